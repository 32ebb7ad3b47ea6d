"""Studies: tables of other papers, as far as existing rules and methods fill them, in real runs of the embedded pair.

The papers' models and data are not here.  So compare their figures with ours in kind, not in size; each study says what
differs and what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from importlib import import_module
from math import sqrt
from statistics import fmean, pstdev
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.lab import Watcher
from pearl.lab.bench.figures import Figures, Surprise, figures
from pearl.lab.bench.rows import PAIR, Row
from pearl.lab.bench.runner import Plan, measure
from pearl.lab.bench.systems import devices_of
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.papers.page import Table
from pearl.metrics import Statistics
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner
from pearl.worker.build import make_runner
from pearl.worker.placement import place

GREEDY: dict[str, Any] = {"temperature": 0.0}
MoreRows = Callable[[ModelRunner, Sequence[Sequence[int]], int, Sequence[int], Watcher], list[dict[str, Any]]]
COLUMNS = (
    *("row", "theirs", "over ar", "tokens a step", "accepted", "tokens a run", "rejected: expected", "bias"),
    "perplexity",
)


@dataclass(frozen=True)
class StudyRow:
    """A way to decode. `base`: label of the row that it is compared with; `paper`: the paper's figure or claim."""

    label: str
    decoding: DecodingConfig
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    base: str = "ar"
    paper: str = ""


@dataclass(frozen=True)
class Study:
    """A table of a paper.

    Attributes:
        differs: differences from the paper's setting, in words. left_out: what cannot be filled here.
        more_rows: decodes the same prompts with the target alone (runner, prompts, max tokens, EOS, watcher), and
            returns further rows; with it all rows have a perplexity.
    """

    title: str
    rows: Sequence[StudyRow]
    differs: str
    left_out: str
    more_rows: MoreRows | None = None


def load(name: str) -> Study:
    """The study of a paper, one of `papers.STUDIES`."""
    found = import_module(f"pearl.lab.papers.{name}").STUDY
    assert isinstance(found, Study)
    return found


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
    if study.more_rows is not None:
        runner, eos = make_runner(config.model("target"), place(config, "target")), load_tokenizer(config.target)[1].eos
        prompts = list(dict.fromkeys(text.prompt for text in measured.texts))
        surprise, more = Surprise(config, runner), study.more_rows(runner, prompts, tokens, eos, watcher)
    found = {one.name: one for one in figures(plan, measured, surprise)}
    statistics = {row.label: [t.statistics for t in measured.texts if t.row == row.label] for row in study.rows}
    known = {label: [one for one in some if one is not None] for label, some in statistics.items()}
    return [row_document(row, found[row.label], known[row.label]) for row in study.rows if row.label in found] + more


def row_document(row: StudyRow, found: Figures, texts: Sequence[Statistics]) -> dict[str, Any]:
    """Rejections, their expected number and its standard deviation are sums over the texts; bias is per position."""
    judged = sum(one.num_judged_draft_tokens for one in texts)
    lengths = [int(k) for one in texts for k, n in one.run_histogram.items() for _ in range(n)]
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


def in_words(study: Study, found: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of a study as a table. Rows of `more_rows` may lack keys."""
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
