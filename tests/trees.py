"""An executor that feeds guesses chosen by a test, and the commands that ask for guesses."""

from collections.abc import Sequence
from typing import Any

from pearl.drafting.ngram import GuessTree
from pearl.protocol.events import Guess
from pearl.protocol.messages import Source
from pearl.protocol.window import Payoff
from tests.opened import OpenExecutor


class TreeExecutor(OpenExecutor):
    """Feeds `tokens` as guesses.

    `parents`: for each guess, the position of the token before it. From the text's length on, the
    number stands for a guess: the text's length means the first guess.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()

    def _guess(self, request: Any, guess: Guess, num_fed: int) -> GuessTree:
        super()._guess(request, guess, num_fed)
        count = len(self.tokens)
        sources = [Source.NGRAM] * count
        return GuessTree([*self.tokens], [*self.parents], [0.5] * count, sources)


def guess_after(text: Sequence[int], known: int = 0, pending: int = 0, trust: float = 0.5) -> Guess:
    """Return a command that asks for guesses after `text`, all of which are worth feeding.

    `known`: how many tokens of the text the n-gram index has read.
    """
    committed = len(text) - pending
    return Guess(known, tuple(text[known:]), committed, 99, (trust,) * pending, 16, all_of)


def all_of(fed: int, most: int) -> Payoff:
    return Payoff(1.0, [1.0] * (most + 1))
