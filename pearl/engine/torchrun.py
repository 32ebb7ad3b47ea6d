"""An engine under torchrun: rank 0 is the front and launches the target, the last rank launches the draft.

If several ranks share the target, those between launch a worker of it each, on rank 0's host. Ranks find each other
through torchrun's store. Each rank is only a launcher: it restarts a dead draft without failing itself, at which
torchrun would end the whole job. With an address as control channel the ranks may be on two hosts, which share only the
address and the keys.
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
from pearl.spec.transports import is_remote
from pearl.transport.address import is_engine_directory, is_local, private_directory
from pearl.transport.keys import read_keys
from pearl.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from pearl.transport.torch_dist import TorchrunStore

log = logging.getLogger(__name__)

_ADDRESS, _DIRECTORY, _CLOSED, _FAILED = "address", "directory", "closed", "failed"  # keys in the store
_POLL_SECONDS = 0.5
_REPORT_SECONDS = 5.0  # for a rank to notice that its worker is gone and report it


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
    from pearl.transport.torch_dist import TorchrunStore  # imports torch: only under torchrun

    return TorchrunStore()


class TorchrunLauncher(LocalLauncher):
    """Rank 0's: other ranks launch all workers but the target's first."""

    def __init__(self, config: EngineConfig) -> None:
        self._store = _store()
        super().__init__(config, others_elsewhere=True)

    def launch(self, progress: Progress) -> str:
        self._store.set(_DIRECTORY, str(self.directory))  # first, for the target's ranks meet there
        address = super().launch(progress)
        self._store.set(_ADDRESS, address)
        return address

    def wait_until_ready(self) -> float:
        try:
            return super().wait_until_ready()
        except TransportError as error:
            raise self._error_elsewhere() or error from None

    def _check_others(self) -> None:
        if (why := self._store.peek(_FAILED)) is not None:
            raise _failure(why)

    def exit_cause(self, otherwise: str) -> str:
        found = super().exit_cause(otherwise)  # first: it waits for the target's last status line
        return str(self._error_elsewhere() or found)

    def _error_elsewhere(self) -> PearlError | None:
        """If our rank of the target has only lost another one: the error that the other's launcher reports."""
        target = self.target
        if self.config.target_tp > 1 and target is not None and isinstance(target.error, TransportError):
            with suppress(TransportError):
                return _failure(self._store.get(_FAILED, _REPORT_SECONDS))
        return None

    def lose(self) -> None:
        super().lose()
        self._report_closed()

    def close(self) -> None:
        self._report_closed()
        super().close()

    def _report_closed(self) -> None:
        """To the other ranks, which then end their workers."""
        try:
            self._store.set(_CLOSED, "yes")
        except TransportError:
            log.debug("torchrun's store is gone already")


def serve(config: EngineConfig, rank: int, progress: Progress) -> None:
    """Every rank but 0: keeps its worker running until rank 0 closes the engine. Raises the worker's start error."""
    store = _store()
    with _reported_to_rank_0(store, config):
        if rank < config.target_tp:
            _serve_follower(config, rank, store)
        else:
            _serve_draft(config, progress, store)


def _serve_follower(config: EngineConfig, rank: int, store: TorchrunStore) -> None:
    """Another rank of the target. Its worker is not restarted: all ranks of a model end together."""
    directory = _shared_directory(config, store)
    worker = Worker(WorkerSettings(role="target", rank=rank, config=config, directory=directory))
    try:
        while not _is_closed(store):
            if not worker.alive and not _is_closed(store):
                with suppress(PearlError):  # its last status line may still arrive
                    worker.wait_for("gone", time.monotonic() + 1.0)
                error = worker.exit_error()
                if isinstance(error, TransportError):
                    return  # it has only lost another rank
                raise error
    finally:
        worker.end()


def _serve_draft(config: EngineConfig, progress: Progress, store: TorchrunStore) -> None:
    """The last rank. torchrun authenticates nobody, so what the store holds is checked before it is used."""
    if config.keys is not None:
        read_keys(Path(config.keys))  # fails now rather than after rank 0 has loaded its model
    address = store.get(_ADDRESS, config.startup_timeout)
    with _directory(config, store, address) as directory:
        keeper = DraftKeeper(config, address, directory, progress)
        try:
            _wait_until_ready(keeper, store, config)
            keeper.keep()
            while not _is_closed(store):
                pass
        finally:
            keeper.end()


def _failure(report: str) -> PearlError:
    """A rank's report in the store as an error."""
    kind, _, message = report.partition(":")
    return error_named(kind)(message)


@contextmanager
def _reported_to_rank_0(store: TorchrunStore, config: EngineConfig) -> Iterator[None]:
    """Report why this rank fails: not every torchrun then ends rank 0, which would wait in vain.

    On one host rank 0 prints the error; this rank exits with 0, or torchrun would end rank 0 before that.
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
    """Rank 0's on the same host; on another host one of this rank's own, removed at the end."""
    if config.one_host:
        directory = _shared_directory(config, store)
        if not is_local(address):
            raise _not_here(address)
        yield directory
    elif not is_remote(address):
        raise StartError(f"rank 0 listens at {address}: give both ranks the same --control")
    else:
        directory = private_directory()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _shared_directory(config: EngineConfig, store: TorchrunStore) -> Path:
    """Rank 0's. Raises `StartError` if it is not on this host."""
    directory = Path(store.get(_DIRECTORY, config.startup_timeout))
    if not is_engine_directory(directory):
        raise _not_here(f"directory {directory}")
    return directory


def _not_here(what: str) -> StartError:
    return StartError(
        f"rank 0's {what} is not on this machine, or not this user's. The target's ranks share a host; for a draft on "
        "another give all ranks --control tcp://HOST:PORT, of rank 0's host, and --keys FILE (pearl keys FILE)"
    )


def _wait_until_ready(keeper: DraftKeeper, store: TorchrunStore, config: EngineConfig) -> None:
    deadline = time.monotonic() + config.startup_timeout
    while not keeper.worker.reached("ready") and not _is_closed(store):
        if not keeper.worker.alive or time.monotonic() > deadline:
            try:
                keeper.worker.wait_for("ready", time.monotonic() + 1.0)
            except TransportError:  # the target that it connects to has failed, which rank 0 reports
                if not _is_closed(store):
                    raise


def _is_closed(store: TorchrunStore) -> bool:
    """Whether rank 0 has closed the engine; waits a moment for that."""
    try:
        store.get(_CLOSED, _POLL_SECONDS)
    except TransportError:
        return store.gone
    return True
