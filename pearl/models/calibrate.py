"""The start-up measurement: some forwards of both models at the same time, as they will run.

The target's and the draft's worker each call their half right after they have connected.
"""

from __future__ import annotations

import time
from statistics import median

from pearl.errors import ModelError
from pearl.models.gpu.row_table import SIZES
from pearl.models.runner import ModelRunner, feed_chain

FED = (1, 2, 4, 8)  # tokens fed to the target; other sizes are interpolated
_CONTEXT = 32  # tokens in the cache
_REPEATS = 3
_DRAFT_SECONDS = 1.0  # the draft keeps going while the target measures its several sizes
_MOST_DRAFTS = 200


def calibrate_target(runner: ModelRunner, brief: bool = False) -> tuple[tuple[int, float], ...]:
    """(fed, seconds) of forwards fed 1, 2, 4 and 8 tokens; leaves the cache empty.

    Where forwards have two sizes, also of as many as fit the smaller, of one more, and of as many as fit the larger.

    `brief`: measure none, for the times are known; only run the model once.
    """
    base = 0 if brief else _fill(runner)
    forward_seconds(runner, base, 1)  # a process's first forwards are slower
    if brief:
        runner.rollback(0)
        return ()
    few, most = SIZES[0], runner.capabilities.tree_nodes
    more = (few, few + 1, most) if runner.capabilities.launches and most > few else ()
    sizes = [fed for fed in (*FED, *more) if base + fed <= runner.context]
    found = tuple(
        (fed, median(forward_seconds(runner, base, fed) for _ in range(_REPEATS))) for fed in sizes
    )
    runner.rollback(0)
    return found


def calibrate_draft(runner: ModelRunner, brief: bool = False) -> tuple[float, float]:
    """(seconds of a one-token forward, seconds per token of a longer one); leaves the cache empty.

    The former is the median over about a second, or over few forwards if `brief`. The latter is an upper estimate, from
    this process's first forward.
    """
    began = time.monotonic()
    base = _fill(runner)
    runner.synchronize()
    each = (time.monotonic() - began) / base
    end = time.monotonic() + (0.0 if brief else _DRAFT_SECONDS)
    forward_seconds(runner, base, 1)
    taken: list[float] = []
    while len(taken) < _REPEATS or (time.monotonic() < end and len(taken) < _MOST_DRAFTS):
        taken.append(forward_seconds(runner, base, 1))
    runner.rollback(0)
    return median(taken), each


def _fill(runner: ModelRunner) -> int:
    runner.rollback(0)
    count = max(1, min(_CONTEXT, runner.context - max(FED)))
    feed_chain(runner, [i % runner.vocab_size for i in range(count)], 0, prompt=True)
    return count


def forward_seconds(runner: ModelRunner, base: int, fed: int) -> float:
    """The time of one forward fed `fed` tokens after `base` others."""
    runner.rollback(base)
    runner.synchronize()
    began = time.perf_counter()
    logits = feed_chain(runner, [i % runner.vocab_size for i in range(fed)], fed)
    runner.synchronize()
    seconds = time.perf_counter() - began
    if not logits.amax(-1).isfinite().all():  # NaN spreads to the maximum
        raise ModelError(
            "Its logits are not finite. Try a wider dtype (bfloat16 or float32); or it is damaged."
        )
    return seconds
