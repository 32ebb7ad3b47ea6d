"""Compare tokens a step and speed over `ar` of drafters in virtual time, with the real models.

    python scripts/simulate_heads.py --head my-head/head --limit 3

Greedy texts, each checked to be the target's own. A draft forward takes a c-th of a target forward, one of the head
`--t-head` of one, wherever it runs, and each further token that the target is fed `--per-row` of one. A block takes a
c-th, too: a draft computes as many at once as 16 rows hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from msgspec.structs import replace

from pearl.cache import silent
from pearl.config import ModelConfig
from pearl.config.options import RequestOptions
from pearl.drafting.ngram import NgramIndex
from pearl.execution.target import Event
from pearl.lab.bench.tasks import read_tasks
from pearl.lab.studies.simulate import Outcome, Simulation, Timing, paired_executors
from pearl.metrics import Sums
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.heads.block_runner import BlockRunner
from pearl.models.heads.chain import ChainHead
from pearl.models.heads.loading import load_draft_head, load_head, states_for
from pearl.protocol.events import Drafted, Forwarded
from pearl.protocol.messages import Submit

CPU = torch.device("cpu")
OFF = {"look_ahead": 0, "draft_lookup": 0, "branches": 0, "siblings": 0}
ALL = {"look_ahead": 16, "draft_lookup": 8, "branches": 8, "siblings": 16}


# name -> method, its guesses, whether the target has the head, whether the head is the draft
class Drafter(NamedTuple):
    """A row: a method and its guesses.

    Attributes:
        has_head: the target guesses by the head.
        head_drafts: the head is the draft.
        is_alone: without n-grams of the text.
    """

    method: str
    guesses: dict[str, int] = {}  # noqa: RUF012
    has_head: bool = False
    head_drafts: bool = False
    is_alone: bool = False

    def depends_on_c(self, is_block: bool) -> bool:
        """Whether a forward takes a c-th of the target's."""
        if self.has_head or self.head_drafts:
            return is_block or not self.head_drafts
        return self.method in ("sd", "pearl")


ROWS = {
    "ar": Drafter("ar"),
    "ngram": Drafter("ngram", {"look_ahead": 16}),
    "head": Drafter("head", {"look_ahead": 16}, has_head=True),
    "head alone": Drafter("head", {"look_ahead": 16}, has_head=True, is_alone=True),
    "sd": Drafter("sd"),
    "pearl as published": Drafter("pearl"),
    "pearl": Drafter("pearl", ALL),
    "pearl with head": Drafter("pearl", ALL, has_head=True),
    "the head drafts, as published": Drafter("pearl", head_drafts=True),
    "the head drafts": Drafter("pearl", ALL, head_drafts=True),
}
_ROWS_AT_ONCE = 16  # of a forward that takes no longer than one of one row


class Counter:
    """Counts the calls of a head's method `name`. Each call is a forward."""

    def __init__(self, head: Any, name: str) -> None:
        self.forwards = 0
        self._compute = getattr(head, name)
        setattr(head, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.forwards += 1
        return self._compute(*arguments, **options)


class TimedGuesses(Simulation):
    """Adds the time of the head's forwards to the target's, which reads no message between the two."""

    counter: Counter | None = None
    blocks: Counter | None = None  # those of the draft
    block_size = 0
    t_head = 0.0

    def _compute(self, actor: int, command: object) -> tuple[Event | None, float]:
        event, seconds = super()._compute(actor, command)
        if isinstance(event, Forwarded) and self.counter is not None:
            seconds += self.counter.forwards * self.t_head
            event = replace(event, seconds=seconds, at=self._now + seconds)
            self.counter.forwards = 0
        if isinstance(event, Drafted) and self.blocks is not None:
            seconds = ceil(self.blocks.forwards * self.block_size / _ROWS_AT_ONCE) * self.t_head
            event = replace(event, seconds=seconds)
            self.blocks.forwards = 0
        return event, seconds


def outcomes(args: argparse.Namespace) -> Iterator[tuple[int, str, Outcome]]:
    """Yield (c, row, outcome) of each text."""
    tokenizer, defaults = load_tokenizer(args.target)
    features = states_for([args.head], args.target, silent)
    target = load_runner(ModelConfig(args.target), CPU, features=features)
    draft = load_runner(ModelConfig(args.draft, "draft"), CPU, spare=8)
    head = load_head(args.head, target, silent)
    is_block = not isinstance(head, ChainHead)
    # A chain reads tokens one by one; a block drafter proposes a block with one forward.
    counter = Counter(head, "propose" if is_block else "read")
    blocks = None
    block_size = 0
    rows = {name: row for name, row in ROWS.items() if not args.rows or name in args.rows}
    head_runner = None
    if any(row.head_drafts for row in rows.values()):
        head_runner = load_draft_head(args.head, args.target, CPU, None, 9, silent)
    if isinstance(head_runner, BlockRunner):
        blocks = Counter(head_runner.head, "block_states")
        block_size = head_runner.head.deepest
    for prompt in _prompts(args):
        messages = [{"role": "user", "content": prompt}]
        ids = tuple(tokenizer.encode(tokenizer.chat_text(messages) or prompt))
        expected: list[int] = []
        for name, row in rows.items():
            groups = [args.c]
            if row.depends_on_c(is_block):
                groups = [[c] for c in args.c]
            for group in groups:
                c = group[0]
                t_head = 1 / c if is_block else args.t_head
                runner = draft
                if row.head_drafts:
                    assert head_runner is not None
                    runner = head_runner
                t_draft = t_head if row.head_drafts else 1 / c
                timing = Timing(t_draft, lambda fed: 1 + args.per_row * (fed - 1))
                target.rollback(0)
                runner.rollback(0)
                executors = paired_executors(
                    target,
                    runner,
                    t_draft=partial(_constant, t_draft),
                    head=head if row.has_head else None,
                )
                simulation = TimedGuesses(*executors, timing, runner.context, None)
                if row.has_head:
                    simulation.counter = counter
                simulation.t_head = t_head
                if row.head_drafts and blocks is not None:
                    simulation.blocks = blocks
                    simulation.block_size = block_size
                guesses: dict[str, Any] = OFF | row.guesses
                options = RequestOptions(method=row.method, temperature=0.0, **guesses).resolved()
                submit = Submit(1, ids, len(ids) + args.max_tokens, options, eos=defaults.eos)
                with torch.inference_mode(), ngrams(not row.is_alone):
                    outcome = simulation.run(submit)
                expected = expected or outcome.tokens
                assert outcome.tokens == expected, (name, c)
                for same in group:
                    yield same, name, outcome


def ngrams(are_guesses: bool) -> AbstractContextManager[object]:
    """Return a context in which the n-grams of a text are guesses, or are not."""
    if are_guesses:
        return nullcontext()
    return patch.object(NgramIndex, "_matching", lambda index, position: [])


def _prompts(args: argparse.Namespace) -> Iterator[str]:
    for name in args.prompts:
        for task in read_tasks(name, None, args.limit):
            yield task.turns[0]


def _constant(seconds: float, fed: int) -> float:
    """The time of a draft forward, whatever it is fed."""
    return seconds


def _seconds(texts: list[Outcome]) -> float:
    return sum(text.seconds for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="embedded-draft")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--prompts", action="append")
    parser.add_argument("--limit", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--c", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--per-row", type=float, default=0.01)
    parser.add_argument("--t-head", type=float, default=0.12)
    parser.add_argument("--rows", action="append", choices=ROWS)
    args = parser.parse_args()
    args.prompts = args.prompts or ["humaneval", "questions", "edits"]
    args.head = str(args.head)
    by_row: dict[tuple[int, str], list[Outcome]] = {}
    for c, name, outcome in outcomes(args):
        by_row.setdefault((c, name), []).append(outcome)
    print("| tokens a step, speed over ar | " + " | ".join(f"c = {c}" for c in args.c) + " |")
    print("|---" * (1 + len(args.c)) + "|")
    for name in dict.fromkeys(name for _, name in by_row):
        cells = []
        for c in args.c:
            texts = by_row[c, name]
            statistics = [text.statistics for text in texts]
            tokens_per_step = Sums(texts=statistics).tokens_per_step or 0.0
            speed = _seconds(by_row[c, "ar"]) / _seconds(texts)
            cells.append(f"{tokens_per_step:.2f}, {speed:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
