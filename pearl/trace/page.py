"""A report as one HTML page: figures, waits by cause, requests, and the timeline to zoom into.

The page is a file by itself: no library, no network. `page.html` draws what stands here as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pearl.errors import TraceError
from pearl.trace.figures import REQUEST_COLUMNS, request_row, side_by_side
from pearl.trace.gantt import FORESEEN, LOOKS, SOURCES, VERDICTS, Chart, chart, first_steps
from pearl.trace.reading import Trace
from pearl.trace.report import Report, Worker

_WAITS = ("#8c564b", "#bcbd22", "#e377c2", "#7f7f7f", "#d8b4a0")  # causes, by their share
_BUSY, _MESSAGES = LOOKS["post-verify"].colour, LOOKS["other"].colour
_MICROSECOND = 6  # digits of a second


def write(runs: Sequence[tuple[Trace, Report]], path: Path) -> None:
    """Writes the page of one or several runs, each chart below the one before. Raises `TraceError` where it cannot."""
    traces, reports = zip(*runs, strict=True)
    template = files("pearl.trace").joinpath("page.html").read_text(encoding="utf-8")
    names = [str(trace.path) for trace in traces]
    parts = {
        "title": escape(" and ".join(names)),
        "figures": _table(["", *names], ([name, *values] for name, values in side_by_side(reports))),
        "shares": "".join(_shares(name, report) for name, report in zip(names, reports, strict=True)),
        "requests": "".join(_requests(name, report) for name, report in zip(names, reports, strict=True)),
        "notes": "".join(
            f"<li>{escape(f'{n}: {note}')}</li>" for n, r in zip(names, reports, strict=True) for note in r.notes
        ),
        "legend": _legend(),
        # Within a script element nothing may look like its end.
        "data": json.dumps(_data(traces), separators=(",", ":")).replace("<", "\\u003c"),
    }
    filled = re.sub(r"<!-- (\w+) -->", lambda mark: parts[mark[1]], template)
    try:
        path.write_text(filled, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _shares(name: str, report: Report) -> str:
    """A bar for each worker: what share of the time it worked, and waited for what."""
    workers = {"target": report.target} | ({"draft": report.draft} if report.draft else {})
    bars = "".join(f"<tr><td>{role}</td><td>{_bar(worker)}</td></tr>" for role, worker in workers.items())
    return f"<h3>{escape(name)}: {escape(report.method)}</h3><table class=shares>{bars}</table>"


def _bar(worker: Worker) -> str:
    parts = [("works", worker.busy, _BUSY), ("messages", worker.communication, _MESSAGES)]
    waits = enumerate(worker.waits.items())
    parts += [(f"waits for {cause}", share, _WAITS[min(i, len(_WAITS) - 1)]) for i, (cause, share) in waits]
    parts.append(("not covered", max(0.0, worker.uncovered), "#ffffff"))
    pieces = (f'<i style="width:{share:.2%};background:{colour}"></i>' for _, share, colour in parts)
    words = (
        f'<b style="background:{colour}"></b>{escape(what)} {share:.1%} '
        for what, share, colour in parts
        if share >= 5e-4
    )
    return f"<div class=bar>{''.join(pieces)}</div><div class=words>{''.join(words)}</div>"


def _requests(name: str, report: Report) -> str:
    return f"<h3>{escape(name)}</h3>" + _table(REQUEST_COLUMNS, map(request_row, report.per_request))


def _legend() -> str:
    entries = [(look.colour, look.meaning) for look in LOOKS.values()]
    entries += [FORESEEN, *((colour, f"arrow: {words}") for words, colour in VERDICTS.values())]
    entries += [(colour, f"in the text: {meaning}") for colour, meaning in SOURCES.values()]
    return "".join(f'<span><b style="background:{colour}"></b>{escape(meaning)}</span>' for colour, meaning in entries)


def _data(traces: Sequence[Trace]) -> dict[str, Any]:
    whole = [chart(trace, seconds=trace.end - trace.start) for trace in traces]
    return {
        "colours": [look.colour for look in LOOKS.values()],
        "sources": [colour for colour, _ in SOURCES.values()],
        "verdicts": [VERDICTS[False][1], VERDICTS[True][1]],
        "foreseen": FORESEEN[0],
        "view": min(first_steps(trace, trace.start) for trace in traces),
        "runs": [_run(trace, shown) for trace, shown in zip(traces, whole, strict=True)],
    }


def _run(trace: Trace, shown: Chart) -> dict[str, Any]:
    """What the script draws; times in seconds, colours by their index."""
    looks, sources = list(LOOKS), list(SOURCES)
    return {
        "name": f"{trace.path}: {shown.method}",
        "end": _short(shown.end),
        "rows": [
            {
                "name": name,
                "bars": [[_short(b.start), _short(b.end), looks.index(b.look), b.what] for b in bars],
            }
            for name, bars in shown.rows.items()
        ],
        "verdicts": [[_short(v.sent), _short(v.read), int(v.is_rejection)] for v in shown.verdicts],
        "commits": [[_short(c.time), [sources.index(source) for source in c.sources]] for c in shown.commits],
        "foreseen": [[_short(start), _short(end)] for start, end in shown.foreseen],
    }


def _short(seconds: float) -> float:
    return round(seconds, _MICROSECOND)
