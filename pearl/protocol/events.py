"""What happens inside one process: events that go into a state machine, commands that come out.

Messages (`protocol/messages.py`) are events too. A worker carries out commands in order; `Forward`, `Judge`, `Sample`
and `Draft` are each answered by exactly one event.  Every one of them names its request; -1 is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pearl.protocol.messages import FinishReason, Message, Sampling


class Phase(Enum):
    """What a target forward is for (DESIGN section 2)."""

    PREFILL = "prefill"
    PRE_VERIFY = "pre-verify"
    POST_VERIFY = "post-verify"


class Cause(Enum):
    """Why the target waits."""

    HELD_ROW = "held row"  # a row is there, the draft token that it judges is not
    WINDOW = "window"  # the window is not full yet
    IDLE = "idle"  # no request


# ---- events ----


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The target's forward is done; it took `seconds`."""

    seconds: float = 0.0
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Judged:
    """The first `accepted` tokens of the run were accepted; `token` is the correction, None where all were accepted.

    `stop_after`: how many tokens of accepted + correction it takes to complete a stop string; None if none does.
    """

    accepted: int
    token: int | None
    stop_after: int | None = None
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The DIRECT draw asked for. `stop`: it completes a stop string."""

    token: int
    stop: bool = False
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class DraftJoined:
    """A draft is there, first or again; its model holds `context` tokens, and one takes it `seconds` (0: unknown)."""

    context: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftGone:
    """The draft died, fell silent or broke the protocol; or cannot go on with `request`, and only with that."""

    reason: str
    request: int | None = None


@dataclass(frozen=True, slots=True)
class Stalled:
    """The target waits for draft tokens, and the draft waits as well: something that one has sent was lost."""

    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked to be computed gave nothing that can be used. Only this request ends by it."""

    reason: str
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Drafted:
    """The draft's forward is done.

    Attributes:
        tokens: what it proposes for the positions that follow, at most as many as were asked for; none where it only
            fed a part of a long prefix.
        seconds: of the forward.
        rows: the distribution that each token was drawn from; empty where the rule needs none.
        draw: seconds that it took to draw them.
        failure: why none could be drawn: its logits are not finite. Only this request's drafting ends by it.
        cached: how many of `tokens`, from the first on, the KV cache holds already.
        paused: whether the stop policy ends drafting here until a verdict comes.
    """

    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    rows: tuple[Any, ...] = ()
    draw: float = 0.0
    failure: str = ""
    cached: int = 0
    paused: bool = False
    request: int = field(default=-1, kw_only=True)


# ---- commands ----


@dataclass(frozen=True, slots=True)
class Open:
    """Get ready for a request in slot `slot` (the draft: also when it is given a prefix anew)."""

    prompt: tuple[int, ...]
    sampling: Sampling
    rule: str
    stops: tuple[str, ...] = ()
    parameters: tuple[tuple[str, float], ...] = ()  # of the rule
    slot: int = 0
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Rollback:
    """Forget all but the first `length` tokens in the KV cache."""

    length: int
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Forward:
    """Feed `tokens`, the first of which stands at position `start`; keep the last `rows` rows. Answer: Forwarded."""

    phase: Phase
    start: int
    tokens: tuple[int, ...]
    rows: int
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge draft `tokens` from position `start` on; `rows`: a draft distribution each (opaque). Answer: Judged."""

    start: int
    tokens: tuple[int, ...]
    rows: tuple[Any, ...]
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw position `position` from the target alone. Answer: Sampled."""

    position: int
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Draft:
    """Feed `tokens` from position `start` on and propose up to `budget` tokens that follow. Answer: Drafted.

    `budget` 0: only feed. `pending`: tokens proposed already since the prefix that the target last told.
    """

    start: int
    tokens: tuple[int, ...]
    budget: int
    pending: int = 0
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the other model's worker."""

    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send to the front whose request this is."""

    message: Message


@dataclass(frozen=True, slots=True)
class End:
    """A request is over: tell its front. `counts`: a `request.Counts`; `window`: c as last used."""

    request: int
    reason: FinishReason
    prompt_tokens: int
    counts: Any
    window: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until a message comes."""

    cause: Cause
    request: int = field(default=-1, kw_only=True)
