"""The window that the measured speeds make best, what it waits for, and the times that it is chosen by."""

from __future__ import annotations

import pytest

from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.protocol.request_machine import RequestMachine
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import ForwardTimes, Speeds
from pearl.protocol.window import Window
from pearl.spec.methods import MAX_WINDOW, METHODS


def speeds(ratio: float, acceptance: float, growth: float = 0.0) -> Speeds:
    """t_draft 1, t_target(n) = ratio + growth * (n - 1)."""
    known = Speeds(1.0, acceptance)
    for fed in range(1, 40):
        known.observe_target(fed, ratio + growth * (fed - 1))
    return known


@pytest.mark.parametrize("ratio", [2, 3, 7, 12])
def test_best_window_is_theorem_1s_ratio(ratio: int) -> None:
    for acceptance in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        assert speeds(ratio, acceptance).best_window() == ratio


def test_a_target_that_slows_with_what_it_is_fed_makes_the_window_smaller() -> None:
    """So steep that feeding more than half the ratio costs more than it yields."""
    assert speeds(8, 0.8).best_window() == 8
    assert 1 <= speeds(8, 0.8, growth=3.0).best_window() < 8


def test_best_window_is_bounded_and_has_a_default() -> None:
    assert Speeds().best_window() == 4
    assert Speeds(1.0).best_window() == 4
    assert speeds(1000, 0.9).best_window() <= MAX_WINDOW
    assert speeds(0.2, 0.9).best_window() == 1


def test_target_times_are_interpolated_not_extrapolated() -> None:
    known = Speeds()
    assert known.t_target(3) == 0
    known.observe_target(2, 1.0)
    known.observe_target(6, 3.0)
    assert [known.t_target(n) for n in (1, 2, 3, 4, 6, 9)] == [1.0, 1.0, 1.5, 2.0, 3.0, 3.0]


def test_the_first_forward_of_a_size_does_not_set_its_time_by_itself() -> None:
    """On a GPU it may have had to prepare: 200 ms among forwards of 20, and the window would be another for a while."""
    known = Speeds(0.005)
    for fed in (1, 2, 4, 8):
        known.observe_target(fed, 0.02)
    window = known.best_window()
    known.observe_target(3, 0.2)
    assert known.t_target(3) < 0.023
    assert known.best_window() == window
    known.observe_target(5, 0.015)
    assert known.t_target(5) == 0.015, "no forward is faster than it can be"


def test_a_first_forward_of_more_tokens_than_any_may_take_as_much_longer() -> None:
    """Where a forward takes longer with each token, as on a CPU, the first of a larger size is believed."""
    known = Speeds()
    for fed in (1, 2, 4, 8, 100):
        known.observe_target(fed, 0.01 * fed)
    assert [known.t_target(fed) for fed in (1, 2, 4, 8, 100)] == pytest.approx([0.01, 0.02, 0.04, 0.08, 1.0])
    known.observe_target(200, 30.0)
    assert known.t_target(200) < 2.3


def test_speeds_follow_what_is_measured() -> None:
    """A hiccup fades, a lasting change arrives, and no time at all is no measurement."""
    known = Speeds()
    for _ in range(50):
        known.observe_draft(1.0)
        known.observe_target(1, 3.0)
    assert known.ratio == pytest.approx(3)
    known.observe_draft(0.0)
    known.observe_draft(2.0)
    assert 1.0 < known.t_draft < 1.2
    known.observe_target(1, 3000.0)
    assert 3.0 < known.t_target(1) < 3.6
    for _ in range(60):
        known.observe_draft(2.0)
    assert known.t_draft == pytest.approx(2.0, rel=0.01)
    for _ in range(400):
        known.observe_judgement(accepted=1, judged=2)
    assert known.acceptance == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("policy", ["fixed", "stream"])
@pytest.mark.parametrize("method", METHODS)
def test_the_draft_may_always_draft_what_the_target_waits_for(method: str, policy: str) -> None:
    """`needed` counts the last committed token, which is there already."""
    for c in range(1, 20):
        for fresh in (True, False):
            window = Window.after(METHODS[method], policy, c, 100, fresh)
            assert window.needed >= 1
            assert window.draft_until >= 100 + window.needed - 1


def test_stream_waits_for_a_token_that_is_due_but_never_after_a_rejection() -> None:
    pearl = METHODS["pearl"]
    assert Window.after(pearl, "stream", 5, 100, fresh=True) == Window(1, 110)
    assert Window.after(pearl, "stream", 5, 100, fresh=False) == Window(4, 110)
    assert Window.after(pearl, "stream", 1, 100, fresh=False) == Window(1, 102)
    assert Window.after(pearl, "fixed", 5, 100, fresh=True, pending=4) == Window(1, 109), "a branch is a window"


@pytest.mark.parametrize(
    ("method", "temperature", "keeps"), [("sd", 1.0, True), ("sd", 0.0, False), ("pearl", 1.0, False)]
)
def test_a_text_that_depends_on_its_measured_window_keeps_it(method: str, temperature: float, keeps: bool) -> None:
    """So that it can be recorded, and the text made again."""
    submit = Submit(1, (1,), 99, RequestOptions(method, sampling=Sampling(temperature)))
    machine = RequestMachine(submit, TokenSequence(), 0, speeds := Speeds(t_draft=1.0), 99, 0, {})
    windows = []
    for seconds in (2.0, 9.0):
        speeds.target = ForwardTimes([(1, seconds)])
        for _ in range(8):
            machine.draft._grant()
        windows.append(machine.draft.window)
    assert (windows[0] == windows[1]) == keeps
