"""The fronts (users' processes) that are attached to a target worker, and their requests."""

import logging
import time
from collections.abc import Callable
from itertools import count

from pearl.config.option_values import wide_window
from pearl.errors import RemoteProtocolError, RequestError
from pearl.metrics import Stopwatch, fold
from pearl.models.checkpoints.checkpoint import is_head
from pearl.protocol.events import End
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Committed,
    Error,
    Finished,
    Hello,
    Message,
    Preview,
    Submit,
)
from pearl.protocol.speeds import Speeds
from pearl.spec.methods import MAX_WINDOW
from pearl.spec.stops import STOPS
from pearl.transport.base import Peer
from pearl.worker.settings import TargetSettings

log = logging.getLogger(__name__)

Post = Callable[[Message, Peer], None]
MAX_FRONTS = 256
MAX_REQUESTS = 128  # of one front, running ones included


class Fronts:
    """Knows which front has submitted each request, and sends the request's results there.

    Each request gets a number of the worker's own, "our number", because the numbers that fronts
    choose are not unique.

    Args:
        post: sends a message to a front.

    Attributes:
        attached: all attached fronts, whether they have requests or not.
    """

    def __init__(self, post: Post, settings: TargetSettings) -> None:
        self._post = post
        self.attached: set[Peer] = set()
        self._unwelcomed: list[Peer] = []  # attached before requests could be served
        self._owners: dict[int, tuple[Peer, int]] = {}  # our number -> front, its number
        self._settings = settings
        self._is_head = is_head(settings.config.draft)
        self._numbers = count(1)
        self._watches: dict[int, Stopwatch] = {}
        self._undelivered: list[Committed | Preview] = []

    def __contains__(self, peer: Peer) -> bool:
        return peer in self.attached

    def meet(self, peer: Peer, hello: Hello) -> None:
        """Attach a front, which `welcome` will answer.

        Raises `RemoteProtocolError` or `RequestError` if the front is refused.
        """
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"front speaks version {hello.version}, this target {PROTOCOL_VERSION}"
            )
        if len(self.attached) >= MAX_FRONTS:
            raise RequestError(f"{MAX_FRONTS} fronts are attached: try again later")
        self.attached.add(peer)
        self._unwelcomed.append(peer)

    def welcome(self, introduction: Message) -> None:
        """Send the target's introduction to all fronts that have not received it."""
        for peer in self._unwelcomed:
            self._post(introduction, peer)
        self._unwelcomed.clear()

    def lose(self, peer: Peer) -> list[int]:
        """Forget a front that is gone, and return our numbers of its requests.

        The caller cancels these requests, because nobody reads their results.
        """
        self.attached.discard(peer)
        numbers = self._requests(peer)
        for number in numbers:
            log.info("front is gone: cancelling its request")
            del self._owners[number]
        return numbers

    def _requests(self, peer: Peer) -> list[int]:
        """Return our numbers of all requests of a front."""
        return [number for number, (owner, _) in self._owners.items() if owner == peer]

    def number(self, peer: Peer, submit: Submit) -> Submit:
        """Register a front's request, and return it with our number.

        Raises `RequestError` if the request cannot be served.
        """
        number = next(self._numbers)
        problem = _problem(submit, self._settings, self._is_head)
        if problem is not None:
            raise RequestError(problem)
        if len(self._requests(peer)) >= MAX_REQUESTS:
            raise RequestError(f"{MAX_REQUESTS} requests of yours wait already: try again later")
        self._owners[number] = (peer, submit.request)
        self._watches[number] = Stopwatch(time.monotonic())
        return submit.changed(request=number, client=f"{peer.hex()[:24]} {submit.client[:32]}")

    def numbers(self, peer: Peer, request: int) -> list[int]:
        """Return [our number of a front's request]; [] if the request has ended."""
        return [number for number, owner in self._owners.items() if owner == (peer, request)]

    def watch(self, request: int) -> Stopwatch:
        """Return the stopwatch of a request.

        If the request is over, return an unused one, because messages may come late.
        """
        return self._watches.get(request) or Stopwatch()

    @property
    def waiting(self) -> set[Peer]:
        """The fronts that have requests."""
        return {peer for peer, _ in self._owners.values()}

    def deliver(self, message: Committed | Preview) -> None:
        """Let the next `flush` send these tokens."""
        self._undelivered.append(message)

    def flush(self) -> None:
        """Send the messages that were given to `deliver`, in their order."""
        for message in self._undelivered:
            if isinstance(message, Committed):
                self.watch(message.request).committed(len(message.tokens), time.monotonic())
            if message.request in self._owners:
                peer, front_number = self._owners[message.request]
                self._post(message.changed(request=front_number), peer)
        self._undelivered.clear()

    def end(self, end: End, speeds: Speeds) -> None:
        """Send the last message of a request: why it failed, or its statistics."""
        self.flush()
        peer, front_number = self._owners.pop(end.request, (b"", -1))
        watch = self._watches.pop(end.request, Stopwatch())
        if peer and end.failure is not None:
            log.info("%s", end.failure.reason)
            self._post(Error(front_number, end.failure.kind, end.failure.reason), peer)
        elif peer:
            statistics = fold(end.counts, watch, speeds, end.prompt_tokens, end.window)
            self._post(Finished(front_number, end.reason, statistics.to_json()), peer)


def _problem(submit: Submit, settings: TargetSettings, is_head: bool) -> str | None:
    """Return why a request cannot be served; None if it can.

    Args:
        is_head: whether the draft is a head of the target.
    """
    if not submit.prompt:
        return "the prompt is empty: give at least one token"
    options = submit.options
    if STOPS[options.draft_stop].is_trained and settings.config.disco is None:
        return f"draft_stop {options.draft_stop} needs a classifier, and this engine was started without --disco"
    if options.method_spec.drafts and not options.commits_draws and is_head:
        return f"a head as a draft serves no text by rule {options.rule}: give rule coupled, or temperature 0"
    if settings.config.slots > 1 and (options.gamma or 0) > MAX_WINDOW:
        return wide_window(options.gamma)
    vocab = settings.vocab_size
    if max(submit.prompt) >= vocab:
        return f"prompt holds token id {max(submit.prompt)}, the model has ids up to {vocab - 1}"
    for token, _ in options.logit_bias:
        if token >= vocab:
            return f"logit_bias names token id {token}, the model has ids up to {vocab - 1}"
    largest = max(options.predicted, default=0)
    if largest >= vocab:
        return f"prediction holds token id {largest}, the model has ids up to {vocab - 1}"
    context = settings.context
    if submit.limit > context or submit.limit <= len(submit.prompt):
        return f"prompt of {len(submit.prompt)} tokens and limit {submit.limit} do not fit a context of {context}"
    return None
