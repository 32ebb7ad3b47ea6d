"""The codec alone: every type round-trips, every limit holds, and nothing that a peer can send does harm."""

import time
import tracemalloc
import typing
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from pearl.config.options import Reasoning
from pearl.decoding.distribution import PackedRow
from pearl.errors import LocalProtocolError, RemoteProtocolError
from pearl.protocol import messages as m
from pearl.protocol.acceptance_estimates import Seen
from pearl.transport import codec
from pearl.transport.codec import TYPE_CODES, decode, encode
from tests.options import drawn_by, resolved, shaped, unchecked
from tests.replace import replace
from tests.wire import bad_values, good_values, placed, places

# Their codes are 1, 2, ...
PINNED = (
    *(
        m.Hello,
        m.Welcome,
        m.Submit,
        m.Committed,
        m.Preview,
        m.Finished,
        m.Begin,
        m.DraftTokens,
        m.Verdict,
        m.Resync,
    ),
    *(m.Finish, m.Cancel, m.Heartbeat, m.Ping, m.Pong, m.Error, m.Trace, m.HiddenStates),
    m.Outcomes,
)
SOURCES = [
    "model",
    "n-gram",
    "datastore",
    "branch",
    "lookup",
    "runner-up",
    "head",
    "jacobi",
    "prediction",
]


HELLO = m.Hello(1, m.Role.DRAFT, 32000, 2048)
SUBMIT = m.Submit(1, (1, 2), 10, resolved(stop=("end",)), eos=(2,))
BEGIN = m.Begin(1, 0, (1, 2), 10, 5, resolved(sampling=drawn_by()))
DRAFT = m.DraftTokens(1, 0, 2, (7,), 0.5)
COMMITTED = m.Committed(1, 0, (4, 5), (m.Provenance.ACCEPTED, m.Provenance.BONUS))


def test_the_page_describes_the_version_that_is_spoken() -> None:
    page = Path(codec.__file__).with_name("WIRE.md").read_text()
    assert page.startswith(f"# The wire, version {m.PROTOCOL_VERSION}\n")


def test_every_message_has_a_pinned_code() -> None:
    """A new class without a code, or a renumbering that an older peer would misread."""
    assert set(TYPE_CODES) == {type(message) for message in EXAMPLES}
    assert {kind: code for code, kind in enumerate(PINNED, 1)} == TYPE_CODES


def test_enum_values_are_pinned() -> None:
    """Enums travel by their values: renaming one would silently change the wire."""
    assert [e.value for e in m.Role] == ["front", "target", "draft"]
    assert [e.value for e in m.Provenance] == [
        "accepted",
        "corrected",
        "direct",
        "bonus",
        "guessed",
    ]
    assert [e.value for e in m.FinishReason] == ["eos", "stop", "length", "cancelled"]
    assert [e.value for e in m.Source] == SOURCES


def test_bytes_are_pinned() -> None:
    """A change of the format that both sides of this version agree on, and an older peer would not."""
    verdict = m.Verdict(1, 2, 3, (4, 5), 6, 2**64 - 1)
    assert encode(verdict) == [bytes.fromhex("97090102 03920405 06cfffffffffffffffff")]


FULL = resolved(
    gamma=4,
    rule="opt",
    parameters=(("epsilon", 0.5),),
    draft_stop="threshold",
    stop_parameters=(("confidence", 0.5),),
    sampling=drawn_by(1.0, shaping=shaped(2, logit_bias=((3, 1.0),), grammar_ends=(2,))),
    stop=("end",),
    logprobs=1,
    predicted=(4, 5),
    reasoning=Reasoning("<think>", 7, ("</think>",), (8,), True),
)
EXAMPLES = (
    HELLO,
    m.Welcome(1, 5, 5, 5, 0.5, ((1, 0.5),), 4),
    m.Submit(1, (1, 2), 10, FULL, (2,)),
    replace(COMMITTED, details=(m.TokenDetails(-1.0, ((5, -1.0),)),) * 2),
    m.Preview(1, 0, (4,)),
    m.Finished(1, m.FinishReason.EOS, "{}"),
    m.Begin(1, 0, (1, 2), 10, 5, FULL),
    replace(
        DRAFT,
        rows=(PackedRow(bytes(4), ids=bytes(4)),),
        after=(1, 5),
        runners_up=(Seen(7, (3, 4)),),
    ),
    m.Verdict(1, 0, 1, (4,), 6, 7),
    m.Resync(1, 0),
    m.Finish(1),
    m.Cancel(1),
    m.Heartbeat(1, "decode", 1, 0.5),
    m.Ping(1),
    m.Pong(1, 2),
    m.Trace(1, True),
    m.HiddenStates(1, 4, bytes(12)),
    m.Outcomes((m.Finish(2),), (BEGIN,), (m.Verdict(1, 0, 1, (4,), 6, 7),)),
    m.Error(-1, "TargetLost", ""),
)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: m.Message) -> None:
    """As it is, and with each value in turn at the ends of its range, where the others allow that."""
    assert decode(encode(message)) == message
    tried = 0
    for path, kind in places(inspect.type_info(type(message))):
        for frames in filter(
            None, (placed(message, path, value) for value in good_values(kind) if path)
        ):
            if not isinstance(found := codec.received(frames), RemoteProtocolError):
                again = encode(found)
                assert all(type(frame) is bytes for frame in again)
                assert decode([memoryview(frame) for frame in again]) == found
                tried += 1
    assert tried >= len(type(message).__struct_fields__)


@settings(max_examples=300)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_message_is_refused_or_read(message: m.Message, data: st.DataObject) -> None:
    """Bytes changed, cut and inserted where a valid message was; frames lost and doubled."""
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(frames))
        at = data.draw(st.integers(0, len(frame)))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    read = codec.received(data.draw(st.sampled_from([frames, frames[1:], frames + frames[-1:]])))
    # What was let in must itself be sound: a second trip must take it as it is.
    assert isinstance(read, RemoteProtocolError) or decode(encode(read)) == read


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_field_out_of_range_is_refused(message: m.Message) -> None:
    """Each value of a message in turn, at any depth, is one that its type does not allow."""
    tried = 0
    for path, kind in places(inspect.type_info(type(message))):
        for value in bad_values(kind) if path else ():
            if (frames := placed(message, path, value)) is not None:
                with pytest.raises(RemoteProtocolError):
                    decode(frames)
                tried += 1
    assert tried >= 5 * len(type(message).__struct_fields__)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        *(
            (kind(*before, unchecked(FULL, **changes)), problem)
            for kind, before in ((m.Submit, (1, (1,), 9)), (m.Begin, (1, 0, (1,), 9, 5)))
            for changes, problem in (
                ({"method": "beam"}, "method"),
                ({"window": "slow"}, "window"),
                ({"rule": "any"}, "rule"),
                ({"parameters": (("epsilon", 1.01),)}, "epsilon"),
                ({"parameters": (("epsilon", 0.5),) * 2}, "twice"),
                ({"parameters": (("delta", 0.5),)}, "delta"),
                ({"draft_stop": "any"}, "stop policy"),
                ({"draft_stop": "fixed"}, "confidence"),
                ({"stop_parameters": (("confidence", 1.5),)}, "confidence"),
                ({"method": "ssd"}, "draft_stop"),
                ({"stop": ("",)}, "stop string"),
                ({"temperature": 1e-5}, "temperature"),
                ({"logit_bias": ((3, 1.0), (3, 2.0))}, "twice"),
            )
        ),
        (m.Error(-1, "OSError", ""), "OSError"),
        (replace(DRAFT, seconds=5e-324), "time"),
        (replace(DRAFT, waited=5e-324), "time"),
        (m.Heartbeat(1, "calibrated", 1, 5e-324), "time"),
        (m.Welcome(1, 5, 5, 5, 0.5, ((1, 1e-13),), 4), "time"),
        (replace(DRAFT, tokens=()), "no tokens"),
        (replace(DRAFT, known=3), "known prefix"),
        (replace(DRAFT, after=(2, 5)), "outcome"),
        (replace(DRAFT, rows=(PackedRow(bytes(4), ids=bytes(4)),) * 2), "2 rows"),
        (replace(DRAFT, rows=(PackedRow(bytes(8), ids=bytes(4)),)), "one length"),
        (replace(DRAFT, rows=(PackedRow(bytes(3), ids=bytes(3)),)), "one length"),
        (replace(COMMITTED, provenance=COMMITTED.provenance[:1]), "provenance"),
        (replace(COMMITTED, details=(m.TokenDetails(-1.0),)), "details of each token"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(message: m.Message, wrong: str) -> None:
    with pytest.raises(RemoteProtocolError, match=wrong):
        decode(encode(message))


def test_raw_frames_are_one_row_a_token_of_one_length() -> None:
    row = PackedRow(b"1234")
    header = encode(replace(DRAFT, rows=(row,)))[0]
    assert decode([header, b"1234"]).rows == (row,)  # type: ignore[union-attr]
    for raw in ([], [b"1234", b"1234"], [b"123"], [b""]):
        with pytest.raises(RemoteProtocolError):
            decode([header, *raw])
    two = encode(replace(DRAFT, tokens=(1, 2), rows=(row, PackedRow(b"5678"))))
    assert decode(two) == replace(DRAFT, tokens=(1, 2), rows=(row, PackedRow(b"5678")))
    with pytest.raises(RemoteProtocolError, match="one length"):
        decode([*two[:2], b"12345678"])
    for message in (m.Finish(1), DRAFT):
        with pytest.raises(RemoteProtocolError, match="raw frames"):
            decode([*encode(message), b"1234"])


def test_the_largest_message_passes_and_more_is_refused() -> None:
    prompt, statistics = replace(SUBMIT, prompt=(9,) * m.MAX_TOKENS), "x" * m.MAX_STATISTICS
    finished = m.Finished(1, m.FinishReason.EOS, statistics)
    rows = (PackedRow(b"\xdd\xdd\xdd\xdd", ids=b"\xdc\x08\x00\x00"),) * m.MAX_RUN
    for message in (
        prompt,
        finished,
        m.DraftTokens(1, 0, 2, (7,) * m.MAX_RUN, 0.5, rows),
        replace(SUBMIT, options=resolved(stop=("\u0708" * 9,) * 64), prompt=(0xDC,) * 100_000),
        m.Welcome(2, 5, 5, 5, 0.5, tuple((2**40 + n, 0.5) for n in range(m.MAX_RUN)), 4),
    ):
        assert decode(encode(message)) == message
    for larger in (
        replace(prompt, prompt=(9,) * (m.MAX_TOKENS + 1)),
        replace(finished, statistics=statistics + "x"),
    ):
        with pytest.raises(RemoteProtocolError, match="length"):
            decode(encode(larger))


def test_frames_are_limited_in_number_and_length() -> None:
    many = [*encode(DRAFT), *[b"1234"] * (m.MAX_RUN + 1)]
    for frames, problem in (
        ([], "0 frames"),
        (many, "frames"),
        ([bytes(m.MAX_FRAME + 1)], "bytes"),
    ):
        with pytest.raises(RemoteProtocolError, match=problem):
            decode(frames)
    with pytest.raises(LocalProtocolError, match="exceeds"):
        encode(replace(DRAFT, rows=(PackedRow(bytes(m.MAX_FRAME + 4)),)))


@pytest.mark.parametrize(
    "message",
    [m.Finish(2**70), replace(SUBMIT, options=unchecked(resolved(), stop=("\ud800",))), drawn_by()],
    ids=["too large", "half a surrogate", "no message"],
)
def test_our_own_mistakes_are_local_errors(message: m.Message) -> None:
    with pytest.raises(LocalProtocolError, match=r"cannot be written|no message"):
        encode(message)


def test_numbers_given_as_integers_travel_as_floats() -> None:
    """A caller's temperature=1 must not be refused by the peer for its type."""
    sampling = drawn_by(temperature=1, top_p=1)
    assert decode(encode(replace(BEGIN, options=resolved(sampling=sampling)))).options == resolved(
        sampling=sampling
    )  # type: ignore[union-attr]


def test_an_error_too_long_to_send_is_cut() -> None:
    """A long traceback must not turn the report of an error into another error."""
    read = decode(encode(m.Error(-1, "ModelError", "é" * 10**6)))
    assert isinstance(read, m.Error)
    assert read.message.startswith("ééé")


def test_what_another_version_sends_is_refused_with_ours() -> None:
    """`meet` refuses a Hello of the same shape, and names both versions."""
    with pytest.raises(RemoteProtocolError, match=f"version {m.PROTOCOL_VERSION} of the wire"):
        decode([msgpack.packb([1, 999, "something", "new"])])


HOSTILE = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "bin": b"\xc6\xff\xff\xff\xff",
    "str": b"\xdb\xff\xff\xff\xff",
    "ext": b"\xc9\xff\xff\xff\xff\x01",
    "prompt": b"\x98\x03\x01\xdd\xff\xff\xff\xff",
    "nested": b"\xdd\x00\x00\x08\x00" * 1000,
    "nested deep": b"\xdd\x00\x00\x08\x00" * 2_000_000,
    "nested small": b"\x9f" * (1 << 20),
    "nested in a field": b"\x98\x08" + b"\xdc\x08\x00" * 1000,
    "nested in a run of rows": b"\x98\x08\x01\x01\x01\xc4\x00\xcb"
    + bytes(8)
    + b"\x92\x01"
    + b"\xdc\x08\x00" * 1000,
    "nested in a string": b"\x92\x03\xda\xff\xff" + b"\xdc\x08\x00" * 1000,
    "wide": b"\x98\x08" + (b"\xdc\x08\x00" + b"\x01" * 2048) * 2048,
    "wide and deep": (b"\xdc\x08\x00" + (b"\xdc\x08\x00" + b"\x01" * 2048) * 2047) * 2,
    "long integers": b"\x9f" + b"\xcf" * (1 << 20),
    "announced bytes": b"\x9f" + b"\xc6\x00\xff\xff\xff" * 1000,
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_costs_little_memory_and_time(header: bytes) -> None:
    """Four bytes that claim 2**32 - 1 elements, or claims nested a thousand deep, must not be believed.

    Medians of CPU time: beside the largest message that is valid.
    """

    def seconds(work: typing.Callable[[], object]) -> float:
        taken = []
        for _ in range(11):
            began = time.process_time()
            work()
            taken.append(time.process_time() - began)
        return sorted(taken)[5]

    largest = [
        msgpack.packb(
            [
                8,
                1,
                1,
                1,
                [1] * m.MAX_RUN,
                0.5,
                [[bytes(4)] * 2] * m.MAX_RUN,
                0.5,
                "model",
                None,
                False,
                0,
            ]
        )
    ]
    assert isinstance(decode(largest), m.DraftTokens)
    assert seconds(lambda: codec.received([header])) < 4 * seconds(lambda: decode(largest))
    tracemalloc.start()
    try:
        assert isinstance(codec.received([header]), RemoteProtocolError)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
