"""Makes rows and plans of a benchmark of toy models."""

from collections.abc import Sequence
from typing import Any

from pearl import SamplingParams
from pearl.config import EngineConfig, RequestOptions
from pearl.lab.bench.rows import Row
from pearl.lab.bench.runner import Plan
from pearl.lab.bench.tasks import Task


def row_of(method: str, name: str = "", **settings: Any) -> Row:
    return Row(name or method, RequestOptions(method=method, **settings))


def plan_of(rows: Sequence[Row], some: Sequence[Task] = (), **more: Any) -> Plan:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=20)
    return Plan(EngineConfig(target="toy", draft="toy"), rows, some, params, raw=True, **more)
