"""The statistics of a request, computed from the target's counters and the times of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import ceil, sqrt
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from pearl.protocol.request import Counts, Tally
from pearl.protocol.speeds import Speeds
from pearl.spec.methods import METHODS

ESTIMATED = "estimated"  # a value of `Statistics.speedup_basis`
MOST_CORE_WAIT = (
    0.05  # a reply that waited for cores for a larger share of its time reports no speedup
)
_LEAST_FORWARDS = 4  # least number of forwards of one token for an estimate of the speedup


@dataclass
class Statistics(Tally):
    """The statistics of one request. Only committed tokens count.

    A name that vLLM also uses has the same meaning as in vLLM. A run is a sequence of accepted
    draft tokens, up to the correction or bonus token that ends it. A step is a target forward after
    the prefill.

    Attributes:
        num_prompt_tokens: number of tokens in the prompt.
        num_generated_tokens: number of generated tokens, an EOS included.
        draft_acceptance_rate: accepted / drafted tokens, as in vLLM. Drafted tokens that were
            discarded after an earlier rejection count too.
        acceptance_rate: accepted / judged draft tokens, the alpha of the papers.
        mean_run_length: (accepted draft tokens + runs) / runs, so that the token that ends a run
            counts. In theory this is 1 / (1 - alpha). A run may last over many steps, so this
            is not vLLM's mean acceptance length; `tokens_per_step` is.
        expected_rejections: sum over the judged positions of the probability that the token is
            rejected. For rule ratio this probability is the total variation distance between the
            draft's and the target's distribution. None if the rule gives no such probabilities.
        expected_rejections_sd: expected standard deviation of `num_rejections` around that sum.
        bias: sum over the judged positions of the total variation distance between the distribution
            of committed tokens and the target's; 0 for an exact rule. The mean of this sum over
            texts bounds the distance between the distributions of whole texts.
        tokens_per_step: committed tokens / steps. The token that the prefill gave does not count,
            so this is 1 for method ar.
        queue_seconds: seconds from the submission to the start of the prefill.
        seconds: seconds from the submission to the last commit.
        seconds_to_first_token: seconds from the submission to the first commit (TTFT).
        itl_p50, itl_p99: quantiles of the inter-token latency: the seconds between the commits of
            two successive tokens, which are 0 if one step committed both.
        tokens_per_second: tokens after the first commit / seconds after the first commit; 1 / TPOT.
        target_wait_seconds: seconds that the target waited, by cause.
        draft_wait_seconds: seconds that the draft waited for verdicts, as reported with its last
            tokens.
        speedup: how many times as fast this reply was as it would have been with the target alone.
            The figure comes from measurements during this reply. None if nothing was guessed
            (method ar), or if there are too few measurements. Also None if the measurements were
            disturbed: other requests ran at the same time, or `core_wait` exceeds `MOST_CORE_WAIT`.
        speedup_basis: how `speedup` was found; empty if `speedup` is None. If method auto has
            compared its best method in this reply with a method without a draft, this is the name
            of the method without a draft, such as "ngram". Otherwise this is `ESTIMATED`, and
            `speedup` is tokens_per_second times the mean seconds of this reply's forwards of one
            token.
        core_wait: how long a computing thread of the target was ready to run but had no core, as a
            share of the time since the prefill began. If there are several computing threads, this
            is the largest share.
        t_draft: running estimate of the seconds of a draft forward.
        t_target: running estimates of the seconds of a target forward, by number of fed tokens.
        t_target_spread: like `t_target`, while the target computes on the draft's cores too.
        speed_ratio: t_target(1) / t_draft.
        window: the last window length c; 0 if there was no draft.
        draft_lost: whether the draft was lost during the request.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    draft_acceptance_rate: float | None = None
    acceptance_rate: float | None = None
    mean_run_length: float | None = None
    expected_rejections: float | None = None
    expected_rejections_sd: float | None = None
    bias: float | None = None
    tokens_per_step: float | None = None
    queue_seconds: float = 0.0
    seconds: float = 0.0
    seconds_to_first_token: float = 0.0
    itl_p50: float | None = None
    itl_p99: float | None = None
    tokens_per_second: float | None = None
    target_wait_seconds: dict[str, float] = field(default_factory=dict)
    draft_wait_seconds: float = 0.0
    speedup: float | None = None
    speedup_basis: str = ""
    core_wait: float = 0.0
    t_draft: float = 0.0
    t_target: dict[int, float] = field(default_factory=dict)
    t_target_spread: dict[int, float] = field(default_factory=dict)
    speed_ratio: float = 0.0
    window: int = 0
    draft_lost: bool = False

    @property
    def late_seconds(self) -> float:
        """Seconds from the first to the last commit."""
        return max(0.0, self.seconds - self.seconds_to_first_token)

    @property
    def late_tokens(self) -> int:
        """Number of tokens committed after the first commit."""
        return round((self.tokens_per_second or 0.0) * self.late_seconds)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> Statistics:
        """Decode statistics. Unknown fields are ignored, because the target may be newer."""
        return msgspec.json.decode(text, type=Statistics)


@dataclass
class Sums:
    """Sums and rates over the statistics of several texts.

    Rates divide sums over all texts; a rate is None if its divisor is 0.
    """

    texts: list[Statistics] = field(default_factory=list, kw_only=True)

    def total(self, name: str) -> Any:
        """Return the sum of an attribute of `Statistics` over all texts."""
        return sum(map(attrgetter(name), self.texts))

    @property
    def rate(self) -> float | None:
        """Tokens per second after each text's first commit."""
        return _ratio(self.total("late_tokens"), self.total("late_seconds"))

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(
            self.total("num_accepted_draft_tokens"), self.total("num_judged_draft_tokens")
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Committed tokens per step, see `Statistics.tokens_per_step`."""
        tokens = self.total("num_generated_tokens") - self.total("num_prefill_tokens")
        return _ratio(tokens, self.total("steps"))

    @property
    def accepted_per_run(self) -> float | None:
        """Accepted draft tokens / runs.

        The accepted tokens of a run that a text's end cuts off count too. Without them the mean
        would be too small, because long runs are the ones that are cut off.
        """
        return _ratio(self.total("num_accepted_draft_tokens"), self.total("num_runs"))

    @property
    def mean_run_length(self) -> float | None:
        """Mean number of committed tokens per run, including the correction or bonus at its end."""
        accepted = self.accepted_per_run
        if accepted is None:
            return None
        return 1 + accepted


@dataclass(frozen=True)
class Figure:
    """A figure of a request's statistics, as the summary and the chat print it.

    Attributes:
        name: what is printed next to the value.
        value: function that returns the figure's value, or None if there is none.
        form: format string of the value.
        is_brief: whether the status line below a chat reply shows the figure.
        remark: function that returns a remark to print in brackets, or "" for none.
    """

    name: str
    value: Callable[[Statistics], Any]
    form: str
    is_brief: bool = False
    remark: Callable[[Statistics], str] = lambda s: ""

    def text(self, s: Statistics) -> str | None:
        """Return the value as text; None if there is no value."""
        value = self.value(s)
        if value is None:
            return None
        return self.form.format(value)


def _waited(s: Statistics) -> float:
    return sum(seconds for cause, seconds in s.target_wait_seconds.items() if cause != "idle")


def _share(s: Statistics, seconds: float) -> float | None:
    return min(1.0, seconds / s.seconds) if s.seconds else None


def _milliseconds(seconds: float | None) -> float | None:
    return seconds and 1e3 * seconds


def _siblings(s: Statistics) -> str | None:
    if not s.num_siblings:
        return None
    return f"{s.guessed_by_source.get('runner-up', 0)} of {s.num_siblings}"


def _methods(s: Statistics) -> str:
    return ", ".join(f"{method} {count}" for method, count in s.ways.items())


def _draft_waited(s: Statistics) -> float | None:
    if not s.num_draft_tokens:
        return None
    return _share(s, s.draft_wait_seconds)


def _basis(s: Statistics) -> str:
    if s.speedup_basis in ("", ESTIMATED):
        return s.speedup_basis
    return f"compared with {s.speedup_basis}"


FIGURES = (
    Figure("tokens/s", attrgetter("tokens_per_second"), "{:.1f}", True),
    Figure("tokens a step", attrgetter("tokens_per_step"), "{:.2f}", True),
    Figure("times the target alone", attrgetter("speedup"), "about {:.2f}", True, _basis),
    Figure("first token", attrgetter("seconds_to_first_token"), "{:.2f} s"),
    Figure("of it in the queue", attrgetter("queue_seconds"), "{:.2f} s"),
    Figure(
        "next tokens (TPOT)",
        lambda s: s.tokens_per_second and 1e3 / s.tokens_per_second,
        "{:.1f} ms",
    ),
    Figure("ITL p50", lambda s: _milliseconds(s.itl_p50), "{:.0f} ms"),
    Figure("ITL p99", lambda s: _milliseconds(s.itl_p99), "{:.0f} ms"),
    Figure("accepted of judged", attrgetter("acceptance_rate"), "{:.0%}"),
    Figure("accepted of drafted", attrgetter("draft_acceptance_rate"), "{:.0%}"),
    Figure("tokens per run", attrgetter("mean_run_length"), "{:.1f}"),
    Figure("guessed", lambda s: s.provenance.get("guessed"), "{} tokens"),
    Figure("runners-up", _siblings, "{} fed"),
    Figure("waited for a core", lambda s: s.core_wait or None, "{:.0%}"),
    Figure("settled on", lambda s: s.settled or None, "{}"),
    Figure("ways", lambda s: _methods(s) or None, "{}"),
    Figure("window c", lambda s: s.window or None, "{}"),
    Figure("target waited", lambda s: _share(s, _waited(s)), "{:.0%}"),
    Figure("draft waited", _draft_waited, "{:.0%}"),
)


def brief(s: Statistics) -> str:
    """Return the status line of a reply, such as "64 tokens · 20.0 tokens/s · 2.50 tokens a step".

    The line also shows the speedup over the target alone, if there is one. If method auto settled
    on a method without a draft, the line names that method.
    """
    parts = [f"{s.num_generated_tokens} tokens"]
    for figure in FIGURES:
        text = figure.text(s)
        if figure.is_brief and text is not None:
            parts.append(f"{text} {figure.name}")
            if figure.remark(s):
                parts[-1] += f" ({figure.remark(s)})"
    if s.settled and not METHODS[s.settled].drafts:
        parts.append(f"auto settled on the target alone ({s.settled})")
    return " · ".join(parts)


@dataclass
class Stopwatch:
    """The times of a request's events, in seconds of one monotonic clock.

    Attributes:
        submitted: when the request arrived.
        begun: when work on the request began.
        first: when the first tokens were committed; None before.
        last: when tokens were last committed.
        generated: number of committed tokens.
        waits: seconds of all waits that have ended, by cause.
        gaps: (seconds since the previous commit, number of tokens) of each commit but the first.
        draft_waited: see `Statistics.draft_wait_seconds`.
        draft_lost: whether the draft was lost.
        waiting: (cause, start) of the current wait; None if the request does not wait.
        core_wait: see `Statistics.core_wait`.
    """

    submitted: float = 0.0
    begun: float = 0.0
    first: float | None = None
    last: float = 0.0
    generated: int = 0
    waits: dict[str, float] = field(default_factory=dict)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    draft_waited: float = 0.0
    draft_lost: bool = False
    waiting: tuple[str, float] | None = None
    core_wait: float = 0.0

    def committed(self, tokens: int, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append((now - self.last, tokens))
        self.last = now
        self.generated += tokens

    def wait(self, cause: str, now: float) -> None:
        """Record that a wait begins at `now`, unless the request waits already."""
        self.waiting = self.waiting or (cause, now)

    def resume(self, now: float) -> None:
        """Record that the current wait, if there is one, ends at `now`."""
        if self.waiting is not None:
            cause, since = self.waiting
            self.waits[cause] = self.waits.get(cause, 0.0) + (now - since)
            self.waiting = None

    def token_latency(self, share: float) -> float | None:
        """Return the inter-token latency at quantile `share`, in seconds; None if there is none.

        This is the smallest latency such that at least `share` of all latencies are no larger.
        The tokens of one commit arrive together, so all of them but the first have a latency of 0.
        """
        latencies = []
        for gap, tokens in self.gaps:
            latencies.append(gap)
            latencies += [0.0] * (tokens - 1)
        if not latencies:
            return None
        latencies.sort()
        return latencies[max(1, ceil(share * len(latencies))) - 1]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first commit / seconds after it; None if there was only one commit."""
        seconds = 0.0
        count = 0
        for gap, tokens in self.gaps:
            seconds += gap
            count += tokens
        return _ratio(count, seconds)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


class Speedup(NamedTuple):
    """The values of `Statistics.speedup` and `speedup_basis`."""

    value: float | None = None
    basis: str = ""


def _speedup(counts: Counts, watch: Stopwatch) -> Speedup:
    if counts.was_shared or watch.core_wait > MOST_CORE_WAIT:
        return Speedup()
    undrafted = []
    for name in counts.compared:
        if not METHODS[name].drafts and not METHODS[name].takes_head:
            undrafted.append(name)
    if undrafted:
        plainest = min(undrafted, key=lambda name: METHODS[name].look_ahead)
        return Speedup(counts.compared[plainest], plainest)
    has_guesses = counts.num_draft_tokens + counts.num_guesses > 0
    if not has_guesses or counts.lone_forwards < _LEAST_FORWARDS or watch.tokens_per_second is None:
        return Speedup()
    return Speedup(watch.tokens_per_second * counts.lone_seconds / counts.lone_forwards, ESTIMATED)


def fold(
    counts: Counts, watch: Stopwatch, speeds: Speeds, prompt_tokens: int, window: int
) -> Statistics:
    """Return the statistics of one finished request."""
    speedup = _speedup(counts, watch)
    tally = {field.name: getattr(counts, field.name) for field in fields(Tally)}
    tally["run_histogram"] = dict(sorted(counts.run_histogram.items()))
    tally["provenance"] = {source: n for source, n in counts.provenance.items() if n}
    statistics = Statistics(
        **tally,
        num_prompt_tokens=prompt_tokens,
        num_generated_tokens=watch.generated,
        draft_acceptance_rate=_ratio(counts.num_accepted_draft_tokens, counts.num_draft_tokens),
        acceptance_rate=_ratio(counts.num_accepted_draft_tokens, counts.num_judged_draft_tokens),
        mean_run_length=_ratio(counts.num_accepted_draft_tokens + counts.num_runs, counts.num_runs),
        tokens_per_step=_ratio(watch.generated - counts.num_prefill_tokens, counts.steps),
        queue_seconds=max(0.0, watch.begun - watch.submitted),
        seconds=max(0.0, watch.last - watch.submitted),
        seconds_to_first_token=max(0.0, (watch.first or watch.begun) - watch.submitted),
        itl_p50=watch.token_latency(0.5),
        itl_p99=watch.token_latency(0.99),
        tokens_per_second=watch.tokens_per_second,
        target_wait_seconds=watch.waits,
        draft_wait_seconds=watch.draft_waited,
        speedup=speedup.value,
        speedup_basis=speedup.basis,
        core_wait=watch.core_wait,
        t_draft=speeds.t_draft,
        t_target=dict(speeds.profile.t_target),
        t_target_spread=dict(speeds.profile.t_elsewhere),
        speed_ratio=speeds.ratio,
        window=window if counts.num_draft_tokens else 0,
        draft_lost=watch.draft_lost or bool(counts.loss),
    )
    if counts.odds is not None:
        statistics.expected_rejections = counts.odds.rejections
        statistics.expected_rejections_sd = sqrt(counts.odds.variance)
        statistics.bias = counts.odds.bias
    return statistics
