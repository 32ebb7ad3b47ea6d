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
from pearl.protocol.messages import Provenance, Submit
from pearl.protocol.options import RequestOptions, Sampling

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
    """Texts, and the times under which they are decoded.

    Attributes:
        acceptance: the rate, also of positions of which a text does not say whether the draft is right.
        block: this many texts, one after the other, have their luck together; that of blocks is independent.
    """

    timing: Timing
    acceptance: float
    texts: tuple[Text, ...]
    seed: int = 0
    block: int = 1

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    def at(self, **timing: Any) -> Workload:
        """The same texts at other times."""
        return replace(self, timing=replace(self.timing, **timing))

    def part(self, tokens: int) -> Workload:
        """The first texts, of about so many tokens together: enough to choose by."""
        return replace(self, texts=self.texts[: max(1, round(tokens / self.tokens * len(self.texts)))])


def independent(
    timing: Timing, acceptance: float, requests: int, tokens: int, seed: int = 0, block: int | None = None
) -> Workload:
    """Texts with i.i.d. acceptance behind a prompt of one token.

    Args:
        block: texts that have their luck together: a hypercube; default: all.
    """
    luck, rights = random.Random(seed), list[dict[int, bool]]()
    while len(rights) < requests:
        rights += _hypercube(luck, acceptance, min(block or requests, requests - len(rights)), tokens)
    return Workload(timing, acceptance, tuple(Text(1, tokens, right) for right in rights), seed, block or requests)


def _hypercube(luck: random.Random, acceptance: float, texts: int, tokens: int) -> list[dict[int, bool]]:
    """For each text: position -> whether the draft is right there."""
    rights = [dict[int, bool]() for _ in range(texts)]
    for position in range(1, 1 + tokens):
        due = int(acceptance * texts + luck.random())  # texts in which the draft is right here
        chosen = set(luck.sample(range(texts), due))
        for number, right in enumerate(rights):
            right[position] = number in chosen
    return rights


def guessers(decoding: RequestOptions) -> list[str]:
    """What guesses beside the draft."""
    known = {"look-ahead": decoding.look_ahead, "lookup": decoding.draft_lookup, "branches": decoding.branches}
    return [name for name, most in known.items() if most]


@dataclass
class Totals:
    """What came of all requests of a workload, decoded by one method. Times are virtual seconds.

    Attributes:
        tokens, seconds: from a request's first commit on; what came with it (of the prefill) is left out.
        texts: the same of each request.
        steps: target forwards after the prefill.
        runs: accepted tokens of a run that ended in a correction or bonus -> runs.
        foreseen: rejections and bonus tokens for which a branch was there.
        sources: who drafted the accepted tokens -> tokens. guessed: who guessed what became text -> tokens.
        target_waits: cause -> seconds. draft_waits: seconds, for verdicts.
        whole: seconds, prefills included: what the waits are shares of.
        window: c (or gamma) as last used.
    """

    decoding: RequestOptions
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    judged: int = 0
    accepted: int = 0
    corrected: int = 0
    runs: dict[int, int] = field(default_factory=dict)
    foreseen: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    guessed: dict[str, int] = field(default_factory=dict)
    target_waits: dict[str, float] = field(default_factory=dict)
    draft_waits: float = 0.0
    whole: float = 0.0
    window: int = 0
    texts: list[tuple[int, float]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        watch, counts = outcome.watch, outcome.counts
        self.requests += 1
        self.texts.append((watch.generated - watch.in_first, watch.last - (watch.first or 0.0)))
        self.tokens += self.texts[-1][0]
        self.seconds += self.texts[-1][1]
        self.steps += outcome.target_steps
        self.judged += counts.judged
        self.accepted += counts.accepted
        self.corrected += counts.provenance[Provenance.CORRECTED]
        _add(self.runs, counts.runs)
        self.foreseen += counts.foreseen + counts.foreseen_bonuses
        _add(self.sources, {source.value: n for source, n in counts.sources.items()})
        _add(self.guessed, {source.value: n for source, n in counts.guessed.items()})
        _add(self.target_waits, watch.waits)
        self.draft_waits += watch.draft_waited
        self.whole += watch.last
        self.window = outcome.window

    @property
    def name(self) -> str:
        method = self.decoding.method
        if method in ("sd", "ssd"):
            return f"{method}, gamma {self.window}"
        if method == "pearl":
            window = "stream" if self.decoding.window == "stream" else f"fixed({self.window})"
            return " + ".join([f"pearl, {window}", *guessers(self.decoding)])
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
    def foreseen_share(self) -> float | None:
        """Of the rejections and bonus tokens, each of which ends a run."""
        runs = sum(self.runs.values())
        return self.foreseen / runs if runs else None

    @property
    def mean_run_length(self) -> float | None:
        """Committed tokens a run, its correction or bonus included."""
        return None if self.accepted_per_run is None else 1 + self.accepted_per_run

    def as_dict(self) -> dict[str, Any]:
        names = ["name", "tokens_per_second", "tokens_per_step", "acceptance_rate", "mean_run_length", "foreseen_share"]
        return {name: getattr(self, name) for name in names} | asdict(self)


def _add(totals: dict[_Key, _Number], more: Mapping[_Key, _Number]) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0) + value


def _coin_draft(limit: int, seed: int) -> Executor:
    return CoinDraft()


def run(
    workload: Workload,
    decoding: RequestOptions,
    coin: Coin = CoinTarget,
    draft: Callable[[int, int], Executor] = _coin_draft,
) -> Totals:
    """Decodes every text, one after the other; the measured speeds and acceptance outlive each.

    Args:
        draft: makes the draft of a text from its limit and seed.
    """
    totals, speeds = Totals(decoding), known_speeds(workload.timing)
    for number, text in enumerate(workload.texts):
        seed = workload.seed * 1_000_003 + number
        submit = Submit(number, (0,) * text.prompt, text.prompt + text.tokens, decoding.changed(sampling=Sampling()))
        target = coin(workload.acceptance, seed, text.right)
        timing = replace(workload.timing, seed=_MANY + seed)
        totals.add(simulate(submit, target, draft(submit.limit, seed + 1), timing, speeds=speeds))
    return totals
