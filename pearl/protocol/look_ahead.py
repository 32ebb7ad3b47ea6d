"""The guesses of one request: what to base them on, and how many are worth feeding to the target.

Guesses are tokens that come from n-grams, a datastore or a head, not from the draft model.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.events import Alternative, Guess
from pearl.protocol.request import Request
from pearl.protocol.speeds import Speeds
from pearl.protocol.window import LEAST_GAIN, Payoff


class LookAhead:
    """Plans the guesses of one request."""

    def __init__(self, request: Request, speeds: Speeds) -> None:
        self._request = request
        self._speeds = speeds
        # For each token that was pending when `guess` was last called, the chance that it is right.
        self._trust: tuple[float, ...] = ()

    def guess(self) -> Guess:
        """Return the `Guess` for the next forward, from which the executor makes guesses.

        Guesses may follow the text or replace pending tokens.
        """
        request = self._request
        seq = request.sequence
        seen = request.proposals.seen(len(seq.tokens) - seq.committed)
        self._trust = tuple(map(self._acceptance, seen))
        alternatives: tuple[Alternative, ...] = ()
        if request.takes_siblings:
            alternatives = self._alternatives(seen)
        base, tokens = request.take_unindexed()
        return Guess(
            base,
            tokens,
            seq.committed,
            # Nothing is decided after the last position before `limit`: its token need not be fed.
            request.submit.limit - 1,
            self._trust,
            request.options.look_ahead,
            self.payoff,
            alternatives,
            request.method.takes_head,
        )

    def payoff(self, fed: int, most: int) -> Payoff:
        """Return a new `Payoff`, which decides how many guesses to feed in one forward.

        Args:
            fed: number of tokens of the text that the forward is fed; guesses do not count.
            most: the most guesses that will be offered to the `Payoff`.
        """
        seq = self._request.sequence
        pending = self._trust[: max(0, seq.fed - seq.committed)]
        expected = sum(accumulate(pending, mul, initial=1.0))
        if not self._request.runs_ahead:
            # A guess helps only if the draft's own token turns out the same.
            expected /= self._speeds.bounded_acceptance
        fed += self._request.beside
        seconds = list(map(self._speeds.target.hoped, range(fed, fed + most + 1)))
        return Payoff(expected, seconds, LEAST_GAIN)

    def _acceptance(self, seen: Seen | None) -> float:
        """Return the probability that a pending token is right if all earlier tokens are right."""
        if seen is None:
            return self._speeds.acceptance
        return self._speeds.foresight.agrees(seen)

    def _alternatives(self, pending: Sequence[Seen | None]) -> tuple[Alternative, ...]:
        """Return the likeliest runners-up of the pending tokens.

        If the draft has sent a branch for a runner-up, the branch's tokens follow the runner-up.
        """
        request = self._request
        foresight = self._speeds.foresight
        candidates = []
        reached = 1.0  # the probability that all tokens before this position are right
        for position, seen in enumerate(pending, request.sequence.committed):
            rivals = [] if seen is None else foresight.others(seen)
            for share, rival in rivals:
                candidates.append((reached * share, self._alternative(position, share, rival)))
            reached *= self._acceptance(seen)
        candidates.sort(key=lambda candidate: -candidate[0])
        return tuple(alternative for _, alternative in candidates[: request.options.siblings])

    def _alternative(self, position: int, share: float, rival: int) -> Alternative:
        """Return the runner-up `rival` for `position`, with the tokens of its branch, if any.

        `share`: the probability that the target commits `rival`.
        """
        tokens: tuple[int, ...] = (rival,)
        chances: tuple[float, ...] = (share,)
        branch = self._request.proposals.branch(position, rival)
        if branch is not None:
            tokens += branch.tokens[: len(branch.seen)]
            chances += tuple(map(self._speeds.foresight.agrees, branch.seen))
        return Alternative(position, tokens, chances)
