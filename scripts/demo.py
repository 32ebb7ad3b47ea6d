"""The second half of `scripts/demo`: a benchmark's speed-ups by kind of text, and an emulated 7B & 70B at work.

python scripts/demo.py BENCH.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from pearl.config import SamplingParams
from pearl.engine import Engine
from pearl.lab.bench.rows import AR, AR_ON_ALL, AUTO
from pearl.lab.studies.pearl import Pair, pairs
from pearl.spec.methods import AS_PUBLISHED
from pearl.trace.gantt import charts, png
from pearl.trace.reading import read

PAIR = "Llama 2 7B & 70B"
SECONDS = 10.0  # of each method of the emulated pair


# ---- what was measured, by kind of text ----


def by_kind(document: dict[str, Any]) -> str:
    """Say how many times as fast as the target alone `auto` was, by set and baseline of `pearl bench --json`.

    Example: "edits 1.85, questions 0.76 times the target on 1 core; edits 1.37, questions 0.56 times on 2 cores".
    """
    devices = {row["name"]: row["devices"] for row in document["rows"]}
    parts: list[str] = []
    for baseline in (AR, AR_ON_ALL):
        if baseline in devices:
            kinds = []
            for kind, speedup in speedups(document, baseline).items():
                kinds.append(f"{kind} {speedup:.2f}")
            target = "" if parts else "the target "
            parts.append(f"{', '.join(kinds)} times {target}on {devices[baseline]}")
    if document["is_noisy"]:
        parts.append(f"rough: others took {document['others'] + document['stolen']:.0%}")
    return "; ".join(parts)


def speedups(document: dict[str, Any], baseline: str) -> dict[str, float]:
    """Return for each set the median over its texts of the rate of `auto` over that of `baseline` on the same text."""
    baseline_rates = rates(document, baseline)
    ratios: dict[str, list[float]] = {}
    for (kind, number), rate in rates(document, AUTO).items():
        baseline_rate = baseline_rates.get((kind, number))
        if baseline_rate:
            ratios.setdefault(kind, []).append(rate / baseline_rate)
    return {kind: median(of_kind) for kind, of_kind in ratios.items()}


def rates(document: dict[str, Any], row: str) -> dict[tuple[str, int], float]:
    """Return tokens per second after the first commit, by (set, number) of each text of a row."""
    rates = {}
    for text in document["texts"]:
        if text["row"] == row and text["late_tokens"]:
            rates[text["set"], text["task"]] = text["late_tokens"] / text["late_seconds"]
    return rates


# ---- the emulated pair ----


def emulated(pair: Pair, folder: Path) -> Iterator[tuple[str, float]]:
    """Decode by each method for `SECONDS`; yield its name and its tokens per second. Leaves traces of sd and pearl."""
    toy = f"toy:vocab={pair.vocabulary},alpha={pair.acceptance()[0]:.4f},seed=1,coin=1"
    methods = {
        "ar": SamplingParams(method="ar"),
        "sd": SamplingParams(method="sd", gamma=pair.gamma),
        "pearl": SamplingParams(method="pearl", **AS_PUBLISHED),
    }
    for name, options in methods.items():
        trace = str(folder / f"{name}.json")
        with Engine(
            toy, toy, target_pace=pair.t_target, draft_pace=pair.t_draft, trace=trace
        ) as engine:
            yield name, measured(engine, options)


def measured(engine: Engine, options: SamplingParams) -> float:
    """Tokens per second after the first commit."""
    tokens = 0
    passed = 0.0
    with engine.stream("text 1", options.changed(temperature=0.0, seed=1)) as stream:
        next(stream)
        began = time.monotonic()
        for piece in stream:
            tokens += len(piece.tokens)
            passed = time.monotonic() - began
            if passed >= SECONDS:
                break
    return tokens / passed


def show_emulated() -> None:
    pair = next(pair for pair in pairs() if pair.title == PAIR)
    folder = Path(tempfile.mkdtemp(prefix="pearl-demo-"))
    print(
        f"demo: EMULATED {PAIR}: models that compute nothing, with the forward times ({pair.t_draft * 1e3:.0f} and "
        f"{pair.t_target * 1e3:.0f} ms) and the acceptance ({pair.acceptance()[0]:.2f}) of the paper's, "
        f"{SECONDS:.0f} s each"
    )
    alone = 0.0
    for name, rate in emulated(pair, folder):
        alone = alone or rate
        print(
            f"demo:   {name:5} {rate:5.1f} tokens/s, {rate / alone:.2f} times the target alone",
            flush=True,
        )
    picture = folder / "timeline.png"
    png(charts([read(folder / "sd.json"), read(folder / "pearl.json")]), picture)
    print(f"demo: what both workers did, sd above pearl: {picture}")


if __name__ == "__main__":
    print(f"demo: with auto, {by_kind(json.loads(Path(sys.argv[1]).read_text()))}", flush=True)
    show_emulated()
