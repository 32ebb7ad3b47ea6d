"""Runs the studies of other papers (`studies`) and puts their rows in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from math import exp, sqrt
from statistics import fmean, pstdev
from typing import Any

import torch

from pearl.config import EngineConfig, SamplingParams
from pearl.lab import Watcher
from pearl.lab.bench.figures import Figures, Surprise, figures
from pearl.lab.bench.rows import PAIR, Row
from pearl.lab.bench.runner import Plan, measure
from pearl.lab.bench.systems import devices_of
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments import mjgd
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.papers.figures import Figure
from pearl.lab.papers.page import Table
from pearl.lab.papers.studies import Study, StudyRow
from pearl.metrics import Statistics
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner
from pearl.worker.build import make_runner
from pearl.worker.placement import place

COLUMNS = (
    *("row", "theirs", "over ar", "tokens a step", "accepted", "tokens a run", "rejected: expected", "bias"),
    "perplexity",
)


def run_study(
    study: Study, tasks: Sequence[Task], tokens: int, watcher: Watcher, config: EngineConfig | None = None
) -> list[dict[str, Any]]:
    """Decode the first turn of each task with each row of the study, in turns. For JSON, one dictionary a row.

    `config`: of the pair; None: the embedded one.
    """
    config = config or EngineConfig()
    target, draft = devices_of(config)
    rows = [
        Row(row.label, PAIR, target | draft, row.decoding, SamplingParams(**row.sampling, max_tokens=tokens), row.base)
        for row in study.rows
    ]
    tasks = [replace(task, turns=task.turns[:1]) for task in tasks]
    plan = Plan(config, rows, tasks, SamplingParams(seed=0, max_tokens=tokens))
    measured = measure(plan, watcher)
    surprise, more = None, list[dict[str, Any]]()
    if study.joint:
        runner, eos = make_runner(config.model("target"), place(config, "target")), load_tokenizer(config.target)[1].eos
        prompts = list(dict.fromkeys(text.prompt for text in measured.texts))
        surprise = Surprise(config, runner)
        more = _joint_rows(runner, prompts, study.joint, tokens, eos, watcher)
    found = {one.name: one for one in figures(plan, measured, surprise)}
    texts = {row.label: [t.statistics for t in measured.texts if t.row == row.label] for row in study.rows}
    return [row_document(row, found[row.label], texts[row.label]) for row in study.rows if row.label in found] + more


def _joint_rows(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    tokens: int,
    eos: Sequence[int],
    watcher: Watcher,
) -> list[dict[str, Any]]:
    """Rows of the target alone by joint greedy decoding, `counts` tokens a step, with the perplexity of its texts."""
    watcher.begin("joint greedy decoding", len(counts) * len(prompts))
    rows = []
    for count in counts:
        label, texts = f"joint greedy, {count} a step", []
        for prompt in prompts:
            with torch.inference_mode():
                texts.append(mjgd.decode(runner, prompt, tokens, count, eos))
            watcher.advance(1, label)
        surprise, length = sum(one.surprise for one in texts), sum(len(one.tokens) for one in texts)
        perplexity = exp(surprise / length) if length else None
        rows.append({"label": label, "paper": "falls with the number", "texts": len(texts), "perplexity": perplexity})
    return rows


def row_document(row: StudyRow, found: Figures, texts: Sequence[Statistics]) -> dict[str, Any]:
    """Rejections, their expected number and its standard deviation are sums over the texts; bias is per position."""
    judged = sum(one.num_judged_draft_tokens for one in texts)
    lengths = [k for one in texts for k, n in one.run_histogram.items() for _ in range(n)]
    known = [one for one in texts if one.expected_rejections is not None]
    return {
        "label": row.label,
        "paper": row.paper,
        "texts": found.texts,
        "speedup": found.speedup and list(astuple(found.speedup)),
        "tokens_per_step": found.tokens_per_step,
        "acceptance": found.acceptance,
        "run": [fmean(lengths), pstdev(lengths)] if lengths else None,
        "judged": judged,
        "rejected": sum(one.num_rejections for one in known) if known else None,
        "expected": sum(one.expected_rejections or 0.0 for one in known) if known else None,
        "sd": sqrt(sum((one.expected_rejections_sd or 0.0) ** 2 for one in known)) if known else None,
        "bias": sum(one.bias or 0.0 for one in known) / judged if known and judged else None,
        "perplexity": found.perplexity and found.perplexity.value,
    }


_SWEEPS = {  # label of a row of MJSD's study, with its value; what the value is; that of the row without one
    r"sd, joint(?:, tau ([\d.]+))?": ("tau", 0.1),
    r"sd, joint(?:, (\d+) beams)?": ("beams", 8.0),
    r"sd, joint(?:, blocks of (\d+))?": ("block length", 4.0),
    r"joint greedy, (\d+) a step": ("tokens decoded jointly", 0.0),
}


def sweeps(name: str, found: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Of MJSD's study: perplexity and speed by what is varied (its table 3 and its figures of tau, and of MJGD)."""
    drawn = []
    for pattern, (what, usual) in _SWEEPS.items() if name == "mjsd" else ():
        lines: dict[str, list[tuple[float, float]]] = {"perplexity": [], "times as fast as ar": []}
        for one in found:
            if (match := re.fullmatch(pattern, one["label"])) is None:
                continue
            value = float(match[1] or usual)
            if one.get("perplexity") is not None:
                lines["perplexity"].append((value, one["perplexity"]))
            if one.get("speedup"):
                lines["times as fast as ar"].append((value, one["speedup"][0]))
        shown = {label: sorted(points) for label, points in lines.items() if points}
        drawn.append(Figure(f"mjsd-{what.replace(' ', '-')}", f"Joint decoding by {what}", what, "", shown))
    return drawn


def in_words(study: Study, found: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of a study as a table. Rows of joint greedy decoding lack keys."""
    return Table(study.title, COLUMNS, [_words(one) for one in found], [study.differs, f"Left out: {study.left_out}"])


def _words(one: Mapping[str, Any]) -> list[str]:
    def number(name: str, digits: int = 2) -> str:
        return "" if one.get(name) is None else f"{one[name]:.{digits}f}"

    return [
        one["label"],
        one["paper"],
        str(Estimate(*one["speedup"])) if one.get("speedup") else "",
        number("tokens_per_step"),
        number("acceptance"),
        "{:.1f}, sd {:.1f}".format(*one["run"]) if one.get("run") else "",
        "" if one.get("expected") is None else "{rejected}: {expected:.1f}, sd {sd:.1f}, of {judged}".format(**one),
        number("bias", 3),
        number("perplexity"),
    ]
