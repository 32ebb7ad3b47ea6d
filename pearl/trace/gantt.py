"""A picture of both workers on one time axis, as a PNG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pearl.colours import SOURCES, WORK
from pearl.errors import ConfigError, TraceError, installing
from pearl.trace.chrome import committed
from pearl.trace.reading import VERIFICATIONS, Arrow, Slice, Trace

_STEPS = 12  # verification forwards shown by default
_PAUSE = (
    1e-3  # seconds: shorter work (a heartbeat, say) is too short to see and does not split a wait
)
_VERDICTS = {  # is it a rejection -> colour, meaning
    False: ("#333333", "verdict: all accepted"),
    True: (WORK["rejected"][0], "verdict: a draft token rejected"),
}
_IN_TEXT = {
    source: (colour, f"in the text: {meaning}") for source, (colour, meaning) in SOURCES.items()
}
# Measures of a picture, in units of its vertical axis; `_CHARACTER` is a share of the horizontal one.
_HALF = 0.36  # half the height of a worker's row
_STEP = 1.1  # between the middles of two rows
_TEXT = 0.95  # height of the largest step in the row of the text
_CHARACTER = 0.005  # width of a character
_EDGE = {"edgecolor": "white", "linewidth": 0.6}


@dataclass(frozen=True)
class Bar:
    """A piece of work, or a wait and its cause. Times in seconds."""

    start: float
    end: float
    look: str
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Chart:
    """Bars of each worker, verdicts and commits. Times in seconds from the start of the first request.

    Attributes:
        commits: time, and the source of each token that became part of the text.
    """

    start: float
    end: float
    rows: dict[str, list[Bar]]
    verdicts: list[Arrow]
    commits: list[tuple[float, list[str]]]
    method: str
    models: str

    @property
    def tokens(self) -> int:
        return sum(len(sources) for _, sources in self.commits)

    @property
    def rate(self) -> float:
        """Tokens per second of the time shown, the prefill included."""
        return self.tokens / (self.end - self.start)

    def shares(self, row: str) -> tuple[float, float]:
        """Shares of the time shown that a worker worked and waited."""
        wait = sum(bar.seconds for bar in self.rows[row] if bar.look == "wait")
        work = sum(bar.seconds for bar in self.rows[row] if bar.look != "wait")
        return work / (self.end - self.start), wait / (self.end - self.start)


def chart(trace: Trace, start: float | None = None, seconds: float | None = None) -> Chart:
    """Part of a run, from `start` seconds after the first request began; by default the first steps.

    Raises `ConfigError` where the run has no work in that time.
    """
    zero, at = trace.start, start or 0.0
    length = trace.end - zero
    if not 0 <= at < length or (seconds is not None and seconds <= 0):
        wanted = f"from {at:g} s on" + (f" for {seconds:g} s" if seconds is not None else "")
        raise ConfigError(f"nothing to show {wanted}: the run is {length:.3f} s long")
    end = min(at + (seconds or _first_steps(trace, at)), length)

    def cut(slices: Iterable[Slice]) -> list[Bar]:
        bars = (bar for one in slices for bar in _bars(one, zero))
        return [
            Bar(max(bar.start, at), min(bar.end, end), bar.look, bar.cause)
            for bar in bars
            if bar.end > at and bar.start < end
        ]

    workers = {"target": trace.target, "draft": trace.draft}
    verdicts = [Arrow(v.sent - zero, v.read - zero, v.is_rejection) for v in trace.verdicts]
    return Chart(
        at,
        end,
        {name: cut(slices) for name, slices in workers.items() if slices},
        [arrow for arrow in verdicts if at <= arrow.sent <= end],
        [
            (one.end - zero, [source for _, sources in commits for source in sources])
            for one in trace.target
            if one.name == "decide"
            and at <= one.end - zero <= end
            and (commits := committed(one.args))
        ],
        _method(trace),
        f"target {trace.metadata['config']['target']}, draft {trace.metadata['config']['draft']}",
    )


def charts(
    traces: Sequence[Trace], start: float | None = None, seconds: float | None = None
) -> list[Chart]:
    """As `chart`, the same time of each run; by default the first steps of the run with shorter steps."""
    seconds = seconds or min(_first_steps(trace, start or 0.0) for trace in traces)
    return [chart(trace, start, seconds) for trace in traces]


def _method(trace: Trace) -> str:
    """The method, and the guesses used with it if all requests use the same."""
    known = {
        "look_ahead": "look-ahead",
        "draft_lookup": "lookup",
        "branches": "branches",
        "siblings": "siblings",
    }
    options = [request.args.get("options", {}) for request in trace.requests]
    used = {", ".join(word for name, word in known.items() if each.get(name)) for each in options}
    if len(used) > 1 or trace.method != "pearl":
        return trace.method
    return f"pearl with {guesses}" if (guesses := used.pop()) else "pearl as published"


def _first_steps(trace: Trace, at: float) -> float:
    """How many seconds the first steps take that begin `at` seconds after the first request, or later."""
    since = trace.start + at
    steps = [s.end for s in trace.target if s.name in VERIFICATIONS and s.start >= since][:_STEPS]
    return (steps[-1] if steps else trace.end) - since


def _bars(one: Slice, zero: float) -> list[Bar]:
    """The bars of a slice: a forward that drafted several tokens has one for each."""
    if one.kind == "wait":
        return [Bar(one.start - zero, one.end - zero, "wait", one.name.removeprefix("wait: "))]
    looks = one.args.get("fates", [one.name if one.name in WORK else "other"])
    ends = [one.start - zero + one.seconds * i / len(looks) for i in range(len(looks) + 1)]
    return [Bar(*span, each) for span, each in zip(pairwise(ends), looks, strict=True)]


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Without work too short to see; waits that only this separates are one, of the longer one's cause."""
    joined: list[Bar] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if last is not None and bar.look == last.look == "wait" and bar.start - last.end < _PAUSE:
            joined[-1] = Bar(
                last.start, bar.end, "wait", max(last, bar, key=lambda wait: wait.seconds).cause
            )
        elif bar.look != "other" or bar.seconds >= _PAUSE:
            joined.append(bar)
    return joined


def png(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts with matplotlib, one above the other, on one scale of time.

    Raises `TraceError` if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        raise TraceError(f"drawing this needs matplotlib: {installing('plot')}") from None
    figure = Figure(figsize=(13, 1.9 + 2.6 * len(charts)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    seconds = max(chart.end - chart.start for chart in charts)
    most = max((len(sources) for chart in charts for _, sources in chart.commits), default=1)
    legend: dict[str, Any] = {}
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        _panel(axes, chart, seconds, most, charts[0])
        legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    legend |= {
        label: Line2D([], [], color=colour, marker="v", markersize=5)
        for colour, label in _VERDICTS.values()
    }
    axes.set_xlabel("seconds since the request began")
    title = "\n".join(dict.fromkeys(chart.models for chart in charts))
    form = {"frameon": False, "fontsize": 8.5, "title": title, "title_fontsize": 8}
    labels = [label for _, label in (*WORK.values(), *_VERDICTS.values(), *_IN_TEXT.values())]
    labels = [label for label in labels if label in legend]
    figure.legend(
        [legend[label] for label in labels], labels, loc="outside lower center", ncols=4, **form
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _panel(axes: Any, chart: Chart, seconds: float, most: int, first: Chart) -> None:
    """A row for each worker, arrows of verdicts between them, and below the tokens that each step committed.

    Args:
        most: tokens of the largest step of the picture.
        first: the chart of the first panel, whose rate that of the others is compared with.
    """
    for row, bars in enumerate(chart.rows.values()):
        _row(axes, bars, row * _STEP, seconds)
    for verdict in chart.verdicts:
        line = {
            "arrowstyle": "-|>",
            "linewidth": 1.2,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 9,
        }
        line["color"] = _VERDICTS[verdict.is_rejection][0]
        ends = {
            "xytext": (verdict.sent, _HALF),
            "xy": (min(verdict.read, chart.end), _STEP - _HALF),
        }
        axes.annotate("", **ends, arrowprops=line, annotation_clip=True)
    ground = (len(chart.rows) - 1) * _STEP + _HALF + 0.35 + _TEXT
    _text(axes, chart.commits, seconds, ground, _TEXT / most)
    labels = [
        f"{name}\nworks {{:.0%}}, waits {{:.0%}}".format(*chart.shares(name)) for name in chart.rows
    ]
    places = [row * _STEP for row in range(len(labels))]
    axes.set_yticks(
        [*places, ground - _TEXT / 2], [*labels, "tokens added\nto the text"], fontsize=9
    )
    axes.set_ylim(ground, -0.5)
    axes.set_xlim(chart.start, chart.start + seconds)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{chart.method}: {chart.tokens} tokens in {chart.end - chart.start:.2f} s"
    if chart is not first and first.tokens:
        title += f", {chart.rate / first.rate:.2f} times as fast as {first.method}"
    axes.set_title(title, loc="left", fontsize=12, weight="bold")


def _draw(
    axes: Any, bars: Iterable[Bar], place: tuple[float, float], look: tuple[str, str], **form: Any
) -> None:
    spans = [(bar.start, bar.seconds) for bar in bars]
    axes.broken_barh(spans, place, facecolors=look[0], label=look[1], **form)


def _row(axes: Any, bars: Sequence[Bar], at: float, seconds: float) -> None:
    """A worker's bars; a wait names its cause: upright where it is short, not at all where it is very short."""
    joined = _joined(bars)
    for look in dict.fromkeys(bar.look for bar in joined):
        form = {"linewidth": 0} if look in ("other", "wait") else _EDGE
        _draw(
            axes,
            (bar for bar in joined if bar.look == look),
            (at - _HALF, 2 * _HALF),
            WORK[look],
            **form,
        )
    for bar in (each for each in joined if each.look == "wait"):
        place = (bar.start + bar.end) / 2, at
        middle: dict[str, Any] = {"ha": "center", "va": "center", "color": "#555555"}
        if bar.seconds / seconds > _CHARACTER * max(len(bar.cause), len("waits for")):
            axes.text(*place, f"waits for\n{bar.cause}", fontsize=8, **middle)
        elif bar.seconds / seconds > 2 * _CHARACTER:
            axes.text(*place, bar.cause, fontsize=6.5, rotation=90, **middle)


def _text(
    axes: Any, commits: list[tuple[float, list[str]]], seconds: float, ground: float, height: float
) -> None:
    """The tokens of each commit as a pile of boxes of this height, with their number above."""
    has_room = len(commits) * 2 * _CHARACTER < 1
    for time, sources in commits:
        for i, source in enumerate(sources):
            box = Bar(time, time + 1.6 * _CHARACTER * seconds, source)
            _draw(
                axes,
                [box],
                (ground - (i + 1) * height, height),
                _IN_TEXT[source],
                edgecolor="white",
                linewidth=0.5,
            )
        if has_room:
            place = time + 0.8 * _CHARACTER * seconds, ground - len(sources) * height - 0.03
            axes.text(
                *place, f"+{len(sources)}", ha="center", va="bottom", fontsize=8, color="#333333"
            )
