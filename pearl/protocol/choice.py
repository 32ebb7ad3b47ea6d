"""With the draft or without it: which makes more tokens a second, found out while texts are written.

Texts differ in how much can be guessed of them, by more than both ways differ.  So only what stands side by side in one
text is compared: the stretch of tokens before a change-over and the one after it.  Each change-over is one comparison;
their mean decides.  One comparison says little, for a stretch may be easy and the next one hard: at first nearly every
text has one.  Later the way that loses is tried again so often that this costs as much as may be lost by being wrong.
A draft that rests is tried where a text begins: there it reads the prompt while the target does.
Only for texts that do not depend on who proposed what.

The numbers below lost least of those tried on recorded texts of the embedded pair, at 20 ratios of the ways' speeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erfc, exp, log, pi, sqrt

_STRETCH_TOKENS, _STRETCH_STEPS = 24, 8  # a stretch has at least so many of each: fewer tell nothing
# Of the rate before the change-over: what is slower after so many steps loses, and is tried no longer.
_CLEARLY = {_STRETCH_STEPS: 0.6, _STRETCH_STEPS // 2: 0.4}
_OF_NEW = 0.5  # weight of a new stretch in a rate
_MOST_COMPARISONS = 16  # that the mean is of: earlier ones fade, for texts and machines change
_MOST_FACTOR = 3.0  # by which one comparison may say that a way is faster: a stretch of guesses may be much faster
_SPREAD = 0.35  # standard deviation of one comparison
_SURE, _FEW = 1.5, 8  # standard errors from a tie; comparisons: with fewer of both, nearly every text has one
_PATIENCE_AT_FIRST = 20  # tokens between two trials then: a stretch on either side is longer
_LEAST_SHARE, _MOST_SHARE = 0.005, 0.03  # of all time that trying the way that lost may cost after that
_LEAST_PATIENCE, _MOST_PATIENCE = 192, 8192  # tokens until the next one: least a comparison, most
_ONCE_SLOWED = 96  # tokens until the way that lost is tried again where the way in use has slowed
_OF_BEFORE = 4.0  # comparisons that what was known counts as then
_MARGIN = log(1.03)  # what is less may be chance, by one comparison: no reason to change over at once
_DOUBT, _MOST_TEXTS = 3, 16  # texts: as if so many had been without a drift; of so many it is the mean
_SLOWED, _IN_A_ROW = 0.6, 3  # of the rate that it had, so many stretches: the way in use is looked at again
_DRAFTLESS = 32  # tokens after which a draft that has sent none yet is taken to be as slow as that
_FOR_TRIAL = 2 * _STRETCH_TOKENS  # that a text must have left for a trial: one stretch for it, one to compare again
_TO_READ = 256  # tokens that a text must have left for a draft to be tried amid it: it has to read all before


@dataclass
class Choice:
    """What is known of both ways. With the draft: it drafts, on devices of its own. Without: it rests, and the target
    has its cores too, where both are on CPUs of one host.

    Attributes:
        rests: whether the draft rests now.
        rates: tokens a second, by whether it rests; of stretches of any text.
        gain: logarithm of how many times as fast the target is with the draft as without; mean of the comparisons.
        comparisons: their number, at most 16; a fraction where some were of short stretches.
        since_tried: tokens since the way that loses was tried.
        cost: what trying it cost the last time: tokens that the better way would have made beside those that came.
        drift: logarithm of how many times as fast a text goes on as it begins, the way being the same: a mean, at first
            taken to be nothing.
        is_spread: whether the target has the draft's cores.
    """

    rests: bool = False
    rates: dict[bool, float] = field(default_factory=dict)
    gain: float = 0.0
    comparisons: float = 0.0
    since_tried: int = 0
    cost: float = float(_STRETCH_TOKENS)
    drift: float = 0.0
    is_spread: bool = False
    _since: float | None = None  # when the stretch began; None: with the next step
    _tokens: int = 0  # of the stretch
    _steps: int = 0
    _last: float = 0.0  # when the last step of the stretch ended
    _longest: float = 0.0  # seconds, of its steps
    _here: float = 0.0  # tokens a second in this text, as things are; 0: not known yet
    _before: float = 0.0  # in this text before the change-over that is to be compared; 0: none is
    _way: tuple[float, int] | None = None  # when this text's way began, and tokens since; None: with the first step
    _left: tuple[float, int] = (0.0, 0)  # seconds and tokens of the way that was left by the last change-over
    _skipped: int = 0  # tokens committed while the draft had sent nothing yet
    _stretches: int = 0  # that have ended in this text as things are, if it began so; else more than one
    _texts: int = 0  # of which the drift is the mean
    _easy: float = 1.0  # how much of that rate is of the text's first stretch
    _drifts: float = 0.0  # how much of the drift is in the comparison to be made; negative where the draft rested first
    _drifted: float = 0.0  # mean of that over the comparisons: the gain is corrected as the drift is known better
    _slow: int = 0  # stretches in a row that were much slower than usual

    @property
    def speedup(self) -> float | None:
        """How many times as fast the target is with the draft as without; None: not compared yet."""
        return exp(self.gain) if self.comparisons else None

    @property
    def is_alone_better(self) -> bool:
        """Whether the target is faster without the draft, as far as is known."""
        return self.comparisons > 0 and self.gain < 0

    def begin(self, left: int) -> None:
        """A text of at most `left` tokens begins. The draft is tried if nothing is known of it, or it is time to."""
        self.rests = self.is_alone_better
        if self.rests and self.since_tried >= self._patience and left >= _FOR_TRIAL:
            self.rests, self.since_tried = False, 0

    def end(self) -> None:
        """A text ends. What it has of an unfinished stretch counts half, if it is half of one."""
        tokens, steps = self._tokens, self._steps
        if self._before and self._since is not None and 2 * tokens >= _STRETCH_TOKENS and 2 * steps >= _STRETCH_STEPS:
            self._compare(tokens / (self._last - self._since), tokens, 0.5)
        self._begin_stretch()
        self._here = self._before = 0.0
        self._way, self._slow, self._stretches, self._easy = None, 0, 0, 1.0

    def stepped(self, at: float, tokens: int, has_drafted: bool = True, left: int = 1 << 62) -> bool:
        """A forward ended. Whether to change over now: `rests` is the other way then.

        Args:
            at: seconds, of any clock that never goes back.
            tokens: that were committed since the last forward ended.
            has_drafted: whether the draft has sent anything since it last began.
            left: tokens until the text's limit.
        """
        self.since_tried += tokens
        began, so_far = self._way or (at, -tokens)
        self._way = began, so_far + tokens
        if not self.rests and not has_drafted and self._skipped < _DRAFTLESS:  # it is still reading the text
            self._skipped += tokens
            self._since = None
            return False
        if self._since is None:  # what the change-over took is not this way's
            self._since, self._last = at, at
            return False
        self._longest = max(self._longest, at - self._last)
        self._tokens, self._steps, self._last = self._tokens + tokens, self._steps + 1, at
        is_whole = self._steps >= _STRETCH_STEPS and self._tokens >= _STRETCH_TOKENS
        if at <= self._since or not (is_whole or self._clearly_loses(at)):
            return False
        rate = self._tokens / (at - self._since)
        tokens, weight = self._tokens, min(1.0, self._tokens / _STRETCH_TOKENS)
        self._begin_stretch(at)
        has_slowed = self._has_slowed(rate)
        if self._before:
            self._compare(rate, tokens, weight)
        elif self._stretches == 1:
            more = (log(rate / self._here) - self.drift) / (self._texts + _DOUBT)
            self.drift += more
            if self._texts < _FEW:  # later ones are no longer texts as those that were compared
                self.gain += more * self._drifted
            self._texts = min(self._texts + 1, _MOST_TEXTS)
        self._easy *= 1 - _OF_NEW if self._here else 1.0
        self._here, self._stretches = _blend(self._here, rate), self._stretches + 1
        if not self._is_other_wanted(has_slowed, left):
            return False
        self._change_over(at)
        return True

    def _clearly_loses(self, at: float) -> bool:
        """Whether the way that is tried is far slower than the one before, even without its longest step: a hiccup."""
        assert self._since is not None
        share = max((share for steps, share in _CLEARLY.items() if self._steps >= steps), default=0.0)
        return self._tokens < share * self._before * (at - self._since - self._longest)

    def _change_over(self, at: float) -> None:
        assert self._way is not None
        began, tokens = self._way
        if not self._is_other_better:
            self.since_tried = 0
        self.rests = not self.rests
        self._before, self._here, self._slow = self._here, 0.0, 0
        self._before *= exp(self._easy * self.drift)
        self._drifts = self._easy if self.rests else -self._easy
        self._stretches, self._easy = 2, 0.0
        self._way, self._left = (at, 0), (at - began, tokens)
        self._begin_stretch()

    def _has_slowed(self, rate: float) -> bool:
        """Adds `rate` to what is usual, and compares. A text's first stretch may be slow for other reasons."""
        usual = self.rates.get(self.rests, 0.0)
        is_slow = rate < _SLOWED * usual
        self._slow = self._slow + 1 if is_slow and self._here > 0 else 0
        if not is_slow or self._slow >= _IN_A_ROW:
            self.rates[self.rests] = _blend(usual, rate)
        return self._slow >= _IN_A_ROW

    def _begin_stretch(self, at: float | None = None) -> None:
        self._since, self._tokens, self._steps, self._skipped, self._longest = at, 0, 0, 0, 0.0
        self._last = at or 0.0

    def _compare(self, rate: float, tokens: int, weight: float) -> None:
        """Adds the comparison of `rate`, of a stretch of `tokens` after the last change-over, with the rate before."""
        gain = log(rate / self._before) * (-1 if self.rests else 1)
        gain = min(max(gain, -log(_MOST_FACTOR)), log(_MOST_FACTOR))
        self.comparisons = min(self.comparisons + weight, _MOST_COMPARISONS)
        share = weight / max(weight, self.comparisons)
        self.gain += (gain - self.gain) * share
        self._drifted += (self._drifts - self._drifted) * share
        if self._is_other_better:  # this stretch is what it cost to try the way that loses
            self.cost = max(0.0, tokens * (self._before / rate - 1))
        else:  # there and back: a draft that begins amid a text takes a while until it is of use
            assert self._way is not None
            (seconds, made), (began, since) = self._left, self._way
            self.cost = max(0.0, (seconds + self._last - began) * rate - made - since)
        if self.comparisons <= 2:  # there and back: the first time much is done that is not done again
            self.cost = min(self.cost, _STRETCH_TOKENS)
        self._before = 0.0

    def _is_other_wanted(self, has_slowed: bool, left: int) -> bool:
        """For it is better, or is to be tried again; or this one was only tried."""
        if self._is_other_better or not self.comparisons:
            return left >= _STRETCH_TOKENS
        if has_slowed:  # things have changed, it seems: what was compared before counts less
            self.comparisons = min(self.comparisons, _OF_BEFORE)
        is_due = self.since_tried >= (_ONCE_SLOWED if has_slowed else self._patience)
        # Behind a text's first stretch one more will do; what a longer one was is known less well.
        least = _TO_READ if self.rests else _STRETCH_TOKENS if self._stretches == 1 else _FOR_TRIAL
        return is_due and left >= least

    @property
    def _is_other_better(self) -> bool:
        is_known = self.comparisons > 0 and abs(self.gain) > _MARGIN / max(1.0, self.comparisons) ** 0.5
        return is_known and self.rests != (self.gain < 0)

    @property
    def _patience(self) -> int:
        """Tokens between two trials of the way that loses."""
        error = _SPREAD / sqrt(self.comparisons)
        far = abs(self.gain) / error
        is_drift_known = self._texts > self.comparisons - 2  # texts without a change-over tell it
        if self.comparisons < _FEW and far < _SURE and is_drift_known:
            return _PATIENCE_AT_FIRST
        # What is lost in the mean, as a share of the time, for the other way may be the better: with a normal error.
        lost = error * (exp(-(far**2) / 2) / sqrt(2 * pi) - far * erfc(far / sqrt(2)) / 2)
        share = min(max(lost, _LEAST_SHARE), _MOST_SHARE)
        return int(min(max(self.cost / share, _LEAST_PATIENCE * self.comparisons), _MOST_PATIENCE))


def _blend(old: float, new: float) -> float:
    return old + _OF_NEW * (new - old) if old else new
