"""Prove in one command what only a GPU can show of this package; nothing is downloaded.

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
    # As in a worker; before torch is imported.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import click
import torch
from bench_forward import bandwidth, seconds, weights_read
from prove_bits import FORWARDS, REHEARSAL, ROUNDINGS, Measurement, Scale, none_of, tokens_of
from prove_heads import heads
from random_models import save_pair
from rich.console import Console

from pearl.config import EngineConfig, RequestOptions
from pearl.engine import Engine
from pearl.engine.request import submission
from pearl.execution.pair import decode
from pearl.lab.bench.exactness import check_texts
from pearl.lab.bench.machine import hardware
from pearl.metrics import Statistics
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


def tests(scale: Scale) -> Iterator[Measurement]:
    """Run the tests with the mark `gpu`, if pytest and the tests are here."""
    folder = _ROOT / "tests"
    has_pytest = subprocess.run([sys.executable, "-c", "import pytest"]).returncode == 0
    if not folder.exists() or not has_pytest:
        yield Measurement("tests marked gpu: not here, or no pytest", 0)
        return
    files = []
    for path in sorted(folder.glob("test_*.py")):
        if "mark.gpu" in path.read_text():
            files.append(str(path))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--timeout=120"]
    command += ["-n", "0", files[0]] if scale.rehearses else ["-n", "4", *files]
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    lines = run.stdout.strip().splitlines() or ["nothing"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    passed = re.search(r"(\d+) passed", lines[-1])
    count = int(passed[1]) if passed else 0
    yield Measurement("tests that passed", count, summary=lines[-1].strip("= "))
    detail = "; ".join([lines[-1], *failed])
    yield none_of("exit code of pytest -m gpu", run.returncode, detail)


def speed(scale: Scale) -> Iterator[Measurement]:
    """Milliseconds of a forward, and the share of the memory bandwidth with which it reads its weights."""
    rate = bandwidth(scale.device, 1 << (24 if scale.rehearses else 28))
    yield Measurement("a streamed read", rate / 1e9, "GB/s")
    for shape in scale.timed:
        for rounding in ROUNDINGS:
            runner = scale.runner(shape, 512, slots=8, rounding=rounding)
            yield from _speed_of(scale, runner, shape, rounding, rate)
            del runner
            gc.collect()  # before there is another


def _speed_of(
    scale: Scale, runner: ForwardRunner, shape: str, rounding: str, rate: float
) -> Iterator[Measurement]:
    tokens = tokens_of(runner, 256)
    name = f"{shape} {rounding or 'whole'}"
    for slot in range(8):
        feed_chain(runner, tokens, 1, slot, prompt=True)
    two_each = [Feed(tokens[:2], 2, slot) for slot in range(8)]
    forwards = {
        "1 token": [Feed(tokens[:1], 1)],
        "8 tokens": [Feed(tokens[:8], 8)],
        f"{FED} tokens": [Feed(tokens[:FED], FED)],
        f"{max(SIZES)} tokens": [Feed(tokens[: max(SIZES)], max(SIZES))],
        "1 slot": two_each[:1],
        "8 slots": two_each,
    }
    times: dict[str, list[float]] = {what: [] for what in forwards}
    for what in list(times) * scale.repeats:
        for slot in range(8):
            runner.rollback(256, slot)
        times[what].append(seconds(lambda: runner.forward(forwards[what]), scale.device))  # noqa: B023
    milliseconds = {what: median(times_of) * 1e3 for what, times_of in times.items()}
    one = milliseconds["1 token"]
    most = None if rounding or not _is_known(scale.device) else _MOST_MS.get(shape)
    share = weights_read(runner) / one * 1e3 / rate
    yield Measurement(
        f"{name}: 1 token",
        one,
        "ms",
        f"at most {most} on this GPU" if most else "",
        not most or one <= most,
        f"{share:.0%} of the bandwidth",
        f"{rounding or shape} {one:.2f} ms {share:.0%}" if shape == scale.timed[0] else "",
    )
    for count in (FED, max(SIZES)):
        what = f"{count} tokens"
        yield Measurement(f"{name}: {what}", milliseconds[what], "ms")
    for what, alone, bound in (
        ("8 tokens", "1 token", _MOST_GROWTH),
        ("8 slots", "1 slot", _MOST_OF_EIGHT),
    ):
        growth = milliseconds[what] / milliseconds[alone]
        must = "" if rounding else scale.bound(f"at most {bound}")
        passed = not must or growth <= bound
        yield Measurement(f"{name}: {what} over 1", growth, "", must, passed)


def _is_known(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return any(gpu in torch.cuda.get_device_name(device) for gpu in _KNOWN)


def prompts(scale: Scale) -> Iterator[Measurement]:
    """Duration of a prompt over that by transformers."""
    for shape in scale.timed:
        yield from _prompts_of(scale, shape)
        gc.collect()


def _prompts_of(scale: Scale, shape: str) -> Iterator[Measurement]:
    context = max(scale.prompts) + FED
    must = scale.bound("at most 1")
    ours = scale.runner(shape, context)
    theirs = scale.theirs(shape, context)
    for count in scale.prompts:
        tokens = tokens_of(ours, count)
        ours_ms: list[float] = []
        theirs_ms: list[float] = []
        for _ in range(1 + scale.repeats // 4):
            ours_ms.append(_prompt_ms(ours, tokens, scale.device))
            theirs_ms.append(_prompt_ms(theirs, tokens, scale.device))
        ours_median = median(ours_ms[1:] or ours_ms)  # the first warms up
        theirs_median = median(theirs_ms[1:] or theirs_ms)
        share = ours_median / theirs_median
        summary = ""
        if count == max(scale.prompts):
            summary = f"{shape} {share:.2f}"
            if shape == scale.timed[-1]:
                summary += f" of transformers' time at {count} tokens"
        yield Measurement(
            f"{shape}: {count} tokens over transformers'",
            share,
            "",
            must,
            not must or share <= 1,
            f"{ours_median:.1f} ms, theirs {theirs_median:.1f}",
            summary,
        )


def _prompt_ms(runner: ModelRunner, tokens: Sequence[int], device: torch.device) -> float:
    runner.rollback(0)
    return seconds(lambda: feed_chain(runner, tokens, 1, prompt=True), device) * 1e3


def engine(scale: Scale) -> Iterator[Measurement]:
    """Two processes on this one device: acceptance, speed, and texts that agree."""
    for eps, shape in zip((0.0, _EPS), scale.pairs, strict=True):
        with tempfile.TemporaryDirectory() as directory:
            pair = Path(directory)
            save_pair(shape, 0.25, pair, scale.device, scale.dtype, eps)
            gc.collect()
            if not scale.rehearses:
                torch.cuda.empty_cache()
            device = str(scale.device)
            dtype = str(scale.dtype).removeprefix("torch.")
            config = EngineConfig(
                target=str(pair / "target"),
                draft=str(pair / "draft"),
                target_device=device,
                draft_device=device,
                target_dtype=dtype,
                draft_dtype=dtype,
                max_context=2048,
                draft_restarts=10_000,
                log_level="error",
            )
            with Engine(config=config) as running:
                yield from _differing(scale, running) if eps else _equal(scale, running)
            if not eps:
                yield _in_one_process(scale, config)
                gc.collect()  # before there is another pair


_PROMPT = list(range(40, 72))
_METHODS = ("ar", "sd", "pearl")


def _differing(scale: Scale, running: Engine) -> Iterator[Measurement]:
    for name, branches in (("no branches", 0), ("branches", None)):
        text = _greedy(scale, running, method="pearl", branches=branches)
        yield _speed(f"pearl, {name}", text)
    params = RequestOptions(temperature=1.0, seed=5, max_tokens=scale.text, ignore_eos=True)
    differ = 0
    for finding in check_texts(running, [_PROMPT], params, kill=True):
        count = finding.count - finding.equal
        differ += count
        yield none_of(f"{finding.what}: texts differ", count, finding.first)
    yield none_of("all in all, texts that differ", differ, summary=f"{differ} texts differ")


def _equal(scale: Scale, running: Engine) -> Iterator[Measurement]:
    for method in _METHODS:
        yield _speed(method, _greedy(scale, running, method=method))
    text = _greedy(scale, running, method="pearl", **AS_PUBLISHED)
    yield _speed("pearl, as published", text)
    acceptance = text.acceptance_rate or 0.0
    what = "acceptance of a draft that equals its target"
    must = f"above {_LEAST_ACCEPTANCE}"
    yield Measurement(what, acceptance, "", must, acceptance > _LEAST_ACCEPTANCE)


def _in_one_process(scale: Scale, config: EngineConfig) -> Measurement:
    """Decode with the same pair in this process, in turns: `sd` without messages and a second process."""
    target, draft = (load_runner(config.model(role), scale.device) for role in config.roles)
    params = RequestOptions(method="sd", max_tokens=scale.text, seed=1)
    for _ in range(2):  # the first warms up
        target.rollback(0)
        draft.rollback(0)
        submit = submission(1, _PROMPT, target.context, params, GenerationDefaults())
        times: list[float] = []
        with torch.inference_mode():
            for committed in decode(submit, target, draft):
                times += [time.perf_counter()] * len(committed.tokens)
    rate = (len(times) - 1) / (times[-1] - times[0])
    return Measurement("sd in one process: tokens a second", rate)


def _greedy(scale: Scale, running: Engine, **settings: Any) -> Statistics:
    """Return the statistics of a greedy text, after a warm-up."""
    params = RequestOptions(temperature=0.0, max_tokens=scale.text, ignore_eos=True, **settings)
    running.generate(_PROMPT, params)
    (result,) = running.generate(_PROMPT, params)
    return result.statistics


def _speed(name: str, text: Statistics) -> Measurement:
    """Return the tokens a second of a text."""
    guessed = ", ".join(f"{source} {count}" for source, count in text.guessed_by_source.items())
    rate = text.tokens_per_second or 0.0
    summary = f"{name} {rate:.0f}" if name in _METHODS else ""
    if name == "pearl":
        summary += " tokens/s"
    return Measurement(f"{name}: tokens a second", rate, detail=guessed, summary=summary)


Step = Callable[[Scale], Iterator[Measurement]]
STEPS: dict[str, Step] = {
    "tests": tests,
    **FORWARDS,
    "speed": speed,
    "prompts": prompts,
    "heads": heads,
    "engine": engine,
}


@dataclass
class StepResult:
    step: str
    passed: bool = False
    seconds: float = 0.0
    error: str = ""
    figures: list[Measurement] = field(default_factory=list)

    def line(self) -> str:
        """Return the step's line of the short table: failures first, then the figures with a summary."""
        failed = [figure for figure in self.figures if not figure.passed]
        failed.sort(key=lambda figure: not figure.summary)
        passed = [figure for figure in self.figures if figure.passed and figure.summary]
        words = []
        if self.error:
            words.append(" ".join(self.error.split()))
        for figure in failed + passed:
            plain = f"{figure.what} {figure.value:.3g} {figure.unit}".strip()
            words.append(figure.summary or plain)
        verdict = "pass" if self.passed else "FAIL"
        return _cut(f"{self.step:<10} {verdict} {self.seconds:3.0f} s  {', '.join(words)}")


def _cut(line: str) -> str:
    return line if len(line) <= _COLUMNS else line[: _COLUMNS - 3] + "..."


def run_step(name: str, scale: Scale, console: Console) -> StepResult:
    """Run one step; return its figures, and the error that ended it, if any."""
    began = time.perf_counter()
    result = StepResult(name)
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


def short_table(results: Sequence[StepResult], where: dict[str, Any]) -> str:
    """Return at most 12 lines of 80 columns, for an issue."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    git = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    device = (where["gpus"] or [where["processor"]])[0].removeprefix("NVIDIA ")[:28]
    versions = where["versions"]
    about = (
        f"{device}, torch {versions['torch']}, triton {triton}, pearl {versions['pearl']} {commit}"
    )
    failed = [result.step for result in results if not result.passed]
    words = f"failed: {', '.join(failed)}" if failed else "all passed"
    minutes = sum(result.seconds for result in results) / 60
    lines = [result.line() for result in results]
    return "\n".join([_cut(about.strip()), *lines, _cut(f"{words}; {minutes:.1f} minutes")])


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
    console = Console(soft_wrap=True, highlight=False)
    where = hardware()
    results: list[StepResult] = []
    for name in only or STEPS:
        results.append(run_step(name, scale, console))
        document = {
            "rehearsal": rehearse,
            "device": str(scale.device),
            "hardware": where,
            "table": short_table(results, where).splitlines(),
            "steps": [asdict(result) for result in results],
        }
        to.write_text(json.dumps(document, indent=2) + "\n")  # after each step
    console.print(f"\n{short_table(results, where)}\n", markup=False)
    console.print(
        f"{to} has all of it" + ("; a rehearsal" if rehearse else ": please send both as an issue")
    )
    sys.exit(not all(result.passed for result in results))


if __name__ == "__main__":
    main()
