"""Branches: continuations for outcomes other than the expected one, prepared before the target decides.

At each position the draft's row also ranks the tokens that it did not draw.  Rows of its forwards that would be idle
continue the likeliest of these, each in a slot of its own.  If the target then commits such a token, a window is
waiting and the slot becomes the text's: keys and values are not computed again.  Draws are keyed by position, so a
branch has what would be drafted anyway.  Source: hedging as in speculative speculative decoding (Saguaro), SpecBranch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from pearl.decoding.rules import DraftHalf
from pearl.decoding.sampling import Shortlist, read_shortlist, shortlist
from pearl.models.runner import ModelRunner
from pearl.protocol.acceptance_estimates import RIVALS, Foresight, Seen
from pearl.protocol.proposals import Proposal
from pearl.protocol.sequence import common_prefix

_LEAST_CHANCE = 0.005  # a continuation's next token that is less likely is not worth a row

Outcome = tuple[int, int]  # (position, token): the target commits this token there


def see(top: Shortlist, position: int, token: int, half: DraftHalf, is_root: bool = False) -> Seen:
    """What a row's shortlist says about `token`, which was drawn from the row for `position`.

    `is_root`: see `DraftHalf.likeliest`.
    """
    likeliest, shares = half.likeliest(top, position, RIVALS + 1, is_root)
    share = dict(zip(likeliest, shares, strict=True)).get(token, 0.0)
    return Seen(min(7, int(8 * share)), tuple(each for each in likeliest if each != token)[:RIVALS])


@dataclass(slots=True)
class Branch:
    """One continuation.

    Attributes:
        after: the outcome under which it holds.
        slot: holds the text before the outcome, its token, and of `tokens` all but the last.
        tokens, rows: drafted after the outcome, and what each was drawn from if the rule needs that.
        seen: of each token.
    """

    after: Outcome
    slot: int
    tokens: list[int] = field(default_factory=list)
    rows: list[object] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.after[0]

    @property
    def end(self) -> int:
        """The position of its next token."""
        return self.position + 1 + len(self.tokens)

    @property
    def unfed(self) -> int:
        """The token to feed next."""
        return self.tokens[-1] if self.tokens else self.after[1]

    @property
    def proposal(self) -> Proposal:
        rows, seen = tuple(self.rows), tuple(self.seen)
        return Proposal(self.position + 1, tuple(self.tokens), rows, after=self.after, seen=seen)


class Branches:
    """The continuations of one text.

    Args:
        runner: the draft model's.
        slots: of the runner, for this object alone: one for each continuation.
    """

    def __init__(self, runner: ModelRunner, slots: Iterable[int], foresight: Foresight) -> None:
        self._runner = runner
        self._free = list(slots)
        self._foresight = foresight
        self._shared = dict.fromkeys(
            self._free, 0
        )  # by slot: how many of its tokens are the text's
        self._seen: dict[
            int, tuple[int, Seen]
        ] = {}  # by position: drafted tokens that the target has not judged
        self._bonus: tuple[int, int, Seen] | None = (
            None  # the position whose token the target draws, the likeliest one
        )
        self._live: dict[Outcome, Branch] = {}

    @property
    def slots(self) -> set[int]:
        """The runner's slots that this object has; none of them holds the text."""
        return set(self._shared)

    @property
    def proposals(self) -> tuple[Proposal, ...]:
        return tuple(branch.proposal for branch in self._live.values() if branch.tokens)

    # ---- following the text ----

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text, and what depends on more of them."""
        for position in [position for position in self._seen if position > length]:
            del self._seen[position]
        if self._bonus is not None and self._bonus[0] > length:
            self._bonus = None
        self._drop(branch for branch in self._live.values() if branch.position > length)
        self._shared = {slot: min(shared, length) for slot, shared in self._shared.items()}

    def settle(self, start: int, tokens: Sequence[int], committed: int) -> None:
        """Learn from the text, which goes on with `tokens` at `start`; its first `committed` tokens are committed."""
        for position in [position for position in self._seen if position < committed]:
            token, seen = self._seen.pop(position)
            # A token that was fed before it was judged, and not rolled back since, was right.
            self._foresight.learn(
                seen, token, tokens[position - start] if position >= start else token
            )
        if self._bonus is not None and self._bonus[0] < committed:
            self._bonus = None
        self._drop(branch for branch in self._live.values() if branch.position < committed)

    def adopt(self, start: int, tokens: Sequence[int], slot: int) -> tuple[int, int]:
        """Look for a continuation that has the text in `slot`, `start` long, followed by `tokens`.

        Returns:
            The slot that holds the text from now on, and how many of `tokens` it holds (never all).
        """
        branch = self._live.get((start, tokens[0]))
        if branch is None or not branch.tokens:
            return slot, 0
        before = [tokens[0], *branch.tokens[:-1]]
        held = common_prefix(before, tokens[:-1])
        if held == 0:
            return slot, 0
        del self._live[branch.after]
        self._runner.rollback(start + held, branch.slot)
        del self._shared[branch.slot]
        self._shared = {each: min(shared, start) for each, shared in self._shared.items()} | {
            slot: start
        }
        self._free.append(slot)
        drafted = common_prefix(branch.tokens, tokens[1:])
        known = list(zip(branch.tokens, branch.seen, strict=True))
        self._seen |= dict(enumerate(known[:drafted], start + 1))
        return branch.slot, held

    # ---- going on ----

    def see_bonus(self, position: int, half: DraftHalf, logits: torch.Tensor) -> None:
        """Take in logits [vocab] for `position`, whose token the target draws itself."""
        (top,) = read_shortlist(shortlist(logits))
        ids, shares = half.likeliest(top, position, RIVALS + 1)
        self._bonus = position, ids[0], Seen(min(7, int(8 * shares[0])), tuple(ids[1:]))

    def add_drafted(self, position: int, token: int, seen: Seen) -> None:
        """Take in the next drafted token of the text."""
        self._seen[position] = token, seen

    def reach(self) -> float:
        """Probability that the target accepts all drafted tokens that it has not judged."""
        return prod(self._foresight.agrees(seen) for _, seen in self._seen.values())

    def worth(
        self, most: int, cached: int, until: int, depth: int = 1 << 31
    ) -> list[tuple[float, Outcome]]:
        """Up to `most` outcomes for which to prepare one more token, with the probability that it is used; best first.

        Args:
            cached: tokens of the text in its slot: a new continuation can begin up to there.
            until: the first position that need not be drafted.
            depth: maximum tokens of a continuation.
        """
        reached, ranked = 1.0, []
        for position in sorted(self._seen):
            _, seen = self._seen[position]
            ranked += [
                (reached * chance, (position, rival))
                for chance, rival in self._foresight.others(seen)
            ]
            reached *= self._foresight.agrees(seen)
        if self._bonus is not None:
            position, token, seen = self._bonus
            ranked.append((reached * self._foresight.agrees(seen), (position, token)))
            ranked += [
                (reached * chance, (position, rival))
                for chance, rival in self._foresight.others(seen)
            ]
        ranked = sorted(ranked, reverse=True)[: len(self._shared)]  # one slot each
        kept = {after for _, after in ranked}
        if not self._free:
            self._drop(branch for branch in self._live.values() if branch.after not in kept)
        worth = []
        for chance, after in ranked:
            branch = self._live.get(after)
            if branch is not None:
                chance *= prod(map(self._foresight.agrees, branch.seen))
            end = min(until, after[0] + 1 + depth)
            is_possible = (
                branch.end < end
                if branch is not None
                else after[0] <= cached and after[0] + 1 < end
            )
            if is_possible and chance >= _LEAST_CHANCE:
                worth.append((chance, after))
        return sorted(worth, reverse=True)[:most]

    def make(self, outcomes: Iterable[Outcome], slot: int) -> list[Branch]:
        """The continuations for outcomes; new ones are forked from the text in `slot` while slots are free."""
        outcomes = list(outcomes)
        for after in outcomes:
            if after not in self._live and self._free:
                into, position = (
                    max(self._free, key=self._shared.__getitem__),
                    after[0],
                )  # the fewest tokens to copy
                self._free.remove(into)
                self._runner.fork(slot, into, position, min(self._shared[into], position))
                self._shared[into] = position
                self._live[after] = Branch(after, into)
        return [self._live[after] for after in outcomes if after in self._live]

    def end(self, branch: Branch) -> None:
        """Drop a branch that cannot go on."""
        self._drop([branch])

    def _drop(self, dropped: Iterable[Branch]) -> None:
        for branch in list(dropped):
            del self._live[branch.after]
            self._free.append(branch.slot)
