"""What `scripts/demo` says of its measurements: made-up records here, for what it prints is what it measured."""

from pathlib import Path
from typing import Any

import pytest

from scripts import demo

RATES = {  # tokens per second by kind of text, of its texts
    "ar": {"edits": [20.0, 40.0, 10.0], "questions": [20.0]},
    "ar, all devices": {"edits": [40.0, 50.0, 10.0], "questions": [30.0]},
    "auto": {"edits": [40.0, 60.0, 30.0], "questions": [15.0]},
}


def document(rows: list[str], **more: Any) -> dict[str, Any]:
    devices = {"ar": "1 core", "ar, all devices": "2 cores", "auto": "2 cores"}
    texts = [
        {"row": row, "set": kind, "task": task, "late_tokens": 2 * rate, "late_seconds": 2.0}
        for row in rows
        for kind, rates in RATES[row].items()
        for task, rate in enumerate(rates, 1)
    ]
    about = {"is_noisy": False, "others": 0.0, "stolen": 0.0}
    return {
        "rows": [{"name": row, "devices": devices[row]} for row in rows],
        "texts": texts,
        **about,
        **more,
    }


def test_figures_are_told_by_kind_and_baseline_text_by_text() -> None:
    """Of edits the ratio on the same text is 2, 1.5 and 3: the ratio of the medians would be another."""
    line = demo.by_kind(document(list(RATES)))
    on_one = "edits 2.00, questions 0.75 times the target on 1 core"
    assert line == on_one + "; edits 1.20, questions 0.50 times on 2 cores"
    assert demo.by_kind(document(["ar", "auto"])) == on_one, "a pair without a second row"


def test_a_busy_machine_is_named_beside_the_figures() -> None:
    line = demo.by_kind(document(["ar", "auto"], is_noisy=True, others=0.1, stolen=0.02))
    assert line.endswith("; rough: others took 12%")


def test_a_text_without_a_rate_is_left_out() -> None:
    """It ended with its first commit."""
    made = document(["ar", "auto"])
    made["texts"][0]["late_tokens"] = 0
    assert demo.by_kind(made).startswith("edits 2.25,")


def test_the_emulated_pair_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each forward of the target takes the pair's time, so that no rate of the target alone can be higher."""
    monkeypatch.setattr(demo, "SECONDS", 0.5)
    pair = next(one for one in demo.pairs() if one.title == demo.PAIR)
    rates = dict(demo.emulated(pair, tmp_path))
    assert list(rates) == ["ar", "sd", "pearl"]
    assert 0 < rates["ar"] <= 1.01 * pair.target_speed
    assert (tmp_path / "sd.json").exists()
    assert (tmp_path / "pearl.json").exists()


def test_the_demo_is_a_rewriting_task_by_auto() -> None:
    script = Path(demo.__file__).with_name("demo").read_text()
    first = script.index(".venv/bin/pearl generate")
    assert "Correct the spelling:" in script[:first]
    assert script[first:].splitlines()[0].count("--method auto") == 1
