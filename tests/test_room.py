"""The room for several requests and many proposals: schedules, stores, and what an illegal event tells."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import pytest
import torch

from pearl.drafting.model import ModelProposer
from pearl.drafting.proposer import Features, Launched, Proposer
from pearl.errors import LocalProtocolError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Deliver,
    Draft,
    Drafted,
    DraftJoined,
    End,
    Forward,
    Forwarded,
    Judge,
    Judged,
    Open,
    Rollback,
    Sample,
    Sampled,
    Send,
    Wait,
)
from pearl.protocol.messages import (
    Begin,
    Cancel,
    Committed,
    DraftTokens,
    FinishReason,
    Source,
    Submit,
    Verdict,
)
from pearl.protocol.options import RequestOptions, Sampling
from pearl.protocol.proposals import Proposal, ProposalStore
from pearl.protocol.request import Counts
from pearl.protocol.scheduler import Scheduler
from pearl.protocol.sequence import extend_digest
from pearl.spec.methods import MAX_BRANCHES
from tests.replace import replace

VOCAB = 32


def submit(
    number: int, prompt: Sequence[int], length: int, seed: int = 3, method: str = "ar", **settings: Any
) -> Submit:
    decoding = RequestOptions(method, **({"gamma": 2} | settings))
    return Submit(number, tuple(prompt), len(prompt) + length, replace(decoding, sampling=Sampling(1.0, seed=seed)))


@dataclass
class Actor:
    """A worker without a loop: it carries out one command at a time."""

    machine: Coordinator | Drafter
    execute: Callable[[object], object | None]
    todo: deque[object] = field(default_factory=deque)
    order: list[int] = field(default_factory=list)  # of its forwards, by request
    is_computing: bool = False


class Schedule:
    """Requests side by side on one target and one draft, under a virtual clock: a forward takes 4 and 1.

    Which of an actor's requests goes on next is drawn at random; of one request its commands stay in order.
    """

    def __init__(self, slots: int, seed: int, proposer: Proposer | None = None) -> None:
        target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.5))
        drafts = DraftExecutor(proposer or ModelProposer(draft, VOCAB))
        self.target = Actor(Coordinator(slots=slots), TargetExecutor(target).execute)
        self.draft = Actor(Drafter(1 << 20, slots), drafts.execute)
        self.chance, self.now, self.ids = random.Random(seed), 0.0, count()
        self.events: list[tuple[float, int, Actor, object]] = []
        self.texts: dict[int, list[int]] = {}
        self.counts: dict[int, Counts] = {}

    def run(self, submits: Sequence[Submit]) -> dict[int, list[int]]:
        self.texts |= {one.request: [] for one in submits}
        self.take(self.target, DraftJoined(1 << 20, 1.0))
        for one in submits:
            self.take(self.target, one)
        while len(self.counts) < len(submits):
            free = [actor for actor in (self.target, self.draft) if actor.todo and not actor.is_computing]
            if free:
                self.carry_out(free[0])
            else:
                self.now, _, actor, event = heapq.heappop(self.events)
                actor.is_computing = False
                self.take(actor, event)
        return self.texts

    def take(self, actor: Actor, event: object) -> None:
        actor.todo.extend(actor.machine.handle(event))

    def carry_out(self, actor: Actor) -> None:
        command = actor.todo[0]
        if isinstance(command, (Forward, Draft)):  # another request's may come first
            firsts = {getattr(one, "request", -1): one for one in reversed(actor.todo)}
            ready = [one for one in firsts.values() if isinstance(one, (Forward, Draft))]
            command = self.chance.choice(ready)
        actor.todo.remove(command)
        match command:
            case Send(message):
                other = self.draft if actor is self.target else self.target
                self.take(other, message)
            case Deliver(Committed(request, _, tokens)):
                self.texts[request] += tokens
            case End(request, counts=counts):
                self.counts[request] = counts
            case Wait() | Deliver():
                pass
            case Forward() | Draft():
                actor.order.append(command.request)
                actor.is_computing = True
                seconds = 4.0 if isinstance(command, Forward) else 1.0
                heapq.heappush(self.events, (self.now + seconds, next(self.ids), actor, actor.execute(command)))
            case _:
                event = actor.execute(command)
                if event is not None:
                    self.take(actor, event)


def alone(one: Submit) -> list[int]:
    return Schedule(1, 0).run([one])[one.request]


@pytest.mark.parametrize("method", ["ar", "sd", "pearl"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_side_by_side_give_the_texts_that_they_give_alone(method: str, seed: int) -> None:
    asked = [
        submit(1, (3, 1), 24, seed=5, method=method),
        submit(2, (7, 7, 2), 19, seed=6, method=method, rule="coupled"),
        submit(3, (3, 1, 4), 10, seed=7, method=method, window="fixed"),
    ]
    schedule = Schedule(2, seed)
    assert schedule.run(asked) == {one.request: alone(one) for one in asked}
    for actor in (schedule.target, schedule.draft)[: 1 if method == "ar" else 2]:
        assert sum(a != b for a, b in pairwise(actor.order)) > 2, "they took turns"


def test_with_one_slot_requests_come_one_after_the_other() -> None:
    schedule = Schedule(1, 0)
    schedule.run([submit(1, (3, 1), 4), submit(2, (5,), 4)])
    assert schedule.target.order == [1] * 4 + [2] * 4


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
        coordinator.handle(Submit(number, prompt, 10, RequestOptions("pearl", sampling=Sampling())))
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
    with pytest.raises(LocalProtocolError, match=r"cannot take Judged.* running are \[1\]"):
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
    assert [store.accept(committed) for committed in (6, 7, 8)] == [Source.MODEL, Source.LOOKUP, Source.NGRAM]
    assert len(store) == 0


def test_a_branch_holds_under_its_outcome_and_no_other() -> None:
    store = ProposalStore()
    store.add(Proposal(5, (10, 11, 12)))
    foreseen = Proposal(7, (30, 31), source=Source.BRANCH, after=(6, 99))
    store.add(foreseen)
    store.add(Proposal(6, (40,), source=Source.BRANCH, after=(5, 77)))
    store.accept(6)
    assert store.branches == [foreseen]
    assert store.branch(6, 98) is None
    taken = store.branch(6, 99)
    assert taken == Proposal(7, (30, 31), source=Source.BRANCH)
    store.clear()
    store.add(taken)
    assert (len(store), store.branches) == (2, [])


# ---- branches ----


def working(**settings: Any) -> Coordinator:
    """The target at position 2, that has fed the prompt and holds the row for it."""
    coordinator = Coordinator()
    coordinator.handle(DraftJoined(100))
    coordinator.handle(
        Submit(1, (3, 1), 12, RequestOptions("pearl", **({"gamma": 3, "branches": 8} | settings), sampling=Sampling()))
    )
    coordinator.handle(Forwarded(1.0, request=1))
    return coordinator


def branch(epoch: int = 0, after: tuple[int, int] = (3, 20), tokens: tuple[int, ...] = (21, 22)) -> DraftTokens:
    return DraftTokens(1, epoch, after[0] + 1, tokens, source=Source.BRANCH, after=after)


def rejected_at_3(coordinator: Coordinator, token: int = 20) -> list[object]:
    """Position 2 is accepted, and `token` committed at 3 in place of the draft's."""
    coordinator.handle(Judged(1, None, request=1))
    coordinator.handle(Forwarded(1.0, request=1))
    return coordinator.handle(Judged(0, token, request=1))


def test_a_foreseen_rejection_finds_its_branch_pending() -> None:
    coordinator = working()
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    coordinator.handle(branch())
    coordinator.handle(branch(after=(3, 30), tokens=(31,)))
    (forward,) = [c for c in rejected_at_3(coordinator) if isinstance(c, Forward)]
    assert forward.tokens == (20, 21, 22), "what was prepared for this outcome is verified at once"
    assert (coordinator.epoch, coordinator.counts.foreseen, coordinator.counts.resyncs) == (1, 1, 0)


def test_a_branch_that_the_verdict_has_overtaken_still_counts() -> None:
    coordinator = working(window="fixed")
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    rejected_at_3(coordinator)
    coordinator.handle(branch())
    assert coordinator.sequence.tokens == [3, 1, 8, 20, 21, 22]
    coordinator.handle(branch())  # comes twice
    assert coordinator.sequence.tokens == [3, 1, 8, 20, 21, 22]
    assert coordinator.counts.duplicate == 1


@pytest.mark.parametrize(
    "stale",
    [
        branch(after=(3, 99)),  # another outcome came
        branch(after=(2, 20)),  # decided long ago
        branch(after=(7, 20)),  # of a position that nothing is drafted for
    ],
    ids=str,
)
def test_a_branch_for_another_outcome_is_dropped_and_counted(stale: DraftTokens) -> None:
    coordinator = working()
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    rejected_at_3(coordinator)
    coordinator.handle(stale)
    coordinator.handle(replace(stale, epoch=1))
    assert coordinator.sequence.tokens == [3, 1, 8, 20]
    assert coordinator.counts.stale == 2
    assert coordinator.counts.foreseen == 0


def test_branches_are_bounded() -> None:
    coordinator = working()
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    for token in range(100, 300):
        coordinator.handle(branch(after=(3, token)))
    assert len(coordinator.running[1].request.proposals.branches) == MAX_BRANCHES
    coordinator = working(gamma=9)
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    coordinator.handle(branch(tokens=(1,) * 9))
    branches = coordinator.running[1].request.proposals.branches
    assert max(known.end for known in branches) == 12, "no further than the limit"


def test_a_branch_that_the_verdict_has_overtaken_is_no_longer_than_one_that_waits() -> None:
    """It went on as far as the text may, with a distribution for each token, all fed in one forward."""
    coordinator = Coordinator()
    coordinator.handle(DraftJoined(1000))
    coordinator.handle(Submit(1, (3, 1), 500, RequestOptions("pearl", "fixed", 3, branches=8, sampling=Sampling())))
    coordinator.handle(Forwarded(1.0, request=1))
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    rejected_at_3(coordinator)
    request = coordinator.running[1]
    for size in (1, 40, 1, 40):
        start = len(request.sequence.tokens)
        coordinator.handle(replace(branch(tokens=(21,) * size), start=start))
    assert coordinator.sequence.tokens == [3, 1, 8, 20, 21, 21]
    assert len(request.sequence.tokens) <= request.sequence.committed + request.draft._furthest
    assert coordinator.counts.stale == 2


def test_what_a_draft_repeats_beside_a_branch_that_came_is_not_put_behind_it() -> None:
    """It stood at positions that it was not drafted for, and beyond the limit of the text."""
    coordinator = working(look_ahead=4, gamma=9)
    coordinator.handle(DraftTokens(1, 0, 2, (8,)))
    coordinator.handle(branch(after=(2, 20), tokens=(21,) * 9))
    coordinator.handle(Sampled((20,), request=1))
    expected = [3, 1, 20, *(21,) * 9]
    assert coordinator.sequence.tokens == expected
    coordinator.handle(DraftTokens(1, 1, 2, (20, 40, 41), known=2))
    assert coordinator.sequence.tokens == expected
    assert coordinator.counts.duplicate == 1


# ---- proposers and stop policies ----


@dataclass
class Fixed:
    """A proposer that always guesses the same token, as many times as it may."""

    token: int
    most: int = 3
    chains: bool = False
    device: torch.device = field(default=torch.device("cpu"))

    def measure(self, brief: bool) -> tuple[float, float]:
        return 1e-6, 1e-6

    def open(self, command: Open) -> None: ...

    def rollback(self, length: int, request: int) -> None: ...

    def launch(self, command: Draft, after: Launched | None = None) -> Launched:
        return command  # type: ignore[return-value]

    def collect(self, launched: Launched) -> Drafted:
        assert isinstance(launched, Draft)
        return Drafted((self.token,) * min(self.most, launched.budget), request=launched.request)


@pytest.mark.parametrize("window", ["stream", "fixed"])
@pytest.mark.parametrize("token", [0, 5])
def test_a_proposer_that_always_guesses_a_token_changes_no_text(token: int, window: str) -> None:
    """Under a direct rule: what is guessed decides how fast a text comes, and nothing else."""
    asked = submit(1, (3, 1), 60, method="pearl", rule="coupled", window=window)
    schedule = Schedule(1, 0, Fixed(token))
    assert schedule.run([asked])[1] == alone(submit(1, (3, 1), 60, rule="coupled"))
    assert schedule.counts[1].accepted == sum(one == token for one in schedule.texts[1][1:])
    assert len(schedule.draft.order) < schedule.counts[1].drafted, "several tokens of a forward"


class Unsure:
    """Stops after every second token; notes what it is shown."""

    def __init__(self) -> None:
        self.seen: list[Features] = []

    def stop(self, features: Features) -> bool:
        self.seen.append(features)
        return features.index == 1

    def confidence(self, features: Features) -> None: ...

    def end_window(self, accepted: int) -> None: ...


@pytest.mark.parametrize(("method", "rule"), [("sd", "coupled"), ("pearl", "ratio")])
def test_a_stop_policy_ends_windows_and_changes_no_text(method: str, rule: str) -> None:
    """A target that waits for a full window is told that there is no more to wait for."""
    policy, draft = Unsure(), alpha_pair(VOCAB, 0.5)[1]
    asked = submit(1, (3, 1), 40, method=method, rule=rule, window="fixed", gamma=6)
    schedule = Schedule(1, 0, ModelProposer(ToyRunner(VOCAB, draft), VOCAB, lambda opened: policy))
    assert schedule.run([asked])[1] == alone(asked)
    assert max(features.index for features in policy.seen) == 1
    for features in policy.seen:
        assert list(features.top) == sorted(features.top, reverse=True)
        assert 0 < features.top[0] <= 1
        assert features.entropy >= 0


def drafting(*tokens: int) -> Drafter:
    """A drafter that has begun on these and computes a forward."""
    drafter = Drafter(100)
    drafter.handle(Begin(1, 0, tokens, 20, extend_digest(0, tokens), RequestOptions(rule="coupled")))
    return drafter


def test_tokens_that_the_cache_holds_already_are_not_fed_again() -> None:
    """A draft that has fed its guesses along, and found the first two to be its own draws."""
    drafter = drafting(3, 1)
    send, draft = drafter.handle(Drafted((8, 9, 10), cached=2, request=1))
    assert send == Send(DraftTokens(1, 0, 2, (8, 9, 10), known=2))
    assert draft == Draft(4, (10,), 15, 3, request=1)


def test_tokens_of_a_forward_that_was_overtaken_leave_the_cache() -> None:
    drafter = drafting(3, 1)
    drafter.handle(Verdict(1, 1, 2, (30,), 20, extend_digest(0, (3, 1, 30))))
    rollback, draft = drafter.handle(Drafted((8, 9, 10), cached=2, request=1))
    assert rollback == Rollback(2, request=1)
    assert draft == Draft(2, (30,), 17, request=1)
    assert drafter.counts.wasted == 3
