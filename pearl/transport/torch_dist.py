"""Rows over process groups, and torchrun's key-value store: the one file that imports torch.distributed.

Knows rows and ranks, not their purpose. Groups are made directly from their backend; the process's default group, which
belongs to its launcher, is not touched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as dist

from pearl.errors import ConfigError, TransportError
from pearl.transport.base import check_row

_TAG = 0
_NEVER = timedelta(days=1)  # a row may wait for its receiver as long as a request lasts
_POLL = 0.0001  # seconds between two looks at a CUDA event
_STORE_POLL = 0.1  # seconds


class ProcessGroupChannel:
    """A tensor channel over a group of two: rank 0 the target, rank 1 the draft. Rows go either way.

    A receive that expires kills the channel on both sides; the next one needs a new `name`.  One thread may receive
    while another sends or closes.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        store_path: Path,
        name: str,
        rank: int,
        vocab_size: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        """Waits for the other rank; raises `TransportError` if it does not come within `timeout` seconds.

        Args:
            store_path: a file in the engine's private directory, through which the two find each other.
            name: the same on both sides, and new for each group made over this file.
            device: of received rows; for NCCL this rank's own GPU.
            timeout: seconds that a `receive` may take.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._timeout = timeout
        self._dead = ""
        store = dist.PrefixStore(
            name, dist.FileStore(str(store_path), -1)
        )  # -1: keep the file for the next group
        try:
            self._group: _Gloo | _Nccl = _BACKENDS[backend](store, rank, device, timeout)
        except RuntimeError as error:
            raise TransportError(
                f"no {backend} group {name!r} with the other worker: {error}"
            ) from error
        # The first row each way makes NCCL connect, which blocks for most of a second: now, not in mid-text.
        if rank:
            self.send(torch.zeros(vocab_size))
        self.receive(1)
        if not rank:
            self.send(torch.zeros(vocab_size))

    def send(self, row: torch.Tensor) -> None:
        check_row(row, self._vocab_size)
        self._check_alive()
        try:
            self._group.send(row.detach())
        except RuntimeError as error:
            self._die(f"a row could not be sent: {error}", error)

    def receive(self, count: int) -> torch.Tensor:
        self._check_alive()
        # If a row that arrives is too short, its end must not pass for probabilities.
        rows = torch.full((count, self._vocab_size), torch.nan, device=self._group.device)
        try:
            self._group.receive(rows, time.monotonic() + self._timeout)
        except (RuntimeError, TimeoutError) as error:
            self._die(
                f"{count} announced rows did not come within {self._timeout} s: {error}", error
            )
        return rows.to(self._device)

    def close(self) -> None:
        """Abandon the channel at once; a thread closes the connection.

        NCCL first waits for started operations, with a peer that may be dead; gloo for a thread that holds a row.
        """
        if not self._dead:
            self._dead = "it was closed"
            Thread(target=self._group.close, name="pearl-rows-end", daemon=True).start()

    def _check_alive(self) -> None:
        if self._dead:
            raise TransportError(f"the tensor channel is dead: {self._dead}")

    def _die(self, reason: str, cause: Exception) -> None:
        self.close()
        self._dead = reason
        raise TransportError(reason) from cause


def _gloo(store: dist.Store, rank: int, timeout: float) -> Any:
    """A group of two over the loopback, for processes of one machine."""
    backend: Any = dist.ProcessGroupGloo  # torch's own stubs lack its options
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout)
    return backend(store, rank, 2, options)


def _nccl(store: dist.Store, rank: int, device: torch.device, timeout: float) -> Any:
    """A group of two GPUs of one machine."""
    os.environ.setdefault(
        "NCCL_SOCKET_IFNAME", "lo"
    )  # to meet; the data goes over links of its own
    # By default NCCL ends the process if an operation fails or its watchdog hangs, but the target must outlive its
    # draft. Receives have a deadline of their own.
    for handling in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        os.environ.setdefault(handling, "0")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = (
        _NEVER  # else NCCL's watchdog ends the process over a row that is never received
    )
    # NCCL's own rendezvous blocks without a deadline, so both ranks meet in the store first.
    store.set(f"rank{rank}", "here")
    store.wait(["rank0", "rank1"], timedelta(seconds=timeout))
    group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group


class _Gloo:
    """Through host memory, for two processes of one machine."""

    def __init__(self, store: dist.Store, rank: int, device: torch.device, timeout: float) -> None:
        self._group = _gloo(store, rank, timeout)
        self.device = torch.device("cpu")
        self._peer = 1 - rank
        self._error: RuntimeError | None = None
        # Gloo reads a row only when its receiver asks for it, and has no way to poll for that: a thread keeps each row
        # alive until then. A daemon, so that an exit does not wait for it.
        self._unsent: SimpleQueue[tuple[Any, torch.Tensor] | None] = SimpleQueue()
        self._keeper = Thread(target=self._keep, name="pearl-gloo-rows", daemon=True)
        self._keeper.start()

    def send(self, row: torch.Tensor) -> None:
        if self._error is not None:
            raise self._error
        row = row.cpu().contiguous()
        self._unsent.put((self._group.send([row], self._peer, _TAG), row))

    def receive(self, rows: torch.Tensor, deadline: float) -> None:
        works = [self._group.recv([row], self._peer, _TAG) for row in rows]
        for work in works:
            work.wait(
                timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            )  # 0 would mean forever

    def close(self) -> None:
        """Break the connection, so that the keeper and the peer stop waiting."""
        self._unsent.put(None)
        self._keeper.join(0.01)
        if (
            self._keeper.is_alive()
        ):  # it waits for a receiver; only an expired operation closes a gloo pair
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], self._peer, _TAG).wait(timedelta(milliseconds=1))
            self._keeper.join(1.0)

    def _keep(self) -> None:
        while (item := self._unsent.get()) is not None:
            try:
                item[0].wait(_NEVER)
            except RuntimeError as error:
                self._error = error


class _Nccl:
    """Between two GPUs, on a stream of its own, so that no forward waits for a row.

    Unproven: never run on a machine with two GPUs (tests marked `gpu`). Its kernels wait on the device until the other
    side reaches the same row, so only `--tensors nccl` uses it.
    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device, timeout: float) -> None:
        self.device = device
        self._peer = 1 - rank
        self._stream = torch.cuda.Stream(device)
        self._group = _nccl(store, rank, device, timeout)

    def send(self, row: torch.Tensor) -> None:
        row = row.to(self.device).contiguous()
        self._stream.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # which may still compute the row
        with torch.cuda.stream(self._stream):
            self._group.send([row], self._peer, _TAG)
        row.record_stream(self._stream)

    def receive(self, rows: torch.Tensor, deadline: float) -> None:
        torch.cuda.set_device(self.device)  # per thread, and another thread may have made the group
        self._stream.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # which may still use the memory
        with torch.cuda.stream(self._stream):
            for row in rows:
                self._group.recv(
                    [row], self._peer, _TAG
                ).wait()  # makes the stream wait, not this thread
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        rows.record_stream(self._stream)
        while not arrived.query():
            if time.monotonic() > deadline:
                raise TimeoutError("deadline exceeded")
            time.sleep(_POLL)

    def close(self) -> None:
        self._group.abort()


_BACKENDS: dict[str, type[_Gloo] | type[_Nccl]] = {"gloo": _Gloo, "nccl": _Nccl}


class TorchrunStore:
    """The store that torchrun keeps for its workers, through which ranks exchange addresses.

    Keys are prefixed with the run's id and its restart count, so a restarted run reads none of an earlier attempt.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, timeout: float = 30.0) -> None:
        """Connects within `timeout` seconds, else raises `TransportError`; outside torchrun `ConfigError`."""
        try:
            host = environment["MASTER_ADDR"]
            port = int(environment["MASTER_PORT"])
            rank = int(environment["RANK"])
            run = environment["TORCHELASTIC_RUN_ID"]
            restart = int(environment["TORCHELASTIC_RESTART_COUNT"])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"this was not started by torchrun: {error} is missing or no number"
            ) from None
        # With some rendezvous backends rank 0 hosts the store.
        keeps = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True"
        limit = timedelta(seconds=timeout)
        try:
            store = dist.TCPStore(
                host, port, None, keeps, limit, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:
            raise TransportError(
                f"torchrun's store at {host}:{port} does not answer: {error}"
            ) from error
        self._store = dist.PrefixStore(f"pearl/{run}/{restart}", store)
        self.gone = False  # whether torchrun has ended

    def set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise TransportError(
                f"torchrun's store is gone, {key!r} was not set: {error}"
            ) from error

    def peek(self, key: str) -> str | None:
        """The value of `key`, None if it is not set. Raises `TransportError` if the store is gone."""
        try:
            return (
                self._store.get(key).decode(errors="replace") if self._store.check([key]) else None
            )
        except RuntimeError as error:
            self.gone = True
            raise TransportError(
                f"torchrun's store is gone, {key!r} was not read: {error}"
            ) from error

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
