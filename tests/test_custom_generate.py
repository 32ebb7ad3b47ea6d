"""`launch/hub` behind transformers' own `generate`: its arguments, its texts, our methods."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from pearl.engine.custom_generate import generate
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
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def ours(inputs: torch.Tensor = PROMPT, **arguments: Any) -> Any:
    return TARGET.generate(inputs, custom_generate=FOLDER, trust_remote_code=True, **arguments)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 60},
        {"max_length": 30},
        {"max_new_tokens": 60, "repetition_penalty": 1.3},
        {
            "generation_config": GenerationConfig(
                max_new_tokens=60, eos_token_id=[EOS_ID, 70, 100], pad_token_id=0
            )
        },
        {
            "max_new_tokens": 60,
            "stopping_criteria": [lambda ids, *_: torch.full((len(ids),), ids.shape[1] >= 17)],
        },
        {
            "inputs": BATCH,
            "attention_mask": MASK,
            "max_new_tokens": 40,
            "eos_token_id": [EOS_ID, *range(50, 110)],
        },
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
    torch.manual_seed(3)
    first = ours(**SAMPLED, max_new_tokens=20)
    torch.manual_seed(3)
    assert torch.equal(first, ours(**SAMPLED, max_new_tokens=20)), "without a seed it is torch's"


def test_what_is_returned_and_streamed_and_left_as_it_was() -> None:
    streamed: list[int] = []
    streamer = SimpleNamespace(
        put=lambda new: streamed.extend(new.flatten().tolist()), end=lambda: streamed.append(-1)
    )
    TARGET.train()
    try:
        found = ours(
            max_new_tokens=20,
            assistant_model=DRAFT,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        assert TARGET.training
    finally:
        TARGET.eval()
    assert [*found.sequences[0].tolist(), -1] == streamed
    assert torch.equal(found.sequences, TARGET.generate(PROMPT, max_new_tokens=20))


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
        ({"method": "sd"}, "sd needs an assistant_model"),
        ({"inputs": BATCH, "streamer": SimpleNamespace(put=len)}, "streamer"),
        ({"do_sample": True, "min_p": 2.0}, "min_p"),
        ({"max_new_tokens": 300}, "256 positions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_taken_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ModelError, ValueError), match=words):
        ours(**{"max_new_tokens": 5, "inputs": PROMPT, **arguments})


@pytest.mark.parametrize(
    "arguments", [{"assistant_model": DRAFT, "gamma": 4}, {}], ids=["sd", "ngram"]
)
def test_several_tokens_are_committed_a_forward(arguments: dict[str, Any]) -> None:
    forwards: list[object] = []
    hook = TARGET.register_forward_hook(lambda *_: forwards.append(None))
    found = ours(max_new_tokens=60, **arguments)
    hook.remove()
    assert found.shape[1] == PROMPT.shape[1] + 60
    assert len(forwards) < 45


def test_a_recurrent_pair_is_rolled_back() -> None:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(tiny_model("lfm2", noise=noise)) for noise in (0, 0.3)
    )
    for _ in range(2):
        found = generate(target, inputs=PROMPT, max_new_tokens=30, assistant_model=draft)
        assert torch.equal(found, target.generate(PROMPT, max_new_tokens=30))


def test_a_draft_whose_logits_are_not_finite_changes_no_text() -> None:
    broken = deepcopy(DRAFT)
    broken.get_output_embeddings().weight.data.fill_(torch.nan)
    text = ours(max_new_tokens=20, assistant_model=broken)
    assert torch.equal(text, TARGET.generate(PROMPT, max_new_tokens=20))
