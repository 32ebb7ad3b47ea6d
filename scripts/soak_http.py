"""Many clients at once against `pearl serve --http`, whose draft is killed at random.

Toys in real processes, whose texts are computed here without the runtime.  Half of the clients stream; some disconnect
in the middle of a text.  The exit code is 1 if a text is not the target's, an answer does not come, memory grows, or
the server's overhead per token is too high.

    python scripts/soak_http.py                       # 32 clients for five minutes
    python scripts/soak_http.py --seconds 30 --clients 8 --slots 2

**Overhead** per token: the client's seconds from the request to the last token, minus the time in the queue, minus the
engine's own time.  It includes this script's work on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import click
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from pearl.lab.bench.machine import hardware, in_words
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.toy import alpha_pair

ALPHA = 0.7
VOCAB = 32
SPEC = f"toy:vocab={VOCAB},alpha={ALPHA}"
LONGEST_TEXT = 60  # tokens
LONGEST_PROMPT = 300
GO_AWAY = 0.05  # share of the streams that a client leaves early
PATIENCE = 60.0  # seconds for an answer
SETTLED = 0.2  # of the time: growth after that is a leak


class Overhead(NamedTuple):
    """The overhead of a text: seconds a token, and its tokens."""

    seconds: float
    tokens: int


class ReadText(NamedTuple):
    """A text that was read to its end; `length`: tokens asked for."""

    prompt: list[int]
    length: int
    text: str


@dataclass
class Results:
    """Results of all clients.

    Attributes:
        overheads: of each text that was read to its end.
        texts: these texts.
    """

    counts: Counter[str] = field(default_factory=Counter)
    overheads: list[Overhead] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    texts: list[ReadText] = field(default_factory=list)

    def check_texts(self) -> None:
        """Compare with the texts of the target alone; after the run, because it takes CPU time from the server."""
        tokenizer = ToyTokenizer(VOCAB)
        target, _ = alpha_pair(VOCAB, ALPHA)
        for prompt, length, text in self.texts:
            tokens = list(prompt)
            for _ in range(length):
                tokens.append(int(target(tokens).argmax()))
            if text != tokenizer.decode(tokens[len(prompt) :]):
                self.wrong.append(f"wrong text: {text!r} of {prompt}, {length} tokens")


class ChatClient:
    """Requests one text after the other."""

    def __init__(self, number: int, results: Results, http: httpx.AsyncClient, model: str) -> None:
        self._noise = random.Random(number)
        self._results = results
        self._http = http
        self._model = model

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            try:
                await asyncio.wait_for(self._ask(), PATIENCE)
            except TimeoutError:
                self._results.wrong.append(f"no answer after {PATIENCE:.0f} s")
            except httpx.HTTPError as error:
                self._results.wrong.append(f"{type(error).__name__}: {error}")

    async def _ask(self) -> None:
        noise = self._noise
        prompt = [noise.randrange(VOCAB) for _ in range(noise.randint(1, LONGEST_PROMPT))]
        length = noise.randint(1, LONGEST_TEXT)
        streams = noise.random() < 0.5
        request = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "stream": streams,
        }
        if streams:
            request["stream_options"] = {"include_usage": True}
        began = time.monotonic()
        text, usage = await (self._streamed(request) if streams else self._whole(request))
        seconds = time.monotonic() - began
        results = self._results
        if usage is None:
            results.counts["texts left early"] += 1
            return
        tokens = usage["completion_tokens"]
        results.counts["texts streamed" if streams else "texts at once"] += 1
        results.counts["tokens"] += tokens
        results.texts.append(ReadText(prompt, length, text))
        (queued,) = usage["pearl"]["queue_seconds"]
        (engine,) = usage["pearl"]["seconds"]
        results.overheads.append(Overhead((seconds - queued - engine) / tokens, tokens))

    async def _whole(self, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        response = await self._http.post("/v1/completions", json=request)
        answer = response.raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]

    async def _streamed(self, request: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """Return (text, usage); the usage is None if the client disconnected."""
        text = ""
        usage = None
        leaves = self._noise.randint(1, 5) if self._noise.random() < GO_AWAY else None
        async with self._http.stream("POST", "/v1/completions", json=request) as response:
            response.raise_for_status()
            async for event in _events(response):
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
                if leaves is not None and len(text) >= leaves:
                    return text, None
        return text, usage


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.HTTPError(event["error"]["message"])
            yield event


class ServerProcess:
    """`pearl serve --http` in a process of its own."""

    def __init__(self, slots: int) -> None:
        command = [sys.executable, "-m", "pearl", "serve", "--http", "127.0.0.1:0"]
        command += ["--target", SPEC, "--target-pace", "0.004"]
        command += ["--draft", SPEC, "--draft-pace", "0.001", "--draft-restarts", "100000"]
        command += ["--slots", str(slots), "--log-level", "error"]
        environment = os.environ | {"COLUMNS": "200"}
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stderr is not None
        output = ""
        match = None
        while match is None:
            line = self._process.stderr.readline()
            if not line:
                raise SystemExit(f"the server has ended: {output}")
            output += line
            match = re.search(r"http://[\d.]+:\d+", output)
        self.url = match.group()
        self._server = psutil.Process(self._process.pid)

    def workers(self) -> list[psutil.Process]:
        """Return the target, and the draft if it is alive: it was started last."""
        return sorted(self._server.children(), key=lambda child: child.create_time())

    def kill_draft(self) -> bool:
        workers = self.workers()
        if len(workers) != 2:
            return False
        workers[-1].send_signal(signal.SIGKILL)
        return True

    def megabytes(self) -> dict[str, float]:
        """Return the private memory of each long-lived process."""
        processes = {"server": self._server, "target": self.workers()[0]}
        return {name: process.memory_full_info().uss / 1e6 for name, process in processes.items()}

    def close(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE)


async def _kill(server: ServerProcess, results: Results, every: float, end: float) -> None:
    noise = random.Random(0)
    while True:
        await asyncio.sleep(noise.uniform(0.5, 1.5) * every)
        if time.monotonic() > end:
            return
        results.counts["drafts killed"] += server.kill_draft()


async def _soak(
    server: ServerProcess, results: Results, clients: int, seconds: float, every: float
) -> dict[str, list[float]]:
    """Let the clients ask; return the memory over time, by process."""
    began = time.monotonic()
    end = began + seconds
    memory: dict[str, list[float]] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        tasks = [asyncio.create_task(_kill(server, results, every, end))]
        for number in range(clients):
            client = ChatClient(number, results, http, model)
            tasks.append(asyncio.create_task(client.run(end)))
        while time.monotonic() < end:
            await asyncio.sleep(seconds / 20)
            if time.monotonic() - began > SETTLED * seconds:
                for name, megabytes in server.megabytes().items():
                    memory.setdefault(name, []).append(megabytes)
        await asyncio.gather(*tasks)
    return memory


def _quantile(overheads: Sequence[Overhead], share: float) -> float:
    """Return a quantile over tokens, each with the mean of its text."""
    ordered = sorted(overheads)
    upto = list(accumulate(overhead.tokens for overhead in ordered))
    return ordered[bisect_left(upto, share * upto[-1])].seconds


@click.command()
@click.option("--seconds", default=300.0, help="How long clients ask.")
@click.option("--clients", default=32, help="How many of them at once.")
@click.option("--slots", default=4, help="Of the server.")
@click.option(
    "--kill-every", default=10.0, help="Seconds between two kills of the draft, in the mean."
)
@click.option("--most-overhead", default=5.0, help="Milliseconds a token, of 99 tokens in 100.")
@click.option(
    "--most-growth", default=5.0, help="Megabytes, of a process, once a fifth of the time is over."
)
def main(
    seconds: float,
    clients: int,
    slots: int,
    kill_every: float,
    most_overhead: float,
    most_growth: float,
) -> None:
    """Print the counts of all events."""
    console = Console(soft_wrap=True, highlight=False)
    results = Results()
    server = ServerProcess(slots)
    try:
        memory = asyncio.run(_soak(server, results, clients, seconds, kill_every))
    finally:
        code = server.close()
    if code:
        results.wrong.append(f"the server ended with exit code {code}")
    results.check_texts()
    if not results.overheads:
        results.wrong.append("no text was read to its end")
    table = Table("what", "count", box=None, padding=(0, 2, 0, 0))
    for what, count in sorted(results.counts.items()):
        table.add_row(what, f"{count:,}")
    for share in (0.5, 0.99) if results.overheads else ():
        overhead = 1e3 * _quantile(results.overheads, share)
        table.add_row(
            f"overhead beyond the engine, p{100 * share:.0f}, ms a token", f"{overhead:.2f}"
        )
        if share > 0.5 and overhead > most_overhead:
            results.wrong.append(f"overhead {overhead:.1f} ms a token, more than {most_overhead:g}")
    for name, megabytes in memory.items():
        samples = megabytes[:: max(1, len(megabytes) // 4)]
        words = " ".join(f"{sample:.1f}" for sample in samples)
        table.add_row(f"memory of the {name}, MB, over time", words)
        growth = megabytes[-1] - megabytes[0]
        if growth > most_growth:
            results.wrong.append(f"the {name} has grown by {growth:.1f} MB")
    console.print(table)
    for wrong, times in Counter(results.wrong).most_common(20):
        console.print(f"{times} times: {wrong}", style="red")
    rate = results.counts["tokens"] / seconds
    console.print(
        f"{clients} clients, {slots} slots, {seconds:.0f} s: {rate:.0f} tokens/s, {len(results.wrong)} wrong"
    )
    console.print(in_words(hardware()))
    raise SystemExit(bool(results.wrong))


if __name__ == "__main__":
    main()
