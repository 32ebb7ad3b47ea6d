"""Target and draft on two hosts, as `launch/two_hosts.sh` starts them: two network namespaces with one link between.

Needs root and iproute2, and is skipped elsewhere.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL

import pytest

from pearl.config import EngineConfig, RequestOptions, SamplingParams
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.trace import chrome
from pearl.trace.reading import read
from pearl.trace.report import report
from pearl.transport.keys import write_keys
from pearl.transport.zeromq import new_keys
from tests.conftest import HAS_NAMESPACES, eventually
from tests.screen import home as temporary
from tests.virtual import emulated

__all__ = ["temporary"]  # a fixture
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SPEC = "toy:vocab=32,alpha=0.5"
PLAIN = [
    "--look-ahead",
    "0",
    "--siblings",
    "0",
]  # otherwise the target would not wait for its draft
PAIR = ["--target", SPEC, "--draft", SPEC, "--method", "pearl", *PLAIN]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


def tunnel(name: str) -> int:
    """The other end of an interface `wire` in the namespace `name`: what it sends is read here."""
    device, own = os.open("/dev/net/tun", os.O_RDWR), f"pt{os.getpid()}"
    fcntl.ioctl(
        device, 0x400454CA, struct.pack("16sH22x", own.encode(), 0x1001)
    )  # TUNSETIFF; IFF_TUN, IFF_NO_PI
    ip("link", "set", own, "netns", name, "name", "wire")
    return device


class Way(threading.Thread):
    """One way of a link that delays packets, limits bytes a second, and while `is_cut` loses all."""

    is_cut = has_ended = False

    def __init__(self, source: int, sink: int, delay: float, rate: float) -> None:
        super().__init__(daemon=True)
        self._source, self._sink, self._delay, self._rate = source, sink, delay, rate
        self.start()

    def run(self) -> None:
        packets: deque[tuple[float, bytes]] = deque()  # each with the time when it arrives
        free = 0.0  # when the last one has left
        while not self.has_ended:
            left = max(packets[0][0] - time.monotonic(), 0) if packets else 0.1
            room = (
                [self._source] if len(packets) < 1000 else []
            )  # the rest waits in the interface, which drops some
            if select.select(room, [], [], left)[0]:
                packet = os.read(self._source, 1 << 16)
                free = max(free, time.monotonic()) + len(packet) / self._rate
                packets.extend([] if self.is_cut else [(free + self._delay, packet)])
            while packets and packets[0][0] <= time.monotonic():
                with suppress(OSError):  # the other interface may be down
                    os.write(self._sink, packets.popleft()[1])


class Hosts:
    """Two namespaces, each with an interface `wire`: 10.77.0.1 and 10.77.0.2. `stop` removes all of it."""

    def __init__(self, environment: dict[str, str], keys: Path) -> None:
        self._environment, self._keys = environment, keys
        self.homes = [Path(environment["TMPDIR"], f"host{number}") for number in (0, 1)]
        self._names = [f"pearl-{os.getpid()}-{number}" for number in (0, 1)]
        self._runs: list[subprocess.Popen[bytes]] = []
        self._devices: list[int] = []
        self._ways: list[Way] = []

    def connect(self, delay: float | None = None, rate: float = 1e9) -> None:
        """By a cable; or with a `delay` in seconds, and a `rate` in bytes a second, by a relay."""
        first, second = self._names
        for name in self._names:
            ip("netns", "add", name)
        if delay is None:
            ip(
                "link",
                "add",
                "wire",
                "netns",
                first,
                "type",
                "veth",
                "peer",
                "name",
                "wire",
                "netns",
                second,
            )
        else:
            one, other = self._devices = [tunnel(first), tunnel(second)]
            self._ways = [Way(one, other, delay, rate), Way(other, one, delay, rate)]
        for number, name in enumerate(self._names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")

    def cut(self, is_cut: bool) -> None:
        """The relay loses every packet; without one, the interface of the draft's host is down."""
        for way in self._ways:
            way.is_cut = is_cut
        if not self._ways:
            ip("-n", self._names[1], "link", "set", "wire", "down" if is_cut else "up")

    def run(self, *arguments: str, draft_keys: Path | None = None) -> None:
        """The same command on both, each in a home of its own."""
        common = self._environment | {
            "PYTHON": sys.executable,
            "HOST": "10.77.0.1",
            "PYTHONPATH": str(ROOT),
        }
        for number, (name, home) in enumerate(zip(self._names, self.homes, strict=True)):
            keys = str(draft_keys if number and draft_keys else self._keys)
            own = common | {"RANK": str(number), "KEYS": keys, "TMPDIR": str(home)}
            command = [
                "ip",
                "netns",
                "exec",
                name,
                str(ROOT / "launch" / "two_hosts.sh"),
                *arguments,
                "123",
            ]
            home.mkdir()
            with (home / "out").open("wb") as out, (home / "error").open("wb") as error:
                run = subprocess.Popen(
                    command, env=own, cwd=home, stdin=DEVNULL, stdout=out, stderr=error
                )
            self._runs.append(run)

    def codes(self) -> list[int]:
        return [run.wait(240) for run in self._runs]

    def said(self, number: int, file: str = "error") -> str:
        return (self.homes[number] / file).read_text()

    def text(self) -> str:
        """Once both have ended well."""
        assert self.codes() == [0, 0], self.said(0) + self.said(1)
        return self.said(0, "out")

    def stop(self) -> None:
        for run in self._runs:
            run.kill()  # its ranks and their workers follow it
            run.wait()
        for way, device in zip(self._ways, self._devices, strict=True):
            way.has_ended = True
            way.join()
            os.close(device)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=10)


@pytest.fixture
def hosts(temporary: dict[str, str], tmp_path: Path) -> Iterator[Hosts]:
    if not HAS_NAMESPACES:
        pytest.skip("two hosts take network namespaces: root, and `ip` of iproute2")
    write_keys(tmp_path / "keys", new_keys())
    made = Hosts(temporary, tmp_path / "keys")
    try:
        yield made
    finally:
        made.stop()


def on_one_host(
    length: int, spec: str = SPEC, rule: str = "coupled", temperature: float = 0.0
) -> str:
    """The text as one process makes it, under the virtual clock."""
    config = EngineConfig(target=spec, draft=spec, target_pace=1.0, draft_pace=0.2)
    decoding = RequestOptions(method="pearl", rule=rule, look_ahead=0, siblings=0)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=length)
    tokens = emulated(config, decoding, [1, 2, 3], params).tokens
    return ToyTokenizer(int(spec.partition("vocab=")[2].partition(",")[0])).decode(tokens) + "\n"


@pytest.mark.parametrize("has_keys", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_draft_without_the_keys_is_refused_in_one_line(
    hosts: Hosts, tmp_path: Path, has_keys: bool
) -> None:
    """On both hosts; the target's says on which the fault is."""
    hosts.connect()
    if has_keys:
        write_keys(tmp_path / "others", new_keys())
    hosts.run(*PAIR, "--max-tokens", "80", draft_keys=tmp_path / "others")
    assert 0 not in hosts.codes()
    for number in (0, 1):
        (error,) = [line for line in hosts.said(number).splitlines() if line.startswith("error: ")]
        assert ("our key file is not its own" if has_keys else "cannot read the key file") in error
        assert ("on the draft's host, " in error) == (number == 0)


@pytest.mark.parametrize(
    "delay",
    [
        pytest.param(None, id="interface down"),
        pytest.param(0.0, id="packets lost", marks=pytest.mark.long),
    ],
)
def test_a_cut_link_costs_the_draft_until_it_is_back(hosts: Hosts, delay: float | None) -> None:
    """Where packets are lost without a word, the kernel's own attempts come ever more rarely: minutes went by."""
    hosts.connect(delay)
    paces = [
        "--target-pace",
        "0.05",
        "--draft-pace",
        "0.01",
        "--draft-timeout",
        "1",
        "--max-tokens",
        "50000",
    ]
    hosts.run(*PAIR, "--log-level", "info", *paces)
    eventually(
        lambda: len(hosts.said(0, "out")) > 80,
        "the text is on its way, and the draft is looked after",
    )
    hosts.cut(True)
    eventually(lambda: "the target goes on alone" in hosts.said(0), "the target gives its draft up")
    if delay is not None:
        eventually(
            lambda: "is gone; starting it again" in hosts.said(1),
            "the draft gives its connection up",
        )
    hosts.cut(False)
    eventually(lambda: "a draft has joined" in hosts.said(0), "the draft is admitted again")
    before = len(hosts.said(0, "out"))
    eventually(lambda: len(hosts.said(0, "out")) > before + 80, "and the text goes on with it")
    text = hosts.said(0, "out")
    assert text + "\n" == on_one_host(len(text))


def test_over_a_slow_link_the_text_is_that_of_one_host_and_the_trace_names_the_way_of_messages(
    hosts: Hosts,
) -> None:
    """10 ms one way, 10 Mbit/s. Each host keeps its half, and the report says what to do."""
    hosts.connect(0.01, 10e6 / 8)
    paces = ["--target-pace", "0.02", "--draft-pace", "0.004"]
    sampled = ["--rule", "ratio", "--temperature", "1", "--seed", "5", "--max-tokens", "100"]
    hosts.run(*PAIR, *paces, *sampled, "--trace", "it.json")
    assert hosts.text() == on_one_host(100, rule="ratio", temperature=1.0)
    assert "lost" not in hosts.said(0)
    path = hosts.homes[0] / "it.json"
    assert any("it.json.draft-*.part" in note for note in report(read(path)).notes)
    (half,) = hosts.homes[1].glob("it.json*")
    half.rename(path.with_name(half.name))
    chrome.merge(path)
    assert report(read(path)).target.waits["transport"] > 0
    assert [*hosts.homes[0].glob("it.json*")] == [path]


@pytest.mark.long
def test_rows_that_take_seconds_are_no_lost_message(hosts: Hosts) -> None:
    """Heartbeats that waited behind them told of a draft at rest, and it got the whole prefix again and again."""
    hosts.connect(0.01, 10e6 / 8)
    spec = "toy:vocab=32000,alpha=0.8"  # a row is 128 kB
    pair = [
        "--target",
        spec,
        "--draft",
        spec,
        "--target-pace",
        "0.05",
        "--draft-pace",
        "0.01",
        *PLAIN,
    ]
    hosts.run(
        *pair,
        "--method",
        "pearl",
        "--rule",
        "ratio",
        "--temperature",
        "1",
        "--seed",
        "5",
        "--max-tokens",
        "12",
    )
    assert hosts.text() == on_one_host(12, spec, "ratio", 1.0)
    assert "was lost" not in hosts.said(0)
