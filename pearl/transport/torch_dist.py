"""Sends rows between two GPUs over NCCL, and reads and writes torchrun's key-value store.

No other file imports torch.distributed. A row is a float32 tensor [vocab]; this file does not know
what it means. This file makes a process group directly from a backend. It leaves torch's default
group alone, because that group belongs to the program that runs this process.
"""

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from pearl.errors import ConfigError, TransportError
from pearl.transport.base import check_row

_TAG = 0
_NEVER = timedelta(days=1)  # a row may wait for its receiver as long as a request lasts
_POLL = 0.0001  # seconds between two looks at a CUDA event
_STORE_POLL = 0.1  # seconds


class ProcessGroupChannel:
    """A tensor channel over a process group of two: rank 0 is the target, rank 1 the draft.

    Rows go either way. If a receive misses its deadline, the channel is dead on both sides; a new
    channel needs a new `name`. One thread may receive while another sends or closes.
    """

    def __init__(
        self,
        store_path: Path,
        name: str,
        rank: int,
        vocab_size: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        """Wait for the other rank; raise `TransportError` if it does not come in `timeout` seconds.

        Args:
            store_path: a file in the engine's private directory, through which the two ranks find each other.
            name: the same on both sides, and new for each group made over this file.
            device: this rank's own GPU.
            timeout: seconds that a `receive` may take.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._timeout = timeout
        self._dead = ""
        # With -1 the file is kept for the next group.
        store = dist.PrefixStore(name, dist.FileStore(str(store_path), -1))
        try:
            self._group = NcclGroup(store, rank, device, timeout)
        except RuntimeError as error:
            raise TransportError(f"no group {name!r} with the other worker: {error}") from error
        # The first row each way makes NCCL connect, which blocks for most of a second: do that now, not during a text.
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
        rows = torch.full((count, self._vocab_size), torch.nan, device=self._device)
        try:
            self._group.receive(rows, time.monotonic() + self._timeout)
        except (RuntimeError, TimeoutError) as error:
            reason = f"{count} announced rows did not come within {self._timeout} s: {error}"
            self._die(reason, error)
        return rows

    def close(self) -> None:
        """Mark the channel as dead and return; a thread closes the group.

        Closing the group may block: NCCL first waits for operations that have started, and the peer may be dead.
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


class NcclGroup:
    """A group of two GPUs of one machine. It has a CUDA stream of its own, so that no forward waits for a row.

    This class has not been run on a machine with two GPUs yet. On such a machine, the tests marked
    `gpu` run it. While a row is sent or received, a kernel waits on the device until the other side
    takes part. Because this can block the device, the class is used only if the user asks for it
    with `--tensors nccl`.
    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device, timeout: float) -> None:
        self._device = device
        self._peer = 1 - rank
        self._stream = torch.cuda.Stream(device)
        # Over this interface the two ranks only meet; rows go over other links.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # By default NCCL ends the process if an operation fails or its watchdog hangs, but the target must outlive its
        # draft. Receives have a deadline of their own.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # With a shorter time, NCCL's watchdog would end the process if a row is never received.
        options._timeout = _NEVER
        # NCCL's own rendezvous blocks without a deadline, so both ranks meet in the store first.
        store.set(f"rank{rank}", "here")
        store.wait(["rank0", "rank1"], timedelta(seconds=timeout))
        self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(device)

    def send(self, row: torch.Tensor) -> None:
        row = row.to(self._device).contiguous()
        # The current stream may still compute the row.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._group.send([row], self._peer, _TAG)
        row.record_stream(self._stream)

    def receive(self, rows: torch.Tensor, deadline: float) -> None:
        # The device is set per thread, and another thread may have made the group.
        torch.cuda.set_device(self._device)
        # The current stream may still use the memory.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for row in rows:
                # Makes the stream wait, not this thread.
                self._group.recv([row], self._peer, _TAG).wait()
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        rows.record_stream(self._stream)
        while not arrived.query():
            if time.monotonic() > deadline:
                raise TimeoutError("deadline exceeded")
            time.sleep(_POLL)

    def close(self) -> None:
        self._group.abort()


class TorchrunStore:
    """The store that torchrun keeps for its workers, through which ranks exchange addresses.

    Keys are prefixed with the run's id and its restart count. So a restarted run does not read the
    addresses of an earlier attempt.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, timeout: float = 30.0) -> None:
        """Connect to the store.

        Raises `TransportError` if that fails within `timeout` seconds, and `ConfigError` if
        torchrun has not started this process.
        """
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
        """Return the value of `key`; None if it is not set.

        Raises `TransportError` if the store is gone.
        """
        try:
            if not self._store.check([key]):
                return None
            return self._store.get(key).decode(errors="replace")
        except RuntimeError as error:
            self.gone = True
            raise TransportError(
                f"torchrun's store is gone, {key!r} was not read: {error}"
            ) from error

    def get(self, key: str, timeout: float) -> str:
        """Wait until `key` is set, and return its value.

        Raises `TransportError` after `timeout` seconds. The method polls, because the store's own
        wait prints a warning to the terminal when it times out.
        """
        end = time.monotonic() + timeout
        while (value := self.peek(key)) is None:
            if time.monotonic() > end:
                raise TransportError(f"no rank has set {key!r} within {timeout} s")
            time.sleep(_STORE_POLL)
        return value
