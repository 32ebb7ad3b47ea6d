"""The events that go into a state machine, and the commands that come out, within one process.

Messages between processes (`protocol/messages.py`) are events too. A worker carries out commands in
order, and answers each `Forward` and each `Draft` by exactly one event.

When a forward has ended, the target's machine calls a `Verifier` to judge draft tokens and to draw
tokens. These calls return at once, so no event can come in between.

A row is one position's vector over the vocabulary: the logits after a fed token, or a distribution.
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
    """What a target forward is for: the prompt, or one of PEARL's two kinds of verification."""

    PREFILL = "prefill"
    PRE_VERIFY = "pre-verify"
    POST_VERIFY = "post-verify"


class Cause(Enum):
    """Why the target waits."""

    HELD_ROW = "held row"  # the logits for a position are there, but its draft token is not
    WINDOW = "window"  # the window is not full yet
    IDLE = "idle"  # there is no request


class OfRequest(Struct, frozen=True, kw_only=True):
    """An event or a command of one request; `request` is -1 if it concerns no request."""

    request: int = -1


# ---- events ----


class Forwarded(OfRequest, frozen=True):
    """The target's forward is done.

    Attributes:
        seconds: duration of the forward.
        at: when the forward ended, in seconds of a monotonic clock.
        beside: number of tokens in the same forward that are not of this request's text: tokens of
            other requests, or the window of Lookahead decoding. None if any part of a prompt was
            fed.
        fed: the tokens of the `Forward` command, and the guesses that were fed with them. None if
            no guesses were fed.
    """

    seconds: float = 0.0
    at: float = 0.0
    beside: int | None = 0
    fed: FedTokens | None = None


class Odds(Struct, frozen=True):
    """Expected rejections and bias over some judged positions.

    They are computed from the target's and the draft's distribution at each of these positions.

    Attributes:
        rejections: expected number of rejections: the sum of p, the probability of a rejection at
            each position.
        variance: variance of the number of rejections: the sum of p * (1 - p).
        bias: sum over the positions of the total variation distance between the distribution of
            committed tokens and the target's; 0 for an exact rule. The mean of this sum over texts
            bounds the distance between the distributions of whole texts.
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
    """A draft has connected. Its model holds `context` tokens, and takes `seconds` per token.

    `seconds` is 0 if the time is unknown.
    """

    context: int
    seconds: float = 0.0


class DraftGone(Struct, frozen=True):
    """The draft is lost: for all requests if `request` is None, otherwise for this request only."""

    reason: str
    request: int | None = None


class Failed(OfRequest, frozen=True):
    """A result of the model cannot be used. This request ends, and no other.

    `kind` is the name of a class in `pearl.errors`.
    """

    reason: str
    kind: str = "ForwardError"


class Drafted(OfRequest, frozen=True):
    """The draft's forward is done.

    Attributes:
        tokens: tokens proposed for the next positions, at most `Draft.budget`. There are none if
            the forward was fed a part of a long prefix, if it drafted only branches, or if it was
            one of several forwards that search for a block.
        seconds: duration of the forward.
        rows: the distribution that each token was drawn from; empty if the rule needs none.
        draw: seconds that drawing the tokens took.
        failure: an error message; empty if there was no error. The error is that the logits were
            not finite, so that no token could be drawn. It ends drafting for this request only.
        cached: how many of `tokens`, counted from the first, are already in the KV cache.
        paused: whether the stop policy ends drafting until these tokens are judged. If `tokens` is
            empty, the policy keeps back the token that was drafted. In answer to a `Draft` with
            `hedge`, it means that no more branches are worth a forward.
        branches: the branches (see `Proposal.after`), each with all tokens that were drafted for it
            so far, including those that were sent before.
        fed: number of tokens fed in the forward, including those of other requests; 0 if unknown.
        seen: see `DraftTokens.runners_up`.
        has_prompt: whether any part of a prefix was fed in the forward, of this request or another.
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
    has_prompt: bool = False


# ---- commands ----


class Open(OfRequest, frozen=True):
    """Start a request in slot `slot`.

    The draft starts a request anew whenever the target sends a whole prefix.
    """

    prompt: tuple[int, ...]
    options: RequestOptions
    slot: int = 0


class Spread(OfRequest, frozen=True):
    """Compute on `cores` from now on."""

    cores: Cores


class Rollback(OfRequest, frozen=True):
    """Forget all but the first `length` tokens in the KV cache."""

    length: int


class Keep(OfRequest, frozen=True):
    """Keep one path of the last token tree in the KV cache, and drop the tree's other nodes.

    The path continues the text. `path` lists the path's nodes; each node is the parent of the next.
    """

    path: tuple[int, ...]


class Alternative(Struct, frozen=True):
    """A runner-up for `position` and the tokens that the draft has prepared after it.

    A runner-up is a token that the draft found likely but did not draw.

    Attributes:
        tokens: the runner-up, and then the tokens prepared after it. They may replace the text's
            tokens from `position` on.
        chances: chances[i] is the probability that tokens[i] is right if all earlier tokens are.
    """

    position: int
    tokens: tuple[int, ...]
    chances: tuple[float, ...]


class Guess(Struct, frozen=True):
    """What the executor needs to guess, without the draft model, which tokens may follow the text.

    Attributes:
        base: number of the text's first tokens that the executor has already, from the prompt and
            from earlier `Guess`es. If the text has changed since, only tokens before the first
            change count.
        tokens: the text's tokens from position `base` on.
        committed: number of committed tokens. Guesses may follow the last committed token and any
            pending token.
        limit: the first position that needs no guess.
        trust: for each pending token, the probability that it is right if the pending tokens before
            it are right.
        most: maximum number of guesses, besides `alternatives`.
        payoff: function (number of fed tokens, maximum number of guesses) -> `Payoff`, which
            decides how many guesses to feed. Each guess is offered with its chance: the estimated
            probability that the target commits the guess and all tokens on the path to it.
        alternatives: the draft's runners-up, which may be fed as guesses too.
        head: whether the target's drafting head (such as EAGLE-3), if there is one, guesses too.
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
        """Maximum number of guesses, including the tokens of `alternatives`."""
        return self.most + sum([len(alternative.tokens) for alternative in self.alternatives])


class Forward(OfRequest, frozen=True):
    """Run a forward of the target, answered by `Forwarded`.

    Attributes:
        start: the position of the first token to feed.
        tokens: the text's tokens to feed.
        rows: number of tokens at the end of `tokens` whose logits are kept. The logits of guesses
            are always kept.
        guess: what to base guesses on; None to feed no guesses.
    """

    phase: Phase
    start: int
    tokens: tuple[int, ...]
    rows: int
    guess: Guess | None = None


class Draft(OfRequest, frozen=True):
    """Run a forward of the draft, answered by `Drafted`.

    Attributes:
        start: the position of the first token to feed.
        tokens: the text's tokens to feed.
        budget: maximum number of tokens to propose after `tokens`; 0 to propose none.
        pending: number of tokens at the end of the text that the target has not judged yet.
        hedge: 0 to continue the text. If positive, only branches (see `Proposal.after`) are
            drafted, each of at most `hedge` tokens.
        bonus: whether to draft branches also for the bonus token that the target draws after the
            text.
        prompt: whether `tokens` belong to the prefix that the request began with.
    """

    start: int
    tokens: tuple[int, ...]
    budget: int
    pending: int = 0
    hedge: int = 0
    bonus: bool = False
    prompt: bool = False


class Send(Struct, frozen=True):
    """Send a message to the other model's worker."""

    message: Message


class Deliver(Struct, frozen=True):
    """Send a message to the front (the user's process) that submitted the request."""

    message: Message


class End(Struct, frozen=True):
    """Tell the front that a request has ended.

    Attributes:
        counts: the request's counters, a `request.Counts`.
        window: the window length c that was used last.
        failure: why the request failed; None if it did not fail.
    """

    request: int
    reason: FinishReason
    prompt_tokens: int
    counts: Any
    window: int
    failure: Failed | None = None


class DraftDropped(OfRequest, frozen=True):
    """Log why the target goes on with this request without the draft."""

    reason: str


class Wait(OfRequest, frozen=True):
    """Wait until a message comes, because there is nothing to compute for this request."""

    cause: Cause


# ---- questions, answered at once ----


class Judge(OfRequest, frozen=True):
    """Judge draft `tokens` from position `start` on.

    Attributes:
        rows: the draft distribution of each token; the protocol does not look into it.
        nodes: for each token, the node of the last forward whose logits judge the token. A node is
            the index of a token in the forward, see `FedTokens`.
    """

    start: int
    tokens: tuple[int, ...]
    rows: tuple[Any, ...]
    nodes: tuple[int, ...]


class Sample(OfRequest, frozen=True):
    """Draw the token at `position` from the target's distribution alone.

    Attributes:
        node: the token of the last forward after which to draw, see `FedTokens`.
        follow: whether to draw further tokens. If the drawn token was fed as a guess after `node`,
            the logits after the guess give the next draw, and so on.
    """

    position: int
    node: int
    follow: bool = False


class Judged(Struct, frozen=True):
    """The verdict on draft tokens.

    Attributes:
        accepted: how many tokens were accepted, counted from the first.
        token: the token to commit after the accepted ones: a correction. None if all were accepted.
        stop_after: a stop string is complete after this many of the tokens to commit, which are the
            accepted tokens and `token`; None if no stop string is complete.
        odds: expected rejections and bias; None if the rule does not see the draft's distributions.
        is_candidate: whether `token` is no correction but accepted too, as one of several
            candidates for its position (rules batch and spectr).
    """

    accepted: int
    token: int | None
    stop_after: int | None = None
    odds: Odds | None = None
    is_candidate: bool = False


class Sampled(Struct, frozen=True):
    """The target's own draws for successive positions, in answer to `Sample`.

    All draws but the last were fed as guesses. In the tree of guesses each draw is a child of the
    previous draw. `stop_after` is the number of `tokens` after which a stop string is complete, or
    None if no stop string is complete.
    """

    tokens: tuple[int, ...]
    stop_after: int | None = None


class Verifier(Protocol):
    """Judges and draws with the logits of a request's last forward.

    Raises `ForwardError` if the logits cannot be used.
    """

    def judge(self, judge: Judge) -> Judged: ...

    def sample(self, sample: Sample) -> Sampled: ...
