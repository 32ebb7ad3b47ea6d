"""The codec alone: every type round-trips, every limit holds, and nothing that a peer can send does harm."""

from __future__ import annotations

import dataclasses
import struct
import time
import tracemalloc
import typing
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.decoding.distribution import Distribution, Form
from pearl.errors import LocalProtocolError, RemoteProtocolError
from pearl.protocol import messages as m
from pearl.protocol.window import METHODS, WINDOWS
from pearl.transport import codec, extent
from pearl.transport.codec import TYPE_CODES, decode, encode
from tests import lenient_rule

PINNED = {
    m.Hello: 1,
    m.Welcome: 2,
    m.Submit: 3,
    m.Committed: 4,
    m.Preview: 5,
    m.Finished: 6,
    m.Begin: 7,
    m.DraftTokens: 8,
    m.Verdict: 9,
    m.Resync: 10,
    m.Finish: 11,
    m.Cancel: 12,
    m.Heartbeat: 13,
    m.Ping: 14,
    m.Pong: 15,
    m.Error: 16,
    m.Trace: 17,
}

counts = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**31 - 1)
words = st.integers(0, 2**64 - 1)
tokens = st.lists(positions, max_size=5).map(tuple)
seconds = st.just(0.0) | st.floats(codec.LEAST_SECONDS, codec.MOST_SECONDS)
vocabs = st.integers(0, codec.MAX_VOCAB)
temperatures = st.floats(0, allow_infinity=False, allow_nan=False)
names = st.text(max_size=16)
samplings = st.builds(
    m.Sampling,
    temperatures,
    positions,
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
    words,
    counts,
    st.none()
    | st.builds(
        m.Shaping,
        positions,
        st.floats(0.01, 100),
        st.floats(-2, 2),
        st.floats(-2, 2),
        st.dictionaries(positions, st.floats(-100, 100), max_size=4).map(lambda biases: tuple(biases.items())),
    ),
)
epsilons = st.lists(st.tuples(st.just("epsilon"), st.floats(0, 1)), max_size=1).map(tuple)
rules = st.sampled_from(["ratio", "coupled"]).map(lambda name: (name, ())) | st.tuples(st.just("lenient"), epsilons)


confidences = st.lists(st.tuples(st.just("confidence"), st.floats(0, 1)), max_size=1).map(tuple)
stops = st.sampled_from(["fixed", "heuristic", "disco"]).map(lambda name: (name, ())) | st.tuples(
    st.just("threshold"), confidences
)
guesses = st.tuples(st.integers(0, 256), st.integers(0, 256))


@st.composite
def decodings(draw: st.DrawFn) -> m.Decoding:
    method, window = draw(st.sampled_from(sorted(METHODS))), draw(st.sampled_from(WINDOWS))
    gamma, branches = draw(st.none() | st.integers(1, 1024)), draw(st.integers(0, 64))
    return m.Decoding(method, window, gamma, *draw(rules), *draw(guesses), branches, *draw(stops))


@st.composite
def begins(draw: st.DrawFn) -> m.Begin:
    rule, parameters = draw(rules)
    start = (draw(counts), draw(counts), draw(tokens), draw(positions), draw(samplings))
    stop, of_stop = draw(stops)
    begin = m.Begin(*start, rule, draw(words), parameters, draw(guesses)[0])
    return dataclasses.replace(begin, bonus=draw(st.booleans()), draft_stop=stop, stop_parameters=of_stop)


cells = st.integers(1, 4).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n))


@st.composite
def committed(draw: st.DrawFn) -> m.Committed:
    run = draw(tokens)
    provenance = tuple(draw(st.sampled_from(m.Provenance)) for _ in run)
    logarithms = st.floats(-9999, 0, width=32)
    pairs = st.tuples(positions, logarithms)
    count = draw(st.integers(0, 20))
    told = st.builds(m.Logprobs, logarithms, st.lists(pairs, min_size=count, max_size=count).map(tuple))
    logprobs = tuple(draw(told) for _ in run) if draw(st.booleans()) else ()
    return m.Committed(draw(counts), draw(positions), run, provenance, logprobs)


@st.composite
def draft_tokens(draw: st.DrawFn) -> m.DraftTokens:
    run, width, start = draw(tokens.filter(bool)), 4 * draw(st.integers(1, 4)), draw(positions)
    cells = st.binary(min_size=width, max_size=width)
    row = st.one_of(
        st.builds(Distribution, st.tuples(cells, cells), st.just(Form.SPARSE)),
        st.builds(Distribution, cells, st.just(Form.FRAME)),
        st.builds(Distribution, st.none(), st.just(Form.CHANNEL)),
    )
    rows = tuple(draw(row) for _ in run) if draw(st.booleans()) else ()
    after = (start - 1, draw(positions)) if start and draw(st.booleans()) else None
    source, paused = draw(st.sampled_from(m.Source)), draw(st.booleans())
    ours = draw(counts), draw(counts), start, run, draw(seconds), rows, draw(seconds)
    return m.DraftTokens(*ours, source, after, paused)


BUILDERS: dict[type, st.SearchStrategy] = {
    m.Hello: st.builds(
        m.Hello,
        st.integers(0, 65535),
        st.sampled_from(m.Role),
        vocabs,
        positions,
        st.binary(max_size=64),
    ),
    m.Welcome: st.builds(
        m.Welcome,
        st.integers(0, 65535),
        vocabs,
        positions,
        positions,
        seconds,
        st.lists(st.tuples(counts, seconds), max_size=4).map(tuple),
        positions,
    ),
    m.Submit: st.builds(
        m.Submit,
        counts,
        tokens,
        positions,
        samplings,
        decodings(),
        tokens,
        st.lists(names, max_size=3).map(tuple),
        st.booleans(),
    ),
    m.Committed: committed(),
    m.Preview: st.builds(m.Preview, counts, positions, tokens),
    m.Finished: st.builds(m.Finished, counts, st.sampled_from(m.FinishReason), names),
    m.Begin: begins(),
    m.DraftTokens: draft_tokens(),
    m.Verdict: st.builds(m.Verdict, counts, counts, positions, tokens, positions, words),
    m.Resync: st.builds(m.Resync, counts, counts),
    m.Finish: st.builds(m.Finish, counts),
    m.Cancel: st.builds(m.Cancel, counts),
    m.Heartbeat: st.builds(m.Heartbeat, counts, names, counts, seconds),
    m.Ping: st.builds(m.Ping, counts),
    m.Pong: st.builds(m.Pong, counts, counts),
    m.Trace: st.builds(m.Trace, counts, st.booleans()),
    m.Error: st.builds(m.Error, st.integers(-1, 2**63 - 1), st.sampled_from(["TargetLost", "RequestError"]), names),
}
any_message = st.one_of(*BUILDERS.values())


@pytest.fixture(autouse=True, scope="module")
def lenient() -> Iterator[None]:
    """A rule that takes a parameter; hypothesis needs it for as long as the module's tests run."""
    with lenient_rule.registered():
        yield


HELLO = m.Hello(1, m.Role.DRAFT, 32000, 2048)
SUBMIT = m.Submit(1, (1, 2), 10, m.Sampling(), m.Decoding(), (2,), ("end",))
BEGIN = m.Begin(1, 0, (1, 2), 10, m.Sampling(), "ratio", 5)
DRAFT = m.DraftTokens(1, 0, 2, (7,), 0.5)
COMMITTED = m.Committed(1, 0, (4, 5), (m.Provenance.ACCEPTED, m.Provenance.BONUS))


def test_the_page_describes_the_version_that_is_spoken() -> None:
    page = Path(codec.__file__).with_name("WIRE.md").read_text()
    assert page.startswith(f"# The wire, version {m.PROTOCOL_VERSION}\n")


def test_every_message_has_a_pinned_code() -> None:
    """A new class without a code, or a renumbering that an older peer would misread."""
    assert set(TYPE_CODES) == set(typing.get_args(m.Message)) == set(BUILDERS)
    assert TYPE_CODES == PINNED
    assert len(set(TYPE_CODES.values())) == len(TYPE_CODES)


def test_enum_codes_are_pinned() -> None:
    """Enums travel by their order: reordering one would silently change the wire."""
    assert [e.name for e in m.Role] == ["FRONT", "TARGET", "DRAFT"]
    assert [e.name for e in m.Provenance] == ["ACCEPTED", "CORRECTED", "DIRECT", "BONUS", "GUESSED"]
    assert [e.name for e in m.FinishReason] == ["EOS", "STOP", "LENGTH", "CANCELLED"]
    assert [e.name for e in m.Source] == ["MODEL", "NGRAM", "DATASTORE", "BRANCH", "LOOKUP"]


def test_bytes_are_pinned() -> None:
    """A change of the format that both sides of this version agree on, and an older peer would not."""
    verdict = m.Verdict(1, 2, 3, (4, 5), 6, 2**64 - 1)
    assert encode(verdict) == [bytes.fromhex("97090102 03c40804000000 05000000 06cfffffffffffffffff")]


@pytest.mark.parametrize("kind", BUILDERS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(BUILDERS[kind])
    frames = encode(message)
    assert all(type(frame) is bytes for frame in frames)
    assert decode(frames) == message
    assert decode([memoryview(frame) for frame in frames]) == message


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_any_bytes_are_refused_or_read(frames: list[bytes]) -> None:
    _read_or_refuse(frames)


@settings(max_examples=300)
@given(any_message, st.data())
def test_a_damaged_message_is_refused_or_read(message: m.Message, data: st.DataObject) -> None:
    """Bytes changed, cut and inserted where a valid message was; frames lost and doubled."""
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(frames))
        at = data.draw(st.integers(0, len(frame)))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    frames = data.draw(st.sampled_from([frames, frames[1:], frames + frames[-1:]]))
    _read_or_refuse(frames)


plain = st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain, inner), max_leaves=4)


@settings(max_examples=200)
@given(st.integers(1, 16), st.lists(values, max_size=7))
def test_well_formed_msgpack_of_the_wrong_shape(code: int, fields: list[object]) -> None:
    """What passes the unpacker has to be stopped by the checks: any value in any field."""
    _read_or_refuse([msgpack.packb([code, *fields])])


def _read_or_refuse(frames: list) -> None:
    try:
        message = decode(frames)
    except RemoteProtocolError:
        return
    # What was let in must itself be sound: a second trip must take it as it is.
    assert decode(encode(message)) == message


def _with(message: m.Message, **changes: object) -> list[bytes]:
    """The frames of `message` with fields replaced by raw msgpack values, past every check of `encode`."""
    header = msgpack.unpackb(encode(message)[0])
    names = [field.name for field in dataclasses.fields(message)]
    for name, value in changes.items():
        header[1 + names.index(name)] = value
    return [msgpack.packb(header), *encode(message)[1:]]


def _ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


SHAPING = [2, 1.5, 0.5, -0.5, struct.pack("<id", 3, 1.0)]
SAMPLING = [0.5, 0, 1.0, 0.0, 0, 0, SHAPING]
DECODING = ["pearl", "stream", None, "ratio", [], 0, 0, 0, "fixed", []]
LENIENT = m.Begin(1, 0, (1, 2), 10, m.Sampling(), "lenient", 5, (("epsilon", 0.5),))

STOPPED = dataclasses.replace(BEGIN, draft_stop="threshold", stop_parameters=(("confidence", 0.5),))


def _swap(values: list, index: int, value: object) -> list:
    return [*values[:index], value, *values[index + 1 :]]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (m.Finish(1), {"request": True}),
        (m.Finish(1), {"request": -1}),
        (m.Finish(1), {"request": 2**63}),
        (m.Finish(1), {"request": 1.0}),
        (m.Error(-1, "TargetLost", ""), {"request": -2}),
        (m.Error(-1, "TargetLost", ""), {"kind": "OSError"}),
        (HELLO, {"role": 3}),
        (HELLO, {"role": False}),
        (HELLO, {"role": "draft"}),
        (HELLO, {"vocab_digest": b"x" * 65}),
        (SUBMIT, {"prompt": _ids(-1)}),
        (SUBMIT, {"prompt": b"\0\0\0"}),
        (SUBMIT, {"prompt": [1, 2]}),
        (SUBMIT, {"preview": 1}),
        (SUBMIT, {"logprobs": 21}),
        (SUBMIT, {"logprobs": -1}),
        (SUBMIT, {"stops": [b"end"]}),
        (SUBMIT, {"stops": "end"}),
        (SUBMIT, {"stops": ["x" * (2**16 + 1)]}),
        (SUBMIT, {"limit": 2**31}),
        *[
            (SUBMIT, {"sampling": _swap(SAMPLING, index, value)})
            for index, value in [
                (0, -0.1),
                (0, float("nan")),
                (0, float("inf")),
                (0, 1),
                (1, -1),
                (2, 0.0),
                (2, 1.1),
                (3, -0.1),
                (3, 1.1),
                (3, float("nan")),
                (4, -1),
                (5, True),
            ]
        ],
        (SUBMIT, {"sampling": SAMPLING[:-1]}),
        (SUBMIT, {"sampling": None}),
        *[
            (SUBMIT, {"decoding": _swap(DECODING, index, value)})
            for index, value in [
                (0, "beam"),
                (1, "slow"),
                (2, 0),
                (2, 1025),
                (2, True),
                (3, "any"),
                (3, None),
                (3, "x" * 65),
            ]
        ],
        *[
            (message, changes(values))
            for values in [
                None,
                [["epsilon", 0.5]] * 2,
                [["epsilon", 0.5]] * 9,
                [["epsilon"]],
                [["epsilon", 0.5, 0.5]],
                [["epsilon", 1]],
                [["epsilon", True]],
                [["epsilon", None]],
                [["epsilon", 1.01]],
                [["epsilon", -0.01]],
                [["epsilon", float("nan")]],
                [["epsilon", float("inf")]],
                [["epsilon", -float("inf")]],
                [[b"epsilon", 0.5]],
                [["x" * 65, 0.5]],
                [["delta", 0.5]],
            ]
            for message, changes in [
                (LENIENT, lambda values: {"parameters": values}),
                (
                    SUBMIT,
                    lambda values: {"decoding": ["pearl", "stream", None, "lenient", values, 0, 0, 0, "fixed", []]},
                ),
            ]
        ],
        (BEGIN, {"parameters": [["epsilon", 0.5]]}),
        (SUBMIT, {"decoding": _swap(DECODING, 4, [["epsilon", 0.5]])}),
        *[
            (SUBMIT, {"sampling": _swap(SAMPLING, 6, _swap(SHAPING, index, value))})
            for index, value in (
                (0, -1),
                (1, 0.0),
                (1, 101.0),
                (2, 2.5),
                (3, float("nan")),
                (4, b"1234"),
                (4, struct.pack("<id", -1, 1.0)),
                (4, struct.pack("<id", 1, 101.0)),
                (4, struct.pack("<id", 1, float("nan"))),
                (4, struct.pack("<id", 1, 1.0) * 2),
                (4, b"".join(struct.pack("<id", token, 1.0) for token in range(1025))),
            )
        ],
        (BEGIN, {"rule": "any"}),
        (BEGIN, {"rule": 1}),
        (BEGIN, {"digest": -1}),
        (DRAFT, {"seconds": float("nan")}),
        (DRAFT, {"seconds": float("inf")}),
        (DRAFT, {"seconds": -1.0}),
        (DRAFT, {"seconds": 5e-324}),
        (DRAFT, {"seconds": 1e308}),
        (DRAFT, {"waited": 1e10}),
        (HELLO, {"vocab_size": codec.MAX_VOCAB + 1}),
        (m.Heartbeat(1, "calibrated", 1, 0.1), {"seconds": 5e-324}),
        (DRAFT, {"tokens": _ids(*range(codec.MAX_RUN + 1))}),
        (DRAFT, {"tokens": b""}),
        (DRAFT, {"rows": [4, []]}),
        (DRAFT, {"rows": [True, []]}),
        (DRAFT, {"rows": [0, [[b"", b""]]]}),
        (DRAFT, {"rows": [1, []]}),
        (DRAFT, {"rows": [1, [[b"1234", b"12345678"]]]}),
        (DRAFT, {"rows": [1, [[b"123", b"123"]]]}),
        (DRAFT, {"rows": [1, [[b"1234", "1234"]]]}),
        (DRAFT, {"rows": [1, [[b"1234"]]]}),
        (DRAFT, {"rows": [1, [[b"1234", b"1234"]] * 2]}),
        (DRAFT, {"rows": [2, []]}),
        (DRAFT, {"known": DRAFT.start + 1}),
        (SUBMIT, {"decoding": DECODING[:-1]}),
        *[
            (SUBMIT, {"decoding": _swap(DECODING, index, value)})
            for index, value in [
                (5, 257),
                (6, -1),
                (7, 65),
                (8, "any"),
                (8, "oracle"),
                (8, None),
                (9, [["confidence", 0.5]]),
                (9, None),
            ]
        ],
        (BEGIN, {"draft_stop": "oracle"}),
        (BEGIN, {"stop_parameters": [["confidence", 0.5]]}),
        (STOPPED, {"stop_parameters": [["confidence", 1.5]]}),
        (STOPPED, {"stop_parameters": [["epsilon", 0.5]]}),
        (DRAFT, {"rows": [3, [b"1234"]]}),
        (COMMITTED, {"provenance": b"\0"}),
        (COMMITTED, {"provenance": b"\0\5"}),
        (m.Finished(1, m.FinishReason.EOS, ""), {"reason": 4}),
        (m.Heartbeat(1, "decode", 1), {"work": "x" * 65}),
        (m.Heartbeat(1, "decode", 1), {"work": "é" * 33}),
        (m.Heartbeat(1, "decode", 1), {"work": b"decode"}),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(message: m.Message, changes: dict[str, object]) -> None:
    """One wrong field in a message that is otherwise sound: its refusal says which."""
    assert decode(_with(message)) == message
    with pytest.raises(RemoteProtocolError, match=type(message).__name__) as caught:
        decode(_with(message, **changes))
    if not {"rows", "provenance"} & changes.keys():
        assert f"{type(message).__name__}.{next(iter(changes))}" in str(caught.value)


@pytest.mark.parametrize("raw", [[], [b"1234", b"1234"], [b"123"], [b""]], ids=["none", "many", "odd", "empty"])
def test_raw_frames_must_be_one_row_a_token(raw: list[bytes]) -> None:
    header = encode(dataclasses.replace(DRAFT, rows=(Distribution(b"1234", Form.FRAME),)))[0]
    assert decode([header, b"1234"]).rows == (Distribution(b"1234", Form.FRAME),)  # type: ignore[union-attr]
    with pytest.raises(RemoteProtocolError):
        decode([header, *raw])


def test_rows_of_one_message_have_one_length() -> None:
    message = dataclasses.replace(
        DRAFT, tokens=(1, 2), rows=(Distribution(b"1234", Form.FRAME), Distribution(b"5678", Form.FRAME))
    )
    frames = encode(message)
    assert decode(frames) == message
    with pytest.raises(RemoteProtocolError, match="one length"):
        decode([*frames[:2], b"12345678"])


@pytest.mark.parametrize("message", [m.Finish(1), DRAFT], ids=["finish", "draft without rows"])
def test_raw_frames_where_none_belong(message: m.Message) -> None:
    with pytest.raises(RemoteProtocolError, match="raw frames"):
        decode([*encode(message), b"1234"])


def test_the_largest_prompt_passes_and_one_more_token_is_refused() -> None:
    """Refused on both sides: the sender must learn it as its own mistake, not by being cut off."""
    message = dataclasses.replace(SUBMIT, prompt=(9,) * codec.MAX_TOKENS)
    assert decode(encode(message)) == message
    with pytest.raises(LocalProtocolError, match="at most"):
        encode(dataclasses.replace(message, prompt=(9,) * (codec.MAX_TOKENS + 1)))
    with pytest.raises(RemoteProtocolError, match=r"Submit\.prompt"):
        decode(_with(SUBMIT, prompt=bytes(4 * codec.MAX_TOKENS + 4)))


def test_statistics_are_limited() -> None:
    message = m.Finished(1, m.FinishReason.EOS, "x" * codec.MAX_STATISTICS)
    assert decode(encode(message)) == message
    with pytest.raises(RemoteProtocolError, match="max_str_len"):
        decode(_with(message, statistics="x" * (codec.MAX_STATISTICS + 1)))


def test_frames_are_limited_in_number_and_length() -> None:
    with pytest.raises(RemoteProtocolError, match="0 frames"):
        decode([])
    with pytest.raises(RemoteProtocolError, match="frames"):
        decode([*encode(DRAFT), *[b"1234"] * codec.MAX_RUN, b"1234"])
    with pytest.raises(RemoteProtocolError, match="bytes"):
        decode([bytes(codec.MAX_FRAME + 1)])
    row = bytes(codec.MAX_FRAME + 4)
    with pytest.raises(LocalProtocolError, match="exceeds"):
        encode(dataclasses.replace(DRAFT, rows=(Distribution(row, Form.FRAME),)))


@pytest.mark.parametrize(
    "message",
    [
        m.Finish(2**70),
        dataclasses.replace(SUBMIT, stops=("\ud800",)),
        dataclasses.replace(DRAFT, tokens=(2**31,)),
        m.Sampling(),
    ],
    ids=["too large", "half a surrogate", "no token", "no message"],
)
def test_our_own_mistakes_are_local_errors(message: m.Message) -> None:
    with pytest.raises(LocalProtocolError, match=r"cannot be written|no message"):
        encode(message)


def test_numbers_given_as_integers_travel_as_floats() -> None:
    """A caller's temperature=1 must not be refused by the peer for its type."""
    sampling = m.Sampling(temperature=1, top_p=1)
    assert decode(encode(dataclasses.replace(BEGIN, sampling=sampling))).sampling == sampling  # type: ignore[union-attr]


def test_an_error_too_long_to_send_is_cut() -> None:
    """A long traceback must not turn the report of an error into another error."""
    read = decode(encode(m.Error(-1, "ModelError", "é" * 10**6)))
    assert isinstance(read, m.Error)
    assert read.message.startswith("ééé")


def test_a_hello_of_another_version_is_named_as_such() -> None:
    """Its fields may differ, and `Hello has 5 fields, not 6` tells nobody to update."""
    with pytest.raises(RemoteProtocolError, match="version 999"):
        decode([msgpack.packb([1, 999, "something", "new"])])


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x10\x00\x00" * 1000,
        b"\xdd\x00\x00\x08\x00" * 1000,
        b"\xdd\x00\x00\x08\x00" * 2_000_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x92\x03\xdd\xff\xff\xff\xff",
    ],
    ids=["array", "nested large", "nested", "nested deep", "map", "bin", "str", "ext", "field"],
)
def test_a_hostile_header_costs_little_memory_and_time(header: bytes) -> None:
    """Four bytes that claim 2**32 - 1 elements, or claims nested a thousand deep, must not be believed.

    Time of this process, so that a busy machine does not count: a hundred times what any of these takes.
    """
    began = time.process_time()
    with pytest.raises(RemoteProtocolError):
        decode([header])
    assert time.process_time() - began < 5
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode([header])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


ROW = b"\x92\xc4\x04abcd\xc4\x04abcd"
COSTLY = {
    "nested in 3 KB": b"\xdc\x08\x00" * 1020 + b"\x01",
    "nested in a short header": b"\xdc\x08\x00" * 340,
    "nested, 32 bits": b"\xdd\x00\x00\x08\x00" * 1000,
    "nested small": b"\x9f" * 1024,
    "nested small, long": b"\x9f" * (1 << 20),
    "in a field": b"\x98\x08" + b"\xdc\x08\x00" * 1000,
    "in a run of rows": b"\x98\x08\x01\x01\x01\xc4\x00\xcb" + bytes(8) + b"\x92\x01" + b"\xdc\x08\x00" * 1000,
    "wide": b"\x98\x08" + (b"\xdc\x08\x00" + b"\x01" * 2048) * 2048,
    "wide and deep": (b"\xdc\x08\x00" + (b"\xdc\x08\x00" + b"\x01" * 2048) * 2047) * 2,
    "many small": b"\x98\x08" + b"\xdc\x08\x00" + (b"\x9f" + b"\x9f" * 15) * 2048,
    "long integers": b"\x9f" + b"\xcf" * (1 << 20),
    "announced bytes": b"\x9f" + b"\xc6\x00\xff\xff\xff" * 1000,
    "nested in a string": b"\x92\x03\xda\xff\xff" + b"\xdc\x08\x00" * 1000,
}


@pytest.mark.parametrize("header", COSTLY.values(), ids=COSTLY)
def test_a_header_is_refused_for_little_more_than_its_bytes_cost(header: bytes) -> None:
    """3 KB took 16 ms, for the unpacker makes room for an array where it sees its length. Medians, of CPU time."""

    def seconds(work: typing.Callable[[], object]) -> float:
        taken = []
        for _ in range(11):
            began = time.process_time()
            work()
            taken.append(time.process_time() - began)
        return sorted(taken)[5]

    largest = [
        msgpack.packb(
            [8, 1, 1, 1, bytes(4 * codec.MAX_RUN), 0.5, [[bytes(4)] * 2] * codec.MAX_RUN, 0.5, 0, None, False, 0]
        )
    ]
    assert isinstance(decode(largest), m.DraftTokens)
    assert isinstance(codec.received([header]), RemoteProtocolError)
    assert seconds(lambda: codec.received([header])) < 4 * seconds(lambda: decode(largest))


def test_what_the_wire_allows_passes_though_it_is_long() -> None:
    """The pass over the lengths must not refuse the largest of what is valid: rows, stop strings, speeds."""
    rows = (Distribution((b"\xdc\x08\x00\x00", b"\xdd\xdd\xdd\xdd"), Form.SPARSE),) * codec.MAX_RUN
    for message in (
        m.DraftTokens(1, 0, 2, (7,) * codec.MAX_RUN, 0.5, rows),
        dataclasses.replace(SUBMIT, stops=("\u0708" * 9,) * codec.MAX_RUN, prompt=(0xDC,) * 100_000),
        m.Welcome(2, 5, 5, 5, 0.5, tuple((2**40 + n, 0.5) for n in range(codec.MAX_RUN)), 4),
    ):
        assert decode(encode(message)) == message


@settings(max_examples=400)
@given(values, st.binary(max_size=3))
def test_the_pass_over_lengths_agrees_with_the_unpacker(value: object, after: bytes) -> None:
    """What it lets through is one whole value; what it refuses is none, has a map in it, or is nested too deep."""
    packed = msgpack.packb(value) + after
    try:
        read = msgpack.unpackb(packed, strict_map_key=False)
        whole, depth = True, _depth(read)
    except ValueError:
        whole, depth = False, 0
    try:
        extent.check_extent(packed, codec.MAX_RUN, 10_000)
        passed = True
    except ValueError:
        passed = False
    assert passed == (whole and depth <= extent.DEEPEST)


def _depth(value: object) -> int:
    """Of lists within each other; a map, which is never allowed, counts as too many."""
    if isinstance(value, dict):
        return 99
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=300)
@given(any_message)
def test_the_pass_over_lengths_refuses_no_message(message: m.Message) -> None:
    extent.check_extent(encode(message)[0], codec.MAX_RUN, codec._MAX_VALUES)


def test_a_sound_decoding_is_taken() -> None:
    """Whose fields are changed above one by one: it must be refused for these alone."""
    found = decode(_with(SUBMIT, decoding=DECODING))
    assert isinstance(found, m.Submit)
    assert found.decoding == m.Decoding()
    page = (Path(codec.__file__).parent / "WIRE.md").read_text(encoding="utf-8")
    assert page.startswith(f"# The wire, version {m.PROTOCOL_VERSION}\n")
