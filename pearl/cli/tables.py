"""Tables and progress of the commands that study and measure."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from pearl.cli.console import SafeConsole

_Row = TypeVar("_Row")
Column = tuple[str, Callable[[_Row], str]]  # header, and the text of a row's cell
_WIDTH = 160  # columns, if the output is not a terminal
_MOST_COUNTED = 999  # pieces of work that are counted one by one where the output is not a terminal
_SILENT_SECONDS = 5.0  # between two lines of `Bars` if the output is not a terminal


class Bars:
    """A `Watcher` on standard error: a progress bar with ETA on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._console = SafeConsole(stderr=True)
        count = MofNCompleteColumn(separator=" of ")
        columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
        self._progress = Progress(
            *columns, TextColumn("[dim]{task.fields[note]}"), console=self._console, transient=True
        )
        self._task: TaskID | None = None
        self._last = time.monotonic()

    def __enter__(self) -> Bars:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Begin a bar. `total`: None if it is unknown."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total, note="")

    def advance(self, count: int, note: str = "") -> None:
        assert self._task is not None
        self._progress.update(self._task, advance=count, note=note)
        task, now = self._progress.tasks[-1], time.monotonic()
        if not self._console.is_terminal and now - self._last > _SILENT_SECONDS:
            self._last = now
            self.say(f"{task.description} {_done(task)}{note}")

    def step(self, note: str) -> None:
        """Report the next step of work of unknown length."""
        if self._task is None:
            self.begin("working", None)
        self.advance(1, note)

    def say(self, message: str) -> None:
        self._console.print(message, soft_wrap=True)


def _done(task: Task) -> str:
    """How much of the work is done; of bytes and of thousands of samples as a share."""
    if task.total is None:
        return ""
    return (
        f"{task.percentage:.0f}% "
        if task.total > _MOST_COUNTED
        else f"[{task.completed:.0f} of {task.total:.0f}] "
    )


def print_lines(*lines: str) -> None:
    """Print lines, broken between words where the width is known: on a terminal, or with COLUMNS set."""
    console, is_known = _console()
    for line in lines:
        console.print(line, soft_wrap=not is_known)


def _console() -> tuple[Console, bool]:
    """For standard output; and whether its width is known."""
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_known else _WIDTH), is_known


def _parts(wanted: Iterable[int], widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Of each table the columns: the first, and as many of those wanted as fit beside it."""
    part = [0]
    for i in wanted:
        if len(part) > 1 and sum(1 + widths[each] for each in (*part, i)) > width:
            yield part
            part = [0]
        part.append(i)
    yield part


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *notes: str,
    words: int = 1,
    title: str | None = None,
) -> None:
    """Print a table and notes below it; one that is too wide, as several with the same first column. Leaves out columns
    without a cell.

    Args:
        notes: empty ones are left out.
        words: number of leading columns that are text, aligned to the left.
    """
    console, cells = _console()[0], [*rows]
    lines = [
        [*name.split(), *(line for row in cells for line in row[i].split("\n"))]
        for i, name in enumerate(columns)
    ]
    widths = [
        max(map(cell_len, each), default=0) for each in lines
    ]  # where only a header is broken, between words
    wanted = range(1, len(columns))
    filled = [i for i in wanted if not cells or any(row[i] for row in cells)]
    for number, part in enumerate(_parts(filled, widths, console.width)):
        if title and not number:
            print_lines(title)
        table, room = (
            Table(box=None, padding=(0, 1, 0, 0)),
            console.width - sum(1 + widths[i] for i in part),
        )
        for i in part:
            more = max(0, min(room, max(map(cell_len, columns[i].split("\n"))) - widths[i]))
            justify: Literal["left", "right"] = "left" if i < words else "right"
            width = (
                widths[i] + more if room >= 0 else None
            )  # rich would break the widest cells, not the headers
            table.add_column(columns[i], justify=justify, no_wrap=i == 0, width=width)
            room -= more
        for row in cells:
            table.add_row(*(row[i] for i in part))
        console.print(table, "")
    print_lines(*filter(None, notes))


def print_columns(
    columns: Sequence[Column[_Row]], found: Iterable[_Row], *notes: str, **options: Any
) -> None:
    """`print_table` with a row for each of `found`."""
    print_table(
        [name for name, _ in columns],
        ([cell(one) for _, cell in columns] for one in found),
        *notes,
        **options,
    )


def shown(value: Any, digits: int = 2) -> str:
    """A number, or the value of an estimate; "-" for None."""
    number = getattr(value, "value", value)
    return "-" if number is None else f"{number:.{digits}f}"
