"""The simulator against theory, with wrong executors that must be found out; workloads; replays; the commands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from pearl.cli import cli
from pearl.drafting.model import ModelProposer
from pearl.errors import ConfigError, TraceError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab import theory
from pearl.lab.experiments import checks, plots, rejections
from pearl.lab.experiments.compare import AR, FIXED, STREAM, best, compare, sd_at_best
from pearl.lab.experiments.estimate import Estimate, speedup
from pearl.lab.experiments.recorded import interpolated, recorded
from pearl.lab.experiments.workload import Totals, independent, run
from pearl.lab.simulate import CoinTarget, Executor, Outcome, Timing, paired_executors, simulate
from pearl.models.runner import ModelRunner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.events import Drafted, Judge, Judged
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.trace import chrome
from pearl.trace.reading import Trace, read
from pearl.trace.recorder import part_path
from tests.replace import replace
from tests.tiny import tiny_model

VOCAB = 12
PROMPT = (1, 2, 3)
TOKENS = 20_000
STEADY = Timing(1.0, lambda _: 5.0)
TRACED = Timing(0.01, lambda _: 0.05)
SD = RequestOptions("sd", "fixed", 4)
PNG = b"\x89PNG"


# ---- theory ----


@pytest.mark.long
@pytest.mark.parametrize(("a", "c"), [(0.6, 3), (0.8, 5), (0.9, 8)])
def test_the_best_window_found_is_theorem_1s(a: float, c: int) -> None:
    assert checks.best_window(a, c, 3000, seed=1).passed


@pytest.mark.parametrize(
    ("held", "at", "count"),
    [
        (checks.pearl_yield, (0.8, 5), 4),
        pytest.param(checks.pearl_yield, (0.9, 5), 4, marks=pytest.mark.long),
        pytest.param(checks.pearl_yield, (0.6, 3), 4, marks=pytest.mark.long),
        (checks.sd_yield, (0.8, 4, 5), 2),
        pytest.param(checks.sd_yield, (0.6, 2, 5), 2, marks=pytest.mark.long),
        (checks.window_yield, (0.8, 3, 5), 3),
        pytest.param(checks.window_yield, (0.9, 6, 4), 3, marks=pytest.mark.long),
    ],
)
def test_closed_forms_hold_within_one_per_cent(
    held: Callable[..., Iterable[checks.Check]], at: tuple[float, ...], count: int
) -> None:
    """Yield, speed and run lengths of PEARL; speed of its ablations and other windows; yield and speed of sd."""
    found = list(held(*at, TOKENS, seed=1))
    assert (len(found), [check for check in found if not check.passed]) == (count, [])


def flattered(target: ModelRunner, draft: ModelRunner) -> tuple[Executor, Executor]:
    """The draft understates the probability of each token, so more of them pass."""

    class Flattering(DraftExecutor):
        def execute(self, command: object) -> object:  # type: ignore[override]
            event = super().execute(command)
            if not isinstance(event, Drafted):
                return event
            return replace(event, rows=tuple(row * 0.9 for row in event.rows))

    return TargetExecutor(target), Flattering(ModelProposer(draft, target.vocab_size))


def swapped(target: ModelRunner, draft: ModelRunner) -> tuple[Executor, Executor]:
    """Every distance is the same, but the text is the other model's."""
    return paired_executors(draft, target)


@pytest.mark.parametrize(("pair", "tokens"), [(paired_executors, 12_000), (flattered, 4000), (swapped, 4000)])
def test_rejections_are_the_sum_of_distances_and_a_wrong_pair_is_found_out(pair: checks.Pair, tokens: int) -> None:
    assert checks.rejections(0, tokens, 1, pair).passed == (pair is paired_executors)


def generous(acceptance: float, seed: int, right: Mapping[int, bool]) -> Executor:
    """A coin that accepts a little too often, and ignores what is known."""
    return CoinTarget(acceptance + 0.02, seed)


class Greedless(CoinTarget):
    """Judges at most three tokens of a run."""

    def execute(self, command: object):  # type: ignore[no-untyped-def]
        if isinstance(command, Judge) and len(command.tokens) > 3:
            event = super().execute(replace(command, tokens=command.tokens[:3], rows=command.rows[:3]))
            assert isinstance(event, Judged)
            return event if event.token is not None else replace(event, token=1)
        return super().execute(command)


@pytest.mark.long
@pytest.mark.parametrize("coin", [generous, Greedless])
def test_a_wrong_coin_is_found_out(coin: checks.Coin) -> None:
    assert not any(check.passed for check in checks.pearl_yield(0.8, 5, TOKENS, 1, coin))
    assert not any(check.passed for check in checks.sd_yield(0.8, 4, 5, TOKENS, 1, coin))


def test_all_checks_are_made() -> None:
    claims = {check.claim.partition(":")[0] for check in checks.checks(1000, seed=0)}
    papers = {"PEARL, theorem 1", "PEARL", "PEARL, theorem 2", "SD (Leviathan)", "Yin et al., theorem 1"}
    assert claims == papers | {"pearl", "pearl-no-pre-verify", "pearl-no-post-verify"}


@pytest.mark.parametrize(
    ("rule", "parameters"), [("batch", (("candidates", 4.0),)), ("opt", (("epsilon", 0.05),)), ("uno", ())], ids=str
)
def test_rejections_and_bias_are_as_theory_expects(rule: str, parameters: tuple[tuple[str, float], ...]) -> None:
    """In texts of non-stationary chains; and the theory of another rule does not hold."""
    chain = rejections.chains(1)[0]
    found = rejections.measured(chain, rule, parameters, 60, 5)
    margin = found.measured.margin
    assert margin is not None
    assert abs(found.measured.value - found.expected) < 2 * margin
    assert found.measured_bias.value == pytest.approx(found.bias, rel=0.05)
    plain = theory.expected_rejections(chain.target.tolist(), chain.draft.tolist(), 0)
    assert abs(found.measured.value - plain) > 2 * margin or rule == "uno"
    assert (found.bias == 0) == (rule == "batch")


def test_opt_pays_for_each_rejection_less_with_as_much_bias() -> None:
    """Where the bias does not change the text's course: all rows are equal."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    for epsilon in (0.0, 0.1, 0.2, 0.5):
        rejected, bias = theory.expected_relaxed_rejections([[p] * 3] * 4, [[q] * 3] * 4, 0, epsilon)
        assert rejected + bias == pytest.approx(4 * theory.total_variation(p, q))
        uno = theory.expected_relaxed_rejections([[p] * 3] * 4, [[q] * 3] * 4, 0, epsilon, corrects=False)
        assert uno[1] >= bias - 1e-12


def test_a_position_of_the_front_is_what_theory_has_for_it() -> None:
    p, q = torch.softmax(torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(3)).double(), -1)
    for epsilon, corrects in ((0.0, True), (0.1, True), (0.1, False)):
        rejected, bias = rejections.relaxed(p, q, epsilon, corrects)
        for i in range(5):
            tables = [p[i][None].expand(7, 7).tolist()], [q[i][None].expand(7, 7).tolist()], 0
            expected = theory.expected_relaxed_rejections(*tables, epsilon, corrects)
            assert (rejected[i], bias[i]) == pytest.approx(expected)


# ---- workloads ----


def test_luck_is_independent_in_a_text_and_due_over_texts() -> None:
    work = independent(STEADY, 0.8, 20, 500)
    assert {sum(text.right[position] for text in work.texts) for position in range(1, 501)} == {16}
    one = work.texts[3].right
    assert 0.7 < sum(one.values()) / 500 < 0.9
    both = sum(one[p] and one[p + 1] for p in range(1, 500)) / 499
    assert both == pytest.approx(0.64, abs=0.06)
    assert independent(STEADY, 0.8, 20, 500) == work != independent(STEADY, 0.8, 20, 500, seed=1)
    uneven = independent(STEADY, 0.77, 3, 4000)
    assert sum(sum(text.right.values()) for text in uneven.texts) / 12_000 == pytest.approx(0.77, abs=0.01)


def test_every_method_meets_the_same_luck() -> None:
    """Where every position is judged, as many draft tokens are right by any window and delay."""
    work = independent(STEADY, 0.7, 4, 300)
    expected = sum(sum(text.right.values()) for text in work.texts)
    for decoding in (STREAM, FIXED, RequestOptions("pearl", "fixed", 2), RequestOptions("pearl-no-pre-verify")):
        for timing in ({}, {"delay": 2.0}, {"jitter": 0.4}):
            done = run(work.at(**timing), decoding)
            assert (done.judged, done.accepted) == (1200, expected)


def test_methods_stand_side_by_side() -> None:
    done = {totals.name: totals for totals in compare(independent(STEADY, 0.8, 20, 100))}
    ablations = ["pearl-no-pre-verify", "pearl-no-post-verify"]
    assert list(done) == ["ar", "sd, gamma 4", *ablations, "pearl, stream", "pearl, fixed(5)"]
    assert done["ar"].tokens_per_second == pytest.approx(0.2)
    assert (done["ar"].mean_run_length, Totals(AR).acceptance_rate) == (None, None)
    rates = {name: totals.tokens_per_second for name, totals in done.items()}
    assert rates["ar"] < rates["sd, gamma 4"] < rates["pearl-no-post-verify"] < rates["pearl, stream"]


def test_waits_are_measured() -> None:
    """In alternation each side waits for all that the other does: in a step of 4 + 5 seconds."""
    work = independent(STEADY, 1.0, 2, 500)
    done = run(work, SD)
    assert sum(done.target_waits.values()) / done.whole == pytest.approx(4 / 9, abs=0.01)
    assert done.draft_waits / done.whole == pytest.approx(5 / 9, abs=0.01)
    assert run(work, FIXED).target_waits == {"window": pytest.approx(0, abs=1e-6)}


@pytest.mark.long
def test_the_best_window_is_climbed_to() -> None:
    """From wherever one begins."""
    work = independent(STEADY, 0.8, 20, 100)
    assert {best(work, lambda c: RequestOptions("pearl", "fixed", c), start).gamma for start in (2, 9)} == {5}
    assert sd_at_best(work).gamma == 4


@pytest.mark.long
def test_an_interval_holds_what_other_luck_gives() -> None:
    """Nineteen times in twenty; for blocks of texts that balance each other: single texts vary far more."""
    found = []
    for seed in range(12):
        texts = independent(STEADY, 0.8, 100, 50, seed, 20)
        done, plain = run(texts, STREAM), run(texts, AR)
        found.append((speedup(done, plain, texts.block), speedup(done, plain, 1)))
    middle = sum(one.value for one, _ in found) / len(found)
    assert sum(one.ties(middle) for one, _ in found) >= 10
    assert all(one.margin is not None and 0.002 < one.margin < 0.1 for one, _ in found)
    assert sum(each.margin or 0 for _, each in found) > 2 * sum(one.margin or 0 for one, _ in found)


def test_digits_are_those_that_the_sample_carries() -> None:
    shown = {0.2: "2.2 ± 0.2", 0.04: "2.18 ± 0.04", 0.004: "2.178 ± 0.004", 1e-9: "2.178 ± 0.000", 3.0: "2 ± 3"}
    assert {margin: str(Estimate(2.1781, margin)) for margin in shown} == shown
    assert str(Estimate(2.1781, None)) == "2.18", "one block: nothing is known"
    ties = [Estimate(value, margin).ties(1.0) for value, margin in ((1.02, 0.03), (1.02, 0.01), (1.0, None))]
    assert ties == [True, False, False]


def test_a_delay_costs_sd_two_messages_a_step_and_ar_nothing() -> None:
    for delay in (0.5, 3.0):
        work = independent(Timing(1.0, lambda _: 5.0, delay), 0.8, 20, 400)
        closed = theory.sd_tokens_per_step(0.8, 4) / (4 + 5 + 2 * delay)
        assert run(work, SD).tokens_per_second == pytest.approx(closed, rel=0.01)
        assert run(work, AR).tokens_per_second == run(work.at(delay=0.0), AR).tokens_per_second


@pytest.mark.parametrize("decoding", [STREAM, FIXED, SD], ids=["stream", "fixed", "sd"])
def test_delay_and_jitter_make_it_slower(decoding: RequestOptions) -> None:
    """PEARL is as slow as the slower of two forwards, so a spread of both costs, though their means stay."""
    work = independent(STEADY, 0.8, 20, 100)
    rates = [run(work.at(delay=delay), decoding).tokens_per_second for delay in (0.0, 1.0, 2.5, 10.0)]
    assert all(later < sooner for sooner, later in pairwise(rates)), rates
    if decoding is not SD:
        rates = [run(work.at(jitter=jitter), decoding).tokens_per_second for jitter in (0.0, 0.3, 0.6)]
        assert all(later < sooner for sooner, later in pairwise(rates)), rates


# ---- replays of traces ----


def decoded(decoding: RequestOptions, timing: Timing, temperature: float = 1.0, **options: object) -> Outcome:
    tokens = options.pop("tokens", 300)
    assert isinstance(tokens, int)
    runners = [ToyRunner(VOCAB, model, slots=8) for model in alpha_pair(VOCAB, 0.7, order=8)]
    submit = Submit(1, PROMPT, len(PROMPT) + tokens, replace(decoding, sampling=Sampling(temperature, seed=5)))
    return simulate(submit, *paired_executors(*runners, t_draft=timing.draft), timing, **options)  # type: ignore[arg-type]


@pytest.fixture
def traced(tmp_path: Path) -> Callable[..., Trace]:
    """Records a run, reads its trace."""

    def run(decoding: RequestOptions, timing: Timing = TRACED, **options: object) -> Trace:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        decoded(decoding, timing, parts=(part_path(path, "target", 1), part_path(path, "draft", 2)), **options)
        chrome.merge(path)
        return read(path)

    return run


@pytest.mark.parametrize("window", ["stream", "fixed"])
def test_a_replay_has_the_traces_own_speed_and_that_of_any_other_window(
    traced: Callable[..., Trace], window: str
) -> None:
    """Exactly where forwards take their mean time; within 3 per cent where they vary by a fifth."""
    for jitter, bound in ((0.0, 1e-6), (0.2, 0.03)):
        timing = Timing(0.01, lambda n: 0.05 + 0.001 * n, jitter=jitter, seed=3)
        record = recorded(traced(RequestOptions("pearl", window, 5), timing), jitter=jitter)
        again = run(record.workload, record.decoding)
        assert again.tokens_per_second == pytest.approx(record.tokens_per_second, rel=bound)
        assert (record.known, again.tokens) == (300, 299)
    record = recorded(traced(RequestOptions("pearl", window)))
    for other in (RequestOptions("pearl", "fixed", 3), RequestOptions("pearl-no-pre-verify", "stream", 6)):
        expected = decoded(other, TRACED).watch.tokens_per_second
        assert run(record.workload, other).tokens_per_second == pytest.approx(expected, rel=1e-6)


def test_a_greedy_replay_under_sd_is_sd(traced: Callable[..., Trace]) -> None:
    record = recorded(traced(RequestOptions("pearl"), temperature=0.0))
    expected = decoded(SD, TRACED, temperature=0.0).watch.tokens_per_second
    assert run(record.workload, SD).tokens_per_second == pytest.approx(expected, rel=1e-6)


def test_a_replay_of_sd_tosses_for_what_was_never_judged(traced: Callable[..., Trace]) -> None:
    """Bonus tokens: their coins have the rate of the trace, and the seed decides them."""
    trace = traced(SD)
    record = recorded(trace)
    assert 200 < record.known < 300
    assert len({run(recorded(trace, seed=seed).workload, STREAM).accepted for seed in range(4)}) > 1
    assert run(record.workload, STREAM).acceptance_rate == pytest.approx(record.workload.acceptance, abs=0.05)


@pytest.mark.parametrize(
    ("method", "tokens", "why"), [("ar", 300, "no draft drafted"), ("pearl", 1, "longer text")], ids=str
)
def test_what_cannot_be_replayed_is_refused(traced: Callable[..., Trace], method: str, tokens: int, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        recorded(traced(RequestOptions(method), tokens=tokens))


def test_times_are_level_beyond_what_is_given() -> None:
    times = interpolated({2: 1.0, 6: 3.0})
    assert [times(n) for n in (1, 2, 4, 6, 20)] == [1.0, 1.0, 2.0, 3.0, 3.0]


# ---- the commands ----


def invoked(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    if isinstance(result.exception, (ConfigError, TraceError)):
        raise result.exception
    return result


SMALL = ("--requests", "2", "--tokens", "8")


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large run was silent for minutes."""
    monkeypatch.setattr("pearl.cli.tables._SILENT_SECONDS", -1.0)
    shown = invoked(*SMALL).stderr.splitlines()
    assert shown[0] == "simulating the best window of sd"
    assert "simulating pearl, window stream (5 of 6)" in shown
    monkeypatch.setattr("pearl.cli.tables._SILENT_SECONDS", math.inf)
    assert invoked(*SMALL).stderr == ""


def test_table_and_json_agree(tmp_path: Path) -> None:
    small = ("--t-target", "1:50,4:55,8:60", "--acceptance", "0.8", "--requests", "60", "--tokens", "60")
    shown = invoked(*small, "--json", str(tmp_path / "out.json")).stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(invoked(*small, "--json", "-").stdout) == document
    times = {"1": 0.05, "2": 0.0516667, "4": 0.055, "8": 0.06, "16": 0.06}
    assert document["settings"]["t_target"] == pytest.approx(times)
    for method in document["methods"]:
        (row,) = [line for line in shown.splitlines() if line.startswith(method["name"] + " ")]
        over = Estimate(method["speedup"], method["speedup_margin"])
        assert str(over) in row
        assert f"{method['tokens_per_second']:.{max(0, over.digits - 1)}f}" in row
    assert (document["methods"][0]["speedup"], document["methods"][0]["speedup_margin"]) == (1, 0)


def test_a_trace_is_replayed_by_command(traced: Callable[..., Trace]) -> None:
    path = traced(RequestOptions("pearl", "fixed", 5)).path
    assert "(1.000 of it); 300 of 300 positions" in invoked("--trace", str(path)).output.replace("\n", "")
    with pytest.raises(ConfigError, match="leave one of them out"):
        invoked("--trace", str(path), "--tokens", "9")


@pytest.mark.parametrize("accepted", ["a", None, [1]])
def test_a_damaged_trace_is_refused(traced: Callable[..., Trace], accepted: object) -> None:
    path = traced(RequestOptions("pearl"), tokens=20).path
    document = json.loads(path.read_text())
    decisions = (e["args"] for e in document["traceEvents"] if e["ph"] == "X" and e["name"] == "decide")
    event = next(each["event"] for each in decisions if each["event"]["type"] == "Judged")
    event["accepted"] = accepted
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match="damaged"):
        invoked("--trace", str(path))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        *((("--t-target", times), "tokens fed:milliseconds") for times in ("5:", "1:5,1:6", "0:5", "nan")),
        (("--t-draft", "0"), "--t-draft"),
        (("--t-draft", "inf"), "finite"),
        (("--acceptance", "1.5"), "--acceptance"),
        (("--jitter", "nan"), "finite"),
        (("--delay", "-1"), "--delay"),
        (("--requests", "0"), "--requests"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], why: str) -> None:
    result = invoked(*arguments)
    assert result.exit_code == 2
    assert why in result.output


def test_options_before_a_subcommand_are_not_lost_silently() -> None:
    with pytest.raises(ConfigError, match="go behind it"):
        invoked("--delay", "3", "check")


def test_nothing_is_too_extreme() -> None:
    for acceptance in ("0", "1"):
        assert "pearl, stream" in invoked("--acceptance", acceptance, *SMALL).output
    assert "c = 1" in invoked("--t-draft", "90", "--t-target", "5", *SMALL).output


@pytest.mark.parametrize("passes", [True, False])
def test_check_fails_by_its_exit_code(passes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = [checks.Check("one", "a", 2.0, 2.01), checks.Check("other", "b", 5, 5 if passes else 4, exact=True)]
    monkeypatch.setattr("pearl.lab.experiments.checks.checks", lambda tokens, seed: iter(made))
    result = invoked("check", "--json", str(tmp_path / "c.json"))
    assert (result.exit_code, "FAIL" in result.output) == ((0, False) if passes else (1, True))
    assert [one["passed"] for one in json.loads((tmp_path / "c.json").read_text())] == [True, passes]


def test_the_table_of_rejections_and_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejections, "EPSILONS", (0.1,))
    monkeypatch.setattr(rejections, "CANDIDATES", (2,))
    png, document = tmp_path / "it.png", tmp_path / "it.json"
    result = invoked("rejections", "--texts", "3", "--png", str(png), "--json", str(document))
    assert result.exit_code == 0, result.output
    assert "chain 2 uno (not exact), epsilon 0.1" in result.output
    assert png.read_bytes().startswith(PNG)
    found = json.loads(document.read_text())
    assert [one["rule"] for one in found["rules"]] == ["ratio", "batch", "opt", "uno"] * 2
    assert found["limits"]["chain 1"] < found["rules"][1]["expected"] < found["rules"][0]["expected"]


def test_bias_and_rejections_of_opt_add_up_to_the_distance_on_a_pair_of_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the target's texts; in its own each rule's rejections are as the distributions there foretell."""
    monkeypatch.setattr(rejections, "EPSILONS", (0.0, 0.001, 0.01))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The hat and the tin\nan inner thing, then another one\nThen the other\n")
    pair = [f"--{role}={tiny_model('llama', noise=noise)}" for role, noise in (("target", 0.0), ("draft", 0.2))]
    png, document = tmp_path / "it.png", tmp_path / "it.json"
    more = ["--max-tokens=40", "--target-dtype=float32", "--draft-dtype=float32", f"--png={png}", f"--json={document}"]
    result = invoked("front", str(prompts), *pair, *more)
    assert result.exit_code == 0, result.output
    assert "uno (not exact), epsilon 0.001" in result.output
    assert png.read_bytes().startswith(PNG)
    found = json.loads(document.read_text())["rules"]
    opt, uno = ([one for one in found if one["rule"] == rule] for rule in ("opt", "uno"))
    assert (opt[0]["bias"], opt[0]["measured_bias"]["value"]) == pytest.approx((0, 0), abs=1e-6)
    for one, other in zip(opt, uno, strict=True):
        assert one["expected"] + one["bias"] == pytest.approx(opt[0]["expected"], abs=1e-5)
        assert other["expected"] == one["expected"]
        assert other["bias"] >= one["bias"]
    assert opt[0]["expected"] > opt[1]["expected"] > opt[2]["expected"] >= 0
    off = [abs(one["measured"]["value"] - one["foretold"]) / (one["margin"] or 1) for one in found]
    assert max(off) < 2, "that is 3.9 standard deviations"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--draft", "none"], "these rules judge what a draft proposes"),
        (["--temperature", "0"], "has no distribution to be biased"),
        (["--repetition-penalty", "1.2"], "leave out penalties"),
        (["--limit", "1", "--target=toy:vocab=32,alpha=0.8", "--draft=toy:vocab=32,alpha=0.8"], "it takes two prompts"),
    ],
)
def test_what_a_front_cannot_be_drawn_of_is_refused(tmp_path: Path, given: list[str], why: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match=why):
        invoked("front", str(prompts), *given)


def test_a_picture_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        plots.save(plots.figure(1, 1), tmp_path / "no" / "it.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"scripts/setup plot|pip install"):
        plots.figure(1, 1)
