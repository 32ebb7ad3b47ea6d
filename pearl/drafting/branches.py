"""Continuations for outcomes other than the expected one, prepared while the target is still to decide.

At each position the draft's row also says which tokens are next best.  Rows of its forwards that would be idle continue
the likeliest of these, each in a slot of its own.  Where the target then commits such a token, a window is waiting, and
the slot becomes the text's: keys and values are not computed again.  Source: hedging as in speculative speculative
decoding (Saguaro) and SpecBranch; draws are keyed by position, so what is prepared is what would be drafted anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from pearl.decoding.rules import DraftHalf
from pearl.decoding.sampling import SHORTLIST, shortlist
from pearl.models.runner import ModelRunner
from pearl.protocol.events import Seen
from pearl.protocol.proposals import Proposal
from pearl.protocol.sequence import common_prefix

RIVALS = 4  # tokens of a row that are considered
_RATE_WEIGHT = 0.03  # of a new outcome in a rate
_LEAST_CHANCE = 0.005  # of a continuation's next token: what is less likely is not worth a row

# How often a drafted token is right, by the share that it has among the likeliest of its row, in eighths; and, where it
# is wrong, how often the best of the others is right, the second, and so on. Measured on answers of the embedded pair.
_AGREED = (0.15, 0.15, 0.18, 0.24, 0.35, 0.43, 0.6, 0.75)
_RIGHT = (0.22, 0.11, 0.07, 0.06)


def see(
    ids: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float64],
    position: int,
    token: int,
    half: DraftHalf,
    is_root: bool = False,
    confidence: float | None = None,
) -> Seen:
    """What a row says of `token`, that was drawn from it for `position`.

    Args:
        ids, logits: see `sampling.shortlist`. is_root: see `DraftHalf.likeliest`.
        confidence: that the target accepts it, where a stop policy knows; it stands for the token's share then.
    """
    likeliest, shares = half.likeliest(ids, logits, position, RIVALS + 1, is_root)
    own = next((share for each, share in zip(likeliest, shares, strict=True) if each == token), 0.0)
    own = own if confidence is None else confidence
    return Seen(token, min(7, int(8 * own)), tuple(each for each in likeliest if each != token)[:RIVALS])


@dataclass(slots=True)
class Branch:
    """One continuation.

    Attributes:
        after: the outcome (position, token) under which it holds.
        slot: holds the text before the outcome, its token, and of `tokens` all but the last.
        tokens, rows: drafted after the outcome, and what each was drawn from where the rule needs that.
        seen: of each token.
    """

    after: tuple[int, int]
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
        return Proposal(self.position + 1, tuple(self.tokens), tuple(self.rows), after=self.after)


class Foresight:
    """How often drafted tokens and their rivals turn out right: learned from what was decided."""

    def __init__(self) -> None:
        self._agreed = list(_AGREED)
        self._right = list(_RIGHT)

    def learn(self, seen: Seen, committed: int) -> None:
        """`committed` is what the target has decided on where `seen` was drafted."""
        hit = committed == seen.token
        self._agreed[seen.share] += _RATE_WEIGHT * (hit - self._agreed[seen.share])
        if not hit:
            for rank, rival in enumerate(seen.rivals):
                self._right[rank] += _RATE_WEIGHT * ((rival == committed) - self._right[rank])

    def agrees(self, seen: Seen) -> float:
        """How likely the target decides on the drafted token, if on all before it."""
        return self._agreed[seen.share]

    def others(self, seen: Seen) -> list[tuple[float, int]]:
        """How likely it decides on each of the rivals."""
        wrong = 1 - self.agrees(seen)
        return [(wrong * right, rival) for right, rival in zip(self._right, seen.rivals, strict=False)]


class Branches:
    """The continuations of one text.

    Args:
        runner: the draft model's.
        slots: of the runner, that nobody else uses: one for each continuation.
    """

    def __init__(self, runner: ModelRunner, slots: Iterable[int], foresight: Foresight) -> None:
        self._runner = runner
        self._free = list(slots)
        self._foresight = foresight
        self._shared = dict.fromkeys(self._free, 0)  # of each slot: how many of its tokens are the text's
        self._seen: dict[int, Seen] = {}  # by position: what the target has not decided
        self._bonus: tuple[int, Seen] | None = None  # the position that the target draws for itself
        self._live: dict[tuple[int, int], Branch] = {}
        self._adopted: list[tuple[int, Seen]] = []

    @property
    def slots(self) -> set[int]:
        """Those of the runner that this has: none of them holds the text."""
        return set(self._shared)

    @property
    def proposals(self) -> tuple[Proposal, ...]:
        return tuple(branch.proposal for branch in self._live.values() if branch.tokens)

    # ---- following the text ----

    def rollback(self, length: int) -> None:
        """The text is forgotten but for its first `length` tokens; so is what depended on more."""
        for position in [position for position in self._seen if position > length]:
            del self._seen[position]
        if self._bonus is not None and self._bonus[0] > length:
            self._bonus = None
        self._adopted = [(position, seen) for position, seen in self._adopted if position <= length]
        self._drop(branch for branch in self._live.values() if branch.position > length)
        self._shared = {slot: min(shared, length) for slot, shared in self._shared.items()}

    def settle(self, start: int, tokens: Sequence[int], committed: int) -> None:
        """The text goes on with `tokens` from `start` on; the first `committed` of it are decided. Learns from that."""
        for position in [position for position in self._seen if position < committed]:
            seen = self._seen.pop(position)
            # What was fed before it was decided, and was not taken back since, was right.
            self._foresight.learn(seen, tokens[position - start] if position >= start else seen.token)
        if self._bonus is not None and self._bonus[0] < committed:
            self._bonus = None
        self._drop(branch for branch in self._live.values() if branch.position < committed)

    def adopt(self, start: int, tokens: Sequence[int], slot: int) -> tuple[int, int]:
        """The text in `slot`, `start` long, goes on with `tokens`: are some of these a continuation's?

        Returns:
            The slot that holds the text from now on, and how many of the tokens it holds: fewer than there are.
        """
        branch = self._live.get((start, tokens[0]))
        if branch is None or not branch.tokens:
            return slot, 0
        known = [tokens[0], *branch.tokens[:-1]]
        held = common_prefix(known, tokens[:-1])
        if held == 0:
            return slot, 0
        del self._live[branch.after]
        self._runner.rollback(start + held, branch.slot)
        del self._shared[branch.slot]
        self._shared = {each: min(shared, start) for each, shared in self._shared.items()} | {slot: start}
        self._free.append(slot)
        drafted = common_prefix(branch.tokens, tokens[1:])
        adopted = list(enumerate(branch.seen[:drafted], start + 1))
        self._seen |= dict(adopted)
        self._adopted += adopted
        return branch.slot, held

    def taken(self) -> list[tuple[int, Seen]]:
        """What rows said of the tokens that continuations had when the text became them, since this was last asked."""
        adopted, self._adopted = self._adopted, []
        return adopted

    # ---- going on ----

    def see_bonus(self, position: int, half: DraftHalf, logits: torch.Tensor) -> None:
        """What logits [vocab] say of the token for `position`, which the target is to draw without a draft's."""
        ids, shares = half.likeliest(*shortlist(logits, SHORTLIST), position, RIVALS + 1)
        self._bonus = position, Seen(ids[0], min(7, int(8 * shares[0])), tuple(ids[1:]))

    def drafted(self, position: int, seen: Seen) -> None:
        """The next token of the text."""
        self._seen[position] = seen

    def reach(self) -> float:
        """How likely all that is drafted and not decided is right."""
        return prod(map(self._foresight.agrees, self._seen.values()))

    def worth(self, most: int, cached: int, until: int, depth: int = 1 << 31) -> list[tuple[float, tuple[int, int]]]:
        """Outcomes for which to prepare one more token, the best first: how likely that is of use, and the outcome.

        Args:
            most: how many.
            cached: how many of the text's tokens its slot holds: a new continuation can begin up to there.
            until: the first position that need not be drafted.
            depth: tokens that a continuation needs to have, at most.
        """
        reached, ranked = 1.0, []
        for position in sorted(self._seen):
            seen = self._seen[position]
            ranked += [(reached * chance, (position, rival)) for chance, rival in self._foresight.others(seen)]
            reached *= self._foresight.agrees(seen)
        if self._bonus is not None:
            position, seen = self._bonus
            ranked.append((reached * self._foresight.agrees(seen), (position, seen.token)))
            ranked += [(reached * chance, (position, rival)) for chance, rival in self._foresight.others(seen)]
        ranked = sorted(ranked, reverse=True)[: len(self._shared)]  # there are slots for so many
        kept = {after for _, after in ranked}
        if not self._free:
            self._drop(branch for branch in self._live.values() if branch.after not in kept)
        worth = []
        for chance, after in ranked:
            branch = self._live.get(after)
            if branch is not None:
                chance *= prod(map(self._foresight.agrees, branch.seen))
            end = min(until, after[0] + 1 + depth)
            is_possible = branch.end < end if branch is not None else after[0] <= cached and after[0] + 1 < end
            if is_possible and chance >= _LEAST_CHANCE:
                worth.append((chance, after))
        return sorted(worth, reverse=True)[:most]

    def branch(self, after: tuple[int, int], slot: int) -> Branch | None:
        """The continuation for an outcome: a new one of the text in `slot` where there is none, if a slot is free."""
        if (known := self._live.get(after)) is not None:
            return known
        if not self._free:
            return None
        into, position = max(self._free, key=self._shared.__getitem__), after[0]  # the least to copy
        self._free.remove(into)
        self._runner.fork(slot, into, position, min(self._shared[into], position))
        self._shared[into] = position
        self._live[after] = Branch(after, into)
        return self._live[after]

    def end(self, branch: Branch) -> None:
        """It cannot go on."""
        self._drop([branch])

    def _drop(self, dropped: Iterable[Branch]) -> None:
        for branch in list(dropped):
            del self._live[branch.after]
            self._free.append(branch.slot)
