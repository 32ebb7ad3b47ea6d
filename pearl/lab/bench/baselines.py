"""The paper's baselines that can be run here: guesses from the text so far, on the embedded target.

Lookahead decoding, Ouroboros and DistillSpec need code or weights that are not here.  Nearest to the first, for they
need no draft model either, are prompt lookup (`generate` of `transformers`) and method `ngram`.  Each is compared with
plain decoding by the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pearl.config import EngineConfig, SamplingParams
from pearl.lab.bench.run import AR, NGRAM, Plan, Watcher, measure, rows_for
from pearl.lab.bench.summary import figures
from pearl.lab.bench.tasks import Task

GENERATE, LOOKUP = "generate", "generate, prompt lookup"
_BASES = {NGRAM: AR, LOOKUP: GENERATE}
_STARTING = 30.0  # seconds
_SECONDS_A_TOKEN = 0.2  # of all four together, about


@dataclass(frozen=True)
class Baseline:
    """What to decode. `tokens`: of an answer at most."""

    tasks: Sequence[Task]
    tokens: int


def measured_baselines(asked: Baseline, watcher: Watcher) -> list[dict[str, Any]]:
    """Decodes the tasks greedily, methods in turns. For JSON: of each method its speed over its base, as `Figures`."""
    config = EngineConfig()
    rows = [row for row in rows_for(config, baselines=True) if row.name in {*_BASES, *_BASES.values()}]
    plan = Plan(config, rows, asked.tasks, SamplingParams(temperature=0.0, seed=0, max_tokens=asked.tokens))
    measured, found = measure(plan, watcher), []
    for method, base in _BASES.items():
        one = next(row for row in figures(plan, measured, base) if row.name == method)
        found.append({"method": method, "base": base} | asdict(one))
    return found


def expected_seconds(asked: Baseline) -> float:
    turns = sum(len(task.turns) for task in asked.tasks)
    return _STARTING + turns * asked.tokens * _SECONDS_A_TOKEN if turns else 0.0
