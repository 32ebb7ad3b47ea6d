"""`pearl trace`: reports and pictures of runs in virtual time, where the right ones are known."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pearl.cli import cli
from pearl.colours import WORK
from pearl.errors import ConfigError
from pearl.lab.studies.simulate import Outcome
from pearl.protocol.messages import Provenance
from pearl.trace import chrome
from pearl.trace.gantt import chart, charts
from pearl.trace.reading import read
from pearl.trace.recorder import part_paths
from pearl.trace.report import Report, WorkerShares, report, verdict
from tests.conftest import ran
from tests.options import resolved
from tests.replace import replace
from tests.traced import recorded, run, simulated

__all__ = ["run"]  # a fixture


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "sd.json"
    recorded(path, resolved("sd", gamma=4), alpha=0.8, tokens=400)
    return path


def invoked(*arguments: str) -> str:
    return ran("trace", *arguments).output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["trace", *arguments])
    assert result.exit_code != 0
    return f"{result.output} {result.exception}"


# ---- reports ----


def test_report(run: tuple[Outcome, Path]) -> None:
    found = json.loads(invoked("report", "--json", str(run[1])))
    assert found == json.loads(json.dumps(asdict(report(read(run[1])))))
    text = invoked("report", str(run[1]))
    for row in (
        "target: busy",
        "draft: waits for",
        "both in a forward",
        "in alternation",
        "never judged",
    ):
        assert row in text
    assert text.startswith("the target never waited in 915.0 s; overlap 98.7%\n")


def waiting(shares: dict[str, float], **more: Any) -> Report:
    """A run of 5 s, in which the target waited so."""
    target = WorkerShares(
        busy=0.4, wait=sum(shares.values()), communication=0.0, uncovered=0.0, waits=shares, work={}
    )
    counts = dict.fromkeys(
        ("drafted", "judged", "accepted", "rejected", "discarded", "prepared"), 0
    )
    draft = replace(target, waits={})
    known: dict[str, Any] = {
        "draft": draft,
        "overlap": 0.008,
        "alternation": 4.25,
        **counts,
        **more,
    }
    return Report("sd", 5.04, 1, 100, 20.0, target, steps={}, forwards={}, ratio=None, **known)


def test_a_report_begins_with_a_verdict() -> None:
    drafting = waiting({"draft tokens": 0.49, "transport": 0.02})
    assert (
        verdict(drafting)
        == "the target waited 51% of 5.0 s, all but 2% for draft tokens; overlap 0.8%"
    )
    several = waiting({"draft tokens": 0.2, "held row": 0.15, "consumer": 0.1}, overlap=0.5)
    assert verdict(several) == "the target waited 45% of 5.0 s, 20% for draft tokens; overlap 50.0%"
    assert (
        verdict(waiting({"consumer": 0.3}, draft=None))
        == "the target waited 30% of 5.0 s, all for requests"
    )
    assert (
        verdict(waiting({"draft tokens": 0.004}, draft=None)) == "the target never waited in 5.0 s"
    )
    assert verdict(waiting({}, draft=None)) == "the target never waited in 5.0 s"


def test_a_run_that_alternates_is_not_compared_with_alternation(sd: Path) -> None:
    """It said "0.85 times as long", of itself without its waits."""
    text = invoked("report", str(sd))
    assert text.splitlines()[0].startswith("the target waited 4")
    assert "in alternation" not in text


def test_a_forward_that_was_done_before_its_loop_asked_for_it_counts(
    run: tuple[Outcome, Path], tmp_path: Path
) -> None:
    """It takes no time of the loop's, and was written after the draw that begins at the same moment."""
    document = json.loads(run[1].read_text())
    events: list[Any] = []
    for event in document["traceEvents"]:
        if event["name"] in chrome.DRAFTED.values() and event["ph"] == "X":
            events.append(event | {"name": "sample", "args": {}})
            event["dur"] = 0
        events.append(event)
    path = tmp_path / "early.json"
    path.write_text(json.dumps(document | {"traceEvents": events}))
    found, before = report(read(path)), report(read(run[1]))
    assert (found.drafted, found.judged, found.accepted) == (
        before.drafted,
        before.judged,
        before.accepted,
    )
    assert before.judged > 0


def test_a_report_of_two_runs(run: tuple[Outcome, Path], sd: Path) -> None:
    text = invoked("report", str(sd), str(run[1]))
    heads = text.splitlines()[:2]
    assert [head.partition(": the target ")[0] for head in heads] == [str(sd), str(run[1])]
    rates = [report(read(path)).tokens_per_second for path in (sd, run[1])]
    assert f"is {rates[1] / rates[0]:.2f} times as fast" in " ".join(text.split())
    assert set(json.loads(invoked("report", "--json", str(sd), str(run[1])))) == {
        str(sd),
        str(run[1]),
    }


# ---- merge ----


def test_merge_of_what_a_killed_run_has_left(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    simulated(path, resolved("pearl"), tokens=30)
    assert "events" in invoked("merge", str(path))
    assert report(read(path)).tokens == 30
    assert part_paths(path) == []


# ---- pictures ----


def test_a_chart_has_the_bars_of_both_workers(run: tuple[Outcome, Path]) -> None:
    """Virtual time: t_draft 1 s, t_target 5 s; the first forward of each is its prefill."""
    shown = chart(read(run[1]), seconds=40.0)
    target, draft = shown.rows["target"], shown.rows["draft"]
    assert [(bar.look, bar.start, bar.end) for bar in target if bar.end > bar.start][:2] == [
        ("prefill", 0.0, 5.0),
        ("post-verify", 5.0, 10.0),
    ]
    assert {"accepted", "rejected"} < {bar.look for bar in draft} < set(WORK)
    part = chart(read(run[1]), start=10.0, seconds=5.0)
    assert (part.start, part.end) == (10.0, 15.0)
    assert chart(read(run[1])).end < 70
    for start, seconds in ((-1.0, None), (1e9, None), (0.0, 0.0)):
        with pytest.raises(ConfigError, match="nothing to show"):
            charts([read(run[1])], start, seconds)


def test_commits_are_the_text(run: tuple[Outcome, Path]) -> None:
    outcome, path = run
    whole = chart(read(path), seconds=1e6)
    assert [source for _, sources in whole.commits for source in sources] == [
        p.value for p in outcome.provenance
    ]
    rejections = sum("corrected" in sources for _, sources in whole.commits)
    assert rejections == outcome.counts.provenance[Provenance.CORRECTED] > 0
    assert sum(arrow.is_rejection for arrow in whole.verdicts) == rejections


def test_two_runs_in_one_picture(run: tuple[Outcome, Path], sd: Path, tmp_path: Path) -> None:
    """On one scale of time: sd waits about half of it, pearl hardly, and its text grows faster."""
    pytest.importorskip("matplotlib")
    both = charts([read(sd), read(run[1])])
    assert [c.method for c in both] == ["sd", "pearl as published"]
    assert [(c.start, c.end) for c in both] == [(0.0, pytest.approx(both[0].end))] * 2
    assert both[0].shares("target")[1] > 0.3 > 0.1 > both[1].shares("target")[1]
    assert {bar.cause for bar in both[0].rows["target"] if bar.look == "wait"} == {"draft tokens"}
    assert both[0].tokens <= both[1].tokens
    assert both[1].rate == pytest.approx(both[1].tokens / both[1].end)
    for command in (("show", str(run[1])), ("show", str(sd), str(run[1]), "--seconds", "30")):
        invoked(*command, "--png", str(tmp_path / "g.png"))
        assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
        assert "cannot write" in refused(*command, "--png", str(tmp_path / "no" / "g.png"))
    assert "Missing option '--png'" in refused("show", str(run[1]))
