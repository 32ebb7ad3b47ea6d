"""Predicted outputs: a client's guess at its text is a source of guesses, which changes no text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl import Engine, SamplingParams
from pearl.drafting.fused_guesses import text_index
from pearl.drafting.ngram import anchored, guess_tree
from pearl.drafting.prediction import PredictedGuesses, PredictionCount
from pearl.engine.request import submission
from pearl.errors import ConfigError
from pearl.protocol.messages import Source
from pearl.text.tokenizer import GenerationDefaults
from tests.served import Served

PROMPT = [1, 2, 3]
FILE = [10, 11, 12, 13, 14, 15, 12, 16, 17, 18]
TOKENS = st.lists(st.integers(0, 6), max_size=20)
METHODS = ("ar", "ngram", "sd", "pearl")


def first(written: list[int]) -> int | None:
    """Return the likeliest token after a prompt and a beginning of the text, learned token by token."""
    text = list(PROMPT)
    guesses = PredictedGuesses(FILE, text)
    for token in written:
        text.append(token)
        guesses.learn(len(text))
    candidates = guesses.candidates(len(text))
    if not candidates:
        return None
    return candidates[0].token


@pytest.mark.parametrize(
    ("written", "token"),
    [
        ([], 10),  # a text begins as its prediction does
        ([10, 11], 12),
        ([10, 11, 12], 13),
        ([10, 11, 12, 13, 14, 15, 12], 16),
        ([10, 11, 99, 14], 15),  # some tokens are replaced
        ([10, 11, 12, 13, 14, 99, 12], 16),  # of two places the next, not the first
        ([99, 98, 12], 13),
        ([10, 11, 12, 13, 14, 15, 12, 16, 17, 18], None),  # it is at its end
        ([*FILE, 11], None),  # few tokens are no return to an earlier place
        ([*FILE, 10, 11, 12, 13], 14),
    ],
)
def test_a_text_follows_its_prediction(written: list[int], token: int | None) -> None:
    assert first(written) == token


def test_the_tree_of_guesses_is_the_prediction() -> None:
    index = text_index(PROMPT, None, prediction=FILE)
    tree = guess_tree(index, anchored(PROMPT, len(PROMPT), ()), 10, 100)
    assert tree.tokens == FILE
    assert set(tree.sources) == {Source.PREDICTION}
    assert not guess_tree(text_index(PROMPT, None), anchored(PROMPT, 3, ()), 10, 100).tokens


@given(prediction=TOKENS, text=TOKENS, cut=st.integers(0, 20))
def test_counts_are_of_the_texts_alone(prediction: list[int], text: list[int], cut: int) -> None:
    """However the tokens come."""
    whole = PredictionCount(prediction, PROMPT)
    whole.extend(text)
    parts = PredictionCount(prediction, PROMPT)
    parts.extend(text[:cut])
    for token in text[cut:]:
        parts.extend([token])
    assert parts.accepted == whole.accepted
    assert whole.accepted + whole.rejected == len(prediction)
    assert whole.accepted <= len(text)
    same = PredictionCount(text, PROMPT)
    same.extend(text)
    assert same.rejected == 0


def test_guesses_are_forgotten_with_the_text() -> None:
    """A pending token that is rejected leaves no trace."""
    index = text_index(PROMPT, None, prediction=FILE)
    plain = text_index(PROMPT, None, prediction=FILE)
    index.extend([10, 13])
    assert index.candidates(5)[0].token == 14
    index.cut(4)
    plain.extend([10])
    for each in (index, plain):
        each.learn(4)
    assert index.candidates(4) == [
        candidate._replace(origin=index.candidates(4)[number].origin)
        for number, candidate in enumerate(plain.candidates(4))
    ]


# ---- through the runtime ----


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_prediction_changes_no_text(toy: Engine, method: str, temperature: int) -> None:
    """Right or wrong; its tokens are counted. Whether they are fed as guesses depends on measured times."""
    params = SamplingParams(
        method=method,
        rule="coupled",
        temperature=temperature,
        seed=7,
        max_tokens=60,
        ignore_eos=True,
    )
    (plain,) = toy.generate("12", params)
    edited = plain.text[:20] + "v" + plain.text[20:]
    for prediction in (plain.text, edited, plain.text[::-1], "0"):
        (predicted,) = toy.generate("12", params.changed(prediction=prediction))
        assert predicted.tokens == plain.tokens
        counts = predicted.accepted_prediction_tokens + predicted.rejected_prediction_tokens
        assert counts == min(60, len(prediction))
        if prediction == plain.text:
            assert predicted.accepted_prediction_tokens == 60
        guessed = predicted.statistics.guessed_by_source
        if method == "ar":
            assert not guessed


def test_methods_without_a_draft_take_it(toy: Engine) -> None:
    params = SamplingParams(method="ngram", temperature=1, seed=7, max_tokens=60, ignore_eos=True)
    (plain,) = toy.generate("12", params)
    (predicted,) = toy.generate("12", params.changed(prediction=plain.text))
    assert predicted.statistics.tokens_per_step > 2 * plain.statistics.tokens_per_step


def test_tokens_of_a_prediction_are_at_most_those_of_the_text(toy: Engine) -> None:
    options = SamplingParams(seed=1, max_tokens=5, prediction="0123456789" * 100)
    submit = submission(1, [1], 100, options, GenerationDefaults(), tokenizer=toy.tokenizer)
    assert submit.options.predicted == (0, 1, 2, 3, 4)
    assert submit.options.prediction is None
    with pytest.raises(ConfigError, match="prediction: holds half a surrogate pair"):
        SamplingParams(prediction="\ud800")


# ---- over HTTP ----


@pytest.mark.parametrize("content", [str, lambda text: [{"type": "text", "text": text}]])
def test_usage_counts_a_prediction(served: Served, content: Any) -> None:
    """In chats and completions, whole and streamed; where there is none, too."""
    asked = {"max_tokens": 40, "ignore_eos": True, "seed": 3, "temperature": 1}
    for path in ("chat/completions", "completions"):
        plain = served.post(path, **asked).json()
        details = plain["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 0
        assert details["rejected_prediction_tokens"] == 0
        (choice,) = plain["choices"]
        text = choice.get("text") or choice["message"]["content"]
        wrong = "v" if text[20] != "v" else "u"
        prediction = {"type": "content", "content": content(text[:20] + wrong + text[21:])}
        reply = served.post(path, prediction=prediction, **asked).json()
        assert reply["choices"] == plain["choices"]
        details = reply["usage"]["completion_tokens_details"]
        assert details["rejected_prediction_tokens"] in (1, 2)
        assert details["accepted_prediction_tokens"] == 40 - details["rejected_prediction_tokens"]
        events = served.events(
            path, prediction=prediction, stream_options={"include_usage": True}, **asked
        )
        assert events[-1]["usage"]["completion_tokens_details"] == details


@pytest.mark.parametrize(
    "prediction", ["text", {"type": "content"}, {"type": "other", "content": "a"}]
)
def test_what_is_no_prediction_is_refused(served: Served, prediction: Any) -> None:
    response = served.post("chat/completions", prediction=prediction)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")
