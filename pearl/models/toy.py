"""Toy models for tests, emulation and the simulator: they have exactly known distributions.

A pair made with one seed has a chosen acceptance rate alpha.  In every context the target's
distribution lives on one half of the vocabulary, and draft = alpha * target + (1 - alpha) * rival,
where the rival lives on the other half.  So the sum of min(target, draft) is exactly alpha, and
under the ratio rule acceptance is i.i.d. with rate alpha.  A pair with `coin=1` has this rate under
every rule and at every temperature, greedy included: see `coin_pair`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from pearl.models.checkpoints.checkpoint import toy_options
from pearl.models.feeds import Feed, is_path
from pearl.models.runner import Capabilities, ModelRunner, check_feeds
from pearl.spec.methods import BRANCHES

# The tokens so far -> probabilities [vocab_size] of the next token.
NextToken = Callable[[Sequence[int]], torch.Tensor]

_SLOTS = 8
_TREE_NODES = 256
_COIN_ROWS = 32
_COIN_SIDES = 1 << 32


class ToyRunner(ModelRunner):
    """A runner whose next-token distribution is a function of the whole context.

    Args:
        distribution: the tokens so far (at least one) -> probabilities [vocab_size], float32.
        slots: number of sequences that the runner holds.
    """

    device = torch.device("cpu")

    def __init__(
        self, vocab_size: int, distribution: NextToken, context: int = 1 << 20, slots: int = _SLOTS
    ) -> None:
        self.capabilities = Capabilities(slots, _TREE_NODES, row_invariant=True)
        self.vocab_size = vocab_size
        self.context = context
        self.distribution = distribution
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self._trees: list[Feed | None] = [None] * slots

    def length(self, slot: int = 0) -> int:
        return len(self.tokens[slot])

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        check_feeds(feeds, self, "the toy model")
        logits = []
        for feed in feeds:
            logits.append(self._chain(feed) if feed.parents is None else self._tree(feed))
        return logits

    def _chain(self, feed: Feed) -> torch.Tensor:
        tokens = self.tokens[feed.slot]
        tokens.extend(map(int, feed.tokens))
        self._trees[feed.slot] = None
        ends = range(len(tokens) - feed.rows + 1, len(tokens) + 1)
        return self._logits([tokens[:end] for end in ends])

    def _tree(self, feed: Feed) -> torch.Tensor:
        assert feed.parents is not None
        contexts: list[list[int]] = []
        for token, parent in zip(feed.tokens, feed.parents, strict=True):
            prefix = contexts[parent] if parent >= 0 else self.tokens[feed.slot]
            contexts.append([*prefix, int(token)])
        self._trees[feed.slot] = feed
        return self._logits(contexts[len(contexts) - feed.rows :])

    def _logits(self, contexts: list[list[int]]) -> torch.Tensor:
        probs = [self.distribution(context) for context in contexts]
        if probs:
            return torch.log(torch.stack(probs))
        return torch.empty(0, self.vocab_size)

    def rollback(self, length: int, slot: int = 0) -> None:
        assert 0 <= length <= self.length(slot)
        self._trees[slot] = None
        del self.tokens[slot][length:]

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        tree = self._trees[slot]
        self._trees[slot] = None
        assert tree is not None, "no tree was fed to this slot"
        assert tree.parents is not None
        assert is_path(tree.parents, path), (tree.parents, path)
        self.tokens[slot].extend(int(tree.tokens[node]) for node in path)

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        assert self.tokens[into][:shared] == self.tokens[slot][:shared]
        self._trees[into] = None
        self.tokens[into] = self.tokens[slot][:length]


@lru_cache(maxsize=16)
def alpha_pair(
    vocab_size: int, alpha: float, seed: int = 0, order: int = 8
) -> tuple[NextToken, NextToken]:
    """Return (target, draft) distributions with acceptance rate exactly `alpha` in every context.

    Both depend on the last `order` tokens alone.  So they are cached, and calls with the same
    arguments share them.
    """

    @lru_cache(maxsize=4096)
    def pair(context: tuple[int, ...]) -> _Rows:
        generator = _generator(_hash(seed, context) >> 1)
        permutation = torch.randperm(vocab_size, generator=generator)
        weights = torch.rand(vocab_size, generator=generator) ** 3 + 1e-3
        halves = []
        for tokens in (permutation[: vocab_size // 2], permutation[vocab_size // 2 :]):
            probs = torch.zeros(vocab_size)
            probs[tokens] = weights[tokens] / weights[tokens].sum()
            halves.append(probs)
        target, rival = halves
        return _Rows(target, alpha * target + (1 - alpha) * rival)

    return _functions(pair, order)


def coin_pair(
    vocab_size: int, alpha: float, seed: int = 0, order: int = 8
) -> tuple[NextToken, NextToken]:
    """Return (target, draft) distributions that are equal in a share `alpha` of all contexts of `order` tokens.

    In the other contexts no token is likely under both.  So a draft token is accepted with rate
    `alpha`, i.i.d., whether greedy or sampled, under any rule, any filter of probabilities and any
    size of the vocabulary.  No probability is zero.  Distributions are as peaked as in real texts:
    the probability of the r-th likeliest token is proportional to r ** -1.6, so that top-p 0.95
    leaves about 90 tokens of any large vocabulary.
    """
    generator = _generator(seed)
    weights = torch.arange(1, vocab_size // 2 + 1, dtype=torch.float64) ** -1.6
    likely = (weights / weights.sum()).float()
    # Two rows for each kind of context, with likely tokens in different halves of the vocabulary.
    rows = torch.full((_COIN_ROWS, 2, vocab_size), 1e-18)
    for target_row, draft_row in rows:
        permutation = torch.randperm(vocab_size, generator=generator)
        target_row[permutation[: len(likely)]] = likely
        draft_row[permutation[len(likely) : 2 * len(likely)]] = likely

    def pair(context: tuple[int, ...]) -> _Rows:
        number = _hash(seed, context)
        target_row, other_row = rows[number % _COIN_ROWS]
        is_right = number // _COIN_ROWS % _COIN_SIDES < alpha * _COIN_SIDES
        return _Rows(target_row, target_row if is_right else other_row)

    return _functions(pair, order)


class _Rows(NamedTuple):
    """Probabilities [vocab_size] of the next token in one context, for target and draft."""

    target: torch.Tensor
    draft: torch.Tensor


def _functions(pair: Callable[[tuple[int, ...]], _Rows], order: int) -> tuple[NextToken, NextToken]:
    """Return (target, draft) distributions that depend on the last `order` tokens only."""

    def target(tokens: Sequence[int]) -> torch.Tensor:
        return pair(tuple(tokens[-order:])).target

    def draft(tokens: Sequence[int]) -> torch.Tensor:
        return pair(tuple(tokens[-order:])).draft

    return target, draft


def _hash(seed: int, context: tuple[int, ...]) -> int:
    digest = blake2b(repr((seed, context)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _generator(seed: int) -> torch.Generator:
    """Return a generator with this seed.

    It is a clone, because `torch.Generator()` needs modules that workers do not import: see
    `meta_device`.
    """
    return torch.default_generator.clone_state().manual_seed(seed)


def load_toy(spec: str, role: str, max_context: int | None = None, texts: int = 1) -> ModelRunner:
    """Return the runner of a toy model. Raises `ModelError` for an unknown or bad option.

    Args:
        spec: such as "toy" or "toy:vocab=32,alpha=0.8,seed=1,context=4096". With coin=1 the model
            is one of a `coin_pair`, else of an `alpha_pair`.
        role: "target" or "draft".
        texts: number of texts at a time. The runner has a slot for each text, and a few slots more
            for a draft's branches.
    """
    options = toy_options(spec)
    make_pair = coin_pair if options.coin else alpha_pair
    target, draft = make_pair(options.vocab, options.alpha, options.seed)
    distribution = draft if role == "draft" else target
    context = min(options.context, max_context or options.context)
    return ToyRunner(options.vocab, distribution, context, texts + BRANCHES)
