"""Toy models: exact known distributions, no weights. For tests, emulation and the simulator.

A pair made with one seed has a chosen acceptance rate: in every context the target's distribution lives on one half of
the vocabulary, and the draft's is alpha times the target's plus (1 - alpha) times one that lives on the other half.  So
the sum of min(target, draft) is exactly alpha everywhere: under the ratio rule acceptance is i.i.d. with rate alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch

from pearl.errors import ModelError, RequestError
from pearl.models.faulty import FaultyRunner
from pearl.models.runner import ModelRunner, Tokens

Distribution = Callable[[Sequence[int]], torch.Tensor]


class ToyRunner:
    """A ModelRunner whose next-token distribution is a function of the whole context.

    Args:
        distribution: the tokens so far (at least one) -> probabilities [vocab_size], float32.
    """

    device = torch.device("cpu")
    launches = False
    row_invariant = True

    def __init__(self, vocab_size: int, distribution: Distribution, context: int = 1 << 20) -> None:
        self.vocab_size = vocab_size
        self.context = context
        self._distribution = distribution
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    def forward(self, tokens: Tokens, rows: int) -> torch.Tensor:
        if self.length + len(tokens) > self.context:
            raise RequestError(f"toy context of {self.context} tokens is full")
        self._tokens.extend(map(int, tokens))
        ends = range(self.length - rows + 1, self.length + 1)
        probs = [self._distribution(self._tokens[:end]) for end in ends]
        return torch.log(torch.stack(probs)) if probs else torch.empty(0, self.vocab_size)

    def rollback(self, length: int) -> None:
        assert 0 <= length <= self.length
        del self._tokens[length:]

    def synchronize(self) -> None:
        pass


def alpha_pair(vocab_size: int, alpha: float, seed: int = 0, order: int = 8) -> tuple[Distribution, Distribution]:
    """(target, draft) distributions with acceptance rate exactly `alpha` in every context of `order` tokens."""

    @lru_cache(maxsize=4096)
    def halves(context: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        digest = blake2b(repr((seed, context)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        order_ = torch.randperm(vocab_size, generator=generator)
        weights = torch.rand(vocab_size, generator=generator) ** 3 + 1e-3
        target, other = torch.zeros(vocab_size), torch.zeros(vocab_size)
        mine, rest = order_[: vocab_size // 2], order_[vocab_size // 2 :]
        target[mine] = weights[mine] / weights[mine].sum()
        other[rest] = weights[rest] / weights[rest].sum()
        return target, alpha * target + (1 - alpha) * other

    def target(tokens: Sequence[int]) -> torch.Tensor:
        return halves(tuple(tokens[-order:]))[0]

    def draft(tokens: Sequence[int]) -> torch.Tensor:
        return halves(tuple(tokens[-order:]))[1]

    return target, draft


def load_toy(spec: str, role: str, max_context: int | None) -> ModelRunner:
    """A runner from `toy` or `toy:vocab=32,alpha=0.8,seed=1,context=4096`; `role` is "target" or "draft".

    `fault=hang@drafting` and `once=FILE` make it go wrong: see `FaultyRunner`.
    Raises ModelError for an unknown key or a bad value.
    """
    kinds = {"vocab": int, "alpha": float, "seed": int, "context": int, "eos": int, "fault": str, "once": str}
    values: dict[str, Any] = {"vocab": 32, "alpha": 0.8, "seed": 0, "context": 1 << 20, "fault": "", "once": ""}
    for item in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in kinds:
            raise ModelError(f"toy model {spec!r}: unknown key {key!r}; known are {', '.join(kinds)}")
        try:
            values[key] = kinds[key](value)
        except ValueError:
            raise ModelError(f"toy model {spec!r}: {key}={value!r} is not {kinds[key].__name__}") from None
    if values["vocab"] < 2 or not 0 <= values["alpha"] <= 1:
        raise ModelError(f"toy model {spec!r}: vocab must be at least 2 and alpha between 0 and 1")
    vocab = int(values["vocab"])
    pair = alpha_pair(vocab, values["alpha"], int(values["seed"]))
    context = min(int(values["context"]), max_context or 1 << 20)
    runner = ToyRunner(vocab, pair[role == "draft"], context)
    return FaultyRunner(runner, values["fault"], role, values["once"]) if values["fault"] else runner
