"""Statistics of a trace: busy and waiting time of both workers, the critical path, and what overlap has saved.

Sums over the recorded slices of both workers' loops, from the start of the first request to the end of the last. Time
that no slice covers is reported as `uncovered`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles

from pearl.trace.chrome import committed, incident, lacks_draft
from pearl.trace.reading import FORWARDS, VERIFICATIONS, Slice, Trace
from pearl.trace.recorder import CONSUMER, HELD_ROW, TRANSPORT

_NOTHING = 0.005  # of the time: 0%
_LEAST_OVERLAP = 0.05  # of the time: what messages and the ends of forwards make is less
_CAUSES = {
    CONSUMER: "requests",
    HELD_ROW: "the draft token of a held row",
    TRANSPORT: "messages under way",
}


@dataclass(frozen=True)
class Worker:
    """How one worker's loop spent the wall time, as shares. `waits`: by cause; `work`: by name of the slice."""

    busy: float
    wait: float
    communication: float
    uncovered: float
    waits: dict[str, float]
    work: dict[str, float]


@dataclass(frozen=True)
class Forwards:
    """Durations of one kind of forward, in seconds."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Report:
    """One run. Times are seconds, shares are of `wall`.

    Attributes:
        wall: from the start of the first request to the end of the last, idle time in between included.
        overlap: share of the time in which both models were running a forward.
        steps: number of verification forwards, by kind.
        drafted: draft tokens, of which `judged` were `accepted` or `rejected`, and the rest `discarded`.
        prepared: tokens drafted in branches. If the branch's outcome came and they were judged, `drafted` counts them
            too.
        forwards: durations, of the draft's forwards, and of the target's by number of tokens fed.
        ratio: median duration of a verification forward over that of a draft forward.
        alternation: seconds that the same steps would take at least without overlap: the target's work plus the
            drafting of the judged tokens, without waits and messages.
    """

    method: str
    wall: float
    requests: int
    tokens: int
    tokens_per_second: float
    target: Worker
    draft: Worker | None
    overlap: float
    steps: dict[str, int]
    drafted: int
    judged: int
    accepted: int
    rejected: int
    discarded: int
    prepared: int
    forwards: dict[str, Forwards]
    ratio: float | None
    alternation: float
    notes: list[str] = field(default_factory=list)


def report(trace: Trace) -> Report:
    start, end = trace.start, trace.end
    target, draft = _between(trace.target, start, end), _between(trace.draft, start, end)
    wall = max(end - start, 1e-9)  # a trace may be of one instant
    verifications = [s for s in target if s.name in VERIFICATIONS]
    forwards = _forwards(draft, verifications)
    shares = _worker(target, wall), _worker(draft, wall) if draft else None
    tokens = sum(
        len(provenance)
        for one in target
        if one.name == "decide"
        for _, provenance in committed(one.args)
    )
    t_draft = forwards["draft"].p50 if "draft" in forwards else 0.0
    t_target = median(s.seconds for s in verifications) if verifications else 0.0
    return Report(
        method=trace.method,
        wall=wall,
        requests=len(trace.requests),
        tokens=tokens,
        tokens_per_second=tokens / wall,
        target=shares[0],
        draft=shares[1],
        overlap=_overlap(_spans(target), _spans(draft)) / wall,
        steps=dict(Counter(s.name for s in verifications)),
        forwards=forwards,
        ratio=t_target / t_draft if t_draft and t_target else None,
        alternation=sum(s.seconds for s in target if s.kind == "busy") + _drafting(draft),
        notes=_notes(trace, *shares),
        **_outcomes(draft),
    )


def _between(slices: Iterable[Slice], start: float, end: float) -> list[Slice]:
    """The slices that touch [`start`, `end`], clipped to it."""
    return [
        Slice(s.name, s.kind, max(s.start, start), min(s.end, end), s.args)
        for s in slices
        if s.end >= start
        and s.start <= end  # >=, <=: in virtual time a decision at the very end has no duration
    ]


def _worker(slices: Sequence[Slice], wall: float) -> Worker:
    shares: dict[str, Counter[str]] = {
        "wait": Counter(),
        "busy": Counter(),
        "communication": Counter(),
    }
    for one in slices:
        shares[one.kind][one.name.removeprefix("wait: ")] += one.seconds / wall  # type: ignore[assignment]
    busy, wait, communication = (shares[kind].total() for kind in ("busy", "wait", "communication"))
    return Worker(
        busy=busy,
        wait=wait,
        communication=communication,
        uncovered=1 - busy - wait - communication,
        waits=dict(shares["wait"].most_common()),
        work=dict(shares["busy"].most_common()),
    )


def _outcomes(draft: Sequence[Slice]) -> dict[str, int]:
    """Counts of draft tokens, by the name of their field in `Report`."""
    counts = Counter(fate for s in draft for fate in s.args.get("fates", ()))
    prepared = Counter(fate for s in draft for fate in s.args.get("branches", ()))
    counts += Counter({fate: count for fate, count in prepared.items() if fate != "discarded"})
    judged = counts["accepted"] + counts["rejected"]
    sums = {"drafted": counts.total(), "judged": judged, "prepared": prepared.total()}
    return sums | {name: counts[name] for name in ("accepted", "rejected", "discarded")}


def _spans(slices: Iterable[Slice]) -> list[tuple[float, float]]:
    return [(s.end - s.ran, s.end) for s in slices if s.name in FORWARDS]


def _overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Seconds for which spans of `a` and `b` overlap. The spans of each list are disjoint and in order."""
    both, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        both += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def _forwards(draft: Iterable[Slice], verifications: Iterable[Slice]) -> dict[str, Forwards]:
    times: dict[tuple[str, int], list[float]] = {}
    for one in draft:
        if one.name in ("draft", "prepare"):
            times.setdefault((one.name, 0), []).append(one.ran)
    for one in verifications:
        times.setdefault(("verify", one.args["n"]), []).append(one.seconds)
    found = {}
    for (name, n), taken in sorted(times.items()):
        cuts = (
            quantiles(taken, n=100, method="inclusive") if len(taken) > 1 else taken * 99
        )  # as numpy's percentiles
        found[f"{name} {n}" if n else name] = Forwards(len(taken), cuts[49], cuts[98])
    return found


def _drafting(draft: Sequence[Slice]) -> float:
    """Seconds spent drafting judged tokens: their forwards and draws, prefills, and forwards that gave no token."""
    seconds = 0.0
    for one, following in pairwise([*draft, None]):
        assert one is not None
        if one.name in ("draft", "prefill") and one.args.get("fates", [""])[0] != "discarded":
            seconds += one.ran
            if following is not None and following.name == "sample":
                seconds += following.seconds
    return seconds


def _notes(trace: Trace, *shares: Worker | None) -> list[str]:
    workers = trace.metadata["workers"]
    notes = [
        f"the {w['role']} did not end by itself (killed?): up to 0.25 s of its trace may be missing"
        for w in workers
        if not w["ended"]
    ]
    notes += [
        f"the {w['role']}'s clock was aligned by pings, to within {w['clock_uncertainty_ns'] / 1e6:.3f} ms"
        for w in workers
        if w["clock_uncertainty_ns"]
    ]
    if lacks_draft(trace.metadata["config"], [w["role"] for w in workers]):
        notes.append(
            f"the draft's half is on its host, so waits for the draft include the way of its messages: copy "
            f"{trace.path.name}.draft-*.part here and `pearl trace merge {trace.path}`"
        )
    for one in _between(trace.target, trace.start, trace.end):
        if one.name == "decide" and (note := incident(one.args["event"])):
            notes.append(f"at {one.end - trace.start:.3f} s: {note}")
    for name, share in zip(("target", "draft"), shares, strict=True):
        if share is not None and share.uncovered > 0.02:
            notes.append(f"{share.uncovered:.1%} of the {name}'s time is not covered by the trace")
    return notes


# ---- as text ----


def verdict(r: Report) -> str:
    """What to know first: how long the target waited, for what, and how long both models computed at once."""
    waited = f"the target never waited in {r.wall:.1f} s"
    if r.target.wait >= _NOTHING:
        waited = f"the target waited {r.target.wait:.0%} of {r.wall:.1f} s, {_main_cause(r.target)}"
    return f"{waited}; overlap {r.overlap:.1%}" if r.draft else waited


def _main_cause(worker: Worker) -> str:
    cause, share = next(iter(worker.waits.items()))  # the longest comes first
    words = _CAUSES.get(cause, cause)
    others = worker.wait - share
    if others < _NOTHING:
        return f"all for {words}"
    return f"all but {others:.0%} for {words}" if share > others else f"{share:.0%} for {words}"


def side_by_side(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """Each figure with its value in every run, "-" where a run has none."""
    columns = [_figures(r) for r in reports]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def _figures(r: Report) -> dict[str, str]:
    figures = {
        "wall": f"{r.wall:.3f} s, requests: {r.requests}",
        "tokens": f"{r.tokens}, {r.tokens_per_second:.2f} a second, prefill included",
    }
    figures |= _worker_figures("target", r.target)
    if r.draft:
        figures |= _worker_figures("draft", r.draft)
        figures["both in a forward"] = f"{r.overlap:.1%}"
    figures["steps"] = (
        ", ".join(f"{n} {kind}" for kind, n in sorted(r.steps.items(), reverse=True)) or "-"
    )
    if r.draft:
        fates = f"{r.accepted} accepted, {r.rejected} rejected, {r.discarded} never judged"
        figures["draft tokens"] = f"{r.drafted}: {fates}"
        if r.prepared:
            figures["draft tokens"] += f"; {r.prepared} prepared for other outcomes"
        figures["acceptance"] = f"{r.accepted / r.judged:.3f} of the judged" if r.judged else "-"
        figures["ratio"] = f"{r.ratio:.2f}" if r.ratio else "-"
    for name, f in r.forwards.items():
        figures[f"forward: {name}"] = (
            f"p50 {f.p50 * 1e3:.2f} ms, p99 {f.p99 * 1e3:.2f} ms, {f.count} of them"
        )
    if (
        r.overlap >= _LEAST_OVERLAP
    ):  # in a run that alternates itself the same steps took as long as they did
        saved = r.alternation / r.wall if r.wall else 0.0
        figures["in alternation"] = f"{r.alternation:.3f} s, {saved:.2f} times as long"
    return figures


def _worker_figures(name: str, w: Worker) -> dict[str, str]:
    figures = {
        f"{name}: busy": f"{w.busy:.1%} ("
        + ", ".join(f"{k} {v:.1%}" for k, v in w.work.items() if v >= 0.0005)
        + ")",
        f"{name}: waits": f"{w.wait:.1%}",
    }
    figures |= {f"{name}: waits for {cause}": f"{share:.1%}" for cause, share in w.waits.items()}
    figures[f"{name}: messages"] = f"{w.communication:.1%}"
    figures[f"{name}: not covered"] = f"{w.uncovered:.1%}"
    return figures
