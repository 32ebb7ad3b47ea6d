"""The pair of a run: the target, which teaches, and the draft to train.

A draft starts from an existing draft, or from some of the target's layers with the target's
embeddings. Embeddings and output head of the draft are not trained if they have the shape of the
target's.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pearl.cache import Progress
from pearl.config import EngineConfig, ModelConfig
from pearl.errors import DistillError, ModelError
from pearl.lab.distill.config import DistillConfig
from pearl.models.checkpoints.loading import load_model
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.text.stream import Tokenizer
from pearl.text.tokenizer import check_same_vocabulary
from pearl.worker.placement import place

_MARK = "\u2042"  # stands for a user's message, to find it in the text of a chat template
# Settings of config.json that have an entry for each layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


@dataclass(frozen=True)
class Teacher:
    """A loaded target.

    Attributes:
        name: the target as the user named it.
        eos: ids that end an answer.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    eos: tuple[int, ...]

    @cached_property
    def turn_start(self) -> str:
        """The chat template's text before the first user message; empty without a chat template."""
        text = self.tokenizer.chat_text([{"role": "user", "content": _MARK}])
        return "" if text is None else text.partition(_MARK)[0]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, in the chat template if there is one. The answer follows these tokens."""
        ids = self.tokenizer.apply_chat([{"role": "user", "content": text}])
        return self.tokenizer.encode(text) if ids is None else ids

    def encode_start(self, opening: str) -> list[int]:
        """Return the tokens of a user's turn that begins with `opening` and is not finished."""
        if self.turn_start:
            return self.tokenizer.encode(self.turn_start + opening, special=False)
        return self.tokenizer.encode(opening)


def load_teacher(config: DistillConfig, progress: Progress) -> Teacher:
    """Load the target and its tokenizer.

    Raises `ModelError` if the target cannot be loaded, if it has no end-of-sequence token, or if
    `check_head` refuses it.
    """
    name = config.target
    trust = config.trust_remote_code
    tokenizer, defaults = load_tokenizer(name, trust_remote_code=trust, progress=progress)
    if not defaults.eos:
        raise ModelError(
            f"Model {name!r} names no end-of-sequence token: its answers would never end."
        )
    device = place(EngineConfig(target=name, draft="none", target_device=config.device), "target")
    settings = ModelConfig(name, dtype=config.dtype, trust_remote_code=trust)
    model = load_model(settings, device, progress).eval().requires_grad_(False)
    check_head(model)
    return Teacher(name, model, tokenizer, defaults.eos)


# ---- the draft ----


def new_draft(config: DistillConfig, teacher: Teacher) -> PreTrainedModel:
    """Return the draft before training, in float32 on the target's device.

    Raises `ModelError` if the draft does not fit the target, or if a model is of an unsupported
    kind.
    """
    torch.manual_seed(config.seed)
    if config.init_from is None:
        draft = _from_layers(teacher.model, config.layers)
    else:
        draft = _existing(config.init_from, config.trust_remote_code, teacher)
    draft.eval()  # no dropout: a few passes over the data hardly overfit
    if head(draft).shape == head(teacher.model).shape:
        # Embeddings and head of the target's shape are not trained.
        embeddings(draft).requires_grad_(False)
        head(draft).requires_grad_(False)
    check_head(draft)
    return draft


def _existing(name: str, trust: bool, teacher: Teacher) -> PreTrainedModel:
    tokenizer, _ = load_tokenizer(name, trust_remote_code=trust)
    check_same_vocabulary(teacher.tokenizer, tokenizer, teacher.name, name)
    settings = ModelConfig(name, dtype="float32", trust_remote_code=trust)
    draft = load_model(settings, teacher.model.device)
    draft_vocab = head(draft).shape[0]
    target_vocab = head(teacher.model).shape[0]
    if draft_vocab < target_vocab:
        raise ModelError(
            f"{name!r} has {draft_vocab} tokens and the target {target_vocab}: "
            "a draft must be able to read whatever the target writes"
        )
    return draft


def _from_layers(target: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """Make a draft from these layers of the target, numbered from 0, and from all other weights of the target."""
    prefix, count = _layer_list(target)
    if max(layers) >= count:
        raise ModelError(f"the target has layers 0 to {count - 1}; there is no layer {max(layers)}")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    config.dtype = torch.float32
    for name in _PER_LAYER:
        settings = getattr(config, name, None)
        if settings:
            setattr(config, name, [settings[layer] for layer in layers])
    kind: Any = type(target)
    draft: PreTrainedModel = kind(config).to(target.device, torch.float32)
    target_weights = target.state_dict()
    layer_name = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    weights = {}
    for name in draft.state_dict():
        source = layer_name.sub(lambda match: f"{prefix}.{layers[int(match[1])]}.", name)
        weights[name] = target_weights[source]
    draft.load_state_dict(weights)
    return draft


def _layer_list(model: PreTrainedModel) -> tuple[str, int]:
    """Return (module name of the list of decoder layers, number of layers).

    Raises `ModelError` if no `ModuleList` of the model has as many items as there are layers.
    """
    count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, count
    raise ModelError(
        f"{type(model).__name__} keeps its layers in no list: start from an existing draft (--init-from)"
    )


def decoder_layers(model: PreTrainedModel) -> Any:
    """Return the model's list of decoder layers."""
    name, _ = _layer_list(model)
    return model.get_submodule(name)


def embeddings(model: PreTrainedModel) -> torch.Tensor:
    """Return the input embeddings [vocab, width]."""
    table: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return table


def head(model: PreTrainedModel) -> torch.Tensor:
    """Return the matrix of the output head [vocab, width]."""
    matrix: torch.Tensor = model.get_output_embeddings().weight
    return matrix


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise `ModelError` unless the model's logits are states @ head.T.

    `head_loss` computes logits in this way, without the scale, cap or bias that some models have.
    """
    ids = torch.arange(4, device=model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    product = (hidden_states(model, ids) @ head(model).T).float()
    if logits.shape != product.shape or (logits - product).abs().max() > 0.02 * logits.abs().max():
        raise ModelError(
            f"{type(model).__name__} does more to its logits than multiply: it is not supported here"
        )


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states [batch, length, width] of right-padded ids [batch, length].

    No mask is needed: the states of a causal model do not depend on later tokens.
    """
    states: torch.Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yield a new directory to write into, which replaces `directory` at the end of the block.

    If the block fails, `directory` stays as it was, and `DistillError` is raised.
    """
    building = directory.with_name(f".{directory.name}.building")
    old = directory.with_name(f".{directory.name}.old")
    try:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        building.mkdir()
        yield building
        if directory.exists():
            os.replace(directory, old)
        os.replace(building, directory)
        shutil.rmtree(old, ignore_errors=True)
    except (
        Exception
    ) as error:  # safetensors and tokenizers have errors of their own for a full disk
        shutil.rmtree(building, ignore_errors=True)
        raise DistillError(
            f"cannot write {directory}: {error}. The last checkpoint is whole: make room, and --resume"
        ) from error
