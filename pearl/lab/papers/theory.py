"""Yin et al. 2024, "A theoretical perspective for speculative decoding algorithm": rejections and bias."""

from __future__ import annotations

from typing import Any

from pearl.config import DecodingConfig
from pearl.lab.bench.rows import AR, PUBLISHED
from pearl.lab.papers.study import Study, StudyRow

_SAMPLED: dict[str, Any] = {"temperature": 1.0}


def _row(label: str, paper: str, **settings: Any) -> StudyRow:
    return StudyRow(label, DecodingConfig(**PUBLISHED | settings), _SAMPLED, paper=paper)


STUDY = Study(
    "Yin et al. 2024, theorem 1 and figure 4: rejections and bias of rules that relax acceptance",
    [
        StudyRow(AR, DecodingConfig(method=AR), _SAMPLED),
        _row("ratio", "bias 0, rejections: the sum of TVs", rule="ratio"),
        *(
            _row(f"batch, {m} candidates", "bias 0, fewer rejections", rule="batch", candidates=float(m))
            for m in (2, 4, 8)
        ),
        *(
            _row(f"opt, epsilon {e:g}", "bias + rejected = TV a position", rule="opt", epsilon=e)
            for e in (0.02, 0.1, 0.3)
        ),
        _row("uno, epsilon 0.1", "more bias than opt", rule="uno", epsilon=0.1),
    ],
    "Theirs are Markov chains without printed values; ours is the embedded pair at temperature 1, in which the text, "
    "and with it the TV, depends on the rule.",
    "Tables 1 and 2 (win rates) need reward models; figures 2 to 4, on chains: the tests compare them with theory.",
)
