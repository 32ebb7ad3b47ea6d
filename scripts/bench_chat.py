"""Time to first token by turn of a conversation: it must not grow, because earlier turns stay in the KV cache.

Several conversations of ten turns, with messages and replies of equal length; prints the median time to first token of
each turn, measured by the client, and the ratio of turn 10 to turn 2, with a bootstrap interval over the conversations.

    python scripts/bench_chat.py             # the embedded pair: about two minutes
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from pearl import Engine, RequestOptions
from pearl.lab.bench.machine import Conditions
from pearl.lab.studies.estimate import bootstrap
from pearl.text.conversation import Conversation

SUBJECTS = [
    "the sea",
    "the sun",
    "the fog",
    "the sky",
    "a tree",
    "a cat",
    "a bird",
    "the rain",
    "a lamp",
    "the wind",
]


@click.command()
@click.option("--target", default="embedded", help="Target model.")
@click.option("--draft", default="embedded-draft", help="Draft model.")
@click.option("--turns", default=10, help="Of a conversation.")
@click.option("--conversations", default=12, help="How many.")
@click.option("--tokens", default=24, help="Of a reply.")
def main(target: str, draft: str, turns: int, conversations: int, tokens: int) -> None:
    """Print the time to the first token by turn."""
    console = Console(soft_wrap=True, highlight=False)
    params = RequestOptions(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    seconds: list[list[float]] = [[] for _ in range(turns)]
    uncached: list[list[int]] = [[] for _ in range(turns)]
    lengths = [0] * turns
    conditions = Conditions()
    with Engine(target, draft) as engine:
        for i in range(-1, conversations):  # the first warms up
            conversation = Conversation(engine.tokenizer)
            for turn in range(turns):
                message = f"Now say something about {SUBJECTS[(turn + i) % len(SUBJECTS)]}, please."
                prompt = conversation.prompt(message)
                began = time.monotonic()
                with engine.stream(prompt, params) as stream:
                    next(stream)
                    ttft = time.monotonic() - began
                    for _ in stream:
                        pass
                result = stream.result
                conversation.add(message, result.text)
                if i >= 0:
                    seconds[turn].append(ttft)
                    uncached[turn].append(len(prompt) - result.statistics.num_cached_tokens)
                    lengths[turn] = len(prompt)
    table = Table(
        "turn", "prompt, tokens", "of them not cached", "first token, ms", "least", "most"
    )
    for turn, times in enumerate(seconds):
        table.add_row(
            str(turn + 1),
            str(lengths[turn]),
            f"{median(uncached[turn]):.0f}",
            f"{median(times) * 1e3:.0f}",
            f"{min(times) * 1e3:.0f}",
            f"{max(times) * 1e3:.0f}",
        )
    console.print(table)
    ratio = bootstrap(list(zip(seconds[1], seconds[-1], strict=True)), _growth)
    console.print(
        f"turn {turns} over turn 2: {ratio.value:.2f}, 95% interval {ratio.low:.2f} to {ratio.high:.2f}"
    )
    conditions.stop()
    console.print(f"{conversations} conversations; {conditions}")


def _growth(conversations: Sequence[tuple[float, float]]) -> float:
    """Return the median of the last turn over that of the second."""
    second_turns, last_turns = zip(*conversations, strict=True)
    return median(last_turns) / median(second_turns)


if __name__ == "__main__":
    main()
