"""Every number that a peer can send, at its extremes: it is refused, or the loop that reads it continues.

A number may be valid by itself and still break what is computed from it: 5e-324 seconds a token make a speed ratio of
infinity.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf, isfinite

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from pearl.drafting.proposer import ModelProposer
from pearl.errors import DraftLost, PearlError, RemoteProtocolError
from pearl.execution.draft import DraftExecutor
from pearl.metrics import Stopwatch, fold
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol import messages as m
from pearl.protocol.request import Counts
from pearl.protocol.sequence import extend_digest
from pearl.protocol.speeds import Speeds
from pearl.spec.methods import MAX_WINDOW
from pearl.trace.tracer import Tracer
from pearl.transport.codec import decode, encode, received
from pearl.worker.draft import DraftWorker
from pearl.worker.draft_rows import RowPacker
from pearl.worker.health import DraftHealth
from tests.loops import (
    BOUND,
    CONTEXT,
    DIGEST,
    GREEDY,
    PROMPT,
    FakeDraft,
    MakeLoops,
    first,
    submission,
)
from tests.loops import simulated as simulated_text
from tests.memory_transport import MemoryHub
from tests.options import drawn_by, resolved, shaped
from tests.replace import replace
from tests.wire import bad_values, good_values, placed, places

SAMPLING = drawn_by(1.0, 5, 0.9, 0.1, 1, 1, shaped(2, 1.1, 0.5, -0.5, ((3, 1.5),)))
PREFIX = (1, 2, 3)
BEGIN = m.Begin(1, 0, PREFIX, 6, extend_digest(0, PREFIX), resolved(sampling=SAMPLING))
EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(m.PROTOCOL_VERSION, m.Role.DRAFT, 32, CONTEXT, DIGEST),
    m.Hello(m.PROTOCOL_VERSION, m.Role.FRONT, 0, 0),
    m.Welcome(m.PROTOCOL_VERSION, 32, CONTEXT, CONTEXT, 1e-3, ((1, 1e-2), (4, 2e-2)), 4),
    m.Submit(9, PROMPT, 6, replace(resolved(gamma=4), sampling=SAMPLING), eos=(2,)),
    m.Committed(1, 3, (4,), (m.Provenance.DIRECT,)),
    m.Preview(1, 3, (4,)),
    m.Finished(1, m.FinishReason.LENGTH, "{}"),
    BEGIN,
    m.DraftTokens(1, 0, 3, (1,), 1e-3, (), 1e-3),
    m.Verdict(1, 0, 3, (4,), 9, extend_digest(BEGIN.digest, (4,))),
    m.Resync(1, 0),
    m.Finish(1),
    m.Cancel(1),
    m.Heartbeat(1, "prefill", 1, 1e-3),
    m.Heartbeat(1, "calibrated", 1, 1e-3),
    m.Heartbeat(1, "waiting", 1, 1e-3),
    m.Ping(1),
    m.Pong(1, 2),
    m.Error(1, "NumericalError", "so it goes"),
    m.Trace(1, True),
)


@settings(max_examples=400)
@given(st.data())
def test_accepted_numbers_are_safe_to_compute_with(data: st.DataObject) -> None:
    """Any number in any place: products and quotients of two accepted ones are finite."""
    message = data.draw(st.sampled_from(EXAMPLES))
    kinds = inspect.IntType, inspect.FloatType
    path, kind = data.draw(
        st.sampled_from(
            [one for one in places(inspect.type_info(type(message))) if isinstance(one[1], kinds)]
        )
    )
    is_float = isinstance(kind, inspect.FloatType)
    number = data.draw(
        st.floats() | st.sampled_from((5e-324, 1e-13, 1e308))
        if is_float
        else st.integers(-(2**63), 2**64 - 1)
    )
    read = received(placed(message, path, number) or [b""])
    if isinstance(read, RemoteProtocolError):
        return
    assert decode(encode(read)) == read
    if isinstance(read, m.DraftTokens | m.Heartbeat | m.Welcome) and is_float:
        assert number == 0 or (isfinite(1e18 / number) and isfinite(1e18 * number))


sound = st.floats(m.LEAST_SECONDS, m.MOST_SECONDS)
any_float = st.floats(0, allow_nan=False)


@settings(max_examples=300)
@example(5e-324, {1: 0.01}, 0.5)
@example(1e-300, {1: 1e300, 4: inf}, 1.0)
@given(
    sound | any_float,
    st.dictionaries(st.integers(1, 600), sound | any_float, max_size=4),
    st.floats(0, 1),
)
def test_any_speeds_give_a_window(
    t_draft: float, t_target: dict[int, float], acceptance: float
) -> None:
    speeds = Speeds(0.0, acceptance)
    speeds.observe_draft(t_draft)
    for fed, seconds in t_target.items():
        speeds.observe_target(fed, seconds)
    assert 1 <= speeds.best_window() <= MAX_WINDOW
    fold(Counts(), Stopwatch(), speeds, 1, 1).to_json()


@given(sound, sound, st.lists(sound, max_size=10))
def test_any_times_give_a_health(usual: float, announced: float, took: list[float]) -> None:
    health, speeds = DraftHealth(1.0), Speeds()
    health.calibrated(usual)
    health.announced(announced)
    assert health.silence.seconds >= -10.0, "a draft cannot ask for ever"
    with contextlib.suppress(DraftLost):
        for seconds in took:
            health.took(1, seconds, speeds)


# ---- the loops ----


def hostile(message: m.Message) -> Iterator[tuple[tuple[int, ...], object, list[bytes]]]:
    """Frames with each value in turn at the ends of its range. Of refused ones one a place: refusals are alike."""
    refused = set[tuple[int, ...]]()
    for path, kind in places(inspect.type_info(type(message))):
        for value in (*good_values(kind), *bad_values(kind)) if path else ():
            if (frames := placed(message, path, value)) is None:
                continue
            if isinstance(received(frames), RemoteProtocolError):
                if path in refused:
                    continue
                refused.add(path)
            yield path, value, frames


def test_no_number_of_a_draft_ends_the_target(loops: MakeLoops) -> None:
    """In the middle of a request, and read by all that follows it: choosing a window, statistics, a welcome."""
    pair = loops()
    front = None
    for message in EXAMPLES:
        for path, value, _ in hostile(message):
            draft = FakeDraft(pair)
            front = front or pair.front()
            front.endpoint.send(submission(3, sampling=GREEDY))
            begin = first(draft.endpoint, m.Begin)
            current = (
                replace(message, request=begin.request) if hasattr(message, "request") else message
            )  # type: ignore[type-var]
            draft.endpoint.send_frames(placed(current, path, value))  # type: ignore[attr-defined]
            front.endpoint.send(m.Cancel(1))
            front.endpoint.send(
                submission(3, sampling=GREEDY, request=2)
            )  # for which a window is chosen anew
            draft.endpoint.send_frames([b"\xc1"])  # type: ignore[attr-defined]  # and it is gone
            front.until(m.Finished)
            front.until(m.Finished)
            assert not pair.errors, (current, path, value)
    again = pair.front()
    assert again.ask(submission(40, sampling=GREEDY)).tokens == simulated_text(
        submission(40, "ar", GREEDY)
    )


def test_no_number_of_a_front_ends_the_target(loops: MakeLoops) -> None:
    pair = loops()
    draft = FakeDraft(pair)
    witness = pair.front()
    for message in EXAMPLES:
        if isinstance(message, m.Hello) and message.role is m.Role.DRAFT:
            continue  # as a draft, it is tried above
        front = pair.front()
        for _, _, frames in hostile(message):
            front.endpoint.send_frames(frames)  # type: ignore[attr-defined]
        front.endpoint.close()
    draft.endpoint.close()
    assert witness.ask(submission(40, sampling=GREEDY)).tokens == simulated_text(
        submission(40, "ar", GREEDY)
    )


WELCOME = m.Welcome(m.PROTOCOL_VERSION, 32, 64, 64, 1e-3, (), 4)
FROM_TARGET = [
    message
    for message in EXAMPLES
    if not isinstance(message, m.Hello | m.Submit | m.Resync | m.Cancel)
]


@pytest.mark.parametrize("message", FROM_TARGET, ids=lambda message: type(message).__name__)
def test_a_draft_ends_by_an_error_of_ours_or_not_at_all(message: m.Message) -> None:
    """Whatever its target sends; its launcher starts another."""
    worker = None
    for path, value, frames in hostile(message):
        worker = worker if worker and worker.alive else DraftThread()
        if not isinstance(message, m.Welcome):
            worker.send(encode(WELCOME))
            worker.send(encode(BEGIN))
        worker.send(frames)
        worker.settle()
        assert isinstance(worker.error(), PearlError | None), (path, value, worker.error())
        if worker.alive and isinstance(message, m.Welcome):
            worker.close()
    if worker is not None:
        worker.close()


class DraftThread:
    """A draft worker in a thread, connected to a target that only the test plays."""

    def __init__(self) -> None:
        self._hub, self._ended = MemoryHub(), threading.Event()
        hello = m.Hello(m.PROTOCOL_VERSION, m.Role.DRAFT, 32, 64, DIGEST)
        connection = self._hub.connect()
        worker = DraftWorker(
            connection, hello, self._welcomed, lambda: None, self._ended.is_set, 5.0, Tracer()
        )
        self._run = ThreadPoolExecutor(1).submit(worker.run)
        ((self._peer, _),) = self._hub.listener.receive(BOUND)

    @staticmethod
    def _welcomed(welcome: m.Welcome) -> tuple[DraftExecutor, RowPacker]:
        return DraftExecutor(
            ModelProposer(ToyRunner(32, alpha_pair(32, 0.5)[1], 64), welcome.vocab_size)
        ), RowPacker()

    @property
    def alive(self) -> bool:
        return not self._run.done()

    def error(self) -> BaseException | None:
        """By which it has ended, if it has."""
        return None if self.alive else self._run.exception()

    def send(self, frames: list[bytes]) -> None:
        self._hub.listener.send_frames(frames, self._peer)

    def settle(self) -> None:
        """Returns once it has handled all messages, or has ended."""
        self.send(encode(m.Ping(77)))
        deadline = time.monotonic() + BOUND
        while self.alive and time.monotonic() < deadline:
            answers = [message for _, message in self._hub.listener.receive(0.05)]
            if any(isinstance(answer, m.Pong) and answer.sent == 77 for answer in answers):
                return
        assert not self.alive, "it does not answer"

    def close(self) -> None:
        self._ended.set()
        self._run.exception(BOUND)
