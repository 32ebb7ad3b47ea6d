"""What method `ngram` makes of texts that a target has drawn: tokens a step, by who guessed them and how many are fed.

A replay asks for guesses after every token that a forward would have committed, and follows the text through the tree
as the target would have: what it draws at each node is the text.  Nothing is computed by a model, nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pearl.drafting.datastore import Datastore
from pearl.drafting.guesser import StoreGuesses, text_index
from pearl.drafting.ngram import Candidate, TextIndex, anchored, guess_tree
from pearl.protocol.messages import Source
from pearl.protocol.window import worthwhile

Seconds = Callable[[int], float]  # of a forward by the number of tokens fed
MakeIndex = Callable[[Sequence[int], Datastore | None], TextIndex]
_LEARN = 64  # tokens at the end of a prompt that a datastore's rates are learned from, as in a worker


@dataclass(frozen=True)
class Generated:
    """A text that a model made, from `start` on; before that its prompt."""

    tokens: tuple[int, ...]
    start: int


@dataclass
class Replayed:
    """What a replay comes to. A step is a forward after the prefill, whose token takes none.

    Attributes:
        accepted: guesses that became text, by who made them.
        fed: forwards by the number of tokens that they were fed, the last committed one included.
        trees: the parents of each forward's guesses, as `Feed.parents` has them behind the last committed token.
    """

    steps: int = 0
    tokens: int = 0
    accepted: Counter[Source] = field(default_factory=Counter)
    fed: Counter[int] = field(default_factory=Counter)
    trees: list[tuple[int, ...]] = field(default_factory=list)

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.accepted + other.accepted,
            self.fed + other.fed,
            self.trees + other.trees,
        )

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def fed_per_step(self) -> float:
        return sum(size * count for size, count in self.fed.items()) / self.steps if self.steps else 0.0

    def accepted_per_step(self, source: Source) -> float:
        return self.accepted[source] / self.steps if self.steps else 0.0

    def speedup(self, seconds: Seconds) -> float:
        """How many times as fast as one token a forward, where only forwards take time."""
        spent = sum(count * seconds(size) for size, count in self.fed.items())
        return self.tokens * seconds(1) / spent if spent else 0.0


class StoreIndex:
    """A `TextIndex` of one text that asks a datastore alone: what that finds without n-grams of the text itself."""

    def __init__(self, tokens: Sequence[int], store: Datastore) -> None:
        self.tokens = list(tokens)
        self._store = StoreGuesses(store, self.tokens, max(0, len(tokens) - _LEARN))
        self._store.learn(len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        self._store.cut(length)

    def learn(self, committed: int) -> None:
        self._store.learn(committed)

    def candidates(self, position: int) -> list[Candidate]:
        return self._store.candidates(position)

    def following(self, candidate: Candidate) -> list[Candidate]:
        return self._store.following(candidate)


def store_alone(tokens: Sequence[int], store: Datastore | None) -> TextIndex:
    assert store is not None
    return StoreIndex(tokens, store)


def replay(
    texts: Iterable[Generated],
    store: Datastore | None,
    most: int,
    *,
    branches: bool = True,
    seconds: Seconds | None = None,
    make: MakeIndex = text_index,
) -> Replayed:
    """What method `ngram` makes of these texts with at most `most` guesses a forward.

    Args:
        branches: whether guesses are a tree; otherwise a chain.
        seconds: of a forward; of the guesses found, so many are fed as then make most tokens a second. None: all.
        make: from a prompt and the datastore what is asked for guesses.
    """
    total = Replayed()
    for text in texts:
        index = make(text.tokens[: text.start], store)
        committed, end = text.start + 1, len(text.tokens)
        while committed < end:
            index.extend(text.tokens[len(index) : committed])
            index.learn(committed)
            anchors = anchored(index.tokens, committed, 1.0)
            tokens, parents, chances, sources = guess_tree(index, anchors, most, end - 1, branches)
            count = len(tokens) if seconds is None else worthwhile(chances, 1, 1.0, seconds)
            pairs = zip(parents[:count], tokens[:count], strict=True)
            children = {pair: i for i, pair in enumerate(pairs)}
            at, before = committed - 1, committed
            while committed < end and (node := children.get((at, text.tokens[committed]))) is not None:
                total.accepted[sources[node]] += 1
                at, committed = before + node, committed + 1
            committed = min(end, committed + 1)
            total.steps += 1
            total.tokens += committed - before
            total.fed[1 + count] += 1
            total.trees.append((-1, *(parent - before + 1 for parent in parents[:count])))
    return total
