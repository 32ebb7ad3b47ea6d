"""With the draft or without it: which makes more tokens a second, found out while texts are written.

Texts differ in how much can be guessed of them, by more than both ways differ, and parts of one text do.  So both ways
are compared on the very same tokens.  Where the draft helps to write a stretch of a text, the stretch tells afterwards
which forwards the target alone would have taken (`drafting.hindsight`), and how long these take has been measured.
What is left to chance is how texts differ in what a draft is good for: the mean of the comparisons decides, together
with those of the text itself.
Where the draft is the better way, each stretch is such a comparison.  Where it is not, it is tried again so often that
this costs as much as may be lost by being wrong; a draft that rests is tried where a text begins: there it reads the
prompt while the target does.  Now and then a stretch is written without it, for the target's times alone.
Only for texts that do not depend on who proposed what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erfc, exp, log, pi, sqrt

_STRETCH_TOKENS, _STRETCH_STEPS = 24, 8  # a stretch has at least so many of each: fewer tell nothing
# Of the rate without it: a draft that is tried and that is slower after so many steps is tried no longer.
_CLEARLY = {_STRETCH_STEPS: 0.6, _STRETCH_STEPS // 2: 0.4}
_OF_NEW = 0.5  # weight of a new stretch in a rate
_MOST_COMPARISONS = 16  # that the mean is of: earlier ones fade, for texts and machines change
_MOST_FACTOR = 3.0  # by which one comparison may say that a way is faster: a stretch of guesses may be much faster
_SPREAD = 0.25  # standard deviation of a comparison; 0.18 in recorded texts of the embedded pair
_SURE, _FEW = 1.5, 8  # standard errors from a tie; comparisons: with fewer of both, nearly every text has one
_FEWEST = 3  # comparisons that are too few however far they are from it
_LEAST_SHARE, _MOST_SHARE = 0.005, 0.03  # of all time that trying the way that lost may cost after that
_LEAST_PATIENCE, _MOST_PATIENCE = 192, 8192  # tokens until the next one: least a comparison, most
_ONCE_SLOWED = 96  # tokens until the way that lost is tried again where the way in use has slowed
_OF_BEFORE = 4.0  # comparisons that what was known counts as then
_MARGIN = log(1.03)  # what is less may be chance, by one comparison: no reason to change over at once
_SLOWED, _IN_A_ROW = 0.6, 3  # of the rate that it had, so many stretches: the way in use is looked at again
_DRAFTLESS = 32  # tokens after which a draft that has sent none yet is taken to be as slow as that
_FOR_TRIAL = 2 * _STRETCH_TOKENS  # that a text must have left for a trial
_TO_READ = 256  # tokens that a text must have left for a draft to begin amid it: it has to read all before
_MOST_HERE = 8.0  # comparisons of one text that count
_TIMINGS, _RETIMED = 5, 128  # of the target alone, each after twice as many tokens as the one before; the first of them
_FOR_TIMES, _FOR_SURE_TIMES = 0.01, 0.005  # of all time that this may cost; where no such time could change anything
_SURELY = 1.5  # times as fast as without the draft, even if steps there took nothing beside their forwards
_AROUND = 3  # steps that such a stretch costs beside its own: the first is not counted, and the draft has to come back
_TIMED, _SLOWER = (4, 2), 0.75  # steps of the first and of others, where it is slower than that part of the other rate
_OF_TIMES = 0.25  # weight of a new stretch in what the target's steps take beside their forwards


@dataclass
class Choice:
    """What is known of both ways. With the draft: it drafts, on devices of its own. Without: it rests, and the target
    has its cores too, where both are on CPUs of one host.

    Attributes:
        rests: whether the draft rests now.
        rates: tokens a second, by whether it rests; of stretches of any text.
        gain: logarithm of how many times as fast the target is with the draft as without; mean of the comparisons.
        comparisons: their number, at most 16. Of several stretches in a row each counts less: together up to two.
        since_tried: tokens since the way that loses was tried.
        cost: what trying it cost the last time: tokens that the better way would have made beside those that came.
        overhead: seconds that a step without the draft takes beside its forward; None: none has been measured.
        is_spread: whether the target has the draft's cores.
    """

    rests: bool = False
    rates: dict[bool, float] = field(default_factory=dict)
    gain: float = 0.0
    comparisons: float = 0.0
    since_tried: int = 0
    cost: float = float(_STRETCH_TOKENS)
    overhead: float | None = None
    is_spread: bool = False
    _since: float | None = None  # when the stretch began; None: with the next step
    _tokens: int = 0  # of the stretch
    _steps: int = 0
    _last: float = 0.0  # when the last step of the stretch ended
    _longest: float = 0.0  # seconds, of its steps
    _beside: float = 0.0  # seconds that its steps took beside their forwards
    _most_beside: float = 0.0  # one of them
    _alone: tuple[float, int] = (0.0, 0)  # without the draft: seconds that the stretch would have taken, and its tokens
    _bare: float = 0.0  # of these seconds, the forwards'
    _of_forwards: float = 0.0  # share of such seconds that the forwards were, in the last comparison
    _skipped: int = 0  # tokens committed while the draft had sent nothing yet
    _text: tuple[float, int, float, int] = (0.0, 0, 0.0, 0)  # compared in it: seconds, tokens; without: seconds, tokens
    _gains: float = 0.0  # of this text: the sum of the comparisons
    _compared: float = 0.0  # and their number
    _in_a_row: int = 0  # those that were made since the draft began, of up to 8
    _timings: int = 0  # stretches of the target alone, for its times
    _has_drafted: bool = False  # in this text
    _has_begun: bool = False  # a stretch of this text has ended
    _slow: int = 0  # stretches in a row that were much slower than usual

    @property
    def speedup(self) -> float | None:
        """How many times as fast the target is with the draft as without, as is decided by; None: not compared yet.

        Of this text, others and a kept profile, each comparison counted as three times at most.
        """
        return exp(self.gain) if self.comparisons else None

    @property
    def measured(self) -> tuple[float | None, int]:
        """Likewise in the stretches of this text alone, as measured, and of how many tokens that is."""
        took, tokens, seconds, made = self._text
        return (tokens / took * seconds / made if tokens else None), tokens

    @property
    def is_alone_better(self) -> bool:
        """Whether the target is faster without the draft, as far as is known."""
        return self.comparisons > 0 and self.gain < 0

    def begin(self, left: int) -> None:
        """A text of at most `left` tokens begins. The draft is tried if nothing is known of it, or it is time to."""
        self.rests, self._text = self.is_alone_better, (0.0, 0, 0.0, 0)
        if self.rests and left >= _FOR_TRIAL and (self._is_unsure or self.since_tried >= self._patience):
            self.rests, self.since_tried = False, 0
        self._has_drafted = not self.rests

    def end(self) -> None:
        """A text ends. What it has of an unfinished stretch counts, if it is half of one."""
        if self._since is not None and 2 * self._tokens >= _STRETCH_TOKENS and 2 * self._steps >= _STRETCH_STEPS:
            self._compare()
        self._begin_stretch()
        self._gains = self._compared = 0.0
        self._has_begun, self._slow, self._in_a_row = False, 0, 0

    def retraced(self, seconds: float, tokens: int) -> None:
        """Without the draft a forward of `seconds` would have written `tokens` of this text."""
        if self._since is not None and self.overhead is not None:
            before, made = self._alone
            self._alone = before + max(seconds / 2, seconds + self.overhead), made + tokens
            self._bare += seconds

    def stepped(
        self, at: float, tokens: int, seconds: float = 0.0, has_drafted: bool = True, left: int = 1 << 62
    ) -> bool:
        """A forward ended. Whether to change over now: `rests` is the other way then.

        Args:
            at: seconds, of any clock that never goes back.
            tokens: that were committed since the last forward ended.
            seconds: that such a forward takes.
            has_drafted: whether the draft has sent anything since it last began.
            left: tokens until the text's limit.
        """
        self.since_tried += tokens
        if not self.rests and not has_drafted and self._skipped < _DRAFTLESS:  # it is still reading the text
            self._skipped += tokens
            self._since, self._alone, self._bare = None, (0.0, 0), 0.0
            return False
        if self._since is None:  # what the change-over took is not this way's
            self._since = self._last = at
            return False
        beside = at - self._last - seconds
        self._beside, self._most_beside = self._beside + beside, max(self._most_beside, beside)
        self._longest = max(self._longest, at - self._last)
        self._tokens, self._steps, self._last = self._tokens + tokens, self._steps + 1, at
        if at <= self._since or not self._is_whole(at):
            return False
        has_slowed = self._has_slowed(self._tokens / (at - self._since))
        self._compare()
        self._begin_stretch(at)
        self._has_begun = True
        if not self._is_other_wanted(has_slowed, left):
            return False
        if not self._is_other_better:
            self.since_tried = 0
        self.rests, self._slow, self._in_a_row = not self.rests, 0, 0
        self._has_drafted |= not self.rests
        self._begin_stretch()
        return True

    def _is_whole(self, at: float) -> bool:
        """Whether the stretch is. Of a way that is but tried, and that is far slower, less will do."""
        steps, tokens = self._steps, self._tokens
        is_enough = steps >= _STRETCH_STEPS and tokens >= _STRETCH_TOKENS
        if is_enough or self._is_in_better:
            return is_enough
        assert self._since is not None
        seconds = at - self._since
        if self.rests:  # for the target's times alone: steps tell them, and no tokens
            is_far_slower = tokens <= _SLOWER * self.rates.get(False, 0.0) * seconds
            return steps >= (_TIMED[min(self._timings, 1)] if is_far_slower else _STRETCH_STEPS)
        needed, made = self._alone
        share = max((share for least, share in _CLEARLY.items() if steps >= least), default=0.0)
        return needed > 0 and tokens < share * made / needed * (seconds - self._longest)  # that may be a hiccup

    def _has_slowed(self, rate: float) -> bool:
        """Adds `rate` to what is usual, and compares. A text's first stretch may be slow for other reasons."""
        usual = self.rates.get(self.rests, 0.0)
        is_slow = rate < _SLOWED * usual
        self._slow = self._slow + 1 if is_slow and self._has_begun else 0
        if not is_slow or self._slow >= _IN_A_ROW:
            self.rates[self.rests] = usual + _OF_NEW * (rate - usual) if usual else rate
        return self._slow >= _IN_A_ROW

    def _begin_stretch(self, at: float | None = None) -> None:
        self._since, self._last, self._alone, self._bare = at, at or 0.0, (0.0, 0), 0.0
        self._tokens = self._steps = self._skipped = 0
        self._longest = self._beside = self._most_beside = 0.0

    def _compare(self) -> None:
        """Takes in the stretch that ends: with the draft, it is a comparison; without, it tells the target's times."""
        assert self._since is not None
        if self.rests:
            self._time()
            return
        seconds, made = self._alone
        took = self._last - self._since
        if 2 * made < self._tokens or not seconds > 0 < took:
            return
        new = took, self._tokens, seconds, made
        self._text = tuple(map(sum, zip(self._text, new, strict=True)))  # type: ignore[assignment]
        times, self._of_forwards = self._tokens / took * seconds / made, self._bare / seconds
        weight = min(1.0, self._tokens / _STRETCH_TOKENS)
        gain = min(max(log(times), -log(_MOST_FACTOR)), log(_MOST_FACTOR))
        self._gains, self._compared = self._gains + weight * gain, self._compared + weight
        if self._compared > _MOST_HERE:
            self._gains, self._compared = self._gains * _MOST_HERE / self._compared, _MOST_HERE
        self._in_a_row = self._in_a_row % int(_MOST_HERE) + 1
        weight *= 2 / (self._in_a_row * (self._in_a_row + 1))
        self.comparisons = min(self.comparisons + weight, _MOST_COMPARISONS)
        self.gain += (gain - self.gain) * weight / max(weight, self.comparisons)
        if not self._is_in_better:
            self.cost = max(0.0, self._tokens * (1 / times - 1))

    def _time(self) -> None:
        """Takes in what steps without the draft took beside their forwards.

        Whatever disturbs makes them longer, never shorter: where less is found than was taken for true, what was
        compared by it is corrected.
        """
        beside = (self._beside - self._most_beside) / max(1, self._steps - 1)  # the longest may be a hiccup
        known, is_tried = self.overhead, not self._is_in_better
        if known is None or (is_tried and not self._timings):
            self.overhead = beside
        elif is_tried and beside < known:
            forward = max(0.0, (self._last - self._since - self._beside) / self._steps) if self._since else 0.0
            if forward + beside > 0:
                share = (forward + beside) / (forward + known)
                self.gain += max(log(share), -log(_MOST_FACTOR))
                took, tokens, seconds, made = self._text
                self._text = took, tokens, seconds * share, made
            self.overhead = beside
        else:
            self.overhead = known + _OF_TIMES * (beside - known)
        if is_tried:
            self._timings += 1
            self.cost = self._tokens * (exp(max(0.0, self._here)) - 1)

    def _is_other_wanted(self, has_slowed: bool, left: int) -> bool:
        """For it is better, or is to be tried again; or this one was only tried."""
        amid = _STRETCH_TOKENS if self._has_drafted else _TO_READ  # for the draft to come back, or to begin
        if self._is_other_better or not self.comparisons:
            is_wanted = self.comparisons > 0 or self.rests or self.overhead is None
            return is_wanted and left >= (amid if self.rests else _STRETCH_TOKENS)
        if has_slowed:  # things have changed, it seems: what was compared before counts less
            self.comparisons = min(self.comparisons, _OF_BEFORE)
        is_due = self.since_tried >= (_ONCE_SLOWED if has_slowed else self._patience)
        return is_due and left >= (_TO_READ if self.rests else _STRETCH_TOKENS)

    @property
    def _here(self) -> float:
        """The gain that this text is expected to have: what it has told itself counts most."""
        others = self.comparisons / (self.comparisons + 2)
        return (others * self.gain + self._gains) / (others + self._compared) if others + self._compared else 0.0

    @property
    def _is_in_better(self) -> bool:
        """Whether the way in use is the better one, as far as is known."""
        return self.comparisons > 0 and self.rests == (self._here < 0)

    @property
    def _is_other_better(self) -> bool:
        """So much so that it is no chance."""
        is_known = self.comparisons > 0 and abs(self._here) > _MARGIN / max(1.0, self.comparisons) ** 0.5
        return is_known and not self._is_in_better

    @property
    def _is_unsure(self) -> bool:
        is_far = abs(self.gain) > _SURE * self._error and self.comparisons >= _FEWEST
        return self.comparisons < _FEW and not is_far

    @property
    def _error(self) -> float:
        """Standard error of the gain."""
        return _SPREAD / sqrt(self.comparisons)

    @property
    def _patience(self) -> int:
        """Tokens between two trials of the way that loses."""
        if self.gain > 0 and self._timings < _TIMINGS:
            lost = (_TIMED[1] + _AROUND) * (exp(self.gain) - 1)
            is_sure = exp(self.gain) * min(1.0, self._of_forwards) > _SURELY
            may_cost = _FOR_SURE_TIMES if is_sure else _FOR_TIMES
            return int(max(_RETIMED << self._timings, min(lost / may_cost, _MOST_PATIENCE)))
        far = abs(self.gain) / self._error
        # What is lost in the mean, as a share of the time, for the other way may be the better: with a normal error.
        lost = self._error * (exp(-(far**2) / 2) / sqrt(2 * pi) - far * erfc(far / sqrt(2)) / 2)
        share = min(max(lost, _LEAST_SHARE), _MOST_SHARE)
        return int(min(max(self.cost / share, _LEAST_PATIENCE * self.comparisons), _MOST_PATIENCE))
