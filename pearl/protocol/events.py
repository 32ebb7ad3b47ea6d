"""What happens inside one process: events that go into a state machine, commands that come out.

Messages (`protocol/messages.py`) are events too. A worker carries out commands in order; `Guess`, `Forward`, `Judge`,
`Sample` and `Draft` are each answered by exactly one event.  Every one of them names its request; -1 is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pearl.protocol.messages import FinishReason, Message, Source
from pearl.protocol.options import RequestOptions
from pearl.protocol.proposals import Proposal


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
    """The target's forward is done; it took `seconds`, and ended at `at`, seconds of a monotonic clock.

    `beside`: tokens that it was fed for other requests; None: parts of their prompts too.
    """

    seconds: float = 0.0
    at: float = 0.0
    beside: int | None = 0
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Odds:
    """What was to be expected of some judgements, by the two distributions at each position judged.

    Attributes:
        rejections: their expected number: the sum of the chances of being rejected.
        variance: of that number, for given chances: the sum of chance times 1 - chance.
        bias: the sum of the total variation distances between what was committed by and the target's distribution; 0
            for an exact rule. The text's own distance is at most its mean.
    """

    rejections: float = 0.0
    variance: float = 0.0
    bias: float = 0.0

    def __add__(self, other: Odds) -> Odds:
        return Odds(self.rejections + other.rejections, self.variance + other.variance, self.bias + other.bias)


@dataclass(frozen=True, slots=True)
class Judged:
    """The first `accepted` tokens of the run were accepted; `token` is the correction, None where all were accepted.

    `stop_after`: how many tokens of accepted + correction it takes to complete a stop string; None if none does.
    `odds`: of the positions judged; None where the rule does not know the draft's distributions.
    `is_candidate`: whether `token` is no correction: of several tokens drawn there it is the one accepted.
    """

    accepted: int
    token: int | None
    stop_after: int | None = None
    odds: Odds | None = None
    is_candidate: bool = False
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The DIRECT draws asked for: all but the last are nodes of the tree that was fed, each the parent of the next.

    `stop_after`: how many of `tokens` it takes to complete a stop string; None if none does.
    """

    tokens: tuple[int, ...]
    stop_after: int | None = None
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Guessed:
    """What may follow, guessed without a model: a tree, its parents first, the likeliest nodes first.

    Attributes:
        parents: of each token, numbered by its position where it stands in the text, and from the text's length on
            where it is a guess.
        chances: that the target takes the path to the token, itself included; estimated, never rising.
        sources: who guessed each.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    sources: tuple[Source, ...] = ()
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
class Hold:
    """Begin no more requests, as a recording begins or ends between two; or begin those that wait."""

    is_held: bool


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
class Seen:
    """What the draft's row says of a token that was drawn from it.

    Attributes:
        share: of the token among the likeliest, in eighths.
        rivals: the likeliest others, the likeliest first.
    """

    token: int
    share: int
    rivals: tuple[int, ...]


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
        paused: whether the stop policy ends drafting here until these tokens are judged.
        branches: what follows under other outcomes, as far as it is drafted: each whole, from its outcome on.
        seen: what its row says of each of `tokens`, and of those that a branch had when the text became it: (position,
            what). For a trace; empty where nobody asks.
        fed: tokens that the forward was fed, those of other requests too; 0: not known.
    """

    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    rows: tuple[Any, ...] = ()
    draw: float = 0.0
    failure: str = ""
    cached: int = 0
    paused: bool = False
    branches: tuple[Proposal, ...] = ()
    seen: tuple[tuple[int, Seen], ...] = ()
    fed: int = 0
    request: int = field(default=-1, kw_only=True)


# ---- commands ----


@dataclass(frozen=True, slots=True)
class Open:
    """Start a request in slot `slot`. The draft gets it again with each whole prefix."""

    prompt: tuple[int, ...]
    options: RequestOptions
    slot: int = 0
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Spread:
    """Compute on the draft's cores too from now on, or no more."""

    everywhere: bool
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Rollback:
    """Forget all but the first `length` tokens in the KV cache."""

    length: int
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Keep:
    """Of the tree fed last let these nodes, each the parent of the next, continue the text in the KV cache."""

    path: tuple[int, ...]
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Guess:
    """Guess, without a model, what may follow the text. Answer: Guessed.

    Attributes:
        base: the text is, up to this position, what it was when it was last told (at first: the prompt).
        tokens: its tokens from there on.
        committed: how many of the text's tokens are; guesses may follow the last of these, and any after it.
        limit: the first position that needs no guess.
        acceptance: how likely a pending token is right, where those before it are.
        most: guesses.
    """

    base: int
    tokens: tuple[int, ...]
    committed: int
    limit: int
    acceptance: float
    most: int
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Forward:
    """Feed `tokens`, the first of which stands at position `start`; keep the last `rows` rows. Answer: Forwarded.

    `parents`: None where they are a chain; else the index in `tokens` of each one's parent, -1 for a token at `start`.
    """

    phase: Phase
    start: int
    tokens: tuple[int, ...]
    rows: int
    parents: tuple[int, ...] | None = None
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge draft `tokens` from position `start` on. Answer: Judged.

    Attributes:
        rows: a draft distribution each (opaque).
        nodes: of the last forward's tokens those whose rows judge them, one each.
    """

    start: int
    tokens: tuple[int, ...]
    rows: tuple[Any, ...]
    nodes: tuple[int, ...]
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw position `position` from the target alone, by the row of token `node` of the last forward. Answer: Sampled.

    `follow`: where the draw is a child of that node, draw the position after it too, and so on.
    """

    position: int
    node: int
    follow: bool = False
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Draft:
    """Feed `tokens` from position `start` on and propose up to `budget` tokens that follow. Answer: Drafted.

    Attributes:
        budget: 0: only feed.
        pending: tokens proposed already since the prefix that the target last told.
        hedge: where more than 0 nothing is proposed for the text, for it may not go on: continuations for other
            outcomes are, each of up to so many tokens. `Drafted.paused` tells that no more are worth a forward.
        bonus: the target draws the token behind the text itself: whichever it may be is such an outcome too.
        prompt: whether `tokens` are of the prefix that the request began with.
    """

    start: int
    tokens: tuple[int, ...]
    budget: int
    pending: int = 0
    hedge: int = 0
    bonus: bool = False
    prompt: bool = field(default=False, kw_only=True)
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
class DraftDropped:
    """The draft cannot go on with this request, whose text the target writes alone: log it."""

    reason: str
    request: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until a message comes."""

    cause: Cause
    request: int = field(default=-1, kw_only=True)
