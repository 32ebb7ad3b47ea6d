"""Tokens a second on the embedded pair, all in one run on one machine, the same prompts for all.

Rows: `pearl` and `sd` on two cores, `ar` on one and on both, `transformers` generate on one and on both.  The methods
take turns prompt by prompt, so that a slow minute hits all of them.  Greedy; only committed tokens up to EOS count.

    python scripts/bench_embedded.py          # about fifteen minutes
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import click
from bench_paced import stolen_seconds
from rich.console import Console
from rich.table import Table

from pearl import Engine, SamplingParams

PROMPTS = [
    "Explain gravity to a beginner.",
    "Write a Python function that reverses a linked list.",
    "Give three tips for staying healthy.",
    "Tell a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise how photosynthesis works.",
]

# transformers runs in a process of its own, pinned before torch starts, answering one line for each prompt
GENERATE = """
import json, os, sys, time
cores = [int(c) for c in sys.argv[1].split(",")]
os.sched_setaffinity(0, cores)
import torch
torch.set_num_threads(len(cores))
from transformers import AutoModelForCausalLM
from pearl.models.embedded import embedded_target
model = AutoModelForCausalLM.from_pretrained(embedded_target(), dtype=torch.bfloat16)
print("ready", flush=True)
for line in sys.stdin:
    prompt, most = json.loads(line)
    ids = torch.tensor([prompt])
    times = []

    class Clock:
        def put(self, value): times.append(time.perf_counter())
        def end(self): pass

    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most, streamer=Clock())
    times = times[1:]  # the first put is the prompt
    print(json.dumps((len(times) - 1) / (times[-1] - times[0])), flush=True)
"""


class Generate:
    """transformers' generate on given cores; decoding rate of one text."""

    def __init__(self, cores: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", GENERATE, cores], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def rate(self, prompt: list[int], most: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps([prompt, most]), file=self._process.stdin, flush=True)
        return float(json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("transformers' process ended; its error stands above")
        return line

    def close(self) -> None:
        self._process.communicate()


def over_the_same_text(rates: dict[str, list[float]], one: str, other: str) -> float:
    """The median, over texts, of a ratio whose two rates were measured one soon after the other."""
    return median(a / b for a, b in zip(rates[one], rates[other], strict=True) if b)


@click.command()
@click.option("--max-tokens", default=96, help="Most tokens a text.")
@click.option("--repeats", default=2, help="Rounds over the prompts.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Also write every rate to this file.")
def main(max_tokens: int, repeats: int, out: Path | None) -> None:
    """Prints a table of tokens a second after the first token: median over prompts and rounds. The ratios are medians
    over texts too, so that a slow minute weighs on both sides of each.
    """
    console = Console()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    rates: dict[str, list[float]] = {}
    alphas: list[float] = []
    console.print("starting three engines and two generates ...")
    pair = Engine(target_device="cpu:0", draft_device="cpu:1")
    one = Engine(draft="none", target_device="cpu:0")
    both = Engine(draft="none", target_device="cpu:0-1")
    hf_one, hf_both = Generate("0"), Generate("0,1")
    began, stolen = time.monotonic(), stolen_seconds()
    try:
        for round_ in range(repeats + 1):  # the first round warms up
            for prompt in PROMPTS[: 1 if round_ == 0 else None]:
                ids = pair.encode(prompt, raw=False)
                row = {}
                for method in ("pearl", "sd"):
                    statistics = pair.generate(ids, params, method=method)[0].statistics
                    row[f"{method}, two cores"] = statistics.tokens_per_second
                    if method == "pearl" and round_:
                        alphas.append(statistics.draft_acceptance_rate or 0.0)
                for cores, engine, hf in (("one core", one, hf_one), ("both cores", both, hf_both)):
                    row[f"ar, {cores}"] = engine.generate(ids, params, method="ar")[0].statistics.tokens_per_second
                    row[f"transformers generate, {cores}"] = hf.rate(ids, max_tokens)
                if round_:
                    for name, rate in row.items():
                        rates.setdefault(name, []).append(rate or 0.0)
        window = pair.generate(ids, params, method="pearl")[0].statistics
    finally:
        for thing in (pair, one, both, hf_one, hf_both):
            thing.close()
    table = Table("what", "tokens/s, median", "least", "most", "over ar, one core")
    for name, r in rates.items():
        over = over_the_same_text(rates, name, "ar, one core")
        table.add_row(name, f"{median(r):.2f}", f"{min(r):.2f}", f"{max(r):.2f}", f"{over:.2f}")
    console.print(table)
    for cores in ("one core", "both cores"):
        over = over_the_same_text(rates, f"ar, {cores}", f"transformers generate, {cores}")
        console.print(f"ar over transformers generate, {cores}: {over:.3f}")
    console.print(f"pearl over sd: {over_the_same_text(rates, 'pearl, two cores', 'sd, two cores'):.3f}")
    share = (stolen_seconds() - stolen) / (os.cpu_count() or 1) / (time.monotonic() - began)
    console.print(f"stolen by the host's other machines: {share:.1%} of the cores' time")
    console.print(f"acceptance rate (accepted / judged), median: {median(alphas):.2f}; window c = {window.window}")
    times = ", ".join(f"{n}: {t * 1e3:.1f}" for n, t in window.t_target.items())
    console.print(f"t_draft {window.t_draft * 1e3:.1f} ms; t_target(n) {times} ms; ratio {window.speed_ratio:.2f}")
    console.print(
        f"{len(PROMPTS)} prompts x {repeats}, {max_tokens} tokens, bfloat16, {time.monotonic() - began:.0f} s; "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    )
    if out:
        out.write_text(json.dumps({"rates": rates, "acceptance": alphas}, indent=1))


if __name__ == "__main__":
    main()
