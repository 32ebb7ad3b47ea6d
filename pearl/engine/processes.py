"""Launches worker processes and watches them.

An engine uses this module to launch both workers. Under torchrun, each rank uses it to launch one
worker. The module knows the status lines that a worker prints, but nothing of decoding.
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
# Longest wait before a restart. Without a wait, a draft that dies at once would make a busy loop.
_MOST_BACK_OFF_SECONDS = 30.0
_SOUND_SECONDS = 600.0  # after a draft has run this long, earlier restarts no longer count


class Worker:
    """One worker process. A thread reads the status lines that the worker prints.

    Attributes:
        notes: sentences for the user; complete once the worker is ready.
        silence: how long the worker has printed no status line.
        began: when the process was started, a time of time.monotonic().
        ready_since: when the worker was ready, a time of time.monotonic(); 0 before.
    """

    def __init__(self, settings: WorkerSettings, progress: Progress = silent) -> None:
        self.role = settings.role
        self.notes: list[str] = []  # sentences for the user; complete once the worker is ready
        self.silence = Silence(_LOOK_SECONDS * 5)
        self.began = time.monotonic()
        self.ready_since = 0.0
        self._progress = progress
        self._statuses: dict[str, dict[str, Any]] = {}  # state -> its last status line
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
        """The address where the target listens. The worker must have reached the state "bound"."""
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
        """Wait until the worker has reached `state` or is gone, at most `seconds`.

        Return whether it has reached `state`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._statuses.keys() & {state, "gone"}, seconds)
            return state in self._statuses

    def wait_for(
        self, state: str, deadline: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the worker has reached `state`, which is "bound" or "ready".

        If the worker fails, its own error is raised. If it dies without an error, or has not
        reached the state at the deadline, `StartError` is raised.

        Args:
            deadline: a time of time.monotonic().
            check: called a few times per second; an error that it raises ends the wait.
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
        """Return whether the worker has ended. Waits up to 5 s for it to end."""
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
        """Kill the worker's process group: the worker and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Tell the worker to end, by sending it a byte and closing its stdin.

        The byte is needed if a fork of this process still holds stdin open.
        """
        self._write(b"\n")
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _write(self, line: bytes) -> None:
        # An error is ignored, because the worker has ended (its status lines say why), or its stdin
        # was closed.
        with contextlib.suppress(OSError, ValueError):
            self._stdin.write(line)
            self._stdin.flush()

    def end(self, seconds: float = END_SECONDS) -> None:
        """Tell the worker to end, and wait for its end. Kill it if this takes over `seconds`."""
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
    """Restarts a draft worker that dies or hangs.

    The setting `draft_restarts` says how many times in a row it does so.

    The keeper waits before each restart, longer each time. The target notices a silent draft only
    during requests, but this object watches all the time, and kills a draft that hangs.

    Attributes:
        restarts: number of restarts so far.
        worker: the current draft worker.
    """

    def __init__(self, settings: WorkerSettings, progress: Progress = silent) -> None:
        self._config = settings.config
        # A restarted draft cannot join torch's process group again.
        self._settings = settings.model_copy(update={"tensors": "frames"})
        self._closing = threading.Event()
        self._in_a_row = 0  # restarts since the draft has last run for `_SOUND_SECONDS`
        self.restarts = 0
        self.worker = Worker(settings, progress)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="draft-keeper")

    def keep(self) -> None:
        """Start watching.

        Before this call a failed draft is not restarted, so that its error can be reported to the
        user.
        """
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
        """Try to start a worker until one starts.

        A start may fail for lack of files, threads or memory. Such a failure does not count as a
        restart.
        """
        for tries in count(1):
            try:
                self.worker = Worker(self._settings)
                return
            except (OSError, RuntimeError) as error:
                log.warning("a draft worker could not be started: %s", error)
            if self._closing.wait(_back_off(tries)):
                return

    def _trouble(self) -> str | None:
        """Return what is wrong with the draft; None if nothing is wrong."""
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
    """Return the environment variables of a worker whose model runs on `place`.

    Libraries read some of these variables before they start threads. A worker that is pinned to
    cores gets as many threads as cores. A worker with several GPUs sees only these GPUs, so that a
    model that is spread over them does not use the other worker's GPU.
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
