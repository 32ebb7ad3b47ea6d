"""A front that asks for more than an engine has is refused, memory stays bounded and others are served."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from pearl.config import EngineConfig, RequestOptions, SamplingParams
from pearl.decoding.distribution import PackedRow
from pearl.engine import Engine
from pearl.errors import ConfigError, RequestError
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    DraftTokens,
    Error,
    Hello,
    Role,
    Submit,
    Welcome,
)
from pearl.protocol.scheduler import Scheduler
from pearl.spec.methods import MAX_WINDOW
from pearl.transport.codec import decode, encode
from pearl.transport.keys import read_keys, write_keys
from pearl.transport.zeromq import new_keys
from pearl.worker.fronts import MAX_REQUESTS, Fronts
from pearl.worker.settings import TargetSettings
from tests.conftest import BOUND, greedy_text
from tests.options import drawn_by, resolved
from tests.peers import stranger
from tests.replace import replace

CONTEXT = (1 << 20) + 2
SETTINGS = TargetSettings(EngineConfig(target="toy", draft="none"), 32, CONTEXT, b"")
SPEC = f"toy:vocab=32,alpha=0.5,context={CONTEXT}"
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
MIB = 1 << 20


def submit(tokens: int = 3, request: int = 1, stops: tuple[str, ...] = ()) -> Submit:
    return Submit(
        request, (1,) * tokens, tokens + 1, resolved("ar", sampling=drawn_by(), stop=stops)
    )


# ---- what is admitted ----


def fronts_of(slots: int = 1) -> Fronts:
    config = EngineConfig(target="toy", draft="none", slots=slots)
    return Fronts(lambda message, peer: None, replace(SETTINGS, config=config))


def refuse(asked: Submit, match: str, slots: int = 1) -> None:
    with pytest.raises(RequestError, match=match):
        fronts_of(slots).number(b"a", asked)


def test_the_requests_of_one_front_are_bounded() -> None:
    fronts = fronts_of()
    for _ in range(MAX_REQUESTS):
        fronts.number(b"a", submit())
    with pytest.raises(RequestError, match="try again later"):
        fronts.number(b"a", submit())
    fronts.number(b"b", submit())
    fronts.lose(b"a")
    fronts.number(b"a", submit())


def test_stop_strings_are_bounded() -> None:
    """Two thousand stops of a thousand characters took a second, again and again, in the loop that all share."""
    for stops in (("x",) * 65, ("x" * 1001,)):
        with pytest.raises(
            ConfigError, match="stop: at most 64 strings of at most 1000 characters"
        ):
            SamplingParams(stop=stops)


def test_a_wide_window_is_for_an_engine_of_one_slot() -> None:
    """One of 1024 tokens made another text wait for six seconds."""
    asked = replace(submit(), decoding=resolved("sd", "fixed", MAX_WINDOW + 1))
    fronts_of().number(b"a", asked)
    refuse(asked, "gamma 65 is more than 64", slots=2)
    decoding = RequestOptions(method="sd", window="fixed", gamma=MAX_WINDOW + 1)
    EngineConfig().check_options(decoding)
    with pytest.raises(ConfigError, match="gamma 65 is more than 64"):
        EngineConfig(slots=2).check_options(decoding)


# ---- whose turn it is ----


def test_fronts_take_turns() -> None:
    fronts = fronts_of()
    for peer in (b"a", b"b", b"c"):
        fronts.meet(peer, Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
    scheduler = Scheduler()
    for peer in (b"a", b"a", b"a", b"a", b"b", b"c"):
        scheduler.submit(fronts.number(peer, submit(request=7)))
    first = scheduler.admit()
    assert first is not None
    scheduler.release(first[1])
    assert scheduler.cancel(3), "the second that a waits for"
    assert not scheduler.cancel(3)
    order = []
    while (admitted := scheduler.admit()) is not None:
        order.append(admitted[0].request)
        scheduler.release(admitted[1])
    assert order == [5, 6, 2, 4], "of b, c, a and a"


# ---- a real one, flooded ----


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Over the loopback; slow enough to be in the middle of a text for a while."""
    write_keys(file := tmp_path_factory.mktemp("keys") / "keys", new_keys())
    more = {"control": "tcp://127.0.0.1:*", "keys": str(file)}
    with Engine(SPEC, "none", target_pace=0.03, startup_timeout=120, **more) as made:
        yield made


@contextmanager
def hostile(engine: Engine) -> Iterator[zmq.Socket[bytes]]:
    """A front that speaks the wire, has the key, and keeps no measure."""
    with stranger(read_keys(Path(engine.config.keys))) as peer:
        peer.connect(engine.target_worker.address)
        peer.send_multipart(encode(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0)))
        hears(peer, Welcome)
        yield peer


def hears(peer: zmq.Socket[bytes], kind: type) -> object:
    while peer.poll(BOUND * 1000):
        if isinstance(message := decode(peer.recv_multipart()), kind):
            return message
    raise AssertionError(f"no {kind.__name__} within {BOUND} s")


def test_a_front_that_floods_costs_bounded_memory_and_others_are_served(engine: Engine) -> None:
    """20 prompts of 4 MiB each, then 20,000 small ones: it gets an error, and a text in progress goes on."""
    process = psutil.Process(engine.target_worker.pid)
    with hostile(engine) as peer:
        with engine.stream([1, 2, 3], GREEDY, method="ar") as stream:
            next(iter(stream))
            before = most = process.memory_info().rss
            big = encode(submit(tokens=1 << 20))
            for _ in range(20):
                peer.send_multipart(big)
            for number in range(20_000):
                peer.send_multipart(encode(submit(request=number)))
            for _ in stream:
                most = max(most, process.memory_info().rss)
            assert stream.result.tokens == greedy_text([1, 2, 3], 60)
        assert hears(peer, Error).kind == "RequestError"
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:  # while what the flood has left is worked off
            most = max(most, process.memory_info().rss)
            time.sleep(0.05)
        assert most - before < 400 * MIB, f"{(most - before) / MIB:.0f} MiB more"
    with Engine.attach(engine.directory) as other:
        assert other.generate([[1, 2, 3]], GREEDY, method="ar")[0].tokens == greedy_text(
            [1, 2, 3], 60
        )


DEEP = b"\xdc\x08\x00" * 1020 + b"\x01"
ROWS = DraftTokens(1, 0, 0, (1,) * 2048, rows=(PackedRow(b"\0\0\x80\x3f", ids=b"\1\0\0\0"),) * 2048)
FLOODS = {
    "nested headers": [DEEP],
    "no msgpack": [b"\xc1"],
    "another's rows": encode(ROWS),
}


@pytest.mark.parametrize("frames", FLOODS.values(), ids=FLOODS)
def test_one_front_does_not_stop_another(engine: Engine, frames: list[bytes]) -> None:
    def flood() -> None:
        for _ in range(100):
            for _ in range(20):
                peer.send_multipart(frames)
            time.sleep(0.005)

    with hostile(engine) as peer, ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        assert engine.generate([[1, 2, 3]], GREEDY, method="ar")[0].tokens == greedy_text(
            [1, 2, 3], 60
        )
        flooding.result()
