"""Recordings that a front begins and ends while an engine runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pearl.config import SamplingParams
from pearl.engine import Engine
from pearl.errors import TraceError
from pearl.protocol import messages
from pearl.trace.reading import read
from pearl.trace.recorder import Recorder
from pearl.trace.report import report
from pearl.trace.tracer import Tracer
from pearl.worker.recording import Recordings
from tests.traced import check_sound

BOUND = 60.0
SHORT = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)


def test_recordings_hold_what_was_asked_between_start_and_stop(toy: Engine, tmp_path: Path) -> None:
    """Each can be replayed, though the engine had a history before it: caches, an epoch, a draft that has joined."""
    for name, methods in {"a.json": ["pearl"], "b.json": ["sd", "ar"]}.items():
        toy.generate([[1, 2, 3]], SHORT, method="pearl")
        toy.start_trace(tmp_path / name)
        statistics = []
        for method in methods:
            time.sleep(0.3)  # the target has nothing to do, for long enough to be seen
            statistics.append(toy.generate([[1, 2, 3]], SHORT, method=method)[0].statistics)
        assert toy.stop_trace() == tmp_path / name
        trace = read(tmp_path / name)
        found = report(trace)
        check_sound(trace.path)
        assert (found.requests, found.method, found.tokens) == (len(methods), ", ".join(methods), 20 * len(methods))
        assert found.judged == sum(s.num_judged_draft_tokens for s in statistics)
        assert found.accepted == sum(s.num_accepted_draft_tokens for s in statistics)
        assert found.steps == {kind: sum(s.target_steps[kind] for s in statistics) for kind in found.steps}
        for length, count in found.histogram.items():
            assert count == sum(s.run_histogram.get(length, 0) for s in statistics)
        assert found.recorder > 0
        assert ("consumer" in found.target.waits) == (len(methods) > 1)
        assert trace.metadata["config"]["target"] == toy.config.target
        assert set(trace.metadata["versions"]) >= {"pearl", "torch", "python"}
        assert all(worker["ended"] for worker in trace.metadata["workers"])
    assert not list(toy.directory.glob("*.part"))


def test_one_recording_at_a_time_into_what_can_be_written(toy: Engine, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace is being recorded"):
        toy.stop_trace()
    with pytest.raises(TraceError, match="directory that exists"):
        toy.start_trace(tmp_path / "nowhere" / "t.json")
    toy.start_trace(tmp_path / "t.json")
    with pytest.raises(TraceError, match="already"):
        toy.start_trace(tmp_path / "u.json")
    with Engine.attach(toy.directory) as other, pytest.raises(TraceError, match="already"):
        other.start_trace(tmp_path / "u.json")
    toy.generate([[1, 2, 3]], SHORT, method="pearl")
    toy.stop_trace()


def recordings(directory: Path) -> tuple[Recordings, Tracer, list[Any]]:
    """With what it posts."""
    posted: list[Any] = []
    tracer = Tracer(None, lambda number: Recorder(directory / f"{number}.part", {"role": "target"}))
    return Recordings(tracer, lambda message, peer: posted.append((message, peer))), tracer, posted


def test_a_draft_that_never_answers_holds_up_no_recording(tmp_path: Path) -> None:
    asked, _, posted = recordings(tmp_path)
    begin, end = messages.Trace(1, True), messages.Trace(1, False)
    asked.wish(b"front", begin)
    assert asked.begin_or_end() == begin
    asked.wish(b"front", end)
    now = time.monotonic()
    asked.look(now + 30)
    assert asked.begin_or_end() is None, "it waits"
    assert not posted
    asked.look(now + 61)
    assert posted == [(begin, b"front")]
    asked.done(begin)
    assert posted == [(begin, b"front")], "a late answer is none"
    assert asked.begin_or_end() == end


@pytest.mark.parametrize("leaves", [False, True])
def test_a_recording_that_is_given_up_before_it_begins_never_does(tmp_path: Path, leaves: bool) -> None:
    """It began once there was a pause, for nobody, and its parts stayed."""
    asked, tracer, posted = recordings(tmp_path)
    asked.wish(b"front", messages.Trace(1, True))
    asked.wish(b"other", messages.Trace(2, True))
    assert asked.fronts == {b"front", b"other"}, "they wait, and must hear that the target lives"
    if leaves:
        asked.lose(b"front")
    else:
        asked.wish(b"front", messages.Trace(1, False))
    assert asked.begin_or_end() == messages.Trace(2, True)
    assert not posted
    tracer.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["2.part"]
