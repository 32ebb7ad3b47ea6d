"""Heads that read the target's hidden states: their checkpoints, their guesses, and that no text changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pearl.config import EngineConfig, SamplingParams
from pearl.drafting.heads import HeadText
from pearl.engine import Engine
from pearl.errors import ConfigError, ModelError
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.head import HeadModel
from pearl.lab.distill.run import Distillation
from pearl.models.checkpoints.heads import load_head
from pearl.models.checkpoints.loading import load_runner
from pearl.models.feeds import Feed
from pearl.models.forward.layers import tapped
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from tests.conftest import Quiet
from tests.tiny import tiny_model

CPU = torch.device("cpu")
KNOWN = 96  # tokens of the head's own vocabulary
TEXT = [5, 40, 7, 93, 11, 12, 200, 3, 17, 60, 61, 5, 40]


def target(kind: str = "llama-tied") -> Path:
    return tiny_model(kind, layers=4, chat=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that has learned a few answers of the target by heart."""
    config = DistillConfig(
        target=str(target()),
        out=str(tmp_path_factory.mktemp("head")),
        head=True,
        head_tokens=KNOWN,
        device="cpu",
        dtype="float32",
        rounds=1,
        answers_per_round=8,
        held_out=2,
        answer_batch=8,
        max_prompt_tokens=6,
        max_answer_tokens=40,
        temperatures=(0.0,),
        top=4,
        passes=120,
        batch_tokens=400,
        learning_rate=1e-2,
    )
    return Distillation(config, Quiet()).run()


def runner(**options: Any) -> Any:
    return load_runner(str(target()), device=CPU, features=True, **options)


def changed(head: Path, into: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> Path:
    """A copy with some tensors replaced (None: removed) and settings changed."""
    shutil.copytree(head, into, dirs_exist_ok=True)
    found: dict[str, torch.Tensor | None] = {**load_file(head / "model.safetensors"), **(tensors or {})}
    save_file({name: one for name, one in found.items() if one is not None}, into / "model.safetensors")
    settings = json.loads((head / "config.json").read_text()) | config
    (into / "config.json").write_text(json.dumps(settings))
    return into


# ---- hidden states ----


@pytest.mark.parametrize("how", ["as it comes", "fixed sizes", "kernels"])
def test_features_are_the_inputs_of_three_layers(how: str) -> None:
    """Of chains in any cut and of trees, in each of the ways that our own forward computes."""
    model = AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model.base_model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer][0] for layer in tapped(4)], -1)
    if how == "kernels":
        pytest.importorskip("triton")
    more: dict[str, Any] = {"fixed sizes": {"record": lambda work: work}, "as it comes": {}}.get(how, {})
    if how == "kernels":
        more = {"record": lambda work: work, "kernels": True}
    own = ForwardRunner(model, 256, features=True, **more)
    assert (own._decode is not None) == (how == "kernels")
    feed_chain(own, TEXT[:6], 1, prompt=True)
    torch.testing.assert_close(own.features(), wanted[:6], rtol=1e-4, atol=1e-4)
    own.forward([Feed((200, TEXT[6], TEXT[7], 9), 4, parents=(-1, -1, 1, 0))])
    torch.testing.assert_close(own.features()[[1, 2]], wanted[6:8], rtol=1e-4, atol=1e-4)
    own.keep((1, 2))
    feed_chain(own, TEXT[8:], 1)
    torch.testing.assert_close(own.features(), wanted[8:], rtol=1e-4, atol=1e-4)


# ---- the head ----


def test_a_head_computes_what_it_has_learned(trained: Path) -> None:
    """Step by step with a cache what training computes at once: a prompt, then its own outputs."""
    own = runner()
    head = load_head(str(trained), own, lambda what: None)
    weights = load_file(trained / "model.safetensors")
    model = HeadModel(AutoModelForCausalLM.from_pretrained(target()).config, own.embedding, head.ids, 0)
    for name, weight in model.weights.items():
        weight.detach().copy_(weights[f"{name}.weight"])
    feed_chain(own, TEXT, 1)
    features, ids = own.features(), torch.tensor(TEXT)
    turns = torch.stack((head._cos, head._sin))[:, : len(TEXT)]
    with torch.inference_mode():
        steps = list(model.steps(features[None], ids[None], turns))
        for cut in (3, 8):
            output = head.read(ids[1:cut], head.fused(features[: cut - 1]), 0)
            for depth, step in enumerate(steps):
                at = cut - 2
                torch.testing.assert_close(output, step[0, at : at + 1], rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(head.logits(output), model.logits(output)[0], rtol=1e-3, atol=1e-3)
                output = head.read(ids[cut + depth : cut + depth + 1], output, 0)
            head.lengths[0] = 0


def test_what_is_read_follows_the_cache(trained: Path) -> None:
    """After a rollback the head continues from states that it kept, and starts over where it kept none."""
    own = runner()
    text = HeadText(load_head(str(trained), own, lambda what: None), 0)
    draw = lambda logits, position: int(text._head.ids[logits.argmax()])  # noqa: E731
    with torch.inference_mode():
        feed_chain(own, TEXT, 1)
        text.extend(0, own.features())
        assert text.read(TEXT, 5)
        before = text.draft(5, draw, 0.0)
        assert len(before) == 8
        text.rollback(9)
        assert text.read(TEXT, 9)
        own.rollback(7)
        text.rollback(7)
        feed_chain(own, TEXT[7:], 1)
        text.extend(7, own.features())
        assert text.read(TEXT, len(TEXT)), "what it knows begins later"
        own.rollback(0)
        text.rollback(0)
        feed_chain(own, TEXT, 1)
        text.extend(0, own.features())
        assert text.read(TEXT, 5)
        assert text.draft(5, draw, 0.0) == before
        text.rollback(0)
        text.extend(0, own.features()[:10])
        assert not text.read(TEXT, len(TEXT)), "states of later tokens are missing"


@pytest.mark.parametrize(
    ("tensors", "config", "why"),
    [
        ({"model.layers.61.eh_proj.weight": torch.zeros(2, 2)}, {}, "a layer for multi-token prediction"),
        ({"fc.weight": torch.zeros(32, 64)}, {}, "EAGLE head of the first or second version"),
        ({"fc.weight": torch.zeros(32, 99)}, {}, "of another model"),
        ({"midlayer.hidden_norm.weight": None}, {}, "has no midlayer.hidden_norm.weight"),
        ({"d2t": None}, {}, "nothing says which"),
        ({}, {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, "rope is not computed"),
    ],
)
def test_other_checkpoints_are_refused_by_what_they_are(
    trained: Path, tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        load_head(str(changed(trained, tmp_path / "head", tensors, **config)), runner(), lambda what: None)


def test_the_layout_of_speculators_is_read(trained: Path, tmp_path: Path) -> None:
    """The same head under vLLM's names gives the same guesses."""
    weights = load_file(trained / "model.safetensors")
    renamed: dict[str, torch.Tensor | None] = {name: None for name in weights if name.startswith("midlayer.")}
    renamed |= {name.replace("midlayer.", "layers.0."): weights[name] for name in renamed}
    inner = json.loads((trained / "config.json").read_text())
    other = changed(trained, tmp_path / "head", renamed, transformer_layer_config=inner)
    own = runner()
    feed_chain(own, TEXT, 1)
    outputs = []
    for path in (trained, other):
        head = load_head(str(path), own, lambda what: None)
        with torch.inference_mode():
            outputs.append(head.read(torch.tensor(TEXT[1:]), head.fused(own.features()[:-1]), 0))
    assert torch.equal(*outputs)


def test_who_needs_a_head_and_who_cannot_have_one(trained: Path) -> None:
    with pytest.raises(ConfigError, match="name one with --head"):
        EngineConfig(draft="none").check_method("head")
    with pytest.raises(ModelError, match="keeps no hidden states"):
        runner(forwards="transformers")
    with pytest.raises(ModelError, match="needs a target of our own forward"):
        Engine("toy:vocab=32", "none", head=str(trained)).close()


# ---- texts ----


@pytest.fixture(scope="module")
def engine(trained: Path) -> Iterator[Engine]:
    draft = tiny_model("llama-tied", layers=4, chat=True, noise=0.3)
    with Engine(str(target()), str(draft), head=str(trained), slots=2) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_changes(engine: Engine, temperature: float) -> None:
    """By a head alone and beside a draft, with siblings and branches, in several slots, and after a common prefix."""
    prompts = ["Write a", "Write a poem", "Explain", "What is"]
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=5, ignore_eos=True)
    wanted = [one.tokens for one in engine.generate(prompts, params, method="ar", rule="coupled")]
    guessed = {}
    for method in ("head", "pearl", "ngram"):
        found = engine.generate(prompts, params, method=method, rule="coupled")
        assert [one.tokens for one in found] == wanted, method
        guessed[method] = sum(one.statistics.guessed_by_source.get("head", 0) for one in found)
    assert guessed["ngram"] == 0
    assert guessed["head"] > 0 or temperature, "random models' sampled texts cannot be guessed"


def test_a_head_saves_forwards(engine: Engine, trained: Path) -> None:
    """On texts that it has learned, over n-grams alone."""
    answers = torch.load(trained.parent / "answers.pt", weights_only=True)["rounds"]["round-000"]["answers"]
    steps = dict.fromkeys(("ngram", "head"), 0)
    for one in answers:
        params = SamplingParams(temperature=0, max_tokens=len(one["tokens"]))
        for method in steps:
            (found,) = engine.generate([one["prompt"]], params, method=method)
            assert found.tokens == one["tokens"]
            steps[method] += found.statistics.steps
    assert steps["head"] < 0.9 * steps["ngram"]
