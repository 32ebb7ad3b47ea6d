"""PEARL's tables from this runtime: emulated pairs in two real processes, and in virtual time.

The real models do not fit on small machines.  Toys have their forward times, vocabulary and acceptance rate; nothing
else of a model matters to the runtime.  So each cell comes from three sources: paper, simulator, runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.lab.bench.rows import AR, Row
from pearl.lab.bench.runner import Measured, Plan, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.studies.figures import Table
from pearl.lab.studies.pearl import TABLES, Cell, Pair, Run, Unit, cells_of
from pearl.lab.studies.simulate import Timing
from pearl.lab.studies.workload import independent, run
from pearl.metrics import Sums

_SIMULATED_TEXTS = 20
_SIMULATED_TOKENS = 1000
_Figures = dict[Unit, float | None]  # of a run by one source


def emulate(
    pair: Pair,
    tables: Sequence[str],
    watcher: Watcher,
    *,
    tokens: int,
    texts: int,
    seed: int,
    runtime: bool = True,
) -> tuple[dict[str, list[Cell]], dict[str, Any]]:
    """Run and simulate one pair for the given tables: (table -> its cells, the pair and its texts as JSON).

    Args:
        tokens: length of each text.
        texts: decoded by each row. Each has a prompt of its own; text n is sampled with seed + n.
        runtime: False: simulate only.
    """
    cells = {name: cells_of(pair, name) for name in TABLES if name in tables}
    # Cells without a run have the paper's figure only.
    to_fill = [cell for row in cells.values() for cell in row if cell.run is not None]
    measured = Measured()
    if runtime and to_fill:
        measured = measure(_plan(pair, to_fill, tokens, texts, seed), watcher)
    simulator = _simulator(pair, seed)
    for cell in to_fill:
        assert cell.run is not None
        cell.simulator = simulator(cell.run)[cell.unit]
        cell.runtime = _measured(measured, cell.run)[cell.unit]
    acceptance, origin = pair.acceptance()
    return cells, {
        "title": pair.title,
        "config": pair.config,
        "vocabulary": pair.vocabulary,
        "t_draft": pair.t_draft,
        "t_target": pair.t_target,
        "acceptance": acceptance,
        "acceptance_from": origin,
        "texts": measured.samples,
    }


def _plan(pair: Pair, cells: Sequence[Cell], tokens: int, texts: int, seed: int) -> Plan:
    """Plan `ar` and each run, for two toys with the pair's vocabulary, acceptance rate and forward times."""
    acceptance, _ = pair.acceptance()
    model = f"toy:vocab={pair.vocabulary},alpha={acceptance:.6f},seed=1,coin=1"
    runs = dict.fromkeys([Run(AR), *(cell.run for cell in cells if cell.run)])
    return Plan(
        EngineConfig(target=model, draft=model, target_pace=pair.t_target, draft_pace=pair.t_draft),
        [Row(run.label, run.decoding()) for run in runs],
        [Task(pair.title, number, (f"text {number}",)) for number in range(1, texts + 1)],
        RequestOptions(temperature=0.0, seed=seed, max_tokens=tokens),
        gamma=pair.gamma,
    )


# ---- simulator and runtime ----


def _figures(texts: Sums, rate: float | None, alone: float) -> _Figures:
    """Return a run's figures. `rate`, `alone`: tokens per second of the run, and of the target alone."""
    accepted = texts.accepted_per_run
    steps = texts.total("steps")
    target_idle = 0.0
    for text in texts.texts:
        for cause, seconds in text.target_wait_seconds.items():
            if cause != "idle":
                target_idle += seconds
    return {
        "tokens/s": rate,
        "speed-up": rate and rate / alone,
        "accepted": accepted,
        "run": None if accepted is None else accepted + 1,
        "draft idle": texts.total("draft_wait_seconds") / steps if steps else None,
        "target idle": target_idle / steps if steps else None,
    }


def _simulator(pair: Pair, seed: int) -> Callable[[Run], _Figures]:
    """Return a function from a run to its figures over 20 texts with i.i.d. acceptance."""
    timing = Timing(pair.t_draft, lambda fed: pair.t_target)
    acceptance, _ = pair.acceptance()
    texts = independent(acceptance, _SIMULATED_TEXTS, _SIMULATED_TOKENS, seed)

    @cache
    def simulator(method: Run) -> _Figures:
        totals = run(texts, timing, method.decoding())
        return _figures(totals, totals.rate, pair.target_speed)

    return simulator


def _measured(measured: Measured, method: Run) -> _Figures:
    """Return a run's figures over all its texts; its rate is the median of theirs."""
    samples = [sample for sample in measured.samples if sample.row == method.label]
    texts = Sums(texts=[text for sample in samples for text in sample.texts])
    return _figures(texts, _median_rate(measured, method.label), _median_rate(measured, AR) or 1.0)


def _median_rate(measured: Measured, row: str) -> float | None:
    rates = [sample.rate for sample in measured.samples if sample.row == row and sample.rate]
    return median(rates) if rates else None


# ---- in words ----

EXPLAINED = (
    "EMULATION: two real processes run toys with the pair's vocabulary, forward times (the paper's Table 7) and "
    "acceptance rate (its Table 4). Greedy. Each cell: paper/simulator/runtime. The "
    "simulator runs the same state machines under a virtual clock, on 20 texts of 1,000 tokens; it agrees with "
    "the closed forms."
)


def table(name: str, cells: Sequence[Cell]) -> Table:
    """Lay cells out in a table with a row for each pair and a column for each method."""
    by_pair: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_pair.setdefault(cell.pair, {})[cell.label] = cell
    methods = list(dict.fromkeys(method for row in by_pair.values() for method in row))
    rows = []
    for pair, row in by_pair.items():
        words = [_figure(row[method]) if method in row else "" for method in methods]
        rows.append([pair, *words])
    caption = f"Table {name}" if name[0].isdigit() else name.capitalize()
    shown = TABLES[name]
    title = f"{caption}, emulated: {shown.shows}"
    return Table(title, ["pair", *methods], rows, [shown.note] if shown.note else [])


def _figure(cell: Cell) -> str:
    """Return paper/simulator/runtime, or the paper's figure of a method that cannot be run here."""
    digits = {"tokens/s": 1, "draft idle": 3, "target idle": 3}.get(cell.unit, 2)
    sources = [cell.paper]
    if cell.run:
        sources += [cell.simulator, cell.runtime]
    return "/".join("-" if value is None else f"{value:.{digits}f}" for value in sources)


def pair_line(pair: Pair) -> str:
    """Return a pair's forward times, and its windows of `sd` and `pearl`; tables 5 and 6 vary the latter."""
    acceptance, origin = pair.acceptance()
    return (
        f"{pair.title}: t_draft {pair.t_draft * 1e3:.2f} ms, t_target {pair.t_target * 1e3:.2f} ms, acceptance "
        f"{acceptance:.4f} ({origin}), {pair.vocabulary:,} ids; gamma {pair.gamma}, fixed({pair.window})"
    )
