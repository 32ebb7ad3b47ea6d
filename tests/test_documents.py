"""Files that somebody else has written, at their worst: one line, and exit code 2; 4 where output is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.cli import cli
from pearl.config import EngineConfig, load_settings
from pearl.device import Device
from pearl.document import parse_json, parse_yaml
from pearl.errors import ConfigError, PearlError, TraceError
from pearl.lab.papers.pearl import pairs
from pearl.trace.chrome import merge
from pearl.trace.reading import read
from pearl.trace.recorder import Recorder, part_path, part_paths

DEEP = 200_000
DIGITS = "9" * 5000
SOUND = {"traceEvents": [], "distributedInfo": {"rank": 0}, "metadata": {"pearl_trace": 2, "config": {}, "workers": []}}
COMMANDS = ("report", f"show --png {os.devnull}", "replay", "check", "compare")


def trace_of(*events: object, **metadata: object) -> str:
    return json.dumps({**SOUND, "traceEvents": events, "metadata": {**SOUND["metadata"], **metadata}})


def event(**changes: object) -> dict[str, object]:
    return {"ph": "X", "name": "decide", "cat": "busy", "pid": 1, "tid": 1, "ts": 0, "dur": 1, "args": {}} | changes


NAMES = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {}},
]
WHOLE = event(cat="whole", name="request 1", dur=5)
TRACES = {
    "nested arrays": "[" * DEEP,
    "nested in a trace": '{"traceEvents": ' + "[" * DEEP + "]" * DEEP + "}",
    "nested objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "a long integer": '{"traceEvents": [' + DIGITS + "]}",
    "a long integer in a time": trace_of(event()).replace('"ts": 0', '"ts": ' + DIGITS),
    "an infinite time": trace_of(event()).replace('"ts": 0', '"ts": 1e999'),
    "a large time": trace_of(*NAMES, event(), WHOLE).replace('"ts": 0', '"ts": 1e308'),
    "a list for a process": trace_of(event(pid=[1])),
    "an object for a name": trace_of(event(name={})),
    "a name that is none": trace_of({"ph": "M", "name": 5, "pid": 1, "args": {}}),
    "an unhashable kind": trace_of({"ph": [], "name": 5}),
    "no category": trace_of(*NAMES, {k: v for k, v in event().items() if k != "cat"}, WHOLE),
    "text for arguments": trace_of(*NAMES, event(args="x"), WHOLE),
    "a decision of nothing": trace_of(*NAMES, event(), WHOLE),
    "a counter of text": trace_of({"ph": "C", "name": "window", "pid": 1, "ts": 0, "args": {}}),
    "a counter without arguments": trace_of({"ph": "C", "name": "window", "pid": 1, "ts": 0, "args": 5}),
    "metadata of text": '{"traceEvents": [], "metadata": {"pearl_trace": 2, "config": 1, "workers": 1}}',
    "rank of text": '{"traceEvents": [], "distributedInfo": 5, "metadata": {"pearl_trace": 2}}',
    "half a surrogate": trace_of(*NAMES, event(name="\\ud800"), WHOLE),
}


def told(*arguments: str) -> PearlError | None:
    """What a command says of a file; None where it finds nothing wrong. An exception of any other kind fails."""
    result = CliRunner().invoke(cli, list(arguments))
    if result.exception is None or isinstance(result.exception, SystemExit):
        return None
    if not isinstance(result.exception, PearlError):
        raise result.exception
    assert result.exception.exit_code == 2
    return result.exception


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("content", TRACES.values(), ids=TRACES)
def test_a_hostile_trace_is_one_line(tmp_path: Path, content: str, command: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content, encoding="utf-8")
    error = told("trace", *command.split(), *[str(path)] * (1 + (command == "compare")))
    assert error is None or (str(path) in str(error) and len(str(error)) < 1000)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("ph", "name", "cat", "pid", "tid", "ts", "dur", "args")


@settings(max_examples=200)
@given(st.sampled_from(FIELDS), json_values, st.sampled_from(COMMANDS[:4]))
def test_any_value_in_any_field_of_a_trace(field: str, value: object, command: str) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"pearl-test-{os.getpid()}.json"
    path.write_text(trace_of(*NAMES, event(**{field: value}), WHOLE), encoding="utf-8", errors="replace")
    try:
        told("trace", *command.split(), str(path))
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
    "config": {"tensors": "auto"},
    "versions": {},
}
RECORD = [1, "busy", "decide", 1, 2, {"event": {"type": "Forwarded"}, "commands": []}]


def part_of(*items: object, **header: object) -> bytes:
    return b"".join(map(msgpack.packb, [["pearl-trace", 2, HEADER | header], *items]))


PARTS = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "a number": b"\x05",
    "a header of text": msgpack.packb(["pearl-trace", 2, "x"]),
    "a header of nothing": msgpack.packb(["pearl-trace", 2, {}]),
    "another format": msgpack.packb(["pearl-trace", 99, HEADER]),
    "a format of text": msgpack.packb(["pearl-trace", "x", HEADER]),
    "an opening of text": part_of(opened="x"),
    "a role that is a list": part_of(role=[]),
    "no configuration": part_of(config=None),
    "a number for a record": part_of(5),
    "an empty record": part_of([]),
    "a short record": part_of(RECORD[:4]),
    "a long record": part_of([*RECORD, 1]),
    "times of text": part_of([1, "busy", "decide", "x", "y", {}]),
    "arguments of text": part_of([*RECORD[:5], "x"]),
    "a decision of nothing": part_of([*RECORD[:5], {}]),
    "a send of nothing": part_of([1, "communication", "send", 1, 2, {}]),
    "a judgement of text": part_of([1, "busy", "judge", 1, 2, {"accepted": "x", "correction": 1, "start": 1}]),
    "bytes in arguments": part_of([*RECORD[:5], {**RECORD[5], "x": b"x"}]),
    "an end of nothing": part_of(RECORD, ["end"]),
    "an unhashable key": part_of() + b"\x81\x90\x01",
    "nested": part_of() + b"\x91" * 100_000,
    "announced": part_of() + b"\xdd\xff\xff\xff\xff",
    "announced and nested": part_of() + b"\xdd\x00\x01\x00\x00" * 1000,
    "an extension": part_of() + b"\xc7\x08\xff" + bytes(8),
}


@pytest.mark.parametrize("content", PARTS.values(), ids=PARTS)
def test_a_hostile_part_is_one_line(tmp_path: Path, content: bytes) -> None:
    """And it is left where it is; nothing half made stands in the place of the trace."""
    path = tmp_path / "t.json"
    part = part_path(path, "target", 1)
    part.write_bytes(content)
    error = told("trace", "merge", str(path))
    if error is None:
        json.loads(path.read_text())
    else:
        assert str(path) in str(error)
        assert [each.name for each in tmp_path.iterdir()] == [part.name]


def test_what_is_no_file_is_no_part(tmp_path: Path) -> None:
    """A pipe would be waited for for ever."""
    path = tmp_path / "t.json"
    os.mkfifo(part_path(path, "target", 1))
    part_path(path, "draft", 2).mkdir()
    assert part_paths(path) == []
    with pytest.raises(TraceError, match="nothing to make"):
        merge(path)


def test_a_sound_part_is_still_merged(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    recorder = Recorder(part_path(path, "target", 1), {k: v for k, v in HEADER.items() if k != "opened"})
    recorder.record(1, "whole", "request 1", recorder.clock(), recorder.clock() + 5, {"request": 1})
    recorder.close()
    merge(path)
    assert len(read(path).requests) == 1


# ---- YAML ----

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
YAMLS = {
    "an alias bomb": BOMB,
    "an alias": "target: &t embedded\ndraft: *t\n",
    "an anchor": "target: &t embedded\n",
    "a merge": "<<: {target: embedded}\n",
    "a tag": "target: !!python/object/apply:os.system [ls]\n",
    "a known tag": "target_tp: !!int x\n",
    "a timestamp": "target: !!timestamp x\n",
    "a date": "target_tp: 2020-01-01\n",
    "no date": "target_tp: 2020-13-45\n",
    "a long integer": f"target_tp: {DIGITS}\n",
    "a large number": "draft_timeout: 1e999\n",
    "nested": "target: " + "[" * DEEP,
    "nested a little": "target: " + "[" * 500 + "]" * 500,
    "nested maps": "".join(" " * i + "a:\n" for i in range(300)),
    "a list for a key": "? [a, b]\n: 5\n",
    "several documents": "target: embedded\n---\ntarget: embedded\n",
    "too long": "target: " + "x" * 2_000_000,
    "a list": "- target\n",
    "control characters": "target: \x00\x1b[2J\n",
    "a device of many cores": "target_device: cpu:0-1000000000000\n",
    "a device of a long number": f"target_device: cpu:{DIGITS}\n",
}


@pytest.mark.parametrize("content", YAMLS.values(), ids=YAMLS)
@pytest.mark.parametrize("reader", ["settings", "pairs"])
def test_hostile_yaml_is_one_line_and_soon(tmp_path: Path, content: str, reader: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {}) if reader == "settings" else pairs(path)
    assert time.process_time() - began < 2
    said = str(caught.value)
    assert len(said) < 1000
    assert "\n" not in said
    assert str(path) in said


def test_a_date_is_text_and_all_else_is_as_before() -> None:
    text = "a: 2020-01-01\nb: 5\nc: 0.5\nd: true\ne: null\nf: [1, x]\ng: '5'\nh: {i: 1e-3}\n"
    values = {"a": "2020-01-01", "b": 5, "c": 0.5, "d": True, "e": None, "f": [1, "x"], "g": "5", "h": {"i": "1e-3"}}
    assert parse_yaml(text) == values


def test_the_configurations_that_come_with_us_are_read() -> None:
    root = Path(__file__).parent.parent
    found = [path for path in root.rglob("*.yaml") if "configs" in path.parts or path.name == "paper.yaml"]
    assert len(found) > 5
    for path in found:
        assert parse_yaml(path.read_text())


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_any_text_is_yaml_or_one_error(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        with contextlib.suppress(ValueError):
            parse(text)


@pytest.mark.parametrize("name", ["cpu:0-1000000000000", "cuda:0-1000000000000", f"cpu:{DIGITS}", "cpu:0-4095,0-4095"])
def test_a_device_of_more_than_there_can_be_is_refused_at_once(name: str) -> None:
    """A list of all its cores took all memory."""
    began = time.process_time()
    with pytest.raises(ValueError, match="bad device"):
        Device.parse(name)
    with pytest.raises(ConfigError, match="target_device") as caught:
        EngineConfig(target_device=name)
    assert len(str(caught.value)) < 500
    assert time.process_time() - began < 1


def test_cores_that_are_not_there_are_named_in_short() -> None:
    with pytest.raises(ConfigError, match="are not there") as caught:
        EngineConfig(target_device="cpu:0-4000")
    assert len(str(caught.value)) < 500


# ---- output ----


@pytest.mark.parametrize(
    ("redirected", "said"),
    [
        (">/dev/full", "output is lost: No space left on device"),
        (">&-", "output is lost: standard output is closed"),
        (">/dev/full <&-", "output is lost"),
    ],
)
@pytest.mark.parametrize("arguments", ["--version", "trace --help", "trace check {trace}"])
def test_output_that_is_lost_is_an_error(tmp_path: Path, redirected: str, said: str, arguments: str) -> None:
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps(SOUND))
    command = f"{sys.executable} -m pearl {arguments.format(trace=trace)} {redirected}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 4
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("redirected", [">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_with_nobody_to_tell_the_exit_code_still_tells(redirected: str) -> None:
    command = f"{sys.executable} -m pearl --version {redirected}"
    assert subprocess.run(["bash", "-c", command], capture_output=True, timeout=120).returncode == 4


def test_an_error_of_its_own_goes_before_a_lost_output() -> None:
    command = f"{sys.executable} -m pearl trace check /nonexistent >&-"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "does not exist" in ended.stderr
