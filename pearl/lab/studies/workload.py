"""Texts with draft accuracy fixed in advance, position by position, and the totals of one method on them.

So every method, window and delay meets the same luck.  Over several texts the luck is a Latin hypercube (McKay,
Beckman, Conover 1979): each text is i.i.d., and at each position the draft is right in the expected number of texts,
which leaves little noise.
"""

from __future__ import annotations

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
    """One request. `prompt`: number of tokens; `right`: for each token after it, whether the draft's is the same."""

    prompt: int
    right: list[bool]


def independent(acceptance: float, texts: int, tokens: int, seed: int = 0) -> list[TextPlan]:
    """Return texts with i.i.d. acceptance and a prompt of one token."""
    luck = random.Random(seed)
    plans = [TextPlan(1, []) for _ in range(texts)]
    for _ in range(tokens):
        chosen = set(luck.sample(range(texts), int(acceptance * texts + luck.random())))
        for number, plan in enumerate(plans):
            plan.right.append(number in chosen)
    return plans


class _Target:
    """A target that accepts the draft's tokens where the plan says that they are right, whatever they are."""

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
        rows: for each position after the prompt, the features that the policy sees: see `drafting.step.shape_of`.
        policy: ends windows; None: their bound does.
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
    """Decode all texts in turn, in virtual seconds; measured speeds and acceptance carry over.

    `draft`: makes the draft of a text.
    """
    totals = Sums()
    speeds = known_speeds(timing)
    # As published: the target makes no guesses.
    options = decoding.changed(temperature=0.0, **AS_PUBLISHED).resolved()
    for number, text in enumerate(texts):
        submit = Submit(number, (0,) * text.prompt, text.prompt + len(text.right), options)
        jitter = replace(timing, seed=number)
        outcome = simulate(submit, _Target(text), draft(), jitter, speeds=speeds)
        totals.texts.append(outcome.statistics)
    return totals
