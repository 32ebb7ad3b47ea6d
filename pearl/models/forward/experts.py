"""The MLP of a layer with experts: a router sends each token through a few of many experts.

A row's bits do not depend on the other rows: an expert's products do not depend on the number of rows,
and the outputs of a row's experts are added in the order of their probabilities.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from pearl.models.forward.linear_layers import Matrix, gated
from pearl.models.gpu.recordings import FED

# Rows of every product of an expert on a GPU, where the kernel depends on the number of rows.
_PIECE = 64
_SERIAL = 32768  # torch splits operations on at least this many elements between threads


class Experts:
    """Computes a sparse MLP. It takes the weights away from `block`, the module of transformers.

    Args:
        lay_out: joins the weights of linear layers into one matrix; see `linear_layers.matrix`.
        kernels: whether our GPU kernels compute forwards of 16 rows (`recordings.FED`). All other
            forwards are computed expert by expert.

    Attributes:
        each: (gate_up, down) of each expert.
    """

    def __init__(
        self,
        block: Any,
        config: Mapping[str, Any],
        lay_out: Callable[..., Matrix],
        kernels: bool,
    ) -> None:
        self._top = int(config["num_experts_per_tok"])
        # The weights of Mixtral's and gpt-oss's experts always sum to one.
        self._sums_to_one = bool(config.get("norm_topk_prob", True))
        router = getattr(block, "gate", None) or block.router
        self._limits: tuple[float, float] | None = None
        self._gate: Callable[[torch.Tensor], torch.Tensor] = gated
        if config.get("swiglu_limit") is not None:  # gpt-oss
            alpha = float(config.get("swiglu_alpha", 1.702))
            limit = float(config["swiglu_limit"])
            self._limits = (alpha, limit)
            self._gate = partial(_clamped, alpha, limit)
        # Neither the router nor its rows are rounded: it is small, and it chooses the experts.
        router_linear = _linear(router.weight, getattr(router, "bias", None))
        self.router = lay_out(router_linear, rounding="", rounds_rows=False)
        self.each: list[tuple[Matrix, Matrix]] = []
        for gate_up, down in _linears(block.experts, self._limits is not None):
            self.each.append((lay_out(*gate_up), lay_out(down)))
        del block.experts
        self._piece = 0 if router.weight.device.type == "cpu" else _PIECE
        self.products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        if kernels:
            from pearl.models.gpu.expert_kernels import ExpertProducts

            products = ExpertProducts(self.each, self._limits)  # type: ignore[arg-type]
            self.products = products
            self.each = list(products.each)

    def __call__(
        self,
        x: torch.Tensor,
        is_fed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the outputs of each row's experts, weighted by their probabilities.

        The shape of x and of the result is [n, hidden].

        Args:
            is_fed: [n], false for padding rows. These take the experts of the first row.
        """
        probs = self.router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probs.topk(self._top)  # [n, top]
        if self._sums_to_one:
            total = weights[:, 0].clone()
            for column in weights.T[1:]:
                total += column
            weights = weights / total[:, None]
        weights = weights.to(x.dtype)
        if is_fed is not None:
            chosen = torch.where(is_fed[:, None], chosen, chosen[:1])
        if self.products is not None and len(x) == FED:
            outputs = self.products(x, chosen)
        else:
            outputs = x.new_zeros(len(x), self._top, x.shape[1])
            for expert in chosen.unique().tolist():
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                parts = x[rows].split(self._piece or len(x))
                outputs[rows, places] = torch.cat([self._through(expert, part) for part in parts])
        mixed = outputs[:, 0] * weights[:, :1]
        for place in range(1, self._top):
            mixed += outputs[:, place] * weights[:, place : place + 1]
        return mixed

    def _through(
        self,
        expert: int,
        x: torch.Tensor,
    ) -> torch.Tensor:
        count = len(x)
        gate_up, down = self.each[expert]
        if count < self._piece:
            x = torch.cat([x, x[:1].expand(self._piece - count, -1)])
        return down(self._gate(gate_up(x)))[:count]


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return SimpleNamespace(weight=weight, bias=bias)


def _linears(experts: Any, alternates: bool) -> Iterator[tuple[list[Any], Any]]:
    """Yield the linear layers of each expert: ([gate, up] or [gate_up], down).

    Args:
        alternates: whether the matrices are stored transposed, with alternating rows of gate and
            up.
    """
    if not hasattr(experts, "gate_up_proj"):  # files that were read directly
        for expert in experts:
            yield [expert.gate_proj, expert.up_proj], expert.down_proj
        return
    gate_ups = experts.gate_up_proj.detach()
    downs = experts.down_proj.detach()
    no_biases = [None] * len(downs)
    gate_up_biases = getattr(experts, "gate_up_proj_bias", no_biases)
    down_biases = getattr(experts, "down_proj_bias", no_biases)
    rows = [slice(None)]
    if alternates:
        gate_ups = gate_ups.mT
        downs = downs.mT
        rows = [slice(0, None, 2), slice(1, None, 2)]
    for gate_up, down, bias, down_bias in zip(
        gate_ups, downs, gate_up_biases, down_biases, strict=True
    ):
        parts = []
        for part in rows:
            parts.append(_linear(gate_up[part], None if bias is None else bias[part]))
        yield parts, _linear(down.contiguous(), down_bias)


def _clamped(
    alpha: float,
    limit: float,
    gate_up: torch.Tensor,
) -> torch.Tensor:
    """Return gpt-oss's activation: [n, 2 * inner] -> [n, inner]. Overwrites its argument.

    It is (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit).

    Torch must not split a row between threads: it would compute the elements next to the cut with the
    scalar exponential, whose bits differ from the vector one's. So the rows are computed in small pieces.
    """
    outputs = []
    for piece in gate_up.split(max(1, _SERIAL // gate_up.shape[1])):
        gate, up = piece.chunk(2, -1)
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
        # With the strides of `gate`, so that no vector extends over the end of a row.
        shares = torch.empty_like(piece).chunk(2, -1)[0]
        torch.mul(gate, alpha, out=shares).sigmoid_()
        outputs.append((up + 1).mul_(gate * shares))
    return torch.cat(outputs)
