"""Messages to frames of bytes and back, by one fixed table. The format in words is WIRE.md.

What comes from a peer is believed only after its length, type and range were checked: `decode` gives a
message whose every field lies within this table, or raises `RemoteProtocolError`.  Knows no sockets, and no
state: whether a message is allowed *now* is the business of the state machines.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Sequence
from math import inf
from typing import Any

import msgpack

import pearl.errors
from pearl.config import (
    LEAST_REPETITION_PENALTY,
    MAX_GRAMMAR,
    MAX_LOGPROBS,
    MOST_EOS,
    MOST_PENALTY,
    MOST_REPETITION_PENALTY,
)
from pearl.decoding.distribution import Distribution, Form
from pearl.decoding.registry import MAX_PARAMETERS, Parameters, find
from pearl.drafting.registry import check_stop, find_stop
from pearl.errors import LocalProtocolError, PearlError, RemoteProtocolError
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    Cancel,
    Committed,
    Decoding,
    DraftTokens,
    Error,
    Finish,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Preview,
    Provenance,
    Resync,
    Role,
    Sampling,
    Shaping,
    Source,
    Submit,
    Trace,
    Verdict,
    Welcome,
)
from pearl.protocol.proposals import MAX_BRANCHES
from pearl.protocol.window import MAX_LOOK_AHEAD, METHODS, WINDOWS
from pearl.transport.extent import check_extent, is_plain
from pearl.transport.fields import (
    Kind,
    Shape,
    array,
    codes,
    flag,
    integer,
    member,
    named,
    nested,
    optional,
    real,
    sized,
    token_list,
)
from pearl.transport.pairs import biases, logprobs, pack_biases, pack_logprobs

Frame = bytes | bytearray | memoryview

MAX_FRAME = 16 << 20  # bytes
MAX_TOKENS = 1 << 20  # in one list
MAX_RUN = 2048  # drafted tokens in one message, and elements of any msgpack array: twice the largest gamma
MAX_FRAMES = 1 + MAX_RUN
MAX_GAMMA = 1024
MAX_VOCAB = MAX_FRAME // 4  # ids: a distribution over more would fit no frame
LEAST_SECONDS = 1e-12  # above 0, which means unknown; no clock tells less
MOST_SECONDS = 1e9  # thirty years
MAX_STATISTICS = 1 << 20  # bytes of UTF-8

_MAX_TEXT = 1 << 16  # bytes of UTF-8: an error message, a stop string
_MAX_NAME = 64
_MAX_VALUES = 64 + 3 * MAX_RUN  # in one header: the fields, and MAX_RUN entries that are pairs
_LIMITS = {
    "max_array_len": MAX_RUN,  # no token list is a msgpack array, so arrays are short
    "max_bin_len": MAX_FRAME,
    "max_str_len": MAX_STATISTICS,
    "max_map_len": 0,
    "max_ext_len": 0,
}


def _seconds(value: object) -> object:
    """Quotients and multiples of these are formed, and must stay numbers."""
    if type(value) is float and (LEAST_SECONDS <= value <= MOST_SECONDS or value == 0):
        return value
    raise ValueError(f"must be a float: 0, or from {LEAST_SECONDS} to {MOST_SECONDS:.0e}")


def _speed(value: object) -> tuple[int, float]:
    if type(value) is tuple and len(value) == 2:
        return _COUNT.check(value[0]), _SECONDS.check(value[1])
    raise ValueError("must be pairs of (fed tokens, seconds)")


def _provenance(value: object) -> tuple[Provenance, ...]:
    if type(value) is bytes and len(value) <= MAX_TOKENS and (not value or max(value) in _PROVENANCES):
        return tuple(map(_PROVENANCES.__getitem__, value))
    raise ValueError(f"must be bytes of at most {MAX_TOKENS} provenance codes")


def _rule(value: object) -> str:
    """Looked up with each message: rules may be registered at any time."""
    name: str = _NAME.check(value)
    return find(name).name


def _stop(value: object) -> str:
    name: str = _NAME.check(value)
    check_stop(name)
    return name


def _parameters(value: object) -> Parameters:
    """Pairs (name, finite value); whether the rule or policy takes them is checked with the whole message."""
    if type(value) is not tuple or len(value) > MAX_PARAMETERS:
        raise ValueError(f"must be an array of at most {MAX_PARAMETERS} pairs (name, value)")
    for pair in value:
        if type(pair) is not tuple or len(pair) != 2:
            raise ValueError("must hold pairs (name, value)")
        _NAME.check(pair[0])
        _FINITE.check(pair[1])
    return value


def _pack_parameters(parameters: Parameters) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in parameters]


def _pack_rows(rows: Sequence[Distribution]) -> list[Any]:
    return [_pack_row(row) for row in rows]


def _pack_row(row: Distribution) -> Any:
    if row.form is Form.SPARSE:
        return row.data
    if row.form not in _ROW_CODES:
        raise ValueError("a distribution was not packed")
    return _ROW_CODES[row.form]


def _rows(value: object) -> tuple[Distribution, ...]:
    """The rows but for the raw frames of FRAME, which are no part of the packed header."""
    if type(value) is not tuple or len(value) > MAX_RUN:
        raise ValueError(f"must be an array of at most {MAX_RUN} rows")
    return tuple(map(_row, value))


def _row(entry: object) -> Distribution:
    if type(entry) is int and entry in _ROW_FORMS:
        return Distribution(None, _ROW_FORMS[entry])
    if type(entry) is not tuple or list(map(type, entry)) != [bytes, bytes]:
        raise ValueError("must hold 0, 1 or (ids, probs), both bytes")
    if len(entry[0]) != len(entry[1]) or len(entry[0]) % 4:
        raise ValueError("has ids and probs that are not of one length divisible by 4")
    return Distribution(entry, Form.SPARSE)


def _outcome(value: object) -> tuple[int, int]:
    if type(value) is tuple and len(value) == 2:
        return _POSITION.check(value[0]), _POSITION.check(value[1])
    raise ValueError("must be a pair (position, token)")


_PROVENANCES = codes(Provenance)
_PROVENANCE_CODES = {member: code for code, member in _PROVENANCES.items()}
_ROW_FORMS = {0: Form.FRAME, 1: Form.CHANNEL}
_ROW_CODES = {form: code for code, form in _ROW_FORMS.items()}

_COUNT = integer(0, 2**63)
_POSITION = integer(0, 2**31)
_WORD = integer(0, 2**64)
_VOCAB = integer(0, MAX_VOCAB + 1)
_GUESSES = integer(0, MAX_LOOK_AHEAD + 1)
_SECONDS = Kind(_seconds, float)
_TOKENS = token_list(MAX_TOKENS)
_RUN = token_list(MAX_RUN)
_EOS = token_list(MOST_EOS)
_NAME = sized(str, _MAX_NAME)
_FRAMED = sized(bytes, MAX_FRAME)
_TEXT = sized(str, _MAX_TEXT)
_CUT_TEXT = Kind(_TEXT.check, lambda text: text[: _MAX_TEXT // 4])  # a long error is cut, not lost
_FINITE = real(-sys.float_info.max, sys.float_info.max)
_RULE = Kind(_rule)
_STOP = Kind(_stop)
_PARAMETERS = Kind(_parameters, _pack_parameters)
_ERRORS = [
    name for name, value in vars(pearl.errors).items() if isinstance(value, type) and issubclass(value, PearlError)
]


_PENALTY = real(-MOST_PENALTY, MOST_PENALTY)
_SHAPING = nested(
    Shape(
        Shaping,
        prompt=_POSITION,
        repetition_penalty=real(LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY),
        presence_penalty=_PENALTY,
        frequency_penalty=_PENALTY,
        logit_bias=Kind(biases, pack_biases),
        grammar=sized(str, MAX_GRAMMAR),
        ends=_EOS,
    )
)
_SAMPLING = nested(
    Shape(
        Sampling,
        temperature=real(0.0, inf),
        top_k=_POSITION,
        top_p=real(0.0, 1.0, above=True),
        min_p=real(0.0, 1.0),
        seed=_WORD,
        sample=_COUNT,
        shaping=optional(_SHAPING),
    )
)
_DECODING = nested(
    Shape(
        Decoding,
        method=named(METHODS),
        window=named(WINDOWS),
        gamma=optional(integer(1, MAX_GAMMA + 1)),
        rule=_RULE,
        parameters=_PARAMETERS,
        look_ahead=_GUESSES,
        draft_lookup=_GUESSES,
        branches=integer(0, MAX_BRANCHES + 1),
        draft_stop=_STOP,
        stop_parameters=_PARAMETERS,
    )
)
_SHAPES: dict[int, Shape] = {
    1: Shape(
        Hello,
        version=integer(0, 2**16),
        role=member(Role),
        vocab_size=_VOCAB,
        context=_POSITION,
        vocab_digest=sized(bytes, _MAX_NAME),
    ),
    2: Shape(
        Welcome,
        version=integer(0, 2**16),
        vocab_size=_VOCAB,
        context=_POSITION,
        draft_context=_POSITION,
        t_draft=_SECONDS,
        t_target=array(Kind(_speed), MAX_RUN),
        window=_POSITION,
    ),
    3: Shape(
        Submit,
        request=_COUNT,
        prompt=_TOKENS,
        limit=_POSITION,
        sampling=_SAMPLING,
        decoding=_DECODING,
        eos=_EOS,
        stops=array(_TEXT, MAX_RUN),
        preview=Kind(flag),
        logprobs=optional(integer(0, MAX_LOGPROBS + 1)),
    ),
    4: Shape(
        Committed,
        request=_COUNT,
        start=_POSITION,
        tokens=_TOKENS,
        provenance=Kind(_provenance, lambda codes: bytes(map(_PROVENANCE_CODES.__getitem__, codes))),
        logprobs=Kind(lambda value: logprobs(_FRAMED.check(value)), pack_logprobs),
    ),
    5: Shape(Preview, request=_COUNT, start=_POSITION, tokens=_TOKENS),
    6: Shape(
        Finished,
        request=_COUNT,
        reason=member(FinishReason),
        statistics=sized(str, MAX_STATISTICS),
    ),
    7: Shape(
        Begin,
        request=_COUNT,
        epoch=_COUNT,
        tokens=_TOKENS,
        draft_until=_POSITION,
        sampling=_SAMPLING,
        rule=_RULE,
        digest=_WORD,
        parameters=_PARAMETERS,
        lookup=_GUESSES,
        branches=integer(0, MAX_BRANCHES + 1),
        bonus=Kind(flag),
        draft_stop=_STOP,
        stop_parameters=_PARAMETERS,
    ),
    8: Shape(
        DraftTokens,
        request=_COUNT,
        epoch=_COUNT,
        start=_POSITION,
        tokens=_RUN,
        seconds=_SECONDS,
        rows=Kind(_rows, _pack_rows),
        waited=_SECONDS,
        source=member(Source),
        after=optional(Kind(_outcome, list)),
        paused=Kind(flag),
        known=_POSITION,
    ),
    9: Shape(
        Verdict,
        request=_COUNT,
        epoch=_COUNT,
        start=_POSITION,
        tokens=_TOKENS,
        draft_until=_POSITION,
        digest=_WORD,
    ),
    10: Shape(Resync, request=_COUNT, epoch=_COUNT),
    11: Shape(Finish, request=_COUNT),
    12: Shape(Cancel, request=_COUNT),
    13: Shape(Heartbeat, step=_COUNT, work=_NAME, tokens=_COUNT, seconds=_SECONDS),
    14: Shape(Ping, sent=_COUNT),
    15: Shape(Pong, sent=_COUNT, received=_COUNT),
    16: Shape(Error, request=integer(-1, 2**63), kind=named(_ERRORS), message=_CUT_TEXT),
    17: Shape(Trace, number=_COUNT, on=Kind(flag)),
}
TYPE_CODES: dict[type, int] = {shape.cls: code for code, shape in _SHAPES.items()}
_OF_TARGET = {TYPE_CODES[kind] for kind in (Welcome, Committed, Preview, Finished, Begin, Verdict, Finish)}


class _Own(threading.local):
    """A packer for each thread: to make one for each message takes as long as to pack it."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer()


_own = _Own()


def encode(message: Message) -> list[bytes]:
    """The frames of `message`: a packed header and, for each row of form FRAME, one raw frame.

    Raises `LocalProtocolError` where it cannot be written or exceeds the limits of the wire. It does not look
    at ranges: what we made is in range, and the peer looks anyway.
    """
    code = TYPE_CODES.get(type(message))
    if code is None:
        raise LocalProtocolError(f"{type(message).__name__} is no message of the wire")
    try:
        frames = [_own.packer.pack([code, *_SHAPES[code].pack(message)])]
    except (ValueError, TypeError, OverflowError, KeyError, struct.error) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be written: {error}") from error
    if isinstance(message, DraftTokens):
        frames.extend(row.data for row in message.rows if row.form is Form.FRAME)
    if len(frames) > MAX_FRAMES or max(map(len, frames)) > MAX_FRAME:
        raise LocalProtocolError(
            f"{type(message).__name__} exceeds {MAX_FRAMES} frames of {MAX_FRAME} bytes: send it in parts"
        )
    return frames


def decode(frames: Sequence[Frame], to_target: bool = False) -> Message:
    """The message that `frames` hold. Raises `RemoteProtocolError`, and nothing else, whatever they hold.

    Args:
        to_target: they came to the target, so what only a target says is not looked into: texts may be long.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise RemoteProtocolError(f"a message of {len(frames)} frames; the wire allows 1 to {MAX_FRAMES}")
    for frame in frames:
        if (frame.nbytes if type(frame) is memoryview else len(frame)) > MAX_FRAME:
            raise RemoteProtocolError(f"a frame of more than {MAX_FRAME} bytes")
    values = _unpack(frames[0])
    shape = _SHAPES.get(values[0])
    if shape is None:
        raise RemoteProtocolError(f"unknown message type {values[0]}; is the peer a newer PEARL?")
    if to_target and values[0] in _OF_TARGET:
        raise RemoteProtocolError(f"target does not expect {shape.cls.__name__} from a peer")
    try:
        return _whole(shape.check(values[1:]), frames[1:])
    except ValueError as error:
        raise RemoteProtocolError(f"{error}{_version_hint(shape.cls, values)}") from None


def received(frames: Sequence[Frame], to_target: bool = False) -> Message | RemoteProtocolError:
    """As `decode`, with the error for a value: one bad message must not hide the good ones behind it."""
    try:
        return decode(frames, to_target)
    except RemoteProtocolError as error:
        return error


def _unpack(header: Frame) -> tuple[Any, ...]:
    packed = header if type(header) is bytes else bytes(header)
    try:
        if not is_plain(packed):
            check_extent(packed, MAX_RUN, _MAX_VALUES)
        values = msgpack.unpackb(packed, use_list=False, **_LIMITS)
    except ValueError as error:  # all of msgpack's own are ValueErrors, UnicodeDecodeError too
        raise RemoteProtocolError(f"a header that is no msgpack within limits: {error}") from None
    if type(values) is not tuple or not values or type(values[0]) is not int:
        raise RemoteProtocolError("a header that is no array beginning with a type code")
    return values


def _whole(message: Any, raw: Sequence[Frame]) -> Message:
    """Checks what concerns several fields, and puts raw frames into the rows that they belong to."""
    if type(message) is DraftTokens:
        return _with_rows(message, raw)
    if raw:
        raise ValueError(f"{type(message).__name__} came with {len(raw)} raw frames and has none")
    if type(message) is Committed and len(message.tokens) != len(message.provenance):
        raise ValueError("Committed has not one provenance a token")
    if type(message) is Committed and len(message.logprobs) not in (0, len(message.tokens)):
        raise ValueError("Committed.logprobs are not as many as its tokens")
    if type(message) is Submit:
        _check_parameters("Submit.decoding", "Submit.decoding", message.decoding)
    if type(message) is Begin:
        _check_parameters("Begin.parameters", "Begin.stop_parameters", message)
    return message


def _check_parameters(of_rule: str, of_stop: str, given: Decoding | Begin) -> None:
    """Raises ValueError, which begins with the field's name as it is given here."""
    field = of_rule
    try:
        find(given.rule).values(given.parameters)
        field = of_stop
        find_stop(given.draft_stop).values(given.stop_parameters)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _with_rows(message: DraftTokens, raw: Sequence[Frame]) -> DraftTokens:
    rows, tokens = message.rows, message.tokens
    if not tokens:  # a pause behind nothing would leave the target to verify nothing
        raise ValueError("DraftTokens.tokens is empty")
    if rows and len(rows) != len(tokens):
        raise ValueError(f"DraftTokens has {len(tokens)} tokens and {len(rows)} rows")
    if message.after is not None and message.after[0] >= message.start:
        raise ValueError(f"DraftTokens starts at {message.start} after an outcome at {message.after[0]}")
    if message.known > message.start:
        raise ValueError(f"DraftTokens.known: a prefix of {message.known} is told, and drafted from {message.start} on")
    announced = [row for row in rows if row.form is Form.FRAME]
    if len(announced) != len(raw):
        raise ValueError(f"DraftTokens announced {len(announced)} raw frames and came with {len(raw)}")
    if raw:
        sizes = set(map(len, raw))
        if len(sizes) > 1 or any(size % 4 or not size for size in sizes):
            raise ValueError("DraftTokens.rows has raw frames that are not float32 rows of one length")
        for row, frame in zip(announced, raw, strict=True):
            row.data = bytes(frame)
    return message


def _version_hint(kind: type, values: tuple[Any, ...]) -> str:
    """A Hello of another version may have other fields; its version stands first for ever, to be named."""
    if kind is Hello and len(values) > 1 and type(values[1]) is int and values[1] != PROTOCOL_VERSION:
        return f" (the peer speaks version {values[1]} of the wire, this side version {PROTOCOL_VERSION})"
    return ""
