"""Converts quantised weights of GGUF files, and weights in MXFP4, to `QuantisedMatrix`."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from pearl.models.forward.quantised import QuantisedMatrix, stacked

Make = Callable[[], QuantisedMatrix]


# ---- GGUF ----

_TOGETHER = 8192  # rows converted at once, because a conversion takes several bytes for each weight


def _half(block: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 numbers [out, blocks] at byte `at` of each block [out, blocks, bytes]."""
    return block[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(block: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., n] into halves [..., 2 * n]: first all low halves, then all high halves."""
    return torch.cat((block & 15, block >> 4), -1)


def _bits(block: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., n] into bits [..., 8 * n], the lowest of each byte first."""
    return (block[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def fields(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Split words of 32 bits [..., n] into unsigned fields [..., n * 32 / bits].

    Field 0 has a word's lowest bits.  The fields of a word are returned in the order 0, 1, 2 ... or
    as `order` says: with 0, 4, 1 ..., for example, field 4 comes second.
    """
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    return (words[..., None] >> shifts & 2**bits - 1).to(torch.uint8).flatten(-2)


def _legacy(has_least: bool, bits: int) -> Callable[[torch.Tensor], QuantisedMatrix]:
    """Return a reader of Q4_0, Q4_1, Q5_0 or Q5_1, in which 32 weights share a scale.

    Args:
        has_least: whether each group has a least weight too, as in Q4_1 and Q5_1.
    """

    def read(block: torch.Tensor) -> QuantisedMatrix:
        steps = _nibbles(block[..., -16:])
        if bits == 5:
            steps = steps | _bits(block[..., -20:-16]) << 4
        steps = steps.flatten(1)
        scales = _half(block, 0)
        if has_least:
            return QuantisedMatrix(steps, bits, scales, least=_half(block, 2))
        return QuantisedMatrix(steps, bits, scales, offset=2.0 ** (bits - 1))

    return read


def _q8_0(block: torch.Tensor) -> QuantisedMatrix:
    return QuantisedMatrix(
        block[..., 2:].contiguous().view(torch.int8).flatten(1), 8, _half(block, 0)
    )


def _k(bits: int) -> Callable[[torch.Tensor], QuantisedMatrix]:
    """Return a reader of Q4_K or Q5_K, in which 32 weights share a scale and a least weight.

    8 such groups share two factors: one for their scales, and one for their least weights.
    """

    def read(block: torch.Tensor) -> QuantisedMatrix:
        first, second, third = block[..., 4:16].split(4, -1)
        scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
        least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
        steps = _nibbles(block[..., -128:].unflatten(-1, (4, 32)))  # [out, blocks, 4, 64]
        if bits == 5:
            shifts = torch.arange(8, dtype=torch.uint8)
            above = block[..., 16:48, None] >> shifts & 1  # [out, blocks, 32, 8]
            steps = steps | above.transpose(-1, -2).reshape(steps.shape) << 4
        return QuantisedMatrix(
            steps.flatten(1),
            bits,
            scales.flatten(1),
            _half(block, 0),
            least.flatten(1),
            -_half(block, 2),
        )

    return read


def _q6_k(block: torch.Tensor) -> QuantisedMatrix:
    """Read Q6_K, in which 16 weights share a scale, and 16 scales share a factor."""
    low = _nibbles(block[..., :128].unflatten(-1, (2, 64)))  # [out, blocks, 2, 128]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = block[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    steps = (low | high.flatten(-2) << 4).flatten(1)
    scales = block[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return QuantisedMatrix(steps, 6, scales, _half(block, 208), offset=32.0)


FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0])  # doubled values
_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])


def paired(pairs: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [out, ...] into steps [out, in]. The low half of a byte is the first of two."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def mxfp4(pairs: torch.Tensor, exponents: torch.Tensor) -> QuantisedMatrix:
    """Convert weights in MXFP4.

    Args:
        pairs: bytes [out, ...] that hold two steps each, the first in the low half.
        exponents: [out, groups], uint8.

    Source: "OCP Microscaling Formats", 5.3.3.
    """
    return _mx(paired(pairs), exponents)


def _mx(steps: torch.Tensor, exponents: torch.Tensor) -> QuantisedMatrix:
    """Return the MXFP4 matrix with these steps [out, in] and exponents [out, groups]."""
    # Exponents have a bias of 127, and `FP4` has twice the values of the format.
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)
    return QuantisedMatrix(steps, 4, scales.bfloat16(), table=FP4)


def _mxfp4(block: torch.Tensor) -> QuantisedMatrix:
    return _mx(_nibbles(block[..., 1:]).flatten(1), block[..., 0])


def _iq4_nl(block: torch.Tensor) -> QuantisedMatrix:
    return QuantisedMatrix(_nibbles(block[..., 2:]).flatten(1), 4, _half(block, 0), table=_IQ4)


def _iq4_xs(block: torch.Tensor) -> QuantisedMatrix:
    """Read IQ4_XS, in which 32 weights share a scale of 6 bits.

    8 such groups share one factor for their scales.
    """
    low = fields(block[..., 4:8].contiguous().view(torch.int32), 4)
    high = fields(block[..., 2:4].contiguous().view(torch.int16).int(), 2)[..., :8]
    scales = (low | high << 4).to(torch.int8) - 32
    steps = _nibbles(block[..., 8:].unflatten(-1, (8, 16)))
    return QuantisedMatrix(steps.flatten(1), 4, scales.flatten(1), _half(block, 0), table=_IQ4)


class Block(NamedTuple):
    """How a type of GGUF packs weights into blocks.

    Attributes:
        weights: number of weights in a block.
        size: number of bytes in a block.
        read: converts blocks [out, blocks, bytes].
    """

    weights: int
    size: int
    read: Callable[[torch.Tensor], QuantisedMatrix]


GGUF_BLOCKS: Mapping[str, Block] = {
    "Q4_0": Block(32, 18, _legacy(False, 4)),
    "Q4_1": Block(32, 20, _legacy(True, 4)),
    "Q5_0": Block(32, 22, _legacy(False, 5)),
    "Q5_1": Block(32, 24, _legacy(True, 5)),
    "Q8_0": Block(32, 34, _q8_0),
    "Q4_K": Block(256, 144, _k(4)),
    "Q5_K": Block(256, 176, _k(5)),
    "Q6_K": Block(256, 210, _q6_k),
    "IQ4_NL": Block(32, 18, _iq4_nl),
    "IQ4_XS": Block(256, 136, _iq4_xs),
    "MXFP4": Block(32, 17, _mxfp4),
}


def from_gguf(kind: str, rows: torch.Tensor) -> QuantisedMatrix:
    """Convert the bytes [out, bytes] of a tensor of type `kind` in a GGUF file."""
    block = GGUF_BLOCKS[kind]
    pieces = (block.read(piece.view(len(piece), -1, block.size)) for piece in rows.split(_TOGETHER))
    return stacked(pieces, len(rows))
