"""What a GPU alone can show of our own forward: that recorded forwards give the same bits however a text is cut.

A random Llama of a 7B's width, a few layers deep, is made in memory; nothing is downloaded.

    python scripts/prove_gpu.py                      # cuda:0, bfloat16; --device cpu walks the same code on a CPU
"""

from __future__ import annotations

import sys

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pearl.lab.bench.exactness import compare_cuts
from pearl.models.graphs import FED
from pearl.models.llama import LlamaRunner


@click.command()
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--hidden", default=4096, show_default=True, help="Width; heads are 128 wide.")
@click.option("--layers", default=4, show_default=True)
@click.option("--tokens", default=1500, show_default=True, help="Crosses the ends of recordings at 512 and 1024.")
def main(device: str, dtype: str, hidden: int, layers: int, tokens: int) -> None:
    """Compare logits of random cuts, with and without recordings; exit code 1 where a bit differs."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        vocab_size=32000,
        max_position_embeddings=tokens,
    )
    failed = False
    for records in (True, False):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.to(device=torch.device(device), dtype=getattr(torch, dtype))  # type: ignore[call-arg]
        record = (lambda work: work) if device == "cpu" else None
        runner = LlamaRunner(model, tokens, records=records, record=record)
        name = "recorded" if records else "eager"
        for seed in range(3):
            found = compare_cuts(runner, name, tokens, seed, FED)
            at = f"; first: {found.first}" if found.first else ""
            click.echo(f"{found.what}: {found.equal} of {found.count} rows equal{at}")
            failed |= not found.passed
    sys.exit(failed)


if __name__ == "__main__":
    main()
