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

    A pre-verify step yields 1 token, a post-verify step (1 - a^c) / (1 - a) tokens. The next step
    is a post-verify step with probability a after a pre-verify step, and with probability a^c after
    a post-verify step. A step lasts as long as c draft forwards or one target forward, whichever is
    slower.

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
    """Return the committed tokens per second of speculative decoding in turn (method sd).

    Acceptance is i.i.d.; the target adds a bonus token to each fully accepted window.

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


# Feed guesses only if they multiply the expected tokens per second by at least this. The margin is
# needed because chances and times are estimates, the chances of the guesses that look best are too
# high on average, and a tree also takes time outside of the forward.
LEAST_GAIN = 1.05


class Payoff:
    """Decides how many guesses to feed in a forward, to maximise the expected tokens per second.

    Guesses are offered one by one, the likeliest first.

    Args:
        expected: expected number of tokens that the forward yields without guesses.
        seconds: seconds of the forward with 0, 1, 2 ... guesses, up to the most that will be
            offered.
        least_gain: feed guesses only if they multiply the tokens per second by more than this.

    Attributes:
        count: number of guesses to feed: the first `count` guesses that were offered.
    """

    def __init__(self, expected: float, seconds: Sequence[float], least_gain: float = 1.0) -> None:
        self.count = 0
        self._offered = 0
        self._expected = expected
        self._seconds = seconds
        self._rate = least_gain * expected / seconds[0] if seconds[0] else 0.0

    def offer(self, chance: float) -> None:
        """Consider the next guess, which is right with probability `chance`."""
        self._offered += 1
        self._expected += chance
        seconds = self._seconds[self._offered]
        if self._expected > self._rate * seconds:
            self.count = self._offered
            self._rate = self._expected / seconds if seconds else 0.0

    def may_pay(self, chance: float) -> bool:
        """Return whether further guesses may pay, if each is right with at most chance `chance`."""
        expected = self._expected
        for seconds in self._seconds[self._offered + 1 :]:
            expected += chance
            if expected > self._rate * seconds:
                return True
        return False


def worthwhile(
    chances: Sequence[float], fed: int, expected: float, t_target: Callable[[int], float]
) -> int:
    """Return how many candidates to add to a forward, to maximise the expected tokens per second.

    Args:
        chances: for each candidate the probability that it is accepted, in descending order.
        fed: number of tokens that the forward is fed without candidates.
        expected: expected number of tokens that the forward yields without candidates.
        t_target: function from the number of tokens fed to the seconds of a forward.
    """
    payoff = Payoff(expected, [t_target(fed + count) for count in range(len(chances) + 1)])
    for chance in chances:
        payoff.offer(chance)
    return payoff.count


@dataclass(frozen=True)
class Window:
    """When the target starts its next forward, and how far the draft may draft meanwhile.

    Attributes:
        needed: the target starts a forward once this many tokens wait to be fed.
        draft_until: the first position of the text that the draft may not draft.
    """

    needed: int
    draft_until: int

    def in_blocks(self, block: int, length: int) -> Window:
        """Return this window with both limits rounded up to whole blocks of `block` tokens.

        The target then waits for a whole block before every forward, because a block can only be
        judged as a whole. One of the `needed` tokens is the last committed token, which belongs to
        no block.

        Args:
            length: number of committed tokens.
        """
        needed = 1 + _whole(self.needed - 1, block)
        return Window(needed, length + _whole(self.draft_until - length, block))

    @staticmethod
    def after(
        method: Method, policy: str, c: int, length: int, fresh: bool, pending: int = 0
    ) -> Window:
        """Return the window that applies once `length` tokens are committed.

        Args:
            policy: "stream" or "fixed", see DESIGN section 2.
            c: the window length in tokens, fixed or chosen from measured speeds.
            fresh: whether a new window begins at `length`, as after a prefill, a rejection or a
                bonus token.
            pending: the number of pending tokens, used if `fresh`. A new window can begin with
                pending tokens if the draft had prepared a branch for the correction or bonus token.
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
            # Wait for c - 1 tokens, not c. A rejection makes at most one draft forward useless, so
            # c - 1 tokens are there when the target is free. Waiting for one more takes t_draft.
            return Window(1 if fresh else max(1, c - 1), length + 2 * c)
        # While the target verifies a branch, however long, the draft fills the window after the branch.
        return Window(1, length + pending + c) if fresh else Window(c, length - 1 + 2 * c)
