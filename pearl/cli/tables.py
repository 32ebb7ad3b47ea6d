"""Progress and tables of the commands that study."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.table import Table

from pearl.cli.console import SafeConsole
from pearl.cli.numbers import table_console

_SILENT_SECONDS = 5.0  # between two lines of progress where there is no terminal


@contextmanager
def progress(what: str = "simulating") -> Iterator[Callable[[str], None]]:
    """Yield a function that reports progress: in a spinner on a terminal, elsewhere as a line every few seconds."""
    console = SafeConsole(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda step: status.update(f"{what} {step}")
        return
    last = time.monotonic()

    def report(step: str) -> None:
        nonlocal last
        if time.monotonic() - last > _SILENT_SECONDS:
            last = time.monotonic()
            console.print(f"{what} {step}", soft_wrap=True)

    yield report


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *notes: str, words: int = 1) -> None:
    """Print a table and notes below it. `words`: number of leading columns that are text, aligned to the left."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", no_wrap=number < words)
    for row in rows:
        table.add_row(*row)
    console = table_console()
    console.print(table, "")
    for note in notes:
        console.print(note, soft_wrap=True)
