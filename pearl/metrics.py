"""What happened, in numbers: the statistics of one request, folded from the coordinator's counts and a few times."""

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

ESTIMATED = "estimated"  # a basis of `Statistics.speedup`
MOST_CORE_WAIT = (
    0.05  # a share of a reply's time: a reply that waited longer for its cores has no speedup
)
_LEAST_FORWARDS = 4  # of one token: fewer are too few for an estimate


@dataclass
class Statistics(Tally):
    """One request. Names as vLLM's where they mean what vLLM means by them; only committed tokens count.

    Attributes:
        num_prompt_tokens, num_generated_tokens: tokens; generated ones include an EOS.
        draft_acceptance_rate: accepted / drafted, as vLLM's; a token that an earlier rejection discarded counts too.
        acceptance_rate: accepted / judged: the alpha of the papers.
        mean_run_length: committed tokens a run, its correction (or bonus) included: 1 / (1 - alpha) in theory. A run
            may last over many steps, so it is not vLLM's mean acceptance length: that is `tokens_per_step`, which
            includes a step's correction or bonus too.
        expected_rejections: the sum of the chances, at each position judged, that its token is rejected: for rule ratio
            of the total variation distances between draft and target. None where nothing was judged so.
        expected_rejections_sd: the standard deviation of `num_rejections` from that.
        bias: of a rule that is not exact the sum over these positions of the total variation distance between the
            target's distribution and the one that is committed by: the text's own distance is at most its mean. 0 for
            an exact rule.
        tokens_per_step: tokens of steps (forwards after the prefill) over steps: those accepted, guessed, corrected,
            drawn or bonus; without the token that the prefill gave, so it is 1 for method ar.
        queue_seconds: from the submission to the start of the prefill: other requests came first.
        seconds: from the submission to the last commit.
        seconds_to_first_token: TTFT, from the submission.
        itl_p50, itl_p99: inter-token latency, quantiles of the seconds between a token and the one before it; 0 where
            both came with one commit.
        tokens_per_second: of decoding: tokens after the first commit, over the time after it; 1 / TPOT.
        target_wait_seconds: cause -> seconds.
        draft_wait_seconds: seconds that the draft waited for verdicts, as it reported with its last tokens.
        speedup: how many times as fast as the target alone, as far as this reply itself shows. None where nothing was
            guessed (method ar), where it does not show, and where other requests or programs disturbed it: more than
            `MOST_CORE_WAIT`, or other requests at the same time.
        speedup_basis: the way without a draft, "ngram" say, that method auto compared its best way with in this reply;
            or `ESTIMATED`: tokens_per_second times the mean time of this reply's own forwards of one token, on the
            cores that they had; empty: there is no `speedup`.
        core_wait: the share of the time since the prefill began in which a thread that computes for the target was
            ready to run but had no core, because others had it: of the thread that waited longest.
        t_draft, t_target: running estimates, seconds; t_target by number of fed tokens.
        t_target_spread: the same while the target has the draft's cores too.
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
        """Tokens committed in these seconds."""
        return round((self.tokens_per_second or 0.0) * self.late_seconds)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> Statistics:
        """Decode the fields that this version knows: the target that wrote them may be a newer one."""
        return msgspec.json.decode(text, type=Statistics)


@dataclass
class Sums:
    """Sums and rates over the statistics of several texts."""

    texts: list[Statistics] = field(default_factory=list, kw_only=True)

    def total(self, name: str) -> Any:
        """The sum of an attribute of `Statistics`."""
        return sum(map(attrgetter(name), self.texts))

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first commits."""
        return _ratio(self.total("late_tokens"), self.total("late_seconds"))

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(
            self.total("num_accepted_draft_tokens"), self.total("num_judged_draft_tokens")
        )

    @property
    def tokens_per_step(self) -> float | None:
        """As `Statistics.tokens_per_step`."""
        tokens = self.total("num_generated_tokens") - self.total("num_prefill_tokens")
        return _ratio(tokens, self.total("steps"))

    @property
    def accepted_per_run(self) -> float | None:
        """Accepted draft tokens of a finished run, on average."""
        accepted = 0
        runs = 0
        for text in self.texts:
            for length, count in text.run_histogram.items():
                accepted += length * count
                runs += count
        return _ratio(accepted, runs)

    @property
    def mean_run_length(self) -> float | None:
        """Committed tokens per run, its correction or bonus included."""
        accepted = self.accepted_per_run
        if accepted is None:
            return None
        return 1 + accepted


@dataclass(frozen=True)
class Figure:
    """A figure as summary and chat print it.

    Attributes:
        value: its value, None where there is none.
        is_brief: whether the status line below a reply of the chat has it.
        remark: a remark in brackets; empty if there is none.
    """

    name: str
    value: Callable[[Statistics], Any]
    form: str
    is_brief: bool = False
    remark: Callable[[Statistics], str] = lambda s: ""

    def text(self, s: Statistics) -> str | None:
        """The value as text; None if there is no value."""
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
    """The status line of a reply, such as "64 tokens · 20.0 tokens/s · 2.50 tokens a step".

    It goes on with the speedup over the target alone, if the reply shows one, and with the method that auto settled on,
    if that uses no draft.
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
    """When things happened to a request, in seconds of one monotonic clock.

    Attributes:
        submitted: when it arrived.
        begun: when work on it began.
        first, last: its first and its last commit.
        gaps: (seconds since the commit before, tokens) of each commit but the first.
        waiting: what it waits for, and since when; None: it does not wait.
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
        """Note that the request waits from `now` on, unless it waits already."""
        self.waiting = self.waiting or (cause, now)

    def resume(self, now: float) -> None:
        """Note that the wait has ended."""
        if self.waiting is not None:
            cause, since = self.waiting
            self.waits[cause] = self.waits.get(cause, 0.0) + (now - since)
            self.waiting = None

    def token_latency(self, share: float) -> float | None:
        """The smallest inter-token latency, seconds, that at least `share` of all do not exceed; None without any.

        Tokens of one commit arrive together: all but the first of them have a latency of 0.
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
        """Tokens after the first commit over the time after it."""
        seconds = 0.0
        count = 0
        for gap, tokens in self.gaps:
            seconds += gap
            count += tokens
        return _ratio(count, seconds)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


class Speedup(NamedTuple):
    """`Statistics.speedup` and `speedup_basis`."""

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
    """The statistics of one finished request."""
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
