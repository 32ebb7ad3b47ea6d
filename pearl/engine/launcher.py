"""Launching an engine's workers and ending them: what differs between here, torchrun and another process's engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pearl.cache import Progress
from pearl.config import EngineConfig
from pearl.engine.card import write_card
from pearl.engine.client import Life
from pearl.engine.preflight import check_classifier, check_datastore, check_models, check_profile, check_toys
from pearl.engine.processes import END_SECONDS, DraftKeeper, Ranks, Worker
from pearl.engine.recording import logged_not_raised
from pearl.errors import PearlError, StartError, TraceError, TransportError
from pearl.trace.chrome import merge
from pearl.trace.recorder import being_written, part_paths
from pearl.transport.address import bind_address, check_bind, private_directory
from pearl.transport.zeromq import ensured_keys
from pearl.worker.settings import WorkerSettings

_DRAFT_END_SECONDS = 1.0  # for the draft to end by itself where the target is lost, and callers wait to be told
_LAST_WORDS_SECONDS = 5.0  # for the status line of a worker that is going down
_LOOK_SECONDS = 0.1  # between two looks at who still writes a trace


class Launcher(Life, Protocol):
    """Brings up what an engine needs, in the order of the methods; `close` is called whatever fails.

    Attributes:
        directory: the engine's, of sockets and keys, which nobody but this user can reach.
        untraced: why the trace of the workers' whole life was not written at their end.
    """

    config: EngineConfig
    directory: Path

    @property
    def untraced(self) -> list[PearlError]: ...

    @property
    def draft_pid(self) -> int | None:
        """Process id of the draft worker on this host; None where there is none now."""
        ...

    @property
    def draft_restarts(self) -> int:
        """How often a draft that was lost was started again, by this process."""
        ...

    def launch(self, progress: Progress) -> str:
        """Starts the workers, and returns the address where the target listens while they load their models."""
        ...

    def wait_until_ready(self) -> float:
        """Returns when models are loaded: the time.monotonic() at which the target must have answered.

        Raises the worker's own error where it fails, `StartError` where it is late.
        """
        ...

    def keep(self) -> None:
        """The engine stands: from now on a draft that fails is started again, and other fronts may find the engine."""
        ...


class LocalLauncher:
    """The workers are children of this process, in a directory of its own.

    Args:
        others_elsewhere: launch the target's first rank only; the other workers are another process's.
    """

    remedy = "Make a new engine"

    def __init__(self, config: EngineConfig, others_elsewhere: bool = False) -> None:
        self.config = config
        self.directory = private_directory()
        self.untraced: list[PearlError] = []
        self._began = time.time()
        self.target: Ranks | None = None
        self.draft: DraftKeeper | None = None
        self._elsewhere = others_elsewhere
        self._ending = threading.RLock()
        self._ended = False

    @property
    def draft_pid(self) -> int | None:
        worker = self.draft.worker if self.draft else None
        return worker.pid if worker is not None and worker.alive else None

    @property
    def draft_restarts(self) -> int:
        return self.draft.restarts if self.draft else 0

    def launch(self, progress: Progress) -> str:
        config, directory = self.config, self.directory
        check_classifier(config)
        check_models(config, ("target",) if self._elsewhere else config.roles, progress)
        check_toys(config)
        check_profile(config)
        check_datastore(config, progress)
        self._deadline = time.monotonic() + config.startup_timeout
        address = bind_address(config.control, directory)
        keys = ensured_keys(config.control, config.keys, directory)
        check_bind(address, keys=keys is not None)
        followers = () if self._elsewhere else range(1, config.target_tp)
        settings = WorkerSettings(role="target", config=config, address=address, directory=directory)
        self.target = Ranks(settings, followers, progress)
        is_known = not address.endswith("*")  # else the port is free for the target to choose
        if is_known:
            self._launch_draft(address, progress)  # at once: both import torch meanwhile, and what is sent early waits
        self.target.wait_for("bound", self._deadline)
        if not is_known:
            self._launch_draft(self.target.address, progress)
        return self.target.address

    def _launch_draft(self, address: str, progress: Progress) -> None:
        if self.config.has_draft and not self._elsewhere:
            self.draft = DraftKeeper(self.config, address, self.directory, progress)

    def wait_until_ready(self, check_others: Callable[[], None] = lambda: None) -> float:
        """`check_others` raises why workers that are elsewhere will not come."""
        assert self.target is not None
        while not self.target.reached("ready"):
            check_others()
            if self.draft and not self.draft.worker.alive:
                raise self._start_failure(self.draft.worker)
            try:
                self.target.wait_for("ready", min(self._deadline, time.monotonic() + 0.2))
            except StartError:
                if not self.target.alive:  # it has just died: its own words, not that it is late
                    self.target.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
                    raise self.target.fate() from None
                if time.monotonic() > self._deadline:
                    raise
        return self._deadline

    def _start_failure(self, draft: Worker) -> PearlError:
        """Whose failure it was: a draft also ends because the target it talks to has failed."""
        assert self.target is not None
        draft.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
        fate = draft.fate()
        if isinstance(fate, TransportError):
            with contextlib.suppress(StartError):
                self.target.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
                return self.target.fate()
        return fate

    def keep(self) -> None:
        assert self.target is not None
        if self.draft:
            self.draft.keep()
        config = self.config.model_dump(mode="json")
        for role in ("target", "draft"):  # whoever attaches may do so from another directory
            config[role] = os.path.abspath(config[role]) if os.path.exists(config[role]) else config[role]
        workers = {"target": self.target} | ({"draft": self.draft.worker} if self.draft else {})
        taken = {role: worker.taken for role, worker in workers.items()}
        write_card(self.directory, self.target.address, config, taken)

    def alive(self, connected: bool) -> bool:
        return self.target is not None and self.target.alive

    def fate(self, otherwise: str) -> str:
        if self.target is not None:
            with contextlib.suppress(StartError):
                self.target.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
                return str(self.target.fate())
        return otherwise

    def lose(self) -> None:
        with self._ending:
            if self.target is not None:
                self.target.kill()
        self._end(_DRAFT_END_SECONDS)

    def close(self) -> None:
        """Also writes the trace of the workers' whole life, where there is to be one."""
        self._end(END_SECONDS)
        if self.config.trace:
            path, deadline = Path(self.config.trace), time.monotonic() + _LAST_WORDS_SECONDS
            with logged_not_raised() as self.untraced:
                while being_written(path) and time.monotonic() < deadline:  # the draft may be another process's
                    time.sleep(_LOOK_SECONDS)
                self._merge(path)

    def _merge(self, path: Path) -> None:
        """Leaves no parts behind."""
        parts = [part for part in part_paths(path) if part.stat().st_mtime >= self._began]
        try:
            if not all(part.stat().st_size for part in parts):
                raise TraceError(f"cannot write the trace {path}: a worker's part of it did not fit the disk")
            merge(path)
        except TraceError:
            for part in parts:
                part.unlink(missing_ok=True)
            raise

    def _end(self, seconds: float) -> None:
        """Once. A second thread waits until it is done. `seconds`: how long each has to end by itself."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            # The target first: it must not see its draft go before it knows that it is to end itself.
            workers = [w for w in (self.target, self.draft) if w is not None]
            for worker in workers:
                worker.close()
            for worker in workers:
                worker.end(seconds)
            shutil.rmtree(self.directory, ignore_errors=True)
