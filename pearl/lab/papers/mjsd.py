"""MJSD (Qin et al. 2024), "Optimized multi-token joint decoding": speed, perplexity, and joint greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

import torch

from pearl.config import DecodingConfig
from pearl.lab import Watcher
from pearl.lab.bench.rows import AR, PUBLISHED
from pearl.lab.experiments import mjgd
from pearl.lab.papers.study import Study, StudyRow
from pearl.models.runner import ModelRunner

JOINT = (1, 2, 3)  # tokens a step of joint greedy decoding
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}


def _sd(label: str, paper: str, **settings: Any) -> StudyRow:
    return StudyRow(f"sd, {label}", DecodingConfig(method="sd", **{"gamma": 4} | settings), _SAMPLING, paper=paper)


def joint_greedy(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], tokens: int, eos: Sequence[int], watcher: Watcher
) -> list[dict[str, Any]]:
    """Rows of the target alone by joint greedy decoding, with the perplexity of its texts."""
    watcher.begin("joint greedy decoding", len(JOINT) * len(prompts))
    rows = []
    for count in JOINT:
        label, texts = f"joint greedy, {count} a step", []
        for prompt in prompts:
            with torch.inference_mode():
                texts.append(mjgd.decode(runner, prompt, tokens, count, eos))
            watcher.advance(1, label)
        surprise, length = sum(one.surprise for one in texts), sum(len(one.tokens) for one in texts)
        perplexity = exp(surprise / length) if length else None
        rows.append({"label": label, "paper": "falls with the number", "texts": len(texts), "perplexity": perplexity})
    return rows


STUDY = Study(
    "MJSD (Qin et al. 2024), table 2: speed and perplexity; and joint greedy decoding of the target alone",
    [
        StudyRow(AR, DecodingConfig(method=AR), _SAMPLING, paper="greedy: 1.00; perplexity 3.74, 2.11, 2.88"),
        _sd("gamma 4", "1.63, 1.43, 1.41; 3.64, 2.13, 2.87"),
        _sd("bild, threshold 0.4", "1.52, 1.31, 1.41; 3.15, 1.95, 2.93", rule="bild", draft_stop="threshold", gamma=10),
        _sd("spectr, 4 candidates", "1.99, 1.26, 1.15; 3.64, 2.15, 3.06", rule="spectr"),
        _sd("joint", "2.78, 2.00, 2.04; 2.06, 1.88, 2.63", rule="joint"),
        _sd("joint, 2 beams", "table 3: 0.91 of 8 beams' speed", rule="joint", width=2),
        *(StudyRow(f"pearl, {rule}", DecodingConfig(**PUBLISHED, rule=rule), _SAMPLING) for rule in ("ratio", "joint")),
    ],
    "Theirs are Llama 68M with Llama 2 13B on an L40 (and OPT 125M with 13B), on ChatGPT-Prompt, ChatAlpaca and "
    "CNN-Dailymail; ours is the embedded pair. Top-k 20, then top-p 0.9, blocks of 4, 8 beams, tau 0.1, as theirs. "
    "Their SpecTr drafts several whole sequences; ours several tokens where the text has left what was drafted. "
    "Perplexity is by the target's own rows, unfiltered.",
    "OPT's columns; energy.",
    joint_greedy,
)
