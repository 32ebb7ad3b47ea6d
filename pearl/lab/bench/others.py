"""Tables of other papers, as far as rules and methods that exist can fill them: on the embedded pair, in real runs.

Their models and data are not here.  So a figure of theirs and one of ours stand side by side to be compared in kind,
not in size, and each study says what differs and what is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from statistics import fmean, pstdev
from typing import Any

import torch

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.lab.bench.interval import median_of
from pearl.lab.bench.run import PUBLISHED, Text, Watcher
from pearl.lab.bench.systems import OurSystem
from pearl.lab.bench.tasks import Task
from pearl.lab.bench.ways import Surprise
from pearl.lab.experiments import mjgd
from pearl.metrics import Statistics
from pearl.models.tokenizers import load_tokenizer
from pearl.protocol.events import Phase
from pearl.worker.build import make_runner, place

_GREEDY: dict[str, Any] = {"temperature": 0.0}
_WARP: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.7}
_MJSD: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
_WARM_UP = 16  # tokens
JOINT = (1, 2, 3)  # tokens a step of joint greedy decoding


@dataclass(frozen=True)
class Row:
    """A way to decode. `paper`: what that paper says of it; `base`: label of the row that it is compared with."""

    label: str
    decoding: DecodingConfig
    sampling: Mapping[str, Any] = field(default_factory=lambda: _GREEDY)
    base: str = "ar"
    paper: str = ""


@dataclass(frozen=True)
class Study:
    """`differs`: from theirs, in words; `left_out`: what nothing here can fill; `reads`: whether the target is to read
    what was written, and to write some itself by joint greedy decoding.
    """

    title: str
    rows: Sequence[Row]
    differs: str
    left_out: str
    reads: bool = False


def _rule(rule: str, **parameters: float) -> DecodingConfig:
    settings: dict[str, Any] = {**PUBLISHED, **parameters}
    return DecodingConfig(rule=rule, **settings)


def _sd(**settings: Any) -> DecodingConfig:
    return DecodingConfig(method="sd", **settings)


def _stopping(policy: str) -> DecodingConfig:
    return DecodingConfig(method="sd", draft_stop=policy)


_AR = DecodingConfig(method="ar")
_SAMPLED: dict[str, Any] = {"temperature": 1.0}
STUDIES = {
    "theory": Study(
        "Yin et al. 2024, theorem 1 and figure 4: rejections and bias of rules that relax acceptance",
        [
            Row("ar", _AR, _SAMPLED),
            Row("ratio", _rule("ratio"), _SAMPLED, paper="bias 0, rejections: the sum of TVs"),
            *(
                Row(f"batch, {m} candidates", _rule("batch", candidates=m), _SAMPLED, paper="bias 0, fewer rejections")
                for m in (2, 4, 8)
            ),
            *(
                Row(f"opt, epsilon {e:g}", _rule("opt", epsilon=e), _SAMPLED, paper="bias + rejected = TV a position")
                for e in (0.02, 0.1, 0.3)
            ),
            Row("uno, epsilon 0.1", _rule("uno", epsilon=0.1), _SAMPLED, paper="more bias than opt"),
        ],
        "Theirs are Markov chains without printed values; ours is the embedded pair at temperature 1, in which the "
        "text, and with it the TV, depends on the rule.",
        "Tables 1 and 2 (win rates) need reward models; figures 2 to 4, on chains: pearl simulate rejections.",
    ),
    "disco": Study(
        "DISCO (Mamou et al. 2024), tables 1 and 2, HumanEval: static speculation lengths, and the oracle's",
        [
            Row("ar", _AR, paper="1.00"),
            Row("sd, gamma 5", DecodingConfig(method="sd", gamma=5), paper="static SL-5: 1.63"),
            *(
                Row(f"sd, gamma {gamma}", DecodingConfig(method="sd", gamma=gamma), paper="static SL-opt: 1.63")
                for gamma in (1, 2, 3)
            ),
            Row("sd, heuristic", _stopping("heuristic"), paper="dynHeur: less than SL-5"),
            Row("sd, threshold 0.4", _stopping("threshold")),
            Row("pearl, runs", DecodingConfig(**PUBLISHED), paper="oracle SL: 14.7 tokens, sd 42.6"),
        ],
        "Theirs are StarCoder 15B with 168M on one A100; ours is the embedded pair, greedy, whose best "
        "length is one of 1 to 3. An oracle drafts what is accepted between two rejections: the tokens of a run.",
        "DISCO's classifier, trained for a pair, and the oracle, on recorded texts: pearl simulate stops has both.",
    ),
    "sssd": Study(
        "SSSD (Marzollo et al. 2024), prose: guesses without a draft model, one request at a time",
        [
            Row("ar", _AR, paper="1.00"),
            Row("ngram", DecodingConfig(method="ngram"), paper="2.05 to 2.61"),
            Row("ar, temperature 1", _AR, _WARP, base="ar, temperature 1"),
            Row(
                "ngram, temperature 1",
                DecodingConfig(method="ngram"),
                _WARP,
                base="ar, temperature 1",
                paper="acceptance 1 to 2% lower",
            ),
        ],
        "Theirs are Llama 2 7B and Llama 3 8B on an Ascend 910B4 with a datastore of conversations; ours is the "
        "embedded target on one core, guessing from prompt and own text, and from --datastore where it is given. Top-k "
        "50 and top-p 0.7, as theirs.",
        "Batches of 8 to 64 requests.",
    ),
    "mjsd": Study(
        "MJSD (Qin et al. 2024), table 2: speed and perplexity; and joint greedy decoding of the target alone",
        [
            Row("ar", _AR, _MJSD, paper="greedy: 1.00; perplexity 3.74, 2.11, 2.88"),
            Row("sd, gamma 4", _sd(gamma=4), _MJSD, paper="1.63, 1.43, 1.41; 3.64, 2.13, 2.87"),
            Row(
                "sd, bild, threshold 0.4",
                _sd(rule="bild", draft_stop="threshold", gamma=10),
                _MJSD,
                paper="1.52, 1.31, 1.41; 3.15, 1.95, 2.93",
            ),
            Row(
                "sd, spectr, 4 candidates",
                _sd(rule="spectr", gamma=4),
                _MJSD,
                paper="1.99, 1.26, 1.15; 3.64, 2.15, 3.06",
            ),
            Row("sd, joint", _sd(rule="joint", gamma=4), _MJSD, paper="2.78, 2.00, 2.04; 2.06, 1.88, 2.63"),
            Row(
                "sd, joint, 2 beams",
                _sd(rule="joint", gamma=4, width=2),
                _MJSD,
                paper="table 3: 0.91 of 8 beams' speed",
            ),
            Row("pearl, ratio", _rule("ratio"), _MJSD),
            Row("pearl, joint", _rule("joint"), _MJSD),
        ],
        "Theirs are Llama 68M with Llama 2 13B on an L40 (and OPT 125M with 13B), on ChatGPT-Prompt, ChatAlpaca and "
        "CNN-Dailymail; ours is the embedded pair. Top-k 20, then top-p 0.9, blocks of 4, 8 beams, tau 0.1, as theirs. "
        "Their SpecTr drafts several whole sequences; ours several tokens where the text has left what was drafted. "
        "Perplexity is by the target's own rows, unfiltered.",
        "OPT's columns, and energy, which pearl compare tells where the machine does.",
        reads=True,
    ),
}


def study(
    name: str, tasks: Sequence[Task], tokens: int, watcher: Watcher, config: EngineConfig | None = None
) -> list[dict[str, Any]]:
    """Decodes the first turn of each task with each row of the study, in turns. For JSON, a row each.

    `config`: of the pair; None: the embedded one.
    """
    config, about = config or EngineConfig(), STUDIES[name]
    rows = about.rows
    tokenizer, _ = load_tokenizer(config.target)
    done: dict[str, list[Statistics]] = {row.label: [] for row in rows}
    texts: list[Text] = []
    system = OurSystem(config)
    try:
        watcher.begin(name, len(rows) * len(tasks))
        for row in rows:
            system.decode(row.decoding, [1, 2, 3], SamplingParams(seed=0, max_tokens=_WARM_UP, **row.sampling))
        for task in tasks:
            chat = tokenizer.apply_chat([{"role": "user", "content": task.turns[0]}])
            prompt = chat if chat is not None else tokenizer.encode(task.turns[0])
            for row in rows:
                params = SamplingParams(seed=task.number, max_tokens=tokens, **row.sampling)
                system.forget(row.decoding, prompt)
                decoded = system.decode(row.decoding, prompt, params)
                assert decoded.statistics is not None
                done[row.label].append(decoded.statistics)
                texts.append(Text(row.label, tuple(prompt), decoded.tokens))
                watcher.advance(1, f"{row.label}, {task.set} {task.number}")
    finally:
        system.close()
    found = [_figures(row, done[row.label], done[row.base]) for row in rows]
    return found + _read(config, texts, found, tokens, watcher) if about.reads else found


def _read(
    config: EngineConfig, texts: Sequence[Text], found: Sequence[dict[str, Any]], tokens: int, watcher: Watcher
) -> list[dict[str, Any]]:
    """Fills in the perplexity of what the rows wrote; returns rows of joint greedy decoding behind the same prompts."""
    runner = make_runner(config.model("target"), place(config, "target"))
    surprise, eos = Surprise(config, runner), load_tokenizer(config.target)[1].eos
    prompts = dict.fromkeys(text.prompt for text in texts)
    watcher.begin("what was written, and joint greedy decoding", len(texts) + len(JOINT) * len(prompts))
    for row in found:
        own = [text for text in texts if text.row == row["label"]]
        row["perplexity"] = _perplexity([(surprise(text), len(text.tokens)) for text in own])
        watcher.advance(len(own), row["label"])
    more = []
    for count in JOINT:
        label, written = f"joint greedy, {count} a step", []
        for prompt in prompts:
            with torch.inference_mode():
                written.append(mjgd.decode(runner, prompt, tokens, count, eos))
            watcher.advance(1, label)
        empty = _figures(Row(label, _AR, paper="falls with the number"), [], [])
        figures = {"perplexity": _perplexity([(one.surprise, len(one.tokens)) for one in written])}
        more.append(empty | figures | {"texts": len(written)})
    return more


def _perplexity(texts: Sequence[tuple[float, int]]) -> float | None:
    count = sum(tokens for _, tokens in texts)
    return exp(sum(each for each, _ in texts) / count) if count else None


def _figures(row: Row, own: Sequence[Statistics], base: Sequence[Statistics]) -> dict[str, Any]:
    ratios = [
        one.tokens_per_second / other.tokens_per_second
        for one, other in zip(own, base, strict=True)
        if one.tokens_per_second and other.tokens_per_second
    ]
    speedup = median_of(ratios) if ratios else None
    judged = sum(one.num_judged_draft_tokens for one in own)
    steps = sum(n for one in own for phase, n in one.target_steps.items() if phase != Phase.PREFILL.value)
    lengths = [int(k) for one in own for k, n in one.run_histogram.items() for _ in range(n)]
    known = [one for one in own if one.expected_rejections is not None]
    return {
        "label": row.label,
        "paper": row.paper,
        "texts": len(own),
        "speedup": None if speedup is None else [speedup.value, speedup.low, speedup.high],
        "tokens_per_step": sum(one.num_generated_tokens for one in own) / steps if steps else None,
        "acceptance": sum(one.num_accepted_draft_tokens for one in own) / judged if judged else None,
        "run": [fmean(lengths), pstdev(lengths)] if lengths else None,
        "judged": judged,
        "rejected": sum(one.num_rejections for one in known) if known else None,
        "expected": sum(one.expected_rejections or 0.0 for one in known) if known else None,
        "sd": sqrt(sum((one.expected_rejections_sd or 0.0) ** 2 for one in known)) if known else None,
        "bias": sum(one.bias or 0.0 for one in known) / judged if known and judged else None,
        "perplexity": None,
    }


COLUMNS = (
    *("row", "theirs", "over ar", "tokens a step", "accepted", "tokens a run", "rejected: expected", "bias"),
    "perplexity",
)


def in_words(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of a study, one word for each of `COLUMNS`; bias and what it adds up to are a position."""
    return [
        [
            one["label"],
            one["paper"],
            "" if one["speedup"] is None else "{:.2f} ({:.2f}-{:.2f})".format(*one["speedup"]),
            _number(one["tokens_per_step"]),
            _number(one["acceptance"]),
            "" if one["run"] is None else "{:.1f}, sd {:.1f}".format(*one["run"]),
            _rejections(one),
            _number(one["bias"], 3),
            _number(one["perplexity"]),
        ]
        for one in found
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _rejections(one: Mapping[str, Any]) -> str:
    if one["expected"] is None:
        return ""
    return f"{one['rejected']}: {one['expected']:.1f}, sd {one['sd']:.1f}, of {one['judged']}"
