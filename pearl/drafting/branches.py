"""Branches: continuations for other outcomes than the expected one, drafted before the verdict.

The draft expects the target to commit the tokens that it drafted.  At each position its logits also
rank the tokens that it did not draw.  The draft continues the likeliest of these tokens as
branches.  Each branch has its own KV cache slot.  Branches are fed together with the text, in
forwards that have room for more tokens.  If the target then commits the token that a branch
continues, a window of draft tokens is ready.  The branch's slot becomes the slot of the text, so
that nothing is computed again.

Each draw is keyed by its position (see `pearl.decoding.keys`).  So a branch has the same tokens
that the draft, without branches, would draw once the outcome is known.  Source: hedging as in
speculative speculative decoding (Saguaro), and SpecBranch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from pearl.decoding.rules import DraftHalf
from pearl.decoding.sampling import Shortlist, read_shortlist, shortlist
from pearl.models.runner import ModelRunner
from pearl.protocol.acceptance_estimates import RIVALS, Foresight, Seen
from pearl.protocol.proposals import Proposal
from pearl.protocol.sequence import common_prefix

# A branch's next token is drafted only if it is used with at least this probability.
_LEAST_CHANCE = 0.005

Outcome = tuple[int, int]  # (position, token): the target commits this token at this position


def see(top: Shortlist, position: int, token: int, half: DraftHalf, is_root: bool = False) -> Seen:
    """Return what the draft's logits say about a drafted token: its share and its runners-up.

    The share is the token's probability if only the likeliest tokens could be drawn.

    Args:
        top: the shortlist of the logits that `token` was drawn from.
        position: the position that `token` was drawn for.
        half: the draft's half of the acceptance rule.
        is_root: see `DraftHalf.likeliest`.
    """
    likeliest, shares = half.likeliest(top, position, RIVALS + 1, is_root)
    share = 0.0
    if token in likeliest:
        place = likeliest.index(token)
        share = shares[place]
        del likeliest[place]
    return Seen(_bin(share), tuple(likeliest[:RIVALS]))


def _bin(share: float) -> int:
    """Return which eighth of [0, 1] a share is in, from 0 to 7."""
    return min(7, int(8 * share))


@dataclass(slots=True)
class Branch:
    """A continuation of the text for one outcome.

    Attributes:
        outcome: the outcome that the branch is prepared for.
        slot: the runner's slot with the branch's KV cache. The cache lacks only the branch's last
            token: the last of `tokens` or, if `tokens` is empty, the token of `outcome`.
        tokens: the tokens drafted after the outcome.
        rows: the distribution that each token was drawn from; empty if the rule needs none.
        seen: the result of `see` for each token.
    """

    outcome: Outcome
    slot: int
    tokens: list[int] = field(default_factory=list)
    rows: list[object] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.outcome[0]

    @property
    def end(self) -> int:
        """The position of the next token to draft."""
        return self.position + 1 + len(self.tokens)

    @property
    def unfed(self) -> int:
        """The token to feed next: the last one drafted, or the outcome's if there is none yet."""
        return self.tokens[-1] if self.tokens else self.outcome[1]

    @property
    def proposal(self) -> Proposal:
        return Proposal(
            self.position + 1,
            tuple(self.tokens),
            tuple(self.rows),
            after=self.outcome,
            seen=tuple(self.seen),
        )


class Branches:
    """The branches of one text.

    Args:
        runner: the draft model's runner.
        slots: slots of the runner that this object alone uses, one for each branch.
        foresight: estimates of how often the target commits a token.
    """

    def __init__(self, runner: ModelRunner, slots: Iterable[int], foresight: Foresight) -> None:
        self._runner = runner
        self._free = list(slots)
        self._foresight = foresight
        #: slot -> how many of the slot's first tokens are also the first tokens of the text
        self._shared = dict.fromkeys(self._free, 0)
        #: position -> (drafted token that the target has not judged, its `Seen`)
        self._seen: dict[int, tuple[int, Seen]] = {}
        #: (position of the bonus token, the draft's likeliest token there, its `Seen`)
        self._bonus: tuple[int, int, Seen] | None = None
        self._live: dict[Outcome, Branch] = {}

    @property
    def slots(self) -> set[int]:
        """The runner's slots that belong to this object; none of them holds the text."""
        return set(self._shared)

    @property
    def live_slots(self) -> list[int]:
        """The slots that hold a branch."""
        return [branch.slot for branch in self._live.values()]

    @property
    def proposals(self) -> tuple[Proposal, ...]:
        return tuple(branch.proposal for branch in self._live.values() if branch.tokens)

    # ---- following the text ----

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text.

        This ends the branches whose outcome is for a position after `length`.
        """
        for position in list(self._seen):
            if position > length:
                del self._seen[position]
        if self._bonus is not None and self._bonus[0] > length:
            self._bonus = None
        for branch in list(self._live.values()):
            if branch.position > length:
                self.end(branch)
        self._limit_shared(length)

    def _limit_shared(self, length: int) -> None:
        """Record that each slot shares at most the first `length` tokens with the text."""
        for slot, shared in self._shared.items():
            self._shared[slot] = min(shared, length)

    def settle(self, start: int, tokens: Sequence[int], committed: int) -> None:
        """Learn from the text's committed tokens, and end the branches for their positions.

        Args:
            start: the position of the first of `tokens`.
            tokens: the text's tokens from `start` on; the last ones may be uncommitted.
            committed: how many tokens of the whole text are committed.
        """
        for position in list(self._seen):
            if position >= committed:
                continue
            token, seen = self._seen.pop(position)
            # A drafted token before `start` was fed and not rolled back since, so it was right.
            outcome = tokens[position - start] if position >= start else token
            self._foresight.learn(seen, token, outcome)
        if self._bonus is not None and self._bonus[0] < committed:
            self._bonus = None
        for branch in list(self._live.values()):
            if branch.position < committed:
                self.end(branch)

    def adopt(self, start: int, tokens: Sequence[int], slot: int) -> tuple[int, int]:
        """Make a branch's slot the text's slot, if the branch continues the text with `tokens`.

        Args:
            start: length of the text in `slot`, without `tokens`.
            slot: the slot that holds the text.

        Returns:
            The slot that holds the text from now on, and how many of `tokens` its KV cache already
            holds. The last token is never among them, so that it is fed. Without a matching branch
            the result is (`slot`, 0).
        """
        branch = self._live.get((start, tokens[0]))
        if branch is None or not branch.tokens:
            return slot, 0
        cached = [tokens[0], *branch.tokens[:-1]]
        held = common_prefix(cached, tokens[:-1])
        if held == 0:
            return slot, 0
        del self._live[branch.outcome]
        self._runner.rollback(start + held, branch.slot)
        del self._shared[branch.slot]
        self._limit_shared(start)
        self._shared[slot] = start
        self._free.append(slot)
        for i in range(common_prefix(branch.tokens, tokens[1:])):
            self._seen[start + 1 + i] = branch.tokens[i], branch.seen[i]
        return branch.slot, held

    # ---- going on ----

    def see_bonus(self, position: int, half: DraftHalf, logits: torch.Tensor) -> None:
        """Rank the outcomes for the bonus token at `position` by the draft's logits [vocab] there.

        The bonus token is the one that the target draws itself after a fully accepted window.
        """
        (top,) = read_shortlist(shortlist(logits))
        ids, shares = half.likeliest(top, position, RIVALS + 1)
        self._bonus = position, ids[0], Seen(_bin(shares[0]), tuple(ids[1:]))

    def add_drafted(self, position: int, token: int, seen: Seen) -> None:
        """Record the token drafted for `position` of the text, and what `see` returned for it."""
        self._seen[position] = token, seen

    def reach(self) -> float:
        """Return the probability that the target accepts all drafted tokens that it has not judged."""
        return prod(self._foresight.agrees(seen) for _, seen in self._seen.values())

    def worth(self, most: int, cached: int, until: int, depth: int) -> list[tuple[float, Outcome]]:
        """Return (chance, outcome) of up to `most` outcomes whose branch is worth one more token.

        The result is sorted, the highest chance first.  The chance is the probability that the new
        token is of use: the target accepts all drafted tokens before the outcome, commits the
        outcome, and accepts the tokens that the branch has already.  If no slot is free, this ends
        the branches whose outcomes are not among the likeliest.

        Args:
            cached: number of tokens in the text's slot. A new branch can only begin at a position
                up to `cached`.
            until: the first position that need not be drafted.
            depth: the most tokens that a branch may have.
        """
        ranked = sorted(self._outcomes(), reverse=True)[: len(self._shared)]  # one slot each
        if not self._free:
            likeliest = {outcome for _, outcome in ranked}
            for outcome, branch in list(self._live.items()):
                if outcome not in likeliest:
                    self.end(branch)
        worth = []
        for chance, outcome in ranked:
            position, _ = outcome
            end = min(until, position + 1 + depth)
            if outcome in self._live:
                branch = self._live[outcome]
                is_possible = branch.end < end
                chance *= prod(map(self._foresight.agrees, branch.seen))
            else:
                is_possible = position <= cached and position + 1 < end
            if is_possible and chance >= _LEAST_CHANCE:
                worth.append((chance, outcome))
        return sorted(worth, reverse=True)[:most]

    def _outcomes(self) -> Iterator[tuple[float, Outcome]]:
        """Yield (probability, outcome) for each runner-up, and for the likeliest bonus token."""
        reached = 1.0
        for position in sorted(self._seen):
            _, seen = self._seen[position]
            for chance, rival in self._foresight.others(seen):
                yield reached * chance, (position, rival)
            reached *= self._foresight.agrees(seen)
        if self._bonus is not None:
            position, token, seen = self._bonus
            yield reached * self._foresight.agrees(seen), (position, token)
            for chance, rival in self._foresight.others(seen):
                yield reached * chance, (position, rival)

    def make(self, outcomes: Iterable[Outcome], slot: int) -> list[Branch]:
        """Return the branches for `outcomes`, and begin missing ones while slots are free.

        `slot`: the text's slot, from which the KV cache of a new branch is copied.
        """
        branches = []
        for outcome in outcomes:
            if outcome not in self._live and self._free:
                self._live[outcome] = self._fork(outcome, slot)
            branch = self._live.get(outcome)
            if branch is not None:
                branches.append(branch)
        return branches

    def _fork(self, outcome: Outcome, slot: int) -> Branch:
        position, _ = outcome
        branch_slot = max(self._free, key=self._shared.__getitem__)  # the fewest tokens to copy
        self._free.remove(branch_slot)
        shared = min(self._shared[branch_slot], position)
        self._runner.fork(slot, branch_slot, position, shared)
        self._shared[branch_slot] = position
        return Branch(outcome, branch_slot)

    def end(self, branch: Branch) -> None:
        """Drop a branch, and free its slot."""
        del self._live[branch.outcome]
        self._free.append(branch.slot)
