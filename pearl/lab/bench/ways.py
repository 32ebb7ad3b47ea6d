"""Ways to decode, named in a line, side by side: what each gains, and what it costs in bias, perplexity and energy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pearl.config import DecodingConfig, EngineConfig
from pearl.errors import ConfigError
from pearl.lab.bench.interval import Interval, bootstrapped
from pearl.lab.bench.machine import Taken, hardware
from pearl.lab.bench.run import AR, Measured, Plan, Row, Sample, Text
from pearl.lab.bench.summary import Figures, figures
from pearl.lab.bench.systems import devices_of
from pearl.models.runner import ModelRunner, feed_chain
from pearl.spec.methods import AS_PUBLISHED
from pearl.spec.rules import RULES
from pearl.worker.build import make_runner, place

PUBLISHED = "published"  # short for method pearl with AS_PUBLISHED
DEFAULT = (
    "sd",
    "sd,rule=coupled",
    "sd,draft_stop=heuristic",
    PUBLISHED,
    f"{PUBLISHED},rule=batch",
    f"{PUBLISHED},rule=spectr",
    *(f"{PUBLISHED},rule={rule},epsilon={epsilon}" for rule in ("opt", "uno") for epsilon in (0.02, 0.1)),
    "sd,rule=bild,draft_stop=threshold",
    f"{PUBLISHED},rule=joint",
    "pearl",
    "pearl,rule=coupled",
    "ngram",
    "auto",
)
_PIECE = 64  # positions of the target in one forward: a row spans the vocabulary


def parse(text: str) -> DecodingConfig:
    """`METHOD,NAME=VALUE,...`: a method, or `published`, and settings of `DecodingConfig`. Raises `ConfigError`."""
    method, *settings = text.split(",")
    values: dict[str, Any] = {"method": "pearl", **AS_PUBLISHED} if method == PUBLISHED else {"method": method}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{text!r}: write METHOD,NAME=VALUE, such as pearl,rule=opt,epsilon=0.1")
        values[name.strip().replace("-", "_")] = _number(value)
    try:
        return DecodingConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def rows_of(config: EngineConfig, ways: Iterable[str]) -> list[Row]:
    """`ar`, and a row for each way. Raises `ConfigError` for one that is named twice or cannot be."""
    target, draft = devices_of(config)
    rows = [Row(AR, "pair", target, DecodingConfig(method="ar"))]
    for way in ways:
        decoding = parse(way)
        if any(row.name == way for row in rows):
            if way != AR:
                raise ConfigError(f"{way!r} is named twice")
            continue
        alone = decoding.method in (AR, "ngram")
        rows.append(Row(way, "pair", target if alone else target | draft, decoding))
    return rows


@dataclass(frozen=True)
class Compared:
    """The figures of one way; see `summary.Figures` for those that are there too.

    Attributes:
        exact: whether its text has the target's distribution.
        bias: total variation distance between what was committed and the target's distribution, a committed token.
        perplexity: of the text under the target, at temperature 1 and unfiltered.
        energy: joules a token of all devices; None where the machine does not tell.
    """

    name: str
    rule: str
    exact: bool
    texts: int
    tokens: int
    rate: Interval | None
    speedup: Interval | None
    acceptance: float | None
    tokens_per_step: float | None
    bias: Interval
    perplexity: Interval | None
    energy: Interval | None


def compared(plan: Plan, measured: Measured, surprise: Callable[[Text], float] | None = None) -> list[Compared]:
    """The figures of each row of the plan that has any. `surprise`: see `Surprise`; None: no perplexity."""
    return [
        _compared(
            next(row for row in plan.rows if row.name == one.name),
            one,
            [sample for sample in measured.samples if sample.row == one.name],
            [text for text in measured.texts if text.row == one.name],
            surprise,
        )
        for one in figures(plan, measured)
    ]


def _compared(
    row: Row, one: Figures, samples: Sequence[Sample], texts: Sequence[Text], surprise: Callable[[Text], float] | None
) -> Compared:
    rule = RULES[row.decoding.rule_in_use]
    drafts = row.decoding.method not in (AR, "ngram")  # the others draw from the target alone
    told = [(surprise(text), len(text.tokens)) for text in texts if text.tokens] if surprise else []
    measured = [(sample.joules, sample.tokens) for sample in samples if sample.joules is not None and sample.tokens]
    return Compared(
        name=row.name,
        rule=rule.name if drafts else "",
        exact=rule.is_exact or not drafts,
        texts=one.texts,
        tokens=one.tokens,
        rate=one.rate,
        speedup=one.speedup,
        acceptance=one.acceptance,
        tokens_per_step=one.tokens_per_step,
        bias=bootstrapped([(sample.bias, sample.tokens) for sample in samples], _ratio),
        perplexity=bootstrapped(told, lambda items: math.exp(_ratio(items))) if told else None,
        energy=bootstrapped(measured, _ratio) if len(measured) == len(samples) else None,
    )


def _ratio(items: Sequence[tuple[float, int]]) -> float:
    return sum(value for value, _ in items) / max(1, sum(count for _, count in items))


class Surprise:
    """How unlikely the target finds texts, by its own forward in this process. Each text is read once."""

    def __init__(self, config: EngineConfig, runner: ModelRunner | None = None) -> None:
        self._runner = runner or make_runner(config.model("target"), place(config, "target"))
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def __call__(self, text: Text) -> float:
        """Minus the log probability of its tokens, nats: of the row itself, at temperature 1."""
        key = (text.prompt, text.tokens)
        if key not in self._known:
            self._known[key] = self._read(*key)
        return self._known[key]

    @torch.inference_mode()
    def _read(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        self._runner.rollback(0)
        if len(prompt) > 1:
            feed_chain(self._runner, prompt[:-1], 0)
        fed, total = [prompt[-1], *tokens[:-1]], 0.0
        for first in range(0, len(fed), _PIECE):
            piece, said = fed[first : first + _PIECE], tokens[first : first + _PIECE]
            rows = torch.log_softmax(feed_chain(self._runner, piece, len(piece)).double(), -1)
            total -= float(rows[torch.arange(len(said)), torch.tensor(said, device=rows.device)].sum())
        return total


def document(plan: Plan, measured: Measured, found: Sequence[Compared], seconds: float, taken: Taken) -> dict[str, Any]:
    """For JSON."""
    return {
        "kind": "compare",
        "settings": {
            "engine": plan.config.model_dump(),
            "sampling": plan.params.model_dump(),
            "ways": {row.name: row.decoding.in_use().model_dump() for row in plan.rows},
            "sets": {name: sum(task.set == name for task in plan.tasks) for name in {t.set: 0 for t in plan.tasks}},
        },
        "hardware": hardware(),
        "seconds": seconds,
        **asdict(taken),
        "energy_of": measured.energy_of,
        "gamma": {"best": measured.gamma, "tried": measured.gammas},
        "skipped": measured.skipped,
        "rows": [asdict(one) for one in found],
    }
