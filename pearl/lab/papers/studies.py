"""Studies: tables of other papers, as far as existing rules and methods fill them, in real runs of a pair.

The papers' models and data are not here.  So compare their figures with ours in kind, not in size; each study says what
differs and what is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.lab import Watcher
from pearl.lab.bench.figures import Figures, Surprise, figures, perplexity
from pearl.lab.bench.rows import PUBLISHED, Row
from pearl.lab.bench.runner import Plan, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments import mjgd
from pearl.lab.papers.figures import Figure, Table
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner

GREEDY: dict[str, Any] = {"temperature": 0.0}
FILTERED: dict[str, Any] = {"top_k": 50, "top_p": 0.7}  # as SSSD's paper has it
_WARM: dict[str, Any] = {"temperature": 1.0}
_SSSD: dict[str, Any] = _WARM | FILTERED
_MJSD: dict[str, Any] = _WARM | {"top_k": 20, "top_p": 0.9}


@dataclass(frozen=True)
class Study:
    """A table of a paper.

    Attributes:
        differs: differences from the paper's setting, in words. left_out: what cannot be filled here.
        joint: further rows, the target alone by joint greedy decoding of so many tokens a step; with these all rows
            have a perplexity.
    """

    title: str
    rows: Sequence[Row]
    differs: str
    left_out: str
    joint: Sequence[int] = ()


def _row(label: str, paper: str = "", sampling: Mapping[str, Any] = GREEDY, base: str = "ar", **settings: Any) -> Row:
    return Row(label, DecodingConfig(**settings), sampling, base, paper=paper)


def _rule(label: str, paper: str, **settings: Any) -> Row:
    return _row(label, paper, _WARM, **PUBLISHED | settings)


def _mjsd(label: str, paper: str, **settings: Any) -> Row:
    return _row(f"sd, {label}", paper, _MJSD, **dict[str, Any](method="sd", gamma=4) | settings)


def _greedy(label: str, **settings: Any) -> Row:
    return _row(f"{label}, greedy", base="ar, greedy", **settings)


STUDIES = {
    "theory": Study(
        "Yin et al. 2024, theorem 1 and figure 4: rejections and bias of rules that relax acceptance",
        [
            _row("ar", "", _WARM, method="ar"),
            _rule("ratio", "bias 0, rejections: the sum of TVs", rule="ratio"),
            *(
                _rule(f"batch, {m} candidates", "bias 0, fewer rejections", rule="batch", candidates=float(m))
                for m in (2, 4, 8)
            ),
            *(
                _rule(f"opt, epsilon {e:g}", "bias + rejected = TV a position", rule="opt", epsilon=e)
                for e in (0.02, 0.1, 0.3)
            ),
            _rule("uno, epsilon 0.1", "more bias than opt", rule="uno", epsilon=0.1),
        ],
        "Theirs are Markov chains without printed values; ours is the embedded pair at temperature 1, in which the "
        "text, and with it the TV, depends on the rule.",
        "Tables 1 and 2 (win rates) need reward models.",
    ),
    "disco": Study(
        "DISCO (Mamou et al. 2024), tables 1 and 2, HumanEval: static speculation lengths, and the oracle's",
        [
            _row("ar", "1.00", method="ar"),
            _row("sd, gamma 5", "static SL-5: 1.63", method="sd", gamma=5),
            *(_row(f"sd, gamma {gamma}", "static SL-opt: 1.63", method="sd", gamma=gamma) for gamma in (1, 2, 3)),
            _row("sd, heuristic", "dynHeur: less than SL-5", method="sd", draft_stop="heuristic"),
            _row("sd, threshold 0.4", "", method="sd", draft_stop="threshold"),
            _row("pearl, runs", "oracle SL: 14.7 tokens, sd 42.6", **PUBLISHED),
        ],
        "Theirs are StarCoder 15B with 168M on one A100; ours is the embedded pair, greedy, whose best length is one "
        "of 1 to 3. An oracle drafts what is accepted between two rejections: the tokens of a run.",
        "DISCO's classifier and the oracle decode recorded texts: pearl simulate stops has both.",
    ),
    "sssd": Study(
        "SSSD (Marzollo et al. 2024), prose: guesses without a draft model, one request at a time",
        [
            _row("ar", "1.00", method="ar"),
            _row("ngram", "2.05 to 2.61", method="ngram"),
            _row("ar, temperature 1", "", _SSSD, "ar, temperature 1", method="ar"),
            _row("ngram, temperature 1", "acceptance 1 to 2% lower", _SSSD, "ar, temperature 1", method="ngram"),
        ],
        "Theirs are Llama 2 7B and Llama 3 8B on an Ascend 910B4 with a datastore of conversations; ours is the "
        "embedded target on one core, guessing from prompt and own text, and from --datastore if given. Top-k 50 and "
        "top-p 0.7, as theirs.",
        "Their datastores, and PG-19.",
    ),
    "mjsd": Study(
        "MJSD (Qin et al. 2024), table 2: speed and perplexity; and joint greedy decoding of the target alone",
        [
            _row("ar", "greedy: 1.00; perplexity 3.74, 2.11, 2.88", _MJSD, method="ar"),
            _mjsd("gamma 4", "1.63, 1.43, 1.41; 3.64, 2.13, 2.87"),
            _mjsd(
                *("bild, threshold 0.4", "1.52, 1.31, 1.41; 3.15, 1.95, 2.93"),
                rule="bild",
                draft_stop="threshold",
                gamma=10,
            ),
            _mjsd("spectr, 4 candidates", "1.99, 1.26, 1.15; 3.64, 2.15, 3.06", rule="spectr"),
            _mjsd("joint", "2.78, 2.00, 2.04; 2.06, 1.88, 2.63", rule="joint"),
            *(_mjsd(f"joint, tau {tau:g}", "", rule="joint", tau=tau) for tau in (0.0, 0.3, 0.6, 0.9)),
            *(
                _mjsd(f"joint, {width} beams", f"table 3: {share} of 8 beams' speed", rule="joint", width=width)
                for width, share in ((2, 0.91), (4, 0.98), (6, 0.98))
            ),
            *(_mjsd(f"joint, blocks of {depth}", "", rule="joint", depth=depth) for depth in (2, 6, 8)),
            *(_row(f"pearl, {rule}", "", _MJSD, **PUBLISHED, rule=rule) for rule in ("ratio", "joint")),
            _greedy("ar", method="ar"),
            _greedy("sd, gamma 4", method="sd", gamma=4),
            _greedy("sd, bild", method="sd", gamma=10, rule="bild", draft_stop="threshold"),
            _greedy("sd, joint", method="sd", gamma=4, rule="joint"),
            _greedy("pearl, bild", **PUBLISHED, rule="bild", draft_stop="threshold"),
            _greedy("pearl, joint", **PUBLISHED, rule="joint"),
        ],
        "Theirs are Llama 68M with Llama 2 13B on an L40 (and OPT 125M with 13B), on ChatGPT-Prompt, ChatAlpaca and "
        "CNN-Dailymail; ours is the embedded pair. Top-k 20, then top-p 0.9, blocks of 4, 8 beams, tau 0.1, as theirs. "
        "Greedy: at temperature 0, over greedy ar; joint greedy is MJGD, by a search that is exact. "
        "Their SpecTr drafts several whole sequences; ours several tokens where the text has left what was drafted. "
        "Perplexity is by the target's own rows, unfiltered.",
        "OPT's columns. Energy by batch is measured where the machine has a meter.",
        joint=(1, 2, 3),
    ),
}


def run_study(
    study: Study, tasks: Sequence[Task], tokens: int, watcher: Watcher, config: EngineConfig | None = None
) -> list[Figures]:
    """Decode the first turn of each task with each row of the study, in turns.

    `config`: of the pair; None: the embedded one.
    """
    config = config or EngineConfig()
    tasks = [replace(task, turns=task.turns[:1]) for task in tasks]
    plan = Plan(config, study.rows, tasks, SamplingParams(seed=0, max_tokens=tokens))
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
        varied = sorted(((float(m[1] or usual), one) for m, one in matches if m), key=lambda each: each[0])
        lines = {
            "perplexity": [(value, one.perplexity.value) for value, one in varied if one.perplexity],
            "times as fast as ar": [(value, one.speedup.value) for value, one in varied if one.speedup],
        }
        shown = {label: points for label, points in lines.items() if points}
        drawn.append(Figure(f"mjsd-{what.replace(' ', '-')}", f"Joint decoding by {what}", what, "", shown))
    return drawn


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "over ar": lambda one: str(one.speedup or ""),
    "tokens a step": lambda one: _number(one.tokens_per_step),
    "accepted": lambda one: _number(one.acceptance),
    "tokens a run": lambda one: "{:.1f}, sd {:.1f}".format(*one.accepted_in_runs) if one.accepted_in_runs else "",
    "rejected: expected": lambda one: str(one.rejections or ""),
    "bias": lambda one: _number(one.rejections.bias if one.rejections else None, 3),
    "perplexity": lambda one: _number(one.perplexity.value if one.perplexity else None),
}


def in_words(study: Study, found: Sequence[Figures]) -> Table:
    """The rows of a study as a table, beside the paper's figures."""
    theirs = {row.name: row.paper for row in study.rows}
    rows = [
        [one.name, theirs.get(one.name, "falls with the number"), *(cell(one) for cell in COLUMNS.values())]
        for one in found
    ]
    return Table(study.title, ("row", "theirs", *COLUMNS), rows, [study.differs, f"Left out: {study.left_out}"])
