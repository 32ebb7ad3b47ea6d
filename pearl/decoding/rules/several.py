"""Exact rules that judge several first tokens: batch and spectr.

At a root, where the text has left what was drafted (behind a prompt or a correction), the draft's row is there before
the target's, so any number of tokens can be drawn from it, with replacement.  The draft goes on from the first. The
others cost it nothing: the target has the row and draws them itself, by keys that both sides know.  A candidate that is
accepted in place of the first is committed like a correction, and the draft may have a branch ready that follows it.

Batch judges the candidates in turn, each against what those before it have left of the target's distribution.  Source:
Yin et al. 2024, algorithm of section 3.3.  Spectr judges them by K-SEQ, and those that equal the accepted one go on as
candidates of their own.  Source: Sun et al. 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.keys import Purpose, draw_key, uniform
from pearl.decoding.rules import Drafted, Tops
from pearl.decoding.rules.ratio import RatioTarget, SampledDraft, accepts, odds_of, residual
from pearl.decoding.sampling import Shortlist, pick, probabilities, read_draw, shares
from pearl.protocol.events import Judged

_HALVINGS = 40  # of the interval that has K-SEQ's divisor: float32 has no finer one


class SeveralDraft(SampledDraft):
    """Drafts as under the ratio rule; at a root, expects another candidate to be accepted if its own is not."""

    def __init__(self, options: RequestOptions, candidates: int) -> None:
        super().__init__(options)
        self._candidates = candidates
        self._rows: dict[int, Tensor] = {}  # of the last `draft`: position -> distribution

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        drafted = super().draft(logits, positions)
        self._rows = {
            at: probs
            for at, (_, probs) in zip(positions, drafted, strict=True)
            if probs is not None
        }
        return drafted

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """The candidates first, in the order in which they are judged."""
        probs = self._rows.get(position)
        if not is_root or probs is None:
            return super().likeliest(top, position, count)
        ids = top[0].tolist()
        drawn = [
            candidate(probs, self.options, position, number)
            for number in range(1, self._candidates)
        ]
        found = list(dict.fromkeys([*drawn, *ids]))[:count]
        share = dict(zip(ids, shares(top[1], self.options.temperature).tolist(), strict=True))
        return found, [share.get(token, 0.0) for token in found]


class BatchTarget(RatioTarget):
    """Judges the candidates of a root in turn, each against what is left. With one candidate it is the ratio rule.

    A root is a position behind a token that was not drafted, so that the text alone says which positions are roots.

    Args:
        candidates: at a root, the token that the draft went on from among them.
    """

    def __init__(self, options: RequestOptions, candidates: int) -> None:
        super().__init__(options)
        self._candidates = candidates
        self._next = -1  # the position behind the last drafted token that was accepted
        self._sequences = 1  # that go on there

    def judge(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        rows: Sequence[Tensor],
        start: int,
        launched: Tensor | None = None,
    ) -> Judged:
        sums: list[tuple[float, float]] = []
        for i, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            position = start + i
            target = probabilities(logits[i], self.options) if launched is None else launched[i]
            draft = row.to(target.device)
            drawn = [token, *self._others(position, draft)]
            chosen, rest, rejected = self._choose(position, drawn, target, draft)
            sums.append((1 - rejected, 0.0))
            if chosen is None:
                correction = pick(
                    rest, draw_key(self.options, position, Purpose.CORRECTION), otherwise=target
                )
                return Judged(i, read_draw(correction), odds=odds_of(sums))
            own = drawn[chosen]
            self._next, self._sequences = position + 1, self._going_on(own, drawn)
            if own != token:
                return Judged(i, own, odds=odds_of(sums), is_candidate=True)
        return Judged(len(tokens), None, odds=odds_of(sums))

    def _others(self, position: int, draft: Tensor) -> list[int]:
        """The candidates for a position beside the draft's own token."""
        count = self._sequences if position == self._next else self._candidates
        return [candidate(draft, self.options, position, number) for number in range(1, count)]

    def _choose(
        self, position: int, drawn: Sequence[int], target: Tensor, draft: Tensor
    ) -> tuple[int | None, Tensor, float]:
        """Judge tokens drawn from `draft` [vocab].

        Returns:
            The index of the accepted one; if there is none, what replaces it, [vocab], not normalised; and the
            probability that none is accepted.
        """
        chosen, left, rejected = None, target, 1.0
        for number, token in enumerate(drawn):
            if number:
                left = left / left.sum()
            if chosen is None and accepts(
                self._uniform(position, number), left[token].item(), draft[token].item()
            ):
                chosen = number
            rejected *= min(1.0, max(0.0, 1 - torch.minimum(left, draft).sum().item()))
            left = residual(left, draft)
            if not left.any():  # the two are equal, up to rounding
                break
        return chosen, left, rejected

    def _going_on(self, accepted: int, drawn: Sequence[int]) -> int:
        """How many sequences are judged at the next position."""
        return 1

    def _uniform(self, position: int, number: int) -> float:
        return uniform(draw_key(self.options, position, Purpose.ACCEPT, number))


class SpectrTarget(BatchTarget):
    """K-SEQ: each candidate is accepted with probability min(1, target / (divisor * draft)); see `_divisor`."""

    def _choose(
        self, position: int, drawn: Sequence[int], target: Tensor, draft: Tensor
    ) -> tuple[int | None, Tensor, float]:
        divisor = _divisor(target, draft, len(drawn))
        each = torch.minimum(draft, target / divisor)
        mass = min(1.0, each.sum().item())
        rejected = (1 - mass) ** len(drawn)
        rest = (target - each * ((1 - rejected) / mass)).relu_() if mass else target
        for number, token in enumerate(drawn):
            u, scaled = self._uniform(position, number), divisor * draft[token].item()
            if accepts(u, target[token].item(), scaled):
                return number, rest, rejected
        return None, rest, rejected

    def _going_on(self, accepted: int, drawn: Sequence[int]) -> int:
        return drawn.count(accepted)


def candidate(draft: Tensor, options: RequestOptions, position: int, number: int) -> int:
    """Candidate `number`, from 1 on, of those drawn from `draft` [vocab] for a position; 0 is the draft's own draw."""
    return read_draw(pick(draft, draw_key(options, position, Purpose.DRAFT, number)))


def _divisor(target: Tensor, draft: Tensor, candidates: int) -> float:
    """The least divisor, from 1 to `candidates`, with which K-SEQ takes no token more often than the target does."""
    low, high = 1.0, float(candidates)
    if candidates == 1 or _excess(target, draft, low, candidates) <= 0:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _excess(target, draft, middle, candidates) > 0:
            low = middle
        else:
            high = middle
    return high


def _excess(target: Tensor, draft: Tensor, divisor: float, candidates: int) -> float:
    mass = min(1.0, torch.minimum(draft, target / divisor).sum().item())
    return float(1 - (1 - mass) ** candidates - divisor * mass)
