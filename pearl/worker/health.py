"""Decides whether a draft is still worth waiting for, by its silence, its pace and its heartbeats.

This module knows no sockets and no messages.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pearl.errors import DraftLost
from pearl.protocol.drafter import DrafterState
from pearl.protocol.speeds import Speeds
from pearl.silence import SLACK, Silence

# A token is slow if it takes this many times the seconds that were measured when the draft joined.
_TOO_SLOW = 20.0
# Seconds. A token that takes less is never slow, because noise on a busy machine is as large.
_LEAST_SLOW = 0.01
# The draft is lost after this many slow tokens of one request in a row, or if such a row of tokens
# takes longer than `timeout`.
_SLOW_TOKENS = 8
# The longest silence that a draft may announce, and the longest wait for a token, in multiples of
# `timeout`.
_MOST_ALLOWED = 10
# If an idle draft for which the target waits sends this many heartbeats, a message was lost, and
# the target sends the whole prefix again.
_STALLED_BEATS = 2
_STALLED_FOR_GOOD = 8
_AT_REST = frozenset(state.value for state in DrafterState if state is not DrafterState.DRAFTING)


class _Progress(NamedTuple):
    """How far a request has come.

    Attributes:
        lengths: the largest (committed tokens, committed and pending tokens) so far.
        since: when these lengths were first seen, in seconds.
    """

    lengths: tuple[int, int]
    since: float


class _SlowRun(NamedTuple):
    """Successive slow tokens of one request: their number and their total time."""

    tokens: int = 0
    seconds: float = 0.0


class DraftHealth:
    """Judges the health of the connected draft.

    Args:
        timeout: seconds of silence after which a draft is lost.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.silence = Silence()
        self._usual_pace = 0.0  # seconds per token, measured when the draft joined
        self.joined()

    def joined(self) -> None:
        """Start anew: another draft has connected."""
        self._is_calibrated = False
        self._stalled_beats = 0
        self._progress: dict[int, _Progress] = {}  # by waiting request
        self._slow: dict[int, _SlowRun] = {}  # by request
        self.silence.heard()

    def calibrated(self, seconds: float) -> bool:
        """Note the draft's seconds per token; return whether it reports them for the first time."""
        is_news = not self._is_calibrated
        self._is_calibrated = True
        self._usual_pace = seconds
        return is_news

    def announced(self, seconds: float) -> None:
        """Allow the draft to be silent during work that should take `seconds`.

        It may be silent for four times as long, but at most for ten times `timeout`.
        """
        self.silence.heard(min(SLACK * seconds, _MOST_ALLOWED * self._timeout))

    def drafted(self) -> None:
        """Note that tokens have come: target and draft do not wait for each other."""
        self._stalled_beats = 0

    def overdue(self, waiting: Mapping[int, tuple[int, int]], now: float) -> list[int]:
        """Return the waiting requests that made no progress for too long.

        A draft may send signs of life, and yet no tokens of a request.

        Args:
            waiting: request -> (committed tokens, committed and pending tokens).
            now: the current time in seconds.
        """
        progress = {}
        overdue = []
        for request, lengths in waiting.items():
            furthest = self._progress.get(request)
            if furthest is None or lengths > furthest.lengths:
                furthest = _Progress(lengths, now)
            progress[request] = furthest
            if now - furthest.since > _MOST_ALLOWED * self._timeout:
                overdue.append(request)
        self._progress = progress
        return overdue

    def took(self, request: int, seconds: float, speeds: Speeds) -> None:
        """Note the seconds that a token took. Raises `DraftLost` after several slow tokens of a request.

        Slow tokens are counted per request, because one slow forward may yield a token for each of many requests.
        """
        if not seconds:  # unknown: the forward was fed more than one token
            return
        # The cheap comparison comes first, because the target's time is interpolated, and this runs
        # for every token.
        bound = max(_TOO_SLOW * self._usual_pace, _LEAST_SLOW)
        if seconds <= bound or seconds <= 2 * speeds.t_target(1):
            self._slow.clear()
            return
        run = self._slow.get(request, _SlowRun())
        run = _SlowRun(run.tokens + 1, run.seconds + seconds)
        self._slow[request] = run
        if run.tokens >= _SLOW_TOKENS or run.seconds > self._timeout:
            raise DraftLost(
                f"{seconds * 1e3:.0f} ms a token, where {self._usual_pace * 1e3:.1f} ms are usual"
            )

    def stalled(self, work: str, awaited: bool) -> bool:
        """Note a heartbeat of the draft; return whether the target must send the prefix again.

        It must if target and draft wait for each other, because then a message was lost.

        Args:
            work: the draft's state.
            awaited: whether the target waits for the draft's tokens.

        Raises `DraftLost` if giving the draft the whole prefix again has not helped.
        """
        if work not in _AT_REST or not awaited:
            self._stalled_beats = 0
            return False
        self._stalled_beats += 1
        if self._stalled_beats == _STALLED_FOR_GOOD:
            raise DraftLost(
                "it waits while the target waits for it, although it has the whole prefix"
            )
        return self._stalled_beats % _STALLED_BEATS == 0
