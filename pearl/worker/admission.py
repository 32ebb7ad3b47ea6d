"""What a target worker takes on: which requests it can serve, and how many fronts and requests at a time.

What is refused is refused to the front that asked, so one front cannot fill the memory of the engine that others use.
"""

from __future__ import annotations

from collections.abc import Mapping

from pearl.config.decoding import wide_window
from pearl.errors import RequestError
from pearl.protocol.messages import Submit
from pearl.spec.methods import MAX_WINDOW
from pearl.spec.stops import STOPS
from pearl.transport.base import Peer

MAX_FRONTS = 256
MAX_REQUESTS = 64  # of one front, the one in work included
MAX_HELD = 1 << 21  # tokens, and characters of stop strings, in the requests of all fronts
MAX_SHARE = MAX_HELD // MAX_FRONTS  # so much of it a front may have however much the others hold
REQUEST = 1 << 10  # what a request counts beside its tokens
MAX_RECORDINGS = 16  # wishes to begin or end one
_LATER = "try again later"


class Admission:
    """Keeps what each request holds. `owners` is the worker's: number -> front, its number.

    `has_classifier`: of stop policy disco. `slots`: requests that are worked on side by side.
    """

    def __init__(
        self,
        owners: Mapping[int, tuple[Peer, int]],
        vocab_size: int,
        context: int,
        has_classifier: bool = False,
        slots: int = 1,
    ) -> None:
        self._owners = owners
        self._vocab_size, self._context = vocab_size, context
        self._has_classifier, self._slots = has_classifier, slots
        self._held: dict[int, int] = {}

    def admit(self, number: int, front: Peer, submit: Submit) -> None:
        """Raises `RequestError` where it cannot be served, or not now: who waits has asked for too much already."""
        problem = self._problem(submit) or self._excess(front)
        if problem:
            raise RequestError(problem)
        shaping = submit.options.sampling.shaping
        grammar = shaping.grammar if shaping is not None else ""
        holds = REQUEST + len(submit.prompt) + len(submit.eos) + sum(map(len, submit.options.stops)) + len(grammar)
        self._held = {waiting: held for waiting, held in self._held.items() if waiting in self._owners}
        own = sum(held for waiting, held in self._held.items() if self._owners[waiting][0] == front)
        if own + holds > MAX_SHARE and sum(self._held.values()) + holds > MAX_HELD:
            raise RequestError(f"the requests that wait would hold over {MAX_HELD:,} tokens and characters: {_LATER}")
        self._held[number] = holds

    def _excess(self, front: Peer) -> str | None:
        if sum(owner == front for owner, _ in self._owners.values()) >= MAX_REQUESTS:
            return f"{MAX_REQUESTS} requests of yours wait already: {_LATER}"
        return None

    def _problem(self, submit: Submit) -> str | None:
        if not submit.prompt:
            return "the prompt is empty: give at least one token"
        options = submit.options
        if problem := options.problem():
            return problem
        if STOPS[options.draft_stop].is_trained and not self._has_classifier:
            return f"draft_stop {options.draft_stop} needs a classifier, and this engine was started without --disco"
        if self._slots > 1 and (submit.options.gamma or 0) > MAX_WINDOW:
            return wide_window(submit.options.gamma)
        if max(submit.prompt) >= self._vocab_size:
            return f"prompt holds token id {max(submit.prompt)}, the model has ids up to {self._vocab_size - 1}"
        shaping = options.sampling.shaping
        if shaping is not None and (beyond := [token for token, _ in shaping.logit_bias if token >= self._vocab_size]):
            return f"logit_bias names token id {beyond[0]}, the model has ids up to {self._vocab_size - 1}"
        if submit.limit > self._context or submit.limit <= len(submit.prompt):
            length = len(submit.prompt)
            return f"prompt of {length} tokens and limit {submit.limit} do not fit a context of {self._context}"
        return None
