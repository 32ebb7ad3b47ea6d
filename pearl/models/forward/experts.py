"""The MLP of a layer that has experts: a router sends each token through a few of many.

A row's bits do not depend on its company: the products of an expert do not depend on the number of rows, and a row adds
what its experts give in the order of their probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pearl.models.forward.linear_layers import Matrix, gated
from pearl.models.gpu.recordings import FED

if TYPE_CHECKING:
    from pearl.models.gpu.expert_kernels import ExpertProducts

_PIECE = (
    64  # rows of an expert's products on a GPU, where other kernels serve other numbers of rows
)
_SERIAL = 32768  # elements: torch splits operations of at least as many between threads


def computes_experts(device: torch.device) -> bool:
    """Whether experts can be computed there: on a GPU recorded forwards need our kernels."""
    return device.type == "cpu" or find_spec("triton") is not None


class Experts:
    """Takes the weights of `block`, a sparse MLP of transformers, away.

    Args:
        kernels: whether forwards of `FED` rows are computed by our kernels.
    """

    def __init__(
        self, block: Any, config: Mapping[str, Any], one: Callable[..., Matrix], kernels: bool
    ) -> None:
        self._top = int(config["num_experts_per_tok"])
        self._sums_to_one = bool(
            config.get("norm_topk_prob", True)
        )  # those of Mixtral and gpt-oss always do
        experts, router = block.experts, getattr(block, "gate", None) or block.router
        self._limits: tuple[float, float] | None = None
        if config.get("swiglu_limit") is not None:  # gpt-oss's
            self._limits = (
                float(config.get("swiglu_alpha", 1.702)),
                float(config.get("swiglu_limit", 7.0)),
            )
        # Never rounded: it is small, and chooses.
        self.router = one(_linear(router.weight, getattr(router, "bias", None)), rounding="")
        self.each = [
            (one(*both), one(down)) for both, down in _linears(experts, self._limits is not None)
        ]
        self._gate = gated if self._limits is None else partial(_clamped, *self._limits)
        del block.experts
        self._piece = 0 if router.weight.device.type == "cpu" else _PIECE
        self._products: ExpertProducts | None = None
        if kernels:
            from pearl.models.gpu.expert_kernels import ExpertProducts

            self._products = ExpertProducts(self.each, self._limits)
            self.each = self._products.each

    def __call__(self, x: torch.Tensor, is_fed: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] -> [n, hidden]

        Args:
            is_fed: [n]; other rows are padding, and need no experts of their own.
        """
        weights, chosen = (
            self.router(x, None).softmax(-1, dtype=torch.float32).topk(self._top)
        )  # [n, top]
        if self._sums_to_one:
            total = weights[:, 0].clone()
            for column in weights.T[1:]:
                total += column
            weights = weights / total[:, None]
        weights = weights.to(x.dtype)
        if is_fed is not None:
            chosen = torch.where(is_fed[:, None], chosen, chosen[:1])
        if self._products is not None and len(x) == FED:
            found = self._products(x, chosen)
        else:
            found = x.new_zeros(len(x), self._top, x.shape[1])
            for expert in chosen.unique().tolist():
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                parts = x[rows].split(self._piece or len(x))
                found[rows, places] = torch.cat([self._through(expert, part) for part in parts])
        mixed = found[:, 0] * weights[:, :1]
        for place in range(1, self._top):
            mixed += found[:, place] * weights[:, place : place + 1]
        return mixed

    def _through(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        count, (both, down) = len(x), self.each[expert]
        if count < self._piece:
            x = torch.cat([x, x[:1].expand(self._piece - count, -1)])
        return down(self._gate(both(x, None)), None)[:count]


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return SimpleNamespace(weight=weight, bias=bias)


def _linears(experts: Any, alternates: bool) -> Iterator[tuple[list[Any], Any]]:
    """Gate and up, perhaps as one, and down of each expert. alternates: transposed, with gate and up in turn."""
    if not hasattr(experts, "gate_up_proj"):  # of files read directly
        yield from (([each.gate_proj, each.up_proj], each.down_proj) for each in experts)
        return
    both, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    biases = [
        getattr(experts, f"{name}_bias", [None] * len(down))
        for name in ("gate_up_proj", "down_proj")
    ]
    if alternates:
        both, down = both.mT, down.mT
    rows = [slice(0, None, 2), slice(1, None, 2)] if alternates else [slice(None)]
    for first, second, bias, other in zip(both, down, *biases, strict=True):
        parts = [_linear(first[some], None if bias is None else bias[some]) for some in rows]
        yield parts, _linear(second.contiguous(), other)


def _clamped(alpha: float, limit: float, gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation: [n, 2 * inner] -> [n, inner]. Overwrites its argument.

    In pieces that torch does not split between threads: elements next to a cut within a row would use the scalar
    exponential, whose bits are not the vector one's.
    """
    found = []
    for some in gate_up.split(max(1, _SERIAL // gate_up.shape[1])):
        gate, up = some.chunk(2, -1)
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
        shares = torch.empty_like(some).chunk(2, -1)[
            0
        ]  # rows apart, as in `gate`: each ends a vector
        torch.mul(gate, alpha, out=shares).sigmoid_()
        found.append((up + 1).mul_(gate * shares))
    return torch.cat(found)
