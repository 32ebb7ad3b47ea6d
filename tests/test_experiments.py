"""The simulator against theory, with wrong executors that must be found out; replays; sweeps; the commands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from pearl.cli import cli
from pearl.decoding.rules.direct import DirectDraft
from pearl.decoding.sampling import read_shortlist, shortlist
from pearl.drafting.branches import see
from pearl.drafting.model import ModelProposer
from pearl.errors import ConfigError, TraceError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab import theory
from pearl.lab.experiments import checks, front, plots, rejections, sweeps, texts
from pearl.lab.experiments.compare import AR, FIXED, STREAM, best, compare, sd_at_best
from pearl.lab.experiments.estimate import Estimate, speedup
from pearl.lab.experiments.recorded import interpolated, recorded
from pearl.lab.experiments.retold import Retold, Told, texts_of
from pearl.lab.experiments.workload import Totals, independent, run
from pearl.lab.simulate import (
    CoinDraft,
    CoinTarget,
    Executor,
    ForesightDraft,
    LookupDraft,
    Outcome,
    Timing,
    paired_executors,
    simulate,
)
from pearl.models.replay import ReplayRunner
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


# ---- theory ----


@pytest.mark.long
def test_theorem_1() -> None:
    """Tried out, the best of all fixed windows is the speed ratio."""
    for a, c in ((0.6, 3), (0.8, 5), (0.9, 8)):
        found = checks.best_window(a, c, 3000, seed=1)
        assert found.passed, found


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
    """Tokens a step, speed and run lengths of PEARL; its ablations and other windows; tokens a step and speed of sd."""
    found = list(held(*at, TOKENS, seed=1))
    assert len(found) == count
    assert [check for check in found if not check.passed] == []


@pytest.mark.parametrize(("share", "filled"), [(0.5, 4), (1.0, 4), (0.5, 1)])
def test_a_foreseen_share_has_its_closed_form(share: float, filled: int) -> None:
    """Tokens a step, and as many times as fast as ar: nobody waits for a window behind a branch."""
    assert [each for each in checks.foreseen_yield(0.8, 5, share, filled, TOKENS, 1) if not each.passed] == []
    assert not any(each.passed for each in checks.foreseen_yield(0.8, 5, share, filled, TOKENS, 1, generous))


def test_the_closed_form_of_a_foreseen_share_has_pearls_own_for_its_end() -> None:
    for a, c in ((0.6, 3), (0.8, 5), (1.0, 4)):
        assert theory.pearl_foreseen_tokens_per_step(a, c, 0.0) == pytest.approx(theory.pearl_tokens_per_step(a, c))
        assert theory.pearl_foreseen_tokens_per_step(a, c, 1.0) == pytest.approx(theory.geometric(a, c))
        assert theory.pearl_foreseen_tokens_per_step(a, c, 1.0, 0) == pytest.approx(theory.pearl_tokens_per_step(a, c))


def test_rejections_are_the_sum_of_distances() -> None:
    found = checks.rejections(0, 12_000, seed=1)
    assert found.passed, found


@pytest.mark.parametrize(
    ("rule", "parameters"), [("batch", (("candidates", 4.0),)), ("opt", (("epsilon", 0.05),)), ("uno", ())], ids=str
)
def test_rejections_and_bias_are_as_theory_expects(rule: str, parameters: tuple[tuple[str, float], ...]) -> None:
    """In texts of non-stationary chains; and a theory of another rule is not met."""
    (chain, _) = rejections.chains(1)
    found = rejections.measured(chain, rule, parameters, 60, 5)
    margin = found.measured.margin
    assert margin is not None
    assert abs(found.measured.value - found.expected) < 2 * margin
    assert found.measured_bias.value == pytest.approx(found.bias, rel=0.05)
    plain = theory.expected_rejections(chain.target.tolist(), chain.draft.tolist(), 0)
    assert abs(found.measured.value - plain) > 2 * margin or rule == "uno"
    assert (found.bias == 0) == (rule == "batch")


def test_opt_pays_for_each_rejection_less_with_as_much_bias() -> None:
    """Where the bias does not change the text's course: the models of each row are those of every other."""
    rows = [[0.5, 0.3, 0.2]] * 3, [[0.2, 0.3, 0.5]] * 3
    tables = [rows[0]] * 4, [rows[1]] * 4, 0
    for epsilon in (0.0, 0.1, 0.2, 0.5):
        rejected, bias = theory.expected_relaxed_rejections(*tables, epsilon)
        assert rejected + bias == pytest.approx(4 * theory.total_variation(rows[0][0], rows[1][0]))
        assert theory.expected_relaxed_rejections(*tables, epsilon, corrects=False)[1] >= bias - 1e-12


def test_the_table_of_rejections_and_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejections, "EPSILONS", (0.1,))
    monkeypatch.setattr(rejections, "CANDIDATES", (2,))
    png, document = tmp_path / "it.png", tmp_path / "it.json"
    arguments = ["simulate", "rejections", "--texts", "3", "--png", str(png), "--json", str(document)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "chain 2  uno (not exact), epsilon 0.1" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    told = json.loads(document.read_text())
    assert [one["rule"] for one in told["rules"]] == ["ratio", "batch", "opt", "uno"] * 2
    assert told["limits"]["chain 1"] < told["rules"][1]["expected"] < told["rules"][0]["expected"]


def test_all_checks_are_made() -> None:
    claims = {check.claim.partition(":")[0] for check in checks.checks(1000, seed=0)}
    assert claims == {
        "PEARL, theorem 1",
        "PEARL",
        "PEARL with branches",
        "PEARL, theorem 2",
        "pearl",
        "pearl-no-pre-verify",
        "pearl-no-post-verify",
        "SD (Leviathan)",
        "Yin et al., theorem 1",
    }


def generous(acceptance: float, seed: int, right: Mapping[int, bool]) -> Executor:
    """A coin that lands a little too often, and does not look at what is settled."""
    return CoinTarget(acceptance + 0.02, seed)


class Greedless(CoinTarget):
    """Judges no more than three tokens of a run: as if the others were not there."""

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


def flattered(target: ModelRunner, draft: ModelRunner) -> tuple[Executor, Executor]:
    """The draft says that it was sure of every token less than it was: more of them pass."""

    class Flattering(DraftExecutor):
        def execute(self, command: object) -> object:  # type: ignore[override]
            event = super().execute(command)
            if not isinstance(event, Drafted):
                return event
            return replace(event, rows=tuple(row * 0.9 for row in event.rows))

    return TargetExecutor(target), Flattering(ModelProposer(draft, target.vocab_size))


def swapped(target: ModelRunner, draft: ModelRunner) -> tuple[Executor, Executor]:
    """Draft and target confused: every distance is the same, but the text is the other model's."""
    return paired_executors(draft, target)


@pytest.mark.parametrize("pair", [flattered, swapped])
def test_a_wrong_pair_is_found_out(pair: checks.Pair) -> None:
    assert not checks.rejections(0, 4000, 1, pair).passed


# ---- workloads ----


def test_luck_is_independent_in_a_text_and_due_over_texts() -> None:
    work = independent(STEADY, 0.8, 20, 500)
    for position in range(1, 501):
        assert sum(text.right[position] for text in work.texts) == 16
    one = work.texts[3].right
    assert 0.7 < sum(one.values()) / 500 < 0.9
    both = sum(one[p] and one[p + 1] for p in range(1, 500)) / 499
    assert both == pytest.approx(0.64, abs=0.06)
    assert independent(STEADY, 0.8, 20, 500) == work
    assert independent(STEADY, 0.8, 20, 500, seed=1) != work


def test_a_rate_that_does_not_divide_is_met_on_average() -> None:
    work = independent(STEADY, 0.77, 3, 4000)
    right = sum(sum(text.right.values()) for text in work.texts)
    assert right / 12_000 == pytest.approx(0.77, abs=0.01)


def test_every_method_meets_the_same_luck() -> None:
    """Where every position is judged, as many draft tokens are right by any window and delay."""
    work = independent(STEADY, 0.7, 4, 300)
    expected = sum(sum(text.right.values()) for text in work.texts)
    for decoding in (STREAM, FIXED, RequestOptions("pearl", "fixed", 2), RequestOptions("pearl-no-pre-verify")):
        for timing in ({}, {"delay": 2.0}, {"jitter": 0.4}):
            done = run(work.at(**timing), decoding)
            assert (done.judged, done.accepted) == (1200, expected)


def test_methods_stand_side_by_side() -> None:
    done = {totals.name: totals for totals in compare(independent(STEADY, 0.8, 20, 200))}
    assert list(done) == [
        "ar",
        "sd, gamma 4",
        "pearl-no-pre-verify",
        "pearl-no-post-verify",
        "pearl, stream",
        "pearl, fixed(5)",
    ]
    assert done["ar"].tokens_per_second == pytest.approx(0.2)
    assert done["ar"].mean_run_length is None
    rates = {name: totals.tokens_per_second for name, totals in done.items()}
    assert rates["ar"] < rates["sd, gamma 4"] < rates["pearl-no-post-verify"] < rates["pearl, stream"]


def test_waits_are_told() -> None:
    """In alternation each side waits for all that the other does: of a step of 4 + 5 seconds."""
    done = run(independent(STEADY, 1.0, 2, 500), RequestOptions("sd", "fixed", 4))
    assert sum(done.target_waits.values()) / done.whole == pytest.approx(4 / 9, abs=0.01)
    assert done.draft_waits / done.whole == pytest.approx(5 / 9, abs=0.01)
    assert run(independent(STEADY, 1.0, 2, 500), FIXED).target_waits == {"window": pytest.approx(0, abs=1e-6)}


@pytest.mark.long
def test_the_best_window_is_climbed_to() -> None:
    """From wherever one begins."""
    work = independent(STEADY, 0.8, 20, 100)
    assert {best(work, lambda c: RequestOptions("pearl", "fixed", c), start).gamma for start in (2, 9)} == {5}
    assert sd_at_best(work).gamma == 4


# ---- delay and jitter ----


def test_a_delay_costs_sd_two_messages_a_step() -> None:
    for delay in (0.5, 3.0):
        done = run(independent(Timing(1.0, lambda _: 5.0, delay), 0.8, 20, 400), RequestOptions("sd", "fixed", 4))
        closed = theory.sd_tokens_per_step(0.8, 4) / (4 + 5 + 2 * delay)
        assert done.tokens_per_second == pytest.approx(closed, rel=0.01)


@pytest.mark.parametrize("decoding", [STREAM, FIXED, RequestOptions("sd", "fixed", 4)])
def test_no_delay_is_better_than_a_delay(decoding: RequestOptions) -> None:
    work = independent(STEADY, 0.8, 20, 200)
    rates = [run(work.at(delay=delay), decoding).tokens_per_second for delay in (0.0, 1.0, 2.5, 5.0, 10.0)]
    assert all(later < sooner for sooner, later in pairwise(rates)), rates


def test_a_delay_does_not_touch_ar() -> None:
    work = independent(STEADY, 0.8, 4, 100)
    assert run(work, AR).tokens_per_second == run(work.at(delay=7.0), AR).tokens_per_second


@pytest.mark.parametrize("decoding", [STREAM, FIXED])
def test_jitter_makes_pearl_slower(decoding: RequestOptions) -> None:
    """It is as slow as the slower of two: a spread of both costs, though their means stay."""
    work = independent(STEADY, 0.8, 20, 400)
    rates = [run(work.at(jitter=jitter), decoding).tokens_per_second for jitter in (0.0, 0.3, 0.6)]
    assert all(later < sooner for sooner, later in pairwise(rates)), rates


# ---- replays ----


def decoded(
    decoding: RequestOptions,
    timing: Timing,
    temperature: float = 1.0,
    tokens: int = 300,
    order: int = 8,
    **options: object,
) -> Outcome:
    target, draft = alpha_pair(VOCAB, 0.7, order=order)
    runners = [ToyRunner(VOCAB, model, slots=8) for model in (target, draft)]
    executors = paired_executors(*runners, t_draft=timing.draft, noted="parts" in options)
    submit = Submit(1, PROMPT, len(PROMPT) + tokens, replace(decoding, sampling=Sampling(temperature, seed=5)))
    return simulate(submit, *executors, timing, **options)  # type: ignore[arg-type]


def traced(
    path: Path, decoding: RequestOptions, timing: Timing, temperature: float = 1.0, tokens: int = 300, order: int = 8
) -> Trace:
    parts = part_path(path, "target", 1), part_path(path, "draft", 2)
    decoded(decoding, timing, temperature, tokens, order, parts=parts)
    chrome.merge(path)
    return read(path)


def rate(outcome: Outcome) -> float:
    speed = outcome.watch.tokens_per_second
    assert speed is not None
    return speed


@pytest.mark.parametrize(
    "decoding", [RequestOptions("pearl", "stream", 5), RequestOptions("pearl", "fixed", 4), RequestOptions("pearl")]
)
def test_a_replay_gives_back_the_traces_own_speed(tmp_path: Path, decoding: RequestOptions) -> None:
    """Exactly, where forwards lasted as long as their mean; within 3 per cent where they vary by a fifth."""
    for jitter, bound in ((0.0, 1e-6), (0.2, 0.03)):
        timing = Timing(0.01, lambda n: 0.05 + 0.001 * n, jitter=jitter, seed=3)
        record = recorded(read_new(tmp_path, decoding, timing), jitter=jitter)
        again = run(record.workload, record.published)
        assert again.tokens_per_second == pytest.approx(record.tokens_per_second, rel=bound)
        assert (record.known, again.tokens) == (300, 299)


def read_new(folder: Path, decoding: RequestOptions, timing: Timing, temperature: float = 1.0, order: int = 8) -> Trace:
    return traced(folder / f"{len(list(folder.iterdir()))}.json", decoding, timing, temperature, order=order)


@pytest.mark.parametrize(("rule", "temperature"), [("coupled", 0.0), ("coupled", 1.0), ("ratio", 1.0)])
@pytest.mark.parametrize("kind", ["look_ahead", "draft_lookup", "branches"])
def test_what_guesses_is_replayed_from_a_trace_without_it(
    tmp_path: Path, kind: str, temperature: float, rule: str
) -> None:
    """Recorded as published and decoded again with it, or the other way round: both as if recorded so."""
    timing = Timing(0.01 if kind != "draft_lookup" else 0.03, lambda _: 0.05)
    published = RequestOptions("pearl", "fixed", 5, rule=rule)
    guessing = replace(published, **{kind: {"look_ahead": 16, "draft_lookup": 8, "branches": 7}[kind]})
    records = [recorded(read_new(tmp_path, each, timing, temperature, 2)) for each in (published, guessing)]
    speeds = [record.tokens_per_second for record in records]
    if temperature:  # greedy these two agree everywhere
        assert speeds[1] > 1.04 * speeds[0]
    for record in records:
        assert record.texts is not None
        again = [texts.run(record.texts, replace(each, rule=texts.RULE), timing) for each in (published, guessing)]
        assert again[0].tokens_per_second == pytest.approx(speeds[0], rel=0.04)
        if (kind, rule, temperature) == ("look_ahead", "ratio", 1.0):  # the target of a replay draws for itself
            assert again[1].tokens_per_second > speeds[1]
        else:
            assert again[1].tokens_per_second == pytest.approx(speeds[1], rel=0.05)


def test_two_answers_to_one_prompt_are_not_told_apart(tmp_path: Path) -> None:
    one, other = (Retold((1, 2), answer, {2: Told(answer[0], 3, (7, 8, 9, 10))}) for answer in ([3, 4], [5, 6]))
    assert texts_of(tmp_path, [one, replace(one)]) is not None
    assert texts_of(tmp_path, [one, other]) is None


@pytest.mark.parametrize("token", [-1, 1 << 20, "a", None, [1]])
def test_what_is_no_token_is_no_reason_to_take_memory(tmp_path: Path, token: object) -> None:
    path = tmp_path / "it.json"
    traced(path, RequestOptions("pearl"), Timing(0.01, lambda _: 0.05), tokens=20)
    document = json.loads(path.read_text())
    decisions = (e["args"] for e in document["traceEvents"] if e["ph"] == "X" and e["name"] == "decide")
    event = next(each["event"] for each in decisions if each["event"].get("seen"))
    event["seen"][0][1]["rivals"][0] = token
    path.write_text(json.dumps(document))
    result = CliRunner().invoke(cli, ["simulate", "--trace", str(path)])
    assert isinstance(result.exception, TraceError)
    assert "damaged" in str(result.exception)


def test_a_position_that_nobody_drafted_borrows_the_rank_of_another(tmp_path: Path) -> None:
    told = {1: Told(5, 0, (6, 7, 8, 9))}  # 8 was committed: the third of the others
    recorded = texts_of(tmp_path, [Retold((3,), [8, 4, 4], told)])
    assert recorded is not None
    (text,) = recorded.texts
    assert text.right == [False] * 3
    runner = ReplayRunner(recorded, "draft", 64)
    for i, (token, context) in enumerate([(8, (3,)), (4, (3, 8)), (4, (3, 8, 4))]):
        row = runner._logits([list(context)])[0]
        found = see(*read_shortlist(shortlist(row)), 1 + i, int(row.argmax()), DirectDraft(Sampling(0.0)))
        assert (found.rivals[2], found.share) == (token, 0)
        assert (found.token == 5) == (i == 0)


@pytest.mark.parametrize("draft", [CoinDraft(), ForesightDraft(0.5, 4, 500), LookupDraft(0.5, 4, 500)])
def test_coins_prepare_for_no_more_than_they_say(draft: Executor) -> None:
    """A draft that may go on preparing while it waits ends that, too: its forwards could go on for ever."""
    submit = Submit(1, (0,), 101, RequestOptions("pearl", branches=7, sampling=Sampling()))
    outcome = simulate(submit, CoinTarget(0.7), draft, Timing(0.01, lambda _: 0.2))
    assert len(outcome.tokens) == 100


def test_a_replay_under_another_window_is_that_window(tmp_path: Path) -> None:
    """The bits are the text's, not the window's: what was never run comes out as it would have been."""
    timing = Timing(0.01, lambda _: 0.05)
    record = recorded(read_new(tmp_path, RequestOptions("pearl", "stream", 5), timing))
    for other in (RequestOptions("pearl", "fixed", 3), RequestOptions("pearl-no-pre-verify", "stream", 6)):
        assert run(record.workload, other).tokens_per_second == pytest.approx(rate(decoded(other, timing)), rel=1e-6)


def test_a_greedy_replay_under_sd_is_sd(tmp_path: Path) -> None:
    timing = Timing(0.01, lambda _: 0.05)
    record = recorded(read_new(tmp_path, RequestOptions("pearl"), timing, temperature=0.0))
    sd = RequestOptions("sd", "fixed", 3)
    expected = rate(decoded(sd, timing, temperature=0.0))
    assert run(record.workload, sd).tokens_per_second == pytest.approx(expected, rel=1e-6)


def test_a_replay_of_sd_tosses_for_what_was_never_judged(tmp_path: Path) -> None:
    """Bonus tokens: their coins have the rate of the trace, and the seed decides them."""
    trace = read_new(tmp_path, RequestOptions("sd", "fixed", 4), Timing(0.01, lambda _: 0.05))
    record = recorded(trace)
    assert 200 < record.known < 300
    rates = {run(recorded(trace, seed=seed).workload, STREAM).accepted for seed in range(4)}
    assert len(rates) > 1
    assert run(record.workload, STREAM).acceptance_rate == pytest.approx(record.workload.acceptance, abs=0.05)


def test_a_trace_of_ar_cannot_be_replayed(tmp_path: Path) -> None:
    trace = read_new(tmp_path, RequestOptions("ar"), Timing(0.01, lambda _: 0.05))
    with pytest.raises(TraceError, match="no draft drafted"):
        recorded(trace)


def test_a_text_of_one_commit_has_no_speed(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    traced(path, RequestOptions("pearl"), Timing(0.01, lambda _: 0.05), tokens=1)
    with pytest.raises(TraceError, match="longer text"):
        recorded(read(path))


# ---- sweeps ----


def a_point(acceptance: float, delay: float, pearl: float, sd: float = 1.5, ratio: float = 5.0) -> sweeps.Point:
    speedups = {sweeps.PEARL: Estimate(pearl, 0.1), sweeps.FIXED_C: Estimate(pearl, 0.1), sweeps.SD: Estimate(sd, 0.1)}
    over_sd = {name: Estimate(one.value / sd, 0.1) for name, one in speedups.items()}
    return sweeps.Point(acceptance, ratio, 0.0, delay, speedups, dict.fromkeys(speedups, 5), over_sd)


def test_where_a_method_stops_paying() -> None:
    points = [a_point(0.8, delay, pearl) for delay, pearl in ((0.0, 2.0), (1.0, 1.6), (2.0, 1.2), (3.0, 0.8))]
    assert sweeps.stops_paying(points, "delay", sweeps.PEARL) == pytest.approx(2.5)
    assert sweeps.stops_paying(points, "delay", sweeps.PEARL, sweeps.SD) == pytest.approx(1.25)
    assert sweeps.stops_paying(points[:3], "delay", sweeps.PEARL) is None
    assert sweeps.stops_paying(points[3:], "delay", sweeps.PEARL) == 0.0
    for of, at in ((lambda e: e.low, 2.25), (lambda e: e.high, 2.75)):
        assert sweeps.stops_paying(points, "delay", sweeps.PEARL, None, of) == pytest.approx(at)


@pytest.mark.long
def test_an_interval_holds_what_other_luck_gives() -> None:
    """Nineteen times in twenty; of blocks of texts that balance each other, not of the texts, which are far wider."""
    luck = [sweeps.Luck(1000, 5, seed) for seed in range(12)]
    found = []
    for one in luck:
        texts = one.texts(STEADY, 0.8)
        done, plain = run(texts, STREAM), run(texts, AR)
        found.append((speedup(done, plain, texts.block), speedup(done, plain, 1)))
    middle = sum(one.value for one, _ in found) / len(found)
    assert sum(one.ties(middle) for one, _ in found) >= 10
    assert all(one.margin is not None and 0.002 < one.margin < 0.1 for one, _ in found)
    assert sum(each.margin or 0 for _, each in found) > 2 * sum(one.margin or 0 for one, _ in found)


def test_digits_are_those_that_the_sample_carries() -> None:
    told = {0.2: "2.2 ± 0.2", 0.04: "2.18 ± 0.04", 0.004: "2.178 ± 0.004", 1e-9: "2.178 ± 0.000", 3.0: "2 ± 3"}
    assert {margin: str(Estimate(2.1781, margin)) for margin in told} == told
    assert str(Estimate(2.1781, None)) == "2.18", "one block: nothing is known"
    assert Estimate(1.02, 0.03).ties(1.0)
    assert not Estimate(1.02, 0.01).ties(1.0)
    assert not Estimate(1.0, None).ties(1.0)


@pytest.mark.long
def test_a_long_delay_takes_pearls_lead(tmp_path: Path) -> None:
    """And the best window found is never behind the one that is chosen without knowing of the delay."""
    points = list(sweeps.over_delay(Timing(0.01, lambda _: 0.05), [0.8], sweeps.Luck(500, 2), (0.0, 0.5, 2.0)))
    assert [p.delay for p in points] == pytest.approx([0.0, 0.025, 0.1])
    assert points[0].lead(sweeps.PEARL, sweeps.SD).low > 1
    assert points[-1].lead(sweeps.PEARL).value < 1
    assert all(p.lead(sweeps.BEST_C).value > 0.97 * p.lead(sweeps.PEARL).value for p in points)
    end = sweeps.stops_paying(points, "delay", sweeps.PEARL)
    assert end is not None
    assert 0.02 < end < 0.1


@pytest.mark.long
def test_more_foresight_is_faster_and_has_its_closed_form() -> None:
    """No faster than its bound, and as fast as published PEARL without any."""
    points = list(sweeps.over_foreseen(STEADY, [0.8], sweeps.Luck(2000, 2, 1)))
    assert [p.foreseen for p in points] == list(sweeps.FORESEEN)
    for one in points:
        assert one.lead(sweeps.FIXED_C).value == pytest.approx(one.lead(sweeps.CLOSED).value, rel=0.03)
    assert all(a.lead(sweeps.PEARL).value < b.lead(sweeps.PEARL).value for a, b in pairwise(points))


@pytest.mark.long
def test_a_lookup_that_hits_moves_the_bound() -> None:
    """Where all that is drafted is right, PEARL is as fast as c says, times the tokens of a draft forward."""
    work = independent(STEADY, 1.0, 20, 300)
    for hit in (0.0, 0.5):
        done = run(work, RequestOptions("pearl", "stream", 24), draft=partial(LookupDraft, hit, 8))
        bound = 5 * theory.pearl_lookup_ratio(hit, 8)
        assert done.tokens_per_second * 5 == pytest.approx(bound, rel=0.05)
    points = list(sweeps.over_lookup(STEADY, [0.8], sweeps.Luck(1000, 1, 1)))
    assert points[0].lead(sweeps.PEARL).value < points[5].lead(sweeps.PEARL).value < points[9].lead(sweeps.PEARL).value


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    grid = [a_point(a, 0.0, 0.7 + a * c / 4, ratio=c) for a in (0.3, 0.6, 0.9) for c in (1, 2, 5)]
    plots.heat_maps(grid, tmp_path / "speedup.png")
    along = [a_point(a, delay, 2 - delay) for a in (0.6, 0.9) for delay in (0.0, 0.5, 1.5)]
    plots.lines(along, "delay", "delay (ms)", 1e3, "a title", tmp_path / "delay.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write"):
        plots.heat_maps(grid, tmp_path / "no" / "speedup.png")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"scripts/setup plot|pip install"):
        plots.heat_maps([a_point(0.8, 0.0, 2.0)], tmp_path / "x.png")


def test_times_are_level_beyond_what_is_given() -> None:
    times = interpolated({2: 1.0, 6: 3.0})
    assert [times(n) for n in (1, 2, 4, 6, 20)] == [1.0, 1.0, 2.0, 3.0, 3.0]


# ---- the commands ----


def invoked(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    if code == 0 and result.exception is not None:
        raise result.exception
    assert result.exit_code == code or isinstance(result.exception, (ConfigError, TraceError)), result.output
    return result


def test_what_is_simulated_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large run was silent for minutes."""
    monkeypatch.setattr("pearl.cli.simulate._SILENT_SECONDS", -1.0)
    told = invoked("--requests", "2", "--tokens", "8").stderr.splitlines()
    assert told[0] == "simulating the best window of sd"
    assert "simulating pearl, window stream (5 of 6)" in told
    monkeypatch.setattr("pearl.cli.simulate._SILENT_SECONDS", math.inf)
    assert invoked("--requests", "2", "--tokens", "8").stderr == ""


def test_table_and_json_agree(tmp_path: Path) -> None:
    small = [
        "--t-draft",
        "10",
        "--t-target",
        "1:50,4:55,8:60",
        "--acceptance",
        "0.8",
        "--requests",
        "60",
        "--tokens",
        "60",
    ]
    shown = invoked(*small, "--json", str(tmp_path / "out.json")).stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(invoked(*small, "--json", "-").stdout) == document
    assert document["settings"]["t_target"] == pytest.approx(
        {"1": 0.05, "2": 0.0516667, "4": 0.055, "8": 0.06, "16": 0.06}
    )
    for method in document["methods"]:
        (row,) = [line for line in shown.splitlines() if line.startswith(method["name"] + " ")]
        told = Estimate(method["speedup"], method["speedup_margin"])
        assert str(told) in row
        assert f"{method['tokens_per_second']:.{max(0, told.digits - 1)}f}" in row
    assert (document["methods"][0]["speedup"], document["methods"][0]["speedup_margin"]) == (1, 0)


def test_a_trace_is_replayed_by_command(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    traced(path, RequestOptions("pearl", "fixed", 5), Timing(0.01, lambda _: 0.05))
    assert "(1.000 of it); 300 of 300 positions" in invoked("--trace", str(path)).output.replace("\n", "")
    assert "leave one of them out" in str(invoked("--trace", str(path), "--tokens", "9", code=2).exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--t-target", "5:"], "tokens fed:milliseconds"),
        (["--t-target", "1:5,1:6"], "tokens fed:milliseconds"),
        (["--t-target", "0:5"], "tokens fed:milliseconds"),
        (["--t-target", "nan"], "tokens fed:milliseconds"),
        (["--t-draft", "0"], "--t-draft"),
        (["--t-draft", "inf"], "finite"),
        (["--acceptance", "1.5"], "--acceptance"),
        (["--jitter", "nan"], "finite"),
        (["--delay", "-1"], "--delay"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_options_before_a_subcommand_are_not_lost_silently() -> None:
    assert "go behind it" in str(CliRunner().invoke(cli, ["simulate", "--delay", "3", "check"]).exception)


def test_nothing_is_too_extreme() -> None:
    for acceptance in ("0", "1"):
        assert "pearl, stream" in invoked("--acceptance", acceptance, "--requests", "3", "--tokens", "20").output
    assert "c = 1" in invoked("--t-draft", "90", "--t-target", "5", "--requests", "2", "--tokens", "2").output


@pytest.mark.parametrize("passes", [True, False])
def test_check_tells_by_its_exit_code(passes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = [checks.Check("one", "a", 2.0, 2.01), checks.Check("other", "b", 5, 5 if passes else 4, exact=True)]
    monkeypatch.setattr("pearl.lab.experiments.checks.checks", lambda tokens, seed: iter(made))
    result = invoked("check", "--json", str(tmp_path / "c.json"), code=0 if passes else 1)
    assert result.exit_code == (0 if passes else 1)
    assert ("FAIL" in result.output) is not passes
    assert [one["passed"] for one in json.loads((tmp_path / "c.json").read_text())] == [True, passes]


def test_a_sweep_leaves_a_picture_and_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = invoked(
        "sweep", "foreseen", "--out", str(tmp_path / "s"), "--acceptance", "0.8", "--tokens", "1000", "--repeats", "1"
    ).output
    assert "slower" not in out
    assert (tmp_path / "s" / "foreseen.png").read_bytes().startswith(b"\x89PNG")
    out = invoked(
        "sweep", "jitter", "--out", str(tmp_path / "s"), "--acceptance", "0.8", "--tokens", "1000", "--repeats", "2"
    ).output
    assert "slower from here on" in out
    points = json.loads((tmp_path / "s" / "jitter.json").read_text())
    assert [point["jitter"] for point in points] == list(sweeps.JITTERS)
    assert (tmp_path / "s" / "jitter.png").read_bytes().startswith(b"\x89PNG")


def test_totals_of_nothing_judged_say_so() -> None:
    assert Totals(AR).acceptance_rate is None


def test_bias_and_rejections_of_opt_add_up_to_the_distance_on_a_pair_of_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the target's texts; in its own each rule's rejections are as the distributions there foretell."""
    monkeypatch.setattr(front, "EPSILONS", (0.0, 0.001, 0.01))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The hat and the tin\nan inner thing, then another one\nThen the other\n")
    pair = [f"--{role}={tiny_model('llama', noise=noise)}" for role, noise in (("target", 0.0), ("draft", 0.2))]
    png, document = tmp_path / "it.png", tmp_path / "it.json"
    more = ["--max-tokens=40", "--target-dtype=float32", "--draft-dtype=float32", f"--png={png}", f"--json={document}"]
    result = CliRunner().invoke(cli, ["simulate", "front", str(prompts), *pair, *more])
    assert result.exit_code == 0, result.output
    assert "uno (not exact), epsilon 0.001" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    told = json.loads(document.read_text())["rules"]
    opt, uno = ([one for one in told if one["rule"] == rule] for rule in ("opt", "uno"))
    assert (opt[0]["bias"], opt[0]["measured_bias"]["value"]) == pytest.approx((0, 0), abs=1e-6)
    for one, other in zip(opt, uno, strict=True):
        assert one["expected"] + one["bias"] == pytest.approx(opt[0]["expected"], abs=1e-5)
        assert other["expected"] == one["expected"]
        assert other["bias"] >= one["bias"]
    assert opt[0]["expected"] > opt[1]["expected"] > opt[2]["expected"] >= 0
    off = [abs(one["measured"]["value"] - one["foretold"]) / (one["margin"] or 1) for one in told]
    assert max(off) < 2, "that is 3.9 standard deviations"


def test_a_position_of_the_front_is_what_theory_has_for_it() -> None:
    p, q = torch.softmax(torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(3)).double(), -1)
    for epsilon, corrects in ((0.0, True), (0.1, True), (0.1, False)):
        rejected, bias = front.relaxed(p, q, epsilon, corrects)
        for i in range(5):
            tables = [p[i][None].expand(7, 7).tolist()], [q[i][None].expand(7, 7).tolist()], 0
            expected = theory.expected_relaxed_rejections(*tables, epsilon, corrects)
            assert (rejected[i], bias[i]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--draft", "none"], "these rules judge what a draft proposes"),
        (["--temperature", "0"], "has no distribution to be biased"),
        (["--limit", "1", "--target=toy:vocab=32,alpha=0.8", "--draft=toy:vocab=32,alpha=0.8"], "it takes two prompts"),
    ],
)
def test_what_a_front_cannot_be_drawn_of_is_refused(tmp_path: Path, given: list[str], told: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    result = CliRunner().invoke(cli, ["simulate", "front", str(prompts), *given])
    assert isinstance(result.exception, ConfigError)
    assert told in str(result.exception)
