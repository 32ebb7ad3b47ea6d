"""Sweeps as pictures (PNG). Knows what a sweep found and how to draw it; what it means stands in the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.extras import installing
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.experiments.front import Price
from pearl.lab.experiments.rejections import Rejections
from pearl.lab.experiments.sweeps import BEST_C, CLOSED, FIXED_C, PEARL, SD, Point, by_acceptance, stops_paying

_COLOURS = {PEARL: "#1f6fb2", FIXED_C: "#5aa9e6", BEST_C: "#3fa34d", SD: "#d1495b", CLOSED: "#888888"}
_RELAXED = (("opt", _COLOURS[PEARL]), ("uno", _COLOURS[SD]))
_MARKS = {PEARL: "o", FIXED_C: "s", BEST_C: "^", SD: "D", CLOSED: "x"}


def heat_maps(points: Sequence[Point], path: Path) -> None:
    """PEARL's speed-up over `ar` and over `sd` at its best gamma, by acceptance rate and speed ratio."""
    picture = figure(20, 5)
    ratios, rates = (sorted({getattr(p, name) for p in points}) for name in ("ratio", "acceptance"))
    of = {(p.acceptance, p.ratio): p for p in points}
    pairs = [(PEARL, None), (PEARL, SD), (FIXED_C, SD)]
    for axes, (method, other) in zip(picture.subplots(1, len(pairs)), pairs, strict=True):
        _heat_map(picture, axes, [[of[a, c].lead(method, other) for c in ratios] for a in rates])
        axes.set_xticks(range(len(ratios)), [f"{c:g}" for c in ratios])
        axes.set_yticks(range(len(rates)), [f"{a:g}" for a in rates])
        axes.set_xlabel("speed ratio c = t_target / t_draft")
        axes.set_ylabel("acceptance rate")
        axes.set_title(f"{method}: times as fast as {other or 'ar'}   (=: a tie)", loc="left", fontsize=10)
    save(picture, path)


def _heat_map(picture: Any, axes: Any, grid: list[list[Estimate]]) -> None:
    """Blue where it pays, red where it loses, white where it makes no difference. Each cell tells its figure, with as
    many digits as its interval leaves; a tie, whose interval holds 1, has no colour and an =.
    """
    from matplotlib.colors import TwoSlopeNorm

    values = [[1.0 if one.ties(1.0) else one.value for one in row] for row in grid]
    norm = TwoSlopeNorm(1.0, min(0.8, *map(min, values)), max(1.2, *map(max, values)))
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="RdBu", norm=norm)
    for y, row in enumerate(grid):
        for x, one in enumerate(row):
            dark = abs(norm(values[y][x]) - 0.5) > 0.35
            words = "=" if one.ties(1.0) else f"{one.value:.{min(2, one.digits)}f}"
            axes.text(x, y, words, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    picture.colorbar(image, ax=axes)


def lines(points: Sequence[Point], axis: str, label: str, scale: float, title: str, path: Path) -> None:
    """Speed-ups over `ar` along `axis` with their intervals, a panel for each acceptance rate; dotted where PEARL falls
    behind.

    Args:
        label: of the axis. scale: from its unit to the label's.
    """
    groups = by_acceptance(points)
    picture = figure(1.5 + 4.5 * len(groups), 4.8)
    every = picture.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (acceptance, group) in zip(every, groups.items(), strict=True):
        for name in group[0].speedups:
            x, found = [getattr(p, axis) * scale for p in group], [p.speedups[name] for p in group]
            y, low, high = ([getattr(one, what) for one in found] for what in ("value", "low", "high"))
            axes.fill_between(x, low, high, color=_COLOURS[name], alpha=0.2, linewidth=0)
            axes.plot(x, y, color=_COLOURS[name], marker=_MARKS[name], markersize=4, label=name)
        axes.axhline(1.0, color="black", linewidth=1, label="ar")
        for other, colour in ((SD, _COLOURS[SD]), (None, "black")):
            if other and other not in group[0].speedups:
                continue
            at = stops_paying(group, axis, PEARL, other)
            if at:
                behind = f"pearl (stream) behind {'sd' if other else 'ar'}: {at * scale:.3g}"
                axes.axvline(at * scale, color=colour, linestyle=":", label=behind)
        axes.set_title(f"acceptance rate {acceptance:g}", loc="left", fontsize=10)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    every[0].set_ylabel("times as fast as ar at the same setting")
    every[0].set_ylim(bottom=0)  # of all, and only once all are drawn
    picture.suptitle(title, fontsize=10)
    save(picture, path)


def figure(width: float, height: float) -> Any:
    """Inches. Raises `ConfigError` where there is no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"pictures need matplotlib: {installing('plot')}") from None
    made = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(picture: Any, path: Path) -> None:
    """Raises `ConfigError` where it cannot be written."""
    try:
        picture.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def rejections_and_bias(done: Sequence[Rejections], limits: Mapping[str, float], tokens: int, path: Path) -> None:
    """For each chain rejections by the number of candidates, and bias against rejections of rules that are not exact.

    Lines and crosses are theory, dots with their 95% intervals are measured.
    """
    names = list(limits)
    picture = figure(5 * len(names), 7.5)
    every = picture.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        own = [one for one in done if one.chain == name]
        _by_candidates(every[0][column], [one for one in own if one.rule == "batch"], limits[name])
        every[0][column].set_title(f"{name}: rejections in {tokens} tokens", loc="left", fontsize=10)
        _front(every[1][column], own, tokens)
    save(picture, path)


def prices(done: Sequence[Price], path: Path) -> None:
    """Bias against rejections a token: lines and crosses along the target's texts, dots with 95% intervals measured in
    the rules' own.
    """
    picture = figure(6.5, 4.8)
    axes = picture.subplots()
    for rule, colour in _RELAXED:
        rows = [one for one in done if one.rule == rule]
        along = [one.bias for one in rows], [one.expected for one in rows]
        axes.plot(*along, "x-", color=colour, label=f"{rule}, along the target's texts")
        across, up = [one.measured_bias for one in rows], [one.measured for one in rows]
        _dots(axes, across, up, colour, f"{rule}, its own texts")
        below = {"ha": "right", "va": "top"} if rule == "opt" else {}  # where the lines meet their labels must not
        for one in rows:
            axes.annotate(f" {one.epsilon:g} ", (one.bias, one.expected), fontsize=7, **below)
    axes.set_xlabel("bias a token")
    axes.set_ylabel("rejections a token")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    save(picture, path)


def _dots(axes: Any, across: Sequence[Estimate], up: Sequence[Estimate], colour: str, label: str) -> None:
    """Points with their 95% intervals both ways."""
    values, margins = ([[getattr(e, n) or 0.0 for e in each] for each in (across, up)] for n in ("value", "margin"))
    axes.errorbar(*values, *reversed(margins), fmt="o", markersize=4, color=colour, label=label)


def _by_candidates(axes: Any, own: Sequence[Rejections], least: float) -> None:
    places = range(len(own))
    axes.plot(places, [one.expected for one in own], "x-", color=_COLOURS[CLOSED], label="theory")
    margins = [one.measured.margin or 0.0 for one in own]
    axes.errorbar(
        places, [one.measured.value for one in own], margins, fmt="o", color=_COLOURS[PEARL], label="measured"
    )
    axes.axhline(least, color=_COLOURS[CLOSED], linestyle=":", label="theory, any number")
    axes.set_xticks(places, [f"{one.parameters[0][1]:g}" for one in own])
    axes.set_xlabel("candidates (1: the ratio rule)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _front(axes: Any, own: Sequence[Rejections], tokens: int) -> None:
    for rule, colour in _RELAXED:
        rows = [one for one in own if one.rule == rule]
        axes.plot([one.bias / tokens for one in rows], [one.expected / tokens for one in rows], "x-", color=colour)
        across, up = ([_a_token(getattr(one, name), tokens) for one in rows] for name in ("measured_bias", "measured"))
        _dots(axes, across, up, colour, rule)
        for one in rows:
            at = one.bias / tokens, one.expected / tokens
            axes.annotate(f" {one.parameters[0][1]:g}", at, fontsize=7)
    axes.set_xlabel("bias a token")
    axes.set_ylabel("rejections a token")
    axes.set_title("the price of fewer rejections, by epsilon", loc="left", fontsize=10)
    axes.legend(fontsize=8)


def _a_token(one: Estimate, tokens: int) -> Estimate:
    return Estimate(one.value / tokens, (one.margin or 0.0) / tokens)
