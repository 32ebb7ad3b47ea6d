"""The target as a teacher: its model and tokenizer, and how it encodes prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from pearl.cache import Progress
from pearl.errors import ModelError
from pearl.lab.distill.config import DistillConfig
from pearl.models.checkpoints.loading import load_model
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.text.stream import Tokenizer

_MARK = "\u2042"  # placeholder for a user's message, to split the chat template at


@dataclass(frozen=True)
class Teacher:
    """A loaded target. `name`: as given by the user; `eos`: ids that end an answer."""

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    eos: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def turn_start(self) -> str:
        """The chat template's text before the first user message; empty without a chat template."""
        text = self.tokenizer.chat_text([{"role": "user", "content": _MARK}])
        return "" if text is None else text.partition(_MARK)[0]

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, inside the chat template if there is one; an answer follows them."""
        ids = self.tokenizer.apply_chat([{"role": "user", "content": text}])
        return self.tokenizer.encode(text) if ids is None else ids

    def encode_start(self, opening: str) -> list[int]:
        """The tokens of an unfinished user's turn that begins with `opening`."""
        if start := self.turn_start:
            return self.tokenizer.encode(start + opening, special=False)
        return self.tokenizer.encode(opening)


def load_teacher(config: DistillConfig, progress: Progress) -> Teacher:
    """Load model and tokenizer. Raises `ModelError`, also for a model without an end-of-sequence token."""
    name, trust = config.target, config.trust_remote_code
    tokenizer, defaults = load_tokenizer(name, trust_remote_code=trust, progress=progress)
    if not defaults.eos:
        raise ModelError(f"Model {name!r} names no end-of-sequence token: its answers would never end.")
    device = choose_device(config.device)
    model = load_model(name, device=device, dtype=config.dtype, trust_remote_code=trust, progress=progress)
    return Teacher(name, model.eval().requires_grad_(False), tokenizer, defaults.eos)


def choose_device(name: str) -> torch.device:
    """Parse a device; "auto": the first GPU if there is one, otherwise the CPU. Raises `ModelError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"bad device {name!r}: use auto, cpu or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"there is no {name} here: use auto or cpu")
    return device
