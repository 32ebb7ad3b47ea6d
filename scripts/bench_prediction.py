"""Measures what predicted outputs gain: `python scripts/bench_prediction.py [TEXTS] [TOKENS]`.

Each prompt of `edits` is answered by the embedded target alone, with its n-grams, and with the prompt's function as the
prediction, too; then again with the text itself as the prediction, as of a text that is written again after a small
change.  The ways alternate, text by text, and all texts must be equal.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable
from typing import NamedTuple

from pearl import Engine, SamplingParams
from pearl.engine.stream import Result
from pearl.lab.bench.tasks import read_tasks

FIRST = 10  # prompts that the first chances of predicted tokens were measured on
ROUNDS = 2
FUNCTION = re.compile("```python\n(.*?)```", re.DOTALL)


class Row(NamedTuple):
    """One text: its speed over that of the target alone, and its tokens a step."""

    speedup: float
    tokens_per_step: float


def row_of(result: Result, alone: Result) -> Row:
    assert result.tokens == alone.tokens, "a prediction changes no text"
    tokens_per_step = result.statistics.tokens_per_step
    assert tokens_per_step is not None, "a text has steps"
    return Row(alone.statistics.seconds / result.statistics.seconds, tokens_per_step)


def answer(engine: Engine, prompt: str, params: SamplingParams) -> Result:
    with engine.stream(prompt, params, raw=False) as stream:
        for _ in stream:
            pass
    return stream.result


def rows_of(engine: Engine, prompt: str, params: SamplingParams) -> dict[str, Row]:
    """Return a row for each way of writing the answer to a prompt."""
    alone = answer(engine, prompt, params.changed(method="ar"))
    function = FUNCTION.search(prompt)
    assert function is not None
    ways = {
        "n-grams": params,
        "the function predicted": params.changed(prediction=function[1]),
        "the text predicted": params.changed(prediction=alone.text),
    }
    return {name: row_of(answer(engine, prompt, way), alone) for name, way in ways.items()}


def median(values: Iterable[float]) -> str:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main(num_texts: int = 6, max_tokens: int = 96) -> None:
    tasks = read_tasks("edits", None, FIRST + num_texts)[FIRST:]
    params = SamplingParams(method="ngram", temperature=0, max_tokens=max_tokens)
    rows: dict[str, list[Row]] = {}
    with Engine(draft="none") as engine:
        for number in range(ROUNDS + 1):
            for task in tasks:
                (prompt,) = task.turns
                for name, row in rows_of(engine, prompt, params).items():
                    if number:  # the first round warms up
                        rows.setdefault(name, []).append(row)
    for name, measured in rows.items():
        speedup = median(row.speedup for row in measured)
        print(f"{name}: {speedup} times as fast", end=", ")
        print(f"{median(row.tokens_per_step for row in measured)} tokens a step")


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*arguments)
