"""How far to draft ahead: the speeds that are measured, the window they make best, and the policies that use it.

Pure arithmetic on numbers that others measured. Source: PEARL (Liu et al.), Theorem 1, and DESIGN section 2.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

MAX_WINDOW = 64
_DEFAULT_WINDOW = 4  # until both speeds are known
_TIME_WEIGHT = 0.1  # of a new forward time in the running estimate: a hiccup fades within ten forwards
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
class Speeds:
    """Running estimates of both models' forward times (seconds) and of the acceptance rate."""

    t_draft: float = 0.0
    acceptance: float = 0.8
    _t_target: dict[int, float] = field(default_factory=dict)

    def observe_draft(self, seconds: float) -> None:
        if seconds > 0:
            self.t_draft = _blend(self.t_draft, seconds)

    def observe_target(self, fed: int, seconds: float) -> None:
        if seconds > 0:
            self._t_target[fed] = _blend(self._t_target.get(fed, 0.0), seconds)

    def observe_judgement(self, accepted: int, judged: int) -> None:
        for outcome in [1.0] * accepted + [0.0] * (judged - accepted):
            self.acceptance += _ACCEPTANCE_WEIGHT * (outcome - self.acceptance)

    @property
    def measured(self) -> tuple[tuple[int, float], ...]:
        """(fed tokens, seconds), in order of fed tokens."""
        return tuple(sorted(self._t_target.items()))

    def t_target(self, fed: int) -> float:
        """Seconds of a target forward fed `fed` tokens: measured, or interpolated between the nearest measured.

        Beyond the measured range the nearest value stands: extrapolating a noisy slope would be worse than flat.
        """
        known = self.measured
        if not known:
            return 0.0
        at = bisect_left(known, (fed, 0.0))
        if at == len(known):
            return known[-1][1]
        if known[at][0] == fed or at == 0:
            return known[at][1]
        (n0, t0), (n1, t1) = known[at - 1], known[at]
        return t0 + (t1 - t0) * (fed - n0) / (n1 - n0)

    @property
    def ratio(self) -> float:
        """t_target(1) / t_draft, the measured speed ratio; 0 where either is unknown."""
        return self.t_target(1) / self.t_draft if self.t_draft else 0.0

    def best_window(self) -> int:
        """The c that maximises expected tokens a second. With t_target constant it is Theorem 1's ratio."""
        if not self.ratio:
            return _DEFAULT_WINDOW
        # Past twice the ratio the draft alone sets the pace. The minimum first: a ratio of sound numbers may be inf.
        most = int(min(MAX_WINDOW, 2 * self.ratio + 2))
        t1 = self.t_target(1)
        acceptance = min(max(self.acceptance, 0.05), 0.98)  # never so sure as to stop looking
        rates = [expected_rate(c, acceptance, self.t_draft, t1, self.t_target(c)) for c in range(1, most + 1)]
        return 1 + rates.index(max(rates))


def _blend(old: float, new: float) -> float:
    return old + _TIME_WEIGHT * (min(new, _MOST_OFF * old) - old) if old else new


@dataclass(frozen=True)
class Method:
    """What makes a decoding method: which of PEARL's two overlaps it has. One coordinator runs them all."""

    drafts: bool = True
    pre_verify: bool = True  # the target judges the first token while the window is being drafted
    post_verify: bool = True  # the draft drafts on while the target verifies

    @property
    def bonus(self) -> bool:
        """Whether the row after a fully accepted window is drawn from: only where no draft token will come for it."""
        return not self.post_verify


METHODS = {
    "ar": Method(drafts=False, pre_verify=False, post_verify=False),
    "sd": Method(pre_verify=False, post_verify=False),
    "pearl": Method(),
    "pearl-no-pre-verify": Method(pre_verify=False),
    "pearl-no-post-verify": Method(post_verify=False),
}
WINDOWS = ("stream", "fixed")


@dataclass(frozen=True)
class Window:
    """For one step: start the target once `needed` tokens are unfed; let the draft draft up to `draft_until`."""

    needed: int
    draft_until: int

    @staticmethod
    def after(method: Method, policy: str, c: int, length: int, fresh: bool) -> Window:
        """The window once `length` tokens are committed.

        Args:
            c: the window, fixed or measured.
            fresh: nothing drafted survives (prefill, rejection, bonus): a new window begins at `length`.
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
        return Window(1, length + c) if fresh else Window(c, length - 1 + 2 * c)
