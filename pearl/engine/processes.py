"""Launches worker processes and watches them. Knows a worker's status lines, but nothing of decoding.

An engine launches both workers with this module. Under torchrun each rank launches its own worker with it.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from pearl import errors
from pearl.cache import Progress, silent
from pearl.device import Device
from pearl.silence import Silence
from pearl.worker.lifeline import DIRECTORY
from pearl.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "pearl.worker"]
END_SECONDS = 8.0  # a worker that has not ended by itself after this time is killed
_EXIT_SECONDS = 5.0  # longest wait for the last status line of a worker that exits
_LOOK_SECONDS = 0.2  # between two checks of a worker
# longest wait before a restart; restarting a draft that dies at once must not become a busy loop
_MOST_BACK_OFF_SECONDS = 30.0
_SOUND_SECONDS = 600.0  # after a draft has run this long, earlier restarts no longer count


class Worker:
    """One worker process. A thread reads its status lines; `wait_for` waits for them."""

    def __init__(self, settings: WorkerSettings, progress: Progress = silent) -> None:
        self.role = settings.role
        self.notes: list[str] = []  # sentences for the user; complete once the worker is ready
        self.silence = Silence(_LOOK_SECONDS * 5)
        self.began = time.monotonic()
        self.ready_since = 0.0
        self._progress = progress
        self._statuses: dict[str, dict[str, Any]] = {}  # state -> the last status with it
        self._changed = threading.Condition()
        self._process = Popen(
            COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            env=environment_for(settings.model.place) | {DIRECTORY: str(settings.directory)},
            start_new_session=True,  # Ctrl-C is for the front; a worker ends when its stdin closes
        )
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout
        self._write(settings.model_dump_json().encode() + b"\n")
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"{self.role}-status")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def address(self) -> str:
        """The address where the target listens, once it is bound."""
        return str(self._statuses["bound"]["address"])

    @property
    def place(self) -> dict[str, str]:
        """The model's device and dtype; empty until the worker is ready."""
        return self._statuses.get("ready", {})

    def _read(self) -> None:
        for line in self._stdout:
            with contextlib.suppress(ValueError):
                self._on_status(json.loads(line))
        self._process.wait()
        self._on_status({"state": "gone"})

    def _on_status(self, status: dict[str, Any]) -> None:
        self.silence.heard(status.get("allowance", 0.0))
        state = status.pop("state")
        if state == "loading":
            self._progress(f"{self.role}: {status['message']}")
        with self._changed:
            if state == "note":
                self.notes.append(str(status["message"]))
            if state == "ready":
                self.ready_since = time.monotonic()
            self._statuses[state] = status
            self._changed.notify_all()

    def _reaches(self, state: str, seconds: float) -> bool:
        """Wait at most `seconds` until the worker reaches `state` or is gone. Return whether it has reached `state`."""
        with self._changed:
            self._changed.wait_for(lambda: self._statuses.keys() & {state, "gone"}, seconds)
            return state in self._statuses

    def wait_for(
        self, state: str, deadline: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the worker has reached `state`: bound or ready.

        Raises the worker's own error if it failed. Raises `StartError` if it died without an error, or is too late.

        Args:
            deadline: a time.monotonic().
            check: called now and then; an error that it raises ends the wait.
        """
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._reaches(state, min(_LOOK_SECONDS, left)):
                return
            check()
            if not self.alive:
                raise self.exit_error()
            if time.monotonic() > deadline:
                raise errors.StartError(
                    f"{self.role} worker is not {state} in time; raise startup_timeout, or see "
                    "--log-level debug"
                )

    def is_gone(self) -> bool:
        """Return whether the worker has ended. Waits a moment for its last status line."""
        return self._reaches("gone", _EXIT_SECONDS)

    def exit_error(self) -> errors.PearlError:
        """Return the error that says why the worker is gone."""
        self.is_gone()
        failure = self._statuses.get("failed")
        if failure is not None:
            kind = errors.error_named(failure["kind"])
            if kind is errors.DraftLost:  # here the draft itself has failed
                kind = errors.StartError
            return kind(f"{self.role} worker: {failure['message']}")
        code = self._process.poll()
        if code is None or code >= 0:
            return errors.StartError(f"{self.role} worker ended with exit code {code}")
        hint = ""
        if code == -signal.SIGKILL:
            hint = "; a kill by signal 9 is often the kernel's, for lack of memory"
        return errors.StartError(f"{self.role} worker was killed by signal {-code}{hint}")

    def kill(self) -> None:
        """Kill the worker and its own children, which are in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Tell the worker to end: send a byte, and close its stdin.

        The byte is for the case that a fork of this process also holds stdin open.
        """
        self._write(b"\n")
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _write(self, line: bytes) -> None:
        # Ignored: the worker may have ended, and its status lines say why; or its stdin is closed.
        with contextlib.suppress(OSError, ValueError):
            self._stdin.write(line)
            self._stdin.flush()

    def end(self, seconds: float = END_SECONDS) -> None:
        """Tell the worker to end, and wait; kill it if it has not ended after `seconds`."""
        self.close()
        try:
            self._process.wait(seconds)
        except TimeoutExpired:
            log.warning("%s worker does not end by itself: killing it", self.role)
            self.kill()
            self._process.wait()
        self._reader.join(1.0)
        self._stdout.close()


class DraftKeeper:
    """Restarts a draft worker that dies or falls silent, with back-off, at most `draft_restarts` times in a row.

    The target notices a silent draft only during requests. The keeper watches always, and kills a draft that hangs.
    """

    def __init__(self, settings: WorkerSettings, progress: Progress = silent) -> None:
        self._config = settings.config
        # A restarted draft cannot join torch's process group again.
        self._settings = settings.model_copy(update={"tensors": "frames"})
        self._closing = threading.Event()
        self._in_a_row = 0  # restarts since a sound run
        self.restarts = 0
        self.worker = Worker(settings, progress)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="draft-keeper")

    def keep(self) -> None:
        """Start watching. Before this call a failed draft is not restarted, so that its error can be reported."""
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            trouble = self._trouble()
            if trouble is None:
                continue
            ready_since = self.worker.ready_since
            if ready_since and time.monotonic() - ready_since > _SOUND_SECONDS:
                self._in_a_row = 0
            self.worker.kill()
            self.worker.end()
            if self._in_a_row == self._config.draft_restarts:
                log.error("%s; it is not started again, the target goes on alone", trouble)
                return
            self._in_a_row += 1
            self.restarts += 1
            log.warning("%s; starting it again (%d)", trouble, self._in_a_row)
            if not self._closing.wait(_back_off(self._in_a_row)):
                self._start_again()

    def _start_again(self) -> None:
        """Try to start a worker until it succeeds. Failures for lack of files, threads or memory are no restarts."""
        for tries in count(1):
            try:
                self.worker = Worker(self._settings)
                return
            except (OSError, RuntimeError) as error:
                log.warning("a draft worker could not be started: %s", error)
            if self._closing.wait(_back_off(tries)):
                return

    def _trouble(self) -> str | None:
        """Return what is wrong with the draft; None if nothing is."""
        worker = self.worker
        if not worker.alive:
            return str(worker.exit_error())
        if worker.ready_since:
            silence = worker.silence.seconds
            if silence > self._config.draft_timeout:
                return f"draft worker was silent for {silence:.1f} s"
        elif time.monotonic() - worker.began > self._config.startup_timeout:
            return "draft worker is not ready in time; see startup_timeout"
        return None

    def close(self) -> None:
        self._closing.set()
        self.worker.close()

    def end(self, seconds: float = END_SECONDS) -> None:
        self.close()
        if self._thread.is_alive():
            self._thread.join()
        self.worker.end(seconds)


def _back_off(times: int) -> float:
    return min(0.5 * 2.0 ** min(times, 16), _MOST_BACK_OFF_SECONDS)


def environment_for(place: Device) -> dict[str, str]:
    """Return the worker's environment variables, which libraries read before they start threads.

    A pinned worker gets as many threads as cores. A worker with several GPUs sees only those, so that a model that is
    spread over them does not use the other worker's.
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if place.cores:
        environment["OMP_NUM_THREADS"] = str(len(place.cores))
        environment["MKL_NUM_THREADS"] = str(len(place.cores))
    if len(place.gpus) > 1:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            gpus = [str(gpu) for gpu in place.gpus]
        else:
            names = visible.split(",")
            gpus = [names[gpu] for gpu in place.gpus if gpu < len(names)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment
