"""Measured speeds: forward times of both models, the acceptance rate, and method auto's estimates.

This file computes with numbers that are measured elsewhere.  Times are in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import inf
from typing import Annotated, NamedTuple

from msgspec import Meta

from pearl.protocol.acceptance_estimates import Foresight
from pearl.protocol.method_choice import HEAD, ONE_CORE, WAYS, Auto, Estimate
from pearl.protocol.window import expected_rate, expected_rate_in_turn
from pearl.spec.methods import MAX_WINDOW

_DEFAULT_WINDOW = 4  # until both speeds are known
# Weight of a new forward time in the running estimate: an outlier fades within ten forwards.
# Each forward since the last one of its size adds to the weight, up to a maximum.
_TIME_WEIGHT = 0.1
_AGED_WEIGHT = 1 / 256
_MAX_WEIGHT = 0.75
# A new time counts as at most this multiple of the estimate, because the forward may have prepared
# memory or kernels for later forwards.
_OUTLIER = 2.0
# A size is the number of tokens that a forward is fed. If a size was not fed for 256 forwards, its
# time in `hoped` shrinks by 0.2% with each further forward, down to half. So a size whose time was
# an outlier is tried again. If the retry takes more than 0.9 of the estimate, the 256 are doubled
# for this size, because such retries cost more than they bring in.
_LASTS = 256
_DECAY = 0.998
_AS_SLOW = 0.9
_LEAST_LEFT = 0.5
_ACCEPTANCE_WEIGHT = 0.02  # of one judged token: acceptance varies from token to token by nature


class Cores(Enum):
    """The cores that the target computes on."""

    ONE = "the first of its own"
    OWN = "its own"
    ALL = "its own and the draft's"


class _Table(NamedTuple):
    """Forward times by size, which is the number of tokens fed.

    Attributes:
        sizes: the sizes, ascending.
        times: the measured time of each size, but never more than the time of a larger size.
        hoped: the times for `ForwardTimes.hoped`.
    """

    sizes: list[int]
    times: list[float]
    hoped: list[float]


class ForwardTimes:
    """Running estimates of one model's forward times by size, which is the number of tokens fed.

    Args:
        known: (size, seconds) of each size that was measured before.
        like: times of the same model on other cores. If a size was measured only on the other
            cores, its time there is multiplied by a factor to estimate its time here. The factor is
            (sum of the times here) / (sum of the times there), over the sizes measured here.
    """

    def __init__(
        self, known: Iterable[tuple[int, float]] = (), like: ForwardTimes | None = None
    ) -> None:
        self._known = dict(known)
        self.like = like
        self._seen: dict[int, int] = {}  # size -> number of its last forward
        self._once: set[int] = set()  # sizes that were fed only once
        # Size -> forwards after which it is retried, if that is not `_LASTS`.
        self._waits: dict[int, int] = {}
        self._forwards = 0
        self._sorted: _Table | None = None

    @property
    def measured(self) -> tuple[tuple[int, float], ...]:
        """(tokens fed, seconds) of each measured size, the smallest size first."""
        return tuple(sorted(self._known.items()))

    def observe(self, fed: int, seconds: float) -> None:
        """Update the estimates with a forward of `fed` tokens that took `seconds`.

        Sizes of 64 tokens and more are rounded, so that there are few hundred sizes however many
        requests share a forward. The first forward of a size may include preparation of kernels or
        memory. So its time is capped (see `_bound`), and is discarded if the second forward of that
        size takes less.
        """
        if seconds <= 0:
            return
        fed = _rounded(fed)
        expected = self._known.get(fed) or min(self._bound(fed), seconds)
        if fed in self._once:
            expected = min(expected, seconds)
            self._once.discard(fed)
        elif fed not in self._known:
            self._once.add(fed)
        age = self._forwards - self._seen.get(fed, self._forwards)
        weight = min(_MAX_WEIGHT, _TIME_WEIGHT + _AGED_WEIGHT * age)
        if age > _LASTS:
            is_as_slow = seconds > _AS_SLOW * expected
            self._waits[fed] = 2 * self._wait(fed) if is_as_slow else _LASTS
        self._known[fed] = _blend(expected, seconds, weight)
        self._forwards += 1
        self._seen[fed] = self._forwards
        self._sorted = None

    def settle(self) -> None:
        """Treat all times measured so far as if they had been passed as `known`.

        Then `observe` does not discard them as times of a first forward, and `hoped` does not
        shorten them until other sizes have been fed for a while.
        """
        self._once.clear()
        self._seen.clear()
        self._forwards = 0
        self.refresh()

    def refresh(self) -> None:
        """Drop the table of times, because `like` may have changed. Its next use computes it."""
        self._sorted = None

    def seconds(self, fed: int) -> float:
        """Return the seconds of a forward of `fed` tokens, measured or interpolated; 0 if unknown.

        The time of a size is never more than the time of a larger size, because a time that was
        measured seldom may be an outlier. Beyond the largest measured size, each further token adds
        the mean time per token between the smallest and the largest measured size.
        """
        table = self._sorted or self._table()
        return _interpolate(table.sizes, table.times, fed)

    @property
    def hoped(self) -> Callable[[int], float]:
        """A function like `seconds`, but with shorter times for sizes that were not fed lately.

        So a size that seems too slow is tried again from time to time.
        """
        table = self._sorted or self._table()
        return partial(_interpolate, table.sizes, table.hoped)

    def _wait(self, size: int) -> int:
        return self._waits.get(size, _LASTS)

    def _bound(self, fed: int) -> float:
        """Return the cap, in seconds, on the time of the first forward of a size.

        The cap is the interpolated time or, if that is longer, `fed` times the time per token of
        the largest measured size.
        """
        table = self._table()
        if not table.sizes:
            return inf
        seconds = _interpolate(table.sizes, table.times, fed)
        return max(seconds, table.times[-1] * fed / table.sizes[-1])

    def _table(self) -> _Table:
        if self._sorted is None:
            measured = self._expected()
            sizes = sorted(measured)
            times = [measured[size] for size in sizes]
            for index in reversed(range(len(times) - 1)):
                times[index] = min(times[index], times[index + 1])
            hoped = []
            smaller = times[:1] + times  # never less than a smaller forward takes
            for size, seconds, least in zip(sizes, times, smaller, strict=False):
                age = max(0, self._forwards - self._seen.get(size, 0) - self._wait(size))
                share = max(_LEAST_LEFT, _DECAY**age)
                hoped.append(max(seconds * share, least))
            self._sorted = _Table(sizes, times, hoped)
        return self._sorted

    def _expected(self) -> dict[int, float]:
        """Return the times by size, including scaled times of sizes that only `like` has."""
        if self.like is None or not self.like._known:
            return self._known
        here = sum(self._known.values())
        there = sum(map(self.like.seconds, self._known))
        scale = here / there if here and there else 1.0
        scaled = {size: self.like.seconds(size) * scale for size in self.like._known}
        return scaled | self._known


def _rounded(fed: int) -> int:
    """Round a size of 64 or more up to one of the 32 sizes up to the next power of two."""
    step = 1 << max(0, fed.bit_length() - 6)
    return -(-fed // step) * step


def _interpolate(sizes: Sequence[int], times: Sequence[float], fed: int) -> float:
    if not sizes:
        return 0.0
    index = bisect_left(sizes, fed)
    if index == len(sizes):
        slope = 0.0
        if len(sizes) > 1:
            slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        return times[-1] + slope * (fed - sizes[-1])
    if index == 0 or sizes[index] == fed:
        return times[index]
    share = (fed - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
    return times[index - 1] + (times[index] - times[index - 1]) * share


def _blend(old: float, new: float, weight: float = _TIME_WEIGHT) -> float:
    if not old:
        return new
    return old + weight * (min(new, _OUTLIER * old) - old)


Seconds = Annotated[float, Meta(ge=0.0, lt=1e4)]
Times = tuple[tuple[Annotated[int, Meta(ge=1)], Seconds], ...]


@dataclass(frozen=True)
class Profile:
    """The measured speeds of a pair of models, with which a later engine of the pair can start.

    The speeds are taken while no text is being generated.

    Attributes:
        t_draft: seconds of a draft forward; 0 if unknown.
        acceptance: acceptance rate of judged draft tokens.
        t_target: (tokens fed, seconds) of target forwards on the target's own cores.
        t_elsewhere: (tokens fed, seconds) of target forwards on the target's and the draft's cores.
        best: the fastest way (decoding method) that method auto has found.
        ways: (way, score, number of comparisons) of each way; see `method_choice.Estimate`.
    """

    t_draft: Seconds = 0.0
    acceptance: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.8
    t_target: Times = ()
    t_elsewhere: Times = ()
    best: str = WAYS[0]
    ways: tuple[
        tuple[str, Annotated[float, Meta(gt=-10, lt=10)], Annotated[int, Meta(ge=0, le=1000)]], ...
    ] = ()

    def __post_init__(self) -> None:
        if not {self.best, *(way for way, _, _ in self.ways)} <= {*WAYS, HEAD, ONE_CORE}:
            raise ValueError(f"a way is none of {', '.join((*WAYS, HEAD, ONE_CORE))}")


@dataclass
class Speeds:
    """Running estimates of both models' forward times and of the acceptance rate.

    Attributes:
        t_draft: seconds per draft token; 0 if unknown.
        acceptance: acceptance rate of judged draft tokens.
        target: the target's forward times on the cores that it computes on now.
        elsewhere: the target's forward times on other sets of cores.
        auto: method auto's estimates.
        foresight: acceptance rates by what the draft's distribution says of a token.
        cores: the cores that the target computes on now. The target has only its own cores while a
            text uses the draft.
    """

    t_draft: float = 0.0
    acceptance: float = 0.8
    target: ForwardTimes = field(default_factory=ForwardTimes)
    elsewhere: dict[Cores, ForwardTimes] = field(default_factory=dict)
    auto: Auto = field(default_factory=Auto)
    foresight: Foresight = field(default_factory=Foresight)
    cores: Cores = Cores.OWN
    # Whether the next forward is not counted, because the draft may not have left its cores yet.
    _is_disturbed: bool = False

    @staticmethod
    def of(profile: Profile) -> Speeds:
        estimates = [(way, Estimate(score, count)) for way, score, count in profile.ways]
        target = ForwardTimes(profile.t_target)
        elsewhere = {}
        if profile.t_elsewhere:
            elsewhere[Cores.ALL] = ForwardTimes(profile.t_elsewhere, target)
        auto = Auto(profile.best, estimates)
        return Speeds(profile.t_draft, profile.acceptance, target, elsewhere, auto)

    @property
    def profile(self) -> Profile:
        """These speeds as a `Profile`, to be read while no text is being generated."""
        ways = []
        for way, estimate in self.auto.estimates.items():
            ways.append((way, estimate.score, estimate.count))
        return Profile(
            self.t_draft,
            self.acceptance,
            self.on(Cores.OWN).measured,
            self.on(Cores.ALL).measured,
            self.auto.best,
            tuple(ways),
        )

    def on(self, cores: Cores) -> ForwardTimes:
        """Return the target's forward times on `cores`.

        If a size was not measured on `cores`, its time is estimated from the time on the target's
        own cores.
        """
        if cores is self.cores:
            return self.target
        if cores not in self.elsewhere:
            self.elsewhere[cores] = ForwardTimes(like=self.on(Cores.OWN))
        self.elsewhere[cores].refresh()
        return self.elsewhere[cores]

    def spread(self, cores: Cores) -> None:
        """Switch to the forward times on `cores`, on which the target computes from now on."""
        times = self.on(cores)
        self.elsewhere[self.cores] = self.target
        self.target = times
        self.cores = cores
        self._is_disturbed = True

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

    def t_target(self, fed: int) -> float:
        """Return the seconds of a target forward of `fed` tokens."""
        return self.target.seconds(fed)

    def rate_alone(self, cores: Cores) -> float:
        """Return the tokens per second of the target alone on these cores; 0 if unknown."""
        seconds = self.on(cores).seconds(1)
        return 1 / seconds if seconds else 0.0

    @property
    def ratio(self) -> float:
        """The measured speed ratio, t_target(1) / t_draft; 0 if either time is unknown."""
        return self.t_target(1) / self.t_draft if self.t_draft else 0.0

    def best_window(self, beside: int = 0) -> int:
        """Return the window c, in tokens, for which the expected tokens per second are highest.

        If target forwards took equally long for any number of tokens, the best window would be the
        speed ratio (PEARL, Theorem 1). Return a default if either model's speed is unknown.

        Args:
            beside: number of tokens of other requests in the target's forwards.
        """
        if not self.ratio:
            return _DEFAULT_WINDOW
        t1 = self.t_target(beside + 1)
        rates = []
        for c in self._windows(t1):
            t_target_c = self.t_target(beside + c)
            rates.append(expected_rate(c, self.bounded_acceptance, self.t_draft, t1, t_target_c))
        return 1 + rates.index(max(rates))

    def predicted_rates(self) -> dict[str, float]:
        """Return the expected tokens per second of each method that uses the draft.

        Empty until both models are timed.  The gain from branches and guesses is left out.  So
        `ssd`, which is `sd` with branches, is expected to be as fast as `sd`.  What the branches of
        `ssd` gain and cost is known only after a trial.
        """
        target = self.on(Cores.OWN)
        t1 = target.seconds(1)
        if not t1 or not self.t_draft:
            return {}
        rates: dict[str, list[float]] = {"pearl": [], "sd": []}
        for c in self._windows(t1):
            drafting = c * self.t_draft
            in_turn = target.seconds(c + 1)
            a = self.bounded_acceptance
            rates["pearl"].append(expected_rate(c, a, self.t_draft, t1, target.seconds(c)))
            rates["sd"].append(expected_rate_in_turn(c, a, drafting, in_turn))
        best = {way: max(by_window) for way, by_window in rates.items()}
        best["ssd"] = best["sd"]
        return best

    def _windows(self, t_target: float) -> range:
        """Return the windows to choose from, up to about twice the speed ratio.

        With longer windows the pace depends only on the time of drafting, so they gain nothing.
        """
        # Limited before rounding: the ratio may be infinite.
        return range(1, 1 + int(min(MAX_WINDOW, 2 * t_target / self.t_draft + 2)))

    @property
    def bounded_acceptance(self) -> float:
        # Never so certain that other windows are no longer tried.
        return min(max(self.acceptance, 0.05), 0.98)
