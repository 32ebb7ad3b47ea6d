"""Which forwards a text would have taken with guesses alone, found out behind it while a draft helps to write it.

The text is the same whoever proposes (rules that commit the target's own draws), so what guesses would have hit is
known exactly once it stands: only how long such forwards take has to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from pearl.drafting.ngram import TextIndex, anchored, guess_tree
from pearl.protocol.window import worthwhile


class Hindsight:
    """Of one text.

    Args:
        start: how many of its tokens were there when this began.
        times: seconds of a forward of 1, 2, ... tokens: what decides how many guesses are fed. Of more tokens than
            these: as many as of the last.
        most: guesses in a forward.
        branches: see `guess_tree`.

    Attributes:
        reached: the length of the text behind the last forward that is known.
    """

    def __init__(self, start: int, times: Sequence[float], most: int, branches: bool) -> None:
        self.reached = start
        self._times, self._most, self._branches = times, most, branches
        self._children: dict[tuple[int, int], int] | None = None  # (node, token) -> node, of the tree fed there
        self._fed = 0

    def follow(self, index: TextIndex, committed: int, limit: int) -> list[tuple[int, int]]:
        """The forwards that the first `committed` tokens of the index's text tell of, since this was last asked.

        The index learns on the way what stands before each of them, and nothing of what it could not know there.

        Args:
            limit: the first position that needs no guess.

        Returns:
            (tokens fed, tokens that they made) of each.
        """
        found: list[tuple[int, int]] = []
        if committed <= self.reached:
            return found
        text = index.tokens[self.reached :]
        first = self.reached
        index.cut(first)
        while (made := self._made(index, text[self.reached - first : committed - first], limit)) is not None:
            found.append((self._fed, made))
            index.extend(text[self.reached - first : self.reached - first + made])
            self.reached += made
            self._children = None
            index.learn(self.reached)
        index.extend(text[self.reached - first :])
        return found

    def _made(self, index: TextIndex, text: Sequence[int], limit: int) -> int | None:
        """How many tokens the next forward would have made, if `text` followed; None: it tells too little."""
        if not text:
            return None
        if self._children is None:
            self._feed(index, limit)
        assert self._children is not None
        node = self.reached - 1
        for made, token in enumerate(text, start=1):
            if (below := self._children.get((node, token))) is None:
                return made
            node = below
        return None

    def _feed(self, index: TextIndex, limit: int) -> None:
        (anchor,) = anchored(index.tokens, self.reached, 1.0)
        tokens, parents, chances, _ = guess_tree(index, [anchor], self._most, limit, self._branches)
        count = worthwhile(chances, 1, 1.0, lambda fed: self._times[min(fed, len(self._times)) - 1])
        edges = zip(parents[:count], tokens[:count], strict=True)
        self._children = {edge: self.reached + number for number, edge in enumerate(edges)}
        self._fed = 1 + count
