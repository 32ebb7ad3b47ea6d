"""Draws from rows of logits or probabilities in two Triton kernels: each block of a row, then the blocks of each row.

The device's form of `sampling.greedy`, `race_rows` and `pick`, which in torch's operations take 6 to 25 launches, and
as long as a small draft's forward.  All draws are in float64, [n, 2]: a check value, finite where the row was, and the
token id.  `TRITON_INTERPRET=1` runs the kernels on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from pearl.decoding.keys import key_column

_BLOCK = 1024  # tokens
_GOLDEN, _MIX1, _MIX2 = constexpr(0x9E3779B97F4A7C15), constexpr(0xBF58476D1CE4E5B9), constexpr(0x94D049BB133111EB)
_INF = constexpr(float("inf"))


@triton.jit
def _log_exponentials(key, ids):
    """Logarithms of `keys.exponentials` of token ids [n]."""
    x = (ids.to(tl.uint64) + 1) * _GOLDEN + key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    x = (x ^ (x >> 31)) >> 12
    return tl.log(-tl.log((x.to(tl.int64).to(tl.float64) + 0.5) * (1.0 / (1 << 52))))


@triton.jit
def _first_of_block(logits, keys, rate, best, V, RACES: constexpr, BLOCK: constexpr):
    """best [n, 2, blocks]: a block's least score and its token: log time of a race if RACES, else minus the logit."""
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row.to(tl.int64) * V + ids, mask=ids < V, other=-_INF).to(tl.float64)
    scores = -found * rate
    if RACES:
        scores += _log_exponentials(tl.load(keys + row), ids)
    scores = tl.where(found != found, -_INF, scores)  # NaN wins, and is reported
    at = best + row * 2 * blocks + block
    tl.store(at, tl.min(scores, 0))
    tl.store(at + blocks, (block * BLOCK + tl.argmin(scores, 0)).to(tl.float64))


@triton.jit
def _first_of_row(best, draws, blocks, MANY: constexpr):
    """draws [n, 2]: the least score of the blocks of each row, and its token."""
    row, block = tl.program_id(0), tl.arange(0, MANY)
    scores = tl.load(best + row * 2 * blocks + block, mask=block < blocks, other=_INF)
    tl.store(draws + 2 * row, tl.min(scores, 0))
    tl.store(draws + 2 * row + 1, tl.load(best + (row * 2 + 1) * blocks + tl.argmin(scores, 0)))


@triton.jit
def _sum_block(probs, sums, V, BLOCK: constexpr):
    """sums [n, blocks] of each block of probs [n, V]."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(probs + row.to(tl.int64) * V + ids, mask=ids < V, other=0.0).to(tl.float64)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(found, 0))


@triton.jit
def _invert(probs, keys, sums, draws, V, blocks, BLOCK: constexpr, MANY: constexpr):
    """draws [n, 2]: the logarithm of a row's sum, and the token at which the cumulative sum passes its uniform share.

    Rounding may take that share to the end of the row or of its block: then it is the last possible token there.
    """
    row, block, inside = tl.program_id(0), tl.arange(0, MANY), tl.arange(0, BLOCK)
    of_blocks = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    up_to = tl.cumsum(of_blocks, 0)
    total = tl.sum(of_blocks, 0)
    share = (tl.load(keys + row).to(tl.uint64, bitcast=True) >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))
    left = share * total
    last = tl.max(tl.where(of_blocks > 0, block, 0), 0)
    its = tl.minimum(tl.sum((up_to <= left).to(tl.int32), 0), last)
    left -= tl.sum(tl.where(block < its, of_blocks, 0.0), 0)
    ids = its * BLOCK + inside
    found = tl.load(probs + row.to(tl.int64) * V + ids, mask=ids < V, other=0.0).to(tl.float64)
    possible = tl.max(tl.where(found > 0, inside, 0), 0)
    index = tl.minimum(tl.sum((tl.cumsum(found, 0) <= left).to(tl.int32), 0), possible)
    tl.store(draws + 2 * row, tl.log(total))
    tl.store(draws + 2 * row + 1, (its * BLOCK + index).to(tl.float64))


def first(logits: torch.Tensor, keys: Sequence[int] | None = None, temperature: float = 1.0) -> torch.Tensor:
    """The likeliest token of each row of logits [n, vocab], the first of equals; with keys, the first of its race."""
    (n, vocab), device = logits.shape, logits.device
    blocks = triton.cdiv(vocab, _BLOCK)
    best = torch.empty(n, 2, blocks, dtype=torch.float64, device=device)
    draws = torch.empty(n, 2, dtype=torch.float64, device=device)
    column = best if keys is None else key_column(keys, device)
    logits, rate = logits.contiguous(), 1.0 / temperature
    _first_of_block[(n, blocks)](logits, column, rate, best, vocab, RACES=keys is not None, BLOCK=_BLOCK)
    _first_of_row[(n,)](best, draws, blocks, MANY=triton.next_power_of_2(blocks))
    return draws


def pick(probs: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """`sampling.pick` of each row of probs [n, vocab]."""
    (n, vocab), device = probs.shape, probs.device
    blocks, probs = triton.cdiv(vocab, _BLOCK), probs.contiguous()
    sums = torch.empty(n, blocks, dtype=torch.float64, device=device)
    draws = torch.empty(n, 2, dtype=torch.float64, device=device)
    _sum_block[(n, blocks)](probs, sums, vocab, BLOCK=_BLOCK)
    many = triton.next_power_of_2(blocks)
    _invert[(n,)](probs, key_column(keys, device), sums, draws, vocab, blocks, BLOCK=_BLOCK, MANY=many)
    return draws
