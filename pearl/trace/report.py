"""A trace in numbers: who worked, who waited for what, what set the pace, and what overlap has saved.

All are sums over the recorded slices of the two loops, from the start of the first request to the end of the last. Time
without a slice is reported as such.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pearl.trace.chrome import told
from pearl.trace.latency import Latency, latencies, latency
from pearl.trace.reading import FORWARDS, Slice, Trace
from pearl.trace.recorder import DRAFT, HELD_ROW, TRANSPORT

_OF_DRAFT = (DRAFT, HELD_ROW)  # causes for which the target waits for the draft's work


@dataclass(frozen=True)
class Worker:
    """Shares of the wall time of one loop. `waits`: cause -> share; `work`: name of a slice -> share."""

    busy: float
    wait: float
    communication: float
    uncovered: float
    waits: dict[str, float]
    work: dict[str, float]


@dataclass(frozen=True)
class Forwards:
    """Durations of forwards of one kind, seconds."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Report:
    """One run. Times are seconds, shares are of `wall`.

    Attributes:
        wall: from the start of the first request to the end of the last, pauses included.
        overlap: share of the time in which both models were in a forward.
        pace: shares of the time in which the target worked, waited for the draft's work, for a message on its way, and
            for a consumer; with the target's communication and `uncovered` they add up to 1.
        steps: verification forwards by kind; `owners`: by critical path: "draft" or "transport" where the target had to
            wait in that step (since the end of the previous forward), "target" where it did not.
        drafted, judged, accepted: draft tokens. `rejected` of the judged; the other drafted ones were `discarded`.
        stops: windows that the draft's stop policy ended.
        prepared: tokens drafted for other outcomes. Those judged, as their outcome came, are in `drafted` too.
        histogram: accepted length -> how many.
        forwards: of the draft, and of the target by number of fed tokens.
        ratio: median verification forward over median draft forward. `window`: median of c; 0 without a draft.
        alternation: seconds that the target's work and the drafting of the judged tokens take one after the other,
            without waits and messages: the least time of the same steps without overlap.
        recorder: the recorder's share of the wall time, of the busier worker.
        latency: of all requests together; `per_request`: of each, in order.
    """

    method: str
    wall: float
    requests: int
    tokens: int
    tokens_per_second: float
    target: Worker
    draft: Worker | None
    overlap: float
    pace: dict[str, float]
    steps: dict[str, int]
    owners: dict[str, int]
    drafted: int
    judged: int
    accepted: int
    rejected: int
    discarded: int
    stops: int
    prepared: int
    histogram: dict[int, int]
    forwards: dict[str, Forwards]
    ratio: float | None
    window: float
    alternation: float
    recorder: float
    latency: Latency
    per_request: list[Latency]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(trace: Trace) -> Report:
    start, end = trace.start, trace.end
    target, draft = _between(trace.target, start, end), _between(trace.draft, start, end)
    wall = end - start
    verifications = [s for s in target if s.name in ("pre-verify", "post-verify")]
    forwards = _forwards(draft, verifications)
    shares = _worker(target, wall), _worker(draft, wall) if draft else None
    tokens, histogram = _committed(target)
    medians = _median([s.seconds for s in verifications]), forwards["draft"].p50 if "draft" in forwards else 0.0
    windows = [value for at, value in trace.counters.get("window", []) if at <= end and value]
    return Report(
        method=trace.method,
        wall=wall,
        requests=len(trace.requests),
        tokens=tokens,
        tokens_per_second=tokens / wall if wall else 0.0,
        target=shares[0],
        draft=shares[1],
        overlap=_overlap(_spans(target), _spans(draft)) / wall,
        pace=_pace(shares[0]),
        steps=dict(Counter(s.name for s in verifications)),
        owners=_owners(target, verifications),
        stops=sum(s.args.get("event", {}).get("paused", False) for s in target if s.name == "decide"),
        histogram=histogram,
        forwards=forwards,
        ratio=medians[0] / medians[1] if all(medians) else None,
        window=_median(windows) if draft else 0.0,
        alternation=sum(s.seconds for s in target if s.kind == "busy") + _drafting(draft),
        recorder=max(w["recorder_seconds"] for w in trace.metadata["workers"]) / wall if wall else 0.0,
        latency=latency(trace),
        per_request=latencies(trace),
        notes=_notes(trace, *shares),
        **_outcomes(draft),
    )


def _pace(target: Worker) -> dict[str, float]:
    waits = target.waits
    return {
        "target works": target.busy,
        "draft works": sum(waits.get(cause, 0.0) for cause in _OF_DRAFT),
        "message on its way": waits.get(TRANSPORT, 0.0),
        "consumer": sum(share for cause, share in waits.items() if cause not in (*_OF_DRAFT, TRANSPORT)),
    }


def _outcomes(draft: Sequence[Slice]) -> dict[str, Any]:
    """The counts of draft tokens, by field of `Report`."""
    counts = Counter(fate for s in draft if "fate" in s.args for fate in s.args.get("fates", [s.args["fate"]]))
    prepared = Counter(fate for s in draft for fate in s.args.get("branches", ()))
    counts += Counter({fate: count for fate, count in prepared.items() if fate != "discarded"})
    names = "accepted", "rejected", "discarded"
    judged = counts["accepted"] + counts["rejected"]
    sums = {"drafted": counts.total(), "judged": judged, "prepared": prepared.total()}
    return sums | {name: counts[name] for name in names}


def _between(slices: Iterable[Slice], start: float, end: float) -> list[Slice]:
    """The slices between `start` and `end`, cut to that time."""
    return [
        Slice(s.name, s.kind, max(s.start, start), min(s.end, end), s.args)
        for s in slices
        if s.end >= start and s.start <= end  # decisions at the very end, in virtual time, take none
    ]


def _worker(slices: Sequence[Slice], wall: float) -> Worker:
    shares: Counter[str] = Counter()
    names: dict[str, Counter[str]] = {"wait": Counter(), "busy": Counter(), "communication": Counter()}
    for one in slices:
        shares[one.kind] += one.seconds / wall  # type: ignore[assignment]
        names[one.kind][one.name.removeprefix("wait: ")] += one.seconds / wall  # type: ignore[assignment]
    return Worker(
        busy=shares["busy"],
        wait=shares["wait"],
        communication=shares["communication"],
        uncovered=1 - shares.total(),
        waits=dict(names["wait"].most_common()),
        work=dict(names["busy"].most_common()),
    )


def _spans(slices: Iterable[Slice]) -> list[tuple[float, float]]:
    return [(s.end - s.ran, s.end) for s in slices if s.name in FORWARDS]


def _overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Seconds in both lists of disjoint spans, each in order."""
    both, j = 0.0, 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            both += min(end, b[k][1]) - max(start, b[k][0])
            k += 1
    return both


def _owners(target: Sequence[Slice], verifications: Sequence[Slice]) -> dict[str, int]:
    waits = [s for s in target if s.kind == "wait"]
    starts = [s.start for s in waits]
    owners: Counter[str] = Counter()
    before = target[0].start if target else 0.0
    for step in verifications:
        waited: Counter[str] = Counter()
        for wait in waits[bisect_left(starts, before) : bisect_left(starts, step.end)]:
            cause = wait.name.removeprefix("wait: ")
            waited["draft" if cause in _OF_DRAFT else cause] += wait.seconds  # type: ignore[assignment]
        owner = max(("draft", TRANSPORT), key=lambda cause: waited[cause])
        owners[owner if waited[owner] > 0 else "target"] += 1
        before = step.end
    return dict(owners)


def _forwards(draft: Iterable[Slice], verifications: Iterable[Slice]) -> dict[str, Forwards]:
    times: dict[tuple[str, int], list[float]] = {}
    for one in draft:
        if one.name in ("draft", "prepare"):
            times.setdefault((one.name, 0), []).append(one.ran)
    for one in verifications:
        times.setdefault(("verify", one.args["n"]), []).append(one.seconds)
    return {
        f"{name} {n}" if n else name: Forwards(len(t), _quantile(t, 0.5), _quantile(t, 0.99))
        for (name, n), t in sorted(times.items())
    }


def _committed(target: Iterable[Slice]) -> tuple[int, dict[int, int]]:
    """The number of committed tokens, and how often each accepted length occurred."""
    tokens, run = 0, dict[int, int]()  # request -> accepted tokens since the last correction or bonus
    runs: Counter[int] = Counter()
    for one in target:
        for command in one.args.get("commands", ()) if one.name == "decide" else ():
            if command["type"] == "Open":
                run[command["request"]] = 0
            elif command["type"] == "Deliver" and command["message"]["type"] == "Committed":
                number = command["message"]["request"]
                for provenance in command["message"]["provenance"]:
                    tokens += 1
                    if provenance == "accepted":
                        run[number] = run.get(number, 0) + 1
                    elif provenance in ("corrected", "bonus"):  # "guessed" and "direct" change nothing
                        runs[run.get(number, 0)] += 1
                        run[number] = 0
    return tokens, dict(sorted(runs.items()))


def _drafting(draft: Sequence[Slice]) -> float:
    """Seconds of drafting the judged tokens: their forwards and draws, and forwards without a token."""
    seconds = 0.0
    for i, one in enumerate(draft):
        if one.name in ("draft", "prefill") and one.args.get("fate") != "discarded":
            seconds += one.ran
            following = draft[i + 1] if i + 1 < len(draft) else one
            seconds += following.seconds if following.name == "sample" else 0.0
    return seconds


def _notes(trace: Trace, *shares: Worker | None) -> list[str]:
    notes = [
        f"the {w['role']} did not end by itself: its last quarter of a second may be missing"
        for w in trace.metadata["workers"]
        if not w["ended"]
    ]
    notes += [
        f"the {w['role']}'s clock was aligned by pings, give or take {w['clock_uncertainty_ns'] / 1e6:.3f} ms"
        for w in trace.metadata["workers"]
        if w["clock_uncertainty_ns"]
    ]
    for one in _between(trace.target, trace.start, trace.end):
        if one.name == "decide" and (trouble := told(one.args["event"])):
            notes.append(f"at {one.end - trace.start:.3f} s: {trouble}")
    for name, share in zip(("target", "draft"), shares, strict=True):
        if share is not None and share.uncovered > 0.02:
            notes.append(f"{share.uncovered:.1%} of the {name}'s time has no slice")
    return notes


def _median(values: Sequence[float]) -> float:
    return _quantile(values, 0.5) if values else 0.0


def _quantile(values: Sequence[float], q: float) -> float:
    """With linear interpolation, numpy's default."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
