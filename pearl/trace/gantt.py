"""Both workers on one time axis: in the terminal, as a PNG, as an HTML page that can be zoomed.

One palette for all three.  Letters stand for the kinds of work in the terminal, so that it reads without colours too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.style import Style
from rich.text import Text

from pearl.errors import ConfigError, TraceError
from pearl.trace.reading import Slice, Trace

_STEPS = 12  # verification forwards that are shown by default
_LABEL = 8  # columns before the axis
_CHARACTER = 0.005  # the width of a character in a picture, as a share of the axis
_PAUSE = 1e-3  # seconds: shorter work (a heartbeat, noting a message) does not cut a wait in two


@dataclass(frozen=True)
class Look:
    letter: str
    colour: str
    meaning: str


LOOKS = {
    "prefill": Look("P", "#7b6fc4", "reading the prompt (prefill)"),
    "pre-verify": Look("v", "#5aa9e6", "target forward without draft tokens (pre-verify)"),
    "post-verify": Look("V", "#1f6fb2", "target forward over draft tokens (post-verify)"),
    "accepted": Look("a", "#3fa34d", "draft token, accepted"),
    "rejected": Look("x", "#d1495b", "draft token, rejected"),
    "discarded": Look("d", "#e0a458", "draft token after a rejected one, discarded"),
    "draft": Look("o", "#9a9a9a", "draft forward that a verdict made useless"),
    "other": Look("+", "#6b6b6b", "judging, sampling, messages"),
    "wait": Look(".", "#ececec", "waiting"),
    "uncovered": Look(" ", "#ffffff", "not recorded"),
}
_REJECTION = "x"


@dataclass(frozen=True)
class Bar:
    """One piece of work, or a wait. `cause`: what a wait is for."""

    start: float
    end: float
    look: str
    what: str
    cause: str = ""


@dataclass(frozen=True)
class Commit:
    """`tokens` became part of the text at `time`; with `is_rejection` the last of them corrects a draft token."""

    time: float
    tokens: int
    is_rejection: bool


@dataclass(frozen=True)
class Chart:
    """Bars of each worker, and rejections. Times in seconds from the start of the first request."""

    start: float
    end: float
    rows: dict[str, list[Bar]]
    rejections: list[float]
    commits: list[Commit]
    method: str
    models: str

    @property
    def title(self) -> str:
        return f"{self.method}: {self.models}"

    def shares(self, row: str) -> tuple[float, float]:
        """Of the time shown: the share in which `row` worked, and the share in which it waited."""
        work = wait = 0.0
        for bar in self.rows[row]:
            inside = max(0.0, min(bar.end, self.end) - max(bar.start, self.start))
            work, wait = (work, wait + inside) if bar.look == "wait" else (work + inside, wait)
        return work / (self.end - self.start), wait / (self.end - self.start)


def chart(trace: Trace, start: float | None = None, seconds: float | None = None) -> Chart:
    """A part of the run, `start` in seconds from the first request's start; by default the first steps.

    Raises `ConfigError` where the run has no work in that time.
    """
    begin = trace.start
    length = trace.end - begin
    if (start or 0.0) < 0 or (start or 0.0) >= length or (seconds is not None and seconds <= 0):
        wanted = f"from {start or 0.0:g} s on" + (f" for {seconds:g} s" if seconds is not None else "")
        raise ConfigError(f"nothing to show {wanted}: the run is {length:.3f} s long")
    since = begin + (start or 0.0)
    until = since + (seconds or _usual(trace, since))
    until = min(until, trace.end)
    rows = {
        name: _merged([_bar(s, begin) for s in slices if s.end > since and s.start < until])
        for name, slices in (("target", trace.target), ("draft", trace.draft))
        if slices
    }
    rejections = [
        s.end - begin
        for s in trace.target
        if s.name == "judge" and s.args["correction"] is not None and since <= s.end <= until
    ]
    return Chart(
        since - begin,
        until - begin,
        rows,
        rejections,
        [c for c in _commits(trace) if since <= begin + c.time <= until],
        trace.method,
        f"target {trace.metadata['config']['target']}, draft {trace.metadata['config']['draft']}",
    )


def same_time(traces: Sequence[Trace], seconds: float | None = None) -> list[Chart]:
    """The first `seconds` of each run; by default the first steps of the run whose steps are shorter."""
    if seconds is None:
        seconds = min(_usual(trace, trace.start) for trace in traces)
    return [chart(trace, None, seconds) for trace in traces]


def _usual(trace: Trace, since: float) -> float:
    """Seconds that the first steps from `since` on take."""
    steps = [s.end for s in trace.target if s.name in ("pre-verify", "post-verify") and s.start >= since]
    return (steps[min(_STEPS, len(steps)) - 1] if steps else trace.end) - since


def _bar(one: Slice, begin: float) -> Bar:
    look, cause = one.name if one.name in LOOKS else "other", ""
    if one.kind == "wait":
        look, cause = "wait", one.name.removeprefix("wait: ")
    elif one.name == "draft" or "fate" in one.args:
        look = one.args.get("fate", "draft")
    details = ", ".join(f"{k} {v}" for k, v in one.args.items() if isinstance(v, int | float | str))
    what = f"{one.name}, {one.ran * 1e3:.2f} ms" + (f" ({details})" if details else "")
    return Bar(one.start - begin, one.end - begin, look, what, cause)


def _merged(bars: Sequence[Bar]) -> list[Bar]:
    """Waits with less than `_PAUSE` of other work between them become one; its cause is that of the longest."""
    merged: list[Bar] = []
    waits: list[Bar] = []  # that make the last bar of `merged`
    short: list[Bar] = []  # work since then
    for bar in bars:
        if bar.look == "wait" and waits and bar.start - waits[-1].end < _PAUSE:
            waits.append(bar)
            cause = max(waits, key=lambda wait: wait.end - wait.start).cause
            seconds = sum(wait.end - wait.start for wait in waits)
            merged[-1] = Bar(waits[0].start, bar.end, "wait", f"wait: {cause}, {seconds * 1e3:.2f} ms", cause)
            short = []
        elif bar.look == "other" and waits and bar.end - waits[-1].end < _PAUSE:
            short.append(bar)
        else:
            merged += [*short, bar]
            waits, short = [bar] if bar.look == "wait" else [], []
    return merged + short


def _commits(trace: Trace) -> list[Commit]:
    begin, found = trace.start, []
    for one in trace.target:
        for command in one.args.get("commands", ()) if one.name == "decide" else ():
            if command["type"] == "Deliver" and command["message"]["type"] == "Committed":
                sources = command["message"]["provenance"]
                found.append(Commit(one.end - begin, len(sources), "corrected" in sources))
    return found


# ---- in the terminal ----


def terminal(chart: Chart, width: int) -> Iterator[Text]:
    """Lines of at most `width` columns: bands of a ruler, a line for each worker, and the rejections."""
    columns = max(10, width - _LABEL)
    cell = _cell(chart, columns)
    at = chart.start
    while at < chart.end - cell / 2:
        count = min(columns, max(1, round((chart.end - at) / cell)))
        yield Text(f"{'s':<{_LABEL}}" + _ruler(at, cell, count), style="dim")
        for name, bars in chart.rows.items():
            yield Text(f"{name:<{_LABEL}}").append_text(_line(bars, at, cell, count))
        marks = [" "] * count
        for time in chart.rejections:
            if at <= time < at + count * cell:
                marks[int((time - at) / cell)] = _REJECTION
        yield Text(f"{'rejects':<{_LABEL}}" + "".join(marks).rstrip(), style="red")
        yield Text()
        at += count * cell
    yield from _legend(chart, width)
    yield Text(f"one column is {cell * 1e3:.3g} ms; each shows what took most of it", style="dim")


def _cell(chart: Chart, columns: int) -> float:
    """Seconds of a column: half of a draft forward, but no more than six bands in all."""
    drafts = sorted(
        b.end - b.start for b in chart.rows.get("draft", ()) if b.look in ("accepted", "rejected", "discarded")
    )
    fine = drafts[len(drafts) // 2] / 2 if drafts else (chart.end - chart.start) / columns
    return max(fine, (chart.end - chart.start) / (6 * columns), 1e-6)


def _ruler(at: float, cell: float, count: int) -> str:
    """A time every twenty columns."""
    marks = (f"|{at + i * cell:.3f}" for i in range(0, count, 20))
    return "".join(f"{mark:<20}" for mark in marks)[:count]


def _line(bars: Sequence[Bar], at: float, cell: float, count: int) -> Text:
    line, i = Text(), 0
    for column in range(count):
        start = at + column * cell
        while i < len(bars) and bars[i].end <= start:
            i += 1
        shares: dict[str, float] = {}
        for bar in bars[i:]:
            if bar.start >= start + cell:
                break
            inside = min(bar.end, start + cell) - max(bar.start, start)
            shares[bar.look] = shares.get(bar.look, 0.0) + max(0.0, inside)
        free = cell - sum(shares.values())
        look = max(shares, key=lambda name: shares[name]) if shares else "uncovered"
        look = "uncovered" if free > shares.get(look, 0.0) else look
        line.append(LOOKS[look].letter, _style(look))
    return line


def _style(look: str) -> Style:
    if look == "uncovered":
        return Style()
    return Style(color="black" if look in ("wait", "discarded", "pre-verify") else "white", bgcolor=LOOKS[look].colour)


def _legend(chart: Chart, width: int) -> Iterator[Text]:
    text = Text()
    for look in _used(chart):
        entry = Text(f" {LOOKS[look].letter} ", _style(look)).append(f" {LOOKS[look].meaning}   ", Style.null())
        if len(text) and len(text) + len(entry) > width:
            yield text
            text = Text()
        text.append_text(entry)
    yield text


def _used(chart: Chart) -> list[str]:
    seen = {bar.look for bars in chart.rows.values() for bar in bars}
    return [look for look in LOOKS if look in seen]


# ---- as pictures ----


def png(charts: Sequence[Chart], path: Path) -> None:
    """Draws the charts with matplotlib, one above the other on one scale of time.

    Raises `TraceError` where matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise _missing("matplotlib") from None
    rows = sum(len(chart.rows) + 1 for chart in charts)
    figure = Figure(figsize=(13, 1.3 + 0.55 * rows + 0.5 * len(charts)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    seconds = max(chart.end - chart.start for chart in charts)
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        _panel(axes, chart, seconds)
    axes.set_xlabel("seconds since the request began")
    used = dict.fromkeys(look for look in LOOKS if any(look in _used(chart) for chart in charts))
    handles = [Patch(facecolor=LOOKS[k].colour, edgecolor="#bbbbbb", label=LOOKS[k].meaning) for k in used]
    models = "\n".join(dict.fromkeys(chart.models for chart in charts))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9, title=models, title_fontsize=8
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _panel(axes: Any, chart: Chart, seconds: float) -> None:
    """One run: a row for each worker, and below them the tokens that each step added to the text."""
    for row, bars in enumerate(chart.rows.values()):
        for look, spans in _spans(bars, chart).items():
            lines = {"edgecolor": "white", "linewidth": 0.6} if look not in ("other", "wait") else {"linewidth": 0}
            axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=LOOKS[look].colour, **lines)
        for bar in bars:
            start, end = max(bar.start, chart.start), min(bar.end, chart.end)
            if bar.look == "wait" and (end - start) / seconds > _CHARACTER * len(bar.cause):
                text = f"waits for\n{bar.cause}"
                axes.text((start + end) / 2, row, text, ha="center", va="center", fontsize=8, color="#555555")
    last = len(chart.rows)
    room = len(chart.commits) * 2 * _CHARACTER < 1
    for commit in chart.commits:
        colour = LOOKS["rejected"].colour if commit.is_rejection else LOOKS["accepted"].colour
        axes.plot([commit.time] * 2, [last - 0.5, last - 0.25], color=colour, linewidth=1.5)
        if room:
            axes.text(commit.time, last + 0.1, f"+{commit.tokens}", ha="center", va="center", fontsize=9, color=colour)
    labels = [f"{name}\nworks {{:.0%}}, waits {{:.0%}}".format(*chart.shares(name)) for name in chart.rows]
    axes.set_yticks(range(last + 1), [*labels, "added to the text\n(red: with a correction)"], fontsize=9)
    axes.set_ylim(last + 0.45, -0.5)
    axes.set_xlim(chart.start, chart.start + seconds)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    tokens = sum(commit.tokens for commit in chart.commits)
    axes.set_title(
        f"{chart.method}: {tokens} tokens in {chart.end - chart.start:.2f} s", loc="left", fontsize=12, weight="bold"
    )


def _spans(bars: Iterable[Bar], chart: Chart) -> dict[str, list[tuple[float, float]]]:
    """style -> (start, duration) in seconds, cut to the time shown."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for bar in bars:
        start, end = max(bar.start, chart.start), min(bar.end, chart.end)
        spans.setdefault(bar.look, []).append((start, end - start))
    return spans


def html(chart: Chart, path: Path) -> None:
    """Draws the chart with plotly, library included: the page opens offline. Raises `TraceError` as `png` does."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise _missing("plotly") from None
    figure = go.Figure()
    for look in _used(chart):
        given = [(name, bar) for name, bars in chart.rows.items() for bar in bars if bar.look == look]
        figure.add_bar(
            orientation="h",
            y=[name for name, _ in given],
            base=[bar.start for _, bar in given],
            x=[bar.end - bar.start for _, bar in given],
            text=[bar.what for _, bar in given],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
            marker={"color": LOOKS[look].colour, "line": {"color": "#bbbbbb", "width": 0.5}},
            name=LOOKS[look].meaning,
        )
    for time in chart.rejections:
        figure.add_vline(time, line={"color": LOOKS["rejected"].colour, "dash": "dot", "width": 1})
    figure.update_layout(
        barmode="overlay",
        title=chart.title,
        dragmode="zoom",
        template="plotly_white",
        legend={"orientation": "h", "y": -0.25},
        xaxis={"title": "seconds since the request began; dotted lines: rejections"},
        yaxis={"autorange": "reversed", "fixedrange": True, "categoryarray": list(chart.rows)},
        height=420,
    )
    figure.update_xaxes(range=[chart.start, chart.end])
    try:
        figure.write_html(path, include_plotlyjs=True, config={"scrollZoom": True, "displaylogo": False})
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _missing(library: str) -> TraceError:
    return TraceError(f"drawing this needs {library}: pip install 'pearl-runtime[plot]'")
