"""One run of `pearl paper pearl` in words: tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pearl.lab.papers.pearl import TABLES, Cell

_BY_WINDOW = ("5", "6")  # tables whose columns are windows
EXPLAINED = (
    "EMULATION: two real processes run toys with the pair's vocabulary, forward times (the paper's Table 7) and "
    "acceptance rate (its Table 4). Greedy. Each cell: paper/simulator/runtime. The "
    "simulator runs the same state machines under a virtual clock, on 20 texts of 1,000 tokens; it agrees with "
    "the closed forms. Of simulated: the runtime's speed over the simulator's on the same texts, lowest and highest "
    "median of the row; the rest is the runtime's own cost. The prompt of a greedy text is the one of six "
    "whose simulated acceptance is nearest to the pair's."
)
NOTES = {
    "1": [
        "Acceptance is that of Table 4 and times are those of Table 7: the columns of `sd` and `pearl` are "
        "predictions. Llama 2 has no row in Table 4: its acceptance is fitted to its figure of `sd`, which therefore "
        "says nothing.",
    ],
    "2": [
        "Acceptance is fitted to the column of `sd`; those of `pearl` are predictions. The paper disagrees with itself "
        "on GSM8K: 2.87 here, but 42.20 tokens/s in its Table 6 over 15.30 in its Table 7 make 2.76.",
    ],
    "3": ["Without either half the window is PEARL's, and `sd` has twice that, as in the authors' scripts."],
    "4": [
        "The authors' code counts accepted tokens alone; theorem 2 of the paper counts the next token too. "
        "Acceptance is 1 - 1/M of PEARL's M, as in theorem 2: the last column is an input, and those of `sd` are "
        "predictions.",
    ],
    "5": ["Below c every source is above the paper: there the target verifies fewer tokens than it has time for."],
    "7": ["The paper's figure is what the emulation was given."],
    "figure 2a": ["The paper's figures are rounded."],
}


@dataclass(frozen=True)
class Table:
    """A title, named columns and rows of words. `notes`: lines below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def tables(found: Mapping[str, Sequence[Cell]]) -> list[Table]:
    """The run's tables, from the cells of each; a row for each pair, a column for each method."""
    return [_table(name, cells) for name, cells in found.items()]


def _table(name: str, cells: Sequence[Cell]) -> Table:
    rows: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        method = cell.label if name in _BY_WINDOW else re.sub(r", gamma \d+|\(\d+\)", "", cell.label)
        rows.setdefault(cell.pair, {})[method] = cell
    methods = list(dict.fromkeys(method for row in rows.values() for method in row))
    words = [
        [pair, *(_figure(row[method]) if method in row else "" for method in methods), _shares(row.values())]
        for pair, row in rows.items()
    ]
    title = f"{'Table ' + name if name[0].isdigit() else name.capitalize()}, emulated: {TABLES[name]}"
    return Table(title, ["pair", *methods, "of simulated"], words, NOTES.get(name, []))


def _figure(cell: Cell) -> str:
    digits = {"tokens/s": 1, "draft idle": 3, "target idle": 3}.get(cell.unit, 2)
    sources = (cell.paper, cell.simulator, cell.runtime) if cell.run else (cell.paper,)  # we cannot run all methods
    return "/".join("-" if value is None else f"{value:.{digits}f}" for value in sources)


def _shares(cells: Iterable[Cell]) -> str:
    medians = [cell.of_simulated[0] for cell in cells if cell.of_simulated]
    return f"{min(medians):.3f}-{max(medians):.3f}" if medians else ""


def pair_lines(found: Mapping[str, Sequence[Cell]], pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each pair: its times, and the windows of `sd` and `pearl` in all tables but those that vary them."""
    cells = [cell for name, some in found.items() if name not in _BY_WINDOW for cell in some]
    lines = []
    for pair in pairs:
        labels = " ".join(cell.label for cell in cells if cell.pair == pair["title"])
        windows = ", ".join(dict.fromkeys(re.findall(r"gamma \d+|fixed\(\d+\)", labels)))
        lines.append(
            f"{pair['title']}: t_draft {pair['t_draft'] * 1e3:.2f} ms, t_target {pair['t_target'] * 1e3:.2f} ms, "
            f"acceptance {pair['acceptance']:.4f} ({pair['acceptance_from']}), {pair['vocabulary']:,} ids; {windows}"
        )
    return lines
