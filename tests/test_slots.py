"""Several requests at once: each text is the one that its request gets alone, whatever runs beside it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pearl import Engine, SamplingParams
from pearl.config import RequestOptions
from pearl.drafting.proposer import ModelProposer
from pearl.errors import ModelError, PearlError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import Timing, VirtualProposer
from pearl.models.runner import Feed
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Draft,
    Drafted,
    DraftJoined,
    Forward,
    Forwarded,
    Open,
    Phase,
    Rollback,
    Sampled,
    Send,
    Wait,
)
from pearl.protocol.messages import Begin, Finish, Submit
from pearl.protocol.scheduler import PREFILL_CHUNK, SHARED_CHUNK, Batch, Scheduler
from pearl.protocol.sequence import extend_digest
from pearl.protocol.speeds import Cores, ForwardTimes, Speeds
from pearl.trace.outcomes import messages
from pearl.trace.reading import read
from tests.conftest import AS_PUBLISHED, TOY, greedy_text
from tests.forwards import KINDS
from tests.options import drawn_by, resolved
from tests.replace import replace
from tests.scripted import Told
from tests.tiny import on_cpu, tiny_model
from tests.virtual import Counting, Turns
from tests.wrapped import WrappedRunner

PROMPTS = [[1, 2, 3], [4, 5], [6], [7] * 90, [1, 2, 3, 4], [8, 9], [1, 2]]
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(
    engine: Engine, params: SamplingParams, prompts: Sequence[object] = PROMPTS, **options: object
) -> object:
    return [result.tokens for result in engine.generate(prompts, params, **options)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def several() -> Iterator[Engine]:
    with Engine(TOY, TOY, slots=4) as engine:
        yield engine


# ---- texts ----


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("ar", "ratio"),
        ("ngram", "coupled"),
        ("sd", "ratio"),
        ("ssd", "coupled"),
        ("pearl", "ratio"),
        ("auto", "coupled"),
    ],
)
def test_texts_side_by_side_are_those_of_each_alone(
    several: Engine, toy: Engine, method: str, rule: str
) -> None:
    decoding = RequestOptions(method=method, rule=rule, window="fixed", gamma=3)
    wanted, found = (
        engine.generate(PROMPTS, SEEDED.overridden_by(decoding)) for engine in (toy, several)
    )
    assert not any(result.statistics.draft_lost for result in wanted + found), (
        "then the target goes on by itself"
    )
    assert [result.tokens for result in found] == [result.tokens for result in wanted]
    assert tokens(several, GREEDY.overridden_by(decoding)) == [
        greedy_text(prompt, 24) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_family_say_in_company_what_they_say_alone(kind: str) -> None:
    """Both runners, proposals from everywhere, in float32: all forwards that are ready are computed as one."""
    asked = []
    for number in range(3):
        options = resolved("pearl", "fixed", 3, "ratio" if number == 1 else "coupled", (), 8, 4, 4)
        prompt = tuple(range(3 + number, 40 + 40 * number))
        options = replace(options, sampling=drawn_by(0.9, seed=number))
        asked.append(Submit(number, prompt, len(prompt) + 20, options))
    texts, most = {}, []
    for slots in (1, 3):
        target, draft = (
            on_cpu(tiny_model(kind), dtype="float32", slots=slots, spare=spare, max_context=192)
            for spare in (0, 8)
        )
        assert target.capabilities.slots == slots
        counting = Counting(target)
        proposer = VirtualProposer(draft, target.vocab_size, lambda fed: 0.2, texts=slots)
        loops = Turns(
            TargetExecutor(counting),
            DraftExecutor(proposer),
            Timing(0.2, lambda fed: 1.0),
            slots,
            192,
        )
        texts[slots] = loops.run(asked)
        most.append(max(map(len, counting.fed)))
    assert texts[1] == texts[3]
    assert most == [1, 3]
    assert all(len(text) == 20 for text in texts[3].values())


def test_a_draft_that_is_killed_is_lost_to_all_and_changes_no_text(toy: Engine) -> None:
    params = SEEDED.changed(max_tokens=120)
    wanted = tokens(toy, params, PROMPTS[:4], method="auto")
    with Engine(TOY, TOY, slots=4, target_pace=0.01, draft_pace=0.003) as engine:
        streams = [engine.stream(prompt, params, method="auto") for prompt in PROMPTS[:4]]
        for stream in streams:
            next(stream)
        engine.draft.worker.kill()
        for stream in streams:
            list(stream)
        assert [stream.result.tokens for stream in streams] == wanted


def test_one_that_is_cancelled_makes_room_and_harms_no_other(several: Engine) -> None:
    long = GREEDY.changed(max_tokens=300)
    streams = [several.stream(prompt, long, method="pearl") for prompt in PROMPTS[:4]]
    waiting = several.stream(PROMPTS[4], GREEDY, method="pearl")
    next(streams[1])
    streams[1].close()
    assert [token for piece in waiting for token in piece.tokens] == greedy_text(PROMPTS[4], 24)
    for number in (0, 2, 3):
        assert [t for piece in streams[number] for t in piece.tokens] == greedy_text(
            PROMPTS[number], 300
        )
    assert streams[1].result.finish_reason == "cancelled"


def test_what_is_refused_is_refused_alone(several: Engine) -> None:
    with pytest.raises(PearlError, match="context"):
        several.generate([[1], [1] * 600, [2]], GREEDY)
    assert tokens(several, GREEDY, [[1], [2]]) == [greedy_text([1], 24), greedy_text([2], 24)]


def test_a_recording_of_several_tells_them_apart(tmp_path: Path) -> None:
    """By what is committed, by how many go through one forward, and by what became of draft tokens."""
    path = tmp_path / "trace.json"
    with Engine(TOY, TOY, slots=3, trace=str(path), target_pace=0.02) as engine:
        results = engine.generate(PROMPTS, SEEDED.overridden_by(AS_PUBLISHED))
    trace = read(path)
    written = Counter[int]()
    for piece in trace.target:
        if piece.name == "decide":
            for message in messages(piece.args, "Deliver", "Committed"):
                written[message["request"]] += len(message["provenance"])
    assert sorted(written) == sorted(request.args["request"] for request in trace.requests)
    assert list(written.values()) == [24] * len(PROMPTS)
    assert [one.args["prompt_tokens"] for one in trace.requests] == [
        len(prompt) for prompt in PROMPTS
    ]
    assert results[-1].statistics.queue_seconds > 0.3, "the others were served first"
    together = [one.args["requests"] for one in trace.target if "requests" in one.args]
    assert max(map(len, together)) == 3
    fates = [fate for one in trace.draft for fate in one.args.get("fates", ())]
    judged = sum(fate in ("accepted", "rejected") for fate in fates)
    assert judged == sum(result.statistics.num_judged_draft_tokens for result in results)


# ---- who goes when ----


def submitted(number: int, prompt: Sequence[int]) -> Submit:
    return Submit(number, tuple(prompt), len(prompt) + 8, resolved("ar", sampling=drawn_by()))


def test_a_long_prompt_is_fed_in_small_parts_while_others_write() -> None:
    """So that none of their tokens waits for more than one part."""
    coordinator = Coordinator(Told(), slots=2)
    (*_, whole) = coordinator.handle(submitted(1, [1] * 2000))
    assert isinstance(whole, Forward)
    assert len(whole.tokens) == PREFILL_CHUNK
    (*_, first) = coordinator.handle(submitted(2, [2] * 100))
    assert isinstance(first, Forward)
    assert len(first.tokens) == SHARED_CHUNK
    (part,) = coordinator.handle(Forwarded(request=1))
    assert isinstance(part, Forward)
    assert (part.start, len(part.tokens)) == (PREFILL_CHUNK, SHARED_CHUNK)


def test_the_draft_reads_long_prefixes_in_small_parts_too() -> None:
    drafter = Drafter(4096, slots=2)

    def begun(number: int, prefix: tuple[int, ...]) -> Draft:
        begin = Begin(
            number, 0, prefix, len(prefix) + 4, extend_digest(0, prefix), resolved(rule="coupled")
        )
        (*_, draft) = drafter.handle(begin)
        assert isinstance(draft, Draft)
        return draft

    assert len(begun(1, (1,) * 2000).tokens) == PREFILL_CHUNK
    assert len(begun(2, (2,) * 2000).tokens) == SHARED_CHUNK


def test_a_request_that_begins_again_keeps_its_slot_of_the_draft() -> None:
    """Its forward may still run there. Another slot may hold more of the text, of an equal request before it."""
    drafter = Drafter(64, slots=2)

    def begun(number: int, prefix: tuple[int, ...]) -> list[object]:
        until = len(prefix) + 4
        options = resolved(rule="coupled")
        return drafter.handle(Begin(number, 0, prefix, until, extend_digest(0, prefix), options))

    begun(1, (1, 2, 3, 4, 5, 6))
    drafter.handle(Drafted((7,), request=1))
    (_, draft) = begun(2, (1, 2, 3))
    drafter.handle(Drafted((4,), request=1))
    drafter.handle(Finish(1))
    drafter.handle(Drafted((8,), request=1))
    drafter.handle(Finish(2))
    assert begun(2, (1, 2, 3, 4, 5))[1:] == [], "it drafts once its forward has ended"
    (again,) = drafter.handle(Drafted((9,), request=2))
    assert isinstance(draft, Draft)
    assert isinstance(again, Draft)
    assert (draft.start, draft.tokens) == (0, (1, 2, 3))
    assert (again.start, again.tokens) == (3, (4, 5)), "the token 9 was of an earlier prefix"


def test_a_request_gets_the_slot_that_has_read_most_of_its_prompt() -> None:
    scheduler = Scheduler(slots=3)
    for slot, text in enumerate(([1, 2, 3], [4, 5, 6], [4, 5, 7, 8])):
        scheduler.sequences[slot].restart(text)
        scheduler.sequences[slot].feed(10)
    for number, prompt in enumerate([[4, 5, 6, 9], [4, 5, 7, 8, 1], [9]]):
        scheduler.submit(submitted(number, prompt))
    assert [scheduler.admit()[1] for _ in range(3)] == [1, 2, 0]  # type: ignore[index]
    for slot in (2, 0, 1):
        scheduler.release(slot)
    scheduler.submit(submitted(3, [30]))
    assert scheduler.admit()[1] == 2, "where none has any of it, the one whose text is oldest"  # type: ignore[index]


def test_forward_times_are_those_of_all_that_was_fed() -> None:
    coordinator = Coordinator(Told(*[Sampled((5,))] * 3), slots=2)
    for number in (1, 2):
        coordinator.handle(submitted(number, (number, 3)))
    for number in (1, 2):  # parts of a prompt beside it: this says nothing of what a window takes
        coordinator.handle(Forwarded(0.5, beside=None, request=number))
    assert coordinator.speeds.target.measured == ()
    coordinator.handle(Forwarded(0.25, beside=3, request=1))
    assert coordinator.speeds.target.measured == ((4, 0.25),)
    assert coordinator.running[1].request.beside == 3


def test_only_one_text_at_a_time_compares_with_and_without_the_draft() -> None:
    """Of two that change over at will neither would know what made it faster."""
    coordinator = Coordinator(Told(), slots=3)
    coordinator.handle(DraftJoined(100, 0.01))
    auto = resolved("auto", "stream", None, "coupled", (), 8, sampling=drawn_by())
    for number in (1, 2):
        coordinator.handle(Submit(number, (1, 2), 90, auto))
    one, other = coordinator.running.values()
    assert (one.auto.is_timed, other.auto.is_timed) == (True, False)
    assert (one.request.method.name, other.request.method.name) == ("pearl", "ngram"), (
        "one trial, of a way unknown"
    )
    coordinator.handle(Submit(3, (1, 2), 90, auto))
    third = coordinator.running[3]
    assert third.request.method.name == "ngram"
    assert coordinator.speeds.cores is Cores.OWN, (
        "the draft still drafts for others, on its own cores"
    )


def test_a_forward_waits_for_others_no_longer_than_what_that_saves() -> None:
    """One draft forward and a fifth at most, from when it was due on, and never more than the forwards saved."""
    speeds = Speeds(t_draft=1.0, target=ForwardTimes([(1, 4.0)]))
    due = Forward(Phase.PRE_VERIFY, 3, (7,), 1, request=1)
    batch: Batch[Forward] = Batch()
    batch.commands.append(due)
    assert batch.delay((), 10.0, speeds) == 0
    delays = [batch.delay([2], now, speeds) for now in (10.0, 10.7, 11.3)]
    assert delays == pytest.approx([1.2, 0.5, 0.0])
    assert batch.take() == [due]
    batch.commands += [due] * 8
    assert batch.delay([2], 20.0, speeds) == 0.5, "one forward of 4 s saved, eight requests wait"


def test_what_is_due_is_computed_before_another_request_takes_its_slot() -> None:
    batch: Batch[Draft] = Batch()
    opened = Open((1, 2), resolved(), request=2)
    assert not batch.precedes(opened)
    batch.commands.append(Draft(3, (7,), 4, request=1))
    assert batch.precedes(opened)
    assert not batch.precedes(Rollback(3, request=1))


def test_a_forward_with_a_part_of_a_prompt_measures_no_token() -> None:
    """It takes tens of times as long, for which the target would give the draft up after eight such tokens."""
    _, model = alpha_pair(32, 0.5)
    proposer = VirtualProposer(ToyRunner(32, model), 32, lambda fed: 0.01 * fed, texts=2)
    executor = DraftExecutor(proposer)
    drafter = Drafter(4096, slots=2)
    options = resolved(rule="coupled")
    commands: list[object] = []
    for number, prefix in enumerate(((1, 2), (3,) * 200)):
        until = len(prefix) + 4
        digest = extend_digest(0, prefix)
        commands += drafter.handle(Begin(number, 0, prefix, until, digest, options))
    seconds = []
    while len(seconds) < 8:
        drafts = []
        for command in commands:
            if isinstance(command, Draft):
                drafts.append(command)
            elif isinstance(command, Send):
                seconds.append(command.message.seconds)
            elif not isinstance(command, Wait):
                executor.execute(command)
        commands = []
        for event in executor.draft(drafts):
            commands += drafter.handle(event)
    assert max(seconds) == pytest.approx(0.01), "of a forward of one token"


# ---- what fails alone ----


class _Choking(WrappedRunner):
    """Gives no numbers after a token 9."""

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        found = super().forward(feeds)
        for feed, rows in zip(feeds, found, strict=True):
            if int(feed.tokens[-1]) == 9:
                rows.fill_(torch.nan)
        return found


@pytest.mark.parametrize("branches", [0, 4])
def test_a_draft_that_chokes_on_one_text_drafts_on_for_the_others(branches: int) -> None:
    _, draft = alpha_pair(32, 0.5)
    executor = DraftExecutor(ModelProposer(_Choking(ToyRunner(32, draft)), 32, texts=2))
    options = resolved(rule="coupled", branches=branches, sampling=drawn_by(1.0))
    for slot, text in enumerate(((1, 2), (3, 9))):
        executor.execute(Open(text, options, slot=slot, request=slot))
    asked = [Draft(0, text, 4, request=slot) for slot, text in enumerate(((1, 2), (3, 9)))]
    good, bad = executor.draft(asked)
    assert (len(good.tokens), good.failure) == (1, "")
    assert (bad.tokens, bool(bad.failure), bad.request) == ((), True, 1)


def test_slots_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.models.checkpoints.memory.available_memory", lambda: 1 << 18)
    on_cpu(tiny_model("llama"), dtype="float32", max_context=128)
    with pytest.raises(ModelError, match=r"16 times 128 tokens .* Lower max_context or slots"):
        on_cpu(tiny_model("llama"), dtype="float32", max_context=128, slots=16)
