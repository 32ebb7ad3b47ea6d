"""Describes a model on this machine's disk, and how it would run here, without its weights."""

import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pearl.cache import Progress
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import config_in, resolve_checkpoint
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.hub import in_cache
from pearl.models.checkpoints.loading import DEFAULT_CONTEXT, context_of, language_model_of
from pearl.models.checkpoints.memory import needed
from pearl.models.checkpoints.stored import kind_of, stored
from pearl.models.cpu import native
from pearl.models.families import (
    OWN_FORWARD,
    Config,
    not_computed,
    reads_weights,
    weight_shapes,
)
from pearl.models.heads import kinds as heads
from pearl.models.own_forward import has_own_forward
from pearl.text.reasoning import tags_of
from pearl.text.tokenizer import load
from pearl.text.tools import FORMATS, format_of, knows_tools

_NOT_HERE = "our own forward does not compute its layers or sizes here"


def describe(spec: str, progress: Progress) -> dict[str, Any]:
    """Describe a model without using the network. A value is None if it is unknown.

    Raises `ModelError` for a model that is not on this machine.

    Args:
        spec: the name of a model on disk, as `stored.stored` lists it, or any name that
            `resolve_checkpoint` takes.
    """
    path = _path(spec, progress)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json. Of a repository of GGUF files name one: {spec}:FILE."
        )
    config = config_in(path)
    is_head = heads.describes_head(config)
    on_gpu = _here().type == "cuda"
    need = needed(path, "auto", None, DEFAULT_CONTEXT, keeps_bits=True, on_gpu=on_gpu)
    description = {
        "model": spec,
        "path": str(path),
        "weights": kind_of(path).weights or None,
    }
    try:
        if is_head:
            description |= of_head(config)
        else:
            description |= of_model(path) if table_in(path) is None else of_gguf(path)
    except Exception as error:  # transformers raises anything
        why = " ".join(str(error).split())[:300]
        description |= {"architecture": None, "forward": None, "why": why}
    description["memory"] = str(need) if need else None
    if is_head:
        return description
    return description | _chat(path)


def _path(spec: str, progress: Progress) -> Path:
    """Return the directory of a model on this machine. Raises `ModelError` for a model that is not here."""
    path = Path(spec).expanduser()
    if not path.is_file():  # to look through the caches takes a quarter of a second
        for model in stored():
            if model.name == spec:
                return Path(model.path)
    is_here = spec.startswith("embedded") or path.exists()
    if not (is_here or in_cache(spec)):
        raise ModelError(f"{spec!r} is not on this machine: get it with `pearl pull {spec}`.")
    return resolve_checkpoint(spec, progress)


def of_gguf(path: Path) -> dict[str, Any]:
    """Describe a GGUF file.

    The parameters are counted without building a model: the family and config.json determine the
    shapes of all weights.
    """
    config = config_in(path)
    architecture = config["architectures"][0]
    forward = OWN_FORWARD[architecture].forward
    settings = SimpleNamespace(**config)
    settings.get_text_config = lambda decoder=True: settings
    here = _here()
    is_ours = native.takes_model(here, config) and not not_computed(architecture, config)
    return _facts(
        architecture,
        parameters=sum(math.prod(shape) for shape in weight_shapes(forward, config).values()),
        context=context_of(str(path), SimpleNamespace(config=settings), None),  # type: ignore[arg-type]
        vocabulary=config["vocab_size"],
        why="" if is_ours else _NOT_HERE,
    )


def of_head(config: Config) -> dict[str, Any]:
    """Describe a drafting head. Raises `ValueError` for a kind of head that is not read."""
    layers = heads.kind_of(config).target_layers(config)
    verifier = config.get("speculators_config", {}).get("verifier", {})
    places = "three of its layers"
    if layers is not None:
        places = f"layers {', '.join(map(str, layers))}"
    return {
        "architecture": heads.title_of(config),
        "target": verifier.get("name_or_path"),
        "reads": f"the target's hidden states before {places}",
        "block": config.get("block_size"),
        "vocabulary": config.get("draft_vocab_size"),
        "forward": "own",
        "why": None,
    }


def _facts(
    architecture: str, parameters: int, context: int, vocabulary: int, why: str
) -> dict[str, Any]:
    """Return the part of a description that the configuration of a model determines.

    Args:
        why: the reason why the model runs through transformers; "" if our own forward computes it.
    """
    return {
        "architecture": architecture,
        "parameters": parameters,
        "context": context,
        "vocabulary": vocabulary,
        "forward": "transformers" if why else "own",
        "why": why or None,
    }


def _here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def of_model(path: Path) -> dict[str, Any]:
    """Describe a model by building it on the meta device, where it has no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = language_model_of(path)
    if config is None:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return _facts(
        type(model).__name__,
        parameters=sum(weight.numel() for weight in model.parameters()),
        context=context_of(str(path), model, None),
        vocabulary=config.vocab_size,
        why=_why_general(model, config_in(path)),
    )


def _why_general(model: Any, stored_config: Config) -> str:
    """Return why a model runs through transformers; "" if our own forward computes it.

    Args:
        stored_config: the checkpoint's config.json.
    """
    if type(model).__name__ not in OWN_FORWARD:
        return "our own forward does not compute its family"
    if not has_own_forward(model, _here()):
        return _NOT_HERE
    if not reads_weights(stored_config):
        method = stored_config["quantization_config"].get("quant_method")
        return f"our own forward does not read its weights, quantised by {method}"
    return ""


def _chat(path: Path) -> dict[str, Any]:
    """Describe the chat template, tools and sampling defaults."""
    with suppress(Exception):  # files and their readers raise anything
        tokenizer, defaults = load(path, trust_remote_code=False, encodes=False)
        tool_format = format_of(tokenizer)
        names = [name for name, value in FORMATS.items() if value is tool_format]
        template = tokenizer.tool_template or tokenizer.chat_template
        return {
            "chat_template": bool(tokenizer.chat_template),
            "tools": names[0] if template and knows_tools(tokenizer) else None,
            "reasoning": tags_of(tokenizer.chat_template) is not None,
            "sampling": str(defaults),
        }
    return {"chat_template": None, "tools": None, "reasoning": None, "sampling": None}
