"""Under the virtual clock a text depends on what should decide it, and on nothing else (invariants 3, 5, 10).

Of toys, and of models that guess; and how often a draft is right.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from pearl.config import RequestOptions
from pearl.drafting.stops import make_policy
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.runner import ModelRunner
from pearl.models.toy import ToyRunner, alpha_pair, coin_pair
from pearl.protocol.events import Odds, Sample, Sampled
from pearl.protocol.messages import Source, Submit
from pearl.protocol.request import Counts
from pearl.protocol.scheduler import PREFILL_CHUNK
from pearl.spec.methods import METHODS
from pearl.spec.rules import RULES, find
from pearl.spec.stops import CAP
from tests.options import drawn_by, resolved
from tests.pairwise import combined, pairwise
from tests.replace import replace
from tests.stop_policies import classifier
from tests.tiny import on_cpu, tiny_model
from tests.virtual import DRAFT, TARGET, TIMINGS, Chains, decoded, first_order

PAIR = alpha_pair(6, 0.7, order=1), 6  # texts that repeat: the next token depends on the last
WINDOWS: list[tuple[str, int | None]] = [
    ("stream", None),
    ("stream", 7),
    ("fixed", 1),
    ("fixed", 3),
]
STOPS: dict[str, Any] = {
    "fixed": (),
    "threshold": (("confidence", 0.3),),
    "heuristic": (),
    "disco": (),
}
DIRECT = [
    ("coupled", 0.0),
    ("coupled", 1.0),
    ("ratio", 0.0),
]  # rule, temperature: the text is the target's own
SEEDED = [(rule, 1.0) for rule in RULES if rule != "coupled" and not find(rule).judges_blocks]


def outcome(
    asked: RequestOptions, temperature: float = 1.0, timing: int = 0, pair: Any = PAIR, **more: Any
) -> Outcome:
    policies = partial(make_policy, classifier=classifier())
    sampling = drawn_by(temperature, seed=5)
    return decoded(
        *pair, asked, sampling, 60, TIMINGS[timing], (1, 2, 0), policies=policies, **more
    )


@cache
def expected(rule: str, temperature: float, method: str = "pearl") -> list[int]:
    method = "ar" if (rule, temperature) in DIRECT or not METHODS[method].drafts else "pearl"
    return outcome(resolved(method, rule=rule), temperature).tokens


class Case(NamedTuple):
    """Settings that must not change a text."""

    window: tuple[str, int | None]
    timing: int
    look_ahead: int
    draft_lookup: int
    branches: int
    siblings: int
    stop: str
    has_chains: bool
    chains: bool

    @property
    def id(self) -> str:
        return "-".join(str(value) for value in (*self.window, *self[1:]))


Text = tuple[str, str, float]  # method, rule, temperature
TEXTS: list[Text] = [
    *((method, *how) for method in METHODS if method != "ar" for how in DIRECT[1:]),
    ("pearl", *DIRECT[0]),
    *(("pearl", *how) for how in SEEDED),
    ("pearl-no-pre-verify", "ratio", 1.0),
    ("ngram", "ratio", 1.0),
]


def axes_of(method: str) -> list[Iterable[Any]]:
    """Return the values of each field of a case."""
    spec = METHODS[method]
    return [
        WINDOWS,
        range(len(TIMINGS)),
        (0, 8) if spec.look_ahead else (0,),
        (0, 8) if spec.drafts else (0,),
        (0, 7) if spec.branches else (0,),
        (0, 16) if spec.siblings else (0,),
        STOPS if spec.takes_stops else ["fixed"],
        (True, False),
        (False, True),
    ]


def usual_cases() -> dict[Text, list[Case]]:
    """Return the cases of each text, which meets each setting of its method.

    Each two settings meet in each direct text of method pearl, in one of the direct texts of another method, and in one
    of the other texts of a method.
    """
    cases: dict[Text, list[Case]] = {text: [] for text in TEXTS}
    sharing: dict[object, list[Text]] = {}
    for text in TEXTS:
        method, *how = text
        is_direct = tuple(how) in DIRECT
        has_all = is_direct and method == "pearl"
        sharing.setdefault(text if has_all else (method, is_direct), []).append(text)
    for texts in sharing.values():
        for text, *values in pairwise(texts, *axes_of(texts[0][0])):
            cases[text].append(Case(*values))
    return cases


CASES = usual_cases()


@cache
def counts_of(method: str, rule: str, temperature: float, case: Case) -> Counts:
    """Write the text of a case, which must be the expected one, and return its counts."""
    options = resolved(
        method,
        *case.window,
        rule,
        (),
        case.look_ahead,
        case.draft_lookup,
        case.branches,
        case.siblings,
        case.stop,
        STOPS[case.stop],
    )
    wrap = Chains if case.has_chains else as_it_is
    text = outcome(options, temperature, case.timing, wrap=wrap, chains=case.chains)
    assert text.tokens == expected(rule, temperature, method), (options, case)
    return text.counts


def as_it_is(runner: ModelRunner) -> ModelRunner:
    return runner


def with_group(text: Text, *more: Case) -> Any:
    """A parameter whose tests run on one worker, so that each case of a text is written once."""
    name = "-".join(map(str, (*text, *(case.id for case in more))))
    return pytest.param(
        *text, *more, id=name, marks=pytest.mark.xdist_group("-".join(map(str, text)))
    )


@pytest.mark.parametrize(
    ("method", "rule", "temperature", "case"),
    [with_group(text, case) for text, cases in CASES.items() for case in cases],
)
def test_a_text_depends_on_what_should_decide_it(
    method: str, rule: str, temperature: float, case: Case
) -> None:
    """Seed, rule and models; not windows, timing, what guesses, stop policies, nor what a model or a device can do."""
    counts = counts_of(method, rule, temperature, case)
    assert counts.resyncs == 0, "both sides always agreed on which continuation holds"
    assert case.branches or not counts.num_foreseen_rejections
    assert case.siblings or not counts.num_siblings


@pytest.mark.long
@pytest.mark.parametrize(("method", "rule", "temperature"), TEXTS)
def test_no_combination_changes_a_text(method: str, rule: str, temperature: float) -> None:
    for values in product(*axes_of(method)):
        case = Case(*values)
        assert counts_of(method, rule, temperature, case).resyncs == 0, case


@pytest.mark.parametrize(("method", "rule", "temperature"), [with_group(text) for text in TEXTS])
def test_these_cases_use_what_they_are_about(method: str, rule: str, temperature: float) -> None:
    """Summed over the cases above: without drafts, guesses and rejections they would show nothing."""
    spec = METHODS[method]
    sums = Counter[str]()
    for case in CASES[method, rule, temperature]:
        counts = counts_of(method, rule, temperature, case)
        sums.update(
            accepted=counts.num_accepted_draft_tokens,
            guesses=counts.num_guesses,
            foreseen=counts.num_foreseen_rejections,
            pauses=counts.num_draft_stops,
            siblings=counts.num_siblings,
        )
    has_guesses = spec.look_ahead > 0 and spec.needs != "datastore"  # there is no datastore here
    assert bool(sums["guesses"]) == has_guesses
    if method == "auto" and not sums["accepted"]:
        return  # by the times of these cases no way with a draft should pay
    assert bool(sums["accepted"]) == spec.drafts
    assert not spec.takes_stops or sums["pauses"]
    assert bool(sums["siblings"]) == (spec.siblings > 0 and (rule, temperature) in DIRECT)
    # A greedy text is a short loop, of which the draft is right or wrong for ever.
    assert not spec.branches or not temperature or sums["foreseen"]


@pytest.mark.parametrize("branches", [0, 7])
def test_runners_up_catch_rejections_and_change_nothing_else(
    branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step earlier, where the target's rows cost nothing; none where each costs as much as a forward."""
    asked = resolved(rule="coupled", branches=branches)
    plain, more = (outcome(asked.changed(siblings=most)) for most in (0, 16))
    assert more.tokens == plain.tokens == expected("coupled", 1.0)
    assert more.counts.steps < plain.counts.steps
    assert more.counts.guessed_by_source[Source.RUNNER_UP] > 3
    dear = Timing(1.0, lambda fed: 4.0 * fed)
    pair = [ToyRunner(PAIR[1], each) for each in PAIR[0]]
    submit = Submit(1, (1, 2, 0), 63, replace(asked, siblings=16, sampling=drawn_by(1.0, seed=5)))
    found = simulate(submit, *paired_executors(*pair), dear)
    assert (found.tokens, found.counts.num_siblings) == (plain.tokens, 0)
    real = TargetExecutor.sample

    def credulous(self: TargetExecutor, sample: Sample) -> Sampled:
        fed = self._requests[sample.request].fed
        siblings = [
            token
            for token, parent in zip(fed.tokens, fed.parents or (), strict=False)
            if parent == sample.node
        ]
        return Sampled((siblings[-1],)) if len(siblings) > 1 else real(self, sample)

    monkeypatch.setattr(TargetExecutor, "sample", credulous)
    assert outcome(asked.changed(siblings=16)).tokens != plain.tokens, (
        "the last sibling, whatever the target draws"
    )


@pytest.mark.parametrize(
    ("gamma", "stop"), [*product((1, 2, 5), ["fixed"]), *product([CAP], list(STOPS)[1:])]
)
def test_under_ratio_the_text_of_sd_is_one_of_seed_window_and_policy(gamma: int, stop: str) -> None:
    """It depends on where windows end, so that must depend on rows and text alone; and ssd changes nothing."""
    pair = first_order(TARGET, DRAFT), 3
    asked = resolved("sd", "fixed", gamma, draft_stop=stop, stop_parameters=STOPS[stop])
    plain = outcome(asked, pair=pair)
    bonuses = foreseen = 0
    for timing, ssd in product(range(len(TIMINGS)), (False, True) if stop == "fixed" else (False,)):
        found = outcome(
            asked.changed(method="ssd", branches=7) if ssd else asked, timing=timing, pair=pair
        )
        assert (found.tokens, found.provenance) == (plain.tokens, plain.provenance)
        assert found.counts.steps == plain.counts.steps, "the same windows, only sooner"
        foreseen, bonuses = (
            foreseen + found.counts.num_foreseen_rejections,
            bonuses + found.counts.num_foreseen_bonuses,
        )
    if stop != "fixed":
        assert (
            plain.tokens
            != outcome(asked.changed(draft_stop="fixed", stop_parameters=()), pair=pair).tokens
        )
    else:
        assert foreseen
        assert bonuses or gamma == 5, "all five are seldom right"


@pytest.mark.parametrize("method", ["sd", "ssd", "pearl-no-post-verify"])
def test_draft_tokens_that_come_during_the_prefill_change_no_window(method: str) -> None:
    """The draft has read a long prompt before the target has, which may read it in more parts in company."""
    pair = first_order(TARGET, DRAFT)
    branches = 7 if method == "ssd" else 0
    asked = resolved(method, "fixed", 3, branches=branches)
    prompt = (1, 2, 0) * (PREFILL_CHUNK // 2)
    for seed in range(6):
        texts = []
        for timing in TIMINGS:
            found = decoded(pair, 3, asked, drawn_by(1.0, seed=seed), 12, timing, prompt)
            texts.append((found.tokens, found.provenance))
        assert texts == texts[:1] * len(TIMINGS), seed


# ---- how often a draft is right ----

SAMPLINGS = {
    "greedy": drawn_by(0.0),
    "sampled": drawn_by(1.0, seed=5),
    "nucleus": drawn_by(0.7, 20, 0.9, seed=5),
}
SLOW = {("ratio", "greedy"), ("coupled", "nucleus")}


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        pytest.param(*one, marks=[pytest.mark.long] * (one in SLOW))
        for one in product(("ratio", "coupled"), SAMPLINGS)
    ],
)
def test_a_pair_of_coins_has_its_rate_under_every_rule(rule: str, name: str) -> None:
    """Of 2,500 positions judged: four standard deviations are 0.024."""
    decoding = resolved("pearl", "fixed", 4, rule)
    counts = decoded(
        coin_pair(64, 0.9), 64, decoding, SAMPLINGS[name], 2500, prompt=(1, 2, 3)
    ).counts
    assert counts.num_judged_draft_tokens > 2400
    assert counts.num_accepted_draft_tokens / counts.num_judged_draft_tokens == pytest.approx(
        0.9, abs=0.024
    )


# ---- look-ahead, lookup and branches on models ----

KINDS = ["llama", "qwen3", "gpt2"]
MORE = ["llama-biased", "llama-tied", "llama-long", "mistral", "qwen2", "opt", "bloom", "gpt-neox"]
OURS = ("llama", "mistral", "qwen")


@cache
def models(kind: str) -> tuple[ModelRunner, ModelRunner]:
    """A target and a draft that is often right."""
    spare = 5 if kind.startswith(OURS) else 0
    target, draft = (
        on_cpu(tiny_model(kind, noise=noise), dtype="float32", spare=spare) for noise in (0.0, 0.05)
    )
    return target, draft


def decode_model(kind: str, decoding: RequestOptions, timing: Timing) -> Outcome:
    for runner in models(kind):
        for slot in range(runner.capabilities.slots):
            runner.rollback(0, slot)
    prompt = (5, 9, 40, 7, 12, 33) * 4
    return simulate(
        Submit(1, prompt, len(prompt) + 24, decoding), *paired_executors(*models(kind)), timing
    )


@combined
@pytest.mark.parametrize(
    ("rule", "temperature"), [("coupled", 0.0), ("coupled", 0.8), ("ratio", 0.8)]
)
@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE)]
)
def test_all_that_guesses_writes_one_text(
    kind: str, rule: str, temperature: float, combined: Any
) -> None:
    """Look-ahead, lookup, branches and siblings, with either window, and whatever forwards and messages take."""
    plain = resolved("pearl", "fixed", 3, rule, sampling=drawn_by(temperature, top_k=5, seed=8))
    expected, seen = decode_model(kind, plain, TIMINGS[0]).tokens, Odds()
    axes = (0, 8), (0, 4), (0, 4), (0, 16), ("stream", "fixed"), TIMINGS[:3]
    for ahead, lookup, branches, siblings, window, timing in combined(*axes):
        asked = {
            "look_ahead": ahead,
            "draft_lookup": lookup,
            "branches": branches,
            "siblings": siblings,
        }
        guessing = plain.changed(**asked, window=window)
        outcome = decode_model(kind, guessing, timing)
        assert (outcome.tokens, outcome.counts.resyncs) == (expected, 0), guessing
        seen += outcome.counts.odds or Odds()
    assert (seen.rejections > 0) == (rule == "ratio")
