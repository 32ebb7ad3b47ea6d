"""`pearl trace`: what a recorded run says. Arguments and tables; the numbers come from `pearl.trace`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table

from pearl.cli.terminal import SafeConsole, say
from pearl.document import damaged
from pearl.errors import TraceError
from pearl.printable import printable
from pearl.trace import chrome
from pearl.trace.gantt import chart, html, png, same_time, terminal
from pearl.trace.reading import read, read_document
from pearl.trace.replay import replay as run_again
from pearl.trace.report import Report, Worker
from pearl.trace.report import report as make_report
from pearl.trace.validate import problems

_FILE = click.Path(path_type=Path)


@click.group()
def trace() -> None:
    """Report, compare, draw or replay what --trace FILE has recorded.

    The file is a Chrome trace: ui.perfetto.dev opens it too.
    """


@trace.command()
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(file: Path, as_json: bool) -> None:
    """Work, waits by cause, overlap and pace of the run in FILE."""
    found = _reported(file)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    console = SafeConsole()
    console.print(_table({str(file): found}))
    for note in found.notes:
        console.print(f"note: {note}")


@trace.command()
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--png", "png_path", type=_FILE, help="Instead draw both runs, A above B on one time scale.")
@click.option("--seconds", type=float, help="How much --png shows of each; default: twelve verification steps of one.")
def compare(a: Path, b: Path, as_json: bool, png_path: Path | None, seconds: float | None) -> None:
    """Two runs side by side: one of sd and one of pearl, say."""
    if seconds is not None and png_path is None:
        raise click.UsageError("--seconds says how much a picture shows: give --png FILE too")
    if png_path is not None:
        with damaged(a, TraceError):
            shown = same_time([read(a), read(b)], seconds)
        png(shown, png_path)
        say(f"{png_path}: {a} above {b}, {max(c.end for c in shown):.3f} s of each")
        return
    reports = {str(path): _reported(path) for path in (a, b)}
    if as_json:
        click.echo(json.dumps({path: found.as_dict() for path, found in reports.items()}))
        return
    console = SafeConsole()
    console.print(_table(reports))
    one, other = reports[str(a)], reports[str(b)]
    if one.tokens_per_second and other.tokens_per_second:
        rate = other.tokens_per_second / one.tokens_per_second
        console.print(f"{b} ({other.method}) is {rate:.2f} times as fast as {a} ({one.method})")
    for path, found in reports.items():
        for note in found.notes:
            console.print(f"note on {path}: {note}")


@trace.command()
@click.argument("file", type=_FILE)
@click.option("--from", "start", type=float, help="Seconds from the start of the first request.")
@click.option("--seconds", type=float, help="How much to show; default: twelve verification steps.")
@click.option("--png", "png_path", type=_FILE, help="Draw a PNG instead.")
@click.option("--html", "html_path", type=_FILE, help="Draw an HTML page instead; it opens offline and can be zoomed.")
def show(file: Path, start: float | None, seconds: float | None, png_path: Path | None, html_path: Path | None) -> None:
    """Both workers on one time axis, in the terminal or as a picture."""
    with damaged(file, TraceError):
        shown = chart(read(file), start, seconds)
    if png_path is not None:
        png([shown], png_path)
    if html_path is not None:
        html(shown, html_path)
    for path in filter(None, (png_path, html_path)):
        say(f"{path}: {shown.start:.3f} s to {shown.end:.3f} s of {file}")
    if png_path is None and html_path is None:
        console = SafeConsole()
        for line in terminal(shown, console.width):
            console.print(line, no_wrap=True, crop=False, soft_wrap=True)


@trace.command()
@click.argument("file", type=_FILE)
def replay(file: Path) -> None:
    """Do fresh state machines decide the same?

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
    """Makes FILE of what a killed run has left.

    Each worker writes a part beside FILE as it goes; closing the engine merges them, a kill leaves them.
    """
    chrome.merge(file)
    click.echo(printable(f"{file}: {len(read_document(file)['traceEvents'])} events"))


@trace.command()
@click.argument("file", type=_FILE)
def check(file: Path) -> None:
    """Checks any Chrome trace as viewers see it.

    Fields, names of processes and tracks, nesting of slices, pairing of flows.
    """
    document = read_document(file)
    with damaged(file, TraceError):
        found = problems(document)
    for problem in found[:20]:
        click.echo(printable(problem))
    if found:
        raise TraceError(f"{file}: {len(found)} problems")
    click.echo(printable(f"{file}: {len(document['traceEvents'])} events, sound"))


def _reported(file: Path) -> Report:
    with damaged(file, TraceError):
        return make_report(read(file))


def _table(reports: dict[str, Report]) -> Table:
    """A row a number, a column a run; groups are parted by empty rows."""
    table = Table("", *(f"{path}\n{r.method}" for path, r in reports.items()), box=None, padding=(0, 2, 0, 0))
    columns = [_rows(r) for r in reports.values()]
    names = list(dict.fromkeys(name for rows in columns for name in rows))
    for name in _in_order(names, columns):
        table.add_row(name, *(rows.get(name, "-") for rows in columns))
    return table


def _in_order(names: list[str], columns: list[dict[str, str]]) -> list[str]:
    """Rows that only one run has stay within their group."""
    order = {name: max(list(rows).index(name) / len(rows) for rows in columns if name in rows) for name in names}
    return sorted(names, key=lambda name: order[name])


def _rows(r: Report) -> dict[str, str]:
    rows = {
        "wall": f"{r.wall:.3f} s, {r.requests} request" + ("s" if r.requests != 1 else ""),
        "tokens": f"{r.tokens}, {r.tokens_per_second:.2f} a second, prefill included",
    }
    rows |= _worker_rows("target", r.target)
    if r.draft:
        rows |= _worker_rows("draft", r.draft)
        rows["both in a forward"] = f"{r.overlap:.1%}"
    rows |= {f"pace: {name}": f"{share:.1%}" for name, share in r.pace.items()}
    rows["steps"] = ", ".join(f"{n} {kind}" for kind, n in sorted(r.steps.items(), reverse=True)) or "-"
    if r.draft:
        rows["steps that waited"] = ", ".join(f"{r.owners.get(k, 0)} for {k}" for k in ("draft", "transport"))
        rows["draft tokens"] = f"{r.drafted}: {r.accepted} accepted, {r.rejected} rejected, {r.discarded} never judged"
        rows["acceptance"] = f"{r.accepted / r.judged:.3f} of the judged" if r.judged else "-"
        rows["accepted in a run"] = ", ".join(f"{k}: {n}" for k, n in r.histogram.items()) or "-"
        rows["ratio, window"] = f"{r.ratio:.2f}, c = {r.window:.0f}" if r.ratio else "-"
    for name, f in r.forwards.items():
        rows[f"forward: {name}"] = f"p50 {f.p50 * 1e3:.2f} ms, p99 {f.p99 * 1e3:.2f} ms, {f.count} of them"
    if r.draft:
        saved = r.alternation / r.wall if r.wall else 0.0
        rows["in alternation"] = f"{r.alternation:.3f} s, {saved:.2f} times as long"
    rows["recorder"] = f"{r.recorder:.2%} of the busier worker's time"
    return rows


def _worker_rows(name: str, w: Worker) -> dict[str, str]:
    rows = {
        f"{name}: busy": f"{w.busy:.1%} (" + ", ".join(f"{k} {v:.1%}" for k, v in w.work.items() if v >= 0.0005) + ")",
        f"{name}: waits": f"{w.wait:.1%}",
    }
    rows |= {f"{name}: waits for {cause}": f"{share:.1%}" for cause, share in w.waits.items()}
    rows[f"{name}: messages"] = f"{w.communication:.1%}"
    rows[f"{name}: not covered"] = f"{w.uncovered:.1%}"
    return rows
