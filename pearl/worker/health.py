"""Decides whether a draft is still worth waiting for, by its silence, pace and heartbeats. No sockets, no messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pearl.errors import DraftLost
from pearl.protocol.drafter import State as Working
from pearl.protocol.speeds import Speeds
from pearl.silence import SLACK, Silence

_TOO_SLOW = 20.0  # times what its token took when it joined
_LEAST_SLOW = 0.01  # seconds; a token that takes less is never slow: a busy machine's noise is as large
_SLOW_TOKENS = 8  # slow tokens of a request in a row that end it; or as many as have taken `timeout` in all
_MOST_ALLOWED = 10  # times `timeout`: the longest silence that a draft may announce, and that a text is waited with
_STALLED_BEATS = 2  # heartbeats of an idle draft while the target waits for it: a message was lost, begin anew
_STALLED_FOR_GOOD = 8  # such heartbeats after which the draft is given up
_NEGLECTED = 512  # tokens drafted for others while a request waits, after which a message of it must have been lost:
# more than the parts in which the draft reads the longest prefix
_AT_REST = frozenset(state.value for state in Working if state is not Working.DRAFTING)


class DraftHealth:
    """Health of the draft that is connected now. `timeout`: seconds of silence after which a draft is lost."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._silence = Silence()
        self._usual_pace = 0.0  # seconds of a token, measured when it joined
        self.joined()

    def joined(self) -> None:
        """Begin anew: another draft has connected."""
        self._is_calibrated = False
        self._stalled_beats = 0
        self._passed: dict[int, int] = {}  # request that waits -> tokens drafted for others since
        self._reached: dict[int, tuple[tuple[int, int], float]] = {}  # request that waits -> how far it came, and when
        self._slow: dict[int, tuple[int, float]] = {}  # request -> its slow tokens in a row, their seconds
        self._silence.heard()

    def calibrated(self, seconds: float) -> bool:
        """Whether it had not said so since it connected."""
        is_news, self._is_calibrated = not self._is_calibrated, True
        self._usual_pace = seconds
        return is_news

    def heard(self) -> None:
        self._silence.heard()

    def announced(self, seconds: float) -> None:
        """Allow silence for work that should take `seconds`: four times as much, at most ten times `timeout`."""
        self._silence.heard(min(SLACK * seconds, _MOST_ALLOWED * self._timeout))

    @property
    def silent(self) -> float:
        """Seconds since the last sign of life, less those that were allowed."""
        return self._silence.seconds

    def drafted(self, request: int) -> None:
        """A token of this request has come, so nothing is stalled."""
        self._stalled_beats = 0
        self._passed.pop(request, None)
        for waiting in self._passed:
            self._passed[waiting] += 1

    def neglected(self, waiting: Collection[int]) -> list[int]:
        """Of the requests that wait those of which a message was lost: the draft has gone on with others only."""
        self._passed = {request: self._passed.get(request, 0) for request in waiting}
        found = [request for request, passed in self._passed.items() if passed >= _NEGLECTED]
        self._passed |= dict.fromkeys(found, 0)
        return found

    def overdue(self, waiting: Mapping[int, tuple[int, int]], now: float) -> list[int]:
        """Of the requests that wait those that have got no further for too long, whatever the draft says meanwhile.

        A draft is not silent that answers, or says that it works, or asks for the prefix again, and sends no token.

        Args:
            waiting: request -> its tokens that are committed, and those that are pending too.
            now: seconds.
        """
        before, self._reached = self._reached, {}
        for request, reached in waiting.items():
            best = before.get(request)
            self._reached[request] = best if best is not None and reached <= best[0] else (reached, now)
        most = _MOST_ALLOWED * self._timeout
        return [request for request, (_, since) in self._reached.items() if now - since > most]

    def took(self, request: int, seconds: float, speeds: Speeds) -> None:
        """Note the seconds that a token took. Raises `DraftLost` after several that took too long to be worth it.

        They are counted by request, for one slow forward may be that of a token for each of many.
        """
        if not seconds:  # unknown: the forward was fed more than one token
            return
        # The cheap comparison first: the target's time is interpolated, and this runs for every token.
        if seconds <= max(_TOO_SLOW * self._usual_pace, _LEAST_SLOW) or seconds <= 2 * speeds.t_target(1):
            self._slow.clear()
            return
        tokens, total = self._slow.get(request, (0, 0.0))
        self._slow[request] = tokens, total = tokens + 1, total + seconds
        if tokens >= _SLOW_TOKENS or total > self._timeout:
            raise DraftLost(f"{seconds * 1e3:.0f} ms a token, where {self._usual_pace * 1e3:.1f} ms are usual")

    def stalled(self, work: str, awaited: bool) -> bool:
        """Whether draft and target wait for each other, by a heartbeat of the draft: a message was lost then.

        Args:
            work: what the draft says that it does.
            awaited: whether the target waits for its tokens.

        Raises `DraftLost` where giving it the whole prefix again has not helped.
        """
        if work not in _AT_REST or not awaited:
            self._stalled_beats = 0
            return False
        self._stalled_beats += 1
        if self._stalled_beats == _STALLED_FOR_GOOD:
            raise DraftLost("it waits while it is waited for, though it was told all")
        return self._stalled_beats % _STALLED_BEATS == 0
