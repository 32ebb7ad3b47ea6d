"""torchrun's store, with a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from pearl.errors import ConfigError, TransportError
from pearl.transport.torch_dist import TorchrunStore

WAIT = 120.0  # seconds: a bound for a slow machine, never reached where all is well


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
