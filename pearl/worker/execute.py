"""Carrying out the commands that compute: forwards, judgements, draws. Knows runners and rules, no sockets, no clock
but the one that times a forward.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pearl.decoding.registry import Needs
from pearl.decoding.rules import DraftHalf, TargetHalf, make_draft_half, make_target_half, rule_in_force
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.errors import OutOfMemory
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.events import (
    Draft,
    Drafted,
    Forward,
    Forwarded,
    Judge,
    Judged,
    Open,
    Rollback,
    Sample,
    Sampled,
)
from pearl.protocol.messages import NO_ROWS, RowKind, Rows
from pearl.text import TextStream

Event = Forwarded | Judged | Sampled | Drafted


def _of_memory(error: Exception) -> OutOfMemory | None:
    """What to say of an error where it is one of memory; on a CPU torch has no class of its own for that."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if not known and not re.search(r"(?i)can't allocate memory|not enough memory", str(error)):
        return None
    cause = str(error).partition("\n")[0].rstrip(".") or "no memory is left"
    return OutOfMemory(f"{cause}. Shorten the prompt, lower max_context, or take a smaller model.")


class TargetExecutor:
    """Computes for the coordinator.

    Args:
        runner: the target model.
        text_stream: (prompt, stops) -> a TextStream that says when a stop string is complete.
    """

    def __init__(
        self,
        runner: ModelRunner,
        text_stream: Callable[[Sequence[int], Sequence[str]], TextStream] | None = None,
    ) -> None:
        self.runner = runner
        self._uploads = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None
        self._text_stream = text_stream
        self._text: TextStream | None = None
        self._rule: TargetHalf | None = None
        self._direct: DirectDraw | None = None
        self._needs = Needs.NOTHING
        self._logits = torch.empty(0)  # [rows, vocab]
        self._first = 0  # position that row 0 is for

    def bring(self, row: torch.Tensor) -> torch.Tensor:
        """A draft's distribution to where it will be judged, beside a forward that runs. Any thread may.

        Unproven: no GPU was at hand.
        """
        if self._uploads is None:
            return row
        try:
            with torch.cuda.stream(self._uploads):
                return row.pin_memory().to(self.runner.device, non_blocking=True)
        except RuntimeError:  # no memory: judging will find none either, and that ends a request, not this worker
            return row

    @property
    def needs_rows(self) -> bool:
        """Whether judging the open request takes more than the draft's tokens: rows must come with them."""
        return self._needs is not Needs.NOTHING

    def execute(self, command: object) -> Event | None:
        """The event that answers `command`; None where it needs no answer.

        Raises `ForwardError` where it gives nothing that can be used.
        """
        try:
            return self._execute(command)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if (told := _of_memory(error)) is not None:
                raise told from error
            raise

    def _execute(self, command: object) -> Event | None:
        match command:
            case Open():
                self._open(command)
            case Rollback(length):
                self.runner.rollback(length)
            case Forward():
                return self._forward(command)
            case Judge():
                return self._judge(command)
            case Sample():
                return self._sample(command)
            case _:
                raise AssertionError(command)
        return None

    def _open(self, command: Open) -> None:
        self._rule = make_target_half(command.rule, command.sampling, command.parameters)
        self._direct = DirectDraw(command.sampling)
        self._needs = rule_in_force(command.rule, command.sampling).needs
        self._text = None
        if command.stops:
            assert self._text_stream is not None
            self._text = self._text_stream(command.prompt, command.stops)

    def _forward(self, command: Forward) -> Forwarded:
        assert self.runner.length() == command.start, (self.runner.length(), command)
        began = time.perf_counter()
        self._logits = feed_chain(self.runner, command.tokens, command.rows)
        self.runner.synchronize()
        self._first = command.start + len(command.tokens) - command.rows + 1
        return Forwarded(time.perf_counter() - began, request=command.request)

    def _judge(self, command: Judge) -> Judged:
        assert self._rule is not None
        if self._uploads is not None:
            torch.cuda.current_stream(self.runner.device).wait_stream(self._uploads)
        row = command.start - self._first
        logits = self._logits[row : row + len(command.tokens)]
        verdict = self._rule.judge(logits, command.tokens, command.rows, command.start)
        new = list(command.tokens[: verdict.accepted])
        if verdict.token is not None:
            new.append(verdict.token)
        return Judged(verdict.accepted, verdict.token, self._stop_after(new), request=command.request)

    def _sample(self, command: Sample) -> Sampled:
        assert self._direct is not None
        token = self._direct(self._logits[command.position - self._first], command.position)
        return Sampled(token, self._stop_after([token]) is not None, request=command.request)

    def _stop_after(self, tokens: Sequence[int]) -> int | None:
        if self._text is not None:
            for count, token in enumerate(tokens, start=1):
                self._text.push(token)
                if self._text.stopped:
                    return count
        return None


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


@dataclass(frozen=True)
class Launched:
    """A forward and the draw after it, asked of the device and not waited for.

    Attributes:
        token: [1], on the device: the forward after it can be fed it before anybody knows it.
        said: a draw, [check value, token id], on its way to the host.
        probs: the distribution that it was drawn from, where the rule needs it.
        marks: before the forward, between it and the draw, after both.
    """

    token: torch.Tensor
    said: torch.Tensor
    probs: torch.Tensor | None
    marks: Sequence[Any]

    @property
    def done(self) -> bool:
        return bool(self.marks[-1].query())


class DraftExecutor:
    """Computes for the drafter.

    Args:
        runner: the draft model.
        vocab_size: the target's. A draft with more ids (padding) never emits them; one with fewer gives the rest
            probability 0.
        chains: whether forwards are to be launched one after the other, each fed what the last has drawn before the
            host knows it; None: where the runner's forwards can be launched.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, chains: bool | None = None) -> None:
        self.runner = runner
        self.chains = runner.capabilities.launches if chains is None else chains
        self._missing = vocab_size - runner.vocab_size
        self._rule: DraftHalf | None = None

    def execute(self, command: object) -> Event | None:
        """The event that answers `command`; None where it needs no answer."""
        match command:
            case Open(_, sampling, rule, _, parameters):
                self._rule = make_draft_half(rule, sampling, parameters)
            case Rollback(length):
                self.runner.rollback(length)
            case Draft():
                return self._draft(command)
            case _:
                raise AssertionError(command)
        return None

    def _draft(self, command: Draft) -> Drafted:
        assert self.runner.length() == command.start, (self.runner.length(), command)
        assert self._rule is not None
        began = time.perf_counter()
        logits = feed_chain(self.runner, self._known(command.tokens), int(command.sample))
        self.runner.synchronize()
        done = time.perf_counter()
        if not command.sample:
            return Drafted(None, done - began, request=command.request)
        position = command.start + len(command.tokens)
        token, probs = self._rule.draft(self._fit(logits[0]), position)
        return Drafted(token, done - began, _in_memory(probs), time.perf_counter() - done, request=command.request)

    def launch(self, command: Draft, token: torch.Tensor | None = None) -> Launched:
        """Asks the device for what answers `command`, which samples; returns before it is done.

        `token`: [1], what was drawn last, in place of the command's one token, which nobody knows yet.

        Unproven: no GPU was at hand. The tests run it on a CPU, where all is done when it returns.
        """
        assert self.runner.length() == command.start, (self.runner.length(), command)
        assert self._rule is not None
        assert command.sample
        began, forwarded, done = marks = _marks(self.runner.device)
        began.record()
        logits = feed_chain(self.runner, self._known(command.tokens) if token is None else token, 1)
        forwarded.record()
        said, probs = self._rule.draft_on_device(self._fit(logits[0]), command.start + len(command.tokens))
        # Of logits that are not finite the draw may be any number, and a wrong id would abort the process.
        following = said[1:].long().clamp_(0, self.runner.vocab_size - 1)
        said = said.to("cpu", non_blocking=True)
        done.record()
        return Launched(following, said, probs, marks)

    def collect(self, launched: Launched) -> Drafted:
        """Waits for what was launched, and only for that."""
        began, forwarded, done = launched.marks
        done.synchronize()
        token = read_draw(launched.said)
        seconds, draw = began.elapsed_time(forwarded) / 1000, forwarded.elapsed_time(done) / 1000
        return Drafted(token, seconds, _in_memory(launched.probs), draw)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """An id that only the target has stands for something this model cannot know; only acceptance suffers."""
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        if self._missing == 0:
            return logits
        if self._missing < 0:
            return logits[: self._missing]
        return torch.nn.functional.pad(logits, (0, self._missing), value=-torch.inf)


def _in_memory(probs: torch.Tensor | None) -> Rows:
    """As it is: how it travels is nothing that a draft's next forward should wait for."""
    return NO_ROWS if probs is None else Rows(RowKind.CHANNEL, (probs,))
