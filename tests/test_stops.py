"""Stop policies: what they declare, where they end windows, and that no text changes by them that may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pearl.cli import cli
from pearl.cli.options import field_option
from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.drafting.disco import FARTHEST, INPUTS, Classifier, classifier_of, inputs, read_classifier
from pearl.drafting.model import ModelProposer
from pearl.drafting.proposer import Features, StopPolicy
from pearl.drafting.stops import Doubtful, Heuristic, StopWindow, Threshold, make_policy
from pearl.engine.preflight import check_classifier
from pearl.engine.request import submission as submit_from
from pearl.errors import ConfigError, RequestError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.experiments import stops
from pearl.lab.simulate import Outcome, Timing, VirtualProposer, simulate, timing_of
from pearl.models.recorded import Header, RecordedText, RecordedTexts, write_texts
from pearl.models.toy import ToyRunner
from pearl.protocol.events import Draft, Open
from pearl.protocol.messages import Provenance, Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.methods import METHODS
from pearl.spec.stops import CAP, STOPS, stops_table
from pearl.text.tokenizer import GenerationDefaults
from pearl.trace.figures import side_by_side
from pearl.trace.report import report
from tests import traced
from tests.replace import replace
from tests.test_rules import overlapping
from tests.test_verification import DRAFT, NEVER, TARGET, Table, p_value
from tests.test_worker import MakeLoops, loops, simulated, submission

STOPPING = [name for name, method in METHODS.items() if method.takes_stops]
__all__ = ["loops"]  # a fixture

WARM = Sampling(1.0, seed=3)
SURE = (("confidence", 0.3),)
RUNNING = [("threshold", SURE), ("heuristic", ()), ("disco", ())]


def features(chosen: float = 0.5, index: int = 0, top: tuple[float, ...] = (0.5, 0.5), position: int = 0) -> Features:
    return Features(top, 0.7, chosen, index, position)


def classifier(**changes: Any) -> Classifier:
    """Its confidence is the largest probability, through a sigmoid: 0 at a half, so it is sure of what is above."""
    first = (1.0, *[0.0] * (INPUTS - 1))
    values = {
        "target": "embedded",
        "draft": "embedded-draft",
        "threshold": 0.5,
        "cap": 4,
        "examples": 10,
        "accepted": 0.5,
        "mean": (0.25, *[0.0] * (INPUTS - 1)),
        "scale": (1.0,) * INPUTS,
        "hidden": (first, tuple(-x for x in first)),
        "hidden_bias": (0.0, 0.0),
        "out": (8.0, -8.0),
        "out_bias": 0.0,
    }
    return Classifier(**(values | changes))


# ---- what is declared is read everywhere ----


@pytest.mark.parametrize("name", STOPS)
def test_every_policy_can_be_made_or_says_where_it_is_to_be_had(name: str) -> None:
    spec, opened = STOPS[name], Open((0,), RequestOptions(draft_stop=name, sampling=WARM))
    if spec.is_simulated:
        with pytest.raises(
            ConfigError, match="needs the recorded text, so only pearl simulate has it; choose fixed, t"
        ):
            DecodingConfig(draft_stop=name)  # type: ignore[call-arg]
        with pytest.raises(RequestError, match=name):
            make_policy(opened, classifier())
        return
    assert DecodingConfig(draft_stop=name).draft_stop == name  # type: ignore[call-arg]
    assert (make_policy(opened, classifier()) is None) == (name == "fixed")
    if spec.is_trained:
        with pytest.raises(RequestError, match="--disco"):
            make_policy(opened)


def test_flags_are_made_from_the_registry() -> None:
    @click.command()
    @field_option("draft_stop", DecodingConfig.model_fields["draft_stop"])
    @field_option("confidence", DecodingConfig.model_fields["confidence"])
    def command(**given: object) -> None:
        raise AssertionError(given)

    shown = " ".join(command.get_help(click.Context(command)).split())
    assert f"[{'|'.join(STOPS)}]" in shown.replace(" ", "")
    assert "Of draft_stop threshold: confidence (float in [0, 1], default 0.4)" in shown


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"draft_stop": "disko"}, "draft_stop: .*'fixed', 'threshold', 'heuristic', 'disco' or 'oracle'"),
        ({"draft_stop": "threshold", "confidence": 1.5}, "confidence: .*less than or equal to 1"),
        ({"draft_stop": "heuristic", "confidence": 0.5}, "no parameter 'confidence'; heuristic takes no parameters"),
        ({"confidence": 0.5}, "draft_stop fixed has no parameter 'confidence'"),
        *(
            (
                {"method": method, "draft_stop": "heuristic"},
                f"for methods auto, sd, .*, not {method}, which takes fixed",
            )
            for method in ("ar", "ngram", "ssd", "pearl-no-post-verify")
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        DecodingConfig(**given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_an_engine_without_a_classifier_refuses_disco_before_it_starts() -> None:
    asked = DecodingConfig(draft_stop="disco")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="pearl disco train"):
        EngineConfig().check_decoding(asked)
    EngineConfig(disco="some.disco").check_decoding(asked)


def test_policy_and_parameters_travel_with_a_request_and_bound_the_windows_of_sd() -> None:
    def sent(**given: Any) -> RequestOptions:
        asked = DecodingConfig(**given)
        return submit_from(1, [1, 2], 100, SamplingParams(seed=1), GenerationDefaults(), asked).options

    given = {"draft_stop": "threshold", "confidence": 0.3}
    assert (sent(**given).draft_stop, sent(**given).stop_parameters) == ("threshold", (("confidence", 0.3),))
    assert sent(method="sd", **given).gamma == CAP
    assert sent(method="sd", gamma=7, **given).gamma == 7
    assert sent(method="sd").gamma is None
    assert sent(method="pearl", **given).gamma is None, "there the target does not wait for what is not drafted"


def test_the_table_says_what_is_declared() -> None:
    lines = stops_table().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [f"`{name}`" for name in STOPS]
    assert len({line.count("|") for line in lines}) == 1


# ---- where windows end ----


def test_threshold_goes_by_the_probability_of_the_token_drawn() -> None:
    policy = Threshold(0.4)
    assert [policy.stop(features(chosen)) for chosen in (0.39, 0.4, 0.9)] == [True, False, False]


def test_heuristic_grows_by_2_and_shrinks_by_1_as_transformers_does() -> None:
    policy, sizes = Heuristic(), []
    for accepted in (5, 7, 3, 0, *[0] * 9, 1):
        policy.end_window(accepted)
        sizes.append(policy.window)
    assert sizes == [7, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 3]
    assert [policy.stop(features(index=index)) for index in (0, 1, 2)] == [False, False, True]


def test_disco_goes_by_confidence_and_cap() -> None:
    policy = Doubtful(classifier())
    sure, unsure = features(top=(0.6, 0.4)), features(top=(0.2, 0.2))
    assert classifier().confidence(sure) > 0.9 > 0.5 > classifier().confidence(unsure)
    assert [policy.stop(each) for each in (sure, unsure, replace(sure, index=2), replace(sure, index=3))] == [
        *(False, True, False, True)
    ]
    assert inputs(features(top=(0.5,), position=1 << 20)) == [0.5, *[0.0] * 9, 0.7, FARTHEST]
    wild = classifier(out=(1e6, 1e6), out_bias=-1e6, hidden_bias=(1e6, 1e6))
    assert 0 <= wild.confidence(sure) <= 1
    assert classifier(out_bias=-1e6).confidence(unsure) == 0


class Noted:
    """Stops behind windows of `most`; notes what it is asked and told."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.asked, self.heard = most, list[tuple[int, int]](), list[int]()

    def stop(self, features: Features) -> bool:
        self.asked.append((features.position, features.index))
        return features.index + 1 == self.most

    def confidence(self, features: Features) -> None: ...

    def end_window(self, accepted: int) -> None:
        self.heard.append(accepted)


def drafted(window: StopWindow, position: int, *tokens: int) -> list[bool]:
    return [window.stops(at, token, (1.0, 0.0, 1.0)) for at, token in enumerate(tokens, position)]


def test_a_window_begins_behind_what_the_draft_has_not_drafted() -> None:
    policy = Noted()
    window = StopWindow(policy, 2)
    window.see(0, (8, 9), drafts=True)
    drafted(window, 2, 5, 6, 7)
    window.see(4, (7,), drafts=True)  # nothing is known of them yet
    drafted(window, 5, 1)
    window.see(4, (9,), drafts=True)  # a correction of the third
    assert policy.heard == [2]
    drafted(window, 5, 1, 2)
    window.see(6, (2, 3), drafts=True)  # all of them, and a bonus token
    assert policy.heard == [2, 2]
    drafted(window, 8, 4)
    assert policy.asked == [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0), (4, 1), (6, 0)]


def test_a_window_that_was_stopped_is_over_once_all_of_it_is_accepted() -> None:
    policy = Noted(2)
    window = StopWindow(policy, 1)
    window.see(0, (8,), drafts=True)
    assert drafted(window, 1, 5, 6) == [False, True]
    window.see(2, (6,), drafts=True)
    assert drafted(window, 3, 7) == [False], "the next one has begun"
    assert policy.heard == [2]


def test_what_was_drafted_and_forgotten_counts_once() -> None:
    """A forward that was begun too early, and a prefix that is given anew."""
    policy = Noted()
    window = StopWindow(policy, 1)
    window.see(0, (8,), drafts=True)
    drafted(window, 1, 5, 6)
    window.see(1, (5,), drafts=True)
    drafted(window, 2, 6)
    window.see(0, (8,), drafts=False)
    window.see(1, (5, 9), drafts=True)
    assert policy.heard == [1]
    assert policy.asked == [(0, 0), (1, 1), (1, 1)]


# ---- no text changes that may not ----


def decoded(
    decoding: RequestOptions,
    sampling: Sampling = WARM,
    tokens: int = 100,
    timing: Timing | None = None,
    policies: Callable[[Open], StopPolicy | None] | None = None,
    target: Table | None = None,
    draft: Table | None = None,
) -> Outcome:
    if target is not None and draft is not None:
        pair: tuple[Any, Any] = (lambda seen: target[seen[-1]], lambda seen: draft[seen[-1]])
    else:
        pair = overlapping(32, 0.5)
    vocab = 32 if target is None else len(target)
    theirs, ours = (ToyRunner(vocab, each, slots=9) for each in pair)
    made = policies or partial(make_policy, classifier=classifier())
    proposer = VirtualProposer(ours, vocab, lambda fed: 1.0, policies=made)
    submit = Submit(1, (0,), 1 + tokens, replace(decoding, sampling=sampling))
    return simulate(submit, TargetExecutor(theirs), DraftExecutor(proposer), timing or Timing(1.0, lambda _: 4.0))


@cache
def alone(rule: str, sampling: Sampling) -> list[int]:
    return decoded(RequestOptions("ar", rule=rule), sampling).tokens


@pytest.mark.parametrize(("stop", "parameters"), RUNNING)
@pytest.mark.parametrize("method", STOPPING)
def test_greedy_and_coupled_text_is_that_of_the_target_alone(
    method: str, stop: str, parameters: tuple[tuple[str, float], ...]
) -> None:
    for sampling, rule in ((Sampling(), "ratio"), (WARM, "coupled")):
        asked = RequestOptions(method, "stream", 6, rule, draft_stop=stop, stop_parameters=parameters)
        found = decoded(asked, sampling)
        assert found.tokens == alone(rule, sampling)
        assert found.counts.pauses > 0
        assert found.counts.judged > 0


@cache
def unstopped(asked: RequestOptions) -> list[int]:
    return decoded(asked).tokens


@pytest.mark.parametrize(("stop", "parameters"), RUNNING)
def test_pearls_text_is_the_seeds(stop: str, parameters: tuple[tuple[str, float], ...]) -> None:
    """Also where branches become the text, and the draft takes several tokens of one forward."""
    plain = [RequestOptions(*way, 6) for way in product(("pearl", "pearl-no-pre-verify"), ("fixed", "stream"))]
    every = [
        RequestOptions("pearl", "stream", 4, rule, look_ahead=16, draft_lookup=8, branches=8)
        for rule in ("ratio", "coupled")
    ]
    for asked in plain + every:
        found = decoded(replace(asked, draft_stop=stop, stop_parameters=parameters))
        assert found.tokens == unstopped(replace(asked, look_ahead=0, draft_lookup=0, branches=0))
        assert found.counts.pauses > 0


TIMINGS = [
    Timing(1.0, lambda fed, c=c: c, delay, jitter, seed=7)
    for c in (0.2, 1.5, 8.0)
    for delay, jitter in ((0.0, 0.0), (0.6, 0.4))
]


@pytest.mark.parametrize(("stop", "parameters"), RUNNING)
def test_under_ratio_one_seed_gives_sd_one_text_whatever_the_timing(
    stop: str, parameters: tuple[tuple[str, float], ...]
) -> None:
    """Its text depends on where windows end, so that must depend on rows and text alone."""
    asked = RequestOptions("sd", "fixed", CAP, draft_stop=stop, stop_parameters=parameters)
    found = [decoded(asked, timing=timing) for timing in TIMINGS]
    assert len({tuple(each.tokens) for each in found}) == 1
    assert len({tuple(each.provenance) for each in found}) == 1
    assert found[0].tokens != decoded(replace(asked, draft_stop="fixed", stop_parameters=())).tokens
    assert Provenance.BONUS in found[0].provenance


def test_windows_that_begin_with_a_verdict_make_text_depend_on_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a token's place is counted from the newest verdict on. The first one of `sd` comes amid drafting."""

    def most_texts() -> int:
        asked = RequestOptions("sd", "fixed", CAP, draft_stop="heuristic")
        seeds = [Sampling(1.0, seed=seed) for seed in range(20)]
        return max(len({tuple(decoded(asked, each, 12, timing).tokens) for timing in TIMINGS}) for each in seeds)

    assert most_texts() == 1
    plan = ModelProposer._step

    def counting(self: ModelProposer, command: Draft, after: Any = None, beside: int = 0) -> Any:
        planned, end = plan(self, command, after, beside), command.start + len(command.tokens)
        own = self._texts[command.request].window
        if own is not None and command.budget:
            own._own = own._own[len(own._own) - command.pending :]
            own._start = end - command.pending
        return planned

    monkeypatch.setattr(ModelProposer, "_step", counting)
    assert most_texts() > 1


# ---- exactness under ratio ----


def texts(decoding: RequestOptions, policies: Any = None, runs: int = 3, tokens: int = 400) -> list[list[int]]:
    return [
        decoded(decoding, Sampling(1.0, seed=seed), tokens, policies=policies, target=TARGET, draft=DRAFT).tokens
        for seed in range(runs)
    ]


ASKED = RequestOptions("sd", "fixed", 4)


@pytest.mark.parametrize("least", [0.3, 0.6])
def test_a_policy_that_looks_at_the_token_drawn_leaves_the_distribution_as_it_is(least: float) -> None:
    """By chi-square on whole runs: the token is sent and judged, whatever the policy makes of it."""
    asked = replace(ASKED, draft_stop="threshold", stop_parameters=(("confidence", least),))
    assert p_value(texts(asked), TARGET) > NEVER
    assert p_value(texts(asked, runs=300, tokens=3), TARGET) > NEVER


Law = dict[tuple[int, ...], Fraction]
P = {(): (40, 24, 0), (0,): (16, 16, 32), (1,): (8, 40, 16), (2,): (64, 0, 0)}  # in 64ths, of target and draft
Q = {(): (32, 16, 16), (0,): (32, 16, 16), (1,): (16, 16, 32), (2,): (16, 32, 16)}


def of(rows: dict[tuple[int, ...], tuple[int, ...]], *before: int) -> list[Fraction]:
    return [Fraction(n, 64) for n in rows[before]]


def committed(target: list[Fraction], draft: list[Fraction], token: int) -> tuple[Fraction, list[Fraction]]:
    """How likely the ratio rule accepts a token, and what it commits in its place."""
    rest = [max(Fraction(0), p - q) for p, q in zip(target, draft, strict=True)]
    mass = sum(rest)
    accepted = min(Fraction(1), target[token] / draft[token])
    return accepted, [r / mass if mass else p for r, p in zip(rest, target, strict=True)]


def law_of_two(stops: Callable[[list[Fraction], int], bool], is_withheld: bool) -> Law:
    """Of the first two tokens of a window of up to two: over every token drafted, accepted and corrected.

    `is_withheld`: planted bug: the token that the policy stops at is not sent, and the target draws there.
    """
    found: Law = {}

    def add(first: int, second: list[Fraction], share: Fraction) -> None:
        for token, p in enumerate(second):
            found[first, token] = found.get((first, token), Fraction(0)) + share * p

    target, draft = of(P), of(Q)
    for token, q in enumerate(draft):
        stopped = stops(draft, token)
        if stopped and is_withheld:
            for other, p in enumerate(target):
                add(other, of(P, other), q * p)
            continue
        accepted, residual = committed(target, draft, token)
        for other, r in enumerate(residual):
            add(other, of(P, other), q * (1 - accepted) * r)
        if stopped:
            add(token, of(P, token), q * accepted)  # a bonus token
            continue
        for following, share in enumerate(of(Q, token)):
            passed, rest = committed(of(P, token), of(Q, token), following)
            add(token, [passed * (other == following) for other in range(3)], q * accepted * share)
            add(token, rest, q * accepted * share * (1 - passed))
    return {both: share for both, share in found.items() if share}


def test_stopping_behind_a_token_that_is_judged_is_exact_and_withholding_it_is_not() -> None:
    """By enumeration, for every way of looking at the token drawn."""
    exact = {(a, b): p * r for a, p in enumerate(of(P)) for b, r in enumerate(of(P, a)) if p * r}
    policies = [lambda draft, token, some=some: token in some for some in ((), (0,), (1,), (2,), (0, 1), (0, 1, 2))]
    for policy in policies:
        assert law_of_two(policy, is_withheld=False) == exact
    withheld = [law_of_two(policy, is_withheld=True) == exact for policy in policies]
    assert withheld == [True, False, False, False, False, True], "but where it does not look at the token"


# ---- through the runtime ----


@pytest.mark.parametrize("method", ["sd", "pearl"])
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_policy_goes_through_both_workers(loops: MakeLoops, method: str, rule: str) -> None:
    """Over the codec: the text is the simulator's, and the statistics tell how often drafting was ended."""
    pair = loops()
    pair.draft()
    front = pair.front()
    asked = submission(80, method, rule=rule, draft_stop="threshold", stop_parameters=(("confidence", 0.2),), gamma=8)  # type: ignore[arg-type]
    told = front.ask(asked)
    assert told.tokens == simulated(asked)
    assert told.statistics.num_draft_stops > 0
    assert front.ask(replace(asked, request=2, draft_stop="fixed", stop_parameters=())).statistics.num_draft_stops == 0


def test_a_trace_tells_how_often_drafting_was_ended(tmp_path: Path) -> None:
    for stop, parameters in (("fixed", ()), ("threshold", (("confidence", 0.2),))):
        asked = RequestOptions("sd", "fixed", 8, draft_stop=stop, stop_parameters=parameters)
        outcome, trace = traced.recorded(tmp_path / f"{stop}.json", asked, alpha=0.5, tokens=100)
        told = report(trace)
        assert told.stops == outcome.counts.pauses == told.as_dict()["stops"]
        assert (told.stops > 0) == (stop == "threshold")
        shown = dict(side_by_side([told]))["draft tokens"][0]
        assert (f"a stop policy ended {told.stops} windows" in shown) == (told.stops > 0)


@pytest.mark.parametrize(
    ("method", "asked", "told"),
    [
        ("pearl", {"draft_stop": "disco"}, "started without --disco"),
        ("ssd", {"draft_stop": "heuristic"}, "is for methods auto, sd"),
        ("pearl", {"draft_stop": "oracle"}, "only pearl simulate has it"),
        ("pearl", {"draft_stop": "threshold", "stop_parameters": (("confidence", 2.0),)}, "it takes confidence"),
    ],
)
def test_what_a_front_may_not_ask_for_is_refused_and_the_target_goes_on(
    loops: MakeLoops, method: str, asked: dict[str, Any], told: str
) -> None:
    pair = loops()
    pair.draft()
    front = pair.front()
    with pytest.raises(RequestError, match=told):
        front.ask(submission(20, method, **asked))
    assert len(front.ask(submission(20, request=2)).tokens) == 20


# ---- the classifier and its file ----


def test_a_classifier_is_kept_whole_and_is_for_its_pair(tmp_path: Path) -> None:
    path = tmp_path / "it.disco"
    classifier().write(path)
    assert read_classifier(path, "embedded", "embedded-draft") == classifier()
    assert classifier_of(EngineConfig(disco=str(path))) == classifier()
    assert classifier_of(EngineConfig()) is None
    with pytest.raises(
        ConfigError, match=r"it\.disco is for draft embedded-draft, not other: make one with pearl disco"
    ):
        check_classifier(EngineConfig(disco=str(path), draft="other"))
    with pytest.raises(ConfigError, match="is for target embedded, not toy"):
        check_classifier(EngineConfig(disco=str(path), target="toy:vocab=8", draft="toy:vocab=8"))
    classifier(target=str(tmp_path)).write(path)
    assert read_classifier(path, f"{tmp_path}/.", "embedded-draft"), "the same directory by another name"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda known: known | {"out": [0.0]}, "different widths"),
        (lambda known: known | {"threshold": 2}, "threshold: "),
        (lambda known: known | {"hidden": [[1.0]]}, "hidden.0: "),
        (lambda known: known | {"scale": [0.0] * INPUTS}, "scale.0: "),
        (lambda known: known | {"code": "x"}, "code: "),
        (lambda known: {"pearl_texts": 1}, "target: "),
        (lambda known: [known], "contents: "),
    ],
)
def test_a_file_that_is_no_classifier_is_told(
    change: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "it.disco"
    path.write_text(json.dumps(change(classifier().model_dump())))
    with pytest.raises(ConfigError, match=f"is no classifier that pearl disco train has made: {told}|{told}") as caught:
        read_classifier(path, "embedded", "embedded-draft")
    assert "\n" not in str(caught.value)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no classifier"):
        read_classifier(path, "embedded", "embedded-draft")
    with pytest.raises(ConfigError, match="cannot read the classifier"):
        read_classifier(tmp_path / "none", "embedded", "embedded-draft")


# ---- recorded texts: training, and policies side by side ----


def learnable(count: int = 12, length: int = 60, noise: float = 0.1) -> RecordedTexts:
    """Texts whose draft is right where its largest probability is above a half, but for some noise."""
    luck, made = np.random.default_rng(5), []
    for _ in range(count):
        top = luck.uniform(0.05, 0.95, length).astype(np.float32)
        right = (top > 0.5) ^ (luck.random(length) < noise)
        answer = luck.integers(0, 40, length)
        drawn = np.where(right, answer, (answer + 1) % 40)
        shape = np.zeros((length, 12), np.float32)
        shape[:, 0], shape[:, 10], shape[:, 11] = top, 1 - top, top
        ids, logits = np.stack((answer, drawn), 1).astype(np.int32), np.zeros((length, 2), np.float32)
        made.append(RecordedText((1, 2), tuple(answer.tolist()), ids, logits, shape))
    header = Header(
        target="embedded", draft="embedded-draft", vocab_size=40, eos=(), temperature=0.0, seed=1, max_tokens=60
    )
    return RecordedTexts(header, tuple(made))


def test_a_classifier_learns_what_can_be_learned() -> None:
    found = stops.train(learnable(), timing_of(None, None))
    assert found.accuracy > 0.85 > 0.6 > found.base
    assert found.best.totals.tokens_per_second > 1.02 * found.static.totals.tokens_per_second
    again = stops.train(learnable(), timing_of(None, None))
    assert again.classifier == found.classifier
    with pytest.raises(ConfigError, match="3 texts are too few"):
        stops.train(learnable(3), timing_of(None, None))


def test_labels_that_are_shuffled_teach_nothing() -> None:
    """Planted bug: examples whose labels are of other tokens."""
    seen, labels = stops.examples(learnable().texts)
    mixed = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    for given, least, most in ((labels, 0.85, 1.0), (mixed, 0.0, 0.65)):
        made = stops.fit(seen, given, "a", "b")
        said = [made.confidence(each) > 0.5 for text in learnable().texts for each in stops.features_of(text)]
        share = sum(one == bool(other) for one, other in zip(said, labels.tolist(), strict=True)) / len(said)
        assert least <= share <= most


def test_the_oracle_needs_the_fewest_calls() -> None:
    known, made = learnable(), classifier()
    by_name = {one.name: one for one in stops.side_by_side(known, timing_of(None, None), made)}
    oracle, right = by_name["sd, oracle"], sum(sum(text.right) for text in known.texts)
    tokens = sum(len(text.answer) for text in known.texts)
    sds = [one for name, one in by_name.items() if name.startswith("sd")]
    assert len(sds) == 6
    assert all(oracle.totals.tokens_per_second >= one.totals.tokens_per_second for one in sds)
    assert all(one.totals.tokens + len(known.texts) == tokens for one in by_name.values()), "first commits are left out"
    wasted = oracle.drafted - oracle.totals.accepted
    # Only where the first token of a window is wrong, and the one before it told nothing of that.
    assert wasted <= tokens - right
    assert by_name["sd, 5 tokens"].drafted > oracle.drafted
    assert {one.policy for one in by_name.values()} == set(STOPS)


def test_the_commands_train_and_compare(tmp_path: Path) -> None:
    known, file, out = learnable(), tmp_path / "it.npz", tmp_path / "it.disco"
    write_texts(file, known.header, known.texts)
    ran = CliRunner().invoke(cli, ["disco", "train", str(file), "--out", str(out)], catch_exceptions=False)
    assert "for embedded-draft and embedded; trained on 540 tokens" in ran.output
    made = read_classifier(out, "embedded", "embedded-draft")
    arguments = ["simulate", "stops", str(file), "--disco", str(out)]
    shown = CliRunner().invoke(cli, arguments, catch_exceptions=False).output
    assert "sd, disco" in shown
    assert made.cap >= 1
    other = learnable()
    write_texts(file, other.header.model_copy(update={"draft": "another"}), other.texts)
    with pytest.raises(ConfigError, match="is for draft embedded-draft, not another"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
