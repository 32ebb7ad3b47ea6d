"""The figures of a reply are of that reply: tokens a step, and how many times as fast as the target alone it was."""

import time
from typing import Any

import pytest

from pearl.lab.bench.figures import figures
from pearl.lab.bench.rows import AR
from pearl.lab.bench.runner import Measured, TaskSample
from pearl.lab.studies.simulate import Outcome, Timing, paired_executors, simulate
from pearl.metrics import ESTIMATED, MOST_CORE_WAIT, Statistics, Stopwatch, brief, fold
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.events import Forwarded, Sampled
from pearl.protocol.method_choice import Auto
from pearl.protocol.request import Counts
from pearl.protocol.speeds import Profile, Speeds
from pearl.worker.contention import ThreadTime, longest_wait, thread_times
from tests.auto import VOCAB, asked, decode, write
from tests.joint import decode as joint_decode
from tests.joint import parameters
from tests.options import resolved
from tests.plans import plan_of, row_of
from tests.replace import replace
from tests.scripted import Told
from tests.virtual import FOUR_TO_ONE

RISING = Timing(1.0, lambda fed: 3.0 + fed)
STALE = Profile(1.0, 0.7, ((1, 40.0), (16, 190.0)))  # ten times as long


# ---- tokens a step ----


@pytest.mark.parametrize("method", ["ar", "ngram", "sd", "pearl"])
def test_the_token_of_the_prefill_is_in_no_step(method: str) -> None:
    outcome = decode(method, FOUR_TO_ONE, 50)
    statistics = outcome.statistics
    assert statistics.num_prefill_tokens == 1
    assert statistics.tokens_per_step == 49 / statistics.steps
    assert method != "ar" or statistics.tokens_per_step == 1.0


def test_a_text_that_the_prefill_ends_has_no_step() -> None:
    statistics = decode("ar", FOUR_TO_ONE, 1).statistics
    assert (statistics.num_prefill_tokens, statistics.tokens_per_step) == (1, None)


def test_under_a_block_rule_the_row_of_the_prefill_comes_again() -> None:
    decoding = resolved("pearl", "stream", 4, "joint", parameters(0.55, 3, 16))
    outcome = joint_decode(decoding, 5, 40)
    assert outcome.counts.num_prefill_tokens == 0
    assert outcome.statistics.tokens_per_step == 40 / outcome.counts.steps


def test_a_benchmark_counts_likewise() -> None:
    texts = [
        Statistics(
            num_generated_tokens=count,
            num_prefill_tokens=1,
            target_steps={"prefill": 1, "pre-verify": count - 1},
        )
        for count in (1, 9, 41)
    ]
    samples = [TaskSample(AR, "x", task, texts=[text]) for task, text in enumerate(texts)]
    (row,) = figures(plan_of([row_of(AR)]), Measured(samples))
    assert row.tokens_per_step == 1.0


# ---- times the target alone ----


def begun_stale(method: str, tokens: int = 100) -> Outcome:
    """A text by an engine that begins with times of another moment."""
    laws = alpha_pair(VOCAB, 0.7, order=2)
    target, draft = paired_executors(ToyRunner(VOCAB, laws[0]), ToyRunner(VOCAB, laws[1]))
    submit = asked(method, tokens, temperature=1.0)
    published = submit.options.changed(look_ahead=0, branches=0, draft_lookup=0)
    return simulate(
        replace(submit, options=published), target, draft, RISING, speeds=Speeds.of(STALE)
    )


def test_method_ar_is_compared_with_nothing() -> None:
    outcome = begun_stale("ar")
    assert outcome.counts.lone_forwards == 99
    assert (outcome.statistics.speedup, outcome.statistics.speedup_basis) == (None, "")


def test_the_estimate_is_by_forwards_of_the_same_reply() -> None:
    """It was tokens/s times a forward time of another moment: ten times as much here."""
    outcome = begun_stale("pearl")
    rate = outcome.statistics.tokens_per_second
    assert rate is not None
    assert outcome.statistics.speedup == pytest.approx(4.0 * rate)
    assert outcome.statistics.speedup_basis == ESTIMATED


def test_without_forwards_of_one_token_in_the_reply_nothing_is_estimated() -> None:
    """Those that the profile knows are older than the reply."""
    outcome = begun_stale("sd")
    assert outcome.counts.lone_forwards < 4
    assert outcome.statistics.speedup is None


def times_of(core_wait: float = 0.0) -> Stopwatch:
    watch = Stopwatch(core_wait=core_wait)
    for at in range(10):
        watch.committed(2, float(at))
    return watch


def counted(**more: Any) -> Counts:
    return Counts(num_draft_tokens=10, lone_forwards=5, lone_seconds=4.0, **more)


def speedup_of(counts: Counts, watch: Stopwatch) -> tuple[float | None, str]:
    statistics = fold(counts, watch, Speeds(), 4, 0)
    return statistics.speedup, statistics.speedup_basis


def test_a_disturbed_reply_has_no_speedup() -> None:
    assert speedup_of(counted(), times_of()) == (1.6, ESTIMATED)
    assert speedup_of(counted(), times_of(MOST_CORE_WAIT / 2)) == (1.6, ESTIMATED)
    assert speedup_of(counted(), times_of(2 * MOST_CORE_WAIT)) == (None, "")
    assert speedup_of(counted(was_shared=True), times_of()) == (None, "")


def test_a_step_beside_another_request_is_a_shared_one() -> None:
    coordinator = Coordinator(Told(Sampled((5,)), Sampled((5,)), Sampled((6,))), slots=2)
    for number in (1, 2):
        coordinator.handle(replace(asked("ar", 20), request=number))
        coordinator.handle(Forwarded(0.1, 1.0, request=number))
    first, second = coordinator.running.values()
    assert not first.request.counts.was_shared
    coordinator.handle(Forwarded(0.1, 2.0, request=2))
    assert second.request.counts.was_shared


def test_what_auto_compared_in_the_reply_stands_before_an_estimate() -> None:
    assert speedup_of(counted(compared={"sd": 1.2, "ngram": 1.3}), times_of()) == (1.3, "ngram")
    assert speedup_of(counted(compared={"sd": 1.2, "head": 1.1}), times_of()) == (1.6, ESTIMATED)
    assert speedup_of(counted(compared={"ngram": 1.3}), times_of(2 * MOST_CORE_WAIT)) == (None, "")


def test_auto_tells_the_comparisons_of_this_text_alone() -> None:
    auto = Auto()
    rates: dict[str, float] = {"ngram": 40, "pearl": 50, "sd": 10, "ssd": 35}
    write(auto, rates, 1000)
    assert auto.best == "pearl"
    assert auto.gains == pytest.approx({"ngram": 50 / 40, "sd": 50 / 10, "ssd": 50 / 35}, rel=0.1)
    write(auto, rates, 30)
    assert auto.gains == {}


def test_auto_says_what_it_settled_on() -> None:
    """Once it has compared: it begins with n-grams, but that is no finding."""
    slow_draft = Timing(4.0, lambda _: 1.0)
    assert decode("auto", slow_draft, 20).counts.settled == ""
    outcome = decode("auto", slow_draft, 600)
    assert outcome.counts.settled == "ngram"
    assert set(outcome.counts.compared) <= {"pearl", "sd", "ssd"}
    assert "auto settled on the target alone (ngram)" in brief(outcome.statistics)


# ---- in words ----


def line(**figures: Any) -> str:
    return brief(
        Statistics(num_generated_tokens=100, tokens_per_second=20.0, tokens_per_step=1.5, **figures)
    )


def test_the_line_says_what_a_speedup_is_by() -> None:
    begin = "100 tokens · 20.0 tokens/s · 1.50 tokens a step"
    assert line() == begin
    assert (
        line(speedup=1.3, speedup_basis=ESTIMATED)
        == begin + " · about 1.30 times the target alone (estimated)"
    )
    compared = begin + " · about 1.30 times the target alone (compared with ngram)"
    assert line(speedup=1.3, speedup_basis="ngram", settled="pearl") == compared
    assert line(settled="ngram") == begin + " · auto settled on the target alone (ngram)"


# ---- a busy machine ----


def test_the_wait_for_a_core_is_that_of_threads_which_compute() -> None:
    """A thread that reads sockets waits behind the forward on its own core: that is no other program."""
    before = {1: ThreadTime(5.0, 1.0), 2: ThreadTime(3.0, 0.0), 3: ThreadTime(0.0, 0.0)}
    after = {1: ThreadTime(7.0, 1.1), 2: ThreadTime(4.5, 0.5), 3: ThreadTime(0.1, 0.8)}
    assert longest_wait(before, after) == pytest.approx(0.5)
    assert longest_wait(before, after | {4: ThreadTime(2.0, 0.7)}) == pytest.approx(0.7), (
        "a thread begun meanwhile"
    )
    assert longest_wait({}, {}) == 0.0


def test_the_system_counts_what_a_thread_computes() -> None:
    before = thread_times()
    if not before:
        pytest.skip("this system tells no times of threads")
    ends = time.thread_time() + 0.05
    while time.thread_time() < ends:
        pass
    after = thread_times()
    most = max(after[thread].ran - before[thread].ran for thread in before.keys() & after.keys())
    assert most >= 0.04
