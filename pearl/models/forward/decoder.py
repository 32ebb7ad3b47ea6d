"""Weights and configuration of a model, in the form that our own forward takes.

This module must not know files.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class Decoder(nn.Module):
    """Holds a model's weights in modules, under the names that transformers gives them. It computes nothing."""

    model: Any
    lm_head: Any

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config: Any = config

    def place(
        self,
        name: str,
        module: nn.Module | nn.Parameter,
    ) -> None:
        """Add `module` under a dotted name such as "model.layers.0.mlp"; missing parents are created."""
        *path, last = name.split(".")
        parent: nn.Module = self
        for part in path:
            if not hasattr(parent, part):
                is_list = part in ("layers", "experts")
                parent.add_module(part, nn.ModuleList() if is_list else nn.Module())
            parent = getattr(parent, part)
        setattr(parent, last, module)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.embed_tokens.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.embed_tokens.weight.device
        return device
