"""Draw the JSON of `pearl bench`, its subcommands and `pearl compare` as PNG pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.lab.bench import results
from pearl.lab.experiments.plots import figure, save

_LABEL = 0.6  # width of a label, as a share of the largest bias


def draw(result: Any, path: Path) -> None:
    """Draw a parsed result into `path`. Raises `ConfigError` for any other JSON, or if it cannot write the picture."""
    kind = result.get("kind") if isinstance(result, dict) else None
    try:
        if kind == "bench":
            _bench(result, path)
        elif kind == "paper":
            _paper(result, path)
        elif kind == "slots":
            _slots(result, path)
        elif kind == "compare":
            _ways(result, path)
        else:
            raise ConfigError("that is no result of pearl bench, pearl bench paper, pearl bench slots or pearl compare")
    except (KeyError, TypeError, IndexError):
        raise ConfigError("that result of pearl bench is incomplete, or of another version") from None


def _bench(result: Mapping[str, Any], path: Path) -> None:
    """Speedups over `ar` with their intervals: a panel for all texts, and one for each set."""
    rows = result["rows"]
    sets = list(result["settings"]["sets"])
    panels = [("all texts", [row["speedup"] for row in rows])]
    if len(sets) > 1:
        panels += [(name, [row["by_set"].get(name) for row in rows]) for name in sets]
    picture = figure(3 + 3.2 * len(panels), 1.5 + 0.4 * len(rows))
    every = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    places = range(len(rows))
    for axes, (title, intervals) in zip(every, panels, strict=True):
        for place, row, one in zip(places, rows, intervals, strict=True):
            if one is None:
                continue
            colour = "#1f6fb2" if row["name"].startswith("pearl") else "#9a9a9a"
            axes.barh(place, one["value"], color=colour)
            axes.plot([one["low"], one["high"]], [place, place], color="black", linewidth=1.5)
            axes.text(max(one["high"], one["value"]), place, f" {one['value']:.2f}", va="center", fontsize=8)
        axes.axvline(1.0, color="black", linewidth=1, linestyle=":")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("times as fast as ar")
        axes.margins(x=0.15)
    every[0].set_yticks(places, [f"{row['name']} ({row['devices']})" for row in rows])
    every[0].invert_yaxis()
    engine = result["settings"]["engine"]
    picture.suptitle(f"{engine['target']} with {engine['draft']}; {result['hardware']['processor']}", fontsize=9)
    save(picture, path)


def _slots(result: Mapping[str, Any], path: Path) -> None:
    """By the number of slots: tokens a second of all texts, each round a dot, and of one text."""
    rows = result["slots"]
    picture, places, labels = figure(8, 3.4), range(len(rows)), list[str]()
    together, alone = picture.subplots(1, 2)
    together.bar(places, [row["rate"] for row in rows], color="#1f6fb2")
    for place, row in zip(places, rows, strict=True):
        together.plot([place] * len(row["rates"]), row["rates"], "k.", markersize=4)
        label = f"{row['slots']}\n{row['over_one']:.2f}x"
        if row["of_simulated"] is not None:
            together.plot(place, row["rate"] / row["of_simulated"], "_", color="black", markersize=24)
            label += f"\n{row['of_simulated']:.3f} of\nsimulated (-)"
        labels.append(label)
    together.set_title("all texts together: tokens/s", loc="left", fontsize=10)
    alone.bar(places, [row["each"] or 0.0 for row in rows], color="#9a9a9a")
    alone.set_title("one text, while it is written: tokens/s", loc="left", fontsize=10)
    together.set_xticks(places, labels, fontsize=8)
    alone.set_xticks(places, [str(row["slots"]) for row in rows])
    for axes in (together, alone):
        axes.set_xlabel("slots")
    target, draft = result["pair"]
    about = f"{target} with {draft}, method {result['method']}, {result['texts']} texts at once"
    picture.suptitle(f"{about}; {result['hardware']['processor']}", fontsize=8)
    save(picture, path)


def _ways(result: Mapping[str, Any], path: Path) -> None:
    """Speed against bias: what is exact stands at the left edge."""
    rows = [row for row in result["rows"] if row["speedup"] is not None]
    picture = figure(8, 5)
    axes = picture.subplots()
    for row in rows:
        bias, speed = row["bias"], row["speedup"]
        colour = "#1f6fb2" if row["exact"] else "#b2451f"
        axes.plot([bias["low"], bias["high"]], [speed["value"]] * 2, color=colour, linewidth=1)
        axes.plot([bias["value"]] * 2, [speed["low"], speed["high"]], color=colour, linewidth=1)
        axes.plot(bias["value"], speed["value"], "o", color=colour, markersize=4)
    # Labels in the order of the speeds, apart from those near by; a thin line leads to the point where one had to move.
    low, high = axes.get_ylim()
    least, placed = (high - low) / 28, list[tuple[float, float]]()
    right = max([row["bias"]["high"] for row in rows] + [0.05])
    for row in sorted(rows, key=lambda row: row["speedup"]["value"]):
        x, y = row["bias"]["value"], row["speedup"]["value"]
        place = max([y, *(other + least for at, other in placed if abs(at - x) < _LABEL * right)])
        placed.append((x, place))
        shown = f"{row['name']}: {y:.2f}"
        axes.annotate(
            shown,
            (x, y),
            (x + 0.03 * right, place),
            fontsize=7,
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#9a9a9a"},
        )
    axes.set_xlim(-0.03 * right, 1.5 * right)
    axes.axhline(1.0, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel("bias: total variation distance from the target, a committed token (0: exact)")
    axes.set_ylabel("times as fast as ar")
    engine, sampling = result["settings"]["engine"], result["settings"]["sampling"]
    about = f"{engine['target']} with {engine['draft']}, temperature {sampling['temperature']:g}"
    picture.suptitle(f"{about}; {result['hardware']['processor']}", fontsize=8)
    save(picture, path)


def _paper(result: Mapping[str, Any], path: Path) -> None:
    """Paper against runtime (the simulator where nothing ran), a panel for each table that has figures of the paper."""
    source = "runtime" if result["settings"]["runtime"] else "simulator"
    tables = {name: _pairs_of_bars(cells, source) for name, cells in result["tables"].items()}
    tables = {name: bars for name, bars in tables.items() if bars}
    heights = [1.2 + 0.16 * len(bars) for bars in tables.values()]
    picture = figure(9, sum(heights))
    every = picture.subplots(len(tables), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (name, bars) in zip(every, tables.items(), strict=True):
        _panel(axes, bars, source)
        axes.set_title(results.title(name), loc="left", fontsize=9)
    save(picture, path)


_Bars = list[tuple[str, float, float]]  # label, the paper's, ours


def _pairs_of_bars(cells: Sequence[Mapping[str, Any]], source: str) -> _Bars:
    known = [cell for cell in cells if cell["paper"] is not None and cell[source] is not None]
    return [(f"{cell['pair']}: {cell['label']}", cell["paper"], cell[source]) for cell in known]


def _panel(axes: Any, bars: _Bars, source: str) -> None:
    places = range(len(bars))
    for shift, column, colour in ((-0.2, "paper", "#9a9a9a"), (0.2, source, "#1f6fb2")):
        values = [each[1 if column == "paper" else 2] for each in bars]
        axes.barh([place + shift for place in places], values, 0.4, color=colour, label=column)
    axes.set_yticks(places, [label for label, _, _ in bars], fontsize=5)
    axes.tick_params(axis="x", labelsize=6)
    axes.invert_yaxis()
    axes.legend(fontsize=6, frameon=False)
    axes.grid(axis="x", alpha=0.3)
