"""Keyed randomness: a draw depends on (seed, sample, position, purpose), not on earlier draws.

These four are hashed to a key with BLAKE2b.  A vector of draws is the SplitMix64 stream that starts
at the key (Steele, Lea, Flood 2014).  SplitMix64 is a counter-based generator in integer
arithmetic, so every device computes the same bits.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from math import exp
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pearl.config.options import RequestOptions

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
EARLY = 1e-3  # `early_ids` are those with exponentials below this: about 50 of 49,152 ids


class Purpose(IntEnum):
    """What a draw is for, which is a part of its key.

    New purposes are appended, and the numbers never change, so that a seed keeps giving the same
    text.
    """

    DRAFT = 1
    ACCEPT = 2
    CORRECTION = 3
    DIRECT = 4


def draw_key(options: RequestOptions, position: int, purpose: Purpose, candidate: int = 0) -> int:
    """Return the 64-bit key of one draw for the token at `position` of the whole sequence.

    key = BLAKE2b(seed, sample, position, purpose[, candidate]). `candidate` numbers the draws if
    there are several for one position and purpose.
    """
    packed = struct.pack("<QqqB", options.seed, options.sample, position, purpose)
    if candidate:
        packed += struct.pack("<H", candidate)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def uniform(key: int) -> float:
    """Return one draw from the uniform distribution on [0, 1), a multiple of 2**-53."""
    return (key >> 11) * 2.0**-53


def exponentials(
    key: int | torch.Tensor, ids: npt.NDArray[np.int64] | torch.Tensor
) -> torch.Tensor:
    """Return independent draws from Exp(1), one for each token id; none is 0 or infinite.

    The draw for an id does not depend on which other ids are passed. The device of `ids` computes
    the draws (float64), and this function does not wait for it. A draw is minus the logarithm of a
    uniform number, and devices may round this logarithm differently.

    Args:
        key: one key, or the `key_column` [n, 1] of several keys; the result is then [n, len(ids)].
        ids: an array or a tensor. For few ids on the host, an array is faster.
    """
    if isinstance(ids, np.ndarray) and isinstance(key, int):
        x: Any = (ids.astype(np.uint64) + 1) * _GOLDEN + key  # uint64 wraps around
        x = (x ^ x >> 30) * _MIX1
        x = (x ^ x >> 27) * _MIX2
        bits = torch.from_numpy(((x ^ x >> 31) >> 12).astype(np.float64))
    else:
        start = _signed(key) if isinstance(key, int) else key
        x = (ids + 1) * _signed(_GOLDEN) + start  # int64 also wraps around
        x = (x ^ _shifted(x, 30)) * _signed(_MIX1)
        x = (x ^ _shifted(x, 27)) * _signed(_MIX2)
        bits = _shifted(x ^ _shifted(x, 31), 12).double()
    # (bits + 0.5) / 2**52 with 52 bits lies between 0 and 1, even after rounding.
    return bits.add_(0.5).mul_(2.0**-52).log_().neg_()


def key_column(keys: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return keys [n, 1] for `exponentials` on `device`, without waiting for the copy."""
    column = torch.tensor([[_signed(key)] for key in keys], pin_memory=device.type == "cuda")
    return column.to(device, non_blocking=True)


@lru_cache(maxsize=256)  # branches and guesses draw for the same positions, with the same keys
def early_ids(key: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the ids whose `exponentials` for this key are below `EARLY`, in ascending order.

    The result may also have a few ids whose exponentials are slightly above `EARLY`. This function
    takes a third of the time of computing all exponentials, because it compares random bits instead
    of their logarithms.
    """
    x = _steps(vocab_size) + np.uint64(key)
    y = np.empty_like(x)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        np.right_shift(x, np.uint64(shift), out=y)
        np.bitwise_xor(x, y, out=x)
        np.multiply(x, np.uint64(factor), out=x)
    # The last mixing step changes only the lower 33 bits, so the upper 31 suffice for a bound.
    least = int(exp(-EARLY) * 2.0**52) - 1  # least value of the 52 bits that are used
    ids = np.flatnonzero(x >= np.uint64(least >> 21 << 33))
    ids.flags.writeable = False
    return ids


@lru_cache(maxsize=4)
def _steps(vocab_size: int) -> npt.NDArray[np.uint64]:
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def _signed(bits: int) -> int:
    """Return the int64 with the same bits as a uint64; torch has few operations for uint64."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return an int64 tensor shifted right by `by` bits and filled with zeros, like a uint64."""
    return (x >> by) & ((1 << (64 - by)) - 1)
