"""Whether a draft is still worth waiting for, by its silence, pace and heartbeats. No sockets, no messages."""

from __future__ import annotations

from collections.abc import Mapping

from pearl.errors import DraftLost
from pearl.protocol.drafter import State as Working
from pearl.protocol.speeds import Speeds
from pearl.silence import SLACK, Silence

_TOO_SLOW = 20.0  # times the seconds per token that were measured when it joined
_LEAST_SLOW = 0.01  # seconds; a faster token is never slow: a busy machine's noise is as large
_SLOW_TOKENS = (
    8  # slow tokens of one request in a row that end the draft; or as many as took `timeout` in all
)
_MOST_ALLOWED = 10  # times `timeout`: the longest silence a draft may announce, and the longest wait for a token
_STALLED_BEATS = (
    2  # heartbeats of an idle draft that the target waits for: a message was lost, resynchronise
)
_STALLED_FOR_GOOD = 8  # such heartbeats after which the draft is lost
_AT_REST = frozenset(state.value for state in Working if state is not Working.DRAFTING)


class DraftHealth:
    """Health of the draft that is connected now. `timeout`: seconds of silence after which a draft is lost."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.silence = Silence()
        self._usual_pace = 0.0  # seconds per token, measured when it joined
        self.joined()

    def joined(self) -> None:
        """Start again: another draft has connected."""
        self._is_calibrated = False
        self._stalled_beats = 0
        self._reached: dict[
            int, tuple[tuple[int, int], float]
        ] = {}  # waiting request -> its lengths, since when
        self._slow: dict[
            int, tuple[int, float]
        ] = {}  # request -> its slow tokens in a row, their seconds
        self.silence.heard()

    def calibrated(self, seconds: float) -> bool:
        """Note the seconds per token of a draft that joins; whether it is the first time since it connected."""
        is_news = not self._is_calibrated
        self._is_calibrated = True
        self._usual_pace = seconds
        return is_news

    def announced(self, seconds: float) -> None:
        """Allow silence for work that should take `seconds`: four times as long, at most ten times `timeout`."""
        self.silence.heard(min(SLACK * seconds, _MOST_ALLOWED * self._timeout))

    def drafted(self) -> None:
        """Tokens have come, so nothing is stalled."""
        self._stalled_beats = 0

    def overdue(self, waiting: Mapping[int, tuple[int, int]], now: float) -> list[int]:
        """The waiting requests that made no progress for too long, though the draft is not silent.

        Args:
            waiting: request -> (committed tokens, tokens with the pending ones).
            now: seconds.
        """
        before = self._reached
        self._reached = {}
        for request, reached in waiting.items():
            best = before.get(request)
            self._reached[request] = (
                best if best is not None and reached <= best[0] else (reached, now)
            )
        most = _MOST_ALLOWED * self._timeout
        return [request for request, (_, since) in self._reached.items() if now - since > most]

    def took(self, request: int, seconds: float, speeds: Speeds) -> None:
        """Note the seconds that a token took. Raises `DraftLost` after several slow ones.

        Counted per request, as one slow forward may yield a token for each of many.
        """
        if not seconds:  # unknown: the forward was fed more than one token
            return
        # The cheap comparison first: the target's time is interpolated, and this runs for every token.
        if seconds <= max(
            _TOO_SLOW * self._usual_pace, _LEAST_SLOW
        ) or seconds <= 2 * speeds.t_target(1):
            self._slow.clear()
            return
        tokens, total = self._slow.get(request, (0, 0.0))
        self._slow[request] = tokens, total = tokens + 1, total + seconds
        if tokens >= _SLOW_TOKENS or total > self._timeout:
            raise DraftLost(
                f"{seconds * 1e3:.0f} ms a token, where {self._usual_pace * 1e3:.1f} ms are usual"
            )

    def stalled(self, work: str, awaited: bool) -> bool:
        """Whether draft and target wait for each other, by a heartbeat of the draft: then a message was lost.

        Args:
            work: the draft's state.
            awaited: whether the target waits for its tokens.

        Raises `DraftLost` if giving it the whole prefix again has not helped.
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
