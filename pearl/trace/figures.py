"""The figures of a report as text, for tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pearl.metrics import FIGURES
from pearl.trace.report import Latency, Report, Worker

_VERIFY = "forward: verify "  # followed by the number of tokens fed
_LATENCIES = [each for each in FIGURES if isinstance(each.of, str) and each.of in Latency.__dataclass_fields__]
REQUEST_COLUMNS = ("request", "method", "prompt", "tokens", *(each.name for each in _LATENCIES))


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


def request_row(one: Latency) -> list[str]:
    """The values of `REQUEST_COLUMNS`."""
    counts = str(one.num_prompt_tokens), str(one.num_generated_tokens)
    return [one.request, one.method, *counts, *(each.text(one) or "-" for each in _LATENCIES)]


def _figures(r: Report) -> dict[str, str]:
    figures = {
        "wall": f"{r.wall:.3f} s, requests: {r.requests}",
        "tokens": f"{r.tokens}, {r.tokens_per_second:.2f} a second, prefill included",
    }
    figures |= {each.name: text for each in _LATENCIES if (text := each.text(r.latency)) is not None}
    figures |= _worker("target", r.target)
    if r.draft:
        figures |= _worker("draft", r.draft)
        figures["both in a forward"] = f"{r.overlap:.1%}"
    figures |= {f"pace: {name}": f"{share:.1%}" for name, share in r.pace.items()}
    figures["steps"] = ", ".join(f"{n} {kind}" for kind, n in sorted(r.steps.items(), reverse=True)) or "-"
    if r.draft:
        figures["steps that waited"] = ", ".join(f"{r.owners.get(k, 0)} for {k}" for k in ("draft", "transport"))
        fates = f"{r.accepted} accepted, {r.rejected} rejected, {r.discarded} never judged"
        figures["draft tokens"] = f"{r.drafted}: {fates}"
        if r.stops:
            figures["draft tokens"] += f"; a stop policy ended {r.stops} windows"
        if r.prepared:
            figures["draft tokens"] += f"; {r.prepared} prepared for other outcomes"
        figures["acceptance"] = f"{r.accepted / r.judged:.3f} of the judged" if r.judged else "-"
        figures["accepted in a run"] = ", ".join(f"{k}: {n}" for k, n in r.histogram.items()) or "-"
        figures["ratio, window"] = f"{r.ratio:.2f}, c = {r.window:.0f}" if r.ratio else "-"
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
