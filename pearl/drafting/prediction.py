"""Guesses from a prediction: the text that a client expects, such as the file that the model is asked to edit.

An edit leaves most of a file as it is, so the text follows the prediction, leaves it and returns to it.  Source: the
predicted outputs of OpenAI's API.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

from pearl.drafting.ngram import (
    LONGEST,
    MOST_MATCHED,
    RANKS,
    Candidate,
    NgramTable,
    Occurrence,
    SuffixLookup,
)
from pearl.protocol.messages import Source

_MOST = 8  # occurrences at a position


class PredictedGuesses(SuffixLookup):
    """Finds the text's last tokens in the prediction; the tokens that follow them are candidates.

    The current place is where the text has arrived in the prediction. Longer matches come first.
    Among matches of the same length, the match nearest after the current place comes first. A match
    before the current place counts only if it has at least `LONGEST` tokens, because few texts go
    back.

    The search covers the end of the prompt, followed by the prediction. So a text is first expected
    to begin as the prediction does.

        >>> guesses = PredictedGuesses((5, 6, 7), [1, 2])
        >>> guesses.candidates(2)[0].token
        5

    Attributes:
        written: the places of the prediction whose tokens the text has followed.

    Args:
        text: the prompt. The caller appends the text's later tokens to this list; this object only
            reads it.
    """

    def __init__(self, prediction: Sequence[int], text: list[int]) -> None:
        super().__init__(text, "prediction", len(text))
        before = text[-MOST_MATCHED:]
        self.written: set[int] = set()
        self._table = NgramTable(before)
        self._table.extend(prediction)
        self._start = len(before)
        self._place = self._start

    def learn(self, committed: int) -> None:
        for position in range(self._learned, committed):
            candidates = self.candidates(position)
            if candidates and candidates[0].token == self.tokens[position]:
                place, _ = candidates[0].occurrences[0]
                self.written.add(place)
                self._place = place + 1
        super().learn(committed)

    def _matching(self, position: int) -> list[Occurrence]:
        text = self.tokens
        matches: dict[int, int] = {}
        for n in range(min(LONGEST, position), 0, -1):
            for end in self._nearest(self._table.ends(text, position, n), n == LONGEST):
                if end not in matches and len(matches) < _MOST:
                    matches[end] = self._table.matched(end, text, position, n)
        return sorted(matches.items(), key=lambda match: match[1], reverse=True)

    def _nearest(self, ends: Sequence[int], may_return: bool) -> Iterator[int]:
        """Yield the places in `ends` from the current place on, the nearest first.

        If `may_return`, then also yield the places before the current place, the nearest first.
        """
        current = bisect_left(ends, self._place)
        yield from islice(ends, current, current + _MOST)
        if not may_return:
            return
        for end in reversed(ends[max(0, current - _MOST) : current]):
            if end >= self._start:
                yield end

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[Candidate]:
        tokens = self._table.tokens
        by_token: dict[int, list[Occurrence]] = {}
        for occurrence in occurrences:
            place, _ = occurrence
            if place < len(tokens):
                by_token.setdefault(tokens[place], []).append(occurrence)
        return self._rated(islice(by_token.items(), RANKS), Source.PREDICTION)


class PredictionCount:
    """Counts the tokens of a prediction that the text has, as usage statistics report them.

    The count depends on prediction and text alone, not on who guessed the text's tokens.
    """

    def __init__(self, prediction: Sequence[int], prompt: Sequence[int]) -> None:
        self._num_predicted = len(prediction)
        self._text = list(prompt)
        self._guesses = PredictedGuesses(prediction, self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens to the text."""
        self._text += tokens
        self._guesses.learn(len(self._text))

    @property
    def accepted(self) -> int:
        """Number of the prediction's tokens that the text has."""
        return len(self._guesses.written)

    @property
    def rejected(self) -> int:
        """Number of the prediction's tokens that the text does not have."""
        return self._num_predicted - self.accepted
