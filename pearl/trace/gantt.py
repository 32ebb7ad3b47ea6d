"""Draws both workers on one time axis, as a PNG."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pearl.colours import SOURCES, WORK
from pearl.errors import ConfigError, TraceError, installing
from pearl.trace.chrome import committed
from pearl.trace.reading import VERIFICATIONS, Arrow, RunTrace, Slice

_STEPS = 12  # verification forwards shown by default
# seconds; shorter work, such as a heartbeat, is too short to see and does not split a wait
_PAUSE = 1e-3


# Options that make pearl guess, as a title names them.
_GUESSES = {
    "look_ahead": "look-ahead",
    "draft_lookup": "lookup",
    "branches": "branches",
    "siblings": "siblings",
}
# By whether the verdict is a rejection: colour, meaning.
_VERDICTS = {
    False: ("#333333", "verdict: all accepted"),
    True: (WORK["rejected"][0], "verdict: a draft token rejected"),
}
_IN_TEXT = "in the text: "  # prefix of the labels of sources
_LEGEND = [meaning for _, meaning in chain(WORK.values(), _VERDICTS.values())]
_LEGEND += [_IN_TEXT + meaning for _, meaning in SOURCES.values()]
# Measures of a picture, in units of its vertical axis; `_CHARACTER` is a share of the horizontal one.
_HALF = 0.36  # half the height of a worker's row
_STEP = 1.1  # between the middles of two rows
_TEXT = 0.95  # height of the largest step in the row of the text
_CHARACTER = 0.005  # width of a character
_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6}
_THIN_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "color": "#555555"}


@dataclass(frozen=True)
class Bar:
    """A piece of work, or a wait and its cause. Times are in seconds.

    `look`: a key of `colours.WORK`, which determines the colour.
    """

    start: float
    end: float
    look: str
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Commit(NamedTuple):
    """The time at which tokens became part of the text, and the source of each token."""

    time: float
    sources: list[str]


class Shares(NamedTuple):
    """Shares of a time span, from 0 to 1."""

    work: float
    wait: float


@dataclass(frozen=True)
class Chart:
    """The bars of each worker, the verdicts, and the commits.

    Times are in seconds from the start of the first request.
    """

    start: float
    end: float
    rows: dict[str, list[Bar]]
    verdicts: list[Arrow]
    commits: list[Commit]
    method: str
    models: str

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        return sum(len(commit.sources) for commit in self.commits)

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the largest commit; 0 if there is none."""
        return max((len(commit.sources) for commit in self.commits), default=0)

    @property
    def rate(self) -> float:
        """Tokens per second in the time that is shown, which may include the prefill."""
        return self.tokens / self.seconds

    def shares(self, row: str) -> Shares:
        """Return the shares of the shown time in which a worker works and waits."""
        work = 0.0
        wait = 0.0
        for bar in self.rows[row]:
            if bar.look == "wait":
                wait += bar.seconds
            else:
                work += bar.seconds
        return Shares(work / self.seconds, wait / self.seconds)


def chart(trace: RunTrace, start: float = 0.0, seconds: float | None = None) -> Chart:
    """Return a chart of a part of a run.

    Raises `ConfigError` if `start` is not within the run, or `seconds` is not positive.

    Args:
        start: seconds after the first request began.
        seconds: length of the part; None for the length of the first twelve verification steps.
    """
    length = trace.end - trace.start
    if not 0 <= start < length or (seconds is not None and seconds <= 0):
        span = f"from {start:g} s on"
        if seconds is not None:
            span += f" for {seconds:g} s"
        raise ConfigError(f"nothing to show {span}: the run is {length:.3f} s long")
    end = min(start + (seconds or _first_steps(trace, start)), length)
    rows = {"target": _row_bars(trace.target, trace.start, start, end)}
    if trace.draft:
        rows["draft"] = _row_bars(trace.draft, trace.start, start, end)
    config = trace.metadata["config"]
    return Chart(
        start=start,
        end=end,
        rows=rows,
        verdicts=_verdicts(trace, start, end),
        commits=_commits(trace, start, end),
        method=_method(trace),
        models=f"target {config['target']}, draft {config['draft']}",
    )


def charts(
    traces: Sequence[RunTrace], start: float | None = None, seconds: float | None = None
) -> list[Chart]:
    """Return a chart of each run, all of the same time span.

    If `seconds` is None, the span is the first steps of the run with the shortest steps.
    """
    start = start or 0.0
    if seconds is None:
        seconds = min(_first_steps(trace, start) for trace in traces)
    return [chart(trace, start, seconds) for trace in traces]


def _row_bars(slices: Iterable[Slice], zero: float, start: float, end: float) -> list[Bar]:
    """Return a worker's bars, clipped to [`start`, `end`]. `zero`: when the first request began."""
    bars = []
    for piece in slices:
        for bar in _bars(piece, piece.start - zero):
            if bar.end > start and bar.start < end:
                bars.append(replace(bar, start=max(bar.start, start), end=min(bar.end, end)))
    return bars


def _bars(piece: Slice, start: float) -> list[Bar]:
    """Return the bars of a slice.

    A forward that drafted several tokens has a bar for each token; any other slice has one bar.
    """
    if piece.kind == "wait":
        return [Bar(start, start + piece.seconds, "wait", piece.name)]
    looks = piece.args.get("fates", [piece.name if piece.name in WORK else "other"])
    width = piece.seconds / len(looks)
    bars = []
    for number, look in enumerate(looks):
        bars.append(Bar(start + number * width, start + (number + 1) * width, look))
    return bars


def _verdicts(trace: RunTrace, start: float, end: float) -> list[Arrow]:
    arrows = []
    for verdict in trace.verdicts:
        sent = verdict.sent - trace.start
        if start <= sent <= end:
            arrows.append(Arrow(sent, verdict.read - trace.start, verdict.is_rejection))
    return arrows


def _commits(trace: RunTrace, start: float, end: float) -> list[Commit]:
    commits = []
    for decision in trace.target:
        time = decision.end - trace.start
        if decision.name == "decide" and start <= time <= end:
            sources = committed(decision.args)
            if sources:
                commits.append(Commit(time, sources))
    return commits


def _method(trace: RunTrace) -> str:
    """Return the decoding method; for pearl, also return which options for guesses were on.

    The options are left out if they differ between the requests.
    """
    guesses = set()
    for request in trace.requests:
        options = request.args.get("options", {})
        words = [word for name, word in _GUESSES.items() if options.get(name)]
        guesses.add(", ".join(words))
    if len(guesses) > 1 or trace.method != "pearl":
        return trace.method
    used = guesses.pop()
    return f"pearl with {used}" if used else "pearl as published"


def _first_steps(trace: RunTrace, start: float) -> float:
    """Return the seconds from `start` to the end of the `_STEPS` next verification forwards.

    `start`: seconds after the first request began.
    """
    start += trace.start
    end = trace.end
    count = 0
    for piece in trace.target:
        if piece.name in VERIFICATIONS and piece.start >= start and count < _STEPS:
            end = piece.end
            count += 1
    return end - start


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Drop work that is too short to see, and join waits that only such work separates.

    Of two joined waits, the longer one names the cause.
    """
    joined: list[Bar] = []
    for bar in bars:
        wait = joined[-1] if joined and joined[-1].look == "wait" else None
        if wait is not None and bar.look == "wait" and bar.start - wait.end < _PAUSE:
            cause = bar.cause if bar.seconds > wait.seconds else wait.cause
            joined[-1] = replace(wait, end=bar.end, cause=cause)
        elif bar.look != "other" or bar.seconds >= _PAUSE:
            joined.append(bar)
    return joined


def png(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts with matplotlib, one above the other, at the same scale of time.

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
    seconds = max(chart.seconds for chart in charts)
    max_tokens = max(1, *(chart.most_tokens for chart in charts))
    handles: dict[str, Any] = dict.fromkeys(_LEGEND)
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        _panel(axes, chart, seconds, max_tokens)
        title = f"{chart.method}: {chart.tokens} tokens in {chart.seconds:.2f} s"
        if chart is not charts[0] and charts[0].tokens:
            title += f", {chart.rate / charts[0].rate:.2f} times as fast as {charts[0].method}"
        axes.set_title(title, loc="left", fontsize=12, weight="bold")
        for artist in axes.collections:
            handles[artist.get_label()] = artist
    for colour, label in _VERDICTS.values():
        handles[label] = Line2D([], [], color=colour, marker="v", markersize=5)
    axes.set_xlabel("seconds since the request began")
    shown = {label: handle for label, handle in handles.items() if handle is not None}
    figure.legend(
        list(shown.values()),
        list(shown),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8.5,
        title="\n".join(dict.fromkeys(map(attrgetter("models"), charts))),
        title_fontsize=8,
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _panel(axes: Any, chart: Chart, seconds: float, max_tokens: int) -> None:
    """Draw a row for each worker, arrows of verdicts between them, and a row of committed tokens.

    Args:
        max_tokens: the number of tokens of the largest step in the whole picture.
    """
    ticks = []
    labels = []
    for number, (name, bars) in enumerate(chart.rows.items()):
        shares = chart.shares(name)
        ticks.append(number * _STEP)
        labels.append(f"{name}\nworks {shares.work:.0%}, waits {shares.wait:.0%}")
        _row(axes, bars, number * _STEP, seconds)
    for verdict in chart.verdicts:
        _arrow(axes, verdict, chart.end)
    ground = (len(chart.rows) - 1) * _STEP + _HALF + 0.35 + _TEXT
    _text(axes, chart.commits, seconds, ground, _TEXT / max_tokens)
    ticks.append(ground - _TEXT / 2)
    labels.append("tokens added\nto the text")
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.set_ylim(ground, -0.5)
    axes.set_xlim(chart.start, chart.start + seconds)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _arrow(axes: Any, verdict: Arrow, end: float) -> None:
    """Draw a verdict, from the target's row to the draft's row.

    If the verdict is read only after `end`, its arrow ends at `end`.
    """
    colour, _ = _VERDICTS[verdict.is_rejection]
    axes.annotate(
        "",
        xytext=(verdict.sent, _HALF),
        xy=(min(verdict.read, end), _STEP - _HALF),
        arrowprops={
            "arrowstyle": "-|>",
            "linewidth": 1.2,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 9,
            "color": colour,
        },
        annotation_clip=True,
    )


def _row(axes: Any, bars: Sequence[Bar], middle: float, seconds: float) -> None:
    """Draw a worker's bars, and the causes of its waits as text.

    The text is vertical if a wait is short, and left out if the wait is very short.
    """
    bars = _joined(bars)
    spans = defaultdict(list)
    for bar in bars:
        spans[bar.look].append((bar.start, bar.seconds))
    for name, pieces in spans.items():
        colour, label = WORK[name]
        edge = _EDGE
        if name in ("other", "wait"):
            edge = {"linewidth": 0}
        place = (middle - _HALF, 2 * _HALF)
        axes.broken_barh(pieces, place, facecolors=colour, label=label, **edge)
    for bar in bars:
        share = bar.seconds / seconds
        if bar.look != "wait" or share <= 2 * _CHARACTER:
            continue
        time = (bar.start + bar.end) / 2
        if share > _CHARACTER * max(len(bar.cause), len("waits for")):
            axes.text(time, middle, f"waits for\n{bar.cause}", fontsize=8, **_CENTRED)
        else:
            axes.text(time, middle, bar.cause, fontsize=6.5, rotation=90, **_CENTRED)


def _text(axes: Any, commits: list[Commit], seconds: float, ground: float, height: float) -> None:
    """Draw the tokens of each commit as a pile of boxes, with the number of tokens above it.

    Args:
        ground: where the piles stand.
        height: the height of one box.
    """
    has_room = len(commits) * 2 * _CHARACTER < 1
    width = 1.6 * _CHARACTER * seconds
    for time, sources in commits:
        top = ground
        for source in sources:
            top -= height
            colour, meaning = SOURCES[source]
            label = _IN_TEXT + meaning
            axes.broken_barh(
                [(time, width)], (top, height), facecolors=colour, label=label, **_THIN_EDGE
            )
        if has_room:
            axes.text(
                time + width / 2,
                top - 0.03,
                f"+{len(sources)}",
                ha="center",
                va="bottom",
                fontsize=8,
                color="#333333",
            )
