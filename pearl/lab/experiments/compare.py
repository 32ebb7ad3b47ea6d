"""All methods on one workload; windows that have to be chosen are found by trying."""

from __future__ import annotations

from collections.abc import Callable

from pearl.lab.experiments.workload import Totals, Workload, run
from pearl.lab.theory import MOST_GAMMA, sd_best_gamma
from pearl.protocol.options import RequestOptions

_SEARCH_TOKENS = 4000  # simulated for each window that is tried
_SEARCH_RADIUS = 2  # windows around the best so far to try: one noisy step must not end the climb

AR = RequestOptions("ar")
STREAM = RequestOptions("pearl", "stream")
FIXED = RequestOptions("pearl", "fixed")
OVERLAPPED = (RequestOptions("pearl-no-pre-verify"), RequestOptions("pearl-no-post-verify"), STREAM, FIXED)


def compare(workload: Workload, tell: Callable[[str], None] = lambda what: None) -> list[Totals]:
    """`ar`, `sd` at its best gamma, the ablations and `pearl` with either window, in this order.

    Args:
        tell: called with what is simulated next.
    """
    tell("the best window of sd")
    decodings = (AR, sd_at_best(workload), *OVERLAPPED)
    done = []
    for number, decoding in enumerate(decodings, 1):
        tell(f"{decoding.method}, window {decoding.window} ({number} of {len(decodings)})")
        done.append(run(workload, decoding))
    return done


def sd_at_best(workload: Workload) -> RequestOptions:
    timing = workload.timing
    start = sd_best_gamma(workload.acceptance, timing.t_draft, timing.t_target, timing.delay)
    return best(workload, lambda gamma: RequestOptions("sd", "fixed", gamma), start)


def best(workload: Workload, decoding: Callable[[int], RequestOptions], start: int) -> RequestOptions:
    """The decoding with the fastest window: climbs from `start` until no near window is faster."""
    part, rates = workload.part(_SEARCH_TOKENS), dict[int, float]()
    top, before = start, 0
    while top != before:
        before = top
        for window in range(max(1, top - _SEARCH_RADIUS), min(MOST_GAMMA, top + _SEARCH_RADIUS) + 1):
            if window not in rates:
                rates[window] = run(part, decoding(window)).tokens_per_second
        top = max(rates, key=lambda window: rates[window])
    return decoding(top)
