"""The same engine under torchrun: rank 0 is the front and launches the target, the last one launches the draft.

Where several ranks share the target, those between launch a worker of it each; they are on rank 0's host.

The ranks find each other through torchrun's own store.  torchrun takes the job down when one rank fails, so a rank is
only a launcher: a draft worker that dies is started again by its rank, and torchrun never hears of it.

Where the control channel has an address the ranks may be on two hosts: they share nothing but it and the keys.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.cache import Progress
from pearl.config import EngineConfig
from pearl.engine.launcher import LocalLauncher
from pearl.engine.processes import DraftKeeper, Worker
from pearl.errors import ConfigError, PearlError, StartError, TransportError, error_named
from pearl.transport.address import is_engine_directory, is_local, private_directory
from pearl.transport.keys import read_keys
from pearl.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from pearl.transport.torch_dist import TorchrunStore

log = logging.getLogger(__name__)

_ADDRESS, _DIRECTORY, _CLOSED, _FAILED = "address", "directory", "closed", "failed"
_POLL_SECONDS = 0.5
_TOLD_SECONDS = 5.0  # for a rank to notice that its worker is gone, and to say so


def rank() -> int | None:
    """This process's rank under torchrun with several processes; None otherwise."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return int(os.environ["RANK"])


def check_world(config: EngineConfig) -> None:
    """Raises `ConfigError` unless there is a rank for each worker."""
    world, targets = int(os.environ["WORLD_SIZE"]), config.target_tp
    ranks = targets + config.has_draft
    if world != ranks:
        shares = f"ranks 0 to {targets - 1} for the target" if targets > 1 else "rank 0 for the target"
        shares += f" and rank {targets} for the draft" if config.has_draft else ""
        remedy = f"Start it with --nproc-per-node {ranks}" if ranks > 1 else "Start `python -m pearl` directly"
        raise ConfigError(
            f"torchrun started {world} processes; PEARL takes {ranks} here: {shares}. {remedy}, or share "
            f"the target with --target-tp {world - config.has_draft}"
        )


def die_with_torchrun() -> None:
    """Ends this process when torchrun is gone, SIGKILL included; its worker follows, for its stdin closes."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="torchrun-watch").start()


def _store() -> TorchrunStore:
    from pearl.transport.torch_dist import TorchrunStore  # torch only where there is a torchrun

    return TorchrunStore()


class TorchrunLauncher:
    """Rank 0's: all workers but the target's first are launched by other ranks."""

    draft_pid = None
    draft_restarts = 0  # another rank's business

    def __init__(self, config: EngineConfig) -> None:
        self._store = _store()
        self._first = LocalLauncher(config, others_elsewhere=True)
        self.config, self.directory, self.remedy = config, self._first.directory, self._first.remedy

    @property
    def untraced(self) -> list[PearlError]:
        return self._first.untraced

    def launch(self, progress: Progress) -> str:
        self._store.set(_DIRECTORY, str(self.directory))  # now, for the target's ranks meet there
        address = self._first.launch(progress)
        self._store.set(_ADDRESS, address)
        return address

    def wait_until_ready(self) -> float:
        try:
            return self._first.wait_until_ready(self._check_others)
        except TransportError as error:
            raise self._blamed() or error from None

    def _check_others(self) -> None:
        if (why := self._store.peek(_FAILED)) is not None:
            raise _failure(why)

    def keep(self) -> None:
        self._first.keep()

    def alive(self, connected: bool) -> bool:
        return self._first.alive(connected)

    def fate(self, otherwise: str) -> str:
        found = self._first.fate(otherwise)  # first: it waits for what the target has to say of itself
        return str(self._blamed() or found)

    def _blamed(self) -> PearlError | None:
        """Where our rank of the target has only lost another one: what that one's launcher says of it."""
        target = self._first.target
        if self.config.target_tp > 1 and target is not None and isinstance(target.error, TransportError):
            with suppress(TransportError):
                return _failure(self._store.get(_FAILED, _TOLD_SECONDS))
        return None

    def lose(self) -> None:
        self._first.lose()
        self._tell_closed()

    def close(self) -> None:
        self._tell_closed()
        self._first.close()

    def _tell_closed(self) -> None:
        """To the other ranks, which then end their workers."""
        try:
            self._store.set(_CLOSED, "yes")
        except TransportError:
            log.debug("torchrun's store is gone already")


def serve(config: EngineConfig, rank: int, progress: Progress) -> None:
    """Every rank but 0: keeps its worker running until rank 0 closes the engine. Raises the worker's error at start."""
    if rank < config.target_tp:
        serve_follower(config, rank)
    else:
        serve_draft(config, progress)


def serve_follower(config: EngineConfig, rank: int) -> None:
    """Another rank of the target's, whose worker is not started again: all of them end together."""
    store = _store()
    with _told_to_rank_0(store, config):
        directory = _shared_directory(config, store)
        worker = Worker(WorkerSettings(role="target", rank=rank, config=config, directory=directory))
        try:
            while not _closed(store):
                if not worker.alive and not _closed(store):
                    with suppress(PearlError):  # its last words may still be on their way
                        worker.wait_for("gone", time.monotonic() + 1.0)
                    if isinstance(fate := worker.fate(), TransportError):
                        return  # it has only lost another rank
                    raise fate
        finally:
            worker.end()


def serve_draft(config: EngineConfig, progress: Progress) -> None:
    """The last rank: keeps a draft worker running until rank 0 closes the engine. Raises the draft's error at start.

    What the store says may be anybody's, for torchrun authenticates nobody: it is checked before it is used.
    """
    store = _store()
    with _told_to_rank_0(store, config):
        _check_keys(config)  # a missing file is told at once, not when rank 0 has loaded its model
        address = store.get(_ADDRESS, config.startup_timeout)
        with _directory(config, store, address) as directory:
            keeper = DraftKeeper(config, address, directory, progress)
            try:
                _wait_until_ready(keeper, store, config)
                keeper.keep()
                while not _closed(store):
                    pass
            finally:
                keeper.end()


def _check_keys(config: EngineConfig) -> None:
    if config.keys is not None:
        read_keys(Path(config.keys))


def _failure(told: str) -> PearlError:
    """What a rank has said in the store, as an error."""
    kind, _, message = told.partition(":")
    return error_named(kind)(message)


@contextmanager
def _told_to_rank_0(store: TorchrunStore, config: EngineConfig) -> Iterator[None]:
    """Why this rank fails: not every torchrun takes the other down with it, and rank 0 would wait in vain.

    On one host it is told once, by rank 0; this one then ends as if all were well, or torchrun would end rank 0 for it.
    """
    try:
        yield
    except PearlError as error:
        with suppress(TransportError):
            store.set(_FAILED, f"{type(error).__name__}:{error}")
            if config.one_host:
                log.info("%s", error)
                raise SystemExit(0) from None
        raise


@contextmanager
def _directory(config: EngineConfig, store: TorchrunStore, address: str) -> Iterator[Path]:
    """Rank 0's on the same host; on another one of this rank's own, removed at the end."""
    if config.one_host:
        directory = _shared_directory(config, store)
        if not is_local(address):
            raise StartError(_elsewhere(address))
        yield directory
    elif not address.startswith("tcp://"):
        raise StartError(f"rank 0 listens at {address}: give both ranks the same --control")
    else:
        directory = private_directory()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _shared_directory(config: EngineConfig, store: TorchrunStore) -> Path:
    """Rank 0's. Raises `StartError` where it is not on this host."""
    directory = Path(store.get(_DIRECTORY, config.startup_timeout))
    if not is_engine_directory(directory):
        raise StartError(_elsewhere(f"directory {directory}"))
    return directory


def _elsewhere(what: str) -> str:
    return (
        f"rank 0's {what} is not on this machine, or not this user's. The target's ranks share a host; for a draft on "
        "another give all ranks --control tcp://HOST:PORT, of rank 0's host, and --keys FILE (pearl keys FILE)"
    )


def _wait_until_ready(keeper: DraftKeeper, store: TorchrunStore, config: EngineConfig) -> None:
    deadline = time.monotonic() + config.startup_timeout
    while not keeper.worker.reached("ready") and not _closed(store):
        if not keeper.worker.alive or time.monotonic() > deadline:
            try:
                keeper.worker.wait_for("ready", time.monotonic() + 1.0)
            except TransportError:  # the target it talks to has failed, which rank 0 tells
                if not _closed(store):
                    raise


def _closed(store: TorchrunStore) -> bool:
    try:
        store.get(_CLOSED, _POLL_SECONDS)
    except TransportError:
        return store.gone
    return True
