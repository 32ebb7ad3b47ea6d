"""Carrying out the commands that compute: forwards, judgements, draws. Knows runners and rules, no sockets, no clock
but the one that times a forward.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pearl.decoding.registry import Needs
from pearl.decoding.rules import TargetHalf, make_target_half, rule_in_force
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.drafting.proposer import Proposer
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
from pearl.text import TextStream

Event = Forwarded | Judged | Sampled | Drafted


def _of_memory(error: Exception) -> OutOfMemory | None:
    """What to say of an error where it is one of memory; on a CPU torch has no class of its own for that."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if not known and not re.search(r"(?i)can't allocate memory|not enough memory", str(error)):
        return None
    cause = str(error).partition("\n")[0].rstrip(".") or "no memory is left"
    return OutOfMemory(f"{cause}. Shorten the prompt, lower max_context, or take a smaller model.")


@dataclass(slots=True)
class _Request:
    """What judging one request takes.

    Attributes:
        text: tells when a stop string is complete; None where there are none.
        logits: [rows, vocab], of its last forward.
        first: position that row 0 is for.
    """

    slot: int
    rule: TargetHalf
    direct: DirectDraw
    needs: Needs
    text: TextStream | None
    logits: torch.Tensor
    first: int = 0


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
        self._requests: dict[int, _Request] = {}

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

    def needs_rows(self, request: int) -> bool:
        """Whether judging the request takes more than the draft's tokens: rows must come with them."""
        found = self._requests.get(request)
        return found is not None and found.needs is not Needs.NOTHING

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
                self.runner.rollback(length, self._requests[command.request].slot)
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
        self._requests = {number: each for number, each in self._requests.items() if each.slot != command.slot}
        rule = make_target_half(command.rule, command.sampling, command.parameters)
        needs, text = rule_in_force(command.rule, command.sampling).needs, None
        if command.stops:
            assert self._text_stream is not None
            text = self._text_stream(command.prompt, command.stops)
        direct = DirectDraw(command.sampling)
        self._requests[command.request] = _Request(command.slot, rule, direct, needs, text, torch.empty(0))

    def _forward(self, command: Forward) -> Forwarded:
        request = self._requests[command.request]
        assert self.runner.length(request.slot) == command.start, (self.runner.length(request.slot), command)
        began = time.perf_counter()
        request.logits = feed_chain(self.runner, command.tokens, command.rows, request.slot)
        self.runner.synchronize()
        request.first = command.start + len(command.tokens) - command.rows + 1
        return Forwarded(time.perf_counter() - began, request=command.request)

    def _judge(self, command: Judge) -> Judged:
        request = self._requests[command.request]
        if self._uploads is not None:
            torch.cuda.current_stream(self.runner.device).wait_stream(self._uploads)
        row = command.start - request.first
        logits = request.logits[row : row + len(command.tokens)]
        rows = [row.tensor for row in command.rows if row is not None]
        verdict = request.rule.judge(logits, command.tokens, rows, command.start)
        new = list(command.tokens[: verdict.accepted])
        if verdict.token is not None:
            new.append(verdict.token)
        stop_after = self._stop_after(request, new)
        return Judged(verdict.accepted, verdict.token, stop_after, request=command.request)

    def _sample(self, command: Sample) -> Sampled:
        request = self._requests[command.request]
        token = read_draw(request.direct(request.logits[command.position - request.first], command.position))
        return Sampled(token, self._stop_after(request, [token]) is not None, request=command.request)

    def _stop_after(self, request: _Request, tokens: Sequence[int]) -> int | None:
        if request.text is not None:
            for count, token in enumerate(tokens, start=1):
                request.text.push(token)
                if request.text.stopped:
                    return count
        return None


class DraftExecutor:
    """Computes for the drafter, with whoever guesses."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    def execute(self, command: object) -> Event | None:
        """The event that answers `command`; None where it needs no answer."""
        match command:
            case Open():
                self.proposer.open(command)
            case Rollback(length):
                self.proposer.rollback(length, command.request)
            case Draft():
                return self.proposer.collect(self.proposer.launch(command))
            case _:
                raise AssertionError(command)
        return None
