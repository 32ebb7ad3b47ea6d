"""The two work loops, each in a thread of this process, with the test as the front - and as a misbehaving peer.

What only real processes can show is in test_processes.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pearl.decoding.distribution import AnnouncedRow, PackedRow, pack
from pearl.drafting.model import ModelProposer
from pearl.errors import DraftLost, ModelError, RemoteProtocolError, RequestError, TransportError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.simulate import Timing, paired_executors, simulate
from pearl.metrics import Statistics
from pearl.models.loading import load_runner
from pearl.models.runner import Feed, ModelRunner, WrappedRunner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.events import Forward, Judge, Open, Phase
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    Cancel,
    Committed,
    DraftTokens,
    Error,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Preview,
    Resync,
    Role,
    Submit,
    Verdict,
    Welcome,
)
from pearl.protocol.options import RequestOptions, Sampling
from pearl.protocol.speeds import Speeds
from pearl.trace.tracer import Tracer
from pearl.transport.address import bind_address
from pearl.transport.base import Endpoint, TensorChannel
from pearl.transport.torch_dist import ProcessGroupChannel
from pearl.transport.zeromq import ZmqConnection, ZmqListener
from pearl.worker.draft import DraftWorker
from pearl.worker.draft_link import DraftLink, weigh
from pearl.worker.health import DraftHealth
from pearl.worker.rows import RowPacker, packed
from pearl.worker.settings import TargetSettings
from pearl.worker.target import TargetWorker
from tests.conftest import greedy_text
from tests.memory_transport import memory_channels, memory_hub
from tests.replace import replace
from tests.tiny import tiny_model

BOUND = 120.0  # seconds that anything here may take; far more than it does
CONTEXT = 1 << 19
DIGEST = b"the same tokens"
PROMPT = (1, 2, 3)
WARM = Sampling(temperature=1.0, seed=7)
METHODS = ("ar", "sd", "pearl", "pearl-no-pre-verify", "pearl-no-post-verify")
Channels = Callable[[int], TensorChannel]


class Hanging(ToyRunner):
    """A model that computes for ever from the moment `hang` is set until `release` is."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.after = 1 << 60  # forwards
        self.fed: list[int] = []  # tokens, by forward
        self.release = threading.Event()

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if len(self.fed) >= self.after:
            assert self.release.wait(2 * BOUND)
        self.fed.append(len(feeds[0].tokens))
        return super().forward(feeds)


@dataclass
class Told:
    """What a front has been told about one request."""

    tokens: list[int] = field(default_factory=list)
    previews: list[Preview] = field(default_factory=list)
    reason: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    end: int | None = None  # position after the last token


class Front:
    """A front in the test's hands."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._inbox: deque[object] = deque()
        endpoint.send(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
        self.welcome = self.until(Welcome)

    def until(self, kind: type, told: Told | None = None) -> object:
        """The first message of that kind; raises what an Error says."""
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            if not self._inbox:
                self._inbox.extend(message for _, message in self.endpoint.receive(0.2))
                continue
            message = self._inbox.popleft()
            if told is not None:
                self._note(message, told)
            if isinstance(message, kind):
                return message
            if isinstance(message, Error):
                raise RequestError(message.message, message.kind)
        raise AssertionError(f"no {kind.__name__} within {BOUND} s")

    @staticmethod
    def _note(message: object, told: Told) -> None:
        match message:
            case Committed(_, start, tokens):
                assert told.end in (None, start), "a gap, or something twice"
                told.tokens += tokens
                told.end = start + len(tokens)
            case Preview():
                told.previews.append(message)
            case Finished(_, reason, statistics):
                told.reason, told.statistics = reason, Statistics.from_json(statistics)

    def ask(self, submit: Submit) -> Told:
        self.endpoint.send(submit)
        told = Told()
        self.until(Finished, told)
        return told


class NotingPacker(RowPacker):
    """Notes in which forms distributions travel."""

    forms: set[str]

    def prepare(self, message: DraftTokens) -> tuple[DraftTokens, list[torch.Tensor]]:
        prepared, announced = super().prepare(message)
        self.forms.update(form_of(row) for row in packed(prepared).rows)  # type: ignore[attr-defined]
        return prepared, announced


def form_of(row: PackedRow | AnnouncedRow) -> str:
    if isinstance(row, AnnouncedRow):
        return "announced"
    return "dense" if row.ids is None else "sparse"


class Loops:
    """A target worker in a thread, and drafts and fronts that connect to it."""

    def __init__(
        self,
        listener: Endpoint,
        connect: Callable[[], Endpoint],
        vocab: int = 32,
        alpha: float = 0.5,
        draft_timeout: float = 120.0,
        expects_draft: bool = True,
        channel: Channels | None = None,
        slots: int = 1,
        wrap: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
    ) -> None:
        torch.set_num_threads(1)
        self.connect, self.vocab, self.alpha, self.slots = connect, vocab, alpha, slots
        self.target_model = Hanging(vocab, alpha_pair(vocab, alpha)[0], CONTEXT)
        self.forms: set[str] = set()  # in which the drafts' distributions left
        self.errors: list[BaseException] = []
        self._stop, self._ready, self._lost = threading.Event(), threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._endpoints = [listener]
        self._channel = channel
        settings = TargetSettings(vocab, CONTEXT, DIGEST, draft_timeout, expects_draft, slots)
        self._start(
            lambda: TargetWorker(
                listener,
                TargetExecutor(wrap(self.target_model)),
                settings,
                self._ready.set,
                self._stop.is_set,
                Tracer(),
                (lambda: channel(0)) if channel else None,
            ).run()
        )

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except DraftLost:
                self._lost.set()  # told that it was given up, a draft ends
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def endpoint(self) -> Endpoint:
        self._endpoints.append(self.connect())
        return self._endpoints[-1]

    def draft(
        self,
        digest: bytes = DIGEST,
        stop: threading.Event | None = None,
        kind: type[Hanging] = Hanging,
        wrap: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
        chains: bool | None = None,
    ) -> Hanging:
        """Starts a draft worker; returns its model. `chains`: as on a GPU."""
        endpoint = wrap(self.endpoint())
        model = kind(self.vocab, alpha_pair(self.vocab, self.alpha)[1], CONTEXT)
        stop = stop or self._stop

        def welcomed(welcome: Welcome) -> tuple[DraftExecutor, RowPacker]:
            packer = NotingPacker(self._channel(1) if self._channel else None)
            packer.forms = self.forms
            return DraftExecutor(ModelProposer(model, welcome.vocab_size, chains=chains, texts=self.slots)), packer

        def run() -> None:
            try:
                DraftWorker(endpoint, hello, welcomed, lambda: None, stop.is_set, 0.2, Tracer(), slots=self.slots).run()
            finally:
                endpoint.close()  # as its process would

        hello = Hello(PROTOCOL_VERSION, Role.DRAFT, self.vocab, CONTEXT, digest)
        self._start(run)
        return model

    def front(self) -> Front:
        return Front(self.endpoint())

    def wait_lost(self) -> None:
        assert self._lost.wait(BOUND), "no draft has been told that it was given up"

    def wait_ready(self) -> None:
        assert self._ready.wait(BOUND), self.errors

    def close(self) -> None:
        self.target_model.release.set()
        self._stop.set()
        for thread in self._threads:
            thread.join(BOUND)
            assert not thread.is_alive(), "a loop did not end"
        for endpoint in self._endpoints:
            endpoint.close()


MakeLoops = Callable[..., Loops]


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[MakeLoops]:
    """Makes `Loops` over "memory", "ipc" or "tcp"; at the end none of their threads may have died of an error."""
    with ExitStack() as stack:

        def make(control: str = "memory", **settings: object) -> Loops:
            if control == "memory":
                hub = memory_hub()
                made = Loops(hub.listener, hub.connect, **settings)  # type: ignore[arg-type]
            else:
                tmp_path.chmod(0o700)
                listener = ZmqListener(bind_address(control, tmp_path))
                connect = lambda: ZmqConnection(listener.address)  # noqa: E731
                made = Loops(listener, connect, **settings)  # type: ignore[arg-type]
            stack.callback(made.close)
            stack.callback(lambda: made.errors and pytest.fail(f"a loop failed: {made.errors!r}"))
            return made

        yield make


def submission(new: int, method: str = "pearl", sampling: Sampling = WARM, request: int = 1, **decoding: str) -> Submit:
    return Submit(request, PROMPT, len(PROMPT) + new, RequestOptions(method, **decoding, sampling=sampling))  # type: ignore[arg-type]


def simulated(submit: Submit, vocab: int = 32, alpha: float = 0.5) -> list[int]:
    """The same request under the virtual clock, distributions handed over as they are."""
    runners = (ToyRunner(vocab, distribution) for distribution in alpha_pair(vocab, alpha))
    return simulate(submit, *paired_executors(*runners), Timing(1.0, lambda _: 4.0)).tokens


GREEDY = Sampling()

# ---- the same text, whatever carries it ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("window", ["stream", "fixed"])
def test_greedy_text_is_the_simulators(loops: MakeLoops, method: str, window: str) -> None:
    pair = loops()
    pair.draft()
    submit = submission(60, method, GREEDY, window=window)
    told = pair.front().ask(submit)
    assert told.tokens == simulated(submission(60, "ar", GREEDY))
    assert told.reason is FinishReason.LENGTH
    assert not pair.forms, "greedy decoding needs no distributions"


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("window", ["stream", "fixed"])
@pytest.mark.parametrize("method", ["pearl", "pearl-no-pre-verify"])
def test_sampled_text_is_the_simulators(loops: MakeLoops, method: str, window: str, rule: str) -> None:
    """Invariant 5: threads, timing and window leave no trace in the text."""
    pair = loops()
    pair.draft()
    told = pair.front().ask(submission(120, method, rule=rule, window=window))
    assert told.tokens == simulated(submission(120, rule=rule))


CHAINED = [("pearl", "ratio", WARM), ("pearl-no-pre-verify", "ratio", WARM)]
CHAINED += [(method, "coupled", sampling) for method in METHODS for sampling in (WARM, GREEDY)]


@pytest.mark.parametrize(("method", "rule", "sampling"), CHAINED, ids=str)
def test_text_of_chained_forwards_is_the_simulators(
    loops: MakeLoops, method: str, rule: str, sampling: Sampling
) -> None:
    pair = loops()
    pair.draft(chains=True)
    front = pair.front()
    for request in range(2):
        submit = submission(120, method, sampling, request, rule=rule, window="fixed")
        assert front.ask(submit).tokens == simulated(submit)


def test_coupled_text_is_plain_seeded_decoding(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    front = pair.front()
    texts = [front.ask(submission(80, method, rule="coupled", request=i)).tokens for i, method in enumerate(METHODS)]
    assert all(text == texts[0] for text in texts)


def _memory_channel(_: Path) -> Channels:
    ends = memory_channels(VOCAB, BOUND)
    return lambda rank: ends[rank]


def _gloo_channel(directory: Path) -> Channels:
    cpu = torch.device("cpu")
    return lambda rank: ProcessGroupChannel("gloo", directory / "group", "rows", rank, VOCAB, cpu, BOUND)


VOCAB = 512  # large enough for distributions to be dense
CARRIERS = {"frames": (None, "dense"), "memory": (_memory_channel, "announced")}
CARRIERS["gloo"] = (_gloo_channel, "announced")


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("control", ["memory", "ipc", "tcp"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_ratio_rule_gives_the_same_text_over_every_transport(
    loops: MakeLoops, tmp_path: Path, carrier: str, control: str, chains: bool
) -> None:
    """A row that came late, twice, or to the wrong position would change what is accepted."""
    make_channel, form = CARRIERS[carrier]
    pair = loops(control, vocab=VOCAB, alpha=0.7, channel=make_channel(tmp_path) if make_channel else None)
    pair.draft(chains=chains)
    front = pair.front()
    for request in range(2):  # the second finds the channel in step still
        submit = submission(100, sampling=replace(WARM, seed=request), request=request)
        assert front.ask(submit).tokens == simulated(submit, VOCAB, 0.7)
    assert pair.forms == {form}


@pytest.mark.parametrize("control", ["memory", "ipc", "tcp"])
def test_sparse_rows_give_the_same_text(loops: MakeLoops, control: str) -> None:
    pair = loops(control, vocab=VOCAB, alpha=0.7)
    pair.draft()
    submit = submission(100, sampling=replace(WARM, top_k=20))
    assert pair.front().ask(submit).tokens == simulated(submit, VOCAB, 0.7)
    assert pair.forms == {"sparse"}


def test_statistics_add_up(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    told = pair.front().ask(submission(200))
    s = told.statistics
    assert sum(s.provenance.values()) == s.num_generated_tokens == len(told.tokens) == 200
    assert s.num_accepted_draft_tokens == s.provenance["accepted"]
    assert s.num_judged_draft_tokens == s.provenance["accepted"] + s.provenance["corrected"]
    assert s.num_draft_tokens >= s.num_judged_draft_tokens
    assert sum(s.run_histogram.values()) == s.provenance["corrected"]
    assert 0.3 < s.acceptance_rate < 0.7  # 0.5 by construction; 200 tokens, so within six deviations
    assert not s.draft_lost


def test_preview_comes_only_on_request(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    front = pair.front()
    assert not front.ask(submission(60, request=1)).previews
    told = front.ask(replace(submission(60, request=2), preview=True))
    assert any(preview.tokens for preview in told.previews)
    assert told.tokens == simulated(submission(60)), "a preview is no part of the text"


def test_cache_is_kept_from_one_request_to_the_next(loops: MakeLoops) -> None:
    """A chat sends its whole history again: of a known prefix only the last token may be fed once more."""
    pair = loops()
    draft = pair.draft()
    front = pair.front()
    text = front.ask(submission(100, sampling=GREEDY)).tokens
    target_forwards, draft_forwards = len(pair.target_model.fed), len(draft.fed)
    longer = (*PROMPT, *text[:90])
    again = front.ask(replace(submission(0, sampling=GREEDY, request=2), prompt=longer, limit=len(longer) + 5))
    assert again.tokens == text[90:95]
    assert pair.target_model.fed[target_forwards] == 1
    assert draft.fed[draft_forwards] <= 2


# ---- fronts ----


def test_requests_of_two_fronts_are_served_in_turn(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    one, two = pair.front(), pair.front()
    one.endpoint.send(submission(300, request=5))
    two.endpoint.send(submission(50, request=5))  # the fronts' own numbers may coincide
    told = [Told(), Told()]
    two.until(Finished, told[1])
    one.until(Finished, told[0])
    assert [len(t.tokens) for t in told] == [300, 50]
    assert told[0].tokens[:40] == told[1].tokens[:40] == simulated(submission(40))


def test_fronts_take_turns_however_much_one_has_asked_for(loops: MakeLoops) -> None:
    """Another front's text waited for all of one's 64, which could take hours."""
    pair = loops(expects_draft=False)
    greedy, modest = pair.front(), pair.front()
    for number in range(1, 9):
        greedy.endpoint.send(submission(CONTEXT - 10, "ar", request=number))
    greedy.until(Committed)
    modest.endpoint.send(submission(20, "ar"))
    modest.endpoint.send(Ping(1))
    modest.until(Pong)  # it waits
    greedy.endpoint.send(Cancel(5))
    greedy.endpoint.send(Cancel(1))
    while greedy.until(Committed).request != 2:  # type: ignore[attr-defined]
        pass
    greedy.endpoint.send(Cancel(2))
    told = Told()
    modest.until(Finished, told)
    assert told.reason is FinishReason.LENGTH
    while greedy.until(Committed).request != 3:  # type: ignore[attr-defined]
        pass


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
    for front, first in zip(fronts, (1, 9, 2), strict=True):
        front.endpoint.send(Submit(1, (first, 4), 22, RequestOptions("ar", sampling=Sampling(0.0))))
    for front, first in ((fronts[0], 1), (fronts[2], 2)):
        front.until(Finished, told := Told())
        assert told.tokens == list(greedy_text([first, 4], 20))
    with pytest.raises(RequestError, match="no memory is left"):
        fronts[1].until(Finished)


def test_cancelled_request_ends_and_the_next_is_served(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    front = pair.front()
    front.endpoint.send(submission(CONTEXT - 10, request=1))
    front.until(Committed)
    front.endpoint.send(submission(20, request=2))  # waits its turn
    front.endpoint.send(submission(20, request=3))
    front.endpoint.send(Cancel(2))  # while it waits
    front.endpoint.send(Cancel(99))  # never heard of
    front.endpoint.send(Cancel(1))
    ended = [front.until(Finished) for _ in range(3)]
    assert {e.request: e.reason for e in ended} == {  # type: ignore[attr-defined]
        1: FinishReason.CANCELLED,
        2: FinishReason.CANCELLED,
        3: FinishReason.LENGTH,
    }


@pytest.mark.parametrize("control", ["memory", "ipc", "tcp"])
def test_front_that_vanishes_takes_its_request_with_it(loops: MakeLoops, control: str) -> None:
    """Its request would run for hours: nobody else would ever be served."""
    pair = loops(control)
    pair.draft()
    leaver, stayer = pair.front(), pair.front()
    leaver.endpoint.send(submission(CONTEXT - 10))
    leaver.until(Committed)
    leaver.endpoint.close()
    assert stayer.ask(submission(50)).tokens == simulated(submission(50))


@pytest.mark.parametrize("control", ["ipc", "tcp"])
def test_front_that_does_not_read_delays_nobody(loops: MakeLoops, control: str) -> None:
    pair = loops(control, expects_draft=False)
    slow, quick = pair.front(), pair.front()
    slow.endpoint.send(submission(5000, "ar", GREEDY))
    assert quick.ask(submission(20, "ar", GREEDY)).reason is FinishReason.LENGTH  # served after it, so it is done
    told = Told()
    slow.until(Finished, told)
    assert len(told.tokens) == 5000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": (), "limit": 5}, "empty"),
        ({"prompt": (1, 32), "limit": 5}, "token id 32"),
        ({"limit": CONTEXT + 1}, "context"),
        ({"limit": 3}, "limit 3"),
        ({"sampling": Sampling(1e308)}, "greatest temperature"),
        ({"sampling": Sampling(1e-5)}, "least temperature"),
        ({"sampling": Sampling(1.0, top_p=5e-324)}, "least top_p"),
        ({"sampling": Sampling(1.0, min_p=5e-324)}, "least min_p"),
    ],
)
def test_impossible_request_is_refused_before_any_work(loops: MakeLoops, change: dict[str, int], said: str) -> None:
    pair = loops(expects_draft=False)
    front = pair.front()
    with pytest.raises(RequestError, match=said):
        front.ask(replace(submission(20, "ar"), **change))  # type: ignore[arg-type]
    assert not pair.target_model.fed
    assert front.ask(submission(20, "ar", request=2)).reason is FinishReason.LENGTH


def test_front_of_another_version_is_refused(loops: MakeLoops) -> None:
    pair = loops(expects_draft=False)
    endpoint = pair.endpoint()
    endpoint.send(Hello(PROTOCOL_VERSION + 1, Role.FRONT, 0, 0))
    answer = first(endpoint, Error)
    assert str(PROTOCOL_VERSION + 1) in answer.message
    assert pair.front().ask(submission(5, "ar")).tokens


def first(endpoint: Endpoint, kind: type) -> object:
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        for _, message in endpoint.receive(0.2):
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} within {BOUND} s")


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


@pytest.mark.parametrize("control", ["memory"])
def test_garbage_from_fronts_and_strangers_is_answered_and_survived(loops: MakeLoops, control: str) -> None:
    pair = loops(control)
    pair.draft()
    front, stranger = pair.front(), pair.endpoint()
    for frames in GARBAGE:
        for endpoint in (front.endpoint, stranger):
            endpoint.send_frames(frames)  # type: ignore[attr-defined]
            assert first(endpoint, Error).kind == "RemoteProtocolError"
    for message in (
        submission(5),
        Welcome(1, 1, 1, 1, 0.0, (), 1),
        Verdict(1, 0, 0, (1,), 5, 0),
        Committed(1, 0, (), ()),
    ):
        stranger.send(message)  # it never said hello
        assert first(stranger, Error).kind == "RemoteProtocolError"
    stranger.send(DraftTokens(1, 0, 3, (1,)))  # as from a draft that was replaced: ignored
    stranger.send(Resync(1, 0))
    stranger.send(Cancel(1))  # as from a front that closed amid a text, and was found gone before this was read
    stranger.send(Ping(5))
    assert first(stranger, Pong).sent == 5
    assert front.ask(submission(50)).tokens == simulated(submission(50))


def test_rows_of_who_is_not_the_draft_are_not_unpacked(loops: MakeLoops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few bytes each would become a whole vocabulary: 28 KB made 1.2 GB. Nor do they reach a draft that joins."""
    unpacked: list[object] = []
    monkeypatch.setattr(PackedRow, "unpack", lambda row, vocab: unpacked.append(row))
    pair = loops(expects_draft=False)
    stranger, front = pair.endpoint(), pair.front()
    message = DraftTokens(1, 0, len(PROMPT), (1,), rows=(_sparse([1], [1.0]),))
    front.endpoint.send(submission(2000, "ar"))
    front.until(Committed)
    stranger.send(message)
    # All at once, so that it is read before the loop has met the draft.
    for one in (
        Hello(PROTOCOL_VERSION, Role.DRAFT, pair.vocab, CONTEXT, DIGEST),
        Heartbeat(0, "calibrated", 1, 1e-3),
        *(replace(message, request=request, epoch=epoch) for request in (1, 2) for epoch in range(3)),
    ):
        stranger.send(one)
    front.until(Finished)
    assert not unpacked


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND} s: {what}"
        time.sleep(0.01)


class FakeDraft:
    """A draft in the test's hands: it is admitted as a good one, and waits for the first Begin."""

    def __init__(self, pair: Loops) -> None:
        self.endpoint = pair.endpoint()
        self.endpoint.send(Hello(PROTOCOL_VERSION, Role.DRAFT, pair.vocab, CONTEXT, DIGEST))
        first(self.endpoint, Welcome)
        self.endpoint.send(Heartbeat(0, "calibrated", 1, 1e-3))

    def say(self, *messages: DraftTokens | Resync | list[bytes]) -> None:
        begin = first(self.endpoint, Begin)
        assert isinstance(begin, Begin)
        for message in messages:
            if isinstance(message, list):
                self.endpoint.send_frames(message)  # type: ignore[attr-defined]
            else:
                self.endpoint.send(replace(message, request=begin.request))


def _sparse(ids: Sequence[int], probs: Sequence[float]) -> PackedRow:
    return PackedRow(torch.tensor(probs).numpy().tobytes(), torch.tensor(ids, dtype=torch.int32).numpy().tobytes())


KINDS = (torch.int32, torch.float32)  # of a sparse row's ids and probabilities
NAN = float("nan")
LIES: dict[str, DraftTokens | list[bytes]] = {
    "no msgpack": [b"\xc1"],
    "a future epoch": DraftTokens(0, 3, len(PROMPT), (1,)),
    "beyond draft_until": DraftTokens(0, 0, len(PROMPT), (1,) * 1000),
    "a token that is none": DraftTokens(0, 0, len(PROMPT), (100_000,), rows=(_sparse([1], [1.0]),)),
    "no distribution": DraftTokens(0, 0, len(PROMPT), (1,)),
    "a distribution of another size": DraftTokens(0, 0, len(PROMPT), (1,), rows=(PackedRow(b"\0" * 4 * 31),)),
    "ids out of range": DraftTokens(0, 0, len(PROMPT), (1,), rows=(_sparse([32], [1.0]),)),
    "a negative id": DraftTokens(0, 0, len(PROMPT), (1,), rows=(_sparse([-1], [1.0]),)),
    "NaN": DraftTokens(0, 0, len(PROMPT), (1,), rows=(_sparse([1], [NAN]),)),
    "dense NaN": DraftTokens(0, 0, len(PROMPT), (1,), rows=(PackedRow(torch.full((32,), NAN).numpy().tobytes()),)),
    "negative": DraftTokens(0, 0, len(PROMPT), (1,), rows=(_sparse([1, 2], [2.0, -1.0]),)),
    "more ids than a dense one has room for": DraftTokens(
        0, 0, len(PROMPT), (1,), rows=(_sparse([1] * 17, [1.0] * 17),)
    ),
    "nothing": DraftTokens(0, 0, len(PROMPT), (1,), rows=(PackedRow(b"\0" * 4 * 32),)),
    "sparsely nothing": DraftTokens(0, 0, len(PROMPT), (1,), rows=(_sparse([1], [0.0]),)),
    "a channel that is not there": DraftTokens(0, 0, len(PROMPT), (1,), rows=(AnnouncedRow(),)),
}


@pytest.mark.parametrize("vocab", [5, 127, 128, 300])
@pytest.mark.parametrize("possible", [1, 3, 1000])
def test_a_row_arrives_as_it_was(vocab: int, possible: int) -> None:
    """Few tokens of a small or a large vocabulary, or all of it; the ids in whatever order they come."""
    row = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab))
    row[possible:] = 0
    row /= row.sum()
    prepared, announced = RowPacker().prepare(DraftTokens(1, 0, 3, (1,), rows=(row,)))
    (sent,) = packed(prepared).rows  # type: ignore[attr-defined]
    assert not announced
    assert form_of(sent) == ("sparse" if min(possible, vocab) < vocab // 8 else "dense")
    assert torch.equal(sent.unpack(vocab), row)
    if sent.ids is not None:
        parts = zip((sent.ids, sent.probs), KINDS, strict=True)
        ids, weights = (torch.frombuffer(bytearray(part), dtype=kind) for part, kind in parts)
        assert torch.equal(_sparse(ids.flip(0).tolist(), weights.flip(0).tolist()).unpack(vocab), row)
        with pytest.raises(RemoteProtocolError):
            sent.unpack(len(ids) - 1)


def test_of_a_few_bytes_no_vocabularies_are_made_before_they_are_judged() -> None:
    """The thread that reads messages made them of all that came: of 8 MB, with an id for every page, 4 GiB."""
    vocab = 1 << 18
    executor = TargetExecutor(ToyRunner(vocab, alpha_pair(32, 0.5)[0]))
    link = DraftLink(TargetSettings(vocab, CONTEXT, DIGEST, 1.0, True), executor, None)
    link.peer = b"draft"

    def examined(*rows: PackedRow) -> DraftTokens:
        message = link.examined(b"draft", DraftTokens(1, 0, 3, (1,) * len(rows), rows=rows))
        assert isinstance(message, DraftTokens)
        return message

    many, few = (examined(*(_sparse([1], [1.0]) for _ in range(count))) for count in (2048, 8))
    assert sum(row.nbytes for row in many.rows) == 8 * 2048
    assert {type(row) for row in few.rows} == {torch.Tensor}, "beside a forward, as the rows of any window are"
    assert weigh(few) > 8 * 4 * vocab
    with pytest.raises(RemoteProtocolError, match="no distribution"):
        examined(*[_sparse([1], [1.0])] * 2047, _sparse([1], [2.0]))


def test_rows_that_came_packed_are_judged_as_others() -> None:
    executor = TargetExecutor(ToyRunner(32, alpha_pair(32, 0.5)[0]))
    executor.execute(Open(PROMPT, RequestOptions(sampling=WARM)))
    executor.execute(Forward(Phase.PREFILL, 0, PROMPT, 1))
    dense = torch.softmax(torch.randn(32, generator=torch.Generator().manual_seed(1)), -1)
    sparse = torch.zeros(32)
    sparse[[1, 5]] = torch.tensor([0.25, 0.75])
    for probs in (dense, sparse):
        rows = (probs, pack(probs))
        one, other = (executor.execute(Judge(len(PROMPT), (5,), (each,), (len(PROMPT) - 1,))) for each in rows)
        assert one == other


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, NO_GPU])])
def test_a_row_is_judged_where_it_was_brought(device: str) -> None:
    runner = load_runner(str(tiny_model()), device=torch.device(device), dtype="float32", max_context=64)
    executor = TargetExecutor(runner)
    executor.execute(Open(PROMPT, RequestOptions(sampling=WARM)))
    executor.execute(Forward(Phase.PREFILL, 0, PROMPT, 1))
    rows = [torch.softmax(torch.randn(runner.vocab_size), -1) for _ in range(2)]
    brought = [executor.bring(pack(row)) for row in rows]
    judges = (Judge(len(PROMPT), (5,), (row,), (len(PROMPT) - 1,)) for row in (rows[0], brought[0]))
    here, there = map(executor.execute, judges)
    assert here == there
    assert all(torch.equal(found.cpu(), row) for found, row in zip(brought, rows, strict=True))


def test_a_row_for_which_there_is_no_memory_does_not_end_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is brought by the thread that reads messages, and nobody survives its end."""

    def full(stream: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    current: list[object] = []
    executor = TargetExecutor(ToyRunner(32, alpha_pair(32, 0.5)[0]))
    executor._uploads = object()  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "stream", full)
    row = torch.ones(32) / 32
    assert torch.equal(executor.bring(pack(row)), row)
    assert current == [executor.runner.device], "that thread's own device is GPU 0, whichever the target has"


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_draft_is_dropped_and_the_request_goes_on(loops: MakeLoops, lie: str) -> None:
    """A draft may be broken; it must never take the target with it, nor leave a mark on what is drawn."""
    pair = loops()
    fake = FakeDraft(pair)
    front = pair.front()
    front.endpoint.send(submission(40))
    fake.say(LIES[lie])
    told = Told()
    front.until(Finished, told)
    assert told.statistics.draft_lost
    assert told.tokens == simulated(submission(40, "ar")), "alone from the first token on: every draw is direct"


@pytest.mark.parametrize("method", ["sd", "pearl-no-pre-verify", "pearl-no-post-verify"])
def test_a_pause_behind_nothing_is_a_lie(loops: MakeLoops, method: str) -> None:
    """No token to verify, and none to wait for: it ended the target, which was left to verify nothing."""
    pair = loops()
    fake = FakeDraft(pair)
    front = pair.front()
    front.endpoint.send(submission(40, method))
    row = _sparse([1], [1.0])
    fake.say(
        *(DraftTokens(0, 0, at, tokens, rows=(row,) * len(tokens), paused=True) for at, tokens in ((3, (1,)), (4, ())))
    )
    told = Told()
    front.until(Finished, told)
    assert told.statistics.draft_lost
    assert len(told.tokens) == 40


LIVELY: dict[str, Callable[[int], Message]] = {
    "answers": lambda number: Pong(number, number),
    "says that it drafts": lambda number: Heartbeat(number, "drafting", 0),
    "says that it reads": lambda number: Heartbeat(number, "prefill", 9, 1e9),
    "says now this and now that": lambda number: Heartbeat(number, ("waiting", "drafting")[number % 2], 0),
    "joins again and again": lambda number: Heartbeat(0, "calibrated", 1, 1e-3),
    "asks for the prefix": lambda number: Resync(1, number),
    "drafts for nobody": lambda number: DraftTokens(77, 0, 3, (1,)),
    "drafts what has been": lambda number: DraftTokens(1, 0, 0, (1,)),
}


@pytest.mark.parametrize("says", LIVELY)
def test_a_draft_that_lives_and_sends_no_token_is_not_waited_for_without_end(loops: MakeLoops, says: str) -> None:
    """It is not silent, so it was waited for as long as it pleased; now the request goes on without it."""
    pair = loops(draft_timeout=0.05)
    fake, front, told, has_ended = FakeDraft(pair), pair.front(), Told(), threading.Event()

    def speak() -> None:
        first(fake.endpoint, Begin)
        for number in range(10_000):
            if has_ended.wait(0.02):
                return
            with suppress(TransportError):
                fake.endpoint.send(LIVELY[says](number))

    with ThreadPoolExecutor(1) as speaking:
        spoken = speaking.submit(speak)
        front.endpoint.send(submission(20))
        try:
            front.until(Finished, told)
        finally:
            has_ended.set()
        spoken.result()
    assert told.statistics.draft_lost
    assert told.tokens == simulated(submission(20, "ar"))


AGAIN: dict[str, Callable[[int], list[Message]]] = {
    "asks": lambda number: [Resync(1, number)],
    "leaves gaps": lambda number: [DraftTokens(1, number, 4, (1,))],
    "drafts before each gap": lambda number: [DraftTokens(1, number, 3, (1,)), DraftTokens(1, number, 6, (1,))],
    "joins": lambda number: [Heartbeat(0, "calibrated", 1, 1e-3)],
    "rests, and drafts for nobody": lambda _: [*[Heartbeat(0, "waiting", 0)] * 2, DraftTokens(77, 0, 3, (1,))],
}


@pytest.mark.parametrize("way", AGAIN)
def test_whole_prefixes_do_not_pile_up_for_a_draft_that_reads_none(loops: MakeLoops, way: str) -> None:
    """Each was sent at once: as many as the queue holds, 65,536, of up to half a megabyte."""
    pair = loops()
    fake, front, told = FakeDraft(pair), pair.front(), Told()
    front.endpoint.send(replace(submission(40), decoding=RequestOptions("pearl", "fixed", 4, "coupled")))
    first(fake.endpoint, Begin)
    has_ended = threading.Event()

    def speak() -> None:
        for number in range(100_000):
            # The first 200 at once; then until it has ended, for some ways count only while the target waits.
            if has_ended.wait(0.0 if number < 200 else 0.005):
                return
            with suppress(TransportError):
                for message in AGAIN[way](number):
                    fake.endpoint.send(message)

    with ThreadPoolExecutor(1) as speaking:
        spoken = speaking.submit(speak)
        try:
            front.until(Finished, told)
        finally:
            has_ended.set()
        spoken.result()
    assert told.statistics.draft_lost
    assert told.tokens == simulated(submission(40, "ar"))
    begun = 0
    for message in iter(lambda: fake.endpoint.receive(0.1), []):
        begun += sum(isinstance(each, Begin) for _, each in message)
    assert begun < 30


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_draft_may_not_say_now_with_distributions_and_now_without(loops: MakeLoops, rule: str) -> None:
    """Where the rule needs none they are dropped. They ended the target: a branch had fewer of them than tokens."""
    pair = loops()
    fake = FakeDraft(pair)
    front = pair.front()
    front.endpoint.send(replace(submission(40), decoding=RequestOptions("pearl", "fixed", 64, rule, branches=4)))
    row = _sparse([1], [1.0])
    branch = DraftTokens(0, 0, 9, (1,), rows=(row,), after=(8, 5), known=3)
    main = DraftTokens(0, 0, 3, (1,) * 20, rows=(row,) * 20, known=3)
    fake.say(main, branch, replace(branch, start=10, rows=()), [b"\xc1"])
    told = Told()
    front.until(Finished, told)
    assert told.statistics.draft_lost
    if rule == "coupled":
        assert told.tokens == simulated(submission(40, "ar"))


def test_what_a_draft_says_of_a_request_before_it_is_begun_is_dropped() -> None:
    """Nobody can have told it what the rule needs, and numbers can be guessed."""
    executor = TargetExecutor(ToyRunner(32, alpha_pair(32, 0.5)[0]))
    link = DraftLink(TargetSettings(32, CONTEXT, DIGEST, 1.0, True), executor, None)
    rows = (torch.ones(32) / 32,)
    without = DraftTokens(1, 0, 3, (5,))
    assert link.with_needed_rows(without) is None
    executor.execute(Open(PROMPT, RequestOptions(rule="coupled", sampling=WARM), request=1))
    assert link.with_needed_rows(replace(without, rows=rows)) == without
    executor.execute(Open(PROMPT, RequestOptions(sampling=WARM), request=1))
    assert link.with_needed_rows(replace(without, rows=rows)) == replace(without, rows=rows)
    with pytest.raises(RemoteProtocolError, match="what the rule needs"):
        link.with_needed_rows(without)


def test_stale_and_duplicate_draft_messages_are_dropped_and_counted(loops: MakeLoops) -> None:
    pair = loops()
    fake = FakeDraft(pair)
    front = pair.front()
    front.endpoint.send(submission(3, sampling=GREEDY, window="fixed", gamma=1))  # type: ignore[arg-type]
    text = simulated(submission(3, "ar", GREEDY))
    wrong = (text[0] + 1) % 32
    fake.say(DraftTokens(0, 0, 3, (wrong,)))
    verdict = first(fake.endpoint, Verdict)
    assert isinstance(verdict, Verdict)
    assert verdict.tokens == (text[0],)
    request, epoch = verdict.request, verdict.epoch
    for message in (
        DraftTokens(request, epoch - 1, 4, (9,)),  # stale: what it had sent before it knew
        DraftTokens(request, epoch, 4, (text[1],)),
        DraftTokens(request, epoch, 4, (text[1],)),  # a known start again
        DraftTokens(request, epoch, 5, (text[2],)),
    ):
        fake.endpoint.send(message)
    told = Told()
    front.until(Finished, told)
    assert told.statistics.stale == 1
    assert told.tokens == text


# ---- drafts that come and go ----


@pytest.mark.parametrize("version_and_digest", [(PROTOCOL_VERSION, b"other tokens"), (PROTOCOL_VERSION + 1, DIGEST)])
def test_unfit_draft_is_refused_and_a_fit_one_then_admitted(
    loops: MakeLoops, version_and_digest: tuple[int, bytes]
) -> None:
    pair = loops()
    version, digest = version_and_digest
    endpoint = pair.endpoint()
    worker = DraftWorker(
        endpoint,
        Hello(PROTOCOL_VERSION, Role.DRAFT, 32, CONTEXT, digest),
        lambda _: pytest.fail("it was welcomed"),
        lambda: None,
        lambda: False,
        1.0,
        Tracer(),
    )
    worker._hello = replace(worker._hello, version=version)
    with pytest.raises(ModelError, match=r"does not fit|version"):
        worker.run()
    pair.draft()
    assert pair.front().ask(submission(30)).tokens == simulated(submission(30))


def _hanging_request(pair: Loops, new: int) -> tuple[Hanging, Front]:
    """A running request whose draft hangs after some tokens."""
    draft = pair.draft()
    front = pair.front()
    draft.after = len(draft.fed) + 10
    front.endpoint.send(submission(new, sampling=GREEDY))
    return draft, front


@pytest.mark.parametrize("control", ["memory", "ipc"])
def test_request_survives_a_draft_that_hangs(loops: MakeLoops, control: str) -> None:
    pair = loops(control, draft_timeout=0.5)
    draft, front = _hanging_request(pair, 100)
    told = Told()
    front.until(Finished, told)
    assert told.tokens == simulated(submission(100, sampling=GREEDY))
    assert told.statistics.draft_lost
    assert told.statistics.num_draft_tokens <= 10
    assert told.statistics.provenance["direct"] >= 80
    again = front.ask(submission(20, sampling=GREEDY, request=2))
    assert again.statistics.provenance == {"direct": 20}, "nobody waits for it any more"
    draft.release.set()


def test_request_survives_a_draft_that_ends(loops: MakeLoops) -> None:
    """Its socket is gone, so this is noticed at once, however long draft_timeout is."""
    pair = loops("ipc", draft_timeout=1000.0)
    fake = FakeDraft(pair)
    front = pair.front()
    front.endpoint.send(submission(60))
    first(fake.endpoint, Begin)
    fake.endpoint.close()
    told = Told()
    front.until(Finished, told)
    assert told.statistics.draft_lost
    assert told.tokens == simulated(submission(60, "ar"))


def test_second_draft_takes_over_in_mid_request(loops: MakeLoops) -> None:
    """A restarted draft is given the whole prefix; what its predecessor still says when it wakes up is not heard."""
    pair = loops()
    first, front = _hanging_request(pair, 300)
    front.until(Committed)
    pair.draft()
    told = Told()
    front.until(Finished, told)
    text = simulated(submission(300, sampling=GREEDY))
    assert told.tokens == text[-len(told.tokens) :]
    assert told.statistics.num_draft_tokens > 20, "the second one drafted"
    assert told.statistics.resyncs >= 1
    first.release.set()
    again = front.ask(submission(300, request=2))
    assert again.tokens == simulated(submission(300))
    assert not again.statistics.draft_lost


def test_draft_that_was_given_up_ends_and_another_takes_its_place(loops: MakeLoops) -> None:
    """It wakes up, reads that it was given up, and ends; its launcher starts a sound one."""
    pair = loops(draft_timeout=0.5)
    draft, front = _hanging_request(pair, 100)
    assert front.ask(submission(10, sampling=GREEDY, request=2)).tokens  # both done, alone
    draft.release.set()
    pair.wait_lost()
    pair.draft()
    told = Told()
    deadline = time.monotonic() + BOUND
    for request in range(3, 10_000):
        told = front.ask(submission(50, request=request))
        if told.statistics.num_accepted_draft_tokens or time.monotonic() > deadline:
            break
    assert told.statistics.num_accepted_draft_tokens
    assert front.ask(submission(50, request=20_000)).tokens == simulated(submission(50))


class Ailing(Hanging):
    """A model that is `pause` seconds slower from forward `after` on."""

    pause = 0.0

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if len(self.fed) >= self.after:
            time.sleep(self.pause)
        self.fed.append(len(feeds[0].tokens))
        return ToyRunner.forward(self, feeds)


@pytest.mark.parametrize("method", ["sd", "pearl", "pearl-no-pre-verify", "pearl-no-post-verify"])
def test_draft_that_becomes_far_too_slow_is_given_up(loops: MakeLoops, method: str) -> None:
    """It sends tokens and beats, so it is not silent; but each token costs more than it can save."""
    pair = loops(draft_timeout=1000.0)
    draft = pair.draft(kind=Ailing)
    assert isinstance(draft, Ailing)
    front = pair.front()
    draft.after, draft.pause = len(draft.fed) + 10, 0.2
    told = front.ask(replace(submission(100, method, GREEDY), decoding=RequestOptions(method, gamma=4)))
    assert told.tokens == simulated(submission(100, sampling=GREEDY))
    assert told.statistics.draft_lost
    assert told.statistics.provenance["direct"] > 50
    pair.wait_lost()


class Chainwise(Hanging):
    """A model that takes no trees, and a quarter of a millisecond for each token."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, tree_nodes=0)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        time.sleep(0.00025 * len(feeds[0].tokens))
        return super().forward(feeds)


def test_draft_that_searches_widely_is_not_taken_for_slow(loops: MakeLoops) -> None:
    """A token of a block takes it 50 times what a token takes, for each sequence is a forward of its own."""
    pair = loops()
    pair.draft(kind=Chainwise)
    widest = (("tau", 0.0), ("depth", 8), ("width", 16))
    told = pair.front().ask(replace(submission(24), decoding=RequestOptions("sd", rule="joint", parameters=widest)))
    assert told.statistics.num_draft_tokens > 8 * 8, "more blocks than slow tokens would end a draft"
    assert not told.statistics.draft_lost


def test_model_that_gives_no_distribution_fails_its_request_only(loops: MakeLoops) -> None:
    """NaN in the target: a named error to that front; the next request is served, from an empty cache."""
    pair = loops()
    pair.draft()
    front = pair.front()
    fine = pair.target_model._distribution
    fed = len(pair.target_model.fed)

    def broken(tokens: Sequence[int]) -> torch.Tensor:
        return fine(tokens) * (NAN if len(pair.target_model.fed) > fed + 4 else 1.0)

    pair.target_model._distribution = broken
    front.endpoint.send(submission(60))
    with pytest.raises(RequestError, match="not finite") as caught:
        front.until(Finished)
    assert caught.value.args[1:] == ("NumericalError",)
    pair.target_model._distribution = fine
    before = len(pair.target_model.fed)
    assert front.ask(submission(60, request=2)).tokens == simulated(submission(60))
    assert pair.target_model.fed[before] == len(PROMPT), "nothing of the cache was kept"


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_prompt_that_the_draft_chokes_on_ends_drafting_for_that_request_only(
    loops: MakeLoops, rule: str, chains: bool
) -> None:
    """Anybody who finds one could otherwise have the draft ended for all, each time, until it is given up."""
    pair = loops()
    draft = pair.draft(chains=chains)
    fine = draft._distribution
    draft._distribution = lambda tokens: fine(tokens) * (NAN if 30 in tokens[:4] else 1.0)
    front = pair.front()
    poisoned = replace(submission(40, rule=rule), prompt=(1, 2, 30))
    for request in range(6):
        told = front.ask(replace(poisoned, request=request))
        assert told.statistics.draft_lost
        assert told.tokens == simulated(replace(poisoned, decoding=RequestOptions("ar", rule=rule)))
        sound = submission(120, rule=rule, request=100 + request)
        told = front.ask(sound)
        assert not told.statistics.draft_lost
        assert told.statistics.num_accepted_draft_tokens
        assert told.tokens == simulated(sound)
    front.endpoint.send(replace(poisoned, request=7))
    front.endpoint.send(replace(sound, request=8))  # begins while the draft may still be at the one before
    for _ in range(2):
        told = Told()
        front.until(Finished, told)
    assert told.tokens == simulated(sound)


def test_error_is_told_to_the_request_that_failed(loops: MakeLoops) -> None:
    """Another one ends while the failing forward runs, and must not be given its error."""
    pair = loops(expects_draft=False)
    front, model = pair.front(), pair.target_model
    fine = model._distribution
    model.after = len(model.fed) + 3
    front.endpoint.send(submission(60, "ar", request=1))
    front.endpoint.send(submission(60, "ar", request=2))
    eventually(lambda: len(model.fed) == model.after, "the first text hangs")
    model._distribution = lambda tokens: fine(tokens) * NAN
    front.endpoint.send(Cancel(2))
    time.sleep(0.2)  # it waits in the inbox when the forward ends; should it come later, nothing is tested
    model.after = 1 << 60
    model.release.set()
    deadline, said = time.monotonic() + BOUND, {}
    while len(said) < 2 and time.monotonic() < deadline:
        for _, message in front.endpoint.receive(0.2):
            if isinstance(message, (Error, Finished)):
                said[message.request] = message
    assert isinstance(said[1], Error)
    assert said[1].kind == "NumericalError"
    assert isinstance(said[2], Finished)
    assert said[2].reason is FinishReason.CANCELLED


class _Crammed(Hanging):
    """A draft with memory for one sequence at a time; and for none of the text that begins with 9."""

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if len(feeds) > 1 or [*self._tokens[feeds[0].slot], *feeds[0].tokens][0] == 9:
            raise torch.OutOfMemoryError("no memory is left")
        return super().forward(feeds)


@pytest.mark.parametrize("chains", [False, True])
def test_a_draft_without_memory_for_all_drafts_one_by_one(loops: MakeLoops, chains: bool) -> None:
    """And goes on: a text for which it has none alone is the target's."""
    pair = loops(slots=3, alpha=0.9)
    pair.draft(kind=_Crammed, chains=chains)
    fronts = [pair.front() for _ in range(3)]
    for front, first in zip(fronts, (1, 9, 2), strict=True):
        front.endpoint.send(Submit(1, (first, 4), 62, RequestOptions("pearl", sampling=Sampling(0.0))))
    drafted = []
    for front in fronts:
        front.until(Finished, told := Told())
        assert len(told.tokens) == 60
        drafted.append(told.statistics.num_draft_tokens)
    assert min(drafted[0], drafted[2]) > 0 == drafted[1]
    assert fronts[0].ask(submission(20, request=2)).statistics.num_draft_tokens, "the draft was lost"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried."),
        RuntimeError("[enforce] can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=["gpu", "cpu", "graph or pinned", "cublas", "cudnn"],
)
def test_forward_without_memory_fails_its_request_only(loops: MakeLoops, error: Exception) -> None:
    pair = loops(expects_draft=False)
    front, model = pair.front(), pair.target_model
    fine = model._distribution

    def starved(_: Sequence[int]) -> torch.Tensor:
        raise error

    model._distribution = starved
    with pytest.raises(RequestError, match="Shorten the prompt") as caught:
        front.ask(submission(20, "ar"))
    assert caught.value.args[1:] == ("OutOfMemory",)
    model._distribution = fine
    assert front.ask(submission(20, "ar", request=2)).tokens == simulated(submission(20, "ar"))


def losing(lost: list[object], request: int) -> Callable[[Endpoint], Endpoint]:
    """A draft's endpoint that loses one message of a request, and puts it into `lost`."""

    def lossy(endpoint: Endpoint) -> Endpoint:
        send = endpoint.send

        def sometimes(message: object, peer: bytes | None = None) -> None:
            is_drafted = isinstance(message, DraftTokens) and message.request == request
            if is_drafted and message.start == len(PROMPT) + 5 and not lost:  # type: ignore[attr-defined]
                lost.append(message)
            else:
                send(message, peer)  # type: ignore[arg-type]

        endpoint.send = sometimes  # type: ignore[method-assign]
        return endpoint

    return lossy


@pytest.mark.parametrize("requests", [1, 4])
def test_slow_tokens_are_counted_by_request(requests: int) -> None:
    """A forward for four that was slow is one slow forward: eight of them end a draft, not two."""
    health, speeds = DraftHealth(10.0), Speeds()
    health.calibrated(0.001)
    for _ in range(2):
        for _ in range(7):
            for request in range(requests):
                health.took(request, 0.5, speeds)
        health.took(0, 0.001, speeds)
    for _ in range(7):
        for request in range(requests):
            health.took(request, 0.5, speeds)
    with pytest.raises(DraftLost, match=r"500 ms a token, where 1\.0 ms are usual"):
        health.took(0, 0.5, speeds)


def test_lost_message_is_made_good(loops: MakeLoops) -> None:
    """Target and draft wait for each other: the beats of a draft at rest tell, and it is given the whole prefix."""
    pair = loops()
    lost: list[object] = []
    pair.draft(wrap=losing(lost, 1))
    told = pair.front().ask(submission(6, window="fixed", gamma=1))  # type: ignore[arg-type]
    assert lost
    assert told.tokens == simulated(submission(6))
    assert told.statistics.resyncs == 1
    assert not told.statistics.draft_lost


def test_a_lost_message_is_made_good_while_the_draft_works_for_others(
    loops: MakeLoops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never at rest then: what tells is that it goes on with the others only."""
    monkeypatch.setattr("pearl.worker.health._NEGLECTED", 20)
    monkeypatch.setattr(DraftHealth, "stalled", lambda *_: False)  # which would tell once the others have ended
    pair = loops(slots=2)
    lost: list[object] = []
    pair.draft(wrap=losing(lost, 1))
    pair.wait_ready()
    one, other = pair.front(), pair.front()
    one.endpoint.send(submission(12, window="fixed", gamma=1))  # type: ignore[arg-type]
    asked = [submission(400, sampling=Sampling(1.0, seed=number), request=number) for number in range(1, 40)]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(one.until, Finished, told := Told())
        for request in asked:
            if not done.done():
                other.ask(request)
        done.result(BOUND)
    assert lost
    assert told.tokens == simulated(submission(12))
    assert told.statistics.resyncs == 1


def test_dead_channel_leaves_the_target_alone(loops: MakeLoops) -> None:
    """Announced rows that never come: the channel dies, the draft with it, the request does not."""
    ends = memory_channels(VOCAB, 0.5)
    pair = loops(vocab=VOCAB, channel=lambda rank: ends[rank])
    fake = FakeDraft(pair)
    front = pair.front()
    front.endpoint.send(submission(30))
    fake.say(DraftTokens(0, 0, 3, (1,), rows=(AnnouncedRow(),)))
    told = Told()
    front.until(Finished, told)
    assert told.statistics.draft_lost
    assert told.tokens == simulated(submission(30, "ar"), VOCAB)
