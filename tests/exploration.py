"""Explores every state that a pair of state machines can reach, for a short text.

See test_model_check.
"""

import io
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

from pearl.config import RequestOptions
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.draft_state import DraftState
from pearl.protocol.drafter import Drafter, DraftMachine
from pearl.protocol.events import Drafted
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.look_ahead import LookAhead
from pearl.protocol.messages import Cancel, DraftTokens, Provenance, Resync, Source, Verdict
from pearl.protocol.method_choice import Auto
from pearl.protocol.method_trials import AutoText
from pearl.protocol.proposals import ProposalStore
from pearl.protocol.request import Counts, Request
from pearl.protocol.request_machine import RequestMachine, State
from pearl.protocol.scheduler import Scheduler
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds
from tests.options import drawn_by
from tests.protocol_pair import Pair, check_counts
from tests.replace import replace
from tests.scripted import LOST, PROMPT, Cache, ScriptDraft, ScriptTarget, script, submission

TEXT = script(len(PROMPT) + 4)
DRAFTED = tuple(range(len(PROMPT), len(TEXT)))
OPEN_UP = (
    *(
        Coordinator,
        RequestMachine,
        Request,
        DraftState,
        AutoText,
        LookAhead,
        FedTokens,
        Scheduler,
        ProposalStore,
    ),
    *(Drafter, DraftMachine),
    TokenSequence,
    *(ScriptTarget, ScriptDraft, Cache, Pair),
)
# With a fixed window, and without a clock, these never decide what happens next.
INDIFFERENT = (Counts, Speeds, Auto)
# What was, and references to machines that the coordinator or the drafter has, and to a request that its machine has.
_LEFT_OUT = (
    "log",
    "stale",
    "results",
    "_story",
    "_running",
    "_machines",
    "_request",
    "_trust",
    "_draft",
    "_sequence",
)


def freeze(value: object) -> object:
    """Return a hashable picture of everything in `value` that determines what can happen next."""
    return (_FREEZERS.get(type(value)) or _freezer(value))(value)


def _freeze_attributes(value: object) -> tuple[object, ...]:
    return tuple([freeze(v) for k, v in vars(value).items() if k not in _LEFT_OUT])


def _freezer(value: object) -> Callable[[Any], object]:
    """Return the function that makes pictures of values of this type.

    It is kept for each type, because half of the time is spent on pictures.
    """
    kind = type(value)
    if isinstance(value, INDIFFERENT) or callable(value):
        found: Callable[[Any], object] = lambda value: None  # noqa: E731
    elif isinstance(value, OPEN_UP):
        found = _freeze_attributes
    elif isinstance(value, dict):
        found = lambda value: tuple([(k, freeze(v)) for k, v in value.items()])  # noqa: E731
    elif kind in (list, tuple, deque):
        found = lambda value: tuple([v if type(v) is int else freeze(v) for v in value])  # noqa: E731
    else:
        found = lambda value: value  # noqa: E731
    return _FREEZERS.setdefault(kind, found)


_FREEZERS: dict[type, Callable[[Any], object]] = {}


class FaultyPair(Pair):
    """A pair in which each of `faults` happens at most once, at any time."""

    faults: tuple[str, ...] = ()
    next_context = 1 << 20  # of a draft that joins

    @property
    def moves(self) -> list[str]:
        return super().moves + [fault for fault in self.faults if self.possible(fault)]

    def move(self, move: str) -> None:
        self.log.clear()
        if move not in self.faults:
            super().move(move)
            return
        happen = self.possible(move)
        assert happen is not None
        self.faults = tuple(fault for fault in self.faults if fault != move)
        happen()
        self.check_invariants()

    def possible(self, fault: str) -> Callable[[], object] | None:
        """Return a function that makes the fault happen; None if the fault cannot happen now."""
        tokens = [m for m in self.to_target if isinstance(m, DraftTokens)]
        branches = [m for m in tokens if m.after]
        verdicts = [m for m in self.to_draft if isinstance(m, Verdict)]
        match fault:
            case "kill" if self.drafter is not None:
                return self.kill_draft
            case "join" if self.drafter is None:
                return lambda: self.join_draft(self.next_context)
            case "repeat tokens" if tokens:
                return lambda: self.to_target.append(tokens[0])
            case "repeat branch" if branches:
                return lambda: self.to_target.append(branches[0])
            case "delay branch" if branches:
                return lambda: (
                    self.to_target.remove(branches[0]),
                    self.to_target.append(branches[0]),
                )
            case "lose branch" if branches:
                return lambda: self._lose(self.to_target, branches[0])
            case "foul branch" if self.drafter is not None:
                return self._foul
            case "repeat verdict" if verdicts:
                return lambda: self.to_draft.append(verdicts[0])
            case "garble verdict" if verdicts and verdicts[0] is self.to_draft[0]:
                return lambda: self._garble(verdicts[0])
            # But not the news that a draft has come or gone.
            case "lose to target" | "lose two to target" if isinstance(
                next(iter(self.to_target), None), DraftTokens | Resync
            ):
                return lambda: self._lose(self.to_target, self.to_target[0])
            case "lose to draft" | "lose two to draft" if self.to_draft:
                return lambda: self._lose(self.to_draft, self.to_draft[0])
            case "resync" if self.drafter is not None and self.coordinator.state in (
                State.HELD,
                State.GATHERING,
            ):
                return self.stall
            case "fail" if self.target_answer is not None:
                return self.fail_target
            case "fail to judge" if not self.target.chokes:
                return partial(setattr, self.target, "chokes", True)
            case "choke" if isinstance(self.draft_answer, Drafted) and self.draft_answer.tokens:
                return partial(setattr, self, "draft_answer", Drafted(failure="not finite"))
            case "cancel" | "cancel next":
                return lambda: self.tell_target(Cancel(1 + (fault == "cancel next")))
        return None

    def _lose(self, wire: deque[object], message: object) -> None:
        wire.remove(message)
        self.lossy = True

    def _garble(self, verdict: Verdict) -> None:
        self.to_draft[0] = replace(verdict, digest=verdict.digest ^ 1)

    def _foul(self) -> None:
        """Send the target a branch whose outcome will come, with a token that will not follow.

        The draft has never drafted that token.
        """
        for machine in self.coordinator.running.values():
            request, position = machine.request, machine.sequence.committed
            if position + 1 >= request.submit.limit:
                continue
            after = position, self.target.text[position]
            foul = DraftTokens(
                request.number,
                request.epoch,
                position + 1,
                (LOST,),
                source=Source.BRANCH,
                after=after,
            )
            self.to_target.append(foul)


class System(NamedTuple):
    """The state of the whole system.

    It has the two sides by their numbers, the messages on the wires, and the faults that may still
    happen.
    """

    target: int
    draft: int
    to_target: tuple[object, ...]
    to_draft: tuple[object, ...]
    stalls: int
    lossy: bool
    faults: tuple[str, ...]


_OPTIONS: dict[int, RequestOptions] = {}  # by `id`


def _options(number: int) -> RequestOptions:
    return _OPTIONS[number]


class SidePickler(pickle.Pickler):
    """Pickles a side. All copies share the requests' options.

    Options never change, and new ones would be checked again.
    """

    def reducer_override(self, value: object) -> Any:
        if type(value) is not RequestOptions:
            return NotImplemented
        _OPTIONS[id(value)] = value
        return _options, (id(value),)


def dumped(values: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    SidePickler(file, pickle.HIGHEST_PROTOCOL).dump(values)
    return file.getvalue()


class Side:
    """Numbers the states that one side of a pair can have.

    `names`: the attributes of a pair that belong to this side.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._numbers: dict[object, int] = {}
        self._saved: list[bytes] = []
        self.shown: list[dict[str, Any]] = []

    def number(self, pair: FaultyPair) -> int:
        values = {name: getattr(pair, name) for name in self._names}
        picture = (
            tuple([freeze(value) for name, value in values.items() if name != "results"]),
            _outcomes(values),
        )
        number = self._numbers.setdefault(picture, len(self._saved))
        if number == len(self._saved):
            self._saved.append(dumped(values))
            self.shown.append(pickle.loads(self._saved[-1]))
        return number

    def put(self, number: int, pair: FaultyPair, *, is_changed: bool) -> None:
        """Give the pair state `number` of this side.

        `is_changed`: whether the pair gets a copy of its own; otherwise it may only look at the
        state.
        """
        vars(pair).update(pickle.loads(self._saved[number]) if is_changed else self.shown[number])


def _outcomes(values: dict[str, Any]) -> object:
    """Return what has become of each request.

    This does not determine what happens next. But it distinguishes a side that has seen a fault
    from one that has not.
    """
    results = values.get("results", {})
    return tuple(
        [(number, len(one.tokens), one.end and one.end.reason) for number, one in results.items()]
    )


class Exploration:
    """Every state that a pair can reach, whatever happens in whatever order.

    What a side does depends only on the side and on the message that it takes, so each such move is
    computed once. The state of the other side matters for the invariants only. These are checked
    for every two states of the sides that occur together.
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
        """Yield every state from which no move is possible, once for each state.

        The caller has to check that the state is no deadlock.
        """
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
        """Return a pair in this state. Only the sides named in `changed` may be changed."""
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
        has_draft = (
            self._draft.shown[state.draft]["drafter"] is not None
        )  # what is sent to no draft is not sent
        key = "target", state.target, move, taken, has_draft
        if key not in self._known:
            pair = self._pair(state, "target")
            pair.move(move)
            self._known[key] = (
                self._target.number(pair),
                tuple(pair.to_draft)[len(state.to_draft) :],
            )
        number, sent = self._known[key]
        rest, stalls = state.to_target[len(taken) :], 0 if taken else state.stalls
        return state._replace(
            target=number, to_target=rest, to_draft=state.to_draft + sent, stalls=stalls
        )

    def _after_draft(self, state: System, move: str) -> System:
        taken = state.to_draft[:1] if move == "to_draft" else ()
        key = "draft", state.draft, move, taken
        if key not in self._known:
            pair = self._pair(state, "draft")
            pair.move(move)
            self._known[key] = (
                self._draft.number(pair),
                tuple(pair.to_target)[len(state.to_target) :],
            )
        number, sent = self._known[key]
        return state._replace(
            draft=number, to_target=state.to_target + sent, to_draft=state.to_draft[len(taken) :]
        )


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
    """Explore one pair to the end, check every way in which it can end, and return their number.

    Args:
        origins: a set to which the provenances of the texts are added.
        ahead: options of the request, such as those for guesses and `rule`; also `unguessed` and
            `trees` of `ScriptTarget`, and `foresees` and `stops` of `ScriptDraft`.
    """
    target = {name: ahead.pop(name) for name in ("unguessed", "trees") if name in ahead}
    drafts = ahead.pop("foresees", ()), ahead.pop("stops", ())
    sampling = drawn_by(1.0 if ahead.get("rule") in ("ratio", "joint") else 0.0)
    submit = submission(text, method, window=window, gamma=gamma, sampling=sampling, **ahead)
    pair = FaultyPair(
        [submit], ScriptTarget(text, **target), partial(ScriptDraft, text, wrong, *drafts)
    )
    pair.faults = faults
    ends = 0
    for final in Exploration(pair).finals():
        assert final.done, (
            f"deadlock: {final.coordinator.state}, {final.drafter and final.drafter.state}"
        )
        result = final.results[1]
        assert tuple(result.tokens) == text[len(PROMPT) :]
        check_counts(result, runs_ahead=bool({"look_ahead", "siblings"} & set(ahead)))
        if origins is not None:
            origins.add(tuple(result.provenance))
        assert faults or result.counts.resyncs == 0
        ends += 1
    return ends
