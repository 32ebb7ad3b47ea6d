"""How far to draft ahead: the speeds that are measured, the window they make best, and the policies that use it.

Pure arithmetic on numbers that others measured. Source: PEARL (Liu et al.), Theorem 1, and DESIGN section 2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from pearl.protocol.choice import Choice
from pearl.spec.methods import MAX_WINDOW, Method

_DEFAULT_WINDOW = 4  # until both speeds are known
_TIME_WEIGHT = 0.1  # of a new forward time in the running estimate: a hiccup fades within ten forwards
# Forwards of other sizes until a time begins to fade, by how much with each after that, and down to which part of it.
_LASTS, _FADES, _LEAST_LEFT = 256, 0.998, 0.5
_OF_AGE, _MOST_WEIGHT = 1 / 256, 0.75  # how much more a new time counts by each of these forwards, and at most
_MOST_OFF = 2.0  # times the estimate that a new forward time counts as at most: one may have had to prepare others
_ACCEPTANCE_WEIGHT = 0.02  # of a new judgement: acceptance varies from token to token by nature


def expected_rate(window: int, acceptance: float, t_draft: float, t_target_1: float, t_target_c: float) -> float:
    """Committed tokens a second of PEARL with a fixed window under i.i.d. acceptance.

    A pre-verify step yields 1 token, a post-verify step (1 - a^c) / (1 - a); pre leads to post with probability a,
    post to post with a^c. A step lasts as long as the slower side: c drafts or one target forward.

    Args:
        window: c, tokens.
        acceptance: a, in [0, 1].
        t_draft, t_target_1, t_target_c: seconds of one draft forward and of target forwards fed 1 and c tokens.
    """
    power = acceptance**window
    post = acceptance / (1 + acceptance - power)  # stationary share of post-verify steps
    post_yield = window if acceptance == 1 else (1 - power) / (1 - acceptance)
    tokens = (1 - post) + post * post_yield
    seconds = (1 - post) * max(window * t_draft, t_target_1) + post * max(window * t_draft, t_target_c)
    return tokens / seconds


@dataclass
class ForwardTimes:
    """Running estimates of a model's forward times, seconds by number of tokens fed.

    Attributes:
        known: what was measured.
        like: of the same model on other cores. A size that was measured there alone is expected to take as much less or
            more time here as the sizes that were measured on both do together.
    """

    known: dict[int, float] = field(default_factory=dict)
    like: ForwardTimes | None = None
    _once: set[int] = field(default_factory=set)  # sizes that were seen once
    _last: dict[int, int] = field(default_factory=dict)  # when each was seen, in forwards
    _forwards: int = 0
    _least: tuple[tuple[int, float], ...] | None = None  # `_all` in order, none above one for more tokens
    _hopes: tuple[tuple[int, float], ...] | None = None  # see `hoped`

    def observe(self, fed: int, seconds: float) -> None:
        """Take in a forward of `fed` tokens.

        The first of a size may have had to prepare (kernels, memory): what it takes beyond what other sizes let expect
        counts as little as a hiccup does, and if the second takes less it counts no more.
        """
        if seconds > 0:
            known = self.known.get(fed)
            expected = min(self._expected(fed), seconds) if known is None else known
            if fed in self._once:
                expected = min(expected, seconds)
            self._once.discard(fed)
            if known is None:
                self._once.add(fed)
            age = self._forwards - self._last.get(fed, self._forwards)
            self.known[fed] = _blend(expected, seconds, min(_MOST_WEIGHT, _TIME_WEIGHT + _OF_AGE * age))
            self._forwards += 1
            self._last[fed] = self._forwards
            self.reconsider()

    def settle(self) -> None:
        """What has been measured so far is taken as the times of a profile are: none is a first time, all are new."""
        self._once.clear()
        self._last.clear()
        self._forwards = 0
        self.reconsider()

    def reconsider(self) -> None:
        """What is known of other cores may have changed."""
        self._least = self._hopes = None

    def _expected(self, fed: int) -> float:
        """The most that a forward of a size not yet seen should take; infinite where nothing is known.

        Between measured sizes: interpolated. Beyond the largest: each token as long as there.
        """
        largest = max(self._all, default=0)
        return self.seconds(fed) * max(1.0, fed / largest) if largest else inf

    @property
    def _all(self) -> dict[int, float]:
        """What was measured, and what is expected of sizes that were measured on other cores alone."""
        if self.like is None or not self.like.known:
            return self.known
        here, there = sum(self.known.values()), sum(map(self.like.at_most, self.known))
        times = here / there if here and there else 1.0
        return {size: self.like.at_most(size) * times for size in self.like.known} | self.known

    @property
    def measured(self) -> tuple[tuple[int, float], ...]:
        """(fed tokens, seconds), in order of fed tokens."""
        return tuple(sorted(self.known.items()))

    def seconds(self, fed: int) -> float:
        """Of a forward fed `fed` tokens: measured, or interpolated between the nearest measured; 0: nothing is known.

        Beyond the measured range the nearest value stands: extrapolating a noisy slope would be worse than flat.
        """
        return _interpolated(tuple(sorted(self._all.items())), fed)

    def at_most(self, fed: int) -> float:
        """As `seconds`, but never longer than a larger forward took: what is measured seldom may have been a hiccup."""
        if self._least is None:
            every = self._all
            sizes = sorted(every, reverse=True)
            least = accumulate((every[size] for size in sizes), min)
            self._least = tuple(zip(sizes, least, strict=True))[::-1]
        return _interpolated(self._least, fed)

    def hoped(self, fed: int) -> float:
        """As `at_most`, but less for what has not been measured lately: what seems too dear would not be tried again.

        Never less than a smaller forward takes.
        """
        if self._hopes is None:
            self.at_most(fed)
            assert self._least is not None
            hopes = []
            least = self._least[0][1] if self._least else 0.0
            for size, seconds in self._least:
                hopes.append((size, max(least, seconds * max(_LEAST_LEFT, _FADES ** self._age(size)))))
                least = seconds
            self._hopes = tuple(hopes)
        return _interpolated(self._hopes, fed)

    def _age(self, size: int) -> int:
        """Forwards for which a time has been fading; of a size that was never seen here, it lasts from the first on."""
        return max(0, self._forwards - self._last.get(size, 0) - _LASTS)


def _interpolated(known: Sequence[tuple[int, float]], fed: int) -> float:
    if not known:
        return 0.0
    at = bisect_left(known, (fed, 0.0))
    if at == len(known):
        return known[-1][1]
    if known[at][0] == fed or at == 0:
        return known[at][1]
    (n0, t0), (n1, t1) = known[at - 1], known[at]
    return t0 + (t1 - t0) * (fed - n0) / (n1 - n0)


@dataclass(frozen=True)
class Profile:
    """What is known of a pair on its devices, between two texts: what an engine may begin with.

    Attributes:
        t_draft: seconds of a draft forward; 0: not known.
        acceptance: of judged draft tokens.
        t_target, t_elsewhere: of the target on its own cores, and with the draft's too: (fed tokens, seconds).
        gain, comparisons, since_tried, cost, rates, overhead: see `Choice`.
    """

    t_draft: float = 0.0
    acceptance: float = 0.8
    t_target: tuple[tuple[int, float], ...] = ()
    t_elsewhere: tuple[tuple[int, float], ...] = ()
    gain: float = 0.0
    comparisons: float = 0.0
    since_tried: int = 0
    cost: float = 24.0
    rates: tuple[tuple[bool, float], ...] = ()
    overhead: float | None = None


@dataclass
class Speeds:
    """Running estimates of both models' forward times (seconds) and of the acceptance rate."""

    t_draft: float = 0.0
    acceptance: float = 0.8
    target: ForwardTimes = field(default_factory=ForwardTimes)
    elsewhere: ForwardTimes | None = None  # of the target on other cores: see `spread`
    choice: Choice = field(default_factory=Choice)
    _is_disturbed: bool = False  # the next forward is: who had these cores may not have left them yet

    @staticmethod
    def of(profile: Profile) -> Speeds:
        choice = Choice(
            False,
            dict(profile.rates),
            profile.gain,
            profile.comparisons,
            profile.since_tried,
            profile.cost,
            profile.overhead,
        )
        here = ForwardTimes(dict(profile.t_target))
        elsewhere = ForwardTimes(dict(profile.t_elsewhere), here) if profile.t_elsewhere else None
        return Speeds(profile.t_draft, profile.acceptance, here, elsewhere, choice)

    @property
    def profile(self) -> Profile:
        """To be taken between two texts."""
        choice, known = self.choice, (self.target, self.elsewhere or ForwardTimes())
        here, there = known[::-1] if choice.is_spread else known
        compared = choice.gain, choice.comparisons, choice.since_tried, choice.cost, tuple(choice.rates.items())
        return Profile(self.t_draft, self.acceptance, here.measured, there.measured, *compared, choice.overhead)

    def spread(self, everywhere: bool) -> None:
        """The target computes on other cores from now on: its times are those that were measured there."""
        self._is_disturbed = True
        here, self.elsewhere = self.target, self.elsewhere or ForwardTimes(like=self.target)
        self.target, self.elsewhere = self.elsewhere, here
        self.target.reconsider()

    @property
    def alone(self) -> ForwardTimes:
        """Of the target where the draft rests."""
        return self.target if self.choice.is_spread or self.elsewhere is None else self.elsewhere

    def observe_draft(self, seconds: float) -> None:
        if seconds > 0:
            self.t_draft = _blend(self.t_draft, seconds)

    def observe_target(self, fed: int, seconds: float) -> None:
        if not self._is_disturbed:
            self.target.observe(fed, seconds)
        self._is_disturbed = False

    def observe_judgement(self, accepted: int, judged: int) -> None:
        for outcome in [1.0] * accepted + [0.0] * (judged - accepted):
            self.acceptance += _ACCEPTANCE_WEIGHT * (outcome - self.acceptance)

    @property
    def measured(self) -> tuple[tuple[int, float], ...]:
        """Of the target: (fed tokens, seconds), in order of fed tokens."""
        return self.target.measured

    def t_target(self, fed: int) -> float:
        """Seconds of a target forward fed `fed` tokens."""
        return self.target.seconds(fed)

    @property
    def ratio(self) -> float:
        """t_target(1) / t_draft, the measured speed ratio; 0 where either is unknown."""
        return self.t_target(1) / self.t_draft if self.t_draft else 0.0

    def best_window(self, beside: int = 0) -> int:
        """The c that maximises expected tokens a second. With t_target constant it is Theorem 1's ratio.

        `beside`: tokens that other requests have in the target's forwards.
        """
        if not self.ratio:
            return _DEFAULT_WINDOW
        # Past twice the ratio the draft alone sets the pace. The minimum first: a ratio of sound numbers may be inf.
        t1 = self.t_target(beside + 1)
        most = int(min(MAX_WINDOW, 2 * t1 / self.t_draft + 2))
        acceptance = min(max(self.acceptance, 0.05), 0.98)  # never so sure as to stop looking
        rates = [expected_rate(c, acceptance, self.t_draft, t1, self.t_target(beside + c)) for c in range(1, most + 1)]
        return 1 + rates.index(max(rates))


def whole_blocks(c: int, block: int) -> int:
    """The window nearest to `c` that has blocks of `block` tokens alone; at least one."""
    return max(1, (2 * c + block) // (2 * block)) * block


def _whole(tokens: int, block: int) -> int:
    """So many tokens, and those that make the last block whole; at least one block."""
    return max(1, -(-tokens // block)) * block


def worthwhile(chances: Sequence[float], fed: int, expected: float, t_target: Callable[[int], float]) -> int:
    """How many guesses to feed beside `fed` tokens: what makes most tokens a second.

    Args:
        chances: of each guess that it is right, never rising.
        expected: tokens that the forward yields without any.
        t_target: seconds of a forward by the number of tokens fed.
    """
    best, rate = 0, expected / t_target(fed) if t_target(fed) else 0.0
    for count, chance in enumerate(chances, start=1):
        expected += chance
        seconds = t_target(fed + count)
        if expected > rate * seconds:
            best, rate = count, expected / seconds if seconds else 0.0
    return best


def _blend(old: float, new: float, weight: float = _TIME_WEIGHT) -> float:
    return old + weight * (min(new, _MOST_OFF * old) - old) if old else new


@dataclass(frozen=True)
class Window:
    """For one step: start the target once `needed` tokens are unfed; let the draft draft up to `draft_until`."""

    needed: int
    draft_until: int

    def in_blocks(self, block: int, length: int) -> Window:
        """The same with whole blocks of `block` tokens; the last committed token is fed with them.

        A row that is there for the next position judges nothing by itself, so none is computed before a block has come.
        """
        return Window(1 + _whole(self.needed - 1, block), length + _whole(self.draft_until - length, block))

    @staticmethod
    def after(method: Method, policy: str, c: int, length: int, fresh: bool, pending: int = 0) -> Window:
        """The window once `length` tokens are committed.

        Args:
            c: the window, fixed or measured.
            fresh: nothing drafted survives (prefill, rejection, bonus): a new window begins at `length`.
            pending: tokens that wait for this all the same, if `fresh`: a branch of this outcome.
        """
        if not method.drafts:
            return Window(1, length)
        if not method.post_verify:
            if not method.pre_verify:  # sd: draft a window, then verify it
                return Window(c + 1, length + c)
            return Window(1, length + c) if fresh else Window(c, length - 1 + c)
        if fresh and not method.pre_verify:  # the target idles for the first window, the draft drafts on past it
            return Window(c + 1, length + 2 * c)
        if policy == "stream":
            # Wait for c - 1 tokens, not c. A rejection costs the draft at most the forward that it is in, so it has
            # c - 1 tokens when the target is free. Its next token takes t_draft; starting without it saves that wait.
            return Window(1 if fresh else max(1, c - 1), length + 2 * c)
        # While the target verifies a branch, however long, the draft fills the window behind it.
        return Window(1, length + pending + c) if fresh else Window(c, length - 1 + 2 * c)
