"""Pictures (PNG) of sweeps and of rejections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.extras import installing
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.experiments.rejections import RELAXED, Price, Rejections
from pearl.lab.experiments.sweeps import BEST_C, FIXED_C, PEARL, SD, Point, by_acceptance, stops_paying

_COLOURS = {PEARL: "#1f6fb2", FIXED_C: "#5aa9e6", BEST_C: "#3fa34d", SD: "#d1495b"}
_MARKS = {PEARL: "o", FIXED_C: "s", BEST_C: "^", SD: "D"}
_RULES = dict(zip(RELAXED, (_COLOURS[PEARL], _COLOURS[SD]), strict=True))
_GREY = "#888888"


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


def heat_maps(points: Sequence[Point], path: Path) -> None:
    """Speed-ups of PEARL over `ar` and over `sd` at its best gamma, by acceptance rate and speed ratio."""
    picture = figure(20, 5)
    ratios, rates = (sorted({getattr(p, name) for p in points}) for name in ("ratio", "acceptance"))
    of = {(p.acceptance, p.ratio): p for p in points}
    pairs = [(PEARL, None), (PEARL, SD), (FIXED_C, SD)]
    for axes, (method, other) in zip(picture.subplots(1, len(pairs)), pairs, strict=True):
        _heat_map(picture, axes, [[of[a, c].lead(method, other) for c in ratios] for a in rates])
        axes.set_xticks(range(len(ratios)), [f"{c:g}" for c in ratios])
        axes.set_yticks(range(len(rates)), [f"{a:g}" for a in rates])
        axes.set(xlabel="speed ratio c = t_target / t_draft", ylabel="acceptance rate")
        axes.set_title(f"{method}: times as fast as {other or 'ar'}   (=: a tie)", loc="left", fontsize=10)
    save(picture, path)


def _heat_map(picture: Any, axes: Any, grid: list[list[Estimate]]) -> None:
    """Blue above 1, red below; each cell shows its significant digits. A tie with 1 is white and shows "="."""
    from matplotlib.colors import TwoSlopeNorm

    values = [[1.0 if one.ties(1.0) else one.value for one in row] for row in grid]
    norm = TwoSlopeNorm(1.0, min(0.8, *map(min, values)), max(1.2, *map(max, values)))
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="RdBu", norm=norm)
    for y, row in enumerate(grid):
        for x, one in enumerate(row):
            is_dark = abs(norm(values[y][x]) - 0.5) > 0.35
            words = "=" if one.ties(1.0) else f"{one.value:.{min(2, one.digits)}f}"
            axes.text(x, y, words, ha="center", va="center", fontsize=7, color="white" if is_dark else "black")
    picture.colorbar(image, ax=axes)


def lines(points: Sequence[Point], axis: str, label: str, scale: float, title: str, path: Path) -> None:
    """Speed-ups over `ar` with intervals along `axis`, a panel per acceptance rate; dotted where PEARL falls behind.

    Args:
        label: of the axis.
        scale: factor from its unit to the label's.
    """
    groups = by_acceptance(points)
    picture = figure(1.5 + 4.5 * len(groups), 4.8)
    every = picture.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (acceptance, group) in zip(every, groups.items(), strict=True):
        x = [getattr(p, axis) * scale for p in group]
        for name in group[0].speedups:
            found = [p.speedups[name] for p in group]
            axes.fill_between(x, [e.low for e in found], [e.high for e in found], color=_COLOURS[name], alpha=0.2)
            style = {"color": _COLOURS[name], "marker": _MARKS[name], "markersize": 4}
            axes.plot(x, [e.value for e in found], label=name, **style)
        axes.axhline(1.0, color="black", linewidth=1, label="ar")
        for other, colour in ((SD, _COLOURS[SD]), (None, "black")):
            if at := stops_paying(group, axis, PEARL, other):
                behind = f"pearl (stream) behind {'sd' if other else 'ar'}: {at * scale:.3g}"
                axes.axvline(at * scale, color=colour, linestyle=":", label=behind)
        axes.set_title(f"acceptance rate {acceptance:g}", loc="left", fontsize=10)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    every[0].set_ylabel("times as fast as ar at the same setting")
    every[0].set_ylim(bottom=0)  # once all panels, which share it, are drawn
    picture.suptitle(title, fontsize=10)
    save(picture, path)


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
        _dots(axes, [Estimate(at, 0) for at in places], [one.measured for one in batch], _COLOURS[PEARL], "measured")
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
    axes.plot(biases, rejections, "x-", color=_RULES[rule])
    _dots(axes, [bias for bias, _ in measured], [rejected for _, rejected in measured], _RULES[rule], rule)
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
