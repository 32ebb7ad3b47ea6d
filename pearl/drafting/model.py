"""The proposer that is a model: a forward of its runner, and a keyed draw from the row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pearl.decoding.distribution import Distribution
from pearl.decoding.rules import DraftHalf, make_draft_half
from pearl.decoding.sampling import read_draw
from pearl.drafting.proposer import TOP, Features, Launched, StopPolicy
from pearl.models.calibrate import calibrate_draft
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.events import Draft, Drafted, Open


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


def _marks(device: torch.device) -> list[Any]:
    return [torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostMark() for _ in range(3)]


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """A forward and the draw after it.

    Attributes:
        command: what asked for it.
        marks: before the forward, between it and the draw, after both.
        draw: on its way to the host: [check value, token id]; None where nothing was to be drawn.
        probs: what the token was drawn from, on the device, where the rule needs it.
        following: the token as [1] on the device; None on a CPU, where nothing is fed before the host knows it.
        features: [TOP + 1] on its way to the host: largest probabilities, entropy; None where nobody asks.
    """

    command: Draft
    marks: Sequence[Any]
    draw: torch.Tensor | None = None
    probs: torch.Tensor | None = None
    following: torch.Tensor | None = None
    features: torch.Tensor | None = field(default=None)

    @property
    def done(self) -> bool:
        return bool(self.marks[-1].query())


class ModelProposer:
    """Drafts with a model, one token a forward.

    Args:
        runner: the draft model.
        vocab_size: the target's. A draft with more ids (padding) never emits them; one with fewer gives the rest
            probability 0.
        stop: says where to stop; None: at the bound.
        chains: whether forwards are to be launched one after the other; None: where the runner's can be.
    """

    def __init__(
        self, runner: ModelRunner, vocab_size: int, stop: StopPolicy | None = None, chains: bool | None = None
    ) -> None:
        self.runner = runner
        self.device = runner.device
        self.chains = runner.capabilities.launches if chains is None else chains
        self._missing = vocab_size - runner.vocab_size
        self._stop = stop
        self._open: dict[int, tuple[DraftHalf, int]] = {}  # request -> its rule, its slot

    def measure(self, brief: bool) -> tuple[float, float]:
        return calibrate_draft(self.runner, brief)

    def open(self, command: Open) -> None:
        half = make_draft_half(command.rule, command.sampling, command.parameters)
        self._open = {number: each for number, each in self._open.items() if each[1] != command.slot}
        self._open[command.request] = half, command.slot

    def rollback(self, length: int, request: int) -> None:
        self.runner.rollback(length, self._slot(request))

    def launch(self, command: Draft, after: Launched | None = None) -> LaunchedForward:
        """See `Proposer`. What a GPU does here is unproven: none was at hand."""
        rule, slot = self._open[command.request]
        assert self.runner.length(slot) == command.start, (self.runner.length(slot), command)
        began, forwarded, done = marks = _marks(self.device)
        began.record()
        tokens = self._known(command.tokens) if after is None else after.following
        assert tokens is not None
        logits = feed_chain(self.runner, tokens, int(command.budget > 0), slot)
        if not self.chains:
            self.runner.synchronize()
        forwarded.record()
        if command.budget == 0:
            done.record()
            return LaunchedForward(command, marks)
        row = self._fit(logits[0])
        draw, probs = rule.draft(row, command.start + len(command.tokens))
        features = self._features(row) if self._stop is not None else None
        following = None
        if self.chains:
            # Of logits that are not finite the draw may be any number, and a wrong id would abort the process.
            following = draw[1:].long().clamp_(0, self.runner.vocab_size - 1)
            draw = draw.to("cpu", non_blocking=True)
            features = None if features is None else features.to("cpu", non_blocking=True)
        done.record()
        return LaunchedForward(command, marks, draw, probs, following, features)

    def collect(self, launched: Launched) -> Drafted:
        assert isinstance(launched, LaunchedForward)
        began, forwarded, done = launched.marks
        done.synchronize()
        seconds, draw = began.elapsed_time(forwarded) / 1000, forwarded.elapsed_time(done) / 1000
        command = launched.command
        if launched.draw is None:
            return Drafted((), seconds, request=command.request)
        tokens = (read_draw(launched.draw),)
        rows = () if launched.probs is None else (Distribution(launched.probs),)
        paused = False
        if self._stop is not None:
            assert launched.features is not None
            *top, entropy = launched.features.tolist()
            paused = self._stop.stop(Features(tuple(top), entropy, command.pending))
        return Drafted(tokens, seconds, rows, draw, paused=paused, request=command.request)

    def _slot(self, request: int) -> int:
        """Of a request that is not open (the cache is emptied before a recording, say): the first."""
        return self._open[request][1] if request in self._open else 0

    def _features(self, row: torch.Tensor) -> torch.Tensor:
        probs = torch.softmax(row.float(), -1)
        top = probs.topk(min(TOP, len(probs))).values
        return torch.cat((top, torch.special.entr(probs).sum()[None]))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """An id that only the target has stands for something this model cannot know; only acceptance suffers."""
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        if self._missing == 0:
            return logits
        if self._missing < 0:
            return logits[: self._missing]
        return torch.nn.functional.pad(logits, (0, self._missing), value=-torch.inf)
