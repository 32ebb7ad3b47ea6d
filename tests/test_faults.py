"""Every cell of FAULTS.md is made to happen: the table says what must come of it, and of nothing may anything be left.

Process faults strike real workers, which do it to themselves at the right moment (`scripts/faulty.py`) or are sent a
signal. Message faults change one message on a real socket, between loops in threads of this process.
"""

import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from pearl.config import EngineConfig, SamplingParams
from pearl.engine import Engine
from pearl.engine.registry import write_card
from pearl.errors import NumericalError, PearlError, StartError, TargetLost
from pearl.protocol import messages as m
from pearl.transport import connect, listen
from pearl.transport.address import bind_address, private_directory
from pearl.transport.base import Endpoint, Peer
from pearl.transport.codec import MAX_FRAME, encode
from scripts import faulty
from tests.conftest import AS_PUBLISHED, BOUND, TOY, children, eventually, gone, greedy_text, output
from tests.loops import Loops
from tests.replace import replace

PHASES = ("start-up", "prefill", "drafting", "verifying", "idle", "shutdown")
PROCESS_FAULTS = ("SIGKILL", "SIGSTOP", "SIGSTOP, SIGCONT", "hang", "exception in a forward", "NaN")
TAMPERING = ("garbage", "oversize", "truncated", "duplicate", "reordered", "delayed", "lost")
MESSAGE_FAULTS = (*TAMPERING, "wrong version", "wrong vocabulary")
WORKERS = ("draft", "target")
LINKS = ("draft", "target to draft", "target to front")
OUTCOMES = ("identical", "TargetLost", "NumericalError", "refused")

PROMPT = [
    i % 31 + 1 for i in range(48)
]  # long enough to be announced, and to be told from the start-up measurement
TOKENS = 60
MARGIN = 30.0  # seconds
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
TEXT = greedy_text(PROMPT, TOKENS)


# ---- the table ----


@dataclass(frozen=True)
class Cell:
    fault: str
    of: str
    phase: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.fault}-{self.of}-{self.phase}"


def cells() -> dict[tuple[str, str, str], str]:
    """FAULTS.md, read: (fault, of, phase) -> what it says."""
    found = {}
    for line in (Path(__file__).parent / "FAULTS.md").read_text().splitlines():
        fields = [field.strip() for field in line.strip("|").split("|")]
        if (
            line.startswith("|")
            and len(fields) == 2 + len(PHASES)
            and fields[0] != "fault"
            and "---" not in fields[0]
        ):
            found |= {
                (fields[0], fields[1], phase): said
                for phase, said in zip(PHASES, fields[2:], strict=True)
            }
    return found


TABLE = cells()


def those(faults: tuple[str, ...]) -> list[Any]:
    """Every fault, role and moment. One moment of each fault and role runs daily; the others are marked long."""
    found = [
        Cell(*where, said)
        for where, said in TABLE.items()
        if where[0] in faults and said in OUTCOMES
    ]
    usual = {
        (cell.fault, cell.of): cell for cell in found if cell.phase in ("start-up", "drafting")
    }
    usual["one that does not start", ""] = next(cell for cell in found if cell.outcome == "refused")
    return [
        pytest.param(cell, marks=[] if cell in usual.values() else pytest.mark.long, id=str(cell))
        for cell in found
    ]


def test_the_table_is_whole() -> None:
    """No cell is forgotten, and each that cannot be has its reason."""
    wanted = set(product(PROCESS_FAULTS, WORKERS, PHASES)) | set(
        product(MESSAGE_FAULTS, LINKS, PHASES)
    )
    assert set(TABLE) == wanted
    reasons = set(re.findall(r"(?m)^(\d+)\. ", (Path(__file__).parent / "FAULTS.md").read_text()))
    assert set(TABLE.values()) == set(OUTCOMES) | reasons


# ---- nothing is left ----


@contextmanager
def nothing_left() -> Iterator[None]:
    """This process has the children, threads and open files afterwards that it had before."""

    def footprint() -> tuple[set[int], int, int]:
        return children(), threading.active_count(), psutil.Process().num_fds()

    before = footprint()
    yield
    eventually(
        lambda: all(now <= then for now, then in zip(footprint(), before, strict=True)),
        f"as {before}",
    )


# ---- a worker process ----

SELF_INFLICTED = {
    "SIGKILL": "kill",
    "SIGSTOP": "stop",
    "SIGSTOP, SIGCONT": "stop",
    "hang": "hang",
    "exception in a forward": "raise",
    "NaN": "nan",
}
AILS = {  # what the error of a start says, or of a lost target
    "SIGKILL": "killed by signal 9|the target is gone",
    "SIGSTOP": "startup_timeout|silent",
    "hang": "startup_timeout|silent",
    "exception in a forward": "a fault on purpose",
    "NaN": "not finite",
}


def pids(engine: Engine) -> dict[str, int]:
    return {"target": engine.target_worker.pid, "draft": engine.draft.worker.pid}


def inflicted(cell: Cell, once: Path) -> AbstractContextManager[None]:
    """What makes the workers launched meanwhile do the fault of `cell`, unless it is one of the test's own."""
    phase = "start" if cell.phase == "start-up" else cell.phase
    if cell.phase not in ("idle", "shutdown"):
        return faulty.inflicted(cell.of, f"{SELF_INFLICTED[cell.fault]}@{phase}", once)
    return faulty.inflicted(cell.of, "hang@drafting") if cell.fault == "hang" else nullcontext()


def engine_with(cell: Cell, startup_timeout: float = BOUND) -> Engine:
    patient = cell.fault == "SIGSTOP, SIGCONT" or cell.phase == "shutdown"
    return Engine(
        TOY,
        TOY,
        target_pace=0.004,
        draft_pace=0.001,
        draft_timeout=BOUND if patient else 1.0,
        target_timeout=BOUND if patient else 4.0,
        startup_timeout=startup_timeout,
    )


@contextmanager
def waker() -> Iterator[None]:
    """Sends SIGCONT to any child that has stopped, a moment after."""
    done = threading.Event()

    def wake() -> None:
        while not done.wait(0.05):
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if child.status() == psutil.STATUS_STOPPED:
                        done.wait(0.3)
                        child.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def text(engine: Engine) -> Any:
    """As published: otherwise the target would go on at once, and end before it misses the draft."""
    (result,) = engine.generate([PROMPT], GREEDY.overridden_by(AS_PUBLISHED))
    assert result.tokens == TEXT
    return result.statistics


def strike(cell: Cell, engine: Engine) -> None:
    """What the test does itself, to an idle worker."""
    if cell.fault != "hang":
        os.kill(
            pids(engine)[cell.of], signal.SIGKILL if cell.fault == "SIGKILL" else signal.SIGSTOP
        )


def wait_until_speculation_resumes(engine: Engine, first: int, restarted: bool = True) -> None:
    def has_drafted() -> bool:
        statistics = text(engine)
        return not statistics.draft_lost and statistics.num_accepted_draft_tokens > 0

    eventually(has_drafted, "the draft has come back")
    assert (pids(engine)["draft"] != first) == restarted


def check_survived(cell: Cell, engine: Engine) -> None:
    first = pids(engine)["draft"]
    if cell.phase == "shutdown":
        check_ends(cell, engine)
        return
    if cell.phase == "idle":
        text(engine)
        strike(cell, engine)
    with within(1.0 if cell.fault == "SIGSTOP, SIGCONT" else engine.config.draft_timeout):
        statistics = text(engine)
    if cell.fault == "SIGSTOP, SIGCONT":
        assert not statistics.draft_lost
    elif cell.phase == "idle":  # noticed where no text is being made, or by the one that is
        wait_until_speculation_resumes(engine, first)
    else:
        assert statistics.draft_lost
        assert statistics.provenance["direct"] > 0
        if cell.phase == "drafting":
            wait_until_speculation_resumes(engine, first, restarted=cell.fault != "NaN")


def check_ends(cell: Cell, engine: Engine) -> None:
    if cell.fault == "hang":
        stream = engine.stream(PROMPT, GREEDY, method="pearl")
        time.sleep(
            0.5
        )  # it hangs by now, or will while it is being ended; either way the end must be clean
        assert stream.is_open
    else:
        text(engine)
    strike(cell, engine)
    engine.close()


def check_not_started(cell: Cell, once: Path) -> None:
    silent = cell.fault in ("SIGSTOP", "hang")
    for bound in (
        (2.0, 6.0, 20.0, BOUND) if silent else (BOUND,)
    ):  # a busy machine may not come to the fault in the first
        with pytest.raises(PearlError, match=AILS[cell.fault]) as caught:
            engine_with(cell, bound)
        assert caught.value.exit_code == 3
        if once.exists():
            return


@contextmanager
def within(timeout: float) -> Iterator[None]:
    """What is to be noticed is, within its time-out and what a busy machine needs besides."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < timeout + MARGIN


def check_lost(cell: Cell, engine: Engine) -> None:
    workers = list(pids(engine).values())
    if cell.phase == "idle":
        text(engine)
        strike(cell, engine)
    with (
        within(engine.config.target_timeout),
        pytest.raises(TargetLost, match=AILS[cell.fault]) as caught,
    ):
        text(engine)
    assert "Make a new engine" in str(caught.value)
    eventually(
        lambda: all(map(gone, workers)), "the workers are gone, though nobody has closed the engine"
    )
    assert not engine.directory.exists()
    with pytest.raises(PearlError):
        text(engine)


def check_named(engine: Engine) -> None:
    with pytest.raises(NumericalError, match="not finite"):
        text(engine)
    with pytest.raises(
        NumericalError, match="not finite"
    ):  # it is broken for good; and the engine still answers
        text(engine)


@pytest.mark.parametrize("cell", those(PROCESS_FAULTS))
def test_process_fault(
    cell: Cell, temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    once = tmp_path_factory.mktemp("faults") / "struck"
    with (
        nothing_left(),
        inflicted(cell, once),
        waker() if cell.fault == "SIGSTOP, SIGCONT" else nullcontext(),
    ):
        if cell.outcome == "refused":
            check_not_started(cell, once)
        else:
            with engine_with(cell) as engine:
                match cell.outcome:
                    case "identical":
                        check_survived(cell, engine)
                    case "TargetLost":
                        check_lost(cell, engine)
                    case "NumericalError":
                        check_named(engine)
        assert once.exists() == (cell.phase not in ("idle", "shutdown")), "the fault has struck"


# ---- many at random ----


SOAK = Path(__file__).parent.parent / "scripts" / "soak.py"


@pytest.mark.long
@pytest.mark.slow
def test_the_soak_has_as_many_faults_as_it_was_asked_for() -> None:
    """It once went on for so many seconds, and on a slow machine had one fault in 300."""
    said = output(sys.executable, SOAK, "--faults", 2, "--seed", 3, timeout=280)
    struck = sum(int(count) for count in re.findall(r"(?m)^fault: .* (\d+) *$", said))
    assert struck >= 2
    assert f"{struck} faults in" in said


@pytest.mark.slow
@pytest.mark.long
def test_the_soak_of_the_server(tmp_path: Path) -> None:
    """Its limits of time and memory are for a quiet machine, and for minutes."""
    flags = shlex.split(
        "--seconds 6 --clients 4 --slots 2 --kill-every 2 --most-overhead 1e6 --most-growth 1e6"
    )
    said = output(sys.executable, SOAK.with_name("soak_http.py"), *flags, timeout=240, cwd=tmp_path)
    assert "drafts killed" in said
    assert ", 0 wrong" in said


# ---- one message changed ----

# which message of its link is tampered with: its type, and the how-manieth that fits
Chosen = tuple[Callable[[m.Message], bool], int]


def of(kind: type, number: int = 1, work: str | None = None) -> Chosen:
    return (
        lambda message: (
            isinstance(message, kind) and work in (None, getattr(message, "work", None))
        ),
        number,
    )


CHOSEN: dict[str, dict[str, Chosen]] = {
    "draft": {
        "start-up": of(m.Hello),
        "prefill": of(m.Heartbeat, work="prefill"),
        "drafting": of(m.DraftTokens),
        "verifying": of(m.DraftTokens, 5),
        "idle": of(m.Heartbeat, work="idle"),
    },
    "target to draft": {
        "start-up": of(m.Welcome),
        "prefill": of(m.Begin),
        "drafting": of(m.Verdict),
        "verifying": of(m.Verdict, 3),
        "idle": of(m.Finish),
    },
    "target to front": {
        "start-up": of(m.Welcome, 2),  # the draft's is the first
        "prefill": of(m.Committed),
        "drafting": of(m.Committed, 2),
        "verifying": of(m.Committed, 4),
        "idle": of(m.Finished),
    },
}
REFUSALS = {
    "garbage": "no message that version",
    "oversize": "is gone",
    "truncated": "no message that version",
    "wrong version": r"speaks version|version \d",
    "wrong vocabulary": "does not fit the target",
}
_DELAY_SECONDS = 0.3


class Tampered:
    """Makes `endpoint` do `fault` to one of the messages that it sends."""

    def __init__(self, endpoint: Any, fault: str, chosen: Chosen) -> None:
        self.struck = threading.Event()
        self._endpoint, self._whole, self._fault = endpoint, endpoint.send, fault
        self._fits, self._left = chosen
        self._held: list[tuple[m.Message, Peer | None]] = []
        self._lock = threading.RLock()
        endpoint.send = self.send

    def send(self, message: m.Message, peer: Peer | None = None) -> None:
        with self._lock:
            self._left -= self._fits(message)
            if self._left == 0 and not self.struck.is_set():
                self.struck.set()
                self._tamper(message, peer)
            elif self._held and self._fault == "delayed":
                self._held.append((message, peer))  # a connection delays, it does not reorder
            else:
                self._whole(message, peer)
                if self._held and self._held[0][1] == peer:
                    self._release()

    def _tamper(self, message: m.Message, peer: Peer | None) -> None:
        header = encode(message)[0]
        match self._fault:
            case "garbage":
                self._raw(b"\xc1 is no message that version", peer)
            case "oversize":
                self._raw(bytes(MAX_FRAME + 1), peer)
            case "truncated":
                self._raw(header[:-1], peer)
            case "duplicate":
                self._whole(message, peer)
                self._whole(message, peer)
            case "reordered":
                self._held.append((message, peer))
            case "delayed":
                self._held.append((message, peer))
                threading.Timer(_DELAY_SECONDS, self._release).start()
            case "lost":
                pass
            case "wrong version":
                self._whole(replace(message, version=message.version + 1), peer)  # type: ignore[union-attr, call-arg]
            case "wrong vocabulary":
                self._whole(replace(message, vocab_digest=b"other tokens"), peer)  # type: ignore[call-arg]

    def _raw(self, frame: bytes, peer: Peer | None) -> None:
        self._endpoint.send_frames([frame], peer)

    def _release(self) -> None:
        with self._lock:
            held, self._held = self._held, []
            for message, peer in held:
                self._whole(message, peer)


class FaultyLoops(Loops):
    """Loops over a Unix socket, one of whose links is tampered with. What ends a draft is kept, as its exit is."""

    def __init__(self, directory: Path, cell: Cell) -> None:
        self.ended: list[BaseException] = []
        self.directory = directory
        listener = listen(bind_address("ipc", directory))
        self.address = listener.address
        chosen = CHOSEN[cell.of][cell.phase]
        tampered: list[Tampered] = []
        if cell.of != "draft":
            tampered.append(Tampered(listener, cell.fault, chosen))
        super().__init__(listener, lambda: connect(listener.address), draft_timeout=2.0)

        def wrap(endpoint: Endpoint) -> Endpoint:
            if cell.of == "draft":
                tampered.append(Tampered(endpoint, cell.fault, chosen))
            return endpoint

        self.draft(wrap=wrap)
        (self.tampered,) = tampered

    def start(self, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except PearlError as error:
                self.ended.append(error)

        return super().start(guarded)


def front_of(pair: FaultyLoops) -> Engine:
    """A front of a target that is a loop and runs already."""
    config = EngineConfig(target=TOY, draft=TOY, target_timeout=4.0).model_dump(mode="json")
    write_card(pair.directory, pair.address, config, {})
    return Engine.attach(pair.directory)


def check_refused(cell: Cell, pair: FaultyLoops) -> None:
    if cell.of == "target to front":
        pair.wait_ready()
        with pytest.raises(StartError, match=REFUSALS[cell.fault]):
            front_of(pair)
    else:
        eventually(lambda: bool(pair.ended), "the draft has ended, with an error")
        assert re.search(REFUSALS[cell.fault], str(pair.ended[0])), pair.ended
        assert not pair.is_ready


def check_served(cell: Cell, pair: FaultyLoops) -> None:
    pair.wait_ready()
    with front_of(pair) as engine:
        if cell.outcome == "TargetLost":
            with pytest.raises(TargetLost, match="Start an engine again"):
                text(engine)
            return
        text(engine)
        if cell.phase == "idle":
            eventually(pair.tampered.struck.is_set, "the idle loop has sent that message")
        for _ in range(2):
            text(engine)


@pytest.mark.parametrize("cell", those(MESSAGE_FAULTS))
def test_message_fault(cell: Cell, temporary: Path) -> None:
    with nothing_left():
        directory = private_directory()
        pair = FaultyLoops(directory, cell)
        try:
            (check_refused if cell.outcome == "refused" else check_served)(cell, pair)
            assert pair.tampered.struck.is_set()
        finally:
            pair.close()
            (directory / "engine.json").unlink(missing_ok=True)
            directory.rmdir()
        assert not pair.errors
