"""Many requests under one virtual clock: which draft tokens are right, what a run of them adds up to.

Whether the draft is right at a position of a text is settled beforehand, so that every method, window and delay meets
the same luck.  Over several texts the luck is a Latin hypercube (McKay, Beckman, Conover 1979): each text by itself is
i.i.d., and at each position the draft is right in the due number of texts.  What is left of the noise is small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from pearl.lab.simulate import CoinDraft, CoinTarget, Executor, Outcome, Timing, known_speeds, simulate
from pearl.protocol.messages import Decoding, Provenance, Sampling, Submit

Coin = Callable[[float, int, Mapping[int, bool]], Executor]
_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)
_MANY = 1 << 32  # seeds of jitter lie apart from seeds of coins


@dataclass(frozen=True)
class Text:
    """One request: `prompt` tokens, then `tokens` to be committed.

    Attributes:
        right: absolute position -> whether the draft's token there agrees with the committed one.
    """

    prompt: int
    tokens: int
    right: Mapping[int, bool]


@dataclass(frozen=True)
class Workload:
    """`acceptance`: the rate, also of positions of which a text does not say whether the draft is right."""

    timing: Timing
    acceptance: float
    texts: tuple[Text, ...]
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    def at(self, **timing: Any) -> Workload:
        """The same texts at other times."""
        return replace(self, timing=replace(self.timing, **timing))

    def part(self, tokens: int) -> Workload:
        """The first texts, of about so many tokens together: enough to choose by."""
        return replace(self, texts=self.texts[: max(1, round(tokens / self.tokens * len(self.texts)))])


def independent(timing: Timing, acceptance: float, requests: int, tokens: int, seed: int = 0) -> Workload:
    """Texts with i.i.d. acceptance behind a prompt of one token."""
    luck, rights = random.Random(seed), [dict[int, bool]() for _ in range(requests)]
    for position in range(1, 1 + tokens):
        due = int(acceptance * requests + luck.random())  # texts in which the draft is right here
        chosen = set(luck.sample(range(requests), due))
        for number, right in enumerate(rights):
            right[position] = number in chosen
    return Workload(timing, acceptance, tuple(Text(1, tokens, right) for right in rights), seed)


@dataclass
class Totals:
    """What came of all requests of a workload, decoded by one method. Times are virtual seconds.

    Attributes:
        tokens, seconds: from a request's first commit on; what came with it (of the prefill) is left out.
        steps: target forwards after the prefill.
        runs: accepted tokens of a run that ended in a correction or bonus -> runs.
        target_waits: cause -> seconds. draft_waits: seconds, for verdicts.
        whole: seconds, prefills included: what the waits are shares of.
        window: c (or gamma) as last used.
    """

    decoding: Decoding
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    judged: int = 0
    accepted: int = 0
    corrected: int = 0
    runs: dict[int, int] = field(default_factory=dict)
    target_waits: dict[str, float] = field(default_factory=dict)
    draft_waits: float = 0.0
    whole: float = 0.0
    window: int = 0

    def add(self, outcome: Outcome) -> None:
        watch, counts = outcome.watch, outcome.counts
        self.requests += 1
        self.tokens += watch.generated - watch.in_first
        self.seconds += watch.last - (watch.first or 0.0)
        self.steps += outcome.target_steps
        self.judged += counts.judged
        self.accepted += counts.accepted
        self.corrected += counts.provenance[Provenance.CORRECTED]
        _add(self.runs, counts.runs)
        _add(self.target_waits, watch.waits)
        self.draft_waits += watch.draft_waited
        self.whole += watch.last
        self.window = outcome.window

    @property
    def name(self) -> str:
        method = self.decoding.method
        if method == "sd":
            return f"sd, gamma {self.window}"
        if method == "pearl":
            return "pearl, stream" if self.decoding.window == "stream" else f"pearl, fixed({self.window})"
        return method

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.judged if self.judged else None

    @property
    def accepted_per_run(self) -> float | None:
        runs = sum(self.runs.values())
        return sum(length * n for length, n in self.runs.items()) / runs if runs else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Committed tokens a run, its correction or bonus included."""
        return None if self.accepted_per_run is None else 1 + self.accepted_per_run

    def as_dict(self) -> dict[str, Any]:
        names = ("name", "tokens_per_second", "tokens_per_step", "acceptance_rate", "mean_acceptance_length")
        return {name: getattr(self, name) for name in names} | asdict(self)


def _add(totals: dict[_Key, _Number], more: Mapping[_Key, _Number]) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0) + value


def run(workload: Workload, decoding: Decoding, coin: Coin = CoinTarget) -> Totals:
    """Decodes every text, one after the other; the measured speeds and acceptance outlive each."""
    totals, speeds = Totals(decoding), known_speeds(workload.timing)
    for number, text in enumerate(workload.texts):
        seed = workload.seed * 1_000_003 + number
        submit = Submit(number, (0,) * text.prompt, text.prompt + text.tokens, Sampling(), decoding)
        target = coin(workload.acceptance, seed, text.right)
        timing = replace(workload.timing, seed=_MANY + seed)
        totals.add(simulate(submit, target, CoinDraft(), timing, speeds=speeds))
    return totals
