"""Prints text, tables and progress bars for people. Control characters are shown as symbols, never obeyed.

This module is separate from `terminal`, which imports prompt_toolkit: every command prints, only the chat reads lines.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

from pearl.printable import printable

_Row = TypeVar("_Row")
Column = tuple[str, Callable[[_Row], str]]  # header, and the text of a row's cell
_WIDTH = 160  # columns, if the output is not a terminal
_MOST_COUNTED = 999  # larger amounts of work are reported in percent if the output is no terminal
_SILENT_SECONDS = 5.0  # between two lines of `Bars` if the output is not a terminal


# ---- text ----


class SafeConsole(Console):
    """A console that prints text literally, and applies only our own styles.

    It shows control characters as symbols, and ignores rich's markup.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def text_input(errors: str, newline: str | None = "") -> TextIO:
    """Return standard input, without a byte order mark at its beginning.

    Nothing may have been read from it before.

    Args:
        errors, newline: see `open`.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        encoding = codecs.lookup(sys.stdin.encoding).name
        if encoding in ("utf-8", "ascii"):
            encoding = "utf-8-sig"
        sys.stdin.reconfigure(encoding=encoding, errors=errors, newline=newline)
    return sys.stdin


def write_text(text: str) -> None:
    """Write a model's text to standard output.

    On a terminal control characters are written as symbols; to a file they are written as they are.
    """
    if sys.stdout.isatty():
        text = printable(text)
    sys.stdout.write(text)  # click.echo would strip ANSI codes
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line to standard error."""
    click.echo(printable(text), err=True)


# ---- progress ----


class Bars:
    """A `Watcher` on standard error.

    On a terminal it shows a progress bar with ETA; elsewhere it prints a line every few seconds.
    """

    def __init__(self) -> None:
        self._console = SafeConsole(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(separator=" of "),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._reported = time.monotonic()

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Begin a bar. `total` is None if the amount of work is unknown."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total, note="")

    def advance(self, count: int, note: str = "") -> None:
        assert self._task is not None
        self._progress.update(self._task, advance=count, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._reported > _SILENT_SECONDS:
            self._reported = now
            task = self._progress.tasks[-1]
            self.say(f"{task.description} {amount_done(task)}{note}")

    def step(self, note: str) -> None:
        """Report the next step of work of unknown length."""
        if self._task is None:
            self.begin("working", None)
        self.advance(1, note)

    def say(self, message: str) -> None:
        self._console.print(message, soft_wrap=True)


def amount_done(task: Task) -> str:
    """Return how much of the work is done: a count such as "[3 of 20] ", or a percentage for large totals."""
    if task.total is None:
        return ""
    if task.total > _MOST_COUNTED:
        return f"{task.percentage:.0f}% "
    return f"[{task.completed:.0f} of {task.total:.0f}] "


# ---- tables ----


def _knows_width() -> bool:
    """Return whether the width of standard output is known: it is a terminal, or COLUMNS is set."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def _table_console() -> SafeConsole:
    return SafeConsole(width=None if _knows_width() else _WIDTH)


def print_lines(*lines: str) -> None:
    """Print lines. If the width of standard output is known, long lines are broken between words."""
    console = _table_console()
    for line in lines:
        console.print(line, soft_wrap=not _knows_width())


def _column_widths(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[int]:
    """Return the least width of each column.

    Headers may be broken between words, cells only at their line feeds.
    """
    widths = [max(map(cell_len, header.split()), default=0) for header in columns]
    for row in rows:
        for column, cell in enumerate(row):
            for line in cell.split("\n"):
                widths[column] = max(widths[column], cell_len(line))
    return widths


def _parts(columns: Iterable[int], widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Split a table that is too wide; yield the columns of each partial table.

    A partial table has the first column, and as many of `columns` as fit beside it in `width`
    characters.
    """
    table_columns = [0]
    used_width = 1 + widths[0]
    for column in columns:
        if len(table_columns) > 1 and used_width + 1 + widths[column] > width:
            yield table_columns
            table_columns = [0]
            used_width = 1 + widths[0]
        table_columns.append(column)
        used_width += 1 + widths[column]
    yield table_columns


def _filled_columns(count: int, rows: Sequence[Sequence[str]]) -> list[int]:
    """Return which columns after column 0 have text in any row; all if there are no rows."""
    filled = []
    for column in range(1, count):
        if not rows or any(row[column] for row in rows):
            filled.append(column)
    return filled


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *notes: str,
    words: int = 1,
    title: str | None = None,
) -> None:
    """Print a table and the notes below it. Columns without any text are left out.

    A table that is too wide is printed as several tables, each of which begins with the first
    column.

    Args:
        notes: lines below the table; empty ones are left out.
        words: number of leading columns that are text, aligned to the left.
    """
    console = _table_console()
    cells = list(rows)
    widths = _column_widths(columns, cells)
    if title:
        print_lines(title)
    for part in _parts(_filled_columns(len(columns), cells), widths, console.width):
        table = Table(box=None, padding=(0, 1, 0, 0))
        room = console.width - sum(1 + widths[column] for column in part)
        for column in part:
            width = None  # if there is no room, rich chooses the width and breaks the widest cells
            if room >= 0:
                header_width = max(map(cell_len, columns[column].split("\n")))
                width = max(widths[column], min(widths[column] + room, header_width))
                room -= width - widths[column]
            table.add_column(
                columns[column],
                justify="left" if column < words else "right",
                no_wrap=column == 0,
                width=width,
            )
        for row in cells:
            table.add_row(*(row[column] for column in part))
        console.print(table, "")
    print_lines(*filter(None, notes))


def pair_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and their values, without a header."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    return table


def print_columns(
    columns: Sequence[Column[_Row]], records: Iterable[_Row], *notes: str, **options: Any
) -> None:
    """Call `print_table` with a row for each of `records`."""
    headers = [header for header, _ in columns]
    rows = []
    for record in records:
        rows.append([cell_of(record) for _, cell_of in columns])
    print_table(headers, rows, *notes, **options)


def shown(value: Any, digits: int = 2) -> str:
    """Return a number, or the value of an estimate, as text; "-" for None."""
    number = getattr(value, "value", value)
    if number is None:
        return "-"
    return f"{number:.{digits}f}"
