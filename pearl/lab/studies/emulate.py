"""Reproduces the tables of the PEARL paper, with each pair in two real processes and in a simulation.

The paper's models do not fit on small machines.  Toys replace them, with the same forward times, vocabulary and
acceptance rate; nothing else of a model matters to the runtime.  Each cell has a figure from each of three sources: the
paper, the simulator and the runtime.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.lab.bench.rows import AR, Row
from pearl.lab.bench.runner import Measured, Plan, measure, median_of
from pearl.lab.bench.tasks import Task
from pearl.lab.studies.figures import Table
from pearl.lab.studies.pearl import TABLES, Cell, Pair, Run, cells_of
from pearl.lab.studies.simulate import Timing
from pearl.lab.studies.workload import decode, independent
from pearl.metrics import Sums

SIMULATED_TEXTS = 20
_SIMULATED_TOKENS = 1000
_Figures = dict[str, float | None]  # unit -> figure; all are of one run, from one source


def emulate(
    pairs: Iterable[Pair],
    tables: Collection[str],
    watcher: Watcher,
    *,
    tokens: int,
    texts: int,
    seed: int,
    runtime: bool = True,
) -> tuple[dict[str, list[Cell]], list[dict[str, Any]]]:
    """Run and simulate pairs for the given tables.

    Return the cells of each table and, for JSON, a description of each pair with its texts.

    Args:
        tokens: length of each text.
        texts: number of texts that each row decodes. Each text has its own prompt; text n is
            sampled with seed + n.
        runtime: whether to run real processes; otherwise pairs are only simulated.
    """
    cells: dict[str, list[Cell]] = {name: [] for name in TABLES if name in tables}
    descriptions = []
    for pair in pairs:
        watcher.say(pair.title)
        runs: dict[Run, list[Cell]] = {}  # a cell without a run has only the paper's figure
        for name, rows in cells.items():
            for cell in cells_of(pair, name):
                rows.append(cell)
                if cell.run is not None:
                    runs.setdefault(cell.run, []).append(cell)
        measured = Measured()
        if runtime and runs:
            measured = measure(_plan(pair, runs, tokens, texts, seed), watcher)
        for run, cells_of_run in runs.items():
            simulated = _simulated(pair, run, seed)
            real = _measured(measured, run)
            for cell in cells_of_run:
                cell.simulator = simulated[cell.unit]
                cell.runtime = real[cell.unit]
        descriptions.append(_description(pair, measured))
    return {name: rows for name, rows in cells.items() if rows}, descriptions


def _description(pair: Pair, measured: Measured) -> dict[str, Any]:
    acceptance, origin = pair.acceptance()
    return {
        "title": pair.title,
        "config": pair.config,
        "vocabulary": pair.vocabulary,
        "t_draft": pair.t_draft,
        "t_target": pair.t_target,
        "acceptance": acceptance,
        "acceptance_from": origin,
        "texts": [sample.as_dict() for sample in measured.samples],
    }


def _plan(pair: Pair, runs: Iterable[Run], tokens: int, texts: int, seed: int) -> Plan:
    """Return a plan with `ar` and each run, for toys with the pair's vocabulary, acceptance rate and forward times."""
    acceptance, _ = pair.acceptance()
    model = f"toy:vocab={pair.vocabulary},alpha={acceptance:.6f},seed=1,coin=1"
    rows = {AR: Row(AR, Run(AR).decoding())}
    for run in runs:
        rows[run.label] = Row(run.label, run.decoding())
    tasks = [Task(pair.title, number, (f"text {number}",)) for number in range(1, texts + 1)]
    return Plan(
        EngineConfig(target=model, draft=model, target_pace=pair.t_target, draft_pace=pair.t_draft),
        list(rows.values()),
        tasks,
        RequestOptions(temperature=0.0, seed=seed, max_tokens=tokens),
        gamma=pair.gamma,
    )


# ---- simulator and runtime ----


def _simulated(pair: Pair, run: Run, seed: int) -> _Figures:
    """Return a run's figures in the simulator, over `SIMULATED_TEXTS` texts."""
    timing = Timing(pair.t_draft, lambda fed: pair.t_target)
    acceptance, _ = pair.acceptance()
    texts = independent(acceptance, SIMULATED_TEXTS, _SIMULATED_TOKENS, seed)
    totals = decode(texts, timing, run.decoding())
    return _figures(totals, totals.rate, pair.target_speed)


def _measured(measured: Measured, run: Run) -> _Figures:
    """Return a run's figures from real processes, over all its texts.

    The rate is the median of the texts' rates. All other figures are over all texts together.
    """
    samples = measured.of(run.label)
    totals = Sums(texts=[])
    for sample in samples:
        totals.texts += sample.texts
    alone = median_of(sample.rate for sample in measured.of(AR))
    return _figures(totals, median_of(sample.rate for sample in samples), alone or 1.0)


def _figures(texts: Sums, rate: float | None, alone: float) -> _Figures:
    """Return a run's figures. `rate` and `alone` are the tokens per second of the run and of the target alone."""
    figures: _Figures = {"tokens/s": rate, "speed-up": rate and rate / alone}
    figures["accepted"] = texts.accepted_per_run
    figures["run"] = texts.mean_run_length
    target_idle = 0.0
    for text in texts.texts:
        for cause, seconds in text.target_wait_seconds.items():
            if cause != "idle":
                target_idle += seconds
    idle = {"draft idle": texts.total("draft_wait_seconds"), "target idle": target_idle}
    steps = texts.total("steps")
    for unit, seconds in idle.items():
        figures[unit] = seconds / steps if steps else None
    return figures


# ---- in words ----

EXPLAINED = (
    "EMULATION: two real processes run toys with the pair's vocabulary, forward times (the paper's Table 7) and "
    "acceptance rate (its Table 4). Greedy. Each cell: paper/simulator/runtime. The "
    "simulator runs the same state machines under a virtual clock, on 20 texts of 1,000 tokens; it agrees with "
    "the closed forms."
)


def table(name: str, cells: Sequence[Cell]) -> Table:
    """Lay cells out in a table with a row for each pair and a column for each method."""
    words: dict[str, dict[str, str]] = {}  # pair -> column -> text
    columns = {"pair": None}
    for cell in cells:
        words.setdefault(cell.pair, {"pair": cell.pair})[cell.label] = _figure(cell)
        columns[cell.label] = None
    rows = []
    for pair in words.values():
        rows.append([pair.get(column, "") for column in columns])
    caption = name.capitalize()
    if name[0].isdigit():
        caption = f"Table {name}"
    shown = TABLES[name]
    return Table(f"{caption}, emulated: {shown.shows}", list(columns), rows, shown.notes)


def _figure(cell: Cell) -> str:
    """Return a cell's text, "paper/simulator/runtime", such as "2.31/2.28/2.20"; "-" for no figure.

    A method that cannot be run here has only the paper's figure.
    """
    digits = {"tokens/s": 1, "draft idle": 3, "target idle": 3}.get(cell.unit, 2)
    sources = [cell.paper]
    if cell.run:
        sources += [cell.simulator, cell.runtime]
    words = []
    for value in sources:
        words.append("-" if value is None else f"{value:.{digits}f}")
    return "/".join(words)


def pair_line(pair: Pair) -> str:
    """Return a line with a pair's forward times, acceptance, vocabulary, and windows of `sd` and `pearl`.

    Tables 5 and 6 use other windows of `pearl`.
    """
    acceptance, origin = pair.acceptance()
    return (
        f"{pair.title}: t_draft {pair.t_draft * 1e3:.2f} ms, t_target {pair.t_target * 1e3:.2f} ms, acceptance "
        f"{acceptance:.4f} ({origin}), {pair.vocabulary:,} ids; gamma {pair.gamma}, fixed({pair.window})"
    )
