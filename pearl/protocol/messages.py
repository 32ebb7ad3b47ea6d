"""Messages between processes, as plain values.

The byte format (msgpack arrays, limits, checks) is `transport/codec.py`, specified in `pearl/transport/WIRE.md`.
Draft distributions are opaque here: see `pearl.decoding.distribution`.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from pearl.config.options import LEAST_LOGPROB, MAX_LOGPROBS, Ends, RequestOptions
from pearl.config.records import MAX_TEXT, Count, Name, Position, Record, Word
from pearl.protocol.acceptance_estimates import Seen

PROTOCOL_VERSION = 17

MAX_FRAME = 16 << 20  # bytes
MAX_TOKENS = 1 << 20  # in one list
MAX_RUN = 2048  # drafted tokens in one message: twice the largest gamma
MAX_VOCAB = MAX_FRAME // 4  # ids: a distribution over more would fit no frame
LEAST_SECONDS = 1e-12  # above 0, which means unknown; no clock measures less
MOST_SECONDS = 1e9  # thirty years; quotients and multiples of times must stay finite
MAX_STATISTICS = 1 << 20  # characters

Tokens = Annotated[tuple[Position, ...], Meta(max_length=MAX_TOKENS)]
Run = Annotated[tuple[Position, ...], Meta(max_length=MAX_RUN)]
Vocabulary = Annotated[int, Meta(ge=0, le=MAX_VOCAB)]
Version = Annotated[int, Meta(ge=0, lt=1 << 16)]
Seconds = Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]
Logarithm = Annotated[float, Meta(ge=LEAST_LOGPROB, le=0.0)]


class Role(Enum):
    FRONT = "front"
    TARGET = "target"
    DRAFT = "draft"


class Provenance(StrEnum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"  # drafted, and the target agreed
    CORRECTED = "corrected"  # in place of a rejected draft token: a sample of the residual
    DIRECT = "direct"  # the target's own draw where no draft token was due (ar, prefill in sd, going alone)
    BONUS = (
        "bonus"  # the target's own draw after a fully accepted window (sd, pearl-no-post-verify)
    )
    GUESSED = "guessed"  # fed beside or in place of draft tokens, and the target agreed


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"  # a stop string
    LENGTH = "length"  # max_tokens or the context
    CANCELLED = "cancelled"


class Source(StrEnum):
    """Who guessed a token."""

    MODEL = "model"
    NGRAM = "n-gram"
    DATASTORE = "datastore"
    BRANCH = "branch"
    LOOKUP = "lookup"  # the model, which confirmed a guess in the forward for the token before
    RUNNER_UP = "runner-up"  # the model, which nearly drew it
    HEAD = "head"  # of the target
    JACOBI = "jacobi"  # the target, from a wrong beginning
    PREDICTION = "prediction"  # the client


class SparseRow(Record, frozen=True):
    """A distribution of few possible tokens: bytes of their ids (int32 LE) and probabilities (float32 LE)."""

    ids: Annotated[bytes, Meta(max_length=MAX_FRAME)]
    probs: Annotated[bytes, Meta(max_length=MAX_FRAME)]


FRAME = 0
CHANNEL = 1  # a distribution in a raw frame behind the header, or over the tensor channel
WireRow = (
    SparseRow | Annotated[int, Meta(ge=FRAME, le=CHANNEL)] | None
)  # None: left out of a trace; never on the wire

if TYPE_CHECKING:
    Rows = tuple[Any, ...]  # in a process tensors; see `decoding.distribution`
else:
    Rows = Annotated[tuple[WireRow, ...], Meta(max_length=MAX_RUN)]


class Message(Record, frozen=True, tag=0):
    """Base of the message types; each has a number of its own, for ever."""


class Hello(Message, frozen=True, tag=1):
    """First message in either direction. `context`: the most tokens the sender's model can hold."""

    version: Version
    role: Role
    vocab_size: Vocabulary
    context: Position
    vocab_digest: Annotated[bytes, Meta(max_length=64)] = b""


class Welcome(Message, frozen=True, tag=2):
    """The target's answer to a front's Hello: what this engine serves, and the speeds measured at start (seconds)."""

    version: Version
    vocab_size: Vocabulary
    context: Position
    draft_context: Position  # 0: no draft
    t_draft: Seconds  # 0.0: unknown
    t_target: Annotated[
        tuple[tuple[Count, Seconds], ...], Meta(max_length=MAX_RUN)
    ]  # (fed tokens, seconds)
    window: Position


class Submit(Message, frozen=True, tag=3):
    """A front asks for a text.

    Attributes:
        request: the front's own number.
        limit: the total length at which to end.
        preview: whether to send `Preview`s.
        client: whose request it is; the waiting requests of several clients are served in turns.
    """

    request: Count
    prompt: Tokens
    limit: Position
    options: RequestOptions
    eos: Ends = ()
    preview: bool = False
    client: Name = ""


class Logprobs(Record, frozen=True):
    """Log probability of a token in the target's row: natural logarithm, at temperature 1, without filters, penalties
    and biases; at least `LEAST_LOGPROB`.

    Attributes:
        top: the likeliest tokens with theirs, the likeliest first.
    """

    logprob: Logarithm
    top: Annotated[tuple[tuple[Position, Logarithm], ...], Meta(max_length=MAX_LOGPROBS)] = ()


class Committed(Message, frozen=True, tag=4):
    """Final tokens from position `start` on, with one provenance each; `logprobs` too, where asked for."""

    request: Count
    start: Position
    tokens: Tokens
    provenance: Annotated[tuple[Provenance, ...], Meta(max_length=MAX_TOKENS)]
    logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_TOKENS)] = ()


class Preview(Message, frozen=True, tag=5):
    """Pending tokens from position `start` on: a guess, replaced by what is committed. Only on request."""

    request: Count
    start: Position
    tokens: Tokens


class Finished(Message, frozen=True, tag=6):
    """A request ended. `statistics` is a JSON document (see pearl.metrics.Statistics)."""

    request: Count
    reason: FinishReason
    statistics: Annotated[str, Meta(max_length=MAX_STATISTICS)]


class Begin(Message, frozen=True, tag=7):
    """The target gives the draft a whole prefix: a new request, or one to be resumed after a resynchronisation."""

    request: Count
    epoch: Count
    tokens: Tokens
    draft_until: Position
    digest: Word
    options: RequestOptions


class DraftTokens(Message, frozen=True, tag=8):
    """Tokens proposed for the positions from `start` on, in their order.

    Attributes:
        seconds: how long a token of the forward that made them took; 0: unknown.
        rows: the distribution that each was drawn from (see `decoding.distribution`); empty if the rule needs none.
        waited: seconds that the draft has waited for verdicts in all of this request so far.
        source: who guessed them.
        after: None for the main line; else the outcome (position, token) under which they hold: that this token is
            committed at this position, where the main line has another. They continue what came for it before.
        paused: whether the draft's stop policy ends drafting until these tokens are judged; where the draft withholds
            a token, until the target has committed its own for the position behind them.
        known: length of the prefix that the draft had when it drafted them.
        runners_up: what the row of each token says of it and of others; empty if the target takes no siblings.
    """

    request: Count
    epoch: Count
    start: Position
    tokens: Run
    seconds: Seconds = 0.0
    rows: Rows = ()
    waited: Seconds = 0.0
    source: Source = Source.MODEL
    after: tuple[Position, Position] | None = None
    paused: bool = False
    known: Position = 0
    runners_up: Annotated[tuple[Seen, ...], Meta(max_length=MAX_RUN)] = ()


class Verdict(Message, frozen=True, tag=9):
    """Tokens committed from position `start` on; draft up to (not including) position `draft_until`.

    `epoch` is one higher than before where the draft's continuation has become invalid. `digest` is the rolling hash
    of the whole committed prefix, these tokens included.
    """

    request: Count
    epoch: Count
    start: Position
    tokens: Tokens
    draft_until: Position
    digest: Word


class HiddenStates(Message, frozen=True, tag=18):
    """For a draft that is a head: the target's hidden states of committed tokens from position `start` on, before the
    verdict on them. `states`: bfloat16 LE [n, features].
    """

    request: Count
    start: Position
    states: Annotated[bytes, Meta(max_length=MAX_FRAME)]


class Resync(Message, frozen=True, tag=10):
    """The draft's prefix has a gap or another digest: it requests the whole prefix."""

    request: Count
    epoch: Count


class Finish(Message, frozen=True, tag=11):
    """The request is over; the draft stops drafting for it."""

    request: Count


class Cancel(Message, frozen=True, tag=12):
    """A front no longer wants this request."""

    request: Count


class Heartbeat(Message, frozen=True, tag=13):
    """From a work loop: number of forwards, and the current work on so many `tokens`.

    `seconds`: how long it should take; for "calibrated", which admits a draft, what a token takes it.
    """

    step: Count
    work: Name
    tokens: Count
    seconds: Seconds = 0.0


class Ping(Message, frozen=True, tag=14):
    """Clock ping: `sent` is the sender's monotonic clock, nanoseconds."""

    sent: Count


class Pong(Message, frozen=True, tag=15):
    """Answer to a Ping: `sent` as received, `received` the answerer's monotonic clock, nanoseconds."""

    sent: Count
    received: Count


class Trace(Message, frozen=True, tag=17):
    """Begin recording `number`; not `on`: end it. Echoed by the receiver once done."""

    number: Count
    on: bool


class Error(Message, frozen=True, tag=16):
    """Something went wrong at the sender. `request` -1: about none. `kind`: a class name of pearl.errors."""

    request: Annotated[int, Meta(ge=-1)]
    kind: Name
    message: Annotated[str, Meta(max_length=MAX_TEXT // 4)]
