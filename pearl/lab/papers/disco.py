"""DISCO (Mamou et al. 2024), "Dynamic speculation lookahead": static speculation lengths, and the oracle's."""

from __future__ import annotations

from typing import Any

from pearl.config import DecodingConfig
from pearl.lab.bench.rows import AR, PUBLISHED
from pearl.lab.papers.study import Study, StudyRow


def _sd(label: str, paper: str = "", **settings: Any) -> StudyRow:
    return StudyRow(f"sd, {label}", DecodingConfig(method="sd", **settings), paper=paper)


STUDY = Study(
    "DISCO (Mamou et al. 2024), tables 1 and 2, HumanEval: static speculation lengths, and the oracle's",
    [
        StudyRow(AR, DecodingConfig(method=AR), paper="1.00"),
        _sd("gamma 5", "static SL-5: 1.63", gamma=5),
        *(_sd(f"gamma {gamma}", "static SL-opt: 1.63", gamma=gamma) for gamma in (1, 2, 3)),
        _sd("heuristic", "dynHeur: less than SL-5", draft_stop="heuristic"),
        _sd("threshold 0.4", draft_stop="threshold"),
        StudyRow("pearl, runs", DecodingConfig(**PUBLISHED), paper="oracle SL: 14.7 tokens, sd 42.6"),
    ],
    "Theirs are StarCoder 15B with 168M on one A100; ours is the embedded pair, greedy, whose best length is one of 1 "
    "to 3. An oracle drafts what is accepted between two rejections: the tokens of a run.",
    "DISCO's classifier, trained for a pair, and the oracle, on recorded texts: pearl simulate stops has both.",
)
