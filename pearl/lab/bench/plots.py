"""Draw the JSON of `pearl bench`, its subcommands and `pearl compare` as PNG pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.lab.experiments.plots import figure, save

_BLUE, _GREY, _RED = "#1f6fb2", "#9a9a9a", "#b2451f"
_Result = Mapping[str, Any]


def draw(result: Any, path: Path) -> None:
    """Draw a parsed result into `path`. Raises `ConfigError` for any other JSON, or if it cannot write the picture."""
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind not in _KINDS:
        raise ConfigError("that is no result of pearl bench, pearl bench paper, pearl bench slots or pearl compare")
    try:
        save(_KINDS[kind](result), path)
    except (KeyError, TypeError, IndexError):
        raise ConfigError("that result of pearl bench is incomplete, or of another version") from None


def _bench(result: _Result) -> Any:
    """Speedups over `ar` with their intervals: a panel for all texts, and one for each set."""
    rows = result["rows"]
    sets = list(result["settings"]["sets"])
    panels = [("all texts", [row["speedup"] for row in rows])]
    if len(sets) > 1:
        panels += [(name, [row["by_set"].get(name) for row in rows]) for name in sets]
    picture = figure(3 + 3.2 * len(panels), 1.5 + 0.4 * len(rows))
    every = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, intervals) in zip(every, panels, strict=True):
        for place, (row, one) in enumerate(zip(rows, intervals, strict=True)):
            if one is None:
                continue
            axes.barh(place, one["value"], color=_BLUE if row["name"].startswith("pearl") else _GREY)
            axes.plot([one["low"], one["high"]], [place, place], color="black", linewidth=1.5)
            axes.text(max(one["high"], one["value"]), place, f" {one['value']:.2f}", va="center", fontsize=8)
        axes.axvline(1.0, color="black", linewidth=1, linestyle=":")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("times as fast as ar")
        axes.margins(x=0.15)
    every[0].set_yticks(range(len(rows)), [f"{row['name']} ({row['devices']})" for row in rows])
    every[0].invert_yaxis()
    engine = result["settings"]["engine"]
    picture.suptitle(f"{engine['target']} with {engine['draft']}; {result['hardware']['processor']}", fontsize=9)
    return picture


def _slots(result: _Result) -> Any:
    """By the number of slots: tokens per second of all texts, each round a dot, and of one text."""
    rows = result["slots"]
    picture, places = figure(8, 3.4), range(len(rows))
    together, single = picture.subplots(1, 2)
    together.bar(places, [row["rate"] for row in rows], color=_BLUE)
    single.bar(places, [row["each"] or 0.0 for row in rows], color=_GREY)
    for place, row in enumerate(rows):
        together.plot([place] * len(row["rates"]), row["rates"], "k.", markersize=4)
        if row["of_simulated"] is not None:
            together.plot(place, row["rate"] / row["of_simulated"], "_", color="black", markersize=24)
    together.set_title("all texts together: tokens/s (-: simulated)", loc="left", fontsize=10)
    single.set_title("one text: tokens/s", loc="left", fontsize=10)
    together.set_xticks(places, [f"{row['slots']}\n{row['over_one']:.2f}x" for row in rows], fontsize=8)
    single.set_xticks(places, [str(row["slots"]) for row in rows])
    target, draft = result["pair"]
    about = f"{target} with {draft}, method {result['method']}, {result['texts']} texts at once, by slots"
    picture.suptitle(f"{about}; {result['hardware']['processor']}", fontsize=8)
    return picture


def _compare(result: _Result) -> Any:
    """Speed against bias, with 95% intervals; exact rows are at the left edge. The legend is ordered by speed."""
    rows = [row for row in result["rows"] if row["speedup"] is not None]
    picture = figure(10, 5)
    axes = picture.subplots()
    for number, row in enumerate(sorted(rows, key=lambda row: -row["speedup"]["value"]), 1):
        bias, speed = row["bias"], row["speedup"]
        margins = [[[one["value"] - one["low"]], [one["high"] - one["value"]]] for one in (bias, speed)]
        colour, label = _BLUE if row["exact"] else _RED, f"{number}: {row['name']}, {speed['value']:.2f}"
        axes.errorbar(
            bias["value"], speed["value"], margins[1], margins[0], "o", color=colour, markersize=4, label=label
        )
        axes.annotate(f" {number}", (bias["value"], speed["value"]), fontsize=7)
    axes.axhline(1.0, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel("bias: total variation distance from the target, per committed token (0: exact)")
    axes.set_ylabel("times as fast as ar")
    axes.legend(fontsize=7, frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
    engine, sampling = result["settings"]["engine"], result["settings"]["sampling"]
    about = f"{engine['target']} with {engine['draft']}, temperature {sampling['temperature']:g}"
    picture.suptitle(f"{about}; {result['hardware']['processor']}", fontsize=8)
    return picture


def _paper(result: _Result) -> Any:
    """Paper against runtime (the simulator if nothing ran), a panel for each table that has figures of the paper."""
    source = "runtime" if result["settings"]["runtime"] else "simulator"
    tables = {
        name: [cell for cell in cells if cell["paper"] is not None and cell[source] is not None]
        for name, cells in result["tables"].items()
    }
    tables = {name: cells for name, cells in tables.items() if cells}
    heights = [1.2 + 0.16 * len(cells) for cells in tables.values()]
    picture = figure(9, sum(heights))
    every = picture.subplots(len(tables), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (name, cells) in zip(every, tables.items(), strict=True):
        for shift, column, colour in ((-0.2, "paper", _GREY), (0.2, source, _BLUE)):
            places = [place + shift for place in range(len(cells))]
            axes.barh(places, [cell[column] for cell in cells], 0.4, color=colour, label=column)
        axes.set_yticks(range(len(cells)), [f"{cell['pair']}: {cell['label']}" for cell in cells], fontsize=5)
        axes.tick_params(axis="x", labelsize=6)
        axes.invert_yaxis()
        axes.legend(fontsize=6, frameon=False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(f"table {name}" if name[0].isdigit() else name, loc="left", fontsize=9)
    return picture


_KINDS: dict[Any, Callable[[_Result], Any]] = {"bench": _bench, "paper": _paper, "slots": _slots, "compare": _compare}
