"""Logits to probabilities to a token. Knows no models and no protocol state.

`race`, `pick` and `greedy` return a *draw*: a tensor [2] on the device that holds the numbers, with a check value, that
is finite where the logits were, and the token id. They wait for no device; `read_draw` does, and gives the id. On the
host `race` and `pick` compute in numpy, ten times faster than torch on few tokens; `race_on_device`,
`pick_on_device` and `shortlists_on_device` are what another device computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

import numpy as np
import numpy.typing as npt
import torch

from pearl.decoding.keys import EARLIEST, earliest, early, exponentials, exponentials_on_device, uniform
from pearl.errors import NumericalError
from pearl.protocol.options import Sampling

_LARGE = 4096  # tokens: where fewer are possible each takes part in a race
_LIKELY = 1e-4  # probability; a row has a few hundred tokens that are likelier
_PICK_BLOCK = 256  # tokens whose probabilities are summed up at once
SHORTLIST = 64  # tokens of a row that are ranked: one that is less likely seldom wins
_BLOCK, _MOST_ABOVE = 64, 16  # tokens whose largest is looked for first; times what is asked for that it may leave
_TOP_P_SHORTLIST = 256  # a nucleus rarely holds more tokens; sorting these is 20 times cheaper than the vocabulary


Shortlist = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # ids and logits


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


def on_host(draws: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Draws for `read_draw`, for all of which their device is waited for once."""
    return list(draws) if draws[0].is_cpu else list(torch.stack(list(draws)).cpu())


def race(probs: torch.Tensor, key: int) -> torch.Tensor:
    """Draw a token from `probs` [vocab] (need not sum to 1): argmin over tokens of E_token / probs[token].

    Token i wins with probability probs[i] / sum.  Two sides that race with the same key on close distributions mostly
    get the same winner: the basis of the coupled rule.  The check value is not finite where no probability is above 0.
    Source: "Coupling without communication", Daliri, Musco, Suresh 2024.
    """
    if not probs.is_cpu:
        return race_on_device(probs, key)
    weights = probs.numpy()
    possible = weights > 0  # of booleans what is not zero is found five times faster than of floats
    if np.count_nonzero(possible) < _LARGE:
        return _draw(*_first(weights, np.flatnonzero(possible), key))
    first = _first(weights, np.flatnonzero(weights > _LIKELY), key)
    if first[0] == inf:
        return _draw(*_first(weights, np.flatnonzero(possible), key))
    # Any other token wins only if its exponential is small; of which that is true takes no logarithm to tell.
    bound = first[0] * _LIKELY
    others, _ = _earlier(key, len(weights), bound)
    return _draw(*min(first, _first(weights, others[possible[others]], key)))


def races_of_logits(
    rows: Sequence[torch.Tensor], keys: Sequence[int], temperature: float, tops: Sequence[Shortlist]
) -> tuple[list[torch.Tensor], npt.NDArray[np.float64]]:
    """`race` on the distributions of logits [vocab] on the host, whose likeliest tokens are known: half the time.

    Several at once take little longer than one.

    No other token is likelier than the last of these, so of the others only the few with the smallest exponentials can
    win, and nothing is computed for the rest.  The winner is that of `race`, except where two times differ by less than
    float32 rounds probabilities.

    Args:
        rows, keys, tops: of each race; `tops` are `shortlists` of the rows.
        temperature: above 0; nothing is filtered out.

    Returns:
        The draws, and when each of each race's `top` comes in: [rows, top].
    """
    ids, logits = (np.stack(each) for each in zip(*tops, strict=True))
    draws = []
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        weights = np.exp((logits - logits[:, :1]) / temperature)
        times = exponentials(np.array(keys, np.uint64)[:, None], ids) / weights
        best = times.argmin(-1).tolist()
        for n, (row, key) in enumerate(zip(rows, keys, strict=True)):
            largest, least = float(logits[n, 0]), float(weights[n, -1])
            if not isfinite(largest):
                times[n] = inf
                draws.append(_draw(inf, 0))
                continue
            first = float(times[n, best[n]]), int(ids[n, best[n]])
            others, their_times = _earlier(key, len(row), first[0] * least)
            if len(others):
                theirs = row.numpy()[others].astype(np.float64) - largest
                later = their_times / np.exp(theirs / temperature)
                soonest = int(np.argmin(later))
                first = min(first, (float(later[soonest]), int(others[soonest])))
            draws.append(_draw(*first))
    return draws, times


def _earlier(key: int, vocab_size: int, bound: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids below `vocab_size` whose exponentials are at most `bound`, seldom one that is not quite; and these."""
    if bound > EARLIEST:
        ids = early(key, vocab_size, bound)
        return ids, exponentials(key, ids)
    ids, times = earliest(key, vocab_size)
    count = int(times.searchsorted(bound, side="right"))
    return ids[:count], times[:count]


def _first(weights: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], key: int) -> tuple[float, int]:
    """When the first of `ids` comes in a race, and which it is: the lowest where several do. Infinity where none is."""
    if not len(ids):
        return inf, 0
    times = exponentials(key, ids) / weights[ids].astype(np.float64)
    best = int(np.argmin(times))
    return float(times[best]), int(ids[best])


def race_on_device(probs: torch.Tensor, key: int | Sequence[int]) -> torch.Tensor:
    """`race` in torch, on the device of `probs`: [vocab] and a key, or [rows, vocab] and a key a row: draws [rows, 2].

    The winner is the host's, except where two times differ by less than the rounding of the device's logarithm.
    """
    times = exponentials_on_device(key, probs.shape[-1], probs.device)
    best, token = (times / probs.double()).min(-1)  # infinite where the probability is 0
    return torch.stack((best, token.double()), -1)


def pick(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """Draw a token from `probs` [vocab] (need not sum to 1) by inverting the cumulative sum: one uniform number.

    Ten times cheaper than a race over a whole vocabulary; for draws that the other side need not repeat.  The check
    value is not finite where the sum is not, or is 0.

    Args:
        otherwise: [vocab], drawn from where `probs` is all zero.
    """
    if not probs.is_cpu:
        return pick_on_device(probs, key, otherwise)
    weights = probs.numpy()
    # Sums of blocks first, then within the block that is hit: an accumulation over all takes ten times as long. Of
    # blocks float32 is enough: it rounds no more than the probabilities have been, and takes a fifth of the time.
    whole = len(weights) - len(weights) % _PICK_BLOCK
    of_blocks = probs[:whole].view(-1, _PICK_BLOCK).sum(-1).numpy()
    if whole < len(weights):
        of_blocks = np.append(of_blocks, weights[whole:].sum())
    sums = np.add.accumulate(of_blocks, dtype=np.float64)
    total = float(sums[-1])
    if total == 0 and otherwise is not None:
        return pick(otherwise, key)
    if not 0 < total < inf:  # NaN is neither
        return _draw(inf, 0)
    left = uniform(key) * total
    block = int(np.searchsorted(sums, left, side="right"))
    if block == len(sums):  # the product has been rounded up to the total
        return _draw(total, int(np.flatnonzero(weights)[-1]))
    start = block * _PICK_BLOCK
    within = np.add.accumulate(weights[start : start + _PICK_BLOCK], dtype=np.float64)
    index = int(np.searchsorted(within, left - (float(sums[block - 1]) if block else 0.0), side="right"))
    if index == len(within):  # the sums of one block, added in another order, have been rounded apart
        index = int(np.flatnonzero(weights[start : start + _PICK_BLOCK])[-1])
    return _draw(total, start + index)


def _draw(check: float, token: int) -> torch.Tensor:
    return torch.tensor((check, token), dtype=torch.float64)


def pick_on_device(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """`pick` in torch, on the device of `probs`.

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
        if scores.is_cpu and not sampling.min_p:
            return _nucleus_on_host(scores, sampling.top_p)
        if scores.is_cpu and scores.dim() > 1:  # row by row a shortlist may do
            rows = [_keep_nucleus(row, sampling.top_p) for row in scores.flatten(0, -2)]
            scores = torch.stack(rows).view_as(scores)
        else:
            scores = _keep_nucleus(scores, sampling.top_p)
    if sampling.min_p > 0:
        probs = torch.softmax(scores, -1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return torch.softmax(scores, -1)


def shortlist(logits: torch.Tensor, count: int = SHORTLIST) -> Shortlist:
    """The `count` likeliest tokens of logits [vocab], descending."""
    count = min(count, len(logits))
    ids = _above_most(logits, count)
    if ids is None:
        found, indices = torch.topk(logits, count)
        top, ids = found.double().cpu().numpy(), indices.cpu().numpy()
    else:
        top = logits.numpy()[ids]
        order = np.argsort(-top, kind="stable")[:count]
        top, ids = top[order].astype(np.float64), ids[order]
    return ids, top


def shortlists(rows: Sequence[torch.Tensor]) -> list[Shortlist]:
    """`shortlist` of each; another device than the host is waited for once."""
    return [shortlist(row) for row in rows] if rows[0].is_cpu else shortlists_on_device(rows)


def shortlists_on_device(rows: Sequence[torch.Tensor]) -> list[Shortlist]:
    """`shortlists`, found on the device that holds the rows, and brought to the host in one piece."""
    found, indices = torch.stack(list(rows)).topk(min(SHORTLIST, len(rows[0])))
    ids, logits = torch.stack((indices.double(), found.double())).cpu().numpy()
    return list(zip(ids.astype(np.int64), logits, strict=True))


def shares(logits: npt.NDArray[np.float64], temperature: float) -> npt.NDArray[np.float64]:
    """The probabilities of logits [n], descending, that sum to 1 among them."""
    with np.errstate(invalid="ignore"):  # of a row that is not finite it is for the draw to tell
        weights = np.exp((logits - logits[0]) / (temperature or 1.0))
    return weights / weights.sum()


def _above_most(logits: torch.Tensor, count: int) -> npt.NDArray[np.int64] | None:
    """The ids of somewhat more than `count` tokens, the largest logits among them; None where that is not faster.

    Each of the `count` blocks with the largest maxima has a token that is at least as large as the least of these. It
    takes a third of the time of `topk`.  Where many are equal to that least some of them will do.
    """
    if not logits.is_cpu or logits.dtype is not torch.float32 or len(logits) % _BLOCK or len(logits) < _BLOCK * count:
        return None
    largest = logits.view(-1, _BLOCK).amax(-1).numpy()
    least = np.partition(largest, -count)[-count]
    blocks = np.flatnonzero(largest >= least)
    values = logits.numpy().reshape(-1, _BLOCK)[blocks].ravel()
    found = np.flatnonzero(values >= least)
    if len(found) > _MOST_ABOVE * count:
        above = np.flatnonzero(values > least)
        found = np.concatenate((above, np.flatnonzero(values == least)[:count])) if len(above) < count else above
    if len(found) > _MOST_ABOVE * count or np.isnan(largest).any():
        return None
    return blocks[found // _BLOCK] * _BLOCK + found % _BLOCK


def _nucleus_on_host(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The probabilities of scores [..., vocab] within each row's nucleus, 0 elsewhere: `_keep_nucleus` and a softmax.

    Only the nucleus is sorted, in numpy, and its softmax written into zeros: half the time on 32,000 tokens.
    """
    probs = torch.zeros_like(scores)
    for row, into in zip(scores.view(-1, scores.shape[-1]), probs.view(-1, scores.shape[-1]).numpy(), strict=True):
        ids = _nucleus(row, top_p)
        into[ids] = torch.softmax(torch.from_numpy(row.numpy()[ids]), -1).numpy()
    return probs


def _nucleus(row: torch.Tensor, top_p: float) -> npt.NDArray[np.int64]:
    """Ids of the likeliest tokens of scores [vocab] until those before a token hold `top_p`, descending.

    None of a row that is not finite: nothing can be drawn from it.
    """
    shares = torch.softmax(row, -1).numpy()
    for size in (min(_TOP_P_SHORTLIST, len(row)), len(row)):
        ids = _likeliest(row, size)
        before = np.cumsum(shares[ids]) - shares[ids]
        if size == len(row) or before[-1] >= top_p:
            break
    return ids[: np.searchsorted(before, np.float32(top_p))]


def _likeliest(row: torch.Tensor, count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest of [vocab], descending."""
    above = _above_most(row, count)
    if above is None:
        return torch.topk(row, count).indices.numpy()
    return above[np.argsort(-row.numpy()[above], kind="stable")[:count]]


def _keep_nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the likeliest tokens until those before a token hold `top_p`; at least one. scores: [..., vocab]."""
    total, vocab = torch.logsumexp(scores, -1, keepdim=True), scores.shape[-1]
    # Only the host can tell whether a shortlist is long enough: asking would mean waiting for the device.
    shortlist = _TOP_P_SHORTLIST if scores.is_cpu and scores.dim() == 1 else vocab
    for size in (min(shortlist, vocab), vocab):
        top, ids = torch.topk(scores, size)
        probs = torch.exp(top - total)
        before = torch.cumsum(probs, -1) - probs
        if size == vocab or before[-1] >= top_p:
            break
    return torch.full_like(scores, -torch.inf).scatter_(-1, ids, top.masked_fill(before >= top_p, -torch.inf))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of logits [..., vocab], the first of equals, as in transformers; NaN counts as the largest.

    Returns draws [..., 2].
    """
    if logits.is_cpu and logits.dtype is torch.float32:  # in numpy: a tenth of the time
        if logits.dim() > 1:
            return torch.stack([greedy(row) for row in logits])
        row = logits.numpy()
        first = int(row.argmax())
        return _draw(row.item(first), first)
    best, token = logits.max(-1)
    return torch.stack((best.double(), token.double()), -1)
