"""Inside one process: events that go into a state machine, commands that come out.

Messages (`protocol/messages.py`) are events too. A worker carries out commands in order; each `Forward` and `Draft` is
answered by exactly one event. `request` is -1 if an event or command concerns no request.

When a forward has ended, the target's machine asks a `Verifier` at once what the rows decide: no event can come between
question and answer.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, Protocol

from msgspec import Struct

from pearl.config.options import RequestOptions
from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.messages import FinishReason, Message
from pearl.protocol.proposals import Proposal
from pearl.protocol.speeds import Cores
from pearl.protocol.window import Payoff


class Phase(StrEnum):
    """What a target forward is for (DESIGN section 2)."""

    PREFILL = "prefill"
    PRE_VERIFY = "pre-verify"
    POST_VERIFY = "post-verify"


class Cause(Enum):
    """Why the target waits."""

    HELD_ROW = "held row"  # a row is there, but not the draft token that the row judges
    WINDOW = "window"  # the window is not full yet
    IDLE = "idle"  # no request


class OfRequest(Struct, frozen=True, kw_only=True):
    """An event or a command of one request; `request` is -1 if there is none."""

    request: int = -1


# ---- events ----


class Forwarded(OfRequest, frozen=True):
    """The target's forward is done; it took `seconds`, and ended at `at`, seconds of a monotonic clock.

    Attributes:
        beside: tokens in the same forward that are not of this request's text: other requests' tokens, or the window of
            Lookahead decoding. None if the forward was fed parts of prompts.
        fed: the command's tokens and the guesses fed with them. None stands for the command's tokens alone.
    """

    seconds: float = 0.0
    at: float = 0.0
    beside: int | None = 0
    fed: FedTokens | None = None


class Odds(Struct, frozen=True):
    """Expectations for some judgements, from the two distributions at each judged position.

    Attributes:
        rejections: expected number of rejections: the sum of their probabilities p.
        variance: variance of the number of rejections: the sum of p * (1 - p).
        bias: sum of the total variation distances between the committed distribution and the target's; 0 for an exact
            rule. The distance between the distributions of whole texts is at most the mean of this sum.
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
    """A draft has connected. Its model holds `context` tokens and takes `seconds` per token (0: unknown)."""

    context: int
    seconds: float = 0.0


class DraftGone(Struct, frozen=True):
    """The draft is lost: for all requests if `request` is None, otherwise for this request only."""

    reason: str
    request: int | None = None


class Failed(OfRequest, frozen=True):
    """A result cannot be used; this ends the request, and no other. `kind`: a class name of pearl.errors."""

    reason: str
    kind: str = "ForwardError"


class Drafted(OfRequest, frozen=True):
    """The draft's forward is done.

    Attributes:
        tokens: tokens proposed for the next positions, at most the budget. There are none if the forward fed a part of
            a long prefix, drafted branches, or was one of several that search for a block.
        seconds: duration of the forward.
        rows: the distribution that each token was drawn from; empty if the rule needs none.
        draw: seconds that drawing the tokens took.
        failure: why no token could be drawn: the logits are not finite. Ends drafting for this request only.
        cached: how many of `tokens`, from the first on, are already in the KV cache.
        paused: whether the stop policy ends drafting until these tokens are judged. With no tokens: the policy
            withholds the drafted one.
        branches: continuations for other outcomes. Each has all its tokens drafted so far, those sent before included.
        fed: tokens fed in the forward, other requests' tokens included; 0: unknown.
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
    """Start a request in slot `slot`. The draft does this for each whole prefix that it is given."""

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
    """Keep one path of the last tree in the KV cache, as the continuation of the text; drop the tree's other nodes.

    `path`: the nodes of the path, each the parent of the next.
    """

    path: tuple[int, ...]


class Alternative(Struct, frozen=True):
    """A runner-up and the tokens prepared after it: they may replace the text's tokens from `position` on.

    `chances`: the probability of each token, given that the tokens before it are right.
    """

    position: int
    tokens: tuple[int, ...]
    chances: tuple[float, ...]


class Guess(Struct, frozen=True):
    """Guess, without a model, what may follow the text; `alternatives` are guesses too.

    Attributes:
        base: length of the text that earlier `Guess`es gave and that has not changed since. In the first `Guess`: the
            length of the prompt.
        tokens: the text's tokens from position `base` on.
        committed: number of committed tokens. Guesses may follow the last committed token and any token after it.
        limit: the first position that needs no guess.
        trust: for each pending token, the probability that it is right if the pending tokens before it are.
        most: maximum number of guesses from the text.
        payoff: function (fed tokens, most guesses) -> what decides how many guesses to feed. The chance of a guess is
            the estimated probability that the target commits all tokens of the path to the guess, and the guess itself.
        head: whether the target's head guesses too, if there is one.
    """

    base: int
    tokens: tuple[int, ...]
    committed: int
    limit: int
    trust: tuple[float, ...]
    most: int
    payoff: Callable[[int, int], Payoff]
    alternatives: tuple[Alternative, ...] = ()
    head: bool = True

    @property
    def most_in_all(self) -> int:
        """Maximum number of guesses, from the text and of `alternatives`."""
        return self.most + sum([len(alternative.tokens) for alternative in self.alternatives])


class Forward(OfRequest, frozen=True):
    """Feed `tokens` from position `start` on, and guesses; keep the rows of the last `rows` tokens and of the guesses.

    Answered by `Forwarded`. `guess`: None to feed no guesses.
    """

    phase: Phase
    start: int
    tokens: tuple[int, ...]
    rows: int
    guess: Guess | None = None


class Draft(OfRequest, frozen=True):
    """Feed `tokens` from position `start` on and propose up to `budget` tokens that follow. Answered by `Drafted`.

    Attributes:
        budget: 0: feed only.
        pending: number of tokens already proposed after the known prefix.
        hedge: 0: continue the text. If positive: draft only continuations for other outcomes (branches), each of at
            most this many tokens. `Drafted.paused` then means that no more branches are worth a forward.
        bonus: whether to draft branches for the bonus token after the text too.
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
    """Send to the front that submitted the request."""

    message: Message


class End(Struct, frozen=True):
    """A request has ended: tell its front.

    `counts`: `request.Counts`. `window`: c as last used. `failure`: why the request failed; None if it did not.
    """

    request: int
    reason: FinishReason
    prompt_tokens: int
    counts: Any
    window: int
    failure: Failed | None = None


class DraftDropped(OfRequest, frozen=True):
    """The target goes on with this request without the draft: log the reason."""

    reason: str


class Wait(OfRequest, frozen=True):
    """Nothing to do until a message comes."""

    cause: Cause


# ---- questions, answered at once ----


class Judge(OfRequest, frozen=True):
    """Judge draft `tokens` from position `start` on.

    Attributes:
        rows: the draft distribution of each token (opaque).
        nodes: for each token, the node of the last forward whose row judges it.
    """

    start: int
    tokens: tuple[int, ...]
    rows: tuple[Any, ...]
    nodes: tuple[int, ...]


class Sample(OfRequest, frozen=True):
    """Draw the token at `position` from the target alone, with the row of `node` of the last forward.

    `follow`: if the drawn token was fed as a child of `node`, also draw the next position with the child's row, and so
    on.
    """

    position: int
    node: int
    follow: bool = False


class Judged(Struct, frozen=True):
    """The first `accepted` tokens were accepted; `token` is the correction after them, None if all were accepted.

    `stop_after`: how many of the accepted tokens and the correction complete a stop string; None if they complete none.
    `odds`: expectations for the judged positions; None if the rule does not have the draft's distributions.
    `is_candidate`: whether `token` is accepted too: it is one of several candidates for its position, no correction.
    """

    accepted: int
    token: int | None
    stop_after: int | None = None
    odds: Odds | None = None
    is_candidate: bool = False


class Sampled(Struct, frozen=True):
    """The target's own draws. All draws but the last were fed as guesses: they are nodes of the tree, each the parent
    of the next.

    `stop_after`: number of `tokens` that complete a stop string; None if none does.
    """

    tokens: tuple[int, ...]
    stop_after: int | None = None


class Verifier(Protocol):
    """Computes what the rows of a request's last forward decide; raises `ForwardError` if the rows cannot be used."""

    def judge(self, judge: Judge) -> Judged: ...

    def sample(self, sample: Sample) -> Sampled: ...
