"""`launch/hub` behind transformers' own `generate`: its arguments, its texts, our methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from pearl.errors import ConfigError, ModelError
from tests.tiny import EOS_ID, tiny_model

FOLDER = str(Path(__file__).parent.parent / "launch" / "hub")
TARGET = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
DRAFT = AutoModelForCausalLM.from_pretrained(tiny_model("llama", noise=0.1))
PROMPT = torch.tensor([[40, 41, 42, 43, 44, 40, 41, 42, 43]])
BATCH = torch.tensor([[0, 0, 50, 51, 52], [60, 61, 62, 63, 64]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
METHODS: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    "ngram": {},
    "sd": {"assistant_model": DRAFT},
    "sd, gamma 2": {"assistant_model": DRAFT, "gamma": 2, "method": "sd"},
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def ours(inputs: torch.Tensor = PROMPT, **arguments: Any) -> Any:
    return TARGET.generate(inputs, custom_generate=FOLDER, trust_remote_code=True, **arguments)


class Streamer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.has_ended = True


class After(StoppingCriteria):
    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.count)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 60},
        {"max_length": 30},
        {"max_new_tokens": 60, "repetition_penalty": 1.3},
        {"generation_config": GenerationConfig(max_new_tokens=60, eos_token_id=[EOS_ID, 70, 100], pad_token_id=0)},
        {"max_new_tokens": 60, "stopping_criteria": [After(17)]},
        {"inputs": BATCH, "attention_mask": MASK, "max_new_tokens": 40, "eos_token_id": [EOS_ID, *range(50, 110)]},
    ],
    ids=["plain", "max_length", "penalty", "ends", "criteria", "padded batch"],
)
def test_greedy_texts_are_those_of_generate(method: str, arguments: dict[str, Any]) -> None:
    arguments = {"inputs": PROMPT, **arguments}
    assert torch.equal(ours(**arguments, **METHODS[method]), TARGET.generate(**arguments))


def test_a_seed_gives_one_sampled_text_whatever_the_method() -> None:
    texts = [ours(**SAMPLED, seed=7, max_new_tokens=60, **how).tolist() for how in METHODS.values()]
    assert texts.count(texts[0]) == len(texts)
    assert ours(**SAMPLED, seed=8, max_new_tokens=60).tolist() != texts[0]
    two = ours(**SAMPLED, seed=7, max_new_tokens=60, num_return_sequences=2).tolist()
    assert two[0][: len(texts[0][0])] == texts[0][0]
    assert two[1] != two[0]
    again = []
    for _ in range(2):
        torch.manual_seed(3)
        again.append(ours(**SAMPLED, max_new_tokens=20, assistant_model=DRAFT).tolist())
    assert again[0] == again[1], "without a seed it is torch's"


def test_what_is_returned_and_streamed_and_left_as_it_was() -> None:
    streamer = Streamer()
    TARGET.train()
    try:
        found = ours(max_new_tokens=20, assistant_model=DRAFT, streamer=streamer, return_dict_in_generate=True)
        assert TARGET.training
    finally:
        TARGET.eval()
    assert found.sequences[0].tolist() == streamer.tokens
    assert streamer.has_ended
    assert streamer.tokens == TARGET.generate(PROMPT, max_new_tokens=20)[0].tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"output_scores": True}, "output_scores"),
        ({"logits_processor": []}, "logits_processor"),
        ({"generation_config": GenerationConfig(no_repeat_ngram_size=2)}, "no_repeat_ngram_size"),
        ({"cache": 1}, "cache"),
        ({"method": "pearl"}, "method 'pearl'"),
        ({"method": "sd"}, "without an assistant_model"),
        ({"inputs": BATCH, "streamer": Streamer()}, "streamer"),
        ({"do_sample": True, "min_p": 2.0}, "min_p"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_taken_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        ours(**{"max_new_tokens": 5, "inputs": PROMPT, **arguments})


@pytest.mark.parametrize("arguments", [{"assistant_model": DRAFT, "gamma": 4}, {}], ids=["sd", "ngram"])
def test_several_tokens_are_committed_a_forward(arguments: dict[str, Any]) -> None:
    forwards: list[object] = []
    hook = TARGET.register_forward_hook(lambda *_: forwards.append(None))
    try:
        ours(max_new_tokens=60, eos_token_id=None, **arguments)  # tried by an earlier text, or now
        forwards.clear()
        found = ours(max_new_tokens=60, eos_token_id=None, **arguments)
    finally:
        hook.remove()
    assert found.shape[1] == PROMPT.shape[1] + 60
    assert len(forwards) < 45


def test_what_the_context_does_not_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="256 positions"):
        ours(max_new_tokens=300)


def test_a_recurrent_pair_is_rolled_back() -> None:
    target, draft = (AutoModelForCausalLM.from_pretrained(tiny_model("lfm2", noise=noise)) for noise in (0, 0.3))
    for _ in range(2):
        found = target.generate(
            PROMPT, max_new_tokens=30, assistant_model=draft, custom_generate=FOLDER, trust_remote_code=True
        )
        assert torch.equal(found, target.generate(PROMPT, max_new_tokens=30))
