"""A trace as a workload: where its draft was right, and how long forwards took.

The draft is right at a position if its token there is the committed one.  It drafted that token after the committed
prefix, so under greedy or coupled decoding the answer depends on the text alone: any method or window would meet the
same.  Under the ratio rule that holds for `pearl` with any window, with or without pre-verify: draws are keyed by
position.  `sd` and `pearl-no-post-verify` draw bonus tokens, so a replay stands for another text as hard.  Positions
without a draft token get coins of the trace's own acceptance rate.

A forward lasts as the trace's did on average, by tokens fed, with what its worker did until the next (judging,
sampling, messages) but not its waits; beyond the recorded sizes, as the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import mean, median_low

from pearl.errors import TraceError
from pearl.lab.experiments.workload import Text, Workload
from pearl.lab.simulate import Timing
from pearl.protocol.options import RequestOptions
from pearl.protocol.speeds import Speeds
from pearl.trace.plain import from_plain
from pearl.trace.reading import FORWARDS, Slice, Trace

_ROUNDING = 1e-9  # seconds: rounding error of sums of a file's microseconds
_VERIFIES = ("pre-verify", "post-verify")


@dataclass(frozen=True)
class Recorded:
    """What a trace contains.

    Attributes:
        decoding: of its first request, without look-ahead, lookup and branches.
        guessing: what of these the first request had.
        tokens_per_second: of the run, after each request's first commit.
        known: number of positions that had a draft token.
    """

    workload: Workload
    decoding: RequestOptions
    guessing: RequestOptions
    tokens_per_second: float
    known: int


def recorded(trace: Trace, delay: float = 0.0, jitter: float = 0.0, seed: int = 0) -> Recorded:
    """Raises `TraceError` if no request ended, none was drafted for, or several ran at once."""
    whole = [request for request in trace.requests if "prompt_tokens" in request.args]
    if not whole:
        raise TraceError(f"{trace.path} holds no request that came to its end")
    if any(later.start < earlier.end - _ROUNDING for earlier, later in pairwise(whole)):
        raise TraceError(f"{trace.path}: requests ran side by side in it, and the simulation has one at a time")
    decisions = [[s for s in trace.target if s.name == "decide" and _within(s, request)] for request in whole]
    rights = [_right(each) for each in decisions]
    bits = [bit for right in rights for bit in right.values()]
    if not bits:
        raise TraceError(f"{trace.path}: no draft drafted for these texts; record a run of pearl or sd")
    commits = [_commits(each) for each in decisions]
    rate = _rate(commits)
    if not rate:
        raise TraceError(f"{trace.path}: all was committed at once; record a longer text")
    texts = [
        Text(request.args["prompt_tokens"], sum(n for _, n in committed), right)
        for request, committed, right in zip(whole, commits, rights, strict=True)
        if committed
    ]
    workload = Workload(_timing(trace, delay, jitter), mean(bits), tuple(texts), seed)
    decoding = _decoding(trace, whole[0])
    return Recorded(workload, decoding.changed(look_ahead=0, draft_lookup=0, branches=0), decoding, rate, len(bits))


def _within(one: Slice, request: Slice) -> bool:
    return one.start >= request.start - _ROUNDING and one.end <= request.end + _ROUNDING


def _decoding(trace: Trace, request: Slice) -> RequestOptions:
    """The request's options; a window that the runtime chose is the median of its choices."""
    decoding = from_plain(request.args["options"])
    assert isinstance(decoding, RequestOptions)
    windows = [int(value) for _, value in trace.counters.get("window", []) if value]
    return decoding.changed(gamma=decoding.gamma or (median_low(windows) if windows else None))


def _right(decisions: Iterable[Slice]) -> dict[int, bool]:
    """Position -> whether its draft token was accepted, from the commands to judge and their results."""
    right: dict[int, bool] = {}
    start = 0
    for one in decisions:
        event = one.args["event"]
        if event["type"] == "Judged":
            right |= dict.fromkeys(range(start, start + event["accepted"]), True)
            if event["token"] is not None:
                right[start + event["accepted"]] = False
        start = next((c["start"] for c in one.args.get("commands", ()) if c["type"] == "Judge"), start)
    return right


def _commits(decisions: Iterable[Slice]) -> list[tuple[float, int]]:
    """(time, tokens) of each commit."""
    return [
        (one.end, len(command["message"]["tokens"]))
        for one in decisions
        for command in one.args.get("commands", ())
        if command["type"] == "Deliver" and command["message"]["type"] == "Committed"
    ]


def _rate(commits: Iterable[list[tuple[float, int]]]) -> float:
    tokens, seconds = 0, 0.0
    for committed in filter(None, commits):
        tokens += sum(n for _, n in committed[1:])
        seconds += committed[-1][0] - committed[0][0]
    return tokens / seconds if seconds else 0.0


def _timing(trace: Trace, delay: float, jitter: float) -> Timing:
    drafts: dict[int, list[float]] = {}
    for one, seconds in steps(trace.draft):
        if one.name == "draft":
            drafts.setdefault(one.args.get("fed", one.args["n"]), []).append(seconds)
    verifies: dict[int, list[float]] = {}
    for one, seconds in steps(trace.target):
        if one.name in _VERIFIES:
            verifies.setdefault(one.args["n"], []).append(seconds)
    if not drafts or not verifies:
        raise TraceError(f"{trace.path} holds no forward of the {'target' if drafts else 'draft'} to take times from")
    plain = mean(drafts.get(1, [seconds for times in drafts.values() for seconds in times]))
    fed, target = (interpolated({n: mean(times) for n, times in each.items()}) for each in (drafts, verifies))
    return Timing(plain, target, delay, jitter, t_draft_fed=fed)


def interpolated(times: dict[int, float]) -> Callable[[int], float]:
    """Seconds of a forward by tokens fed: linear between the given sizes, constant beyond them."""
    speeds = Speeds()
    for fed, seconds in times.items():
        speeds.observe_target(fed, seconds)
    return cache(speeds.t_target)


def timing_of(
    t_draft: dict[int, float] | None, t_target: dict[int, float] | None, delay: float = 0.0, jitter: float = 0.0
) -> Timing:
    """From milliseconds by tokens fed; None: 10 for a draft forward, 50 for a target forward."""
    drafts, verifies = (
        interpolated({n: ms / 1e3 for n, ms in times.items()})
        for times in (t_draft or {1: 10.0}, t_target or {1: 50.0})
    )
    return Timing(drafts(1), verifies, delay / 1e3, jitter, t_draft_fed=drafts)


def steps(slices: Iterable[Slice]) -> list[tuple[Slice, float]]:
    """Each forward with its seconds, and those of its worker's other work until the next."""
    steps: list[tuple[Slice, float]] = []
    for one in slices:
        if one.name in FORWARDS:
            steps.append((one, one.seconds))
        elif steps and one.kind in ("busy", "communication"):
            forward, seconds = steps[-1]
            steps[-1] = forward, seconds + one.seconds
    return steps
