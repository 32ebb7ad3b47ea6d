"""Method auto: find the way of decoding that makes most tokens per second, by timing the ways in turns.

A text is written in stretches of at least 24 tokens, each with one way: `ngram`, `pearl`, `sd` or `ssd`.  The best way
so far writes most of them; now and then another way gets one, and its rate over that of the neighbouring stretches of
the same text is one comparison.  A way becomes the best once the mean of its comparisons is half a standard error above
the best's.  A way that lost waits until another trial costs at most a small share of the tokens written meanwhile, and
a trial that is clearly slower ends early.  `ngram` comes first: without useful guesses it is the target alone.

Only for texts that do not depend on who proposed what (rules that commit the target's own draw), one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from pearl.spec.methods import METHODS

WAYS = ("ngram", "pearl", "sd", "ssd")  # in the order in which they are tried; `ar` is ngram where no guess pays

_TOKENS, _STEPS = 24, 8  # a stretch has at least so many of each: the rate of a shorter one is mostly noise
_CLEARLY, _SOON = 0.6, 5  # a trial of n steps ends at less than this share, and n / (n + 5), of the best way's rate
_NOISE = 0.25  # standard deviation of one comparison (logarithm); 0.18 to 0.3 in recorded texts of the embedded pair
_MEMORY = 16  # comparisons that a mean is of; older ones fade, as texts and machines change
_SHARE = (
    0.01  # of all tokens that trials of one way may cost after its first comparison; after n comparisons 1 / n of it
)
_SWITCH = 8  # tokens that a change of ways costs beside the slower stretch
_PATIENCE = (96, 4096)  # tokens between two trials: at least (of any ways), at most (of one way)
_READING = 256  # tokens that a text must have left for a draft that has to read all of it first
_SLOWED = 3  # stretches of the best way in a row at less than `_CLEARLY` of its usual rate: try the others again
_SILENT = 32  # a draft that has sent nothing after so many tokens is timed as it is


@dataclass(frozen=True)
class Estimate:
    """How fast a way is: logarithm of its rate relative to the other ways, the mean of `count` comparisons."""

    score: float = 0.0
    count: int = 0


class Auto:
    """What is known of each way, and the stretch that is being timed.

    Attributes:
        best: the way that writes what is no trial.
        way: the way in use.
        rates: tokens per second of each way's stretches, running means.
    """

    def __init__(self, best: str = WAYS[0], estimates: Iterable[tuple[str, Estimate]] = ()) -> None:
        self.best = self.way = best
        self.estimates = dict.fromkeys(WAYS, Estimate()) | dict(estimates)
        self.rates: dict[str, float] = {}
        self._since_trial = _PATIENCE[0]  # tokens since any way was tried
        self._waited = dict.fromkeys(WAYS, 0)  # tokens since each way was tried
        self._has_drafted = False  # in this text: the draft has most of it in its cache
        self._usual = 0.0  # rate of the best way, for what is compared with it while this text has no stretch of it
        self._slow = 0  # stretches of the best way in a row that were much slower than that
        self._reference: float | None = None  # rate of the best way's last stretch in this text
        self._trial: tuple[str, float] | None = None  # a way and its rate, not compared yet
        # The stretch that is being timed: when it began and when its last step ended, its tokens and steps.
        self._began: float | None = None
        self._ended = 0.0
        self._tokens = self._steps = self._skipped = 0

    @property
    def speedup(self) -> float | None:
        """How many times as fast the best way with a draft is as the target with guesses alone; None: not compared."""
        alone, drafting = self.estimates[WAYS[0]], [self.estimates[way] for way in WAYS[1:]]
        scores = [each.score for each in drafting if each.count]
        return exp(max(scores) - alone.score) if scores else None

    def begin(self, left: int, alone: float = 0.0) -> str:
        """A text of at most `left` tokens begins; return its way.

        `alone`: tokens per second of the target alone, as far as is known, until a stretch has been timed.
        """
        self._reference = self._trial = None
        self._usual = self._usual or alone
        self._has_drafted = False
        self.way = self._due(left, left) or self.best
        self._start()
        return self.way

    def step(self, at: float, tokens: int, left: int, has_drafted: bool) -> str | None:
        """A forward has ended; return the way to change to, None: none.

        Args:
            at: seconds of a monotonic clock.
            tokens: committed since the forward before.
            left: tokens until the text's limit.
            has_drafted: whether the draft has sent tokens since this way began.
        """
        self._since_trial += tokens
        for way in WAYS:
            self._waited[way] += tokens
        if self._began is None:
            self._skipped += tokens  # while the draft reads, and the change itself, are not the way's pace
            if has_drafted or not METHODS[self.way].drafts or self._skipped >= _SILENT:
                self._began = at
            return None
        self._tokens, self._steps, self._ended = self._tokens + tokens, self._steps + 1, at
        if not self._is_whole():
            return None
        self._end_stretch()
        before = self.way
        self.way = self._due(left, left if self._has_drafted else left - _READING) or self.best
        if self.way == before:
            self._restart(at)
            return None
        self._start()
        return self.way

    def end(self) -> None:
        """The text ends. Half a stretch counts, and a trial without a neighbour is compared with the usual rate."""
        if self._began is not None and 2 * self._tokens >= _TOKENS and 2 * self._steps >= _STEPS:
            self._end_stretch()
        if self._trial is not None and self._usual:
            self._compare(*self._trial, self._reference or self._usual)
        self._trial = None
        self._restart()

    def _start(self) -> None:
        """Begin to use `way`."""
        if self.way != self.best:
            self._since_trial = self._waited[self.way] = 0
        self._has_drafted |= METHODS[self.way].drafts
        self._restart()

    def _restart(self, at: float | None = None) -> None:
        self._began, self._ended = at, at or 0.0
        self._tokens = self._steps = self._skipped = 0

    @property
    def _rate(self) -> float:
        seconds = self._ended - (self._began or 0.0)
        return self._tokens / seconds if seconds > 0 else 0.0

    def _is_whole(self) -> bool:
        if not self._rate:
            return False
        if self.way != self.best:
            share = min(_CLEARLY, self._steps / (self._steps + _SOON))
            if self._rate < share * (self._reference or self._usual):
                return True
        return self._steps >= _STEPS and self._tokens >= _TOKENS

    def _end_stretch(self) -> None:
        rate = self._rate
        if not rate:
            return
        self.rates[self.way] = (self.rates.get(self.way, rate) + rate) / 2
        if self.way != self.best:
            self._trial = self.way, rate
            return
        around = [known for known in (self._reference, rate) if known is not None]
        self._slow = self._slow + 1 if rate < _CLEARLY * self._usual and self._reference else 0
        if self._slow >= _SLOWED:  # the machine has changed, it seems
            self._slow, self._waited = 0, dict.fromkeys(WAYS, _PATIENCE[1])
            self.estimates = {way: replace(each, count=min(each.count, 1)) for way, each in self.estimates.items()}
        if not self._slow:
            self._usual = (self._usual + rate) / 2 if self._usual else rate
        self._reference = rate
        if self._trial is not None:
            trial, self._trial = self._trial, None
            self._compare(*trial, sum(around) / len(around))

    def _compare(self, way: str, rate: float, reference: float) -> None:
        """`way` made `rate` tokens per second where the best way made `reference`."""
        best, known = self.estimates[self.best], self.estimates[way]
        count = min(known.count + 1, _MEMORY)
        gain = max(-1.5, min(1.5, log(rate / reference)))
        score = known.score + (best.score + gain - known.score) / count
        self.estimates[way] = Estimate(score, count)
        if score - best.score > _NOISE / sqrt(count) / 2:
            self.estimates[self.best] = Estimate(best.score, max(best.count, 1))
            self.best, self._reference, self._usual = way, None, rate

    def _due(self, left: int, left_for_reading: int) -> str | None:
        """The way that is to be tried now, if any."""
        if self._since_trial < _PATIENCE[0] or left < 2 * _TOKENS:
            return None
        for way in WAYS:
            has_room = left_for_reading >= 2 * _TOKENS or not METHODS[way].drafts
            if way != self.best and has_room and self._waited[way] >= self._patience(way):
                return way
        return None

    def _patience(self, way: str) -> float:
        """Tokens between two trials of a way that lost."""
        known = self.estimates[way]
        if not known.count:
            return 0
        lost = self.estimates[self.best].score - known.score
        cost = _TOKENS * (exp(max(0.0, lost)) - 1) + _SWITCH
        return min(max(cost * known.count / _SHARE, _PATIENCE[0]), _PATIENCE[1])
