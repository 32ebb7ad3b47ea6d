"""Whether the draft rests while one request is worked on: what the request adds to the choice, and what follows of it.

Changes what one `RequestState` knows; when a text begins, steps and ends is the state machine's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pearl.protocol.events import Retrace, Send, Spread
from pearl.protocol.machine import Do
from pearl.protocol.messages import Finish
from pearl.protocol.request import RequestState
from pearl.protocol.telling import begin_draft
from pearl.protocol.window import Speeds


class Beside(Protocol):
    """A request that is worked on at the same time."""

    request: RequestState
    resting: Resting


class Resting:
    """For one request.

    Args:
        speeds: the target's estimates, the choice among them.
        adapts: whether the draft may rest for it: no choice changes its text, and its method leaves it open.
        running: all requests that are worked on, this one among them.

    Attributes:
        compares: whether the ways are compared while its text is written. One text at a time is where they are; beside
            it, others take the one that is better so far.
    """

    def __init__(self, request: RequestState, speeds: Speeds, adapts: bool, running: Mapping[int, Beside]) -> None:
        self._request, self._speeds, self._running = request, speeds, running
        self._choice = speeds.choice
        self._adapts = adapts
        self.compares: bool = adapts and not any(beside.resting.compares for beside in running.values())
        self._retraces = False  # whether that was asked for
        self._timed = 0  # tokens that were committed when the choice was last told

    def begin(self, do: Do) -> None:
        """The text begins: with the draft, or without it."""
        request, choice = self._request, self._choice
        if self.compares:
            choice.begin(request.submit.limit - len(request.submit.prompt))
        rests = choice.rests if self.compares else choice.is_alone_better
        self._rest(self._adapts and rests and request.draft_context > 0, do)

    def retraced(self, alone: Sequence[tuple[int, int]]) -> None:
        """What the text would have taken without the draft: see `Guessed.alone`."""
        if self.compares:
            times = self._speeds.alone
            for fed, made in alone:
                self._choice.retraced(times.at_most(fed + self._request.beside), made)

    def stepped(self, at: float, do: Do) -> None:
        """A forward ended at `at` seconds: with the draft or without it from here on."""
        request, choice = self._request, self._choice
        if not self.compares or not request.draft_context or request.is_undraftable or not at:
            return
        committed = request.sequence.committed
        new, self._timed = committed - self._timed, committed
        seconds = self._speeds.target.at_most(request.in_flight + request.beside)
        if not choice.stepped(at, new, seconds, request.has_drafted, request.submit.limit - committed):
            return
        self._rest(choice.rests, do)
        if choice.rests:
            do(Send(Finish(request.number)))
            request.told_draft = 0
        else:
            request.discard_pending()
            begin_draft(request, self._speeds, do)

    def end(self) -> None:
        """The text ends. What is known of both ways goes into its counts."""
        if self.compares:
            self._choice.end()
            self._request.counts.measured = self._choice.measured
            self.compares = False
        if self._adapts:
            counts = self._request.counts
            counts.rates, counts.speedup = dict(self._choice.rates), self._choice.speedup

    def _rest(self, rests: bool, do: Do) -> None:
        """Whether the draft is to rest for this request; the target has its cores where it rests for all."""
        request, choice = self._request, self._choice
        request.is_resting, request.has_drafted = rests, False
        others = (beside.request for beside in self._running.values() if beside.request is not request)
        everywhere = rests and not any(other.is_drafting for other in others)
        if choice.is_spread != everywhere:
            choice.is_spread = everywhere
            self._speeds.spread(everywhere)
            do(Spread(everywhere, request=request.number))
        self._retrace(do)

    def _retrace(self, do: Do) -> None:
        """While the draft drafts, what the text would have taken without it is found out."""
        request, most = self._request, self._request.options.look_ahead
        is_wanted = self.compares and not request.is_resting and self._choice.overhead is not None
        if is_wanted or self._retraces:
            sizes = range(1, most + 2) if is_wanted else ()
            times = tuple(map(self._speeds.alone.hoped, sizes))
            do(Retrace(request.sequence.committed, times, most, request=request.number))
        self._retraces = is_wanted
