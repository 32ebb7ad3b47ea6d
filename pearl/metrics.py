"""What happened, in numbers: the statistics of one request, from the coordinator's counts and a few times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import ceil, sqrt
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from pearl.protocol.messages import Provenance
from pearl.protocol.request import Counts, Tally
from pearl.protocol.speeds import Speeds
from pearl.spec.methods import METHODS

ESTIMATED = "estimated"  # a value of `Statistics.speedup_basis`
MOST_CORE_WAIT = (
    0.05  # share of a reply's time; if it waited for its cores longer than that, it has no speedup
)
_LEAST_FORWARDS = 4  # forwards of one token that an estimate needs


@dataclass
class Statistics(Tally):
    """One request. A name that vLLM has too means the same as in vLLM. Only committed tokens count.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        num_generated_tokens: generated tokens, an EOS included.
        draft_acceptance_rate: accepted / drafted tokens, as in vLLM; tokens discarded after an earlier rejection count
            as drafted.
        acceptance_rate: accepted / judged tokens: the alpha of the papers.
        mean_run_length: committed tokens per run, the correction (or bonus) at its end included: 1 / (1 - alpha) in
            theory. A run may last over many steps, so this is not vLLM's mean acceptance length, which is
            `tokens_per_step`: that includes a step's correction or bonus too.
        expected_rejections: sum over the judged positions of the probability that the token is rejected. For rule ratio
            the probability is the total variation distance between draft and target. None if no judgement had such
            probabilities.
        expected_rejections_sd: expected standard deviation of `num_rejections` around that sum.
        bias: sum over the judged positions of the total variation distance between the target's distribution and the
            one that tokens are committed by. The distance between the distributions of whole texts is at most the mean
            of this sum. 0 for an exact rule.
        tokens_per_step: tokens of steps / steps (forwards after the prefill). Counts accepted, guessed, corrected,
            drawn and bonus tokens, but not the token that the prefill gave. So it is 1 for method ar.
        queue_seconds: from the submission to the start of the prefill, while other requests come first.
        seconds: from the submission to the last commit.
        seconds_to_first_token: TTFT, from the submission.
        itl_p50, itl_p99: quantiles of the inter-token latency: seconds between a token and the token before it; 0 if
            both came with one commit.
        tokens_per_second: of decoding: tokens after the first commit / seconds after it; 1 / TPOT.
        target_wait_seconds: cause -> seconds.
        draft_wait_seconds: seconds that the draft waited for verdicts, as it reported with its last tokens.
        speedup: how many times as fast as the target alone this reply was, by its own measurements. None if nothing was
            guessed (method ar), if the measurements are too few, or if others disturbed them: other requests ran at the
            same time, or `core_wait` exceeds `MOST_CORE_WAIT`.
        speedup_basis: how `speedup` was found; empty without `speedup`. If method auto compared its best way with a way
            without a draft in this reply: that way, such as "ngram". Otherwise `ESTIMATED`: tokens_per_second times the
            mean seconds of this reply's own forwards of one token, on the cores that they had.
        core_wait: share of the time since the prefill began in which a computing thread of the target was ready to run
            but had no core, because other threads had it. The share of the thread that waited longest.
        t_draft: running estimate of a draft forward, seconds.
        t_target: running estimates of a target forward, seconds by number of fed tokens.
        t_target_spread: as `t_target`, while the target has the draft's cores too.
        speed_ratio: t_target(1) / t_draft.
        window: the last value of c; 0 without a draft.
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
        """Seconds after the first commit."""
        return max(0.0, self.seconds - self.seconds_to_first_token)

    @property
    def late_tokens(self) -> int:
        """Tokens committed in `late_seconds`."""
        return round((self.tokens_per_second or 0.0) * self.late_seconds)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> Statistics:
        """Decode the fields that this version knows: the target that wrote the statistics may be a newer version."""
        return msgspec.json.decode(text, type=Statistics)


@dataclass
class Sums:
    """Sums and rates over the statistics of several texts."""

    texts: list[Statistics] = field(default_factory=list, kw_only=True)

    def total(self, name: str) -> Any:
        """Return the sum of an attribute of `Statistics` over all texts."""
        return sum(map(attrgetter(name), self.texts))

    @property
    def rate(self) -> float | None:
        """Tokens per second, counted after each text's first commit."""
        return _ratio(self.total("late_tokens"), self.total("late_seconds"))

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(
            self.total("num_accepted_draft_tokens"), self.total("num_judged_draft_tokens")
        )

    @property
    def tokens_per_step(self) -> float | None:
        """`Statistics.tokens_per_step` over all texts."""
        tokens = self.total("num_generated_tokens") - self.total("num_prefill_tokens")
        return _ratio(tokens, self.total("steps"))

    @property
    def accepted_per_run(self) -> float | None:
        """Mean number of accepted draft tokens per finished run."""
        accepted = 0
        runs = 0
        for text in self.texts:
            for length, count in text.run_histogram.items():
                accepted += length * count
                runs += count
        return _ratio(accepted, runs)

    @property
    def mean_run_length(self) -> float | None:
        """Mean number of committed tokens per run, its correction or bonus included."""
        accepted = self.accepted_per_run
        if accepted is None:
            return None
        return 1 + accepted


@dataclass(frozen=True)
class Figure:
    """A figure of a request's statistics, as the summary and the chat print it.

    Attributes:
        value: returns the figure's value, None if it has none.
        form: format of the value.
        is_brief: whether the status line below a chat reply shows the figure.
        remark: returns a remark to print in brackets; empty if there is none.
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

    If the reply has a speedup over the target alone, the line shows it. If auto settled on a method without a draft,
    the line names the method.
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
        first: time of the first commit; None before it.
        last: time of the last commit.
        gaps: for each commit but the first, (seconds since the commit before, tokens).
        waiting: (cause, start) of the current wait; None if the request does not wait.
        core_wait: as `Statistics.core_wait`.
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
        """Note that a wait begins at `now`, unless the request waits already."""
        self.waiting = self.waiting or (cause, now)

    def resume(self, now: float) -> None:
        """Note that the wait has ended."""
        if self.waiting is not None:
            cause, since = self.waiting
            self.waits[cause] = self.waits.get(cause, 0.0) + (now - since)
            self.waiting = None

    def token_latency(self, share: float) -> float | None:
        """Return the inter-token latency, seconds, at quantile `share`; None if there are no latencies.

        That is the smallest latency such that at least `share` of all latencies are no larger. Tokens of one commit
        arrive together: all but the first of them have a latency of 0.
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
        """Tokens after the first commit / seconds after it."""
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
    runs = counts.provenance[Provenance.CORRECTED] + counts.provenance[Provenance.BONUS]
    tally = {field.name: getattr(counts, field.name) for field in fields(Tally)}
    tally["run_histogram"] = dict(sorted(counts.run_histogram.items()))
    tally["provenance"] = {source: n for source, n in counts.provenance.items() if n}
    statistics = Statistics(
        **tally,
        num_prompt_tokens=prompt_tokens,
        num_generated_tokens=watch.generated,
        draft_acceptance_rate=_ratio(counts.num_accepted_draft_tokens, counts.num_draft_tokens),
        acceptance_rate=_ratio(counts.num_accepted_draft_tokens, counts.num_judged_draft_tokens),
        mean_run_length=_ratio(counts.num_accepted_draft_tokens + runs, runs),
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
