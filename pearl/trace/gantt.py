"""Both workers on one time axis: in the terminal, as a PNG, as an HTML page that can be zoomed.

One palette for all three.  Letters stand for the kinds of work in the terminal, so that it reads without colours too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.style import Style
from rich.text import Text

from pearl.errors import ConfigError, TraceError
from pearl.trace.reading import Slice, Trace

_STEPS = 12  # verification forwards shown where the user does not say how much
_LABEL = 8  # columns before the axis


@dataclass(frozen=True)
class Look:
    letter: str
    colour: str
    meaning: str


LOOKS = {
    "prefill": Look("P", "#7b6fc4", "prefill"),
    "pre-verify": Look("v", "#5aa9e6", "pre-verify"),
    "post-verify": Look("V", "#1f6fb2", "post-verify"),
    "accepted": Look("a", "#3fa34d", "draft, accepted"),
    "rejected": Look("x", "#d1495b", "draft, rejected"),
    "discarded": Look("d", "#e0a458", "draft, never judged"),
    "draft": Look("o", "#9a9a9a", "draft, overtaken by a verdict"),
    "other": Look("+", "#6b6b6b", "judging, sampling, deciding, messages"),
    "wait": Look(".", "#e8e8e8", "waiting"),
    "uncovered": Look(" ", "#ffffff", "not recorded"),
}
_REJECTION = "x"


@dataclass(frozen=True)
class Bar:
    start: float
    end: float
    look: str
    what: str


@dataclass(frozen=True)
class Chart:
    """What is shown: bars of each worker, and rejections. Seconds from the start of the first request."""

    start: float
    end: float
    rows: dict[str, list[Bar]]
    rejections: list[float]
    title: str


def chart(trace: Trace, start: float | None = None, seconds: float | None = None) -> Chart:
    """A part of the run, `start` in seconds from the first request's start; by default the first steps.

    Raises `ConfigError` where the run holds nothing there.
    """
    begin = trace.start
    length = trace.end - begin
    if (start or 0.0) < 0 or (start or 0.0) >= length or (seconds is not None and seconds <= 0):
        wanted = f"from {start or 0.0:g} s on" + (f" for {seconds:g} s" if seconds is not None else "")
        raise ConfigError(f"nothing to show {wanted}: the run is {length:.3f} s long")
    since = begin + (start or 0.0)
    steps = [s.end for s in trace.target if s.name in ("pre-verify", "post-verify") and s.start >= since]
    until = since + seconds if seconds else (steps[min(_STEPS, len(steps)) - 1] if steps else trace.end)
    until = min(until, trace.end)
    rows = {
        name: [_bar(s, begin) for s in slices if s.end > since and s.start < until]
        for name, slices in (("target", trace.target), ("draft", trace.draft))
        if slices
    }
    rejections = [
        s.end - begin
        for s in trace.target
        if s.name == "judge" and s.args["correction"] is not None and since <= s.end <= until
    ]
    title = f"{trace.method}: {trace.metadata['config']['target']} and {trace.metadata['config']['draft']}"
    return Chart(since - begin, until - begin, rows, rejections, title)


def _bar(one: Slice, begin: float) -> Bar:
    look = one.name if one.name in LOOKS else "other"
    if one.kind == "wait":
        look = "wait"
    elif one.name == "draft" or "fate" in one.args:
        look = one.args.get("fate", "draft")
    details = ", ".join(f"{k} {v}" for k, v in one.args.items() if isinstance(v, int | float | str))
    what = f"{one.name}, {one.ran * 1e3:.2f} ms" + (f" ({details})" if details else "")
    return Bar(one.start - begin, one.end - begin, look, what)


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


def png(chart: Chart, path: Path) -> None:
    """Draws the chart with matplotlib. Raises `TraceError` where that is missing, or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise _missing("matplotlib") from None
    figure = Figure(figsize=(14, 2.6 + 0.4 * len(chart.rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, bars in enumerate(chart.rows.values()):
        for look, spans in _spans(bars, chart).items():
            edge = "#bbbbbb" if look == "wait" else "white"
            axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=LOOKS[look].colour, edgecolor=edge, linewidth=0.4)
    for time in chart.rejections:
        axes.axvline(time * 1e3, color=LOOKS["rejected"].colour, linestyle=":", linewidth=1)
    axes.set_yticks(range(len(chart.rows)), list(chart.rows))
    axes.invert_yaxis()
    axes.set_xlim(chart.start * 1e3, chart.end * 1e3)
    axes.set_xlabel("ms from the start of the first request; dotted lines: rejections")
    axes.set_title(chart.title, loc="left", fontsize=10)
    handles = [Patch(facecolor=LOOKS[k].colour, edgecolor="#bbbbbb", label=LOOKS[k].meaning) for k in _used(chart)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _spans(bars: Iterable[Bar], chart: Chart) -> dict[str, list[tuple[float, float]]]:
    """look -> (start, duration) in milliseconds, cut to what is shown."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for bar in bars:
        start, end = max(bar.start, chart.start), min(bar.end, chart.end)
        spans.setdefault(bar.look, []).append((start * 1e3, (end - start) * 1e3))
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
            base=[bar.start * 1e3 for _, bar in given],
            x=[(bar.end - bar.start) * 1e3 for _, bar in given],
            text=[bar.what for _, bar in given],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
            marker={"color": LOOKS[look].colour, "line": {"color": "#bbbbbb", "width": 0.5}},
            name=LOOKS[look].meaning,
        )
    for time in chart.rejections:
        figure.add_vline(time * 1e3, line={"color": LOOKS["rejected"].colour, "dash": "dot", "width": 1})
    figure.update_layout(
        barmode="overlay",
        title=chart.title,
        dragmode="zoom",
        template="plotly_white",
        legend={"orientation": "h", "y": -0.25},
        xaxis={"title": "ms from the start of the first request; dotted lines: rejections"},
        yaxis={"autorange": "reversed", "fixedrange": True, "categoryarray": list(chart.rows)},
        height=420,
    )
    figure.update_xaxes(range=[chart.start * 1e3, chart.end * 1e3])
    try:
        figure.write_html(path, include_plotlyjs=True, config={"scrollZoom": True, "displaylogo": False})
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _missing(library: str) -> TraceError:
    return TraceError(f"drawing this needs {library}: pip install 'pearl-runtime[plot]'")
