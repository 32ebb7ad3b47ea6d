"""The paper's pairs emulated with recorded texts: their forward times, with the tokens of real models.

So published PEARL stands beside look-ahead, lookup and branches at speeds of models that do not fit here, under the
virtual clock and in two real processes.  Every forward lasts equally long, whatever it is fed: as on GPUs, where
reading the weights dominates for so few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.lab.bench.rows import AHEAD, AR, NGRAM, PEARL, SD, SSD, Row
from pearl.lab.bench.runner import Measured, Plan, Watcher, devices_of, measure
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments import texts
from pearl.lab.papers.pearl import Pair
from pearl.lab.simulate import Timing
from pearl.models.recorded import RecordedTexts, read_texts
from pearl.protocol.options import RequestOptions

_NAMES = {texts.PEARL: PEARL, texts.ALL: AHEAD, texts.NGRAM: NGRAM}  # of others: what is switched on


@dataclass(frozen=True)
class Replayed:
    """A pair with one method. The runtime's figures are medians over texts, None if it did not run.

    Attributes:
        simulated, runtime: speedup over `ar`.
        simulated_gain, runtime_gain: speedup over `pearl` as published.
        tokens_per_step, foreseen: simulated.
        of_simulated: the runtime's speed over the simulator's on the same text: median, least and most. A short text
            can exceed 1, because messages arrive in another order.
        target_busy: share of the runtime's time that the target's forwards after the prefill take at the pair's speed.
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
    """Simulate all texts of `file` at the pair's speeds; decode `run` of them in two processes, up to `tokens`.

    `parts`: also each of look-ahead, lookup and branches alone and two of them together, and `sd` and `ssd` at the
    windows that the simulator finds best.
    """
    recorded = read_texts(file)
    timing = Timing(pair.t_draft, lambda fed: pair.t_target)
    decodings = (*texts.ablations(), texts.NGRAM) if parts else _NAMES
    simulated = [texts.run(recorded, decoding, timing, seed) for decoding in decodings]
    simulated += [texts.at_best(method, recorded, timing, seed) for method in (SD, SSD) if parts]
    done = {_NAMES.get(one.decoding, one.name.removeprefix("pearl, stream ")): one for one in simulated}
    chosen = {AR: DecodingConfig(method="ar")} | {name: _settings(one.decoding) for name, one in done.items()}
    measured = measure(_plan(pair, recorded, file, run, tokens, chosen), watcher) if run else Measured()
    published = done[PEARL].tokens_per_second
    found = []
    for name, totals in done.items():
        samples = [s for s in measured.samples if s.row == name]
        busy = [s.steps * pair.t_target / s.seconds for s in samples]
        shares = sorted(s.of_simulated for s in samples if s.of_simulated is not None)
        found.append(
            Replayed(
                pair=pair.name,
                method=name,
                simulated=totals.tokens_per_second * pair.t_target,
                simulated_gain=totals.tokens_per_second / published,
                tokens_per_step=totals.tokens_per_step,
                foreseen=totals.foreseen_share,
                runtime=_speedup(measured, name, AR),
                runtime_gain=_speedup(measured, name, PEARL),
                of_simulated=(median(shares), shares[0], shares[-1]) if shares else None,
                target_busy=median(busy) if busy else None,
            )
        )
    return found


def _speedup(measured: Measured, name: str, base: str) -> float | None:
    """Median over texts of the ratio of two rows' rates."""
    rates = {(s.row, s.task): s.rate for s in measured.samples if s.rate}
    ratios = [rate / rates[base, task] for (row, task), rate in rates.items() if row == name and (base, task) in rates]
    return median(ratios) if ratios else None


def _settings(decoding: RequestOptions) -> DecodingConfig:
    names = ("method", "window", "gamma", "rule", "look_ahead", "draft_lookup", "branches")
    return DecodingConfig(**{name: getattr(decoding, name) for name in names})


def _plan(
    pair: Pair, recorded: RecordedTexts, file: Path, run: int, tokens: int, chosen: Mapping[str, DecodingConfig]
) -> Plan:
    """Of texts from all over the file. The prompt of a text is its number; its seed is the recorded one."""
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
