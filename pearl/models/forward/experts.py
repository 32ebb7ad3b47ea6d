"""The MLP of a layer that has experts: a router sends each token through a few of many, on a CPU.

A row's bits do not depend on its company: the products of an expert do not depend on the number of rows, and a row adds
what its experts give in the order of their probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from pearl.models.forward.matrices import Matrix, gated


class Experts:
    """Takes the weights of `block`, a sparse MLP of transformers, away.

    Attributes:
        least_rows: from which on the products of an expert do not depend on the number of rows; see `probe`.
    """

    def __init__(self, block: Any, config: Mapping[str, Any], one: Callable[..., Matrix]) -> None:
        self._top = int(config["num_experts_per_tok"])
        self._sums_to_one = bool(config.get("norm_topk_prob", True))  # Mixtral's always do
        both, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()

        def product(weight: torch.Tensor) -> Matrix:
            return one(SimpleNamespace(weight=weight, bias=None))

        self.router = product(block.gate.weight.detach())
        self.each = [(product(first), product(second)) for first, second in zip(both, down, strict=True)]
        self.inner = down.shape[2]
        del block.experts.gate_up_proj, block.experts.down_proj
        self.least_rows = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, hidden]"""
        weights, chosen = self.router(x, None).softmax(-1, dtype=torch.float32).topk(self._top)  # [n, top]
        if self._sums_to_one:
            total = weights[:, 0].clone()
            for column in weights.T[1:]:
                total += column
            weights = weights / total[:, None]
        weights = weights.to(x.dtype)
        found = x.new_zeros(len(x), self._top, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            found[rows, places] = self._through(expert, x[rows])
        mixed = found[:, 0] * weights[:, :1]
        for place in range(1, self._top):
            mixed += found[:, place] * weights[:, place : place + 1]
        return mixed

    def _through(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        count, (both, down) = len(x), self.each[expert]
        if count < self.least_rows:
            x = torch.cat([x, x[:1].expand(self.least_rows - count, -1)])
        return down(gated(both(x, None)), None)[:count]
