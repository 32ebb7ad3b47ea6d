"""Branches: continuations for outcomes other than the expected one, prepared before the target decides.

At each position the draft's logits also rank the tokens that were not drawn.  The draft continues the likeliest of
these tokens, each in a slot of its own, in rows of its forwards that would otherwise be idle.  If the target then
commits such a token, a window is ready, and the branch's slot becomes the text's: keys and values are not computed
again.  Draws are keyed by position, so a branch has the tokens that would be drafted anyway.  Source: hedging as in
speculative speculative decoding (Saguaro), SpecBranch.
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

_LEAST_CHANCE = 0.005  # least chance with which a branch's next token is worth a row

Outcome = tuple[int, int]  # (position, token): the target commits this token there


def see(top: Shortlist, position: int, token: int, half: DraftHalf, is_root: bool = False) -> Seen:
    """Return what a row's shortlist says about `token`, which was drawn from the row for `position`.

    `is_root`: see `DraftHalf.likeliest`.
    """
    likeliest, shares = half.likeliest(top, position, RIVALS + 1, is_root)
    share = 0.0
    if token in likeliest:
        place = likeliest.index(token)
        share = shares[place]
        del likeliest[place]
    return Seen(_bin(share), tuple(likeliest[:RIVALS]))


def _bin(share: float) -> int:
    """Return which eighth of [0, 1] a share is in."""
    return min(7, int(8 * share))


@dataclass(slots=True)
class Branch:
    """A continuation of the text for one outcome.

    Attributes:
        outcome: the outcome that the branch is prepared for.
        slot: the runner's slot with the branch's cache, which lacks only the branch's last token.
        tokens: the tokens drafted after the outcome.
        rows: the distribution that each token was drawn from, if the rule needs it.
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
        """The token to feed next."""
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
    """

    def __init__(self, runner: ModelRunner, slots: Iterable[int], foresight: Foresight) -> None:
        self._runner = runner
        self._free = list(slots)
        self._foresight = foresight
        #: slot -> how many of its first tokens are also the text's
        self._shared = dict.fromkeys(self._free, 0)
        #: position -> drafted token that the target has not judged, and its `Seen`
        self._seen: dict[int, tuple[int, Seen]] = {}
        #: (position whose token the target draws itself, likeliest token there, its `Seen`)
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
        """Forget all but the first `length` tokens of the text, and end the branches that depend on later tokens."""
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
        """Note that each slot shares at most the first `length` tokens with the text."""
        for slot, shared in self._shared.items():
            self._shared[slot] = min(shared, length)

    def settle(self, start: int, tokens: Sequence[int], committed: int) -> None:
        """Learn from the text, which continues with `tokens` at `start`; it is committed up to position `committed`."""
        for position in list(self._seen):
            if position >= committed:
                continue
            token, seen = self._seen.pop(position)
            # A token before `start` has been fed and was not rolled back since, so it was right.
            outcome = tokens[position - start] if position >= start else token
            self._foresight.learn(seen, token, outcome)
        if self._bonus is not None and self._bonus[0] < committed:
            self._bonus = None
        for branch in list(self._live.values()):
            if branch.position < committed:
                self.end(branch)

    def adopt(self, start: int, tokens: Sequence[int], slot: int) -> tuple[int, int]:
        """Look for a branch that continues the text in `slot`, which is `start` long, with `tokens`.

        Returns:
            The slot that holds the text from now on, and how many of `tokens` that slot holds (never all).
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
        """Take in logits [vocab] for `position`, whose token the target draws itself."""
        (top,) = read_shortlist(shortlist(logits))
        ids, shares = half.likeliest(top, position, RIVALS + 1)
        self._bonus = position, ids[0], Seen(_bin(shares[0]), tuple(ids[1:]))

    def add_drafted(self, position: int, token: int, seen: Seen) -> None:
        """Take in the next drafted token of the text."""
        self._seen[position] = token, seen

    def reach(self) -> float:
        """Return the probability that the target accepts all drafted tokens that it has not judged."""
        return prod(self._foresight.agrees(seen) for _, seen in self._seen.values())

    def worth(self, most: int, cached: int, until: int, depth: int) -> list[tuple[float, Outcome]]:
        """Return (chance, outcome) of up to `most` outcomes for which to prepare one more token, best first.

        The chance is the probability that the token is used: that the target accepts all drafted tokens before the
        outcome, commits the outcome, and accepts the tokens that its branch already has.  If no slot is free, this ends
        the branches whose outcomes are not among the likeliest.

        Args:
            cached: number of the text's tokens in its slot; a new branch can begin at most there.
            until: the first position that need not be drafted.
            depth: most tokens of a branch.
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
        """Yield the outcomes other than the drafted tokens, each with its probability."""
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
        """Return the branches for outcomes. While slots are free, fork missing ones from the text in `slot`."""
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
