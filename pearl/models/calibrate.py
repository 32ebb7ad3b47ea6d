"""The start-up measurement: forwards of both models are timed at the same time, as they will run.

Right after they have connected, the target's worker calls `calibrate_target`, and the draft's
worker calls `calibrate_draft`.
"""

import time
from statistics import median

from pearl.errors import ModelError
from pearl.models.gpu.row_table import SIZES
from pearl.models.runner import ModelRunner, feed_chain

FED = (1, 2, 4, 8)  # tokens fed to the target; other sizes are interpolated
_CONTEXT = 32  # tokens in the cache before each forward
_REPEATS = 3
_DRAFT_SECONDS = 1.0  # the draft goes on for so long, because the target measures several sizes
_MOST_DRAFTS = 200


def calibrate_target(runner: ModelRunner, brief: bool = False) -> tuple[tuple[int, float], ...]:
    """Time forwards that are fed 1, 2, 4 and 8 tokens; return (tokens fed, seconds) of each.

    If the runner has CUDA graphs of two sizes, such as 16 and 64 rows, forwards of 16, 17 and 64
    tokens are timed too.  The cache is empty afterwards.

    Args:
        brief: whether the times are known already. The model is then run only once, and no times
            are returned.
    """
    if brief:
        base = 0
    else:
        base = _fill(runner)
    forward_seconds(runner, base, 1)  # a process's first forwards are slower
    sizes: list[int] = []
    if not brief:
        sizes.extend(FED)
        few = SIZES[0]
        most = runner.capabilities.tree_nodes
        if runner.capabilities.launches and most > few:
            sizes += [few, few + 1, most]
    times = []
    for fed in sizes:
        if base + fed <= runner.context:
            seconds = median(forward_seconds(runner, base, fed) for _ in range(_REPEATS))
            times.append((fed, seconds))
    runner.rollback(0)
    return tuple(times)


def time_once(runner: ModelRunner) -> tuple[tuple[int, float], ...]:
    """Time four forwards, fed 1, 2, 4 and 8 tokens; return (tokens fed, seconds) of each.

    This is short enough for an engine's start even if a forward takes a tenth of a second.  The
    cache is empty afterwards.
    """
    forward_seconds(runner, 0, 1)  # not kept: the first forward on a set of cores is slower
    times = []
    for fed in FED:
        if fed <= runner.context:
            times.append((fed, forward_seconds(runner, 0, fed)))
    runner.rollback(0)
    return tuple(times)


def calibrate_draft(runner: ModelRunner, brief: bool = False) -> tuple[float, float]:
    """Return (seconds of a one-token forward, seconds per token of a longer forward).

    The first is the median over about a second of forwards, or over a few forwards if `brief`.  The
    second is an upper estimate, because it comes from this process's first forward, which is slow.
    The cache is empty afterwards.
    """
    began = time.monotonic()
    base = _fill(runner)
    runner.synchronize()
    token_seconds = (time.monotonic() - began) / base
    end = time.monotonic() + (0.0 if brief else _DRAFT_SECONDS)
    forward_seconds(runner, base, 1)
    times: list[float] = []
    while len(times) < _REPEATS or (time.monotonic() < end and len(times) < _MOST_DRAFTS):
        times.append(forward_seconds(runner, base, 1))
    runner.rollback(0)
    return median(times), token_seconds


def _fill(runner: ModelRunner) -> int:
    runner.rollback(0)
    count = max(1, min(_CONTEXT, runner.context - max(FED)))
    feed_chain(runner, [i % runner.vocab_size for i in range(count)], 0, prompt=True)
    return count


def forward_seconds(runner: ModelRunner, base: int, fed: int) -> float:
    """Return the seconds of a forward that is fed `fed` tokens when the cache holds `base` tokens.

    Raises `ModelError` if the logits are not finite.
    """
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
