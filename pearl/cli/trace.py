"""`pearl trace`: reports, draws and merges trace files.

This file has arguments and tables only; the package `pearl.trace` computes the numbers.
"""

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
    """Print each run's work, its waits by cause, and its overlap.

    The overlap is the time in which both models worked at once. Several FILES are shown side by
    side, such as a run of sd and a run of pearl.
    """
    reports = {str(path): _report(path) for path in files}
    if as_json:
        write_json(STDOUT, reports if len(reports) > 1 else reports[str(files[0])])
        return
    _print(reports)
    base = reports.pop(str(files[0]))
    for path, compared in reports.items():
        if base.tokens_per_second and compared.tokens_per_second:
            ratio = compared.tokens_per_second / base.tokens_per_second
            SafeConsole().print(
                f"{path} ({compared.method}) is {ratio:.2f} times as fast as "
                f"{files[0]} ({base.method}) in these runs"
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
    """Draw the work of both workers on one time axis.

    Several runs are drawn one above the other, all on the same scale of time.
    """
    traces = []
    for file in files:
        with damaged(file, TraceError):
            traces.append(read(file))
    runs = charts(traces, start, seconds)
    draw(runs, png)
    end = max(run.end for run in runs)
    say(f"{png}: {runs[0].start:.3f} s to {end:.3f} s of {', '.join(map(str, files))}")


@trace.command()
@_FILE
def merge(file: Path) -> None:
    """Make FILE from the parts that a killed run has left.

    Each worker writes a part beside FILE while it runs. When an engine is closed, it merges its
    parts; a killed engine leaves them.
    """
    chrome.merge(file)
    click.echo(printable(f"{file}: {len(read_document(file)['traceEvents'])} events"))


def _report(file: Path) -> Report:
    with damaged(file, TraceError):
        return make_report(read(file))


def _print(reports: dict[str, Report]) -> None:
    """Print a verdict on each run, a table with a column for each run, and the runs' notes."""
    console = SafeConsole()
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for path, run in reports.items():
        prefix = f"{path}: " if len(reports) > 1 else ""
        console.print(Text(prefix + verdict(run)), soft_wrap=True)
        table.add_column(f"{path}\n{run.method}")
    for name, values in side_by_side(list(reports.values())):
        table.add_row(name, *values)
    console.print(table)
    for path, run in reports.items():
        for note in run.notes:
            console.print(f"note on {path}: {note}")
