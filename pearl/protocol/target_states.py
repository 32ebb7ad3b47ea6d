"""States of the target's machine for one request, and the events that lead from one to the next."""

from __future__ import annotations

from enum import Enum

from pearl.protocol.events import (
    DraftGone,
    DraftJoined,
    Failed,
    Forwarded,
    Guessed,
    Judged,
    Phase,
    Sampled,
    Stalled,
)
from pearl.protocol.messages import Cancel, DraftTokens, Resync, Submit


class State(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    PRE_VERIFY = "pre-verify"
    POST_VERIFY = "post-verify"
    JUDGING = "judging"
    SAMPLING = "sampling"
    HELD = "held"
    GATHERING = "gathering"
    GUESSING = "guessing"


RUNNING = {
    Phase.PREFILL: State.PREFILL,
    Phase.PRE_VERIFY: State.PRE_VERIFY,
    Phase.POST_VERIFY: State.POST_VERIFY,
}
_FED = frozenset({State.JUDGING, State.SAMPLING, State.HELD, State.IDLE})
_OF_BLOCKS = frozenset({State.GATHERING, State.POST_VERIFY})  # blocks: no row is held for a single token
_ENDED = frozenset({State.IDLE})
_DECIDED = frozenset({State.PRE_VERIFY, State.GATHERING, State.GUESSING, State.IDLE})

# state -> event -> the states that may follow; what is not listed is illegal. The README's diagram is made from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.IDLE: {Submit: frozenset({State.PREFILL})},
    State.PREFILL: {Forwarded: _FED | _OF_BLOCKS | {State.PREFILL}, Failed: _ENDED},
    State.PRE_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.POST_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.JUDGING: {
        Judged: _DECIDED | {State.POST_VERIFY, State.JUDGING, State.SAMPLING, State.HELD},
        Failed: _ENDED,
    },
    State.SAMPLING: {Sampled: _DECIDED | {State.POST_VERIFY}, Failed: _ENDED},
    State.HELD: {
        DraftTokens: frozenset({State.JUDGING}),
        DraftGone: frozenset({State.SAMPLING}),
        Stalled: frozenset({State.HELD}),
        Cancel: _ENDED,
    },
    State.GATHERING: {
        DraftTokens: frozenset({State.PRE_VERIFY, State.POST_VERIFY, State.GUESSING}),
        DraftGone: frozenset({State.PRE_VERIFY, State.GUESSING}),
        Stalled: frozenset({State.GATHERING}),
        Cancel: _ENDED,
    },
    State.GUESSING: {Guessed: _ENDED | {State.PRE_VERIFY, State.POST_VERIFY}, Failed: _ENDED},
}
# Legal in every state, and by themselves they change none: peers do not wait for our forwards.
ANYTIME = (Submit, Cancel, DraftTokens, DraftGone, DraftJoined, Resync)
# Events that would discard tokens are deferred while these are being judged, or guesses sought behind them.
AFTER_COMPUTING = (DraftGone, DraftJoined)
COMPUTING = {State.JUDGING: (Judged, Failed), State.GUESSING: (Guessed, Failed)}
