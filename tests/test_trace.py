"""Traces: what is recorded, merged into one file, checked, read back, reported and replayed.

Numbers are checked in virtual time, where the right ones are known; of real processes only the contents are checked,
never how long anything took.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest

from pearl.config import RequestOptions, SamplingParams
from pearl.engine import Engine
from pearl.errors import TargetLost, TraceError
from pearl.lab.studies.simulate import Outcome
from pearl.protocol.messages import Provenance, Source, Verdict
from pearl.trace import chrome
from pearl.trace.reading import read, read_document
from pearl.trace.recorder import LOOP, Part, Recorder, TraceRecord, part_path, where_and_what
from pearl.trace.report import report
from tests.conftest import files_of_at_most
from tests.options import resolved
from tests.traced import check_sound, recorded, recording_of, run, simulated

__all__ = ["run"]  # a fixture

METHODS = ("ar", "sd", "ssd", "pearl", "pearl-no-pre-verify", "pearl-no-post-verify")
TOY = "toy:vocab=32,alpha=0.5,context=4096"
SHORT = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
LONG = SHORT.changed(max_tokens=3000)


@pytest.fixture(autouse=True)
def _no_temporary_file_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("*.tmp"))


# ---- known shares ----

PEARL_5, SD_4 = resolved("pearl", "fixed", 5), resolved("sd", gamma=4)
# run: decoding, its times, and what the report says of it within 2% of the time in all (t_draft is 1, t_target 5)
SHARES: dict[str, tuple[RequestOptions, dict[str, Any], dict[str, float]]] = {
    "a pair in step never waits": (
        PEARL_5,
        {},
        {"target.busy": 1, "draft.busy": 1, "overlap": 1, "ratio": 5, "alternation / wall": 2},
    ),
    "sd: a round is 4 drafts and a verification": (
        SD_4,
        {},
        {
            "target.busy": 5 / 9,
            "target.wait": 4 / 9,
            "target.waits.draft tokens": 4 / 9,
            "draft.busy": 4 / 9,
            "draft.waits.verdict": 5 / 9,
            "overlap": 0,
            "alternation / wall": 1,
        },
    ),
    "a slow draft sets the pace": (
        PEARL_5,
        {"t_target": 2.0},
        {"target.busy": 0.4, "target.wait": 0.6, "draft.busy": 1, "overlap": 0.4},
    ),
    "a round of sd with messages under way: 4 + 0.5 + 5 + 0.5": (
        SD_4,
        {"delay": 0.5},
        {
            "target.busy": 5 / 10,
            "target.waits.transport": 0.5 / 10,
            "target.waits.draft tokens": 4.5 / 10,
            "draft.busy": 4 / 10,
            "draft.waits.transport": 0.5 / 10,
        },
    ),
    "a row is held where a forward ends before the token that it judges is there": (
        resolved("pearl", "fixed", 1),
        {"t_target": 0.5},
        {"target.waits.held row": 0.5},
    ),
    "the target alone": (
        resolved("ar"),
        {"tokens": 50},
        {"target.busy": 1, "target.wait": 0, "steps.pre-verify": 49, "drafted": 0, "judged": 0},
    ),
}


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found |= (
            flattened(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return found


@pytest.mark.parametrize("name", SHARES)
def test_known_shares_are_reported(tmp_path: Path, name: str) -> None:
    decoding, times, expected = SHARES[name]
    found = asdict(report(recorded(tmp_path / "t.json", decoding, **times)[1]))
    flat = flattened(found) | {"alternation / wall": found["alternation"] / found["wall"]}
    for key, value in expected.items():
        assert flat.get(key, 0) == pytest.approx(value, abs=0.02), key


# ---- what adds up in any run ----


@pytest.mark.parametrize("method", METHODS)
def test_a_trace_is_sound_and_says_what_happened(tmp_path: Path, method: str) -> None:
    for number, (window, rule, delay) in enumerate(
        (("stream", "ratio", 0.3), ("fixed", "coupled", 0.0))
    ):
        decoding = resolved(method, window, rule=rule, branches=7 if method == "ssd" else 0)
        outcome, trace = recorded(
            tmp_path / f"{number}.json", decoding, alpha=0.8, tokens=120, delay=delay
        )
        check_sound(trace.path)
        found, counts = report(trace), outcome.counts
        flows = Counter(
            e["name"] for e in read_document(trace.path)["traceEvents"] if e["ph"] == "s"
        )
        assert flows[chrome.REJECTION] == counts.provenance.get(Provenance.CORRECTED, 0)
        assert found.tokens == len(outcome.tokens) == 120
        assert (found.judged, found.accepted) == (
            counts.num_judged_draft_tokens,
            counts.num_accepted_draft_tokens,
        )
        assert found.rejected == counts.num_judged_draft_tokens - counts.num_accepted_draft_tokens
        assert found.drafted + found.prepared >= counts.num_draft_tokens
        assert method != "ssd" or found.prepared > counts.accepted_by_source[Source.BRANCH] > 0
        assert sum(found.steps.values()) == outcome.counts.steps
        assert found.target.uncovered == pytest.approx(0.0, abs=1e-6)
        assert (found.draft is None) == (method == "ar")
        for worker in filter(None, (found.target, found.draft)):
            assert (
                worker.busy + worker.wait + worker.communication + worker.uncovered
                == pytest.approx(1.0)
            )
            assert (
                -1e-9 <= worker.uncovered < 0.05
            )  # virtual time ends while the draft is in a forward, or waits
            assert sum(worker.waits.values()) == pytest.approx(worker.wait)


# ---- broken files ----


def test_a_broken_file_is_named_for_what_it_is(run: tuple[Outcome, Path], tmp_path: Path) -> None:
    path, whole = tmp_path / "t.json", run[1].read_bytes()
    rank = b'{"traceEvents": [], "distributedInfo": {"rank": 0}, "metadata": {"pearl_trace": 11'
    contents = {
        b"": "is empty",
        b" \n": "is empty",
        b"\xff\xfe\x00broken": "is no trace",
        b"hello": "is no trace",
        b"[1, 2]": "no traceEvents",
        b"{}": "no traceEvents",
        b'{"traceEvents": []}': "not one of ours",
        b'{"traceEvents": [], "metadata": {"pearl_trace": 99}}': "format 99",
        b'{"traceEvents": [5], "metadata": {"pearl_trace": 11}}': "damaged",
        rank + b"}}": "lacks config",
        rank + b', "config": {}, "workers": []}}': "holds no request",
    } | {whole[: int(len(whole) * share)]: "is no trace" for share in (0.1, 0.5, 0.999)}
    for content, words in contents.items():
        path.write_bytes(content)
        with pytest.raises(TraceError, match=words) as caught:
            read(path)
        assert str(path) in str(caught.value)


# ---- the recorder ----


def recorder(path: Path, **more: Any) -> Recorder:
    return Recorder(
        path,
        {"role": "target", "run": "r", "config": {"tensors": "auto"}, **where_and_what()},
        **more,
    )


def test_what_is_written_is_read_and_nothing_overwritten(tmp_path: Path) -> None:
    r = recorder(tmp_path / "p")
    with pytest.raises(TraceError, match="cannot write the trace"):
        recorder(tmp_path / "p")
    event = Verdict(1, 0, 3, (4,), 9, 7)
    r.record(TraceRecord(LOOP, "busy", "judge", 5, 9, {"n": 3, "event": event}))
    r.close()
    r.close()
    part = Part(tmp_path / "p")
    verdict = {
        "type": "Verdict",
        "request": 1,
        "epoch": 0,
        "start": 3,
        "tokens": [4],
        "draft_until": 9,
        "digest": 7,
    }
    assert [*part.records()] == [
        TraceRecord(LOOP, "busy", "judge", 5, 9, {"n": 3, "event": verdict})
    ]
    assert part.has_ended


def test_a_part_cut_anywhere_gives_what_is_whole(tmp_path: Path) -> None:
    r = recorder(tmp_path / "p")
    for i in range(100):
        r.record(TraceRecord(LOOP, "busy", "judge", i, i + 1, {}))
    r.close()
    data = (tmp_path / "p").read_bytes()
    for cut, least in ((1, 100), (5, 100), (40, 99), (3000, 10)):
        (tmp_path / "p").write_bytes(data[:-cut])
        part = Part(tmp_path / "p")
        starts = [record.start for record in part.records()]
        assert starts == list(range(len(starts)))
        assert len(starts) >= least
        assert not part.has_ended


class Arguments(dict[str, Any]):
    """Of a record; in contrast to a plain dictionary one can tell whether it is still there."""


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    r = recorder(tmp_path / "p")
    queued = WeakValueDictionary[int, Arguments]()
    with files_of_at_most((tmp_path / "p").stat().st_size):
        for i in range(1000):
            arguments = Arguments()
            queued[i] = arguments
            r.record(TraceRecord(LOOP, "busy", "judge", i, i + 1, arguments))
        r.close()
    assert "the trace ends here" in caplog.text
    assert len(caplog.records) == 1
    assert len(queued) <= 128


@pytest.mark.parametrize("offset", [10**9, -(10**12)])
def test_two_hosts_are_brought_to_one_clock(tmp_path: Path, offset: int) -> None:
    """The draft's clock is ahead by `offset`; the quickest ping tells it to within half of its way."""
    path = tmp_path / "t.json"
    before = report(recorded(path, resolved("pearl"), alpha=0.8, tokens=50)[1])
    outcome, (target, draft) = simulated(path, resolved("pearl"), alpha=0.8, tokens=50)

    def shifted(line: str) -> str:
        item = json.loads(line)
        if item[0] == "pearl-trace":
            item[2] |= {"boot": "another", "opened": item[2]["opened"] + offset}
        elif item[0] == "record":
            item[4:6] = item[4] + offset, item[5] + offset
        return json.dumps(item) + "\n"

    draft.write_text("".join(map(shifted, draft.read_text().splitlines())))
    with pytest.raises(TraceError, match="without clock pings"):
        chrome.merge(path)
    with target.open("a") as file:
        for way, lopsided in ((4000, 1500), (400, 50), (90000, 0)):
            sent, now = 10**9, 10**9 + way
            received = sent + way // 2 + lopsided + offset
            pong = ["record", LOOP, "clock", "pong", now, now, {"sent": sent, "received": received}]
            file.write(json.dumps(pong) + "\n")
    chrome.merge(path)
    trace = read(path)
    worker = trace.metadata["workers"][1]
    assert abs(worker["clock_offset_ns"] + offset) <= worker["clock_uncertainty_ns"] == 200
    after = report(trace)
    assert after.overlap == pytest.approx(before.overlap, abs=1e-6)
    assert after.judged == outcome.counts.num_judged_draft_tokens


# ---- real processes ----


def test_a_killed_target_leaves_a_trace(tmp_path: Path) -> None:
    """Of the text that it was writing, too. And the parts of an earlier run, cut off, stay where they are."""
    path = tmp_path / "t.json"
    recorder(part_path(path, "target", 1)).close()
    part_path(path, "draft", 2).write_bytes(b"broken")
    with Engine(TOY, TOY, trace=str(path), target_pace=0.01, draft_pace=0.0025) as engine:
        engine.generate([[1, 2, 3]], SHORT)
        stream = engine.stream([1, 2, 3], LONG, method="pearl")
        for _ in range(100):
            next(stream)
        os.kill(engine.target_worker.pid, signal.SIGKILL)
        with pytest.raises(TargetLost):
            list(stream)
    assert {each.name for each in tmp_path.iterdir()} == {
        "t.json",
        "t.json.draft-2.part",
        "t.json.target-1.part",
    }
    trace = read(path)
    found = report(trace)
    assert found.requests == 2
    assert found.tokens > 100
    assert [w["ended"] for w in trace.metadata["workers"]] == [False, True]
    assert any("target did not end by itself" in note for note in found.notes)


def test_two_engines_with_one_file_keep_their_own_parts(tmp_path: Path) -> None:
    """The one that was closed first made its trace of the other's, which then had none."""
    path = tmp_path / "t.json"
    tokens = []
    first = Engine(TOY, "none", trace=str(path))
    with closing(first), Engine(TOY, "none", trace=str(path)) as second:
        second.generate([[1, 2, 3]], SHORT.changed(max_tokens=30))
        first.generate([[1, 2, 3]], SHORT)
        first.close()
        tokens.append(report(read(path)).tokens)
        second.generate([[1, 2, 3]], SHORT.changed(max_tokens=30))
    tokens.append(report(read(path)).tokens)
    assert tokens == [20, 60]
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]


def test_a_draft_that_was_started_again_is_a_process_of_its_own(tmp_path: Path) -> None:
    """Started again within a text, it gets "record" and "begin" together; its trace must hold the "begin"."""
    path = tmp_path / "t.json"
    with Engine(TOY, TOY, target_pace=0.02, draft_pace=0.004) as engine:
        first = engine.draft.worker.pid
        with recording_of(engine, path), engine.stream([1, 2, 3], LONG, method="pearl") as stream:
            for _ in range(10):
                next(stream)
            os.kill(first, signal.SIGKILL)
            back = 0
            for piece in stream:
                back += engine.draft.worker.pid != first and Provenance.ACCEPTED in piece.provenance
                if back == 20:
                    break
        assert back == 20, "the draft that returned was of use before the text ended"
        assert engine.draft.restarts == 1
    trace = read(path)
    assert len(trace.metadata["workers"]) >= 2
    marks = [
        e["name"].partition(":")[0] for e in read_document(path)["traceEvents"] if e["ph"] == "i"
    ]
    assert marks[-2:] == ["draft lost", "a draft joins"]
    notes = " ".join(report(trace).notes)
    assert "s: draft lost: the peer is gone" in notes
    assert "s: a draft joins" in notes
