"""Messages between processes, as plain values.

The byte format (msgpack arrays, limits, checks) is `transport/codec.py`, specified in `pearl/transport/WIRE.md`.
Draft distributions are opaque here: see `pearl.decoding.distribution`.
"""

from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from pearl.config.option_values import LEAST_LOGPROB, MAX_LOGPROBS, Ends
from pearl.config.options import RequestOptions
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
MAX_EVENTS = 4096  # in one list of `Outcomes`

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
    DIRECT = "direct"  # the target's own draw, no draft token was due (ar, prefill in sd, no draft)
    BONUS = (
        "bonus"  # the target's own draw after a fully accepted window (sd, pearl-no-post-verify)
    )
    GUESSED = "guessed"  # a guess, not a draft token, and the target agreed


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
    LOOKUP = "lookup"  # the draft model: it confirmed a guess in the forward that drafted the token before
    RUNNER_UP = "runner-up"  # the draft model: likely by its row, but it drew another token
    HEAD = "head"  # the target's head
    JACOBI = "jacobi"  # the target, in a forward whose earlier tokens were wrong
    PREDICTION = "prediction"  # the text that the client expects


class SparseRow(Record, frozen=True):
    """A distribution of few possible tokens: bytes of their ids (int32 LE) and probabilities (float32 LE)."""

    ids: Annotated[bytes, Meta(max_length=MAX_FRAME)]
    probs: Annotated[bytes, Meta(max_length=MAX_FRAME)]


FRAME = 0
CHANNEL = 1  # the distribution comes in a raw frame after the header (0), or over the channel (1)
WireRow = (
    SparseRow | Annotated[int, Meta(ge=FRAME, le=CHANNEL)] | None
)  # None: left out of a trace; never on the wire

if TYPE_CHECKING:
    Rows = tuple[Any, ...]  # tensors, inside a process; see `decoding.distribution`
else:
    Rows = Annotated[tuple[WireRow, ...], Meta(max_length=MAX_RUN)]


class Message(Record, frozen=True, tag=0):
    """Base of the message types; each type has a unique tag that never changes."""


class Hello(Message, frozen=True, tag=1):
    """First message in either direction.

    Attributes:
        context: the most tokens the sender's model can hold.
        name: the sender's, for logs: "vllm, data-parallel rank 0".
        slots: how many requests a draft service drafts for at the same time; 0 if the sender is none.
    """

    version: Version
    role: Role
    vocab_size: Vocabulary
    context: Position
    vocab_digest: Annotated[bytes, Meta(max_length=64)] = b""
    name: Name = ""
    slots: Count = 0


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
        request: the front's own number of this request.
        limit: total length at which the text ends, the prompt included.
        preview: whether to send `Preview`s.
        client: who makes the request; waiting requests of several clients are served in turns.
    """

    request: Count
    prompt: Tokens
    limit: Position
    options: RequestOptions
    eos: Ends = ()
    preview: bool = False
    client: Name = ""


class TokenDetails(Record, frozen=True):
    """What the target reports about a committed token if the options ask for it. A new detail is a field here.

    Log probabilities are natural logarithms of the target's probabilities at temperature 1, without filters, penalties
    and biases. They are at least `LEAST_LOGPROB`.

    Attributes:
        logprob: the token's log probability.
        top: (token, log probability) of the likeliest tokens, the likeliest first.
    """

    logprob: Logarithm
    top: Annotated[tuple[tuple[Position, Logarithm], ...], Meta(max_length=MAX_LOGPROBS)] = ()


class Committed(Message, frozen=True, tag=4):
    """Final tokens from position `start` on, each with its provenance; `details` are empty unless requested."""

    request: Count
    start: Position
    tokens: Tokens
    provenance: Annotated[tuple[Provenance, ...], Meta(max_length=MAX_TOKENS)]
    details: Annotated[tuple[TokenDetails, ...], Meta(max_length=MAX_TOKENS)] = ()


class Preview(Message, frozen=True, tag=5):
    """Pending tokens from position `start` on; the committed tokens replace them. Sent only if `Submit.preview`."""

    request: Count
    start: Position
    tokens: Tokens


class Finished(Message, frozen=True, tag=6):
    """A request ended. `statistics` is a JSON document (see pearl.metrics.Statistics)."""

    request: Count
    reason: FinishReason
    statistics: Annotated[str, Meta(max_length=MAX_STATISTICS)]


class Begin(Message, frozen=True, tag=7):
    """The target gives the draft a whole prefix: of a new request,
    or of a request to resume after a resynchronisation.
    """

    request: Count
    epoch: Count
    tokens: Tokens
    draft_until: Position
    digest: Word
    options: RequestOptions


class DraftTokens(Message, frozen=True, tag=8):
    """Tokens proposed for the positions from `start` on, in order.

    Attributes:
        seconds: seconds per token of the forward that drafted them; 0: unknown.
        rows: the distribution that each token was drawn from (see `decoding.distribution`); empty if the rule needs
            none.
        waited: seconds that the draft has waited for verdicts in all of this request so far.
        source: who guessed these tokens.
        after: None for the main line, the draft's own continuation of the text. A branch is the continuation for
            another outcome (position, token): the target commits this token at this position, where the main line has
            another token or none. Several messages may extend one branch.
        paused: whether the draft, by its stop policy, drafts no more until these tokens are judged. Under a rule with
            `RuleSpec.withholds` it drafts no more until the target has committed its own token after these.
        known: length of the prefix that the draft knew when it drafted these tokens.
        runners_up: for each token, its share and its runners-up in its row; empty unless
            `RequestOptions.sends_runners_up`.
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

    `epoch` is higher than before if the draft's continuation has become invalid. `digest` is the rolling hash of the
    whole committed prefix, these tokens included.
    """

    request: Count
    epoch: Count
    start: Position
    tokens: Tokens
    draft_until: Position
    digest: Word


class HiddenStates(Message, frozen=True, tag=18):
    """The target's hidden states of committed tokens from position `start` on, for a draft that is a head.

    Sent before the verdict on these tokens. `states`: bfloat16 LE [n, features].
    """

    request: Count
    start: Position
    states: Annotated[bytes, Meta(max_length=MAX_FRAME)]


class Resync(Message, frozen=True, tag=10):
    """The draft requests the whole prefix: tokens are missing, or the digest of its prefix differs."""

    request: Count
    epoch: Count


class Finish(Message, frozen=True, tag=11):
    """The request is over; the draft stops drafting for it."""

    request: Count


class Outcomes(Message, frozen=True, tag=19):
    """What one step of another engine has decided, for all its requests together.

    Sent to a draft service (`pearl draft serve`), which handles the events one by one, as if each came alone. It begins
    with `finishes`, so that their slots are free for `begins`.
    """

    finishes: Annotated[tuple[Finish, ...], Meta(max_length=MAX_EVENTS)] = ()
    begins: Annotated[tuple[Begin, ...], Meta(max_length=MAX_EVENTS)] = ()
    verdicts: Annotated[tuple[Verdict, ...], Meta(max_length=MAX_EVENTS)] = ()


class Cancel(Message, frozen=True, tag=12):
    """A front no longer wants this request."""

    request: Count


class Heartbeat(Message, frozen=True, tag=13):
    """Tells the peer what the sender's work loop is doing.

    Attributes:
        step: number of forwards so far.
        work: "prefill" before a long prompt; "calibrated" once, from a draft that is ready; otherwise the loop's state.
        tokens: how many tokens the work is on.
        seconds: how long the work should take; for "calibrated", the draft's seconds per token.
    """

    step: Count
    work: Name
    tokens: Count
    seconds: Seconds = 0.0


class Ping(Message, frozen=True, tag=14):
    """Clock ping: `sent` is the sender's monotonic clock, nanoseconds."""

    sent: Count


class Pong(Message, frozen=True, tag=15):
    """Answer to a Ping: `sent` is copied from it, `received` is the answerer's monotonic clock, nanoseconds."""

    sent: Count
    received: Count


class Trace(Message, frozen=True, tag=17):
    """Begin recording `number` if `on`, otherwise end it. The receiver returns the message once that is done."""

    number: Count
    on: bool


class Error(Message, frozen=True, tag=16):
    """Something went wrong at the sender. `request`: -1 if no request is concerned. `kind`: a class name of
    pearl.errors.
    """

    request: Annotated[int, Meta(ge=-1)]
    kind: Name
    message: Annotated[str, Meta(max_length=MAX_TEXT // 4)]
