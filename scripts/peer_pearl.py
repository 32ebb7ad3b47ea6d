#!/usr/bin/env python
"""The authors' own loops and ours, on the same pair, machine and prompts, in turns.

    git clone https://github.com/smart-lty/ParallelSpeculativeDecoding ../ParallelSpeculativeDecoding
    python scripts/peer_pearl.py ../ParallelSpeculativeDecoding
    python scripts/peer_pearl.py ../ParallelSpeculativeDecoding --target my-target --draft my-draft --gamma 5

Nothing of that repository is copied: its `src/engine.py` is imported from where it lies, and its three loops (target
alone, `sd`, `para_sd`) run as they are, `para_sd` in two processes joined by `accelerate`. Three things are put around
them, for they were written for transformers 4 and two GPUs:

* a model takes and gives its KV cache as tuples of tensors, and its logits in float32, as transformers 4 had them;
* a GPU that is not there ("cuda:1") means the device that the process has;
* models are loaded by our loader, in one data type for them and for us.

Their loops end with the window that passes the limit, and do not end at EOS. `tokens/s` counts what a user gets: tokens
up to EOS and limit, prefill included, for them and for us; `as they count` is their own way. The last column says how
many tokens agree with the target alone, by our engine.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from rich.table import Table

from pearl import SamplingParams
from pearl.cli.numbers import json_option, table_console, write_json
from pearl.config import DecodingConfig, EngineConfig
from pearl.engine import Engine
from pearl.errors import ConfigError, StartError
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.systems import devices_of
from pearl.lab.bench.tasks import HUMANEVAL, OURS, read_tasks
from pearl.models.tokenizers import load_tokenizer
from pearl.spec.methods import AS_PUBLISHED

LOOPS = {
    "large": "autoregressive_sampling",
    "sd": "speculative_decoding",
    "para_sd": "parallel_speculative_decoding",
}
WARM_UP = 16  # tokens


# ---- in a process of theirs ----


def serve(settings: dict[str, Any]) -> None:
    """Answers each line of standard input (loop, prompt, max_tokens) with a line: tokens and seconds, of rank 0."""
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    import torch

    torch.set_num_threads(max(1, len(settings["cores"])))
    _say_own_device_for_missing_ones(torch)
    theirs = _their_decoding(settings)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        theirs.args.eval_mode, theirs.args.max_tokens = asked["loop"], asked["max_tokens"]
        began = time.perf_counter()
        output = getattr(theirs, LOOPS[asked["loop"]])(torch.tensor([asked["prompt"]]))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        print(json.dumps({"tokens": output[0, len(asked["prompt"]) :].tolist(), "seconds": seconds}), flush=True)


def _say_own_device_for_missing_ones(torch: Any) -> None:
    original, present = torch.Tensor.to, torch.cuda.device_count()

    def to(tensor: Any, *arguments: Any, **options: Any) -> Any:
        first = arguments[0] if arguments else None
        if isinstance(first, str) and first.startswith("cuda:") and int(first[5:]) >= present:
            arguments = (tensor.device, *arguments[1:])
        return original(tensor, *arguments, **options)

    torch.Tensor.to = to


def _their_decoding(settings: dict[str, Any]) -> Any:
    """An instance of their abstract `Decoding`, with the models that this rank needs."""
    sys.path.insert(0, settings["repository"])
    decoding: Any = importlib.import_module("src.engine").Decoding

    class Theirs(decoding):
        def load_data(self) -> None: ...

        def preprocess(self, input_text: str) -> str:
            return input_text

        def postprocess(self, input_text: str, output_text: str) -> str:
            return output_text

        def eval(self) -> None: ...

    names = ("seed", "eval_mode", "gamma", "temp", "top_k", "top_p", "vocab_size")
    theirs = Theirs(SimpleNamespace(max_tokens=0, **{name: settings[name] for name in names}))
    theirs.vocab_size = settings["vocab_size"]
    for role in settings["roles"]:
        setattr(theirs, f"{role}_model", _Model(settings[role], settings[f"{role}_dtype"], settings["device"]))
    return theirs


class _Model:
    """A model as transformers 4 had them: the KV cache is a list of (keys, values), and logits are float32."""

    def __init__(self, name: str, dtype: str, device: str) -> None:
        import torch

        from pearl.models.loading import load_model

        self._model = load_model(name, device=torch.device(device), dtype=dtype, device_map=None).eval()
        self.device = self._model.device

    def __call__(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(past_key_values) if past_key_values else DynamicCache()
        output = self._model(input_ids, past_key_values=cache, use_cache=True)
        pairs = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        return SimpleNamespace(logits=output.logits.float(), past_key_values=pairs)


# ---- in ours ----


class Peers:
    """Processes of theirs that decode together: one for the target alone and `sd`, two for `para_sd`."""

    def __init__(self, settings: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> None:
        port = _free_port()
        self._processes = [self._start(settings | own, rank, len(ranks), port) for rank, own in enumerate(ranks)]
        for process in self._processes:
            self._read(process)

    def _start(self, settings: dict[str, Any], rank: int, ranks: int, port: int) -> subprocess.Popen[str]:
        environment = os.environ | {"ACCELERATE_USE_CPU": str(settings["device"] == "cpu").lower()}
        if ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            numbers |= {"MASTER_PORT": port}
            environment |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}
        own = settings | {"device": f"cuda:{rank}"} if settings["device"] == "cuda" else settings
        command = [sys.executable, __file__, "--serve", json.dumps(own)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def decode(self, loop: str, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        asked = json.dumps({"loop": loop, "prompt": list(prompt), "max_tokens": max_tokens})
        for process in self._processes:
            assert process.stdin is not None
            print(asked, file=process.stdin, flush=True)
        first, *_ = [self._read(process) for process in self._processes]
        return first["tokens"], first["seconds"]

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # their code prints, too
                answer: dict[str, Any] = json.loads(line)
                return answer
        self.close()
        raise StartError("a process of theirs has ended; its own words stand above")

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _settings(repository: Path, config: EngineConfig, gamma: int, vocab: int) -> dict[str, Any]:
    sampling = {"temp": 0.0, "top_k": 0, "top_p": 0.0, "gamma": gamma, "seed": 1234, "vocab_size": vocab}
    models = {"target": config.target, "draft": config.draft}
    dtypes = {"target_dtype": config.target_dtype, "draft_dtype": config.draft_dtype}
    return {"repository": str(repository.resolve())} | sampling | models | dtypes


@click.command()
@click.argument("repository", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--target", default="embedded", show_default=True)
@click.option("--draft", default="embedded-draft", show_default=True)
@click.option("--prompts", default=HUMANEVAL, show_default=True, help="humaneval, summaries, edits or a .jsonl file.")
@click.option("--limit", type=int, default=3, show_default=True, help="Prompts.")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--dtype", default="float32", show_default=True, help="Of both models, theirs and ours.")
@click.option("--gamma", type=int, default=4, show_default=True, help="Window of sd and of PEARL, theirs and ours.")
@json_option
def main(
    repository: Path,
    target: str,
    draft: str,
    prompts: str,
    limit: int,
    max_tokens: int,
    dtype: str,
    gamma: int,
    to: Path | None,
) -> None:
    """Measure theirs and ours, greedy, in turns."""
    if not (repository / "src" / "engine.py").is_file():
        raise ConfigError(f"{repository} holds no src/engine.py: give a checkout of ParallelSpeculativeDecoding")
    config = EngineConfig(target=target, draft=draft, target_dtype=dtype, draft_dtype=dtype)
    tasks = read_tasks(prompts, None if prompts in (HUMANEVAL, *OURS) else Path(prompts), limit)
    conditions = Conditions()
    samples = _measure(repository, config, [task.turns[0] for task in tasks], max_tokens, gamma)
    conditions.stop()
    if to is not None:
        settings = {
            "target": target,
            "draft": draft,
            "dtype": dtype,
            "max_tokens": max_tokens,
            "gamma": gamma,
            "prompts": prompts,
        }
        write_json(to, {"kind": "peer", "settings": settings, **conditions.as_dict(), "samples": samples})
    _print(samples, f"greedy, {dtype}, {len(tasks)} prompts, window {gamma}; {conditions}")


def _measure(
    repository: Path, config: EngineConfig, prompts: Sequence[str], max_tokens: int, gamma: int
) -> list[dict[str, Any]]:
    on_target, on_draft = devices_of(config)
    tokenizer, defaults = load_tokenizer(config.target)
    ours = {
        "ar": DecodingConfig(method="ar"),
        "sd": DecodingConfig(method="sd", gamma=gamma),
        "pearl, published": DecodingConfig(method="pearl", window="fixed", gamma=gamma, **AS_PUBLISHED),
        "pearl": DecodingConfig(method="pearl"),
    }
    samples = []
    with Engine(config=config) as engine:
        device = "cuda" if on_target.gpus else "cpu"
        settings = _settings(repository, config, gamma, tokenizer.vocab_size) | {"device": device}
        cores = {"target": list(on_target.cores), "draft": list(on_draft.cores)}
        both = sorted({*cores["target"], *cores["draft"]})
        one = Peers(settings | {"eval_mode": "sd"}, [{"roles": ["draft", "target"], "cores": both}])
        two = Peers(
            settings | {"eval_mode": "para_sd"},
            [{"roles": [role], "cores": cores[role]} for role in ("draft", "target")],
        )
        try:
            peers = {"large": one, "sd": one, "para_sd": two}
            for number, text in enumerate([prompts[0], *prompts]):
                prompt, limit = engine.encode(text), max_tokens if number else WARM_UP
                found = _in_turns(engine, ours, peers, prompt, limit, defaults.eos)
                samples += [{"prompt": number} | one for one in found] if number else []
        finally:
            one.close()
            two.close()
    return samples


def _in_turns(
    engine: Engine,
    ours: dict[str, DecodingConfig],
    peers: dict[str, Peers],
    prompt: list[int],
    max_tokens: int,
    eos: Sequence[int],
) -> list[dict[str, Any]]:
    params, found = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens), []
    expected: list[int] = []
    for name, decoding in ours.items():
        other = [int(prompt[0] == 0)]  # replaces what the caches hold of this prompt
        engine.generate(other, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), decoding=decoding)
        (result,) = engine.generate(prompt, params, decoding=decoding)
        expected = expected or list(result.tokens)
        s = result.statistics
        found.append(
            _sample(f"ours: {name}", list(result.tokens), s.seconds - s.queue_seconds, expected, max_tokens, eos)
        )
    for loop, group in peers.items():
        tokens, seconds = group.decode(loop, prompt, max_tokens)
        found.append(_sample(f"theirs: {loop}", tokens, seconds, expected, max_tokens, eos))
    return found


def _sample(
    name: str, tokens: list[int], seconds: float, expected: list[int], max_tokens: int, eos: Sequence[int]
) -> dict[str, Any]:
    kept = tokens[:max_tokens]
    ends = [i for i, token in enumerate(kept) if token in eos]
    kept = kept[: ends[0] + 1] if ends else kept
    same = next(
        (i for i, (a, b) in enumerate(zip(kept, expected, strict=False)) if a != b), min(len(kept), len(expected))
    )
    return {
        "system": name,
        "returned": len(tokens),
        "tokens": len(kept),
        "seconds": seconds,
        "rate": len(kept) / seconds,
        "as_they_count": len(tokens) / seconds,
        "same": same,
        "of": len(expected),
    }


def _print(samples: Sequence[dict[str, Any]], end: str) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("system", "tokens/s", "as they count", "tokens", "returned", "same as ours alone"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name in dict.fromkeys(sample["system"] for sample in samples):
        own = [sample for sample in samples if sample["system"] == name]
        total = {key: sum(sample[key] for sample in own) for key in ("tokens", "returned", "seconds", "same", "of")}
        rates = (total["tokens"] / total["seconds"], total["returned"] / total["seconds"])
        counts = (str(total["tokens"]), str(total["returned"]), f"{total['same']} of {total['of']}")
        table.add_row(name, *(f"{rate:.1f}" for rate in rates), *counts)
    console = table_console()
    console.print(table)
    console.print(f"\n{end}", soft_wrap=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
