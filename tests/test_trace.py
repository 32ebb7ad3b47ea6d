"""Traces: what is recorded, made one file of, checked, read back, reported on, drawn and replayed.

Numbers are checked in virtual time, where the right ones are known; that real processes record the same things is
checked without looking at how long anything took.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pearl.cli import cli
from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine, Result
from pearl.engine.attach import attach
from pearl.errors import ConfigError, TargetLost, TraceError
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.runner import Feed, feed_chain
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol import messages
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import Drafted, DraftJoined, Forwarded, Judged
from pearl.protocol.messages import (
    Begin,
    DraftTokens,
    Provenance,
    Source,
    Submit,
    Verdict,
)
from pearl.protocol.options import RequestOptions, Sampling
from pearl.protocol.sequence import extend_digest
from pearl.trace import chrome
from pearl.trace.latency import latencies, latency
from pearl.trace.reading import Slice, Trace, read, read_document
from pearl.trace.recorder import GPU, LOOP, Part, Recorder, part_path, part_paths, where_and_what
from pearl.trace.replay import replay
from pearl.trace.report import report
from pearl.trace.tracer import Tracer, _TimedOnGpu
from pearl.trace.validate import problems
from pearl.worker.recording import Recordings
from tests.replace import replace
from tests.traced import PROMPT, VOCAB, altered, recorded

METHODS = ("ar", "sd", "pearl", "pearl-no-pre-verify", "pearl-no-post-verify")
TOY = "toy:vocab=32,alpha=0.5,context=4096"
BOUND = 60.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A pearl run with rejections, in virtual time."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    outcome, _ = recorded(path, RequestOptions("pearl"), alpha=0.8, tokens=400)
    return outcome, path


# ---- known shares ----


def near(value: float | None) -> Any:
    """Within 2% of the time in all."""
    return pytest.approx(value, abs=0.02)


def test_a_pair_in_step_never_waits(tmp_path: Path) -> None:
    """t_target = 5 t_draft, c = 5, everything accepted: both busy all the time."""
    _, trace = recorded(tmp_path / "t.json", RequestOptions("pearl", "fixed", 5))
    found = report(trace)
    assert found.target.busy == near(1.0)
    assert found.draft is not None
    assert found.draft.busy == near(1.0)
    assert found.overlap == near(1.0)
    assert found.ratio == pytest.approx(5.0)
    assert found.window == 5
    assert found.alternation / found.wall == near(2.0)


def test_sd_waits_for_what_pearl_overlaps(tmp_path: Path) -> None:
    """A round is 4 drafts and a verification: the target works 5 of 9 and waits 4, the draft the other way round."""
    _, trace = recorded(tmp_path / "t.json", RequestOptions("sd", gamma=4))
    found = report(trace)
    assert found.target.busy == near(5 / 9)
    assert found.target.waits == {"draft tokens": near(4 / 9)}
    assert found.draft is not None
    assert found.draft.busy == near(4 / 9)
    assert found.draft.waits["verdict"] == near(5 / 9)
    assert found.overlap == near(0.0)
    assert found.pace["draft works"] == near(4 / 9)
    assert found.alternation / found.wall == near(1.0)
    assert set(found.owners) == {"draft"}


def test_sd_that_prepares_uses_the_time_that_its_draft_waits_in_sd(tmp_path: Path) -> None:
    """What it prepared and the target took is known as accepted, though the epoch began with a bonus token."""
    outcome, trace = recorded(tmp_path / "t.json", RequestOptions("ssd", gamma=4, branches=7), t_target=9.0, alpha=0.8)
    assert problems(json.loads(trace.path.read_text())) == []
    assert replay(trace).difference is None
    found, counts = report(trace), outcome.counts
    assert counts.foreseen + counts.foreseen_bonuses > 10
    assert found.accepted == counts.accepted
    assert found.judged == counts.judged
    assert found.prepared > counts.sources[Source.BRANCH] > 0
    assert found.draft is not None
    assert found.draft.busy > 0.6, "in sd it would be 4 of 13"
    assert any(one.name == "prepare" and "accepted" in one.args.get("branches", ()) for one in trace.draft)


def test_a_slow_draft_sets_the_pace(tmp_path: Path) -> None:
    """t_target = 2 t_draft and a window of 5: five drafts for each verification, which takes two of them."""
    _, trace = recorded(tmp_path / "t.json", RequestOptions("pearl", "fixed", 5), t_target=2.0)
    found = report(trace)
    assert found.target.busy == near(0.4)
    assert found.pace["draft works"] == near(0.6)
    assert found.draft is not None
    assert found.draft.busy == near(1.0)
    assert found.overlap == near(0.4)


def test_messages_on_their_way_are_told_from_their_senders_work(tmp_path: Path) -> None:
    """sd with a delay of 0.5: a round is 4 + 0.5 + 5 + 0.5. The last half is the token's way."""
    _, trace = recorded(tmp_path / "t.json", RequestOptions("sd", gamma=4), delay=0.5)
    found = report(trace)
    assert found.target.busy == near(5 / 10)
    assert found.target.waits["transport"] == near(0.5 / 10)
    assert found.target.waits["draft tokens"] == near(4.5 / 10)
    assert found.draft is not None
    assert found.draft.busy == near(4 / 10)
    assert found.draft.waits["transport"] == near(0.5 / 10)
    assert found.pace["message on its way"] == near(0.5 / 10)


def test_a_held_row_is_a_cause_of_its_own(tmp_path: Path) -> None:
    """Window 1, t_target below t_draft: each forward ends before the token that it judges is there."""
    _, trace = recorded(tmp_path / "t.json", RequestOptions("pearl", "fixed", 1), t_target=0.5)
    waits = report(trace).target.waits
    assert waits["held row"] == near(0.5)


def test_target_alone(tmp_path: Path) -> None:
    _, trace = recorded(tmp_path / "t.json", RequestOptions("ar"), tokens=50)
    found = report(trace)
    assert found.target.busy == pytest.approx(1.0)
    assert found.target.waits == {}
    assert found.steps == {"pre-verify": 49}
    assert found.drafted == found.judged == 0
    assert found.owners == {"target": 49}


# ---- what adds up in any run ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("window", "rule"), [("stream", "ratio"), ("fixed", "coupled")])
@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_a_trace_is_sound_and_says_what_happened(
    tmp_path: Path, method: str, window: str, rule: str, delay: float
) -> None:
    decoding = RequestOptions(method, window, rule=rule)
    outcome, trace = recorded(tmp_path / "t.json", decoding, alpha=0.8, tokens=120, delay=delay)
    assert problems(json.loads(trace.path.read_text())) == []
    found = report(trace)
    counts = outcome.counts
    assert found.tokens == len(outcome.tokens) == 120
    assert (found.judged, found.accepted) == (counts.judged, counts.accepted)
    assert found.rejected == counts.judged - counts.accepted
    assert found.drafted >= counts.drafted
    assert found.histogram == counts.runs
    assert sum(found.steps.values()) == outcome.target_steps
    assert sum(found.owners.values()) == outcome.target_steps
    assert found.target.uncovered == pytest.approx(0.0, abs=1e-6)
    assert (found.draft is None) == (method == "ar")
    for worker in filter(None, (found.target, found.draft)):
        assert worker.busy + worker.wait + worker.communication + worker.uncovered == pytest.approx(1.0)
        assert -1e-9 <= worker.uncovered < 0.05  # virtual time ends while the draft is in a forward, or waits
        assert sum(worker.waits.values()) == pytest.approx(worker.wait)
    assert replay(trace).difference is None


@pytest.mark.parametrize("decoding", [RequestOptions("ar"), RequestOptions("sd", gamma=4), RequestOptions("pearl")])
def test_latencies_are_those_of_the_statistics(tmp_path: Path, decoding: RequestOptions) -> None:
    outcome, trace = recorded(tmp_path / "t.json", decoding, alpha=0.8, tokens=120)
    found, watch = report(trace).latency, outcome.watch
    assert watch.first is not None
    assert found.num_prompt_tokens == len(PROMPT)
    assert found.num_generated_tokens == 120
    assert found.seconds_to_first_token == pytest.approx(watch.first - watch.submitted)
    assert found.itl_p50 == pytest.approx(watch.token_latency(0.5))
    assert found.itl_p99 == pytest.approx(watch.token_latency(0.99))
    assert found.tokens_per_second == pytest.approx(watch.tokens_per_second)
    assert found.tokens_per_step == pytest.approx(120 / outcome.target_steps)
    assert [replace(found, request="1")] == report(trace).per_request


def test_time_in_the_queue_counts_to_the_first_token() -> None:
    """Two requests are submitted together; the second begins once the first has ended."""

    def decision(time: float, event: dict[str, Any], tokens: int) -> Slice:
        message = {"type": "Committed", "request": event["request"], "provenance": ["direct"] * tokens}
        commands = [{"type": "Deliver", "message": message}] if tokens else []
        return Slice("decide", "busy", time, time, {"event": event, "commands": commands})

    submits = [decision(0.0, {"type": "Submit", "request": number}, 0) for number in (1, 2)]
    commits = [
        decision(time, {"type": "Sampled", "request": number}, tokens)
        for number, time, tokens in ((1, 1, 1), (1, 2, 3), (2, 5, 1), (2, 6, 2))
    ]
    requests = [
        Slice("request 1", "whole", 0.0, 2.0, {"request": 1, "options": {"method": "sd"}, "prompt_tokens": 3}),
        Slice("request 2", "whole", 2.5, 6.0, {"request": 2, "options": {"method": "ar"}, "prompt_tokens": 4}),
    ]
    trace = Trace(Path("t.json"), {}, [*submits, *commits], [], requests)
    one, two = latencies(trace)
    assert (one.queue_seconds, one.seconds_to_first_token, one.num_generated_tokens) == (0.0, 1.0, 4)
    assert (two.queue_seconds, two.seconds_to_first_token, two.num_generated_tokens) == (2.5, 5.0, 3)
    assert (one.itl_p50, one.itl_p99, one.tokens_per_second) == (0.0, 1.0, 3.0)
    both = latency(trace)
    assert (both.method, both.num_prompt_tokens, both.num_generated_tokens) == ("sd, ar", 7, 7)
    assert (both.tokens_per_second, both.itl_p50, both.itl_p99) == (2.5, 0.0, 1.0)


def test_a_flow_for_each_judged_token(run: tuple[Outcome, Path]) -> None:
    outcome, path = run
    events = json.loads(path.read_text())["traceEvents"]
    flows = [e for e in events if e["ph"] == "s" and e["name"] == "token"]
    assert len(flows) == outcome.counts.judged
    rejections = [e for e in events if e["ph"] == "s" and e["name"] == chrome.REJECTION]
    assert len(rejections) == outcome.counts.provenance[Provenance.CORRECTED] > 10
    assert {e["name"] for e in events if e["ph"] == "C"} == {"pending", "epoch", "window", "acceptance"}


def test_verdicts_are_arrows_from_target_to_draft(tmp_path: Path) -> None:
    """Those that reject among them; each is read after its way."""
    _, trace = recorded(tmp_path / "t.json", RequestOptions("pearl"), alpha=0.8, tokens=100, delay=0.25)
    corrections = [one.end for one in trace.target if one.name == "decide" and chrome.is_rejection(one.args)]
    assert [arrow.sent for arrow in trace.verdicts if arrow.is_rejection] == pytest.approx(corrections)
    assert len(trace.verdicts) > len(corrections) > 5
    assert all(arrow.read - arrow.sent == pytest.approx(0.25) for arrow in trace.verdicts)


def test_only_tracks_that_hold_something_are_named(run: tuple[Outcome, Path]) -> None:
    """No empty GPU track on a machine without one."""
    events = json.loads(run[1].read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert GPU not in {track for _, track in named}


def _perfetto_hue(name: str) -> int:
    """As `hash` of ui/src/base/hash.ts in Perfetto, whose products are rounded to doubles."""
    value = 0x811C9DC5 & 0xFFFFFFF
    for letter in name:
        value = int(float((value ^ ord(letter)) * 16777619)) & 0xFFFFFFFF
        value -= (value >> 31) << 32
    return abs(value) % 360


def test_fates_have_colours_in_perfetto(run: tuple[Outcome, Path]) -> None:
    """It makes a slice's hue (HSLuv: red 12, orange 40, green 127) from its name, whatever a file asks for."""
    assert _perfetto_hue("draft") == 116
    hues = {fate: _perfetto_hue(name) for fate, name in chrome.DRAFTED.items()}
    assert 100 < hues["accepted"] < 150
    assert not 20 < hues["rejected"] < 340
    assert 25 < hues["discarded"] < 70
    names = {e["name"] for e in json.loads(run[1].read_text())["traceEvents"] if e["ph"] == "X"}
    assert set(chrome.DRAFTED.values()) <= names
    assert {"draft"} == {one.name for one in read(run[1]).draft if "fate" in one.args} - {"prefill"}


# ---- replay ----


@pytest.mark.parametrize(("process", "worker", "kind"), [(1, "target", "Forward"), (2, "draft", "Draft")])
def test_replay_notices_another_decision(
    run: tuple[Outcome, Path], tmp_path: Path, process: int, worker: str, kind: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        commands = [
            c
            for e in document["traceEvents"]
            if e["ph"] == "X" and e["name"] == "decide" and e["pid"] == process
            for c in e["args"]["commands"]
            if c["type"] == kind
        ]
        commands[20]["start"] += 1

    difference = replay(read(altered(run[1], tmp_path / "t.json", change))).difference
    assert difference is not None
    assert difference.worker == worker
    assert difference.recorded != difference.replayed


def test_what_comes_after_the_end_and_what_waits_for_it(tmp_path: Path) -> None:
    """A late draft token is counted by the request that is over; a queued request begins in the same turn."""
    path = tmp_path / "t.json"
    time = iter(range(0, 10**9, 1000))
    coordinator = Coordinator()
    r = recorder(part_path(path, "target", 1), clock=lambda: next(time))
    decide = Tracer(r).deciding(coordinator)

    def submit(number: int) -> Submit:
        return Submit(number, PROMPT, len(PROMPT) + 1, RequestOptions("pearl", sampling=Sampling(seed=5)))

    decide(DraftJoined(100))
    for event in (
        submit(1),
        submit(2),
        Forwarded(1.0, request=1),
        DraftTokens(1, 0, 3, (4,)),
        Judged(1, None, request=1),
    ):
        decide(event)
    decide(DraftTokens(1, 0, 4, (5,)))
    assert coordinator.counts.stale == 1
    late = DraftTokens(2, 0, 4, (5,))
    for event in (Forwarded(1.0, request=2), DraftTokens(2, 0, 3, (4,)), Judged(1, None, request=2), late):
        decide(event)
    r.close()
    chrome.merge(path)
    assert replay(read(path)).difference is None
    assert [one.name for one in read(path).requests] == ["request 1", "request 2"]


def test_replay_of_an_unknown_event(run: tuple[Outcome, Path], tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        decide = next(e for e in document["traceEvents"] if e["name"] == "decide")
        decide["args"]["event"] = {"type": "Telepathy"}

    with pytest.raises(TraceError, match="Telepathy"):
        replay(read(altered(run[1], tmp_path / "t.json", change)))


# ---- the validator ----


def _events(document: dict[str, Any], phase: str, name: str | None = None) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == phase and name in (None, e["name"])]


def _overlap(document: dict[str, Any]) -> None:
    first = _events(document, "X", "post-verify")[3]
    first["dur"] += 10.0


def _unpaired(document: dict[str, Any]) -> None:
    document["traceEvents"].remove(_events(document, "f")[0])


def _floating(document: dict[str, Any]) -> None:
    _events(document, "s", "token")[0]["tid"] = 3


def _backwards(document: dict[str, Any]) -> None:
    flow = _events(document, "f")[9]
    start = next(e for e in _events(document, "s") if e["id"] == flow["id"])
    flow["ts"], start["ts"] = start["ts"], flow["ts"]


def _nameless(document: dict[str, Any]) -> None:
    document["traceEvents"] = [e for e in document["traceEvents"] if e["name"] != "thread_name"]


def _not_a_number(document: dict[str, Any]) -> None:
    _events(document, "X")[5]["dur"] = float("nan")


def _no_rank(document: dict[str, Any]) -> None:
    del document["distributedInfo"]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_overlap, "overlaps"),
        (_unpaired, "1 starts and 0 ends"),
        (_floating, "hangs in the air"),
        (_backwards, "ends before it starts"),
        (_nameless, "without a name"),
        (_not_a_number, "times must be"),
        (_no_rank, "rank"),
        (lambda d: _events(d, "X")[5].pop("ts"), "without ts"),
        (lambda d: d["traceEvents"].append({"ph": "?"}), "known"),
        (lambda d: d["traceEvents"].append(5), "known"),
    ],
)
def test_planted_faults_are_found(run: tuple[Outcome, Path], plant: Callable[[Any], None], said: str) -> None:
    document = json.loads(run[1].read_text())
    assert problems(document) == []
    plant(document)
    assert any(said in problem for problem in problems(document)), problems(document)[:3]


@given(st.recursive(st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_the_validator_takes_anything(document: Any) -> None:
    assert problems(document)


# ---- broken files ----


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe\x00broken", "is not text"),
        (b"hello", "not JSON at line 1"),
        (b"[1, 2]", "no traceEvents"),
        (b"{}", "no traceEvents"),
        (b'{"traceEvents": []}', "not one of ours"),
        (b'{"traceEvents": [], "metadata": {"pearl_trace": 99}}', "format 99"),
        (b'{"traceEvents": [5], "metadata": {"pearl_trace": 9}}', "damaged"),
        (b'{"traceEvents": [], "distributedInfo": {"rank": 0}, "metadata": {"pearl_trace": 9}}', "lacks config"),
        (
            b'{"traceEvents": [], "distributedInfo": {"rank": 0}, '
            b'"metadata": {"pearl_trace": 9, "config": {}, "workers": []}}',
            "holds no request",
        ),
    ],
)
@pytest.mark.parametrize("command", ["report", "show --png it.png", "replay", "compare"])
def test_a_broken_file_is_told_what_it_is(tmp_path: Path, content: bytes, said: str, command: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    result = CliRunner().invoke(cli, ["trace", *command.split(), *([str(path)] * (1 + (command == "compare")))])
    assert isinstance(result.exception, TraceError)
    assert said in str(result.exception)
    assert str(path) in str(result.exception)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_truncated_file(run: tuple[Outcome, Path], tmp_path: Path, share: float) -> None:
    path, whole = tmp_path / "t.json", run[1].read_text()
    path.write_text(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError, match=r"cut off|no trace"):
        read(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(TraceError, match="does not exist"):
        read(path)
    with pytest.raises(TraceError, match="nothing to make"):
        chrome.merge(path)
    part_path(path, "target", 77).write_bytes(b"")
    with pytest.raises(TraceError, match="pearl trace merge"):
        read(path)
    with pytest.raises(TraceError, match="no part"):
        chrome.merge(path)
    assert part_paths(path)


@pytest.mark.parametrize("name", ["", "no/such/folder/t.json", "."])
def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match="not a file that can be written"):
        EngineConfig(trace=name)


# ---- the recorder ----


def recorder(path: Path, **more: Any) -> Recorder:
    return Recorder(path, {"role": "target", "run": "r", "config": {"tensors": "auto"}, **where_and_what()}, **more)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    r = recorder(tmp_path / "p")
    r.record(LOOP, "busy", "judge", 5, 9, {"n": 3, "event": Verdict(1, 0, 3, (4,), 9, 7)})
    r.close()
    r.close()
    part = Part(tmp_path / "p")
    ((track, kind, name, start, end, args),) = part.records()
    assert (track, kind, name, start, end, args["n"]) == (LOOP, "busy", "judge", 5, 9, 3)
    verdict = {"request": 1, "epoch": 0, "start": 3, "tokens": [4], "draft_until": 9, "digest": 7}
    assert args["event"] == {"type": "Verdict", **verdict}
    assert part.end["records"] == 1


def test_memory_is_bounded_and_a_crash_loses_little(tmp_path: Path) -> None:
    """What was recorded a quarter of a second ago is in the file, though it was never closed."""
    time = iter(range(0, 10**15, 10**6))  # a millisecond a look
    r = recorder(tmp_path / "p", clock=lambda: next(time))
    most = 0
    for i in range(5000):
        r.record(LOOP, "busy", "judge", i, i * 10**6)
        most = max(most, len(r._waiting))
    assert most <= 128
    assert len(list(Part(tmp_path / "p").records())) >= 5000 - 128


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_part_cut_anywhere_gives_what_is_whole(tmp_path: Path, cut: int) -> None:
    r = recorder(tmp_path / "p")
    for i in range(100):
        r.record(LOOP, "busy", "judge", i, i + 1)
    r.close()
    data = (tmp_path / "p").read_bytes()
    (tmp_path / "p").write_bytes(data[:-cut])
    part = Part(tmp_path / "p")
    assert [record.start for record in part.records()] == list(range(len(list(part.records()))))
    assert part.end == {}


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    r = recorder(tmp_path / "p")
    r._file.close()
    r._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for i in range(1000):
        r.record(LOOP, "busy", "judge", i, i + 1)
    r.close()
    assert "the trace ends here" in caplog.text
    assert len(caplog.records) == 1
    assert len(r._waiting) <= 128


def test_a_part_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("mine")
    with pytest.raises(TraceError, match="cannot write the trace"):
        recorder(tmp_path / "p")


@pytest.mark.parametrize("offset", [0, 10**9, -(10**12)])
def test_two_hosts_are_brought_to_one_clock(tmp_path: Path, offset: int) -> None:
    """The draft's clock is ahead by `offset`; the quickest ping tells it to within half of its way."""
    path = tmp_path / "t.json"
    outcome, there = recorded(path, RequestOptions("pearl"), alpha=0.8, tokens=50)
    before = report(there)
    target, draft = alpha_pair(VOCAB, 0.8)
    executors = paired_executors(ToyRunner(VOCAB, target), ToyRunner(VOCAB, draft))
    parts = part_path(path, "target", 1), part_path(path, "draft", 2)
    submit = Submit(1, PROMPT, len(PROMPT) + 50, RequestOptions("pearl", sampling=Sampling(1.0, seed=5)))
    simulate(submit, *executors, Timing(1.0, lambda _: 5.0), parts=parts)

    def rewrite(part: Path, change: Callable[[list[Any]], list[Any]]) -> None:
        import msgpack

        items = [change(item) for item in msgpack.Unpacker(part.open("rb"), strict_map_key=False)]
        part.write_bytes(b"".join(map(msgpack.packb, items)))

    def shifted(item: list[Any]) -> list[Any]:
        if item[0] == "pearl-trace":
            return [*item[:2], {**item[2], "boot": "another", "opened": item[2]["opened"] + offset}]
        return item if item[0] == "end" else [*item[:3], item[3] + offset, item[4] + offset, item[5]]

    rewrite(parts[1], shifted)
    with pytest.raises(TraceError, match="no clock pings"):
        chrome.merge(path)
    import msgpack

    with parts[0].open("ab") as file:
        for way, lopsided in ((4000, 1500), (400, 50), (90000, 0)):
            sent, now = 10**9, 10**9 + way
            received = sent + way // 2 + lopsided + offset
            file.write(msgpack.packb([LOOP, "clock", "pong", now, now, {"sent": sent, "received": received}]))
    chrome.merge(path)
    trace = read(path)
    draft_worker = trace.metadata["workers"][1]
    assert abs(draft_worker["clock_offset_ns"] + offset) <= draft_worker["clock_uncertainty_ns"] == 200
    after = report(trace)
    assert after.overlap == pytest.approx(before.overlap, abs=1e-6)
    assert after.judged == outcome.counts.judged


# ---- the GPU's own time ----


class FakeEvent:
    """A CUDA event: records when it was reached on a device that lags behind the host."""

    device = 0.0

    def record(self) -> None:
        self.at = FakeEvent.device

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class FakeGpuRunner(ToyRunner):
    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        FakeEvent.device += 7.0  # milliseconds
        return super().forward(feeds)


def test_gpu_time_is_read_where_the_loop_synchronises_anyway(tmp_path: Path) -> None:
    r = recorder(tmp_path / "p")
    runner = _TimedOnGpu(FakeGpuRunner(VOCAB, alpha_pair(VOCAB, 0.5)[0]), Tracer(r), FakeEvent)
    feed_chain(runner, [1, 2], 1)
    runner.synchronize()
    runner.synchronize()
    feed_chain(runner, [3], 1)
    runner.rollback(2)
    runner.synchronize()
    assert runner.length() == 2
    r.close()
    records = list(Part(tmp_path / "p").records())
    assert [(record.track, record.end - record.start) for record in records] == [(GPU, 7_000_000)] * 2


def test_what_ran_beside_the_loop_is_shown_one_after_the_other(tmp_path: Path) -> None:
    """The second was done on its device long before anybody came for it."""
    now = 0
    r = recorder(tmp_path / "p", clock=lambda: now)
    tracer = Tracer(r)
    for now, event in ((10_000_000, Drafted((1,), 0.004, draw=0.001)), (12_000_000, Drafted((2,), 0.004, draw=0.001))):  # noqa: B007
        tracer.beside(event)
    tracer.beside(None)
    r.close()
    slices = [(x.name, x.start, x.end) for x in Part(tmp_path / "p").records()]
    assert [(name, end - start) for name, start, end in slices[:2]] == [("forward", 4_000_000), ("draw", 1_000_000)]
    assert all(start >= before for (_, _, before), (_, start, _) in itertools.pairwise(slices))
    assert len(slices) == 4


# ---- real processes ----


def generated(path: Path, decoding: DecodingConfig, pace: float = 0.004, **settings: Any) -> tuple[Result, Trace]:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    with Engine(TOY, TOY, trace=str(path), target_pace=4 * pace, draft_pace=pace, **settings) as engine:
        result = engine.generate([[1, 2, 3]], params, decoding=decoding)[0]
    return result, read(path)


@pytest.mark.parametrize("method", ["ar", "sd", "pearl"])
def test_real_workers_record_what_the_statistics_say(tmp_path: Path, method: str) -> None:
    result, trace = generated(tmp_path / "t.json", DecodingConfig(method=method))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert problems(json.loads(trace.path.read_text())) == []
    found, s = report(trace), result.statistics
    assert found.tokens == s.num_generated_tokens == 60
    assert (found.judged, found.accepted) == (s.num_judged_draft_tokens, s.num_accepted_draft_tokens)
    assert {k: n for k, n in s.target_steps.items() if n and k != "prefill"} == found.steps
    assert {str(k): n for k, n in found.histogram.items()} == s.run_histogram
    assert found.target.uncovered < 0.2  # generous: this machine may take the core away between any two slices
    assert found.recorder > 0
    assert replay(trace).difference is None
    assert trace.metadata["config"]["target"] == TOY
    assert set(trace.metadata["versions"]) >= {"pearl", "torch", "python"}
    assert all(worker["ended"] for worker in trace.metadata["workers"])


def test_a_draft_that_its_target_runs_ahead_of_is_judged_in_the_trace_too(tmp_path: Path) -> None:
    """No slice judges its tokens: they are compared with what the target drew, before or after they came."""
    result, trace = generated(tmp_path / "t.json", DecodingConfig(method="pearl", rule="coupled"))
    assert problems(json.loads(trace.path.read_text())) == []
    found, s = report(trace), result.statistics
    assert found.tokens == 60
    assert {k: n for k, n in s.target_steps.items() if n and k != "prefill"} == found.steps
    assert s.num_accepted_draft_tokens > 5
    # What was under way when the text ended counts in the trace alone.
    assert 0 <= found.accepted - s.num_accepted_draft_tokens <= 16
    assert 0 <= found.judged - s.num_judged_draft_tokens <= 16
    assert replay(trace).difference is None
    assert {one.name for one in trace.target} >= {"guess", "sample"}


def test_rows_over_a_process_group_are_recorded(tmp_path: Path) -> None:
    spec = "toy:vocab=400,alpha=0.5"
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    path = tmp_path / "t.json"
    with Engine(spec, spec, trace=str(path), tensors="gloo") as engine:
        engine.generate([[1, 2, 3]], params, method="pearl")
    assert any(s.name == "send row" for s in read(path).draft)
    events = json.loads(path.read_text())["traceEvents"]  # by whichever thread of the target has read the message
    assert any(event["name"] == "receive rows" for event in events)


def test_several_requests_are_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    with Engine(TOY, TOY, trace=str(path)) as engine:
        for method in ("pearl", "sd"):
            engine.generate([[1, 2, 3]], params, method=method)
            time.sleep(0.3)  # the target has nothing to do, for long enough to be seen
    trace = read(path)
    found = report(trace)
    assert found.method == "pearl, sd"
    assert found.requests == 2
    assert found.tokens == 40
    assert "consumer" in found.target.waits
    assert replay(trace).difference is None


def test_a_killed_target_leaves_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=3000, ignore_eos=True)
    with Engine(TOY, TOY, trace=str(path), target_pace=0.01, draft_pace=0.0025) as engine:
        assert engine._launcher.target is not None
        stream = engine.stream([1, 2, 3], params, method="pearl")
        for _ in range(100):
            next(stream)
        os.kill(engine._launcher.target.pid, signal.SIGKILL)
        with pytest.raises(TargetLost):
            list(stream)
    trace = read(path)
    found = report(trace)
    assert found.tokens > 20
    assert [w["ended"] for w in trace.metadata["workers"]] == [False, True]
    assert any("target did not end by itself" in note for note in found.notes)
    assert replay(trace).difference is None


def test_a_draft_that_was_started_again_is_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=3000, ignore_eos=True)
    with Engine(TOY, TOY, trace=str(path), target_pace=0.02, draft_pace=0.004) as engine:
        assert engine._launcher.draft is not None
        first = engine._launcher.draft.worker.pid
        with engine.stream([1, 2, 3], params, method="pearl") as stream:
            alone = False
            for i, piece in enumerate(stream):
                if i == 10:
                    os.kill(first, signal.SIGKILL)
                alone = alone or (i > 10 and Provenance.DIRECT in piece.provenance)
                if alone and Provenance.ACCEPTED in piece.provenance:
                    break
    trace = read(path)
    assert len(trace.metadata["workers"]) == len(trace.drafts) + 1 >= 2
    assert replay(trace).difference is None
    marks = [e["name"].partition(":")[0] for e in read_document(path)["traceEvents"] if e["ph"] == "i"]
    assert marks[:3] == ["a draft joins", "draft lost", "a draft joins"]
    assert set(marks[3:]) <= {"draft lost"}  # on a busy machine the second may end well before the target does
    notes = " ".join(report(trace).notes)
    assert "s: draft lost: the peer is gone" in notes
    assert "s: a draft joins" in notes


def test_a_run_of_before_that_was_cut_off_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    old = recorder(part_path(path, "target", 1))
    old.close()
    part_path(path, "draft", 2).write_bytes(b"broken")
    generated(path, DecodingConfig(method="pearl"))
    assert part_paths(path) == [part_path(path, "draft", 2), part_path(path, "target", 1)]


# ---- recordings begun and ended while an engine runs ----

WARM = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)


def test_off_means_that_nothing_is_recorded(toy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even taken down and thrown away: that would cost a worker as much as recording."""
    assert toy.config.trace is None
    monkeypatch.setattr(Tracer, "record", lambda *_: pytest.fail("recorded"))
    drafter = Drafter(100)
    begin = Begin(1, 0, (1, 2), 5, extend_digest(0, (1, 2)), RequestOptions())
    assert Tracer().deciding(drafter)(begin) == Drafter(100).handle(begin)
    assert Tracer().computing(lambda command: command)(5) == 5
    toy.generate([[1, 2, 3]], WARM, method="pearl")
    assert not list(toy.directory.glob("*.part"))


def test_recordings_hold_what_was_asked_between_start_and_stop(toy: Engine, tmp_path: Path) -> None:
    """Each can be replayed, though the engine had a history before it: caches, an epoch, a draft that has joined."""
    for name, methods in {"a.json": ["pearl"], "b.json": ["sd", "ar"]}.items():
        toy.generate([[1, 2, 3]], WARM, method="pearl")
        toy.start_trace(tmp_path / name)
        texts = [toy.generate([[1, 2, 3]], WARM, method=method)[0] for method in methods]
        assert toy.stop_trace() == tmp_path / name
        trace = read(tmp_path / name)
        found = report(trace)
        assert problems(json.loads(trace.path.read_text())) == []
        assert found.requests == len(methods)
        assert found.tokens == sum(len(text.tokens) for text in texts)
        assert found.method == ", ".join(methods)
        assert replay(trace).difference is None
    assert not list(toy.directory.glob("*.part"))


def test_a_recording_waits_for_a_text_that_is_being_ended(toy: Engine, tmp_path: Path) -> None:
    with toy.stream([1, 2, 3], SamplingParams(temperature=1.0, ignore_eos=True), method="pearl") as stream:
        next(stream)
    toy.start_trace(tmp_path / "t.json")
    toy.generate([[1, 2, 3]], WARM, method="pearl")
    toy.stop_trace()
    assert report(read(tmp_path / "t.json")).requests == 1


def test_one_recording_at_a_time_into_what_can_be_written(toy: Engine, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace is being recorded"):
        toy.stop_trace()
    with pytest.raises(TraceError, match="directory that exists"):
        toy.start_trace(tmp_path / "nowhere" / "t.json")
    toy.start_trace(tmp_path / "t.json")
    with pytest.raises(TraceError, match="already"):
        toy.start_trace(tmp_path / "u.json")
    with attach(toy.directory) as other, pytest.raises(TraceError, match="already"):
        other.start_trace(tmp_path / "u.json")
    toy.generate([[1, 2, 3]], WARM, method="pearl")
    toy.stop_trace()
    assert replay(read(tmp_path / "t.json")).difference is None


def test_a_draft_that_joins_is_recorded_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with Engine(TOY, TOY) as engine:
        assert engine._launcher.draft is not None
        first = engine._launcher.draft.worker.pid
        engine.start_trace(path)
        long = WARM.model_copy(update={"max_tokens": 100})  # more than a part keeps in memory
        engine.generate([[1, 2, 3]], long, method="pearl")
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while len(list(engine.directory.glob("*draft*.part"))) < 2:
            engine.generate([[1, 2, 3]], WARM, method="pearl")
            assert time.monotonic() < deadline
        engine.generate([[1, 2, 3]], WARM, method="pearl")
        engine.stop_trace()
    trace = read(path)
    assert len(trace.drafts) == 2
    assert replay(trace).difference is None


def test_a_draft_that_returns_amid_a_text_is_recorded_and_drafts(tmp_path: Path) -> None:
    """It is told to record and to begin in one breath: were it to begin first, it would be with the wrong machine."""
    path = tmp_path / "t.json"
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=1500, ignore_eos=True)
    with Engine(TOY, TOY, target_pace=0.02, draft_pace=0.004) as engine:
        assert engine._launcher.draft is not None
        first = engine._launcher.draft.worker.pid
        engine.start_trace(path)
        with engine.stream([1, 2, 3], params, method="pearl") as stream:
            for _ in range(5):
                next(stream)
            os.kill(first, signal.SIGKILL)
            back = 0
            for piece in stream:
                back += engine._launcher.draft.worker.pid != first and Provenance.ACCEPTED in piece.provenance
                if back == 20:
                    break
        assert back == 20, "the draft that returned was of use before the text ended"
        assert engine._launcher.draft._restarts.total() == 1
        engine.stop_trace()
    assert replay(read(path)).difference is None


KILLED_FRONT = """
import sys, time
from pathlib import Path
from tests.replace import replace
from pearl.engine.attach import attach
engine = attach(Path(sys.argv[1]))
engine.start_trace(sys.argv[2])
print("recording", flush=True)
time.sleep(1000)
"""


def test_a_late_echo_of_a_wish_that_was_given_up_is_no_answer(
    toy: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wish that failed is taken back; what the workers say to that comes while the next one waits."""
    with monkeypatch.context() as patched:
        patched.setattr("pearl.engine.recording._RECORD_SECONDS", 0.0)
        for _ in range(3):
            with pytest.raises(TraceError, match="do not answer"):
                toy.start_trace(tmp_path / "given up.json")
    toy.start_trace(tmp_path / "kept.json")
    toy.generate([[1, 2, 3]], WARM, method="pearl")
    toy.stop_trace()
    assert report(read(tmp_path / "kept.json")).requests == 1


def test_a_draft_that_never_answers_holds_up_no_recording(tmp_path: Path) -> None:
    posted: list[Any] = []
    tracer = Tracer(None, lambda number: Recorder(tmp_path / f"{number}.part", {"role": "target"}))
    recordings = Recordings(tracer, lambda message, peer: posted.append((message, peer)), lambda: None)
    begin, end = messages.Trace(1, True), messages.Trace(1, False)
    recordings.wish(b"front", begin)
    assert recordings.begin_or_end() == begin
    recordings.wish(b"front", end)
    asked = time.monotonic()
    recordings.look(asked + 30)
    assert recordings.begin_or_end() is None, "it waits"
    assert not posted
    recordings.look(asked + 61)
    assert posted == [(begin, b"front")]
    recordings.done(begin)
    assert posted == [(begin, b"front")], "a late answer is none"
    assert recordings.begin_or_end() == end


@pytest.mark.parametrize("leaves", [False, True])
def test_a_recording_that_is_given_up_before_it_begins_never_does(tmp_path: Path, leaves: bool) -> None:
    """It began once there was a pause, for nobody, and its parts stayed."""
    posted: list[Any] = []
    tracer = Tracer(None, lambda number: Recorder(tmp_path / f"{number}.part", {"role": "target"}))
    recordings = Recordings(tracer, lambda message, peer: posted.append((message, peer)), lambda: None)
    recordings.wish(b"front", messages.Trace(1, True))
    recordings.wish(b"other", messages.Trace(2, True))
    assert recordings.fronts == {b"front", b"other"}, "they wait, and must hear that the target lives"
    if leaves:
        recordings.lose(b"front")
    else:
        recordings.wish(b"front", messages.Trace(1, False))
    assert recordings.begin_or_end() == messages.Trace(2, True)
    assert not posted
    tracer.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["2.part"]


def test_the_recording_of_a_front_that_is_killed_ends(toy: Engine, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_FRONT, str(toy.directory), str(tmp_path / "a.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        assert front.stdout.readline() == "recording\n"
        front.kill()
    deadline = time.monotonic() + BOUND
    while True:
        toy.generate([[1, 2, 3]], WARM, method="pearl")  # the target learns of it when it has something to say to it
        try:
            toy.start_trace(tmp_path / "b.json")
            break
        except TraceError:
            assert time.monotonic() < deadline
    toy.generate([[1, 2, 3]], WARM, method="pearl")
    toy.stop_trace()
    assert report(read(tmp_path / "b.json")).requests == 1


def test_closing_the_engine_ends_the_recording(tmp_path: Path) -> None:
    with Engine(TOY, TOY) as engine:
        engine.start_trace(tmp_path / "t.json")
        engine.generate([[1, 2, 3]], WARM, method="pearl")
    assert report(read(tmp_path / "t.json")).requests == 1


@pytest.fixture(autouse=True)
def _no_parts_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("*.tmp"))
