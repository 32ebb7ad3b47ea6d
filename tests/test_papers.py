"""The papers' tables: their data, the figures that fill them, and the page made from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from pearl.cli.tables import print_table
from pearl.config import EngineConfig
from pearl.lab.bench.tasks import Task
from pearl.lab.papers import emulate, study
from pearl.lab.papers.pearl import OTHERS, TABLES, Pair, Run, cells_of, pairs
from pearl.lab.papers.studies import STUDIES
from tests.conftest import TOY, Quiet
from tests.test_bench import pearl

# ---- PEARL's own ----


def test_the_pairs_are_the_papers() -> None:
    """Seven of them, whose rates are those of Table 4 where it has them.

    Tables 1 and 2 follow from Tables 4 and 7: no cell of PEARL is off by more than 6% in closed form.
    """
    found = pairs()
    assert [pair.published.speedup["pearl"] for pair in found] == [2.35, 3.79, 3.01, 2.75, 3.48, 2.87, 2.48]
    assert [pair.vocabulary for pair in found] == [32000, 32000, 32000, 32256, 32256, 32000, 32000]
    for pair in found:
        a, origin = pair.acceptance()
        assert (Path(__file__).parent.parent / "configs" / f"{pair.config}.yaml").exists()
        if pair.published.mean_accepted:
            assert origin == "from Table 4"
            assert 1 / (1 - a) == pytest.approx(pair.published.mean_accepted["pearl"])
        else:
            assert Run("sd", pair.gamma).closed_form(pair) == pytest.approx(pair.published.speedup["sd"])
    for pair in found:
        predicted = Run("pearl", pair.window).closed_form(pair)
        assert predicted == pytest.approx(pair.published.speedup["pearl"], rel=0.06)


def test_each_table_has_the_cells_of_the_paper() -> None:
    cells = {name: [cell for pair in pairs() for cell in cells_of(pair, name)] for name in TABLES}
    known = {name: sum(cell.paper is not None for cell in some) for name, some in cells.items()}
    # Table 1 has no row for its first, 1.00; PEARL's figure stands beside fixed and beside stream. Table 4's stands
    # beside either way to count.
    assert known == {"1": 25, "2": 11, "3": 12, "4": 16, "5": 15, "6": 15, "7": 7, "figure 2a": 2}
    assert not any(cell.run for some in cells.values() for cell in some if cell.label in OTHERS)


@pytest.mark.slow
def test_closed_form_simulator_and_runtime_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every cell; the runtime has each, is never faster than its simulation."""
    out = tmp_path / "it.json"
    small = {
        "name": "Small",
        "tables": ["1", "3", "4", "5", "figure 2a"],
        "config": "toy",
        "vocabulary": 500,
        "draft_speed": 1000,
        "target_speed": 250,
        "window": 4,
        "gamma": 4,
        "published": {
            "speedup": {"pearl": 2.5, "sd": 1.9, "lookahead": 1.1},
            "mean_accepted": {"pearl": 5},
            "windows": {3: 500},
            "idle": {"draft": 0.004, "target": 0.004},
        },
    }
    monkeypatch.setattr("pearl.cli.paper.pairs", lambda: [convert(small, Pair)])
    arguments = ("--tokens", 50, "--repeats", 1, "--json", out)
    done = pearl("paper", "pearl", *arguments)
    assert done.exit_code == 0, done.output
    made = json.loads(out.read_text())
    assert made["emulated"] is True
    assert list(made["tables"]) == ["1", "3", "4", "5", "7", "figure 2a"]
    for cell in (cell for rows in made["tables"].values() for cell in rows if cell["label"] != "lookahead"):
        assert cell["runtime"] > 0
        if cell["theory"] is not None:
            assert cell["simulator"] == pytest.approx(cell["theory"], rel=0.02), cell
        if cell["of_simulated"]:
            assert cell["of_simulated"][2] <= 1.01
    assert [cell["runtime"] for cell in made["tables"]["1"]][-1] is None


def test_simulating_alone_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "measure", None)
    done = pearl("paper", "pearl", "--simulate-only", "--pair", "7B & 34B", "--table", "1", "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [cell["runtime"] for cell in made["tables"]["1"]] == [None] * 5
    assert [cell["simulator"] is None for cell in made["tables"]["1"]] == [False, False, False, True, True]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_tables_fit_the_terminal_and_cut_no_word(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """They were squeezed into columns of a few letters, with an ellipsis for the rest."""
    monkeypatch.setenv("COLUMNS", str(width))
    row = ["sd, joint, 2 beams", "", "0.391 (0.386-0.4)", "22: 22.0, sd 0.1, of 85", *(f"{i}, sd 1" for i in range(5))]
    print_table(study.COLUMNS, [row] * 3, "A note of several words. " * 9, words=2, title="A title of words. " * 9)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(sum(cell in line for line in lines) >= 3 for cell in row)
    assert not any("theirs" in line for line in lines), "no cell"


# ---- studies of other papers ----


@pytest.mark.slow
def test_studies_of_rejections_and_of_perplexity() -> None:
    """On a pair of toys; the first has a coin, so that no token is impossible."""
    config, tasks = EngineConfig(target=TOY + ",coin=1", draft=TOY + ",coin=1"), [Task("x", 1, ("hello",))]
    found = study.run_study(STUDIES["theory"], tasks, 60, Quiet(), config)
    assert [one["label"] for one in found] == [row.label for row in STUDIES["theory"].rows]
    ar, ratio, *relaxed = found
    assert ar["speedup"] == [1.0, 1.0, 1.0]
    assert ar["expected"] is None
    assert ratio["bias"] == 0
    assert ratio["tokens_per_step"] > 1
    assert all((one["bias"] > 0) == (not one["label"].startswith("batch")) for one in relaxed)
    mjsd = STUDIES["mjsd"]
    found = study.run_study(mjsd, tasks, 24, Quiet(), EngineConfig(target=TOY, draft=TOY))
    assert len(found) == len(mjsd.rows) + len(mjsd.joint)
    assert all(one["perplexity"] >= 1 for one in found)
    ar, joint = found[0], found[-len(mjsd.joint) :]
    assert all(one["perplexity"] < ar["perplexity"] for one in joint), "sampling is no search"
    assert {len(words) for words in study.in_words(mjsd, found).rows} == {len(study.COLUMNS)}
