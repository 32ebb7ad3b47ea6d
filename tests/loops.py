"""Target and draft workers as threads of this process.

The test is their front, or a misbehaving draft.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pearl.config import EngineConfig, RequestOptions
from pearl.decoding.distribution import AnnouncedRow, PackedRow
from pearl.drafting.proposer import ModelProposer
from pearl.drafting.step import HostMark
from pearl.errors import DraftLost, RequestError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import Timing, paired_executors, simulate
from pearl.metrics import Statistics
from pearl.models.runner import Feed, ModelRunner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol import messages as m
from pearl.protocol.speeds import Cores
from pearl.trace.tracer import Tracer
from pearl.transport import connect, listen
from pearl.transport.address import bind_address
from pearl.transport.base import Endpoint, TensorChannel
from pearl.worker.draft import DraftWorker
from pearl.worker.draft_rows import RowPacker, packed
from pearl.worker.settings import TargetSettings
from pearl.worker.target import TargetWorker
from tests.memory_transport import MemoryHub
from tests.options import drawn_by, resolved
from tests.replace import replace

BOUND = 120.0  # seconds that anything here may take; far more than it does
CONTEXT = 1 << 19
DIGEST = b"the same tokens"
PROMPT = (1, 2, 3)
WARM = drawn_by(temperature=1.0, seed=7)
METHODS = ("ar", "sd", "pearl", "pearl-no-pre-verify", "pearl-no-post-verify")
Channels = Callable[[int], TensorChannel]


class DraftMark(HostMark):
    """A mark of a virtual clock, which advances by 0.1 ms with each mark.

    By the real clock of a busy machine, drafts would seem slow, and the target would give them up.
    """

    now = 0.0  # seconds

    def record(self) -> None:
        DraftMark.now += 1e-4
        self.at = DraftMark.now


class Hanging(ToyRunner):
    """A model that can hang.

    From its forward number `after` on, counted from 0, each forward waits until `release` is set.
    """

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
class Received:
    """What a front has received for one request."""

    tokens: list[int] = field(default_factory=list)
    reason: m.FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    end: int | None = None  # position after the last token


class Front:
    """A front that the test controls."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._inbox: deque[object] = deque()
        endpoint.send(m.Hello(m.PROTOCOL_VERSION, m.Role.FRONT, 0, 0))
        self.until(m.Welcome)

    def until(self, kind: type, told: Received | None = None) -> object:
        """Return the first message of type `kind`, and note in `told` all messages up to it.

        Raises `RequestError` if an Error arrives first.
        """
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
            if isinstance(message, m.Error):
                raise RequestError(message.message, message.kind)
        raise AssertionError(f"no {kind.__name__} within {BOUND} s")

    @staticmethod
    def _note(message: object, told: Received) -> None:
        match message:
            case m.Committed(_, start, tokens):
                assert told.end in (None, start), "a gap, or something twice"
                told.tokens += tokens
                told.end = start + len(tokens)
            case m.Finished(_, reason, statistics):
                told.reason, told.statistics = reason, Statistics.from_json(statistics)

    def finish(self) -> Received:
        """Return everything that arrives for a request that has been sent."""
        told = Received()
        self.until(m.Finished, told)
        return told

    def ask(self, submit: m.Submit) -> Received:
        self.endpoint.send(submit)
        return self.finish()


class NotingPacker(RowPacker):
    """Notes in which forms distributions are sent: announced, dense or sparse."""

    forms: set[str]

    def prepare(self, message: m.DraftTokens) -> tuple[m.DraftTokens, list[torch.Tensor]]:
        prepared, announced = super().prepare(message)
        self.forms.update(form_of(row) for row in packed(prepared).rows)  # type: ignore[attr-defined]
        return prepared, announced


def form_of(row: PackedRow | AnnouncedRow) -> str:
    if isinstance(row, AnnouncedRow):
        return "announced"
    return "dense" if row.ids is None else "sparse"


class Loops:
    """A target worker in a thread, and the drafts and fronts that connect to it."""

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
        launches: bool | None = None,
        spread: Callable[[Cores], None] | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.connect, self.vocab, self.alpha, self.slots = connect, vocab, alpha, slots
        self.target_model = Hanging(vocab, alpha_pair(vocab, alpha)[0], CONTEXT)
        self.forms: set[str] = set()  # in which the drafts' distributions left
        self.errors: list[BaseException] = []
        self._stop, self._ready, self._lost = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._threads: list[threading.Thread] = []
        self._endpoints = [listener]
        self._channel = channel
        names = {"target": "toy", "draft": "toy" if expects_draft else "none"}
        config = EngineConfig(
            **names,
            target_device="cpu",
            draft_device="cpu",
            draft_timeout=draft_timeout,
            slots=slots,
        )
        settings = TargetSettings(config, vocab, CONTEXT, DIGEST)
        self.start(
            lambda: TargetWorker(
                listener,
                TargetExecutor(wrap(self.target_model), spread=spread, launches=launches),
                settings,
                self._ready.set,
                self._stop.is_set,
                Tracer(),
                (lambda: channel(0)) if channel else None,
            ).run()
        )

    def start(self, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except DraftLost:
                self._lost.set()  # a draft ends once the target has given it up
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
        kind: type[Hanging] = Hanging,
        wrap: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
        chains: bool | None = None,
    ) -> Hanging:
        """Start a draft worker, and return its model. `chains`: see `ModelProposer`."""
        endpoint = wrap(self.endpoint())
        model = kind(self.vocab, alpha_pair(self.vocab, self.alpha)[1], CONTEXT)

        def welcomed(welcome: m.Welcome) -> tuple[DraftExecutor, RowPacker]:
            packer = NotingPacker(self._channel(1) if self._channel else None)
            packer.forms = self.forms
            return DraftExecutor(
                ModelProposer(model, welcome.vocab_size, chains=chains, texts=self.slots)
            ), packer

        hello = m.Hello(m.PROTOCOL_VERSION, m.Role.DRAFT, self.vocab, CONTEXT, DIGEST)
        stop, slots = self._stop.is_set, self.slots
        worker = DraftWorker(
            endpoint, hello, welcomed, lambda: None, stop, 0.2, Tracer(), slots=slots
        )

        def run() -> None:
            with closing(endpoint):  # as its process would
                worker.run()

        self.start(run)
        return model

    def front(self) -> Front:
        return Front(self.endpoint())

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

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
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLoops]:
    """Return a function that makes `Loops` over "memory" or "ipc".

    At the end, the test fails if any of their threads has died of an error.
    """
    monkeypatch.setattr("pearl.drafting.step.HostMark", DraftMark)
    with ExitStack() as stack:

        def make(control: str = "memory", **settings: object) -> Loops:
            if control == "memory":
                hub = MemoryHub()
                made = Loops(hub.listener, hub.connect, **settings)  # type: ignore[arg-type]
            else:
                tmp_path.chmod(0o700)
                listener = listen(bind_address(control, tmp_path))
                made = Loops(listener, lambda: connect(listener.address), **settings)  # type: ignore[arg-type]
            stack.callback(made.close)
            stack.callback(lambda: made.errors and pytest.fail(f"a loop failed: {made.errors!r}"))
            return made

        yield make


def submission(
    new: int,
    method: str = "pearl",
    sampling: RequestOptions = WARM,
    request: int = 1,
    **decoding: str,
) -> m.Submit:
    return m.Submit(
        request, PROMPT, len(PROMPT) + new, resolved(method, **decoding, sampling=sampling)
    )  # type: ignore[arg-type]


def simulated(submit: m.Submit, vocab: int = 32, alpha: float = 0.5) -> list[int]:
    """Return the text of the same request in virtual time, where distributions are not encoded."""
    runners = (ToyRunner(vocab, distribution) for distribution in alpha_pair(vocab, alpha))
    return simulate(submit, *paired_executors(*runners), Timing(1.0, lambda _: 4.0)).tokens


GREEDY = drawn_by()


def first(endpoint: Endpoint, kind: type) -> object:
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        for _, message in endpoint.receive(0.2):
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} within {BOUND} s")


class FakeDraft:
    """A draft that the test controls. The target admits it as it admits a good draft."""

    def __init__(self, pair: Loops) -> None:
        self.endpoint = pair.endpoint()
        self.endpoint.send(m.Hello(m.PROTOCOL_VERSION, m.Role.DRAFT, pair.vocab, CONTEXT, DIGEST))
        first(self.endpoint, m.Welcome)
        self.endpoint.send(m.Heartbeat(0, "calibrated", 1, 1e-3))

    def say(self, *messages: m.DraftTokens | m.Resync | list[bytes]) -> None:
        begin = first(self.endpoint, m.Begin)
        assert isinstance(begin, m.Begin)
        for message in messages:
            if isinstance(message, list):
                self.endpoint.send_frames(message)  # type: ignore[attr-defined]
            else:
                self.endpoint.send(replace(message, request=begin.request))


def sparse(ids: Sequence[int], probs: Sequence[float]) -> PackedRow:
    """Return a distribution that lists only these tokens."""
    return PackedRow(
        torch.tensor(probs).numpy().tobytes(),
        torch.tensor(ids, dtype=torch.int32).numpy().tobytes(),
    )
