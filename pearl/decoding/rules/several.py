"""Exact rules that judge several candidates for the first token of a draft: batch and spectr.

A root is a position where drafting starts: after the prompt, or after a correction.  At a root
several candidates are drawn from the draft's distribution, with replacement.  The draft continues
the first candidate.  The other candidates cost the draft nothing: the target has the distribution,
and draws the other candidates itself, with keys that both sides know.  If the target accepts
another candidate than the first, it commits this candidate as it would commit a correction.  The
draft may have a branch ready that continues this candidate.

Batch judges the candidates in turn, each against the part of the target's distribution that the
earlier candidates have left.  Source: Yin et al. 2024, algorithm of section 3.3.

Spectr judges the candidates by the K-SEQ algorithm.  If k candidates equal the accepted token, the
next position has k candidates.  Source: Sun et al. 2023, algorithm 2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.keys import Purpose, draw_key, uniform
from pearl.decoding.rules import Drafted, Proposed, Tops
from pearl.decoding.rules.ratio import RatioTarget, SampledDraft, accepts, odds_of, residual
from pearl.decoding.sampling import Shortlist, pick, read_draw, shares
from pearl.protocol.events import Judged

_HALVINGS = 40  # how often the interval of K-SEQ's divisor is halved; float32 resolves no finer


class SeveralDraft(SampledDraft):
    """Drafts as under the ratio rule, but ranks a root's candidates before all other tokens."""

    def __init__(self, options: RequestOptions, candidates: int) -> None:
        super().__init__(options)
        self._candidates = candidates
        self._rows: dict[int, Tensor] = {}  # position -> distribution, of the last `draft`

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        drafted = super().draft(logits, positions)
        self._rows.clear()
        for position, (_, probs) in zip(positions, drafted, strict=True):
            if probs is not None:
                self._rows[position] = probs
        return drafted

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """Rank tokens by the draft's probabilities.

        At a root the ranking begins with all candidates but the first, in the order in which the
        target judges them.
        """
        probs = self._rows.get(position)
        if not is_root or probs is None:
            return super().likeliest(top, position, count)
        ids, logits = top
        tokens = []
        for number in range(1, self._candidates):
            tokens.append(candidate(probs, self.options, position, number))
        tokens += ids.tolist()
        likeliest = list(dict.fromkeys(tokens))[:count]
        weights = shares(logits, self.options.temperature).tolist()
        share = dict(zip(ids.tolist(), weights, strict=True))
        return likeliest, [share.get(token, 0.0) for token in likeliest]


class Choice(NamedTuple):
    """The verdict on the candidates of one position.

    Attributes:
        number: index of the accepted candidate; None if none is accepted.
        residual: the distribution [vocab] of a correction, not normalised.
        rejected: probability that no candidate is accepted.
    """

    number: int | None
    residual: Tensor
    rejected: float


class BatchTarget(RatioTarget):
    """Rule batch: judges the candidates of a root in turn. With one candidate it is the ratio rule.

    A position is a root unless the token before it is an accepted candidate.

    Args:
        candidates: number of candidates at a root. The first is the token that the draft continues.
    """

    def __init__(self, options: RequestOptions, candidates: int) -> None:
        super().__init__(options)
        self._candidates = candidates
        self._next = -1  # the position after the last drafted token that was accepted
        self._sequences = 1  # candidates for that position

    def judge(self, proposed: Proposed) -> Judged:
        masses = []
        pairs = zip(proposed.tokens, proposed.rows, strict=True)
        for i, (token, row) in enumerate(pairs):
            position = proposed.start + i
            target = self._target(proposed, i)
            draft = row.to(target.device)
            candidates = self._candidates_at(position, token, draft)
            choice = self._choose(position, candidates, target, draft)
            masses.append(1 - choice.rejected)
            if choice.number is None:
                key = draw_key(self.options, position, Purpose.CORRECTION)
                correction = pick(choice.residual, key, otherwise=target)
                return Judged(i, read_draw(correction), odds=odds_of(masses))
            accepted = candidates[choice.number]
            self._next = position + 1
            self._sequences = self._going_on(accepted, candidates)
            if accepted != token:
                return Judged(i, accepted, odds=odds_of(masses), is_candidate=True)
        return Judged(len(proposed.tokens), None, odds=odds_of(masses))

    def _candidates_at(self, position: int, token: int, draft: Tensor) -> list[int]:
        """Return the candidates for a position: the draft's own token first, then any others."""
        count = self._sequences if position == self._next else self._candidates
        tokens = [token]
        for number in range(1, count):
            tokens.append(candidate(draft, self.options, position, number))
        return tokens

    def _choose(
        self, position: int, candidates: Sequence[int], target: Tensor, draft: Tensor
    ) -> Choice:
        """Judge candidates that were drawn from the distribution `draft` [vocab]."""
        chosen = None
        remaining = target
        rejected = 1.0
        for number, token in enumerate(candidates):
            if number:
                remaining = remaining / remaining.sum()
            if chosen is None:
                u = self._uniform(position, number)
                if accepts(u, remaining[token].item(), draft[token].item()):
                    chosen = number
            rejected *= min(1.0, max(0.0, 1 - torch.minimum(remaining, draft).sum().item()))
            remaining = residual(remaining, draft)
            if not remaining.any():  # both distributions were equal, up to rounding
                break
        return Choice(chosen, remaining, rejected)

    def _going_on(self, accepted: int, candidates: Sequence[int]) -> int:
        """Return the number of candidates for the position after the token `accepted`."""
        return 1

    def _uniform(self, position: int, number: int) -> float:
        return uniform(draw_key(self.options, position, Purpose.ACCEPT, number))


class SpectrTarget(BatchTarget):
    """Rule spectr (K-SEQ): accepts a candidate with probability min(1, target / (divisor * draft)).

    For the divisor see `k_seq_divisor`.
    """

    def _choose(
        self, position: int, candidates: Sequence[int], target: Tensor, draft: Tensor
    ) -> Choice:
        divisor = k_seq_divisor(target, draft, len(candidates))
        accepted = torch.minimum(draft, target / divisor)
        mass = min(1.0, accepted.sum().item())
        rejected = (1 - mass) ** len(candidates)
        remaining = target
        if mass:
            remaining = (target - accepted * ((1 - rejected) / mass)).relu_()
        for number, token in enumerate(candidates):
            u = self._uniform(position, number)
            if accepts(u, target[token].item(), divisor * draft[token].item()):
                return Choice(number, remaining, rejected)
        return Choice(None, remaining, rejected)

    def _going_on(self, accepted: int, candidates: Sequence[int]) -> int:
        return candidates.count(accepted)


def candidate(draft: Tensor, options: RequestOptions, position: int, number: int) -> int:
    """Return candidate `number` for `position`, drawn from the distribution `draft` [vocab].

    Candidate 0 is the token that the draft continues.
    """
    return read_draw(pick(draft, draw_key(options, position, Purpose.DRAFT, number)))


def k_seq_divisor(target: Tensor, draft: Tensor, candidates: int) -> float:
    """Return K-SEQ's divisor for this number of candidates.

    It is the least divisor with which no token is committed more often than the target alone would
    draw the token. It is at least 1 and at most `candidates`.
    """
    low = 1.0
    high = float(candidates)
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
