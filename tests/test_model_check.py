"""Every interleaving of a short run: no deadlock, the right text, no message from the future.

Exhaustive: from each state of the whole system every possible move is made, until no new state turns up.  The wires
are FIFO and lose nothing, as ZeroMQ's; forwards end and messages arrive at any time.  A fault, where one is asked
for, may strike at any time too.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import ProtocolError
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Counts as DraftCounts
from pearl.protocol.drafter import Drafter, DraftMachine
from pearl.protocol.events import Drafted
from pearl.protocol.messages import Cancel, DraftTokens, FinishReason, Resync, Verdict
from pearl.protocol.proposals import ProposalStore
from pearl.protocol.request import Counts as TargetCounts
from pearl.protocol.request import RequestState
from pearl.protocol.request_machine import RequestMachine
from pearl.protocol.scheduler import Scheduler
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.window import METHODS, Speeds
from tests.protocol_pair import (
    PROMPT,
    Cache,
    Pair,
    ScriptDraft,
    ScriptTarget,
    at_random,
    check_counts,
    script,
    submission,
)

TEXT = script(len(PROMPT) + 4)
DRAFTED = tuple(range(len(PROMPT), len(TEXT)))
OPEN_UP = (
    *(Coordinator, RequestMachine, RequestState, Scheduler, ProposalStore, Drafter, DraftMachine),
    TokenSequence,
    *(ScriptTarget, ScriptDraft, Cache, Pair),
)
INDIFFERENT = (TargetCounts, DraftCounts, Speeds)  # with a fixed window these never decide what happens next


def freeze(value: object) -> object:
    """A hashable picture of all that decides what can happen next."""
    if isinstance(value, INDIFFERENT) or callable(value):
        return None
    if isinstance(value, OPEN_UP):
        return tuple(freeze(v) for k, v in vars(value).items() if k not in ("log", "results", "_story"))
    if isinstance(value, dict):
        return tuple((k, freeze(v)) for k, v in value.items())
    if isinstance(value, (list, tuple, deque)) and type(value) in (list, tuple, deque):
        return tuple(map(freeze, value))
    return value


class FaultyPair(Pair):
    """A pair to which each of `faults` happens once, or never, at any time."""

    faults: tuple[str, ...] = ()

    @property
    def moves(self) -> list[str]:
        return super().moves + [fault for fault in self.faults if self._possible(fault)]

    def _possible(self, fault: str) -> bool:
        match fault:
            case "kill":
                return self.drafter is not None
            case "join":
                return self.drafter is None
            case "repeat tokens":
                return any(isinstance(m, DraftTokens) for m in self.to_target)
            case "repeat verdict":
                return any(isinstance(m, Verdict) for m in self.to_draft)
            case "garble verdict":
                return bool(self.to_draft) and isinstance(self.to_draft[0], Verdict)
            case "lose to target" | "lose two to target":  # but not the news that a draft has come or gone
                return isinstance(self.to_target and self.to_target[0], (DraftTokens, Resync))
            case "lose to draft" | "lose two to draft":
                return bool(self.to_draft)
            case "fail":
                return self.target_answer is not None
            case "cancel" | "cancel next":
                return True
        raise AssertionError(fault)

    def move(self, move: str) -> None:
        self.log.clear()
        if move not in self.faults:
            super().move(move)
            return
        self.faults = tuple(fault for fault in self.faults if fault != move)
        match move:
            case "kill":
                self.kill_draft()
            case "join":
                self.join_draft()
            case "repeat tokens":
                self.to_target.append(next(m for m in self.to_target if isinstance(m, DraftTokens)))
            case "repeat verdict":
                self.to_draft.append(next(m for m in self.to_draft if isinstance(m, Verdict)))
            case "garble verdict":
                self.to_draft[0] = replace(self.to_draft[0], digest=self.to_draft[0].digest ^ 1)  # type: ignore
            case "lose to target" | "lose two to target":
                self.lossy = bool(self.to_target.popleft())
            case "lose to draft" | "lose two to draft":
                self.lossy = bool(self.to_draft.popleft())
            case "fail":
                self.fail_target()
            case "cancel" | "cancel next":
                self.tell_target(Cancel(1 + (move == "cancel next")))
        self.check_invariants()


def finals(start: FaultyPair) -> Iterator[FaultyPair]:
    """Every state from which nothing can move, however it is reached. Fails where that is a deadlock."""
    seen: set[int] = set()
    stack = [pickle.dumps(start)]
    while stack:
        state = stack.pop()
        moves = pickle.loads(state).moves
        if not [move for move in moves if move not in start.faults]:
            yield pickle.loads(state)
        for move in moves:
            after = pickle.loads(state)
            after.move(move)
            picture = hash(freeze(after))
            if picture not in seen:
                seen.add(picture)
                stack.append(pickle.dumps(after))


def explore(
    method: str,
    window: str,
    gamma: int,
    wrong: Collection[int],
    text: tuple[int, ...] = TEXT,
    faults: tuple[str, ...] = (),
) -> int:
    """Explores one pair to the end, checks every way it can end; how many there are."""
    submit = submission(text, method, window=window, gamma=gamma)
    pair = FaultyPair([submit], ScriptTarget(text), partial(ScriptDraft, text, wrong))
    pair.faults = faults
    ends = 0
    for final in finals(pair):
        assert final.done, f"deadlock: {final.coordinator.state}, {final.drafter and final.drafter.state}"
        result = final.results[1]
        assert tuple(result.tokens) == text[len(PROMPT) :]
        check_counts(result)
        ends += 1
    return ends


def subsets(positions: Iterable[int]) -> list[tuple[int, ...]]:
    items = tuple(positions)
    return list(chain.from_iterable(combinations(items, n) for n in range(len(items) + 1)))


WINDOWS = [("fixed", 1), ("fixed", 2), ("stream", 1), ("stream", 2)]
PAIRS = [(method, window, gamma) for method in METHODS for window, gamma in WINDOWS if method != "ar"]


@pytest.mark.parametrize(("method", "window", "gamma"), PAIRS)
def test_every_interleaving_ends_with_the_right_text(method: str, window: str, gamma: int) -> None:
    """Whatever the draft gets wrong, and in whatever order things happen."""
    for wrong in subsets(DRAFTED):
        assert explore(method, window, gamma, wrong) > 0


LOSSES = [("lose to target",), ("lose to draft",), ("lose to target", "lose two to target")]
LOSSES += [("lose to draft", "lose two to draft"), ("lose to target", "lose to draft"), ("lose to draft", "kill")]
FAULTS = [("kill",), ("kill", "join"), ("repeat tokens",), ("repeat verdict",), *LOSSES]


@pytest.mark.parametrize("faults", FAULTS, ids=str)
@pytest.mark.parametrize("window", ["fixed", "stream"])
def test_every_interleaving_survives_a_fault_at_any_time(window: str, faults: tuple[str, ...]) -> None:
    """A draft that dies (and returns), messages that come twice, and messages that do not come."""
    for wrong in ((), (3,)):
        assert explore("pearl", window, 2, wrong, TEXT[:-1], faults) > 0


@pytest.mark.parametrize(("wrong", "window"), [((), "fixed"), ((), "stream"), ((3,), "stream")])
def test_every_interleaving_survives_a_divergence_at_any_time(wrong: tuple[int, ...], window: str) -> None:
    """A verdict whose digest does not match: the draft asks for the whole prefix, once and successfully."""
    assert explore("pearl", window, 2, wrong, TEXT[:-1], ("garble verdict",)) > 0


ANY_FAULT = ("kill", "join", "repeat tokens", "repeat verdict", "garble verdict", "lose to target", "lose to draft")


@settings(max_examples=150, deadline=None)
@given(
    method=st.sampled_from([method for method in METHODS if method != "ar"]),
    window=st.sampled_from(["fixed", "stream"]),
    gamma=st.integers(1, 9),
    length=st.integers(3, 80),
    wrong=st.sets(st.integers(2, 80)),
    seed=st.integers(0, 2**32),
    troubles=st.lists(st.tuples(st.integers(0, 400), st.sampled_from(ANY_FAULT)), max_size=12),
)
def test_long_runs_come_to_their_end_whatever_happens(
    method: str, window: str, gamma: int, length: int, wrong: set[int], seed: int, troubles: list[tuple[int, str]]
) -> None:
    """Two requests, long windows, many faults: what cannot be explored whole is tried at random, and shrunk."""
    text = script(length)
    submits = [submission(text, method, window=window, gamma=gamma, request=number) for number in (1, 2)]
    pair = FaultyPair(submits, ScriptTarget(text), partial(ScriptDraft, text, frozenset(wrong)))
    pick, due = at_random(seed), sorted(troubles)
    for step in range(40_000):
        while due and due[0][0] <= step:
            fault = due.pop(0)[1]
            if pair._possible(fault):
                pair.faults = (fault,)
                pair.move(fault)
        if pair.done:
            break
        moves = pair.moves
        assert moves, f"deadlock: {pair.coordinator.state}, {pair.drafter and pair.drafter.state}"
        pair.move(pick(moves))
    for result in pair.results.values():
        assert tuple(result.tokens) == text[len(PROMPT) :]
        check_counts(result)


ENDINGS = [("fail",), ("cancel",), ("fail", "kill"), ("fail", "cancel next"), ("fail", "lose to target")]


@pytest.mark.parametrize("faults", ENDINGS, ids=str)
@pytest.mark.parametrize("window", ["fixed", "stream"])
def test_a_request_that_ends_early_at_any_time_harms_no_other(window: str, faults: tuple[str, ...]) -> None:
    """Two requests, of which one fails or is cancelled: what it has of its text is right, the other's is whole."""
    text = TEXT[:-2]
    for wrong in ((), (2,)):
        submits = [submission(text, "pearl", window=window, gamma=2, request=number) for number in (1, 2)]
        pair = FaultyPair(submits, ScriptTarget(text), partial(ScriptDraft, text, wrong))
        pair.faults = faults
        for final in finals(pair):
            assert final.done, f"deadlock: {final.coordinator.state}, {final.drafter and final.drafter.state}"
            cut = 0
            for result in final.results.values():
                assert tuple(result.tokens) == text[len(PROMPT) :][: len(result.tokens)]
                assert result.end is not None
                cut += result.end.reason is FinishReason.CANCELLED
                assert result.end.reason is FinishReason.CANCELLED or len(result.tokens) == len(text) - len(PROMPT)
            assert cut <= len({"fail", "cancel", "cancel next"} & set(faults))


def test_the_exploration_notices_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: what the target lets the draft draft is one token short of what it waits for."""
    grant = RequestMachine._grant
    monkeypatch.setattr(RequestMachine, "_grant", lambda self: grant(self) - 1)
    with pytest.raises((AssertionError, ProtocolError)):
        explore("pearl", "fixed", 1, ())


def test_the_exploration_notices_that_nothing_makes_a_loss_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a target that is told that both wait does nothing about it."""
    monkeypatch.setattr(RequestMachine, "_resynchronise", lambda self, do: None)
    with pytest.raises(AssertionError, match="deadlock"):
        explore("pearl", "fixed", 1, (), TEXT[:-1], ("lose to target",))


def test_the_exploration_notices_a_draft_that_commits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the draft takes what it drafted for final before it is told."""
    drafted = DraftMachine._drafted

    def hasty(self: DraftMachine, event: Drafted, do: Callable[[object], None]) -> None:
        drafted(self, event, do)
        if self.sequence.pending:
            self.sequence.accept()

    monkeypatch.setitem(DraftMachine.handlers, Drafted, hasty)
    with pytest.raises((AssertionError, ProtocolError)):
        explore("pearl", "stream", 2, (2,))


def test_the_exploration_notices_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: what was drafted before a rejection is kept, as if no epoch had begun."""

    def keep_epoch(self: RequestMachine) -> None:
        self.proposals.clear()
        self.sequence.drop_pending()

    monkeypatch.setattr(RequestMachine, "_discard_pending", keep_epoch)
    with pytest.raises((AssertionError, ProtocolError)):
        explore("pearl", "stream", 2, (2,))
