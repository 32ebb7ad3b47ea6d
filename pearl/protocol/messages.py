"""What crosses between processes, as plain values: the fixed list of message types.

The byte format (msgpack arrays, limits, checks) is `transport/codec.py`; its written specification is
`pearl/transport/WIRE.md`.  No message looks into a draft distribution: see `pearl.decoding.distribution`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

PROTOCOL_VERSION = 10


class Role(Enum):
    FRONT = "front"
    TARGET = "target"
    DRAFT = "draft"


class Provenance(Enum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"  # drafted, and the target agreed
    CORRECTED = "corrected"  # drafted wrongly: a sample of the residual stands in its place
    DIRECT = "direct"  # the target's own draw: no draft was asked (ar, prefill in sd, going alone)
    BONUS = "bonus"  # the target's own draw after a fully accepted window (sd, pearl-no-post-verify)
    GUESSED = "guessed"  # guessed without a model, and the target agreed


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"  # a stop string
    LENGTH = "length"  # max_tokens or the context
    CANCELLED = "cancelled"


class Source(Enum):
    """Who guessed a token."""

    MODEL = "model"
    NGRAM = "n-gram"
    DATASTORE = "datastore"
    BRANCH = "branch"
    LOOKUP = "lookup"  # the model too, by a guess of its own that a forward for the token before has confirmed


@dataclass(frozen=True, slots=True)
class Shaping:
    """How the text before them changes logits; see `pearl.decoding.shaping`. `prompt`: tokens that were not generated.

    A `repetition_penalty` of 1 and other penalties of 0 do nothing. `logit_bias`: (token id, what is added).  What is
    generated keeps to `grammar` (of `pearl.models.grammar`), and then ends with one of `ends`; empty: to none.
    """

    prompt: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to turn logits into tokens; all resolved. `temperature` 0 is greedy; top_k 0, top_p 1, min_p 0: off.

    `shaping`: None where logits are taken as they are.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    shaping: Shaping | None = None


@dataclass(frozen=True, slots=True)
class Decoding:
    """Which method decodes a request. `gamma` is the fixed window, None where the window is the measured ratio.

    `parameters`: (name, value) of the rule's parameters; one left out has the rule's default.  `look_ahead`: the most
    guesses made without a model that the target is fed in one forward, and `draft_lookup` that the draft is; 0: none.
    `branches`: the most other outcomes that the draft prepares continuations for at a time.  `draft_stop`: the policy
    that ends the draft's windows before their bound, with its parameters.
    """

    method: str = "pearl"
    window: str = "stream"
    gamma: int | None = None
    rule: str = "ratio"
    parameters: tuple[tuple[str, float], ...] = ()
    look_ahead: int = 0
    draft_lookup: int = 0
    branches: int = 0
    draft_stop: str = "fixed"
    stop_parameters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """First message in either direction. `context`: the most tokens the sender's model can hold."""

    version: int
    role: Role
    vocab_size: int
    context: int
    vocab_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The target's answer to a front's Hello: what this engine serves, and the speeds measured at start (seconds)."""

    version: int
    vocab_size: int
    context: int
    draft_context: int  # 0: no draft
    t_draft: float  # 0.0: unknown
    t_target: tuple[tuple[int, float], ...]  # (fed tokens, seconds)
    window: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A front asks for a text. `request` is the front's own number; `limit` the total length at which to end.

    `logprobs`: tell of each token its log probability, and of so many of the likeliest tokens at its place; None: not.
    """

    request: int
    prompt: tuple[int, ...]
    limit: int
    sampling: Sampling
    decoding: Decoding
    eos: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    preview: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the target's row says of a token: natural logarithms of probabilities at temperature 1, unfiltered and
    without penalties and biases; at least `LEAST_LOGPROB`.

    Attributes:
        top: the likeliest tokens, the likeliest first, each with its own.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """Final tokens from position `start` on, with one provenance each; `logprobs` too, where asked for."""

    request: int
    start: int
    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Preview:
    """Pending tokens from position `start` on: a guess, replaced by what is committed. Only on request."""

    request: int
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. `statistics` is a JSON document (see pearl.metrics.Statistics)."""

    request: int
    reason: FinishReason
    statistics: str


@dataclass(frozen=True, slots=True)
class Begin:
    """The target gives the draft a whole prefix: a new request, or one to be resumed after a resynchronisation.

    `lookup`: the most guesses made without a model that the draft feeds itself in one forward; `branches`: the most
    other outcomes that it prepares continuations for at a time; `bonus`: the target draws the token behind a window
    itself, so that is such an outcome too; `draft_stop`: the policy that ends windows, with its parameters.
    """

    request: int
    epoch: int
    tokens: tuple[int, ...]
    draft_until: int
    sampling: Sampling
    rule: str
    digest: int
    parameters: tuple[tuple[str, float], ...] = ()  # of the rule
    lookup: int = 0
    branches: int = 0
    bonus: bool = False
    draft_stop: str = "fixed"
    stop_parameters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Tokens proposed for the positions from `start` on, in their order.

    Attributes:
        seconds: how long a token of the forward that made them took; 0: unknown.
        rows: the distribution that each was drawn from (`decoding.distribution.Distribution`); empty where the rule
            needs none.
        waited: seconds that the draft has waited for verdicts in all of this request so far.
        source: who guessed them.
        after: None for the main line; else the outcome (position, token) under which they hold: that this token, which
            the main line does not have there, is committed at this position. They continue what came for it before.
        paused: whether the draft drafts no more, though it may, until these tokens are judged: its stop policy said so.
        known: how long a prefix the target had told the draft when it drafted them.
    """

    request: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    seconds: float = 0.0
    rows: tuple[Any, ...] = ()
    waited: float = 0.0
    source: Source = Source.MODEL
    after: tuple[int, int] | None = None
    paused: bool = False
    known: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens committed from position `start` on; draft up to (not including) position `draft_until`.

    `epoch` is one higher than before where the draft's continuation has become invalid. `digest` is the rolling hash
    of the whole committed prefix, these tokens included.
    """

    request: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    draft_until: int
    digest: int


@dataclass(frozen=True, slots=True)
class Resync:
    """The draft lost the thread (a gap, or a digest that does not match) and asks for the whole prefix."""

    request: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is over; the draft stops drafting for it."""

    request: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """A front no longer wants this request."""

    request: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From a work loop. `step` counts forwards, `work` names what is being done with how many `tokens`.

    `seconds`: how long that should take; of "calibrated", which admits a draft, what a token takes it.
    """

    step: int
    work: str
    tokens: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ping:
    """Clock ping: `sent` is the sender's monotonic clock, nanoseconds."""

    sent: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a Ping: `sent` as received, `received` the answerer's monotonic clock, nanoseconds."""

    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Record what you do from now on, as recording `number`; not `on`: end it. Echoed by the receiver once done."""

    number: int
    on: bool


@dataclass(frozen=True, slots=True)
class Error:
    """Something went wrong at the sender. `request` -1: about none. `kind`: a class name of pearl.errors."""

    request: int
    kind: str
    message: str


Message = (
    Hello | Welcome | Submit | Committed | Preview | Finished | Begin | DraftTokens | Verdict | Resync | Finish
    | Cancel | Heartbeat | Ping | Pong | Trace | Error
)  # fmt: skip
