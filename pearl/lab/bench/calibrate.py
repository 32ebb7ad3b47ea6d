"""Calibrate a pair on this machine: forward times, alone and with both models at work, and the speed of each method.

Times are read from traces of real texts.  Under `sd` the models take turns, so each is timed alone; under `pearl` both
work at once and compete for what their devices share: cache, memory bandwidth, power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from statistics import mean, median, quantiles
from tempfile import TemporaryDirectory

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine
from pearl.engine.request import Prompt
from pearl.errors import RequestError
from pearl.lab.bench.interval import Interval, bootstrap
from pearl.lab.bench.rows import AHEAD, ALL, AR, AUTO, NGRAM
from pearl.lab.bench.systems import devices_of
from pearl.lab.experiments.compare import OVERLAPPED, sd_at_best
from pearl.lab.experiments.recorded import interpolated, steps
from pearl.lab.experiments.workload import independent, run
from pearl.lab.simulate import Timing
from pearl.lab.theory import MOST_GAMMA
from pearl.metrics import Statistics
from pearl.protocol.options import RequestOptions
from pearl.protocol.speeds import Profile, expected_rate
from pearl.spec.methods import AS_PUBLISHED, BRANCHES, DRAFT_LOOKUP, DRAFTLESS, LOOK_AHEAD, WINDOWS
from pearl.trace.reading import FORWARDS, Slice, Trace, read
from pearl.worker.placement import shared_gpus

PROMPTS = (
    "Explain gravity to a beginner.",
    "Write a Python function that reverses a linked list.",
    "Give three tips for staying healthy.",
    "What is the difference between a list and a tuple?",
)
_ALONE = {AR: RequestOptions(AR), NGRAM: RequestOptions(NGRAM, look_ahead=LOOK_AHEAD)}
_IN_TURN = {f"sd, gamma {g}": RequestOptions("sd", "fixed", g) for g in (1, 3, 7)}  # the target is fed 2, 4, 8 tokens
_AT_ONCE = {f"pearl, {one.window}" if one.method == "pearl" else one.method: one for one in OVERLAPPED}
_WITH_GUESSES = {
    NGRAM: _ALONE[NGRAM],
    AHEAD: RequestOptions("pearl", look_ahead=LOOK_AHEAD, draft_lookup=DRAFT_LOOKUP, branches=BRANCHES),
    AUTO: RequestOptions(AUTO, rule="coupled", look_ahead=LOOK_AHEAD, draft_lookup=DRAFT_LOOKUP, branches=BRANCHES),
}
_TEXTS, _TOKENS = 20, 200  # simulated
_MIN_SPEEDUP = 1.02  # over ar, for a method to pay: less may be noise of a busy machine
_WARM_UP = 16  # tokens
_MIN_FORWARDS = 3  # of one size, for its times to count


@dataclass
class Times:
    """Times in seconds; `target` and `target_step` by number of tokens fed.

    Attributes:
        draft, target: median seconds of a forward.
        draft_step, target_step: mean seconds of a forward with all other work of its worker until the next, without
            waits.
        jitter: relative spread of forwards of one size: half the width of the range that holds their middle two thirds.
    """

    draft: float = 0.0
    target: dict[int, float] = field(default_factory=dict)
    draft_step: float = 0.0
    target_step: dict[int, float] = field(default_factory=dict)
    jitter: float = 0.0

    def timing(self) -> Timing:
        return Timing(self.draft_step, interpolated(self.target_step), jitter=self.jitter)


@dataclass(frozen=True)
class Verdict:
    """One method's speedup over `ar`, predicted and measured; None if it was not simulated, or not run."""

    method: str
    predicted: float | None
    measured: Interval | None

    @property
    def speed(self) -> float:
        """The speedup over `ar`: measured, otherwise predicted."""
        return self.measured.value if self.measured else self.predicted or 0.0

    @property
    def pays(self) -> bool:
        """Whether it is faster than `ar` by more than noise."""
        return (self.measured.low if self.measured else self.speed) > 1 and self.speed > _MIN_SPEEDUP


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`.

    Attributes:
        alone, both: times with the other model idle, and with both at work.
        acceptance: accepted / judged draft tokens.
        given: whether the caller gave `acceptance`; otherwise it was measured.
        c: the window that `pearl` chooses, tokens.
        ar: tokens per second of `ar`, measured.
        verdicts: one per method, `ar` first.
        pays_from: the lowest acceptance rate at which PEARL beats `ar`; None: it never does.
        advice, flags: the method to use, as a sentence and as command-line flags.
        profile: for engines started later.
    """

    alone: Times
    both: Times
    acceptance: float
    given: bool
    c: int
    ar: float
    verdicts: tuple[Verdict, ...]
    pays_from: float | None
    advice: str
    flags: str
    profile: Profile

    @property
    def ratio(self) -> float:
        """t_target(1) / t_draft, with both models at work."""
        return interpolated(self.both.target)(1) / self.both.draft


def calibrate(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    acceptance: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Start the pair, decode the prompts with several methods, and predict the speed of each.

    Args:
        acceptance: predict for this acceptance rate; None: for the one measured on these prompts.
        say: takes a line of progress.

    Raises `RequestError` if the texts are too short to measure, and whatever starting an engine raises.
    """
    with _texts(config, prompts, params, say) as texts:
        ar_texts, first = texts.run(AR, _ALONE[AR])
        done = {name: texts.run(name, decoding) for name, decoding in (_IN_TURN | _AT_ONCE | _WITH_GUESSES).items()}
    if not texts.judged or not _rate(ar_texts):
        raise RequestError("the texts ended too soon to measure by: raise max_tokens, or give other prompts")
    alone = _times([first, *(done[name][1] for name in _IN_TURN)])
    both = _times([done["pearl, stream"][1], done["pearl, fixed"][1]])
    measured = {name: _speedup(of, ar_texts) for name, (of, _) in done.items()}
    rate = acceptance if acceptance is not None else texts.accepted / texts.judged
    verdicts = predict(alone, both, rate, measured)
    for name, of in _on_all_devices(config, prompts, params, say).items():
        verdicts += (Verdict(name, None, _speedup(of, ar_texts)),)
    advice, flags = advise(verdicts, config)
    return Calibration(
        alone=alone,
        both=both,
        acceptance=rate,
        given=acceptance is not None,
        c=texts.window,
        ar=_rate(ar_texts),
        verdicts=verdicts,
        pays_from=pays_from(alone, both),
        advice=f"{advice}. {warning}" if (warning := shared_gpus(config)) else advice,
        flags=flags,
        profile=_profile(texts.last, texts.accepted / texts.judged),
    )


def _profile(last: Statistics, acceptance: float) -> Profile:
    """What the engine has measured. `last`: of its last text, by method auto."""
    here, there = (tuple((int(n), t) for n, t in times.items()) for times in (last.t_target, last.t_target_spread))
    ways = tuple((way, log(rate), 1) for way, rate in last.rates.items())
    best = max(last.rates, key=lambda way: last.rates[way], default="ngram")
    return Profile(last.t_draft, acceptance, here, there, best, ways)


# ---- texts ----

_TextRates = list[tuple[float, float]]  # per text: tokens after the first commit, and their seconds


def _rate(texts: _TextRates) -> float:
    """Tokens per second over all texts."""
    seconds = sum(took for _, took in texts)
    return sum(tokens for tokens, _ in texts) / seconds if seconds else 0.0


def _speedup(texts: _TextRates, ar_texts: _TextRates) -> Interval:
    """Speedup over the texts of `ar` for the same prompts: the ratio of the rates over all texts."""

    def ratio(some: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float:
        mine, theirs = (_rate([pair[i] for pair in some]) for i in (0, 1))
        return mine / theirs if theirs else 0.0

    return bootstrap(list(zip(texts, ar_texts, strict=True)), ratio)


@contextmanager
def _texts(
    config: EngineConfig, prompts: Sequence[Prompt], params: SamplingParams, say: Callable[[str], None]
) -> Iterator[_Texts]:
    config = config.model_copy(update={"trace": None, "profile": "none"})
    with Engine(config=config, progress=say) as engine, TemporaryDirectory() as directory:
        yield _Texts(engine, prompts, params, Path(directory) / "trace.json", say)


class _Texts:
    """Decodes the same prompts with one method after another, traced.

    Attributes:
        judged, accepted: draft tokens, summed over the runs of `pearl` without guesses.
        window: the last window c of `pearl` with stream windows.
        last: statistics of the last text.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, trace: Path, say: Callable[[str], None]
    ) -> None:
        self._engine, self._params, self._trace, self._say = engine, params, trace, say
        self._prompts = [engine.encode(prompt, raw=False) for prompt in prompts]
        self.judged = self.accepted = self.window = 0
        self.last = Statistics()
        method = "pearl" if engine.config.has_draft else AR
        engine.generate(self._prompts[0], params.model_copy(update={"max_tokens": _WARM_UP}), method=method)

    def run(self, name: str, decoding: RequestOptions) -> tuple[_TextRates, Trace]:
        """Decode all prompts: the tokens and seconds of each text, and the trace of both workers."""
        self._say(f"measuring {name}")
        self._engine.start_trace(self._trace)
        fields = ("method", "window", "gamma", "rule", *AS_PUBLISHED)
        chosen = DecodingConfig.model_validate({name: getattr(decoding, name) for name in fields})
        results = [self._engine.generate(p, self._params, decoding=chosen)[0].statistics for p in self._prompts]
        path, self.last = self._engine.stop_trace(), results[-1]
        if decoding.method == "pearl" and not decoding.look_ahead:
            self.judged += sum(s.num_judged_draft_tokens for s in results)
            self.accepted += sum(s.num_accepted_draft_tokens for s in results)
            self.window = results[-1].window if decoding.window == "stream" else self.window
        late = [s.seconds - s.seconds_to_first_token for s in results]
        texts = [((s.tokens_per_second or 0.0) * seconds, seconds) for s, seconds in zip(results, late, strict=True)]
        return texts, read(path)


def _on_all_devices(
    config: EngineConfig, prompts: Sequence[Prompt], params: SamplingParams, say: Callable[[str], None]
) -> dict[str, _TextRates]:
    """Measure methods without a draft on all cores of the pair. Empty on GPUs, where more devices add no speed."""
    target, draft = devices_of(config)
    if (target | draft) == target or target.gpus or draft.gpus or config.target_pace:
        return {}
    wide = {"draft": "none", "target_tp": 1, "draft_tp": 1, "target_device": (target | draft).name}
    with _texts(config.model_copy(update=wide), prompts, params, say) as texts:
        return {f"{name}, {ALL}": texts.run(f"{name}, {ALL}", decoding)[0] for name, decoding in _ALONE.items()}


def _times(traces: Sequence[Trace]) -> Times:
    """Times of the forwards in the traces, prefills left out."""
    drafts = [pair for trace in traces for pair in steps(trace.draft) if pair[0].name == "draft"]
    target: dict[int, list[tuple[Slice, float]]] = {}
    for trace in traces:
        for one, seconds in steps(trace.target):
            if one.name in FORWARDS and one.name != "prefill":
                target.setdefault(one.args["n"], []).append((one, seconds))
    target = {n: found for n, found in target.items() if len(found) >= _MIN_FORWARDS} or target
    alike = [drafts, *target.values()]
    spread = [one.ran / median(o.ran for o, _ in group) - 1 for group in alike for one, _ in group]
    sixths = quantiles(spread, n=6)  # ignore outliers of a busy machine
    return Times(
        draft=median(one.ran for one, _ in drafts),
        target={n: median(one.seconds for one, _ in found) for n, found in sorted(target.items())},
        draft_step=mean(seconds for _, seconds in drafts),
        target_step={n: mean(seconds for _, seconds in found) for n, found in sorted(target.items())},
        jitter=(sixths[4] - sixths[0]) / 2,
    )


# ---- what follows ----


def predict(alone: Times, both: Times, acceptance: float, measured: Mapping[str, Interval]) -> tuple[Verdict, ...]:
    """All methods: predicted by the simulator, where it can, and measured.

    `sd` is simulated with the times of each model alone, `pearl` with those of both at work. The simulator's texts
    repeat nothing, so methods with guesses are only measured.
    """
    turns = independent(alone.timing(), acceptance, _TEXTS, _TOKENS)
    overlapped = independent(both.timing(), acceptance, _TEXTS, _TOKENS)
    ar_rate, sd = run(turns, _ALONE[AR]).tokens_per_second, sd_at_best(turns)
    rates = {f"sd, gamma {sd.gamma}": run(turns, sd).tokens_per_second}
    rates |= {name: run(overlapped, decoding).tokens_per_second for name, decoding in _AT_ONCE.items()}
    found = [Verdict(AR, 1.0, Interval(1.0, 1.0, 1.0))]
    found += [Verdict(name, rate / ar_rate, measured.get(name)) for name, rate in rates.items()]
    return (*found, *(Verdict(name, None, of) for name, of in measured.items() if name not in rates))


def pays_from(alone: Times, both: Times) -> float | None:
    """The lowest acceptance rate, in hundredths, at which PEARL with the best fixed window beats `ar`; None: none.

    Source: the closed form `expected_rate`.
    """
    target = interpolated(both.target_step)

    def best(rate: float) -> float:
        windows = range(1, MOST_GAMMA + 1)
        return max(expected_rate(c, rate, both.draft_step, target(1), target(c)) for c in windows)

    return next((a / 100 for a in range(101) if best(a / 100) * alone.target_step[1] > _MIN_SPEEDUP), None)


def advise(verdicts: Sequence[Verdict], config: EngineConfig) -> tuple[str, str]:
    """The fastest method, measured or else predicted, as a sentence and as flags.

    The sentence names the methods whose intervals overlap with the fastest one's.
    """
    best = max(verdicts, key=lambda v: v.speed)
    name, _, how = best.method.partition(", ")
    if not best.pays:
        return "nothing is faster than the target alone here, which leaves the other device free", (
            "--draft none --method ar"
        )
    low = best.measured.low if best.measured else float("inf")
    ties = [v.method for v in verdicts if v is not best and v.pays and v.measured and v.measured.high > low]
    words = f"{best.method}: {best.speed:.2f} times as fast as the target alone"
    words += f", {'as measured' if best.measured else 'as predicted'}"
    words += f"; on these texts not told apart from {', '.join(ties)}" if ties else ""
    flags = f"--method {name}"
    if name in DRAFTLESS:
        target, draft = devices_of(config)
        flags = f"--draft none {flags}" + (f" --target-device {(target | draft).name}" if how == ALL else "")
        words = f"no draft pays here; {words}"
    elif name == "sd":
        flags += f" --gamma {how.removeprefix('gamma ')}"
    elif how in WINDOWS:
        flags += f" --window {how} " + " ".join(f"--{name.replace('_', '-')} 0" for name in AS_PUBLISHED)
    return words, flags
