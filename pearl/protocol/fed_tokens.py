"""The tokens of one forward: consecutive tokens of the text, and guesses after or next to them, as a tree."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from pearl.protocol.messages import Source
from pearl.protocol.sequence import TokenSequence


class FedTokens:
    """The tree of tokens of one forward. A node is a token's index in the forward; -1 is the token before the first
    one.

    Example: after the text 5 6, whose last token stands at `start` 1, the guesses 7 and 8 for one position are fed as
    tokens (6, 7, 8) with parents (-1, 0, 0).

    Args:
        start: position of the first token.
        tokens: the text's tokens, then the guesses.
        parents: the parent node of each token. None if each token follows the token before it.
        guessers: who guessed each guess; the guesses are the last `len(guessers)` tokens.

    Attributes:
        path: nodes of the tokens that belong to the text, from `start` on.
    """

    def __init__(
        self,
        start: int,
        tokens: tuple[int, ...],
        parents: tuple[int, ...] | None = None,
        guessers: tuple[Source, ...] = (),
    ) -> None:
        self.start = start
        self.tokens = tokens
        self.parents = parents
        self.guessers = guessers
        self.path = list(range(len(tokens) - len(guessers)))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """(node, token) -> the child of this node that has this token."""
        parents: Sequence[int] = range(-1, len(self.tokens) - 1)
        if self.parents is not None:
            parents = self.parents
        edges = zip(parents, self.tokens, strict=True)
        return {edge: node for node, edge in enumerate(edges)}

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that has this token; None if it was not fed there."""
        return self._children.get((node, token))

    def walk(self, node: int, tokens: Iterable[int]) -> list[int]:
        """Return the nodes of `tokens`, which follow `node`, up to the first token that was not fed."""
        children = self._children
        nodes = []
        for token in tokens:
            child = children.get((node, token))
            if child is None:
                break
            node = child
            nodes.append(node)
        return nodes

    def nodes(self, position: int, count: int) -> tuple[int, ...]:
        """Return the nodes whose rows are for `position` and the `count` - 1 positions after it."""
        index = position - 1 - self.start
        return tuple(self.path[index : index + count])

    def guesser(self, node: int | None) -> Source | None:
        """Return who guessed a node's token; None if it was not a guess."""
        if node is None:
            return None
        index = node - len(self.tokens) + len(self.guessers)
        return self.guessers[index] if index >= 0 else None

    def follow(self, sequence: TokenSequence) -> None:
        """Extend `path` by the guesses that match the sequence's unfed tokens, and count these tokens as fed."""
        if not self.guessers:
            return
        del self.path[max(0, sequence.fed - self.start) :]
        if self.path:
            nodes = self.walk(self.path[-1], sequence.tokens[sequence.fed :])
            self.path += nodes
            sequence.fed += len(nodes)
