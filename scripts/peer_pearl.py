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
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
    """Answer each line of standard input (loop, prompt, max_tokens) with a line: tokens and seconds, of rank 0."""
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    import torch

    torch.set_num_threads(max(1, len(settings["cores"])))
    _replace_missing_gpus(torch)
    theirs = _their_decoding(settings)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        theirs.args.eval_mode = request["loop"]
        theirs.args.max_tokens = request["max_tokens"]
        prompt = request["prompt"]
        began = time.perf_counter()
        output = getattr(theirs, LOOPS[request["loop"]])(torch.tensor([prompt]))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        answer = {"tokens": output[0, len(prompt) :].tolist(), "seconds": seconds}
        print(json.dumps(answer), flush=True)


def _replace_missing_gpus(torch: Any) -> None:
    original = torch.Tensor.to
    present = torch.cuda.device_count()

    def to(tensor: Any, *arguments: Any, **options: Any) -> Any:
        first = arguments[0] if arguments else None
        if isinstance(first, str) and first.startswith("cuda:") and int(first[5:]) >= present:
            arguments = (tensor.device, *arguments[1:])
        return original(tensor, *arguments, **options)

    torch.Tensor.to = to


def _their_decoding(settings: dict[str, Any]) -> Any:
    """Return an instance of their abstract `Decoding`, with the models that this rank needs."""
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
        model = _PeerModel(settings[role], settings[f"{role}_dtype"], settings["device"])
        setattr(theirs, f"{role}_model", model)
    return theirs


class _PeerModel:
    """A model as transformers 4 had them: the KV cache is a list of (keys, values), and logits are float32."""

    def __init__(self, name: str, dtype: str, device: str) -> None:
        import torch

        from pearl.config import ModelConfig
        from pearl.models.checkpoints.loading import load_model

        config = ModelConfig(name, dtype=dtype)  # type: ignore[arg-type]
        self._model = load_model(config, torch.device(device)).eval()
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes = []
        for rank, rank_settings in enumerate(ranks):
            process = self._start(settings | rank_settings, rank, len(ranks), port)
            self._processes.append(process)
        for process in self._processes:
            self._read(process)

    def _start(
        self, settings: dict[str, Any], rank: int, ranks: int, port: int
    ) -> subprocess.Popen[str]:
        device = settings["device"]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true" if device == "cpu" else "false"}
        if ranks > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        if device == "cuda":
            settings = settings | {"device": f"cuda:{rank}"}
        command = [sys.executable, __file__, "--serve", json.dumps(settings)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def decode(self, loop: str, prompt: Sequence[int], max_tokens: int) -> Text:
        request = json.dumps({"loop": loop, "prompt": list(prompt), "max_tokens": max_tokens})
        for process in self._processes:
            assert process.stdin is not None
            print(request, file=process.stdin, flush=True)
        answers = [self._read(process) for process in self._processes]
        return Text(answers[0]["tokens"], answers[0]["seconds"])

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
        raise ConfigError(
            f"{repository} holds no src/engine.py: give a checkout of ParallelSpeculativeDecoding"
        )
    config = EngineConfig(target=target, draft=draft, target_dtype=dtype, draft_dtype=dtype)
    tasks = read_tasks(prompts, None if prompts in (HUMANEVAL, *OURS) else Path(prompts), limit)
    conditions = Conditions()
    samples = measure(repository, config, [task.turns[0] for task in tasks], max_tokens, gamma)
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
        write_json(
            to, {"kind": "peer", "settings": settings, **conditions.as_dict(), "samples": samples}
        )
    _print(samples, f"greedy, {dtype}, {len(tasks)} prompts, window {gamma}; {conditions}")


def measure(
    repository: Path, config: EngineConfig, prompts: Sequence[str], max_tokens: int, gamma: int
) -> list[dict[str, Any]]:
    """Return a sample for each prompt and system, as `_sample` makes them; the first prompt warms up."""
    tokenizer, defaults = load_tokenizer(config.target)
    devices = {role: settled(config, role) for role in config.roles}
    settings = {
        "repository": str(repository.resolve()),
        "vocab_size": tokenizer.vocab_size,
        "temp": 0.0,
        "top_k": 0,
        "top_p": 0.0,
        "gamma": gamma,
        "seed": 1234,
        "target": config.target,
        "draft": config.draft,
        "target_dtype": config.target_dtype,
        "draft_dtype": config.draft_dtype,
        "device": "cuda" if devices["target"].gpus else "cpu",
    }
    cores = {role: sorted(device.cores or ()) for role, device in devices.items()}
    all_cores = sorted({*cores["target"], *cores["draft"]})
    samples = []
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(config=config))
        single = Peers(
            settings | {"eval_mode": "sd"}, [{"roles": ["draft", "target"], "cores": all_cores}]
        )
        stack.callback(single.close)
        pair = Peers(
            settings | {"eval_mode": "para_sd"},
            [{"roles": [role], "cores": cores[role]} for role in ("draft", "target")],
        )
        stack.callback(pair.close)
        for number, text in enumerate([prompts[0], *prompts]):
            prompt = engine.encode(text)
            limit = max_tokens if number else WARM_UP
            texts = _ours(engine, prompt, limit, gamma)
            for loop, peers in {"large": single, "sd": single, "para_sd": pair}.items():
                texts[f"theirs: {loop}"] = peers.decode(loop, prompt, limit)
            if not number:  # a warm-up
                continue
            expected = texts["ours: ar"].tokens
            for name, decoded in texts.items():
                sample = _sample(name, decoded, expected, limit, defaults.eos)
                samples.append({"prompt": number} | sample)
    return samples


class Text(NamedTuple):
    """The tokens of a text, and the seconds in which it was decoded."""

    tokens: list[int]
    seconds: float


def _ours(engine: Engine, prompt: list[int], max_tokens: int, gamma: int) -> dict[str, Text]:
    """Decode a prompt with each of our methods."""
    methods = {
        "ar": RequestOptions(method="ar"),
        "sd": RequestOptions(method="sd", gamma=gamma),
        "pearl, published": RequestOptions(
            method="pearl", window="fixed", gamma=gamma, **AS_PUBLISHED
        ),
        "pearl": RequestOptions(method="pearl"),
    }
    params = RequestOptions(temperature=0.0, seed=0, max_tokens=max_tokens)
    texts = {}
    for name, options in methods.items():
        forget(engine, options, prompt)
        (result,) = engine.generate(prompt, params.overridden_by(options))
        statistics = result.statistics
        seconds = statistics.seconds - statistics.queue_seconds
        texts[f"ours: {name}"] = Text(result.tokens, seconds)
    return texts


def _sample(
    name: str, text: Text, expected: list[int], max_tokens: int, eos: Sequence[int]
) -> dict[str, Any]:
    tokens = []
    for token in text.tokens[:max_tokens]:
        tokens.append(token)
        if token in eos:
            break
    same = 0
    for token, expected_token in zip(tokens, expected, strict=False):
        if token != expected_token:
            break
        same += 1
    return {
        "system": name,
        "returned": len(text.tokens),
        "tokens": len(tokens),
        "seconds": text.seconds,
        "rate": len(tokens) / text.seconds,
        "as_they_count": len(text.tokens) / text.seconds,
        "same": same,
        "of": len(expected),
    }


def _print(samples: Sequence[dict[str, Any]], end: str) -> None:
    totals: dict[str, Counter[str]] = {}
    for sample in samples:
        total = totals.setdefault(sample["system"], Counter())
        for key in ("tokens", "returned", "seconds", "same", "of"):
            total[key] += sample[key]
    rows = []
    for name, total in totals.items():
        seconds = total["seconds"]
        row = [
            name,
            f"{total['tokens'] / seconds:.1f}",
            f"{total['returned'] / seconds:.1f}",
            str(total["tokens"]),
            str(total["returned"]),
            f"{total['same']} of {total['of']}",
        ]
        rows.append(row)
    columns = ("system", "tokens/s", "as they count", "tokens", "returned", "same as ours alone")
    print_table(columns, rows, end)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
