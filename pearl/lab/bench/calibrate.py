"""Calibrate a pair on this machine: decode a few prompts with the target alone and with each way of method auto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.errors import RequestError
from pearl.lab.bench.figures import Figures, figures
from pearl.lab.bench.rows import (
    ALL,
    AR,
    AUTO,
    CALIBRATED,
    NGRAM,
    PEARL,
    SD,
    SSD,
    devices_of,
    rows_for,
)
from pearl.lab.bench.runner import Plan, measure
from pearl.lab.bench.tasks import Task
from pearl.models.checkpoints.checkpoint import is_head
from pearl.models.checkpoints.tokenizers import translation_of
from pearl.protocol.speeds import Profile
from pearl.spec.methods import DRAFTLESS
from pearl.worker.placement import shared_gpus

_MIN_SPEEDUP = 1.02  # over ar, for a method to pay: less may be noise of a busy machine


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`.

    Attributes:
        rows: `ar`, the ways of method auto, and auto itself; without a draft also on all cores of the pair.
        acceptance: accepted / judged draft tokens of `sd`. gamma: of `sd` and `ssd`. c: the window of `pearl`.
        advice, flags: the method to use, as a sentence and as command-line flags.
        profile: for engines started later; with the forward times, seconds.
    """

    rows: tuple[Figures, ...]
    acceptance: float
    gamma: int
    c: int
    advice: str
    flags: str
    profile: Profile


def calibrate(
    config: EngineConfig, tasks: Sequence[Task], params: RequestOptions, watcher: Watcher
) -> Calibration:
    """Raises `RequestError` if the texts are too short to measure, and whatever starting an engine raises."""
    config = config.model_copy(update={"profile": "none"})
    rows = [row for row in rows_for(config) if row.name in CALIBRATED]
    plan = Plan(config, rows, tasks, params, together=False)
    measured = measure(plan, watcher)
    found = {one.name: one for one in figures(plan, measured)}
    last = [text.statistics for row, text in measured.texts if row == AUTO]
    if (
        not last
        or any(one.speedup is None for one in found.values())
        or found[SD].acceptance is None
    ):
        raise RequestError(
            "the texts ended too soon to measure by: raise max_tokens, or give other prompts"
        )
    acceptance, gamma = found[SD].acceptance or 0.0, measured.gamma or 1
    advice, flags = advise(list(found.values()), gamma, config)
    notes = (
        shared_gpus(config),
        _not_shared(config, [text.tokens for row, text in measured.texts if row == AR]),
    )
    advice = ". ".join([advice, *filter(None, notes)])
    here, there = (tuple(times.items()) for times in (last[-1].t_target, last[-1].t_target_spread))
    rates = last[-1].rates
    ways = tuple((way, log(rate), 1) for way, rate in rates.items())
    profile = Profile(
        last[-1].t_draft,
        acceptance,
        here,
        there,
        max(rates, key=rates.__getitem__, default=NGRAM),
        ways,
    )
    return Calibration(
        tuple(found.values()), acceptance, gamma, found[PEARL].window, advice, flags, profile
    )


def _not_shared(config: EngineConfig, texts: Sequence[Sequence[int]]) -> str:
    """What a draft of another vocabulary cannot propose; "" for one with the target's."""
    has_tokens = config.has_draft and not is_head(config.draft)
    translation = (
        translation_of(config.target, config.draft, config.trust_remote_code)
        if has_tokens
        else None
    )
    if translation is None:
        return ""
    tokens = [token for text in texts for token in text]
    share = sum(token not in translation.shared for token in tokens) / len(tokens)
    return f"The draft has another vocabulary ({translation}): {share:.1%} of the texts' tokens it can never propose"


def advise(found: Sequence[Figures], gamma: int, config: EngineConfig) -> tuple[str, str]:
    """The fastest method as a sentence, with the methods whose intervals overlap with its own, and as flags."""
    speedups = {one.name: one.speedup for one in found if one.speedup is not None}
    name = max(speedups, key=lambda each: speedups[each].value)
    best = speedups[name]
    if best.low <= 1 or best.value <= _MIN_SPEEDUP:
        return "nothing is faster than the target alone here, which leaves the other device free", (
            "--draft none --method ar"
        )
    words = f"{name}: {best.value:.2f} times as fast as the target alone"
    if ties := [
        each
        for each, one in speedups.items()
        if each != name and one.high > best.low and one.low > 1
    ]:
        words += f"; on these texts not told apart from {', '.join(ties)}"
    method, _, how = name.partition(", ")
    flags = f"--method {method}"
    if method in DRAFTLESS:
        flags = f"--draft none {flags}" + (
            f" --target-device {devices_of(config)[1].name}" if how == ALL else ""
        )
        words = f"no draft pays here; {words}"
    elif method in (SD, SSD):
        flags += f" --gamma {gamma}"
    return words, flags
