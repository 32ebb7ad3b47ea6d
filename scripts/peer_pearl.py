#!/usr/bin/env python
"""The authors' own loops and ours, on the same pair, machine and prompts, in turns.

    git clone https://github.com/smart-lty/ParallelSpeculativeDecoding ../ParallelSpeculativeDecoding
    python scripts/peer_pearl.py ../ParallelSpeculativeDecoding
    python scripts/peer_pearl.py ../ParallelSpeculativeDecoding --target my-target --draft my-draft --gamma 5

Nothing of that repository is copied: its `src/engine.py` is imported from the checkout, and its three loops (target
alone, `sd`, `para_sd`) run unchanged, `para_sd` in two processes joined by `accelerate`.  They need transformers 4 and
two GPUs, so this script adapts three things:

* a model takes and gives its KV cache as tuples of tensors, and its logits in float32, as with transformers 4;
* a missing GPU ("cuda:1") means the device of the process;
* models are loaded by our loader, in one data type for both programs.

Their loops end with the window that passes the limit, and do not end at EOS.  `tokens/s` counts tokens up to EOS and
limit, prefill included, for both; `as they count` is their own way.  The last column counts tokens that agree with the
target alone, by our engine.
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
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from pearl import Engine
from pearl.cli.console import print_table
from pearl.cli.prompt_sets import json_option, write_json
from pearl.config import EngineConfig, RequestOptions
from pearl.errors import ConfigError, StartError
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.runner import forget
from pearl.lab.bench.tasks import HUMANEVAL, OURS, read_tasks
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.spec.methods import AS_PUBLISHED
from pearl.worker.placement import settled

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
    _replace_missing_gpus(torch)
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
        print(
            json.dumps({"tokens": output[0, len(asked["prompt"]) :].tolist(), "seconds": seconds}),
            flush=True,
        )


def _replace_missing_gpus(torch: Any) -> None:
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
        setattr(
            theirs,
            f"{role}_model",
            _Model(settings[role], settings[f"{role}_dtype"], settings["device"]),
        )
    return theirs


class _Model:
    """A model as transformers 4 had them: the KV cache is a list of (keys, values), and logits are float32."""

    def __init__(self, name: str, dtype: str, device: str) -> None:
        import torch

        from pearl.config import ModelConfig
        from pearl.models.checkpoints.loading import load_model

        wanted = ModelConfig(name, dtype=dtype)  # type: ignore[arg-type]
        self._model = load_model(wanted, torch.device(device)).eval()
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
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self._processes = [
            self._start(settings | own, rank, len(ranks), port) for rank, own in enumerate(ranks)
        ]
        for process in self._processes:
            self._read(process)

    def _start(
        self, settings: dict[str, Any], rank: int, ranks: int, port: int
    ) -> subprocess.Popen[str]:
        environment = os.environ | {"ACCELERATE_USE_CPU": str(settings["device"] == "cpu").lower()}
        if ranks > 1:
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
            }
            numbers |= {"MASTER_PORT": port}
            environment |= {"MASTER_ADDR": "127.0.0.1"} | {
                name: str(value) for name, value in numbers.items()
            }
        own = settings | {"device": f"cuda:{rank}"} if settings["device"] == "cuda" else settings
        command = [sys.executable, __file__, "--serve", json.dumps(own)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

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
        raise StartError("a process of theirs has ended; its error message stands above")

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


@click.command()
@click.argument("repository", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--target", default="embedded", show_default=True)
@click.option("--draft", default="embedded-draft", show_default=True)
@click.option(
    "--prompts",
    default=HUMANEVAL,
    show_default=True,
    help="humaneval, summaries, edits or a .jsonl file.",
)
@click.option("--limit", type=int, default=3, show_default=True, help="Prompts.")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option(
    "--dtype", default="float32", show_default=True, help="Of both models, theirs and ours."
)
@click.option(
    "--gamma",
    type=int,
    default=4,
    show_default=True,
    help="Window of sd and of PEARL, theirs and ours.",
)
@json_option
def main(
    repository: Path, target: str, draft: str, prompts: str, limit: int, max_tokens: int, dtype: str, gamma: int,
    to: Path | None,
) -> None:  # fmt: skip
    """Measure theirs and ours, greedy, in turns."""
    if not (repository / "src" / "engine.py").is_file():
        raise ConfigError(
            f"{repository} holds no src/engine.py: give a checkout of ParallelSpeculativeDecoding"
        )
    config = EngineConfig(target=target, draft=draft, target_dtype=dtype, draft_dtype=dtype)
    tasks = read_tasks(prompts, None if prompts in (HUMANEVAL, *OURS) else Path(prompts), limit)
    conditions = Conditions()
    samples = measure(repository, config, [task.turns[0] for task in tasks], max_tokens, gamma)
    conditions.stop()
    if to is not None:
        settings: dict[str, Any] = {
            "target": target,
            "draft": draft,
            "dtype": dtype,
            "max_tokens": max_tokens,
        }
        settings |= {"gamma": gamma, "prompts": prompts}
        write_json(
            to, {"kind": "peer", "settings": settings, **conditions.as_dict(), "samples": samples}
        )
    _print(samples, f"greedy, {dtype}, {len(tasks)} prompts, window {gamma}; {conditions}")


def measure(
    repository: Path, config: EngineConfig, prompts: Sequence[str], max_tokens: int, gamma: int
) -> list[dict[str, Any]]:
    """A sample for each prompt and system, as `_sample` makes them; another text of the first prompt warms up."""
    tokenizer, defaults = load_tokenizer(config.target)
    ours = {
        "ar": RequestOptions(method="ar"),
        "sd": RequestOptions(method="sd", gamma=gamma),
        "pearl, published": RequestOptions(
            method="pearl", window="fixed", gamma=gamma, **AS_PUBLISHED
        ),
        "pearl": RequestOptions(method="pearl"),
    }
    settings: dict[str, Any] = {
        "repository": str(repository.resolve()),
        "vocab_size": tokenizer.vocab_size,
    }
    settings |= {"temp": 0.0, "top_k": 0, "top_p": 0.0, "gamma": gamma, "seed": 1234}
    settings |= {
        name: getattr(config, name) for name in ("target", "draft", "target_dtype", "draft_dtype")
    }
    devices = {role: settled(config, role) for role in config.roles}
    settings["device"] = "cuda" if devices["target"].gpus else "cpu"
    cores = {role: sorted(device.cores or ()) for role, device in devices.items()}
    alone = [{"roles": ["draft", "target"], "cores": sorted({*cores["target"], *cores["draft"]})}]
    samples = []
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(config=config))
        one = Peers(settings | {"eval_mode": "sd"}, alone)
        stack.callback(one.close)
        two = Peers(
            settings | {"eval_mode": "para_sd"},
            [{"roles": [r], "cores": cores[r]} for r in ("draft", "target")],
        )
        stack.callback(two.close)
        for number, text in enumerate([prompts[0], *prompts]):
            prompt, limit = engine.encode(text), max_tokens if number else WARM_UP
            params, texts = RequestOptions(temperature=0.0, seed=0, max_tokens=limit), {}
            for name, decoding in ours.items():
                forget(engine, decoding, prompt)
                (result,) = engine.generate(prompt, params.overridden_by(decoding))
                known = result.statistics
                texts[f"ours: {name}"] = result.tokens, known.seconds - known.queue_seconds
            for loop, group in {"large": one, "sd": one, "para_sd": two}.items():
                texts[f"theirs: {loop}"] = group.decode(loop, prompt, limit)
            expected = texts["ours: ar"][0]
            found = [
                _sample(name, *text, expected, limit, defaults.eos) for name, text in texts.items()
            ]
            samples += [{"prompt": number} | each for each in found] if number else []
    return samples


def _sample(
    name: str,
    tokens: list[int],
    seconds: float,
    expected: list[int],
    max_tokens: int,
    eos: Sequence[int],
) -> dict[str, Any]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    kept = tokens[: min(end, max_tokens)]
    pairs = enumerate(zip(kept, expected, strict=False))
    return {
        "system": name,
        "returned": len(tokens),
        "tokens": len(kept),
        "seconds": seconds,
        "rate": len(kept) / seconds,
        "as_they_count": len(tokens) / seconds,
        "same": next((i for i, (a, b) in pairs if a != b), min(len(kept), len(expected))),
        "of": len(expected),
    }


def _print(samples: Sequence[dict[str, Any]], end: str) -> None:
    rows = []
    for name in dict.fromkeys(sample["system"] for sample in samples):
        own = [sample for sample in samples if sample["system"] == name]
        total = {
            key: sum(sample[key] for sample in own)
            for key in ("tokens", "returned", "seconds", "same", "of")
        }
        rates = (total["tokens"] / total["seconds"], total["returned"] / total["seconds"])
        counts = (str(total["tokens"]), str(total["returned"]), f"{total['same']} of {total['of']}")
        rows.append([name, *(f"{rate:.1f}" for rate in rates), *counts])
    columns = ("system", "tokens/s", "as they count", "tokens", "returned", "same as ours alone")
    print_table(columns, rows, end)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
