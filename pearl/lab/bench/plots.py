"""Results of `pearl bench` and `pearl bench paper` as pictures (PNG), from their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.lab.bench.paper import TABLES
from pearl.lab.experiments.plots import figure, save

_COLUMNS = {"paper": "#9a9a9a", "theory": "#e9c46a", "simulator": "#5aa9e6", "runtime": "#1f6fb2"}


def draw(result: Any, path: Path) -> None:
    """Raises `ConfigError` where `result` is neither of the two, or the picture cannot be written."""
    kind = result.get("kind") if isinstance(result, dict) else None
    try:
        if kind == "bench":
            _bench(result, path)
        elif kind == "paper":
            _paper(result, path)
        else:
            raise ConfigError("that is no result of pearl bench or pearl bench paper")
    except (KeyError, TypeError, IndexError):
        raise ConfigError("that result of pearl bench is incomplete, or of another version") from None


def _bench(result: Mapping[str, Any], path: Path) -> None:
    """Speed-ups over `ar` with their intervals: over all texts, and a panel for each set."""
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


def _paper(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each table, all pairs in it; the window sweep as lines."""
    tables = result["tables"]
    picture = figure(15, 4.5 * len(tables))
    for axes, (name, cells) in zip(picture.subplots(len(tables), 1, squeeze=False)[:, 0], tables.items(), strict=True):
        _table(axes, cells)
        axes.set_title(f"Table {name}, emulated: {TABLES[name]}", loc="left", fontsize=10)
    save(picture, path)


def _table(axes: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    width = 0.8 / len(_COLUMNS)
    for i, (column, colour) in enumerate(_COLUMNS.items()):
        known = [(place, cell[column]) for place, cell in enumerate(cells) if cell[column] is not None]
        at = [place + (i - (len(_COLUMNS) - 1) / 2) * width for place, _ in known]
        if not known:  # nothing of it is published
            continue
        axes.bar(at, [value for _, value in known], width, color=colour, label=column)
    axes.set_xticks(
        range(len(cells)), [f"{c['pair']}\n{c['method']}" for c in cells], fontsize=6, rotation=60, ha="right"
    )
    axes.legend(fontsize=8, frameon=False, ncols=len(_COLUMNS))
    axes.grid(axis="y", alpha=0.3)
