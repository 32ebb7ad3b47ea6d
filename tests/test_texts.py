"""Under the virtual clock a text depends on what should decide it, and on nothing else (invariants 3, 5, 10)."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import product
from typing import Any

import pytest

from pearl.drafting.stops import make_policy
from pearl.lab.simulate import Outcome
from pearl.models.toy import alpha_pair
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.methods import METHODS
from pearl.spec.rules import RULES, Unit, find
from pearl.spec.stops import CAP
from tests.pairwise import combined
from tests.test_stops import classifier
from tests.test_verification import DRAFT, TARGET
from tests.virtual import TIMINGS, Chains, decoded, first_order

PAIR = alpha_pair(6, 0.7, order=1), 6  # texts that repeat: the next token depends on the last
WINDOWS: list[tuple[str, int | None]] = [("stream", None), ("stream", 7), ("fixed", 1), ("fixed", 3)]
STOPS: dict[str, Any] = {"fixed": (), "threshold": (("confidence", 0.3),), "heuristic": (), "disco": ()}
DIRECT = [("coupled", 0.0), ("coupled", 1.0), ("ratio", 0.0)]  # rule, temperature: the text is the target's own
SEEDED = [(rule, 1.0) for rule in RULES if rule != "coupled" and find(rule).unit is Unit.TOKEN]


def outcome(asked: RequestOptions, temperature: float = 1.0, timing: int = 0, pair: Any = PAIR, **more: Any) -> Outcome:
    policies = partial(make_policy, classifier=classifier())
    sampling = Sampling(temperature, seed=more.pop("seed", 5))
    return decoded(*pair, asked, sampling, 60, TIMINGS[timing], (1, 2, 0), policies=policies, **more)


@cache
def expected(rule: str, temperature: float) -> list[int]:
    method = "ar" if (rule, temperature) in DIRECT else "pearl"
    return outcome(RequestOptions(method, rule=rule), temperature).tokens


@combined
@pytest.mark.parametrize(
    ("method", "rule", "temperature"),
    [
        *((method, *how) for method in METHODS if method != "ar" for how in DIRECT),
        *(("pearl", *how) for how in SEEDED),
        ("pearl-no-pre-verify", "ratio", 1.0),
    ],
)
def test_a_text_depends_on_what_should_decide_it(method: str, rule: str, temperature: float, combined: Any) -> None:
    """Seed, rule and models; not windows, timing, guesses, branches, stop policies, or whether a model takes trees."""
    spec, seen = METHODS[method], Counter[str]()
    axes: list[Any] = [
        WINDOWS,
        range(len(TIMINGS)),
        (0, 8) if spec.look_ahead else (0,),
        (0, 8) if spec.drafts else (0,),
        (0, 7) if spec.branches else (0,),
        STOPS if spec.takes_stops else ["fixed"],
        (Chains, lambda runner: runner),
    ]
    for window, timing, ahead, lookup, branches, stop, wrap in combined(*axes):
        asked = RequestOptions(
            method, *window, rule, (), ahead, lookup, branches, draft_stop=stop, stop_parameters=STOPS[stop]
        )
        found = outcome(asked, temperature, timing, wrap=wrap)
        assert found.tokens == expected(rule, temperature), (asked, timing, wrap)
        counts = found.counts
        assert counts.resyncs == 0, "both sides always agreed on which continuation holds"
        assert branches or not counts.foreseen
        seen.update(accepted=counts.accepted, guesses=counts.guesses, foreseen=counts.foreseen, pauses=counts.pauses)
    assert bool(seen["accepted"]) == spec.drafts
    assert bool(seen["guesses"]) == bool(spec.look_ahead)
    assert not spec.takes_stops or seen["pauses"]
    # A greedy text is a short loop, of which the draft is right or wrong for ever.
    assert not spec.branches or not temperature or seen["foreseen"]


def test_another_seed_gives_another_text() -> None:
    assert len({tuple(outcome(RequestOptions(), seed=seed).tokens) for seed in range(5)}) == 5


@pytest.mark.parametrize(("gamma", "stop"), [*product((1, 2, 5), ["fixed"]), *product([CAP], list(STOPS)[1:])])
def test_under_ratio_the_text_of_sd_is_one_of_seed_window_and_policy(gamma: int, stop: str) -> None:
    """It depends on where windows end, so that must depend on rows and text alone; and ssd changes nothing."""
    pair = first_order(TARGET, DRAFT), 3
    asked = RequestOptions("sd", "fixed", gamma, draft_stop=stop, stop_parameters=STOPS[stop])
    plain = outcome(asked, pair=pair)
    bonuses = foreseen = 0
    for timing, ssd in product(range(len(TIMINGS)), (False, True) if stop == "fixed" else (False,)):
        found = outcome(asked.changed(method="ssd", branches=7) if ssd else asked, timing=timing, pair=pair)
        assert (found.tokens, found.provenance) == (plain.tokens, plain.provenance)
        assert found.target_steps == plain.target_steps, "the same windows, only sooner"
        foreseen, bonuses = foreseen + found.counts.foreseen, bonuses + found.counts.foreseen_bonuses
    if stop != "fixed":
        assert plain.tokens != outcome(asked.changed(draft_stop="fixed", stop_parameters=()), pair=pair).tokens
    else:
        assert foreseen
        assert bonuses or gamma == 5, "all five are seldom right"
