"""Metrics of the server for Prometheus.

Series that mean the same as vLLM's have vLLM's names, so that its dashboards show them; others begin with `pearl:`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pearl.engine import Piece, Result
from pearl.server.answers import finish_reason, sources

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds between tokens
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_POSITIONS = 32  # of an accepted run that have a series of their own
_REST, _RESTS = 0.1, 20  # least pause between two pages: seconds, and as a multiple of the time to make one
_WEIGHT = 0.2  # of the latest text in the moving average of seconds per text
_ENDED = ", of texts that came to their end."


class Figures:
    """All series of one server, with the label `model_name`; for the event loop's thread only.

    Args:
        running, waiting: number of texts in progress, and in the queue.
        restarts: how often the draft was restarted.
    """

    def __init__(
        self, model: str, running: Callable[[], int], waiting: Callable[[], int], restarts: Callable[[], int]
    ) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self._mean = 1.0
        self._next: asyncio.Future[bytes] | None = None  # the page that callers wait for
        self._next_at = 0.0  # earliest time to make it
        gauge, count, spread = (partial(self._series, kind) for kind in (Gauge, Counter, Histogram))
        gauge("vllm:num_requests_running", "Requests whose text is being written.").set_function(running)
        gauge("vllm:num_requests_waiting", "Requests that wait for their turn.").set_function(waiting)
        gauge("pearl:draft_restarts", "Drafts that were lost and started again.").set_function(restarts)
        self._prompt = count("vllm:prompt_tokens", "Prompt tokens of texts that were begun.")
        self._made = count("vllm:generation_tokens", "Tokens generated.")
        self._drafted = count("vllm:spec_decode_num_draft_tokens", "Draft tokens that the target judged" + _ENDED)
        self._accepted = count("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted" + _ENDED)
        self._runs = count("pearl:runs", "Accepted runs that a correction ended" + _ENDED)
        self._lost = count("pearl:texts_with_draft_lost", "Texts during which the draft was lost.")
        about = "Texts by why they ended; abort: the client went away."
        self._ended = count("vllm:request_success", about, "finished_reason")
        about = "Tokens generated, by source; accepted draft tokens are `accepted`."
        self._sources = count("pearl:tokens_by_source", about, "source")
        about = "Draft tokens accepted, by their place in a run, from 0" + _ENDED
        self._positions = count("pearl:accepted_tokens_per_position", about, "position")
        self._waits = count("pearl:target_wait_seconds", "Seconds that the target waited, by cause" + _ENDED, "cause")
        self._refused = count("pearl:http_refused", "Requests that were not served, by status code.", "status")
        about = "From a request's arrival to its first token."
        self._first = spread("vllm:time_to_first_token_seconds", about, buckets=_LONG)
        about = "Between two tokens; 0 for tokens of the same step."
        self._between = spread("vllm:inter_token_latency_seconds", about, buckets=_SHORT)
        self._queue = spread("vllm:request_queue_time_seconds", "Waited for a turn.", buckets=_LONG)
        about = "From a request's arrival to the end of its text."
        self._whole = spread("vllm:e2e_request_latency_seconds", about, buckets=_LONG)

    def _series(self, kind: type[Any], name: str, about: str, *label: str, **more: Any) -> Any:
        """This model's series; with a label, a function from the label's value to its series."""
        made = kind(name, about, ["model_name", *label], registry=self._registry, **more)
        return partial(made.labels, self._model) if label else made.labels(self._model)

    async def page(self) -> bytes:
        """All series, no older than this call.

        Making a page blocks the event loop for milliseconds, so concurrent callers share one, and a pause follows.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._make_page())
        return await asyncio.shield(self._next)

    async def _make_page(self) -> bytes:
        await asyncio.sleep(max(0.0, self._next_at - time.monotonic()))
        self._next = None  # later callers get a later page
        began = time.monotonic()
        page = generate_latest(self._registry)
        ended = time.monotonic()
        self._next_at = ended + max(_REST, _RESTS * (ended - began))
        return page

    def refused(self, status: int) -> None:
        self._refused(str(status)).inc()

    def begun(self, prompt_tokens: int, waited: float) -> None:
        """A text has begun after `waited` seconds in the queue."""
        self._prompt.inc(prompt_tokens)
        self._queue.observe(waited)

    def first(self, seconds: float) -> None:
        """The first tokens arrived `seconds` after the request."""
        self._first.observe(seconds)

    def step(self, piece: Piece, gap: float | None) -> None:
        """Tokens arrived `gap` seconds after the previous ones; None: they are the first."""
        self._made.inc(len(piece.tokens))
        for _ in piece.tokens if gap is not None else piece.tokens[1:]:
            self._between.observe(gap or 0.0)
            gap = 0.0

    def ended(self, result: Result, seconds: float, turn: float) -> None:
        """A text ended `seconds` after the request arrived, `turn` seconds after it began."""
        complete = result.finish_reason != "cancelled"
        self._ended(finish_reason(result) if complete else "abort").inc()
        for source, count in sources([result]).items():
            self._sources(source).inc(count)
        if not complete:
            return
        self._mean += _WEIGHT * (turn - self._mean)
        self._whole.observe(seconds)
        self._drafted.inc(result.statistics.num_draft_tokens)
        self._accepted.inc(result.statistics.num_accepted_draft_tokens)
        self._lost.inc(result.statistics.draft_lost)
        for run, count in result.statistics.run_histogram.items():
            self._runs.inc(count)
            for position in range(int(run)):
                place = str(position) if position < _POSITIONS else f"{_POSITIONS} and more"
                self._positions(place).inc(count)
        for cause, waited in result.statistics.target_wait_seconds.items():
            self._waits(cause).inc(max(0.0, waited))

    @property
    def retry_after(self) -> int:
        """The moving average of seconds per text, from 1 to 60."""
        return min(60, max(1, math.ceil(self._mean)))
