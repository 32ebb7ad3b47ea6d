"""Every interleaving of a short run: no deadlock, the right text, no message from the future.

Exhaustive: from each state of the whole system every possible move is made, until no new state turns up.  The wires
are FIFO and lose nothing, as ZeroMQ's; forwards end and messages arrive at any time.  A fault, where one is asked
for, may strike at any time too.
"""

from __future__ import annotations

import pickle
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from io import BytesIO
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import ProtocolError
from pearl.protocol.auto import Auto
from pearl.protocol.auto_text import AutoText
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.draft_view import DraftView
from pearl.protocol.drafter import Counts as DraftCounts
from pearl.protocol.drafter import Drafter, DraftMachine
from pearl.protocol.events import Drafted, Stalled
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.feeding import Feeding
from pearl.protocol.messages import (
    Cancel,
    DraftTokens,
    FinishReason,
    Provenance,
    Resync,
    Source,
    Verdict,
)
from pearl.protocol.options import Sampling
from pearl.protocol.proposals import ProposalStore
from pearl.protocol.request import Counts as TargetCounts
from pearl.protocol.request import Request
from pearl.protocol.request_machine import RequestMachine
from pearl.protocol.scheduler import Scheduler
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds
from pearl.protocol.target_states import State
from pearl.spec.methods import METHODS
from tests.protocol_pair import (
    LOST,
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
from tests.replace import replace

STOPPING = [name for name, method in METHODS.items() if method.takes_stops]
TEXT = script(len(PROMPT) + 4)
DRAFTED = tuple(range(len(PROMPT), len(TEXT)))
OPEN_UP = (
    *(Coordinator, RequestMachine, Request, DraftView, AutoText, Feeding, FedTokens, Scheduler, ProposalStore),
    *(Drafter, DraftMachine),
    TokenSequence,
    *(ScriptTarget, ScriptDraft, Cache, Pair),
)
# With a fixed window, and without a clock, these never decide what happens next.
INDIFFERENT = (TargetCounts, DraftCounts, Speeds, Auto)
# What was, and references to machines that the coordinator or the drafter has, and to a request that its machine has.
_LEFT_OUT = ("log", "results", "_story", "_running", "_machines", "_request", "_draft", "_sequence")


def freeze(value: object) -> object:
    """A hashable picture of all that decides what can happen next."""
    return (_FREEZERS.get(type(value)) or _freezer(value))(value)


def _freezer(value: object) -> Callable[[Any], object]:
    """How to picture what is of this value's type: found once, for half of the time goes into pictures."""
    found: Callable[[Any], object]
    kind = type(value)
    if isinstance(value, INDIFFERENT) or callable(value):
        found = _nothing
    elif isinstance(value, OPEN_UP):
        found = _opened
    elif isinstance(value, dict):
        found = _items
    elif kind in (list, tuple, deque):
        found = _sequence
    else:
        found = _itself
    _FREEZERS[kind] = found
    return found


def _nothing(value: object) -> None:
    return None


def _itself(value: object) -> object:
    return value


def _opened(value: object) -> object:
    return tuple([freeze(v) for k, v in vars(value).items() if k not in _LEFT_OUT])


def _items(value: dict[Any, Any]) -> object:
    return tuple([(k, freeze(v)) for k, v in value.items()])


def _sequence(value: Iterable[object]) -> object:
    return tuple([v if type(v) is int else freeze(v) for v in value])


_FREEZERS: dict[type, Callable[[Any], object]] = {}


class _Saver(pickle.Pickler):
    """Saves a state. What never changes (messages, commands, states' names) is only referred to, not copied."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Enum) or (is_dataclass(value) and hasattr(value, "__slots__")):
            try:
                number = _NUMBERS.setdefault((type(value), value), len(_KEPT))
            except TypeError:  # it holds what changes
                return NotImplemented
            if number == len(_KEPT):
                _KEPT.append(value)
            return _kept, (number,)
        return NotImplemented


_NUMBERS: dict[tuple[type, object], int] = {}
_KEPT: list[object] = []


def _kept(number: int) -> object:
    return _KEPT[number]


def saved(state: object) -> bytes:
    file = BytesIO()
    _Saver(file, pickle.HIGHEST_PROTOCOL).dump(state)
    return file.getvalue()


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
            case "repeat branch" | "lose branch" | "delay branch":
                return any(isinstance(m, DraftTokens) and m.after for m in self.to_target)
            case "foul branch":
                return self.drafter is not None
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
            case "repeat branch" | "lose branch" | "delay branch":
                branch = next(m for m in self.to_target if isinstance(m, DraftTokens) and m.after)
                if move != "repeat branch":
                    self.to_target.remove(branch)
                if move != "lose branch":
                    self.to_target.append(branch)
                self.lossy = move == "lose branch"
            case "foul branch":
                self._foul()
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

    def _foul(self) -> None:
        """For what will come next the draft sends what will not follow: it has never drafted that."""
        for machine in self.coordinator.running.values():
            request, position = machine.request, machine.sequence.committed
            if position + 1 >= request.submit.limit:
                continue
            after = position, self.target.text[position]
            foul = DraftTokens(request.number, request.epoch, position + 1, (LOST,), source=Source.BRANCH, after=after)
            self.to_target.append(foul)


class System(NamedTuple):
    """Of the whole system: its two sides by number, what is on the wires, and what may still go wrong."""

    target: int
    draft: int
    to_target: tuple[object, ...]
    to_draft: tuple[object, ...]
    stalls: int
    lossy: bool
    faults: tuple[str, ...]


class Side:
    """What one side can be like, each numbered once. `names`: the attributes of a pair that are this side's."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._numbers: dict[object, int] = {}
        self._saved: list[bytes] = []
        self._shown: list[dict[str, Any]] = []

    def number(self, pair: FaultyPair) -> int:
        values = {name: getattr(pair, name) for name in self._names}
        picture = tuple([freeze(value) for name, value in values.items() if name != "results"]), _outcomes(values)
        number = self._numbers.setdefault(picture, len(self._saved))
        if number == len(self._saved):
            self._saved.append(saved(values))
            self._shown.append(pickle.loads(self._saved[-1]))
        return number

    def put(self, number: int, pair: FaultyPair, *, is_changed: bool) -> None:
        """Gives the pair this side: its own copy, or one that is only to be looked at."""
        vars(pair).update(pickle.loads(self._saved[number]) if is_changed else self._shown[number])


def _outcomes(values: dict[str, Any]) -> object:
    """What has become of each request: it decides nothing, but a side that has seen a fault is not one that has not."""
    results = values.get("results", {})
    return tuple([(number, len(one.tokens), one.end and one.end.reason) for number, one in results.items()])


class Exploration:
    """Every state that a pair can come to, whatever happens in whatever order.

    What a side does depends on itself and on the message that it takes, so each such move is computed once; where the
    other side was at that time matters for invariants only, which are checked for every two sides that meet.
    """

    _MOVES_OF_TARGET, _MOVES_OF_DRAFT = ("submit", "to_target", "target"), ("to_draft", "draft")

    def __init__(self, start: FaultyPair) -> None:
        self._all_faults, self._new_draft = start.faults, start.new_draft
        self._target = Side("coordinator", "target", "target_answer", "submits", "results")
        self._draft = Side("drafter", "draft", "draft_answer")
        self._known: dict[tuple[object, ...], tuple[int, tuple[object, ...]]] = {}
        self._met: set[tuple[int, int]] = set()
        self._start = self._state(start)

    def finals(self) -> Iterator[FaultyPair]:
        """Every state from which nothing can move, however it is reached. Fails where that is a deadlock."""
        seen, stack = {self._start}, [self._start]
        while stack:
            state = stack.pop()
            moves = self._pair(state).moves
            if not [move for move in moves if move not in self._all_faults]:
                yield self._pair(state, "target", "draft")
            for move in moves:
                after = self._after(state, move)
                if after not in seen:
                    seen.add(after)
                    stack.append(after)

    def _state(self, pair: FaultyPair) -> System:
        wires = tuple(pair.to_target), tuple(pair.to_draft)
        numbers = self._target.number(pair), self._draft.number(pair)
        return System(*numbers, *wires, pair.stalls, pair.lossy, pair.faults)

    def _pair(self, state: System, *changed: str) -> FaultyPair:
        """The pair in that state. Only the sides named may be changed."""
        pair = FaultyPair.__new__(FaultyPair)
        self._target.put(state.target, pair, is_changed="target" in changed)
        self._draft.put(state.draft, pair, is_changed="draft" in changed)
        pair.to_target, pair.to_draft = deque(state.to_target), deque(state.to_draft)
        pair.stalls, pair.lossy, pair.faults = state[-3:]
        pair.new_draft, pair.log = self._new_draft, []
        return pair

    def _after(self, state: System, move: str) -> System:
        if move in self._MOVES_OF_TARGET:
            after = self._after_target(state, move)
        elif move in self._MOVES_OF_DRAFT:
            after = self._after_draft(state, move)
        else:  # a fault may change anything
            pair = self._pair(state, "target", "draft")
            pair.move(move)
            return self._state(pair)
        if (after.target, after.draft) not in self._met:
            self._pair(after).check_invariants()
            self._met.add((after.target, after.draft))
        return after

    def _after_target(self, state: System, move: str) -> System:
        taken = state.to_target[:1] if move == "to_target" else ()
        key = "target", state.target, move, taken, self._has_draft(state)  # what is sent to no draft is not sent
        if key not in self._known:
            pair = self._pair(state, "target")
            pair.move(move)
            self._known[key] = self._target.number(pair), tuple(pair.to_draft)[len(state.to_draft) :]
        number, sent = self._known[key]
        rest, stalls = state.to_target[len(taken) :], 0 if taken else state.stalls
        return state._replace(target=number, to_target=rest, to_draft=state.to_draft + sent, stalls=stalls)

    def _after_draft(self, state: System, move: str) -> System:
        taken = state.to_draft[:1] if move == "to_draft" else ()
        key = "draft", state.draft, move, taken
        if key not in self._known:
            pair = self._pair(state, "draft")
            pair.move(move)
            self._known[key] = self._draft.number(pair), tuple(pair.to_target)[len(state.to_target) :]
        number, sent = self._known[key]
        return state._replace(draft=number, to_target=state.to_target + sent, to_draft=state.to_draft[len(taken) :])

    def _has_draft(self, state: System) -> bool:
        return self._pair(state).drafter is not None


def explore(
    method: str,
    window: str,
    gamma: int,
    wrong: Collection[int],
    text: tuple[int, ...] = TEXT,
    faults: tuple[str, ...] = (),
    origins: set[tuple[Provenance, ...]] | None = None,
    **ahead: Any,
) -> int:
    """Explores one pair to the end, checks every way it can end; how many there are.

    `ahead`: `look_ahead`, `branches` and `rule` of the request; `unguessed` and `trees` of `ScriptTarget`, `foresees`
    and `stops` of `ScriptDraft`.  `origins`: takes the provenances of the texts.
    """
    target = {name: ahead.pop(name) for name in ("unguessed", "trees") if name in ahead}
    drafts = ahead.pop("foresees", ()), ahead.pop("stops", ())
    sampling = Sampling(1.0 if ahead.get("rule") in ("ratio", "joint") else 0.0)
    submit = submission(text, method, window=window, gamma=gamma, sampling=sampling, **ahead)
    pair = FaultyPair([submit], ScriptTarget(text, **target), partial(ScriptDraft, text, wrong, *drafts))
    pair.faults = faults
    ends = 0
    for final in Exploration(pair).finals():
        assert final.done, f"deadlock: {final.coordinator.state}, {final.drafter and final.drafter.state}"
        result = final.results[1]
        assert tuple(result.tokens) == text[len(PROMPT) :]
        check_counts(result, runs_ahead="look_ahead" in ahead)
        if origins is not None:
            origins.add(tuple(result.provenance))
        assert faults or result.counts.resyncs == 0
        ends += 1
    return ends


def subsets(positions: Iterable[int]) -> list[tuple[int, ...]]:
    items = tuple(positions)
    return list(chain.from_iterable(combinations(items, n) for n in range(len(items) + 1)))


WINDOWS = [("fixed", 1), ("fixed", 2), ("stream", 1), ("stream", 2)]
PAIRS = [(method, window, gamma) for method, does in METHODS.items() for window, gamma in WINDOWS if does.drafts]


@pytest.mark.parametrize(("method", "window", "gamma"), PAIRS)
def test_every_interleaving_ends_with_the_right_text(method: str, window: str, gamma: int) -> None:
    """Whatever the draft gets wrong, and in whatever order things happen."""
    for wrong in subsets(DRAFTED):
        assert explore(method, window, gamma, wrong) > 0


@pytest.mark.parametrize("method", [name for name in STOPPING if name != "auto"])
@pytest.mark.parametrize("window", ["fixed", "stream"])
def test_every_interleaving_with_a_stop_policy_ends_with_the_right_text(method: str, window: str) -> None:
    """And under `sd` each token comes of the same row, however a window's end and a verdict race: of which one the
    text depends under ratio.
    """
    for wrong in subsets(DRAFTED[:3]):
        for stops in ((2,), (3,), (2, 3, 4, 5)):
            origins: set[tuple[Provenance, ...]] = set()
            assert explore(method, window, 3, wrong, rule="ratio", stops=stops, origins=origins) > 0
            assert len(origins) == 1 or method != "sd"


def test_every_interleaving_with_a_stop_policy_and_all_that_guesses_ends_with_the_right_text() -> None:
    for wrong in ((3,), (2, 4)):
        for stops in ((2,), (3, 4), DRAFTED):
            settings = {"foresees": (3,), "branches": 8, "unguessed": (4,), "look_ahead": 16, "stops": stops}
            assert explore("pearl", "stream", 2, wrong, rule="coupled", **settings) > 0


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize(("window", "trees"), [("fixed", True), ("stream", True), ("stream", False)])
def test_every_interleaving_with_guesses_ends_with_the_right_text(window: str, trees: bool, rule: str) -> None:
    """Whatever the draft gets wrong, and wherever the right token is not among the guesses."""
    for wrong in ((), (3,), (2, 4)):
        for unguessed in ((), (4,)):
            ahead = {"look_ahead": 16, "rule": rule, "unguessed": unguessed, "trees": trees}
            assert explore("pearl", window, 2, wrong, **ahead) > 0


@pytest.mark.parametrize(("rule", "ahead"), [("ratio", {}), ("coupled", {}), ("coupled", {"look_ahead": 16})], ids=str)
@pytest.mark.parametrize(("window", "gamma"), [("fixed", 2), ("stream", 1)])
def test_every_interleaving_with_branches_ends_with_the_right_text(
    window: str, gamma: int, rule: str, ahead: dict[str, Any]
) -> None:
    """Whatever the draft gets wrong, with a continuation for that, and with one for what does not happen."""
    for wrong in ((3,), (2, 4)):
        for foresees in ((3,), DRAFTED):
            settings = {"rule": rule, "foresees": foresees, "branches": 8, "unguessed": (4,), **ahead}
            assert explore("pearl", window, gamma, wrong, **settings) > 0


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("gamma", [1, 2])
def test_every_interleaving_of_sd_that_prepares_ends_with_the_right_text(gamma: int, rule: str) -> None:
    """For what the target may draw behind a window too; and while the draft waits for its verdict."""
    for wrong in ((), (3,), (2, 4)):
        for foresees in ((3,), DRAFTED):
            settings = {"rule": rule, "foresees": foresees, "branches": 8}
            assert explore("ssd", "fixed", gamma, wrong, **settings) > 0


BLOCKED = ("pearl", "sd", "pearl-no-pre-verify", "pearl-no-post-verify")


@pytest.mark.parametrize("method", BLOCKED)
@pytest.mark.parametrize("window", ["fixed", "stream"])
def test_every_interleaving_with_blocks_ends_with_the_right_text(method: str, window: str) -> None:
    """What is judged together does not depend on when tokens come: each has one provenance, whatever happens when."""
    for wrong, depth in product(((), (3,), (2, 4), (5,)), (2, 3)):
        origins: set[tuple[Provenance, ...]] = set()
        settings = {"rule": "joint", "parameters": (("depth", float(depth)),), "origins": origins}
        assert explore(method, window, 2, wrong, **settings) > 0
        assert len(origins) == 1


@pytest.mark.parametrize("faults", [("kill",), ("kill", "join"), ("repeat tokens",), ("lose to target",)], ids=str)
@pytest.mark.parametrize("method", ["pearl", "sd"])
def test_every_interleaving_with_blocks_survives_a_fault_at_any_time(method: str, faults: tuple[str, ...]) -> None:
    for wrong in ((), (3,)):
        settings = {"rule": "joint", "parameters": (("depth", 2.0),)}
        assert explore(method, "stream", 2, wrong, TEXT[:-1], faults, **settings) > 0


@pytest.mark.parametrize("stops", [(2,), (3,), (2, 3, 4, 5)])
def test_blocks_of_a_draft_that_pauses_all_the_same_are_judged_as_they_are(stops: tuple[int, ...]) -> None:
    """No policy goes with them; a draft that says so anyway makes no target wait for ever, or compute for ever."""
    for method, wrong in product(("pearl", "sd"), ((), (3,))):
        settings = {"rule": "joint", "parameters": (("depth", 3.0),), "stops": stops}
        assert explore(method, "stream", 2, wrong, **settings) > 0


def test_a_draft_lost_while_its_tokens_are_compared_costs_no_text() -> None:
    """What was fed of them is fed again, as far as it is the text after all: up to the limit, however near that is."""
    lost = 0
    for seed in range(300):
        text = script(len(PROMPT) + 6)
        submit = submission(text, "pearl", window="stream", gamma=2, rule="coupled", look_ahead=8)
        pair, pick = Pair([submit], ScriptTarget(text, (4,)), partial(ScriptDraft, text, (6,))), at_random(seed)
        while pair.moves:
            target, sequence = pair.coordinator, pair.coordinator.sequence
            is_near = sequence.fed > sequence.committed > len(text) - 5
            if target.state is State.SAMPLING and pair.drafter is not None and is_near:
                lost += 1
                pair.kill_draft()
            pair.move(pick(pair.moves))
        assert tuple(pair.results[1].tokens) == text[len(PROMPT) :]
    assert lost > 0


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_text_that_begins_anew_while_guesses_are_made_is_fed_none_of_them(rule: str) -> None:
    """The pending tokens that they were to follow are gone: the draft has lost its way amid them."""
    lost = 0
    for seed in range(60):
        text = script(len(PROMPT) + 12)
        settings = {"window": "stream", "gamma": 3, "rule": rule, "look_ahead": 8}
        submit = submission(text, "pearl", sampling=Sampling(1.0), **settings)
        pair, pick = Pair([submit], ScriptTarget(text, (4,)), partial(ScriptDraft, text, (6,))), at_random(seed)
        while pair.moves:
            target = pair.coordinator
            if target.state is State.GUESSING and target.sequence.pending and not lost % 2:
                pair.tell_target(Resync(1, target.epoch))
            lost += target.state is State.GUESSING
            pair.move(pick(pair.moves))
        assert tuple(pair.results[1].tokens) == text[len(PROMPT) :]
    assert lost > 0


def test_guesses_without_a_draft_end_with_the_right_text() -> None:
    for unguessed in subsets(DRAFTED):
        for trees in (True, False):
            assert explore("ngram", "stream", 1, (), look_ahead=16, unguessed=unguessed, trees=trees) == 1


BRANCH_FAULTS = ["repeat branch", "delay branch", "foul branch", "lose branch", "kill"]


@pytest.mark.parametrize("fault", BRANCH_FAULTS)
@pytest.mark.parametrize("ahead", [{}, {"look_ahead": 16}], ids=["alone", "with guesses"])
def test_every_interleaving_with_branches_survives_a_fault_at_any_time(ahead: dict[str, Any], fault: str) -> None:
    settings = {"rule": "coupled", "foresees": (3, 4), "branches": 8, "unguessed": (4,), **ahead}
    faults = (fault, "join") if fault == "kill" else (fault,)
    assert explore("pearl", "stream", 2, (3,), TEXT[:-1], faults, **settings) > 0


@pytest.mark.parametrize("fault", BRANCH_FAULTS)
def test_every_interleaving_of_sd_that_prepares_survives_a_fault_at_any_time(fault: str) -> None:
    faults = (fault, "join") if fault == "kill" else (fault,)
    settings = {"rule": "coupled", "foresees": (3, 4), "branches": 8}
    assert explore("ssd", "fixed", 2, (3,), TEXT[:-1], faults, **settings) > 0


def test_the_table_of_faults_names_those_of_branches() -> None:
    said = (Path(__file__).parent / "FAULTS.md").read_text()
    assert set(re.findall(r"(?m)^\| (\w+) branch \| identical \|$", said)) == {
        *(fault.partition(" ")[0] for fault in BRANCH_FAULTS if fault.endswith("branch")),
        *("stale", "crowded"),  # in tests/test_room.py
    }


LOSSES = [("lose to target",), ("lose to draft",), ("lose to target", "lose two to target")]
LOSSES += [("lose to draft", "lose two to draft"), ("lose to target", "lose to draft"), ("lose to draft", "kill")]
FAULTS = [("kill",), ("kill", "join"), ("repeat tokens",), ("repeat verdict",), *LOSSES]


@pytest.mark.parametrize("faults", FAULTS, ids=str)
@pytest.mark.parametrize("window", ["fixed", "stream"])
def test_every_interleaving_survives_a_fault_at_any_time(window: str, faults: tuple[str, ...]) -> None:
    """A draft that dies (and returns), messages that come twice, and messages that do not come."""
    for wrong in ((), (3,)):
        assert explore("pearl", window, 2, wrong, TEXT[:-1], faults) > 0


@pytest.mark.parametrize(
    ("rule", "faults"), [("coupled", faults) for faults in FAULTS] + [("ratio", ("kill", "join"))], ids=str
)
def test_every_interleaving_with_guesses_survives_a_fault_at_any_time(rule: str, faults: tuple[str, ...]) -> None:
    for wrong in ((), (3,)):
        assert explore("pearl", "stream", 2, wrong, TEXT[:-1], faults, look_ahead=16, rule=rule, unguessed=(4,)) > 0


@pytest.mark.parametrize(("wrong", "window"), [((), "fixed"), ((), "stream"), ((3,), "stream")])
def test_every_interleaving_survives_a_divergence_at_any_time(wrong: tuple[int, ...], window: str) -> None:
    """A verdict whose digest does not match: the draft asks for the whole prefix, once and successfully."""
    assert explore("pearl", window, 2, wrong, TEXT[:-1], ("garble verdict",)) > 0


ANY_FAULT = ("kill", "join", "repeat tokens", "repeat verdict", "garble verdict", "lose to target", "lose to draft")


@settings(max_examples=150)
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
        for final in Exploration(pair).finals():
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
    grant = DraftView._grant
    monkeypatch.setattr(DraftView, "_grant", lambda self: grant(self) - 1)
    with pytest.raises((AssertionError, ProtocolError)):
        explore("pearl", "fixed", 1, ())


def test_the_exploration_notices_that_nothing_makes_a_loss_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a target that is told that both wait does nothing about it."""
    monkeypatch.setitem(RequestMachine.handlers, Stalled, lambda self, event, do: None)
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

    def keep_epoch(self: Request) -> None:
        self.proposals.clear()
        self.sequence.drop_pending()

    monkeypatch.setattr(Request, "discard_pending", keep_epoch)
    with pytest.raises((AssertionError, ProtocolError)):
        explore("pearl", "stream", 2, (2,))
