"""Method auto: finds the fastest way of decoding by trying the ways on running requests.

A way is one of the decoding methods `ngram`, `pearl`, `sd` and `ssd`.  If the target has a drafting
head, `head` is a way too.  If the target may compute on several cores, `ar` (the target alone, on
one core) is a way too.  The rate of a way is its number of tokens per second.  The best way is the
one that was found to have the highest rate.  At first this is `ngram`, which without useful guesses
is the same as the target alone.

A text is generated in stretches of at least 24 tokens, each with one way.  Most stretches use the
best way so far; a trial uses another way for one stretch.  A comparison divides the trial's rate by
the rate of the neighbouring stretches, which use the best way.  A way becomes the best way once the
mean of its comparisons shows it to be faster, by at least half the standard error of this mean.  A
rate may also be predicted from measured forward times.  The predicted rate is then compared with
that of the best way, and this counts as the way's first comparison.

A trial costs the time of changing the way, and more if its stretch is slower.  A way is tried only
if this cost is a small share of the text that is left, or of the tokens generated since its last
trial.  So a short text tries only ways that the measured forward times predict to be faster.

On a busy machine one way may drop to a fifth of its rate within a second while another way keeps
its rate.  So a way is left within ten tokens if its rate falls below 0.7 of another way's rate.  A
trial is then left for the best way, and the best way is left for a trial of the faster way.

The rates of `ngram` and `ar` depend little on the text, but the rates of ways with a draft depend
much on the text.  A way with a draft that was best on one text may be slow on the next.  So `ngram`
is tried again as soon as its usual rate is higher than the current rate of the best way.

Ways are tried only under rules whose text does not depend on what was proposed, and on one request
at a time.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

from pearl.spec.methods import METHODS

# In the order of first trials. `ar` is not among them, because ngram without guesses does the same.
WAYS = ("ngram", "pearl", "sd", "ssd")
HEAD = "head"  # a way if the target has a drafting head; tried first
ONE_CORE = "ar"  # a way if the target may compute on several cores; uses one of them; tried last
_STEADY = {WAYS[0], ONE_CORE}  # ways whose rates depend little on the text

# A stretch has at least this many tokens and this many steps: the rate of a shorter one is mostly noise.
_TOKENS = 24
_STEPS = 8
# A trial is left after n tokens if its rate is below min(0.7, n / (n + 4)) of another way's rate.
_CLEARLY = 0.7
_SOON = 4
# The best way counts as slow by the rate of its last steps: at least this many tokens and this many steps.
_RECENT_TOKENS = 8
_RECENT_STEPS = 3
# Standard deviation of the log of one comparison; 0.18 to 0.3 in recorded texts of the embedded
# pair.
_NOISE = 0.25
# Comparisons in a running mean; older ones fade, because texts and the load on the machine change.
_MEMORY = 16
# Trials of a way may cost this share of all tokens; after its n-th comparison, 1 / n of it.
_SHARE = 0.01
_SHARE_OF_TEXT = 0.04  # a trial may cost this share of the text that is left,
_SHARE_OF_WAIT = 0.004  # or this share of the tokens since the way's last trial
_SWITCH = 8  # cost of changing the way, in tokens, on top of the slower stretch
_LEAST_PATIENCE = 96  # tokens between trials of any two ways
_MOST_PATIENCE = 4096  # tokens between trials of one way
# If the draft must prefill the text first, a trial needs a text with this many more tokens left.
_READING = 256
# All ways become due for a trial after three stretches of the best way below 0.6 of its usual rate.
_SLOWED = 3
_SLOW = 0.6
# A way's usual rate is the median of its last 11 stretches: a few slow seconds of the machine do not change it.
_LASTING = 11
_GAINS = 0.95  # a way is due soon if the best way's rate is below this share of its expected rate
_SILENT = 32  # timing waits for the first draft token, but begins after this many tokens at most


@dataclass(frozen=True)
class Estimate:
    """How fast a way is, from comparisons with other ways.

    Attributes:
        score: logarithm of the way's rate relative to other ways. Only differences of scores have a
            meaning: exp(score of a - score of b) is how many times as fast as b the way a is.
        count: number of comparisons that `score` is the mean of.
    """

    score: float = 0.0
    count: int = 0


class Comparison(NamedTuple):
    """A comparison of two ways on neighbouring stretches of one text.

    `gain` is log(rate of `method` / rate of `reference`).
    """

    method: str
    reference: str
    gain: float


class _Step(NamedTuple):
    seconds: float
    tokens: int


class Auto:
    """The estimates of all ways, and the timing of the current stretch.

    Attributes:
        best: the best way so far, used for all stretches that are not trials.
        way: the way in use.
        ways: all ways, in the order in which they are first tried.
        untimed: the way for texts that depend on what is proposed (as under rule ratio). Such a
            text uses this way from start to end.
        estimates: the estimate of each way.
        rates: usual tokens per second of each way: the median of its last stretches.
    """

    def __init__(self, best: str = WAYS[0], estimates: Iterable[tuple[str, Estimate]] = ()) -> None:
        self.best = self.way = best
        self.ways: tuple[str, ...] = WAYS
        self.untimed = "pearl"
        self.estimates = dict.fromkeys(WAYS, Estimate()) | dict(estimates)
        self.rates: dict[str, float] = {}
        # Tokens per second of each way's last stretches.
        self._stretches: dict[str, deque[float]] = {}
        self._since_trial = _LEAST_PATIENCE  # tokens since the last trial of any way
        self._waited = dict.fromkeys(WAYS, 0)  # tokens since the last trial of each way
        self._has_draft = True
        # Whether a way with a draft was used in this text, so that the draft has read most of it.
        self._has_drafted = False
        # The best way's usual rate, for comparisons in a text where that way has no stretch yet.
        self._usual = 0.0
        self._slow = 0  # number of successive stretches of the best way much slower than `_usual`
        self._reference: float | None = None  # rate of the best way's last stretch in this text
        # (way, rate) of a trial that is not compared yet.
        self._trial: tuple[str, float] | None = None
        self._comparisons: list[Comparison] = []  # of this text
        # Rate of each way's last stretch in this text. `ngram` and `ar` begin with estimates.
        self._made: dict[str, float] = {}
        self._predicted: Mapping[str, float] = {}
        # Whether the way in use is on trial because the best way has become slow.
        self._is_fleeing = False
        # The stretch being timed: its start, the end of its last step, its tokens and steps.
        # `_skipped` counts the tokens after a change of the way that are not timed.
        self._began: float | None = None
        self._ended = 0.0
        self._tokens = self._steps = self._skipped = 0
        self._recent: deque[_Step] = deque()  # its last steps

    def add_head(self) -> None:
        """Add the way `head`, because the target has a drafting head."""
        self.ways = (WAYS[0], HEAD, *WAYS[1:])
        self.estimates.setdefault(HEAD, Estimate())
        self._waited.setdefault(HEAD, 0)

    def add_one_core(self) -> None:
        """Add the way `ar`, which uses one core, because the target may compute on several."""
        self.ways = (*self.ways, ONE_CORE)
        self.estimates.setdefault(ONE_CORE, Estimate())
        self._waited.setdefault(ONE_CORE, 0)

    def has_choice(self, has_draft: bool) -> bool:
        """Return whether there is more than one way to choose from.

        `has_draft`: whether there is a draft.
        """
        has_further_ways = len(self.ways) > len(WAYS)
        return has_draft or (has_further_ways and not METHODS[self.best].drafts)

    @property
    def speedup(self) -> float | None:
        """Speed of the best way with a draft / speed of `ngram`; None until a way with a draft has been compared."""
        scores = []
        for method in WAYS:
            if METHODS[method].drafts and self.estimates[method].count:
                scores.append(self.estimates[method].score)
        if not scores:
            return None
        return exp(max(scores) - self.estimates[WAYS[0]].score)

    @property
    def gains(self) -> dict[str, float]:
        """Speed of the best way / speed of each other way, by this text's comparisons of the two.

        Ways that were not compared with the best way are left out.
        """
        logs: dict[str, list[float]] = {}
        for comparison in self._comparisons:
            if comparison.method == self.best:
                logs.setdefault(comparison.reference, []).append(comparison.gain)
            elif comparison.reference == self.best:
                logs.setdefault(comparison.method, []).append(-comparison.gain)
        return {method: exp(fmean(gains)) for method, gains in logs.items()}

    def begin(
        self,
        left: int,
        alone: float = 0.0,
        one_core: float = 0.0,
        has_draft: bool = True,
        predicted: Mapping[str, float] | None = None,
    ) -> str:
        """Begin a text; return the way to begin it with.

        Args:
            left: the most new tokens that the text may have.
            alone: estimated tokens per second of the target alone on all cores; 0 if unknown. It
                stands for the rate of `ngram` until a stretch of `ngram` has been timed.
            one_core: estimated tokens per second of the target alone on one core; 0 if unknown.
            has_draft: whether there is a draft.
            predicted: maps ways with a draft to tokens per second, which are predicted from
                measured forward times. They are used for ways that were never compared.
        """
        self._reference = self._trial = None
        self._comparisons.clear()
        self._has_draft = has_draft
        self._made = {WAYS[0]: self.rates.get(WAYS[0], alone)}
        if ONE_CORE in self.ways:
            self._made[ONE_CORE] = one_core
        self._predicted = dict(predicted or {}) | self._made
        self._is_fleeing = False
        self._usual = self._usual or alone
        self._has_drafted = False
        self.way = self._due(left, left) or self.best
        self._start()
        return self.way

    def step(self, at: float, tokens: int, left: int, has_drafted: bool) -> str | None:
        """Add a target forward that has ended to the timing of the current stretch.

        Return the way to change to, or None to keep the way in use.

        Args:
            at: when the forward ended, seconds of a monotonic clock.
            tokens: number of tokens committed since the previous forward.
            left: number of tokens left until the text's limit.
            has_drafted: whether the draft has sent tokens since this way began.
        """
        self._since_trial += tokens
        for method in self.ways:
            self._waited[method] += tokens
        if self._began is None:
            self._skipped += tokens  # the draft's prefill and the change of ways are not timed
            if has_drafted or not METHODS[self.way].drafts or self._skipped >= _SILENT:
                self._began = at
            return None
        self._recent.append(_Step(at - self._ended, tokens))
        self._tokens += tokens
        self._steps += 1
        self._ended = at
        refuge = self._refuge()
        if refuge is None and not self._is_whole():
            return None
        self._end_stretch()
        previous_way = self.way
        left_for_reading = left if self._has_drafted else left - _READING
        self.way = self._due(left, left_for_reading) or self.best
        if refuge is not None and previous_way == self.best:
            self._flee(refuge)
        if self.way == previous_way:
            self._restart(at)
            return None
        self._start()
        return self.way

    def end(self) -> None:
        """End the text.

        The last stretch counts if it has at least half the tokens and half the steps of a whole
        stretch. The last trial may not have been compared, because no stretch of the best way has
        followed it. The trial is then compared with the best way's last stretch in this text. If
        the text has no such stretch, the trial is compared with the usual rate of the best way.
        """
        if self._began is not None and 2 * self._tokens >= _TOKENS and 2 * self._steps >= _STEPS:
            self._end_stretch()
        if self._trial is not None and self._usual:
            self._compare(*self._trial, self._reference or self._usual)
        self._trial = None
        self._restart()

    def _start(self) -> None:
        """Begin a stretch with `self.way`; it is a trial unless `self.way` is the best way."""
        if self.way != self.best:
            self._since_trial = self._waited[self.way] = 0
        self._has_drafted |= METHODS[self.way].drafts
        self._restart()

    def _restart(self, at: float | None = None) -> None:
        self._began = at
        self._ended = at or 0.0
        self._tokens = self._steps = self._skipped = 0
        self._recent.clear()

    @property
    def _rate(self) -> float:
        seconds = self._ended - (self._began or 0.0)
        return self._tokens / seconds if seconds > 0 else 0.0

    def _is_whole(self) -> bool:
        return self._rate > 0 and self._steps >= _STEPS and self._tokens >= _TOKENS

    def _refuge(self) -> str | None:
        """Return a way to change to, if the way in use is clearly slower; None otherwise.

        During a trial, this is the best way. If the best way is in use, this is the way that had
        the highest rate in this text.
        """
        rates = dict(self._made)  # without the way in use
        rates.pop(self.way, None)
        if self.way != self.best:
            share = min(_CLEARLY, self._tokens / (self._tokens + _SOON))
            reference = max(self._reference or self._usual, *rates.values(), 0.0)
            return self.best if 0 < self._rate < share * reference else None
        rate = self._recent_rate()
        if not rates or rate is None:
            return None
        refuge = max(rates, key=rates.__getitem__)
        return refuge if rate < _CLEARLY * rates[refuge] else None

    def _recent_rate(self) -> float | None:
        """Return the tokens per second of the last steps; None if the steps or tokens are too few.

        The slowest step is left out, because a disturbance of the machine may have slowed it.
        """
        steps = self._recent
        tokens = sum(step.tokens for step in steps)
        while len(steps) > _RECENT_STEPS and tokens - steps[0].tokens >= _RECENT_TOKENS:
            tokens -= steps.popleft().tokens
        if tokens < _RECENT_TOKENS or len(steps) < _RECENT_STEPS:
            return None
        slowest = max(steps)
        seconds = sum(step.seconds for step in steps) - slowest.seconds
        return (tokens - slowest.tokens) / seconds if seconds > 0 else None

    def _flee(self, refuge: str) -> None:
        """Begin a trial of `refuge`, because the best way has become slow.

        The load on the machine has probably changed, so earlier comparisons lose their weight.
        """
        self.way = refuge
        self._is_fleeing = True
        self._forget()
        self.estimates[refuge] = replace(self.estimates[refuge], count=0)

    def _forget(self) -> None:
        for method, estimate in self.estimates.items():
            self.estimates[method] = replace(estimate, count=min(estimate.count, 1))

    def _end_stretch(self) -> None:
        rate = self._rate
        if not rate:
            return
        stretches = self._stretches.setdefault(self.way, deque(maxlen=_LASTING))
        stretches.append(rate)
        self.rates[self.way] = median(stretches)
        self._made[self.way] = rate
        if self.way != self.best:
            if self._is_fleeing and self._reference:
                self._compare(self.way, rate, self._reference)
            else:
                self._trial = self.way, rate
            self._is_fleeing = False
            return
        neighbours = rate if self._reference is None else (self._reference + rate) / 2
        if self._reference and rate < _SLOW * self._usual:
            self._slow += 1
        else:
            self._slow = 0
        if self._slow >= _SLOWED:  # the load on the machine has probably changed
            self._slow = 0
            self._waited = dict.fromkeys(self.ways, _MOST_PATIENCE)
            self._forget()
        if not self._slow:
            self._usual = (self._usual + rate) / 2 if self._usual else rate
        self._reference = rate
        if self._trial is not None:
            method, trial_rate = self._trial
            self._trial = None
            self._compare(method, trial_rate, neighbours)

    def _compare(self, method: str, rate: float, reference: float) -> None:
        """Add a comparison of `method` with the best way, and update `best`.

        Args:
            rate: the tokens per second that `method` reached.
            reference: the tokens per second that the best way reached.
        """
        best = self.estimates[self.best]
        estimate = self.estimates[method]
        predicted = self._predicted.get(method)
        if predicted and not estimate.count and method not in _STEADY:
            estimate = Estimate(best.score + log(predicted / reference), 1)
        count = min(estimate.count + 1, _MEMORY)
        gain = log(rate / reference)
        self._comparisons.append(Comparison(method, self.best, gain))
        gain = max(-1.5, min(1.5, gain))
        score = estimate.score + (best.score + gain - estimate.score) / count
        self.estimates[method] = Estimate(score, count)
        if score - best.score > _NOISE / sqrt(count) / 2:
            self.estimates[self.best] = Estimate(best.score, max(best.count, 1))
            self.best = method
            self._reference = None
            self._usual = rate

    def _due(self, left: int, left_for_reading: int) -> str | None:
        """Return the way whose trial is due now; None if no trial is due.

        Args:
            left: number of tokens left until the text's limit.
            left_for_reading: number of tokens left for ways with a draft: `left`, less the cost of
                the draft's prefill if the draft has not prefilled the text yet.
        """
        if self._since_trial < _LEAST_PATIENCE or left < 2 * _TOKENS:
            return None
        for method in self.ways:
            may_draft = self._has_draft and left_for_reading >= 2 * _TOKENS
            has_room = may_draft or not METHODS[method].drafts
            if method != self.best and has_room and self._is_affordable(method, left):
                return method
        return None

    def _is_affordable(self, method: str, left: int) -> bool:
        """Return whether a trial of `method` is neither too early nor too expensive.

        A trial is too early within `_patience` tokens of the way's last trial. It may cost a small
        share of the tokens left in the text, or of the tokens generated since the way's last trial;
        the larger of the two shares is the limit.
        """
        waited = self._waited[method]
        budget = max(_SHARE_OF_TEXT * left, _SHARE_OF_WAIT * waited)
        return waited >= self._patience(method) and self._cost(self._slowdown(method)) <= budget

    def _patience(self, method: str) -> float:
        """Return how many tokens must lie between two trials of a way. Slower ways need more."""
        count = self.estimates[method].count
        if not count:
            return 0
        if self._slowdown(method) < _GAINS:
            return _LEAST_PATIENCE
        cost = self._cost(max(1.0, self._slowdown(method)))
        return min(max(cost * count / _SHARE, _LEAST_PATIENCE), _MOST_PATIENCE)

    def _slowdown(self, method: str) -> float:
        """Return the best way's rate / the expected rate of `method`.

        Return 0 if nothing is known about `method`: a trial is then expected to cost little.
        """
        estimate = self.estimates[method]
        usual = self.rates.get(method)
        current = self._reference or self.rates.get(self.best)
        if usual and current and method in _STEADY:
            return current / usual
        if estimate.count:
            return exp(self.estimates[self.best].score - estimate.score)
        predicted = self._predicted.get(method)
        if not predicted:
            return 0.0
        reference = self._reference or self.rates.get(self.best, inf)  # inf: not measured yet
        return reference / predicted

    @staticmethod
    def _cost(slowdown: float) -> float:
        """Return how many tokens a trial is expected to cost. A negative number is a gain."""
        slowdown = min(slowdown, 1 / _CLEARLY)  # a slower way is left early
        return _TOKENS * (slowdown - 1) + _SWITCH
