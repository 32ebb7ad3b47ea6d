"""`scripts/prove_gpu.py`, rehearsed: every step runs on a CPU with tiny models, and notices planted bugs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pearl.models.graphs import Graphs
from pearl.models.slots import Slots

Script = Any


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
        yield importlib.import_module("prove_gpu")


@pytest.mark.slow
def test_every_step_passes_in_a_rehearsal(script: Script, tmp_path: Path) -> None:
    run = CliRunner().invoke(script.main, ["--rehearse", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    steps = [(step["step"], step["passed"], step["error"]) for step in found["steps"]]
    assert steps == [(name, True, "") for name in script.STEPS]
    assert all(step["figures"] for step in found["steps"])
    assert found["rehearsal"]
    assert found["hardware"]["versions"]["torch"] == torch.__version__
    assert run.exit_code == 0, run.output
    assert "all passed" in run.output


def leave_a_nan(script: Script, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "_clear", lambda self, slot, length: None)


def look_elsewhere(script: Script, patch: pytest.MonkeyPatch) -> None:
    """Recorded forwards are off by one position, as a graph with a stale buffer would be."""
    few = Graphs._few

    def stale(self: Graphs, feed: Any, start: int, end: int, device: Any) -> Any:
        return few(self, feed, start - 1 if start > 300 else start, end, device)

    patch.setattr(Graphs, "_few", stale)


def record_late(script: Script, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pearl.models.llama.LlamaRunner._record_all", lambda self, slots: None)


def draft_otherwise(script: Script, patch: pytest.MonkeyPatch) -> None:
    draft = script.draft_text

    def wrong(runner: Any, prompt: Any, count: int, chained: bool, options: Any) -> Any:
        tokens, *rest = draft(runner, prompt, count, chained, options)
        return [token + chained for token in tokens], *rest

    patch.setattr(script, "draft_text", wrong)


@pytest.mark.parametrize(
    ("plant", "step", "named", "count"),
    [
        (leave_a_nan, "graphs", "rows that see a NaN after a rollback", 1),
        (look_elsewhere, "graphs", "largest difference from transformers", 1),
        (record_late, "recordings", "recordings at load", 2),
        (draft_otherwise, "chains", "greedy: with lookup", 6),
    ],
)
def test_planted_bugs_are_noticed(
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Script, pytest.MonkeyPatch], None],
    step: str,
    named: str,
    count: int,
) -> None:
    plant(script, monkeypatch)
    failures = [figure.what for figure in script.STEPS[step](script.REHEARSAL) if not figure.passed]
    assert named in failures
    assert len(failures) >= count


def test_steps_that_fail_are_named_and_the_others_run(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: object) -> Iterator[object]:
        yield script.Figure("so far", 1.0)
        raise RuntimeError("CUDA error")

    bad, good = script.Figure("too slow", 2.0, "ms", "at most 1", False), script.Figure("fine", 3.0)
    for name, step in (("rows", breaks), ("graphs", lambda _: iter([bad])), ("speed", lambda _: iter([good]))):
        monkeypatch.setitem(script.STEPS, name, step)
    wanted = [part for name in ("rows", "graphs", "speed") for part in ("--only", name)]
    run = CliRunner().invoke(script.main, ["--rehearse", *wanted, "--json", str(tmp_path / "found.json")])
    assert run.exit_code == 1
    assert "failed: rows, graphs" in run.output
    found = json.loads((tmp_path / "found.json").read_text())["steps"]
    errors = [(step["passed"], step["error"], len(step["figures"])) for step in found]
    assert errors == [(False, "RuntimeError: CUDA error", 1), (False, "", 1), (True, "", 1)]
    if not torch.cuda.is_available():
        refused = CliRunner().invoke(script.main, [])
        assert refused.exit_code == 2
        assert "--rehearse" in refused.output
