"""`pearl trace`: arguments and tables; `pearl.trace` computes the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from pearl.cli.commands import example
from pearl.cli.console import SafeConsole, say
from pearl.cli.prompt_sets import STDOUT, output_option, write_json
from pearl.document import damaged
from pearl.errors import TraceError
from pearl.printable import printable
from pearl.trace import chrome
from pearl.trace.gantt import charts
from pearl.trace.gantt import png as draw
from pearl.trace.reading import read, read_document
from pearl.trace.report import Report, side_by_side, verdict
from pearl.trace.report import report as make_report

_FILE = click.argument("file", type=click.Path(path_type=Path))
_FILES = click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path)
)


@click.group(epilog=example("pearl trace show sd.json pearl.json --png both.png"))
def trace() -> None:
    """Report or draw the recordings of --trace FILE.

    The file is a Chrome trace: ui.perfetto.dev opens it too.
    """


@trace.command()
@_FILES
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(files: Sequence[Path], as_json: bool) -> None:
    """Work, waits by cause and overlap of each run, side by side: one of sd and one of pearl, say."""
    reports = {str(path): _report(path) for path in files}
    if as_json:
        write_json(STDOUT, reports if len(reports) > 1 else reports[str(files[0])])
        return
    _print(reports)
    (a, one), *others = reports.items()
    for b, other in others:
        if one.tokens_per_second and other.tokens_per_second:
            rate = other.tokens_per_second / one.tokens_per_second
            SafeConsole().print(
                f"{b} ({other.method}) is {rate:.2f} times as fast as {a} ({one.method}) in these runs"
            )


@trace.command()
@_FILES
@output_option("--png", required=True, help="The picture to write.")
@click.option("--from", "start", type=float, help="Seconds from the start of the first request.")
@click.option(
    "--seconds",
    type=float,
    help="Length of the picture; default: twelve verification steps of one run.",
)
def show(files: Sequence[Path], png: Path, start: float | None, seconds: float | None) -> None:
    """Draw both workers on one time axis; several runs one above the other, on one scale of time."""
    traces = []
    for file in files:
        with damaged(file, TraceError):
            traces.append(read(file))
    shown = charts(traces, start, seconds)
    draw(shown, png)
    say(
        f"{png}: {shown[0].start:.3f} s to {max(one.end for one in shown):.3f} s of {', '.join(map(str, files))}"
    )


@trace.command()
@_FILE
def merge(file: Path) -> None:
    """Make FILE from the parts that a killed run has left.

    Each worker writes a part beside FILE while it runs. Closing the engine merges them; a killed engine leaves them.
    """
    chrome.merge(file)
    click.echo(printable(f"{file}: {len(read_document(file)['traceEvents'])} events"))


def _report(file: Path) -> Report:
    with damaged(file, TraceError):
        return make_report(read(file))


def _print(reports: dict[str, Report]) -> None:
    """One column for each run."""
    console = SafeConsole()
    for path, found in reports.items():
        name = f"{path}: " if len(reports) > 1 else ""
        console.print(Text(name + verdict(found)), soft_wrap=True)
    table = Table(
        "", *(f"{path}\n{r.method}" for path, r in reports.items()), box=None, padding=(0, 2, 0, 0)
    )
    for name, values in side_by_side(list(reports.values())):
        table.add_row(name, *values)
    console.print(table)
    for path, found in reports.items():
        for note in found.notes:
            console.print(f"note on {path}: {note}")
