"""What only one GPU can show of this package, in one command; nothing is downloaded.

    python scripts/prove_gpu.py                                  # cuda:0; a short table, and prove_gpu.json
    python scripts/prove_gpu.py --only graphs --only speed       # some of its steps
    python scripts/prove_gpu.py --rehearse                       # every step with tiny models, on a CPU

About seven minutes on an H100 as estimated, kernels of a first load included.  Random models of 1B and 7B shapes; 20 GB
of files in $TMPDIR, for the engine's pairs.  Please send the table as an issue, whatever it holds, and the JSON file
with it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault(
        "PYTORCH_ALLOC_CONF", "expandable_segments:True"
    )  # as in a worker; before torch is imported

import click
import torch
from bench_forward import bandwidth, seconds, weights_read
from prove_bits import FORWARDS, REHEARSAL, ROUNDINGS, Figure, Scale, none_of, tokens_of
from random_models import save_pair
from rich.console import Console

from pearl.config import EngineConfig, RequestOptions
from pearl.engine import Engine
from pearl.engine.request import submission
from pearl.execution.pair import decode
from pearl.lab.bench.exactness import check_texts
from pearl.lab.bench.machine import hardware
from pearl.models.checkpoints.loading import load_runner
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.recordings import FED
from pearl.models.gpu.row_table import SIZES
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.spec.methods import AS_PUBLISHED
from pearl.text.tokenizer import GenerationDefaults

_ROOT = Path(__file__).parents[1]
_SMALL = 40e9  # bytes: a GPU with less takes smaller models
_LEAST_ACCEPTANCE = 0.97  # of a draft that equals its target
_MOST_GROWTH = 1.1  # duration of a forward of 8 tokens over one of 1
_MOST_OF_EIGHT = 1.3  # duration of a forward of two tokens in each of 8 slots over one slot's
_MOST_MS = {"7b": 6.5, "1b": 1.8}  # of a forward of one token, in bfloat16, on these:
_KNOWN = ("H100", "H200")
_EPS = 0.3  # of the second pair, see `save_pair`
_COLUMNS = 80  # of the short table


def tests(scale: Scale) -> Iterator[Figure]:
    """The tests with the mark `gpu`, if pytest and the tests are here."""
    if (
        not (_ROOT / "tests").exists()
        or subprocess.run([sys.executable, "-c", "import pytest"]).returncode
    ):
        yield Figure("tests marked gpu: not here, or no pytest", 0)
        return
    files = [
        str(path)
        for path in sorted((_ROOT / "tests").glob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    given = ["-n", "0", files[0]] if scale.rehearses else ["-n", "4", *files]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--timeout=120"]
    found = subprocess.run(command + given, cwd=_ROOT, capture_output=True, text=True)
    last = (found.stdout.strip().splitlines() or ["nothing"])[-1]
    counts = {words: int(count) for count, words in re.findall(r"(\d+) (\w+)", last)}
    failed = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    yield Figure("tests that passed", counts.get("passed", 0), summary=last.strip("= "))
    yield none_of("exit code of pytest -m gpu", found.returncode, "; ".join([last, *failed]))


def speed(scale: Scale) -> Iterator[Figure]:
    """Milliseconds of a forward, and the share of the memory bandwidth with which it reads its weights."""
    rate = bandwidth(scale.device, 1 << (24 if scale.rehearses else 28))
    yield Figure("a streamed read", rate / 1e9, "GB/s")
    for shape in scale.timed:
        for rounding in ROUNDINGS:
            yield from _speed_of(
                scale, scale.runner(shape, 512, slots=8, rounding=rounding), shape, rounding, rate
            )
            gc.collect()  # before there is another


def _speed_of(
    scale: Scale, runner: ForwardRunner, shape: str, rounding: str, rate: float
) -> Iterator[Figure]:
    tokens, name = tokens_of(runner, 256), f"{shape} {rounding or 'whole'}"
    for slot in range(8):
        feed_chain(runner, tokens, 1, slot, prompt=True)
    forwards = {f"{fed} tokens": [Feed(tokens[:fed], fed)] for fed in (1, 8, FED, max(SIZES))}
    forwards |= {
        f"in {count} slots": [Feed(tokens[:2], 2, slot) for slot in range(count)]
        for count in (1, 8)
    }
    times: dict[str, list[float]] = {what: [] for what in forwards}
    for what in [*times] * scale.repeats:
        for slot in range(8):
            runner.rollback(256, slot)
        times[what].append(seconds(lambda: runner.forward(forwards[what]), scale.device))  # noqa: B023
    one, eight, most_16, most_64, alone, together = (median(some) * 1e3 for some in times.values())
    is_known = scale.device.type == "cuda" and any(
        gpu in torch.cuda.get_device_name(scale.device) for gpu in _KNOWN
    )
    most = _MOST_MS.get(shape) if is_known and not rounding else None
    share, must = (
        weights_read(runner) / one * 1e3 / rate,
        f"at most {most} on this GPU" if most else "",
    )
    summary = f"{rounding or shape} {one:.2f} ms {share:.0%}" if shape == scale.timed[0] else ""
    detail = f"{share:.0%} of the bandwidth"
    yield Figure(f"{name}: 1 token", one, "ms", must, not most or one <= most, detail, summary)
    for count, taken in ((FED, most_16), (max(SIZES), most_64)):
        yield Figure(f"{name}: {count} tokens", taken, "ms")
    for what, growth, bound in (
        ("8 tokens", eight / one, _MOST_GROWTH),
        ("8 slots", together / alone, _MOST_OF_EIGHT),
    ):
        must = "" if rounding else scale.bound(f"at most {bound}")
        yield Figure(f"{name}: {what} over 1", growth, "", must, not must or growth <= bound)


def prompts(scale: Scale) -> Iterator[Figure]:
    """Duration of a prompt over that by transformers."""
    for shape in scale.timed:
        yield from _prompts_of(scale, shape)
        gc.collect()


def _prompts_of(scale: Scale, shape: str) -> Iterator[Figure]:
    context, must = max(scale.prompts) + FED, scale.bound("at most 1")
    runners = scale.runner(shape, context), scale.theirs(shape, context)
    for count in scale.prompts:
        tokens, times = tokens_of(runners[0], count), (list[float](), list[float]())
        turns: list[tuple[ModelRunner, list[float]]] = [
            (runners[0], times[0]),
            (runners[1], times[1]),
        ]
        for runner, taken in turns * (1 + scale.repeats // 4):
            runner.rollback(0)
            taken.append(seconds(lambda: feed_chain(runner, tokens, 1, prompt=True), scale.device))  # noqa: B023
        ours, theirs = (median(taken[1:] or taken) * 1e3 for taken in times)  # the first warms up
        share, what = ours / theirs, f"{shape}: {count} tokens"
        summary = f"{shape} {share:.2f}" if count == max(scale.prompts) else ""
        summary += f" of transformers' time at {count} tokens" * (
            bool(summary) and shape == scale.timed[-1]
        )
        detail = f"{ours:.1f} ms, theirs {theirs:.1f}"
        yield Figure(
            f"{what} over transformers'", share, "", must, not must or share <= 1, detail, summary
        )


def engine(scale: Scale) -> Iterator[Figure]:
    """Two processes on this one device: acceptance, speed, and texts that agree."""
    for eps, shape in zip((0.0, _EPS), scale.pairs, strict=True):
        with tempfile.TemporaryDirectory() as directory:
            pair = Path(directory)
            save_pair(shape, 0.25, pair, scale.device, scale.dtype, eps)
            gc.collect()
            if not scale.rehearses:
                torch.cuda.empty_cache()
            place, dtype = str(scale.device), str(scale.dtype).removeprefix("torch.")
            config = EngineConfig(
                target=str(pair / "target"), draft=str(pair / "draft"), target_device=place, draft_device=place,
                target_dtype=dtype, draft_dtype=dtype, max_context=2048, draft_restarts=10_000, log_level="error",
            )  # fmt: skip
            with Engine(config=config) as running:
                yield from _differing(scale, running) if eps else _equal(scale, running)
            if not eps:
                yield _in_one_process(scale, config)
                gc.collect()  # before there is another pair


_PROMPT = list(range(40, 72))
_METHODS = "ar", "sd", "pearl"


def _differing(scale: Scale, running: Engine) -> Iterator[Figure]:
    for name, branches in (("no branches", 0), ("branches", None)):
        yield _speed_by(scale, running, f"pearl, {name}", method="pearl", branches=branches)[0]
    params, differ = (
        RequestOptions(temperature=1.0, seed=5, max_tokens=scale.text, ignore_eos=True),
        0,
    )
    for found in check_texts(running, [_PROMPT], params, kill=True):
        differ += found.count - found.equal
        yield none_of(f"{found.what}: texts differ", found.count - found.equal, found.first)
    yield none_of("all in all, texts that differ", differ, summary=f"{differ} texts differ")


def _equal(scale: Scale, running: Engine) -> Iterator[Figure]:
    for method in _METHODS:
        yield _speed_by(scale, running, method, method=method)[0]
    figure, accepted = _speed_by(
        scale, running, "pearl, as published", method="pearl", **AS_PUBLISHED
    )
    yield figure
    what, must = "acceptance of a draft that equals its target", f"above {_LEAST_ACCEPTANCE}"
    yield Figure(what, accepted, "", must, accepted > _LEAST_ACCEPTANCE)


def _in_one_process(scale: Scale, config: EngineConfig) -> Figure:
    """The same pair in this process, in turns: what `sd` would gain without messages and a second process."""
    runners = [load_runner(config.model(role), scale.device) for role in config.roles]
    given = RequestOptions(method="sd", max_tokens=scale.text, seed=1), GenerationDefaults()
    for _ in range(2):  # the first warms up
        for runner in runners:
            runner.rollback(0)
        with torch.inference_mode():
            times = [
                time.perf_counter()
                for committed in decode(
                    submission(1, _PROMPT, runners[0].context, *given), *runners
                )
                for _ in committed.tokens
            ]
    return Figure("sd in one process: tokens a second", (len(times) - 1) / (times[-1] - times[0]))


def _speed_by(scale: Scale, running: Engine, name: str, **settings: Any) -> tuple[Figure, float]:
    """Tokens a second of a greedy text, and the acceptance."""
    params = RequestOptions(temperature=0.0, max_tokens=scale.text, ignore_eos=True, **settings)
    for _ in range(2):  # the first warms up
        found = running.generate(_PROMPT, params)[0].statistics
    guessed = ", ".join(f"{source} {count}" for source, count in found.guessed_by_source.items())
    rate = found.tokens_per_second or 0.0
    summary = f"{name} {rate:.0f}" + " tokens/s" * (name == "pearl") if name in _METHODS else ""
    figure = Figure(f"{name}: tokens a second", rate, detail=guessed, summary=summary)
    return figure, found.acceptance_rate or 0.0


Step = Callable[[Scale], Iterator[Figure]]
STEPS: dict[str, Step] = {
    "tests": tests,
    **FORWARDS,
    "speed": speed,
    "prompts": prompts,
    "engine": engine,
}


@dataclass
class Result:
    step: str
    passed: bool = False
    seconds: float = 0.0
    error: str = ""
    figures: list[Figure] = field(default_factory=list)

    def line(self) -> str:
        """Of the short table: what has failed, and what tells most."""
        summary = sorted(
            (each for each in self.figures if each.summary or not each.passed),
            key=lambda each: (each.passed, not each.summary),
        )
        words = [
            each.summary or f"{each.what} {each.value:.3g} {each.unit}".strip() for each in summary
        ]
        found = ", ".join([" ".join(self.error.split())] * bool(self.error) + words)
        return _cut(
            f"{self.step:<10} {'pass' if self.passed else 'FAIL'} {self.seconds:3.0f} s  {found}"
        )


def _cut(line: str) -> str:
    return line if len(line) <= _COLUMNS else line[: _COLUMNS - 3] + "..."


def run_step(name: str, scale: Scale, console: Console) -> Result:
    """One step: its figures, and the error that ended it, if any."""
    began, result = time.perf_counter(), Result(name)
    try:
        for figure in STEPS[name](scale):
            result.figures.append(figure)
            console.print(f"  {name}: {figure}", style="dim", markup=False)
    except Exception as problem:  # the next steps may still pass
        result.error = f"{type(problem).__name__}: {problem}"
    gc.collect()
    if not scale.rehearses:
        torch.cuda.empty_cache()
    result.passed = not result.error and all(figure.passed for figure in result.figures)
    result.seconds = time.perf_counter() - began
    return result


def short_table(results: Sequence[Result], where: dict[str, Any]) -> str:
    """At most 12 lines of 80 columns, for an issue."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    asked = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    device = (where["gpus"] or [where["processor"]])[0].removeprefix("NVIDIA ")[:28]
    versions = where["versions"]
    about = f"{device}, torch {versions['torch']}, triton {triton}, pearl {versions['pearl']} {asked.stdout.strip()}"
    failed = [result.step for result in results if not result.passed]
    words = f"failed: {', '.join(failed)}" if failed else "all passed"
    last = f"{words}; {sum(result.seconds for result in results) / 60:.1f} minutes"
    return "\n".join([_cut(about.strip()), *(result.line() for result in results), _cut(last)])


@click.command()
@click.option("--device", default="cuda:0", show_default=True)
@click.option(
    "--rehearse",
    is_flag=True,
    help="Every step with tiny models on a CPU: shows that the steps run.",
)
@click.option(
    "--only",
    type=click.Choice([*STEPS]),
    multiple=True,
    help="This step; may be given several times.",
)
@click.option(
    "--json", "to", type=click.Path(path_type=Path), default="prove_gpu.json", show_default=True
)
def main(device: str, rehearse: bool, only: tuple[str, ...], to: Path) -> None:
    """Run the steps one after the other; exit code 1 if one has failed."""
    if not rehearse and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here; --rehearse runs every step on a CPU")
    scale = REHEARSAL
    if not rehearse:
        is_small = torch.cuda.get_device_properties(torch.device(device)).total_memory < _SMALL
        smaller: dict[str, Any] = {"timed": ("1b",), "pairs": ("1b", "1b")} if is_small else {}
        scale = Scale(torch.device(device), **smaller)
    console, where, results = Console(soft_wrap=True, highlight=False), hardware(), list[Result]()
    for name in only or STEPS:
        results.append(run_step(name, scale, console))
        document = {"rehearsal": rehearse, "device": str(scale.device), "hardware": where}
        document |= {
            "table": short_table(results, where).splitlines(),
            "steps": [*map(asdict, results)],
        }
        to.write_text(json.dumps(document, indent=2) + "\n")  # after each step
    console.print(f"\n{short_table(results, where)}\n", markup=False)
    console.print(
        f"{to} has all of it" + ("; a rehearsal" if rehearse else ": please send both as an issue")
    )
    sys.exit(not all(result.passed for result in results))


if __name__ == "__main__":
    main()
