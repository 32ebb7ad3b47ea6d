"""Runs in virtual time and their traces. A draft forward takes 1 s."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from pearl.config import EngineConfig, RequestOptions
from pearl.engine import Engine
from pearl.execution.target import Event
from pearl.lab.studies.simulate import Outcome, Simulation, Timing, paired_executors
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.events import Drafted, Forwarded, Send
from pearl.protocol.messages import Submit, Verdict
from pearl.trace import chrome
from pearl.trace.reading import RunTrace, read
from pearl.trace.recorder import Recorder, part_path, part_paths, where_and_what
from pearl.trace.tracer import Tracer, identity
from tests.conftest import eventually
from tests.options import drawn_by, resolved
from tests.replace import replace

VOCAB, PROMPT = 12, (1, 2, 3)


@contextmanager
def recording_of(engine: Engine, path: Path) -> Iterator[None]:
    """Write a trace of what the engine does within the block to the file `path`.

    It is made from a recording, like the one that the server's page shows.
    """
    recording = engine.client.recording
    name = recording.start()
    try:
        yield
    finally:
        # Removed by `stop`, before the workers have written their ends.
        files = {part.name.replace(name.name, path.name): part.open() for part in part_paths(name)}
        recording.stop()
    for part, file in files.items():
        pid = part.removesuffix(".part").rpartition("-")[2]
        path.with_name(part).write_text(_whole(file, Path("/proc", pid)))
    chrome.merge(path)


def _whole(part: TextIO, process: Path) -> str:
    """Return the part that a worker writes, once it is complete or the worker has been killed."""
    text = ""

    def is_complete() -> bool:
        nonlocal text
        is_killed = not process.exists()
        text += part.read()
        return is_killed or '\n["end"' in text

    with part:
        eventually(is_complete)
    return text


class _TracedSimulation(Simulation):
    """A simulation that records traces as two workers do, with the virtual clock."""

    def record(self, submit: Submit, parts: tuple[Path, Path]) -> Outcome:
        self._tracers = [
            self._tracer(path, role) for path, role in zip(parts, ("target", "draft"), strict=True)
        ]
        self._free_since: list[int | None] = [0, 0]  # by actor; None: in a forward
        outcome = self.run(submit)
        for tracer in self._tracers:
            tracer.stop()
        return outcome

    def _tracer(self, path: Path, role: str) -> Tracer:
        config = EngineConfig(target="virtual", draft="virtual").model_dump()
        header = {"role": role, "run": "virtual", "config": config}
        return Tracer(
            Recorder(path, header | where_and_what(), clock=lambda: round(self._now * 1e9))
        )

    def _handle(self, actor: int, event: object) -> list[object]:
        since, tracer = self._free_since[actor], self._tracers[actor]
        if since is not None and since < tracer.clock():
            tracer.waited(since, tracer.clock(), event)
        if isinstance(event, Verdict):
            tracer.note("communication", "read", tracer.clock(), messages=[identity(event)])
        if since is not None or isinstance(event, (Forwarded, Drafted)):
            self._free_since[actor] = tracer.clock()
        machine = self._drafter if actor else self._coordinator
        return tracer.decide(machine, event)

    def _carry_out(self, actor: int, command: object) -> None:
        if isinstance(command, Send):
            tracer = self._tracers[actor]
            tracer.note("communication", "send", tracer.clock(), message=identity(command.message))
        super()._carry_out(actor, command)

    def _compute(self, actor: int, command: object) -> tuple[Event | None, float]:
        event, seconds = super()._compute(actor, command)
        start = self._tracers[actor].clock()
        self._tracers[actor].computed(command, event, start, round((self._now + seconds) * 1e9))
        if isinstance(event, (Forwarded, Drafted)):
            self._free_since[actor] = None
        return event, seconds


def simulated(
    path: Path,
    decoding: RequestOptions,
    t_target: float = 5.0,
    alpha: float = 1.0,
    tokens: int = 500,
    delay: float = 0.0,
) -> tuple[Outcome, tuple[Path, Path]]:
    """Simulate a run; return its outcome and the target's and the draft's part of its trace."""
    target, draft = alpha_pair(VOCAB, alpha)
    executors = paired_executors(ToyRunner(VOCAB, target), ToyRunner(VOCAB, draft))
    submit = Submit(
        1, PROMPT, len(PROMPT) + tokens, replace(decoding, sampling=drawn_by(1.0, seed=5))
    )
    parts = part_path(path, "target", 1), part_path(path, "draft", 2)
    return _TracedSimulation(*executors, Timing(1.0, lambda _: t_target, delay)).record(
        submit, parts
    ), parts


def recorded(path: Path, decoding: RequestOptions, **settings: Any) -> tuple[Outcome, RunTrace]:
    """Simulate a run; return its outcome and its merged trace. `settings`: see `simulated`."""
    outcome, _ = simulated(path, decoding, **settings)
    chrome.merge(path)
    return outcome, read(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """Return the outcome and the trace file of a simulated pearl run with rejections."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    outcome, _ = recorded(path, resolved("pearl"), alpha=0.8, tokens=400)
    return outcome, path


def check_sound(path: Path) -> None:
    """Check that a trace file is well formed.

    Slices of a track nest, tracks have names, and each flow starts and ends within slices.
    """
    events = json.loads(path.read_text())["traceEvents"]
    tracks: dict[Any, list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], -e["dur"]))
    assert set(tracks) <= {
        (e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    }
    for inside in tracks.values():
        ends: list[float] = []
        for start, negative in sorted(inside):
            while ends and ends[-1] <= start + 0.002:
                ends.pop()
            assert not ends or start - negative <= ends[-1] + 0.002
            ends.append(start - negative)
    flows = sorted(
        (e["id"], e["ph"] == "f", e["ts"], e["pid"], e["tid"]) for e in events if e["ph"] in "sf"
    )
    assert len(flows) % 2 == 0
    for (a, begins, start, *_), (b, ends_, end, *_) in zip(flows[::2], flows[1::2], strict=True):
        assert (a, begins, ends_) == (b, False, True)
        assert start <= end + 0.002
    for _, _, at, *track in flows:
        assert any(
            start - 0.002 <= at <= start - negative + 0.002
            for start, negative in tracks[tuple(track)]
        )
