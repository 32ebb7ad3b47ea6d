"""A stand-in for vLLM's step, as a custom proposer sees it.

It has rows of tokens that move, and what each step has committed. It behaves like vLLM 0.32:

- Rows have no names.
- If a request ends, the last request takes its row.
- After the tokens of a row, drafts of the step before remain.
- A preempted request loses its row, and comes back with all its tokens.
- While a prompt is read in parts, its row commits nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

NextToken = Callable[[Sequence[int]], int]
_STEPS_PREEMPTED = 3


def vllm_config(
    address: str, most: int = 4, limit: int = 256, vocab: int = 32, **pearl: Any
) -> SimpleNamespace:
    """Return the parts of vLLM's configuration that a proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(
            max_model_len=limit,
            model="target",
            skip_tokenizer_init=True,
            get_vocab_size=lambda: vocab,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            rank=0,
            data_parallel_rank=0,
            distributed_executor_backend="mp",
        ),
        additional_config={"pearl": {"address": address, **pearl}},
    )


@dataclass
class Text:
    """A request: its tokens, and the length at which it ends."""

    name: int
    tokens: list[int]
    length: int
    unread: int = 0  # tokens of the prompt that are still to be read
    drafted: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.length


class Steps:
    """Decodes greedily with `target`, and asks `proposer` for drafts after every step.

    Args:
        rows: maximum number of requests that are decoded at once.
        chunk: maximum number of prompt tokens that a step reads.
    """

    def __init__(
        self, proposer: Any, target: NextToken, rows: int = 4, limit: int = 256, chunk: int = 256
    ) -> None:
        self.proposer = proposer
        self._target = target
        self._max_rows = rows
        self._chunk = chunk
        self._table = np.zeros((rows, limit), dtype=np.int32)
        self.waiting: list[Text] = []
        self._preempted: list[Text] = []
        self._back_at = 0
        self.running: list[Text] = []
        self.done: dict[int, list[int]] = {}
        self.num_steps = 0
        self.num_drafted = 0

    def submit(self, name: int, prompt: Sequence[int], count: int) -> None:
        self.waiting.append(Text(name, list(prompt), len(prompt) + count, len(prompt)))

    def run(self, between: Callable[[], None] = lambda: None) -> dict[int, list[int]]:
        """Decode all requests to their ends; call `between` before each step."""
        while self.running or self.waiting or self._preempted:
            between()
            self.step()
        return self.done

    def preempt(self, row: int) -> None:
        """Take a request's row away. It comes back later, and all its tokens are read again."""
        text = self._leave(row)
        text.unread = len(text.tokens)
        text.drafted = []
        self._preempted.append(text)
        self._back_at = self.num_steps + _STEPS_PREEMPTED

    def abort(self, row: int) -> Text:
        return self._leave(row)

    def step(self) -> None:
        self.num_steps += 1
        for row in reversed(range(len(self.running))):
            if self.running[row].is_done:
                text = self._leave(row)
                self.done[text.name] = text.tokens[: text.length]
        if self.num_steps >= self._back_at:
            self.waiting = self._preempted + self.waiting
            self._preempted = []
        while self.waiting and len(self.running) < self._max_rows:
            self.running.append(self.waiting.pop(0))
        if not self.running:
            return
        sampled = [self._commit(text) for text in self.running]
        lengths = np.zeros(self._max_rows, dtype=np.int32)
        for row, text in enumerate(self.running):
            stale = text.tokens + text.drafted
            self._table[row, : len(stale)] = stale[: self._table.shape[1]]
            lengths[row] = len(text.tokens)
        windows = self.proposer.propose(sampled, lengths, self._table, slot_mappings=None)
        assert len(windows) == len(self.running)
        for text, window in zip(self.running, windows, strict=True):
            text.drafted = list(window)
            self.num_drafted += len(window)

    def _leave(self, row: int) -> Text:
        """Remove a row; the request in the last row takes its place."""
        text = self.running[row]
        last = self.running.pop()
        if last is not text:
            self.running[row] = last
        return text

    def _commit(self, text: Text) -> list[int]:
        if text.unread > self._chunk:
            text.unread -= self._chunk
            return []
        text.unread = 0
        sampled: list[int] = []
        for drafted in [*text.drafted, None]:
            token = self._target(text.tokens)
            sampled.append(token)
            text.tokens.append(token)
            if drafted != token:
                break
        return sampled


class Sampling(Steps):
    """Draws from a distribution as vLLM does.

    It accepts a drafted token with the target's probability of this token. Otherwise it draws
    another token.
    """

    def __init__(self, proposer: Any, probs: Callable[[Sequence[int]], Any], seed: int) -> None:
        super().__init__(proposer, lambda tokens: 0)
        self._probs = probs
        self._random = random.Random(seed)

    def _commit(self, text: Text) -> list[int]:
        sampled: list[int] = []
        for drafted in [*text.drafted, None]:
            weights = self._probs(text.tokens).tolist()
            if drafted is not None and self._random.random() < weights[drafted]:
                sampled.append(drafted)
                text.tokens.append(drafted)
                continue
            if drafted is not None:
                weights[drafted] = 0.0
            token = self._random.choices(range(len(weights)), weights)[0]
            sampled.append(token)
            text.tokens.append(token)
            break
        return sampled
