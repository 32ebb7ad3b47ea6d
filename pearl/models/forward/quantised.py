"""Quantised matrices, which `checkpoints` reads from files or `rounded` makes.

This module imports no code of files or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from pearl.errors import ModelError

# Weights of "int4" that share a scale. The inputs of a rounded matrix are a multiple of this.
GROUP = 32
_OF_ALL_ROWS = ("order", "table")  # tensors that all rows share
_SHORT = 16  # most rows of a look-up whose rows a `StoredMatrix` keeps
_RECENT = 1024  # most rows that a `StoredMatrix` keeps
_TOGETHER = 4096  # rows rounded at once, because a large matrix in float32 may not fit into memory


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """Holds weights [out, in] as small numbers ("steps"), with a scale for each group of inputs.

    A weight is (step - offset - zero) * scale + least or, if there is a table, table[step] * scale.

    Attributes:
        steps: [out, in], uint8; steps of 8 bits may also be int8 or float8_e4m3fn.
        bits: 4, 5, 6 or 8.
        scales: [out, groups], in one of these forms:
            float16, bfloat16 or float32;
            integers of 8 bits, to be multiplied by `of_scales` [out, in / 256];
            float8_e4m3fn, to be divided by `divisors` [out, 1], float32.
        least: [out, groups], in the first or the second form of `scales`, with `of_least` in place of
            `of_scales`; None: 0.
        zeros: [out, groups], uint8, or int16 for steps of 8 bits; None: 0.
        order: [in], the input to which each column of `steps` belongs; None: they are in order.
        table: [16], float32, the number for which each step of 4 bits stands; None: a step stands
            for itself.
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
        """The properties that matrices must have in common, so that `stacked` can join them."""
        table = None if self.table is None else tuple(self.table.tolist())
        return (
            self.steps.dtype,
            self.bits,
            self.group,
            self.scales.dtype,
            self.offset,
            table,
            self.least is None,
            self.zeros is None,
            self.order is None,
        )

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantisedMatrix:
        """Return the matrix after `change` has cut or reordered its rows.

        `change` is called with each tensor that has numbers for each row.
        """
        tensors: dict[str, Any] = {name: change(tensor) for name, tensor in self.of_rows().items()}
        return replace(self, **tensors)

    def of_rows(self) -> dict[str, torch.Tensor]:
        """Return the tensors that have numbers for each row, by their names."""
        tensors = {}
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if isinstance(value, torch.Tensor) and attribute.name not in _OF_ALL_ROWS:
                tensors[attribute.name] = value
        return tensors

    def whole_scales(self) -> torch.Tensor:
        """Return the scales [out, groups], float32."""
        scales = _whole(self.scales, self.of_scales)
        if self.divisors is None:
            return scales
        return scales / self.divisors

    def whole_least(self) -> torch.Tensor | None:
        """Return the numbers [out, groups] that are added to the groups' weights, float32.

        They include `zeros`, but not `offset`. Return None if nothing is added.
        """
        if self.zeros is not None:
            return -self.zeros.float() * self.whole_scales()
        if self.least is not None:
            return _whole(self.least, self.of_least)
        return None

    @property
    def fits_bytes(self) -> bool:
        """Whether the steps, or the numbers of the table if there is one, can become int8."""
        if self.steps.dtype == torch.float8_e4m3fn:
            return False
        if self.table is None:
            return True
        return torch.equal(self.table, self.table.to(torch.int8).float())

    def in_bytes(self, group: int) -> QuantisedMatrix:
        """Return the same weights with steps of 8 bits, and float32 scales and least weights.

        Args:
            group: number of inputs that share a scale in the result; it divides this matrix's
                `group`.
        """
        repeats = self.group // group
        scales = self.whole_scales()
        least = self.whole_least()
        if least is None:
            least = torch.zeros_like(scales)
        scales = scales.repeat_interleave(repeats, 1)
        least = least.repeat_interleave(repeats, 1)
        if self.table is not None:
            steps = self.table.to(torch.int8)[self.steps.long()]
        elif self.steps.dtype == torch.int8:
            steps = self.steps
        else:
            steps = (self.steps.to(torch.int16) - int(self.offset)).to(torch.int8)
        return QuantisedMatrix(steps, 8, scales, least=least, order=self.order)

    def dequantised(self) -> torch.Tensor:
        """Return the weights [out, in], float32: bit for bit the numbers that the formats define."""
        if self.table is None:
            numbers = self.steps.float().sub_(self.offset)
        else:
            numbers = self.table[self.steps.long()]
        weights = numbers.view(len(self.steps), -1, self.group)
        if self.zeros is not None:
            weights -= self.zeros.float()[..., None]
        weights = weights.mul_(self.whole_scales()[..., None])
        if self.least is not None:
            weights += _whole(self.least, self.of_least)[..., None]
        weights = weights.view(self.shape)
        if self.order is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.order, weights)


Weights = torch.Tensor | QuantisedMatrix


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A quantised matrix that stays in its mapped file; rows are converted when they are needed.

    It can be an embedding: `stored[ids]` are dequantised rows. Only rows that were looked up take
    memory.

    Attributes:
        rows: [out, blocks, bytes], mapped.
        read: converts some of the rows.
        release: lets the system take back the memory of all rows that were read.
        shape: [out, in].
        dtype: the dtype of looked-up rows.
        recent: index -> its row, converted, of rows that short forwards have looked up. Texts repeat
            most of their tokens, and a conversion takes a quarter of a millisecond.
    """

    rows: torch.Tensor
    read: Callable[[torch.Tensor], QuantisedMatrix]
    release: Callable[[], None]
    shape: torch.Size
    dtype: torch.dtype
    recent: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) > _SHORT:
            return self._converted(ids)
        wanted = ids.tolist()
        missing = [row for row in wanted if row not in self.recent]
        if missing:
            if len(self.recent) + len(missing) > _RECENT:
                self.recent.clear()
                missing = wanted
            self.recent.update(zip(missing, self._converted(torch.tensor(missing)), strict=True))
        return torch.stack([self.recent[row] for row in wanted])

    def _converted(self, ids: torch.Tensor) -> torch.Tensor:
        return self.read(self.rows[ids]).dequantised().to(self.dtype)

    def whole(self) -> QuantisedMatrix:
        return self.read(self.rows)

    def pieces(self, count: int) -> Iterator[QuantisedMatrix]:
        """Yield the matrix in pieces of `count` rows."""
        for start in range(0, len(self.rows), count):
            yield self.read(self.rows[start : start + count])
            self.release()


Embedding = torch.Tensor | StoredMatrix


def _whole(scales: torch.Tensor, upper: torch.Tensor | None) -> torch.Tensor:
    if upper is None:
        return scales.float()
    repeats = scales.shape[1] // upper.shape[1]
    return scales.float() * upper.float().repeat_interleave(repeats, 1)


def stacked(parts: Iterable[QuantisedMatrix], rows: int | None = None) -> QuantisedMatrix:
    """Concatenate the rows of matrices. `are_alike` must be true for any two of the matrices.

    Args:
        rows: the number of rows of all parts together. If it is given, `parts` may be an iterator,
            so that only one part at a time is in memory beside the result.
    """
    if rows is None:
        parts = list(parts)
        rows = sum(len(part.steps) for part in parts)
    result = None
    start = 0
    for part in parts:
        count = len(part.steps)
        if count == rows:
            return part
        if result is None:
            result = part.changed(lambda tensor: tensor.new_empty(rows, *tensor.shape[1:]))
        for name, tensor in result.of_rows().items():
            tensor[start : start + count] = getattr(part, name)
        start += count
    assert result is not None and start == rows  # noqa: PT018
    return result


def are_alike(left: Weights, right: Weights) -> bool:
    """Return whether the rows of two matrices with the same inputs can be concatenated.

    For quantised matrices, `stacked` does so.
    """
    if not isinstance(left, QuantisedMatrix) or not isinstance(right, QuantisedMatrix):
        return type(left) is type(right)
    if left.kind != right.kind:
        return False
    if left.order is None or right.order is None:
        return True
    return torch.equal(left.order, right.order)


def rounded(weight: torch.Tensor, rounding: Literal["int8", "int4"]) -> QuantisedMatrix:
    """Round weights to "int8" or "int4".

    "int8" has a scale for each row, and steps from -127 to 127.
    "int4" has a scale for each 32 weights of a row, and 16 steps from their least to their largest weight.
    Scales are float16 if `weight` is, otherwise bfloat16.

    Raises:
        ModelError: the number of inputs is no multiple of 32.
    """
    if weight.shape[1] % GROUP:
        raise ModelError(
            f"{rounding} weights need matrices whose inputs are a multiple of {GROUP}; one of this model takes "
            f"{weight.shape[1]}. Choose another dtype."
        )
    return stacked((_rounded(rows, rounding) for rows in weight.split(_TOGETHER)), len(weight))


def _rounded(weight: torch.Tensor, rounding: Literal["int8", "int4"]) -> QuantisedMatrix:
    dtype = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    tiny = torch.finfo(dtype).tiny
    if rounding == "int8":
        scales = (weight.abs().amax(1, keepdim=True) / 127).to(dtype).clamp_min(tiny)
        steps = (weight.float() / scales.float()).round_().clamp_(-127, 127)
        return QuantisedMatrix(steps.to(torch.int8), 8, scales)
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    step = ((high - low) / 15).clamp_min(tiny)
    middle = (low + 8 * step).to(dtype)
    scales = step.to(dtype)
    steps = (groups - middle.float()[..., None]) / scales.float()[..., None]
    steps = steps.round_().add_(8).clamp_(0, 15).to(torch.uint8).view(weight.shape)
    return QuantisedMatrix(steps, 4, scales, least=middle, offset=8.0)


def panels(rows: torch.Tensor, lanes: int) -> torch.Tensor:
    """Cut rows into panels of `lanes` rows, the last one padded with zeros: [out, n] -> [panels, lanes, n]."""
    if rows.dtype == torch.float8_e4m3fn:
        rows = rows.view(torch.uint8)
    missing = -len(rows) % lanes
    if missing:
        rows = pad(rows, (0, 0, 0, missing))
    return rows.view(-1, lanes, rows.shape[1])
