"""The papers' tables: their data, the figures that fill them, and the page made from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pearl.config import EngineConfig
from pearl.errors import ConfigError
from pearl.lab import theory
from pearl.lab.bench.figures import figures
from pearl.lab.bench.rows import Row
from pearl.lab.bench.runner import Measured
from pearl.lab.bench.tasks import Task
from pearl.lab.papers import STUDIES, emulate, mjsd, page, study
from pearl.lab.papers.pearl import OTHERS, TABLES, Pair, Run, pairs, wanted
from pearl.metrics import Statistics
from tests.conftest import TOY
from tests.test_bench import TWO, Quiet, pearl, plan_of, sample

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
    cells = {name: [cell for pair in pairs() for cell in wanted(pair, name)] for name in TABLES}
    known = {name: sum(cell.paper is not None for cell in some) for name, some in cells.items()}
    # Table 1 has no row for its first, 1.00; PEARL's figure stands beside fixed and beside stream. Table 4's stands
    # beside either way to count.
    assert known == {"1": 25, "2": 11, "3": 12, "4": 16, "5": 15, "6": 15, "7": 7, "figure 2a": 2}
    assert not any(cell.run for some in cells.values() for cell in some if cell.label in OTHERS)


def pair_of(**published: Any) -> Pair:
    speeds = {"target_speed": 250, "draft_speed": 1000, "window": 4, "gamma": 4}
    return Pair.model_validate({"name": "p", "config": "toy", **speeds, "published": published})


def test_published_figures_settle_the_acceptance_rate_in_this_order() -> None:
    known = {"mean_accepted": {"pearl": 5.0}, "speedup": {"sd": 1.8, "pearl": 2.0}}
    assert pair_of(**known).acceptance() == (pytest.approx(0.8), "from Table 4")
    a, origin = pair_of(speedup=known["speedup"]).acceptance()
    assert theory.sd_improvement(a, 4, 1 / 4) == pytest.approx(1.8)
    assert origin == "fitted to the row of sd"
    with pytest.raises(ConfigError, match=r"no acceptance rate makes it 4\.5 times as fast"):
        pair_of(speedup={"sd": 4.5}).acceptance()
    with pytest.raises(ConfigError, match="no published figure"):
        pair_of(speedup={"pearl": 2.0}).acceptance()


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
    monkeypatch.setattr("pearl.cli.paper.pairs", lambda: [Pair.model_validate(small)])
    arguments = ("--tokens", 50, "--repeats", 1, "--json", out)
    done = pearl("bench", "paper", *arguments)
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
    done = pearl("bench", "paper", "--simulate-only", "--pair", "7B & 34B", "--table", "1", "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [cell["runtime"] for cell in made["tables"]["1"]] == [None] * 5
    assert [cell["simulator"] is None for cell in made["tables"]["1"]] == [False, False, False, True, True]


def test_a_table_has_a_row_for_each_pair_and_a_column_for_each_method() -> None:
    def cell(label: str, runtime: float | None, share: float | None) -> dict[str, Any]:
        spread = None if share is None else [share, share - 0.01, share + 0.01]
        figures = {"paper": 2.0, "simulator": None if runtime is None else 1.9, "runtime": runtime}
        return {"pair": "A & B", "label": label, "unit": "speed-up", "of_simulated": spread} | figures

    some = [cell("sd, gamma 4", 1.8, 0.95), cell("pearl, fixed(3)", 2.1, 0.99), cell("ouroboros", None, None)]
    result = {"tables": {"1": some, "4": [cell("sd, gamma 4, accepted", 1.8, 0.95)]}}
    first, _ = page.tables(result)
    assert first.columns == ["pair", "sd", "pearl, fixed", "ouroboros", "of simulated"]
    assert first.rows == [["A & B", "2.00/1.90/1.80", "2.00/1.90/2.10", "2.00", "0.950-0.990"]]


# ---- studies of other papers ----


def test_each_row_of_a_study_is_compared_with_one_of_it() -> None:
    for name in STUDIES:
        about = study.load(name)
        labels = [row.label for row in about.rows]
        assert len(labels) == len(set(labels))
        assert {row.base for row in about.rows} <= set(labels)
        assert about.differs
        assert about.left_out


def test_a_row_of_a_study_adds_its_texts_up() -> None:
    """Rejections, their expectation and its deviation, as of one long text; runs with mean and deviation."""
    own = [
        Statistics(
            num_judged_draft_tokens=20,
            num_rejections=5,
            expected_rejections=4.0,
            expected_rejections_sd=deviation,
            bias=1.0,
            run_histogram={"1": 1, "3": 1},
        )
        for deviation in (3.0, 4.0)
    ]
    plan = plan_of([Row("ar", "pair", TWO), Row("ratio", "pair", TWO)])
    samples = [sample("ar", i, rate) for i, rate in ((1, 10.0), (2, 20.0))]
    samples += [sample("ratio", i, rate, judged=20, accepted=15, steps=101) for i, rate in ((1, 20.0), (2, 40.0))]
    _, ratio = figures(plan, Measured(samples))
    found = study.row_document(study.load("theory").rows[1], ratio, own)
    assert (found["speedup"], found["tokens_per_step"], found["acceptance"]) == ([2.0, 2.0, 2.0], 1.0, 0.75)
    assert found["run"] == [2.0, 1.0]
    assert (found["rejected"], found["expected"], found["sd"], found["bias"]) == (10, 8.0, 5.0, 0.05)
    words = study.in_words(study.load("theory"), [found]).rows[0]
    assert words[0] == "ratio"
    assert words[2:] == ["2.00", "1.00", "0.75", "2.0, sd 1.0", "10: 8.0, sd 5.0, of 40", "0.050", ""]


@pytest.mark.slow
def test_studies_of_rejections_and_of_perplexity() -> None:
    """On a pair of toys; the first has a coin, so that no token is impossible."""
    config, tasks = EngineConfig(target=TOY + ",coin=1", draft=TOY + ",coin=1"), [Task("x", 1, ("hello",))]
    found = study.run_study(study.load("theory"), tasks, 60, Quiet(), config)
    assert [one["label"] for one in found] == [row.label for row in study.load("theory").rows]
    ar, ratio, *relaxed = found
    assert ar["speedup"] == [1.0, 1.0, 1.0]
    assert ar["expected"] is None
    assert ratio["bias"] == 0
    assert ratio["tokens_per_step"] > 1
    assert all((one["bias"] > 0) == (not one["label"].startswith("batch")) for one in relaxed)
    found = study.run_study(mjsd.STUDY, tasks, 24, Quiet(), EngineConfig(target=TOY, draft=TOY))
    assert len(found) == len(mjsd.STUDY.rows) + len(mjsd.JOINT)
    assert all(one["perplexity"] >= 1 for one in found)
    ar, joint = found[0], found[-len(mjsd.JOINT) :]
    assert all(one["perplexity"] < ar["perplexity"] for one in joint), "sampling is no search"
    assert {len(words) for words in study.in_words(mjsd.STUDY, found).rows} == {len(study.COLUMNS)}
