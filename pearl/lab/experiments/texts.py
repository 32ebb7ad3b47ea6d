"""Recorded texts under the virtual clock: every method on the same texts, with all that guesses beside the draft.

As published a method needs to know of each token only whether the draft is right (`workload`).  Look-ahead, lookup and
branches need the tokens themselves, and the draft's runners-up: there the executors and the proposer of the runtime
decode the texts again, from replayed models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pearl.drafting.datastore import Datastore
from pearl.lab.experiments.workload import Text, Totals, Workload
from pearl.lab.simulate import Timing, known_speeds, paired_executors, simulate
from pearl.models.recorded import RecordedTexts
from pearl.models.replay import ReplayRunner
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions
from pearl.spec.methods import BRANCHES, DRAFT_LOOKUP, LOOK_AHEAD, MAX_WINDOW

_CONTEXT = 1 << 20
RULE = "coupled"  # what was recorded is the target's own draw
NGRAM = RequestOptions("ngram", rule=RULE, look_ahead=LOOK_AHEAD)
PEARL = RequestOptions("pearl", rule=RULE)
ALL = PEARL.changed(look_ahead=LOOK_AHEAD, draft_lookup=DRAFT_LOOKUP, branches=BRANCHES)


def workload(recorded: RecordedTexts, timing: Timing, seed: int = 0) -> Workload:
    """The texts as who asks only whether the draft is right sees them."""
    rights = [text.right for text in recorded.texts]
    texts = [
        Text(len(text.prompt), len(text.answer), dict(enumerate(right, len(text.prompt))))
        for text, right in zip(recorded.texts, rights, strict=True)
    ]
    return Workload(timing, sum(map(sum, rights)) / sum(map(len, rights)), tuple(texts), seed)


def ablations() -> list[RequestOptions]:
    """`pearl` by stream as published, with each of look-ahead, lookup and branches, with two of them, and with all."""
    sizes = ((0, LOOK_AHEAD), (0, DRAFT_LOOKUP), (0, BRANCHES))
    every = sorted(product(*sizes), key=lambda sizes: sum(map(bool, sizes)))
    return [PEARL.changed(look_ahead=ahead, draft_lookup=lookup, branches=more) for ahead, lookup, more in every]


def compare(
    recorded: RecordedTexts, timing: Timing, seed: int = 0, datastore: Datastore | None = None
) -> Iterator[Totals]:
    """Each as it is done: the ablations, `ssd` at its best window, and the target alone with its look-ahead.

    `datastore`: where look-ahead and lookup guess from too.
    """
    for decoding in ablations():
        yield run(recorded, decoding, timing, seed, datastore)
    yield at_best("ssd", recorded, timing, seed)
    yield run(recorded, NGRAM, timing, seed, datastore)


def at_best(method: str, recorded: RecordedTexts, timing: Timing, seed: int = 0) -> Totals:
    """`sd` or `ssd` with its best window: from 1 on, until a longer one is no faster."""
    best: Totals | None = None
    for gamma in range(1, MAX_WINDOW + 1):
        decoding = RequestOptions(method, "fixed", gamma, RULE, branches=BRANCHES if method == "ssd" else 0)
        totals = run(recorded, decoding, timing, seed)
        if best is not None and totals.tokens_per_second <= best.tokens_per_second:
            return best
        best = totals
    assert best is not None
    return best


def run(
    recorded: RecordedTexts, decoding: RequestOptions, timing: Timing, seed: int = 0, datastore: Datastore | None = None
) -> Totals:
    """All texts, one after the other; what is learned outlives each, as it does in a worker."""
    runners = [ReplayRunner(recorded, role, _CONTEXT) for role in ("target", "draft")]
    executors = paired_executors(runners[0], runners[1], datastore, timing.draft)
    totals, speeds = Totals(decoding), known_speeds(timing)
    for number, text in enumerate(recorded.texts, 1):
        for runner in runners:
            for slot in range(runner.capabilities.slots):
                runner.rollback(0, slot)
        end = len(text.prompt) + len(text.answer)
        submit = Submit(number, text.prompt, end, decoding.changed(sampling=recorded.header.sampling(number)))
        outcome = simulate(submit, *executors, replace(timing, seed=seed + number), speeds=speeds)
        assert tuple(outcome.tokens) == text.answer, "whatever is on, the text is the recorded one"
        totals.add(outcome)
    return totals
