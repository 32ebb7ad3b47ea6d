"""Greedy text against `transformers` generate of the target alone, token for token, for every method and window.

The embedded target in float32 on a CPU, raw prompts.  No difference is expected; one that appears is listed with the
gap between the two likeliest tokens at that position, and fails the check.

    python scripts/check_greedy.py humaneval.jsonl      # 20 prompts, 128 tokens: about 40 minutes on two cores
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from pearl import DecodingConfig, Engine, SamplingParams
from pearl.models.embedded import embedded_target
from pearl.spec.methods import METHODS, WINDOWS

console = Console()


def reference(prompts: list[str], most: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompt ids, the target's own greedy tokens), by transformers alone."""
    path = embedded_target()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    encoded, texts = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=most)
        encoded.append(ids[0].tolist())
        texts.append(out[0, ids.shape[1] :].tolist())
    return encoded, texts


def gap(prefix: list[int]) -> float:
    """Between the two largest logits after `prefix`."""
    model = AutoModelForCausalLM.from_pretrained(embedded_target(), dtype=torch.float32)
    with torch.inference_mode():
        top = model(torch.tensor([prefix])).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


@click.command()
@click.argument("data", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompts", default=20, help="How many prompts of the file.")
@click.option("--max-tokens", default=128, help="New tokens a prompt.")
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)), help="Repeatable; else all.")
@click.option("--window", "windows", multiple=True, type=click.Choice(WINDOWS), help="Repeatable; else both.")
def main(data: Path, prompts: int, max_tokens: int, methods: Sequence[str], windows: Sequence[str]) -> None:
    """DATA: JSON lines with a field "prompt"."""
    texts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()[:prompts]]
    console.print(f"reference: transformers generate, {len(texts)} prompts, {max_tokens} tokens, float32 ...")
    encoded, expected = reference(texts, max_tokens)
    table = Table("method", "window", "equal", "tokens", "acceptance", "seconds")
    mismatches: list[str] = []
    given = (encoded, expected, max_tokens)
    with Engine(target_dtype="float32") as engine:
        for method in methods or METHODS:
            for window in (windows or WINDOWS) if method != "ar" else WINDOWS[:1]:
                row = check(engine, DecodingConfig(method=method, window=window), *given, mismatches)
                table.add_row(method, window if method != "ar" else "-", *row)
                console.print(f"{method} {window}: {row[0]} equal in {row[3]} s")
    console.print(table)
    for line in mismatches:
        console.print(line)
    console.print(f"{len(mismatches)} mismatches")
    sys.exit(bool(mismatches))


def check(
    engine: Engine,
    decoding: DecodingConfig,
    encoded: list[list[int]],
    expected: list[list[int]],
    most: int,
    mismatches: list[str],
) -> tuple[str, str, str, str]:
    began, equal, tokens, accepted, judged = time.monotonic(), 0, 0, 0, 0
    for i, (ids, want) in enumerate(zip(encoded, expected, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=most)
        result = engine.generate(ids, params, decoding=decoding)[0]
        tokens += len(result.tokens)
        accepted += result.statistics.num_accepted_draft_tokens
        judged += result.statistics.num_judged_draft_tokens
        if result.tokens == want:
            equal += 1
            continue
        at = next((k for k, (a, b) in enumerate(zip(result.tokens, want, strict=False)) if a != b), len(want))
        name = f"{decoding.method} {decoding.window}, prompt {i}, token {at}"
        mismatches.append(f"{name}: got {result.tokens[at : at + 3]}, gap {gap(ids + want[:at]):.3g}")
    rate = f"{accepted / judged:.2f}" if judged else "-"
    return f"{equal}/{len(encoded)}", str(tokens), rate, f"{time.monotonic() - began:.0f}"


if __name__ == "__main__":
    main()
