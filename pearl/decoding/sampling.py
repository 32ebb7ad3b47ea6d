"""Logits to probabilities to a token. Pure functions of tensors and keys; knows no models and no protocol state.

Randomness is keyed, not sequenced: every draw is a function of (seed, sample, position, purpose) alone.  The key is a
BLAKE2b hash; a vector of draws is the SplitMix64 stream that starts at the key (Steele, Lea, Flood 2014), a
counter-based generator in integer arithmetic, so the same bits on every device.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from itertools import accumulate
from math import inf, isfinite

import numpy as np
import numpy.typing as npt
import torch

from pearl.errors import NumericalError
from pearl.protocol.messages import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_SHORT = 128  # tokens
_KEYS = 64  # made at once
_TOP_P_SHORTLIST = 256  # a nucleus rarely holds more tokens; sorting these is 20 times cheaper than the vocabulary


class Purpose(IntEnum):
    DRAFT = 1
    ACCEPT = 2
    CORRECTION = 3
    DIRECT = 4


def draw_key(sampling: Sampling, position: int, purpose: Purpose) -> int:
    """The 64-bit key of one draw: for the token at `position` of the whole sequence."""
    packed = struct.pack("<QqqB", sampling.seed, sampling.sample, position, purpose)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


class DrawKeys:
    """`draw_key` of one request. Between two forwards the code that makes one is cold: many take hardly longer."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._made: list[tuple[int, list[int]]] = [(0, [])] * (1 + max(Purpose))  # by purpose: of positions from, keys

    def __call__(self, position: int, purpose: Purpose) -> int:
        first, keys = self._made[purpose]
        if not first <= position < first + len(keys):
            first, keys = position, [draw_key(self._sampling, position + i, purpose) for i in range(_KEYS)]
            self._made[purpose] = first, keys
        return keys[position - first]


def uniform(key: int) -> float:
    """One draw in [0, 1), a multiple of 2**-53."""
    return (key >> 11) * 2.0**-53


def exponentials(key: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Independent draws from Exp(1), one for each token id - never 0, never infinite.

    The draw for an id does not depend on which other ids are asked for.
    """
    x = (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(key)  # uint64 wraps, as the generator wants it
    x ^= x >> np.uint64(30)
    x *= _MIX1
    x ^= x >> np.uint64(27)
    x *= _MIX2
    x ^= x >> np.uint64(31)
    # 52 bits and a half: the largest value is below 1 without rounding to it, the smallest above 0
    uniforms = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.log(torch.from_numpy(uniforms)).neg_().numpy()  # torch's log is vectorised, numpy's takes ten times it


def _not_finite() -> NumericalError:
    """Looked at where a number is read anyway: to look at all logits of every forward would cost more than a draw."""
    return NumericalError(
        "a model's logits are not finite. Try a wider dtype (bfloat16 or float32); if it happens with every prompt, "
        "the checkpoint is damaged."
    )


def drawn(said: torch.Tensor) -> int:
    """The token of a draw that was made where its logits are; waits for it. said: [2], a number to check and the id."""
    check, token = said.tolist()  # together: a device is waited for once
    if not isfinite(check):
        raise _not_finite()
    return int(token)


def race(probs: torch.Tensor, key: int) -> int:
    """Draws a token id from `probs` [vocab] (need not sum to 1): argmin over tokens of E_token / probs[token].

    Token i wins with probability probs[i] / sum.  Two sides that race with the same key on close distributions mostly
    get the same winner, which is what the coupled rule lives on.
    Source: "Coupling without communication", Daliri, Musco, Suresh 2024.

    On the host in numpy: on a short support a tenth of the time that as many torch calls take.
    """
    if not probs.is_cpu:
        return drawn(race_there(probs, key))
    weights = probs.numpy()
    ids = np.flatnonzero(weights > 0)  # of booleans: a fifth of the time
    if not len(ids):
        raise _not_finite()
    times = exponentials(key, ids) / weights[ids].astype(np.float64)
    return int(ids[np.argmin(times)])


def race_there(probs: torch.Tensor, key: int) -> torch.Tensor:
    """As `race`, where the probabilities are: what `drawn` takes. The same winner, but where two times are as good as
    equal: a device's logarithm may be rounded otherwise.
    """
    x = torch.arange(1, len(probs) + 1, device=probs.device) * _signed(int(_GOLDEN)) + _signed(key)  # int64 wraps too
    x = _xor_shifted(x, 30) * _signed(int(_MIX1))
    x = _xor_shifted(_xor_shifted(x, 27) * _signed(int(_MIX2)), 31)
    uniforms = (_shifted(x, 12).double() + 0.5) * 2.0**-52
    best, token = (torch.log(uniforms).neg_() / probs.double()).min(-1)  # where there is no probability: infinity
    return torch.stack((best, token.double()))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as if without a sign: torch has few operations on uint64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _xor_shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    return x ^ _shifted(x, by)


def pick(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> int:
    """Draws a token id from `probs` [vocab] (need not sum to 1) by inverting the cumulative sum: one uniform number.

    A tenth of what a race over a whole vocabulary costs; for draws that nobody else has to repeat.
    `otherwise`: what is drawn from where `probs` holds nothing.
    """
    if not probs.is_cpu:
        return drawn(pick_there(probs, key, otherwise))
    cumulative: Sequence[float] | npt.NDArray[np.float64]
    if len(probs) <= _SHORT:
        cumulative = list(accumulate(probs.tolist()))  # the same sums, without waking numpy
    else:
        cumulative = np.add.accumulate(probs.cpu().numpy(), dtype=np.float64)
    total = float(cumulative[-1])
    if total == 0 and otherwise is not None:
        return pick(otherwise, key)
    if not 0 < total < inf:  # NaN is neither
        raise _not_finite()
    index = bisect_right(cumulative, uniform(key) * total)
    if index == len(cumulative):  # the product has been rounded up to the total
        index = int(torch.nonzero(probs)[-1])
    return index


def pick_there(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """As `pick`, where the probabilities are: what `drawn` takes.

    Sums may be rounded otherwise than on the host; so may the probabilities themselves.
    """
    if otherwise is not None:
        probs = torch.where(probs.any(), probs, otherwise)
    cumulative = torch.cumsum(probs, -1, dtype=torch.float64)
    total = cumulative[-1]
    index = torch.searchsorted(cumulative, uniform(key) * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the product may be rounded up to the total
    return torch.stack((total.log(), torch.minimum(index, last).double()))  # the logarithm of 0 is not finite


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that is sampled from: after temperature, top-k, top-p and min-p, in this order, as transformers.

    Args:
        logits: [..., vocab], any float dtype; each row for itself.
        sampling: temperature > 0 (greedy has no distribution to speak of: use `greedy`).

    Returns:
        [..., vocab], float32, sums to 1 up to rounding; exactly 0 where filtered out.
    """
    scores = logits if logits.dtype is torch.float32 else logits.float()
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < torch.topk(scores, sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        rows = [_keep_nucleus(row, sampling.top_p) for row in scores.flatten(0, -2)] if scores.dim() > 1 else []
        scores = torch.stack(rows).view_as(scores) if rows else _keep_nucleus(scores, sampling.top_p)
    if sampling.min_p > 0:
        probs = torch.softmax(scores, -1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return torch.softmax(scores, -1)


def _keep_nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the likeliest tokens until those before a token hold `top_p`; at least one. scores: [vocab]."""
    total = torch.logsumexp(scores, -1)
    # Whether a shortlist is enough only the host could tell, and a device would have to be waited for.
    shortlist = _TOP_P_SHORTLIST if scores.is_cpu else scores.numel()
    for size in (min(shortlist, scores.numel()), scores.numel()):
        top, ids = torch.topk(scores, size)
        probs = torch.exp(top - total)
        before = torch.cumsum(probs, -1) - probs
        if size == scores.numel() or before[-1] >= top_p:
            break
    return torch.full_like(scores, -torch.inf).scatter_(0, ids, top.masked_fill(before >= top_p, -torch.inf))


def greedy(logits: torch.Tensor) -> int:
    """The likeliest token of logits [vocab]; the first of equals, as transformers' argmax, to which NaN is largest."""
    return drawn(greedy_there(logits))


def greedy_there(logits: torch.Tensor) -> torch.Tensor:
    """As `greedy`, where the logits are: what `drawn` takes."""
    best, token = logits.max(-1)
    return torch.stack((best.double(), token.double()))
