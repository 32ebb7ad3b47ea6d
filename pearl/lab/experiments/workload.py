"""A workload: requests for which it is decided in advance where the draft is right, and their totals by one method.

So every method, window and delay meets the same luck.  Over several texts the luck is a Latin hypercube (McKay,
Beckman, Conover 1979): each text is i.i.d., and at each position the draft is right in the expected number of texts,
which leaves little noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pearl.lab.simulate import CoinDraft, CoinTarget, Executor, Timing, known_speeds, simulate
from pearl.metrics import Sums
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling

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
    """

    timing: Timing
    acceptance: float
    texts: tuple[Text, ...]
    seed: int = 0


def independent(timing: Timing, acceptance: float, texts: int, tokens: int, seed: int = 0) -> Workload:
    """Texts with i.i.d. acceptance and a prompt of one token."""
    luck, rights = random.Random(seed), [dict[int, bool]() for _ in range(texts)]
    for position in range(1, 1 + tokens):
        chosen = set(luck.sample(range(texts), int(acceptance * texts + luck.random())))
        for number, right in enumerate(rights):
            right[position] = number in chosen
    return Workload(timing, acceptance, tuple(Text(1, tokens, right) for right in rights), seed)


@dataclass
class Totals(Sums):
    """All requests of a workload, decoded by one method. Times are virtual seconds."""

    @property
    def window(self) -> int:
        """c or gamma as last used."""
        return self.texts[-1].window

    @property
    def tokens_per_second(self) -> float:
        return self.rate or 0.0

    @property
    def tokens_per_step(self) -> float:
        return float(self.total("late_tokens") / self.total("steps"))


def run(workload: Workload, decoding: RequestOptions, draft: Callable[[], Executor] = CoinDraft) -> Totals:
    """Decode all texts in turn; measured speeds and acceptance carry over. `draft`: makes the draft of a text."""
    totals, speeds = Totals(), known_speeds(workload.timing)
    for number, text in enumerate(workload.texts):
        seed = workload.seed * 1_000_003 + number
        submit = Submit(number, (0,) * text.prompt, text.prompt + text.tokens, decoding.changed(sampling=Sampling()))
        target = CoinTarget(workload.acceptance, seed, text.right)
        timing = replace(workload.timing, seed=_JITTER_SEED + seed)
        totals.texts.append(simulate(submit, target, draft(), timing, speeds=speeds).statistics)
    return totals
