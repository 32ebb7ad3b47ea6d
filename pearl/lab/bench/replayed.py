"""The paper's pairs emulated with recorded texts in place of coins: their forward times, a real vocabulary, real text.

What a pair of models says and how long it takes to say it are two things: recorded texts give the first, the paper's
forward times the second.  So published PEARL stands beside look-ahead, lookup and branches at speeds of models that do
not fit here, under the virtual clock and in two real processes.  Every forward lasts as long, whatever it is fed: as on
GPUs, where so few tokens take the time of reading the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.lab.bench.paper import Pair
from pearl.lab.bench.run import AHEAD, AR, NGRAM, PEARL, SD, SSD, Measured, Plan, Row, Watcher, devices_of, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments import texts
from pearl.lab.simulate import Timing
from pearl.models.recorded import RecordedTexts, read_texts
from pearl.protocol.options import RequestOptions

_NAMES = {texts.PEARL: PEARL, texts.ALL: AHEAD, texts.NGRAM: NGRAM}  # of others: what they have switched on


@dataclass(frozen=True)
class Replayed:
    """A pair with one method. Of the runtime's figures each is the median over texts, None where it did not run.

    Attributes:
        simulated, runtime: times as fast as `ar`.
        simulated_gain, runtime_gain: times as fast as `pearl` as published.
        tokens_per_step, foreseen: simulated.
        of_simulated: the runtime's speed over the simulator's on the same text: median, least and most. By the luck of
            a message that comes a moment earlier, a short text may be faster than the simulator's.
        target_busy: share of the runtime's time that the target's forwards after the prefill take at the pair's speed;
            never more than 1.
    """

    pair: str
    method: str
    simulated: float
    simulated_gain: float
    tokens_per_step: float
    foreseen: float | None
    runtime: float | None = None
    runtime_gain: float | None = None
    of_simulated: tuple[float, float, float] | None = None
    target_busy: float | None = None


def replayed(
    pair: Pair, file: Path, watcher: Watcher, *, seed: int, run: int, tokens: int, parts: bool = False
) -> list[Replayed]:
    """Simulates all texts of `file` at the pair's speeds; decodes `run` of them in two processes, up to `tokens`.

    `parts`: look-ahead, lookup and branches, each alone and two of them together, and `sd` and `ssd` at the windows
    that the simulator finds best, beside all together.
    """
    recorded = read_texts(file)
    timing = Timing(pair.t_draft, lambda fed: pair.t_target)
    ways = (*texts.ablations(), texts.NGRAM) if parts else _NAMES
    simulated = [texts.run(recorded, decoding, timing, seed) for decoding in ways]
    simulated += [texts.at_best(method, recorded, timing, seed) for method in (SD, SSD) if parts]
    names = (_NAMES.get(totals.decoding, totals.name.removeprefix("pearl, stream ")) for totals in simulated)
    done = dict(zip(names, simulated, strict=True))
    chosen = {AR: DecodingConfig(method="ar")} | {name: _settings(totals.decoding) for name, totals in done.items()}
    measured = measure(_plan(pair, recorded, file, run, tokens, chosen), watcher) if run else Measured()
    plain, published = 1 / pair.t_target, done[PEARL].tokens_per_second
    rates = {(s.row, s.task): s.rate for s in measured.samples}
    found = []
    for name, totals in done.items():
        samples = [s for s in measured.samples if s.row == name]
        busy = [s.steps * pair.t_target / s.seconds for s in samples]
        shares = sorted(s.of_simulated for s in samples if s.of_simulated is not None)
        found.append(
            Replayed(
                pair.name,
                name,
                totals.tokens_per_second / plain,
                totals.tokens_per_second / published,
                totals.tokens_per_step,
                totals.foreseen_share,
                _ratio(rates, name, AR),
                _ratio(rates, name, PEARL),
                (median(shares), shares[0], shares[-1]) if shares else None,
                median(busy) if busy else None,
            )
        )
    return found


def _ratio(rates: dict[tuple[str, int], float | None], one: str, other: str) -> float | None:
    """Median over texts of how much faster a row is than another."""
    numbers = [task for row, task in rates if row == one]
    both = [(rates.get((one, task)), rates.get((other, task))) for task in numbers]
    ratios = [rate / base for rate, base in both if rate and base]
    return median(ratios) if ratios else None


def _settings(decoding: RequestOptions) -> DecodingConfig:
    """As who decodes so in the runtime asks for it."""
    names = ("method", "window", "gamma", "rule", "look_ahead", "draft_lookup", "branches")
    return DecodingConfig(**{name: getattr(decoding, name) for name in names})


def _plan(
    pair: Pair, recorded: RecordedTexts, file: Path, run: int, tokens: int, chosen: Mapping[str, DecodingConfig]
) -> Plan:
    """Of texts from all over the file. A text is asked for by its number, and drawn with the seed it was drawn with."""
    header, spec = recorded.header, f"replay:{file}"
    config = EngineConfig(target=spec, draft=spec, target_pace=pair.t_target, draft_pace=pair.t_draft)
    target, draft = devices_of(config)
    step = max(1, len(recorded.texts) // run)
    return Plan(
        config,
        [Row(name, "pair", target | draft, decoding) for name, decoding in chosen.items()],
        [Task("recorded", number, (str(number),)) for number in range(1, len(recorded.texts) + 1, step)][:run],
        SamplingParams(seed=header.seed, max_tokens=min(tokens, header.max_tokens)),
        attempts=3,
    )


def document(done: Sequence[Replayed]) -> list[dict[str, Any]]:
    return [asdict(one) for one in done]
