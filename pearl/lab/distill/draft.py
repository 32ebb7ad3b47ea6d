"""The model that is trained, how it begins, and the ordinary Hugging Face directory that comes out.

Three ways to begin: an existing draft; some of the target's own layers on its own embeddings, which stay as they are;
or a narrower model of the target's class, whose tied embeddings are the target's, projected, and learn too.
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
from pearl.models.tokenizer import check_same_vocabulary, load_tokenizer


def new_draft(config: DistillConfig, teacher: Teacher) -> PreTrainedModel:
    """The draft in float32 on the target's device, as it is before the first step. Raises `ModelError`."""
    torch.manual_seed(config.seed)
    if config.init_from is not None:
        draft = _existing(config, teacher)
    elif config.width is not None:
        draft = _narrow(teacher.model, len(config.layers), config.width)
    else:
        draft = _first_layers(teacher.model, config.layers)
    if head(draft).shape == head(teacher.model).shape:  # the target's own table, or as wide: it is good as it is
        for table in (embeddings(draft), head(draft)):
            table.requires_grad_(False)
    check_head(teacher.model)
    check_head(draft)
    draft.train()
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


def _first_layers(target: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    config = _shrunk(target.config, len(layers))
    prefix, count = _stack(target)
    if max(layers) >= count:
        raise ModelError(f"the target has layers 0 to {count - 1}; there is no layer {max(layers)}")
    draft = _made(target, config)
    ours, theirs = draft.state_dict(), target.state_dict()
    own = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    taken = {name: theirs[own.sub(lambda m: f"{prefix}.{layers[int(m[1])]}.", name)] for name in ours}
    draft.load_state_dict(taken)
    return draft


def _stack(model: PreTrainedModel) -> tuple[str, int]:
    """The name of the model's list of layers, and their number."""
    count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, count
    raise ModelError(f"{type(model).__name__} keeps its layers in no list: start from an existing draft (--init-from)")


def _narrow(target: PreTrainedModel, layers: int, width: int) -> PreTrainedModel:
    config = _shrunk(target.config, layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width % head_dim or width >= config.hidden_size:
        raise ModelError(f"width {width}: a multiple of the target's head size {head_dim} below {config.hidden_size}")
    config.intermediate_size = round(config.intermediate_size * width / config.hidden_size)
    config.hidden_size, config.num_attention_heads, config.tie_word_embeddings = width, width // head_dim, True
    kv = getattr(target.config, "num_key_value_heads", None)
    if kv:
        config.num_key_value_heads = max(n for n in range(1, kv + 1) if config.num_attention_heads % n == 0)
    draft = _made(target, config)
    table = embeddings(target).detach().float()
    with torch.no_grad():  # the directions in which the target's embeddings differ most
        _, directions = torch.linalg.eigh(table.T @ table)
        embeddings(draft).copy_(table @ directions[:, -width:])
    return draft


def _shrunk(config: Any, layers: int) -> Any:
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def _made(target: PreTrainedModel, config: Any) -> PreTrainedModel:
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
    """Raises `ModelError` where logits are more than states times head: scaled, capped or with a bias."""
    ids = torch.arange(4, device=model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    ours = (hidden_states(model, ids) @ head(model).T).float()
    if logits.shape != ours.shape or (logits - ours).abs().max() > 0.02 * logits.abs().max():
        raise ModelError(f"{type(model).__name__} does more to its logits than multiply: it is not supported here")


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The last states [batch, length, width] of right-padded ids: what stands right of a token never reaches it."""
    states: torch.Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def export(model: PreTrainedModel, target: str, directory: Path, about: dict[str, Any]) -> None:
    """Writes the draft in bfloat16, with the target's tokenizer, as an ordinary directory; whole or not at all.

    `about` goes into distillation.json beside it. Raises `DistillError`.
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
    except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
        shutil.rmtree(building, ignore_errors=True)
        raise DistillError(
            f"cannot write the draft to {directory}: {error}. The last checkpoint is whole: make room, and --resume"
        ) from error


def _save_tokenizer(target: str, directory: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    checkpoint = resolve_checkpoint(target)
    gguf = {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {}
    AutoTokenizer.from_pretrained(checkpoint.path, **gguf).save_pretrained(directory)
    if (Path(checkpoint.path) / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(checkpoint.path).save_pretrained(directory)
