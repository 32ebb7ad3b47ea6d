"""A forward of a draft model that is under way, and what is made of it once its logits are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pearl.models.runner import Feed, ModelRunner
from pearl.protocol.events import Draft, Seen
from pearl.protocol.proposals import Proposal


class HostMark:
    """A moment in what a device does, as `torch.cuda.Event`; of one that does at once what it is asked for: a CPU."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostMark, /) -> float:
        return 1000 * (end.at - self.at)


def marks_of(device: torch.device) -> list[Any]:
    return [torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostMark() for _ in range(3)]


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """A forward and the draw after it.

    Attributes:
        command: what asked for it.
        marks: before the forward, between it and the draws, after all.
        draws: each on its way to the host: [check value, token id]; none where nothing was to be drawn.
        probs: what each token was drawn from, on the device, where the rule needs it.
        following: the last token as [1] on the device; None on a CPU, where nothing is fed before the host knows it.
        features: [TOP + 2] on its way to the host: largest probabilities, entropy, the token's own probability, of the
            last; None where nobody asks.
        fed: tokens that the forward was fed.
        cached: how many of the tokens drawn, from the first on, are among these.
        paused: what the stop policy says of the last; None where it is still to be asked.
        branches: what is drafted for other outcomes.
        seen: see `Drafted`; what the host knows already.
        largest: [2, n] on its way to the host: ids and logits of the last row's largest; None where nobody asks.
    """

    command: Draft
    marks: Sequence[Any]
    draws: Sequence[torch.Tensor] = ()
    probs: Sequence[torch.Tensor] = ()
    following: torch.Tensor | None = None
    features: torch.Tensor | None = None
    fed: int = 0
    cached: int = 0
    paused: bool | None = None
    branches: tuple[Proposal, ...] = ()
    seen: Sequence[tuple[int, Seen]] = ()
    largest: torch.Tensor | None = None

    @property
    def done(self) -> bool:
        return bool(self.marks[-1].query())


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be fed for one request, and what is made of the logits.

    Attributes:
        fed: tokens of `feeds`.
        finish: (logits of each feed, marks of which the last is to be set, tokens that the forward was fed in all).
    """

    request: int
    feeds: Sequence[Feed]
    fed: int
    finish: Callable[[Sequence[torch.Tensor], Sequence[Any], int], LaunchedForward]


def known(tokens: Sequence[int], runner: ModelRunner) -> list[int]:
    """An id that only the target has stands for something this model cannot know; only acceptance suffers."""
    return [token if token < runner.vocab_size else 0 for token in tokens]
