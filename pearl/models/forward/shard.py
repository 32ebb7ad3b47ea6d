"""One model shared by several ranks: which weights each rank keeps, and what ranks exchange in a forward.

Tensor parallelism as in "Megatron-LM" (Shoeybi et al., 2019, section 3): a rank has some of the attention heads and
some of the MLP's inner columns, so that each block ends with one sum over the ranks; it has some rows of the head.
Every rank has the embedding and the norms.  Must not know processes: a `Group` communicates.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import Linear, Parameter
from torch.nn.functional import pad

from pearl.errors import ModelError
from pearl.models.families import MATRICES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.checkpoints.direct import Decoder


class Group(Protocol):
    """The ranks that share a model, seen from one of them. All make the same calls in the same order."""

    rank: int
    size: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, the same bits on every rank; may be `part` itself, overwritten."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors [rows, columns] side by side, in their order: [rows, size * columns]."""
        ...


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part


ALONE: Group = Alone()


def cut(model: PreTrainedModel | Decoder, group: Group, device: torch.device) -> None:
    """Reduce a whole `model` of our own forward to this rank's part, and move that to `device`.

    Its config then has the head counts of the part.  Where there are more ranks than key-value heads, each such head is
    kept by all ranks whose queries use it.  Raises `ModelError` where the ranks would have unequal parts.
    """
    config, rank, size = model.config, group.rank, group.size
    heads, kv_heads, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    _check(size, heads, kv_heads, inner)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if any(hasattr(layer.mlp, "experts") for layer in model.model.layers):
        raise ModelError("Ranks cannot share a model with experts. Leave target_tp, draft_tp at 1.")
    if len(getattr(model.model.layers[0].self_attn, "q_norm", SimpleNamespace(weight=[0] * width)).weight) != width:
        raise ModelError("Ranks cannot share this model: its norms run over all heads. Leave target_tp, draft_tp at 1.")
    parts = {
        "queries": _share(heads * width, rank, size),
        "keys": _share(kv_heads * width, *((rank, size) if size <= kv_heads else (rank * kv_heads // size, kv_heads))),
        "inner": _share(inner, rank, size),
    }
    for layer in model.model.layers:
        for name, (outputs, inputs) in MATRICES.items():
            linear = layer.get_submodule(name)
            if outputs in parts:
                _keep_rows(linear, parts[outputs], device)
            else:
                _keep_columns(linear, parts[inputs], rank, device)
    _keep_rows(model.lm_head, _share(-(-config.vocab_size // size) * size, rank, size), device)
    config.num_attention_heads, config.num_key_value_heads = heads // size, max(1, kv_heads // size)
    config.head_dim = width  # it is no longer hidden_size / heads
    model.to(device)  # type: ignore[arg-type]


def _check(size: int, heads: int, kv_heads: int, inner: int) -> None:
    fitting = [
        n for n in range(1, heads + 1) if not heads % n and not inner % n and (not kv_heads % n or not n % kv_heads)
    ]
    if size not in fitting:
        raise ModelError(
            f"{size} ranks cannot share {heads} attention heads, {kv_heads} key-value heads and {inner} inner columns "
            f"equally. Choose {' or '.join(map(str, fitting))} (target_tp, draft_tp)."
        )


def _share(count: int, rank: int, size: int) -> slice:
    each = count // size
    return slice(rank * each, (rank + 1) * each)


def _keep_rows(linear: Linear, rows: slice, device: torch.device) -> None:
    """Keep these output rows. Rows past the end (of a vocabulary that the ranks do not divide) are zeros."""
    part, count = linear.weight[rows], rows.stop - rows.start
    _replace(linear, part if len(part) == count else pad(part, (0, 0, 0, count - len(part))), device)
    if linear.bias is not None:
        linear.bias = Parameter(linear.bias[rows].to(device, copy=True), requires_grad=False)


def _keep_columns(linear: Linear, columns: slice, rank: int, device: torch.device) -> None:
    """Keep these input columns. The first rank keeps the bias: the sum over ranks must contain it once."""
    _replace(linear, linear.weight[:, columns], device)
    if rank:
        linear.bias = None  # type: ignore[assignment]


def _replace(linear: Linear, part: torch.Tensor, device: torch.device) -> None:
    """Set the weight to a copy of `part`, so that the whole is freed, or never read where its file is mapped."""
    linear.weight = Parameter(part.detach().to(device, copy=True).contiguous(), requires_grad=False)
