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
from typing import Any

import click
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from pearl.lab.bench.machine import hardware, in_words
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.toy import alpha_pair

ALPHA, VOCAB = 0.7, 32
SPEC = f"toy:vocab={VOCAB},alpha={ALPHA}"
LONGEST_TEXT = 60  # tokens
LONGEST_PROMPT = 300
GO_AWAY = 0.05  # share of the streams that a client leaves early
PATIENCE = 60.0  # seconds for an answer
SETTLED = 0.2  # of the time: growth after that is a leak


@dataclass
class Found:
    """Results of all clients.

    Attributes:
        overheads: (seconds a token, tokens) of each text that was read to its end.
        texts: (prompt, tokens asked for, text) of these.
    """

    counts: Counter[str] = field(default_factory=Counter)
    overheads: list[tuple[float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    texts: list[tuple[list[int], int, str]] = field(default_factory=list)

    def check_texts(self) -> None:
        """Compare with the texts of the target alone; after the run, because it takes CPU time from the server."""
        tokenizer, (target, _) = ToyTokenizer(VOCAB), alpha_pair(VOCAB, ALPHA)
        for prompt, length, text in self.texts:
            tokens = list(prompt)
            for _ in range(length):
                tokens.append(int(target(tokens).argmax()))
            if text != tokenizer.decode(tokens[len(prompt) :]):
                self.wrong.append(f"wrong text: {text!r} of {prompt}, {length} tokens")


class Client:
    """Requests one text after the other."""

    def __init__(self, number: int, found: Found, http: httpx.AsyncClient, model: str) -> None:
        self._noise, self._found, self._http, self._model = (
            random.Random(number),
            found,
            http,
            model,
        )

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            try:
                await asyncio.wait_for(self._ask(), PATIENCE)
            except TimeoutError:
                self._found.wrong.append(f"no answer after {PATIENCE:.0f} s")
            except httpx.HTTPError as error:
                self._found.wrong.append(f"{type(error).__name__}: {error}")

    async def _ask(self) -> None:
        noise = self._noise
        prompt = [noise.randrange(VOCAB) for _ in range(noise.randint(1, LONGEST_PROMPT))]
        length, streams = noise.randint(1, LONGEST_TEXT), noise.random() < 0.5
        asked = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "stream": streams,
        }
        if streams:
            asked["stream_options"] = {"include_usage": True}
        began = time.monotonic()
        text, usage = await (self._streamed(asked) if streams else self._whole(asked))
        seconds = time.monotonic() - began
        if usage is None:
            self._found.counts["texts left early"] += 1
            return
        self._found.counts["texts streamed" if streams else "texts at once"] += 1
        self._found.counts["tokens"] += usage["completion_tokens"]
        self._found.texts.append((prompt, length, text))
        ((waited,), (engine,)) = usage["pearl"]["queue_seconds"], usage["pearl"]["seconds"]
        tokens = usage["completion_tokens"]
        self._found.overheads.append(((seconds - waited - engine) / tokens, tokens))

    async def _whole(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        answer = (await self._http.post("/v1/completions", json=asked)).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]

    async def _streamed(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """The usage is None if the client disconnected."""
        text, usage = "", None
        leaves = self._noise.randint(1, 5) if self._noise.random() < GO_AWAY else None
        async with self._http.stream("POST", "/v1/completions", json=asked) as answer:
            answer.raise_for_status()
            async for event in _events(answer):
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


class Server:
    """`pearl serve --http` in a process of its own."""

    def __init__(self, slots: int, clients: int) -> None:
        paces = ["--target-pace", "0.004", "--draft-pace", "0.001"]
        command = [
            sys.executable,
            "-m",
            "pearl",
            "serve",
            "--http",
            "127.0.0.1:0",
            "--target",
            SPEC,
            "--draft",
            SPEC,
        ]
        command += [*paces, "--slots", str(slots), "--draft-restarts", "100000"]
        self._process = subprocess.Popen(
            [*command, "--log-level", "error"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "200"},
        )
        assert self._process.stderr is not None
        said = ""
        while (found := re.search(r"http://[\d.]+:\d+", said)) is None:
            line = self._process.stderr.readline()
            if not line:
                raise SystemExit(f"the server has ended: {said}")
            said += line
        self.url = found.group()
        self._of = psutil.Process(self._process.pid)

    def workers(self) -> list[psutil.Process]:
        """The target, and the draft if it is alive: it was started last."""
        return sorted(self._of.children(), key=lambda child: child.create_time())

    def kill_draft(self) -> bool:
        workers = self.workers()
        if len(workers) != 2:
            return False
        workers[-1].send_signal(signal.SIGKILL)
        return True

    def megabytes(self) -> dict[str, float]:
        """Private memory of each long-lived process."""
        named = {"server": self._of, "target": self.workers()[0]}
        return {name: process.memory_full_info().uss / 1e6 for name, process in named.items()}

    def close(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE)


async def _kill(server: Server, found: Found, every: float, end: float) -> None:
    noise = random.Random(0)
    while True:
        await asyncio.sleep(noise.uniform(0.5, 1.5) * every)
        if time.monotonic() > end:
            return
        found.counts["drafts killed"] += server.kill_draft()


async def _soak(
    server: Server, found: Found, clients: int, seconds: float, every: float
) -> dict[str, list[float]]:
    """Memory over time, by process."""
    began = time.monotonic()
    end = began + seconds
    memory: dict[str, list[float]] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        asking = [
            asyncio.create_task(Client(number, found, http, model).run(end))
            for number in range(clients)
        ]
        killing = asyncio.create_task(_kill(server, found, every, end))
        while time.monotonic() < end:
            await asyncio.sleep(seconds / 20)
            if time.monotonic() - began > SETTLED * seconds:
                for name, megabytes in server.megabytes().items():
                    memory.setdefault(name, []).append(megabytes)
        await asyncio.gather(*asking, killing)
    return memory


def _quantile(overheads: Sequence[tuple[float, int]], share: float) -> float:
    """Of tokens, each with the mean of its text."""
    ordered = sorted(overheads)
    upto = list(accumulate(tokens for _, tokens in ordered))
    return ordered[bisect_left(upto, share * upto[-1])][0]


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
    console, found = Console(soft_wrap=True, highlight=False), Found()
    server = Server(slots, clients)
    try:
        memory = asyncio.run(_soak(server, found, clients, seconds, kill_every))
    finally:
        code = server.close()
    if code:
        found.wrong.append(f"the server ended with exit code {code}")
    found.check_texts()
    if not found.overheads:
        found.wrong.append("no text was read to its end")
    table = Table("what", "count", box=None, padding=(0, 2, 0, 0))
    for what, count in sorted(found.counts.items()):
        table.add_row(what, f"{count:,}")
    for share in (0.5, 0.99) if found.overheads else ():
        overhead = 1e3 * _quantile(found.overheads, share)
        table.add_row(
            f"overhead beyond the engine, p{100 * share:.0f}, ms a token", f"{overhead:.2f}"
        )
        if share > 0.5 and overhead > most_overhead:
            found.wrong.append(f"overhead {overhead:.1f} ms a token, more than {most_overhead:g}")
    for name, megabytes in memory.items():
        shown = megabytes[:: max(1, len(megabytes) // 4)]
        table.add_row(
            f"memory of the {name}, MB, over time", " ".join(f"{one:.1f}" for one in shown)
        )
        if megabytes[-1] - megabytes[0] > most_growth:
            found.wrong.append(f"the {name} has grown by {megabytes[-1] - megabytes[0]:.1f} MB")
    console.print(table)
    for wrong, times in Counter(found.wrong).most_common(20):
        console.print(f"{times} times: {wrong}", style="red")
    rate = found.counts["tokens"] / seconds
    console.print(
        f"{clients} clients, {slots} slots, {seconds:.0f} s: {rate:.0f} tokens/s, {len(found.wrong)} wrong"
    )
    console.print(in_words(hardware()))
    raise SystemExit(bool(found.wrong))


if __name__ == "__main__":
    main()
