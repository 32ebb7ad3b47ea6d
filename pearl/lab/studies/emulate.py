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
from pearl.lab.bench.runner import Measured, Plan, Sample, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.studies.figures import Table
from pearl.lab.studies.pearl import TABLES, Cell, Pair, Run, Unit, cells_of
from pearl.lab.studies.simulate import Timing
from pearl.lab.studies.workload import independent, run
from pearl.metrics import Sums

_SIMULATED_TEXTS, _SIMULATED_TOKENS = 20, 1000
_ALONE = Run(AR)
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
    known = [(cell, cell.run) for some in cells.values() for cell in some if cell.run is not None]
    runs = list(dict.fromkeys([_ALONE, *(one for _, one in known)]))
    measured = (
        measure(_plan(pair, runs, tokens, texts, seed), watcher)
        if runtime and known
        else Measured()
    )
    virtual = _simulator(pair, seed)
    for cell, one in known:
        own = [sample for sample in measured.samples if sample.row == one.label]
        alone = [sample.rate for sample in measured.samples if sample.row == AR and sample.rate]
        cell.simulator, cell.runtime = virtual(one)[cell.unit], _measured(own, alone)[cell.unit]
    acceptance, origin = pair.acceptance()
    about = {
        name: getattr(pair, name)
        for name in ("title", "config", "vocabulary", "t_draft", "t_target")
    }
    return cells, about | {
        "acceptance": acceptance,
        "acceptance_from": origin,
        "texts": measured.samples,
    }


def _plan(pair: Pair, runs: Sequence[Run], tokens: int, texts: int, seed: int) -> Plan:
    """For two toys with the pair's vocabulary, acceptance rate and forward times."""
    spec = f"toy:vocab={pair.vocabulary},alpha={pair.acceptance()[0]:.6f},seed=1,coin=1"
    return Plan(
        EngineConfig(target=spec, draft=spec, target_pace=pair.t_target, draft_pace=pair.t_draft),
        [Row(one.label, one.decoding()) for one in runs],
        [Task(pair.title, number, (f"text {number}",)) for number in range(1, texts + 1)],
        RequestOptions(temperature=0.0, seed=seed, max_tokens=tokens),
        gamma=pair.gamma,
    )


# ---- simulator and runtime ----


def _figures(texts: Sums, rate: float | None, alone: float) -> _Figures:
    """By unit. `rate`, `alone`: tokens per second of the run, and of the target alone."""
    accepted, steps = texts.accepted_per_run, texts.total("steps")
    waits = [item for text in texts.texts for item in text.target_wait_seconds.items()]
    return {
        "tokens/s": rate,
        "speed-up": rate and rate / alone,
        "accepted": accepted,
        "run": None if accepted is None else accepted + 1,
        "draft idle": texts.total("draft_wait_seconds") / steps if steps else None,
        "target idle": sum(seconds for cause, seconds in waits if cause != "idle") / steps
        if steps
        else None,
    }


def _simulator(pair: Pair, seed: int) -> Callable[[Run], _Figures]:
    """By 20 texts with i.i.d. acceptance."""
    timing = Timing(pair.t_draft, lambda fed: pair.t_target)
    texts = independent(pair.acceptance()[0], _SIMULATED_TEXTS, _SIMULATED_TOKENS, seed)

    @cache
    def simulator(one: Run) -> _Figures:
        totals = run(texts, timing, one.decoding())
        return _figures(totals, totals.rate, pair.target_speed)

    return simulator


def _measured(samples: Sequence[Sample], alone: Sequence[float]) -> _Figures:
    """`alone`: rates of the target alone."""
    rates = [sample.rate for sample in samples if sample.rate]
    texts = Sums(texts=[text for sample in samples for text in sample.texts])
    return _figures(texts, median(rates) if rates else None, median(alone) if alone else 1.0)


# ---- in words ----

EXPLAINED = (
    "EMULATION: two real processes run toys with the pair's vocabulary, forward times (the paper's Table 7) and "
    "acceptance rate (its Table 4). Greedy. Each cell: paper/simulator/runtime. The "
    "simulator runs the same state machines under a virtual clock, on 20 texts of 1,000 tokens; it agrees with "
    "the closed forms."
)


def table(name: str, cells: Sequence[Cell]) -> Table:
    """A row for each pair, a column for each method."""
    rows: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.pair, {})[cell.label] = cell
    methods = list(dict.fromkeys(method for row in rows.values() for method in row))
    words = [
        [pair, *(_figure(row[method]) if method in row else "" for method in methods)]
        for pair, row in rows.items()
    ]
    title = f"{'Table ' + name if name[0].isdigit() else name.capitalize()}, emulated: {TABLES[name].shows}"
    return Table(title, ["pair", *methods], words, [note for note in [TABLES[name].note] if note])


def _figure(cell: Cell) -> str:
    digits = {"tokens/s": 1, "draft idle": 3, "target idle": 3}.get(cell.unit, 2)
    sources = (
        (cell.paper, cell.simulator, cell.runtime) if cell.run else (cell.paper,)
    )  # we cannot run all methods
    return "/".join("-" if value is None else f"{value:.{digits}f}" for value in sources)


def pair_line(pair: Pair) -> str:
    """Its times, and its windows of `sd` and `pearl`; tables 5 and 6 vary the latter."""
    acceptance, origin = pair.acceptance()
    return (
        f"{pair.title}: t_draft {pair.t_draft * 1e3:.2f} ms, t_target {pair.t_target * 1e3:.2f} ms, acceptance "
        f"{acceptance:.4f} ({origin}), {pair.vocabulary:,} ids; gamma {pair.gamma}, fixed({pair.window})"
    )
