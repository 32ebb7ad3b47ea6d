"""Both workers on one time axis: in the terminal and as a PNG. `page` draws the same chart to zoom in.

One palette for all. Letters stand for the kinds of work in the terminal, so that it reads without colours too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.style import Style
from rich.text import Text

from pearl.errors import ConfigError, TraceError
from pearl.extras import installing
from pearl.trace.chrome import committed
from pearl.trace.reading import Arrow, Slice, Trace

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
    "prepare": Look("b", "#c9b458", "draft forward for other outcomes alone (branches)"),
    "draft": Look("o", "#9a9a9a", "draft forward that a verdict made useless"),
    "other": Look("+", "#6b6b6b", "judging, sampling, messages"),
    "wait": Look(".", "#ececec", "waiting"),
    "uncovered": Look(" ", "#ffffff", "not recorded"),
}
FORESEEN = ("#2fb5a0", "a branch drafted here was accepted")
VERDICTS = {  # whether it rejects
    False: ("verdict: all accepted", "#333333"),
    True: ("verdict: a draft token rejected", LOOKS["rejected"].colour),
}
_REJECTION = "x"
SOURCES = {  # where a committed token came from -> colour, meaning
    "accepted": (LOOKS["accepted"].colour, "accepted from the draft"),
    "guessed": ("#2f6fd0", "guessed without a model"),
    "corrected": (LOOKS["rejected"].colour, "the target's correction"),
    "bonus": ("#b565c9", "bonus"),
    "direct": ("#34495e", "the target's own"),
}


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
    """Tokens that became part of the text at `time`, by where each came from."""

    time: float
    sources: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return len(self.sources)

    @property
    def is_rejection(self) -> bool:
        """Whether the last of them corrects a draft token."""
        return "corrected" in self.sources


@dataclass(frozen=True)
class Chart:
    """Bars of each worker, verdicts on their way, and what was committed. Times in seconds from the start of the first
    request.
    """

    start: float
    end: float
    rows: dict[str, list[Bar]]
    verdicts: list[Arrow]
    commits: list[Commit]
    foreseen: list[tuple[float, float]]  # draft forwards in which a branch was prepared that was accepted
    method: str
    models: str

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
    until = since + (seconds or first_steps(trace, since))
    until = min(until, trace.end)
    rows = {
        name: _merged([bar for s in slices if s.end > since and s.start < until for bar in _bars(s, begin)])
        for name, slices in (("target", trace.target), ("draft", trace.draft))
        if slices
    }
    arrows = [Arrow(v.sent - begin, v.read - begin, v.is_rejection) for v in trace.verdicts]
    return Chart(
        since - begin,
        until - begin,
        rows,
        [arrow for arrow in arrows if since <= begin + arrow.sent <= until],
        [c for c in _commits(trace) if since <= begin + c.time <= until],
        [
            (max(s.start, since) - begin, min(s.end, until) - begin)
            for s in trace.draft
            if "accepted" in s.args.get("branches", ()) and s.end > since and s.start < until
        ],
        _method(trace),
        f"target {trace.metadata['config']['target']}, draft {trace.metadata['config']['draft']}",
    )


def same_time(traces: Sequence[Trace], seconds: float | None = None) -> list[Chart]:
    """The first `seconds` of each run; by default the first steps of the run whose steps are shorter."""
    if seconds is None:
        seconds = min(first_steps(trace, trace.start) for trace in traces)
    return [chart(trace, None, seconds) for trace in traces]


def _method(trace: Trace) -> str:
    """The method, and what guesses beside the draft where all requests have the same."""
    known = {"look_ahead": "look-ahead", "draft_lookup": "lookup", "branches": "branches"}
    decodings = [request.args.get("options", {}) for request in trace.requests]
    used = [tuple(word for name, word in known.items() if decoding.get(name)) for decoding in decodings]
    if len({*used}) > 1 or trace.method != "pearl":
        return trace.method
    return f"pearl with {', '.join(used[0])}" if used[0] else "pearl as published"


def first_steps(trace: Trace, since: float) -> float:
    """Seconds that the first steps from `since` on take."""
    steps = [s.end for s in trace.target if s.name in ("pre-verify", "post-verify") and s.start >= since]
    return (steps[min(_STEPS, len(steps)) - 1] if steps else trace.end) - since


def _bars(one: Slice, begin: float) -> list[Bar]:
    """The bar of a slice. A forward of several draft tokens is divided among them."""
    look, cause = one.name if one.name in LOOKS else "other", ""
    if one.kind == "wait":
        look, cause = "wait", one.name.removeprefix("wait: ")
    elif one.name == "draft" or "fate" in one.args:
        look = one.args.get("fate", "draft")
    details = ", ".join(f"{k} {v}" for k, v in one.args.items() if isinstance(v, int | float | str))
    what = f"{one.name}, {one.ran * 1e3:.2f} ms" + (f" ({details})" if details else "")
    looks = one.args.get("fates", [look])
    ends = [one.start - begin + one.seconds * i / len(looks) for i in range(len(looks) + 1)]
    return [Bar(*span, each, what, cause) for span, each in zip(pairwise(ends), looks, strict=True)]


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
    found = ((one.end - trace.start, committed(one.args)) for one in trace.target if one.name == "decide")
    return [Commit(time, tuple(source for _, each in told for source in each)) for time, told in found if told]


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
        for commit in chart.commits:
            if commit.is_rejection and at <= commit.time < at + count * cell:
                marks[int((commit.time - at) / cell)] = _REJECTION
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
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError:
        raise TraceError(f"drawing this needs matplotlib: {installing('plot')}") from None
    figure = Figure(figsize=(13, 1.9 + 2.6 * len(charts)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    scale = (
        max(chart.end - chart.start for chart in charts),
        max((c.tokens for x in charts for c in x.commits), default=1),
    )
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        _panel(axes, chart, *scale)
    axes.set_xlabel("seconds since the request began")
    used = dict.fromkeys(look for look in LOOKS if any(look in _used(chart) for chart in charts))
    handles: list[Any] = [Patch(facecolor=LOOKS[k].colour, edgecolor="#bbbbbb", label=LOOKS[k].meaning) for k in used]
    if any(chart.foreseen for chart in charts):
        handles.append(Patch(facecolor=FORESEEN[0], label=FORESEEN[1]))
    for words, colour in VERDICTS.values():
        handles.append(Line2D([], [], color=colour, marker="v", markersize=5, label=words))
    seen = {source for chart in charts for commit in chart.commits for source in commit.sources}
    handles += [
        Patch(facecolor=colour, label=f"in the text: {name}") for k, (colour, name) in SOURCES.items() if k in seen
    ]
    models = "\n".join(dict.fromkeys(chart.models for chart in charts))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8.5,
        title=models,
        title_fontsize=8,
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


_HALF = 0.36  # the half height of a worker's row
_STRIP = 0.2  # the height of what was foreseen
_STEP = 1.1  # from the middle of a row to that of the next
_TEXT = 0.95  # the height of the largest step in the row of the text


def _panel(axes: Any, chart: Chart, seconds: float, most: int) -> None:
    """One run: a row for each worker, arrows of verdicts between them, and below the tokens that each step committed.

    Args:
        most: tokens of the largest step that is drawn.
    """
    for row, bars in enumerate(chart.rows.values()):
        at = row * _STEP
        for look, spans in _spans(bars, chart).items():
            lines = {"edgecolor": "white", "linewidth": 0.6} if look not in ("other", "wait") else {"linewidth": 0}
            axes.broken_barh(spans, (at - _HALF, 2 * _HALF), facecolors=LOOKS[look].colour, **lines)
        for bar in bars:
            start, end = max(bar.start, chart.start), min(bar.end, chart.end)
            if bar.look == "wait" and (end - start) / seconds > _CHARACTER * len(bar.cause):
                text = f"waits for\n{bar.cause}"
                axes.text((start + end) / 2, at, text, ha="center", va="center", fontsize=8, color="#555555")
    strips = [(start, end - start) for start, end in chart.foreseen]
    axes.broken_barh(strips, (_STEP + _HALF - _STRIP, _STRIP), facecolors=FORESEEN[0], edgecolor="white", linewidth=0.6)
    for verdict in chart.verdicts:
        colour = VERDICTS[verdict.is_rejection][1]
        line = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
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
    axes.set_title(
        f"{chart.method}: {tokens} tokens in {chart.end - chart.start:.2f} s", loc="left", fontsize=12, weight="bold"
    )


def _text(axes: Any, chart: Chart, seconds: float, ground: float, height: float) -> None:
    """The tokens of each commit as a pile of boxes, `height` each, with their number above."""
    room = len(chart.commits) * 2 * _CHARACTER < 1
    for commit in chart.commits:
        for i, source in enumerate(commit.sources):
            box = (ground - (i + 1) * height, height)
            span = [(commit.time, 1.6 * _CHARACTER * seconds)]
            axes.broken_barh(span, box, facecolors=SOURCES[source][0], edgecolor="white", linewidth=0.5)
        if room:
            top = ground - commit.tokens * height - 0.03
            place = commit.time + 0.8 * _CHARACTER * seconds
            axes.text(place, top, f"+{commit.tokens}", ha="center", va="bottom", fontsize=8, color="#333333")


def _spans(bars: Iterable[Bar], chart: Chart) -> dict[str, list[tuple[float, float]]]:
    """style -> (start, duration) in seconds, cut to the time shown."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for bar in bars:
        start, end = max(bar.start, chart.start), min(bar.end, chart.end)
        spans.setdefault(bar.look, []).append((start, end - start))
    return spans
