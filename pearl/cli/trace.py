"""`pearl trace`: arguments and tables; `pearl.trace` computes the numbers."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from pearl.cli import listed
from pearl.cli.console import SafeConsole, say
from pearl.cli.numbers import STDOUT, write_json
from pearl.document import damaged
from pearl.errors import TraceError
from pearl.printable import printable
from pearl.trace import chrome
from pearl.trace.gantt import chart, same_time
from pearl.trace.gantt import png as draw
from pearl.trace.reading import read, read_document
from pearl.trace.report import Report, side_by_side
from pearl.trace.report import report as make_report

_FILE = click.argument("file", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@listed("See and check", "pearl trace compare sd.json pearl.json --png both.png")
@click.group()
def trace() -> None:
    """Report, compare or draw the recordings of --trace FILE.

    The file is a Chrome trace: ui.perfetto.dev opens it too.
    """


@trace.command()
@_FILE
@_JSON
def report(file: Path, as_json: bool) -> None:
    """Work, waits by cause and overlap of the run in FILE."""
    found = _report(file)
    if as_json:
        write_json(STDOUT, found)
    else:
        _print({str(file): found})


@trace.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@_JSON
@click.option("--png", type=click.Path(path_type=Path), help="Instead draw both runs, A above B on one time scale.")
@click.option("--seconds", type=float, help="Seconds of each in --png; default: twelve verification steps of one.")
def compare(a: Path, b: Path, as_json: bool, png: Path | None, seconds: float | None) -> None:
    """Two runs side by side: one of sd and one of pearl, say."""
    if png is not None:
        with damaged(a, TraceError):
            charts = same_time([read(a), read(b)], seconds)
            draw(charts, png)
        say(f"{png}: {a} above {b}, {max(chart.end for chart in charts):.3f} s of each")
        return
    if seconds is not None:
        raise click.UsageError("--seconds is the length of a picture: give --png FILE too")
    reports = {str(path): _report(path) for path in (a, b)}
    if as_json:
        write_json(STDOUT, reports)
        return
    _print(reports)
    one, other = reports[str(a)], reports[str(b)]
    if one.tokens_per_second and other.tokens_per_second:
        rate = other.tokens_per_second / one.tokens_per_second
        SafeConsole().print(f"{b} ({other.method}) is {rate:.2f} times as fast as {a} ({one.method}) in these two runs")


@trace.command()
@_FILE
@click.option("--png", type=click.Path(path_type=Path), required=True, help="The picture to write.")
@click.option("--from", "start", type=float, help="Seconds from the start of the first request.")
@click.option("--seconds", type=float, help="Length of the picture; default: twelve verification steps.")
def show(file: Path, png: Path, start: float | None, seconds: float | None) -> None:
    """Draw both workers on one time axis."""
    with damaged(file, TraceError):
        shown = chart(read(file), start, seconds)
        draw([shown], png)
    say(f"{png}: {shown.start:.3f} s to {shown.end:.3f} s of {file}")


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
    table = Table("", *(f"{path}\n{r.method}" for path, r in reports.items()), box=None, padding=(0, 2, 0, 0))
    for name, values in side_by_side(list(reports.values())):
        table.add_row(name, *values)
    console.print(table)
    for path, found in reports.items():
        for note in found.notes:
            console.print(f"note on {path}: {note}")
