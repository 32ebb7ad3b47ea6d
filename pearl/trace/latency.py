"""The latencies of each request of a trace, by the names of `pearl.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from pearl.metrics import Stopwatch
from pearl.trace.chrome import committed
from pearl.trace.reading import VERIFICATIONS, Slice, Trace


@dataclass(frozen=True)
class Latency:
    """One request; or several: then medians over them, rates over all their tokens, and quantiles over all their gaps.
    Times are seconds; None where too little was committed.

    Attributes:
        num_generated_tokens: committed tokens, an EOS included.
        queue_seconds: from submission to start.
        seconds_to_first_token: TTFT, from submission.
        itl_p50, itl_p99: quantiles of the time between neighbouring tokens; 0 where both came together.
        tokens_per_second: tokens after the first commit over the time after it: 1 / TPOT.
        tokens_per_step: tokens over target forwards after the prefill.
    """

    request: str
    method: str
    num_prompt_tokens: int
    num_generated_tokens: int
    queue_seconds: float
    seconds_to_first_token: float | None
    itl_p50: float | None
    itl_p99: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None


@dataclass(frozen=True)
class _Request:
    """`steps`: target forwards after the prefill."""

    whole: Slice
    watch: Stopwatch
    steps: int


def latencies(trace: Trace) -> list[Latency]:
    """Of each request, in order of their start."""
    return [_latency([one], one.whole.name.removeprefix("request ")) for one in _requests(trace)]


def latency(trace: Trace) -> Latency:
    """Of all requests together."""
    return _latency(_requests(trace), "all")


def _requests(trace: Trace) -> list[_Request]:
    steps = Counter(
        number
        for one in trace.target
        if one.name in VERIFICATIONS
        for number in one.args.get("requests", [one.args.get("request")])
        if number not in one.args.get("prompts", ())
    )
    found = {}
    for whole in trace.requests:
        number = whole.args.get("request")
        found[number] = _Request(whole, Stopwatch(submitted=whole.start, begun=whole.start), steps[number])
    for one in trace.target:
        if one.name != "decide":
            continue
        event = one.args["event"]
        if event["type"] == "Submit" and event["request"] in found:
            watch = found[event["request"]].watch
            watch.submitted = min(watch.submitted, one.start)
        for number, provenance in committed(one.args):
            if number in found:
                found[number].watch.committed(len(provenance), one.end)
    return list(found.values())


def _latency(requests: Sequence[_Request], name: str) -> Latency:
    watches = [one.watch for one in requests]
    together = Stopwatch(gaps=[gap for watch in watches for gap in watch.gaps])
    firsts = [watch.first - watch.submitted for watch in watches if watch.first is not None]
    tokens = sum(watch.generated for watch in watches)
    steps = sum(one.steps for one in requests)
    return Latency(
        request=name,
        method=", ".join(dict.fromkeys(one.whole.method for one in requests)),
        num_prompt_tokens=sum(one.whole.args.get("prompt_tokens", 0) for one in requests),
        num_generated_tokens=tokens,
        queue_seconds=median_low(watch.begun - watch.submitted for watch in watches),
        seconds_to_first_token=median_low(firsts) if firsts else None,
        itl_p50=together.token_latency(0.5),
        itl_p99=together.token_latency(0.99),
        tokens_per_second=together.tokens_per_second,
        tokens_per_step=tokens / steps if steps else None,
    )
