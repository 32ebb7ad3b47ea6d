"""Statistics of a trace: busy and waiting time of both workers, and what overlap has saved.

The statistics are sums over the recorded slices of both workers' loops, from the start of the first
request to the end of the last request. Time that no slice covers is reported as `uncovered`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from statistics import median, quantiles
from typing import Any

from pearl.trace.chrome import committed, incident, lacks_draft
from pearl.trace.outcomes import ACCEPTED, DISCARDED, REJECTED
from pearl.trace.outside import Proposals, proposals
from pearl.trace.reading import FORWARDS, VERIFICATIONS, RunTrace, Slice
from pearl.trace.recorder import CONSUMER, HELD_ROW, TRANSPORT

_NOTHING = 0.005  # a smaller share is printed as 0%
_LEAST_OVERLAP = 0.05  # a smaller share comes from messages and the ends of forwards
_CAUSES = {
    CONSUMER: "requests",
    HELD_ROW: "the draft token of a held row",
    TRANSPORT: "messages under way",
}


@dataclass(frozen=True)
class WorkerShares:
    """How one worker's loop spent the time, as shares of the whole time from 0 to 1.

    Attributes:
        waits: the share of each cause of waiting.
        work: the share of each kind of work, by the slices' names.
    """

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
    """The report on one run. Times are seconds; shares are parts of `wall`.

    Attributes:
        wall: the time from the start of the first request to the end of the last request, with idle
            time in between.
        overlap: share of the time in which both models were running a forward.
        steps: number of verification forwards, by kind.
        drafted: number of draft tokens: the `judged` and the `discarded` ones.
        judged: number of draft tokens that the target judged: the `accepted` and the `rejected`
            ones.
        prepared: number of tokens drafted in branches, for outcomes that the draft did not expect.
            Prepared tokens that were judged, because the outcome came, also count in `drafted`.
        forwards: durations of the draft's forwards, and of the target's forwards by number of
            tokens fed.
        ratio: median duration of a verification forward / median duration of a draft forward.
        alternation: the least time that the same steps would take if the models worked in turn: the
            target's work plus the drafting of the judged tokens, without waits and messages.
        proposals: calls of the proposer, if the target was in another engine.
    """

    method: str
    wall: float
    requests: int
    tokens: int
    tokens_per_second: float
    target: WorkerShares
    draft: WorkerShares | None
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
    proposals: Proposals | None = None
    notes: list[str] = field(default_factory=list)


def report(trace: RunTrace) -> Report:
    target = _between(trace.target, trace.start, trace.end)
    draft = _between(trace.draft, trace.start, trace.end)
    wall = max(trace.end - trace.start, 1e-9)  # a trace may be of one instant
    verifications = []
    tokens = 0
    for piece in target:
        if piece.name in VERIFICATIONS:
            verifications.append(piece)
        elif piece.name == "decide":
            tokens += len(committed(piece.args))
    forwards = _forwards([*draft, *verifications])
    shares = {"target": _worker(target, wall)}
    if draft:
        shares["draft"] = _worker(draft, wall)
    ratio = None
    if verifications and "draft" in forwards and forwards["draft"].p50:
        ratio = median(map(attrgetter("seconds"), verifications)) / forwards["draft"].p50
    return Report(
        method=trace.method,
        wall=wall,
        requests=len(trace.requests),
        tokens=tokens,
        tokens_per_second=tokens / wall,
        target=shares["target"],
        draft=shares.get("draft"),
        overlap=_overlap(target, draft) / wall,
        steps=dict(Counter(map(attrgetter("name"), verifications))),
        forwards=forwards,
        ratio=ratio or None,
        alternation=shares["target"].busy * wall + _drafting(draft),
        proposals=proposals(target),
        notes=_notes(trace, target, shares),
        **_outcomes(draft),
    )


def _between(slices: Iterable[Slice], start: float, end: float) -> list[Slice]:
    """Return the slices that touch the time from `start` to `end`, clipped to it."""
    clipped = []
    for piece in slices:
        # Not > and <, because in virtual time a decision at the very end has no duration.
        if piece.end >= start and piece.start <= end:
            clipped.append(replace(piece, start=max(piece.start, start), end=min(piece.end, end)))
    return clipped


def _worker(slices: Sequence[Slice], wall: float) -> WorkerShares:
    shares: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by kind and name
    for piece in slices:
        share: Any = piece.seconds / wall
        shares[piece.kind][piece.name] += share
    busy = shares["busy"].total()
    wait = shares["wait"].total()
    communication = shares["communication"].total()
    return WorkerShares(
        busy=busy,
        wait=wait,
        communication=communication,
        uncovered=1 - busy - wait - communication,
        waits=dict(shares["wait"].most_common()),
        work=dict(shares["busy"].most_common()),
    )


def _outcomes(draft: Sequence[Slice]) -> dict[str, int]:
    """Return counts of draft tokens, by the name of their field in `Report`."""
    drafted: Counter[str] = Counter()
    prepared: Counter[str] = Counter()
    for piece in draft:
        drafted.update(piece.args.get("fates", ()))
        prepared.update(piece.args.get("branches", ()))
    accepted = drafted[ACCEPTED] + prepared[ACCEPTED]
    rejected = drafted[REJECTED] + prepared[REJECTED]
    return {
        "drafted": accepted + rejected + drafted[DISCARDED],
        "judged": accepted + rejected,
        "accepted": accepted,
        "rejected": rejected,
        "discarded": drafted[DISCARDED],
        "prepared": prepared.total(),
    }


def _overlap(target: Iterable[Slice], draft: Iterable[Slice]) -> float:
    """Return the seconds in which both workers run a forward."""
    edges = []
    for role, slices in (("target", target), ("draft", draft)):
        for piece in slices:
            if piece.name in FORWARDS:
                edges.append((piece.end - piece.ran, role, 1))
                edges.append((piece.end, role, -1))
    running = {"target": 0, "draft": 0}
    seconds = 0.0
    since = 0.0
    for time, role, change in sorted(edges):
        if all(running.values()):
            seconds += time - since
        running[role] += change
        since = time
    return seconds


def _forwards(slices: Iterable[Slice]) -> dict[str, Forwards]:
    """Return the durations of the forwards among `slices`, without prefills.

    They are grouped by kind; verification forwards are also grouped by the number of tokens fed.
    """
    times = defaultdict(list)
    for piece in slices:
        if piece.name in VERIFICATIONS:
            times["verify", piece.args["n"]].append(piece.seconds)
        elif piece.name in ("draft", "prepare"):
            times[piece.name, 0].append(piece.ran)
    forwards = {}
    for (name, n), seconds in sorted(times.items()):
        percentiles = seconds * 99
        if len(seconds) > 1:
            percentiles = quantiles(seconds, n=100, method="inclusive")  # as numpy's
        label = f"{name} {n}" if n else name
        forwards[label] = Forwards(len(seconds), percentiles[49], percentiles[98])
    return forwards


def _drafting(draft: Sequence[Slice]) -> float:
    """Return the seconds that the draft spent on tokens that were judged.

    The result is the time of the forwards and draws of judged tokens, of prefills, and of forwards
    that drafted no token.
    """
    seconds = 0.0
    counts = False  # whether the last slice was a forward that counts
    for piece in draft:
        if counts and piece.name == "sample":
            seconds += piece.seconds
        outcomes = piece.args.get("fates", [""])
        counts = piece.name in ("draft", "prefill") and outcomes[0] != DISCARDED
        if counts:
            seconds += piece.ran
    return seconds


def _notes(
    trace: RunTrace, target: Iterable[Slice], shares: Mapping[str, WorkerShares]
) -> list[str]:
    """Return notes: where the trace is incomplete, and what went wrong in the run."""
    notes = []
    drafts = 0
    for worker in trace.metadata["workers"]:
        role = worker["role"]
        drafts += role == "draft"
        if not worker["ended"]:
            notes.append(
                f"the {role} did not end by itself (killed?): up to 0.25 s of its trace may be "
                "missing"
            )
        if worker["clock_uncertainty_ns"]:
            milliseconds = worker["clock_uncertainty_ns"] / 1e6
            notes.append(
                f"the {role}'s clock was aligned by pings, to within {milliseconds:.3f} ms"
            )
    if lacks_draft(trace.metadata["config"], drafts):
        notes.append(
            "the draft's half is on its host, so waits for the draft include the way of its "
            f"messages: copy {trace.path.name}.draft-*.part here and `pearl trace merge "
            f"{trace.path}`"
        )
    for piece in target:
        if piece.name == "decide":
            note = incident(piece.args)
            if note:
                notes.append(f"at {piece.end - trace.start:.3f} s: {note}")
    for name, share in shares.items():
        if share.uncovered > 0.02:
            notes.append(f"{share.uncovered:.1%} of the {name}'s time is not covered by the trace")
    return notes


# ---- as text ----


def verdict(r: Report) -> str:
    """Return the most important figures as a sentence.

    It says how long the target waited, for what, and for which share of the time both models
    computed.
    """
    waited = f"the target never waited in {r.wall:.1f} s"
    if r.target.wait >= _NOTHING:
        waited = f"the target waited {r.target.wait:.0%} of {r.wall:.1f} s, {_main_cause(r.target)}"
    return f"{waited}; overlap {r.overlap:.1%}" if r.draft else waited


def _main_cause(worker: WorkerShares) -> str:
    cause, share = next(iter(worker.waits.items()))  # the longest comes first
    words = _CAUSES.get(cause, cause)
    remainder = worker.wait - share
    if remainder < _NOTHING:
        return f"all for {words}"
    if share > remainder:
        return f"all but {remainder:.0%} for {words}"
    return f"{share:.0%} for {words}"


def side_by_side(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """Return each figure's name, and its value in each run; "-" if a run lacks the figure."""
    columns = [_figures(r) for r in reports]
    names = dict.fromkeys(chain.from_iterable(columns))
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
    steps = [f"{n} {kind}" for kind, n in sorted(r.steps.items(), reverse=True)]
    figures["steps"] = ", ".join(steps) or "-"
    if r.draft:
        fates = f"{r.accepted} accepted, {r.rejected} rejected, {r.discarded} never judged"
        figures["draft tokens"] = f"{r.drafted}: {fates}"
        if r.prepared:
            figures["draft tokens"] += f"; {r.prepared} prepared for other outcomes"
        figures["acceptance"] = f"{r.accepted / r.judged:.3f} of the judged" if r.judged else "-"
        figures["ratio"] = f"{r.ratio:.2f}" if r.ratio else "-"
    if r.proposals:
        figures["windows"] = str(r.proposals)
    for name, f in r.forwards.items():
        figures[f"forward: {name}"] = (
            f"p50 {f.p50 * 1e3:.2f} ms, p99 {f.p99 * 1e3:.2f} ms, {f.count} of them"
        )
    # A run without overlap alternates anyway.
    if r.overlap >= _LEAST_OVERLAP:
        times = r.alternation / r.wall
        figures["in alternation"] = f"{r.alternation:.3f} s, {times:.2f} times as long"
    return figures


def _worker_figures(name: str, w: WorkerShares) -> dict[str, str]:
    work = [f"{kind} {share:.1%}" for kind, share in w.work.items() if share >= 0.0005]
    figures = {
        f"{name}: busy": f"{w.busy:.1%} ({', '.join(work)})",
        f"{name}: waits": f"{w.wait:.1%}",
    }
    for cause, share in w.waits.items():
        figures[f"{name}: waits for {cause}"] = f"{share:.1%}"
    figures[f"{name}: messages"] = f"{w.communication:.1%}"
    figures[f"{name}: not covered"] = f"{w.uncovered:.1%}"
    return figures
