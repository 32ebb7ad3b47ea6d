"""A picture of both workers on one time axis, as a PNG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError, TraceError
from pearl.extras import installing
from pearl.trace.chrome import committed
from pearl.trace.reading import Arrow, Slice, Trace

_STEPS = 12  # verification forwards shown by default
_PAUSE = 1e-3  # seconds: shorter work (a heartbeat, say) does not split a wait
LOOKS = {  # kind of work -> colour, meaning
    "prefill": ("#7b6fc4", "reading the prompt (prefill)"),
    "pre-verify": ("#5aa9e6", "target forward without draft tokens (pre-verify)"),
    "post-verify": ("#1f6fb2", "target forward over draft tokens (post-verify)"),
    "accepted": ("#3fa34d", "draft token, accepted"),
    "rejected": ("#d1495b", "draft token, rejected"),
    "discarded": ("#e0a458", "draft token after a rejected one, discarded"),
    "prepare": ("#c9b458", "draft forward for other outcomes alone (branches)"),
    "draft": ("#9a9a9a", "draft forward that a verdict made useless"),
    "other": ("#6b6b6b", "judging, sampling, messages"),
    "wait": ("#ececec", "waiting"),
}
_FORESEEN = ("#2fb5a0", "a branch drafted here was accepted")
_VERDICTS = {  # is it a rejection -> colour, meaning
    False: ("#333333", "verdict: all accepted"),
    True: (LOOKS["rejected"][0], "verdict: a draft token rejected"),
}
_SOURCES = {  # of a committed token -> colour, meaning
    "accepted": (LOOKS["accepted"][0], "accepted from the draft"),
    "guessed": ("#2f6fd0", "guessed without a model"),
    "corrected": (LOOKS["rejected"][0], "the target's correction"),
    "bonus": ("#b565c9", "bonus"),
    "direct": ("#34495e", "the target's own"),
}
# Measures of a picture, in units of its vertical axis; `_CHARACTER` is a share of the horizontal one.
_HALF = 0.36  # half the height of a worker's row
_STRIP = 0.2  # height of the marks of accepted branches
_STEP = 1.1  # between the middles of two rows
_TEXT = 0.95  # height of the largest step in the row of the text
_CHARACTER = 0.005  # width of a character


@dataclass(frozen=True)
class Bar:
    """A piece of work, or a wait and its cause. Times in seconds."""

    start: float
    end: float
    look: str
    cause: str = ""


@dataclass(frozen=True)
class Commit:
    """Tokens that became part of the text at `time`, by the source of each."""

    time: float
    sources: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return len(self.sources)

    @property
    def is_rejection(self) -> bool:
        return "corrected" in self.sources


@dataclass(frozen=True)
class Chart:
    """Bars of each worker, verdicts and commits. Times in seconds from the start of the first request."""

    start: float
    end: float
    rows: dict[str, list[Bar]]
    verdicts: list[Arrow]
    commits: list[Commit]
    foreseen: list[tuple[float, float]]  # draft forwards that prepared a branch that was accepted
    method: str
    models: str

    def cut(self, start: float, end: float) -> tuple[float, float]:
        """A time span, limited to the time shown."""
        return max(start, self.start), min(end, self.end)

    def shares(self, row: str) -> tuple[float, float]:
        """Shares of the time shown that a worker worked and waited."""
        work = wait = 0.0
        for bar in self.rows[row]:
            start, end = self.cut(bar.start, bar.end)
            inside = max(0.0, end - start)
            work, wait = (work, wait + inside) if bar.look == "wait" else (work + inside, wait)
        return work / (self.end - self.start), wait / (self.end - self.start)


def chart(trace: Trace, start: float | None = None, seconds: float | None = None) -> Chart:
    """Part of a run, from `start` seconds after the first request began; by default the first steps.

    Raises `ConfigError` where the run has no work in that time.
    """
    begin, at = trace.start, start or 0.0
    length = trace.end - begin
    if not 0 <= at < length or (seconds is not None and seconds <= 0):
        wanted = f"from {at:g} s on" + (f" for {seconds:g} s" if seconds is not None else "")
        raise ConfigError(f"nothing to show {wanted}: the run is {length:.3f} s long")
    since = begin + at
    until = min(since + (seconds or _first_steps(trace, since)), trace.end)

    def shown(slices: Iterable[Slice]) -> list[Slice]:
        return [one for one in slices if one.end > since and one.start < until]

    workers = {"target": trace.target, "draft": trace.draft}
    branches = (one for one in shown(trace.draft) if "accepted" in one.args.get("branches", ()))
    return Chart(
        since - begin,
        until - begin,
        {
            name: _merged([bar for one in shown(slices) for bar in _bars(one, begin)])
            for name, slices in workers.items()
            if slices
        },
        [Arrow(v.sent - begin, v.read - begin, v.is_rejection) for v in trace.verdicts if since <= v.sent <= until],
        [commit for commit in _commits(trace) if since <= begin + commit.time <= until],
        [(max(one.start, since) - begin, min(one.end, until) - begin) for one in branches],
        _method(trace),
        f"target {trace.metadata['config']['target']}, draft {trace.metadata['config']['draft']}",
    )


def same_time(traces: Sequence[Trace], seconds: float | None = None) -> list[Chart]:
    """The first `seconds` of each run; by default the first steps of the run with shorter steps."""
    if seconds is None:
        seconds = min(_first_steps(trace, trace.start) for trace in traces)
    return [chart(trace, None, seconds) for trace in traces]


def _method(trace: Trace) -> str:
    """The method, and the guesses used with it if all requests use the same."""
    known = {"look_ahead": "look-ahead", "draft_lookup": "lookup", "branches": "branches"}
    options = [request.args.get("options", {}) for request in trace.requests]
    used = {", ".join(word for name, word in known.items() if each.get(name)) for each in options}
    if len(used) > 1 or trace.method != "pearl":
        return trace.method
    return f"pearl with {guesses}" if (guesses := used.pop()) else "pearl as published"


def _first_steps(trace: Trace, since: float) -> float:
    """How many seconds the first steps from `since` on take."""
    steps = [s.end for s in trace.target if s.name in ("pre-verify", "post-verify") and s.start >= since]
    return (steps[min(_STEPS, len(steps)) - 1] if steps else trace.end) - since


def _bars(one: Slice, begin: float) -> list[Bar]:
    """The bars of a slice: a forward that drafted several tokens has one for each."""
    if one.kind == "wait":
        return [Bar(one.start - begin, one.end - begin, "wait", one.name.removeprefix("wait: "))]
    look = one.args.get("fate", one.name if one.name in LOOKS else "other")
    looks = one.args.get("fates", [look])
    ends = [one.start - begin + one.seconds * i / len(looks) for i in range(len(looks) + 1)]
    return [Bar(*span, each) for span, each in zip(pairwise(ends), looks, strict=True)]


def _merged(bars: Sequence[Bar]) -> list[Bar]:
    """Join waits that less than `_PAUSE` of other work separates; the cause is that of the longest."""
    merged: list[Bar] = []
    waits: list[Bar] = []  # joined into the last bar of `merged`
    short: list[Bar] = []  # work since then
    for bar in bars:
        if bar.look == "wait" and waits and bar.start - waits[-1].end < _PAUSE:
            waits.append(bar)
            cause = max(waits, key=lambda wait: wait.end - wait.start).cause
            merged[-1] = Bar(waits[0].start, bar.end, "wait", cause)
            short = []
        elif bar.look == "other" and waits and bar.end - waits[-1].end < _PAUSE:
            short.append(bar)
        else:
            merged += [*short, bar]
            waits, short = [bar] if bar.look == "wait" else [], []
    return merged + short


def _commits(trace: Trace) -> list[Commit]:
    found = ((one.end - trace.start, committed(one.args)) for one in trace.target if one.name == "decide")
    return [Commit(time, tuple(source for _, each in commits for source in each)) for time, commits in found if commits]


def png(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts with matplotlib, one above the other, on one scale of time.

    Raises `TraceError` where matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise TraceError(f"drawing this needs matplotlib: {installing('plot')}") from None
    figure = Figure(figsize=(13, 1.9 + 2.6 * len(charts)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    seconds = max(chart.end - chart.start for chart in charts)
    most = max((commit.tokens for chart in charts for commit in chart.commits), default=1)
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        _panel(axes, chart, seconds, most)
    axes.set_xlabel("seconds since the request began")
    title = "\n".join(dict.fromkeys(chart.models for chart in charts))
    form = {"frameon": False, "fontsize": 8.5, "title": title, "title_fontsize": 8}
    figure.legend(handles=_legend(charts), loc="outside lower center", ncols=4, **form)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _legend(charts: Sequence[Chart]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    looks = {bar.look for chart in charts for bars in chart.rows.values() for bar in bars}
    sources = {source for chart in charts for commit in chart.commits for source in commit.sources}
    handles: list[Any] = [
        Patch(facecolor=colour, edgecolor="#bbbbbb", label=meaning)
        for look, (colour, meaning) in LOOKS.items()
        if look in looks
    ]
    if any(chart.foreseen for chart in charts):
        handles.append(Patch(facecolor=_FORESEEN[0], label=_FORESEEN[1]))
    handles += [Line2D([], [], color=c, marker="v", markersize=5, label=meaning) for c, meaning in _VERDICTS.values()]
    return handles + [
        Patch(facecolor=colour, label=f"in the text: {meaning}")
        for source, (colour, meaning) in _SOURCES.items()
        if source in sources
    ]


def _panel(axes: Any, chart: Chart, seconds: float, most: int) -> None:
    """A row for each worker, arrows of verdicts between them, and below the tokens that each step committed.

    Args:
        most: tokens of the largest step of the picture.
    """
    for row, bars in enumerate(chart.rows.values()):
        _row(axes, chart, bars, row * _STEP, seconds)
    strips = [(start, end - start) for start, end in chart.foreseen]
    thin = {"edgecolor": "white", "linewidth": 0.6}
    axes.broken_barh(strips, (_STEP + _HALF - _STRIP, _STRIP), facecolors=_FORESEEN[0], **thin)
    for verdict in chart.verdicts:
        line = {"arrowstyle": "-|>", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
        line["color"] = _VERDICTS[verdict.is_rejection][0]
        ends = {"xytext": (verdict.sent, _HALF), "xy": (min(verdict.read, chart.end), _STEP - _HALF)}
        axes.annotate("", **ends, arrowprops=line, annotation_clip=True)
    ground = (len(chart.rows) - 1) * _STEP + _HALF + 0.35 + _TEXT
    _text(axes, chart, seconds, ground, _TEXT / most)
    labels = [f"{name}\nworks {{:.0%}}, waits {{:.0%}}".format(*chart.shares(name)) for name in chart.rows]
    places = [row * _STEP for row in range(len(labels))]
    axes.set_yticks([*places, ground - _TEXT / 2], [*labels, "tokens added\nto the text"], fontsize=9)
    axes.set_ylim(ground, -0.5)
    axes.set_xlim(chart.start, chart.start + seconds)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    tokens = sum(commit.tokens for commit in chart.commits)
    title = f"{chart.method}: {tokens} tokens in {chart.end - chart.start:.2f} s"
    axes.set_title(title, loc="left", fontsize=12, weight="bold")


def _row(axes: Any, chart: Chart, bars: Iterable[Bar], at: float, seconds: float) -> None:
    """A worker's bars; a wait that is long enough names its cause."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for bar in bars:
        start, end = chart.cut(bar.start, bar.end)
        spans.setdefault(bar.look, []).append((start, end - start))
        if bar.look == "wait" and (end - start) / seconds > _CHARACTER * len(bar.cause):
            cause = f"waits for\n{bar.cause}"
            axes.text((start + end) / 2, at, cause, ha="center", va="center", fontsize=8, color="#555555")
    for look, found in spans.items():
        lines = {"linewidth": 0} if look in ("other", "wait") else {"edgecolor": "white", "linewidth": 0.6}
        axes.broken_barh(found, (at - _HALF, 2 * _HALF), facecolors=LOOKS[look][0], **lines)


def _text(axes: Any, chart: Chart, seconds: float, ground: float, height: float) -> None:
    """The tokens of each commit as a pile of boxes of this height, with their number above."""
    has_room = len(chart.commits) * 2 * _CHARACTER < 1
    for commit in chart.commits:
        for i, source in enumerate(commit.sources):
            box = (ground - (i + 1) * height, height)
            span = [(commit.time, 1.6 * _CHARACTER * seconds)]
            axes.broken_barh(span, box, facecolors=_SOURCES[source][0], edgecolor="white", linewidth=0.5)
        if has_room:
            place = commit.time + 0.8 * _CHARACTER * seconds, ground - commit.tokens * height - 0.03
            axes.text(*place, f"+{commit.tokens}", ha="center", va="bottom", fontsize=8, color="#333333")
