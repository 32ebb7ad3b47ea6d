"""Metrics of the server for Prometheus.

Series that mean the same as vLLM's have vLLM's names, so that its dashboards show them; others begin with `pearl:`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pearl.engine import Piece, Result
from pearl.metrics import Statistics, Stopwatch
from pearl.server.http import finish_reason, sources

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_POSITIONS = 32  # of an accepted run that have a series of their own
_ENDED = ", of texts that came to their end."


class Series(NamedTuple):
    """A series of measurements as Prometheus shows it.

    Attributes:
        kind: the class of prometheus_client that counts.
        label: the label that the series has besides `model_name`; empty for none.
        buckets: upper bounds of a histogram, in seconds.
    """

    kind: Any
    name: str
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()


_SERIES = {  # by the names that this file uses
    "running": Series(Gauge, "vllm:num_requests_running", "Requests whose text is being written."),
    "waiting": Series(Gauge, "vllm:num_requests_waiting", "Requests that wait for their turn."),
    "restarts": Series(Gauge, "pearl:draft_restarts", "Drafts that were lost and started again."),
    "prompt": Series(Counter, "vllm:prompt_tokens", f"Prompt tokens{_ENDED}"),
    "generated": Series(Counter, "vllm:generation_tokens", "Tokens generated."),
    "drafted": Series(
        Counter, "vllm:spec_decode_num_draft_tokens", f"Draft tokens that the target judged{_ENDED}"
    ),
    "accepted": Series(
        Counter, "vllm:spec_decode_num_accepted_tokens", f"Draft tokens accepted{_ENDED}"
    ),
    "runs": Series(Counter, "pearl:runs", f"Accepted runs that a correction ended{_ENDED}"),
    "lost": Series(
        Counter, "pearl:texts_with_draft_lost", "Texts during which the draft was lost."
    ),
    "ended": Series(
        Counter, "vllm:request_success", "Texts; abort: the client went away.", "finished_reason"
    ),
    "sources": Series(
        Counter,
        "pearl:tokens_by_source",
        "Tokens generated; accepted draft tokens: accepted.",
        "source",
    ),
    "positions": Series(
        Counter,
        "pearl:accepted_tokens_per_position",
        f"By place in a run, from 0{_ENDED}",
        "position",
    ),
    "waits": Series(
        Counter, "pearl:target_wait_seconds", f"Seconds that the target waited{_ENDED}", "cause"
    ),
    "refused": Series(
        Counter, "pearl:http_refused", "Requests that were not served, by status code.", "status"
    ),
    "ttft": Series(
        Histogram,
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        buckets=_LONG,
    ),
    "itl": Series(
        Histogram,
        "vllm:inter_token_latency_seconds",
        "0 for further tokens of the same step.",
        buckets=_SHORT,
    ),
    "queue": Series(
        Histogram, "vllm:request_queue_time_seconds", "Waited for a turn.", buckets=_LONG
    ),
    "latency": Series(
        Histogram,
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to the end of its text.",
        buckets=_LONG,
    ),
}


class ServerMetrics:
    """All series of one server, with the label `model_name`; for the event loop's thread only.

    Args:
        gauges: functions that return the current value of "running", "waiting" and "restarts".
    """

    def __init__(self, model: str, **gauges: Callable[[], int]) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._series: dict[str, Any] = {}  # a function of the label's value, for series with one
        for key, series in _SERIES.items():
            self._series[key] = self._registered(series)
        for key, current in gauges.items():
            self._series[key].set_function(current)

    def _registered(self, series: Series) -> Any:
        labels = ["model_name"]
        options: dict[str, Any] = {"registry": self._registry}
        if series.buckets:
            options["buckets"] = series.buckets
        if series.label:
            labels.append(series.label)
        metric = series.kind(series.name, series.help, labels, **options)
        if series.label:
            return partial(metric.labels, self._model)
        return metric.labels(self._model)

    def page(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return generate_latest(self._registry)

    def refused(self, status: int) -> None:
        """Count a request that was not served."""
        self._series["refused"](str(status)).inc()

    def piece(self, piece: Piece) -> None:
        """Count the tokens of a piece."""
        self._series["generated"].inc(len(piece.tokens))

    def ended(self, result: Result, watch: Stopwatch, arrived: float) -> None:
        """Count a text that has ended. `arrived`: when its request arrived, on the clock of `watch`."""
        series = self._series
        is_complete = result.finish_reason != "cancelled"
        reason = finish_reason(result) if is_complete else "abort"
        series["ended"](reason).inc()
        series["prompt"].inc(len(result.prompt_tokens))
        series["queue"].observe(watch.begun - watch.submitted)
        if watch.first is not None:
            series["ttft"].observe(watch.first - arrived)
        for gap, _ in watch.gaps:
            series["itl"].observe(gap)
        for _ in range(watch.generated - 1 - len(watch.gaps)):  # further tokens of a step
            series["itl"].observe(0.0)
        for source, count in sources([result]).items():
            series["sources"](source).inc(count)
        if is_complete:
            series["latency"].observe(watch.last - arrived)
            self._add_statistics(result.statistics)

    def _add_statistics(self, statistics: Statistics) -> None:
        series = self._series
        series["drafted"].inc(statistics.num_draft_tokens)
        series["accepted"].inc(statistics.num_accepted_draft_tokens)
        series["lost"].inc(statistics.draft_lost)
        for length, count in statistics.run_histogram.items():
            series["runs"].inc(count)
            for index in range(length):
                position = str(index) if index < _POSITIONS else f"{_POSITIONS} and more"
                series["positions"](position).inc(count)
        for cause, seconds in statistics.target_wait_seconds.items():
            series["waits"](cause).inc(max(0.0, seconds))
