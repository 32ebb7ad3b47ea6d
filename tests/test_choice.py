"""Method auto: with the draft or without it, what is faster; and whatever it chooses, the text is the target's."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.drafting.habits import Habits
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.choice import Choice
from pearl.protocol.events import Forward, Guess, Guessed, Open, Phase, Retrace
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.protocol.window import ForwardTimes, Profile, Speeds, worthwhile
from pearl.worker import profile
from tests.conftest import TOY, greedy_text
from tests.replace import replace
from tests.screen import BOUND
from tests.test_look_ahead import Chains

VOCAB, PROMPT = 32, (1, 2, 3)


def asked(method: str, tokens: int, rule: str = "coupled", temperature: float = 0.0, seed: int = 5) -> Submit:
    extras = (0, 8, 8, 7) if method in ("auto", "pearl") else (0, 8 if method == "ngram" else 0, 0, 0)
    decoding = RequestOptions(method, "stream", None, rule, (), *extras[1:])
    return Submit(1, PROMPT, len(PROMPT) + tokens, replace(decoding, sampling=Sampling(temperature, seed=seed)))


def decode(
    method: str, timing: Timing, tokens: int = 400, alpha: float = 0.7, order: int = 2, **given: object
) -> Outcome:
    target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, alpha, order=order))
    submit = asked(method, tokens, **given)  # type: ignore[arg-type]
    return simulate(submit, *paired_executors(target, draft), timing)


# ---- the choice alone ----


def write(choice: Choice, drafted: float, alone: float, tokens: int, noise: float = 0.0, reading: int = 0) -> int:
    """Writes a text at these tokens a second. Returns how many tokens came while the draft rested.

    `reading`: tokens that come before the draft has read what stands there, where it begins amid a text.
    """
    chance, at, left, rested, unread = random.Random(1), 1.0, tokens, 0, 0
    choice.begin(left)
    choice.stepped(at, 0)
    while left > 0:
        at += 2 / (alone if choice.rests else drafted) * max(0.2, chance.gauss(1, noise))
        left, rested, unread = left - 2, rested + 2 * choice.rests, max(0, unread - 2)
        if not choice.rests:
            choice.retraced(2 / alone, 2)
        if choice.stepped(at, 2, 2 / alone, not unread, left) and not choice.rests:
            unread = reading
    choice.end()
    return rested


@pytest.mark.parametrize(("drafted", "alone"), [(50.0, 40.0), (40.0, 50.0), (100.0, 10.0), (10.0, 100.0)])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_faster_way_is_found(drafted: float, alone: float, noise: float) -> None:
    choice = Choice()
    write(choice, drafted, alone, 5000, noise)
    choice.begin(0)
    assert choice.rests == (alone > drafted)
    assert choice.rates[False] == pytest.approx(drafted, rel=0.1 + noise)
    assert choice.rates[True] == pytest.approx(alone, rel=0.1 + noise)


def test_that_texts_begin_faster_than_they_go_on_speaks_for_no_way() -> None:
    """The draft is tried where a text begins, so it seemed better wherever texts begin with what is easily guessed."""
    choice, at = Choice(), 0.0
    drafted = 0
    for text in range(40):
        choice.begin(96)
        for token in range(96):
            easy = 2.0 if token < 26 else 1.0
            at += 1 / (easy * (40.0 if choice.rests else 32.0))
            drafted += not choice.rests and text >= 20
            if not choice.rests:
                choice.retraced(1 / (easy * 40.0), 1)
            choice.stepped(at, 1, 1 / (easy * 40.0), True, 96 - token)
        choice.end()
    assert choice.is_alone_better
    assert choice.speedup == pytest.approx(0.8)
    assert drafted < 0.2 * 20 * 96


@pytest.mark.parametrize("tokens", [60, 64, 90])
def test_a_mistake_of_the_first_comparison_is_found_in_short_texts(tokens: int) -> None:
    """There is room for one change-over in such a text, and the draft in use was never doubted again."""
    choice = Choice(gain=0.3, comparisons=1.0, rates={False: 50.0, True: 40.0}, overhead=0.0)
    rested = [write(choice, 40.0, 50.0, tokens) for _ in range(2400 // tokens)]
    assert choice.is_alone_better
    assert sum(rested[-8:]) > 0.9 * 8 * tokens


@pytest.mark.parametrize(("drafted", "alone"), [(80.0, 100.0), (100.0, 80.0), (70.0, 100.0), (100.0, 70.0)])
def test_twenty_short_texts_tell_which_way_is_faster(drafted: float, alone: float) -> None:
    """Where the luck of a stretch is larger than the difference: they were compared too seldom."""
    right, written = 0, 0
    for seed in range(60):
        choice, chance = Choice(), random.Random(seed)
        for text in range(40):
            at, left, easy = 1.0, 64, chance.lognormvariate(0, 0.4)
            choice.begin(left)
            choice.stepped(at, 0)
            while left > 0:
                tokens = min(left, chance.choice([1, 1, 1, 2, 2, 4]))
                at += (a_step := 11 / 6 / easy) / (alone if choice.rests else drafted)
                if 16 <= left < 32:  # it changes its ways behind the half
                    easy = chance.lognormvariate(0, 0.4)
                if text >= 20:
                    right, written = right + tokens * (choice.rests == (alone > drafted)), written + tokens
                left -= tokens
                if not choice.rests:  # guesses hit other parts of the same text
                    choice.retraced(a_step / alone, chance.choice([1, 1, 1, 2, 2, 4]))
                choice.stepped(at, tokens, a_step / alone, True, left)
            choice.end()
    assert right > 0.86 * written


def test_a_hiccup_is_not_what_each_step_takes() -> None:
    """Where much is done for the first time, a step without the draft took two seconds once."""
    choice, at = Choice(), 0.0
    choice.begin(1000)
    while not choice.rests:
        at += 0.02
        choice.stepped(at, 1, 0.015)
    for step in range(1000):
        at += 2.0 if step == 5 else 0.025  # a thread pool is made, say
        choice.stepped(at, 1, 0.02)
        if not choice.rests:
            break
    assert choice.overhead == pytest.approx(0.005)


def test_one_stretch_alone_is_not_all_that_is_known_of_its_steps() -> None:
    """A profile's overhead, too, is corrected and not replaced by each stretch of the way in use."""
    choice, at = Choice(gain=-0.4, comparisons=5.0, overhead=0.004), 1.0
    choice.begin(100)
    for _ in range(25):
        choice.stepped(at, 1, 0.02)
        at += 0.032
    assert choice.rests
    assert choice.overhead == pytest.approx(0.004 + 0.25 * 0.008)


def test_times_that_were_taken_in_a_bad_moment_do_not_decide_for_long() -> None:
    """Something else had a core while the target alone was timed: the draft was in use for a hundred texts."""
    choice, at, written, drafted = Choice(), 1.0, 0, 0
    for _ in range(40):
        choice.begin(64)
        choice.stepped(at, 0)
        for left in range(62, -1, -2):
            alone = 3 * 2 / 50 if written < 400 else 2 / 50
            at += alone if choice.rests else 2 / 40
            written, drafted = written + 2, drafted + 2 * (not choice.rests)
            if not choice.rests:
                choice.retraced(2 / 50, 2)
            choice.stepped(at, 2, 2 / 50, True, left)
        choice.end()
    assert choice.is_alone_better
    assert drafted < 1200


@pytest.mark.parametrize(("overhead", "least", "most"), [(0.001, 1400, 1500), (0.05, 900, 1050)])
def test_the_target_alone_is_timed_more_seldom_where_no_such_time_could_change_anything(
    overhead: float, least: int, most: int
) -> None:
    """With the draft three tokens in 0.05 s, without it one in 0.04 s and what is beside: if much, perhaps wrong."""
    choice, at, timed = Choice(), 1.0, []
    choice.begin(5000)
    choice.stepped(at, 0)
    for written in range(0, 3 * 1000, 3):
        at += 0.04 + overhead if choice.rests else 0.05
        made = 1 if choice.rests else 3
        for _ in range(0 if choice.rests else made):
            choice.retraced(0.04, 1)
        if choice.stepped(at, made, 0.04, True, 4000) and choice.rests:
            timed.append(written)
    assert choice.overhead == pytest.approx(overhead)
    assert least <= timed[1] - timed[0] <= most


@pytest.mark.parametrize("tokens", [90, 400, 40_000])
@pytest.mark.parametrize(("drafted", "alone"), [(50.0, 20.0), (20.0, 50.0), (40.0, 50.0), (50.0, 40.0)])
def test_finding_out_costs_a_hundredth_of_the_time(drafted: float, alone: float, tokens: int) -> None:
    """In short texts as in long ones, and though a draft that begins amid a text has to read it first."""
    choice, in_all, slow = Choice(), 0, 0
    for _ in range(40_000 // tokens):
        rested = write(choice, drafted, alone, tokens, reading=40)
        in_all += tokens
        slow += rested if drafted > alone else tokens - rested
    waste = slow / min(drafted, alone) - slow / max(drafted, alone)
    assert waste < 0.02 * in_all / max(drafted, alone)
    assert slow > 24, "now and then it is looked at again"


@pytest.mark.parametrize(("drafted", "alone", "tried"), [(50.0, 40.0, 18), (90.0, 45.0, 10), (90.0, 18.0, 10)])
def test_to_time_the_target_alone_takes_few_steps(drafted: float, alone: float, tried: int) -> None:
    """After the change-over eight steps of two tokens tell enough of it, or four where it is far slower."""
    choice = Choice()
    assert write(choice, drafted, alone, 100) == tried
    assert choice.speedup == pytest.approx(min(3, drafted / alone), rel=0.01), "one comparison says no more"
    assert choice.measured[0] == pytest.approx(drafted / alone, rel=0.01), "what is told is what was measured"


def test_a_hiccup_is_not_a_clear_loss() -> None:
    """One step of a draft that is tried took forty times as long: it goes on to the end of its stretch."""
    choice, at = Choice(gain=-0.1, comparisons=1.0, overhead=0.0), 1.0
    choice.begin(200)
    choice.stepped(at, 0)
    for token in range(0, 24, 2):
        assert not choice.rests, f"after {token} tokens"
        at += 2 / 100 * (40 if token == 8 else 1)
        choice.retraced(2 / 50, 2)
        choice.stepped(at, 2)
    assert choice.rests, "in all it was slower"


@pytest.mark.parametrize(("drafted", "alone"), [(50.0, 40.0), (40.0, 50.0)])
def test_a_lively_text_does_not_mislead(drafted: float, alone: float) -> None:
    """Rates of different texts are never compared."""
    for lively in ([3.0, 1.0, 1.0], [1.0, 3.0, 1.0, 3.0], [0.3, 1.0, 1.0, 2.0], [3.0, 0.4, 2.5, 0.3, 1.0]):
        choice = Choice()
        for factor in lively:
            write(choice, drafted * factor, alone * factor, 96)
        choice.begin(0)
        assert choice.rests == (alone > drafted), lively
        assert choice.speedup == pytest.approx(drafted / alone, rel=0.01)


def test_a_way_that_becomes_slow_is_left_soon() -> None:
    choice = Choice()
    write(choice, 50.0, 40.0, 5000)
    assert write(choice, 20.0, 40.0, 600) > 500
    for _ in range(4):  # no text of these has much of it
        assert write(choice, 20.0, 40.0, 100) > 60
    choice.begin(0)
    assert choice.rests


def test_a_text_that_begins_slowly_is_no_reason_to_try_the_other_way() -> None:
    choice = Choice()
    write(choice, 50.0, 40.0, 1000)
    tried = choice.since_tried
    for factor in (0.3, 1.0, 0.3):
        write(choice, 50.0 * factor, 40.0 * factor, 40)
    assert choice.since_tried == tried + 120


@pytest.mark.parametrize(("step", "alone"), [(0.0, 0.01), (0.01, 0.0), (0.0, 0.0)])
def test_what_took_no_time_says_nothing(step: float, alone: float) -> None:
    """A clock may be as coarse as that."""
    choice = Choice(overhead=0.0)
    choice.begin(100)
    for number in range(30):
        choice.retraced(alone, 1)
        choice.stepped(1 + number * step, 1, alone)
    choice.end()
    assert choice.comparisons == 0


def nearly_a_tie(alone: float) -> tuple[int, int]:
    """Change-overs and steps without the draft, of 5,000, where that makes `alone` tokens a second instead of 50."""
    choice, at, changes, rested, before = Choice(), 1.0, 0, 0, False
    choice.begin(10_000)
    for _ in range(5000):
        choice.stepped(at, 2, 2 / alone)
        if not choice.rests:
            choice.retraced(2 / alone, 2)
        at += 2 / (alone if choice.rests else 50.0)
        changes, before = changes + (choice.rests != before), choice.rests
        rested += choice.rests
    return changes, rested


def test_a_tie_changes_nothing_back_and_forth() -> None:
    changes, _ = nearly_a_tie(50.5)
    assert changes < 16


def test_a_way_that_is_faster_by_little_is_taken_once_that_is_known_well() -> None:
    """By less than one comparison can tell: it stayed with whichever way it had come to, half of the time the other."""
    _, rested = nearly_a_tie(51.0)
    assert rested > 0.9 * 5000


def test_times_of_other_cores_are_kept_apart() -> None:
    speeds = Speeds(target=ForwardTimes({1: 2.0}))
    speeds.spread(True)
    assert speeds.t_target(1) == 2.0, "until it is measured"
    for _ in range(100):
        speeds.observe_target(1, 1.0)
    assert speeds.t_target(1) == pytest.approx(1.0, rel=0.01)
    speeds.spread(False)
    assert speeds.t_target(1) == 2.0
    speeds.spread(True)
    assert speeds.t_target(1) == pytest.approx(1.0, rel=0.01)


def test_a_size_that_was_measured_on_other_cores_alone_is_expected_to_gain_what_others_gain() -> None:
    """It was expected to take as long as there: too long to be tried, and so for ever."""
    speeds = Speeds(target=ForwardTimes({1: 2.0, 4: 4.0, 8: 8.0}))
    speeds.spread(True)
    assert speeds.target.at_most(8) == 8.0, "nothing is known yet"
    for _ in range(100):
        speeds.observe_target(1, 1.0)
        speeds.observe_target(4, 2.0)
    assert speeds.t_target(8) == pytest.approx(4.0, rel=0.01)
    assert speeds.target.at_most(8) == pytest.approx(4.0, rel=0.01)
    assert [fed for fed, _ in speeds.measured] == [1, 4], "and what is told is what was measured"
    speeds.spread(False)
    for _ in range(100):
        speeds.observe_target(8, 10.0)
    speeds.spread(True)
    assert speeds.target.at_most(8) == pytest.approx(5.0, rel=0.01), "what is learnt there later counts too"
    again = Speeds.of(Profile(t_target=((1, 2.0), (8, 8.0)), t_elsewhere=((1, 1.0),)))
    again.spread(True)
    assert again.t_target(8) == pytest.approx(4.0)


def test_what_seemed_too_dear_is_hoped_to_be_cheaper() -> None:
    """A size that is not fed is not measured again: one hiccup was enough for it to be too dear for ever."""
    times = ForwardTimes({1: 1.0, 4: 3.0})  # the latter for something else had the cores
    fed = []
    for _ in range(2000):
        size = 1 + worthwhile([0.3, 0.25, 0.2], 1, 1.0, times.hoped)  # of 4 tokens make 1.75 in the mean
        fed.append(size)
        times.observe(size, 1.0 if size == 1 else 1.5)
    assert fed[0] == 1
    assert fed.count(4) > 600
    assert times.at_most(4) == pytest.approx(1.5, rel=0.01)


def test_what_is_too_dear_is_tried_seldom() -> None:
    times = ForwardTimes({1: 1.0, 4: 3.0})
    fed = []
    for _ in range(2000):
        fed.append(1 + worthwhile([0.3, 0.25, 0.2], 1, 1.0, times.hoped))
        times.observe(fed[-1], 3.0 if fed[-1] == 4 else 1.0 + 0.4 * (fed[-1] - 1))
    assert 1 <= len([size for size in fed if size > 1]) < 40
    assert times.at_most(4) == pytest.approx(3.0, rel=0.01)
    assert times.hoped(1) == 1.0


def test_what_a_start_has_measured_is_what_a_trace_begins_with() -> None:
    """A replay knows the times alone, not how often each was measured: decisions differed that depend on that."""
    measured = ForwardTimes()
    for fed in (1, 4, 8):
        measured.observe(fed, 1.0 * fed)
    measured.settle()
    told = ForwardTimes(dict(measured.known))
    for number in range(600):
        for times in (measured, told):
            times.observe(1 + 3 * (number % 50 == 7), 0.9)
        assert [measured.hoped(fed) for fed in range(1, 10)] == [told.hoped(fed) for fed in range(1, 10)]
    assert told.hoped(8) < told.at_most(8)


def test_the_first_forward_on_other_cores_says_nothing() -> None:
    """The draft may not have ended what it was at."""
    speeds = Speeds(target=ForwardTimes({1: 2.0}))
    speeds.spread(True)
    speeds.observe_target(1, 1.9)
    speeds.observe_target(1, 1.0)
    assert speeds.t_target(1) == 1.0


# ---- hindsight ----


Forwards = list[tuple[int, int]]  # (tokens fed, tokens that they made)


def hindsight(method: str, temperature: float, trees: bool = True, habits: bool = True) -> tuple[Forwards, Forwards]:
    """Of one text: the forwards that it took, but for the first, and those that hindsight says guesses would take."""

    def t_target(fed: int) -> float:
        return 3 + 0.1 * fed

    target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.7, order=1))
    known = Habits() if habits else None
    executors = paired_executors(target if trees else Chains(target), draft, habits=known)
    inner, fed, after = executors[0]._execute, list[int](), list[int]()
    alone: Forwards = []

    def execute(command: object) -> object:
        if isinstance(command, Retrace):  # of the machine's own choice
            return None
        event = inner(command)
        if isinstance(command, Open):
            times = tuple(t_target(tokens) for tokens in range(1, 10))
            inner(Retrace(len(PROMPT) + 1, times, 8, request=command.request))
        if isinstance(command, Guess):
            assert isinstance(event, Guessed)
            after.append(command.committed)
            alone.extend(event.alone)
        if isinstance(command, Forward) and command.phase is not Phase.PREFILL:
            fed.append(len(command.tokens))
        return event

    executors[0]._execute = execute  # type: ignore[method-assign, assignment]
    simulate(asked(method, 300, temperature=temperature), *executors, Timing(1.0, t_target))
    made = [one - before for before, one in pairwise(after)]
    return list(zip(fed[: len(made)], made, strict=True)), alone


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("habits", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hindsight_tells_what_guesses_alone_take(
    temperature: float, habits: bool, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the forward and to the token: of nothing that it learns on the way it knows more than they do."""
    monkeypatch.setattr(ForwardTimes, "hoped", ForwardTimes.at_most)  # what was hoped changes as it is written
    took, alone = hindsight("ngram", temperature, trees, habits)
    assert alone == took[: len(alone)]
    assert len(alone) >= len(took) - 1
    assert any(made > 1 for _, made in took)
    drafted, told = hindsight("pearl", temperature, trees, habits)
    assert told == took[: len(told)]
    assert len(told) >= len(took) - 3
    assert drafted != took


# ---- texts ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_choice_changes_a_text(temperature: float) -> None:
    """Whatever is faster at the moment: the draft rests and comes back in the midst of it."""
    timings = [
        Timing(1.0, lambda _: 4.0),
        Timing(1.0, lambda _: 1.0),
        Timing(1.0, lambda n: 2.0 + 0.1 * n, delay=0.7, jitter=0.9, seed=1, t_spread=lambda n: 1.0 + 0.1 * n),
    ]
    alone = decode("ar", timings[0], temperature=temperature)
    rested = []
    for timing in timings:
        outcome = decode("auto", timing, temperature=temperature)
        assert outcome.tokens == alone.tokens
        assert outcome.counts.resyncs == 0
        rested.append(outcome.counts.rested)
    assert 0 < min(rested) < max(rested) < 400


def test_under_ratio_the_draft_never_rests_amid_a_text() -> None:
    """There the text depends on who proposed what: it is that of pearl."""
    timing = Timing(1.0, lambda _: 0.5)
    found, wanted = (decode(method, timing, rule="ratio", temperature=1.0) for method in ("auto", "pearl"))
    assert found.tokens == wanted.tokens
    assert found.counts.rested == 0


@pytest.mark.parametrize(("alpha", "c"), [(0.2, 1), (0.8, 1), (0.8, 8), pytest.param(0.2, 8, marks=pytest.mark.long)])
def test_auto_is_nearly_as_fast_as_the_better_way(alpha: float, c: int) -> None:
    """Once it has found out, for which it takes 48 tokens."""
    t_target, t_spread = (lambda n: c + 0.01 * n), (lambda n: 0.7 * c + 0.01 * n)
    seconds = {}
    for method in ("auto", "pearl", "ngram"):
        alone = t_spread if method == "ngram" else t_target
        timing = Timing(1.0, alone, delay=0.01, t_spread=t_spread)
        target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, alpha))
        submit = asked(method, 1000, temperature=1.0)
        seconds[method] = simulate(submit, *paired_executors(target, draft), timing).seconds
    best = min(seconds["pearl"], seconds["ngram"])
    assert seconds["auto"] <= 1.1 * best
    assert seconds["auto"] < 0.95 * max(seconds["pearl"], seconds["ngram"]) or best > 0.95 * max(seconds.values())


# ---- the target's cores ----


def test_cores_go_back_before_another_request_is_served() -> None:
    """One that does not adapt finds the target on its own cores."""
    spread: list[bool] = []
    target, draft = paired_executors(*(ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.2, order=2)))
    target._spread = spread.append
    simulate(asked("auto", 300), target, draft, Timing(1.0, lambda _: 1.0, t_spread=lambda _: 0.5))
    assert spread[:1] == [True]
    assert all(a != b for a, b in pairwise(spread))


def test_a_simulated_text_finds_the_cores_as_the_one_before_has_left_them() -> None:
    timing = Timing(1.0, lambda _: 1.0, t_spread=lambda _: 0.5)
    speeds = Speeds()
    for tokens in (300, 40):
        executors = paired_executors(*(ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.2, order=2)))
        outcome = simulate(asked("auto", tokens), *executors, timing, speeds=speeds)
        assert speeds.choice.is_spread
    assert outcome.counts.rested == 40
    assert outcome.seconds <= 0.5 * (outcome.target_steps + 1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_while_the_draft_rests_its_cores_are_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first token on, where a profile says that it does not pay: what is measured here has no part in it."""
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path))
    known = Profile(gain=-2.0, comparisons=8.0)
    path = profile.save(EngineConfig(target=TOY, draft=TOY), known)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with Engine(TOY, TOY, profile=str(path)) as engine:
        target = engine._launcher.target.pid  # type: ignore[union-attr]
        others = os.sched_getaffinity(0) - os.sched_getaffinity(target)

        def computing() -> int:
            """Threads of the target, each on a core of the draft's."""
            threads = [int(thread) for thread in os.listdir(f"/proc/{target}/task")]
            return sum(os.sched_getaffinity(thread) in [{core} for core in others] for thread in threads)

        assert (len(others), computing()) == (len(os.sched_getaffinity(0)) // 2, 0)
        with engine.stream([1, 2, 3], params, method="auto") as stream:
            assert {computing() for _ in stream} == {len(others)}
        assert stream.result.statistics.num_tokens_without_draft == 150
        (after,) = engine.generate([[1, 2, 3]], params.model_copy(update={"max_tokens": 5}), method="pearl")
        assert after.statistics.num_tokens_without_draft == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_draft_has_its_cores_again() -> None:
    """In a process of its own: it gets the target's cores, and the draft's, and gives them back."""
    program = f"""if True:
        import os, torch
        from pearl.config import EngineConfig
        from pearl.worker.build import _pin, _spreader, settled
        config = EngineConfig(target={TOY!r}, draft={TOY!r})
        every, own = os.sched_getaffinity(0), settled(config, "target").cores
        spread = _spreader(config)
        _pin(config, "target")
        for _ in range(2):
            assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (len(own), {{own[0]}})
            spread(True)
            assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (len(every), {{own[0]}})
            spread(False)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stderr


def test_an_engine_chooses_and_says_so(toy: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (result,) = toy.generate([[1, 2, 3]], params, method="auto")
    assert result.tokens == greedy_text([1, 2, 3], 200)
    s = result.statistics
    assert set(s.rates) == {"drafted", "alone"}  # which is in use now is up to the machine
    assert s.num_comparisons > 0
    assert s.draft_speedup is not None
    (after,) = toy.generate([[1, 2, 3]], params, method="pearl")
    assert after.tokens == result.tokens


def test_a_sampled_text_of_an_engine_is_the_targets_own(toy: Engine) -> None:
    """For auto takes coupled where nobody has chosen a rule, however it is asked for."""
    params = SamplingParams(temperature=1, max_tokens=150, ignore_eos=True, seed=4)
    texts = [
        toy.generate([[1, 2, 3]], params, **how)[0].tokens  # type: ignore[arg-type]
        for how in ({"method": "ar"}, {"method": "auto"}, {"decoding": DecodingConfig(method="auto")})
    ]
    assert texts[0] == texts[1] == texts[2]


def test_auto_takes_the_rule_under_which_no_choice_changes_a_text() -> None:
    assert DecodingConfig(method="auto").rule_in_use == "coupled"
    assert DecodingConfig(method="auto", rule="ratio").rule_in_use == "ratio"
    assert DecodingConfig(method="pearl").rule_in_use == "ratio"


def test_auto_needs_no_draft() -> None:
    EngineConfig(target=TOY, draft="none").check_method("auto")
    with pytest.raises(ConfigError, match="needs a draft"):
        EngineConfig(target=TOY, draft="none").check_method("pearl")
