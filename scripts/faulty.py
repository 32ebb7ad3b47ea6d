"""A worker that fails on purpose in a chosen phase, for fault tests and `scripts/soak`.

`inflicted` has an engine launch this program in place of its workers; the environment says what fails where.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from pearl.engine import processes
from pearl.models.runner import Feed, ModelRunner
from pearl.worker import build
from pearl.worker.__main__ import main

_FAULT = "PEARL_FAULT"  # of the environment
PROMPT = 40  # tokens: a forward of so many is a prompt's; the start-up measurement feeds fewer
_SLOW_SECONDS = 0.3
_LATER = 6  # forwards of a draft after which a target can be verifying its tokens


class Fault:
    """Happens in the first forward of its phase.

    "raise", "slow" and "nan" last for all later forwards, because the result of a speculative forward may be discarded;
    in a draft "nan" ends with the next prompt of the same length.

    Args:
        name: "FAULT@PHASE": kill, stop, hang, raise, nan or slow at start, prefill, drafting or verifying (of a draft:
            it drafts while the target verifies).
        once: a file that the fault creates. Where it exists no fault happens, so that a restarted process works.
    """

    def __init__(self, runner: ModelRunner, name: str, role: str, once: str = "") -> None:
        self._healthy = runner.forward
        self._fault, _, self._phase = name.partition("@")
        self._role = role
        self._once = once
        #: tokens of the first prompt's forward and of each later one
        self._since_prompt: list[int] = []
        self._struck = self._cured = False

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        fed = sum(len(feed.tokens) for feed in feeds)
        if (
            self._struck
            and self._role == "draft"
            and self._fault == "nan"
            and [fed] == self._since_prompt[:1]
        ):
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
        rows = self._healthy(feeds)
        if self._struck and self._fault == "nan" and not self._cured:
            return [torch.full_like(logits, torch.nan) for logits in rows]
        return rows

    def _is_time(self, fed: int) -> bool:
        forwards = len(self._since_prompt) - 1
        is_verifying = forwards >= 1 and fed > 1
        if self._role == "draft":
            is_verifying = forwards >= _LATER
        return {
            "start": True,
            "prefill": forwards >= 0,
            "drafting": forwards >= 1,
            "verifying": is_verifying,
        }[self._phase]

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


@contextmanager
def inflicted(role: str, name: str, once: object = "") -> Iterator[None]:
    """Workers that are launched meanwhile fail as `Fault` says, if they are of this role."""
    launched = processes.COMMAND
    processes.COMMAND = [sys.executable, __file__]
    os.environ[_FAULT] = f"{role} {name} {once}"
    try:
        yield
    finally:
        processes.COMMAND = launched
        del os.environ[_FAULT]


def make_faulty() -> None:
    """Have this process's worker fail as the environment says."""
    of, name, once = os.environ[_FAULT].split(" ", 2)
    load = build.load_toy

    def load_faulty(spec: str, role: str, *how: Any) -> ModelRunner:
        runner = load(spec, role, *how)
        if role == of:
            runner.forward = Fault(runner, name, role, once).forward  # type: ignore[method-assign]
        return runner

    build.load_toy = load_faulty  # type: ignore[assignment]


if __name__ == "__main__":
    make_faulty()
    code = main()
    sys.stderr.flush()
    os._exit(code)
