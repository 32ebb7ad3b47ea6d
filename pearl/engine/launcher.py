"""Launches an engine's workers as children of this process, and ends them.

`torchrun` has the launcher for engines under torchrun.
"""

import logging
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from pearl.cache import Progress
from pearl.config import EngineConfig, ModelRole
from pearl.engine.preflight import check
from pearl.engine.processes import END_SECONDS, DraftKeeper, Worker
from pearl.engine.registry import read_card, write_card
from pearl.errors import ConfigError, TraceError, TransportError
from pearl.trace.chrome import merge
from pearl.trace.recorder import being_written, part_paths, run_of
from pearl.transport.address import bind_address, check_bind, private_directory
from pearl.transport.keys import channel_keys
from pearl.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# After the target is lost, the draft may take this long to end by itself, while callers wait.
_DRAFT_END_SECONDS = 1.0
_PART_SECONDS = 5.0  # longest wait for the trace of a draft that another process launched
_LOOK_SECONDS = 0.1  # between two checks whether a trace is still being written


class Attached:
    """Stands in for a launcher if another process has launched the engine.

    Closing it does not end the engine. Raises `ConfigError` if `directory` has no running engine.
    """

    target = None
    draft = None
    alive = True  # assumed, because this process cannot see whether the target runs
    remedy = "Start an engine again, with `pearl serve` for example"

    def __init__(self, directory: Path) -> None:
        card = read_card(directory)
        if card is None:
            raise ConfigError(f"{directory} holds no running engine")
        self.config = EngineConfig(**card.config | {"trace": None})
        self.directory = directory
        self.notes: list[str] = []
        self._address = card.address

    def launch(self, progress: Progress) -> str:
        return self._address

    def wait_until_ready(self) -> float:
        return time.monotonic() + self.config.target_timeout

    def keep(self) -> None:
        pass

    def exit_cause(self, otherwise: str) -> str:
        return otherwise

    def lose(self) -> None:
        pass

    def close(self) -> None:
        pass


class LocalLauncher:
    """Launches an engine's workers as children of this process.

    Call `launch`, `wait_until_ready` and `keep` in this order, and `close` at the end, even if a call fails.

    Args:
        draft_elsewhere: whether another process launches the draft.

    Attributes:
        directory: the engine's directory, which has its sockets and keys. Only this user can access
            it.
        draft: watches and restarts the draft worker; None if this process does not launch a draft.
    """

    remedy = "Make a new engine"
    target: Worker

    def __init__(self, config: EngineConfig, draft_elsewhere: bool = False) -> None:
        self.config = config
        self.directory = private_directory()
        self._began = time.time()
        self.draft: DraftKeeper | None = None
        self._launched: list[Worker | DraftKeeper] = []
        self._roles: tuple[ModelRole, ...] = ("target",) if draft_elsewhere else config.roles
        self._ending = threading.RLock()
        self._has_ended = False

    def launch(self, progress: Progress) -> str:
        """Start the workers; return the address where the target listens.

        The models may still be loading when this returns.
        """
        check(self.config, self._roles, progress)
        self._deadline = time.monotonic() + self.config.startup_timeout
        address = bind_address(self.config.control, self.directory)
        check_bind(address, channel_keys(self.config.keys) is not None)
        self.target = Worker(self._settings("target", address), progress)
        self._launched.append(self.target)
        if address.endswith("*"):  # the target chooses a free port
            self.target.wait_for("bound", self._deadline)
            address = self.target.address
        if "draft" in self._roles:  # start it now, so that both workers import torch meanwhile
            self.draft = DraftKeeper(self._settings("draft", address), progress)
            self._launched.append(self.draft)
        self.target.wait_for("bound", self._deadline)
        return self.target.address

    def _settings(self, role: ModelRole, address: str) -> WorkerSettings:
        return WorkerSettings(
            role=role, config=self.config, address=address, directory=self.directory
        )

    def wait_until_ready(self) -> float:
        """Wait until the models are loaded; return the deadline for the target's answer.

        The deadline is a time of time.monotonic(). If a worker fails, its own error is raised; if
        it takes too long, `StartError` is raised.
        """
        self.target.wait_for("ready", self._deadline, self._check_draft)
        return self._deadline

    def _check_draft(self) -> None:
        """Raise the draft's error if the draft has ended.

        If the draft has ended only because the target ended first, raise the target's error.
        """
        if self.draft is not None and not self.draft.worker.alive:
            error = self.draft.worker.exit_error()
            if isinstance(error, TransportError) and self.target.is_gone():
                error = self.target.exit_error()
            raise error

    def keep(self) -> None:
        """From now on restart a failed draft, and let the user's other processes find the engine.

        Call this once the engine is ready.
        """
        if self.draft:
            self.draft.keep()
        places: dict[str, dict[str, str]] = {worker.role: worker.place for worker in self._workers}
        write_card(self.directory, self.target.address, self.config.located(), places)

    @property
    def _workers(self) -> list[Worker]:
        workers = [self.target]
        if self.draft is not None:
            workers.append(self.draft.worker)
        return workers

    @property
    def notes(self) -> list[str]:
        """Notes for the user about these models on these devices, each of one or two sentences."""
        return [note for worker in self._workers for note in worker.notes]

    @property
    def alive(self) -> bool:
        """Whether the target's process is running."""
        return self.target.alive

    def exit_cause(self, otherwise: str) -> str:
        """Return the target's last error if its process has ended; otherwise return `otherwise`."""
        if self.target.is_gone():
            return str(self.target.exit_error())
        return otherwise

    def lose(self) -> None:
        """End the workers at once, because the target can no longer be used.

        Any thread may call this, also repeatedly.
        """
        with self._ending:
            self.target.kill()
        self._end(_DRAFT_END_SECONDS)

    def close(self) -> None:
        """End the workers and remove their files. Then write the trace, if one was requested."""
        self._end(END_SECONDS)
        if self.config.trace:
            path = Path(self.config.trace)
            deadline = time.monotonic() + _PART_SECONDS
            # A draft that another process launched may still be writing its part.
            while being_written(self._parts(path)) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            try:
                self._merge(path)
            except TraceError as error:  # the generated texts are right without a trace
                log.error("no trace: %s", error)

    def _merge(self, path: Path) -> None:
        """Merge the workers' trace files into the file `path`.

        If the merge fails, remove the workers' files and any earlier trace at `path`, and raise
        `TraceError`.
        """
        parts = self._parts(path)
        try:
            if not all(part.stat().st_size for part in parts):
                raise TraceError(
                    f"cannot write the trace {path}: a worker's part of it did not fit the disk"
                )
            merge(path, str(self.directory))
        except TraceError:
            path.unlink(missing_ok=True)
            for part in parts:
                part.unlink(missing_ok=True)
            raise

    def _parts(self, trace: Path) -> list[Path]:
        """Return the parts of the trace that this engine's workers have written.

        Another engine may have been told to write its trace to the same file: its parts are left
        out.
        """
        parts = []
        for part in part_paths(trace):
            with suppress(FileNotFoundError):  # another engine may remove its parts at any time
                status = part.stat()
                is_ours = run_of(part) == str(self.directory)
                if not status.st_size:  # no run is stated, because the disk was full
                    is_ours = status.st_mtime >= self._began
                if is_ours:
                    parts.append(part)
        return parts

    def _end(self, seconds: float) -> None:
        """End the workers and remove the engine's directory. A second call does nothing.

        If another thread has made the first call, wait until that call returns.

        Args:
            seconds: how long each worker may take to end by itself.
        """
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
            # End the target first: a target that is still running would report a lost draft.
            for worker in self._launched:
                worker.close()
            for worker in self._launched:
                worker.end(seconds)
            shutil.rmtree(self.directory, ignore_errors=True)
