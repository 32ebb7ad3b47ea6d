"""The simulator against theory, with wrong executors that must be found out; workloads; replays; the commands."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pearl.cli import cli
from pearl.drafting.model import ModelProposer
from pearl.errors import ConfigError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab import theory
from pearl.lab.experiments.estimate import Estimate, about, bootstrap, speedup
from pearl.lab.experiments.workload import AR, FIXED, STREAM, Totals, compare, independent, run
from pearl.lab.simulate import CoinTarget, Executor, Timing, interpolated, paired_executors
from pearl.models.runner import ModelRunner
from pearl.protocol.events import Drafted, Judge, Judged
from pearl.protocol.options import RequestOptions
from tests import chains
from tests import closed_forms as checks
from tests.rejection_theory import expected_rejections
from tests.replace import replace

VOCAB = 12
PROMPT = (1, 2, 3)
TOKENS = 20_000
STEADY = Timing(1.0, lambda _: 5.0)
TRACED = Timing(0.01, lambda _: 0.05)
SD = RequestOptions("sd", "fixed", 4)


# ---- theory ----


@pytest.mark.parametrize(
    ("held", "at", "count"),
    [
        (checks.pearl_yield, (0.8, 5), 4),
        (checks.sd_yield, (0.8, 4, 5), 2),
    ],
)
def test_closed_forms_hold_within_one_per_cent(
    held: Callable[..., Iterable[checks.Check]], at: tuple[float, ...], count: int
) -> None:
    """Yield, speed and run lengths of PEARL; yield and speed of sd."""
    found = list(held(*at, TOKENS, seed=1))
    assert (len(found), [check for check in found if not check.passed]) == (count, [])


@pytest.mark.parametrize("method", ["pearl", "pearl-no-pre-verify", "pearl-no-post-verify"])
def test_any_window_is_as_fast_as_its_closed_form(method: str) -> None:
    closed = checks._FORMS[method](0.8, 3, 5)
    assert checks.speed(method, closed, 0.8, 3, 5, TOKENS, seed=1).passed


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
    papers = {"PEARL, theorem 1", "PEARL", "PEARL, theorem 2", "sd", "Yin et al., theorem 1"}
    assert claims == papers | {"pearl", "pearl-no-pre-verify", "pearl-no-post-verify"}


@pytest.mark.parametrize(
    ("rule", "parameters"), [("batch", (("candidates", 4.0),)), ("opt", (("epsilon", 0.05),)), ("uno", ())], ids=str
)
def test_rejections_and_bias_are_as_theory_expects(rule: str, parameters: tuple[tuple[str, float], ...]) -> None:
    """In texts of non-stationary chains; and the theory of another rule does not hold."""
    chain = chains.chains(1)[0]
    found = chains.measured(chain, rule, parameters, 60, 5)
    margin = found.measured.margin
    assert abs(found.measured.value - found.expected) < 2 * margin
    assert found.measured_bias.value == pytest.approx(found.bias, rel=0.05)
    plain = expected_rejections(chain.target.tolist(), chain.draft.tolist(), 0)
    assert abs(found.measured.value - plain) > 2 * margin or rule == "uno"
    assert (found.bias == 0) == (rule == "batch")


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
def test_an_interval_holds_what_other_luck_gives() -> None:
    """Nineteen times in twenty; for blocks of texts that balance each other: single texts vary far more."""
    found = []
    for seed in range(12):
        texts = independent(STEADY, 0.8, 100, 50, seed, 20)
        done, plain = run(texts, STREAM), run(texts, AR)
        found.append((speedup(done, plain, texts.block), speedup(done, plain, 1)))
    middle = sum(one.value for one, _ in found) / len(found)
    assert sum(one.low <= middle <= one.high for one, _ in found) >= 10
    assert all(0.002 < one.margin < 0.1 for one, _ in found)
    assert sum(each.margin for _, each in found) > 2 * sum(one.margin for one, _ in found)


def test_an_interval_holds_its_statistic_and_covers_the_truth() -> None:
    """95% intervals of 200 samples, deterministic."""
    found = bootstrap([1.0, 2.0, 4.0, 8.0, 16.0])
    assert (found.value, found) == (4.0, bootstrap([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert 1 <= found.low < 4 < found.high <= 16
    assert bootstrap([3.0]) == Estimate(3.0, 3.0, 3.0)
    noise = random.Random(1)
    samples = [[noise.gauss(10, 1) for _ in range(25)] for _ in range(200)]
    intervals = [bootstrap(sample, resamples=400) for sample in samples]
    assert sum(one.low <= 10 <= one.high for one in intervals) in range(180, 201)


def test_digits_are_those_that_the_sample_carries() -> None:
    shown = {0.2: "2.2 (2.0-2.4)", 0.04: "2.18 (2.14-2.22)", 1e-9: "2.178 (2.178-2.178)", 3.0: "2 (-1-5)"}
    assert {margin: str(about(2.1781, margin)) for margin in shown} == shown
    assert str(about(2.1781, 0.0)) == "2.18", "one block: nothing is known"


def test_a_delay_costs_sd_two_messages_a_step_and_ar_nothing() -> None:
    for delay in (0.5, 3.0):
        work = independent(Timing(1.0, lambda _: 5.0, delay), 0.8, 20, 400)
        closed = theory.sd_tokens_per_step(0.8, 4) / (4 + 5 + 2 * delay)
        assert run(work, SD).tokens_per_second == pytest.approx(closed, rel=0.01)
        assert run(work, AR).tokens_per_second == run(work.at(delay=0.0), AR).tokens_per_second


def test_times_are_level_beyond_what_is_given() -> None:
    times = interpolated({2: 1.0, 6: 3.0})
    assert [times(n) for n in (1, 2, 4, 6, 20)] == [1.0, 1.0, 2.0, 3.0, 3.0]


# ---- the commands ----


def invoked(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result


SMALL = ("--requests", "2", "--tokens", "8")


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large run was silent for minutes."""
    monkeypatch.setattr("pearl.cli.tables._SILENT_SECONDS", -1.0)
    shown = invoked(*SMALL).stderr.splitlines()
    assert shown[0] == "working ar, window stream (1 of 6)"
    assert "working pearl, window stream (5 of 6)" in shown
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
        over = Estimate(method["speedup"], method["speedup_low"], method["speedup_high"])
        assert str(over) in row
        assert f"{method['tokens_per_second']:.{max(0, over.digits - 1)}f}" in row
    assert document["methods"][0]["speedup"] == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        *((("--t-target", times), "tokens fed:milliseconds") for times in ("5:", "1:5,1:6", "0:5", "nan")),
        (("--acceptance", "1.5"), "--acceptance"),
        (("--requests", "0"), "--requests"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], why: str) -> None:
    result = invoked(*arguments)
    assert result.exit_code == 2
    assert why in result.output


def test_options_before_a_subcommand_are_not_lost_silently() -> None:
    with pytest.raises(ConfigError, match="go behind it"):
        invoked("--delay", "3", "stops")


def test_nothing_is_too_extreme() -> None:
    for acceptance in ("0", "1"):
        assert "pearl, stream" in invoked("--acceptance", acceptance, *SMALL).output
    assert "c = 1" in invoked("--t-draft", "90", "--t-target", "5", *SMALL).output
