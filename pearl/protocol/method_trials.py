"""Method auto for one request: which method decodes it, and on which cores the target computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pearl.protocol.draft_state import DraftState
from pearl.protocol.events import Spread
from pearl.protocol.machine import Do
from pearl.protocol.method_choice import ONE_CORE
from pearl.protocol.request import Request
from pearl.protocol.speeds import Cores, Speeds

if TYPE_CHECKING:
    from pearl.protocol.request_machine import RequestMachine


class AutoText:
    """Chooses the way (the decoding method in use) of one text under method auto, and times it.

    If the request has another method than auto, there is no choice. This object then only makes the
    target leave the draft's cores to the draft.  If the text depends on what is proposed (as under
    rule ratio), method auto always uses the way `Auto.untimed`.

    Args:
        draft: what the target knows about the draft in this request.
        speeds: measured speeds of the engine, with the `Auto` that all its texts share.
        running: all running requests, this one included.

    Attributes:
        is_timed: whether ways are timed on this text. One text at a time is timed; the others use
            the best way so far.
    """

    def __init__(
        self,
        request: Request,
        draft: DraftState,
        speeds: Speeds,
        running: Mapping[int, RequestMachine],
    ) -> None:
        self._request = request
        self._draft = draft
        self._speeds = speeds
        self._running = running
        self._is_open = request.method.adapts and request.options.commits_draws
        is_first = not any(machine.auto.is_timed for machine in running.values())
        self.is_timed: bool = self._is_open and is_first
        self._committed = 0  # committed tokens, prompt included, at the last timed forward

    def begin(self, do: Do) -> None:
        """Choose the first way of the text."""
        auto = self._speeds.auto
        submit = self._request.submit
        self._committed = len(submit.prompt)
        has_draft = self._draft.context > 0
        has_choice = auto.has_choice(has_draft)
        self.is_timed = self.is_timed and has_choice
        if not self._is_open:
            if self._request.method.adapts and has_draft:
                self._request.use(auto.untimed)
            self._place(do)
        elif self.is_timed:
            max_new = submit.limit - len(submit.prompt)
            alone = self._speeds.rate_alone(Cores.ALL)
            one_core = self._speeds.rate_alone(Cores.ONE)
            predicted = self._speeds.predicted_rates()
            self._use(auto.begin(max_new, alone, one_core, has_draft, predicted), do)
        elif has_choice:
            self._use(auto.best, do)

    def step(self, at: float, do: Do) -> None:
        """Add a forward to the timing of the way in use; change to another way if that is due.

        `at`: when the forward ended, in seconds of a monotonic clock; 0 if unknown.
        """
        committed = self._request.sequence.committed
        if not self.is_timed or self._draft.is_lost or not at:
            return
        num_new = committed - self._committed
        self._committed = committed
        tokens_left = self._request.submit.limit - committed
        method = self._speeds.auto.step(at, num_new, tokens_left, self._draft.has_sent)
        if method is None:
            return
        self._draft.finish(do)
        self._use(method, do)
        if self._request.method.drafts:
            self._request.discard_pending()
            self._draft.begin(do)

    def lose_draft(self) -> None:
        """Decode with `ngram` from now on, because the draft is gone.

        The rest of the text is not timed, and keeps `ngram` even if another draft joins.
        """
        if self.is_timed:
            self._speeds.auto.end()
            self.is_timed = False
        if self._is_open:
            self._request.use("ngram")

    def end(self) -> None:
        """End the timing, and put the measured rates into the request's counters."""
        auto = self._speeds.auto
        counts = self._request.counts
        if self.is_timed:
            auto.end()
            self.is_timed = False
            counts.compared = auto.gains
        if self._is_open:
            counts.rates = dict(auto.rates)
            counts.draft_speedup = auto.speedup
            counts.settled = auto.best if auto.speedup is not None else ""

    def _use(self, method: str, do: Do) -> None:
        self._request.use(method)
        self._place(do)

    def _place(self, do: Do) -> None:
        """Let the target compute on the draft's cores too while no running request uses the draft.

        Otherwise the target leaves those cores to the draft.
        """
        cores = self._cores()
        if cores is not self._speeds.cores:
            self._speeds.spread(cores)
            do(Spread(cores, request=self._request.number))

    def _cores(self) -> Cores:
        machines = self._running.values()
        if not self._is_open or any(machine.draft.is_drafting for machine in machines):
            return Cores.OWN
        return Cores.ONE if self._request.method.name == ONE_CORE else Cores.ALL
