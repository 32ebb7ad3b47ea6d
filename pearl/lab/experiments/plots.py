"""The picture (PNG) of rejections and bias: figures 2 to 4 of Yin et al. 2024."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.extras import installing
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.experiments.rejections import RELAXED, Rejections

_BLUE, _RED, _GREY = "#1f6fb2", "#d1495b", "#888888"


def rejections_and_bias(done: Sequence[Rejections], limits: Mapping[str, float], tokens: int, path: Path) -> None:
    """For each chain: rejections by the number of candidates, and bias against rejections of the relaxed rules.

    Lines and crosses are theory, dots with 95% intervals are measured. Raises `ConfigError` without matplotlib, or if
    the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"pictures need matplotlib: {installing('plot')}") from None
    picture = Figure(figsize=(5 * len(limits), 7.5), dpi=130, layout="constrained")
    FigureCanvasAgg(picture)
    every = picture.subplots(2, len(limits), squeeze=False)
    for column, (name, least) in enumerate(limits.items()):
        own = [one for one in done if one.chain == name]
        axes, batch = every[0][column], [one for one in own if one.rule == "batch"]
        places = [float(number) for number in range(len(batch))]
        axes.plot(places, [one.expected for one in batch], "x-", color=_GREY, label="theory")
        _dots(axes, [Estimate(at, at, at) for at in places], [one.measured for one in batch], 1, _BLUE, "measured")
        axes.axhline(least, color=_GREY, linestyle=":", label="theory, any number")
        axes.set_xticks(places, [f"{one.parameters[0][1]:g}" for one in batch])
        axes.set(xlabel="candidates (1: the ratio rule)")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        axes.set_title(f"{name}: rejections in {tokens} tokens", loc="left", fontsize=10)
        _front(every[1][column], own, tokens)
    try:
        picture.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _front(axes: Any, done: Sequence[Rejections], tokens: int) -> None:
    """Bias against rejections, per token."""
    for rule, colour in zip(RELAXED, (_BLUE, _RED), strict=True):
        rows = [one for one in done if one.rule == rule]
        axes.plot([one.bias / tokens for one in rows], [one.expected / tokens for one in rows], "x-", color=colour)
        _dots(axes, [one.measured_bias for one in rows], [one.measured for one in rows], tokens, colour, rule)
        below = {"ha": "right", "va": "top"} if rule == "opt" else {}  # the labels of the two rules must not overlap
        for one in rows:
            place = one.bias / tokens, one.expected / tokens
            axes.annotate(f" {one.parameters[0][1]:g} ", place, fontsize=7, **below)
    axes.set(xlabel="bias a token", ylabel="rejections a token")
    axes.legend(fontsize=8)
    axes.set_title("the price of fewer rejections, by epsilon", loc="left", fontsize=10)


def _dots(axes: Any, across: Sequence[Estimate], up: Sequence[Estimate], by: float, colour: str, label: str) -> None:
    """Points, divided by `by`, with their 95% intervals in both directions."""
    (x, x_margins), (y, y_margins) = (
        [[e.value / by for e in each], [e.margin / by for e in each]] for each in (across, up)
    )
    axes.errorbar(x, y, y_margins, x_margins, fmt="o", markersize=4, color=colour, label=label)
