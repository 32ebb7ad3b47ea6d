"""How long a forward takes, against transformers' own and against what the memory allows, on one core or one GPU.

Both runners hold the same weights and take turns, so that a slow minute hits both.  The bandwidth is that of a streamed
read measured in the same run: what a forward can at best reach, for it reads each weight once.

    OMP_NUM_THREADS=1 python scripts/bench_forward.py             # the embedded target on one core: about a minute
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from pearl.models.loading import load_runner
from pearl.models.runner import ModelRunner

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a read of a gigabyte: the best of several, for nothing makes a read faster than it can be."""
    block = torch.ones(1 << 28, device=device)  # float32
    return block.nbytes / min(seconds(lambda: block.sum(), device) for _ in range(5))


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


def weights_read(runner: ModelRunner, model: str, device: torch.device, dtype: str) -> int:
    """Bytes of weights that a forward reads: all but the embedding's rows of tokens that were not fed."""
    from transformers import AutoModelForCausalLM

    from pearl.models.checkpoint import resolve_checkpoint

    checkpoint = resolve_checkpoint(model)
    config = AutoModelForCausalLM.from_pretrained(checkpoint.path, gguf_file=checkpoint.gguf_file, device_map="meta")
    embedding = config.get_input_embeddings().weight
    unread = 0 if config.config.tie_word_embeddings else embedding.numel()
    width = getattr(torch, dtype).itemsize if dtype != "auto" else next(config.parameters()).dtype.itemsize
    return (sum(p.numel() for p in config.parameters()) - unread) * width


@click.command()
@click.option("--model", default="embedded", help="Any model that PEARL loads.")
@click.option("--device", "place", default=None, help="cpu or cuda:0; default: the GPU where there is one.")
@click.option("--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16", "float16"]))
@click.option("--context", default=256, help="Tokens in the cache.")
@click.option("--repeats", default=9, help="Rounds; in each, every size three times on both.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(model: str, place: str | None, dtype: str, context: int, repeats: int, as_json: bool) -> None:
    """Prints milliseconds of a forward by the number of tokens fed."""
    device = torch.device(place or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    most = context + max(SIZES)
    runners = {
        forwards: load_runner(model, device=device, dtype=dtype, max_context=most, forwards=forwards)
        for forwards in ("auto", "transformers")
    }
    tokens = [(7 + 5 * i + i * i) % runners["auto"].vocab_size for i in range(most)]
    taken: dict[tuple[str, int], list[float]] = {}
    for runner in runners.values():
        runner.forward(tokens[:context], 1)
    for round_ in range(repeats + 1):  # the first is for warming up
        for n in SIZES:
            for name, runner in runners.items():
                for _ in range(3):
                    runner.rollback(context)
                    spent = seconds(lambda: runner.forward(tokens[:n], n), device)  # noqa: B023
                    if round_:
                        taken.setdefault((name, n), []).append(spent)
    moved = weights_read(runners["auto"], model, device, dtype)
    rate = bandwidth(device)
    rows = [
        {
            "n": n,
            "seconds": (ours := median(taken["auto", n])),
            "transformers_seconds": (theirs := median(taken["transformers", n])),
            "ratio_to_transformers": ours / theirs,
            "bandwidth_share": moved / ours / rate,
        }
        for n in SIZES
    ]
    about = {
        "model": model,
        "runner": type(runners["auto"]).__name__,
        "dtype": dtype,
        "context": context,
        "weights_bytes": moved,
        "read_bytes_per_second": rate,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    if as_json:
        click.echo(json.dumps({**about, "forwards": rows}))
        return
    console = Console(soft_wrap=True, highlight=False)
    table = Table("tokens fed", "ms", "transformers, ms", "ratio", "of the bandwidth")
    for row in rows:
        times = (f"{row[key] * 1e3:.1f}" for key in ("seconds", "transformers_seconds"))
        table.add_row(str(row["n"]), *times, f"{row['ratio_to_transformers']:.2f}", f"{row['bandwidth_share']:.0%}")
    console.print(table)
    console.print(
        f"{about['runner']} of {model}, {dtype}, {context} tokens in the cache; {moved / 1e6:.0f} MB a forward; "
        f"a streamed read: {rate / 1e9:.1f} GB/s; {about['threads']} threads; {about['device']}, torch {about['torch']}"
    )


if __name__ == "__main__":
    main()
