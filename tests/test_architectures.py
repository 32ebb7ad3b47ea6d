"""Current architectures on the general path: windows and chunks, recurrences and convolutions, experts, each tiny."""

import random
from functools import cache, partial
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from pearl.models.checkpoints import memory
from pearl.models.checkpoints.memory import needed
from pearl.models.runner import feed_chain
from pearl.models.transformers import SNAPSHOTS
from pearl.models.transformers.runner import HFRunner
from tests.runner_contract import Kinds, RunnerContract, close, some_tokens
from tests.tiny import VOCAB_SIZE, tiny_model

WINDOWED = [
    "gpt-oss",
    "gemma3",
    "mistral-sliding",
    "olmo3",
    "llama4",
    "dory",
]  # all windows and chunks are of 8 tokens
RECURRENT = [
    "qwen3.5",
    "qwen3-next",
    "lfm2",
    "nemotron-h",
    "falcon-h1",
    "mamba2",
    "mamba",
    "qwen4-exp",
]
PLAIN = [
    "qwen3-moe",
    "glm4-moe",
    "mixtral",
    "granite",
    "phi",
]  # nothing but keys and values, as deepseek-v3
KINDS = [*WINDOWED, *RECURRENT, *PLAIN, "deepseek-v3", "deepseek-v4"]
CORE = ["gpt-oss", "qwen3-next", "llama4"]


@cache
def model(kind: str, noise: float = 0.0) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model(kind, noise=noise))


def load(kind: str, noise: float = 0.0, context: int = 64) -> HFRunner:
    return HFRunner(model(kind, noise), context)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


class TestContract(RunnerContract):
    kinds: ClassVar[Kinds] = {kind: partial(load, kind) for kind in CORE}
    others: ClassVar[Kinds] = {kind: partial(load, kind) for kind in KINDS if kind not in CORE}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in PLAIN)) for kind in KINDS]
)
def test_a_text_far_longer_than_a_window_has_the_logits_of_one_forward_however_it_is_cut(
    kind: str,
) -> None:
    """With other tokens fed between and rolled back, up to far before them."""
    rng, runner = random.Random(0), load(kind, context=96)
    text = random_tokens(rng, 80)
    with torch.inference_mode():
        expected = model(kind)(torch.tensor([text]), use_cache=False).logits[0]
    for step in range(30):
        start = runner.length()
        part = text[start : start + rng.choice((1, 1, 1, 2, 5, 9))]
        close(feed_chain(runner, part, len(part)), expected[start : start + len(part)])
        for token in random_tokens(rng, rng.choice((0, 3, 12))):
            feed_chain(runner, [token], 1)
        runner.rollback(min(start + len(part), 70) if step % 10 else rng.randrange(start + 1))


@pytest.mark.parametrize("kind", ["deepseek-v3.2", "dots3-note", "qwen4-exp"])
def test_an_indexers_keys_are_rolled_back_too(kind: str) -> None:
    """Compared for the same cut only: where scores nearly tie, another cut lets the indexer choose other positions."""
    runner, text = load(kind), random_tokens(random.Random(0), 40)
    for start, count in ((30, 3), (21, 1), (12, 9), (20, 5)):
        runner.rollback(min(start, runner.length()))
        feed_chain(runner, text[runner.length() : start] + random_tokens(random.Random(1), 9), 1)
        runner.rollback(start)
        own = DynamicCache(config=model(kind).config)
        with torch.inference_mode():
            for part in (text[:start], text[start : start + count]):
                expected = model(kind)(torch.tensor([part]), **{runner.cache_name: own}).logits[0]
        close(feed_chain(runner, text[start : start + count], count), expected)


def fed_by(runner: HFRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward of the model takes, from now on."""
    found: list[int] = []
    forward = runner.model.forward

    def counted(input_ids: torch.Tensor, **given: object) -> object:
        found.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **given)

    monkeypatch.setattr(runner.model, "forward", counted)
    return found


def test_after_a_rejection_only_the_window_is_fed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a target does: feed seven tokens at once, accept three."""
    runner = load("lfm2")
    feed_chain(runner, some_tokens(runner, 20), 1)
    fed = fed_by(runner, monkeypatch)
    for start in (20, 24, 28):
        feed_chain(runner, some_tokens(runner, 7, start), 7)
        runner.rollback(start + 3)
        feed_chain(runner, some_tokens(runner, 1, start + 3), 1)
    assert fed == [7, 4] * 3


def test_a_cache_that_cannot_be_rolled_back_costs_nothing_without_a_rejection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So `ar` runs as with any other; with guesses, a rejection feeds all again. A start says so."""
    runner = load("deepseek-v4")
    assert (
        "DeepseekV4CSACache, DeepseekV4HCACache): after a rejected token all tokens are fed again"
        in caplog.text
    )
    fed = fed_by(runner, monkeypatch)
    for count in (20, 1, 1, 1):
        feed_chain(runner, some_tokens(runner, count, runner.length()), 1)
    runner.rollback(22)
    feed_chain(runner, [5], 1)
    assert fed == [20, 1, 1, 1, 23]


@pytest.mark.parametrize("ahead", [1, 5, 17, 60, 128])
def test_a_draft_that_went_ahead_feeds_again_about_what_it_takes_back(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prompt, by single tokens; the copies are bounded."""
    runner = load("lfm2", context=512)
    feed_chain(runner, random_tokens(random.Random(0), 300), 1)
    for token in random_tokens(random.Random(1), ahead):
        feed_chain(runner, [token], 1)
        assert len(runner.snapshots.kept) <= SNAPSHOTS
    fed = fed_by(runner, monkeypatch)
    for taken in {1, ahead // 3, ahead}:
        runner.rollback(runner.length() - taken)
        feed_chain(runner, [5], 1)
        assert fed.pop() <= 5 + 1.5 * taken
        for token in random_tokens(random.Random(2), taken - 1):
            feed_chain(runner, [token], 1)


def test_a_long_text_is_fed_again_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of thousands of tokens could take more memory than there is; and one of zeros' rows is not the last."""
    runner, text = load("lfm2", context=1200), random_tokens(random.Random(0), 1100)
    expected = feed_chain(runner, text, 1100)
    fed = fed_by(runner, monkeypatch)
    runner.rollback(0)
    feed_chain(runner, text[:1090], 0)
    assert fed == [512, 512, 66]
    runner.rollback(1080)
    close(feed_chain(runner, text[1080:], 20), expected[1080:])


@pytest.mark.parametrize(("kind", "together"), [("mamba", False), ("mamba2", True), ("lfm2", True)])
def test_a_forward_that_would_forget_its_state_is_made_token_by_token(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba drops its state in a forward of several tokens; in half precision logits do not show it."""
    monkeypatch.setattr("pearl.models.transformers.runner.PIECE", 8)
    runner = load(kind)
    expected = model(kind)(torch.tensor([some_tokens(runner, 13)]), use_cache=False).logits[0]
    fed = fed_by(runner, monkeypatch)
    close(feed_chain(runner, some_tokens(runner, 10), 10), expected[:10])
    close(feed_chain(runner, some_tokens(runner, 3, 10), 3), expected[10:])
    assert fed == [8, *([2, 3] if together else [1] * 5)]


@pytest.mark.parametrize(
    "kind", ["llama4", "qwen3.5", "lfm2", "deepseek-v3.2", "falcon-h1", "mamba2", "dory"]
)
def test_what_is_told_before_loading_is_what_is_taken(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows keep the whole context, states have copies."""
    monkeypatch.setattr(memory, "MEASURED_FROM", 0)
    need = needed(tiny_model(kind), "auto", 64, 8192)
    assert need.cache + need.states == load(kind).cache_bytes
    assert (need.states > 0) == (kind in RECURRENT)
    assert (need.cache > 0) == (kind != "mamba2")
    assert ("of recurrent state and 8 copies" in str(need)) == (kind in RECURRENT)
