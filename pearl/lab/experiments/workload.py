"""A workload: requests for which it is decided in advance where the draft is right, and their totals by one method.

So every method, window and delay meets the same luck.  Over several texts the luck is a Latin hypercube (McKay,
Beckman, Conover 1979): each text is i.i.d., and at each position the draft is right in the expected number of texts,
which leaves little noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pearl.lab.simulate import CoinDraft, CoinTarget, Executor, Timing, known_speeds, simulate
from pearl.lab.theory import sd_best_gamma
from pearl.metrics import Sums
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling

Coin = Callable[[float, int, Mapping[int, bool]], Executor]
_JITTER_SEED = 1 << 32  # added to seeds of jitter, which must differ from seeds of coins


@dataclass(frozen=True)
class Text:
    """One request: `prompt` and `tokens` are counts.

    Attributes:
        right: absolute position -> whether the draft's token there is the committed one.
    """

    prompt: int
    tokens: int
    right: Mapping[int, bool]


@dataclass(frozen=True)
class Workload:
    """Texts, and the times under which they are decoded.

    Attributes:
        acceptance: the acceptance rate, also of positions missing in `Text.right`.
        block: number of successive texts whose luck is drawn together; blocks are independent.
    """

    timing: Timing
    acceptance: float
    texts: tuple[Text, ...]
    seed: int = 0
    block: int = 1

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)


def independent(
    timing: Timing, acceptance: float, requests: int, tokens: int, seed: int = 0, block: int | None = None
) -> Workload:
    """Texts with i.i.d. acceptance and a prompt of one token. `block`: texts of a hypercube; default: all."""
    luck, rights = random.Random(seed), list[dict[int, bool]]()
    while len(rights) < requests:
        rights += _hypercube(luck, acceptance, min(block or requests, requests - len(rights)), tokens)
    return Workload(timing, acceptance, tuple(Text(1, tokens, right) for right in rights), seed, block or requests)


def _hypercube(luck: random.Random, acceptance: float, texts: int, tokens: int) -> list[dict[int, bool]]:
    """For each text: position -> whether the draft is right there."""
    rights = [dict[int, bool]() for _ in range(texts)]
    for position in range(1, 1 + tokens):
        chosen = set(luck.sample(range(texts), int(acceptance * texts + luck.random())))
        for number, right in enumerate(rights):
            right[position] = number in chosen
    return rights


@dataclass
class Totals(Sums):
    """All requests of a workload, decoded by one method. Times are virtual seconds."""

    decoding: RequestOptions

    @property
    def window(self) -> int:
        """c or gamma as last used."""
        return self.texts[-1].window

    @property
    def name(self) -> str:
        method = self.decoding.method
        if method in ("sd", "ssd"):
            return f"{method}, gamma {self.window}"
        if method == "pearl":
            window = "stream" if self.decoding.window == "stream" else f"fixed({self.window})"
            return f"pearl, {window}"
        return method

    @property
    def tokens_per_second(self) -> float:
        return self.rate or 0.0

    @property
    def tokens_per_step(self) -> float:
        return float(self.total("late_tokens") / self.total("steps"))

    def as_dict(self) -> dict[str, Any]:
        names = ["name", "tokens_per_second", "tokens_per_step", "acceptance_rate", "mean_run_length", "window"]
        sums = {"tokens": "late_tokens", "seconds": "late_seconds", "steps": "steps", "whole": "seconds"}
        sums |= {"judged": "num_judged_draft_tokens", "accepted": "num_accepted_draft_tokens"}
        return {name: getattr(self, name) for name in names} | {key: self.total(name) for key, name in sums.items()}


def run(
    workload: Workload, decoding: RequestOptions, coin: Coin = CoinTarget, draft: Callable[[], Executor] = CoinDraft
) -> Totals:
    """Decode all texts in turn; measured speeds and acceptance carry over. `draft`: makes the draft of a text."""
    totals, speeds = Totals(decoding), known_speeds(workload.timing)
    for number, text in enumerate(workload.texts):
        seed = workload.seed * 1_000_003 + number
        submit = Submit(number, (0,) * text.prompt, text.prompt + text.tokens, decoding.changed(sampling=Sampling()))
        target = coin(workload.acceptance, seed, text.right)
        timing = replace(workload.timing, seed=_JITTER_SEED + seed)
        totals.texts.append(simulate(submit, target, draft(), timing, speeds=speeds).statistics)
    return totals


# ---- all methods on one workload ----

AR = RequestOptions("ar")
STREAM = RequestOptions("pearl", "stream")
FIXED = RequestOptions("pearl", "fixed")


def compare(workload: Workload, tell: Callable[[str], None] = lambda what: None) -> list[Totals]:
    """`ar`, `sd` with its best gamma (by the closed form), the ablations and `pearl` with either window, in this order.

    Args:
        tell: called with what is simulated next.
    """
    timing = workload.timing
    gamma = sd_best_gamma(workload.acceptance, timing.t_draft, timing.t_target, timing.delay)
    ablations = RequestOptions("pearl-no-pre-verify"), RequestOptions("pearl-no-post-verify")
    decodings = (AR, RequestOptions("sd", "fixed", gamma), *ablations, STREAM, FIXED)
    done = []
    for number, decoding in enumerate(decodings, 1):
        tell(f"{decoding.method}, window {decoding.window} ({number} of {len(decodings)})")
        done.append(run(workload, decoding))
    return done
