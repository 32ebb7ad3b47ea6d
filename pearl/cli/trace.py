"""`pearl trace`: report on recorded runs. Arguments and tables; `pearl.trace` computes the numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from pearl.cli.console import SafeConsole, say
from pearl.document import damaged
from pearl.errors import TraceError
from pearl.printable import printable
from pearl.trace import chrome, page
from pearl.trace.figures import REQUEST_COLUMNS, request_row, side_by_side
from pearl.trace.gantt import chart, png, same_time, terminal
from pearl.trace.reading import Trace, read, read_document
from pearl.trace.replay import replay as run_again
from pearl.trace.report import Report
from pearl.trace.report import report as make_report
from pearl.trace.validate import problems

_FILE = click.Path(path_type=Path)
_HTML = click.option(
    "--html", type=_FILE, help="Instead write a page: figures, waits by cause, and a timeline to zoom into."
)


@click.group()
def trace() -> None:
    """Report, compare, draw or replay what --trace FILE has recorded.

    The file is a Chrome trace: ui.perfetto.dev opens it too.
    """


@trace.command()
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_HTML
def report(file: Path, as_json: bool, html: Path | None) -> None:
    """Work, waits by cause, overlap, pace and latencies of the run in FILE."""
    run = _read_report(file)
    if html is not None:
        _drawn([run], html)
    elif as_json:
        click.echo(json.dumps(run[1].as_dict()))
    else:
        _print({str(file): run[1]})


@trace.command()
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--png", "png_path", type=_FILE, help="Instead draw both runs, A above B on one time scale.")
@click.option("--seconds", type=float, help="How much --png shows of each; default: twelve verification steps of one.")
@_HTML
def compare(a: Path, b: Path, as_json: bool, png_path: Path | None, seconds: float | None, html: Path | None) -> None:
    """Two runs side by side: one of sd and one of pearl, say."""
    if seconds is not None and png_path is None:
        raise click.UsageError("--seconds says how much a picture shows: give --png FILE too")
    if png_path is not None:
        with damaged(a, TraceError):
            shown = same_time([read(a), read(b)], seconds)
        png(shown, png_path)
        say(f"{png_path}: {a} above {b}, {max(c.end for c in shown):.3f} s of each")
        return
    runs = [_read_report(path) for path in (a, b)]
    if html is not None:
        _drawn(runs, html)
        return
    reports = {str(path): found for path, (_, found) in zip((a, b), runs, strict=True)}
    if as_json:
        click.echo(json.dumps({path: found.as_dict() for path, found in reports.items()}))
        return
    _print(reports)
    one, other = reports[str(a)], reports[str(b)]
    if one.tokens_per_second and other.tokens_per_second:
        rate = other.tokens_per_second / one.tokens_per_second
        SafeConsole().print(f"{b} ({other.method}) is {rate:.2f} times as fast as {a} ({one.method}) in these two runs")


@trace.command()
@click.argument("file", type=_FILE)
@click.option("--from", "start", type=float, help="Seconds from the start of the first request.")
@click.option("--seconds", type=float, help="How much to show; default: twelve verification steps.")
@click.option("--png", "png_path", type=_FILE, help="Draw a PNG instead.")
def show(file: Path, start: float | None, seconds: float | None, png_path: Path | None) -> None:
    """Both workers on one time axis, in the terminal or as a picture."""
    with damaged(file, TraceError):
        shown = chart(read(file), start, seconds)
    if png_path is not None:
        png([shown], png_path)
        say(f"{png_path}: {shown.start:.3f} s to {shown.end:.3f} s of {file}")
        return
    console = SafeConsole()
    for line in terminal(shown, console.width):
        console.print(line, no_wrap=True, crop=False, soft_wrap=True)


@trace.command()
@click.argument("file", type=_FILE)
def replay(file: Path) -> None:
    """Check that fresh state machines decide as recorded.

    Feeds the recorded events into them and compares their commands with the recorded ones.
    """
    with damaged(file, TraceError):
        outcome = run_again(read(file))
    if outcome.difference is None:
        click.echo(f"{outcome.decisions} decisions, all the same")
        return
    d = outcome.difference
    raise TraceError(
        f"decision {d.number} of the {d.worker} comes out otherwise (after {outcome.decisions} that are the same):\n"
        f"  event     {json.dumps(d.event)}\n  recorded  {json.dumps(d.recorded)}\n  replayed  {json.dumps(d.replayed)}"
    )


@trace.command()
@click.argument("file", type=_FILE)
def merge(file: Path) -> None:
    """Make FILE from the parts that a killed run has left.

    Each worker writes a part beside FILE while it runs. Closing the engine merges the parts; a kill does not.
    """
    chrome.merge(file)
    click.echo(printable(f"{file}: {len(read_document(file)['traceEvents'])} events"))


@trace.command()
@click.argument("file", type=_FILE)
def check(file: Path) -> None:
    """Check that a Chrome trace is valid for trace viewers.

    Checks fields, names of processes and tracks, nesting of slices, and pairing of flows. Takes any Chrome trace.
    """
    document = read_document(file)
    with damaged(file, TraceError):
        found = problems(document)
    for problem in found[:20]:
        click.echo(printable(problem))
    if found:
        raise TraceError(f"{file}: {len(found)} problems")
    click.echo(printable(f"{file}: {len(document['traceEvents'])} events, sound"))


def _read_report(file: Path) -> tuple[Trace, Report]:
    with damaged(file, TraceError):
        trace = read(file)
        return trace, make_report(trace)


def _print(reports: dict[str, Report]) -> None:
    """Figures and requests; one column for each run."""
    console = SafeConsole()
    table = Table("", *(f"{path}\n{r.method}" for path, r in reports.items()), box=None, padding=(0, 2, 0, 0))
    for name, values in side_by_side(list(reports.values())):
        table.add_row(name, *values)
    console.print(table)
    for path, found in reports.items():
        if found.requests > 1:
            each = Table(*REQUEST_COLUMNS, title=path, title_justify="left", box=None, padding=(0, 2, 0, 0))
            for one in found.per_request:
                each.add_row(*request_row(one))
            console.print("", each)
        for note in found.notes:
            console.print(f"note on {path}: {note}")


def _drawn(runs: Sequence[tuple[Trace, Report]], path: Path) -> None:
    with damaged(runs[0][0].path, TraceError):
        page.write(runs, path)
    say(f"{path}: a page that opens without a network")
