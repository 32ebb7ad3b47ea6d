"""The weights of a GGUF file, mapped: in their own bits, or dequantised as gguf-py does it."""

from __future__ import annotations

import mmap
from functools import partial

import torch

from pearl.models.checkpoints.formats import GGUF_BLOCKS, Make, from_gguf
from pearl.models.checkpoints.gguf import Table
from pearl.models.families import Forward
from pearl.models.forward.quantised import QuantisedMatrix

_NUMBERS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}  # types that are not quantised
_TOGETHER = 4096  # rows dequantised at once: in float32 a large matrix would take the last memory


class GgufWeights:
    """What `table` locates, for a model that `forward` computes."""

    def __init__(self, table: Table, forward: Forward) -> None:
        self._tensors, self._interleaved = table.tensors, table.interleaved
        self._alternates = forward.clamps_experts  # gate and up of an expert, in transformers
        self._shift = forward.norm_shift or 0.0
        with open(table.file, "rb") as file:
            self._map = mmap.mmap(
                file.fileno(), 0, access=mmap.ACCESS_COPY
            )  # torch warns of what cannot be written
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def matrices(self) -> dict[str, Make]:
        """What makes each matrix that stays in its own bits."""
        return {
            name: partial(self._matrix, name)
            for name, each in self._tensors.items()
            if each.kind in GGUF_BLOCKS
        }

    def _matrix(self, name: str) -> QuantisedMatrix:
        found = from_gguf(self._tensors[name].kind, self._rows(name))
        self._leave(name)
        return found

    def _leave(self, name: str) -> None:
        """A weight was copied: its pages of the file need not stay in this process's memory beside the copy."""
        _, _, offset, size = self._tensors[name]
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and offset + size > start:
            self._map.madvise(
                mmap.MADV_DONTNEED, start, (offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
            )

    def plain(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A weight, dequantised; mapped where nothing changes."""
        kind, shape, *_ = self._tensors[name]
        rows = self._rows(name)
        if self._shift and name.endswith("norm.weight"):
            rows = rows.float() - self._shift
        if kind in _NUMBERS:
            return rows.to(device, dtype)
        found = torch.empty(shape, dtype=dtype)
        for some, into in zip(rows.split(_TOGETHER), found.split(_TOGETHER), strict=True):
            into.copy_(_dequantised(kind, some))
        self._leave(name)
        return found.to(device)

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All weights, dequantised, as a model of transformers has them."""
        found = {name: self.plain(name, torch.device("cpu"), dtype) for name in self._tensors}
        for first in [name for name in found if ".experts.0.gate_proj" in name]:
            stack, kind = first.split("0.gate_proj")
            gate, up, down = (
                torch.stack(
                    [
                        found.pop(name)
                        for name in [*found]
                        if name.startswith(stack) and name.endswith(part)
                    ]
                )
                for part in (f".gate_proj{kind}", f".up_proj{kind}", f".down_proj{kind}")
            )
            both = (
                torch.stack((gate, up), 2).flatten(1, 2)
                if self._alternates
                else torch.cat((gate, up), 1)
            )
            if self._alternates and kind == ".weight":
                both, down = both.mT, down.mT
            end = "_bias" * (kind == ".bias")
            found |= {
                f"{stack}gate_up_proj{end}": both.contiguous(),
                f"{stack}down_proj{end}": down.contiguous(),
            }
        return found

    def _rows(self, name: str) -> torch.Tensor:
        """A weight's numbers or, where it is quantised, the bytes of each row; heads as transformers has them."""
        kind, shape, offset, size = self._tensors[name]
        found = self._bytes[offset : offset + size]
        numbers = _NUMBERS.get(kind)
        found = found.view(numbers).view(shape) if numbers else found.view(shape[0], -1)
        if self._interleaved and name.split(".")[-2] in ("q_proj", "k_proj"):
            found = (
                found.unflatten(0, (-1, self._interleaved // 2, 2)).transpose(1, 2).flatten(0, 2)
            )
        return found


def _dequantised(kind: str, rows: torch.Tensor) -> torch.Tensor:
    if kind in GGUF_BLOCKS:
        return from_gguf(kind, rows).dequantised()
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[kind]))
