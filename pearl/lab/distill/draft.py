"""Builds the draft to train, and exports it as an ordinary Hugging Face directory.

A draft starts from an existing draft; or from some of the target's layers with its embeddings, which are not trained;
or from a narrower model of the target's class, with tied embeddings that start as the target's, projected.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pearl.errors import DistillError, ModelError
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.teacher import Teacher
from pearl.models.checkpoint import resolve_checkpoint
from pearl.models.loading import load_model
from pearl.models.tokenizers import load_tokenizer
from pearl.text.tokenizer import check_same_vocabulary, read_tokenizer

# The matrices (and their biases) whose products a layer adds to the states, by the names in transformers' models.
_WRITES = r"(self_attn|attention|self_attention|attn|mlp)\.(o_proj|down_proj|dense|out_proj|c_proj|dense_4h_to_h)\."


def new_draft(config: DistillConfig, teacher: Teacher) -> PreTrainedModel:
    """The draft before training, in float32 on the target's device. Raises `ModelError`."""
    torch.manual_seed(config.seed)
    if config.init_from is not None:
        draft = _existing(config, teacher)
        if config.grow:
            draft = _grown(draft, teacher.model, config.grow)
    elif config.width is not None:
        draft = _narrow(teacher.model, len(config.layers), config.width)
    else:
        draft = _from_layers(teacher.model, config.layers)
    draft.eval()  # train without dropout: few passes overfit little
    if head(draft).shape == head(teacher.model).shape:  # tables as large as the target's are not trained
        for table in (embeddings(draft), head(draft)):
            table.requires_grad_(False)
    check_head(teacher.model)
    check_head(draft)
    return draft


def _existing(config: DistillConfig, teacher: Teacher) -> PreTrainedModel:
    assert config.init_from is not None
    trust = config.trust_remote_code
    tokenizer, _ = load_tokenizer(config.init_from, trust_remote_code=trust)
    check_same_vocabulary(teacher.tokenizer, tokenizer, teacher.name, config.init_from)
    draft = load_model(config.init_from, device=teacher.device, dtype="float32", trust_remote_code=trust)
    if head(draft).shape[0] < head(teacher.model).shape[0]:
        raise ModelError(
            f"{config.init_from!r} has {head(draft).shape[0]} tokens and the target {head(teacher.model).shape[0]}: "
            "a draft must be able to read whatever the target writes"
        )
    return draft


def _grown(draft: PreTrainedModel, target: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """The draft with these layers of the target behind its own.

    At first they add zero to the states (Chen, Goodfellow and Shlens 2016, "Net2Net"): the larger draft begins as good
    as the smaller one.
    """
    if draft.config.hidden_size != target.config.hidden_size or type(draft) is not type(target):
        raise ModelError("grow: the draft must be of the target's class and width to take the target's layers")
    before = draft.config.num_hidden_layers
    larger = _from_layers(target, (0,) * before + layers)
    weights = larger.state_dict() | draft.state_dict()
    prefix, _ = _layer_list(larger)
    added = re.compile(rf"{re.escape(prefix)}\.(\d+)\.{_WRITES}")
    for name, weight in weights.items():
        found = added.match(name)
        if found and int(found[1]) >= before:
            weight.zero_()
    larger.load_state_dict(weights)
    larger.eval()
    _check_same_states(draft, larger)
    return larger


@torch.no_grad()
def _check_same_states(draft: PreTrainedModel, larger: PreTrainedModel) -> None:
    ids = torch.arange(4, device=draft.device)[None]
    ours, theirs = hidden_states(draft, ids), hidden_states(larger, ids)
    if not torch.allclose(ours, theirs, atol=1e-4 * float(ours.abs().max())):
        raise ModelError(f"{type(draft).__name__} cannot grow: its layers write to the states in a way not known here")


def _from_layers(target: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """A draft of these layers of the target, numbered from 0, with all its other weights."""
    config = _with_layers(target.config, len(layers))
    prefix, count = _layer_list(target)
    if max(layers) >= count:
        raise ModelError(f"the target has layers 0 to {count - 1}; there is no layer {max(layers)}")
    draft = _instantiate(target, config)
    ours, theirs = draft.state_dict(), target.state_dict()
    own = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    taken = {name: theirs[own.sub(lambda m: f"{prefix}.{layers[int(m[1])]}.", name)] for name in ours}
    draft.load_state_dict(taken)
    return draft


def _layer_list(model: PreTrainedModel) -> tuple[str, int]:
    """(module name of the decoder layers, their number). Raises `ModelError` if they are not in a `ModuleList`."""
    count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, count
    raise ModelError(f"{type(model).__name__} keeps its layers in no list: start from an existing draft (--init-from)")


def _narrow(target: PreTrainedModel, layers: int, width: int) -> PreTrainedModel:
    """A draft of hidden size `width` with random layers and the target's embeddings, projected to `width`."""
    config = _with_layers(target.config, layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width % head_dim or width >= config.hidden_size:
        raise ModelError(f"width {width}: a multiple of the target's head size {head_dim} below {config.hidden_size}")
    config.intermediate_size = round(config.intermediate_size * width / config.hidden_size)
    config.hidden_size, config.num_attention_heads, config.tie_word_embeddings = width, width // head_dim, True
    kv = getattr(target.config, "num_key_value_heads", None)
    if kv:
        config.num_key_value_heads = max(n for n in range(1, kv + 1) if config.num_attention_heads % n == 0)
    draft = _instantiate(target, config)
    table = embeddings(target).detach().float()
    with torch.no_grad():  # project to the principal directions of the target's embeddings
        _, directions = torch.linalg.eigh(table.T @ table)
        embeddings(draft).copy_(table @ directions[:, -width:])
    return draft


def _with_layers(config: Any, layers: int) -> Any:
    """A copy of the configuration with `layers` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def _instantiate(target: PreTrainedModel, config: Any) -> PreTrainedModel:
    """A model of the target's class with random weights."""
    config.dtype = torch.float32
    kind: Any = type(target)
    draft: PreTrainedModel = kind(config).to(target.device, torch.float32)
    return draft


def embeddings(model: PreTrainedModel) -> torch.Tensor:
    """The input table [vocab, width]."""
    table: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return table


def head(model: PreTrainedModel) -> torch.Tensor:
    """The output matrix [vocab, width]."""
    matrix: torch.Tensor = model.get_output_embeddings().weight
    return matrix


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise `ModelError` unless logits are states times head: `head_loss` supports no scale, cap or bias."""
    ids = torch.arange(4, device=model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    ours = (hidden_states(model, ids) @ head(model).T).float()
    if logits.shape != ours.shape or (logits - ours).abs().max() > 0.02 * logits.abs().max():
        raise ModelError(f"{type(model).__name__} does more to its logits than multiply: it is not supported here")


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The last states [batch, length, width] of right-padded ids [batch, length].

    Needs no mask: a causal model's states do not depend on tokens to their right.
    """
    states: torch.Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def export(model: PreTrainedModel, target: str, directory: Path, about: dict[str, Any]) -> None:
    """Write the draft in bfloat16, with the target's tokenizer. A failed write leaves no partial directory.

    Args:
        about: written to distillation.json in the directory.

    Raises `DistillError`.
    """
    building, old = (directory.with_name(f".{directory.name}.{state}") for state in ("building", "old"))
    try:
        for leftover in (building, old):
            shutil.rmtree(leftover, ignore_errors=True)
        written: Any = copy.deepcopy(model)
        written.to(torch.bfloat16).save_pretrained(building)
        _save_tokenizer(target, building)
        (building / "distillation.json").write_text(json.dumps(about, indent=1))
        if directory.exists():
            os.replace(directory, old)
        os.replace(building, directory)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # safetensors and tokenizers raise errors of their own on a full disk
        shutil.rmtree(building, ignore_errors=True)
        raise DistillError(
            f"cannot write the draft to {directory}: {error}. The last checkpoint is whole: make room, and --resume"
        ) from error


def _save_tokenizer(target: str, directory: Path) -> None:
    from transformers import GenerationConfig

    path = resolve_checkpoint(target)
    read_tokenizer(path).save_pretrained(directory)
    if (Path(path) / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(path).save_pretrained(directory)
