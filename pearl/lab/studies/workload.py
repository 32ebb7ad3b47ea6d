"""Simulated texts: a text's plan fixes in advance which draft tokens are right.

`decode` decodes the texts in virtual time. Every method, window and delay meets the same right and
wrong tokens. The texts are a Latin hypercube (McKay, Beckman, Conover 1979): within each text
acceptance is i.i.d., and at each position the draft is right in the expected number of texts.
Averages over the texts therefore have little noise.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pearl.config.options import RequestOptions
from pearl.drafting.stops import StopPolicy, StopWindow
from pearl.lab.studies.simulate import Executor, Timing, known_speeds, simulate
from pearl.metrics import Sums
from pearl.protocol.events import Draft, Drafted, Forward, Forwarded, Judge, Judged, Sample, Sampled
from pearl.protocol.messages import Submit
from pearl.spec.methods import AS_PUBLISHED


class TextPlan(NamedTuple):
    """One text to decode.

    Attributes:
        prompt: number of tokens of the prompt.
        right: for each token after the prompt, whether the draft's token is the same.
    """

    prompt: int
    right: list[bool]


def independent(acceptance: float, texts: int, tokens: int, seed: int = 0) -> list[TextPlan]:
    """Return texts of `tokens` tokens with i.i.d. acceptance, after prompts of one token."""
    luck = random.Random(seed)
    plans = [TextPlan(1, []) for _ in range(texts)]
    for _ in range(tokens):
        chosen = set(luck.sample(range(texts), int(acceptance * texts + luck.random())))
        for number, plan in enumerate(plans):
            plan.right.append(number in chosen)
    return plans


class _Target:
    """A target that accepts a draft token if the text's plan says that the draft is right there."""

    def __init__(self, text: TextPlan) -> None:
        self._text = text

    def execute(self, command: object) -> Forwarded | None:
        return Forwarded(request=command.request) if isinstance(command, Forward) else None

    def judge(self, judge: Judge) -> Judged:
        first = judge.start - self._text.prompt
        right = self._text.right[first : first + len(judge.tokens)]
        if False in right:
            return Judged(right.index(False), 1)
        return Judged(len(judge.tokens), None)

    def sample(self, sample: Sample) -> Sampled:
        return Sampled((0,))


class VirtualDraft:
    """Drafts token 0 at every position, without branches; counts its forwards in `calls`.

    Args:
        begin: length of the prompt.
        rows: for each position after the prompt, the features that the policy sees (see
            `drafting.step.shape_of`).
        policy: decides where windows end; if None, they end at their bound.
    """

    def __init__(
        self, begin: int = 0, rows: Sequence[Sequence[float]] = (), policy: StopPolicy | None = None
    ) -> None:
        self._begin = begin
        self._rows = rows
        self._window = None if policy is None else StopWindow(policy, begin)
        self.calls = 0

    def execute(self, command: object) -> Drafted | None:
        if not isinstance(command, Draft):
            return None
        if not command.budget:
            return Drafted(paused=command.hedge > 0, request=command.request)
        self.calls += 1
        paused = False
        if self._window is not None:
            end = command.start + len(command.tokens)
            row = self._rows[min(end - self._begin, len(self._rows) - 1)]
            self._window.see(command.start, command.tokens, drafts=True)
            paused = self._window.stops(end, 0, row)
        return Drafted((0,), paused=paused, request=command.request)


def decode(
    texts: Sequence[TextPlan],
    timing: Timing,
    decoding: RequestOptions,
    draft: Callable[[], Executor] = VirtualDraft,
) -> Sums:
    """Decode the texts one after the other, in virtual time; return the sums of their statistics.

    The estimates of forward times and acceptance are passed on from each text to the next.

    Args:
        draft: makes the draft for a text.
    """
    totals = Sums()
    speeds = known_speeds(timing)
    # As in the paper on PEARL: the target makes no guesses.
    options = decoding.changed(temperature=0.0, **AS_PUBLISHED).resolved()
    for number, text in enumerate(texts):
        submit = Submit(number, (0,) * text.prompt, text.prompt + len(text.right), options)
        jitter = replace(timing, seed=number)
        outcome = simulate(submit, _Target(text), draft(), jitter, speeds=speeds)
        totals.texts.append(outcome.statistics)
    return totals
