"""How far the draft drafts ahead, and how many guesses the target is fed.

This file computes the expected tokens per second, and the window of each method. It is pure arithmetic. Source: PEARL
(Liu et al.), Theorem 1, and DESIGN section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pearl.spec.methods import Method


def expected_rate(
    window: int, acceptance: float, t_draft: float, t_target_1: float, t_target_c: float
) -> float:
    """Return PEARL's committed tokens per second with a fixed window under i.i.d. acceptance.

    A pre-verify step yields 1 token, a post-verify step (1 - a^c) / (1 - a). The next step is a post-verify step with
    probability a after a pre-verify step, and with probability a^c after a post-verify step. A step lasts as long as
    its slower side: c draft forwards or one target forward.

    Args:
        window: c, tokens.
        acceptance: a, in [0, 1].
        t_draft: seconds of a draft forward.
        t_target_1, t_target_c: seconds of a target forward that is fed 1 token, and c tokens.
    """
    power = acceptance**window
    post = acceptance / (1 + acceptance - power)  # stationary share of post-verify steps
    post_yield = window if acceptance == 1 else (1 - power) / (1 - acceptance)
    tokens = (1 - post) + post * post_yield
    pre_seconds = max(window * t_draft, t_target_1)
    post_seconds = max(window * t_draft, t_target_c)
    return tokens / ((1 - post) * pre_seconds + post * post_seconds)


def expected_rate_in_turn(
    window: int, acceptance: float, drafting: float, t_target: float
) -> float:
    """Return the committed tokens per second where a window is drafted, then verified with a bonus token, under i.i.d.
    acceptance.

    Args:
        window: c, tokens.
        acceptance: a, in [0, 1].
        drafting: seconds of drafting that the target waits for.
        t_target: seconds of a target forward that is fed c + 1 tokens.
    """
    tokens = sum([acceptance**count for count in range(window + 1)])
    return tokens / (drafting + t_target)


def whole_blocks(c: int, block: int) -> int:
    """Return the multiple of `block` nearest to `c`; at least one block."""
    return max(1, (2 * c + block) // (2 * block)) * block


def _whole(tokens: int, block: int) -> int:
    """Return `tokens` rounded up to a multiple of `block`; at least one block."""
    return max(1, -(-tokens // block)) * block


# Feed guesses only if the expected tokens per second are this many times those without guesses. Chances and times are
# estimates, the chances of the best-looking guesses err upwards, and a tree also takes time outside of the forward.
LEAST_GAIN = 1.05


class Payoff:
    """Decides how many guesses to feed with a forward for the most expected tokens per second.

    Guesses are offered one by one, the likeliest first.

    Args:
        expected: expected tokens of the forward without guesses.
        seconds: seconds of the forward with 0, 1, 2 and so on guesses, up to the most that will be offered.
        least_gain: feed guesses only if they multiply the tokens per second by more than this.

    Attributes:
        count: the number of guesses to feed, the first of those offered.
    """

    def __init__(self, expected: float, seconds: Sequence[float], least_gain: float = 1.0) -> None:
        self.count = 0
        self._offered = 0
        self._expected = expected
        self._seconds = seconds
        self._rate = least_gain * expected / seconds[0] if seconds[0] else 0.0

    def offer(self, chance: float) -> None:
        """Take in the next guess, and the probability that it is right."""
        self._offered += 1
        self._expected += chance
        seconds = self._seconds[self._offered]
        if self._expected > self._rate * seconds:
            self.count = self._offered
            self._rate = self._expected / seconds if seconds else 0.0

    def may_pay(self, chance: float) -> bool:
        """Return whether further guesses may pay if none is likelier than `chance`."""
        expected = self._expected
        for seconds in self._seconds[self._offered + 1 :]:
            expected += chance
            if expected > self._rate * seconds:
                return True
        return False


def worthwhile(
    chances: Sequence[float], fed: int, expected: float, t_target: Callable[[int], float]
) -> int:
    """Return how many candidate tokens to add to a forward of `fed` tokens for the most expected tokens per second.

    Args:
        chances: for each candidate the probability that it is accepted, in descending order.
        expected: expected tokens of the forward without candidates.
        t_target: function from the number of tokens fed to the seconds of a forward.
    """
    payoff = Payoff(expected, [t_target(fed + count) for count in range(len(chances) + 1)])
    for chance in chances:
        payoff.offer(chance)
    return payoff.count


@dataclass(frozen=True)
class Window:
    """The limits of one step.

    Attributes:
        needed: the target starts a forward once this many tokens wait to be fed.
        draft_until: the draft drafts up to this position of the text (not including it).
    """

    needed: int
    draft_until: int

    def in_blocks(self, block: int, length: int) -> Window:
        """Return this window with both sides rounded up to whole blocks of `block` tokens.

        One of the `needed` tokens is the last committed token, which is fed with the blocks and belongs to none. The
        target waits for a whole block before every forward, because a block can only be judged as a whole.
        """
        needed = 1 + _whole(self.needed - 1, block)
        return Window(needed, length + _whole(self.draft_until - length, block))

    @staticmethod
    def after(
        method: Method, policy: str, c: int, length: int, fresh: bool, pending: int = 0
    ) -> Window:
        """Return the window once `length` tokens are committed.

        Args:
            c: the window, fixed or measured.
            fresh: whether no drafted token survives (after a prefill, a rejection or a bonus token): a new window
                begins at `length`.
            pending: number of drafted tokens that are there even though `fresh` is true: those of a branch that the
                draft had prepared for this outcome.
        """
        if not method.drafts:
            return Window(1, length)
        if not method.post_verify:
            if not method.pre_verify:  # sd: draft a window, then verify it
                return Window(c + 1, length + c)
            return Window(1, length + c) if fresh else Window(c, length - 1 + c)
        if fresh and not method.pre_verify:
            # The target idles for the first window; the draft drafts on past it.
            return Window(c + 1, length + 2 * c)
        if policy == "stream":
            # Wait for c - 1 tokens, not c. A rejection costs the draft at most the forward that is running, so c - 1
            # tokens are there when the target is free. Waiting for one more would take t_draft.
            return Window(1 if fresh else max(1, c - 1), length + 2 * c)
        # While the target verifies a branch, however long, the draft fills the window after the branch.
        return Window(1, length + pending + c) if fresh else Window(c, length - 1 + 2 * c)
