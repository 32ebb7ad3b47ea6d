"""The paper's tables, from this runtime: its pairs emulated by toys of their speeds, in two real processes.

The models do not fit on small machines, but what they do to the runtime does: how long a forward takes, and how often a
draft token is accepted.  Each cell stands beside what theory and the simulator have for it, and what the paper says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.document import parse_yaml
from pearl.errors import ConfigError
from pearl.lab import theory
from pearl.lab.bench.run import AR, FIXED, PEARL, SD, Measured, Plan, Row, Sample, Watcher, devices_of, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.compare import sd_at_best
from pearl.lab.experiments.workload import Totals, independent, run
from pearl.lab.simulate import Timing
from pearl.protocol.messages import Decoding

NO_PRE, NO_POST = "pearl-no-pre-verify", "pearl-no-post-verify"
TABLES = {
    "1": "methods: times as fast as ar",
    "3": "ablations: times as fast as ar",
    "5": "mean accepted tokens",
    "6": "windows: times as fast as ar, PEARL with fixed windows",
}
_AROUND = 2  # windows tried on either side of c
_VOCABULARY = 32
_SIMULATED_TEXTS, _SIMULATED_TOKENS = 20, 1000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Published(_Strict):
    """Figures of the paper, as far as they are known.

    Attributes:
        speedup: method -> times as fast as ar. Methods: sd, pearl, and the two ablations.
        mean_accepted: method (sd, pearl) -> M.
        windows: c -> times as fast as ar.
    """

    speedup: dict[str, float] = {}
    mean_accepted: dict[str, float] = {}
    windows: dict[int, float] = {}


class Pair(_Strict):
    """`c`: t_target / t_draft; `t_target`: seconds; `gamma`: of the paper's sd; `config`: of the real pair."""

    name: str
    config: str
    t_target: float = Field(gt=0)
    c: float = Field(ge=1)
    gamma: int = Field(ge=1)
    published: Published = Published()

    @property
    def t_draft(self) -> float:
        return self.t_target / self.c

    @property
    def window(self) -> int:
        return round(self.c)

    def acceptance(self) -> tuple[float, str]:
        """The rate, and where it is from."""
        known = self.published
        if "pearl" in known.mean_accepted:
            return theory.acceptance_of(known.mean_accepted["pearl"]), "from the mean accepted tokens"
        if "sd" in known.speedup:
            gamma, cost = self.gamma, 1 / self.c
            return _fitted(lambda a: theory.sd_improvement(a, gamma, cost), known.speedup["sd"]), "fitted to sd's speed"
        if "pearl" in known.speedup:
            c = self.window
            return _fitted(lambda a: theory.pearl_tokens_per_step(a, c), known.speedup["pearl"]), (
                "fitted to PEARL's speed"
            )
        raise ConfigError(f"{self.name}: no published figure says how often its draft tokens are accepted")


def _fitted(rises: Callable[[float], float], value: float) -> float:
    """The acceptance rate at which a rising function of it has the value; raises `ConfigError` where none has."""
    low, high = 0.0, 1.0
    if not rises(low) <= value <= rises(high):
        raise ConfigError(f"no acceptance rate makes it {value} times as fast: {rises(low):.2f} to {rises(high):.2f}")
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < value else (low, middle)
    return low


def pairs(path: Path | None = None) -> list[Pair]:
    """Those of the paper, or of a file like it. Raises `ConfigError`."""
    source = path if path is not None else files("pearl.lab.bench") / "paper.yaml"
    try:
        return TypeAdapter(list[Pair]).validate_python(parse_yaml(source.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the pairs {source}: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "file"
        raise ConfigError(f"{source}: {where}: {problem['msg']}") from None
    except ValueError as error:  # after the one above, which is a ValueError too
        raise ConfigError(f"{source} is not YAML that PEARL reads: {error}") from None


@dataclass(frozen=True)
class Cell:
    """A row of a table; None: not published, no closed form, or not asked of the runtime.

    Attributes:
        runtime: median over the repeats.
        of_simulated: the runtime's speed over the simulator's on the same seed, median, least and most.
    """

    pair: str
    method: str
    paper: float | None
    theory: float | None
    simulator: float
    runtime: float | None
    of_simulated: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Emulated:
    """One pair, done."""

    pair: Pair
    acceptance: float
    acceptance_from: str
    gamma: int
    measured: Measured | None
    tables: dict[str, list[Cell]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.pair.name,
            "config": self.pair.config,
            "t_draft": self.pair.t_draft,
            "t_target": self.pair.t_target,
            "acceptance": self.acceptance,
            "acceptance_from": self.acceptance_from,
            "gamma": self.gamma,
            "texts": [asdict(sample) for sample in self.measured.samples] if self.measured else [],
        }


def emulate(
    pair: Pair,
    tables: Iterable[str],
    watcher: Watcher,
    *,
    tokens: int,
    repeats: int,
    other_repeats: int,
    seed: int,
    runtime: bool = True,
) -> Emulated:
    """Runs and simulates one pair for the given tables.

    Args:
        tokens: of a text; a repeat is a text of its own seed.
        repeats: of pearl with either window and of sd; `other_repeats`: of the rest.
        runtime: False to simulate only.
    """
    acceptance, origin = pair.acceptance()
    virtual = _Virtual(pair, acceptance, seed)
    gamma = sd_at_best(virtual.workload).gamma
    assert gamma is not None
    wanted = [name for name in TABLES if name in set(tables)]
    decodings = _decodings(pair, gamma, wanted)
    measured = (
        _measured(pair, acceptance, decodings, watcher, tokens, repeats, other_repeats, seed) if runtime else None
    )
    filled = {name: _FILL[name](_Columns(pair, acceptance, gamma, virtual, measured)) for name in wanted}
    return Emulated(pair, acceptance, origin, gamma, measured, filled)


def _decodings(pair: Pair, gamma: int, tables: Sequence[str]) -> dict[str, DecodingConfig]:
    """Rows of the runtime, by name."""
    c = pair.window
    known = {
        AR: DecodingConfig(method="ar"),
        SD: DecodingConfig(method="sd", gamma=gamma),
        NO_PRE: DecodingConfig(method=NO_PRE, window="fixed", gamma=c),
        NO_POST: DecodingConfig(method=NO_POST, window="fixed", gamma=c),
        FIXED: DecodingConfig(method="pearl", window="fixed", gamma=c),
        PEARL: DecodingConfig(method="pearl"),
    }
    if "3" not in tables:
        del known[NO_PRE], known[NO_POST]
    if "6" in tables:
        known |= {_fixed(w): DecodingConfig(method="pearl", window="fixed", gamma=w) for w in _windows(pair) if w != c}
    return known


def _fixed(window: int) -> str:
    return f"{FIXED}({window})"


def _windows(pair: Pair) -> list[int]:
    return list(range(max(1, pair.window - _AROUND), pair.window + _AROUND + 1))


def _measured(
    pair: Pair,
    acceptance: float,
    decodings: dict[str, DecodingConfig],
    watcher: Watcher,
    tokens: int,
    repeats: int,
    other_repeats: int,
    seed: int,
) -> Measured:
    spec = f"toy:vocab={_VOCABULARY},alpha={acceptance:.6f},seed=1"
    config = EngineConfig(target=spec, draft=spec, target_pace=pair.t_target, draft_pace=pair.t_draft)
    target, draft = devices_of(config)
    rows = [Row(name, "pair", target | draft, decoding) for name, decoding in decodings.items()]
    often = {SD, FIXED, PEARL}
    plan = Plan(
        config,
        rows,
        [Task(pair.name, 1, ("hello",))],
        SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens),
        repeats={row.name: repeats if row.name in often else other_repeats for row in rows},
        attempts=3,
        gamma=decodings[SD].gamma,
    )
    return measure(plan, watcher)


class _Virtual:
    """The simulator's side: many texts with i.i.d. acceptance."""

    def __init__(self, pair: Pair, acceptance: float, seed: int) -> None:
        timing = Timing(pair.t_draft, lambda fed: pair.t_target)
        self.workload = independent(timing, acceptance, _SIMULATED_TEXTS, _SIMULATED_TOKENS, seed)
        self._done: dict[Decoding, Totals] = {}

    def totals(self, decoding: Decoding) -> Totals:
        if decoding not in self._done:
            self._done[decoding] = run(self.workload, decoding)
        return self._done[decoding]

    def speedup(self, decoding: Decoding) -> float:
        return self.totals(decoding).tokens_per_second * self.workload.timing.t_target(1)


@dataclass(frozen=True)
class _Columns:
    """What the tables are filled from."""

    pair: Pair
    acceptance: float
    gamma: int
    virtual: _Virtual
    measured: Measured | None

    def speed(self, label: str, row: str, decoding: Decoding, paper: float | None, closed: float | None) -> Cell:
        samples, plain = self._samples(row), self._rates(AR)
        rates = self._rates(row)
        runtime = median(rates) / median(plain) if rates and plain else None
        shares = sorted(s.of_simulated for s in samples if s.of_simulated is not None)
        of_simulated = (median(shares), shares[0], shares[-1]) if shares else None
        return Cell(self.pair.name, label, paper, closed, self.virtual.speedup(decoding), runtime, of_simulated)

    def length(self, label: str, row: str, decoding: Decoding, paper: float | None, closed: float) -> Cell:
        """Of a run up to a correction or bonus, it included."""
        samples = self._samples(row)
        runs = sum(s.runs for s in samples)
        runtime = 1 + sum(s.accepted for s in samples) / runs if runs else None
        return Cell(
            self.pair.name, label, paper, closed, self.virtual.totals(decoding).mean_acceptance_length or 0.0, runtime
        )

    def _samples(self, row: str) -> list[Sample]:
        return [s for s in self.measured.samples if s.row == row] if self.measured else []

    def _rates(self, row: str) -> list[float]:
        return [s.rate for s in self._samples(row) if s.rate]


def _methods(of: _Columns) -> list[Cell]:
    pair, a, c = of.pair, of.acceptance, of.pair.window
    known = pair.published.speedup
    return [
        of.speed(f"sd, gamma {of.gamma}", SD, Decoding("sd", "fixed", of.gamma), known.get("sd"), _sd(of)),
        of.speed(f"pearl, fixed({c})", FIXED, Decoding("pearl", "fixed", c), known.get("pearl"), _pearl(pair, a, c)),
        of.speed("pearl, stream", PEARL, Decoding("pearl"), known.get("pearl"), None),
    ]


def _sd(of: _Columns) -> float:
    return theory.sd_improvement(of.acceptance, of.gamma, 1 / of.pair.c)


def _pearl(pair: Pair, a: float, c: int) -> float:
    return theory.pearl_improvement(a, c, pair.c)


def _ablations(of: _Columns) -> list[Cell]:
    pair, a, c = of.pair, of.acceptance, of.pair.window
    known = pair.published.speedup
    closed = {
        NO_PRE: theory.no_pre_verify_improvement(a, c, pair.c),
        NO_POST: theory.no_post_verify_improvement(a, c, pair.c),
    }
    cells = [of.speed(n, n, Decoding(n, "fixed", c), known.get(n), value) for n, value in closed.items()]
    full = of.speed(f"pearl, fixed({c})", FIXED, Decoding("pearl", "fixed", c), known.get("pearl"), _pearl(pair, a, c))
    return [*cells, full]


def _lengths(of: _Columns) -> list[Cell]:
    a, c, known = of.acceptance, of.pair.window, of.pair.published.mean_accepted
    sd = Decoding("sd", "fixed", of.gamma)
    return [
        of.length(f"sd, gamma {of.gamma}", SD, sd, known.get("sd"), theory.sd_tokens_per_step(a, of.gamma)),
        of.length(
            f"pearl, fixed({c})", FIXED, Decoding("pearl", "fixed", c), known.get("pearl"), theory.run_committed(a)
        ),
    ]


def _sweep(of: _Columns) -> list[Cell]:
    pair, c = of.pair, of.pair.window
    return [
        of.speed(
            f"fixed({w})",
            FIXED if w == c else _fixed(w),
            Decoding("pearl", "fixed", w),
            pair.published.windows.get(w),
            _pearl(pair, of.acceptance, w),
        )
        for w in _windows(pair)
    ]


_FILL: dict[str, Callable[[_Columns], list[Cell]]] = {"1": _methods, "3": _ablations, "5": _lengths, "6": _sweep}


def document(done: Sequence[Emulated]) -> dict[str, Any]:
    """Tables as lists of rows, and the settings of the pairs with all texts."""
    names = [name for name in TABLES if any(name in one.tables for one in done)]
    return {
        "tables": {name: [asdict(cell) for one in done for cell in one.tables[name]] for name in names},
        "pairs": [one.as_dict() for one in done],
    }
