"""What a model on this machine's disk is, and how it would run here: from its files, without its weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pearl.cache import Progress
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.hub import in_cache
from pearl.models.checkpoints.loading import DEFAULT_CONTEXT, context_of, language_model_of
from pearl.models.checkpoints.memory import needed
from pearl.models.checkpoints.stored import kind_of, stored
from pearl.models.families import OWN_FORWARD, QUANTISED
from pearl.models.forward.runner import has_own_forward
from pearl.text.reasoning import tags_of
from pearl.text.tokenizer import load
from pearl.text.tools import FORMATS, format_of, knows_tools


def describe(spec: str, progress: Progress) -> dict[str, Any]:
    """A model as `stored` or `resolve_checkpoint` names it, without the network; None: unknown.

    Raises `ModelError` for a model that is not on this machine.
    """
    found = next((each.path for each in stored() if each.name == spec), None)
    if found is None and not (spec.startswith("embedded") or Path(spec).expanduser().exists() or in_cache(spec)):
        raise ModelError(f"{spec!r} is not on this machine: get it with `pearl pull {spec}`.")
    path = Path(found or resolve_checkpoint(spec, progress))
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json. Of a repository of GGUF files name one: {spec}:FILE.")
    need = needed(path, "auto", None, DEFAULT_CONTEXT, keeps_bits=True)
    about = {"model": spec, "path": str(path), "weights": kind_of(path)[0] or None}
    return about | _model(path) | {"memory": str(need) if need else None} | _chat(path)


def _model(path: Path) -> dict[str, Any]:
    """From a model on the meta device, where it has no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = language_model_of(path) or AutoConfig.from_pretrained(path, trust_remote_code=False)
        method = (vars(config).pop("quantization_config", None) or {}).get("quant_method", "")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        context = context_of(str(path), model, None)
    except Exception as error:  # whatever transformers raises
        return {"architecture": None, "forward": None, "why": " ".join(str(error).split())[:300]}
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = OWN_FORWARD.get(type(model).__name__)
    is_read = not method or (method in QUANTISED and family and family.forward.reads_directly)
    why = "our own forward does not compute its family" if family is None else ""
    why = why or ("" if has_own_forward(model, here) else "our own forward does not compute its layers or sizes here")
    why = why or ("" if is_read else f"our own forward does not read its weights, quantised by {method}")
    return {
        "architecture": type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "context": context,
        "vocabulary": config.vocab_size,
        "forward": "transformers" if why else "own",
        "why": why or None,
    }


def _chat(path: Path) -> dict[str, Any]:
    with suppress(Exception):  # files and their readers raise anything
        tokenizer, defaults = load(path, trust_remote_code=False)
        known = next(name for name, each in FORMATS.items() if each is format_of(tokenizer))
        template = tokenizer.tool_template or tokenizer.chat_template
        return {
            "chat_template": bool(tokenizer.chat_template),
            "tools": known if template and knows_tools(tokenizer) else None,
            "reasoning": tags_of(tokenizer.chat_template) is not None,
            "sampling": str(defaults),
        }
    return {"chat_template": None, "tools": None, "reasoning": None, "sampling": None}
