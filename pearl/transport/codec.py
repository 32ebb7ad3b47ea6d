"""Encodes messages as byte frames and decodes them; WIRE.md describes the format.

`decode` returns a message with every field in the range that `protocol.messages` declares, or raises
`RemoteProtocolError`. This module knows no sockets and no state: the state machines check whether a
message is allowed in the current state.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from pearl.config.records import MAX_TEXT
from pearl.decoding.distribution import AnnouncedRow, PackedRow
from pearl.errors import ConfigError, LocalProtocolError, RemoteProtocolError, error_named
from pearl.protocol.messages import (
    CHANNEL,
    FRAME,
    LEAST_SECONDS,
    MAX_FRAME,
    MAX_RUN,
    PROTOCOL_VERSION,
    Begin,
    Committed,
    DraftTokens,
    Error,
    Finish,
    Finished,
    Heartbeat,
    HiddenStates,
    Message,
    Outcomes,
    Preview,
    SparseRow,
    Verdict,
    Welcome,
    WireRow,
)

Frame = bytes | bytearray | memoryview

MAX_FRAMES = 1 + MAX_RUN
TYPE_CODES: dict[type, int] = {
    kind: int(str(kind.__struct_config__.tag)) for kind in Message.__subclasses__()
}
_OF_TARGET = (
    Welcome,
    Committed,
    Preview,
    Finished,
    Begin,
    Verdict,
    HiddenStates,
    Finish,
    Outcomes,
)


def _wire_row(row: object) -> WireRow:
    """Return the header's entry for a distribution.

    The entry is the distribution itself if it is sparse. Otherwise it is a marker that says whether
    the distribution is sent as a frame or over the tensor channel.
    """
    if isinstance(row, PackedRow):
        return FRAME if row.ids is None else SparseRow(row.ids, row.probs)
    if isinstance(row, AnnouncedRow):
        return CHANNEL
    raise TypeError("a distribution was not packed")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reduce(or_, TYPE_CODES))
# This decoder lacks the types that only targets send. So the target rejects them undecoded, because
# they may be very long.
_to_target: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    reduce(or_, [kind for kind in TYPE_CODES if kind not in _OF_TARGET])
)


def encode(message: Message) -> list[bytes]:
    """Return the frames of `message`: a msgpack header, then one raw frame per packed dense row.

    Raises `LocalProtocolError` if the message cannot be encoded or exceeds the wire's limits. Value ranges are checked
    only by `decode`.
    """
    name = type(message).__name__
    if type(message) not in TYPE_CODES:
        raise LocalProtocolError(f"{name} is no message of the wire")
    if isinstance(message, Error) and len(message.message) > MAX_TEXT // 4:
        # Truncate rather than fail.
        message = message.changed(message=message.message[: MAX_TEXT // 4])
    raw = []
    try:
        if isinstance(message, DraftTokens) and message.rows:
            for row in message.rows:
                if isinstance(row, PackedRow) and row.ids is None:
                    raw.append(row.probs)
            message = message.changed(rows=tuple(map(_wire_row, message.rows)))
        frames = [_encoder.encode(message), *raw]
    except (ValueError, TypeError, AttributeError, OverflowError, msgspec.MsgspecError) as error:
        raise LocalProtocolError(f"{name} cannot be written: {error}") from error
    if len(frames) > MAX_FRAMES or max(map(len, frames)) > MAX_FRAME:
        raise LocalProtocolError(
            f"{name} exceeds {MAX_FRAMES} frames of {MAX_FRAME} bytes: send it in parts"
        )
    return frames


def decode(frames: Sequence[Frame], to_target: bool = False) -> Message:
    """Decode untrusted frames. Raises `RemoteProtocolError` for anything invalid, and no other exception.

    Args:
        to_target: whether the target is the receiver; messages that only targets send are then refused.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise RemoteProtocolError(
            f"a message of {len(frames)} frames; the wire allows 1 to {MAX_FRAMES}"
        )
    for frame in frames:
        size = frame.nbytes if type(frame) is memoryview else len(frame)
        if size > MAX_FRAME:
            raise RemoteProtocolError(f"a frame of more than {MAX_FRAME} bytes")
    decoder = _to_target if to_target else _decoder
    try:
        message: Message = decoder.decode(frames[0])
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        code = bytes(frames[0][1:2]).hex()
        raise RemoteProtocolError(
            f"no message that version {PROTOCOL_VERSION} of the wire has for this side (type code "
            f"{code}): {error}"
        ) from None
    for problem in _problems(message, frames[1:]):
        raise RemoteProtocolError(f"{type(message).__name__} {problem}")
    if isinstance(message, DraftTokens) and message.rows:
        return _with_rows(message, frames[1:])
    return message


def received(frames: Sequence[Frame], to_target: bool = False) -> Message | RemoteProtocolError:
    """Decode frames as `decode` does, but return the error instead of raising it.

    So the other messages of a batch are still read.
    """
    try:
        return decode(frames, to_target)
    except RemoteProtocolError as error:
        return error


def _problems(message: Message, raw: Sequence[Frame]) -> Iterator[str]:
    """Yield what is wrong with the combination of fields. Each field was found valid by itself."""
    seconds = []
    match message:
        case DraftTokens():
            yield from _row_problems(message, raw)
            seconds = [message.seconds, message.waited]
        case Welcome():
            seconds = [message.t_draft]
            for _, t_target in message.t_target:
                seconds.append(t_target)
        case Heartbeat():
            seconds = [message.seconds]
        case Error(_, kind) if error_named(kind).__name__ != kind:
            yield f"names no error of this version: {kind!r}"
        case Committed():
            if len(message.tokens) != len(message.provenance):
                yield "needs one provenance per token"
            if len(message.details) not in (0, len(message.tokens)):
                yield "needs details of each token, or none"
    if any(0 < duration < LEAST_SECONDS for duration in seconds):
        yield f"has a time below {LEAST_SECONDS} s"
    if raw and not isinstance(message, DraftTokens):
        yield f"came with {len(raw)} raw frames; this type takes none"


def _row_problems(message: DraftTokens, raw: Sequence[Frame]) -> Iterator[str]:
    rows = message.rows
    tokens = message.tokens
    if not tokens and (not message.paused or message.after is not None):
        yield "has no tokens"
    if rows and len(rows) != len(tokens):
        yield f"has {len(tokens)} tokens and {len(rows)} rows"
    if message.runners_up and len(message.runners_up) != len(tokens):
        yield f"has {len(tokens)} tokens, and runners-up of {len(message.runners_up)}"
    if message.after is not None and message.after[0] >= message.start:
        yield f"starts at {message.start} after an outcome at {message.after[0]}"
    if message.known > message.start:
        yield (
            f"starts at {message.start}, before the end of its known prefix of {message.known} "
            "tokens"
        )
    if rows.count(FRAME) != len(raw):
        yield f"announced {rows.count(FRAME)} raw frames and came with {len(raw)}"
    sizes = set(map(len, raw))
    if len(sizes) > 1 or any(size % 4 or not size for size in sizes):
        yield "has raw frames that are not float32 rows of one length"
    for row in rows:
        is_sparse = isinstance(row, SparseRow)
        if row is None or (is_sparse and (len(row.ids) != len(row.probs) or len(row.ids) % 4)):
            yield (
                "has sparse rows whose ids and probabilities are not of one length (in bytes, "
                "divisible by 4)"
            )


def _with_rows(message: DraftTokens, raw: Sequence[Frame]) -> DraftTokens:
    frames = iter(raw)
    rows: list[Any] = []
    for row in message.rows:
        if isinstance(row, SparseRow):
            rows.append(PackedRow(row.probs, row.ids))
        elif row == FRAME:
            rows.append(PackedRow(bytes(next(frames))))
        else:
            rows.append(AnnouncedRow())
    return message.changed(rows=tuple(rows))
