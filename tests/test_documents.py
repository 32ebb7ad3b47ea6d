"""Files that somebody else has written, at their worst: one line, and exit code 2; 4 where output is lost."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.cli import cli
from pearl.config import load_settings
from pearl.document import parse_json, parse_yaml
from pearl.errors import ConfigError, PearlError, TraceError
from pearl.trace.chrome import merge
from pearl.trace.recorder import FORMAT, part_path, part_paths

DEEP = 200_000
DIGITS = "9" * 5000
SOUND = {
    "traceEvents": [],
    "distributedInfo": {"rank": 0},
    "metadata": {"pearl_trace": 10, "config": {}, "workers": []},
}
COMMANDS = ("report", f"show --png {os.devnull}")


def trace_of(*events: object, **metadata: object) -> str:
    return json.dumps(
        {**SOUND, "traceEvents": events, "metadata": {**SOUND["metadata"], **metadata}}
    )


def event(**changes: object) -> dict[str, object]:
    return {
        "ph": "X",
        "name": "decide",
        "cat": "busy",
        "pid": 1,
        "tid": 1,
        "ts": 0,
        "dur": 1,
        "args": {},
    } | changes


NAMES = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {}},
]
WHOLE = [
    event(ph=phase, cat="whole", name="request 1", id=1, ts=ts)
    for phase, ts in (("b", 0), ("e", 5))
]
TRACES = {
    "nested arrays": "[" * DEEP,
    "nested in a trace": '{"traceEvents": ' + "[" * DEEP + "]" * DEEP + "}",
    "nested objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "a long integer": '{"traceEvents": [' + DIGITS + "]}",
    "a long integer in a time": trace_of(event()).replace('"ts": 0', '"ts": ' + DIGITS),
    "an infinite time": trace_of(event()).replace('"ts": 0', '"ts": 1e999'),
    "a name that is none": trace_of({"ph": "M", "name": 5, "pid": 1, "args": {}}),
    "a counter of text": trace_of({"ph": "C", "name": "window", "pid": 1, "ts": 0, "args": {}}),
    "a counter without arguments": trace_of(
        {"ph": "C", "name": "window", "pid": 1, "ts": 0, "args": 5}
    ),
    "metadata of text": '{"traceEvents": [], "metadata": {"pearl_trace": 10, "config": 1, "workers": 1}}',
    "rank of text": '{"traceEvents": [], "distributedInfo": 5, "metadata": {"pearl_trace": 10}}',
    "half a surrogate": trace_of(*NAMES, event(name="\\ud800"), *WHOLE),
}


def refusal(*arguments: str) -> PearlError | None:
    """The error of a command on a file; None where it finds nothing wrong. An exception of any other kind fails."""
    result = CliRunner().invoke(cli, list(arguments))
    if result.exception is None or isinstance(result.exception, SystemExit):
        return None
    if not isinstance(result.exception, PearlError):
        raise result.exception
    assert result.exception.exit_code == 2
    return result.exception


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_trace_is_one_line(tmp_path: Path, command: str) -> None:
    path = tmp_path / "t.json"
    for content in TRACES.values():
        path.write_text(content, encoding="utf-8")
        error = refusal("trace", *command.split(), str(path))
        assert error is None or (str(path) in str(error) and len(str(error)) < 1000)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ("ph", "name", "cat", "pid", "tid", "ts", "dur", "args")


@settings(max_examples=100)
@given(st.sampled_from(FIELDS), json_values, st.sampled_from(COMMANDS[:2]))
def test_any_value_in_any_field_of_a_trace(field: str, value: object, command: str) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"pearl-test-{os.getpid()}.json"
    path.write_text(
        trace_of(*NAMES, event(**{field: value}), WHOLE), encoding="utf-8", errors="replace"
    )
    try:
        refusal("trace", *command.split(), str(path))
    finally:
        path.unlink()


# ---- parts ----

HEADER = {
    "role": "target",
    "run": "r",
    "pid": 1,
    "host": "h",
    "machine": "m",
    "boot": "b",
    "opened": 1,
}
HEADER |= {"config": {"tensors": "auto"}, "versions": {}}
DECISION = {"event": {"type": "Forwarded"}, "commands": []}
RECORD = ["record", 1, "busy", "decide", 1, 2, DECISION]


def part_of(*items: object, **header: object) -> bytes:
    return b"".join(
        json.dumps(item).encode() + b"\n"
        for item in [["pearl-trace", FORMAT, HEADER | header], *items]
    )


def parts() -> Iterator[bytes]:
    """Each field of the header, of a record and of what it tells, in turn, is something else; and other damage."""
    for bad in ("x", [], {}, None, -1, 1e999):
        yield from (part_of(**{name: bad}) for name in HEADER)
        yield from (
            part_of([*RECORD[:place], bad, *RECORD[place + 1 :]]) for place in range(len(RECORD))
        )
        yield from (part_of([*RECORD[:6], DECISION | {name: bad}]) for name in DECISION)
        judged = {"accepted": bad, "correction": 1, "start": 1}
        yield part_of(["record", 1, "busy", "judge", 1, 2, judged])
        yield part_of(["record", 1, "communication", "send", 1, 2, bad])
        yield json.dumps(["pearl-trace", FORMAT, bad]).encode() + b"\n"
        yield json.dumps(["pearl-trace", bad, HEADER]).encode() + b"\n"
    yield from (
        b"",
        b"\xc1\n",
        b"5\n",
        part_of(5),
        part_of([]),
        part_of(RECORD[:4]),
        part_of(RECORD, ["end"]),
    )
    yield part_of(RECORD).replace(b" 2,", b" " + DIGITS.encode() + b",")
    yield part_of() + b'["record",1,"\\ud800","x",1,2,{}]\n'
    yield part_of() + b"[" * DEEP + b"\n"
    yield part_of() + b'["record",1,"busy","x",1,2,{"a":' + b"[" * DEEP + b"\n"


def test_a_hostile_part_is_one_line(tmp_path: Path) -> None:
    """And it is left where it is; nothing half made stands in the place of the trace."""
    path = tmp_path / "t.json"
    part = part_path(path, "target", 1)
    for content in parts():
        part.write_bytes(content)
        error = refusal("trace", "merge", str(path))
        if error is None:
            json.loads(path.read_text())
        else:
            assert str(path) in str(error), content[:300]
            assert [each.name for each in tmp_path.iterdir()] == [part.name], content[:300]
        path.unlink(missing_ok=True)


def test_what_is_no_file_is_no_part(tmp_path: Path) -> None:
    """A pipe would be waited for for ever."""
    path = tmp_path / "t.json"
    os.mkfifo(part_path(path, "target", 1))
    part_path(path, "draft", 2).mkdir()
    assert part_paths(path) == []
    with pytest.raises(TraceError, match="nothing to make"):
        merge(path)


# ---- YAML ----

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
YAMLS = {
    "an alias bomb": BOMB,
    "a tag": "target: !!python/object/apply:os.system [ls]\n",
    "no date": "slots: 2020-13-45\n",
    "a long integer": f"slots: {DIGITS}\n",
    "nested": "target: " + "[" * DEEP,
    "several documents": "target: embedded\n---\ntarget: embedded\n",
    "too long": "target: " + "x" * 2_000_000,
    "control characters": "target: \x00\x1b[2J\n",
    **{
        f"a device {name}": f"target_device: {name}\n"  # a list of all its cores took all memory
        for name in (
            "cpu:0-1000000000000",
            "cuda:0-1000000000000",
            "cpu:0-4095,0-4095",
            "cpu:0-4000",
        )
    },
    "a device of a long number": f"target_device: cpu:{DIGITS}\n",
}


def test_hostile_yaml_is_one_line_and_soon(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for content in YAMLS.values():
        path.write_text(content)
        began = time.process_time()
        with pytest.raises(ConfigError) as caught:
            load_settings(path, {})
        assert time.process_time() - began < 2
        words = str(caught.value)
        assert len(words) < 1000
        assert "\n" not in words
        assert str(path) in words


def test_plain_yaml_is_read() -> None:
    text = "b: 5\nc: 0.5\nd: true\ne: null\nf: [1, x]\ng: '5'\nh: {i: 1e-3}\n"
    values = {"b": 5, "c": 0.5, "d": True, "e": None, "f": [1, "x"], "g": "5", "h": {"i": "1e-3"}}
    assert parse_yaml(text) == values


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_text_is_yaml_or_one_error(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        with contextlib.suppress(ValueError):
            parse(text)


# ---- output ----


@pytest.mark.parametrize(
    ("arguments", "redirected", "code", "words"),
    [
        ("--version", ">/dev/full", 4, "output is lost: No space left on device"),
        ("trace --help", ">&-", 4, "output is lost: standard output is closed"),
        ("trace --help", ">/dev/full <&-", 4, "output is lost"),
        ("--version", ">&- 2>&-", 4, ""),  # the exit code is all that can be seen
        ("--version", ">/dev/full 2>/dev/full", 4, ""),
        ("--version", "<&- >&- 2>&-", 4, ""),
        ("trace report /nonexistent", ">&-", 2, "does not exist"),
    ],
)
def test_output_that_is_lost_is_an_error(
    arguments: str, redirected: str, code: int, words: str
) -> None:
    """An error of the command's own goes before it."""
    command = f"{sys.executable} -m pearl {arguments} {redirected}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.returncode == code
    assert words in ended.stderr
    assert code == 2 or len(ended.stderr.splitlines()) == bool(words)
