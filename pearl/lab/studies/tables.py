"""Studies: tables of other papers, as far as existing rules and methods fill them, in real runs of a pair.

The papers' models and data are not here.  So compare their figures with ours in kind, not in size; each study says what
differs and what is left out.  `studies.yaml` has them.
"""

from __future__ import annotations

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
from pearl.lab.studies.figures import Figure, Table
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A row: a way to decode, as `pearl bench` takes it, and the paper's figure or claim.

    Attributes:
        sampling: None: the study's.
        base: the row that its speedup is over.
    """

    name: str
    way: str
    theirs: str = ""
    sampling: dict[str, int | float] | None = None
    base: str = AR


class Study(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a paper.

    Attributes:
        differs: differences from the paper's setting, in words. left_out: what cannot be filled here.
        joint: further rows, the target alone by joint greedy decoding of so many tokens a step; with these all rows
            have a perplexity.
    """

    title: str
    sampling: dict[str, int | float]
    rows: list[Entry]
    differs: str
    left_out: str
    joint: list[int] = []

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
    """Decode the first turn of each task with each row of the study, in turns.

    `config`: of the pair; None: the embedded one.
    """
    config = config or EngineConfig()
    tasks = [replace(task, turns=task.turns[:1]) for task in tasks]
    plan = Plan(config, study.bench_rows, tasks, RequestOptions(seed=0, max_tokens=tokens))
    measured = measure(plan, watcher)
    surprise = Surprise(config) if study.joint else None
    found = figures(plan, measured, surprise)
    if surprise is not None:
        prompts = list(dict.fromkeys(tuple(text.prompt_tokens) for _, text in measured.texts))
        eos = load_tokenizer(config.target)[1].eos
        found += _joint_rows(surprise.runner, prompts, study.joint, tokens, eos, watcher)
    return found


def _joint_rows(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    tokens: int,
    eos: Sequence[int],
    watcher: Watcher,
) -> list[Figures]:
    """Rows of the target alone by joint greedy decoding, `counts` tokens a step, with the perplexity of its texts."""
    watcher.begin("joint greedy decoding", len(counts) * len(prompts))
    rows = []
    for count in counts:
        label, read = f"joint greedy, {count} a step", []
        for prompt in prompts:
            with torch.inference_mode():
                text = mjgd.decode(runner, prompt, tokens, count, eos)
            read.append((text.surprise, len(text.tokens)))
            watcher.advance(1, label)
        rows.append(Figures(label, texts=len(read), perplexity=perplexity(read)))
    return rows


_SWEEPS = {  # label of a row of MJSD's study, with its value; what the value is; that of the row without one
    r"sd, joint(?:, tau ([\d.]+))?": ("tau", 0.1),
    r"sd, joint(?:, (\d+) beams)?": ("beams", 8.0),
    r"sd, joint(?:, blocks of (\d+))?": ("block length", 4.0),
    r"joint greedy, (\d+) a step": ("tokens decoded jointly", 0.0),
}


def sweeps(name: str, found: Sequence[Figures]) -> list[Figure]:
    """Of MJSD's study: perplexity and speed by what is varied (its table 3 and its figures of tau, and of MJGD)."""
    drawn = []
    for pattern, (what, usual) in _SWEEPS.items() if name == "mjsd" else ():
        matches = [(re.fullmatch(pattern, one.name), one) for one in found]
        varied = sorted(
            ((float(m[1] or usual), one) for m, one in matches if m), key=lambda each: each[0]
        )
        lines = {
            "perplexity": [
                (value, one.perplexity.value) for value, one in varied if one.perplexity
            ],
            "times as fast as ar": [
                (value, one.speedup.value) for value, one in varied if one.speedup
            ],
        }
        shown = {label: points for label, points in lines.items() if points}
        drawn.append(
            Figure(f"mjsd-{what.replace(' ', '-')}", f"Joint decoding by {what}", what, "", shown)
        )
    return drawn


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "over ar": lambda one: str(one.speedup or ""),
    "tokens a step": lambda one: _number(one.tokens_per_step),
    "accepted": lambda one: _number(one.acceptance),
    "tokens a run": lambda one: (
        "{:.1f}, sd {:.1f}".format(*one.accepted_in_runs) if one.accepted_in_runs else ""
    ),
    "rejected: expected": lambda one: str(one.rejections or ""),
    "bias": lambda one: _number(one.rejections.bias if one.rejections else None, 3),
    "perplexity": lambda one: _number(one.perplexity.value if one.perplexity else None),
}


def in_words(study: Study, found: Sequence[Figures]) -> Table:
    """The rows of a study as a table, beside the paper's figures."""
    theirs = {row.name: row.theirs for row in study.rows}
    rows = [
        [
            one.name,
            theirs.get(one.name, "falls with the number"),
            *(cell(one) for cell in COLUMNS.values()),
        ]
        for one in found
    ]
    return Table(
        study.title,
        ("row", "theirs", *COLUMNS),
        rows,
        [study.differs, f"Left out: {study.left_out}"],
    )
