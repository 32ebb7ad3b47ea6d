"""Measures what predicted outputs gain: `python scripts/bench_prediction.py [TEXTS] [TOKENS]`.

Prompts of `edits` are answered by the embedded target alone, with its n-grams, and with the prompt's function as the
prediction, too; then with the text itself as the prediction, as of a text that is written again.  The ways alternate,
text by text, and all texts must be equal.  Compared is the target's processor time, which other work on the machine
disturbs less than the clock.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pearl import Engine, SamplingParams
from pearl.engine.stream import Result
from pearl.lab.bench.tasks import read_tasks

FIRST = 10  # prompts that the first chances of predicted tokens were measured on
FUNCTION = re.compile("```python\n(.*?)```", re.DOTALL)


class Row(NamedTuple):
    """One text: its processor time, and its tokens a step."""

    seconds: float
    tokens_per_step: float


def processor_seconds(pid: int) -> float:
    """Return the time that a process has computed so far, in user and in system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answer(engine: Engine, prompt: str, params: SamplingParams) -> tuple[Result, Row]:
    assert engine.target_worker is not None
    pid = engine.target_worker.pid
    before = processor_seconds(pid)
    with engine.stream(prompt, params, raw=False) as stream:
        for _ in stream:
            pass
    tokens_per_step = stream.result.statistics.tokens_per_step
    assert tokens_per_step is not None, "a text has steps"
    return stream.result, Row(processor_seconds(pid) - before, tokens_per_step)


def rows_of(engine: Engine, prompt: str, params: SamplingParams) -> dict[str, Row]:
    """Return a row for each way of writing the answer to a prompt, whose prefill is not measured."""
    answer(engine, prompt, params.changed(max_tokens=4))
    alone, row = answer(engine, prompt, params.changed(method="ar"))
    function = FUNCTION.search(prompt)
    assert function is not None
    ways = {
        "n-grams": params,
        "the function predicted": params.changed(prediction=function[1]),
        "the text predicted": params.changed(prediction=alone.text),
    }
    rows = {"alone": row}
    for name, way in ways.items():
        result, rows[name] = answer(engine, prompt, way)
        assert result.tokens == alone.tokens, "a prediction changes no text"
    return rows


def median(values: Iterable[float]) -> str:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main(num_texts: int = 6, max_tokens: int = 96) -> None:
    tasks = read_tasks("edits", None, FIRST + num_texts)
    params = SamplingParams(method="ngram", temperature=0, max_tokens=max_tokens)
    measured: list[dict[str, Row]] = []
    with Engine(draft="none") as engine:
        rows_of(engine, tasks[0].turns[0], params)  # warms up
        for task in tasks[FIRST:]:
            rows = rows_of(engine, task.turns[0], params)
            measured.append(rows)
            print(task.number, rows, flush=True)
    for name in measured[0]:
        speedup = median(rows["alone"].seconds / rows[name].seconds for rows in measured)
        tokens_per_step = median(rows[name].tokens_per_step for rows in measured)
        print(f"{name}: {speedup} times as fast, {tokens_per_step} tokens a step")


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*arguments)
