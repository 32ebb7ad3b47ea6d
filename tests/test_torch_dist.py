"""Rows between two real processes over a process group, and torchrun's store with a real server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pearl.errors import ConfigError, LocalProtocolError, TransportError
from pearl.transport import torch_dist
from pearl.transport.torch_dist import ProcessGroupChannel, TorchrunStore

VOCAB = 2003
WAIT = 120.0  # seconds: a bound for a slow machine, never reached where all is well

# The draft's side of each test: `channel` is rank 1, `rows` what both sides know. A line on stdin lets it go on.
DRAFT = """
import sys, torch
from pathlib import Path
from pearl.errors import TransportError
from pearl.transport.torch_dist import ProcessGroupChannel
path, backend, name, device, timeout, vocab = sys.argv[1:7]
channel = ProcessGroupChannel(backend, Path(path), name, 1, int(vocab), torch.device(device), float(timeout))
rows = torch.rand(20, int(vocab), generator=torch.Generator().manual_seed(1)).to(device)
print("here", flush=True)
"""


def known_rows() -> torch.Tensor:
    return torch.rand(20, VOCAB, generator=torch.Generator().manual_seed(1))


# As a worker leaves whose launcher has gone. Gloo's own threads now and then abort a process that takes its time.
LEAVE = "\nsys.stdout.flush()\n__import__('os')._exit(0)"


class Pair:
    """This process as rank 0, and a child as rank 1 that runs `DRAFT` and then `script`."""

    def __init__(
        self,
        path: Path,
        script: str,
        backend: str = "gloo",
        timeout: float = WAIT,
        name: str = "one",
        devices: tuple[str, str] = ("cpu", "cpu"),
        ending: str = LEAVE,
    ) -> None:
        arguments = [str(path), backend, name, devices[1], str(WAIT), str(VOCAB)]
        self.draft = subprocess.Popen(
            [sys.executable, "-c", DRAFT + script + ending, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            start = ProcessGroupChannel(
                backend,
                path,
                name,
                0,
                VOCAB,
                torch.device(devices[0]),
                WAIT,  # type: ignore[arg-type]
            )
        except BaseException:
            self.stop()
            raise
        if not self._started():
            start.close()
            self.stop()
            raise AssertionError("the draft's side has ended in its start")
        start._timeout = timeout  # the start may be slow where the deadline under test is short
        self.channel = start

    def _started(self) -> bool:
        """Waits until the draft's side is made: this one is made earlier, and closing it would break the other's start.

        Reads no more than that line, since `said` reads past every buffer.
        """
        assert self.draft.stdout is not None
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self.draft.stdout.fileno(), 1)):
            line += byte
        return line == b"here\n"

    def go_on(self) -> None:
        assert self.draft.stdin is not None
        self.draft.stdin.write("\n")
        self.draft.stdin.flush()

    def said(self) -> str:
        """All that the draft printed; it must have ended by itself and well."""
        out, _ = self.draft.communicate(timeout=WAIT)
        assert self.draft.returncode == 0
        return out.strip()

    def stop(self) -> None:
        if self.draft.poll() is None:
            self.draft.kill()
        self.draft.communicate()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.channel.close()
        pair.stop()


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store"


class TestGloo:
    def test_rows_go_both_ways_and_wait_for_their_receiver(self, pairs: list[Pair], store_path: Path) -> None:
        """In order, bit for bit. The draft drafts on while the target is in a forward: a row overwritten or freed early
        would show. Gloo's default address may be reachable for others, and the default group is the launcher's.
        """
        psutil = pytest.importorskip("psutil")
        script = """
for row in rows:
    channel.send(row.clone())
print("sent", flush=True)
junk = [torch.full_like(rows, 7.0) for _ in range(20)]
sys.stdin.readline()
print(torch.equal(channel.receive(2), rows[:2]), torch.distributed.is_initialized())
"""
        pairs.append(Pair(store_path, script))
        channel, draft = pairs[0].channel, pairs[0].draft
        assert draft.stdout is not None
        assert draft.stdout.readline() == "sent\n"  # nothing has been received
        got = torch.cat([channel.receive(count) for count in (1, 7, 12)])
        assert torch.equal(got.view(torch.int32), known_rows().view(torch.int32))
        addresses = {connection.laddr.ip for connection in psutil.Process(draft.pid).net_connections("tcp")}
        assert addresses
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
        for row in (torch.zeros(VOCAB + 1), torch.zeros(VOCAB).double(), torch.zeros(1, VOCAB)):
            with pytest.raises(LocalProtocolError):
                channel.send(row)
        for row in known_rows()[:2]:
            channel.send(row)
        pairs[0].go_on()
        assert pairs[0].said() == "True False"
        assert not dist.is_initialized()

    def test_the_end_of_a_row_that_is_too_short_is_no_number(self, pairs: list[Pair], store_path: Path) -> None:
        """It was whatever stood in this process's memory, and was judged if that looked like probabilities."""
        script = "for _ in range(3): channel._group._group.send([torch.ones(3)], 0, 0).wait()\nsys.stdin.readline()"
        pairs.append(Pair(store_path, script))
        for _ in range(3):
            row = pairs[0].channel.receive(1)[0]
            assert row[:3].tolist() == [1.0] * 3
            assert row[3:].isnan().all()

    def test_a_receive_past_its_deadline_kills_the_channel_for_good(self, pairs: list[Pair], store_path: Path) -> None:
        """Rows that arrive later must not be taken for other tokens' rows. A new name makes a new group over the same
        file, in which the addresses of the dead one still are.
        """
        script = """
sys.stdin.readline()
try:
    for _ in range(1000):
        for row in rows: channel.send(row)
        import time; time.sleep(0.01)
    print("never noticed")
except TransportError:
    print("noticed")
"""
        pairs.append(Pair(store_path, script, timeout=0.3))
        channel = pairs[0].channel
        started = time.monotonic()
        with pytest.raises(TransportError, match=r"did not come within 0\.3 s"):
            channel.receive(1)
        assert time.monotonic() - started < WAIT / 2
        pairs[0].go_on()
        for _ in range(2):
            with pytest.raises(TransportError, match="dead"):
                channel.receive(1)
        with pytest.raises(TransportError, match="dead"):
            channel.send(torch.zeros(VOCAB))
        assert pairs[0].said() == "noticed"
        pairs.append(Pair(store_path, "channel.send(rows[3])\nsys.stdin.readline()", name="two"))
        assert torch.equal(pairs[1].channel.receive(1)[0], known_rows()[3])
        pairs[1].draft.kill()
        started = time.monotonic()
        with pytest.raises(TransportError):  # in bounded time: the draft is gone
            pairs[1].channel.receive(1)
        assert time.monotonic() - started < WAIT

    def test_closing_with_rows_unsent_leaves_no_thread_behind(self, pairs: list[Pair], store_path: Path) -> None:
        """Gloo's wait cannot be cancelled, so the thread that keeps the rows must be released in another way."""
        pairs.append(Pair(store_path, "sys.stdin.readline()"))
        pairs[0].channel.send(known_rows()[0])
        pairs[0].channel.close()
        pairs[0].channel.close()
        for thread in threading.enumerate():
            if thread.name == "pearl-gloo-rows":
                thread.join(WAIT)
                assert not thread.is_alive()
        with pytest.raises(TransportError, match="closed"):
            pairs[0].channel.receive(1)
        pairs[0].go_on()
        pairs[0].said()

    def test_a_peer_that_never_comes_and_an_unknown_backend(self, store_path: Path) -> None:
        cpu = torch.device("cpu")
        with pytest.raises(TransportError, match="no gloo group"):
            ProcessGroupChannel("gloo", store_path, "alone", 0, VOCAB, cpu, 0.5)
        with pytest.raises(ConfigError, match="pigeon"):
            ProcessGroupChannel("pigeon", store_path, "x", 0, VOCAB, cpu, 1.0)  # type: ignore[arg-type]


class Told:
    """A group that notes what is asked of it, and whose end takes as long as it is told to."""

    def __init__(self, *_: object) -> None:
        self.device, self.said, self.may_end = torch.device("cpu"), list[object](), threading.Event()

    def send(self, row: torch.Tensor) -> None:
        self.said.append(("send", row.shape, bool(row.any())))

    def receive(self, rows: torch.Tensor, deadline: float) -> None:
        self.said.append(("receive", *rows.shape))

    def close(self) -> None:
        self.said.append("close")
        self.may_end.wait()
        self.said.append("closed")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "_BACKENDS", {"nccl": Told})


def opened(path: Path, rank: int) -> tuple[ProcessGroupChannel, Told]:
    channel = ProcessGroupChannel("nccl", path, "one", rank, VOCAB, torch.device("cpu"), WAIT)
    assert isinstance(channel._group, Told)
    return channel, channel._group


@pytest.mark.usefixtures("told")
class TestAnyBackend:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_row_goes_each_way_when_it_is_opened(self, store_path: Path, rank: int) -> None:
        """NCCL connects at the first one, and blocks meanwhile: not amid a text."""
        sent, received = ("send", (VOCAB,), False), ("receive", 1, VOCAB)
        assert opened(store_path, rank)[1].said == ([sent, received] if rank else [received, sent])

    def test_giving_it_up_blocks_nobody(self, store_path: Path) -> None:
        """An abort may wait for what was begun with a peer that is dead; the target's loop must not."""
        channel, group = opened(store_path, 0)
        began = time.monotonic()
        channel.close()
        channel.close()
        assert time.monotonic() - began < WAIT / 2
        with pytest.raises(TransportError, match="dead"):
            channel.receive(1)
        group.may_end.set()
        end = time.monotonic() + WAIT
        while "closed" not in group.said and time.monotonic() < end:
            time.sleep(0.01)
        assert group.said[2:] == ["close", "closed"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")
class TestNccl:
    def test_rows_arrive_in_order_bit_for_bit(self, pairs: list[Pair], store_path: Path) -> None:
        script = "for row in rows: channel.send(row)\nsys.stdin.readline()"
        pairs.append(Pair(store_path, script, "nccl", devices=("cuda:0", "cuda:1")))
        got = torch.cat([pairs[0].channel.receive(count) for count in (1, 7, 12)]).cpu()
        assert torch.equal(got.view(torch.int32), known_rows().view(torch.int32))


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What torchrun tells its workers, with a real server behind it."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT), wait_for_workers=False)
    yield {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del server


class TestTorchrunStore:
    def test_what_one_rank_sets_the_other_gets(self, environment: dict[str, str]) -> None:
        """Now or later, and until it is set not for ever; a restarted run must not see the keys of this one."""
        one, other = TorchrunStore(environment | {"RANK": "0"}), TorchrunStore(environment)
        assert (one.rank, other.rank, other.world_size) == (0, 1, 2)
        one.set("address", "ipc:///tmp/é")
        assert other.get("address", WAIT) == "ipc:///tmp/é"
        with pytest.raises(TransportError, match="late"):
            other.get("late", 0.2)
        timer = threading.Timer(0.3, one.set, ["late", "value"])
        timer.start()
        assert other.get("late", WAIT) == "value"
        timer.join()
        for changed in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
            with pytest.raises(TransportError):
                TorchrunStore(environment | {changed: "7"}).get("address", 0.2)

    @pytest.mark.parametrize("missing", ["RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"])
    def test_outside_torchrun_it_says_what_is_missing(self, environment: dict[str, str], missing: str) -> None:
        del environment[missing]
        with pytest.raises(ConfigError, match=missing):
            TorchrunStore(environment)

    def test_a_store_that_is_not_there_is_an_error_in_bounded_time(self, environment: dict[str, str]) -> None:
        with pytest.raises(TransportError, match="does not answer"):
            TorchrunStore(environment | {"MASTER_PORT": "1"}, timeout=0.5)

    def test_rank_0_keeps_the_store_if_the_agent_does_not(self, environment: dict[str, str]) -> None:
        probe = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = str(probe.port)
        del probe
        own = environment | {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        keeper = TorchrunStore(own | {"RANK": "0"})
        TorchrunStore(own).set("key", "value")
        assert keeper.get("key", WAIT) == "value"
