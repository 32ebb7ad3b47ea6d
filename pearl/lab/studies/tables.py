"""Fills tables of other papers with real runs of a pair.

A row can be filled only if PEARL has the row's acceptance rule and decoding method. The papers'
models and data are not here. So our figures can show a paper's tendencies, but not its values. Each
study says what differs from the paper and what is left out. `studies.yaml` has the studies.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

import torch
from msgspec import Struct, yaml

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.lab.bench.figures import Figures, Surprise, figures, perplexity
from pearl.lab.bench.rows import AR, Row, parse_settings
from pearl.lab.bench.runner import Plan, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.studies import mjgd
from pearl.lab.studies.figures import Plot, Table
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a study: a method with its settings, and the paper's figure or claim.

    Attributes:
        way: the method and its settings, in the notation of `pearl bench`.
        theirs: the paper's figure or claim.
        sampling: sampling settings of the row; None for those of the study.
        base: name of the row that this row's speedup is relative to.
    """

    name: str
    way: str
    theirs: str = ""
    sampling: dict[str, int | float] | None = None
    base: str = AR


class Sweep(Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of a study that differ in one setting.

    Attributes:
        pattern: regular expression that matches the rows' names. The setting's value is what the
            expression's group matches.
        setting: name of the setting.
        usual: value of the setting in a row whose name matches without a value.
    """

    pattern: str
    setting: str
    usual: float


class Study(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a paper.

    Attributes:
        sampling: sampling settings of all rows that have none of their own.
        differs: differences from the paper's setting, in words.
        left_out: parts of the table that cannot be filled here, in words.
        joint: numbers of tokens per step. For each number there is another row: the target alone
            with joint greedy decoding. If there are any, all rows have a perplexity.
        sweeps: groups of rows that are drawn as figures.
    """

    title: str
    sampling: dict[str, int | float]
    rows: list[Entry]
    differs: str
    left_out: str
    joint: list[int] = []
    sweeps: list[Sweep] = []

    @property
    def bench_rows(self) -> list[Row]:
        rows = []
        for entry in self.rows:
            sampling: dict[str, Any] = entry.sampling or self.sampling
            rows.append(Row(entry.name, parse_settings(entry.way).changed(**sampling), entry.base))
        return rows


STUDIES = yaml.decode(
    (files("pearl.lab.studies") / "studies.yaml").read_bytes(), type=dict[str, Study]
)


def run_study(
    study: Study,
    tasks: Sequence[Task],
    tokens: int,
    watcher: Watcher,
    config: EngineConfig | None = None,
) -> list[Figures]:
    """Decode the first turn of each task with each row of the study; return the rows' figures.

    All rows decode the first task, then all decode the second, and so on.

    Args:
        tokens: most tokens of a text.
        config: the pair; by default the small pair that is part of the package.
    """
    config = config or EngineConfig()
    first_turns = [replace(task, turns=task.turns[:1]) for task in tasks]
    plan = Plan(config, study.bench_rows, first_turns, RequestOptions(seed=0, max_tokens=tokens))
    measured = measure(plan, watcher)
    if not study.joint:
        return figures(plan, measured)
    surprise = Surprise(config)
    rows = figures(plan, measured, surprise)
    prompts: dict[tuple[int, ...], None] = {}
    for sample in measured.of(AR):
        prompts[tuple(sample.results[0].prompt_tokens)] = None
    _, defaults = load_tokenizer(config.target)
    rows += _joint_rows(surprise.runner, list(prompts), study.joint, tokens, defaults.eos, watcher)
    return rows


def _joint_rows(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    tokens: int,
    eos: Sequence[int],
    watcher: Watcher,
) -> list[Figures]:
    """Return a row for each of `counts`: the target alone, with joint greedy decoding.

    `counts` are numbers of tokens per step. The rows have the perplexity of their texts, but no
    speed.
    """
    watcher.begin("joint greedy decoding", len(counts) * len(prompts))
    rows = []
    for count in counts:
        label = f"joint greedy, {count} a step"
        surprises = []
        for prompt in prompts:
            with torch.inference_mode():
                text = mjgd.decode(runner, prompt, tokens, count, eos)
            surprises.append((text.surprise, len(text.tokens)))
            watcher.advance(1, label)
        rows.append(Figures(label, texts=len(surprises), perplexity=perplexity(surprises)))
    return rows


def sweeps(study: Study, rows: Sequence[Figures]) -> list[Plot]:
    """Plot perplexity and speedup against each setting in which the rows of a sweep differ."""
    plots = []
    for sweep in study.sweeps:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            match = re.fullmatch(sweep.pattern, row.name)
            if match is None:
                continue
            setting = float(match[1] or sweep.usual)
            measured = {"perplexity": row.perplexity, "times as fast as ar": row.speedup}
            for label, estimate in measured.items():
                if estimate is not None:
                    lines.setdefault(label, []).append((setting, estimate.value))
        for points in lines.values():
            points.sort()
        name = f"mjsd-{sweep.setting.replace(' ', '-')}"
        title = f"Joint decoding by {sweep.setting}"
        plots.append(Plot(name, title, sweep.setting, "", lines))
    return plots


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "over ar": lambda row: str(row.speedup or ""),
    "tokens a step": lambda row: _number(row.tokens_per_step),
    "accepted": lambda row: _number(row.acceptance),
    "tokens a run": lambda row: _mean_and_sd(row.accepted_in_runs),
    "rejected: expected": lambda row: str(row.rejections or ""),
    "bias": lambda row: _number(row.rejections.bias if row.rejections else None, 3),
    "perplexity": lambda row: _number(row.perplexity.value if row.perplexity else None),
}


def _mean_and_sd(accepted: tuple[float, float] | None) -> str:
    if accepted is None:
        return ""
    return "{:.1f}, sd {:.1f}".format(*accepted)


def in_words(study: Study, figures: Sequence[Figures]) -> Table:
    """Return the rows of a study as a table, next to the paper's figures."""
    theirs = {entry.name: entry.theirs for entry in study.rows}
    rows = []
    for row in figures:
        cells = [column(row) for column in COLUMNS.values()]
        rows.append([row.name, theirs.get(row.name, "falls with the number"), *cells])
    notes = [study.differs, f"Left out: {study.left_out}"]
    return Table(study.title, ("row", "theirs", *COLUMNS), rows, notes)
