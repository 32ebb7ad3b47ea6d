"""Pictures (PNG) of rejections and bias."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.extras import installing
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.experiments.rejections import RELAXED, Price, Rejections

_BLUE, _RED, _GREY = "#1f6fb2", "#d1495b", "#888888"
_COLOURS = dict(zip(RELAXED, (_BLUE, _RED), strict=True))


def figure(width: float, height: float) -> Any:
    """An empty figure of so many inches. Raises `ConfigError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"pictures need matplotlib: {installing('plot')}") from None
    made = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(picture: Any, path: Path) -> None:
    """Raises `ConfigError` if it cannot be written."""
    try:
        picture.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def rejections_and_bias(done: Sequence[Rejections], limits: Mapping[str, float], tokens: int, path: Path) -> None:
    """For each chain: rejections by the number of candidates, and bias against rejections of the relaxed rules.

    Lines and crosses are theory, dots with 95% intervals are measured.
    """
    picture = figure(5 * len(limits), 7.5)
    every = picture.subplots(2, len(limits), squeeze=False)
    for column, (name, least) in enumerate(limits.items()):
        own = [one for one in done if one.chain == name]
        axes, batch = every[0][column], [one for one in own if one.rule == "batch"]
        places = [float(number) for number in range(len(batch))]
        axes.plot(places, [one.expected for one in batch], "x-", color=_GREY, label="theory")
        _dots(axes, [Estimate(at, 0) for at in places], [one.measured for one in batch], _BLUE, "measured")
        axes.axhline(least, color=_GREY, linestyle=":", label="theory, any number")
        axes.set_xticks(places, [f"{one.parameters[0][1]:g}" for one in batch])
        axes.set(xlabel="candidates (1: the ratio rule)")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        axes.set_title(f"{name}: rejections in {tokens} tokens", loc="left", fontsize=10)
        for rule in RELAXED:
            rows = [one for one in own if one.rule == rule]
            along = [(one.parameters[0][1], one.bias / tokens, one.expected / tokens) for one in rows]
            measured = [(_scaled(one.measured_bias, tokens), _scaled(one.measured, tokens)) for one in rows]
            _front(every[1][column], rule, along, measured)
        every[1][column].set_title("the price of fewer rejections, by epsilon", loc="left", fontsize=10)
    save(picture, path)


def prices(done: Sequence[Price], path: Path) -> None:
    """Bias against rejections per token: lines along the target's texts, dots with 95% intervals in the rules' own."""
    picture = figure(6.5, 4.8)
    axes = picture.subplots()
    for rule in RELAXED:
        rows = [one for one in done if one.rule == rule]
        along = [(one.epsilon, one.bias, one.expected) for one in rows]
        _front(axes, rule, along, [(one.measured_bias, one.measured) for one in rows])
    axes.set_ylim(bottom=0)
    save(picture, path)


def _front(
    axes: Any, rule: str, along: Iterable[tuple[float, float, float]], measured: Sequence[tuple[Estimate, Estimate]]
) -> None:
    """`along`: (epsilon, bias, rejections). `measured`: (bias, rejections)."""
    epsilons, biases, rejections = zip(*along, strict=True)
    axes.plot(biases, rejections, "x-", color=_COLOURS[rule])
    _dots(axes, [bias for bias, _ in measured], [rejected for _, rejected in measured], _COLOURS[rule], rule)
    below = {"ha": "right", "va": "top"} if rule == "opt" else {}  # the labels of the two rules must not overlap
    for epsilon, bias, rejected in zip(epsilons, biases, rejections, strict=True):
        axes.annotate(f" {epsilon:g} ", (bias, rejected), fontsize=7, **below)
    axes.set(xlabel="bias a token", ylabel="rejections a token")
    axes.legend(fontsize=8)


def _dots(axes: Any, across: Sequence[Estimate], up: Sequence[Estimate], colour: str, label: str) -> None:
    """Points with their 95% intervals in both directions."""
    (x, x_margins), (y, y_margins) = (
        [[e.value for e in each], [e.margin or 0.0 for e in each]] for each in (across, up)
    )
    axes.errorbar(x, y, y_margins, x_margins, fmt="o", markersize=4, color=colour, label=label)


def _scaled(one: Estimate, by: float) -> Estimate:
    return Estimate(one.value / by, (one.margin or 0.0) / by)
