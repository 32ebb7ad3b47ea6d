"""Method auto for one request: which way it decodes with, and on which cores the target computes."""

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
    """Chooses the way of one text, and times it for `Auto`.

    For a method other than auto there is no choice: then this only gives the draft its cores back.  If the rule's text
    depends on what was proposed, the way is `Auto.untimed`, whatever the measured times.

    Args:
        running: all running requests, this one included.

    Attributes:
        is_timed: whether ways are timed on this text. One text at a time is timed; the others use the best way so far.
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
        """Time the forward that ended at `at` seconds (0: unknown), and perhaps change to another way."""
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
        """Take in that the draft is gone: decode by `ngram` from now on, untimed, even if another draft joins."""
        if self.is_timed:
            self._speeds.auto.end()
            self.is_timed = False
        if self._is_open:
            self._request.use("ngram")

    def end(self) -> None:
        """Close the timing, and put the measured rates into the request's counts."""
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
        """Let the target use the draft's cores while no running request drafts; otherwise give them back."""
        cores = self._cores()
        if cores is not self._speeds.cores:
            self._speeds.spread(cores)
            do(Spread(cores, request=self._request.number))

    def _cores(self) -> Cores:
        machines = self._running.values()
        if not self._is_open or any(machine.draft.is_drafting for machine in machines):
            return Cores.OWN
        return Cores.ONE if self._request.method.name == ONE_CORE else Cores.ALL
