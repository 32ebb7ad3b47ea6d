"""Launching an engine's workers and ending them: here, or under torchrun (`torchrun`)."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path

from pearl.cache import Progress
from pearl.config import EngineConfig
from pearl.engine.preflight import check
from pearl.engine.processes import END_SECONDS, DraftKeeper, Worker
from pearl.engine.registry import ROLES, write_card
from pearl.errors import PearlError, StartError, TraceError, TransportError
from pearl.trace.chrome import merge
from pearl.trace.recorder import being_written, part_paths
from pearl.transport.address import bind_address, check_bind, private_directory
from pearl.transport.keys import channel_keys
from pearl.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# for the draft to end by itself after the target is lost, while callers wait
_DRAFT_END_SECONDS = 1.0
_EXIT_SECONDS = 5.0  # for the last status line of a worker that exits
_LOOK_SECONDS = 0.1  # between two checks whether a trace is still being written


class LocalLauncher:
    """Starts what an engine needs, as children of this process, by its methods in this order.

    `close` is called whatever fails.

    Args:
        draft_elsewhere: another process launches the draft.

    Attributes:
        directory: the engine's, of sockets and keys, accessible to this user only.
        draft: the draft worker's keeper, if this process launches it.
    """

    def __init__(self, config: EngineConfig, draft_elsewhere: bool = False) -> None:
        self.config = config
        self.directory = private_directory()
        self._began = time.time()
        self.target: Worker | None = None
        self.draft: DraftKeeper | None = None
        self._draft_elsewhere = draft_elsewhere
        self._ending = threading.RLock()
        self._has_ended = False

    def launch(self, progress: Progress) -> str:
        """Starts the workers; returns the address where the target listens while they load their models."""
        config = self.config
        check(config, ("target",) if self._draft_elsewhere else config.roles, progress)
        self._deadline = time.monotonic() + config.startup_timeout
        address = bind_address(config.control, self.directory)
        check_bind(address, channel_keys(config.keys) is not None)
        settings = WorkerSettings(
            role="target", config=config, address=address, directory=self.directory
        )
        self.target = Worker(settings, progress)
        is_known = not address.endswith("*")  # else the target chooses a free port
        if is_known:
            self._launch_draft(address, progress)  # at once: both import torch meanwhile
        self.target.wait_for("bound", self._deadline)
        if not is_known:
            self._launch_draft(self.target.address, progress)
        return self.target.address

    def _launch_draft(self, address: str, progress: Progress) -> None:
        if self.config.has_draft and not self._draft_elsewhere:
            self.draft = DraftKeeper(self.config, address, self.directory, progress)

    def wait_until_ready(self) -> float:
        """Returns once the models are loaded, with the time.monotonic() by which the target must have answered.

        Raises the worker's own error if it fails, `StartError` if it is late.
        """
        assert self.target is not None
        while not self.target.reached("ready"):
            self._check_others()
            if self.draft and not self.draft.worker.alive:
                raise self._start_failure(self.target, self.draft.worker)
            try:
                self.target.wait_for("ready", min(self._deadline, time.monotonic() + 0.2))
            except StartError:
                if not self.target.alive:
                    raise self._final_error(self.target) from None
                if time.monotonic() > self._deadline:
                    raise
        return self._deadline

    def _check_others(self) -> None:
        """Raises the error of a draft that another process launches, if it has failed."""

    def _start_failure(self, target: Worker, draft: Worker) -> PearlError:
        """The draft's error, or the target's: a draft also ends because the target that it connects to failed."""
        draft.wait_for("gone", time.monotonic() + _EXIT_SECONDS)
        error = draft.exit_error()
        if isinstance(error, TransportError):
            with contextlib.suppress(StartError):
                return self._final_error(target)
        return error

    def _final_error(self, target: Worker) -> PearlError:
        """Why the target is gone. Raises `StartError` if it is not."""
        target.wait_for("gone", time.monotonic() + _EXIT_SECONDS)
        return target.exit_error()

    def keep(self) -> None:
        """The engine is ready: from now on a failed draft is restarted, and other fronts can find the engine."""
        assert self.target is not None
        if self.draft:
            self.draft.keep()
        config = self.config.model_dump(mode="json")
        for role in ROLES:
            if os.path.exists(config[role]):  # other fronts may run in another directory
                config[role] = os.path.abspath(config[role])
        places: dict[str, dict[str, str]] = {worker.role: worker.place for worker in self._workers}
        write_card(self.directory, self.target.address, config, places)

    @property
    def _workers(self) -> list[Worker]:
        workers = []
        if self.target is not None:
            workers.append(self.target)
        if self.draft is not None:
            workers.append(self.draft.worker)
        return workers

    @property
    def notes(self) -> list[str]:
        """What the user should know of these models on these devices, a sentence or two each."""
        return [note for worker in self._workers for note in worker.notes]

    @property
    def alive(self) -> bool:
        """Whether the target runs."""
        return self.target is not None and self.target.alive

    def exit_cause(self, otherwise: str) -> str:
        """Why the target is gone: its own last error, or `otherwise`."""
        if self.target is not None:
            with contextlib.suppress(StartError):
                return str(self._final_error(self.target))
        return otherwise

    def lose(self) -> None:
        """The target cannot be used any more: ends at once what was launched. From any thread, and repeatedly."""
        with self._ending:
            if self.target is not None:
                self.target.kill()
        self._end(_DRAFT_END_SECONDS)

    def close(self) -> None:
        """Ends what was launched and removes its files, also after `lose`; writes the trace of the whole run."""
        self._end(END_SECONDS)
        if self.config.trace:
            path = Path(self.config.trace)
            deadline = time.monotonic() + _EXIT_SECONDS
            # A draft of another process may still write its part.
            while being_written(path) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            try:
                self._merge(path)
            except TraceError as error:  # it does not make the texts wrong
                log.error("no trace: %s", error)

    def _merge(self, path: Path) -> None:
        """Merges the parts; if that fails, removes them and an earlier trace at `path`."""
        parts = [part for part in part_paths(path) if part.stat().st_mtime >= self._began]
        try:
            if not all(part.stat().st_size for part in parts):
                raise TraceError(
                    f"cannot write the trace {path}: a worker's part of it did not fit the disk"
                )
            merge(path)
        except TraceError:
            path.unlink(missing_ok=True)
            for part in parts:
                part.unlink(missing_ok=True)
            raise

    def _end(self, seconds: float) -> None:
        """Ends the workers once; a second thread waits until that is done.

        Args:
            seconds: how long each worker may take to end by itself.
        """
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
            # The target first: it must learn that it is to end before its draft goes.
            workers: list[Worker | DraftKeeper] = []
            if self.target is not None:
                workers.append(self.target)
            if self.draft is not None:
                workers.append(self.draft)
            for worker in workers:
                worker.close()
            for worker in workers:
                worker.end(seconds)
            shutil.rmtree(self.directory, ignore_errors=True)
