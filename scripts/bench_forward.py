"""Duration of a forward, beside transformers' own and the memory bandwidth, on one core or one GPU.

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
from pearl.execution.early_drafts import Ahead
from pearl.models.checkpoints.loading import load_runner
from pearl.models.cpu.native import Native
from pearl.models.forward.linear_layers import Plain, Quantised, Rounding, SideBySide
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import ModelRunner, feed_chain
from pearl.models.transformers.runner import HFRunner
from pearl.protocol.events import Draft, Drafted, Open

_STEPS, _WARM = 48, 8  # tokens drafted, and those of them before the clock is started
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def load_runners(
    model: str, device: torch.device, dtypes: Sequence[str], context: int
) -> dict[str, ModelRunner]:
    """Ours in each dtype, if there is one for this model, and transformers' in the first."""
    found: dict[str, ModelRunner] = {}
    for dtype, forwards in (*((dtype, "auto") for dtype in dtypes), (dtypes[0], "transformers")):
        name = dtype if forwards == "auto" else forwards
        if model not in SHAPES:
            wanted = ModelConfig(model, dtype=dtype, max_context=context, forwards=forwards)  # type: ignore[arg-type]
            found[name] = load_runner(wanted, device)
            continue
        rounding: Rounding = dtype if dtype in ("int8", "int4") else ""  # type: ignore[assignment]
        made = random_model(model, device, _torch_dtype("auto" if rounding else dtype))
        if forwards == "auto":
            found[name] = ForwardRunner(made, context, rounding=rounding)
        else:
            found[name] = HFRunner(made, context)
    return found


def _torch_dtype(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    return found


def bandwidth(device: torch.device, floats: int = 1 << 28) -> float:
    """Bytes per second of a read: the best of several."""
    block = torch.ones(floats, device=device)
    return block.nbytes / min(seconds(block.sum, device) for _ in range(5))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, the device's work included."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(runner: ModelRunner, start: int, chains: bool) -> float:
    """Of one drafted token: its forward, its draw, and the hand-over between threads."""
    executor = DraftExecutor(ModelProposer(runner, runner.vocab_size, chains=chains))
    with closing(Ahead(executor, lambda: True)) as ahead:
        runner.rollback(start)
        ahead.execute(Open((), RequestOptions(temperature=1.0).resolved()))
        token, count, began = 0, 0, 0.0
        while count < _STEPS:
            if count == _WARM:
                began = time.perf_counter()
            event = ahead.execute(Draft(start + count, (token,), _STEPS - count))
            assert isinstance(event, Drafted)
            token, count = event.tokens[0], count + 1
        return (time.perf_counter() - began) / (_STEPS - _WARM)


def weights_read(runner: ModelRunner) -> int:
    """Bytes of the matrices that a forward of ours reads; 0 of transformers'."""
    if not isinstance(runner, ForwardRunner):
        return 0
    layers = runner._layers
    matrices = [layers.head]
    for layer in layers.layers:
        experts = layer.experts.each if layer.experts else [(layer.gate_up, layer.down)]
        matrices += [layer.qkv, layer.out, *(each for both in experts for each in both)]
    parts = [
        part
        for each in matrices
        for part in (each.parts if isinstance(each, SideBySide) else [each])
    ]
    return sum(bytes_of(each) for each in parts)


def bytes_of(matrix: object) -> int:
    """Of a matrix as it is multiplied."""
    if isinstance(matrix, Native):
        return matrix.nbytes
    if isinstance(matrix, Plain | Quantised):
        return matrix.weight.nbytes + (matrix.scales.nbytes if isinstance(matrix, Quantised) else 0)
    return 0


def forward_times(
    runners: dict[str, ModelRunner], device: torch.device, context: int, repeats: int
) -> dict[tuple[str, int], float]:
    """Median seconds by runner and number of tokens fed."""
    tokens = [
        (7 + 5 * i + i * i) % next(iter(runners.values())).vocab_size
        for i in range(context + max(SIZES))
    ]
    taken: dict[tuple[str, int], list[float]] = {}
    for runner in runners.values():
        feed_chain(runner, tokens[:context], 1)
    for round_ in range(repeats + 1):  # the first warms up
        for n in SIZES:
            for name, runner in runners.items():
                for _ in range(3):
                    runner.rollback(context)
                    spent = seconds(lambda: feed_chain(runner, tokens[:n], n), device)  # noqa: B023
                    taken.setdefault((name, n), []).extend([spent] if round_ else [])
    return {key: median(some) for key, some in taken.items()}


@click.command()
@click.option(
    "--model", default="embedded", help=f"Any model that PEARL loads, or {', '.join(SHAPES)}."
)
@click.option(
    "--device", "place", default=None, help="cpu or cuda:0; default: the GPU if there is one."
)
@click.option(
    "--dtype", "dtypes", multiple=True, default=("auto",), type=click.Choice(get_args(DType))
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
    """Prints milliseconds of a forward by the number of tokens fed."""
    device = torch.device(place or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    runners = load_runners(model, device, dtypes, context + max(*SIZES, _STEPS))
    taken = forward_times(runners, device, context, repeats)
    first = runners[dtypes[0]]
    ways = (False, True) if device.type == "cuda" else (False,)
    steps = {
        chains: median(step_seconds(first, context, chains) for _ in range(3)) for chains in ways
    }
    read, rate = {name: weights_read(runner) for name, runner in runners.items()}, bandwidth(device)
    about = {
        "model": model,
        "runner": type(first).__name__,
        "context": context,
        "weights_bytes": read,
        "read_bytes_per_second": rate,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "draft_step_seconds": steps[False],
        "draft_step_chained_seconds": steps.get(True),
    }
    if as_json:
        forwards = [{"n": n, "seconds": {name: taken[name, n] for name in runners}} for n in SIZES]
        click.echo(json.dumps({**about, "forwards": forwards}))
        return
    console = Console(soft_wrap=True, highlight=False)
    table = Table("tokens fed", *(f"{name}, ms" for name in runners))
    for n in SIZES:
        table.add_row(str(n), *(f"{taken[name, n] * 1e3:.1f}" for name in runners))
    shares = (f"{read[name] / taken[name, 1] / rate:.0%}" if read[name] else "" for name in runners)
    table.add_row(
        "MB of matrices", *(f"{read[name] / 1e6:.0f}" if read[name] else "" for name in runners)
    )
    table.add_row("of the bandwidth", *shares)
    console.print(table)
    console.print(
        f"{about['runner']} of {model}, {context} tokens in the cache; a streamed read: {rate / 1e9:.1f} GB/s; "
        f"{about['threads']} threads; {about['device']}, torch {about['torch']}"
    )
    drafted = ", ".join(
        f"{'chained' if chains else 'one by one'} {each * 1e3:.2f} ms"
        for chains, each in steps.items()
    )
    console.print(f"as a draft, a token, its draw and hand-over included: {drafted}")


if __name__ == "__main__":
    main()
