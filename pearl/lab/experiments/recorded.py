"""A recorded run as a workload: where its draft was right, and how long its forwards took.

**What a replay is.** Position i's bit says whether the draft's token at absolute position i agreed with the committed
one: judged and accepted, or judged and corrected, or passed by a target that ran ahead of it.  Each of these tokens was
drafted behind the committed prefix, so under greedy or coupled decoding the bit is a matter of the text alone: any
method or window would have met the same one.
Under the ratio rule so would `pearl` with any window, with and without pre-verify, for its draws are keyed by position;
`sd` and `pearl-no-post-verify` draw bonus tokens of their own, so there a replay stands for another text as hard.
Positions that nobody drafted (bonus tokens of the recorded run) get coins of the trace's own acceptance rate, seeded.

Forwards last what the trace's lasted in the mean, by the number of tokens fed, each with all else that its worker did
until the next but wait: judging, sampling, messages.  What lies beyond the sizes recorded lasts as long as the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import mean, median_low
from typing import Any

from pearl.errors import TraceError
from pearl.lab.experiments.retold import Retold, retold, texts_of
from pearl.lab.experiments.workload import Text, Workload
from pearl.lab.simulate import Timing
from pearl.models.recorded import RecordedTexts
from pearl.protocol.options import RequestOptions
from pearl.protocol.speeds import Speeds
from pearl.trace.plain import from_plain
from pearl.trace.reading import FORWARDS, Slice, Trace

_ROUNDING = 1e-9  # seconds: what a file's microseconds, added and subtracted, may be off
_VERIFIES = ("pre-verify", "post-verify")


@dataclass(frozen=True)
class Recorded:
    """What is in a trace.

    Attributes:
        decoding: of its first request.
        texts: what it tells of the texts themselves; None where it does not tell what the draft's rows said.
        tokens_per_second: the run's own, from each request's first commit on.
        known: positions whose bit the trace tells.
    """

    workload: Workload
    decoding: RequestOptions
    texts: RecordedTexts | None
    tokens_per_second: float
    known: int

    @property
    def published(self) -> RequestOptions:
        """Its decoding without what guesses beside the draft."""
        return self.decoding.changed(look_ahead=0, draft_lookup=0, branches=0)


def recorded(trace: Trace, delay: float = 0.0, jitter: float = 0.0, seed: int = 0) -> Recorded:
    """Raises `TraceError` where nothing was judged in it, or no request came to its end."""
    whole = [request for request in trace.requests if "prompt_tokens" in request.args]
    if not whole:
        raise TraceError(f"{trace.path} holds no request that came to its end")
    if any(later.start < earlier.end - _ROUNDING for earlier, later in pairwise(whole)):
        raise TraceError(f"{trace.path}: requests ran side by side in it, and the simulation has one at a time")
    inside = [[s for s in trace.target if _within(s, request)] for request in whole]
    told = retold(trace)
    again = [told.get(request.args["request"], Retold(())) for request in whole]
    rights = [_right(slices) | one.right for slices, one in zip(inside, again, strict=True)]
    bits = [bit for right in rights for bit in right.values()]
    if not bits:
        raise TraceError(f"{trace.path}: no draft drafted for these texts; record a run of pearl or sd")
    commits = [_commits(slices) for slices in inside]
    if not _rate(commits):
        raise TraceError(f"{trace.path}: all was committed at once; record a longer text")
    timing = _timing(trace, delay, jitter)
    texts = [
        Text(r.args["prompt_tokens"], sum(n for _, n in committed), right)
        for r, committed, right in zip(whole, commits, rights, strict=True)
        if committed
    ]
    workload = Workload(timing, mean(bits), tuple(texts), seed)
    retelling = texts_of(trace.path, [one for one in again if one.answer], seed)
    return Recorded(workload, _decoding(trace, whole[0]), retelling, _rate(commits), len(bits))


def _within(one: Slice, request: Slice) -> bool:
    return one.start >= request.start - _ROUNDING and one.end <= request.end + _ROUNDING


def _decoding(trace: Trace, request: Slice) -> RequestOptions:
    """Where it was the runtime that chose the window: with the median of its choices."""
    decoding = from_plain(request.args["options"])
    assert isinstance(decoding, RequestOptions)
    windows = [int(value) for _, value in trace.counters.get("window", []) if value]
    return decoding.changed(gamma=decoding.gamma or (median_low(windows) if windows else None))


def _right(slices: Iterable[Slice]) -> dict[int, bool]:
    """From the decisions: what the coordinator asked to be judged, and the answer."""
    right: dict[int, bool] = {}
    start = 0
    for decision in _decisions(slices):
        event = decision["event"]
        if event["type"] == "Judged":
            right |= dict.fromkeys(range(start, start + event["accepted"]), True)
            if event["token"] is not None:
                right[start + event["accepted"]] = False
        start = next((c["start"] for c in decision.get("commands", ()) if c["type"] == "Judge"), start)
    return right


def _decisions(slices: Iterable[Slice]) -> Iterator[dict[str, Any]]:
    return (one.args for one in slices if one.name == "decide")


def _commits(slices: Iterable[Slice]) -> list[tuple[float, int]]:
    """(time, tokens) of each."""
    return [
        (one.end, len(command["message"]["tokens"]))
        for one in slices
        for command in (one.args.get("commands", ()) if one.name == "decide" else ())
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
    fed = interpolated({n: mean(times) for n, times in drafts.items()})
    plain = mean(drafts.get(1, [seconds for times in drafts.values() for seconds in times]))
    target = interpolated({n: mean(times) for n, times in verifies.items()})
    return Timing(plain, target, delay, jitter, t_draft_fed=fed)


def interpolated(times: dict[int, float]) -> Callable[[int], float]:
    """Seconds of a forward by tokens fed: straight lines between the given ones, level beyond them."""
    speeds = Speeds()
    for fed, seconds in times.items():
        speeds.observe_target(fed, seconds)
    return cache(speeds.t_target)


def timing_of(
    t_draft: dict[int, float] | None, t_target: dict[int, float] | None, delay: float = 0.0, jitter: float = 0.0
) -> Timing:
    """From milliseconds by tokens fed; None: 10 of a draft forward, 50 of a target forward."""
    drafts, verifies = (
        interpolated({n: ms / 1e3 for n, ms in times.items()})
        for times in (t_draft or {1: 10.0}, t_target or {1: 50.0})
    )
    return Timing(drafts(1), verifies, delay / 1e3, jitter, t_draft_fed=drafts)


def steps(slices: Iterable[Slice]) -> list[tuple[Slice, float]]:
    """Each forward, and how long it lasted with what its worker did until the next, waiting aside."""
    steps: list[tuple[Slice, float]] = []
    for one in slices:
        if one.name in FORWARDS:
            steps.append((one, one.seconds))
        elif steps and one.kind in ("busy", "communication"):
            forward, seconds = steps[-1]
            steps[-1] = forward, seconds + one.seconds
    return steps
