"""How long each request took, and for what: from its submission to its end.

What is said of a request that is not worked on is passed over: peers speak of such ones too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from pearl.metrics import Stopwatch


class Watches:
    """A stopwatch of each request that is worked on. All times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._submitted: dict[int, float] = {}  # when each request came
        self._running: dict[int, Stopwatch] = {}
        self._waiting: dict[int, tuple[str, float]] = {}  # request -> cause, since

    def __contains__(self, request: object) -> bool:
        """Whether `request` is worked on."""
        return request in self._running

    @property
    def waiting(self) -> set[int]:
        """Those that wait, of the ones that are worked on."""
        return self._waiting.keys() & self._running.keys()

    def submit(self, request: int) -> None:
        self._submitted[request] = time.monotonic()

    def open(self, request: int, now: float, draft_lost: bool) -> None:
        """`request` is worked on from `now` on."""
        self._running[request] = Stopwatch(self._submitted.get(request, now), now, draft_lost=draft_lost)

    def wait(self, request: int, cause: str, now: float) -> None:
        self._waiting.setdefault(request, (cause, now))

    def go_on(self, request: int, now: float) -> None:
        """`request` waits no longer."""
        if request in self._waiting:
            cause, since = self._waiting.pop(request)
            if request in self._running:
                self._running[request].waited(cause, now - since)

    def work(self, requests: Iterable[int], seconds: float) -> None:
        """The target was busy with all of `requests`."""
        for request in requests:
            if request in self._running:
                self._running[request].busy += seconds

    def commit(self, request: int, tokens: int, now: float) -> None:
        if request in self._running:
            self._running[request].committed(tokens, now)

    def draft_waited(self, request: int, seconds: float) -> None:
        """The draft has waited for `seconds` since it began with `request`."""
        if request in self._running:
            watch = self._running[request]
            watch.draft_waited = max(watch.draft_waited, seconds)

    def lose_draft(self, request: int | None = None) -> None:
        """`request` goes on without a draft; None: all that are worked on do."""
        for watch in self._running.values() if request is None else [self._running[request]]:
            watch.draft_lost = True

    def end(self, request: int) -> Stopwatch:
        """What was measured; forgotten here."""
        self._waiting.pop(request, None)
        self._submitted.pop(request, None)
        return self._running.pop(request, Stopwatch())
