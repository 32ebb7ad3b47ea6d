"""What only one GPU can show of this package, in one command; nothing is downloaded.

    python scripts/prove_gpu.py                                  # cuda:0; prints a table and writes prove_gpu.json
    python scripts/prove_gpu.py --only graphs --only speed       # some of its steps
    python scripts/prove_gpu.py --rehearse                       # every step with tiny models, on a CPU

Random models of 1B and 7B shapes (17 GB of files in $TMPDIR, for the engine's pair).  Please send the JSON file as an
issue, whatever it holds.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as in a worker; before torch is imported

import click
import torch
from bench_forward import bandwidth, seconds, synchronize, weights_read
from random_models import random_model, save_pair
from rich.console import Console
from rich.table import Table

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.drafting.model import ModelProposer
from pearl.engine import Engine
from pearl.execution.ahead import Ahead
from pearl.execution.draft import DraftExecutor
from pearl.lab.bench.exactness import check_texts, compare_cuts
from pearl.lab.bench.machine import hardware, in_words
from pearl.lab.bench.rows import PUBLISHED
from pearl.models.forward.graphs import FED, Record, Rows, ends, record_on_gpu
from pearl.models.forward.runner import ForwardRunner
from pearl.models.hf import HFRunner
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.methods import DRAFT_LOOKUP

_SMALL = 40e9  # bytes: a GPU with less takes a smaller pair
_TOLERANCE = 2.0  # bound on our difference from transformers, times that of transformers from a wider dtype
_NEAR = 5.0  # times that bound, relative to a row's root mean square: nearer logits may change places
_LEAST_BUSY = 0.9  # share of the time that a chain keeps its device busy
_LEAST_ACCEPTANCE = 0.97  # of a draft that equals its target
_MOST_GROWTH = 1.1  # duration of a forward of 8 tokens over one of 1
_MOST_OF_EIGHT = 1.3  # duration of a forward of two tokens in each of 8 slots over one slot's
_MOST_MS = {"7b": 6.5, "1b": 1.8}  # of a forward of one token, on an H100 or H200
_SAMPLINGS = {
    "greedy": ("coupled", Sampling()),
    "coupled": ("coupled", Sampling(temperature=1.0, seed=3)),
    "ratio, top-p": ("ratio", Sampling(temperature=0.8, top_p=0.9, seed=3)),
}
_EPS = 0.3  # of the second pair, see `save_pair`


@dataclass(frozen=True)
class Scale:
    """Sizes of the steps.

    Attributes:
        wide: shape of few layers, for steps that hold two models at once. timed: shapes whose forwards are timed.
        pair: shape of the engine's target; its draft has a quarter of the layers.
        starts: tokens in the cache when forwards are compared: around the ends of recordings.
        chain, text, cut: tokens of a chain, of a text, and of the sequence that is cut at random.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    wide: str = "7b-4-layers"
    timed: tuple[str, ...] = ("7b", "1b")
    pair: str = "7b"
    starts: tuple[int, ...] = (250, 506, 2042)
    chain: int = 1000
    text: int = 128
    cut: int = 1500
    repeats: int = 20

    @property
    def rehearses(self) -> bool:
        return self.device.type == "cpu"

    @property
    def record(self) -> Record | None:
        """In a rehearsal nothing is recorded, each replay computes."""
        return (lambda work: work) if self.rehearses else None

    def bound(self, words: str) -> str:
        """The bound of a figure; none in a rehearsal."""
        return "" if self.rehearses else words

    def runner(
        self, shape: str, context: int, records: bool = True, record: Record | None = None, slots: int = 1
    ) -> ForwardRunner:
        model, kernels = random_model(shape, self.device, self.dtype), None if self.rehearses else True
        given = record or self.record
        return ForwardRunner(model, context, slots=slots, records=records, record=given, kernels=kernels)


REHEARSAL = Scale(
    torch.device("cpu"), torch.float32, "tiny", ("tiny",), "tiny-8-layers", (250, 506), 24, 16, 540, 2
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One result of a step. `must`: its bound, in words; empty: none."""

    what: str
    value: float
    unit: str = ""
    must: str = ""
    passed: bool = True
    detail: str = ""


def none_of(what: str, count: int, detail: str = "") -> Figure:
    """A count that must be 0."""
    return Figure(what, count, "", "0", count == 0, detail)


def tests(scale: Scale) -> Iterator[Figure]:
    """The tests with the mark `gpu`, if pytest and the tests are here."""
    root = Path(__file__).parents[1]
    if not (root / "tests").exists() or subprocess.run([sys.executable, "-c", "import pytest"]).returncode:
        yield Figure("tests marked gpu: not here, or no pytest", 0)
        return
    files = [str(path) for path in sorted((root / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", "0", "--timeout=120"]
    command += files[:1] if scale.rehearses else files
    found = subprocess.run(command, cwd=root, capture_output=True, text=True)
    last = (found.stdout.strip().splitlines() or ["nothing"])[-1]
    failed = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    yield none_of("exit code of pytest -m gpu", found.returncode, "; ".join([last, *failed]))


def rows(scale: Scale) -> Iterator[Figure]:
    """Logits are the same bits however a text is cut, with and without recordings."""
    for records in (True, False):
        runner = scale.runner(scale.wide, scale.cut, records)
        for seed in range(2):
            found = compare_cuts(runner, "recorded" if records else "eager", scale.cut, seed, FED)
            yield none_of(f"{found.what}: of {found.count} rows differ", found.count - found.equal, found.first)


def recordings(scale: Scale) -> Iterator[Figure]:
    """Number, time and memory of the recordings made when a model is loaded; none is made later."""
    made: list[tuple[float, float]] = []
    plain = scale.record or record_on_gpu(scale.device)

    def record(work: Callable[[], Rows]) -> Callable[[], Rows]:
        before, began = _reserved(scale), time.perf_counter()
        replay = plain(work)
        synchronize(scale.device)
        made.append((time.perf_counter() - began, _reserved(scale) - before))
        return replay

    context = 8192
    runner = scale.runner(scale.wide, context, record=record)
    expected = len(ends(context, runner._room)) if runner._decode is None else 1
    has = runner._decode is not None
    yield Figure("our kernels", float(has), "", scale.bound("1"), has or scale.rehearses)
    yield Figure("recordings at load", len(made), "", f"{expected}", len(made) == expected)
    yield Figure("one takes at most", max((seconds for seconds, _ in made), default=0.0) * 1e3, "ms")
    yield Figure("all take", sum(size for _, size in made) / 1e6, "MB")
    count = len(made)
    feed_chain(runner, [5] * 700, 1)
    feed_chain(runner, [5] * 3, 1)
    yield none_of("made amid a text", len(made) - count)


def _reserved(scale: Scale) -> float:
    free, total = (0, 0) if scale.rehearses else torch.cuda.mem_get_info(scale.device)
    return float(total - free)


def graphs(scale: Scale) -> Iterator[Figure]:
    """Recorded forwards of 1 to 16 tokens against eager ones, ours and those of transformers, also in a wider dtype."""
    context = max(scale.starts) + 3 * FED
    recorded, eager = scale.runner(scale.wide, context), scale.runner(scale.wide, context, records=False)
    theirs = HFRunner(random_model(scale.wide, scale.device, scale.dtype), context)
    wider = torch.float64 if scale.dtype is torch.float32 else torch.float32
    exact = HFRunner(random_model(scale.wide, scale.device, scale.dtype).to(wider), context)  # type: ignore[arg-type]
    tokens = [(7 + 5 * i + i * i) % recorded.vocab_size for i in range(context)]
    differ = seen = 0
    worst = rounding = 0.0
    gaps: list[float] = []  # between the likeliest tokens, in rows where ours and theirs are not the same
    for start in scale.starts:
        for runner in (recorded, eager, theirs, exact):
            runner.rollback(0)
            feed_chain(runner, tokens[:start], 1)
        for fed in range(1, FED + 1):
            ours, plain, other, right = (
                _fed(runner, start, tokens[start : start + fed]) for runner in (recorded, eager, theirs, exact)
            )
            differ += int((ours != plain).any(-1).sum())
            worst, rounding = max(worst, _distance(ours, other)), max(rounding, _distance(other, right))
            top = other.topk(2).values
            gap = (top[:, 0] - top[:, 1]) / other.square().mean(-1).sqrt()
            gaps += gap[ours.argmax(-1) != other.argmax(-1)].tolist()
        with torch.inference_mode():
            recorded._slots.keys[..., start:, :] = torch.nan
        recorded._slots.wrote(0, recorded._room)
        recorded.rollback(start - 1)
        seen += int((~_fed(recorded, start - 1, tokens[:4]).isfinite()).any(-1).sum())
    most = _TOLERANCE * rounding
    bound = f"at most {most:.2g}", worst <= most, f"transformers' own from {wider}: {rounding:.2g}"
    yield none_of("rows whose recorded bits are not the eager ones", differ)
    yield Figure("largest difference from transformers", worst, "of the norm", *bound)
    yield none_of("rows with another likeliest token, no near tie", sum(gap > _NEAR * most for gap in gaps))
    yield none_of("rows that see a NaN after a rollback", seen)


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """The largest difference of two rows, as a share of the norm of the other."""
    return float(((some - others).norm(dim=-1) / others.norm(dim=-1)).max())


def _fed(runner: ModelRunner, start: int, tokens: Sequence[int]) -> torch.Tensor:
    runner.rollback(start)
    with torch.inference_mode():
        return feed_chain(runner, tokens, len(tokens))


def chains(scale: Scale) -> Iterator[Figure]:
    """Chained forwards draft the tokens of single ones, and keep the device busy."""
    prompt = tuple(range(5, 25))
    runner = scale.runner(scale.wide, len(prompt) + scale.chain + 1)
    for name, (rule, sampling) in _SAMPLINGS.items():
        options = RequestOptions(rule=rule, sampling=sampling)
        single, _, apart = draft_text(runner, prompt, scale.chain, False, options)
        chained, busy, together = draft_text(runner, prompt, scale.chain, True, options)
        looked_up, _, _ = draft_text(runner, prompt, scale.chain, True, options.changed(draft_lookup=DRAFT_LOOKUP))
        yield none_of(f"{name}: chained tokens that differ", sum(a != b for a, b in zip(single, chained, strict=True)))
        yield none_of(f"{name}: with lookup", sum(a != b for a, b in zip(single, looked_up, strict=True)))
        must = scale.bound(f"at least {_LEAST_BUSY:.0%}")
        yield Figure(f"{name}: the chain is busy", 100 * busy, "%", must, not must or busy >= _LEAST_BUSY)
        detail = f"one by one {apart * 1e3:.2f} ms"
        yield Figure(f"{name}: a token, chained", together * 1e3, "ms", detail=detail)


def draft_text(
    runner: ModelRunner, prompt: Sequence[int], count: int, chained: bool, options: RequestOptions
) -> tuple[list[int], float, float]:
    """The tokens, the share of the time in which the device computed, and seconds per token."""
    executor = DraftExecutor(ModelProposer(runner, runner.vocab_size, chains=chained))
    runner.rollback(0)
    text, fed, worked, began = [*prompt], 0, 0.0, 0.0
    with Ahead(executor, lambda: True) as ahead:
        ahead.execute(Open(tuple(prompt), options))
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


def speed(scale: Scale) -> Iterator[Figure]:
    """Milliseconds of a forward, and the share of the memory bandwidth with which it reads its weights."""
    rate = bandwidth(scale.device, 1 << (24 if scale.rehearses else 28))
    yield Figure("a streamed read", rate / 1e9, "GB/s")
    gpu = "" if scale.rehearses else torch.cuda.get_device_name(scale.device)
    for shape in scale.timed:
        runner = scale.runner(shape, 512)
        tokens = [(7 + 5 * i) % runner.vocab_size for i in range(256)]
        feed_chain(runner, tokens, 1)
        times: dict[int, list[float]] = {1: [], 8: [], 16: []}
        for fed in [*times] * scale.repeats:
            runner.rollback(256)
            times[fed].append(seconds(lambda: feed_chain(runner, tokens[:fed], fed), scale.device))  # noqa: B023
        one, eight, most_tokens = (median(some) * 1e3 for some in times.values())
        most = _MOST_MS.get(shape) if "H100" in gpu or "H200" in gpu else None
        share = weights_read(runner) / one * 1e3 / rate
        must = f"at most {most} on this GPU" if most else ""
        yield Figure(f"{shape}: 1 token", one, "ms", must, not most or one <= most, f"{share:.0%} of the bandwidth")
        must = scale.bound(f"at most {_MOST_GROWTH}")
        yield Figure(f"{shape}: 8 tokens over 1", eight / one, "", must, not must or eight / one <= _MOST_GROWTH)
        yield Figure(f"{shape}: 16 tokens", most_tokens, "ms")
    yield from _side_by_side(scale)


def _side_by_side(scale: Scale) -> Iterator[Figure]:
    """Eight slots in one forward, two tokens each, over one slot's."""
    runner = scale.runner(scale.timed[-1], 512, slots=8)
    tokens = [(7 + 5 * i) % runner.vocab_size for i in range(256)]
    for slot in range(8):
        feed_chain(runner, tokens, 1, slot)
    times: dict[int, list[float]] = {1: [], 8: []}
    for count in [*times] * scale.repeats:
        for slot in range(count):
            runner.rollback(256, slot)
        feeds = [Feed(tokens[:2], 2, slot) for slot in range(count)]
        times[count].append(seconds(lambda: runner.forward(feeds), scale.device))  # noqa: B023
    one, eight = (median(some) for some in times.values())
    must = scale.bound(f"at most {_MOST_OF_EIGHT}")
    yield Figure("8 slots over 1", eight / one, "", must, not must or eight / one <= _MOST_OF_EIGHT)


def engine(scale: Scale) -> Iterator[Figure]:
    """Two processes on this one device: acceptance, speed, and texts that agree."""
    with tempfile.TemporaryDirectory() as directory:
        for eps in (0.0, _EPS):
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
                yield from _differing(scale, running) if eps else _speeds(scale, running)


_PROMPT = list(range(40, 72))


def _differing(scale: Scale, running: Engine) -> Iterator[Figure]:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=scale.text, ignore_eos=True)
    for found in check_texts(running, [_PROMPT], params, kill=True):
        yield none_of(f"{found.what}: texts differ", found.count - found.equal, found.first)


def _speeds(scale: Scale, running: Engine) -> Iterator[Figure]:
    params, accepted = SamplingParams(temperature=0.0, max_tokens=scale.text, ignore_eos=True), 0.0
    for name, decoding in (("ar", DecodingConfig(method="ar")), ("pearl", DecodingConfig(**PUBLISHED))):
        for _ in range(2):  # the first warms up
            statistics = running.generate(_PROMPT, params, decoding=decoding)[0].statistics
        accepted = statistics.acceptance_rate or 0.0
        yield Figure(f"{name}: tokens a second", statistics.tokens_per_second or 0.0)
    must = f"above {_LEAST_ACCEPTANCE}"
    yield Figure("acceptance of a draft that equals its target", accepted, "", must, accepted > _LEAST_ACCEPTANCE)


Step = Callable[[Scale], Iterator[Figure]]
STEPS: dict[str, Step] = {
    "tests": tests, "rows": rows, "recordings": recordings, "graphs": graphs, "chains": chains, "speed": speed,
    "engine": engine,
}  # fmt: skip


@dataclass
class Result:
    step: str
    passed: bool = False
    seconds: float = 0.0
    error: str = ""
    figures: list[Figure] = field(default_factory=list)


def run_step(name: str, scale: Scale, console: Console) -> Result:
    """One step: its figures, and the error that ended it, if any."""
    began, result = time.perf_counter(), Result(name)
    try:
        for figure in STEPS[name](scale):
            result.figures.append(figure)
            console.print(f"  {name}: {figure.what} {figure.value:.4g} {figure.unit}", style="dim")
    except Exception as problem:  # the next steps may still pass
        result.error = f"{type(problem).__name__}: {problem}"
    gc.collect()
    if not scale.rehearses:
        torch.cuda.empty_cache()
    result.passed = not result.error and all(figure.passed for figure in result.figures)
    result.seconds = time.perf_counter() - began
    return result


def table_of(results: Sequence[Result]) -> Table:
    table = Table("step", "figure", "value", "must be", "")
    for result in results:
        for number, figure in enumerate(result.figures):
            mark = "" if not figure.must else "pass" if figure.passed else "FAIL"
            value = f"{figure.value:.4g} {figure.unit}".strip()
            what = figure.what + (f" ({figure.detail})" if figure.detail else "")
            table.add_row("" if number else result.step, what, value, figure.must, mark)
        if result.error:
            table.add_row(result.step, result.error, "", "", "FAIL")
    return table


@click.command()
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--rehearse", is_flag=True, help="Every step with tiny models on a CPU: shows that the steps run.")
@click.option("--only", type=click.Choice([*STEPS]), multiple=True, help="This step; may be given several times.")
@click.option("--json", "to", type=click.Path(path_type=Path), default="prove_gpu.json", show_default=True)
def main(device: str, rehearse: bool, only: tuple[str, ...], to: Path) -> None:
    """Run the steps one after the other; exit code 1 if one has failed."""
    if not rehearse and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here; --rehearse runs every step on a CPU")
    scale = REHEARSAL
    if not rehearse:
        is_small = torch.cuda.get_device_properties(torch.device(device)).total_memory < _SMALL
        smaller: dict[str, Any] = {"timed": ("1b",), "pair": "1b"} if is_small else {}
        scale = Scale(torch.device(device), **smaller)
    console, where, results = Console(soft_wrap=True, highlight=False), hardware(), list[Result]()
    for name in only or STEPS:
        results.append(run_step(name, scale, console))
        document = {"rehearsal": rehearse, "device": str(scale.device), "hardware": where}
        to.write_text(json.dumps(document | {"steps": [*map(asdict, results)]}, indent=2) + "\n")  # after each step
    console.print(table_of(results))
    failed = [result.step for result in results if not result.passed]
    minutes = sum(result.seconds for result in results) / 60
    words = f"failed: {', '.join(failed)}" if failed else "all passed"
    console.print(f"{words}; {minutes:.1f} minutes; {in_words(where)}")
    console.print(f"{to} has all of it: please send it as an issue" if not rehearse else f"a rehearsal: see {to}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
