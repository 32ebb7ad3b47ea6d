"""Sampling, from logits to probabilities to a token. Knows no models and no protocol state.

A *draw* is a tensor [2] on the device of the logits: [check value, token id].  The check value is
finite if the logits are finite.  Functions that draw do not wait for the device; `read_draw`,
`on_host` and `read_shortlist` do.

Three operations have faster forms for the host.  With 49,152 tokens on one core, a race takes 0.18
ms instead of 0.48, `pick` 0.02 ms instead of 0.07, and top-p 0.1 ms instead of 4.  On a GPU with
Triton, races run as kernels.
"""

import logging
from collections.abc import Sequence
from functools import cache
from math import exp, inf, isfinite, log
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pearl.config.options import RequestOptions
from pearl.decoding.keys import EARLY, early_ids, exponentials, key_column, uniform
from pearl.errors import NumericalError

_log = logging.getLogger(__name__)

# A token is likely if its probability exceeds this times the highest. So a few hundred tokens are.
_LIKELY = 1e-4
_PICK_BLOCK = 256  # tokens whose probabilities are summed at once
SHORTLIST = 64  # number of the likeliest tokens that are ranked
_BLOCK = 64  # tokens of a block in the two-level top-k
_MAX_CANDIDATES = 16  # per token of the top k; with more, the two-level top-k does not pay
# Tokens that top-p ranks at first. Few nuclei are larger, and to rank the whole vocabulary takes 20
# times as long.
_NUCLEUS = 256

# (ids, logits) of the likeliest tokens, descending
Shortlist = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """Return the module `draw_kernels`, compiled for this GPU.

    Return None for a CPU, and if Triton is missing or fails.
    """
    if device.type != "cuda":
        return None
    try:
        from pearl.decoding import draw_kernels

        draw_kernels.race_rows(torch.zeros(1, 16, device=device), [1]).cpu()
    except Exception as problem:  # the errors of Triton's compilers have no common base
        _log.warning("our kernel for draws does not run here, torch's operations draw: %s", problem)
        return None
    return draw_kernels


def read_draw(draw: torch.Tensor) -> int:
    """Return the token id of a draw; wait for the draw's device once.

    Raises `NumericalError` if the check value is not finite, which means that the logits were not.
    """
    check, token = draw.tolist()
    if not isfinite(check):
        raise NumericalError(
            "a model's logits are not finite. Try a wider dtype (bfloat16 or float32); if it happens with every "
            "prompt, the checkpoint is damaged."
        )
    return int(token)


def on_host(draws: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of draws on the host; wait for their device once."""
    if not draws[0].is_cpu:
        draws = torch.stack(list(draws)).cpu().unbind()
    return list(draws)


def race(probs: torch.Tensor, key: int) -> torch.Tensor:
    """Draw a token from `probs` [vocab] by an exponential race: argmin(E / probs).

    E are the `exponentials` of `key`.  `probs` need not sum to 1; token i wins with probability
    probs[i] / sum(probs).  If two models race with the same key on similar distributions, they
    mostly get the same winner.  The coupled rule builds on this.  If no probability is above 0, the
    check value is not finite.  Source: "Coupling without communication", Daliri, Musco, Suresh
    2024.
    """
    if not probs.is_cpu:
        return race_rows(probs[None], [key])[0]
    weights = probs.numpy()
    ids = np.flatnonzero(weights > 0)  # NumPy finds booleans five times faster than floats
    time, token = _winner(weights[ids], ids, key)
    return _draw(time, token)


def race_of_logits(
    logits: torch.Tensor, temperature: float, key: int, top: Shortlist | None = None
) -> torch.Tensor:
    """Run a `race` on softmax(logits / temperature) of logits [vocab].

    On a CPU only tokens that can win are computed. The winner is that of `race`, unless the two
    least times differ by less than the rounding of float32 probabilities.

    Args:
        top: the shortlist of the logits, which saves time; None if it is not known.
    """
    if not (logits.is_cpu and logits.dtype is torch.float32):
        return race_rows_of_logits(logits[None], temperature, [key])[0]
    scores = logits.numpy()
    largest = scores.max() if top is None else top[1][0]
    if not isfinite(largest):
        return _draw(inf, 0)
    early = early_ids(key, len(scores))
    if top is None:
        likely = np.flatnonzero(scores > largest + temperature * log(_LIKELY))
        max_weight = _LIKELY
    else:
        likely, ranked_logits = top
        max_weight = exp((ranked_logits[-1] - largest) / temperature)
    ids = np.concatenate((likely, early))
    with np.errstate(divide="ignore"):
        weights = np.exp((scores[ids].astype(np.float64) - largest) / temperature)
        time, token = _winner(weights, ids, key)
    # A token not in `ids` has an exponential of at least EARLY, and a weight of at most `max_weight`.
    if time * max_weight < EARLY:
        return _draw(time, token)
    if top is not None:
        return race_of_logits(logits, temperature, key)
    return race(torch.softmax(logits / temperature, -1), key)


def _winner(weights: npt.NDArray[Any], ids: npt.NDArray[np.int64], key: int) -> tuple[float, int]:
    """Return (time, id) of the winner of a race among `ids`; the time is infinite if there are no ids."""
    if not len(ids):
        return inf, 0
    times = exponentials(key, ids).numpy() / weights.astype(np.float64)
    best = int(times.argmin())
    return float(times[best]), int(ids[best])


def race_rows(probs: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """Run a `race` for each row of `probs` [n, vocab], on any device; return draws [n, 2].

    The winner is the same as on a CPU, unless the two least times differ by less than the rounding
    of the device's logarithm.
    """
    kernels = kernels_on(probs.device)
    if kernels is not None:
        return kernels.race_rows(probs.log(), keys)
    ids = torch.arange(probs.shape[-1], device=probs.device)
    times = exponentials(key_column(keys, probs.device), ids) / probs.double()
    best, token = times.min(-1)  # infinite where the probability is 0
    return torch.stack((best, token.double()), -1)


def race_rows_of_logits(
    logits: torch.Tensor, temperature: float, keys: Sequence[int]
) -> torch.Tensor:
    """Run `race_rows` on softmax(logits / temperature) of logits [n, vocab]."""
    kernels = kernels_on(logits.device)
    if kernels is not None:
        return kernels.race_rows(logits.float(), keys, temperature)
    return race_rows(torch.softmax(logits.float() / temperature, -1), keys)


def pick(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """Draw a token from `probs` [vocab]: invert the cumulative sum at one uniform random number.

    `probs` need not sum to 1.  This is ten times cheaper than a race.  A race is only needed if
    draft and target should draw the same token.  The check value is not finite if the sum is 0 or
    not finite.

    Args:
        otherwise: probabilities [vocab] to draw from if `probs` is 0 everywhere.
    """
    if not probs.is_cpu:
        return pick_on_device(probs, key, otherwise)
    weights = probs.numpy()
    # First find the block, then the token within it, because accumulating the whole row takes ten
    # times as long. Summing blocks in float32 takes a fifth of the time, and rounds no more than
    # the probabilities themselves are rounded.
    in_blocks = len(weights) - len(weights) % _PICK_BLOCK
    block_sums = probs[:in_blocks].view(-1, _PICK_BLOCK).sum(-1).numpy()
    if in_blocks < len(weights):
        block_sums = np.append(block_sums, weights[in_blocks:].sum())
    sums = np.add.accumulate(block_sums, dtype=np.float64)
    total = float(sums[-1])
    if total == 0 and otherwise is not None:
        return pick(otherwise, key)
    if not 0 < total < inf:  # NaN is neither
        return _draw(inf, 0)
    place = uniform(key) * total
    block = int(np.searchsorted(sums, place, side="right"))
    if block == len(sums):  # rounding took the product up to the total
        return _draw(total, int(np.flatnonzero(weights)[-1]))
    start = block * _PICK_BLOCK
    block_weights = weights[start : start + _PICK_BLOCK]
    within = np.add.accumulate(block_weights, dtype=np.float64)
    if block:
        place -= float(sums[block - 1])
    index = int(np.searchsorted(within, place, side="right"))
    if index == len(within):  # the same sum in another order is rounded differently
        index = int(np.flatnonzero(block_weights)[-1])
    return _draw(total, start + index)


def _draw(check: float, token: int) -> torch.Tensor:
    return torch.tensor((check, token), dtype=torch.float64)


def pick_on_device(
    probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw like `pick`, on any device. Sums may be rounded differently than on a CPU."""
    if otherwise is not None:
        probs = torch.where(probs.any(), probs, otherwise)
    cumulative = torch.cumsum(probs, -1, dtype=torch.float64)
    total = cumulative[-1]
    index = torch.searchsorted(cumulative, uniform(key) * total, right=True)
    highest = torch.searchsorted(cumulative, total)  # rounding may take the product to the total
    token = torch.minimum(index, highest)
    return torch.stack((total.log(), token.double()))  # the logarithm of 0 is not finite


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Draw the likeliest token of logits [..., vocab]; return draws [..., 2].

    If several tokens are equally likely, draw the one with the lowest id, as transformers does. A
    NaN counts as the largest number, so that the check value is not finite.
    """
    if logits.dim() == 1 and logits.is_cpu and logits.dtype is torch.float32:
        row = logits.numpy()  # takes a fifth of torch's time
        likeliest = int(row.argmax())
        return _draw(row.item(likeliest), likeliest)
    best, token = logits.max(-1)
    return torch.stack((best.double(), token.double()), -1)


def probabilities(logits: torch.Tensor, options: RequestOptions) -> torch.Tensor:
    """Return the sampling distribution: softmax after temperature, top-k, top-p and min-p, in transformers' order.

    Ties: top-k keeps every token that is as likely as the k-th. If top-p keeps only some of several equally likely
    tokens, it keeps those with the highest ids.

    Args:
        logits: [..., vocab], any float dtype; rows are independent.
        options: temperature > 0 (for temperature 0 use `greedy`).

    Returns:
        Probabilities [..., vocab], float32, that sum to 1 up to rounding; exactly 0 for tokens that
        are filtered out.
    """
    scores = logits if logits.dtype is torch.float32 else logits.float()
    if options.temperature != 1:
        scores = scores / options.temperature
    if 0 < options.top_k < scores.shape[-1]:
        least = torch.topk(scores, options.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if options.top_p < 1:
        if scores.is_cpu:
            return _nucleus_on_host(scores, options.top_p, options.min_p)
        scores = nucleus(scores, options.top_p)
    if options.min_p > 0:
        probs = torch.softmax(scores, -1)
        least = options.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(probs < least, -torch.inf)
    return torch.softmax(scores, -1)


def nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Apply top-p: set scores [..., vocab] to minus infinity, except those of the nucleus.

    The nucleus is the smallest set of likeliest tokens whose probabilities sum to at least `top_p`.
    Equally likely tokens rank by descending id, as they would in transformers if its sort were
    stable.
    """
    top, places = scores.flip(-1).sort(descending=True, stable=True)
    probs = torch.softmax(top, -1)
    mass_above = torch.cumsum(probs, -1) - probs
    ids = scores.shape[-1] - 1 - places
    top = top.masked_fill(mass_above >= top_p, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(-1, ids, top)


def _nucleus_on_host(scores: torch.Tensor, top_p: float, min_p: float) -> torch.Tensor:
    """Return the probabilities of scores [..., vocab] after top-p and min-p.

    Sorts only the nucleus of each row, not the whole vocabulary.
    """
    vocab_size = scores.shape[-1]
    probs = torch.zeros_like(scores)
    prob_rows = probs.view(-1, vocab_size).numpy()
    for row, prob_row in zip(scores.view(-1, vocab_size), prob_rows, strict=True):
        row_scores = row.numpy()
        ids = _ends_highest(_nucleus_ids(row, top_p), row_scores)
        if min_p > 0 and len(ids):
            nucleus_probs = torch.softmax(torch.from_numpy(row_scores[ids]), -1)
            ids = ids[(nucleus_probs >= min_p * nucleus_probs[0]).numpy()]
        prob_row[ids] = torch.softmax(torch.from_numpy(row_scores[ids]), -1).numpy()
    return probs


def _nucleus_ids(row: torch.Tensor, top_p: float) -> npt.NDArray[np.int64]:
    """Return the ids of the `nucleus` of scores [vocab], the likeliest first."""
    vocab_size = len(row)
    probs = torch.softmax(row, -1).numpy()
    for size in (min(_NUCLEUS, vocab_size), vocab_size):
        ids = _top_ids(row, size)
        mass_above = np.cumsum(probs[ids]) - probs[ids]
        if size == vocab_size or mass_above[-1] >= top_p:
            break
    return ids[: np.searchsorted(mass_above, np.float32(top_p))]


def _ends_highest(
    ids: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """Replace the least likely tokens of a nucleus by equally likely tokens with higher ids.

    Example: the scores are 3 1 1 1, and the nucleus is 0 1. The tokens 1 to 3 are equally likely,
    so return 0 3.

    Args:
        ids: the nucleus, the likeliest first; empty for a row that is not finite.
        scores: [vocab].
    """
    if not len(ids):
        return ids
    above = ids[scores[ids] > scores[ids[-1]]]
    equal = np.flatnonzero(scores == scores[ids[-1]])
    return np.concatenate((above, equal[len(equal) + len(above) - len(ids) :]))


def _top_ids(row: torch.Tensor, count: int) -> npt.NDArray[np.int64]:
    """Return the ids of the `count` largest numbers of a row [vocab] on the host, the largest first."""
    above = _above_most(row, count)
    if above is None:
        return torch.topk(row, count).indices.numpy()
    return above[np.argsort(-row.numpy()[above], kind="stable")[:count]]


def _above_most(logits: torch.Tensor, count: int) -> npt.NDArray[np.int64] | None:
    """Return the ids of the `count` largest logits and of a few others; None if that does not pay.

    The method is a two-level top-k, which takes a third of the time of `topk`.  The logits are
    divided into blocks of `_BLOCK`.  Let `least` be the `count`-th largest of the blocks' maxima.
    Then `count` blocks have a logit of at least `least`, so the `count` largest logits are at least
    `least`.  If many logits equal `least`, it does not matter which of them are returned.
    """
    if (
        not logits.is_cpu
        or logits.dtype is not torch.float32
        or len(logits) % _BLOCK
        or len(logits) < _BLOCK * count
    ):
        return None
    largest = logits.view(-1, _BLOCK).amax(-1).numpy()
    least = np.partition(largest, -count)[-count]
    blocks = np.flatnonzero(largest >= least)
    values = logits.numpy().reshape(-1, _BLOCK)[blocks].ravel()
    places = np.flatnonzero(values >= least)
    if len(places) > _MAX_CANDIDATES * count:
        places = np.flatnonzero(values > least)
        if len(places) < count:
            places = np.concatenate((places, np.flatnonzero(values == least)[:count]))
    if len(places) > _MAX_CANDIDATES * count or np.isnan(largest).any():
        return None
    return blocks[places // _BLOCK] * _BLOCK + places % _BLOCK


def shortlist(logits: torch.Tensor) -> torch.Tensor:
    """Return the `SHORTLIST` likeliest tokens of logits [vocab], to be read by `read_shortlist`.

    The result is [ids, logits], a tensor [2, n] float64, the likeliest token first.
    """
    count = min(SHORTLIST, len(logits))
    if logits.is_cpu and logits.dtype is torch.float32:
        top_ids = _top_ids(logits, count)
        return torch.from_numpy(np.stack((top_ids, logits.numpy()[top_ids]), dtype=np.float64))
    values, ids = torch.topk(logits, count)
    return torch.stack((ids.double(), values.double()))


def read_shortlist(*shortlists: torch.Tensor) -> list[Shortlist]:
    """Return (ids, logits) of each shortlist, on the host; wait for their device once."""
    rows = []
    for shortlist_row in on_host(shortlists):
        ids, logits = shortlist_row.numpy()
        rows.append((ids.astype(np.int64), logits))
    return rows


def shares(logits: npt.NDArray[np.float64], temperature: float) -> npt.NDArray[np.float64]:
    """Return softmax(logits / temperature); temperature 0 counts as 1.

    Args:
        logits: [n], in descending order.
    """
    with np.errstate(invalid="ignore"):  # if a row is not finite, its draw says so
        weights = np.exp((logits - logits[0]) / (temperature or 1.0))
    return weights / weights.sum()
