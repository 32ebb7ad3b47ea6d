"""PEARL's tables from this runtime: emulated pairs in two real processes, and in virtual time.

The real models do not fit on small machines.  Toys have their forward times, vocabulary and acceptance rate; nothing
else of a model matters to the runtime.  So each cell comes from four sources: paper, closed form, simulator, runtime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine
from pearl.lab import Watcher, theory
from pearl.lab.bench.rows import AR, Row
from pearl.lab.bench.runner import Measured, Plan, Sample, measure, simulated
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.workload import Totals, independent, run
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


def runs_of(pair: Pair, tables: Sequence[str]) -> list[Run]:
    """The runs that these tables need, each once; `ar` first, the base of every speedup."""
    cells = [cell for name in TABLES if name in tables for cell in cells_of(pair, name)]
    found = [cell.run for cell in cells if cell.run is not None and cell.unit not in _IDLE]
    return list(dict.fromkeys([_ALONE, *found])) if found else []


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
    runs = runs_of(pair, tables)
    measured = measure(_plan(pair, runs, tokens, texts, seed), watcher) if runtime and runs else Measured()
    cells = {name: cells_of(pair, name) for name in TABLES if name in tables}
    traced = next((cell.run for some in cells.values() for cell in some if cell.unit in _IDLE), None)
    idle = idle_times(pair, traced.decoding(), tokens) if runtime and traced else (None, None)
    sources = _Sources(pair, seed, measured.samples, idle)
    acceptance, origin = pair.acceptance()
    about = {
        "title": pair.title,
        "config": pair.config,
        "vocabulary": pair.vocabulary,
        "t_draft": pair.t_draft,
        "t_target": pair.t_target,
        "acceptance": acceptance,
        "acceptance_from": origin,
        "texts": measured.samples,
    }
    for cell in chain.from_iterable(cells.values()):
        _fill(cell, sources)
    return cells, about


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

    Reduces the variance of a few short texts, as the hypercube of a `Workload` does; all rows decode the same prompts.
    """
    config, params = engine_config(pair), SamplingParams(temperature=0.0, seed=0, max_tokens=tokens)
    tokenizer, acceptance = load_tokenizer(config.target)[0], pair.acceptance()[0]
    decoding = Run("pearl", pair.window).decoding()

    def error(prompt: str) -> float:
        counts = simulated(config, decoding, tokenizer.encode(prompt), params).counts
        judged = counts.num_judged_draft_tokens
        return abs(counts.num_accepted_draft_tokens / judged - acceptance) if judged else 1.0

    return min((f"text {number}, {variant}" for variant in range(_PROMPTS)), key=error)


# ---- the four sources ----


_Figures = dict[Unit, float | None]  # of a run by one source


def _figures(
    rate: float | None, alone: float, accepted: float | None, idle: tuple[float | None, float | None]
) -> _Figures:
    """By unit, from a run's tokens per second and the target's alone, mean accepted tokens, and idle seconds a step."""
    return {
        "tokens/s": rate,
        "speed-up": rate and rate / alone,
        "accepted": accepted,
        "run": None if accepted is None else accepted + 1,
        "draft idle": idle[0],
        "target idle": idle[1],
    }


class _Sources:
    """Closed form, simulator (20 texts with i.i.d. acceptance) and runtime of one pair."""

    def __init__(
        self, pair: Pair, seed: int, samples: Sequence[Sample], idle: tuple[float | None, float | None]
    ) -> None:
        self.pair, self._samples, self._idle = pair, samples, idle
        timing = Timing(pair.t_draft, lambda fed: pair.t_target)
        self._workload = independent(timing, pair.acceptance()[0], _SIMULATED_TEXTS, _SIMULATED_TOKENS, seed)
        self._done: dict[RequestOptions, Totals] = {}

    def closed_form(self, one: Run) -> _Figures:
        pair, window, speedup = self.pair, one.window or 0, one.closed_form(self.pair)
        a = pair.acceptance()[0]
        per_run = theory.sd_tokens_per_step(a, window) if one.method == "sd" else theory.run_committed(a)
        rate = None if speedup is None else speedup * pair.target_speed
        return _figures(rate, pair.target_speed, per_run - 1, (pair.t_target, window * pair.t_draft))

    def simulator(self, one: Run) -> _Figures:
        decoding = RequestOptions(one.method, "stream" if one.window is None else "fixed", one.window)
        if decoding not in self._done:
            self._done[decoding] = run(self._workload, decoding)
        totals = self._done[decoding]
        waits = totals.total("draft_wait_seconds"), sum(sum(s.target_wait_seconds.values()) for s in totals.texts)
        idle = waits[0] / totals.total("steps"), waits[1] / totals.total("steps")
        return _figures(totals.tokens_per_second, self.pair.target_speed, totals.accepted_per_run or 0.0, idle)

    def runtime(self, one: Run) -> _Figures:
        samples = self.samples(one)
        rates, alone = ([s.rate for s in some if s.rate] for some in (samples, self.samples(_ALONE)))
        accepted = Sums(texts=[text for s in samples for text in s.texts]).accepted_per_run
        return _figures(median(rates) if rates else None, median(alone) if alone else 1.0, accepted, self._idle)

    def samples(self, one: Run) -> list[Sample]:
        return [sample for sample in self._samples if sample.row == one.label]


def _fill(cell: Cell, sources: _Sources) -> None:
    if cell.run is None:
        return
    samples = [] if cell.unit in _IDLE else sources.samples(cell.run)
    shares = sorted(s.of_simulated for s in samples if s.of_simulated is not None)
    cell.theory, cell.simulator, cell.runtime = (
        source(cell.run)[cell.unit] for source in (sources.closed_form, sources.simulator, sources.runtime)
    )
    cell.ratio = cell.runtime / cell.paper if cell.runtime is not None and cell.paper else None
    cell.of_simulated = (median(shares), shares[0], shares[-1]) if shares else None


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


def window_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Tables 5 and 6 as pictures, from a result as JSON: tokens per second by window."""
    found = []
    for name, about in (("5", "pair"), ("6", "benchmark")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for cell in result["tables"].get(name, ()):
            for source in ("paper", "simulator", "runtime"):
                if cell[source] is not None:
                    lines.setdefault(f"{cell['pair']}: {source}", []).append((cell["run"]["window"], cell[source]))
        if lines:
            title = f"Windows by {about} (table {name}, emulated)"
            found.append(Figure(f"pearl-windows-{about}", title, "window", "tokens/s", lines))
    return found
