"""Maps a GGUF file and reads its weights, quantised as in the file or dequantised as by gguf-py."""

import mmap
from functools import partial

import torch

from pearl.models.checkpoints.formats import GGUF_BLOCKS, Make, from_gguf
from pearl.models.checkpoints.gguf import GgufTable
from pearl.models.families import Forward
from pearl.models.forward.quantised import QuantisedMatrix, StoredMatrix

_NUMBERS = {  # types of weights that are not quantised
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_TOGETHER = 4096  # rows dequantised at once; a large matrix in float32 would fill the memory


class GgufWeights:
    """Reads the weights that `table` locates, for a model that `forward` computes.

    Attributes:
        matrices: functions that load the matrices that can stay quantised, by the weight's name.
    """

    def __init__(self, table: GgufTable, forward: Forward) -> None:
        self._tensors = table.tensors
        self._interleaved = table.interleaved
        # In transformers the rows of gate and up of these experts alternate.
        self._alternates = forward.clamps_experts
        self._shift = forward.norm_shift or 0.0
        with open(table.file, "rb") as file:
            # Copy-on-write, because torch warns of a map that cannot be written.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.matrices: dict[str, Make] = {}
        for name, tensor in self._tensors.items():
            if tensor.kind in GGUF_BLOCKS:
                self.matrices[name] = partial(self._matrix, name)

    def _matrix(self, name: str) -> QuantisedMatrix:
        matrix = from_gguf(self._tensors[name].kind, self._rows(name))
        self._leave(name)
        return matrix

    def _leave(self, name: str) -> None:
        """Release the file's pages of a weight that was copied, so that they take no memory."""
        tensor = self._tensors[name]
        end = tensor.offset + tensor.size
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and end > start:
            size = (end - start) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def plain(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight, dequantised if it is quantised.

        A weight that is needed as it is in the file, on the CPU, stays mapped and is not copied.
        """
        tensor = self._tensors[name]
        rows = self._rows(name)
        if self._shift and name.endswith("norm.weight"):
            rows = rows.float() - self._shift
        if tensor.kind in _NUMBERS:
            return rows.to(device, dtype)
        weight = torch.empty(tensor.shape, dtype=dtype)
        for piece, place in zip(rows.split(_TOGETHER), weight.split(_TOGETHER), strict=True):
            place.copy_(_dequantised(tensor.kind, piece))
        self._leave(name)
        return weight.to(device)

    def in_file(self, name: str, dtype: torch.dtype) -> StoredMatrix:
        """Return a quantised matrix that stays in the file; rows that are looked up get `dtype`."""
        tensor = self._tensors[name]
        block = GGUF_BLOCKS[tensor.kind]
        return StoredMatrix(
            self._rows(name).unflatten(1, (-1, block.size)),
            read=block.read,
            release=partial(self._leave, name),
            shape=torch.Size(tensor.shape),
            dtype=dtype,
        )

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return all weights, dequantised, in the layout of transformers' model."""
        weights = {name: self.plain(name, torch.device("cpu"), dtype) for name in self._tensors}
        for name in self._tensors:
            if ".experts.0.gate_proj" in name:
                stem, kind = name.split("0.gate_proj")
                self._stack(weights, stem, kind)
        return weights

    def _stack(self, weights: dict[str, torch.Tensor], stem: str, kind: str) -> None:
        """In `weights`, replace the experts whose names begin with `stem` by stacks of all experts.

        Args:
            kind: ".weight" or ".bias".
        """
        gate = _taken(weights, stem, f".gate_proj{kind}")
        up = _taken(weights, stem, f".up_proj{kind}")
        down = _taken(weights, stem, f".down_proj{kind}")
        if self._alternates:
            gate_up = torch.stack((gate, up), 2).flatten(1, 2)
            if kind == ".weight":
                gate_up = gate_up.mT
                down = down.mT
        else:
            gate_up = torch.cat((gate, up), 1)
        suffix = "_bias" if kind == ".bias" else ""
        weights[f"{stem}gate_up_proj{suffix}"] = gate_up.contiguous()
        weights[f"{stem}down_proj{suffix}"] = down.contiguous()

    def _rows(self, name: str) -> torch.Tensor:
        """Return a weight's numbers or, if it is quantised, the bytes of each row.

        If the file interleaves the halves of heads, the rows are put into transformers' order.
        """
        kind, shape, offset, size = self._tensors[name]
        rows = self._bytes[offset : offset + size]
        if kind in _NUMBERS:
            rows = rows.view(_NUMBERS[kind]).view(shape)
        else:
            rows = rows.view(shape[0], -1)
        if self._interleaved and name.split(".")[-2] in ("q_proj", "k_proj"):
            halves = rows.unflatten(0, (-1, self._interleaved // 2, 2))
            rows = halves.transpose(1, 2).flatten(0, 2)
        return rows


def _taken(weights: dict[str, torch.Tensor], stem: str, part: str) -> torch.Tensor:
    """Remove the weights whose names begin with `stem` and end with `part`; return their stack.

    For example, `part` is ".up_proj.weight".  The stack has the weights of expert 0, expert 1 ...
    """
    names = [name for name in weights if name.startswith(stem) and name.endswith(part)]
    return torch.stack([weights.pop(name) for name in names])


def _dequantised(kind: str, rows: torch.Tensor) -> torch.Tensor:
    if kind in GGUF_BLOCKS:
        return from_gguf(kind, rows).dequantised()
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[kind]))
