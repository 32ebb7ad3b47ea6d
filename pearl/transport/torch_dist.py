"""torchrun's key-value store: the one file that imports torch.distributed.

Knows ranks, not their purpose. The process's default group, which belongs to its launcher, is not touched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from pearl.errors import ConfigError, TransportError

_STORE_POLL = 0.1  # seconds


class TorchrunStore:
    """The store that torchrun keeps for its workers, through which ranks exchange addresses.

    Keys are prefixed with the run's id and its restart count, so a restarted run reads none of an earlier attempt.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, timeout: float = 30.0) -> None:
        """Connects within `timeout` seconds, else raises `TransportError`; outside torchrun `ConfigError`."""
        try:
            host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            rank = int(environment["RANK"])
            run, restart = environment["TORCHELASTIC_RUN_ID"], int(environment["TORCHELASTIC_RESTART_COUNT"])
        except (KeyError, ValueError) as error:
            raise ConfigError(f"this was not started by torchrun: {error} is missing or no number") from None
        # With some rendezvous backends rank 0 hosts the store.
        keeps = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True"
        limit = timedelta(seconds=timeout)
        try:
            store = dist.TCPStore(host, port, None, keeps, limit, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            raise TransportError(f"torchrun's store at {host}:{port} does not answer: {error}") from error
        self._store = dist.PrefixStore(f"pearl/{run}/{restart}", store)
        self.gone = False  # whether torchrun has ended

    def set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise TransportError(f"torchrun's store is gone, {key!r} was not set: {error}") from error

    def peek(self, key: str) -> str | None:
        """The value of `key`, None if it is not set. Raises `TransportError` if the store is gone."""
        try:
            return self._store.get(key).decode(errors="replace") if self._store.check([key]) else None
        except RuntimeError as error:
            self.gone = True
            raise TransportError(f"torchrun's store is gone, {key!r} was not read: {error}") from error

    def get(self, key: str, timeout: float) -> str:
        """The value of `key`, once it is set. Raises `TransportError` after `timeout` seconds.

        It polls: the store's own wait prints a warning to the terminal when it times out.
        """
        end = time.monotonic() + timeout
        while (value := self.peek(key)) is None:
            if time.monotonic() > end:
                raise TransportError(f"no rank has set {key!r} within {timeout} s")
            time.sleep(_STORE_POLL)
        return value
