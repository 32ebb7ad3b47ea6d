"""Matrices in few bits, as a file has them or as we round them. Must not know files and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from pearl.errors import ModelError

GROUP = 32  # weights of "int4" that share a scale, and the least inputs of any kind
_OF_ALL_ROWS = ("order", "table")
_TOGETHER = 4096  # rows rounded at once: as float32 a large matrix would take a GPU's last memory


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """Weights [out, in]: (step - offset - zero) * scale + least, or table[step] * scale; scales are of groups.

    Attributes:
        steps: [out, in]: uint8; int8 if of 8 bits; or float8_e4m3fn.
        bits: 4, 5, 6 or 8.
        scales: [out, groups]: float16, bfloat16 or float32; or integers of 8 bits, times `of_scales` [out, in / 256];
            or float8_e4m3fn, divided by `divisors` [out, 1], float32.
        least: likewise with `of_least`, or None.
        zeros: [out, groups] uint8, int16 for steps of 8 bits; or None.
        order: inputs [in] in the order of the columns, or None: as they are.
        table: the numbers [16] that steps of 4 bits stand for, float32, or None: themselves.
    """

    steps: torch.Tensor
    bits: int
    scales: torch.Tensor
    of_scales: torch.Tensor | None = None
    least: torch.Tensor | None = None
    of_least: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    offset: float = 0.0
    order: torch.Tensor | None = None
    table: torch.Tensor | None = None
    divisors: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.steps.shape

    @property
    def device(self) -> torch.device:
        return self.steps.device

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def kind(self) -> tuple[object, ...]:
        """What matrices must have in common to be one."""
        given = (self.least, self.zeros, self.order)
        return (
            self.steps.dtype,
            self.bits,
            self.group,
            self.scales.dtype,
            self.offset,
            None if self.table is None else tuple(self.table.tolist()),
            *(each is None for each in given),
        )

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantisedMatrix:
        """The same with every tensor of rows changed: moved, or cut."""
        changed: dict[str, Any] = {name: change(of) for name, of in self.of_rows().items()}
        return replace(self, **changed)

    def of_rows(self) -> dict[str, torch.Tensor]:
        """The tensors that have something for each row, by their names."""
        found = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in _OF_ALL_ROWS
        }
        return {name: of for name, of in found.items() if isinstance(of, torch.Tensor)}

    def whole_scales(self) -> torch.Tensor:
        """[out, groups], float32."""
        scales = _whole(self.scales, self.of_scales)
        return scales if self.divisors is None else scales / self.divisors

    def whole_least(self) -> torch.Tensor | None:
        """What is added to each weight of a group, `zeros` included, but not `offset`: [out, groups], float32."""
        if self.zeros is not None:
            return -self.zeros.float() * self.whole_scales()
        return None if self.least is None else _whole(self.least, self.of_least)

    @property
    def fits_bytes(self) -> bool:
        """Whether its steps, or the numbers of its table, are whole numbers of 8 bits."""
        if self.steps.dtype == torch.float8_e4m3fn:
            return False
        return self.table is None or torch.equal(self.table, self.table.to(torch.int8).float())

    def in_bytes(self, group: int) -> QuantisedMatrix:
        """The same numbers as steps of 8 bits, with scales and least weights in float32 for each `group` of inputs."""
        repeats = self.group // group
        least = self.whole_least()
        both = (
            self.whole_scales(),
            torch.zeros_like(self.whole_scales()) if least is None else least,
        )
        scales, least = (each.repeat_interleave(repeats, 1) for each in both)
        if self.table is not None:
            steps = self.table.to(torch.int8)[self.steps.long()]
        elif self.steps.dtype == torch.int8:
            steps = self.steps
        else:
            steps = (self.steps.to(torch.int16) - int(self.offset)).to(torch.int8)
        return QuantisedMatrix(steps, 8, scales, least=least, order=self.order)

    def dequantised(self) -> torch.Tensor:
        """[out, in], float32: bit for bit the numbers that the formats define."""
        numbers = (
            self.steps.float().sub_(self.offset)
            if self.table is None
            else self.table[self.steps.long()]
        )
        steps = numbers.view(len(self.steps), -1, self.group)
        if self.zeros is not None:
            steps -= self.zeros.float()[..., None]
        found = steps.mul_(self.whole_scales()[..., None])
        if self.least is not None:
            found += _whole(self.least, self.of_least)[..., None]
        found = found.view(self.shape)
        return (
            found
            if self.order is None
            else torch.empty_like(found).index_copy_(1, self.order, found)
        )


Weights = torch.Tensor | QuantisedMatrix


def _whole(scales: torch.Tensor, upper: torch.Tensor | None) -> torch.Tensor:
    if upper is None:
        return scales.float()
    return scales.float() * upper.float().repeat_interleave(scales.shape[1] // upper.shape[1], 1)


def stacked(parts: Iterable[QuantisedMatrix], rows: int | None = None) -> QuantisedMatrix:
    """Matrices of one kind, and with the same order of inputs, as one.

    rows: of all of them, where `parts` makes one after the other, so that only one is in memory beside the result.
    """
    if rows is None:
        parts = list(parts)
        rows = sum(len(part.steps) for part in parts)
    whole, at = None, 0
    for part in parts:
        if len(part.steps) == rows:
            return part
        if whole is None:
            whole = part.changed(lambda of: of.new_empty(rows, *of.shape[1:]))
        for name, into in whole.of_rows().items():
            into[at : at + len(part.steps)] = getattr(part, name)
        at += len(part.steps)
    assert whole is not None and at == rows  # noqa: PT018
    return whole


def are_alike(one: Weights, other: Weights) -> bool:
    """Whether two matrices of the same inputs can be `stacked`, or concatenated."""
    if not isinstance(one, QuantisedMatrix) or not isinstance(other, QuantisedMatrix):
        return type(one) is type(other)
    same = one.order is None or other.order is None or torch.equal(one.order, other.order)
    return same and one.kind == other.kind


def rounded(weight: torch.Tensor, rounding: Literal["int8", "int4"]) -> QuantisedMatrix:
    """int8: each row in 255 steps; int4: each 32 weights of a row in 16, from their least to their largest.

    Scales have the dtype of `weight`, bfloat16 if that is float32. Raises `ModelError` for inputs of another number.
    """
    if weight.shape[1] % GROUP:
        raise ModelError(
            f"{rounding} weights need matrices whose inputs are a multiple of {GROUP}; one of this model takes "
            f"{weight.shape[1]}. Choose another dtype."
        )
    return stacked((_rounded(some, rounding) for some in weight.split(_TOGETHER)), len(weight))


def _rounded(weight: torch.Tensor, rounding: Literal["int8", "int4"]) -> QuantisedMatrix:
    dtype = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    if rounding == "int8":
        scales = (
            (weight.abs().amax(1, keepdim=True) / 127).to(dtype).clamp_min(torch.finfo(dtype).tiny)
        )
        steps = (weight.float() / scales.float()).round_().clamp_(-127, 127)
        return QuantisedMatrix(steps.to(torch.int8), 8, scales)
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    step = ((high - low) / 15).clamp_min(torch.finfo(dtype).tiny)
    middle = (low + 8 * step).to(dtype)
    scales = step.to(dtype)
    steps = (
        ((groups - middle.float()[..., None]) / scales.float()[..., None])
        .round_()
        .add_(8)
        .clamp_(0, 15)
    )
    return QuantisedMatrix(
        steps.to(torch.uint8).view(weight.shape), 4, scales, least=middle, offset=8.0
    )


def panels(rows: torch.Tensor, lanes: int) -> torch.Tensor:
    """[out, n] -> [panels, lanes, n], padded with zeros."""
    rows = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    missing = -len(rows) % lanes
    return (pad(rows, (0, 0, 0, missing)) if missing else rows).view(-1, lanes, rows.shape[1])
