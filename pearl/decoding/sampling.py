"""Logits to probabilities to a token. Knows no models and no protocol state.

Each way of drawing comes twice: `race`, `pick` and `greedy` return a token id, and wait for the device that holds the
numbers; `race_on_device`, `pick_on_device` and `greedy_on_device` return a *draw*, a tensor [2] on that device: a check
value, which is finite where the logits were, and the token id. `read_draw` turns a draw into the id.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf, isfinite

import numpy as np
import torch

from pearl.decoding.keys import exponentials, exponentials_on_device, uniform
from pearl.errors import NumericalError
from pearl.protocol.messages import Sampling

_TOP_P_SHORTLIST = 256  # a nucleus rarely holds more tokens; sorting these is 20 times cheaper than the vocabulary


def _not_finite() -> NumericalError:
    """For where a number is read anyway: to check all logits of every forward would cost more than a draw."""
    return NumericalError(
        "a model's logits are not finite. Try a wider dtype (bfloat16 or float32); if it happens with every prompt, "
        "the checkpoint is damaged."
    )


def read_draw(draw: torch.Tensor) -> int:
    """The token id of a draw [check value, token id]; waits for its device, once for both.

    Raises `NumericalError` where the check value is not finite.
    """
    check, token = draw.tolist()
    if not isfinite(check):
        raise _not_finite()
    return int(token)


def race(probs: torch.Tensor, key: int) -> int:
    """Draws a token id from `probs` [vocab] (need not sum to 1): argmin over tokens of E_token / probs[token].

    Token i wins with probability probs[i] / sum.  Two sides that race with the same key on close distributions mostly
    get the same winner: the basis of the coupled rule.
    Source: "Coupling without communication", Daliri, Musco, Suresh 2024.

    Raises `NumericalError` where no probability is above 0. On the host in numpy: on a short support ten times faster
    than torch.
    """
    if not probs.is_cpu:
        return read_draw(race_on_device(probs, key))
    weights = probs.numpy()
    ids = np.flatnonzero(weights > 0)  # of booleans: five times faster than of floats
    if not len(ids):
        raise _not_finite()
    times = exponentials(key, ids) / weights[ids].astype(np.float64)
    return int(ids[np.argmin(times)])


def race_on_device(probs: torch.Tensor, key: int) -> torch.Tensor:
    """`race` as a draw on the device of `probs`: see `read_draw`.

    The winner is the host's, except where two times differ by less than the rounding of the device's logarithm.
    """
    times = exponentials_on_device(key, len(probs), probs.device)
    best, token = (times / probs.double()).min(-1)  # infinite where the probability is 0
    return torch.stack((best, token.double()))


def pick(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> int:
    """Draws a token id from `probs` [vocab] (need not sum to 1) by inverting the cumulative sum: one uniform number.

    Ten times cheaper than a race over a whole vocabulary; for draws that the other side need not repeat.
    `otherwise`: [vocab], drawn from where `probs` is all zero. Raises `NumericalError` where the sum is not finite.
    """
    if not probs.is_cpu:
        return read_draw(pick_on_device(probs, key, otherwise))
    cumulative = np.add.accumulate(probs.numpy(), dtype=np.float64)
    total = float(cumulative[-1])
    if total == 0 and otherwise is not None:
        return pick(otherwise, key)
    if not 0 < total < inf:  # NaN is neither
        raise _not_finite()
    index = bisect_right(cumulative, uniform(key) * total)
    if index == len(cumulative):  # the product has been rounded up to the total
        index = int(torch.nonzero(probs)[-1])
    return index


def pick_on_device(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """`pick` as a draw on the device of `probs`: see `read_draw`.

    Sums may round differently than on the host, and so may the probabilities themselves.
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
        logits: [..., vocab], any float dtype; rows are independent.
        sampling: temperature > 0 (for temperature 0 use `greedy`).

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
    # Only the host can tell whether a shortlist is long enough: asking would mean waiting for the device.
    shortlist = _TOP_P_SHORTLIST if scores.is_cpu else scores.numel()
    for size in (min(shortlist, scores.numel()), scores.numel()):
        top, ids = torch.topk(scores, size)
        probs = torch.exp(top - total)
        before = torch.cumsum(probs, -1) - probs
        if size == scores.numel() or before[-1] >= top_p:
            break
    return torch.full_like(scores, -torch.inf).scatter_(0, ids, top.masked_fill(before >= top_p, -torch.inf))


def greedy(logits: torch.Tensor) -> int:
    """The likeliest token of logits [vocab], the first of equals, as in transformers; NaN counts as the largest."""
    return read_draw(greedy_on_device(logits))


def greedy_on_device(logits: torch.Tensor) -> torch.Tensor:
    """`greedy` as a draw on the device of the logits: see `read_draw`."""
    best, token = logits.max(-1)
    return torch.stack((best.double(), token.double()))
