"""Recordings that a front begins and ends while an engine runs."""

import time
from pathlib import Path
from typing import Any

import pytest

from pearl.config import SamplingParams
from pearl.engine import Engine
from pearl.errors import TraceError
from pearl.protocol import messages
from pearl.trace.reading import read
from pearl.trace.recorder import Recorder, part_paths
from pearl.trace.report import report
from pearl.trace.tracer import Tracer
from pearl.worker.recording import Recordings
from tests.conftest import TOY, eventually
from tests.traced import check_sound, recording_of

SHORT = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)


def test_recordings_hold_what_was_asked_between_start_and_stop(toy: Engine, tmp_path: Path) -> None:
    """Though the engine had a history before it: caches, an epoch, a draft that has joined."""
    for name, methods in {"a.json": ["pearl"], "b.json": ["sd", "ar"]}.items():
        toy.generate([[1, 2, 3]], SHORT, method="pearl")
        statistics = []
        with recording_of(toy, tmp_path / name):
            for method in methods:
                time.sleep(0.3)  # the target has nothing to do, for long enough to be seen
                statistics.append(toy.generate([[1, 2, 3]], SHORT, method=method)[0].statistics)
        trace = read(tmp_path / name)
        found = report(trace)
        check_sound(trace.path)
        assert (found.requests, found.method, found.tokens) == (
            len(methods),
            ", ".join(methods),
            20 * len(methods),
        )
        assert found.judged == sum(s.num_judged_draft_tokens for s in statistics)
        assert found.accepted == sum(s.num_accepted_draft_tokens for s in statistics)
        assert found.steps == {
            kind: sum(s.target_steps[kind] for s in statistics) for kind in found.steps
        }
        assert ("consumer" in found.target.waits) == (len(methods) > 1)
        assert trace.metadata["config"]["target"] == toy.config.target
        assert set(trace.metadata["versions"]) >= {"pearl", "torch", "python"}
        assert all(worker["ended"] for worker in trace.metadata["workers"])
    assert not list(toy.directory.glob("*.part"))


def test_a_recording_begins_and_ends_amid_a_text(tmp_path: Path) -> None:
    """It had to wait until all texts had ended, and new ones waited for it."""
    with Engine(TOY, TOY, target_pace=0.02, draft_pace=0.004) as engine:
        stream = engine.stream([1, 2, 3], SHORT.changed(max_tokens=400), method="pearl")
        pieces = [next(stream) for _ in range(5)]
        with recording_of(engine, tmp_path / "t.json"):
            pieces += [next(stream) for _ in range(30)]
        pieces += stream
    check_sound(tmp_path / "t.json")
    found = report(read(tmp_path / "t.json"))
    assert (found.requests, found.method) == (1, "pearl")
    assert 0 < found.tokens < sum(len(piece.tokens) for piece in pieces) == 400
    assert found.accepted > 0


def test_one_recording_at_a_time(toy: Engine) -> None:
    parts = toy.client.recording.start()
    with pytest.raises(TraceError, match="already"):
        toy.client.recording.start()
    with Engine.attach(toy.directory) as other, pytest.raises(TraceError, match="already"):
        other.client.recording.start()
    toy.generate([[1, 2, 3]], SHORT, method="pearl")
    assert part_paths(parts)
    toy.client.recording.stop()
    eventually(lambda: not part_paths(parts))


def recordings(directory: Path) -> tuple[Recordings, Tracer, list[Any]]:
    """With what it posts."""
    posted: list[Any] = []
    tracer = Tracer(None, lambda number: Recorder(directory / f"{number}.part", {"role": "target"}))
    return Recordings(tracer, lambda message, peer: posted.append((message, peer))), tracer, posted


def test_a_front_hears_of_its_recording_once_the_draft_has_done_the_same(tmp_path: Path) -> None:
    asked, tracer, posted = recordings(tmp_path)
    begin, end = messages.Trace(1, True), messages.Trace(1, False)
    assert asked.ask(b"front", begin) == begin
    assert asked.ask(b"front", end) == end
    assert tracer.recorder is None
    asked.done(messages.Trace(2, True))
    assert not posted, "of another recording"
    asked.done(begin)
    assert posted == [(begin, b"front")]
    asked.done()
    assert posted == [(begin, b"front"), (end, b"front")], "the draft is gone"


def test_a_front_that_leaves_ends_its_own_recording(tmp_path: Path) -> None:
    asked, tracer, posted = recordings(tmp_path)
    begin = messages.Trace(1, True)
    asked.ask(b"front", begin)
    assert asked.ask(b"other", messages.Trace(2, True)) is None
    assert [(type(message).__name__, peer) for message, peer in posted] == [("Error", b"other")]
    assert asked.lose(b"other") is None
    assert tracer.number == 1
    assert asked.lose(b"front") == messages.Trace(1, False)
    assert tracer.number == 0
    asked.done(begin)
    assert len(posted) == 1, "nobody is left to hear it"
