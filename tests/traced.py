"""Runs in virtual time, t_draft 1 s, with their traces; and altered traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.trace import chrome
from pearl.trace.reading import Trace, read
from pearl.trace.recorder import part_path
from tests.replace import replace

VOCAB, PROMPT = 12, (1, 2, 3)


def simulated(
    path: Path,
    decoding: RequestOptions,
    t_target: float = 5.0,
    alpha: float = 1.0,
    tokens: int = 500,
    delay: float = 0.0,
) -> tuple[Outcome, tuple[Path, Path]]:
    """A run and the parts of its trace, target and draft, not merged."""
    target, draft = alpha_pair(VOCAB, alpha)
    executors = paired_executors(ToyRunner(VOCAB, target), ToyRunner(VOCAB, draft))
    submit = Submit(1, PROMPT, len(PROMPT) + tokens, replace(decoding, sampling=Sampling(1.0, seed=5)))
    parts = part_path(path, "target", 1), part_path(path, "draft", 2)
    return simulate(submit, *executors, Timing(1.0, lambda _: t_target, delay), parts=parts), parts


def recorded(path: Path, decoding: RequestOptions, **settings: Any) -> tuple[Outcome, Trace]:
    """A run and its trace. `settings`: of `simulated`."""
    outcome, _ = simulated(path, decoding, **settings)
    chrome.merge(path)
    return outcome, read(path)


def altered(path: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(path.read_text())
    change(document)
    to.write_text(json.dumps(document))
    return to
