"""The two work loops, each in a thread of this process: texts, fronts, and what strangers send.

What only real processes can show is in test_processes.py and test_faults.py.
"""

import itertools
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch

from pearl.config import EngineConfig, ModelConfig
from pearl.decoding.distribution import PackedRow, pack
from pearl.drafting.proposer import ModelProposer
from pearl.errors import RemoteProtocolError, RequestError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.models.calibrate import FED
from pearl.models.checkpoints.loading import load_runner
from pearl.models.runner import Feed, ModelRunner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol import messages as m
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.events import Forward, Judge, Open, Phase
from pearl.protocol.sequence import extend_digest
from pearl.protocol.speeds import Cores
from pearl.spec import methods
from pearl.trace.tracer import Tracer
from pearl.transport.codec import decode, encode
from pearl.worker.draft import MAX_UNANNOUNCED, DraftWorker
from pearl.worker.draft_link import DraftLink
from pearl.worker.draft_rows import RowPacker, packed
from pearl.worker.fronts import Fronts
from pearl.worker.settings import TargetSettings
from pearl.worker.target import TargetWorker
from tests.conftest import eventually, greedy_text
from tests.loops import (
    BOUND,
    CONTEXT,
    DIGEST,
    GREEDY,
    METHODS,
    PROMPT,
    WARM,
    Channels,
    MakeLoops,
    Received,
    first,
    form_of,
    simulated,
    sparse,
    submission,
)
from tests.memory_transport import MemoryHub, MemoryRows
from tests.options import drawn_by, resolved
from tests.pairwise import pairwise
from tests.replace import replace
from tests.tiny import tiny_model
from tests.wrapped import WrappedRunner

VOCAB = 512  # large enough for distributions to be dense
CARRIERS = {"frames": "dense", "sparse": "sparse", "channel": "announced"}


def channels(carrier: str) -> Channels | None:
    """The tensor channel of each rank; None: rows travel in the messages."""
    if carrier != "channel":
        return None
    return MemoryRows.pair(BOUND).__getitem__


class Launched(WrappedRunner):
    """As on a device, whose forwards are not done until they are waited for."""

    def is_done(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("carrier", "control", "chains", "method", "rule", "window", "stop", "launches"),
    pairwise(
        *(
            CARRIERS,
            ["memory", "ipc"],
            [False, True],
            METHODS[1:],
            ["ratio", "coupled"],
            ["stream", "fixed"],
        ),
        ["fixed", "threshold"],
        [False, True],
    ),
)
def test_text_is_the_simulators(
    loops: MakeLoops,
    carrier: str,
    control: str,
    chains: bool,
    method: str,
    rule: str,
    window: str,
    stop: str,
    launches: bool,
) -> None:
    """Invariant 5: threads, timing and transport leave no trace. A row that came late, twice or to the wrong position
    would change what is accepted."""
    carried = channels(carrier)
    pair = loops(control, vocab=VOCAB, alpha=0.7, channel=carried, launches=launches, wrap=Launched)
    pair.draft(chains=chains)
    front, sampled = pair.front(), replace(WARM, top_k=20 if carrier == "sparse" else 0)
    if method in ("sd", "pearl-no-post-verify"):  # by ratio their texts depend on the window
        rule = "coupled"
    if stop == "threshold" and not methods.METHODS[method].takes_stops:
        stop = "fixed"
    policy, pauses = {"fixed": (), "threshold": (("confidence", 0.2),)}[stop], 0
    for request, sampling in enumerate((sampled, replace(sampled, seed=8), GREEDY)):
        asked = {
            "rule": rule,
            "window": window,
            "draft_stop": stop,
            "stop_parameters": policy,
            "gamma": 8,
        }
        submit = submission(60, method, sampling, request, **asked)
        told = front.ask(submit)
        assert not told.statistics.draft_lost
        assert (told.tokens, told.reason) == (simulated(submit, VOCAB, 0.7), m.FinishReason.LENGTH)
        pauses += told.statistics.num_draft_stops
    assert bool(pauses) == (stop == "threshold")
    assert pair.forms == ({CARRIERS[carrier]} if rule == "ratio" else set())


class Noted(Launched):
    """Notes when a forward is launched and when it is done, 10 ms later."""

    def __init__(self, runner: ModelRunner, notes: list[str], lasts: bool) -> None:
        super().__init__(runner)
        self._notes, self._lasts = notes, lasts

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        self._notes += ["launched", *["wide"] * (len(feeds[0].tokens) > MAX_UNANNOUNCED)]
        return super().forward(feeds)

    def is_done(self) -> bool:
        return not self._lasts

    def synchronize(self) -> None:
        time.sleep(0.01)
        self._notes.append("done")


@pytest.mark.parametrize("lasts", [True, False])
def test_what_the_host_does_beside_a_forward(
    loops: MakeLoops, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    """Of a device: tokens go to the front and the draft's are taken, but other messages wait; and the host does not
    wait for any once the device is done, sooner than usual."""
    notes: list[str] = []
    pair = loops(wrap=lambda runner: Noted(runner, notes, lasts), launches=True)
    pair.draft()
    front = pair.front()
    handle = TargetWorker.on_message
    deliver = Fronts.deliver
    flush = Fronts.flush
    undelivered: list[str] = []

    def on_message(worker: TargetWorker, peer: bytes, message: m.Message) -> None:
        notes.append(type(message).__name__)
        handle(worker, peer, message)

    def delivered(fronts: Fronts, message: m.Committed | m.Preview) -> None:
        undelivered.append("delivered")
        deliver(fronts, message)

    def flushed(fronts: Fronts) -> None:
        notes.extend(undelivered)
        undelivered.clear()
        flush(fronts)

    monkeypatch.setattr(TargetWorker, "on_message", on_message)
    monkeypatch.setattr(Fronts, "deliver", delivered)
    monkeypatch.setattr(Fronts, "flush", flushed)
    told = Received()
    front.endpoint.send(submission(60))
    for number in range(8):
        front.until(m.Committed, told)
        front.endpoint.send(m.Ping(number))
    told = Received()
    front.until(m.Finished, told)
    beside: set[str] = set()
    inside = False
    for note in notes:
        inside = note == "launched" or (inside and note != "done")
        beside |= {note} if inside else set()
    assert beside - {"wide"} == {"launched", "delivered", *(["DraftTokens"] if lasts else [])}
    assert notes.count("Ping") == 8


def test_the_drafts_tokens_are_taken_beside_a_wide_window(
    loops: MakeLoops, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    pair = loops(wrap=lambda runner: Noted(runner, notes, True), launches=True, alpha=0.99)
    pair.draft()
    front, handle = pair.front(), DraftLink.receive

    def receive(link: DraftLink, message: m.DraftTokens, coordinator: Coordinator) -> None:
        notes.append("taken")
        handle(link, message, coordinator)

    monkeypatch.setattr(DraftLink, "receive", receive)
    front.ask(submission(200, window="fixed", gamma=12))  # type: ignore[arg-type]
    assert ("wide", "taken") in itertools.pairwise(notes)


def test_times_on_all_cores_are_known_before_the_first_text(loops: MakeLoops) -> None:
    """They are measured when the draft has measured its own times; then it has its cores back."""
    spread: list[Cores] = []
    pair = loops(spread=spread.append)
    pair.draft()
    statistics = pair.front().ask(submission(5)).statistics
    assert spread == [Cores.ALL, Cores.OWN]
    assert set(statistics.t_target_spread) == set(FED)


def test_times_are_known_without_a_draft_too(loops: MakeLoops) -> None:
    """Else every guess would seem to pay at first."""
    pair = loops(expects_draft=False)
    statistics = pair.front().ask(submission(5, "ar", GREEDY)).statistics
    assert set(statistics.t_target) == set(FED)


# ---- fronts ----


def test_requests_of_two_fronts_are_served_in_turn(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    one, two = pair.front(), pair.front()
    one.endpoint.send(submission(300, request=5))
    two.endpoint.send(submission(50, request=5))  # the fronts' own numbers may coincide
    told = [Received(), Received()]
    two.until(m.Finished, told[1])
    one.until(m.Finished, told[0])
    assert [len(t.tokens) for t in told] == [300, 50]
    assert told[0].tokens[:40] == told[1].tokens[:40] == simulated(submission(40))


def test_front_that_vanishes_takes_its_request_with_it(loops: MakeLoops) -> None:
    pair = loops("ipc")
    pair.draft()
    leaver, stayer = pair.front(), pair.front()
    leaver.endpoint.send(submission(CONTEXT - 10))
    leaver.until(m.Committed)
    leaver.endpoint.close()
    assert stayer.ask(submission(50)).tokens == simulated(submission(50))


class _Cramped(WrappedRunner):
    """Has memory for one sequence at a time; and for none of the prompt 9 4."""

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if len(feeds) > 1 or list(feeds[0].tokens) == [9, 4]:
            raise torch.OutOfMemoryError("no memory is left")
        return super().forward(feeds)


def test_what_does_not_fit_together_is_computed_one_by_one(loops: MakeLoops) -> None:
    pair = loops(expects_draft=False, slots=3, wrap=_Cramped)
    pair.wait_ready()
    fronts = [pair.front() for _ in range(3)]
    for front, begin in zip(fronts, (1, 9, 2), strict=True):
        front.endpoint.send(m.Submit(1, (begin, 4), 22, resolved("ar", sampling=drawn_by(0.0))))
    for front, begin in ((fronts[0], 1), (fronts[2], 2)):
        front.until(m.Finished, told := Received())
        assert told.tokens == list(greedy_text([begin, 4], 20))
    with pytest.raises(RequestError, match="no memory is left"):
        fronts[1].until(m.Finished)


def test_front_that_does_not_read_delays_nobody(loops: MakeLoops) -> None:
    pair = loops("ipc", expects_draft=False)
    slow, quick = pair.front(), pair.front()
    slow.endpoint.send(submission(5000, "ar", GREEDY))
    assert (
        quick.ask(submission(20, "ar", GREEDY)).reason is m.FinishReason.LENGTH
    )  # served after it, so it is done
    told = Received()
    slow.until(m.Finished, told)
    assert len(told.tokens) == 5000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": (), "limit": 5}, "empty"),
        ({"prompt": (1, 32), "limit": 5}, "token id 32"),
        ({"predicted": (1, 32)}, "prediction holds token id 32"),
        ({"limit": CONTEXT + 1}, "context"),
        ({"limit": 3}, "limit 3"),
    ],
)
def test_impossible_request_is_refused_before_any_work(
    loops: MakeLoops, change: dict[str, object], said: str
) -> None:
    pair = loops(expects_draft=False)
    front = pair.front()
    pair.target_model.fed.clear()  # the forwards that were timed at the start
    with pytest.raises(RequestError, match=said):
        front.ask(replace(submission(20, "ngram", look_ahead=8), **change))  # type: ignore[arg-type]
    assert not pair.target_model.fed
    assert front.ask(submission(20, "ar", request=2)).reason is m.FinishReason.LENGTH


def test_error_is_told_to_the_request_that_failed(loops: MakeLoops) -> None:
    """Another one ends while the failing forward runs, and must not be given its error."""
    pair = loops(expects_draft=False)
    front, model = pair.front(), pair.target_model
    fine = model.distribution
    model.after = len(model.fed) + 3
    front.endpoint.send(submission(60, "ar", request=1))
    front.endpoint.send(submission(60, "ar", request=2))
    eventually(lambda: len(model.fed) == model.after, "the first text hangs")
    model.distribution = lambda tokens: fine(tokens) * math.nan
    front.endpoint.send(m.Cancel(2))
    time.sleep(
        0.2
    )  # it waits in the inbox when the forward ends; should it come later, nothing is tested
    model.after = 1 << 60
    model.release.set()
    deadline, said = time.monotonic() + BOUND, {}
    while len(said) < 2 and time.monotonic() < deadline:
        for _, message in front.endpoint.receive(0.2):
            if isinstance(message, (m.Error, m.Finished)):
                said[message.request] = message
    assert said[1].kind == "NumericalError"
    assert said[2].reason is m.FinishReason.CANCELLED


@pytest.mark.parametrize(
    ("role", "version", "digest", "said"),
    [
        (m.Role.FRONT, m.PROTOCOL_VERSION + 1, b"", str(m.PROTOCOL_VERSION + 1)),
        (m.Role.DRAFT, m.PROTOCOL_VERSION + 1, DIGEST, str(m.PROTOCOL_VERSION + 1)),
        (m.Role.DRAFT, m.PROTOCOL_VERSION, b"other tokens", "does not fit"),
    ],
)
def test_unfit_peer_is_refused_and_a_fit_one_then_admitted(
    loops: MakeLoops, role: m.Role, version: int, digest: bytes, said: str
) -> None:
    pair = loops()
    endpoint = pair.endpoint()
    endpoint.send(m.Hello(version, role, 32, CONTEXT, digest))
    assert said in first(endpoint, m.Error).message
    pair.draft()
    assert pair.front().ask(submission(30)).tokens == simulated(submission(30))


# ---- garbage ----

GARBAGE = (
    [b""],
    [b"\xc1"],
    [b"\xff" * 100],
    [b"\x91\xcd\x7f\xff"],  # an unknown type
    [b"\xdd\xff\xff\xff\xff"],  # an array of four thousand million
    [b"\x91" * 2000],  # a deep nest
    [b"\x92\x01\x01", b"extra"],
    [b""] * 3000,
)


def test_garbage_from_fronts_and_strangers_is_answered_and_survived(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    front, stranger = pair.front(), pair.endpoint()
    for frames in GARBAGE:
        for endpoint in (front.endpoint, stranger):
            endpoint.send_frames(frames)  # type: ignore[attr-defined]
            assert first(endpoint, m.Error).kind == "RemoteProtocolError"
    for message in (
        submission(5),
        m.Welcome(1, 1, 1, 1, 0.0, (), 1),
        m.Verdict(1, 0, 0, (1,), 5, 0),
        m.Committed(1, 0, (), ()),
    ):
        stranger.send(message)  # it never said hello
        assert first(stranger, m.Error).kind == "RemoteProtocolError"
    stranger.send(m.DraftTokens(1, 0, 3, (1,)))  # as from a draft that was replaced: ignored
    stranger.send(m.Resync(1, 0))
    stranger.send(m.Cancel(1))  # as from a front whose loss was noticed before its last message
    stranger.send(m.Ping(5))
    assert first(stranger, m.Pong).sent == 5
    assert front.ask(submission(50)).tokens == simulated(submission(50))


def test_faults_of_peers_are_logged_now_and_then(
    loops: MakeLoops, caplog: pytest.LogCaptureFixture
) -> None:
    """A line in ten seconds: they may come by the thousand."""
    stranger = loops(expects_draft=False).endpoint()
    for _ in range(100):
        stranger.send_frames([b"\xc1"])  # type: ignore[attr-defined]
    stranger.send(m.Ping(5))
    first(stranger, m.Pong)  # by then all have been handled
    assert 1 <= caplog.text.count("dropped a message") < 10


def test_rows_of_who_is_not_the_draft_are_not_unpacked(
    loops: MakeLoops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few bytes each would become a whole vocabulary: 28 KB made 1.2 GB. Nor do they reach a draft that joins."""
    unpacked: list[object] = []
    monkeypatch.setattr(PackedRow, "unpack", lambda row, vocab: unpacked.append(row))
    pair = loops(expects_draft=False)
    stranger, front = pair.endpoint(), pair.front()
    message = m.DraftTokens(1, 0, len(PROMPT), (1,), rows=(sparse([1], [1.0]),))
    front.endpoint.send(submission(2000, "ar"))
    front.until(m.Committed)
    stranger.send(message)
    # All at once, so that it is read before the loop has met the draft.
    for one in (
        m.Hello(m.PROTOCOL_VERSION, m.Role.DRAFT, pair.vocab, CONTEXT, DIGEST),
        m.Heartbeat(0, "calibrated", 1, 1e-3),
        *(
            replace(message, request=request, epoch=epoch)
            for request in (1, 2)
            for epoch in range(3)
        ),
    ):
        stranger.send(one)
    front.until(m.Finished)
    assert not unpacked


def test_a_front_is_welcomed_however_many_sizes_of_forwards_there_were() -> None:
    """With several slots a forward is fed any number of tokens, up to thousands."""
    settings = TargetSettings(EngineConfig(target="toy", draft="none"), 32, CONTEXT, DIGEST)
    worker = TargetWorker(
        MemoryHub().listener,
        TargetExecutor(ToyRunner(32, alpha_pair(32, 0.5)[0])),
        settings,
        lambda: None,
        lambda: True,
        Tracer(),
    )
    speeds = worker._coordinator.speeds
    for fed in range(1, 5000):
        speeds.observe_target(fed, fed / 1000)
    welcome = decode(encode(worker._introduction))
    assert isinstance(welcome, m.Welcome)
    assert len(welcome.t_target) < 300
    for fed in (1, 63, 64, 65, 1000, 4999):
        assert speeds.t_target(fed) == pytest.approx(fed / 1000, rel=0.04)


# ---- the draft's loop ----


class _Target:
    """A target that the test plays, with a draft of two slots in a thread."""

    def __init__(self, proposer: ModelProposer) -> None:
        self._hub = MemoryHub()
        self._ended = threading.Event()
        hello = m.Hello(m.PROTOCOL_VERSION, m.Role.DRAFT, 32, 64, DIGEST)
        worker = DraftWorker(
            self._hub.connect(),
            hello,
            lambda welcome: (DraftExecutor(proposer), RowPacker()),
            lambda: None,
            self._ended.is_set,
            BOUND,
            Tracer(),
            slots=2,
        )
        self._run = ThreadPoolExecutor(1).submit(worker.run)
        ((self._peer, _),) = self._hub.listener.receive(BOUND)
        self.send(m.Welcome(m.PROTOCOL_VERSION, 32, 64, 64, 1e-3, (), 4))

    def send(self, *messages: m.Message) -> None:
        for message in messages:
            self._hub.listener.send(message, self._peer)

    def drafted(self, request: int) -> m.DraftTokens:
        """Return the next draft tokens of a request; those of others are lost."""
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            for _, message in self._hub.listener.receive(0.2):
                if isinstance(message, m.DraftTokens) and message.request == request:
                    return message
        raise AssertionError(f"no tokens of request {request}")

    def close(self) -> None:
        self._ended.set()
        self._run.result(BOUND)


def begin(request: int, prefix: tuple[int, ...] = PROMPT, tokens: int = 1) -> m.Begin:
    options = resolved(rule="coupled")
    until = len(prefix) + tokens
    return m.Begin(request, 0, prefix, until, extend_digest(0, prefix), options)


def test_the_draft_reports_the_waits_of_each_request() -> None:
    """Not those of requests that began before it, whether they have ended or not."""
    proposer = ModelProposer(ToyRunner(32, alpha_pair(32, 0.5)[1], 64), 32, texts=2)
    with closing(_Target(proposer)) as target:
        target.send(begin(1))
        first_token = target.drafted(1).tokens
        target.send(begin(2))
        assert target.drafted(2).waited == 0, "request 1 waits, and request 2 has just begun"
        prefix = PROMPT + first_token
        digest = extend_digest(0, prefix)
        target.send(m.Verdict(1, 0, len(PROMPT), first_token, len(prefix) + 1, digest))
        assert target.drafted(1).waited > 0


def test_hidden_states_that_come_with_their_request_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a draft computes, a `Begin` may wait together with the states that follow it."""
    calls: list[str] = []
    proposer = ModelProposer(ToyRunner(32, alpha_pair(32, 0.5)[1], 64), 32, texts=2)
    monkeypatch.setattr(proposer, "see", lambda states: calls.append("see"))
    opens = proposer.open

    def opened(command: Open) -> None:
        calls.append("open")
        opens(command)

    monkeypatch.setattr(proposer, "open", opened)
    worker = DraftWorker(
        MemoryHub().connect(),
        m.Hello(m.PROTOCOL_VERSION, m.Role.DRAFT, 32, 64, DIGEST),
        Mock(),
        Mock(),
        Mock(),
        BOUND,
        Tracer(),
    )
    worker._executor = DraftExecutor(proposer)
    worker._thread = worker._executor  # type: ignore[assignment]
    worker.on_message(b"", begin(1))
    worker.on_message(b"", m.HiddenStates(1, 0, b""))
    while worker._commands:
        worker._carry_out(worker._commands.popleft())
    assert calls == ["open", "see"]


# ---- distributions ----


@pytest.mark.parametrize(
    ("vocab", "possible"), [(5, 1), (127, 1000), (128, 3), (300, 1), (300, 40)]
)
def test_a_row_arrives_as_it_was(vocab: int, possible: int) -> None:
    """Few tokens of a small or a large vocabulary, or all of it; the ids in whatever order they come."""
    row = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab))
    row[possible:] = 0
    row /= row.sum()
    prepared, announced = RowPacker().prepare(m.DraftTokens(1, 0, 3, (1,), rows=(row,)))
    (sent,) = packed(prepared).rows  # type: ignore[attr-defined]
    assert not announced
    assert form_of(sent) == ("sparse" if min(possible, vocab) < vocab // 8 else "dense")
    assert torch.equal(sent.unpack(vocab), row)
    if sent.ids is not None:
        parts = zip((sent.ids, sent.probs), (torch.int32, torch.float32), strict=True)
        ids, weights = (torch.frombuffer(bytearray(part), dtype=kind) for part, kind in parts)
        assert torch.equal(
            sparse(ids.flip(0).tolist(), weights.flip(0).tolist()).unpack(vocab), row
        )
        with pytest.raises(RemoteProtocolError):
            sent.unpack(len(ids) - 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_row_is_judged_alike_on_the_host_or_on_the_device(device: str) -> None:
    runner = load_runner(
        ModelConfig(str(tiny_model()), dtype="float32", max_context=64), torch.device(device)
    )
    executor = TargetExecutor(runner)
    executor.execute(Open(PROMPT, resolved(sampling=WARM)))
    executor.execute(Forward(Phase.PREFILL, 0, PROMPT, 1))
    dense, few = torch.softmax(torch.randn(runner.vocab_size), -1), torch.zeros(runner.vocab_size)
    few[[1, 5]] = torch.tensor([0.25, 0.75])
    for row in (dense, few):
        forms = row.to(device), pack(row).unpack(runner.vocab_size)
        judged, other = [
            executor.judge(Judge(len(PROMPT), (5,), (each,), (len(PROMPT) - 1,))) for each in forms
        ]
        assert other == judged
