"""The proof of the GPU path, rehearsed: every step runs on a CPU with tiny models, and notices what is wrong."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from pearl.lab.bench import proof
from pearl.lab.bench.proof import REHEARSAL, STEPS, Figure, Scale, full
from pearl.lab.bench.shapes import SHAPES
from pearl.models.graphs import Graphs
from pearl.models.slots import Slots

SCRIPT = Path(__file__).parents[1] / "scripts" / "prove_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prove_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_step_passes_in_a_rehearsal(script: ModuleType, tmp_path: Path) -> None:
    run = CliRunner().invoke(script.main, ["--rehearse", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(step["step"], step["passed"], step["error"]) for step in found["steps"]] == [(n, True, "") for n in STEPS]
    assert all(step["figures"] for step in found["steps"])
    assert found["rehearsal"]
    assert found["hardware"]["versions"]["torch"] == torch.__version__
    assert run.exit_code == 0, run.output
    assert "all passed" in run.output


def failures(step: str) -> list[str]:
    return [figure.what for figure in STEPS[step](REHEARSAL) if not figure.passed]


def test_a_rollback_that_leaves_a_nan_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures("graphs") == []
    monkeypatch.setattr(Slots, "_clear", lambda self, slot, length: None)
    assert "rows that see a NaN after a rollback" in failures("graphs")


def test_a_recording_that_looks_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is off by one position: for recorded forwards only, as a graph with a stale buffer would be."""
    few = Graphs._few

    def stale(self: Graphs, feed, start: int, end: int, device):  # type: ignore[no-untyped-def]
        return few(self, feed, start - 1 if start > 300 else start, end, device)

    monkeypatch.setattr(Graphs, "_few", stale)
    assert "largest difference from transformers" in failures("graphs")


def test_recordings_that_are_made_amid_a_text_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.models.llama.LlamaRunner._record_all", lambda self, slots: None)
    assert failures("recordings") == ["recordings at load", "made amid a text"]


def test_chained_tokens_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = proof._drafted

    def wrong(runner, prompt, count, chained, *how):  # type: ignore[no-untyped-def]
        tokens, *rest = drafted(runner, prompt, count, chained, *how)
        return [token + chained for token in tokens], *rest

    monkeypatch.setattr(proof, "_drafted", wrong)
    assert len(failures("chains")) == 6, "with lookup and without"


def test_a_step_that_fails_or_breaks_is_told_and_the_others_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: Scale) -> Iterator[Figure]:
        yield Figure("so far", 1.0)
        raise RuntimeError("CUDA error")

    def fails(_: Scale) -> Iterator[Figure]:
        yield Figure("too slow", 2.0, "ms", "at most 1", False)

    for name, step in (("rows", breaks), ("graphs", fails), ("speed", lambda _: iter([Figure("fine", 3.0)]))):
        monkeypatch.setitem(STEPS, name, step)
    wanted = [part for name in ("rows", "graphs", "speed") for part in ("--only", name)]
    run = CliRunner().invoke(script.main, ["--rehearse", *wanted, "--json", str(tmp_path / "found.json")])
    assert run.exit_code == 1
    assert "failed: rows, graphs" in run.output
    found = json.loads((tmp_path / "found.json").read_text())["steps"]
    assert [(step["passed"], step["error"], len(step["figures"])) for step in found] == [
        (False, "RuntimeError: CUDA error", 1),
        (False, "", 1),
        (True, "", 1),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_what_can_be_done(script: ModuleType) -> None:
    run = CliRunner().invoke(script.main, [])
    assert run.exit_code == 2
    assert "--rehearse" in run.output


@pytest.mark.parametrize("small", [False, True])
def test_the_full_scale_names_shapes_that_there_are(small: bool) -> None:
    scale = full(torch.device("cuda", 0), small)
    assert {scale.wide, scale.pair, *scale.timed} <= SHAPES.keys()
    assert not scale.rehearses
    assert scale.record is None
