"""Decides which models our own forward computes on a device, and makes its runner there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pearl.models.cpu import native
from pearl.models.cpu.runner import CpuRunner
from pearl.models.families import forward_of
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.runner import KernelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.forward.decoder import Decoder


def has_own_forward(model: PreTrainedModel, device: torch.device | None = None) -> bool:
    """Return whether our own forward can compute this model on `device`; None: the model's device."""
    device = device or model.device
    settings = model.config.to_dict()
    if forward_of(type(model).__name__, settings) is None:
        return False
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    # Norms may have a wider dtype.
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    if len({(weight.device, weight.dtype) for weight in matrices}) != 1:
        return False
    for module in model.modules():
        # Subclasses are quantised layers, which cannot be laid out anew.
        if isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear:
            return False
    has_plain_mlps = all(_has_plain_mlp(layer.mlp) for layer in model.model.layers)
    return has_plain_mlps and native.takes_model(device, settings)


def _has_plain_mlp(mlp: torch.nn.Module) -> bool:
    if hasattr(mlp, "experts"):
        return isinstance(getattr(mlp.experts, "gate_up_proj", None), torch.nn.Parameter)
    return type(mlp.down_proj) is torch.nn.Linear


def own_runner(
    model: PreTrainedModel | Decoder,
    context: int,
    *,
    records: bool = True,
    **options: Any,
) -> ForwardRunner:
    """Return the runner of our own forward on the model's device.

    Raises `KernelsUnfit` if the device is a GPU, and our kernels cannot compute the model there.

    Args:
        records: see `KernelRunner`.
        options: see `ForwardRunner`.
    """
    if model.device.type == "cpu":
        return CpuRunner(model, context, **options)
    return KernelRunner(model, context, records=records, **options)
