"""A runner that fails on purpose in a chosen phase, for fault tests and `scripts/soak`.

An option of toy models (`toy:fault=hang@drafting`), so that it happens in a real worker process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from pearl.errors import ModelError
from pearl.models.runner import Feed, ModelRunner, WrappedRunner

FAULTS = ("kill", "stop", "hang", "raise", "nan", "slow")
PHASES = ("start", "prefill", "drafting", "verifying")
PROMPT = 40  # tokens: a forward of so many is a prompt's; the start-up measurement feeds fewer
_SLOW_SECONDS = 0.3
_LATER = 6  # forwards of a draft after which a target can be verifying its tokens


class FaultyRunner(WrappedRunner):
    """Wraps `runner`; the fault happens in the first forward of its phase.

    "raise", "slow" and "nan" last for all later forwards, because the result of a speculative forward may be discarded;
    in a draft "nan" ends with the next prompt of the same length.

    Args:
        name: "FAULT@PHASE". The phase "verifying" of a draft: it drafts while the target verifies.
        once: a file that the fault creates. Where it exists no fault happens, so that a restarted process works.

    Raises `ModelError` for an unknown fault or phase.
    """

    def __init__(self, runner: ModelRunner, name: str, role: str, once: str = "") -> None:
        fault, _, phase = name.partition("@")
        if fault not in FAULTS or phase not in PHASES:
            raise ModelError(f"fault {name!r} is not one of {', '.join(FAULTS)} at one of {', '.join(PHASES)}")
        super().__init__(runner)
        self._fault, self._phase, self._role, self._once = fault, phase, role, once
        self._since_prompt: list[int] = []  # tokens of each forward after the first prompt's, and of that
        self._struck = self._cured = False

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        fed = sum(len(feed.tokens) for feed in feeds)
        if self._struck and self._role == "draft" and self._fault == "nan" and [fed] == self._since_prompt[:1]:
            self._cured = True  # a longer prompt is the same request fed again: that fails again
        if self._since_prompt or fed >= PROMPT:
            self._since_prompt.append(fed)
        if not self._struck and self._is_time(fed) and self._is_first():
            self._struck = True
            self._strike()
        if self._struck and self._fault == "slow":
            time.sleep(_SLOW_SECONDS)
        if self._struck and self._fault == "raise":
            raise RuntimeError("a fault on purpose")
        found = self._runner.forward(feeds)
        if self._struck and self._fault == "nan" and not self._cured:
            return [torch.full_like(logits, torch.nan) for logits in found]
        return found

    def _is_time(self, fed: int) -> bool:
        after = len(self._since_prompt) - 1
        is_verifying = after >= _LATER if self._role == "draft" else after >= 1 and fed > 1
        return {"start": True, "prefill": after >= 0, "drafting": after >= 1, "verifying": is_verifying}[self._phase]

    def _is_first(self) -> bool:
        with suppress(FileExistsError):
            if self._once:
                Path(self._once).touch(exist_ok=False)
            return True
        return False

    def _strike(self) -> None:
        match self._fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                while True:
                    time.sleep(3600)
