"""The figures of a report as text, for tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from pearl.metrics import FIGURES
from pearl.trace.report import Report, Text, Worker

_OF_TEXTS = ("tokens/s", "tokens a step", "first token", "of it in the queue", "ITL p50", "ITL p99", "window c")
_VERIFY = "forward: verify "  # followed by the number of tokens fed
_FIGURES = [each for each in FIGURES if each.name in _OF_TEXTS]
REQUEST_COLUMNS = ("request", "method", "prompt", "tokens", *_OF_TEXTS)


def side_by_side(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """Each figure with its value in every run, "-" where a run has none."""
    columns = [_figures(r) for r in reports]
    names: list[str] = []
    for column in columns:
        for before, name in pairwise(["", *column]):
            if name not in names:  # a figure of one run alone stays beside its neighbour
                names.insert(names.index(before) + 1 if before else 0, name)
    verifies = sorted((name for name in names if name.startswith(_VERIFY)), key=lambda name: int(name.split()[-1]))
    place = next((i for i, name in enumerate(names) if name in verifies), 0)
    others = [name for name in names if name not in verifies]
    return [(name, [c.get(name, "-") for c in columns]) for name in (*others[:place], *verifies, *others[place:])]


def request_row(one: Text) -> list[str]:
    """The values of `REQUEST_COLUMNS`."""
    counts = str(one.statistics.num_prompt_tokens), str(one.statistics.num_generated_tokens)
    return [one.request, one.method, *counts, *(each.text(one.statistics) or "-" for each in _FIGURES)]


def _medians(texts: Sequence[Text]) -> dict[str, str]:
    """Over the requests."""
    known = {each: [value for one in texts if (value := each.value(one.statistics)) is not None] for each in _FIGURES}
    return {each.name: each.form.format(median(values)) for each, values in known.items() if values}


def _figures(r: Report) -> dict[str, str]:
    figures = {
        "wall": f"{r.wall:.3f} s, requests: {r.requests}",
        "tokens": f"{r.tokens}, {r.tokens_per_second:.2f} a second, prefill included",
    }
    figures |= _medians(r.texts)
    figures |= _worker("target", r.target)
    if r.draft:
        figures |= _worker("draft", r.draft)
        figures["both in a forward"] = f"{r.overlap:.1%}"
    figures |= {f"pace: {name}": f"{share:.1%}" for name, share in r.pace.items()}
    figures["steps"] = ", ".join(f"{n} {kind}" for kind, n in sorted(r.steps.items(), reverse=True)) or "-"
    if r.draft:
        fates = f"{r.accepted} accepted, {r.rejected} rejected, {r.discarded} never judged"
        figures["draft tokens"] = f"{r.drafted}: {fates}"
        if r.stops:
            figures["draft tokens"] += f"; a stop policy ended {r.stops} windows"
        if r.prepared:
            figures["draft tokens"] += f"; {r.prepared} prepared for other outcomes"
        figures["acceptance"] = f"{r.accepted / r.judged:.3f} of the judged" if r.judged else "-"
        figures["accepted in a run"] = ", ".join(f"{k}: {n}" for k, n in r.histogram.items()) or "-"
        figures["ratio"] = f"{r.ratio:.2f}" if r.ratio else "-"
    for name, f in r.forwards.items():
        figures[f"forward: {name}"] = f"p50 {f.p50 * 1e3:.2f} ms, p99 {f.p99 * 1e3:.2f} ms, {f.count} of them"
    if r.draft:
        saved = r.alternation / r.wall if r.wall else 0.0
        figures["in alternation"] = f"{r.alternation:.3f} s, {saved:.2f} times as long"
    figures["recorder"] = f"{r.recorder:.2%} of the busier worker's time"
    return figures


def _worker(name: str, w: Worker) -> dict[str, str]:
    figures = {
        f"{name}: busy": f"{w.busy:.1%} (" + ", ".join(f"{k} {v:.1%}" for k, v in w.work.items() if v >= 0.0005) + ")",
        f"{name}: waits": f"{w.wait:.1%}",
    }
    figures |= {f"{name}: waits for {cause}": f"{share:.1%}" for cause, share in w.waits.items()}
    figures[f"{name}: messages"] = f"{w.communication:.1%}"
    figures[f"{name}: not covered"] = f"{w.uncovered:.1%}"
    return figures
