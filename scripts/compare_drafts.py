"""Draft architectures by what counts: how fast each would make PEARL, given an acceptance rate, from measured forwards.

Without --run shapes are compared, not trained models: a forward takes as long whatever the weights are.  Each shape
and the target take turns on one thread, so that a slow minute hits all; the time of a forward is the median of
the CPU time of its repeats, which is the wall's on a core that nobody else uses.  Tokens a second are the virtual
clock's (`pearl.lab.simulate`): an estimate, with i.i.d. acceptance and messages that cost nothing.

    python scripts/compare_drafts.py                  # of the embedded target: about a minute
    python scripts/compare_drafts.py --run DIR ...    # drafts that were trained, at the agreement that each has reached
"""

from __future__ import annotations

import copy
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from pearl.lab.distill.draft import head, hidden_states
from pearl.lab.distill.storage import Shards
from pearl.lab.simulate import CoinDraft, CoinTarget, Timing, simulate
from pearl.models.embedded import pack_layers, unpack_layers
from pearl.models.llama import LlamaRunner
from pearl.models.loading import load_model, load_runner
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling

CPU = torch.device("cpu")
TRIMMED = (16384, 8192)  # output tokens, tried on the first run
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7)
CONTEXT, TOKENS = 512, 2000
SHAPES: dict[str, dict[str, int]] = {
    "1 layer": {"num_hidden_layers": 1},
    "2 layers": {"num_hidden_layers": 2},
    "4 layers": {"num_hidden_layers": 4},
    "2 layers in 4 bits": {"num_hidden_layers": 2, "bits": 4},
    "4 layers in 4 bits (the bundled draft)": {"num_hidden_layers": 4, "bits": 4},
    "6 layers in 4 bits": {"num_hidden_layers": 6, "bits": 4},
    "8 layers in 4 bits": {"num_hidden_layers": 8, "bits": 4},
    "2 layers, width 384, tied": {"num_hidden_layers": 2, "width": 384},
    "2 layers, width 192, tied": {"num_hidden_layers": 2, "width": 192},
    "4 layers, width 192, tied": {"num_hidden_layers": 4, "width": 192},
    "2 layers, 16,384 output tokens": {"num_hidden_layers": 2, "vocab_size": 16384},
    "2 layers, 8,192 output tokens": {"num_hidden_layers": 2, "vocab_size": 8192},
}


def runner_of(config: Any, shape: dict[str, int]) -> LlamaRunner:
    """A runner of random weights in the target's class, of another shape."""
    from transformers import LlamaForCausalLM

    config, width = copy.deepcopy(config), shape.get("width", config.hidden_size)
    for name, value in shape.items():
        if name not in ("width", "bits"):
            setattr(config, name, value)
    config.intermediate_size = config.intermediate_size * width // config.hidden_size
    config.num_attention_heads = width // config.head_dim
    config.num_key_value_heads = max(n for n in (1, 2, 3) if config.num_attention_heads % n == 0)
    config.hidden_size = width
    model = LlamaForCausalLM(config).bfloat16().eval()
    if "bits" not in shape:
        return LlamaRunner(model, CONTEXT)
    layers = model.model.layers
    layers.load_state_dict(unpack_layers(pack_layers(layers.state_dict())))
    return LlamaRunner(model, CONTEXT, rounding="stored")


def forward_times(runners: dict[str, ModelRunner], fed: dict[str, int], repeats: int) -> dict[str, float]:
    """CPU seconds of a forward at a cache of 128 tokens; in turns, the median."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        if runner.length() == 0:
            feed_chain(runner, [1] * 128, 0)
    for _ in range(repeats):
        for name, runner in runners.items():
            began = time.thread_time()
            feed_chain(runner, [1] * fed.get(name, 1), fed.get(name, 1))
            times[name].append(time.thread_time() - began)
            runner.rollback(128)
    return {name: median(of) for name, of in times.items()}


def estimate(alpha: float, t_draft: float, t_target: dict[int, float]) -> float:
    """Tokens a second of `pearl`, window stream, under the virtual clock."""
    known = sorted(t_target)

    def of(fed: int) -> float:
        return t_target[next((n for n in known if n >= fed), known[-1])]

    submit = Submit(1, (1,), 1 + TOKENS, RequestOptions(sampling=Sampling()))
    outcome = simulate(submit, CoinTarget(alpha), CoinDraft(), Timing(t_draft, of))
    return len(outcome.tokens) / outcome.seconds


@torch.no_grad()
def reached(run: Path, draft: PreTrainedModel, size: int) -> float:
    """How often the target's token on the held-out prompts is the draft's likeliest, of the `size` tokens that the
    target's answers in the run hold most of.
    """
    shards = Shards(run / "answers")
    mass = torch.zeros(draft.config.vocab_size)
    for path in sorted((run / "answers").glob("round-*.pt")):
        for answer in shards.read(path.stem):
            mass.index_add_(0, answer.top_ids.flatten().long(), answer.top_probs.flatten().float())
    kept = mass.topk(size).indices.sort().values
    matrix, agreed, total = head(draft)[kept], 0, 0
    for path in sorted((run / "answers").glob("held-out-*.pt")):
        for answer in shards.read(path.stem):
            ids = torch.tensor([*answer.prompt, *answer.tokens])
            states = hidden_states(draft, ids[None, :-1])[0, len(answer.prompt) - 1 :]
            agreed += int((kept[(states @ matrix.T).argmax(-1)] == ids[len(answer.prompt) :]).sum())
            total += len(answer.tokens)
    return agreed / total


@click.command()
@click.option("--target", default="embedded", show_default=True)
@click.option("--repeats", default=40, show_default=True)
@click.option("--run", "runs", multiple=True, type=click.Path(path_type=Path), help="What `pearl distill` has made.")
@click.option("--json", "as_json", is_flag=True)
def main(target: str, repeats: int, runs: tuple[Path, ...], as_json: bool) -> None:
    torch.set_num_threads(1)
    config = load_model(target, device=CPU).config
    shared: ModelRunner = load_runner(target, device=CPU, max_context=CONTEXT)
    fed = {f"target of {n}": n for n in (1, 2, 4, 6, 8, 12, 16)}
    alphas: dict[str, dict[str, float]] = {}
    runners: dict[str, ModelRunner] = {}
    if runs:
        for run in runs:
            draft = load_model(str(run / "draft"), device=CPU, dtype="bfloat16")
            for size in (draft.config.vocab_size, *(size for size in TRIMMED if run == runs[0])):
                name = run.name if size == draft.config.vocab_size else f"{run.name}, {size:,} output tokens"
                runners[name] = runner_of(draft.config, {"vocab_size": size})
                alphas[name] = {"tokens/s": reached(run, draft, size)}
    else:
        alphas = {name: {f"alpha {a}": a for a in ALPHAS} for name in SHAPES}
        runners = {name: runner_of(config, shape) for name, shape in SHAPES.items()}
    times = forward_times(runners | dict.fromkeys(fed, shared), fed, repeats)
    t_target = {n: times[name] for name, n in fed.items()}
    rows = {
        name: {"t_draft": times[name], "c": t_target[1] / times[name]}
        | ({"agreement": at["tokens/s"]} if runs else {})
        | {column: estimate(a, times[name], t_target) for column, a in at.items()}
        for name, at in alphas.items()
    }
    if as_json:
        click.echo(json.dumps({"t_target": t_target, "shapes": rows}))
        return
    columns = list(next(iter(rows.values())))[1:]
    table = Table("estimated tokens a second", "t_draft ms", *columns, box=None, padding=(0, 2, 0, 0))
    for name, row in rows.items():
        rest = [f"{row[column]:.3f}" if column == "agreement" else f"{row[column]:.1f}" for column in columns]
        table.add_row(name, f"{row['t_draft'] * 1e3:.2f}", *rest)
    console = Console(highlight=False, width=120)
    console.print(table)
    console.print("t_target ms: " + ", ".join(f"{n}: {t * 1e3:.1f}" for n, t in t_target.items()))
    console.print(f"{platform.machine()}, one thread, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
