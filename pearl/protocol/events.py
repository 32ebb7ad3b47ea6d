"""Inside one process: events that go into a state machine, commands that come out.

Messages (`protocol/messages.py`) are events too. A worker carries out commands in order; each `Forward` and `Draft` is
answered by exactly one event. `request` -1: none.

What a forward's rows decide the target's machine asks a `Verifier` for, as soon as it handles the forward's end:
nothing can come between a question and its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, StrEnum
from typing import Any, Protocol

from msgspec import Struct

from pearl.config.options import RequestOptions
from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.messages import FinishReason, Message
from pearl.protocol.proposals import Proposal
from pearl.protocol.speeds import Cores


class Phase(StrEnum):
    """What a target forward is for (DESIGN section 2)."""

    PREFILL = "prefill"
    PRE_VERIFY = "pre-verify"
    POST_VERIFY = "post-verify"


class Cause(Enum):
    """Why the target waits."""

    HELD_ROW = "held row"  # a row is there, the draft token that it judges is not
    WINDOW = "window"  # the window is not full yet
    IDLE = "idle"  # no request


class OfRequest(Struct, frozen=True, kw_only=True):
    """An event or a command of one request; -1: of none."""

    request: int = -1


# ---- events ----


class Forwarded(OfRequest, frozen=True):
    """The target's forward is done; it took `seconds`, and ended at `at`, seconds of a monotonic clock.

    Attributes:
        beside: tokens fed beside the request's own: for other requests, or for Lookahead decoding's window; None:
            parts of prompts were among all that was fed.
        fed: the command's tokens and guesses; None: the command's tokens alone.
    """

    seconds: float = 0.0
    at: float = 0.0
    beside: int | None = 0
    fed: FedTokens | None = None


class Odds(Struct, frozen=True):
    """Expectations for some judgements, from the two distributions at each judged position.

    Attributes:
        rejections: expected number: the sum of the probabilities of rejection.
        variance: of that number: the sum of p * (1 - p).
        bias: sum of the total variation distances between the committed distribution and the target's; 0 for an exact
            rule. The text's own distance is at most its mean.
    """

    rejections: float = 0.0
    variance: float = 0.0
    bias: float = 0.0

    def __add__(self, other: Odds) -> Odds:
        return Odds(
            self.rejections + other.rejections,
            self.variance + other.variance,
            self.bias + other.bias,
        )


class DraftJoined(Struct, frozen=True):
    """A draft has connected; its model holds `context` tokens, and a token takes it `seconds` (0: unknown)."""

    context: int
    seconds: float = 0.0


class DraftGone(Struct, frozen=True):
    """The draft died, fell silent or broke the protocol; or it cannot go on with `request`, and only with that."""

    reason: str
    request: int | None = None


class Failed(OfRequest, frozen=True):
    """A result cannot be used, which ends only this request. `kind`: a class name of pearl.errors."""

    reason: str
    kind: str = "ForwardError"


class Drafted(OfRequest, frozen=True):
    """The draft's forward is done.

    Attributes:
        tokens: proposed for the positions that follow, at most the budget; none if only a part of a long prefix was
            fed.
        seconds: of the forward.
        rows: the distribution that each token was drawn from; empty if the rule needs none.
        draw: seconds of drawing them.
        failure: why none could be drawn: the logits are not finite. Ends only this request's drafting.
        cached: how many of `tokens`, from the first on, the KV cache holds already.
        paused: whether the stop policy ends drafting until these tokens are judged; with none: it withholds one.
        branches: continuations for other outcomes as far as drafted, each whole from its outcome on.
        fed: tokens fed in the forward, those of other requests too; 0: unknown.
        seen: as `DraftTokens.runners_up`.
    """

    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    rows: tuple[Any, ...] = ()
    draw: float = 0.0
    failure: str = ""
    cached: int = 0
    paused: bool = False
    branches: tuple[Proposal, ...] = ()
    fed: int = 0
    seen: tuple[Seen, ...] = ()


# ---- commands ----


class Open(OfRequest, frozen=True):
    """Start a request in slot `slot`; in the draft, once for each whole prefix."""

    prompt: tuple[int, ...]
    options: RequestOptions
    slot: int = 0


class Spread(OfRequest, frozen=True):
    """Compute on these cores from now on."""

    cores: Cores


class Rollback(OfRequest, frozen=True):
    """Forget all but the first `length` tokens in the KV cache."""

    length: int


class Keep(OfRequest, frozen=True):
    """Let these nodes of the tree fed last, each the parent of the next, continue the text in the KV cache."""

    path: tuple[int, ...]


class Alternative(Struct, frozen=True):
    """Tokens of the draft that may stand in the text from `position` on, in place of its own.

    `chances`: of each token, if those before it are right.
    """

    position: int
    tokens: tuple[int, ...]
    chances: tuple[float, ...]


class Guess(Struct, frozen=True):
    """Guess, without a model, what may follow the text; `alternatives` are guesses too.

    Attributes:
        base: length of the text that is as in the last `Guess` (at first: the prompt).
        tokens: the text's tokens from there on.
        committed: number of committed tokens; guesses may follow the last of them, and any token after it.
        limit: the first position that needs no guess.
        trust: of each pending token the probability that it is right if those before it are.
        most: maximum number of guesses from the text.
        worth: (chances, fed tokens) -> how many of the guesses are to be fed. The chance of a guess is the estimated
            probability that the target takes the path to it, itself included; chances never rise.
        head: whether the target's head guesses too, if there is one.
    """

    base: int
    tokens: tuple[int, ...]
    committed: int
    limit: int
    trust: tuple[float, ...]
    most: int
    worth: Callable[[Sequence[float], int], int]
    alternatives: tuple[Alternative, ...] = ()
    head: bool = True


class Forward(OfRequest, frozen=True):
    """Feed `tokens` from position `start` on, and guesses; keep the rows of the last `rows` tokens and of the guesses.

    Answer: Forwarded.  `guess`: None: feed no guesses.
    """

    phase: Phase
    start: int
    tokens: tuple[int, ...]
    rows: int
    guess: Guess | None = None


class Draft(OfRequest, frozen=True):
    """Feed `tokens` from position `start` on and propose up to `budget` tokens that follow. Answer: Drafted.

    Attributes:
        budget: 0: only feed.
        pending: tokens already proposed behind the known prefix.
        hedge: if positive, draft continuations for other outcomes, each of up to so many tokens, and none of the text.
            `Drafted.paused` then says that no more of them are worth a forward.
        bonus: whether the target's own draw behind the text is such an outcome too.
        prompt: whether `tokens` are of the prefix that the request began with.
    """

    start: int
    tokens: tuple[int, ...]
    budget: int
    pending: int = 0
    hedge: int = 0
    bonus: bool = False
    prompt: bool = False


class Send(Struct, frozen=True):
    """Send to the other model's worker."""

    message: Message


class Deliver(Struct, frozen=True):
    """Send to the front whose request this is."""

    message: Message


class End(Struct, frozen=True):
    """A request is over: tell its front. `counts`: `request.Counts`; `window`: c as last used; `failure`: its cause."""

    request: int
    reason: FinishReason
    prompt_tokens: int
    counts: Any
    window: int
    failure: Failed | None = None


class DraftDropped(OfRequest, frozen=True):
    """The draft cannot go on with this request, whose text the target writes alone: log it."""

    reason: str


class Wait(OfRequest, frozen=True):
    """Nothing to do until a message comes."""

    cause: Cause


# ---- questions, answered at once ----


class Judge(OfRequest, frozen=True):
    """Judge draft `tokens` from position `start` on.

    Attributes:
        rows: the draft distribution of each (opaque).
        nodes: the last forward's token whose row judges each.
    """

    start: int
    tokens: tuple[int, ...]
    rows: tuple[Any, ...]
    nodes: tuple[int, ...]


class Sample(OfRequest, frozen=True):
    """Draw position `position` from the target alone, by the row of token `node` of the last forward.

    `follow`: if the draw is a child of that node, draw the position after it too, and so on.
    """

    position: int
    node: int
    follow: bool = False


class Judged(Struct, frozen=True):
    """The first `accepted` tokens of the run were accepted; `token` is the correction, None where all were accepted.

    `stop_after`: number of tokens of accepted + correction that complete a stop string; None if none does.
    `odds`: of the judged positions; None if the rule does not have the draft's distributions.
    `is_candidate`: whether `token` is no correction but the accepted one of several candidates.
    """

    accepted: int
    token: int | None
    stop_after: int | None = None
    odds: Odds | None = None
    is_candidate: bool = False


class Sampled(Struct, frozen=True):
    """The target's own draws: all but the last are nodes of the fed tree, each the parent of the next.

    `stop_after`: number of `tokens` that complete a stop string; None if none does.
    """

    tokens: tuple[int, ...]
    stop_after: int | None = None


class Verifier(Protocol):
    """Computes what the rows of a request's last forward decide; raises `ForwardError` where they cannot be used."""

    def judge(self, judge: Judge) -> Judged: ...

    def sample(self, sample: Sample) -> Sampled: ...
