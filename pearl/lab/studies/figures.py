"""Tables and figures as data. Commands print them as JSON, and draw figures if matplotlib is installed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from pearl.errors import ConfigError, installing

_WIDE = 90  # most characters in a line of a title

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Table:
    """A title, column names and rows of texts. `notes` are lines below the table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Plot:
    """One figure of a paper, from our own runs.

    Attributes:
        name: name of the figure's file, without its suffix.
        lines, dots, bars: label -> points (x, y); a bar is 0.9 wide.
        theirs: the paper's own values, as a line below the title.
        log: the axes with a logarithmic scale: "", "x", "y" or "xy".
    """

    name: str
    title: str
    x: str
    y: str
    lines: Mapping[str, Points] = field(default_factory=dict)
    dots: Mapping[str, Points] = field(default_factory=dict)
    bars: Mapping[str, Points] = field(default_factory=dict)
    theirs: str = ""
    log: str = ""


@dataclass
class Report:
    """The tables and plots of a study."""

    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)


def curve(function: Callable[[Any], float], xs: Iterable[float]) -> Points:
    """Return the points (x, function(x))."""
    return [(x, function(x)) for x in xs]


def check_drawing() -> None:
    """Raise `ConfigError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f"--figures needs matplotlib: {installing('plot')}") from None


def draw(figures: Sequence[Plot], directory: Path) -> list[Path]:
    """Draw each figure as an SVG file; return the paths. Raises `ConfigError` if a file cannot be written."""
    paths = []
    for figure in figures:
        paths.append(directory / f"{figure.name}.svg")
        _draw(figure, paths[-1])
    return paths


def _draw(figure: Plot, path: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7, 4.2), layout="constrained")
    axes = canvas.add_subplot()
    dots = partial(axes.plot, marker="o", linestyle="", markersize=4)
    bars = partial(axes.bar, width=0.9, alpha=0.5)
    count = 0
    for draw_series, series in (
        (bars, figure.bars),
        (axes.plot, figure.lines),
        (dots, figure.dots),
    ):
        for label, points in series.items():
            x, y = zip(*points, strict=True)
            draw_series(x, y, label=label)
            count += 1
    if "x" in figure.log:
        axes.set_xscale("log", base=2)
    if "y" in figure.log:
        axes.set_yscale("log")
    title = fill(figure.title, _WIDE)
    if figure.theirs:
        title += "\n" + fill(figure.theirs, _WIDE)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(figure.x)
    axes.set_ylabel(figure.y)
    axes.grid(alpha=0.3)
    if not figure.y or count > 1:
        axes.legend(fontsize=8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
