"""The paper's tables from this runtime: emulated pairs in two real processes, and in virtual time.

The real models do not fit on small machines.  Toys have their forward times, vocabulary and acceptance rate, which are
all that the runtime sees of a model.  So each cell comes from four sources: paper, closed form, simulator, runtime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine
from pearl.lab import theory
from pearl.lab.bench.emulation import simulated
from pearl.lab.bench.paper import MODES, TABLES, Pair, Run, Wanted, wanted
from pearl.lab.bench.run import AR, Measured, Plan, Row, Sample, Watcher, devices_of, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.workload import Totals, independent, run
from pearl.lab.simulate import Timing
from pearl.models.tokenizers import load_tokenizer
from pearl.protocol.options import RequestOptions
from pearl.trace.reading import read
from pearl.trace.recorder import CONSUMER
from pearl.trace.report import report

_SIMULATED_TEXTS, _SIMULATED_TOKENS = 20, 1000
_PROMPTS = 6
_IDLE = ("draft idle", "target idle")
_STARTING = 25.0  # seconds to start a pair and to simulate it, about
_WARMING = 20  # tokens that a row decodes beside its text: to warm up, and to empty the caches
_REPLAYING = 2e-3  # seconds for a token of a row's text under the virtual clock, about


@dataclass(frozen=True)
class Cell:
    """One figure from each of four sources; None if a source does not have it.

    Attributes:
        paper: the published figure.
        theory: by the closed form.
        simulator: in virtual time, over many texts.
        runtime: measured, median over the texts; mean accepted tokens and idle times over all of them together.
        ratio: runtime / paper.
        of_simulated: runtime speed / simulated speed of the same text: (median, minimum, maximum).
        lost: what the rest of the time went to -> share of the time, mean over the texts; see `emulation.lost`.
    """

    pair: str
    label: str
    mode: str
    unit: str
    paper: float | None
    theory: float | None = None
    simulator: float | None = None
    runtime: float | None = None
    ratio: float | None = None
    of_simulated: tuple[float, float, float] | None = None
    lost: dict[str, float] | None = None


@dataclass(frozen=True)
class Emulated:
    """The results of one pair: table -> cells."""

    pair: Pair
    measured: Measured | None
    tables: dict[str, list[Cell]]

    def as_dict(self) -> dict[str, Any]:
        acceptance, origin = self.pair.acceptance()
        return {
            "title": self.pair.title,
            "config": self.pair.config,
            "vocabulary": self.pair.vocabulary,
            "t_draft": self.pair.t_draft,
            "t_target": self.pair.t_target,
            "acceptance": acceptance,
            "acceptance_from": origin,
            "texts": [asdict(sample) for sample in self.measured.samples] if self.measured else [],
        }


def runs_of(pair: Pair, tables: Sequence[str]) -> list[Run]:
    """What has to be decoded for these tables, each once; `ar` first, which every speed-up is over."""
    cells = [cell for name in TABLES if name in tables for cell in wanted(pair, name)]
    found = [cell.run for cell in cells if cell.run is not None and cell.unit not in _IDLE]
    return list(dict.fromkeys([Run(AR), *found])) if found else []


def expected_seconds(pairs: Sequence[Pair], tables: Sequence[str], tokens: int, texts: int) -> float:
    """About how long `emulate` takes for all of them, by the closed forms."""
    seconds = 0.0
    for pair in pairs:
        runs, stream = runs_of(pair, tables), Run("pearl", pair.window).closed(pair) or 1.0
        per_token = sum(pair.t_target / (one.closed(pair) or stream) + _REPLAYING for one in runs)
        seconds += (per_token + _PROMPTS * _REPLAYING) * texts * (tokens + _WARMING) + (_STARTING if runs else 0)
    return seconds


def emulate(
    pair: Pair, tables: Sequence[str], watcher: Watcher, *, tokens: int, texts: int, seed: int, runtime: bool = True
) -> Emulated:
    """Run and simulate one pair for the given tables.

    Args:
        tokens: length of each text.
        texts: decoded by each row. Each has a prompt of its own, see `_due_prompt`; text n is sampled with seed + n.
        runtime: False: simulate only.
    """
    runs = runs_of(pair, tables)
    measured = measure(_plan(pair, runs, tokens, texts, seed), watcher) if runtime and runs else None
    cells = {name: wanted(pair, name) for name in TABLES if name in tables}
    traced = next((cell.run for some in cells.values() for cell in some if cell.unit in _IDLE), None)
    idle = idle_times(pair, traced.decoding(), tokens) if runtime and traced else None
    fill = _Filler(pair, _Simulated(pair, seed), measured, idle)
    return Emulated(pair, measured, {name: [fill(cell) for cell in some] for name, some in cells.items()})


def engine_config(pair: Pair) -> EngineConfig:
    """Two toys with the pair's vocabulary, acceptance rate and forward times."""
    spec = f"toy:vocab={pair.vocabulary},alpha={pair.acceptance()[0]:.6f},seed=1,coin=1"
    return EngineConfig(target=spec, draft=spec, target_pace=pair.t_target, draft_pace=pair.t_draft)


def _plan(pair: Pair, runs: Sequence[Run], tokens: int, texts: int, seed: int) -> Plan:
    config = engine_config(pair)
    target, draft = devices_of(config)
    params = {mode: SamplingParams(**options, seed=seed, max_tokens=tokens) for mode, options in MODES.items()}
    return Plan(
        config,
        [Row(_name(one), "pair", target | draft, one.decoding(), params[one.mode]) for one in runs],
        [Task(pair.title, number, (_due_prompt(pair, number, tokens),)) for number in range(1, texts + 1)],
        params[runs[0].mode],
        attempts=3,
        gamma=pair.gamma,
    )


def _due_prompt(pair: Pair, number: int, tokens: int) -> str:
    """Of `_PROMPTS` prompts the one along whose greedy text the draft is right most nearly as often as it should be.

    Found under the virtual clock, before anything is measured: it takes luck from few short texts, as the hypercube of
    a `Workload` does, and all rows decode the same ones.
    """
    config, (acceptance, _) = engine_config(pair), pair.acceptance()
    tokenizer, _ = load_tokenizer(config.target)
    params, decoding = SamplingParams(temperature=0.0, seed=0, max_tokens=tokens), Run("pearl", pair.window).decoding()

    def off(prompt: str) -> float:
        counts = simulated(config, decoding, tokenizer.encode(prompt), params).counts
        return abs(counts.accepted / counts.judged - acceptance) if counts.judged else 1.0

    return min((f"text {number}, {variant}" for variant in range(_PROMPTS)), key=off)


def _name(one: Run) -> str:
    return f"{one.label}, {one.mode}"


class _Simulated:
    """The simulator's figures, over `_SIMULATED_TEXTS` texts with i.i.d. acceptance."""

    def __init__(self, pair: Pair, seed: int) -> None:
        timing = Timing(pair.t_draft, lambda fed: pair.t_target)
        self._workload = independent(timing, pair.acceptance()[0], _SIMULATED_TEXTS, _SIMULATED_TOKENS, seed)
        self._done: dict[RequestOptions, Totals] = {}

    def totals(self, one: Run) -> Totals:
        window = "stream" if one.window is None else "fixed"
        decoding = RequestOptions(one.method, window, one.window)
        if decoding not in self._done:
            self._done[decoding] = run(self._workload, decoding)
        return self._done[decoding]


@dataclass(frozen=True)
class _Filler:
    """Fills the cells of one pair. `idle`: of a step of sd, (draft, target), seconds."""

    pair: Pair
    simulated: _Simulated
    measured: Measured | None
    idle: tuple[float, float] | None

    def __call__(self, cell: Wanted) -> Cell:
        if cell.run is None:
            return Cell(self.pair.title, cell.label, "", cell.unit, cell.paper)
        measured = self._measured(cell.run, cell.unit)
        samples = [] if cell.unit in _IDLE else self._samples(cell.run)
        shares = sorted(s.of_simulated for s in samples if s.of_simulated is not None)
        losses = [s.lost for s in samples if s.lost is not None]
        return Cell(
            self.pair.title,
            cell.label,
            cell.run.mode,
            cell.unit,
            cell.paper,
            _closed(self.pair, cell.run, cell.unit),
            self._simulation(cell.run, cell.unit),
            measured,
            measured / cell.paper if measured is not None and cell.paper else None,
            (median(shares), shares[0], shares[-1]) if shares else None,
            {name: mean(each[name] for each in losses) for name in losses[0]} if losses else None,
        )

    def _simulation(self, one: Run, unit: str) -> float:
        totals = self.simulated.totals(one)
        match unit:
            case "tokens/s":
                return totals.tokens_per_second
            case "speed-up":
                return totals.tokens_per_second * self.pair.t_target
            case "draft idle":
                return totals.draft_waits / totals.steps
            case "target idle":
                return sum(totals.target_waits.values()) / totals.steps
        return (totals.accepted_per_run or 0.0) + (unit == "run")

    def _measured(self, one: Run, unit: str) -> float | None:
        if unit in _IDLE:
            return self.idle[_IDLE.index(unit)] if self.idle else None
        rates = [s.rate for s in self._samples(one) if s.rate]
        if not rates:
            return None
        if unit == "tokens/s":
            return median(rates)
        if unit == "speed-up":
            plain = [s.rate for s in self._samples(Run(AR)) if s.rate]
            return median(rates) / median(plain)
        runs = sum(s.runs for s in self._samples(one))
        return sum(s.accepted for s in self._samples(one)) / runs + (unit == "run") if runs else None

    def _samples(self, one: Run) -> list[Sample]:
        return [s for s in self.measured.samples if s.row == _name(one)] if self.measured else []


def idle_times(pair: Pair, decoding: DecodingConfig, tokens: int) -> tuple[float, float]:
    """(draft, target): seconds that either waits for the other in a step, by the trace of one text."""
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


def _closed(pair: Pair, one: Run, unit: str) -> float | None:
    a, speedup = pair.acceptance()[0], one.closed(pair)
    match unit:
        case "tokens/s":
            return None if speedup is None else speedup * pair.target_speed
        case "speed-up":
            return speedup
        case "draft idle":
            return pair.t_target
        case "target idle":
            return (one.window or 0) * pair.t_draft
    with_last = theory.sd_tokens_per_step(a, one.window or 0) if one.method == "sd" else theory.run_committed(a)
    return with_last - (unit == "accepted")


def document(done: Sequence[Emulated]) -> dict[str, Any]:
    """For JSON: the tables as lists of cells; per pair its settings and texts."""
    names = [name for name in TABLES if any(one.tables.get(name) for one in done)]
    return {
        "tables": {name: [asdict(cell) for one in done for cell in one.tables[name]] for name in names},
        "pairs": [one.as_dict() for one in done],
    }
