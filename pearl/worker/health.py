"""Whether the draft is worth waiting for: by its silence, its pace and its beats. Knows no sockets and no messages."""

from __future__ import annotations

from pearl.errors import DraftLost
from pearl.protocol.drafter import State as Working
from pearl.protocol.window import Speeds
from pearl.silence import SLACK, Silence

_TOO_SLOW = 20.0  # times what its token took when it joined
_LEAST_SLOW = 0.01  # seconds; below that slowness harms nobody, and the noise of a busy machine is larger
_SLOW_TOKENS = 8  # that many in a row, or `timeout` spent on them, and it is given up
_MOST_ALLOWED = 10  # times `timeout`: the longest silence that a draft may announce
_STALLED_BEATS = 2  # so many of one at rest while we wait for it: something was lost, and it is told all again
_STALLED_FOR_GOOD = 8  # so many, and it is given up
_AT_REST = frozenset(state.value for state in Working if state is not Working.DRAFTING)


class DraftHealth:
    """Of one draft after the other. `timeout`: seconds of silence that are borne."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._silence = Silence()
        self._usual_pace = 0.0  # seconds of a token, measured when it joined
        self.joined()

    def joined(self) -> None:
        """Another draft."""
        self._slow_tokens = self._stalled_beats = 0
        self._slow_seconds = 0.0
        self._silence.heard()

    def calibrated(self, seconds: float) -> None:
        self._usual_pace = seconds

    def heard(self) -> None:
        self._silence.heard()

    def announced(self, seconds: float) -> None:
        """Long work, that should take so long. It is allowed a multiple; but a draft cannot ask for ever."""
        self._silence.heard(min(SLACK * seconds, _MOST_ALLOWED * self._timeout))

    @property
    def silent(self) -> float:
        """Seconds."""
        return self._silence.seconds

    def drafted(self) -> None:
        """A token has come, so nothing is stalled."""
        self._stalled_beats = 0

    def took(self, seconds: float, speeds: Speeds) -> None:
        """How long a token took. Raises `DraftLost` where each costs more than it can save, and did so for a while."""
        if not seconds:  # a forward of more than its last token says nothing
            return
        # In this order: the target's time is looked up for a token that is slow, not for every one.
        if seconds <= max(_TOO_SLOW * self._usual_pace, _LEAST_SLOW) or seconds <= 2 * speeds.t_target(1):
            self._slow_tokens, self._slow_seconds = 0, 0.0
            return
        self._slow_tokens, self._slow_seconds = self._slow_tokens + 1, self._slow_seconds + seconds
        if self._slow_tokens >= _SLOW_TOKENS or self._slow_seconds > self._timeout:
            raise DraftLost(f"{seconds * 1e3:.0f} ms a token, where {self._usual_pace * 1e3:.1f} ms are usual")

    def stalled(self, work: str, awaited: bool) -> bool:
        """Whether a draft that beats, at this work, waits while it is waited for: then it has missed something.

        Raises `DraftLost` where telling it all again does not help.
        """
        if work not in _AT_REST or not awaited:
            self._stalled_beats = 0
            return False
        self._stalled_beats += 1
        if self._stalled_beats == _STALLED_FOR_GOOD:
            raise DraftLost("it waits while it is waited for, though it was told all")
        return self._stalled_beats % _STALLED_BEATS == 0
