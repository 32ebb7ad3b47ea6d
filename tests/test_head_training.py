"""Heads that speculators trains: the files that we write for it, and what it makes of them."""

import json
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.errors import ModelError
from pearl.lab.distill.answers import RecordedAnswer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.pair import Teacher, load_teacher
from pearl.lab.distill.run import Distillation
from pearl.lab.distill.states import states_of, write_states
from pearl.models.heads.loading import load_head, states_for
from tests.conftest import Quiet
from tests.tiny import VOCAB_SIZE, on_cpu, tiny_model

LAYERS = (2, 1)
TEXTS = [[5, 40, 7, 93, 11, 12, 200, 3], [17, 60, 61]]


def settings(out: Path, **others: object) -> DistillConfig:
    values: dict[str, object] = {
        "target": str(tiny_model("llama-tied", layers=4, chat=True)),
        "out": str(out),
        "device": "cpu",
        "dtype": "float32",
        "rounds": 1,
        "answers_per_round": 8,
        "held_out": 2,
        "answer_batch": 8,
        "max_prompt_tokens": 6,
        "max_answer_tokens": 40,
        "temperatures": (0.0,),
        "top": 4,
        "head_tokens": 96,
        "head_layers": 1,
        "block_size": 4,
        "markov_rank": 8,
        "batch_tokens": 200,
        "learning_rate": 1e-2,
    }
    return DistillConfig(**values | others)


def test_the_last_states_are_those_before_the_last_norm(tmp_path: Path) -> None:
    """Which the trainer applies itself. Padding changes no text's states."""
    teacher = load_teacher(settings(tmp_path), print)
    model = AutoModelForCausalLM.from_pretrained(teacher.name, dtype=torch.float32).eval()
    for text, states in zip(TEXTS, states_of(teacher, TEXTS, LAYERS), strict=True):
        with torch.inference_mode():
            outputs = model(torch.tensor([text]), output_hidden_states=True)
            logits = model.lm_head(model.model.norm(states[:, -1].float()))
        for number, layer in enumerate(LAYERS):
            wanted = outputs.hidden_states[layer][0].bfloat16()
            torch.testing.assert_close(states[:, number], wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(logits, outputs.logits[0], rtol=5e-2, atol=5e-2)


def test_a_target_that_does_more_to_its_logits_is_refused(tmp_path: Path) -> None:
    """Its answers were drawn, and its heads trained, by other logits than its own."""
    with pytest.raises(ModelError, match="does more to its logits than multiply"):
        load_teacher(settings(tmp_path, target=str(tiny_model("granite-scaled", chat=True))), print)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
@pytest.mark.parametrize("target", ["llama-tied", "gemma3-short"])
def test_the_trainer_has_the_target_s_logits(kind: str, target: str, tmp_path: Path) -> None:
    """A Gemma's norm multiplies by 1 + its weights: it was left out for EAGLE-3, and where a head begins."""
    heads = pytest.importorskip("pearl.lab.distill.heads")
    config = settings(tmp_path, head=kind, target=str(tiny_model(target, chat=True)), head_tokens=0)
    teacher = load_teacher(config, print)
    teacher.model.base_model.norm.weight.normal_(std=0.3)
    counts = RecordedAnswer([5], [40, 7], torch.zeros(2, 4).int(), torch.zeros(2, 4).half())
    write_states(teacher, [counts], (0, 1), tmp_path / "states", Quiet())
    model = heads._new_model(config, tmp_path / "states", (0, 1))
    (states,) = states_of(teacher, TEXTS[:1], (0, 1))
    wanted = teacher.model(torch.tensor(TEXTS[:1])).logits[0]
    for norm in (model.verifier_norm, model.norm):
        logits = model.verifier_lm_head(norm(states[:, -1].float()))
        torch.testing.assert_close(logits, wanted, rtol=5e-2, atol=5e-2)


def written(directory: Path) -> Teacher:
    """Write `TEXTS` and their states to directory/states, each with a prompt of two tokens."""
    teacher = load_teacher(settings(directory), print)
    answers = []
    for text in TEXTS:
        top = torch.zeros(len(text) - 2, 4)
        answers.append(RecordedAnswer(text[:2], text[2:], top.int(), top.half()))
    write_states(teacher, answers, LAYERS, directory / "states", Quiet())
    return teacher


def test_speculators_reads_the_answers(tmp_path: Path) -> None:
    """Its own reader of a directory gives the tokens, a mask of the answers, and the states."""
    data = pytest.importorskip("speculators.train.data")
    teacher = written(tmp_path)
    dataset = data.ArrowDataset(200, tmp_path / "states", on_missing="raise")
    rows = [dataset[number] for number in range(len(dataset))]
    for text, states, row in zip(TEXTS, states_of(teacher, TEXTS, LAYERS), rows, strict=True):
        assert row["input_ids"].tolist() == text
        assert row["loss_mask"].tolist() == [0, 0] + [1] * (len(text) - 2)
        torch.testing.assert_close(row["hidden_states"], states[:, :-1].flatten(1))
        torch.testing.assert_close(row["verifier_last_hidden_states"], states[:, -1])
    counts = torch.load(tmp_path / "states" / "token_freq.pt")
    assert counts[61] == 1
    assert 5 not in counts, "a token of a prompt"


@torch.no_grad()
def test_a_block_drafter_begins_by_attending_to_the_last_states(tmp_path: Path) -> None:
    """The product of a mean row with a mean state is the larger, the nearer the state."""
    heads = pytest.importorskip("pearl.lab.distill.heads")
    rotated = import_module("speculators.models.dflash.model_definitions").apply_rotary_pos_emb
    written(tmp_path)
    states = tmp_path / "states"
    torch.manual_seed(0)  # as `heads.train` does
    model = heads._new_model(settings(tmp_path, head="dflash"), states, LAYERS)
    layer = model.layers[0]
    attention = layer.self_attn
    answered = torch.tensor([token for text in TEXTS for token in text[2:]])
    token = layer.input_layernorm(model.embed_tokens(answered)).mean(0).expand(1, 9, -1)
    seen = heads._mean_state(model, states).expand(1, 9, -1)
    shape = (1, 9, -1, attention.head_dim)
    queries = attention.q_norm(attention.q_proj(token).view(shape)).transpose(1, 2)
    keys = attention.k_norm(attention.k_proj(seen).view(shape)).transpose(1, 2)
    turns = model.rotary_emb(token, torch.arange(9)[None])
    queries, keys = rotated(queries, keys, *turns)
    products = (queries[0, :, -1:] * keys[0]).sum(
        -1
    )  # the last row's, with the state at each position
    assert (products.diff() > 0).all()


GUESSES = {"dflash": 3, "dflash2": 3, "dspark": 4, "eagle3": 8, "peagle": 4, "xpress": 3}


def test_every_kind_of_the_setting_has_a_trainer() -> None:
    heads = pytest.importorskip("pearl.lab.distill.heads")
    kinds = get_args(DistillConfig.model_fields["head"].annotation)
    assert {"none", *heads.KINDS} == set(kinds)
    assert heads.KINDS.keys() == GUESSES.keys()


@pytest.mark.parametrize("kind", GUESSES)
def test_a_head_learns(kind: str, tmp_path: Path) -> None:
    """Answers that it sees again and again: it is right about more and more of them."""
    pytest.importorskip("speculators")
    head = Distillation(settings(tmp_path, head=kind, passes=24), Quiet()).run()
    config = json.loads((head / "config.json").read_text())
    assert config["speculators_model_type"] == kind
    assert config["speculators_config"]["verifier"]["name_or_path"] == settings(tmp_path).target
    target = settings(tmp_path).target
    states = states_for([str(head)], target, print)
    read = load_head(str(head), on_cpu(target, features=states), print)
    assert read.deepest == GUESSES[kind]
    assert len(read.ids) == (VOCAB_SIZE if kind == "dflash2" else 96)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
