"""Penalties and biases: logits as a function of the prefix. So what holds without them holds with them."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl import Engine, SamplingParams
from pearl.config import RequestOptions
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import probabilities, read_draw
from pearl.decoding.shaping import Shaper
from pearl.lab.studies.simulate import Timing
from pearl.models.feeds import paths
from pearl.models.toy import alpha_pair
from pearl.spec.methods import METHODS
from tests import virtual
from tests.options import drawn_by, resolved, shaped
from tests.pairwise import pairwise
from tests.tiny import tiny_model
from tests.virtual import NEVER, TIMINGS, Chains, likelihood

VOCAB, PROMPT = 6, (1, 2, 3, 1)
ALL = shaped(len(PROMPT), 1.5, 0.7, 0.4, ((2, -1.5), (5, 0.9)))
SHAPINGS = [ALL, shaped(len(PROMPT), 2.0), shaped(len(PROMPT), presence_penalty=1.5)]
SHAPINGS += [
    shaped(len(PROMPT), frequency_penalty=-0.5),
    shaped(len(PROMPT), logit_bias=((0, 100.0),)),
]

tokens = st.integers(0, VOCAB - 1)
shapings = st.builds(
    shaped,
    st.integers(0, 6),
    st.floats(0.1, 4),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(tokens, st.floats(-9, 9), max_size=3).map(lambda d: tuple(d.items())),
)


def brute_force(logits: torch.Tensor, text: Sequence[int], shaping: RequestOptions) -> torch.Tensor:
    """Token by token, in the words of the definition."""
    shaped = logits.clone()
    for token in range(len(logits)):
        value = logits[token] + torch.tensor(dict(shaping.logit_bias).get(token, 0.0))
        if token in text:
            value = (
                value * shaping.repetition_penalty
                if value < 0
                else value / shaping.repetition_penalty
            )
        times = Counter(text[shaping.prompt_length :])[token]
        if times:
            value = value - (
                torch.tensor(shaping.frequency_penalty) * times + shaping.presence_penalty
            )
        shaped[token] = value
    return shaped


@settings(max_examples=50)
@given(shapings, st.lists(tokens, max_size=8), st.lists(tokens, max_size=8), st.data())
def test_logits_are_shaped_as_defined_however_the_text_came(
    shaping: RequestOptions, prompt: list[int], more: list[int], data: st.DataObject
) -> None:
    """Held in parts, forgotten and fed again, or taken from the prompt where a cache had kept it."""
    text = [*prompt, *more]
    shaper = Shaper(shaping, prompt)
    for length in data.draw(st.lists(st.integers(0, len(prompt)), max_size=3)):
        shaper.hold(length)
        shaper.extend(text[length : data.draw(st.integers(length, len(text)))])
    shaper.hold(0)
    shaper.extend(text)
    logits = torch.linspace(-2, 2, VOCAB)
    before = logits.clone()
    torch.testing.assert_close(shaper.shape(logits), brute_force(logits, text, shaping))
    assert torch.equal(logits, before), "a copy is changed"


@settings(max_examples=50)
@given(shapings, st.lists(tokens, min_size=1, max_size=6), st.data())
def test_a_tree_is_shaped_path_by_path(
    shaping: RequestOptions, prompt: list[int], data: st.DataObject
) -> None:
    nodes = data.draw(st.lists(tokens, min_size=1, max_size=6))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(nodes))]
    rows = data.draw(st.integers(0, len(nodes)))
    shaper = Shaper(shaping, prompt)
    shaper.hold(len(prompt))
    logits = torch.randn(rows, VOCAB)
    shaped = shaper.tree(logits, nodes, paths(parents))
    for row, node in enumerate(range(len(nodes) - rows, len(nodes))):
        path, at = list[int](), node
        while at >= 0:
            path, at = [nodes[at], *path], parents[at]
        torch.testing.assert_close(shaped[row], brute_force(logits[row], [*prompt, *path], shaping))
    logits = torch.randn(min(2, len(nodes)), VOCAB)
    chain = shaper.chain(logits, nodes)
    for row in range(len(logits)):
        text = [*prompt, *nodes[: len(nodes) - len(logits) + row + 1]]
        torch.testing.assert_close(chain[row], brute_force(logits[row], text, shaping))


def test_a_repetition_penalty_is_that_of_transformers_bit_for_bit() -> None:
    logits, text = torch.randn(VOCAB), [1, 3, 3, 4]
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([text]), logits[None].clone()
    )[0]
    shaper = Shaper(shaped(2, 1.3), text)
    shaper.hold(4)
    assert torch.equal(shaper.shape(logits), theirs)


# ---- texts ----


PAIR = alpha_pair(VOCAB, 0.6)


@cache
def reference(sampling: RequestOptions, count: int) -> list[int]:
    """What the target says by itself under the direct draw, found without any of the runtime."""
    target, _ = PAIR
    draw, text = DirectDraw(sampling), list(PROMPT)
    for _ in range(count):
        logits = torch.log(target(text))
        text.append(read_draw(draw(brute_force(logits, text, sampling), len(text))))
    return text[len(PROMPT) :]


def decoded(
    method: str,
    rule: str,
    sampling: RequestOptions,
    timing: Timing,
    count: int = 24,
    **options: Any,
) -> list[int]:
    asked = resolved(method, "stream", None, rule, (), 4, 4, 4)
    found = virtual.decoded(PAIR, VOCAB, asked, sampling, count, timing, PROMPT, **options)
    return list(found.tokens)


WRAPS = (Chains, lambda runner: runner)
CASES = pairwise(METHODS, SHAPINGS, (0.0, 1.0), TIMINGS, WRAPS)


@pytest.mark.parametrize("method", METHODS)
def test_a_direct_text_is_that_of_the_shaped_target(method: str) -> None:
    for shaping, temperature, timing, wrap in [case[1:] for case in CASES if case[0] == method]:
        sampling = drawn_by(temperature, seed=7, shaping=shaping)
        assert decoded(method, "coupled", sampling, timing, wrap=wrap) == reference(sampling, 24)


def test_sampled_texts_have_the_shaped_targets_distribution() -> None:
    count, texts = 2, 800
    found = Counter(
        tuple(
            decoded(
                "pearl", "ratio", drawn_by(1.0, seed=seed, shaping=ALL), TIMINGS[seed % 4], count
            )
        )
        for seed in range(texts)
    )
    target, _ = PAIR
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for so_far, chance in expected.items():
            text = [*PROMPT, *so_far]
            probs = probabilities(brute_force(torch.log(target(text)), text, ALL), drawn_by(1.0))
            longer |= {
                (*so_far, token): chance * float(prob) for token, prob in enumerate(probs) if prob
            }
        expected = longer
    assert likelihood(found, expected) > NEVER


def test_text_of_a_checkpoint_is_that_of_generate_with_its_penalty() -> None:
    path = str(tiny_model("llama"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [[7, 30, 9, 12, 30], [40, 41, 42, 43] * 5]
    asked = SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.4, ignore_eos=True)
    pair = {"target_dtype": "float32", "draft_dtype": "float32", "slots": 2}
    with Engine(path, str(tiny_model("llama", noise=0.05)), **pair) as engine:  # type: ignore[arg-type]
        options = {
            "do_sample": False,
            "max_new_tokens": 40,
            "repetition_penalty": 1.4,
            "pad_token_id": 0,
        }
        wanted = [
            model.generate(torch.tensor([one]), eos_token_id=None, **options)[0, len(one) :]
            for one in prompts
        ]
        for method in ("ar", "ngram", "sd", "pearl"):
            found = engine.generate(prompts, asked.overridden_by(RequestOptions(method=method)))
            assert [result.tokens for result in found] == [one.tolist() for one in wanted], method
        plain = engine.generate(prompts, asked.changed(repetition_penalty=None))
        assert [r.tokens for r in plain] != [r.tokens for r in found]
        (first, *_) = plain[0].tokens
        only = SamplingParams(
            temperature=1, seed=1, max_tokens=8, logit_bias={44: 100}, ignore_eos=True
        )  # type: ignore[arg-type]
        never = SamplingParams(
            temperature=0, max_tokens=8, logit_bias=((first, -100.0),), ignore_eos=True
        )
        assert engine.generate(prompts[0], only)[0].tokens == [44] * 8
        assert first not in engine.generate(prompts[0], never)[0].tokens
