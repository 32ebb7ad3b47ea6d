"""Keyed randomness: every draw is a function of (seed, sample, position, purpose) alone, not of the draws before it.

A key is a BLAKE2b hash; a vector of draws is the SplitMix64 stream that starts at the key (Steele, Lea, Flood 2014), a
counter-based generator in integer arithmetic, so the same bits on every device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from math import exp

import numpy as np
import numpy.typing as npt
import torch

from pearl.protocol.options import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_KEYS_AT_ONCE = 64
_ROUNDING = 1e-12  # more than all that a bound on an exponential, and the exponential itself, are rounded by
EARLIEST = 1e-3  # bound of the exponentials that are kept for later draws with their key


class Purpose(IntEnum):
    """What a draw is for. Part of its key: append, never renumber."""

    DRAFT = 1
    ACCEPT = 2
    CORRECTION = 3
    DIRECT = 4


def draw_key(sampling: Sampling, position: int, purpose: Purpose, candidate: int = 0) -> int:
    """The 64-bit key of one draw: for the token at `position` of the whole sequence.

    Of several draws for one position and purpose each has its `candidate` number.
    """
    packed = struct.pack("<QqqB", sampling.seed, sampling.sample, position, purpose)
    if candidate:
        packed += struct.pack("<H", candidate)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


class DrawKeys:
    """`draw_key` for one request, with keys computed 64 positions at a time.

    Between two forwards the hashing code is out of the CPU's caches: 64 keys take little longer than one.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._computed: list[tuple[int, list[int]]] = [(0, [])] * (1 + max(Purpose))  # by purpose: (first, keys)

    def __call__(self, position: int, purpose: Purpose) -> int:
        first, keys = self._computed[purpose]
        if not first <= position < first + len(keys):
            first, keys = position, [draw_key(self._sampling, position + i, purpose) for i in range(_KEYS_AT_ONCE)]
            self._computed[purpose] = first, keys
        return keys[position - first]


def uniform(key: int) -> float:
    """One draw in [0, 1), a multiple of 2**-53."""
    return (key >> 11) * 2.0**-53


def exponentials(key: int | npt.NDArray[np.uint64], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Independent draws from Exp(1), one for each token id - never 0, never infinite.

    The draw for an id does not depend on which other ids are asked for.  Of several keys [n, 1]: for ids [n, ...].
    """
    x = (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN  # uint64 wraps, as the generator wants it
    x += np.uint64(key) if isinstance(key, int) else key
    x ^= x >> np.uint64(30)
    x *= _MIX1
    x ^= x >> np.uint64(27)
    x *= _MIX2
    x ^= x >> np.uint64(31)
    # 52 bits and a half: the largest value is below 1 without rounding to it, the smallest above 0
    uniforms = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.log(torch.from_numpy(uniforms)).neg_().numpy()  # torch's log is vectorised, numpy's takes ten times it


@lru_cache(maxsize=4)
def _steps(vocab_size: int) -> npt.NDArray[np.uint64]:
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * _GOLDEN


def early(key: int, vocab_size: int, bound: float) -> npt.NDArray[np.int64]:
    """The ids below `vocab_size` whose `exponentials` are below `bound`, ascending; seldom one that is not quite.

    A third of the time that it takes to compute them all: the bits tell, without a logarithm.
    """
    x = _steps(vocab_size) + np.uint64(key)
    y = np.empty_like(x)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        np.right_shift(x, np.uint64(shift), out=y)
        np.bitwise_xor(x, y, out=x)
        np.multiply(x, factor, out=x)
    # What is left of the generator's mixing does not touch the upper 31 bits; they tell nearly as well as all.
    least = max(0, int(exp(-bound * (1 + _ROUNDING) - _ROUNDING) * 2.0**52) - 1)  # of the 52 bits that are used
    return np.flatnonzero(x >= np.uint64(least >> 21 << 33))


@lru_cache(maxsize=256)  # branches and guesses meet the same position, and so the same key, again and again
def earliest(key: int, vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """`early` with the bound `EARLIEST`, 50 ids of 49,152, and their exponentials; by these, ascending."""
    ids = early(key, vocab_size, EARLIEST)
    times = exponentials(key, ids)
    order = np.argsort(times, kind="stable")
    ids, times = ids[order], times[order]
    ids.flags.writeable = times.flags.writeable = False
    return ids, times


def exponentials_on_device(key: int | Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """`exponentials` of all ids, [vocab_size] float64, computed on `device` without waiting for it.

    Of several keys: [keys, vocab_size].  The uniforms are the same bits; a device's logarithm may round differently.
    """
    keys: int | torch.Tensor
    if isinstance(key, int):
        keys = _signed(key)
    else:
        signed = torch.tensor([[_signed(each)] for each in key], pin_memory=device.type == "cuda")
        keys = signed.to(device, non_blocking=True)
    x = torch.arange(1, vocab_size + 1, device=device) * _signed(int(_GOLDEN)) + keys  # int64 wraps too
    x = _xor_shifted(x, 30) * _signed(int(_MIX1))
    x = _xor_shifted(_xor_shifted(x, 27) * _signed(int(_MIX2)), 31)
    uniforms = (_shifted(x, 12).double() + 0.5) * 2.0**-52
    return torch.log(uniforms).neg_()


def _signed(bits: int) -> int:
    """The int64 with the bits of a uint64: torch has few operations on uint64."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """A right shift of int64 that fills with zeros, as a uint64's does."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _xor_shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    return x ^ _shifted(x, by)
