"""PEARL's tables from this runtime: emulated pairs in two real processes, and in virtual time.

The real models do not fit on small machines.  Toys have their forward times, vocabulary and acceptance rate; nothing
else of a model matters to the runtime.  So each cell comes from three sources: paper, simulator, runtime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine
from pearl.lab import Watcher
from pearl.lab.bench.rows import AR, Row
from pearl.lab.bench.runner import Measured, Plan, Sample, measure, simulated
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.workload import independent, run
from pearl.lab.papers.figures import Figure
from pearl.lab.papers.pearl import TABLES, Cell, Pair, Run, Unit, cells_of
from pearl.lab.simulate import Timing
from pearl.metrics import Sums
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.protocol.options import RequestOptions
from pearl.trace.reading import read
from pearl.trace.recorder import CONSUMER
from pearl.trace.report import report

_SIMULATED_TEXTS, _SIMULATED_TOKENS = 20, 1000
_PROMPTS = 6
_IDLE = ("draft idle", "target idle")
_ALONE = Run(AR)
_Figures = dict[Unit, float | None]  # of a run by one source


def emulate(
    pair: Pair, tables: Sequence[str], watcher: Watcher, *, tokens: int, texts: int, seed: int, runtime: bool = True
) -> tuple[dict[str, list[Cell]], dict[str, Any]]:
    """Run and simulate one pair for the given tables: (table -> its cells, the pair and its texts as JSON).

    Args:
        tokens: length of each text.
        texts: decoded by each row. Each has a prompt of its own, see `_typical_prompt`; text n is sampled with
            seed + n.
        runtime: False: simulate only.
    """
    cells = {name: cells_of(pair, name) for name in TABLES if name in tables}
    known = [(cell, cell.run) for some in cells.values() for cell in some if cell.run is not None]
    runs = list(dict.fromkeys([_ALONE, *(one for cell, one in known if cell.unit not in _IDLE)]))
    measured = measure(_plan(pair, runs, tokens, texts, seed), watcher) if runtime and runs[1:] else Measured()
    traced = next((one for cell, one in known if cell.unit in _IDLE), None)
    idle = idle_times(pair, traced.decoding(), tokens) if runtime and traced else None
    virtual = _simulator(pair, seed)
    for cell, one in known:
        own = [sample for sample in measured.samples if sample.row == one.label]
        alone = [sample.rate for sample in measured.samples if sample.row == AR and sample.rate]
        cell.simulator, cell.runtime = virtual(one)[cell.unit], _measured(own, alone, idle)[cell.unit]
        shares = sorted(sample.of_simulated for sample in own if sample.of_simulated and cell.unit not in _IDLE)
        cell.of_simulated = (median(shares), shares[0], shares[-1]) if shares else None
    acceptance, origin = pair.acceptance()
    about = {name: getattr(pair, name) for name in ("title", "config", "vocabulary", "t_draft", "t_target")}
    return cells, about | {"acceptance": acceptance, "acceptance_from": origin, "texts": measured.samples}


def engine_config(pair: Pair) -> EngineConfig:
    """Two toys with the pair's vocabulary, acceptance rate and forward times."""
    spec = f"toy:vocab={pair.vocabulary},alpha={pair.acceptance()[0]:.6f},seed=1,coin=1"
    return EngineConfig(target=spec, draft=spec, target_pace=pair.t_target, draft_pace=pair.t_draft)


def _plan(pair: Pair, runs: Sequence[Run], tokens: int, texts: int, seed: int) -> Plan:
    return Plan(
        engine_config(pair),
        [Row(one.label, one.decoding()) for one in runs],
        [Task(pair.title, number, (_typical_prompt(pair, number, tokens),)) for number in range(1, texts + 1)],
        SamplingParams(temperature=0.0, seed=seed, max_tokens=tokens),
        gamma=pair.gamma,
    )


def _typical_prompt(pair: Pair, number: int, tokens: int) -> str:
    """Of `_PROMPTS` prompts the one whose greedy text comes nearest to the pair's acceptance rate, when simulated.

    Reduces the variance of a few short texts, as the hypercube of `independent` does; all rows decode the same prompts.
    """
    config, params = engine_config(pair), SamplingParams(temperature=0.0, seed=0, max_tokens=tokens)
    tokenizer, acceptance = load_tokenizer(config.target)[0], pair.acceptance()[0]
    decoding = Run("pearl", pair.window).decoding()

    def error(prompt: str) -> float:
        counts = simulated(config, decoding, tokenizer.encode(prompt), params).counts
        judged = counts.num_judged_draft_tokens
        return abs(counts.num_accepted_draft_tokens / judged - acceptance) if judged else 1.0

    return min((f"text {number}, {variant}" for variant in range(_PROMPTS)), key=error)


# ---- simulator and runtime ----


def _figures(rate: float | None, alone: float, accepted: float | None, idle: tuple[float, float] | None) -> _Figures:
    """By unit, from a run's tokens per second and the target's alone, mean accepted tokens, and idle seconds a step."""
    return {
        "tokens/s": rate,
        "speed-up": rate and rate / alone,
        "accepted": accepted,
        "run": None if accepted is None else accepted + 1,
        "draft idle": idle and idle[0],
        "target idle": idle and idle[1],
    }


def _simulator(pair: Pair, seed: int) -> Callable[[Run], _Figures]:
    """By 20 texts with i.i.d. acceptance."""
    timing = Timing(pair.t_draft, lambda fed: pair.t_target)
    texts = independent(pair.acceptance()[0], _SIMULATED_TEXTS, _SIMULATED_TOKENS, seed)

    @cache
    def simulator(one: Run) -> _Figures:
        options = RequestOptions(one.method, "stream" if one.window is None else "fixed", one.window)
        totals = run(texts, timing, options)
        waits = totals.total("draft_wait_seconds"), sum(sum(s.target_wait_seconds.values()) for s in totals.texts)
        idle = waits[0] / totals.total("steps"), waits[1] / totals.total("steps")
        return _figures(totals.tokens_per_second, pair.target_speed, totals.accepted_per_run or 0.0, idle)

    return simulator


def _measured(samples: Sequence[Sample], alone: Sequence[float], idle: tuple[float, float] | None) -> _Figures:
    """`alone`: rates of the target alone."""
    rates = [sample.rate for sample in samples if sample.rate]
    accepted = Sums(texts=[text for sample in samples for text in sample.texts]).accepted_per_run
    return _figures(median(rates) if rates else None, median(alone) if alone else 1.0, accepted, idle)


def idle_times(pair: Pair, decoding: DecodingConfig, tokens: int) -> tuple[float, float]:
    """(draft, target): seconds per step that each waits for the other, by the trace of one text."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=tokens)
    with tempfile.TemporaryDirectory() as folder, Engine(config=engine_config(pair)) as engine:
        engine.generate("warm", params.model_copy(update={"max_tokens": 20}), decoding=decoding)
        engine.start_trace(Path(folder) / "sd.json")
        engine.generate("text", params, decoding=decoding)
        found = report(read(engine.stop_trace()))
    assert found.draft is not None
    steps = sum(found.steps.values())
    draft, target = (
        sum(share for cause, share in worker.waits.items() if cause != CONSUMER) * found.wall / steps
        for worker in (found.draft, found.target)
    )
    return draft, target


def window_figures(tables: Mapping[str, Sequence[Cell]]) -> list[Figure]:
    """Tables 5 and 6 as pictures: tokens per second by window."""
    found = []
    for name, about in (("5", "pair"), ("6", "benchmark")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for cell in tables.get(name, ()):
            for source in ("paper", "simulator", "runtime"):
                if (value := getattr(cell, source)) is not None:
                    assert cell.run is not None
                    lines.setdefault(f"{cell.pair}: {source}", []).append((cell.run.window or 0, value))
        if lines:
            title = f"Windows by {about} (table {name}, emulated)"
            found.append(Figure(f"pearl-windows-{about}", title, "window", "tokens/s", lines))
    return found
