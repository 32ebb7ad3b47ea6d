"""The latencies of each request of a trace, by the names of `pearl.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from pearl.trace.chrome import committed
from pearl.trace.reading import Slice, Trace


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
    """`commits`: (time, tokens). `steps`: target forwards after the prefill."""

    whole: Slice
    submitted: float
    commits: list[tuple[float, int]]
    steps: int

    @property
    def gaps(self) -> Iterator[float]:
        """Seconds between each token after the first commit and the token before it."""
        for (before, _), (time, tokens) in zip(self.commits, self.commits[1:], strict=False):
            yield time - before
            yield from [0.0] * (tokens - 1)

    @property
    def late_tokens(self) -> int:
        return sum(tokens for _, tokens in self.commits[1:])

    @property
    def late_seconds(self) -> float:
        return self.commits[-1][0] - self.commits[0][0] if self.commits else 0.0


def latencies(trace: Trace) -> list[Latency]:
    """Of each request, in order of their start."""
    return [_latency([one], one.whole.name.removeprefix("request ")) for one in _requests(trace)]


def latency(trace: Trace) -> Latency:
    """Of all requests together."""
    return _latency(_requests(trace), "all")


def _requests(trace: Trace) -> list[_Request]:
    decisions = [s for s in trace.target if s.name == "decide"]
    submitted = {s.args["event"]["request"]: s.start for s in decisions if s.args["event"]["type"] == "Submit"}
    commits: dict[int, list[tuple[float, int]]] = {}
    for one in decisions:
        for number, provenance in committed(one.args):
            commits.setdefault(number, []).append((one.end, len(provenance)))
    forwards = [s.args for s in trace.target if s.name in ("pre-verify", "post-verify")]
    steps = Counter(
        number
        for args in forwards
        for number in args.get("requests", [args.get("request")])
        if number not in args.get("prompts", ())
    )
    return [
        _Request(
            whole,
            min(whole.start, submitted.get(whole.args.get("request"), whole.start)),
            commits.get(whole.args.get("request", -1), []),
            steps[whole.args.get("request")],
        )
        for whole in trace.requests
    ]


def _latency(requests: Sequence[_Request], name: str) -> Latency:
    gaps = sorted(gap for one in requests for gap in one.gaps)
    firsts = sorted(one.commits[0][0] - one.submitted for one in requests if one.commits)
    tokens = sum(count for one in requests for _, count in one.commits)
    late = sum(one.late_seconds for one in requests)
    steps = sum(one.steps for one in requests)
    return Latency(
        request=name,
        method=", ".join(dict.fromkeys(one.whole.args.get("options", {}).get("method", "?") for one in requests)),
        num_prompt_tokens=sum(one.whole.args.get("prompt_tokens", 0) for one in requests),
        num_generated_tokens=tokens,
        queue_seconds=_quantile(sorted(one.whole.start - one.submitted for one in requests), 0.5) or 0.0,
        seconds_to_first_token=_quantile(firsts, 0.5),
        itl_p50=_quantile(gaps, 0.5),
        itl_p99=_quantile(gaps, 0.99),
        tokens_per_second=sum(one.late_tokens for one in requests) / late if late else None,
        tokens_per_step=tokens / steps if steps else None,
    )


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed, as `Stopwatch.token_latency`."""
    return ordered[max(1, ceil(share * len(ordered))) - 1] if ordered else None
