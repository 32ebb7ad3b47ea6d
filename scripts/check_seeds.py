"""One seed, one text: sampled text of the embedded pair must not depend on window, policy or timing.

Ratio rule, float32: `pearl` with stream, fixed(1), fixed(2) and fixed(7), and with random delays before every message
and every forward, against each other; coupled rule: `pearl` against seeded `ar`.  On real models a draw that lies
within rounding of its threshold may differ, because a forward of n tokens rounds differently from n forwards of one:
each difference is listed with the position where it begins.

    python scripts/check_seeds.py humaneval.jsonl        # 10 prompts, 64 tokens: about fifteen minutes on two cores
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from pearl import DecodingConfig, Engine, SamplingParams
from pearl.drafting.model import ModelProposer
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.models.loading import load_runner
from pearl.models.runner import Feed, ModelRunner, WrappedRunner
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Committed,
    Finished,
    Hello,
    Message,
    Role,
    Submit,
    Welcome,
)
from pearl.protocol.options import RequestOptions, Sampling
from pearl.trace.tracer import Tracer
from pearl.transport.base import Listener, Peer, Received
from pearl.transport.memory import memory_hub
from pearl.worker.draft import DraftWorker
from pearl.worker.draft_link import TargetSettings
from pearl.worker.rows import RowPacker
from pearl.worker.target import TargetWorker

console = Console()


class DelayedRunner(WrappedRunner):
    """Sleeps before each forward, for a random time."""

    def __init__(self, runner: ModelRunner, noise: random.Random, seconds: float) -> None:
        super().__init__(runner)
        self._noise, self._seconds = noise, seconds

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        time.sleep(self._noise.random() * self._seconds)
        return self._runner.forward(feeds)


class DelayedEndpoint:
    """Holds each message back for a random time; order is kept, as on a slow network."""

    def __init__(self, endpoint: Listener, noise: random.Random, seconds: float) -> None:
        self._endpoint, self._noise, self._seconds, self.address = endpoint, noise, seconds, endpoint.address
        self.wait, self.wake, self.close, self.trust = endpoint.wait, endpoint.wake, endpoint.close, endpoint.trust

    def send(self, message: Message, peer: Peer | None = None) -> None:
        time.sleep(self._noise.random() * self._seconds)
        self._endpoint.send(message, peer)

    def receive(self, timeout: float) -> list[Received]:
        return self._endpoint.receive(timeout)


class DelayedPair:
    """The two workers as threads of this process, every message and forward delayed."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._hub, self._stop = memory_hub(), threading.Event()
        noise = [random.Random(seed + i) for i in range(4)]
        models = [
            DelayedRunner(load_runner(spec, device=torch.device("cpu"), dtype="float32"), noise[i], seconds)
            for i, spec in enumerate(("embedded", "embedded-draft"))
        ]
        ready, (target, draft) = threading.Event(), models
        target_worker = TargetWorker(
            DelayedEndpoint(self._hub.listener, noise[2], seconds),
            TargetExecutor(target),
            TargetSettings(target.vocab_size, target.context, b"same", 300.0, expects_draft=True),
            ready.set,
            self._stop.is_set,
            Tracer(),
        )
        packer = RowPacker()
        draft_worker = DraftWorker(
            DelayedEndpoint(self._hub.connect(), noise[3], seconds),
            Hello(PROTOCOL_VERSION, Role.DRAFT, draft.vocab_size, draft.context, b"same"),
            lambda welcome: (DraftExecutor(ModelProposer(draft, welcome.vocab_size)), packer),
            lambda: None,
            self._stop.is_set,
            1.0,
            Tracer(),
        )
        self._threads = [threading.Thread(target=w.run, daemon=True) for w in (target_worker, draft_worker)]
        for thread in self._threads:
            thread.start()
        ready.wait(300)
        self._front = self._hub.connect()
        self._front.send(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
        self._messages = self._gather()
        assert isinstance(next(self._messages), Welcome)

    def _gather(self):  # type: ignore[no-untyped-def]
        while True:
            for _, message in self._front.receive(1.0):
                yield message

    def text(self, prompt: list[int], tokens: int, seed: int, eos: tuple[int, ...]) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        self._front.send(
            Submit(1, tuple(prompt), len(prompt) + tokens, RequestOptions("pearl", sampling=sampling), eos=eos)
        )
        got: list[int] = []
        for message in self._messages:
            if isinstance(message, Committed):
                got += message.tokens
            elif isinstance(message, Finished):
                return got
        raise AssertionError

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


CASES = {
    "pearl stream": DecodingConfig(method="pearl"),
    "pearl fixed(1)": DecodingConfig(method="pearl", window="fixed", gamma=1),
    "pearl fixed(2)": DecodingConfig(method="pearl", window="fixed", gamma=2),
    "pearl fixed(7)": DecodingConfig(method="pearl", window="fixed", gamma=7),
    "pearl-no-pre-verify": DecodingConfig(method="pearl-no-pre-verify"),
    "coupled ar": DecodingConfig(method="ar", rule="coupled"),
    "coupled pearl": DecodingConfig(method="pearl", rule="coupled"),
    "coupled sd": DecodingConfig(method="sd", rule="coupled"),
}


@click.command()
@click.argument("data", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompts", default=10, help="How many prompts of the file.")
@click.option("--max-tokens", default=64, help="New tokens a prompt.")
@click.option("--delay", default=0.03, help="Longest delay of a message or forward, seconds.")
def main(data: Path, prompts: int, max_tokens: int, delay: float) -> None:
    """DATA: JSON lines with a field "prompt"."""
    lines = [json.loads(line)["prompt"] for line in data.read_text().splitlines()[:prompts]]
    texts: dict[str, list[list[int]]] = {}
    with Engine(target_dtype="float32", draft_dtype="float32") as engine:
        encoded, eos = [engine.encode(line) for line in lines], engine.defaults.eos
        for name, decoding in CASES.items():
            texts[name] = [
                engine.generate(ids, _params(seed, max_tokens), decoding=decoding)[0].tokens
                for seed, ids in enumerate(encoded)
            ]
            console.print(f"{name}: done")
    pair = DelayedPair(delay, seed=1)
    texts["pearl stream, delayed"] = [pair.text(ids, max_tokens, seed, eos) for seed, ids in enumerate(encoded)]
    pair.close()
    sys.exit(report(texts))


def _params(seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=max_tokens)


def report(texts: dict[str, list[list[int]]]) -> int:
    """Prints the table; the number of texts that differ."""
    table, differences = Table("case", "same as", "equal", "differences begin at"), 0
    for name, mine in texts.items():
        base = "coupled ar" if name.startswith("coupled") else "pearl stream"
        if name == base:
            continue
        pairs = list(zip(mine, texts[base], strict=True))
        wrong = [f"prompt {i}: token {_first_difference(a, b)}" for i, (a, b) in enumerate(pairs) if a != b]
        differences += len(wrong)
        table.add_row(name, base, f"{len(pairs) - len(wrong)}/{len(pairs)}", "; ".join(wrong) or "-")
    console.print(table)
    console.print(f"{differences} texts differ")
    return differences


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    main()
