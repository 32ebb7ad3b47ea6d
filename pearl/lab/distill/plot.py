"""Draw an evaluation: agreement by set and by position, and the rank of the right token."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from pearl.errors import ConfigError
from pearl.extras import installing
from pearl.lab.distill.evaluate import BINS, TOPS, Figures


def plot(found: Mapping[str, Figures], title: str, path: Path) -> None:
    """Draw a PNG picture. Raises `ConfigError` if matplotlib is missing, or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"pictures need matplotlib: {installing('plot')}") from None
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    sets, positions, tops = figure.subplots(1, 3, sharey=True)
    _bars(sets, found)
    names = [f"{a}-{b - 1}" if b < BINS[-1] else f"{a}-" for a, b in pairwise(BINS)]
    for name, of in found.items():
        at = [BINS.index(first) for first in of.by_position]
        positions.plot(at, [share for share, _ in of.by_position.values()], marker="o", label=name)
        found_at = [k for k in TOPS if of.correction_in_top[k] is not None]
        tops.plot(range(len(found_at)), [of.correction_in_top[k] for k in found_at], marker="o", label=name)
    positions.set(title="agreement by position in the answer", xticks=range(len(names)), xticklabels=names)
    tops.set(title="wrong guesses: the right token in the draft's top", xticks=range(len(TOPS)), xticklabels=TOPS)
    positions.legend()
    sets.set(ylim=(0, 1))
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _bars(axes: object, found: Mapping[str, Figures]) -> None:
    kinds = {
        "agreement": [of.agreement for of in found.values()],
        "1 - TV": [of.overlap for of in found.values()],
        "agreement, unrepeated": [of.agreement_unrepeated for of in found.values()],
        "1 - TV, unrepeated": [of.overlap_unrepeated for of in found.values()],
    }
    for i, (name, values) in enumerate(kinds.items()):
        at = [place + (i - 1.5) * 0.2 for place in range(len(found))]
        axes.bar(at, [value or 0.0 for value in values], 0.2, label=name)  # type: ignore[attr-defined]
    axes.set(title="by set of prompts", xticks=range(len(found)), xticklabels=list(found))  # type: ignore[attr-defined]
    axes.legend()  # type: ignore[attr-defined]
