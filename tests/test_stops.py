"""Stop policies: what they declare, where they end windows, and that no text changes by them that may not.

And the recorded texts on which they are compared, which the simulator decodes again.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.config import EngineConfig, RequestOptions
from pearl.config.option_names import options_of
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.drafting.disco import (
    FARTHEST,
    INPUTS,
    classifier_of,
    inputs,
    read_classifier,
)
from pearl.drafting.stops import (
    Features,
    Heuristic,
    StopWindow,
    Threshold,
    make_policy,
)
from pearl.engine.request import submission as submit_from
from pearl.errors import ConfigError, RequestError
from pearl.lab.studies import stops
from pearl.lab.studies.recorded_texts import RecordedText, RecordedTexts, record
from pearl.lab.studies.simulate import Outcome, Timing, paired_executors, simulate, timing_of
from pearl.lab.studies.workload import TextPlan, decode
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.events import Open
from pearl.protocol.messages import Submit
from pearl.spec.stops import CAP, STOPS
from pearl.text.tokenizer import GenerationDefaults
from tests.conftest import ran
from tests.loops import MakeLoops, submission
from tests.options import drawn_by, resolved
from tests.replace import replace
from tests.stop_policies import Noted, classifier
from tests.tiny import on_cpu, tiny_model

WARM = drawn_by(1.0, seed=3)


def features(
    chosen: float = 0.5, index: int = 0, top: tuple[float, ...] = (0.5, 0.5), position: int = 0
) -> Features:
    return Features(top, 0.7, chosen, index, position)


# ---- what is declared is read everywhere ----


@pytest.mark.parametrize("name", STOPS)
def test_every_policy_can_be_made_or_says_what_it_lacks(name: str) -> None:
    spec, opened = STOPS[name], Open((0,), resolved(draft_stop=name, sampling=WARM))
    assert RequestOptions(draft_stop=name).draft_stop == name  # type: ignore[call-arg]
    assert (make_policy(opened, classifier()) is None) == (name == "fixed")
    if spec.is_trained:
        with pytest.raises(RequestError, match="--disco"):
            make_policy(opened)


def test_policy_and_parameters_travel_with_a_request_and_bound_the_windows_of_sd() -> None:
    def sent(**given: Any) -> RequestOptions:
        asked = options_of({"seed": 1, **given})
        return submit_from(1, [1, 2], 100, asked, GenerationDefaults()).options

    given = {"draft_stop": "threshold", "confidence": 0.3}
    assert (sent(**given).draft_stop, sent(**given).stop_parameters) == (
        "threshold",
        (("confidence", 0.3),),
    )
    assert sent(method="sd", **given).gamma == CAP
    assert sent(method="sd", gamma=7, **given).gamma == 7
    assert sent(method="sd").gamma is None
    assert sent(method="pearl", **given).gamma is None, (
        "there the target does not wait for what is not drafted"
    )


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
    policy = classifier()
    sure, unsure = features(top=(0.6, 0.4)), features(top=(0.2, 0.2))
    assert classifier().confidence(sure) > 0.9 > 0.5 > classifier().confidence(unsure)
    assert [
        policy.stop(each) for each in (sure, unsure, replace(sure, index=2), replace(sure, index=3))
    ] == [*(False, True, False, True)]
    assert inputs(features(top=(0.5,), position=1 << 20)) == [0.5, *[0.0] * 9, 0.7, FARTHEST]
    wild = classifier(out=(1e6, 1e6), out_bias=-1e6, hidden_bias=(1e6, 1e6))
    assert 0 <= wild.confidence(sure) <= 1
    assert classifier(out_bias=-1e6).confidence(unsure) == 0


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


# ---- through the runtime ----


def test_disco_is_refused_where_there_is_no_classifier_and_the_target_goes_on(
    loops: MakeLoops,
) -> None:
    asked = RequestOptions(draft_stop="disco")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="pearl disco train"):
        EngineConfig().check_options(asked)
    EngineConfig(disco="some.disco").check_options(asked)
    pair = loops()
    pair.draft()
    front = pair.front()
    with pytest.raises(RequestError, match="started without --disco"):
        front.ask(submission(20, draft_stop="disco"))
    assert len(front.ask(submission(20, request=2)).tokens) == 20


# ---- the classifier and its file ----


def test_a_classifier_is_kept_whole_and_is_for_its_pair(tmp_path: Path) -> None:
    path = tmp_path / "it.disco"
    classifier().write(path)
    assert read_classifier(path, "embedded", "embedded-draft") == classifier()
    assert classifier_of(EngineConfig(disco=str(path))) == classifier()
    assert classifier_of(EngineConfig()) is None
    with pytest.raises(
        ConfigError,
        match=r"it\.disco is for draft embedded-draft, not other: make one with pearl disco",
    ):
        classifier_of(EngineConfig(disco=str(path), draft="other"))
    with pytest.raises(ConfigError, match="is for target embedded, not toy"):
        classifier_of(EngineConfig(disco=str(path), target="toy:vocab=8", draft="toy:vocab=8"))
    classifier(target=str(tmp_path)).write(path)
    assert read_classifier(path, f"{tmp_path}/.", "embedded-draft"), (
        "the same directory by another name"
    )


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
    with pytest.raises(
        ConfigError, match=f"is no classifier that pearl disco train has made: {told}|{told}"
    ) as caught:
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
        made.append(RecordedText((1, 2), answer.tolist(), drawn.tolist(), shape.tolist()))
    return RecordedTexts("embedded", "embedded-draft", made)


def test_a_classifier_learns_what_can_be_learned_and_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, out = learnable(), tmp_path / "it.disco"
    monkeypatch.setattr("pearl.lab.studies.recorded_texts.record_pair", lambda *_, **__: known)
    (tmp_path / "some.txt").write_text("a")
    trained = ran("disco", "train", tmp_path / "some.txt", "--out", out)
    assert "for embedded-draft and embedded; trained on 540 tokens" in trained.output
    found = stops.train(known, timing_of(10.0, 50.0))
    assert found.classifier == read_classifier(out, "embedded", "embedded-draft"), (
        "each time the same"
    )
    assert found.accuracy > 0.85 > 0.6 > found.base
    assert found.best.speed > 1.02 * found.static.speed
    with pytest.raises(ConfigError, match="3 texts are too few"):
        stops.train(learnable(3), timing_of(10.0, 50.0))
    with pytest.raises(ConfigError, match="is for draft embedded-draft, not another"):
        read_classifier(out, "embedded", "another")


@pytest.mark.parametrize(("length", "noise"), [(60, 0.1), (37, 0.4), (24, 0.0)])
def test_under_sd_no_policy_is_faster_than_the_oracle(length: int, noise: float) -> None:
    """Nor does the target need fewer forwards with any. It stops only before a wrong token: it once drafted on behind
    one, and past the text's end, and needed more forwards of the draft than a threshold."""
    done = stops.side_by_side(learnable(6, length, noise), timing_of(5.0, 40.0), classifier())
    (oracle,) = (each for each in done if each.name == "sd, oracle")
    others = [each for each in done if each.name.startswith("sd, ") and each is not oracle]
    assert len(others) > 4
    assert max(each.speed for each in others) < oracle.speed
    assert min(each.totals.total("steps") for each in others) >= oracle.totals.total("steps")


# ---- recorded texts ----

TOKENS = 40
PEARL = resolved("pearl", rule="coupled")
TIMING = Timing(1.0, lambda fed: 5.0)
TEMPERATURES = [0.0, 0.7]
PROMPTS = [["the first"], ["in another, the"], ["the first"], ["a an and"]]  # one comes twice


@cache
def runner(role: str) -> ModelRunner:
    path = str(tiny_model("llama", noise=0.0 if role == "target" else 0.2))
    return on_cpu(path, dtype="float32", spare=8)


@cache
def recorded(temperature: float) -> RecordedTexts:
    tokenizer, _ = load_tokenizer(str(tiny_model("llama", noise=0.0)))
    pair = [runner(role) for role in ("target", "draft")]
    found = record(pair, tokenizer, PROMPTS, sampled(temperature, 0), (1,), TOKENS)
    return RecordedTexts("tiny", "tiny", list(found))


def sampled(temperature: float, number: int) -> RequestOptions:
    """How text `number`, from 1 on, is drawn."""
    return drawn_by(temperature, seed=5 + number)


@pytest.fixture(params=TEMPERATURES)
def both(request: pytest.FixtureRequest) -> tuple[float, RecordedTexts]:
    return request.param, recorded(request.param)


def empty_pair() -> list[ModelRunner]:
    """Target and draft, with empty caches."""
    pair = [runner(role) for role in ("target", "draft")]
    for each in pair:
        for slot in range(each.capabilities.slots):
            each.rollback(0, slot)
    return pair


def decoded(temperature: float, number: int, decoding: RequestOptions) -> Outcome:
    text = recorded(temperature).texts[number - 1]
    options = replace(decoding, sampling=sampled(temperature, number))
    submit = Submit(number, tuple(text.prompt), len(text.prompt) + len(text.answer), options)
    outcome = simulate(submit, *paired_executors(*empty_pair()), TIMING)
    assert outcome.tokens == text.answer
    return outcome


# ---- a recording is the run ----


def test_what_is_recorded_is_seeded_decoding(both: tuple[float, RecordedTexts]) -> None:
    """The target's text, and at every position the token that the draft draws."""
    temperature, known = both
    rights = []
    for number, text in enumerate(known.texts, 1):
        draw, whole, start = (
            DirectDraw(sampled(temperature, number)),
            [*text.prompt, *text.answer],
            len(text.prompt),
        )
        rows = [feed_chain(each, whole, len(text.answer) + 1)[:-1] for each in empty_pair()]
        for i, (own, drafts) in enumerate(zip(*rows, strict=True)):
            assert read_draw(draw(own, start + i)) == text.answer[i]
            assert text.drawn[i] == read_draw(draw(drafts, start + i))
            rights.append(text.drawn[i] == text.answer[i])
            assert text.right[i] == rights[-1]
    assert (len(known.texts), {*rights}) == (3, {True, False})


@pytest.mark.parametrize("window", ["stream", "fixed"])
def test_as_published_a_simulation_is_the_run(
    both: tuple[float, RecordedTexts], window: str
) -> None:
    """With the models, and with coins that know where the draft is right."""
    (temperature, known), decoding = both, replace(PEARL, window=window)
    real = [decoded(temperature, number, decoding) for number in range(1, 4)]
    coins = decode(
        [TextPlan(len(text.prompt), text.right) for text in known.texts], TIMING, decoding
    )
    for name in ("num_accepted_draft_tokens", "num_judged_draft_tokens", "seconds"):
        assert coins.total(name) == pytest.approx(
            sum(getattr(one.statistics, name) for one in real)
        ), name


# ---- the commands ----


def test_a_classifier_of_a_pair_by_one_command(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("abc\nhello\nyes\nno\n")
    toy, out = "toy:vocab=20,alpha=0.6", tmp_path / "it.disco"
    options = ["--target", toy, "--draft", toy, "--max-tokens", "12", "--raw", "--out", out]
    arguments = ["disco", "train", tmp_path / "prompts.txt", *options]
    assert "trained on 36 tokens" in ran(*arguments).output
    assert read_classifier(out, toy, toy).examples == 36
    with pytest.raises(ConfigError, match="has the draft's tokens"):
        ran(*arguments, "--draft", "none")
