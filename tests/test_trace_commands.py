"""`pearl trace`: reports and pictures of runs in virtual time, where the right ones are known."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pearl.cli import cli
from pearl.errors import ConfigError, TraceError
from pearl.extras import installing
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import Provenance, Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.trace import chrome
from pearl.trace.figures import side_by_side
from pearl.trace.gantt import _PAUSE, LOOKS, Bar, _bars, _merged, chart, same_time
from pearl.trace.reading import Slice, read
from pearl.trace.recorder import part_path, part_paths
from pearl.trace.report import report
from tests.traced import PROMPT, VOCAB, altered, recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A pearl run with rejections, in virtual time."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    outcome, _ = recorded(path, RequestOptions("pearl"), alpha=0.8, tokens=400)
    return outcome, path


def invoked(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["trace", *arguments], catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


def test_report(run: tuple[Outcome, Path]) -> None:
    found = json.loads(invoked("report", "--json", str(run[1])))
    assert found == json.loads(json.dumps(report(read(run[1])).as_dict()))
    text = invoked("report", str(run[1]))
    for row in ("target: busy", "draft: waits for", "both in a forward", "in alternation", "never judged"):
        assert row in text


def test_a_forward_that_was_done_before_its_loop_asked_for_it_counts(run: tuple[Outcome, Path], tmp_path: Path) -> None:
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
    assert (found.drafted, found.judged, found.accepted) == (before.drafted, before.judged, before.accepted)
    assert before.judged > 0


def test_compare(run: tuple[Outcome, Path], tmp_path: Path) -> None:
    sd = tmp_path / "sd.json"
    recorded(sd, RequestOptions("sd", gamma=4), alpha=0.8, tokens=400)
    text = invoked("compare", str(sd), str(run[1]))
    rates = [report(read(path)).tokens_per_second for path in (sd, run[1])]
    assert f"is {rates[1] / rates[0]:.2f} times as fast" in " ".join(text.split())
    assert set(json.loads(invoked("compare", "--json", str(sd), str(run[1])))) == {str(sd), str(run[1])}


def test_what_only_one_run_has_stands_beside_its_neighbours(tmp_path: Path) -> None:
    """Forwards in the order of the tokens that they were fed, and nothing between them."""
    runs = [recorded(tmp_path / "a.json", RequestOptions("ar"), tokens=60)[1]]
    runs += [
        recorded(tmp_path / f"{i}.json", RequestOptions("sd", gamma=g), alpha=0.8)[1] for i, g in enumerate((9, 2))
    ]
    names = [name for name, _ in side_by_side([report(run) for run in runs])]
    forwards = [name for name in names if name.startswith("forward: verify")]
    fed = [int(name.split()[-1]) for name in forwards]
    assert fed == sorted(fed)
    assert {1, 3, 10} <= set(fed)
    assert names[names.index(forwards[0]) :][: len(forwards)] == forwards
    assert (
        names.index("target: busy")
        < names.index("draft: busy")
        < names.index("draft tokens")
        < names.index(forwards[0])
    )
    assert len(names) == len(set(names))


def unpaired(document: dict[str, Any]) -> None:
    """Without the end of one arrow."""
    document["traceEvents"].remove(next(e for e in document["traceEvents"] if e["ph"] == "f"))


def test_check_and_replay(run: tuple[Outcome, Path], tmp_path: Path) -> None:
    assert "sound" in invoked("check", str(run[1]))
    assert "all the same" in invoked("replay", str(run[1]))
    broken = altered(run[1], tmp_path / "t.json", unpaired)
    result = CliRunner().invoke(cli, ["trace", "check", str(broken)])
    assert "1 starts and 0 ends" in result.output
    assert isinstance(result.exception, TraceError)


def test_merge_of_what_a_killed_run_has_left(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    recorded(path, RequestOptions("pearl"), tokens=30)
    path.rename(tmp_path / "whole.json")
    target, draft = alpha_pair(VOCAB, 1.0)
    executors = paired_executors(ToyRunner(VOCAB, target), ToyRunner(VOCAB, draft))
    submit = Submit(1, PROMPT, 33, RequestOptions("pearl", sampling=Sampling(1.0, seed=5)))
    simulate(
        submit,
        *executors,
        Timing(1.0, lambda _: 5.0),
        parts=(part_path(path, "target", 1), part_path(path, "draft", 2)),
    )
    assert "events" in invoked("merge", str(path))
    assert report(read(path)).tokens == 30
    assert part_paths(path) == []


def test_a_chart_has_the_bars_of_both_workers(run: tuple[Outcome, Path]) -> None:
    """Virtual time: t_draft 1 s, t_target 5 s; the first forward of each is its prefill."""
    shown = chart(read(run[1]), seconds=40.0)
    target, draft = shown.rows["target"], shown.rows["draft"]
    assert [(bar.look, bar.start, bar.end) for bar in target if bar.end > bar.start][:2] == [
        ("prefill", 0.0, 5.0),
        ("post-verify", 5.0, 10.0),
    ]
    assert {"accepted", "rejected"} < {bar.look for bar in draft} < set(LOOKS)
    corrections = [s for s in read(run[1]).target if s.name == "judge" and s.args["correction"] is not None]
    assert sum(c.is_rejection for c in shown.commits) == len([s for s in corrections if s.end <= 40.0]) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("show",), "Missing option '--png'"), (("report", "--html", "it.html"), "No such option '--html'")],
)
def test_a_chart_has_one_form(run: tuple[Outcome, Path], arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(cli, ["trace", *arguments, str(run[1])])
    assert result.exit_code == 2
    assert words in result.output


def test_gantt_of_a_part(run: tuple[Outcome, Path]) -> None:
    whole = chart(read(run[1]))
    part = chart(read(run[1]), start=10.0, seconds=5.0)
    assert (part.start, part.end) == (10.0, 15.0)
    assert whole.end < 70
    for start, seconds in ((-1.0, None), (1e9, None), (0.0, 0.0)):
        with pytest.raises(ConfigError, match="nothing to show"):
            chart(read(run[1]), start, seconds)


def test_png(run: tuple[Outcome, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    invoked("show", str(run[1]), "--png", str(tmp_path / "g.png"))
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(cli, ["trace", "show", str(run[1]), "--png", str(tmp_path / "no" / "g.png")])
    assert isinstance(result.exception, TraceError)


def test_short_work_does_not_cut_a_wait() -> None:
    """A heartbeat, or noting a message, between two waits: one bar, of the cause that took longest."""
    tick = _PAUSE / 10
    bars = [
        Bar(0.0, 0.010, "wait", "verdict"),
        Bar(0.010, 0.010 + tick, "other"),
        Bar(0.010 + 2 * tick, 0.050, "wait", "verdict"),
        Bar(0.050, 0.051 - tick, "wait", "transport"),
        Bar(0.051, 0.061, "accepted"),
        Bar(0.061, 0.070, "wait", "verdict"),
        Bar(0.070, 0.070 + 2 * _PAUSE, "other"),
        Bar(0.070 + 2 * _PAUSE, 0.090, "wait", "verdict"),
        Bar(0.090, 0.090 + tick, "other"),
    ]
    merged = _merged(bars)
    assert [(b.look, b.start, b.end) for b in merged[:2]] == [("wait", 0.0, 0.051 - tick), ("accepted", 0.051, 0.061)]
    assert merged[0].cause == "verdict"
    assert [b.look for b in merged[2:]] == ["wait", "other", "wait", "other"]


def test_two_runs_in_one_picture(run: tuple[Outcome, Path], tmp_path: Path) -> None:
    """On one scale of time: sd waits about half of it, pearl hardly, and its text grows faster."""
    pytest.importorskip("matplotlib")
    recorded(tmp_path / "sd.json", RequestOptions("sd", gamma=4), alpha=0.8, tokens=400)
    charts = same_time([read(tmp_path / "sd.json"), read(run[1])])
    assert [c.method for c in charts] == ["sd", "pearl as published"]
    assert [(c.start, c.end) for c in charts] == [(0.0, pytest.approx(charts[0].end))] * 2
    assert charts[0].shares("target")[1] > 0.3 > 0.1 > charts[1].shares("target")[1]
    assert {bar.cause for bar in charts[0].rows["target"] if bar.look == "wait"} == {"draft tokens"}
    assert sum(c.tokens for c in charts[0].commits) <= sum(c.tokens for c in charts[1].commits)
    both = ("compare", str(tmp_path / "sd.json"), str(run[1]))
    invoked(*both, "--png", str(tmp_path / "g.png"), "--seconds", "30")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    for wrong in (("--seconds", "30"), ("--png", str(tmp_path / "no" / "g.png"))):
        assert CliRunner().invoke(cli, ["trace", *both, *wrong]).exit_code != 0


def test_commits_are_the_text(run: tuple[Outcome, Path]) -> None:
    outcome, path = run
    whole = chart(read(path), seconds=1e6)
    assert [source for commit in whole.commits for source in commit.sources] == [p.value for p in outcome.provenance]
    assert sum(c.is_rejection for c in whole.commits) == outcome.counts.provenance[Provenance.CORRECTED]
    assert sum(arrow.is_rejection for arrow in whole.verdicts) == sum(c.is_rejection for c in whole.commits)


def test_a_chart_names_what_guesses_beside_the_draft(tmp_path: Path) -> None:
    """A branch that came true is marked where it was drafted."""
    _, plain = recorded(tmp_path / "a.json", RequestOptions("pearl"), tokens=50)
    assert chart(plain).method == "pearl as published"
    outcome, trace = recorded(tmp_path / "b.json", RequestOptions("pearl", branches=7), alpha=0.6, tokens=200)
    shown = chart(trace, seconds=1e6)
    assert shown.method == "pearl with branches"
    assert outcome.counts.foreseen > 0
    assert len(shown.foreseen) > 0


def test_a_forward_of_several_tokens_is_divided_among_them() -> None:
    one = Slice("draft", "busy", 1.0, 2.5, {"fate": "accepted", "fates": ["accepted", "accepted", "rejected"]})
    assert [(bar.start, bar.end, bar.look) for bar in _bars(one, 1.0)] == [
        (0.0, 0.5, "accepted"),
        (0.5, 1.0, "accepted"),
        (1.0, 1.5, "rejected"),
    ]


def test_a_missing_library_is_named(run: tuple[Outcome, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(cli, ["trace", "show", str(run[1]), "--png", str(tmp_path / "g")])
    assert isinstance(result.exception, TraceError)
    assert installing("plot") in str(result.exception)


@pytest.fixture(autouse=True)
def _no_parts_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("*.tmp"))
