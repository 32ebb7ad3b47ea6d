"""Launching worker processes and watching them. Knows what a worker says on its status line, nothing of decoding.

Used by the engine for both workers and, under torchrun, by each rank for its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any
from weakref import WeakSet

from pearl import errors
from pearl.cache import Progress
from pearl.config import EngineConfig
from pearl.device import Device
from pearl.silence import Silence
from pearl.worker.lifeline import DIRECTORY
from pearl.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

END_SECONDS = 8.0  # a worker is given this long to end by itself, then killed
_LOOK_SECONDS = 0.2  # between two looks at a draft
_LAST_WORDS_SECONDS = 5.0  # for the status lines of ranks that are going down
_MOST_BACK_OFF_SECONDS = 30.0  # before a restart: a draft that dies at once must not become a busy loop
_MEASURED = re.compile(r"(?<!signal )(?<!exit code )\b\d[\d.]*")  # numbers that differ though the cause is the same
_SOUND_SECONDS = 600.0  # a draft that has lived so long has nothing to do with the restarts before it


_workers: WeakSet[Worker] = WeakSet()


def _let_go() -> None:
    """In a forked process: were it to hold the other end of their stdin, workers would not be told to end.

    The numbers stay taken, by files that are nothing, for the copies of what is opened here will close them again.
    """
    for worker in _workers:
        worker.let_go()


os.register_at_fork(after_in_child=_let_go)


class Worker:
    """One worker process. Everything it says about itself is gathered by a thread and waited for by `wait_for`."""

    def __init__(self, settings: WorkerSettings, progress: Progress | None = None) -> None:
        self.role = settings.name
        self.address = ""  # the target's, once it is bound
        self.taken: dict[str, str] = {}  # the device and the dtype, once it is ready
        self.silence = Silence(_LOOK_SECONDS * 5)
        self.began = time.monotonic()
        self.ready_since = 0.0
        self.error: errors.PearlError | None = None
        self._progress = progress
        self._states: set[str] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._process = Popen(
            [sys.executable, "-m", "pearl.worker"],
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(settings.model.part(settings.rank)) | {DIRECTORY: str(settings.directory)},
            start_new_session=True,  # Ctrl-C is for the front; a worker ends when its stdin does
        )
        _workers.add(self)
        self._write(settings.to_json() + b"\n")
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"{self.role}-status")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            log.debug("%s worker ended before it read its settings", self.role)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            self._on_status(said)
        self._process.wait()
        with self._changed:
            self._states.add("gone")
            self._changed.notify_all()

    def _on_status(self, said: dict[str, Any]) -> None:
        self.silence.heard(said.get("allowance", 0.0))
        if said["state"] == "loading" and self._progress:
            self._progress(f"{self.role}: {said['message']}")
        with self._changed:
            if said["state"] == "ready":
                self.ready_since = time.monotonic()
                self.taken = {name: said[name] for name in ("device", "dtype") if name in said}
            if said["state"] == "bound":
                self.address = said["address"]
            if said["state"] == "failed":
                kind = getattr(errors, said["kind"], errors.StartError)
                kind = errors.StartError if kind is errors.DraftLost else kind  # for whom else was it lost?
                self.error = kind(f"{self.role} worker: {said['message']}")
            self._states.add(said["state"])
            self._changed.notify_all()

    def wait_for(self, state: str, deadline: float) -> None:
        """Waits until the worker has reached `state`: bound, ready or gone. `deadline`: of time.monotonic().

        Raises the worker's own error where it failed, `StartError` where it died without a word or time is up.
        """
        with self._changed:
            while state not in self._states:
                if "gone" in self._states:
                    raise self.fate()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise errors.StartError(
                        f"{self.role} worker is not {state} in time; raise startup_timeout, or see --log-level debug"
                    )
                self._changed.wait(min(left, 1.0))

    def reached(self, state: str) -> bool:
        with self._changed:
            return state in self._states

    def fate(self) -> errors.PearlError:
        """Why the worker is gone."""
        if self.error is not None:
            return self.error
        code = self._process.poll()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = "; a kill by signal 9 is often the kernel's, for lack of memory" if code == -9 else ""
        return errors.StartError(f"{self.role} worker {how}{hint}")

    def kill(self) -> None:
        """Ends it at once, with what it has started itself: it leads a session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of the worker's stdin, which tells it to end. Does not wait."""
        self._closing = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it was gone already
                self._process.stdin.close()

    def let_go(self) -> None:
        """Leaves the worker to the process that started it."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):  # it was closed already
                if pipe is not None:
                    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                    os.dup2(null, pipe.fileno(), inheritable=False)
                    os.close(null)

    def end(self, seconds: float = END_SECONDS) -> None:
        """Waits until it has ended, and kills it if it does not."""
        self.close()
        try:
            self._process.wait(seconds)
        except TimeoutExpired:
            log.warning("%s worker does not end by itself: killing it", self.role)
            self.kill()
            self._process.wait()
        self._reader.join(1.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Ranks(Worker):
    """A model's worker and, where several ranks share the model, those of the others: all end with any of them.

    `ranks`: the others that are launched here; under torchrun each of the target's is another process's.
    """

    def __init__(self, settings: WorkerSettings, ranks: Iterable[int] = (), progress: Progress | None = None) -> None:
        super().__init__(settings, progress)
        self.followers: list[Worker] = []
        try:
            for rank in ranks:
                self.followers.append(Worker(settings.model_copy(update={"rank": rank})))
        except BaseException:
            self.kill()  # first: one that is asked to end takes the directory with it, which may be in use
            self.end()
            raise

    @property
    def alive(self) -> bool:
        return super().alive and all(worker.alive for worker in self.followers)

    def wait_for(self, state: str, deadline: float) -> None:
        """As a worker's. Once another rank is gone so is the model, and no other state is waited for."""
        if all(worker.alive for worker in self.followers) or self.reached(state):
            super().wait_for(state, deadline)
        elif state != "gone":
            raise self.fate()

    def fate(self) -> errors.PearlError:
        """Why the model is gone: what befell the rank that was first to go. The others say that they have lost it."""
        fates = [] if super().alive else [super().fate()]
        bereft = bool(fates) and isinstance(fates[0], errors.TransportError)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for worker in self.followers:
            if bereft or not worker.alive:
                with contextlib.suppress(errors.PearlError):
                    worker.wait_for("gone", deadline)
                if not worker.alive:
                    fates.append(worker.fate())
        fates = fates or [super().fate()]
        return next((fate for fate in fates if not isinstance(fate, errors.TransportError)), fates[0])

    def kill(self) -> None:
        super().kill()
        for worker in self.followers:
            worker.kill()

    def close(self) -> None:
        super().close()
        for worker in self.followers:
            worker.close()

    def end(self, seconds: float = END_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        super().end(seconds)
        for worker in self.followers:
            worker.end(max(0.0, deadline - time.monotonic()))


class DraftKeeper:
    """Keeps a draft worker alive: one that dies or falls silent is started again, later each time.

    After `config.draft_restarts` in a row for one cause it is given up: one that was killed, then fell silent on a busy
    machine, then lost its connection is not one that keeps failing.  Silence is noticed here too, where no text is
    being made and the target does not look; and a draft that hangs must be ended by somebody.
    """

    def __init__(self, config: EngineConfig, address: str, directory: Path, progress: Progress | None = None) -> None:
        self._config = config
        self._settings = WorkerSettings(role="draft", config=config, address=address, directory=directory)
        self._closing = threading.Event()
        self._restarts: Counter[str] = Counter()  # by cause
        self.restarts = 0  # of all causes, ever
        self._starts = count()
        self.worker = self._launch(progress=progress)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="draft-keeper")

    def _launch(self, tensors: str | None = None, progress: Progress | None = None) -> Ranks:
        """Under torchrun too its ranks are all children of this process, which can start them again together."""
        settings = self._settings.model_copy(update={"tensors": tensors, "start": next(self._starts)})
        return Ranks(settings, range(1, settings.model.tp), progress)

    def keep(self) -> None:
        """Starts watching; until then a draft that fails stays down, for its error to be told."""
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            trouble = self._trouble()
            if trouble is None:
                continue
            cause, what = trouble
            if self.worker.ready_since and time.monotonic() - self.worker.ready_since > _SOUND_SECONDS:
                self._restarts.clear()
            self.worker.kill()
            self.worker.end()
            if self._restarts[cause] == self._config.draft_restarts:
                log.error("%s; it is not started again, the target goes on alone", what)
                return
            self._restarts[cause] += 1
            self.restarts += 1
            log.warning("%s; starting it again (%d)", what, self._restarts[cause])
            # Of all causes together: one that dies now of this and now of that must not become a busy loop either.
            if not self._closing.wait(_back_off(self._restarts.total())):
                self._start_again()

    def _start_again(self) -> None:
        """Until there is a process. Where files, threads or memory are short for one, no draft has died."""
        for tries in count(1):
            try:
                self.worker = self._launch(tensors="frames")
                return
            except (OSError, RuntimeError) as error:
                log.warning("a draft worker could not be started: %s", error)
            if self._closing.wait(_back_off(tries)):
                return

    def _trouble(self) -> tuple[str, str] | None:
        """The cause and what to say, if anything is wrong with the draft."""
        worker, config = self.worker, self._config
        if not worker.alive:
            with contextlib.suppress(errors.PearlError):  # its last words may still be on their way
                worker.wait_for("gone", time.monotonic() + 1.0)
            what = str(worker.fate())
            return _MEASURED.sub("", what), what
        if worker.reached("ready"):
            silent = worker.silence.seconds
            late = silent > config.draft_timeout
            return ("silence", f"draft worker was silent for {silent:.1f} s") if late else None
        late = time.monotonic() - worker.began > config.startup_timeout
        return ("start", "draft worker is not ready in time; see startup_timeout") if late else None

    def close(self) -> None:
        self._closing.set()
        self.worker.close()

    def end(self, seconds: float = END_SECONDS) -> None:
        self.close()
        if self._thread.is_alive():
            self._thread.join()
        self.worker.end(seconds)


def _back_off(times: int) -> float:
    return float(min(0.5 * 2 ** min(times, 16), _MOST_BACK_OFF_SECONDS))


def _environment(place: Device) -> dict[str, str]:
    """The worker's: as many threads as cores it is pinned to, known before any library starts its own, and of the GPUs
    only its own where it was given several, so that spreading a model does not spread it over the other's.
    """
    extra = {"TOKENIZERS_PARALLELISM": "false"}
    if place.cores:
        extra |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(len(place.cores)))
    if len(place.gpus) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(max(place.gpus) + 1)] if visible is None else visible.split(",")
        extra["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in place.gpus if i < len(names))
    return {**os.environ, **extra}
