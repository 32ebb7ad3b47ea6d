"""The tokens that one forward is fed: consecutive tokens of the text, and a tree of guesses."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from pearl.protocol.messages import Source
from pearl.protocol.sequence import TokenSequence


class FedTokens:
    """The tree of tokens that one forward is fed.

    A node is a token's index in the forward. Node -1 stands for the token before the first one.

    Example: the text is 5 6, and 7 and 8 are guesses for the next position. The last token of the
    text, at `start` 1, is fed with both: tokens (6, 7, 8), parents (-1, 0, 0).

    Args:
        start: position of the first token in the text.
        tokens: the text's tokens, then the guesses.
        parents: the parent node of each token; None if each token follows the token before it.
        guessers: who guessed each guess. The guesses are the last `len(guessers)` tokens.

    Attributes:
        path: the nodes of the tokens that belong to the text, from `start` on. It grows when the
            text turns out to follow guesses.
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
        """Map (node, token) to the child of the node that has this token."""
        parents: Sequence[int] = range(-1, len(self.tokens) - 1)
        if self.parents is not None:
            parents = self.parents
        edges = zip(parents, self.tokens, strict=True)
        return {edge: node for node, edge in enumerate(edges)}

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that has this token; None if there is no such child."""
        return self._children.get((node, token))

    def walk(self, node: int, tokens: Iterable[int]) -> list[int]:
        """Follow `tokens` down the tree from `node`; return their nodes.

        Stops at the first token that is no child in the tree. In the example of the class,
        walk(0, [7, 9]) returns [1], the node of 7, because 9 was not fed after 7.
        """
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
        """Return the nodes whose logits predict the `count` positions from `position` on.

        In the example of the class, nodes(2, 1) returns (0,), the node of 6 at position 1.
        """
        index = position - 1 - self.start
        return tuple(self.path[index : index + count])

    def guesser(self, node: int | None) -> Source | None:
        """Return who guessed the token of `node`; None if the token was not a guess."""
        if node is None:
            return None
        index = node - len(self.tokens) + len(self.guessers)
        return self.guessers[index] if index >= 0 else None

    def follow(self, sequence: TokenSequence) -> None:
        """Extend `path` by the guesses that equal the next unfed tokens of the sequence.

        These tokens then count as fed.
        """
        if not self.guessers:
            return
        del self.path[max(0, sequence.fed - self.start) :]
        if self.path:
            nodes = self.walk(self.path[-1], sequence.tokens[sequence.fed :])
            self.path += nodes
            sequence.fed += len(nodes)
