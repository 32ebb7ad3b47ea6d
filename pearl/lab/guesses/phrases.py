"""Pools of phrases, from which the methods Lookahead decoding and Ouroboros take their guesses.

In Lookahead decoding the guesses come from the target's own Jacobi iterations. Each forward also
feeds a window of guessed tokens, `LEVELS` deep and `COLUMNS` wide. Level 0 is a chain after the
text. Each token of a later level follows the token in the same column of the level before. The
target draws a token after each token of the last level. These draws become a new level, and level 0
is dropped.

So each column, together with its draw, is an n-gram that the target has continued from a guessed
beginning. The pool keeps the n-gram as a phrase that follows the n-gram's first token. When that
token is the text's last, the phrase is a guess.

Example with 3 columns and 2 levels, after the text's last token t::

    level 0   a b c     a follows t, b follows a, c follows b
    level 1   d e f     d follows a, e follows b, f follows c
    draws     x y z     the pool learns (a: d x), (b: e y) and (c: f z); level 1 is the next level 0

Source: "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", Fu et al. 2024,
section 3. The paper's W, N and G are `COLUMNS`, `LEVELS` + 1 and `KEPT`.
"""

from collections.abc import Sequence
from typing import Any

from pearl.drafting.ngram import Candidate, GuessWindow, NgramIndex, learn_rate
from pearl.protocol.messages import Source
from pearl.protocol.sequence import common_prefix

COLUMNS = 15
LEVELS = 4
KEPT = 15  # most phrases that the pool keeps after one token
LONGEST = LEVELS  # most tokens of a phrase; the token that the phrase follows is not counted
_PRIOR = 0.4  # initial estimate of how often a guess is right, for each position in a phrase


class Pool(NgramIndex):
    """The phrases of one text, by the token that they follow.

    All guesses come from these phrases: the further sources of guesses, `sources`, are ignored.
    """

    def __init__(self, tokens: Sequence[int], *sources: Any) -> None:
        #: token -> the phrases that may follow this token, the newest last
        self.phrases: dict[int, list[tuple[int, ...]]] = {}
        self.hits = [_PRIOR] * LONGEST
        #: The position of the last guesses, and the phrases that were guessed for it.
        self._guess_position = 0
        self._guessed_phrases: list[tuple[int, ...]] = []
        super().__init__(tokens)

    def add(self, first: int, phrase: tuple[int, ...]) -> None:
        """Add `phrase`, of up to `LONGEST` tokens, to the phrases that follow the token `first`.

        Of these phrases only the `KEPT` newest are kept.
        """
        phrases = self.phrases.setdefault(first, [])
        if phrase in phrases:
            phrases.remove(phrase)
        phrases.append(phrase)
        del phrases[:-KEPT]

    def learn(self, committed: int) -> None:
        """Update `hits`: for each place in a phrase, how often guesses are right there.

        The n-grams of `NgramIndex` have rates of their own. They are not used here, and not
        updated.
        """
        phrases = self._guessed_phrases
        text = self.tokens[self._guess_position : committed]
        if not text or not phrases:
            return
        longest = max(common_prefix(phrase, text) for phrase in phrases)
        for place in range(min(len(text), LONGEST, longest + 1)):
            learn_rate(self.hits, place, place < longest)
        self._guess_position = 0
        self._guessed_phrases = []

    def candidates(self, position: int) -> list[Candidate]:
        """Return the tokens that may follow the text; none for a position before the text's end."""
        if position != len(self.tokens):
            return []
        phrases = self.phrases.get(self.tokens[-1], [])
        self._guess_position = position
        self._guessed_phrases = list(phrases)
        return self._after((), phrases)

    def following(self, candidate: Candidate) -> list[Candidate]:
        path = candidate.context
        phrases = [phrase for phrase in self._guessed_phrases if phrase[: len(path)] == path]
        return self._after(path, phrases)

    def _after(self, path: tuple[int, ...], phrases: Sequence[tuple[int, ...]]) -> list[Candidate]:
        """Return the tokens that follow `path` in `phrases`, each once, newer phrases first.

        All tokens get the same chance. It is the rate of right guesses at this place in a phrase,
        `hits[len(path)]`, divided by the number of tokens returned.
        """
        place = len(path)
        tokens: dict[int, None] = {}  # as an ordered set
        for phrase in reversed(phrases):
            if len(phrase) > place:
                tokens[phrase[place]] = None
        candidates = []
        for token in tokens:
            chance = self.hits[place] / len(tokens)
            context = (*path, token)
            candidates.append(Candidate(token, chance, (), Source.JACOBI, context=context))
        return candidates


class JacobiIndex(Pool):
    """The pool of Lookahead decoding, with the window of Jacobi iterations of one text."""

    def __init__(self, tokens: Sequence[int], *sources: Any) -> None:
        self.levels: list[list[int]] = []
        for level in range(LEVELS):
            places = range(level * COLUMNS, (level + 1) * COLUMNS)
            self.levels.append([tokens[-1 - place % len(tokens)] for place in places])
        super().__init__(tokens)

    def window(self, most: int, room: int) -> GuessWindow | None:
        """Return a window with as many columns as fit into `most` nodes.

        Return None if no column fits, or if the context has too little room for the window.
        """
        columns = min(COLUMNS, most // LEVELS)
        if columns < 1 or room <= COLUMNS + LEVELS:
            return None
        tokens = []
        for level in self.levels:
            tokens += level[:columns]
        parents = [*range(-1, columns - 1), *range((LEVELS - 1) * columns)]
        return GuessWindow(tuple(tokens), tuple(parents), columns, LEVELS)

    def take(self, draws: Sequence[int]) -> None:
        for column, token in enumerate(draws):
            first, *rest = (level[column] for level in self.levels)
            self.add(first, (*rest, token))
        undrawn = self.levels[-1][len(draws) :]
        self.levels.append([*draws, *undrawn])
        del self.levels[0]


class PhraseIndex(Pool):
    """The pool of Ouroboros: phrases of the text, and the target's draws after discarded tokens.

    The guesses lengthen a draft window after its last token. In the paper the draft also makes
    phrases, by Jacobi iterations. Here the draft verifies n-grams of the text instead (option
    `draft_lookup`).

    Source: "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding",
    Zhao et al. 2024, section 3.
    """

    reads_discarded = True

    def __init__(self, tokens: Sequence[int], *sources: Any) -> None:
        self._next_end = 0  # the pool has all phrases of the text that end before this position
        super().__init__(tokens)

    def learn(self, committed: int) -> None:
        super().learn(committed)
        for end in range(max(self._next_end, LONGEST + 1), committed + 1):
            first, *phrase = self.tokens[end - LONGEST - 1 : end]
            self.add(first, tuple(phrase))
        self._next_end = max(self._next_end, committed + 1)

    def discarded(self, tokens: Sequence[int], draws: Sequence[int]) -> None:
        """For each discarded token, add a phrase of the target's draws that follow the token.

        The phrase begins with the target's draw after the token. It goes on with the draw after the
        next discarded token, as long as that next token equals the previous draw.

        Example: tokens a b c with draws b x y add the phrases (a: b x), (b: x) and (c: y).
        """
        for start, first in enumerate(tokens):
            end = start + 1
            while end < len(tokens) and end - start < LONGEST and tokens[end] == draws[end - 1]:
                end += 1
            self.add(first, tuple(draws[start:end]))
