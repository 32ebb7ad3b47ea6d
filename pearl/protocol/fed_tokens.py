"""The tokens of one request's last target forward, and how far the text follows them."""

from __future__ import annotations

from collections.abc import Sequence

from pearl.protocol.events import Guessed
from pearl.protocol.messages import Source
from pearl.protocol.sequence import TokenSequence


class FedTokens:
    """The tokens of one forward: a chain of the text, and guesses behind or beside it.

    Args:
        start: position of the first token.
        chain: tokens of the text.
        guessed: guesses behind a text of `length` tokens, of which the first `count` were fed.

    Attributes:
        tokens: chain and guesses.
        parents: as `Forward.parents`; None: each follows the one before it.
        path: indices of the tokens that the text has from `start` on.
    """

    def __init__(self, start: int, chain: tuple[int, ...], guessed: Guessed, count: int, length: int) -> None:
        self.start, self.tokens = start, chain + guessed.tokens[:count]
        self._chain, self._sources = len(chain), guessed.sources
        self.path = list(range(len(chain)))
        # A guess's parent is a token of the text, by position, or another guess, numbered from the text's length on.
        above = [each - start if each < length else each - length + len(chain) for each in guessed.parents[:count]]
        parents = (*range(-1, len(chain) - 1), *above)
        self.parents = None if parents == tuple(range(-1, len(self.tokens) - 1)) else parents
        followed = zip(parents, self.tokens, strict=True) if count else ()
        self._children = {edge: node for node, edge in enumerate(followed)}

    def nodes(self, position: int, count: int) -> tuple[int, ...]:
        """Indices of the tokens whose rows are for `position` and the `count` - 1 positions after it."""
        first = position - 1 - self.start
        return tuple(self.path[first : first + count])

    def guessers(self, position: int, tokens: Sequence[int]) -> list[Source | None]:
        """Who guessed each of `tokens`, which stand from `position` on; None for a token that was no guess."""
        (node,) = self.nodes(position, 1)
        found: list[Source | None] = []
        for token in tokens:
            node = self._children.get((node, token), -2)  # -1 is the first token's parent
            found.append(self._sources[node - self._chain] if node >= self._chain else None)
        return found

    def follow(self, sequence: TokenSequence) -> None:
        """Count unfed tokens of the sequence that are among the guesses as fed."""
        del self.path[max(0, sequence.fed - self.start) :]
        while self.path and sequence.fed < len(sequence.tokens):
            node = self._children.get((self.path[-1], sequence.tokens[sequence.fed]))
            if node is None:
                break
            self.path.append(node)
            sequence.fed += 1
