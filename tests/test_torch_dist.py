"""Rows between two workers, and torchrun's store with a real server."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from pearl.errors import ConfigError, LocalProtocolError, TransportError
from pearl.transport import torch_dist
from pearl.transport.torch_dist import ProcessGroupChannel, TorchrunStore
from tests.conftest import eventually

VOCAB = 2003
WAIT = 120.0  # seconds: a bound for a slow machine, never reached where all is well

Ends = Callable[..., tuple[ProcessGroupChannel, ProcessGroupChannel]]


def known_rows() -> torch.Tensor:
    return torch.rand(20, VOCAB, generator=torch.Generator().manual_seed(1))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int32), other.view(torch.int32))


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def ends(store_path: Path) -> Iterator[Ends]:
    """Makes both ends of a channel, the target's and the draft's, which meet as those of two processes do."""
    made: list[ProcessGroupChannel] = []

    def make(devices: Sequence[str] = ("cpu", "cpu"), timeout: float = WAIT) -> Any:
        def end(rank: int) -> ProcessGroupChannel:
            device = torch.device(devices[rank])
            return ProcessGroupChannel(store_path, "one", rank, VOCAB, device, timeout)

        with ThreadPoolExecutor(2) as pool:
            pair = list(pool.map(end, (0, 1)))
        made.extend(pair)
        return pair

    yield make
    for channel in made:
        channel.close()


class PairedGroup:
    """A group of two in one process."""

    def __init__(self, queues: Sequence[SimpleQueue[torch.Tensor]], rank: int) -> None:
        self._arrivals = queues[rank]
        self.departures = queues[1 - rank]

    def send(self, row: torch.Tensor) -> None:
        self.departures.put(row)

    def receive(self, rows: torch.Tensor, deadline: float) -> None:
        for row in rows:
            try:
                arrived = self._arrivals.get(timeout=max(deadline - time.monotonic(), 0.0))
            except Empty:
                raise TimeoutError("deadline exceeded") from None
            row[: len(arrived)] = arrived

    def close(self) -> None:
        pass


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[PairedGroup]:
    """In place of NCCL's, in the order in which they are made."""
    queues: list[SimpleQueue[torch.Tensor]] = [SimpleQueue(), SimpleQueue()]
    made: list[PairedGroup] = []

    def make(store: object, rank: int, device: object, timeout: float) -> PairedGroup:
        made.append(PairedGroup(queues, rank))
        return made[-1]

    monkeypatch.setattr(torch_dist, "NcclGroup", make)
    return made


class TestRows:
    @pytest.mark.usefixtures("groups")
    def test_rows_go_both_ways_and_only_as_they_are_declared(self, ends: Ends) -> None:
        """In order, bit for bit; and the default group is the launcher's."""
        target, draft = ends()
        for row in known_rows():
            draft.send(row.clone())
        assert same_bits(torch.cat([target.receive(count) for count in (1, 7, 12)]), known_rows())
        for row in (torch.zeros(VOCAB + 1), torch.zeros(VOCAB).double(), torch.zeros(1, VOCAB)):
            with pytest.raises(LocalProtocolError):
                target.send(row)
        for row in known_rows()[:2]:
            target.send(row)
        assert same_bits(draft.receive(2), known_rows()[:2])
        assert not dist.is_initialized()

    def test_the_end_of_a_row_that_is_too_short_is_no_number(
        self, ends: Ends, groups: list[PairedGroup]
    ) -> None:
        """It was whatever stood in this process's memory, and was judged if that looked like probabilities."""
        target, _ = ends()
        for queue in {group.departures for group in groups}:
            queue.put(torch.ones(3))
        row = target.receive(1)[0]
        assert row[:3].tolist() == [1.0] * 3
        assert row[3:].isnan().all()

    @pytest.mark.usefixtures("groups")
    def test_a_receive_past_its_deadline_kills_the_channel_for_good(self, ends: Ends) -> None:
        """Rows that arrive later must not be taken for other tokens' rows."""
        target, draft = ends(timeout=0.3)
        with pytest.raises(TransportError, match=r"did not come within 0\.3 s"):
            target.receive(1)
        draft.send(known_rows()[0])
        for act in (lambda: target.receive(1), lambda: target.send(torch.zeros(VOCAB))):
            with pytest.raises(TransportError, match="dead"):
                act()

    def test_a_peer_that_never_comes(
        self, store_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def alone(store: dist.Store, rank: int, device: object, timeout: float) -> PairedGroup:
            store.set(f"rank{rank}", "here")
            store.wait(["rank0", "rank1"], timedelta(seconds=timeout))
            raise AssertionError("nobody came")

        monkeypatch.setattr(torch_dist, "NcclGroup", alone)
        with pytest.raises(TransportError, match="no group 'alone' with the other worker"):
            ProcessGroupChannel(store_path, "alone", 0, VOCAB, torch.device("cpu"), 0.5)


class NotingGroup:
    """A group that notes what is asked of it, and whose end takes as long as it is told to."""

    made: ClassVar[list["NotingGroup"]] = []

    def __init__(self, *_: object) -> None:
        NotingGroup.made.append(self)
        self.device, self.said, self.may_end = (
            torch.device("cpu"),
            list[object](),
            threading.Event(),
        )

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
    monkeypatch.setattr(torch_dist, "NcclGroup", NotingGroup)


def opened(path: Path, rank: int) -> tuple[ProcessGroupChannel, NotingGroup]:
    channel = ProcessGroupChannel(path, "one", rank, VOCAB, torch.device("cpu"), WAIT)
    return channel, NotingGroup.made.pop()


@pytest.mark.usefixtures("told")
class TestOpeningAndClosing:
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
        eventually(lambda: "closed" in group.said)
        assert group.said[2:] == ["close", "closed"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")
class TestNccl:
    def test_rows_arrive_in_order_bit_for_bit(self, ends: Ends) -> None:
        target, draft = ends(devices=("cuda:0", "cuda:1"))
        for row in known_rows():
            draft.send(row.to("cuda:1"))
        assert same_bits(torch.cat([target.receive(count) for count in (1, 7, 12)]), known_rows())


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What torchrun tells its workers, with a real server behind it."""
    server = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=WAIT), wait_for_workers=False
    )
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
    def test_outside_torchrun_it_says_what_is_missing(
        self, environment: dict[str, str], missing: str
    ) -> None:
        del environment[missing]
        with pytest.raises(ConfigError, match=missing):
            TorchrunStore(environment)

    def test_a_store_that_is_not_there_is_an_error_in_bounded_time(
        self, environment: dict[str, str]
    ) -> None:
        with pytest.raises(TransportError, match="does not answer"):
            TorchrunStore(environment | {"MASTER_PORT": "1"}, timeout=0.5)

    def test_rank_0_keeps_the_store_if_the_agent_does_not(
        self, environment: dict[str, str]
    ) -> None:
        probe = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = str(probe.port)
        del probe
        own = environment | {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        keeper = TorchrunStore(own | {"RANK": "0"})
        TorchrunStore(own).set("key", "value")
        assert keeper.get("key", WAIT) == "value"
