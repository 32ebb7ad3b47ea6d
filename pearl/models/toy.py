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

from pearl.errors import ModelError
from pearl.models.faulty import FaultyRunner
from pearl.models.feeds import Feed, is_path
from pearl.models.runner import Capabilities, ModelRunner, check_feeds

Distribution = Callable[[Sequence[int]], torch.Tensor]

_SLOTS, _TREE_NODES = 8, 256


class ToyRunner:
    """A ModelRunner whose next-token distribution is a function of the whole context.

    Args:
        distribution: the tokens so far (at least one) -> probabilities [vocab_size], float32.
    """

    device = torch.device("cpu")
    capabilities = Capabilities(
        slots=_SLOTS, tree_nodes=_TREE_NODES, launches=False, row_invariant=True, trees_row_invariant=True
    )

    def __init__(self, vocab_size: int, distribution: Distribution, context: int = 1 << 20) -> None:
        self.vocab_size = vocab_size
        self.context = context
        self._distribution = distribution
        self._tokens: list[list[int]] = [[] for _ in range(_SLOTS)]
        self._trees: list[Feed | None] = [None] * _SLOTS

    def length(self, slot: int = 0) -> int:
        return len(self._tokens[slot])

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        check_feeds(feeds, self, "the toy model")
        return [self._chain(feed) if feed.parents is None else self._tree(feed) for feed in feeds]

    def _chain(self, feed: Feed) -> torch.Tensor:
        tokens = self._tokens[feed.slot]
        tokens.extend(map(int, feed.tokens))
        self._trees[feed.slot] = None
        return self._logits([tokens[:end] for end in range(len(tokens) - feed.rows + 1, len(tokens) + 1)])

    def _tree(self, feed: Feed) -> torch.Tensor:
        assert feed.parents is not None
        contexts: list[list[int]] = []
        for token, parent in zip(feed.tokens, feed.parents, strict=True):
            contexts.append([*(contexts[parent] if parent >= 0 else self._tokens[feed.slot]), int(token)])
        self._trees[feed.slot] = feed
        return self._logits(contexts[len(contexts) - feed.rows :])

    def _logits(self, contexts: list[list[int]]) -> torch.Tensor:
        probs = [self._distribution(context) for context in contexts]
        return torch.log(torch.stack(probs)) if probs else torch.empty(0, self.vocab_size)

    def rollback(self, length: int, slot: int = 0) -> None:
        assert 0 <= length <= self.length(slot)
        self._trees[slot] = None
        del self._tokens[slot][length:]

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        tree, self._trees[slot] = self._trees[slot], None
        assert tree is not None, "no tree was fed to this slot"
        assert tree.parents is not None
        assert is_path(tree.parents, path), (tree.parents, path)
        self._tokens[slot].extend(int(tree.tokens[node]) for node in path)

    def fork(self, slot: int, into: int) -> None:
        self._trees[into] = None
        self._tokens[into] = list(self._tokens[slot])

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
