"""Compare the duration of a forward with transformers' own and the memory bandwidth, on one core or one GPU.

Both runners hold the same weights and take turns.  The bandwidth is that of a streamed read in the same run: the bound
of a forward, which reads each weight once.

    OMP_NUM_THREADS=1 python scripts/bench_forward.py             # the embedded target on one core: about a minute
    python scripts/bench_forward.py --model 7b --dtype bfloat16   # random weights of that shape, for a GPU
    python scripts/bench_forward.py --dtype auto --dtype bfloat16 --dtype int8 --dtype int4   # in turns
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median
from typing import get_args

import click
import torch
from random_models import SHAPES, random_model
from rich.console import Console
from rich.table import Table

from pearl.config import ModelConfig
from pearl.config.engine import DType
from pearl.config.options import RequestOptions
from pearl.drafting.proposer import ModelProposer
from pearl.execution.draft import DraftExecutor
from pearl.execution.early_drafts import DraftThread
from pearl.models.checkpoints.loading import load_runner
from pearl.models.cpu import huge_pages
from pearl.models.cpu.native import Native
from pearl.models.forward.linear_layers import KernelMatrix, Rounding, SideBySide
from pearl.models.forward.runner import ForwardRunner
from pearl.models.own_forward import own_runner
from pearl.models.runner import ModelRunner, feed_chain
from pearl.models.transformers.runner import HFRunner
from pearl.protocol.events import Draft, Drafted, Open

_STEPS = 48  # tokens drafted
_WARM = 8  # those of them before the clock is started
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def load_runners(
    model: str, device: torch.device, dtypes: Sequence[str], context: int
) -> dict[str, ModelRunner]:
    """Load our runner in each dtype, and transformers' in the first."""
    runners = {dtype: _load(model, device, dtype, "auto", context) for dtype in dtypes}
    runners["transformers"] = _load(model, device, dtypes[0], "transformers", context)
    return runners


def _load(model: str, device: torch.device, dtype: str, forwards: str, context: int) -> ModelRunner:
    if model not in SHAPES:
        config = ModelConfig(model, dtype=dtype, max_context=context, forwards=forwards)  # type: ignore[arg-type]
        return load_runner(config, device)
    rounding: Rounding = dtype if dtype in ("int8", "int4") else ""  # type: ignore[assignment]
    is_bfloat16 = rounding or dtype == "auto"
    random = random_model(model, device, torch.bfloat16 if is_bfloat16 else getattr(torch, dtype))
    if forwards == "auto":
        return own_runner(random, context, rounding=rounding)
    return HFRunner(random, context)


def bandwidth(device: torch.device, floats: int = 1 << 28) -> float:
    """Return the bytes per second of a read: the best of several; on a CPU in huge pages, as weights are."""
    if device.type == "cpu":
        block = huge_pages.empty((floats,), torch.float32).fill_(1)
    else:
        block = torch.ones(floats, device=device)
    return block.nbytes / min(seconds(block.sum, device) for _ in range(5))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, the device's work included."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(runner: ModelRunner, start: int, chains: bool) -> float:
    """Return the seconds of one drafted token: its forward, its draw, and the hand-over between threads."""
    executor = DraftExecutor(ModelProposer(runner, runner.vocab_size, chains=chains))
    with closing(DraftThread(executor, lambda: True)) as draft_thread:
        runner.rollback(start)
        draft_thread.execute(Open((), RequestOptions(temperature=1.0).resolved()))
        command = Draft(start, (0,), _STEPS)
        num_drafted = 0
        num_warm = 0
        began = 0.0
        while num_drafted < _STEPS:
            if num_warm == 0 and num_drafted >= _WARM:
                num_warm = num_drafted
                began = time.perf_counter()
            event = draft_thread.execute(command)
            assert isinstance(event, Drafted)
            # A guess that the draft took is in its cache, so one command may draft several tokens.
            num_drafted += len(event.tokens)
            next_start = command.start + len(command.tokens) + event.cached
            left = max(1, _STEPS - num_drafted)
            command = Draft(next_start, event.tokens[event.cached :], left)
        return (time.perf_counter() - began) / (num_drafted - num_warm)


def weights_read(runner: ModelRunner) -> int:
    """Return the bytes of the matrices that a forward of ours reads; 0 of transformers'."""
    if not isinstance(runner, ForwardRunner):
        return 0
    layers = runner.layers
    total = bytes_of(layers.head)
    for layer in layers.layers:
        total += bytes_of(layer.qkv) + bytes_of(layer.out)
        experts = layer.experts.each if layer.experts else [(layer.gate_up, layer.down)]
        for gate_up, down in experts:
            total += bytes_of(gate_up) + bytes_of(down)
    return total


def bytes_of(matrix: object) -> int:
    """Return the bytes of a matrix as it is multiplied."""
    if isinstance(matrix, SideBySide):
        return sum(map(bytes_of, matrix.parts))
    if isinstance(matrix, Native):
        return matrix.nbytes
    if isinstance(matrix, KernelMatrix):
        scales = 0 if matrix.scales is None else matrix.scales.nbytes
        return matrix.weight.nbytes + scales
    return 0


def forward_times(
    runners: dict[str, ModelRunner], device: torch.device, context: int, repeats: int
) -> dict[tuple[str, int], float]:
    """Return the median seconds by runner and number of tokens fed."""
    vocab = min(runner.vocab_size for runner in runners.values())
    tokens = [(7 + 5 * i + i * i) % vocab for i in range(context + max(SIZES))]
    times: dict[tuple[str, int], list[float]] = {}
    for runner in runners.values():
        feed_chain(runner, tokens[:context], 1)
    for _ in range(repeats + 1):
        for n in SIZES:
            for name, runner in runners.items():
                for _ in range(3):
                    runner.rollback(context)
                    spent = seconds(lambda: feed_chain(runner, tokens[:n], n), device)  # noqa: B023
                    times.setdefault((name, n), []).append(spent)
    return {key: median(spent[3:]) for key, spent in times.items()}  # the first round warms up


@click.command()
@click.option(
    "--model", default="embedded", help=f"Any model that PEARL loads, or {', '.join(SHAPES)}."
)
@click.option(
    "--device", "place", default=None, help="cpu or cuda:0; default: the GPU if there is one."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    default=("auto",),
    type=click.Choice(get_args(get_args(DType)[0])),
)
@click.option("--context", default=256, help="Tokens in the cache.")
@click.option("--repeats", default=9, help="Rounds; in each, every size three times on both.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    model: str,
    place: str | None,
    dtypes: tuple[str, ...],
    context: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Print milliseconds of a forward by the number of tokens fed."""
    device = torch.device(place or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    is_gpu = device.type == "cuda"
    runners = load_runners(model, device, dtypes, context + max(*SIZES, _STEPS))
    times = forward_times(runners, device, context, repeats)
    first = runners[dtypes[0]]
    single = median(step_seconds(first, context, False) for _ in range(3))
    chained = median(step_seconds(first, context, True) for _ in range(3)) if is_gpu else None
    sizes = {name: weights_read(runner) for name, runner in runners.items()}
    rate = bandwidth(device)
    about = {
        "model": model,
        "runner": type(first).__name__,
        "context": context,
        "weights_bytes": sizes,
        "read_bytes_per_second": rate,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "draft_step_seconds": single,
        "draft_step_chained_seconds": chained,
    }
    if as_json:
        forwards = [{"n": n, "seconds": {name: times[name, n] for name in runners}} for n in SIZES]
        click.echo(json.dumps({**about, "forwards": forwards}))
        return
    table = Table("tokens fed", *(f"{name}, ms" for name in runners))
    for n in SIZES:
        table.add_row(str(n), *(f"{times[name, n] * 1e3:.1f}" for name in runners))
    megabytes = ["MB of matrices"]
    shares = ["of the bandwidth"]
    for name, size in sizes.items():
        megabytes.append(f"{size / 1e6:.0f}" if size else "")
        shares.append(f"{size / times[name, 1] / rate:.0%}" if size else "")
    table.add_row(*megabytes)
    table.add_row(*shares)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(
        f"{about['runner']} of {model}, {context} tokens in the cache; a streamed read: {rate / 1e9:.1f} GB/s; "
        f"{about['threads']} threads; {about['device']}, torch {about['torch']}"
    )
    drafted = f"one by one {single * 1e3:.2f} ms"
    if chained is not None:
        drafted += f", chained {chained * 1e3:.2f} ms"
    console.print(f"as a draft, a token, its draw and hand-over included: {drafted}")


if __name__ == "__main__":
    main()
