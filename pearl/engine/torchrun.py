"""An engine under torchrun: rank 0 is the user's process and launches the target; rank 1 the draft.

The ranks find each other through torchrun's store. A rank does not hold its model itself, but
launches a worker process. So a dead draft can be restarted, whereas torchrun would end the whole
job if a rank failed. If the control channel is a TCP address, the ranks may run on two hosts, which
share only the address and the keys.
"""

from __future__ import annotations

import logging
import os
import platform
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
from pearl.spec.control import is_remote
from pearl.transport.address import is_engine_directory, is_local, private_directory
from pearl.transport.keys import read_keys
from pearl.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from pearl.transport.torch_dist import TorchrunStore

log = logging.getLogger(__name__)

# Keys in torchrun's store.
_ADDRESS = "address"
_DIRECTORY = "directory"
_CLOSED = "closed"
_FAILED = "failed"

_POLL_SECONDS = 0.5


def rank() -> int | None:
    """Return this process's rank if torchrun started several processes; None otherwise."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return int(os.environ["RANK"])


def check_world(config: EngineConfig) -> None:
    """Raise `ConfigError` unless torchrun started exactly two processes, and the engine has a draft."""
    world = int(os.environ["WORLD_SIZE"])
    if world != 2 or not config.has_draft:
        remedy = "Start `python -m pearl` directly"
        if config.has_draft:
            remedy = "Start it with --nproc-per-node 2"
        raise ConfigError(
            f"torchrun started {world} processes; PEARL takes one for the target and one for the "
            f"draft, however many devices share a model. {remedy}"
        )


def die_with_torchrun() -> None:
    """From now on, end this process once torchrun is gone, even if torchrun was killed by SIGKILL.

    The worker then ends too, because its stdin closes.
    """
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
    """Launches the target on rank 0, while rank 1 launches the draft (see `serve`)."""

    def __init__(self, config: EngineConfig) -> None:
        self._store = _store()
        super().__init__(config, draft_elsewhere=True)

    def launch(self, progress: Progress) -> str:
        address = super().launch(progress)
        self._store.set(_DIRECTORY, str(self.directory))
        self._store.set(_ADDRESS, address)
        return address

    def _check_draft(self) -> None:
        failure = self._store.peek(_FAILED)
        if failure is not None:
            kind, _, message = failure.partition(":")
            raise error_named(kind)(message)

    def lose(self) -> None:
        super().lose()
        self._report_closed()

    def close(self) -> None:
        self._report_closed()
        super().close()

    def _report_closed(self) -> None:
        """Tell the other rank that the engine is closed, so that the other rank ends its worker."""
        try:
            self._store.set(_CLOSED, "yes")
        except TransportError:
            log.debug("torchrun's store is gone already")


def serve(config: EngineConfig, progress: Progress) -> None:
    """Run the draft on rank 1 until rank 0 closes the engine.

    Raises the worker's error if the worker does not start. torchrun does not authenticate peers, so
    values from its store are checked before they are used.
    """
    store = _store()
    with _reported_to_rank_0(store, config):
        if config.keys is not None:
            read_keys(Path(config.keys))  # fail now rather than after rank 0 has loaded its model
        address = store.get(_ADDRESS, config.startup_timeout)
        with draft_directory(config, store, address) as directory:
            settings = WorkerSettings(
                role="draft",
                config=config,
                address=address,
                directory=directory,
                run=store.get(_DIRECTORY, config.startup_timeout),
            )
            keeper = DraftKeeper(settings, progress)
            try:
                _wait_until_ready(keeper.worker, store, config)
                for note in keeper.worker.notes:
                    log.warning("%s", note)
                keeper.keep()
                while not _is_closed(store):
                    pass
            finally:
                keeper.end()


@contextmanager
def _reported_to_rank_0(store: TorchrunStore, config: EngineConfig) -> Iterator[None]:
    """Report an error of this rank to rank 0, which would otherwise wait for the draft in vain.

    torchrun does not always end rank 0 when this rank fails. On one host, rank 0 prints the error,
    and this rank exits with status 0. With any other status, torchrun might end rank 0 before it
    prints.
    """
    try:
        yield
    except PearlError as error:
        where = "" if config.one_host else f"on the draft's host, {platform.node()}: "
        with suppress(TransportError):
            store.set(_FAILED, f"{type(error).__name__}:{where}{error}")
            if config.one_host:
                log.info("%s", error)
                raise SystemExit(0) from None
        raise


@contextmanager
def draft_directory(config: EngineConfig, store: TorchrunStore, address: str) -> Iterator[Path]:
    """Yield the directory for the draft's files.

    If rank 0 is on the same host, this is the directory of rank 0. Otherwise it is a new directory,
    which is removed at the end. Raises `StartError` if rank 0 is not where the configuration says.
    """
    if config.one_host:
        directory = Path(store.get(_DIRECTORY, config.startup_timeout))
        if not is_engine_directory(directory) or not is_local(address):
            raise StartError(
                f"rank 0's directory {directory} or address {address} is not on this machine, or "
                "not this user's. For a draft on another host give both ranks --control "
                "tcp://HOST:PORT, of rank 0's host, and --keys FILE (pearl keys FILE)"
            )
        yield directory
    elif not is_remote(address):
        raise StartError(f"rank 0 listens at {address}: give both ranks the same --control")
    else:
        directory = private_directory()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _wait_until_ready(worker: Worker, store: TorchrunStore, config: EngineConfig) -> None:
    """Wait until the draft is ready, or until rank 0 has closed the engine."""

    def check() -> None:
        if _is_closed(store):
            raise TransportError("rank 0 has closed the engine")

    try:
        worker.wait_for("ready", time.monotonic() + config.startup_timeout, check)
    except TransportError:
        # If rank 0 has closed the engine, it reports the cause, such as a target that failed.
        if not _is_closed(store):
            raise


def _is_closed(store: TorchrunStore) -> bool:
    """Return whether rank 0 has closed the engine, or torchrun's store is gone.

    Waits up to `_POLL_SECONDS` for this to happen.
    """
    try:
        store.get(_CLOSED, _POLL_SECONDS)
    except TransportError:
        return store.gone
    return True
