"""Calibrate a pair on this machine: measure every method that `auto` can choose, on a few prompts.

For a target without a draft, these methods are the target alone, n-grams, and the target's head if
it has one.
"""

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
from pearl.metrics import Statistics
from pearl.models.checkpoints.checkpoint import is_head
from pearl.models.checkpoints.tokenizers import translation_of
from pearl.protocol.speeds import Profile
from pearl.spec.methods import DRAFTLESS, METHODS
from pearl.worker.placement import shared_gpus

_MIN_SPEEDUP = 1.02  # a method pays if its speedup over ar is above this; less may be noise


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`.

    Attributes:
        rows: figures of `ar`, of the methods that `auto` can choose, and of `auto` itself. The
            methods `ar` and `ngram`, which need no draft, also have a row on all cores of the pair.
        acceptance: accepted / judged draft tokens of `sd`; 0 without a draft.
        gamma: the window of `sd` and `ssd`, the fastest one that was tried; 0 without a draft.
        c: the window of `pearl`; 0 without a draft.
        advice, flags: the method to use, as a sentence and as command-line flags.
        profile: the measured forward times and rates, with which later engines of this pair start.
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
    """Decode the tasks with each method, and derive the advice and the profile from the figures.

    Raises `RequestError` if the texts are too short to measure, and whatever starting an engine raises.
    """
    config = config.model_copy(update={"profile": "none"})
    rows = [row for row in rows_for(config) if row.name in CALIBRATED]
    plan = Plan(config, rows, tasks, params, together=False)
    measured = measure(plan, watcher)
    by_name = {row.name: row for row in figures(plan, measured)}
    auto_samples = measured.of(AUTO)
    is_measured = bool(auto_samples) and all(row.speedup for row in by_name.values())
    acceptance = 0.0
    c = 0
    if config.has_draft:
        is_measured = is_measured and by_name[SD].acceptance is not None
        acceptance = by_name[SD].acceptance or 0.0
        c = by_name[PEARL].window
    if not is_measured:
        raise RequestError(
            "the texts ended too soon to measure by: raise max_tokens, or give other prompts"
        )
    gamma = measured.gamma or 0
    advice, flags = advise(list(by_name.values()), gamma, config)
    greedy_tokens = []
    for sample in measured.of(AR):
        for text in sample.results:
            greedy_tokens += text.tokens
    for note in (shared_gpus(config), _not_shared(config, greedy_tokens)):
        if note:
            advice += f". {note}"
    return Calibration(
        rows=tuple(by_name.values()),
        acceptance=acceptance,
        gamma=gamma,
        c=c,
        advice=advice,
        flags=flags,
        profile=_profile(auto_samples[-1].texts[-1], acceptance),
    )


def _profile(text: Statistics, acceptance: float) -> Profile:
    """Return forward times and each method's rate, from the last text of method `auto`."""
    rates = text.rates
    return Profile(
        text.t_draft,
        acceptance,
        tuple(text.t_target.items()),
        tuple(text.t_target_spread.items()),
        max(rates, key=rates.__getitem__, default=NGRAM),
        tuple((method, log(rate), 1) for method, rate in rates.items()),
    )


def _not_shared(config: EngineConfig, tokens: Sequence[int]) -> str:
    """Return a sentence on the share of `tokens` that the draft cannot propose.

    Return "" if there is no draft, if the draft is a head, or if its vocabulary is the target's.
    """
    if not config.has_draft or is_head(config.draft):
        return ""
    translation = translation_of(config.target, config.draft, config.trust_remote_code)
    if translation is None:
        return ""
    share = sum(token not in translation.shared for token in tokens) / len(tokens)
    return f"The draft has another vocabulary ({translation}): {share:.1%} of the texts' tokens it can never propose"


def advise(rows: Sequence[Figures], gamma: int, config: EngineConfig) -> tuple[str, str]:
    """Return which method to use, as a sentence and as command-line flags.

    The advice is the fastest method among those that pay, whose speedup is not noise. If no method
    pays, the advice is the target alone. The sentence also names each other method that pays and
    may be just as fast, because its confidence interval overlaps with that of the fastest method.
    """
    speedups = {}  # name of each method that pays -> its speedup
    for row in rows:
        speedup = row.speedup
        if speedup is not None and speedup.low > 1 and speedup.value > _MIN_SPEEDUP:
            speedups[row.name] = speedup
    if not speedups:
        words = "nothing is faster than the target alone here"
        if config.has_draft:
            words += ", which leaves the other device free"
        return words, "--draft none --method ar"
    name = max(speedups, key=lambda name: speedups[name].value)
    best_speedup = speedups[name]
    words = f"{name}: {best_speedup.value:.2f} times as fast as the target alone"
    ties = []
    for rival, speedup in speedups.items():
        if rival != name and speedup.high > best_speedup.low:
            ties.append(rival)
    if ties:
        words += f"; on these texts not told apart from {', '.join(ties)}"
    method, _, system = name.partition(", ")
    if method in DRAFTLESS and config.has_draft:
        words = f"no draft pays here; {words}"
    return words, _flags(method, system, gamma, config)


def _flags(method: str, system: str, gamma: int, config: EngineConfig) -> str:
    """Return the command-line flags of a method; `system` is `ALL` if it runs on all devices."""
    flags = f"--method {method}"
    if method in DRAFTLESS:
        flags = f"--draft none {flags}"
        if METHODS[method].takes_head:
            flags += f" --head {config.head}"
        if system == ALL:
            flags += f" --target-device {devices_of(config)[1].name}"
    elif method in (SD, SSD):
        flags += f" --gamma {gamma}"
    return flags
