"""Replays method `ngram` on generated texts, to count how many guesses are accepted per step.

A replay makes guesses at each position where a forward would begin, and follows the text through
the tree of guesses. A target would follow the same path, because its draws are the text. No model
runs and nothing is timed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import Guesser, MakeIndex, text_index
from pearl.drafting.ngram import Candidate, NgramIndex, anchored, guess_tree
from pearl.protocol.messages import Source
from pearl.protocol.window import LEAST_GAIN, Payoff

Seconds = Callable[[int], float]  # number of tokens fed -> seconds of the forward


@dataclass(frozen=True)
class Generated:
    """A prompt of `start` tokens and the text generated after it."""

    tokens: tuple[int, ...]
    start: int

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.start


@dataclass
class Replayed:
    """The counts of a replay. A step is a forward after the prefill.

    Attributes:
        steps: number of steps.
        tokens: number of tokens that the steps committed.
        accepted: source -> number of committed guesses.
        fed: n -> number of forwards that were fed n tokens, the last committed token included.
    """

    steps: int = 0
    tokens: int = 0
    accepted: Counter[Source] = field(default_factory=Counter)
    fed: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)

    @property
    def fed_per_step(self) -> float:
        return sum(self.fed.elements()) / max(1, self.steps)

    def speedup(self, seconds: Seconds) -> float:
        """Return the speed-up over one token per forward, if nothing but forwards takes time."""
        if not self.steps:
            return 0.0
        total = sum(map(seconds, self.fed.elements()))
        return self.tokens * seconds(1) / total


class _StoreOnly(Guesser):
    """Guesses from the datastore only, not from the text's own n-grams."""

    def candidates(self, position: int) -> list[Candidate]:
        return self.of_sources(position)


def store_alone(tokens: Sequence[int], store: Datastore | None, *_: object) -> NgramIndex:
    return _StoreOnly(tokens, store)


def no_time(fed: int) -> float:
    """Return 0 for every forward. If forwards take no time, every forward feeds all guesses."""
    return 0.0


def replay(
    texts: Iterable[Generated],
    store: Datastore | None,
    most: int,
    *,
    seconds: Seconds = no_time,
    make: MakeIndex = text_index,
) -> Replayed:
    """Replay method `ngram` with at most `most` guesses per forward.

    Args:
        seconds: number of tokens fed -> seconds of the forward. Each forward feeds the number of
            guesses that promises the most tokens per second.
        make: makes the index of a text from its prompt and the datastore.
    """
    total = Replayed()
    for text in texts:
        index = make(text.tokens[: text.start], store, None, None, ())
        committed = text.start + 1
        end = len(text.tokens)
        while committed < end:
            index.extend(text.tokens[len(index) : committed])
            index.learn(committed)
            anchors = anchored(index.tokens, committed, ())
            times = [seconds(fed) for fed in range(1, most + 2)]
            payoff = Payoff(1.0, times, LEAST_GAIN)
            tree = guess_tree(index, anchors, most, end - 1, nodes=most, payoff=payoff)
            tree = tree.first(payoff.count)
            nodes = _follow(text.tokens[committed:], committed, tree.parents, tree.tokens)
            total.accepted.update(tree.sources[node] for node in nodes)
            added = min(len(nodes) + 1, end - committed)
            committed += added
            total.steps += 1
            total.tokens += added
            total.fed[1 + payoff.count] += 1
    return total


def _follow(
    text: Sequence[int], committed: int, parents: Sequence[int], tokens: Sequence[int]
) -> list[int]:
    """Return the path that `text` takes through the tree of guesses, as numbers of guesses.

    Args:
        text: the tokens from position `committed` on.
        parents: for each guess, the number of its parent: `committed` + i for guess i, or
            `committed` - 1 for the last committed token.
    """
    children = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    position = committed - 1
    path = []
    for token in text:
        node = children.get((position, token))
        if node is None:
            break
        path.append(node)
        position = committed + node
    return path
