"""Acceptance rules: how the draft draws a token and how the target accepts or corrects it.

A rule is one object that says what it needs from the wire and judges a run of positions.  It sees logits, tokens and
draft distributions; nothing of windows, epochs or processes.  Each is exact: what is committed has the target's
distribution, whatever the draft proposed (invariants 3 and 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pearl.decoding.sampling import (
    DrawKeys,
    Purpose,
    drawn,
    greedy,
    greedy_there,
    pick,
    pick_there,
    probabilities,
    race,
    race_there,
    uniform,
)
from pearl.errors import RequestError
from pearl.protocol.messages import Sampling


@dataclass(frozen=True)
class Judgement:
    """The first `accepted` tokens stand; `token` is the correction for the next, None where all were accepted."""

    accepted: int
    token: int | None


class Rule(Protocol):
    """What the draft and the target worker call. Positions are absolute; logits rows are [vocab]."""

    needs_rows: bool  # whether the target needs the draft's distributions

    def draft(self, logits: torch.Tensor, position: int) -> tuple[int, torch.Tensor | None]:
        """The draft's token for `position`, and its distribution [vocab] float32 where `needs_rows`."""
        ...

    def draft_there(self, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `draft`, without waiting for the device: in the token's place what `sampling.drawn` takes."""
        ...

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
    ) -> Judgement:
        """Judges `tokens` from position `start` on against the target's logits [len(tokens), vocab].

        Args:
            rows: where `needs_rows`, the draft's distribution [vocab] for each token, on the host or with the logits.
        """
        ...

    def direct(self, logits: torch.Tensor, position: int) -> int:
        """The target's own draw for `position`: `ar`, bonus tokens, going alone."""
        ...


def accepts(u: float, target_prob: float, draft_prob: float) -> bool:
    """Whether a token is accepted, given u in [0, 1). Strict: what the target gives probability 0 never passes.

    Source: Leviathan et al. 2023, algorithm 1, written without the division.
    """
    return u * draft_prob < target_prob


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """max(target - draft, 0) [vocab], not normalised; nothing at all where rounding leaves nothing."""
    return (target_probs - draft_probs).relu_()


def _chosen(rows: torch.Tensor | Sequence[torch.Tensor], tokens: Sequence[int]) -> list[float]:
    """rows[i][tokens[i]]. A look at a number is dear: on a GPU all take one, on the host numpy's are the cheap ones."""
    if not rows[0].is_cpu:
        ids = torch.tensor(tokens, device=rows[0].device).unsqueeze(1)
        together = rows if isinstance(rows, torch.Tensor) else torch.stack([*rows])
        return together.gather(1, ids).squeeze(1).tolist()
    if isinstance(rows, torch.Tensor):
        numbers = rows.numpy()
        return [numbers.item(i, token) for i, token in enumerate(tokens)]
    return [row.numpy().item(token) for row, token in zip(rows, tokens, strict=True)]


class RatioRule:
    """Accept with probability min(1, target/draft), else correct from the residual. Acceptance rate 1 - TV."""

    needs_rows = True

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)

    def draft(self, logits: torch.Tensor, position: int) -> tuple[int, torch.Tensor | None]:
        probs = probabilities(logits, self.sampling)
        return pick(probs, self._key(position, Purpose.DRAFT)), probs

    def draft_there(self, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        probs = probabilities(logits, self.sampling)
        return pick_there(probs, self._key(position, Purpose.DRAFT)), probs

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
    ) -> Judgement:
        target = probabilities(logits, self.sampling)
        if not logits.is_cpu:
            rows = [row.to(logits.device) for row in rows]  # some come over the channel, sparse ones through the host
        chances = zip(_chosen(target, tokens), _chosen(rows, tokens), strict=True)
        for i, (target_prob, draft_prob) in enumerate(chances):
            if not accepts(uniform(self._key(start + i, Purpose.ACCEPT)), target_prob, draft_prob):
                rest = residual(target[i], rows[i])
                return Judgement(i, pick(rest, self._key(start + i, Purpose.CORRECTION), otherwise=target[i]))
        return Judgement(len(tokens), None)

    def direct(self, logits: torch.Tensor, position: int) -> int:
        return race(probabilities(logits, self.sampling), self._key(position, Purpose.DIRECT))

    def _key(self, position: int, purpose: Purpose) -> int:
        return self._keys(position, purpose)


class DirectRule:
    """The target's own draw is always what is committed; the draft guesses it by making the same draw itself.

    With a temperature this is the coupled, drafter-invariant rule: both race with the same exponentials (key DIRECT),
    acceptance is at least (1-TV)/(1+TV).  At temperature 0 it is greedy decoding.  No distribution crosses the wire.
    """

    needs_rows = False

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)

    def draft(self, logits: torch.Tensor, position: int) -> tuple[int, torch.Tensor | None]:
        return self.direct(logits, position), None

    def draft_there(self, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._direct_there(logits, position), None

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
    ) -> Judgement:
        draws: Iterator[int]
        if logits.is_cpu:
            draws = (self.direct(row, start + i) for i, row in enumerate(logits))  # none behind a rejection
        else:
            draws = map(drawn, self._together(logits, start))
        for i, (token, own) in enumerate(zip(tokens, draws, strict=True)):
            if own != token:
                return Judgement(i, own)
        return Judgement(len(tokens), None)

    def direct(self, logits: torch.Tensor, position: int) -> int:
        if self.sampling.temperature == 0:
            return greedy(logits)
        return race(probabilities(logits, self.sampling), self._key(position))

    def _direct_there(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        if self.sampling.temperature == 0:
            return greedy_there(logits)
        return race_there(probabilities(logits, self.sampling), self._key(position))

    def _together(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        """[n, 2]: each row's draw, brought to the host at once."""
        return torch.stack([self._direct_there(row, start + i) for i, row in enumerate(logits)]).cpu()

    def _key(self, position: int) -> int:
        return self._keys(position, Purpose.DIRECT)


RULES: dict[str, type[RatioRule] | type[DirectRule]] = {"ratio": RatioRule, "coupled": DirectRule}


def make_rule(name: str, sampling: Sampling) -> Rule:
    """The rule of that name; greedy decoding needs none of them and is the direct draw under either."""
    if name not in RULES:
        raise RequestError(f"unknown acceptance rule {name!r}; choose one of {', '.join(RULES)}")
    return DirectRule(sampling) if sampling.temperature == 0 else RULES[name](sampling)
