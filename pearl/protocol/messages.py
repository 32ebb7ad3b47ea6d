"""Messages between processes, as plain values.

`transport/codec.py` encodes them as msgpack arrays and checks them; `pearl/transport/WIRE.md`
specifies the bytes. This file does not look into draft distributions, see
`pearl.decoding.distribution`.
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
MAX_VOCAB = MAX_FRAME // 4  # ids: a distribution over more ids would fit no frame
LEAST_SECONDS = 1e-12  # above 0, because 0 means unknown; no clock measures less
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
    DIRECT = "direct"  # the target's own draw, because no draft token was due (ar, prefill in sd)
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
    LOOKUP = "lookup"  # an n-gram guess that the draft model confirmed
    RUNNER_UP = "runner-up"  # the draft model found the token likely, but drew another one
    HEAD = "head"  # the target's drafting head, such as EAGLE-3
    JACOBI = "jacobi"  # the target itself, in a Jacobi iteration of Lookahead decoding
    PREDICTION = "prediction"  # the text that the client expects


class SparseRow(Record, frozen=True):
    """A distribution in which few tokens are possible.

    `ids` has the bytes of the possible tokens' ids (int32 LE), and `probs` has the bytes of their
    probabilities (float32 LE).
    """

    ids: Annotated[bytes, Meta(max_length=MAX_FRAME)]
    probs: Annotated[bytes, Meta(max_length=MAX_FRAME)]


FRAME = 0  # the distribution comes in a raw frame after the message
CHANNEL = 1  # the distribution comes over the tensor channel
WireRow = (
    SparseRow | Annotated[int, Meta(ge=FRAME, le=CHANNEL)] | None
)  # None in a trace, which leaves distributions out; never on the wire

if TYPE_CHECKING:
    Rows = tuple[Any, ...]  # tensors, inside a process; see `decoding.distribution`
else:
    Rows = Annotated[tuple[WireRow, ...], Meta(max_length=MAX_RUN)]


class Message(Record, frozen=True, tag=0):
    """Base of the message types; each type has a unique tag that never changes."""


class Hello(Message, frozen=True, tag=1):
    """First message in either direction.

    Attributes:
        context: the most tokens that the sender's model can hold.
        vocab_digest: hash of the sender's vocabulary; empty if the sender states none.
        name: the sender's name for logs, such as "vllm, data-parallel rank 0".
        slots: how many requests a draft service drafts for at the same time; 0 if the sender is no
            draft service.
    """

    version: Version
    role: Role
    vocab_size: Vocabulary
    context: Position
    vocab_digest: Annotated[bytes, Meta(max_length=64)] = b""
    name: Name = ""
    slots: Count = 0


class Welcome(Message, frozen=True, tag=2):
    """The target's answer to a front's Hello: what the engine serves, and its speeds at start.

    `t_draft` is seconds per draft forward, `t_target` seconds per target forward by number of
    tokens.
    """

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
    """A front (the user's process) submits a request.

    Attributes:
        request: the number that the front gives this request.
        limit: total length at which the text ends, in tokens, the prompt included.
        eos: ids of the tokens that end the text.
        preview: whether to send `Preview`s of tokens that are not committed yet.
        client: name of the client that makes the request. Clients with waiting requests take turns.
    """

    request: Count
    prompt: Tokens
    limit: Position
    options: RequestOptions
    eos: Ends = ()
    preview: bool = False
    client: Name = ""


class TokenDetails(Record, frozen=True):
    """What the target reports about a committed token, if the request's options ask for it.

    A log probability is the natural logarithm of the target's probability at temperature 1, without
    filters, penalties and biases. It is at least `LEAST_LOGPROB`.

    Attributes:
        logprob: the token's log probability.
        top: (token, log probability) of the likeliest tokens, the likeliest first.
    """

    logprob: Logarithm
    top: Annotated[tuple[tuple[Position, Logarithm], ...], Meta(max_length=MAX_LOGPROBS)] = ()


class Committed(Message, frozen=True, tag=4):
    """Committed tokens from position `start` on, each with its provenance.

    `details` has one entry per token, or is empty if the request did not ask for any.
    """

    request: Count
    start: Position
    tokens: Tokens
    provenance: Annotated[tuple[Provenance, ...], Meta(max_length=MAX_TOKENS)]
    details: Annotated[tuple[TokenDetails, ...], Meta(max_length=MAX_TOKENS)] = ()


class Preview(Message, frozen=True, tag=5):
    """Pending tokens from position `start` on, sent only if `Submit.preview` is true.

    They are drafted and not judged yet; the tokens committed later replace them.
    """

    request: Count
    start: Position
    tokens: Tokens


class Finished(Message, frozen=True, tag=6):
    """A request ended. `statistics` is a JSON document (see pearl.metrics.Statistics)."""

    request: Count
    reason: FinishReason
    statistics: Annotated[str, Meta(max_length=MAX_STATISTICS)]


class Begin(Message, frozen=True, tag=7):
    """The target sends the draft a whole prefix to draft from.

    A request starts with this message. The message is sent again whenever the draft has to be
    resynchronised. For `draft_until` and `digest` see `Verdict`.
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
        seconds: seconds per token of the forward that drafted them; 0 if unknown.
        rows: the distribution that each token was drawn from (see `decoding.distribution`); empty
            if the rule needs none.
        waited: total seconds that the draft has waited for verdicts in this request so far.
        source: who guessed these tokens.
        after: None for the main line, which is the draft's own continuation of the text. For a
            branch, the outcome (position, token) that the branch continues: the target commits this
            token at this position, where the main line has another token or none. Several messages
            may extend one branch.
        paused: whether the draft's stop policy ends drafting until these tokens are judged; under
            a rule with `RuleSpec.withholds`, until the target has also committed a token of its own
            after them.
        known: length of the committed prefix that the draft knew when it drafted these tokens.
        runners_up: what the draft's distribution says of each token (see `Seen`); empty unless
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
    """The target tells the draft which tokens it has committed, and how far to draft.

    Attributes:
        epoch: higher than in the last verdict if the tokens that the draft has sent are discarded.
        start: the position of the first token in `tokens`.
        tokens: the tokens committed since the last verdict.
        draft_until: the first position that the draft may not draft.
        digest: rolling hash of the whole committed prefix, `tokens` included.
    """

    request: Count
    epoch: Count
    start: Position
    tokens: Tokens
    draft_until: Position
    digest: Word


class HiddenStates(Message, frozen=True, tag=18):
    """The target's hidden states of committed tokens from position `start` on.

    They go to a draft that reads them, as a drafting head (such as EAGLE-3) does. They are sent
    before the verdict on these tokens. `states` has the bytes of a bfloat16 LE array [n, features].
    """

    request: Count
    start: Position
    states: Annotated[bytes, Meta(max_length=MAX_FRAME)]


class Resync(Message, frozen=True, tag=10):
    """The draft requests the whole prefix; its copy lacks tokens or has another digest."""

    request: Count
    epoch: Count


class Finish(Message, frozen=True, tag=11):
    """The request is over; the draft stops drafting for it."""

    request: Count


class Outcomes(Message, frozen=True, tag=19):
    """What one step of another engine, such as vLLM, has decided for all its requests.

    It is sent to a draft service (`pearl draft serve`), which handles each part as if it were a
    message of its own. The service handles `finishes` first, so that slots are free for `begins`.
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
        work: "prefill" before a long prompt is fed; "calibrated" once, when a draft has measured
            its speed and is ready; otherwise the name of the loop's state.
        tokens: number of tokens that the current work processes.
        seconds: expected duration of the current work; for "calibrated", the draft's seconds per
            token.
    """

    step: Count
    work: Name
    tokens: Count
    seconds: Seconds = 0.0


class Ping(Message, frozen=True, tag=14):
    """Asks for the peer's clock. `sent` is the sender's monotonic clock, in nanoseconds."""

    sent: Count


class Pong(Message, frozen=True, tag=15):
    """Answers a `Ping`.

    `sent` is copied from the ping. `received` is the answering peer's monotonic clock, in
    nanoseconds.
    """

    sent: Count
    received: Count


class Trace(Message, frozen=True, tag=17):
    """Begins the trace recording `number` if `on` is true, and ends the recording if not.

    The receiver returns the same message once the recording has begun or ended.
    """

    number: Count
    on: bool


class Error(Message, frozen=True, tag=16):
    """Reports an error at the sender.

    `request` is -1 if the error concerns no request. `kind` is the name of a class in
    `pearl.errors`.
    """

    request: Annotated[int, Meta(ge=-1)]
    kind: Name
    message: Annotated[str, Meta(max_length=MAX_TEXT // 4)]
