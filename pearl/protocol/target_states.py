"""States and transitions of `RequestMachine`, the target's state machine for one request."""

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
)
from pearl.protocol.messages import Cancel, DraftTokens, Resync, Submit


class State(Enum):
    IDLE = "idle"  # not begun, or ended
    PREFILL = "prefill"  # a forward of the prompt is running
    PRE_VERIFY = "pre-verify"  # a forward of one token (and guesses) is running
    POST_VERIFY = "post-verify"  # a forward of several tokens (and guesses) is running
    JUDGING = "judging"  # the acceptance rule is being applied to draft tokens
    SAMPLING = "sampling"  # the target is drawing a token of its own
    HELD = "held"  # logits are there, the draft token to judge with them is not
    GATHERING = "gathering"  # waits for enough draft tokens to start a forward
    GUESSING = "guessing"  # model-free guesses are being looked up


RUNNING = {
    Phase.PREFILL: State.PREFILL,
    Phase.PRE_VERIFY: State.PRE_VERIFY,
    Phase.POST_VERIFY: State.POST_VERIFY,
}
WAITING = frozenset({State.HELD, State.GATHERING})  # for tokens of the draft
_FED = frozenset({State.JUDGING, State.SAMPLING, State.HELD, State.IDLE})
_OF_BLOCKS = frozenset({State.GATHERING, State.POST_VERIFY})  # block rules: tokens are gathered, not held
_ENDED = frozenset({State.IDLE})
_DECIDED = frozenset({State.PRE_VERIFY, State.GATHERING, State.GUESSING, State.IDLE})

# state -> event -> the states that may follow; anything else is illegal. The README's diagram is generated from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.IDLE: {Submit: frozenset({State.PREFILL})},
    State.PREFILL: {Forwarded: _FED | _OF_BLOCKS | {State.PREFILL}, Failed: _ENDED},
    State.PRE_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.POST_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.JUDGING: {
        Judged: _DECIDED | {State.POST_VERIFY, State.JUDGING, State.SAMPLING, State.HELD},
        Failed: _ENDED,
    },
    # The last two: the token taken in place of a withheld one was fed as a guess, so that the next row is there.
    State.SAMPLING: {Sampled: _DECIDED | {State.POST_VERIFY, State.HELD, State.SAMPLING}, Failed: _ENDED},
    State.HELD: {
        DraftTokens: frozenset({State.JUDGING, State.SAMPLING}),  # the latter where the draft withholds its token
        DraftGone: frozenset({State.SAMPLING}),
        Cancel: _ENDED,
    },
    State.GATHERING: {
        DraftTokens: frozenset({State.PRE_VERIFY, State.POST_VERIFY, State.GUESSING}),
        DraftGone: frozenset({State.PRE_VERIFY, State.GUESSING}),
        Cancel: _ENDED,
    },
    State.GUESSING: {Guessed: _ENDED | {State.PRE_VERIFY, State.POST_VERIFY}, Failed: _ENDED},
}
# Legal in every state: peers do not wait for our forwards. Where a state does not list one, the state stays the same.
ANYTIME = (Submit, Cancel, DraftTokens, DraftGone, DraftJoined, Resync)
# These events discard pending tokens, so they are deferred while such tokens are judged or guesses made after them.
AFTER_COMPUTING = (DraftGone, DraftJoined)
COMPUTING = {State.JUDGING: (Judged, Failed), State.GUESSING: (Guessed, Failed)}
