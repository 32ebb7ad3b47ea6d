"""Every interleaving of a short run: no deadlock, the right text, no message from the future.

Exhaustive: from each state of the whole system every possible move is made, until no new state turns up. The wires
are FIFO and lose nothing, as ZeroMQ's; forwards end and messages arrive at any time. A fault, where one is asked
for, may strike at any time too.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pearl.errors import ProtocolError
from pearl.protocol.draft_state import DraftState
from pearl.protocol.drafter import DraftMachine
from pearl.protocol.events import Drafted, Sampled
from pearl.protocol.messages import FinishReason, Provenance, Resync
from pearl.protocol.request import Request
from pearl.protocol.request_machine import RequestMachine
from pearl.spec.methods import METHODS
from tests.exploration import DRAFTED, TEXT, Exploration, FaultyPair, explore
from tests.pairwise import combined
from tests.replace import replace
from tests.scripted import PROMPT, ScriptDraft, ScriptTarget, submission

DRAFTING = [name for name, method in METHODS.items() if method.drafts]
STOPPING = [name for name, method in METHODS.items() if method.takes_stops and name != "auto"]
WINDOWS = [("fixed", 1), ("fixed", 2), ("stream", 1), ("stream", 2)]
GUESSES = {"look_ahead": 16, "unguessed": (4,)}
BRANCHES = {"branches": 8, "foresees": (3,)}
SIBLINGS = {"rule": "coupled", "siblings": 16}
BILD = {"rule": "bild", "draft_stop": "threshold"}
DEPTH = {"rule": "joint", "parameters": (("depth", 2.0),)}
# What each method may be combined with: settings of `explore`.
SETTINGS: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "nothing": (DRAFTING, [{}]),
    "stops": (STOPPING, [{"rule": "ratio", "stops": stops} for stops in ((2,), (3,), DRAFTED)]),
    "guesses": (
        ["pearl"],
        [{"rule": rule} | GUESSES for rule in ("ratio", "coupled")] + [GUESSES | {"trees": False}],
    ),
    "guesses alone": (["ngram"], [GUESSES, GUESSES | {"trees": False}]),
    "branches": (
        ["pearl", "ssd"],
        [
            {"rule": rule, "branches": 8, "foresees": at}
            for rule, at in (("ratio", DRAFTED), ("coupled", (3,)))
        ],
    ),
    "siblings": (["pearl"], [SIBLINGS, SIBLINGS | BRANCHES, SIBLINGS | {"trees": False}]),
    "all that guesses": (
        ["pearl"],
        [
            BRANCHES | GUESSES | {"rule": "coupled", "stops": at} | more
            for at in ((), (2,), (3, 4))
            for more in ({}, SIBLINGS)
        ],
    ),
    "blocks": (
        ["pearl", "sd", "pearl-no-pre-verify", "pearl-no-post-verify"],
        [{"rule": "joint", "parameters": (("depth", depth),)} for depth in (2.0, 3.0)],
    ),
    # No policy goes with them; a draft that pauses all the same makes no target wait or compute for ever.
    "withheld": (STOPPING, [BILD | {"stops": stops} for stops in ((2,), (3, 4), DRAFTED)]),
    "withheld among guesses": (
        ["pearl"],
        [BILD | GUESSES | {"stops": stops} for stops in ((2,), (3, 4), DRAFTED)],
    ),
    "blocks and pauses": (
        ["pearl", "sd"],
        [DEPTH | {"stops": stops} for stops in ((2,), (3,), DRAFTED)],
    ),
}


@combined
@pytest.mark.parametrize(
    ("what", "method"), [(what, method) for what, (all, _) in SETTINGS.items() for method in all]
)
def test_every_interleaving_ends_with_the_right_text(
    combined: Callable[..., Any], what: str, method: str
) -> None:
    """Whatever the draft gets wrong, and in whatever order things happen."""
    if "guesses" in what or what in ("branches", "siblings"):
        windows, wrongs = (WINDOWS[:2] if method == "ssd" else WINDOWS[1:3]), [(3,), (2, 4)]
    else:
        windows, wrongs = WINDOWS, [(), (2,), (3,), (2, 4), (3, 4), (5,)]
    for (window, gamma), settings, wrong in combined(windows, SETTINGS[what][1], wrongs):
        origins: set[tuple[Provenance, ...]] = set()
        assert explore(method, window, gamma, wrong, origins=origins, **settings) > 0
        # Under these the text depends on what is judged together: not on when tokens come.
        assert len(origins) == 1 or not (
            what in ("blocks", "withheld") or (what, method) == ("stops", "sd")
        )


LOSSES = [("lose to target",), ("lose to draft",), ("lose to target", "lose two to target")]
LOSSES += [
    ("lose to draft", "lose two to draft"),
    ("lose to target", "lose to draft"),
    ("lose to draft", "kill"),
]
FAULTS = [
    ("choke",),
    ("kill",),
    ("kill", "join"),
    ("repeat tokens",),
    ("repeat verdict",),
    ("garble verdict",),
    *LOSSES,
]
BRANCH_FAULTS = ["repeat branch", "delay branch", "foul branch", "lose branch", "kill"]


@pytest.mark.parametrize("faults", FAULTS, ids=str)
def test_every_interleaving_survives_a_fault_at_any_time(faults: tuple[str, ...]) -> None:
    """A draft that dies (and returns), messages that come twice, and messages that do not come."""
    assert explore("pearl", "fixed", 2, (), TEXT[:-1], faults) > 0
    assert explore("pearl", "stream", 2, (3,), TEXT[:-1], faults) > 0
    assert explore("pearl", "stream", 2, (3,), TEXT[:-1], faults, rule="coupled", **GUESSES) > 0
    assert explore("pearl", "stream", 2, (3,), TEXT[:-1], faults, **SIBLINGS) > 0
    for method in ("sd", "pearl"):
        assert explore(method, "stream", 2, (2,), TEXT[:-1], faults, stops=(3,), **BILD) > 0
        assert explore(method, "stream", 2, (3,), TEXT[:-1], faults, **DEPTH) > 0


# A draft that dies and returns while guesses are fed too: 13 s of computing. Those without are its quick kin.
DEATHS = [
    ("kill", "pearl", "stream", {}),
    pytest.param("kill", "pearl", "stream", GUESSES, marks=pytest.mark.long),
]


@pytest.mark.parametrize(
    ("fault", "method", "window", "more"),
    [
        *((fault, "pearl", "stream", GUESSES) for fault in BRANCH_FAULTS if fault != "kill"),
        *((fault, "ssd", "fixed", {}) for fault in BRANCH_FAULTS),
        *DEATHS,
    ],
)
def test_every_interleaving_with_branches_survives_a_fault(
    fault: str, method: str, window: str, more: dict[str, Any]
) -> None:
    faults = (fault, "join") if fault == "kill" else (fault,)
    settings = SIBLINGS | {"foresees": (3, 4), "branches": 8, **more}
    assert explore(method, window, 2, (3,), TEXT[:-1], faults, **settings) > 0


def test_the_table_of_faults_names_those_of_branches() -> None:
    said = (Path(__file__).parent / "FAULTS.md").read_text()
    assert set(re.findall(r"(?m)^\| (\w+) branch \| identical \|$", said)) == {
        *(fault.partition(" ")[0] for fault in BRANCH_FAULTS if fault.endswith("branch")),
        *("stale", "crowded"),  # in tests/test_room.py
    }


@pytest.mark.parametrize(
    "faults",
    [
        ("fail",),
        ("fail to judge",),
        ("cancel",),
        ("choke",),
        ("fail", "kill"),
        ("fail", "cancel next"),
        ("fail to judge", "lose to target"),
        ("fail", "lose to target"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("window", "wrong"), [("fixed", ()), ("stream", (2,))])
def test_a_request_that_ends_early_at_any_time_harms_no_other(
    window: str, wrong: tuple[int, ...], faults: tuple[str, ...]
) -> None:
    """Two requests, of which one fails or is cancelled: what it has of its text is right, the other's is whole."""
    text = TEXT[:-2]
    submits = [
        submission(text, "pearl", window=window, gamma=2, request=number) for number in (1, 2)
    ]
    pair = FaultyPair(submits, ScriptTarget(text), partial(ScriptDraft, text, wrong))
    pair.faults = faults
    ends = 0
    for final in Exploration(pair).finals():
        assert final.done, (
            f"deadlock: {final.coordinator.state}, {final.drafter and final.drafter.state}"
        )
        cut = 0
        for result in final.results.values():
            assert tuple(result.tokens) == text[len(PROMPT) :][: len(result.tokens)]
            cut += result.end.reason is FinishReason.CANCELLED
            assert result.end.reason is FinishReason.CANCELLED or len(result.tokens) == len(
                text
            ) - len(PROMPT)
        assert cut <= len({"fail", "fail to judge", "cancel", "cancel next"} & set(faults))
        ends += 1
    assert ends > 0


def keep_epoch(self: Request) -> None:
    self.proposals.clear()
    self.sequence.drop_pending()


def hasty(self: DraftMachine, event: Drafted, do: Callable[[object], None]) -> None:
    _DRAFTED(self, event, do)
    if self.sequence.pending:
        self.sequence.accept()


def credulous(self: RequestMachine, sampled: Sampled, node: int) -> None:
    """Takes the last of the runners-up that were fed for the position."""
    committed = self.sequence.committed
    said = [
        other.tokens[0]
        for other in self._look_ahead.guess().alternatives
        if other.position == committed
    ]
    count = len(sampled.tokens)
    _COMMIT(self, replace(sampled, tokens=(*said[-1:], *sampled.tokens)[:count]), node)


_COMMIT = RequestMachine.commit_draws
_DRAFTED = DraftMachine.handlers[Drafted]
_GRANT = DraftState.grant
PLANTED: dict[
    str, tuple[object, object, Any, tuple[Any, ...]]
] = {  # where, what, the bug; what is explored
    "the draft may draft one token less than the target waits for": (
        *(DraftState, "grant", lambda self: _GRANT(self) - 1),
        ("pearl", "fixed", 1, ()),
    ),
    "a target that is told that both wait does nothing about it": (
        *(RequestMachine.handlers, Resync, lambda self, event, do: None),
        ("pearl", "fixed", 1, (), TEXT[:-1], ("lose to target",)),
    ),
    "the draft takes what it drafted for final before it is told": (
        *(DraftMachine.handlers, Drafted, hasty),
        ("pearl", "stream", 2, (2,)),
    ),
    "a runner-up is committed though the target draws another token": (
        *(RequestMachine, "commit_draws", credulous),
        ("pearl", "stream", 2, (2,), TEXT, (), None),
    ),
    "what was drafted before a rejection is kept, as if no epoch had begun": (
        *(Request, "discard_pending", keep_epoch),
        ("pearl", "stream", 2, (2,)),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_exploration_notices_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, planted, explored = PLANTED[bug]
    (monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr)(where, what, planted)  # type: ignore
    with pytest.raises((AssertionError, ProtocolError)):
        explore(*explored, **SIBLINGS if planted is credulous else {})
