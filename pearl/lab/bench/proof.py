"""What one GPU can show of this package, and nothing else can: the steps of `scripts/prove_gpu.py`.

Each step makes its own random models and yields figures, of which some must be within a bound.  A rehearsal runs every
step with tiny models on a CPU, which computes in the fixed sizes of a GPU and records nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.drafting.model import ModelProposer
from pearl.engine import Engine
from pearl.execution.ahead import Ahead
from pearl.execution.draft import DraftExecutor
from pearl.lab.bench.exactness import check_texts, compare_cuts
from pearl.lab.bench.shapes import SHAPES, random_model, save_pair
from pearl.lab.experiments.recorded import steps as steps_of
from pearl.models.graphs import FED, Record, ends, record_on_gpu
from pearl.models.hf import HFRunner
from pearl.models.llama import LlamaRunner
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.methods import AS_PUBLISHED, DRAFT_LOOKUP
from pearl.trace.reading import read

_TOLERANCE = 2.0  # times what transformers' logits are off from those of a wider dtype: ours may be as far off as they
_NEAR = 5.0  # times that share of a row's root mean square: two logits that are nearer may change places
_LEAST_BUSY = 0.9  # share of the time that a chain keeps its device busy
_LEAST_ACCEPTANCE = 0.97  # of a draft that is the same model as its target
_MOST_GROWTH = 1.1  # times as long a forward of 8 tokens may take as one of 1
_MOST_MS = {"7b": 6.5, "1b": 1.8}  # milliseconds of a forward of one token, on an H100 or H200
_SAMPLINGS = {
    "greedy": ("coupled", Sampling()),
    "coupled": ("coupled", Sampling(temperature=1.0, seed=3)),
    "ratio, top-p": ("ratio", Sampling(temperature=0.8, top_p=0.9, seed=3)),
}


@dataclass(frozen=True)
class Scale:
    """What the steps are run with.

    Attributes:
        wide: shape of few layers, for what compares two models that stand side by side.
        timed: shapes whose forwards are timed.
        pair: shape of the engine's target; its draft has a quarter of the layers.
        starts: tokens in the cache when forwards are compared: around the ends of recordings.
        tokens: of a chain, of a text, and of the sequence that is cut at random.
        tests: what pytest is given.
        eps: of the second pair, see `save_pair`.
    """

    device: torch.device
    dtype: torch.dtype
    wide: str
    timed: tuple[str, ...]
    pair: str
    starts: tuple[int, ...]
    chain: int
    text: int
    cut: int
    repeats: int
    lengths: int
    tests: tuple[str, ...]
    eps: float

    @property
    def rehearses(self) -> bool:
        return self.device.type == "cpu"

    @property
    def record(self) -> Record | None:
        """Of a rehearsal: nothing is recorded, each replay computes."""
        return (lambda work: work) if self.rehearses else None

    def runner(self, shape: str, context: int, records: bool = True, record: Record | None = None) -> LlamaRunner:
        model = random_model(shape, self.device, self.dtype)
        return LlamaRunner(model, context, records=records, record=record or self.record)

    def synchronize(self) -> None:
        if not self.rehearses:
            torch.cuda.synchronize(self.device)


def full(device: torch.device, small: bool) -> Scale:
    """On a GPU; `small`: one with less than 40 GB, on which the pair is of the 1B shape and 7B is not timed."""
    timed = ("1b",) if small else ("7b", "1b")
    pair = "1b" if small else "7b"
    tests = ("tests",)
    return Scale(
        device, torch.bfloat16, "7b-4-layers", timed, pair, (250, 506, 2042), 1000, 128, 1500, 20, 20, tests, 0.3
    )


REHEARSAL = Scale(
    torch.device("cpu"), torch.float32, "tiny", ("tiny",), "tiny-8-layers", (250, 506), 24, 16, 540, 2, 2,
    ("tests/test_torch_dist.py",), 0.3,
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One result of a step. `must`: the bound that it is held to, in words; empty: none, it is told only."""

    what: str
    value: float
    unit: str = ""
    must: str = ""
    passed: bool = True
    detail: str = ""


Step = Callable[[Scale], Iterator[Figure]]


def tests(scale: Scale) -> Iterator[Figure]:
    """The tests that carry the mark `gpu`, where pytest and the tests are here."""
    root = Path(__file__).parents[3]
    if not (root / scale.tests[0]).exists() or subprocess.run([sys.executable, "-c", "import pytest"]).returncode:
        yield Figure("tests marked gpu: not here, or no pytest", 0)
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", "0", "--timeout=120", *scale.tests]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True)
    last = (found.stdout.strip().splitlines() or ["nothing"])[-1]
    failed = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    yield Figure(
        "exit code of pytest -m gpu", found.returncode, "", "0", found.returncode == 0, "; ".join([last, *failed])
    )


def rows(scale: Scale) -> Iterator[Figure]:
    """Logits are the same bits however a text is cut, with and without recordings."""
    for records in (True, False):
        runner = scale.runner(scale.wide, scale.cut, records)
        for seed in range(2):
            found = compare_cuts(runner, "recorded" if records else "eager", scale.cut, seed, FED)
            what = f"{found.what}: of {found.count} rows differ"
            yield Figure(what, found.count - found.equal, "", "0", found.passed, found.first)


def recordings(scale: Scale) -> Iterator[Figure]:
    """What all recordings cost when a model is loaded: how many, time and memory each."""
    made: list[tuple[float, float]] = []
    plain = scale.record or record_on_gpu(scale.device)

    def record(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        before, began = _reserved(scale), time.perf_counter()
        replay = plain(work)
        scale.synchronize()
        made.append((time.perf_counter() - began, _reserved(scale) - before))
        return replay

    context = 8192
    runner = scale.runner(scale.wide, context, record=record)
    expected = len(ends(context, runner._room))
    yield Figure("recordings at load", len(made), "", f"{expected}", len(made) == expected)
    yield Figure("one takes at most", max((seconds for seconds, _ in made), default=0.0) * 1e3, "ms")
    yield Figure("all take", sum(size for _, size in made) / 1e6, "MB")
    count = len(made)
    feed_chain(runner, [5] * 700, 1)
    feed_chain(runner, [5] * 3, 1)
    yield Figure("made amid a text", len(made) - count, "", "0", len(made) == count)


def _reserved(scale: Scale) -> float:
    return (
        0.0 if scale.rehearses else torch.cuda.mem_get_info(scale.device)[1] - torch.cuda.mem_get_info(scale.device)[0]
    )


def graphs(scale: Scale) -> Iterator[Figure]:
    """Recorded forwards of 1 to 16 tokens against eager ones, ours and those of transformers, also in a wider dtype."""
    context = max(scale.starts) + 3 * FED
    recorded, eager = scale.runner(scale.wide, context), scale.runner(scale.wide, context, records=False)
    theirs = HFRunner(random_model(scale.wide, scale.device, scale.dtype), context)
    wider = torch.float64 if scale.dtype is torch.float32 else torch.float32
    exact = HFRunner(random_model(scale.wide, scale.device, scale.dtype).to(wider), context)  # type: ignore[arg-type]
    tokens = [(7 + 5 * i + i * i) % recorded.vocab_size for i in range(context)]
    apart = rejected = 0
    worst = rounding = 0.0
    gaps: list[float] = []  # where the likeliest tokens are two: how far apart these are
    for start in scale.starts:
        for runner in (recorded, eager, theirs, exact):
            runner.rollback(0)
            feed_chain(runner, tokens[:start], 1)
        for fed in range(1, FED + 1):
            ours, plain, other, right = (
                _fed(runner, start, tokens[start : start + fed]) for runner in (recorded, eager, theirs, exact)
            )
            apart += int((ours != plain).any(-1).sum())
            worst, rounding = max(worst, _apart(ours, other)), max(rounding, _apart(other, right))
            top = other.topk(2).values
            gap = (top[:, 0] - top[:, 1]) / other.square().mean(-1).sqrt()
            gaps += gap[ours.argmax(-1) != other.argmax(-1)].tolist()
        with torch.inference_mode():
            recorded._slots.keys[..., start:, :] = torch.nan
        recorded._slots.wrote(0, recorded._room)
        recorded.rollback(start - 1)
        rejected += int((~_fed(recorded, start - 1, tokens[:4]).isfinite()).any(-1).sum())
    yield Figure("rows whose recorded bits are not the eager ones", apart, "", "0", apart == 0)
    most = _TOLERANCE * rounding
    told = f"at most {most:.2g}", worst <= most, f"transformers' own from {wider}: {rounding:.2g}"
    yield Figure("largest difference from transformers", worst, "of the norm", *told)
    wrong = sum(gap > _NEAR * most for gap in gaps)
    yield Figure("rows with another likeliest token, no near tie", wrong, "", "0", wrong == 0)
    yield Figure("rows that see a NaN after a rollback", rejected, "", "0", rejected == 0)


def _apart(some: torch.Tensor, others: torch.Tensor) -> float:
    """The largest difference of two rows, as a share of the norm of the other."""
    return float(((some - others).norm(dim=-1) / others.norm(dim=-1)).max())


def _fed(runner: ModelRunner, start: int, tokens: Sequence[int]) -> torch.Tensor:
    runner.rollback(start)
    with torch.inference_mode():
        return feed_chain(runner, tokens, len(tokens))


def chains(scale: Scale) -> Iterator[Figure]:
    """Chained forwards give the tokens of single ones, and keep the device busy."""
    prompt = tuple(range(5, 25))
    runner = scale.runner(scale.wide, len(prompt) + scale.chain + 1)
    for name, (rule, sampling) in _SAMPLINGS.items():
        one, _, apart = _drafted(runner, prompt, scale.chain, False, rule, sampling)
        other, busy, together = _drafted(runner, prompt, scale.chain, True, rule, sampling)
        differing = sum(a != b for a, b in zip(one, other, strict=True))
        yield Figure(f"{name}: chained tokens that differ, of {scale.chain}", differing, "", "0", differing == 0)
        must = "" if scale.rehearses else f"at least {_LEAST_BUSY:.0%}"
        yield Figure(f"{name}: the chain is busy", 100 * busy, "%", must, not must or busy >= _LEAST_BUSY)
        yield Figure(f"{name}: a token, chained", together * 1e3, "ms", "", True, f"one by one {apart * 1e3:.2f} ms")
        guessed, _, took = _drafted(runner, prompt, scale.chain, True, rule, sampling, DRAFT_LOOKUP)
        differing = sum(a != b for a, b in zip(one, guessed, strict=True))
        yield Figure(f"{name}: tokens that differ with lookup", differing, "", "0", differing == 0)
        yield Figure(f"{name}: a token, chained, with lookup", took * 1e3, "ms")


def _drafted(
    runner: ModelRunner,
    prompt: Sequence[int],
    count: int,
    chained: bool,
    rule: str,
    sampling: Sampling,
    lookup: int = 0,
) -> tuple[list[int], float, float]:
    """The tokens, the share of the time in which the device computed, and seconds a token."""
    executor = DraftExecutor(ModelProposer(runner, runner.vocab_size, chains=chained))
    runner.rollback(0)
    text, fed, worked, began = [*prompt], 0, 0.0, 0.0
    with Ahead(executor, lambda: True) as ahead:
        ahead.execute(Open(tuple(prompt), RequestOptions(rule=rule, draft_lookup=lookup, sampling=sampling)))
        while len(text) < len(prompt) + count:
            event = ahead.execute(Draft(fed, tuple(text[fed:]), len(prompt) + count - len(text)))
            assert isinstance(event, Drafted)
            if len(text) == len(prompt):  # the prompt's forward is not part of the chain
                began = time.perf_counter()
            else:
                worked += event.seconds + event.draw
            fed = len(text) + event.cached
            text.extend(event.tokens)
    took = time.perf_counter() - began
    return text[len(prompt) :], worked / took, took / (count - 1)


def cudnn(scale: Scale) -> Iterator[Figure]:
    """New prompt lengths through transformers' forward, with cuDNN's attention and, as the workers have it, without."""
    runner = HFRunner(random_model(scale.wide, scale.device, scale.dtype), 4096)
    tokens = [(7 + 5 * i) % runner.vocab_size for i in range(4096)]
    taken: dict[bool, list[float]] = {}
    for length in (30, 31, 32):  # what the first forwards of a process pay for
        _fed(runner, 0, tokens[:length])
    for number in range(2 * scale.lengths):
        with_cudnn = bool(number % 2)
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        runner.rollback(0)
        scale.synchronize()
        began = time.perf_counter()
        feed_chain(runner, tokens[: 200 + 37 * number], 1)
        scale.synchronize()
        taken.setdefault(with_cudnn, []).append(time.perf_counter() - began)
    torch.backends.cuda.enable_cudnn_sdp(False)
    off, on = (median(taken[way]) for way in (False, True))
    yield Figure("a prompt of a new length without cuDNN's attention", off * 1e3, "ms")
    must = "" if scale.rehearses else "not faster than 0.8 times that"
    yield Figure(
        "with it", on * 1e3, "ms", must, not must or on >= 0.8 * off, f"longest {max(taken[True]) * 1e3:.0f} ms"
    )


def speed(scale: Scale) -> Iterator[Figure]:
    """Milliseconds of a forward, and the share of the memory's bandwidth that it reads its weights with."""
    rate = _bandwidth(scale)
    yield Figure("a streamed read", rate / 1e9, "GB/s")
    is_hopper = not scale.rehearses and any(
        name in torch.cuda.get_device_name(scale.device) for name in ("H100", "H200")
    )
    for shape in scale.timed:
        runner = scale.runner(shape, 512)
        tokens = [(7 + 5 * i) % runner.vocab_size for i in range(300)]
        feed_chain(runner, tokens[:256], 1)
        times = {fed: median(_seconds(scale, runner, tokens[:fed]) for _ in range(scale.repeats)) for fed in (1, 8, 16)}
        most = _MOST_MS.get(shape) if is_hopper else None
        must = f"at most {most} on this GPU" if most else ""
        share = _read(shape) * scale.dtype.itemsize / times[1] / rate
        detail = f"{share:.0%} of the bandwidth"
        yield Figure(f"{shape}: 1 token", times[1] * 1e3, "ms", must, not most or times[1] * 1e3 <= most, detail)
        growth = times[8] / times[1]
        must = "" if scale.rehearses else f"at most {_MOST_GROWTH}"
        yield Figure(f"{shape}: 8 tokens over 1", growth, "", must, not must or growth <= _MOST_GROWTH)
        yield Figure(f"{shape}: 16 tokens", times[16] * 1e3, "ms")


def _seconds(scale: Scale, runner: ModelRunner, tokens: Sequence[int]) -> float:
    runner.rollback(256)
    scale.synchronize()
    began = time.perf_counter()
    feed_chain(runner, tokens, len(tokens))
    scale.synchronize()
    return time.perf_counter() - began


def _bandwidth(scale: Scale) -> float:
    """Bytes a second of a read of a gigabyte (a rehearsal: of 64 MB): the best of several."""
    block = torch.ones(1 << (24 if scale.rehearses else 28), device=scale.device)

    def once() -> float:
        scale.synchronize()
        began = time.perf_counter()
        block.sum()
        scale.synchronize()
        return time.perf_counter() - began

    return block.nbytes / min(once() for _ in range(5))


def _read(shape: str) -> int:
    """Weights that a forward reads: all but the embedding."""
    model = random_model(shape, torch.device("meta"), torch.bfloat16)
    return sum(each.numel() for each in model.parameters()) - SHAPES[shape][0] * SHAPES[shape][5]


def engine(scale: Scale) -> Iterator[Figure]:
    """Two processes on this one device: acceptance, the host's time between forwards, and texts that agree."""
    with tempfile.TemporaryDirectory() as directory:
        for eps in (0.0, scale.eps):
            pair = Path(directory) / f"eps-{eps}"
            save_pair(scale.pair, 0.25, pair, scale.device, scale.dtype, eps)
            if not scale.rehearses:
                torch.cuda.empty_cache()
            place, dtype = str(scale.device), str(scale.dtype).removeprefix("torch.")
            config = EngineConfig(
                target=str(pair / "target"), draft=str(pair / "draft"), target_device=place, draft_device=place,
                target_dtype=dtype, draft_dtype=dtype, max_context=2048, draft_restarts=10_000, log_level="error",
            )  # fmt: skip
            with Engine(config=config) as running:
                yield from _texts(scale, running, eps)


def _texts(scale: Scale, running: Engine, eps: float) -> Iterator[Figure]:
    params = SamplingParams(temperature=0.0, max_tokens=scale.text, ignore_eos=True)
    prompt = list(range(40, 72))
    if eps:
        warm = params.model_copy(update={"temperature": 1.0, "seed": 5})
        for found in check_texts(running, [prompt], warm, kill=True):
            different = found.count - found.equal
            yield Figure(f"{found.what}, eps {eps}: texts differ", different, "", "0", found.passed, found.first)
        return
    published = DecodingConfig(method="pearl", **AS_PUBLISHED)
    speeds = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, decoding in (("ar", DecodingConfig(method="ar")), ("pearl", published)):
            running.generate(prompt, params, decoding=decoding)
            running.start_trace(Path(directory) / f"{name}.json")
            speeds[name] = running.generate(prompt, params, decoding=decoding)[0].statistics
            trace = read(running.stop_trace())
            gaps = [seconds - one.seconds for one, seconds in steps_of(trace.target) if one.name != "prefill"]
            yield Figure(f"{name}: the host between two forwards of the target", median(gaps) * 1e3, "ms")
            yield Figure(f"{name}: tokens a second", speeds[name].tokens_per_second or 0.0)
    accepted = speeds["pearl"].acceptance_rate or 0.0
    must = f"above {_LEAST_ACCEPTANCE}"
    yield Figure("acceptance of a draft that is its target", accepted, "", must, accepted > _LEAST_ACCEPTANCE)


STEPS: dict[str, Step] = {
    "tests": tests, "rows": rows, "recordings": recordings, "graphs": graphs, "chains": chains, "cudnn": cudnn,
    "speed": speed, "engine": engine,
}  # fmt: skip
