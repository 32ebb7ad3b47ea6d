"""The two state machines, step by step: their tables, what a peer may send, and a draft's comings and goings.

That every interleaving comes to a good end is for test_model_check; here are single steps, and long random runs.
"""

import copy
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pearl.errors import LocalProtocolError, RemoteProtocolError
from pearl.protocol import drafter as draft_side
from pearl.protocol import events as e
from pearl.protocol import request_machine as target_side
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.messages import (
    Begin,
    Cancel,
    DraftTokens,
    Finish,
    FinishReason,
    Resync,
    Submit,
    Verdict,
)
from pearl.protocol.sequence import extend_digest
from pearl.spec.methods import METHODS
from tests.exploration import FaultyPair, freeze
from tests.options import drawn_by, resolved
from tests.protocol_pair import Pair, at_random, check_counts, draft_in, make_pair, until
from tests.replace import replace
from tests.scripted import LOST, PROMPT, TEXT, WRONG, ScriptDraft, ScriptTarget, script, submission


def finish(pair: Pair, text: tuple[int, ...] = TEXT) -> None:
    """Runs to the end and checks the text."""
    pair.run(at_random(0))
    for result in pair.results.values():
        assert tuple(result.tokens) == text[result.prompt :]
        check_counts(result)


# ---- messages of the draft (invariant 6) ----


def held(wrong: tuple[int, ...] = (), branches: int = 0) -> Pair:
    """A target that holds its first row, for a draft that has sent nothing yet."""
    pair = make_pair(wrong=wrong, branches=branches)
    return until(
        pair,
        lambda p: p.coordinator.state is target_side.State.HELD,
        lambda moves: "target" if "target" in moves else moves[0],
    )


@pytest.mark.parametrize(
    "message",
    [
        DraftTokens(1, 1, 2, (9,)),
        DraftTokens(1, 0, 2, (9,) * 3),
        DraftTokens(1, 0, 4, (9,)),
        DraftTokens(1, 0, 1 << 40, (9,)),
    ],
    ids=["future epoch", "too many", "beyond its bound", "far beyond"],
)
def test_what_the_draft_had_no_right_to_send_is_refused(message: DraftTokens) -> None:
    """It may draft positions 2 and 3, in epoch 0. Refused, and the machine is as it was."""
    pair = held()
    before = freeze(pair.coordinator)
    with pytest.raises(RemoteProtocolError, match="epoch 0"):
        pair.coordinator.handle(message)
    assert freeze(pair.coordinator) == before
    finish(pair)


@pytest.mark.parametrize("branches", [0, 4])
def test_a_draft_prepares_no_further_than_it_may_draft(branches: int) -> None:
    """It could give the target 64 branches to keep, each as long as the text may become, with a row a token."""
    pair = held(branches=branches)
    request = pair.coordinator.running[1]
    assert request.draft.furthest == 2
    request.sequence.extend((9, 9))
    stale = request.request.counts.stale
    for start in range(3, 9):
        pair.coordinator.handle(DraftTokens(1, 0, start, (7,), known=2, after=(2, 8)))
    pair.coordinator.handle(DraftTokens(1, 0, 3, (7,) * 5, known=2, after=(2, 6)))
    assert [branch.tokens for branch in request.request.proposals.branches.values()] == (
        [(7, 7)] if branches else []
    )
    assert request.request.counts.stale - stale == (5 if branches else 7)


def test_a_begin_that_contradicts_itself_is_refused() -> None:
    begin = Begin(1, 0, PROMPT, 9, extend_digest(0, PROMPT), resolved())
    for bad in (
        replace(begin, digest=begin.digest ^ 1),
        replace(begin, tokens=(), digest=0),
        replace(begin, tokens=(3, 2)),
    ):
        machine = Drafter(100)
        before = freeze(machine)
        with pytest.raises(RemoteProtocolError, match="digest"):
            machine.handle(bad)
        assert freeze(machine) == before


# ---- divergence (invariant 7) ----


def test_digests_tell_prefixes_apart() -> None:
    prefixes = [(), (0,), (0, 0), (1,), (1, 2), (2, 1), (1, 2, 3), (1, 2, 4)]
    assert len({extend_digest(0, prefix) for prefix in prefixes}) == len(prefixes)
    assert extend_digest(extend_digest(0, (1, 2)), (3,)) == extend_digest(0, (1, 2, 3))
    assert extend_digest(0, range(100_000)) < 2**61


# ---- a draft that cannot go on with a request ----


def test_a_failed_draw_that_was_overtaken_ends_nothing() -> None:
    """The prefix that it choked on no longer stands: a verdict, or another request, came meanwhile."""
    machine = draft_in(draft_side.DrafterState.DRAFTING)
    machine.handle(Begin(2, 0, (*PROMPT, 8), 9, extend_digest(0, (*PROMPT, 8)), resolved()))
    commands = machine.handle(e.Drafted(failure="not finite"))
    assert not any(isinstance(command, e.Send) for command in commands)
    assert commands[-1] == e.Draft(0, (*PROMPT, 8), 6, prompt=True, request=2)


# ---- several requests ----


def test_both_caches_keep_what_two_requests_have_in_common() -> None:
    """Only the last prompt token and what differs is fed again (the scripted caches check that it is right)."""
    chat = TEXT[:20]
    pair = Pair([submission(chat, gamma=2)], ScriptTarget(TEXT), partial(ScriptDraft, TEXT, (9,)))
    pair.run(at_random(0))
    pair.log.clear()
    pair.submits.append(submission(TEXT, prompt=18, request=2, gamma=2))
    pair.run(at_random(0))
    assert tuple(pair.results[2].tokens) == TEXT[18:]
    fed = {kind: next(c for c in pair.log if isinstance(c, kind)) for kind in (e.Forward, e.Draft)}
    assert fed[e.Forward].start == 17
    assert fed[e.Draft].start >= 16
    assert fed[e.Forward].tokens == TEXT[17:18]


# ---- what is told ----


def test_previews_are_sent_only_on_request_and_only_what_is_pending() -> None:
    guessed = (*TEXT[:9], WRONG, *[LOST] * len(TEXT))
    for preview in (False, True):
        pair = make_pair(wrong=(9,), limit=9, preview=preview, window="stream")
        finish(pair, TEXT[:9])
        assert bool(pair.results[1].previews) is preview
        for guess in pair.results[1].previews:
            assert guess.tokens == guessed[guess.start : guess.start + len(guess.tokens)]


# ---- the tables: unlisted events are refused, listed transitions happen ----

TARGET_EVENTS = {
    Submit: submission(TEXT, request=9),
    Cancel: Cancel(9),
    e.Forwarded: e.Forwarded(request=1),
    DraftTokens: DraftTokens(9, 0, 0, (1,)),
    e.DraftJoined: e.DraftJoined(100),
    e.DraftGone: e.DraftGone("test"),
    e.Failed: e.Failed("test", request=1),
    Resync: Resync(9, 0),
}
MACHINES = {target_side: target_side.RequestMachine, draft_side: draft_side.DraftMachine}
DIFFERENT = [
    name for name, each in METHODS.items() if not each.needs and not each.guesses
]  # for the protocol
DRAFT_EVENTS = {
    Begin: Begin(9, 0, (1,), 5, extend_digest(0, (1,)), resolved()),
    Verdict: Verdict(9, 0, 1, (1,), 5, 0),
    Finish: Finish(9),
    e.Drafted: e.Drafted((1,)),
}


def in_state(state: target_side.State) -> Coordinator:
    """A target that is in `state` in the middle of a request."""
    for method, seed, look_ahead in (("pearl", 0, 0), ("sd", 1, 0), ("pearl", 2, 4)):
        pair = make_pair(method, (4, 9), look_ahead=look_ahead)
        try:
            return until(pair, lambda p: p.coordinator.state is state, at_random(seed)).coordinator
        except (AssertionError, IndexError):
            continue
    raise AssertionError(state)


CASES = [
    *((target_side, state, kind) for state in target_side.State for kind in TARGET_EVENTS),
    *((draft_side, state, kind) for state in draft_side.DrafterState for kind in DRAFT_EVENTS),
]


@pytest.mark.parametrize(
    ("side", "state", "kind"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_events_that_a_table_does_not_list_are_refused(side: Any, state: Any, kind: type) -> None:
    """And leave the machine unchanged."""
    machine = in_state(state) if side is target_side else draft_in(state)
    event = (TARGET_EVENTS | DRAFT_EVENTS)[kind]
    if kind in side.TRANSITIONS[state] or kind in side.ANYTIME:
        machine.handle(event)
        return
    before = freeze(copy.deepcopy(machine))
    with pytest.raises(LocalProtocolError, match=state.value):
        machine.handle(event)
    assert freeze(machine) == before


def watch(
    monkeypatch: pytest.MonkeyPatch, side: object, seen: set[tuple[object, type, object]]
) -> None:
    """Record (state, event type, next state) of every event, nested ones included."""

    def watched(kind: type, handler: Callable[..., None]) -> Callable[..., None]:
        def handle(
            machine: Coordinator | Drafter, event: object, do: Callable[[object], None]
        ) -> None:
            before = machine.state
            handler(machine, event, do)
            seen.add((before, kind, machine.state))

        return handle

    for kind, handler in list(MACHINES[side].handlers.items()):
        monkeypatch.setitem(MACHINES[side].handlers, kind, watched(kind, handler))


def entries(side: object) -> set[tuple[object, type, object]]:
    table = side.TRANSITIONS  # type: ignore[attr-defined]
    return {
        (s, kind, after)
        for s, row in table.items()
        for kind, nexts in row.items()
        for after in nexts
    }


# What may go wrong at any time.
TROUBLES = (
    "choke",
    "kill",
    "join",
    "repeat tokens",
    "repeat verdict",
    "garble verdict",
    "lose to target",
)
TROUBLES += ("lose to draft", "resync", "fail", "fail to judge", "cancel", "cancel next")


def eventful_run(seed: int, withholds: bool = False) -> None:
    """Two requests of a random method, window and length, with random faults: what is written of either is right."""
    chance = random.Random(seed)
    often, text = chance.choice((0.1, 0.6)), script(chance.choice((5, 30, 80)))
    wrong = tuple(p for p in range(len(text)) if chance.random() < often)
    foresees = tuple(p for p in range(len(text)) if chance.random() < 0.5)
    options: dict[str, Any] = {name: chance.choice((0, 8)) for name in ("look_ahead", "branches")}
    options |= {
        "window": chance.choice(("fixed", "stream")),
        "sampling": drawn_by(chance.choice((0.0, 1.0))),
    }
    if withholds:
        options |= {"rule": "bild", "draft_stop": "threshold", "sampling": drawn_by()}
    elif options["sampling"].temperature and chance.random() < 0.3:
        options |= {"rule": "joint", "parameters": (("depth", chance.choice((2.0, 3.0))),)}
    takers = [name for name in DIFFERENT if METHODS[name].takes_stops]
    method = chance.choice(takers if withholds else DIFFERENT)
    if method == "ssd" and options.get("rule") == "joint":  # refused: its windows are no blocks
        method = "sd"
    limits = {number: chance.randint(3, len(text)) for number in (1, 2)}
    submits = [
        submission(
            text, method, gamma=chance.choice((1, 2, 5, 9)), request=number, limit=limit, **options
        )
        for number, limit in limits.items()
    ]
    target = ScriptTarget(text, chance.choice(((), (6, 7, 12))), trees=chance.random() < 0.5)
    draft = partial(
        ScriptDraft,
        text,
        wrong,
        foresees if options["branches"] else (),
        foresees * withholds,
        foresees if seed % 7 == 1 and not withholds else (),
    )
    pair = FaultyPair(submits, target, draft, chance.choice((2, 7, 1000, None)))
    picker, rare, pair.next_context = (
        at_random(seed),
        chance.choice((2, 6, 20)),
        chance.choice((2, 9, 1000)),
    )
    for step in range(20_000):
        trouble = chance.choice(TROUBLES)
        if pair.done:
            break
        if step < 600 and chance.random() * rare < 1 and pair.possible(trouble):
            pair.faults = (trouble,)
            pair.move(trouble)
        elif pair.lossy and not pair.moves:
            pair.kill_draft()  # the worker gives up a draft that it hears nothing from
        else:
            assert pair.moves, (
                f"deadlock: {pair.coordinator.state}, {pair.drafter and pair.drafter.state}"
            )
            pair.move(picker(pair.moves))
    assert pair.done
    for number, result in pair.results.items():
        whole = text[len(PROMPT) : limits[number]]
        assert tuple(result.tokens) == whole[: len(result.tokens)]
        assert len(result.tokens) == len(whole) or result.end.reason is FinishReason.CANCELLED
        check_counts(result, runs_ahead=bool(options["look_ahead"]))


def full_prefix(machine: Drafter) -> None:
    """A prefix that leaves nothing to draft: the target knew another draft's context when it sent this."""
    machine.handle(Begin(1, 2, PROMPT, len(PROMPT), extend_digest(0, PROMPT), resolved()))


Reached = tuple[set[tuple[object, type, object]], set[tuple[object, type, object]]]


@pytest.fixture(scope="module")
def reached() -> Reached:
    """The transitions of (target, draft) that many random runs make."""
    target: set[tuple[object, type, object]] = set()
    draft: set[tuple[object, type, object]] = set()
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, target_side, target)
        watch(patch, draft_side, draft)
        for name, module in list(sys.modules.items()):
            if name.startswith("pearl.protocol.") and hasattr(module, "PREFILL_CHUNK"):
                patch.setattr(module, "PREFILL_CHUNK", 1)
        for seed in (
            *range(1500),
            2179,
            3442,
            4466,
            11805,
            35790,
            59418,
        ):  # the last ones take the rarest arrows
            eventful_run(seed)
        for seed in range(100):
            eventful_run(seed, withholds=True)
        for state in (
            draft_side.DrafterState.IDLE,
            draft_side.DrafterState.WAITING,
            draft_side.DrafterState.LOST,
        ):
            full_prefix(draft_in(state))
    return target, draft


def test_every_transition_made_is_in_the_table(reached: Reached) -> None:
    """An event that is legal at any time may also change nothing."""
    for side, made in zip((target_side, draft_side), reached, strict=True):
        extra = {
            (a, kind, b)
            for a, kind, b in made - entries(side)
            if not (a is b and kind in side.ANYTIME)
        }
        assert extra == set()


def test_every_entry_of_the_tables_is_reached(reached: Reached) -> None:
    """The page's diagram is drawn from the tables."""
    for side, made in zip((target_side, draft_side), reached, strict=True):
        assert entries(side) - made == set()
