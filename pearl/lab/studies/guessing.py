"""Replays method `ngram` on generated texts: tokens per step, by source of the guesses and by tokens fed.

A replay asks for guesses where each forward would begin and follows the text through the tree of guesses, as the target
did: its draw at each node is the text.  No model runs and nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import Guesser, MakeIndex, text_index
from pearl.drafting.ngram import Candidate, NgramIndex, anchored, guess_tree
from pearl.protocol.messages import Source
from pearl.protocol.window import worthwhile

Seconds = Callable[[int], float]  # of a forward, by tokens fed


@dataclass(frozen=True)
class Generated:
    """A prompt of `start` tokens and the text generated after it."""

    tokens: tuple[int, ...]
    start: int


@dataclass
class Replayed:
    """Sums of a replay. A step is a forward after the prefill.

    Attributes:
        accepted: committed guesses by source.
        fed: number of forwards by tokens fed, the last committed token included.
    """

    steps: int = 0
    tokens: int = 0
    accepted: Counter[Source] = field(default_factory=Counter)
    fed: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def fed_per_step(self) -> float:
        return (
            sum(size * count for size, count in self.fed.items()) / self.steps
            if self.steps
            else 0.0
        )

    def speedup(self, seconds: Seconds) -> float:
        """Speed-up over one token per forward, if only forwards take time."""
        spent = sum(count * seconds(size) for size, count in self.fed.items())
        return self.tokens * seconds(1) / spent if spent else 0.0


class _StoreOnly(Guesser):
    """Guesses from the datastore only, not from the text's own n-grams."""

    def candidates(self, position: int) -> list[Candidate]:
        assert self._store is not None
        return self._store.candidates(position)


def store_alone(tokens: Sequence[int], store: Datastore | None, *_: object) -> NgramIndex:
    return _StoreOnly(tokens, store)


def replay(
    texts: Iterable[Generated],
    store: Datastore | None,
    most: int,
    *,
    seconds: Seconds | None = None,
    make: MakeIndex = text_index,
) -> Replayed:
    """Replay method `ngram` with at most `most` guesses per forward.

    Args:
        seconds: of a forward; feeds the number of guesses that gives most tokens per second. None: feeds all.
        make: makes the index of a text from its prompt and the datastore.
    """
    total = Replayed()
    for text in texts:
        index = make(text.tokens[: text.start], store, None, None)
        committed, end = text.start + 1, len(text.tokens)
        while committed < end:
            index.extend(text.tokens[len(index) : committed])
            index.learn(committed)
            anchors = anchored(index.tokens, committed, ())
            tokens, parents, chances, sources = guess_tree(index, anchors, most, end - 1)
            count = len(tokens) if seconds is None else worthwhile(chances, 1, 1.0, seconds)
            pairs = zip(parents[:count], tokens[:count], strict=True)
            children = {pair: i for i, pair in enumerate(pairs)}
            at, before = committed - 1, committed
            while (
                committed < end and (node := children.get((at, text.tokens[committed]))) is not None
            ):
                total.accepted[sources[node]] += 1
                at, committed = before + node, committed + 1
            committed = min(end, committed + 1)
            total.steps += 1
            total.tokens += committed - before
            total.fed[1 + count] += 1
    return total
