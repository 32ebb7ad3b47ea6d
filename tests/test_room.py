"""The room for several requests and many proposals: schedules, stores, and what an illegal event tells."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from pearl.errors import LocalProtocolError
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import Deliver, DraftJoined, End, Forward, Forwarded, Judge, Judged, Sample
from pearl.protocol.messages import Cancel, Committed, Decoding, DraftTokens, FinishReason, Sampling, Submit
from pearl.protocol.proposals import Proposal, ProposalStore, Source
from pearl.protocol.scheduler import Scheduler
from pearl.worker.execute import TargetExecutor

VOCAB = 32


def submit(number: int, prompt: Sequence[int], length: int, seed: int = 3) -> Submit:
    return Submit(number, tuple(prompt), len(prompt) + length, Sampling(1.0, seed=seed), Decoding("ar"))


def run(submits: Sequence[Submit], slots: int, seed: int = 0) -> tuple[dict[int, list[int]], list[int], float]:
    """Decode all requests on one target under a virtual clock, in which a forward takes 1.

    Which of the requests that are ready is served next is drawn at random.  Returns texts, the order of forwards (by
    request), and when the last text was done.
    """
    chance, target, now = random.Random(seed), alpha_pair(VOCAB, 0.5)[0], 0.0
    coordinator, executors = Coordinator(slots=slots), [TargetExecutor(ToyRunner(VOCAB, target)) for _ in range(slots)]
    texts: dict[int, list[int]] = {one.request: [] for one in submits}
    ready: dict[int, list[object]] = {}
    slot_of: dict[int, int] = {}
    order: list[int] = []

    def take(commands: list[object]) -> None:
        for command in commands:
            number: int = getattr(command, "request", -1)
            match command:
                case Deliver(Committed() as committed):
                    texts[committed.request] += committed.tokens
                case Deliver() | End():
                    pass
                case _ if number >= 0:
                    ready.setdefault(number, []).append(command)

    for one in submits:
        take(coordinator.handle(one))
    while any(ready.values()):
        number = chance.choice([number for number, commands in ready.items() if commands])
        command = ready[number].pop(0)
        if number not in slot_of:
            slot_of[number] = coordinator.running[number].slot
        event = executors[slot_of[number]].execute(command) if not hasattr(command, "cause") else None
        if isinstance(command, Forward):
            order.append(number)
            now += 1.0
        if event is not None:
            take(coordinator.handle(event))
    assert not coordinator.running
    return texts, order, now


@pytest.mark.parametrize("seed", range(5))
def test_two_requests_side_by_side_give_the_texts_that_they_give_alone(seed: int) -> None:
    asked = [submit(1, (3, 1), 12, seed=5), submit(2, (7, 7, 2), 9, seed=6), submit(3, (3, 1, 4), 5, seed=7)]
    alone = {one.request: run([one], 1)[0][one.request] for one in asked}
    texts, order, seconds = run(asked, 2, seed)
    assert texts == alone
    assert seconds == sum(len(text) for text in alone.values()), "one forward a token, whoever is served"
    changes = sum(a != b for a, b in pairwise(order))
    assert changes > 2, "they took turns"
    assert run(asked, 1)[0] == alone


def test_with_one_slot_requests_come_one_after_the_other() -> None:
    _, order, _ = run([submit(1, (3, 1), 4), submit(2, (5,), 4)], 1)
    assert order == [1] * 4 + [2] * 4


def test_a_slot_goes_to_the_one_that_has_waited_longest() -> None:
    scheduler = Scheduler(slots=2)
    for number in range(4):
        scheduler.submit(submit(number, (1,), 1))
    first, second = scheduler.admit(), scheduler.admit()
    assert first is not None
    assert second is not None
    assert [(one.request, slot) for one, slot in (first, second)] == [(0, 0), (1, 1)]
    assert scheduler.admit() is None
    assert scheduler.cancel(2)
    assert not scheduler.cancel(2)
    scheduler.release(1)
    third = scheduler.admit()
    assert third is not None
    assert (third[0].request, third[1]) == (3, 1)


def test_events_reach_the_request_that_they_name() -> None:
    coordinator = Coordinator(slots=2)
    coordinator.handle(DraftJoined(100))
    for number, prompt in ((1, (3, 1)), (2, (5, 6))):
        coordinator.handle(Submit(number, prompt, 10, Sampling(), Decoding("pearl")))
    held = coordinator.handle(Forwarded(1.0, request=2))
    assert coordinator.running[1].state.value == "prefill"
    assert all(getattr(command, "request", 2) == 2 for command in held)
    (judge,) = [c for c in coordinator.handle(DraftTokens(2, 0, 2, (8,))) if isinstance(c, Judge)]
    assert (judge.request, judge.tokens) == (2, (8,))
    coordinator.handle(Judged(1, None, request=2))
    assert coordinator.running[2].sequence.committed == 3
    assert coordinator.running[1].sequence.committed == 2
    (end,) = [command for command in coordinator.handle(Cancel(2)) if isinstance(command, End)] or [None]
    assert end is None or end.reason is FinishReason.CANCELLED


def test_an_illegal_event_tells_the_story_that_led_to_it() -> None:
    coordinator = Coordinator()
    coordinator.handle(submit(1, (3, 1), 5))
    (sample,) = [c for c in coordinator.handle(Forwarded(request=1)) if isinstance(c, Sample)]
    assert sample.request == 1
    with pytest.raises(LocalProtocolError, match=r"state sampling .* idle -Submit-> prefill, prefill -Forwarded"):
        coordinator.handle(Judged(0, 1, request=1))
    with pytest.raises(LocalProtocolError, match=r"cannot take Judged.* it works on \[1\]"):
        coordinator.handle(Judged(0, 1, request=7))
    with pytest.raises(LocalProtocolError, match=r"draft in state idle .* before: nothing"):
        Drafter(10).handle(Forwarded(request=1))


# ---- proposals ----


def test_the_main_line_is_judged_in_order_and_remembers_who_guessed() -> None:
    store = ProposalStore()
    store.add(Proposal(5, (10, 11), ("a", "b")))
    store.add(Proposal(7, (12,), source=Source.NGRAM))
    assert len(store) == 3
    assert store.rows(3) == ("a", "b", None)
    assert [store.accept(), store.accept(), store.accept()] == [Source.MODEL, Source.MODEL, Source.NGRAM]
    assert len(store) == 0


def test_a_branch_holds_under_its_outcome_and_no_other() -> None:
    store = ProposalStore()
    store.add(Proposal(5, (10, 11, 12)))
    foreseen = Proposal(7, (30, 31), source=Source.BRANCH, after=(6, 99))
    store.add(foreseen)
    store.add(Proposal(6, (40,), source=Source.BRANCH, after=(5, 77)))
    store.prune(6)
    assert store.branches == [foreseen]
    assert store.correct(6, 99) is foreseen
    assert (len(store), store.branches) == (0, [])
    store.add(foreseen)
    assert store.correct(6, 98) is None
    assert store.branches == []
