"""Target and draft in one process.

They decode one request in virtual time, or several requests in turns without a clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
from scipy.special import chdtrc  # scipy.stats takes a second longer to import

from pearl.config import EngineConfig, RequestOptions, SamplingParams
from pearl.engine.request import submission
from pearl.execution.draft import DraftExecutor
from pearl.execution.early_drafts import DraftThread
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import (
    Outcome,
    Timing,
    VirtualProposer,
    known_speeds,
    paired_executors,
    simulate,
)
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import Feed, ModelRunner
from pearl.models.toy import NextToken, ToyRunner, load_toy
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import Deliver, Draft, DraftJoined, End, Forward, Open, Send, Wait
from pearl.protocol.messages import Committed, Submit
from tests.options import drawn_by
from tests.replace import replace
from tests.wrapped import WrappedRunner

NEVER = 1e-4  # a p-value below this does not come by chance; seeds are fixed, so it either does or does not
FOUR_TO_ONE = Timing(1.0, lambda _: 4.0)
TIMINGS = [
    FOUR_TO_ONE,
    Timing(1.0, lambda n: 2.0 + 0.3 * n, delay=0.7, jitter=0.5, seed=1),
    Timing(1.0, lambda _: 0.5, delay=3.0, jitter=0.9, seed=2),
    Timing(1.0, lambda _: 9.0, delay=0.01, jitter=0.3, seed=3),
]
WARM = drawn_by(1.0, seed=3)
Pair = tuple[NextToken, NextToken]


class Chains(WrappedRunner):
    """A runner that takes no trees, like a runner of the general path."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.capabilities = replace(runner.capabilities, tree_nodes=0)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        assert all(feed.parents is None for feed in feeds)
        return super().forward(feeds)


class Counting(WrappedRunner):
    """A runner that remembers what each forward was fed."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.fed: list[list[Feed]] = []

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        self.fed.append(list(feeds))
        return super().forward(feeds)


def first_order(*tables: torch.Tensor) -> Any:
    """Return a target and a draft whose next token depends on the last token alone.

    `tables`: [vocab, vocab], the distribution after each token, for the target and for the draft.
    """
    return tuple(lambda seen, table=table: table[seen[-1]] for table in tables)


def decoded(
    pair: Pair,
    vocab: int,
    decoding: RequestOptions,
    sampling: RequestOptions = WARM,
    tokens: int = 100,
    timing: Timing = FOUR_TO_ONE,
    prompt: tuple[int, ...] = (0,),
    wrap: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
    **options: Any,
) -> Outcome:
    """Decode one request in virtual time.

    If the proposer `chains`, all is as on a GPU: the draft launches a forward before the last one
    has ended, in a thread of its own, and draws from all rows of a forward at once. The target
    begins to judge before a forward has ended.

    Args:
        wrap: wraps both runners.
        options: arguments of the draft's proposer.
    """
    target, draft = (wrap(ToyRunner(vocab, each)) for each in pair)
    submit = Submit(1, prompt, len(prompt) + tokens, replace(decoding, sampling=sampling))
    proposer = VirtualProposer(draft, vocab, lambda fed: 1.0, **options)
    proposer.model.at_once |= proposer.chains
    executor = DraftExecutor(proposer)
    with (
        closing(DraftThread(executor, lambda: True))
        if proposer.chains
        else nullcontext(executor) as computing
    ):
        return simulate(submit, TargetExecutor(target, launches=proposer.chains), computing, timing)


def emulated(
    config: EngineConfig, decoding: RequestOptions, prompt: Sequence[int], params: SamplingParams
) -> Outcome:
    """Decode a request with an emulated pair in virtual time.

    The result depends only on the models, the seed, the options and the forward times.
    """
    target, draft = (
        load_toy(config.target, "target", config.max_context),
        load_toy(config.draft, "draft"),
    )
    submit = submission(
        1, prompt, target.context, params.overridden_by(decoding), load_tokenizer(config.target)[1]
    )
    timing = Timing(config.draft_pace or 0.0, lambda _: config.target_pace or 0.0)
    return simulate(submit, *paired_executors(target, draft), timing)


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Return the p-value of a chi-square test of counts, one for each cell."""
    cells = zip(observed, expected, strict=True)
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float(chdtrc(len(observed) - 1, statistic))


def likelihood(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of a chi-square test of whole texts.

    All texts that are expected less than five times are one cell.
    """
    total = found.total()
    assert set(found) <= set(expected)
    common = [text for text, chance in expected.items() if chance * total >= 5]
    assert len(common) > 5
    observed, wanted = (
        [float(found[text]) for text in common],
        [expected[text] * total for text in common],
    )
    if (rest := total - sum(observed)) or total - sum(wanted) > 1e-6:
        observed.append(rest)
        wanted.append(total - sum(wanted))
    return chi_square(observed, wanted)


class Turns:
    """Runs both sides in turns.

    Each side handles its events, and makes one forward for all requests that are ready.

    Attributes:
        tokens: the committed tokens, by request.

    Args:
        timing: the forward times by which windows are chosen.
        context: how many tokens the draft's model can hold.
    """

    def __init__(
        self,
        target: TargetExecutor,
        draft: DraftExecutor,
        timing: Timing,
        slots: int,
        context: int = 1 << 20,
    ) -> None:
        piece = target.runner.capabilities.prompt_piece
        self._machines = (
            Coordinator(target, known_speeds(timing), slots, piece),
            Drafter(context, slots, piece),
        )
        self._target, self._draft, self._joined = target, draft, DraftJoined(context)
        self._events: tuple[deque[object], deque[object]] = deque(), deque()
        self._todo: tuple[deque[object], deque[object]] = deque(), deque()
        self._left = 0
        self.tokens: dict[int, list[int]] = {}

    def run(self, submits: Sequence[Submit]) -> dict[int, list[int]]:
        """Serve all requests, which are submitted at once."""
        self._left = len(submits)
        self._events[0].extend([self._joined, *submits])
        while self._left:
            assert any((*self._events, *self._todo)), "both sides wait for ever"
            for side in (0, 1):
                self._turn(side)
        return self.tokens

    def _turn(self, side: int) -> None:
        todo, events, ready = self._todo[side], self._events[side], []
        while todo or events:
            if not todo:
                todo.extend(self._machines[side].handle(events.popleft()))
                continue
            if isinstance(todo[0], Open) and side and ready:  # another request may take their slot
                break
            match todo.popleft():
                case Send(message):
                    self._events[1 - side].append(message)
                case Deliver(Committed(request, _, tokens)):
                    self.tokens.setdefault(request, []).extend(tokens)
                case End():
                    self._left -= 1
                case Deliver() | Wait():
                    pass
                case Forward() | Draft() as command:
                    ready.append(command)
                case command:
                    event = (self._draft if side else self._target).execute(command)
                    if event is not None:
                        todo.extend(self._machines[side].handle(event))
        if ready:
            events.extend(self._draft.draft(ready) if side else self._target.forward(ready))


Table = torch.Tensor  # [vocab, vocab]: the distribution after each token
TARGET = torch.tensor([[32, 16, 16], [8, 40, 16], [2, 30, 32]]) / 64
WAYS = [("pearl", "stream"), ("pearl", "fixed"), ("sd", "fixed")]
DRAFT = torch.tensor([[16, 32, 16], [32, 16, 16], [16, 16, 32]]) / 64


def p_value(texts: list[list[int]], target: Table = TARGET) -> float:
    """Return the p-value of a chi-square test of each token, given the two tokens before it.

    Texts begin after the token 0. A cell is the position in the text (the first three positions are
    distinguished), the two tokens before, and the next token.
    """
    counts: dict[Any, Counter[int]] = {}
    for text in texts:
        for i, token in enumerate(text):
            known = [0, *text[:i]]
            cell = (min(i, 3), *known[-2:])
            counts.setdefault(cell, Counter())[token] += 1
    statistic, freedom = 0.0, 0
    for cell, seen in counts.items():
        n = seen.total()
        probs = [float(p) for p in target[cell[-1]]]
        if n * min(probs) < 5:
            continue
        statistic += sum((seen[token] - n * p) ** 2 / (n * p) for token, p in enumerate(probs))
        freedom += len(probs) - 1
    assert freedom, "too few tokens to say anything"
    return float(chdtrc(freedom, statistic))
