"""An executor that feeds the guesses that a test names, and the commands that ask for them."""

from collections.abc import Sequence
from typing import Any

from pearl.drafting.ngram import GuessTree
from pearl.protocol.events import Guess
from pearl.protocol.messages import Source
from pearl.protocol.window import Payoff
from tests.opened import OpenExecutor


class TreeExecutor(OpenExecutor):
    """Feeds `tokens` as guesses, each after its parent: a position, or from the text's length on a guess."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()

    def _guess(self, request: Any, guess: Guess, num_fed: int) -> GuessTree:
        super()._guess(request, guess, num_fed)
        count = len(self.tokens)
        sources = [Source.NGRAM] * count
        return GuessTree([*self.tokens], [*self.parents], [0.5] * count, sources)


def guess_after(text: Sequence[int], known: int = 0, pending: int = 0, trust: float = 0.5) -> Guess:
    """Asks for guesses, all worth feeding, of a text whose first `known` tokens the index has."""
    committed = len(text) - pending
    return Guess(known, tuple(text[known:]), committed, 99, (trust,) * pending, 16, all_of)


def all_of(fed: int, most: int) -> Payoff:
    return Payoff(1.0, [1.0] * (most + 1))
