"""What happened, in numbers: the statistics of one request, folded from the coordinator's counts and a few times."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields

from pearl.protocol.events import Phase
from pearl.protocol.messages import Provenance
from pearl.protocol.request import Counts
from pearl.protocol.window import Speeds


@dataclass(frozen=True)
class Statistics:
    """One request. Names as vLLM's, where it has them; only committed tokens count.

    Attributes:
        num_prompt_tokens, num_generated_tokens: tokens; generated ones include an EOS.
        num_cached_tokens: prompt tokens whose KV was reused from the request before.
        num_draft_tokens: draft tokens that reached the target, judged or not.
        num_judged_draft_tokens: those that were accepted or corrected; the rest was discarded by an earlier rejection.
        num_accepted_draft_tokens: those accepted.
        draft_acceptance_rate: accepted / judged - the alpha of the papers, not accepted / drafted.
        mean_acceptance_length: committed tokens a run, its correction (or bonus) included: 1/(1-alpha) in theory.
        acceptance_histogram: accepted tokens of a finished run -> number of such runs.
        provenance: committed tokens by where they came from.
        target_steps: forwards by phase.
        seconds: from the start of the prefill to the last commit.
        seconds_to_first_token: from the start of the prefill.
        tokens_per_second: of decoding: tokens after the first, over the time after the first.
        target_busy_seconds: in forwards, judging and sampling.
        target_wait_seconds: cause -> seconds.
        draft_wait_seconds: for verdicts, as the draft told with its last tokens.
        t_draft, t_target: running estimates, seconds; t_target by number of fed tokens.
        speed_ratio: t_target(1) / t_draft.
        window: c as last used; 0 without a draft.
        stale, duplicate, resyncs: draft messages dropped, and whole prefixes sent again.
        draft_lost: whether the draft was lost on the way.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_judged_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    draft_acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    acceptance_histogram: dict[str, int] = field(default_factory=dict)
    provenance: dict[str, int] = field(default_factory=dict)
    target_steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_to_first_token: float = 0.0
    tokens_per_second: float | None = None
    target_busy_seconds: float = 0.0
    target_wait_seconds: dict[str, float] = field(default_factory=dict)
    draft_wait_seconds: float = 0.0
    t_draft: float = 0.0
    t_target: dict[str, float] = field(default_factory=dict)
    speed_ratio: float = 0.0
    window: int = 0
    stale: int = 0
    duplicate: int = 0
    resyncs: int = 0
    draft_lost: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Statistics:
        """What this version knows of them: the target that wrote them may be a newer one."""
        values = json.loads(text)
        return Statistics(**{f.name: values[f.name] for f in fields(Statistics) if f.name in values})


@dataclass
class Stopwatch:
    """When what happened to a request, in seconds of one monotonic clock."""

    begun: float = 0.0
    first: float | None = None
    last: float = 0.0
    generated: int = 0
    in_first: int = 0  # tokens that came with the first commit
    busy: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    draft_waited: float = 0.0
    draft_lost: bool = False

    def committed(self, tokens: int, now: float) -> None:
        if self.first is None:
            self.first, self.in_first = now, tokens
        self.last = now
        self.generated += tokens

    def waited(self, cause: str, seconds: float) -> None:
        self.waits[cause] = self.waits.get(cause, 0.0) + seconds

    @property
    def tokens_per_second(self) -> float | None:
        if self.first is None or self.generated <= self.in_first or self.last <= self.first:
            return None
        return (self.generated - self.in_first) / (self.last - self.first)


def fold(counts: Counts, watch: Stopwatch, speeds: Speeds, prompt_tokens: int, window: int) -> Statistics:
    """The statistics of one finished request."""
    runs = sum(counts.provenance[p] for p in (Provenance.CORRECTED, Provenance.BONUS))
    committed_by_runs = counts.accepted + runs
    return Statistics(
        num_prompt_tokens=prompt_tokens,
        num_generated_tokens=watch.generated,
        num_cached_tokens=counts.cached,
        num_draft_tokens=counts.drafted,
        num_judged_draft_tokens=counts.judged,
        num_accepted_draft_tokens=counts.accepted,
        draft_acceptance_rate=counts.accepted / counts.judged if counts.judged else None,
        mean_acceptance_length=committed_by_runs / runs if runs else None,
        acceptance_histogram={str(k): n for k, n in sorted(counts.runs.items())},
        provenance={p.value: n for p, n in counts.provenance.items() if n},
        target_steps={phase.value: counts.steps[phase] for phase in Phase},
        seconds=max(0.0, watch.last - watch.begun),
        seconds_to_first_token=max(0.0, (watch.first or watch.begun) - watch.begun),
        tokens_per_second=watch.tokens_per_second,
        target_busy_seconds=watch.busy,
        target_wait_seconds=watch.waits,
        draft_wait_seconds=watch.draft_waited,
        t_draft=speeds.t_draft,
        t_target={str(n): t for n, t in speeds.measured},
        speed_ratio=speeds.ratio,
        window=window if counts.drafted else 0,
        stale=counts.stale,
        duplicate=counts.duplicate,
        resyncs=counts.resyncs,
        draft_lost=watch.draft_lost,
    )
