"""Metrics of the server for Prometheus.

A series that vLLM has, too, has vLLM's name here, so that dashboards for vLLM show it. The names of
all other series begin with `pearl:`.
"""

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any, Literal

import prometheus_client
from msgspec import Struct, yaml

from pearl.engine import Piece, Result
from pearl.metrics import Statistics, Stopwatch
from pearl.server.http import finish_reason, sources

_POSITIONS = 32  # positions of an accepted run that have a series of their own


class Series(Struct, frozen=True):
    """A series of measurements as Prometheus shows it.

    Attributes:
        kind: the name of the class in prometheus_client.
        label: the label that the series has besides `model_name`; empty if there is none.
        buckets: upper bounds of a histogram, in seconds.
    """

    kind: Literal["Counter", "Gauge", "Histogram"]
    name: str
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()


# Series by the names that this file uses.
_SERIES = yaml.decode((files("pearl.server") / "series.yaml").read_bytes(), type=dict[str, Series])


class ServerMetrics:
    """All series of one server, with the label `model_name`.

    Only the event loop's thread may call the methods.

    Args:
        gauges: functions that return the current value of "running", "waiting" and "restarts".
    """

    def __init__(self, model: str, **gauges: Callable[[], int]) -> None:
        self._model = model
        self._registry = prometheus_client.CollectorRegistry()
        # For a series with a label: a function that takes the label's value.
        self._series = {key: self._registered(series) for key, series in _SERIES.items()}
        for key, current in gauges.items():
            self._series[key].set_function(current)

    def _registered(self, series: Series) -> Any:
        labels = ["model_name"]
        options: dict[str, Any] = {"registry": self._registry}
        if series.buckets:
            options["buckets"] = series.buckets
        if series.label:
            labels.append(series.label)
        metric = getattr(prometheus_client, series.kind)(
            series.name, series.help, labels, **options
        )
        if series.label:
            return partial(metric.labels, self._model)
        return metric.labels(self._model)

    def page(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)

    def refused(self, status: int) -> None:
        """Count a request that was refused with the HTTP code `status`."""
        self._series["refused"](str(status)).inc()

    def piece(self, piece: Piece) -> None:
        """Count the tokens of a piece."""
        self._series["generated"].inc(len(piece.tokens))

    def ended(self, result: Result, watch: Stopwatch, arrived: float) -> None:
        """Count a text that has ended. `arrived`: when the text's request arrived, on the clock of `watch`."""
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
