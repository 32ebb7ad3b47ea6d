"""A pair on this machine: its forward times alone and with both models at work, and what each method makes of them.

Times are read from traces of real texts.  Under `sd` the two models take turns, so there each is alone; under `pearl`
both work at once, and share whatever the two devices share: cache, memory, power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from tempfile import TemporaryDirectory

from pearl.client.request import Prompt
from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine
from pearl.errors import RequestError
from pearl.lab.bench.systems import devices_of
from pearl.lab.experiments.compare import AR, OVERLAPPED, sd_at_best
from pearl.lab.experiments.recorded import interpolated, steps
from pearl.lab.experiments.workload import independent, run
from pearl.lab.simulate import Timing
from pearl.lab.theory import MOST_GAMMA
from pearl.protocol.messages import Decoding
from pearl.protocol.window import expected_rate
from pearl.trace.reading import FORWARDS, Slice, Trace, read

PROMPTS = (
    "Explain gravity to a beginner.",
    "Write a Python function that reverses a linked list.",
    "Give three tips for staying healthy.",
    "What is the difference between a list and a tuple?",
)
ALL_DEVICES = "ar, all devices"
_GAMMAS = (1, 3, 7)  # of sd: the target is fed 2, 4 and 8 tokens
_TEXTS, _TOKENS = 20, 200  # simulated
_PAYS = 1.02  # so many times as fast as ar at least: below lies what a busy machine does by itself
_WARM_UP = 16
_FEW = 3  # forwards, below which a size tells nothing of itself


@dataclass
class Times:
    """Seconds. `draft`, `target` (by tokens fed): of a forward, medians. The `_step`s: means, with all that its worker
    does until the next but wait. `jitter`: of forwards fed alike, as a share of them: half of what two thirds lie in.
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
    """One method: times as fast as `ar`, as predicted and as measured; None where it was not run."""

    method: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
        alone, both: with the other model idle; with both at work.
        acceptance: of judged draft tokens; `given`: not measured, but asked about.
        c: the window that `pearl` takes.
        ar: tokens a second, measured.
        verdicts: `ar` first.
        pays_from: the acceptance rate from which on PEARL beats `ar`; None: none does.
        advice: which to use, as words and as flags.
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

    @property
    def ratio(self) -> float:
        """t_target(1) / t_draft, both at work."""
        return interpolated(self.both.target)(1) / self.both.draft


def calibrate(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    acceptance: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Starts the pair, decodes the prompts by several methods, and predicts.

    Args:
        acceptance: predict for this rate, in place of the one measured on these prompts.
    """
    with _started(config, say) as engine, TemporaryDirectory() as directory:
        texts = _Texts(engine, prompts, params, Path(directory), say)
        plain, first = texts.run("ar", AR)
        alone = [first, *(texts.run(f"sd, gamma {g}", Decoding("sd", "fixed", g))[1] for g in _GAMMAS)]
        rates = {_name(decoding): texts.run(_name(decoding), decoding) for decoding in OVERLAPPED}
    judged, accepted = texts.judged, texts.accepted
    if not judged or not plain:
        raise RequestError("the texts ended too soon to measure by: raise max_tokens, or give other prompts")
    times = Times(), Times()
    _fill(times[0], alone)
    _fill(times[1], [rates["pearl, stream"][1], rates["pearl, fixed"][1]])
    rate = acceptance if acceptance is not None else accepted / judged
    measured = {name: of / plain for name, (of, _) in rates.items()} | {"ar": 1.0}
    wide = _all_devices(config, prompts, params, say)
    verdicts = _verdicts(*times, rate, measured)
    if wide is not None:
        verdicts = (*verdicts, Verdict(ALL_DEVICES, None, wide / plain))
    advice, flags = _advice(verdicts, config)
    return Calibration(
        *times, rate, acceptance is not None, texts.window, plain, verdicts, _pays_from(*times), advice, flags
    )


def _name(decoding: Decoding) -> str:
    return f"pearl, {decoding.window}" if decoding.method == "pearl" else decoding.method


@contextmanager
def _started(config: EngineConfig, say: Callable[[str], None]) -> Iterator[Engine]:
    with Engine(config=config.model_copy(update={"trace": None}), progress=say) as engine:
        yield engine


class _Texts:
    """Decodes the same prompts again and again, and reads how long the forwards took."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        self._engine, self._params, self._directory, self._say = engine, params, directory, say
        self._prompts = [engine.encode(prompt, raw=False) for prompt in prompts]
        self.judged = self.accepted = self.window = 0
        method = "pearl" if engine.config.has_draft else "ar"
        engine.generate(self._prompts[0], params.model_copy(update={"max_tokens": _WARM_UP}), method=method)

    def run(self, name: str, decoding: Decoding) -> tuple[float, Trace]:
        """Tokens a second after the first, of all texts together; and what both workers did."""
        self._say(f"measuring {name}")
        self._engine.start_trace(self._directory / "trace.json")
        chosen = DecodingConfig.model_validate(
            {"method": decoding.method, "window": decoding.window, "gamma": decoding.gamma}
        )
        results = [self._engine.generate(p, self._params, decoding=chosen)[0].statistics for p in self._prompts]
        path = self._engine.stop_trace()
        if decoding.method == "pearl":
            self.judged += sum(s.num_judged_draft_tokens for s in results)
            self.accepted += sum(s.num_accepted_draft_tokens for s in results)
            if decoding.window == "stream":
                self.window = results[-1].window
        late = [s.seconds - s.seconds_to_first_token for s in results]
        tokens = sum((s.tokens_per_second or 0.0) * seconds for s, seconds in zip(results, late, strict=True))
        return tokens / sum(late) if sum(late) else 0.0, read(path)


def _fill(times: Times, traces: Sequence[Trace]) -> None:
    drafts = [pair for trace in traces for pair in steps(trace.draft) if pair[0].name == "draft"]
    target: dict[int, list[tuple[Slice, float]]] = {}
    for trace in traces:
        for one, seconds in steps(trace.target):
            if one.name in FORWARDS and one.name != "prefill":
                target.setdefault(one.args["n"], []).append((one, seconds))
    target = {n: found for n, found in target.items() if len(found) >= _FEW} or target
    times.draft = median(one.ran for one, _ in drafts)
    times.draft_step = mean(seconds for _, seconds in drafts)
    times.target = {n: median(one.seconds for one, _ in found) for n, found in sorted(target.items())}
    times.target_step = {n: mean(seconds for _, seconds in found) for n, found in sorted(target.items())}
    alike = [drafts, *target.values()]
    spread = [one.ran / median(o.ran for o, _ in group) - 1 for group in alike for one, _ in group]
    sixths = quantiles(spread, n=6)
    times.jitter = (sixths[4] - sixths[0]) / 2  # blind to the few that a busy machine holds up


def _verdicts(alone: Times, both: Times, acceptance: float, measured: Mapping[str, float]) -> tuple[Verdict, ...]:
    """Predicted by the simulator: the methods in turn with times alone, the others with times of both at work."""
    turns = independent(alone.timing(), acceptance, _TEXTS, _TOKENS)
    overlapped = independent(both.timing(), acceptance, _TEXTS, _TOKENS)
    plain = run(turns, AR).tokens_per_second
    sd = sd_at_best(turns)
    found = [Verdict("ar", 1.0, 1.0), Verdict(f"sd, gamma {sd.gamma}", run(turns, sd).tokens_per_second / plain, None)]
    for decoding in OVERLAPPED:
        name = _name(decoding)
        found.append(Verdict(name, run(overlapped, decoding).tokens_per_second / plain, measured.get(name)))
    return tuple(found)


def _all_devices(
    config: EngineConfig, prompts: Sequence[Prompt], params: SamplingParams, say: Callable[[str], None]
) -> float | None:
    """Tokens a second of `ar` with every core that the pair has; None on GPUs, where a spread model is no faster."""
    target, draft = devices_of(config)
    if (target | draft) == target or target.gpus or draft.gpus or config.target_pace:
        return None
    one = {"draft": "none", "target_tp": 1, "draft_tp": 1, "trace": None}
    wide = config.model_copy(update=one | {"target_device": (target | draft).name})
    with _started(wide, say) as engine, TemporaryDirectory() as directory:
        return _Texts(engine, prompts, params, Path(directory), say).run(ALL_DEVICES, AR)[0]


def _pays_from(alone: Times, both: Times) -> float | None:
    """By the closed form of a fixed window, the best for each rate, in hundredths."""
    target = interpolated(both.target_step)

    def best(rate: float) -> float:
        windows = range(1, MOST_GAMMA + 1)
        return max(expected_rate(c, rate, both.draft_step, target(1), target(c)) for c in windows)

    return next((a / 100 for a in range(101) if best(a / 100) * alone.target_step[1] > _PAYS), None)


def _advice(verdicts: Sequence[Verdict], config: EngineConfig) -> tuple[str, str]:
    wide = next((v.measured for v in verdicts if v.method == ALL_DEVICES), None) or 0.0
    best = max((v for v in verdicts if v.predicted is not None), key=lambda v: v.predicted or 0.0)
    fastest = best.predicted or 0.0
    pays = fastest > _PAYS
    if wide > max(fastest, _PAYS):
        target, draft = devices_of(config)
        return (
            f"speculation does not pay here: give the target all devices ({wide:.2f} times as fast)",
            f"--draft none --method ar --target-device {(target | draft).name}",
        )
    if not pays:
        return "speculation does not pay here: the target alone is as fast, and leaves the other device free", (
            "--draft none --method ar"
        )
    name, _, window = best.method.partition(", ")
    flags = f"--method {name}"
    if window:
        flags += f" --gamma {window.removeprefix('gamma ')}" if name == "sd" else f" --window {window}"
    return f"{best.method}: {fastest:.2f} times as fast as the target alone", flags
