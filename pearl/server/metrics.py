"""Metrics of the server for Prometheus.

Series that mean the same as vLLM's have vLLM's names, so that its dashboards show them; others begin with `pearl:`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pearl.engine import Piece, Result
from pearl.metrics import Stopwatch
from pearl.server.http import finish_reason, sources

_SHORT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
)  # seconds between tokens
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_POSITIONS = 32  # of an accepted run that have a series of their own
_ENDED = ", of texts that came to their end."
_SERIES: dict[str, tuple[type[Any], str, str, str]] = {  # key here -> kind, name, help, label
    "running": (Gauge, "vllm:num_requests_running", "Requests whose text is being written.", ""),
    "waiting": (Gauge, "vllm:num_requests_waiting", "Requests that wait for their turn.", ""),
    "restarts": (Gauge, "pearl:draft_restarts", "Drafts that were lost and started again.", ""),
    "prompt": (Counter, "vllm:prompt_tokens", "Prompt tokens" + _ENDED, ""),
    "made": (Counter, "vllm:generation_tokens", "Tokens generated.", ""),
    "drafted": (
        Counter,
        "vllm:spec_decode_num_draft_tokens",
        "Draft tokens that the target judged" + _ENDED,
        "",
    ),
    "accepted": (
        Counter,
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens accepted" + _ENDED,
        "",
    ),
    "runs": (Counter, "pearl:runs", "Accepted runs that a correction ended" + _ENDED, ""),
    "lost": (Counter, "pearl:texts_with_draft_lost", "Texts during which the draft was lost.", ""),
    "ended": (
        Counter,
        "vllm:request_success",
        "Texts; abort: the client went away.",
        "finished_reason",
    ),
    "sources": (
        Counter,
        "pearl:tokens_by_source",
        "Tokens generated; accepted draft tokens: accepted.",
        "source",
    ),
    "positions": (
        Counter,
        "pearl:accepted_tokens_per_position",
        "By place in a run, from 0" + _ENDED,
        "position",
    ),
    "waits": (
        Counter,
        "pearl:target_wait_seconds",
        "Seconds that the target waited" + _ENDED,
        "cause",
    ),
    "refused": (
        Counter,
        "pearl:http_refused",
        "Requests that were not served, by status code.",
        "status",
    ),
    "first": (
        Histogram,
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        "",
    ),
    "between": (
        Histogram,
        "vllm:inter_token_latency_seconds",
        "0 for further tokens of the same step.",
        "",
    ),
    "queue": (Histogram, "vllm:request_queue_time_seconds", "Waited for a turn.", ""),
    "whole": (
        Histogram,
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to the end of its text.",
        "",
    ),
}


class Figures:
    """All series of one server, with the label `model_name`; for the event loop's thread only.

    Args:
        gauges: what "running", "waiting" and "restarts" are now.
    """

    def __init__(self, model: str, **gauges: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._of: dict[
            str, Any
        ] = {}  # with a label, a function from the label's value to its series
        for key, (kind, name, about, label) in _SERIES.items():
            more = {"buckets": _SHORT if key == "between" else _LONG} if kind is Histogram else {}
            made = kind(
                name,
                about,
                ["model_name", label][: 1 + bool(label)],
                registry=self._registry,
                **more,
            )
            self._of[key] = partial(made.labels, model) if label else made.labels(model)
        for key, now in gauges.items():
            self._of[key].set_function(now)

    def page(self) -> bytes:
        """All series."""
        return generate_latest(self._registry)

    def refused(self, status: int) -> None:
        self._of["refused"](str(status)).inc()

    def piece(self, piece: Piece) -> None:
        self._of["made"].inc(len(piece.tokens))

    def ended(self, result: Result, watch: Stopwatch, arrived: float) -> None:
        """A text ended. `arrived`: when the request did, on the clock of `watch`."""
        complete = result.finish_reason != "cancelled"
        self._of["ended"](finish_reason(result) if complete else "abort").inc()
        self._of["prompt"].inc(len(result.prompt_tokens))
        self._of["queue"].observe(watch.begun - watch.submitted)
        if watch.first is not None:
            self._of["first"].observe(watch.first - arrived)
        for gap, _ in watch.gaps:
            self._of["between"].observe(gap)
        for _ in range(watch.generated - 1 - len(watch.gaps)):  # with others of their step
            self._of["between"].observe(0.0)
        for source, count in sources([result]).items():
            self._of["sources"](source).inc(count)
        if not complete:
            return
        self._of["whole"].observe(watch.last - arrived)
        self._of["drafted"].inc(result.statistics.num_draft_tokens)
        self._of["accepted"].inc(result.statistics.num_accepted_draft_tokens)
        self._of["lost"].inc(result.statistics.draft_lost)
        for run, count in result.statistics.run_histogram.items():
            self._of["runs"].inc(count)
            for position in range(run):
                place = str(position) if position < _POSITIONS else f"{_POSITIONS} and more"
                self._of["positions"](place).inc(count)
        for cause, waited in result.statistics.target_wait_seconds.items():
            self._of["waits"](cause).inc(max(0.0, waited))
