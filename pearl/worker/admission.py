"""Which requests a target worker accepts, and how many fronts and requests at a time.

Limits are per front, so that one front cannot fill the memory of an engine that others use.
"""

from __future__ import annotations

from collections.abc import Mapping

from pearl.config.decoding import wide_window
from pearl.errors import RequestError
from pearl.models.checkpoints.checkpoint import is_head
from pearl.protocol.messages import Submit
from pearl.spec.methods import MAX_WINDOW
from pearl.spec.stops import STOPS
from pearl.transport.base import Peer
from pearl.worker.settings import TargetSettings

MAX_FRONTS = 256
MAX_REQUESTS = 128  # of one front, running ones included
MAX_HELD = 1 << 21  # tokens, and characters of stop strings and grammars, in the requests of all fronts
REQUEST = 1 << 10  # tokens that a request counts beside its own
_LATER = "try again later"


class Admission:
    """Keeps what each request holds.

    Args:
        owners: the worker's: number -> front, its number.
    """

    def __init__(self, owners: Mapping[int, tuple[Peer, int]], settings: TargetSettings) -> None:
        self._owners, self._settings = owners, settings
        self._is_head = is_head(settings.config.draft)
        self._held: dict[int, int] = {}

    def admit(self, number: int, front: Peer, submit: Submit) -> None:
        """Raises `RequestError` if the request cannot be served, or its front has too much waiting already."""
        if problem := self._problem(submit):
            raise RequestError(problem)
        if sum(owner == front for owner, _ in self._owners.values()) >= MAX_REQUESTS:
            raise RequestError(f"{MAX_REQUESTS} requests of yours wait already: {_LATER}")
        shaping = submit.options.sampling.shaping
        grammar = shaping.grammar if shaping is not None else ""
        holds = REQUEST + len(submit.prompt) + len(submit.eos) + sum(map(len, submit.options.stops)) + len(grammar)
        self._held = {waiting: held for waiting, held in self._held.items() if waiting in self._owners}
        if sum(self._held.values()) + holds > MAX_HELD:
            raise RequestError(f"the requests that wait would hold over {MAX_HELD:,} tokens and characters: {_LATER}")
        self._held[number] = holds

    def _problem(self, submit: Submit) -> str | None:
        if not submit.prompt:
            return "the prompt is empty: give at least one token"
        options, vocab, context = submit.options, self._settings.vocab_size, self._settings.context
        if problem := options.problem():
            return problem
        if STOPS[options.draft_stop].is_trained and self._settings.config.disco is None:
            return f"draft_stop {options.draft_stop} needs a classifier, and this engine was started without --disco"
        if self._is_head and options.method_spec.drafts and not options.commits_draws:
            return f"a head as a draft serves no text by rule {options.rule}: give rule coupled, or temperature 0"
        if self._settings.config.slots > 1 and (options.gamma or 0) > MAX_WINDOW:
            return wide_window(options.gamma)
        if max(submit.prompt) >= vocab:
            return f"prompt holds token id {max(submit.prompt)}, the model has ids up to {vocab - 1}"
        shaping = options.sampling.shaping
        if shaping is not None and (beyond := [token for token, _ in shaping.logit_bias if token >= vocab]):
            return f"logit_bias names token id {beyond[0]}, the model has ids up to {vocab - 1}"
        if submit.limit > context or submit.limit <= len(submit.prompt):
            return f"prompt of {len(submit.prompt)} tokens and limit {submit.limit} do not fit a context of {context}"
        return None
