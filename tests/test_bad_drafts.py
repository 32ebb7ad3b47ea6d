"""Drafts that lie, stall, lack memory, lose messages or leave: the request goes on, and its text is the target's."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from unittest.mock import Mock

import pytest
import torch

from pearl.config import EngineConfig
from pearl.decoding.distribution import AnnouncedRow, PackedRow
from pearl.errors import DraftLost, RequestError, TransportError
from pearl.execution.target import TargetExecutor
from pearl.models.runner import Feed
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.events import Open
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    Committed,
    DraftTokens,
    Error,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Pong,
    Resync,
    Role,
    Submit,
)
from pearl.protocol.speeds import Speeds
from pearl.worker.draft_link import DraftLink
from pearl.worker.health import DraftHealth
from pearl.worker.settings import TargetSettings
from tests.loops import (
    BOUND,
    CONTEXT,
    DIGEST,
    GREEDY,
    PROMPT,
    WARM,
    DraftMark,
    FakeDraft,
    Hanging,
    Loops,
    MakeLoops,
    Received,
    first,
    simulated,
    sparse,
    submission,
)
from tests.options import drawn_by, resolved
from tests.replace import replace

NAN = float("nan")


LIES: dict[str, DraftTokens | list[bytes]] = {
    "no msgpack": [b"\xc1"],
    "a future epoch": DraftTokens(0, 3, len(PROMPT), (1,)),
    "a token that is none": DraftTokens(0, 0, len(PROMPT), (100_000,), rows=(sparse([1], [1.0]),)),
    "a runner-up that is none": DraftTokens(
        0, 0, len(PROMPT), (1,), runners_up=(Seen(3, (5, 100_000)),)
    ),
    "no distribution": DraftTokens(0, 0, len(PROMPT), (1,)),
    "ids out of range": DraftTokens(0, 0, len(PROMPT), (1,), rows=(sparse([32], [1.0]),)),
    "NaN": DraftTokens(0, 0, len(PROMPT), (1,), rows=(sparse([1], [NAN]),)),
    "more ids than a dense one has room for": DraftTokens(
        0, 0, len(PROMPT), (1,), rows=(sparse([1] * 17, [1.0] * 17),)
    ),
    "nothing": DraftTokens(0, 0, len(PROMPT), (1,), rows=(PackedRow(b"\0" * 4 * 32),)),
    **dict.fromkeys(
        ("a channel that is not there", "announced rows that never come"),
        DraftTokens(0, 0, len(PROMPT), (1,), rows=(AnnouncedRow(),)),
    ),
}


def received_beside(pair: Loops, submit: Submit, *messages: DraftTokens | list[bytes]) -> Received:
    """What a front receives of a request whose draft sends `messages`, for which the target gives it up."""
    fake, front = FakeDraft(pair), pair.front()
    front.endpoint.send(submit)
    fake.say(*messages)
    received = front.finish()
    assert received.statistics.draft_lost
    return received


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_draft_is_dropped_and_the_request_goes_on(loops: MakeLoops, lie: str) -> None:
    """A draft may be broken; it must never take the target with it, nor leave a mark on what is drawn."""
    channel = Mock(receive=Mock(side_effect=TransportError("0 of 1 rows came")))
    pair = loops(
        channel=(lambda rank: channel) if lie == "announced rows that never come" else None
    )
    told = received_beside(pair, submission(40), LIES[lie])
    assert told.tokens == simulated(submission(40, "ar")), (
        "alone from the first token on: every draw is direct"
    )


def test_a_pause_behind_nothing_is_a_lie(loops: MakeLoops) -> None:
    """No token to verify, and none to wait for."""
    row = sparse([1], [1.0])
    said = [
        DraftTokens(0, 0, at, tokens, rows=(row,) * len(tokens), paused=True)
        for at, tokens in ((3, (1,)), (4, ()))
    ]
    assert len(received_beside(loops(), submission(40, "pearl-no-post-verify"), *said).tokens) == 40


STALLING: dict[
    str, tuple[float, Callable[[int], list[Message]]]
] = {  # draft_timeout; what it sends, again and again
    "answers": (0.05, lambda number: [Pong(number, number)]),
    "reports that it drafts": (0.05, lambda number: [Heartbeat(number, "drafting", 0)]),
    "reports that it reads": (0.05, lambda number: [Heartbeat(number, "prefill", 9, 1e9)]),
    "drafts what has been": (0.05, lambda number: [DraftTokens(1, number, 0, (1,))]),
    "asks for the prefix": (BOUND, lambda number: [Resync(1, number)]),
    "leaves gaps": (
        BOUND,
        lambda number: [DraftTokens(1, number, 3, (1,)), DraftTokens(1, number, 6, (1,))],
    ),
    "joins": (BOUND, lambda _: [Heartbeat(0, "calibrated", 1, 1e-3)]),
    "rests": (
        BOUND,
        lambda _: [
            Pong(1 << 62, 0),
            *[Heartbeat(0, "waiting", 0)] * 2,
            DraftTokens(77, 0, 3, (1,)),
        ],
    ),
    "rests and answers no ping": (0.05, lambda _: [Heartbeat(0, "waiting", 0)]),
}


@pytest.mark.parametrize("way", STALLING)
def test_a_draft_that_lives_and_sends_no_token_is_given_up(loops: MakeLoops, way: str) -> None:
    """In bounded time, and before many whole prefixes have been sent to it."""
    draft_timeout, messages = STALLING[way]
    pair = loops(draft_timeout=draft_timeout)
    fake, front, told, has_ended = FakeDraft(pair), pair.front(), Received(), threading.Event()
    front.endpoint.send(replace(submission(40), decoding=resolved("pearl", "fixed", 4, "coupled")))
    first(fake.endpoint, Begin)

    def speak() -> None:
        for number in range(100_000):
            # Many at once, then until the request has ended, for some ways count only while the target waits.
            if has_ended.wait(0.0 if draft_timeout == BOUND and number < 200 else 0.005):
                return
            with suppress(TransportError):
                for message in messages(number):
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
    received = [
        message for batch in iter(lambda: fake.endpoint.receive(0.1), []) for _, message in batch
    ]
    assert sum(isinstance(message, Begin) for message in received) < 30


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_draft_may_not_say_now_with_distributions_and_now_without(
    loops: MakeLoops, rule: str
) -> None:
    """Where the rule needs none they are dropped. They ended the target: a branch had fewer of them than tokens."""
    submit = replace(submission(40), decoding=resolved("pearl", "fixed", 64, rule, branches=4))
    row = sparse([1], [1.0])
    branch = DraftTokens(0, 0, 9, (1,), rows=(row,), after=(8, 5), known=3)
    main = DraftTokens(0, 0, 3, (1,) * 20, rows=(row,) * 20, known=3)
    told = received_beside(
        loops(), submit, main, branch, replace(branch, start=10, rows=()), [b"\xc1"]
    )
    if rule == "coupled":
        assert told.tokens == simulated(submission(40, "ar"))


def test_what_a_draft_says_of_a_request_before_it_is_begun_is_dropped() -> None:
    """The draft cannot know yet what the rule needs, and request numbers can be guessed."""
    executor = TargetExecutor(ToyRunner(32, alpha_pair(32, 0.5)[0]))
    settings = TargetSettings(EngineConfig(draft_timeout=1.0), 32, CONTEXT, DIGEST)
    link = DraftLink(settings, executor, None, Mock(), Mock(), Mock())
    without = DraftTokens(1, 0, 3, (5,))
    assert link.with_needed_rows(without) is None
    executor.execute(Open(PROMPT, resolved(rule="coupled", sampling=WARM), request=1))
    assert link.with_needed_rows(without) == without


# ---- drafts that come and go ----


def test_second_draft_takes_over_in_mid_request(loops: MakeLoops) -> None:
    """It is given the whole prefix; what its predecessor sends when it wakes up is ignored."""
    pair = loops()
    hanging, front = pair.draft(), pair.front()
    hanging.after = len(hanging.fed) + 10
    front.endpoint.send(submission(300, sampling=GREEDY))
    front.until(Committed)
    pair.draft()
    told = front.finish()
    text = simulated(submission(300, sampling=GREEDY))
    assert told.tokens == text[-len(told.tokens) :]
    assert told.statistics.num_draft_tokens > 20, "the second one drafted"
    assert told.statistics.resyncs >= 1
    hanging.release.set()
    again = front.ask(submission(300, request=2))
    assert again.tokens == simulated(submission(300))
    assert not again.statistics.draft_lost


def test_a_draft_that_does_not_fit_takes_nobodys_place(loops: MakeLoops) -> None:
    pair = loops()
    pair.draft()
    front, other = pair.front(), pair.endpoint()
    other.send(Hello(PROTOCOL_VERSION, Role.DRAFT, pair.vocab, CONTEXT, b"other tokens"))
    refusal = first(other, Error)
    assert isinstance(refusal, Error)
    assert "does not fit the target" in refusal.message
    told = front.ask(submission(60))
    assert told.tokens == simulated(submission(60))
    assert told.statistics.num_draft_tokens
    assert not told.statistics.draft_lost


class Slow(Hanging):
    """A model that takes no trees, and `pace` seconds for each token of its forwards from number `slow_from` on."""

    pace, slow_from = 0.00025, 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, tree_nodes=0)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if len(self.fed) >= self.slow_from:
            DraftMark.now += self.pace * len(feeds[0].tokens)
        return super().forward(feeds)


@pytest.mark.parametrize("method", ["sd", "pearl"])
def test_draft_that_becomes_far_too_slow_is_given_up(loops: MakeLoops, method: str) -> None:
    """It sends tokens and beats, so it is not silent; but each token costs more than it can save."""
    pair = loops(draft_timeout=1000.0)
    draft = pair.draft(kind=Slow)
    assert isinstance(draft, Slow)
    front = pair.front()
    draft.slow_from, draft.pace = len(draft.fed) + 10, BOUND
    told = front.ask(replace(submission(100, method, GREEDY), decoding=resolved(method, gamma=4)))
    assert told.tokens == simulated(submission(100, sampling=GREEDY))
    assert told.statistics.draft_lost
    assert told.statistics.provenance["direct"] > 50
    pair.wait_lost()


def test_draft_that_searches_widely_is_not_taken_for_slow(loops: MakeLoops) -> None:
    """A token of a block takes it 50 times what a token takes, for each sequence is a forward of its own."""
    pair = loops()
    pair.draft(kind=Slow)
    widest = (("tau", 0.0), ("depth", 8), ("width", 16))
    told = pair.front().ask(
        replace(submission(24), decoding=resolved("sd", rule="joint", parameters=widest))
    )
    assert told.statistics.num_draft_tokens > 8 * 8, (
        "more blocks than slow tokens would end a draft"
    )
    assert not told.statistics.draft_lost


@pytest.mark.parametrize(("rule", "chains"), [("ratio", False), ("coupled", True)])
def test_a_prompt_that_the_draft_chokes_on_ends_drafting_for_that_request_only(
    loops: MakeLoops, rule: str, chains: bool
) -> None:
    """Anybody who finds one could otherwise have the draft ended for all, each time, until it is given up."""
    pair = loops()
    draft = pair.draft(chains=chains)
    fine = draft.distribution
    draft.distribution = lambda tokens: fine(tokens) * (NAN if 30 in tokens[:4] else 1.0)
    front = pair.front()
    poisoned = replace(submission(40, rule=rule), prompt=(1, 2, 30))
    for request in range(3):
        told = front.ask(replace(poisoned, request=request))
        assert told.statistics.draft_lost
        assert told.tokens == simulated(replace(poisoned, decoding=resolved("ar", rule=rule)))
        sound = submission(120, rule=rule, request=100 + request)
        told = front.ask(sound)
        assert not told.statistics.draft_lost
        assert told.statistics.num_accepted_draft_tokens
        assert told.tokens == simulated(sound)
    front.endpoint.send(replace(poisoned, request=7))
    front.endpoint.send(
        replace(sound, request=8)
    )  # begins while the draft may still be at the one before
    for _ in range(2):
        told = front.finish()
    assert told.tokens == simulated(sound)


class _Crammed(Hanging):
    """A draft with memory for one sequence at a time; and for none of the text that begins with 9."""

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if len(feeds) > 1 or [*self.tokens[feeds[0].slot], *feeds[0].tokens][0] == 9:
            raise torch.OutOfMemoryError("no memory is left")
        return super().forward(feeds)


@pytest.mark.parametrize("chains", [False, True])
def test_a_draft_without_memory_for_all_drafts_one_by_one(loops: MakeLoops, chains: bool) -> None:
    """And goes on: a text for which it has none alone is the target's."""
    pair = loops(slots=3, alpha=0.9)
    pair.draft(kind=_Crammed, chains=chains)
    fronts = [pair.front() for _ in range(3)]
    for front, begin in zip(fronts, (1, 9, 2), strict=True):
        front.endpoint.send(Submit(1, (begin, 4), 62, resolved("pearl", sampling=drawn_by(0.0))))
    drafted = []
    for front in fronts:
        told = front.finish()
        assert len(told.tokens) == 60
        drafted.append(told.statistics.num_draft_tokens)
    assert min(drafted[0], drafted[2]) > 0 == drafted[1]
    assert fronts[0].ask(submission(20, request=2)).statistics.num_draft_tokens, (
        "the draft was lost"
    )


def test_forward_without_memory_fails_its_request_only(loops: MakeLoops) -> None:
    """Of a GPU, of a CPU, of a graph or pinned memory, and of two libraries."""
    pair = loops(expects_draft=False)
    front, fine = pair.front(), pair.target_model.distribution
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried."),
        RuntimeError("[enforce] can't allocate memory: you tried"),
        RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ):
        pair.target_model.distribution = Mock(side_effect=error)
        with pytest.raises(RequestError, match="Shorten the prompt") as caught:
            front.ask(submission(20, "ar"))
        assert caught.value.args[1:] == ("OutOfMemory",)
        pair.target_model.distribution = fine
        assert front.ask(submission(20, "ar", request=2)).tokens == simulated(submission(20, "ar"))


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


@pytest.mark.parametrize("requests", [1, 8])
def test_a_forward_for_many_requests_may_take_long(requests: int) -> None:
    """Thirty times as long as one for a single request is slow for one request, and usual for eight."""
    settings = TargetSettings(EngineConfig(target="toy", draft="toy"), 32, CONTEXT, DIGEST)
    executor = Mock(needs_rows=Mock(return_value=False))
    link = DraftLink(settings, executor, None, Mock(), Mock(), Mock())
    link.health.calibrated(0.01)
    coordinator = Coordinator(Mock())
    for request in range(requests):
        coordinator.running[request] = Mock(request=Mock(block=1))

    def drafted() -> None:
        for start in range(20):
            for request in range(requests):
                link.receive(DraftTokens(request, 0, start, (1,), 0.3), coordinator)

    if requests == 1:
        with pytest.raises(DraftLost, match="300 ms a token"):
            drafted()
    else:
        drafted()
