"""Both state machines in one thread, with every interleaving in the test's hands.

A `Pair` knows no clock: its `moves` are all that could happen next (a forward ends, a message arrives, a front
submits), and the test picks one.  The scripted executors decode a text that is known beforehand and watch the KV
caches: they fail where a command disagrees with what the cache holds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.drafter import State as DraftState
from pearl.protocol.events import (
    Deliver,
    Draft,
    Drafted,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Forward,
    Forwarded,
    Judge,
    Judged,
    Open,
    Rollback,
    Sample,
    Sampled,
    Send,
    Stalled,
    Wait,
)
from pearl.protocol.messages import Begin, Committed, Decoding, Error, Preview, Provenance, Sampling, Submit, Verdict
from pearl.protocol.request import Counts
from pearl.protocol.request_machine import State
from pearl.protocol.sequence import extend_digest
from pearl.protocol.window import Speeds

PROMPT = (3, 1)
WRONG = 1_000  # what a scripted draft says where it is wrong
STALLS = 3  # so many in a row, and the worker gives the draft up: more would be a deadlock that only time resolves
LOST = 2_000  # what a scripted model says in a context that is not the script's


def script(length: int, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """A text of `length` tokens in all, no two of them alike after the prompt."""
    return (*prompt, *range(10, 10 + length - len(prompt)))


TEXT = script(30)


def submission(text: Sequence[int], method: str = "pearl", prompt: int = len(PROMPT), **settings: Any) -> Submit:
    """Asks for the rest of `text`. `settings`: fields of Decoding or of Submit."""
    ours = {k: v for k, v in settings.items() if k in ("window", "gamma", "rule")}
    theirs = {k: v for k, v in settings.items() if k not in ours}
    fields: dict[str, Any] = {"request": 1, "limit": len(text), "sampling": Sampling()} | theirs
    return Submit(prompt=tuple(text[:prompt]), decoding=Decoding(method, **ours), **fields)


class Executor(Protocol):
    def execute(self, command: object) -> object | None: ...


class Cache:
    """The mirror of a KV cache: tokens instead of keys and values."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def rollback(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens), "a rollback may only shorten"
        del self.tokens[length:]

    def feed(self, start: int, tokens: Sequence[int]) -> None:
        assert len(self.tokens) == start, "the cache does not hold what the command says"
        assert tokens, "a forward of nothing"
        self.tokens += tokens


class ScriptTarget:
    """A target that would write `text`. A row can be used only if the last forward kept it."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = tuple(text)
        self.cache = Cache()
        self.first_row = 0

    def execute(self, command: object) -> object | None:
        match command:
            case Open():
                return None
            case Rollback(length):
                self.cache.rollback(length)
                return None
            case Forward(start=start, tokens=tokens, rows=rows):
                self.cache.feed(start, tokens)
                assert 0 <= rows <= len(tokens)
                self.first_row = len(self.cache.tokens) + 1 - rows
                return Forwarded(request=command.request)
            case Judge(start, tokens):
                for i, token in enumerate(tokens):
                    if token != self._says(start + i):
                        return Judged(i, self._says(start + i), request=command.request)
                return Judged(len(tokens), None, request=command.request)
            case Sample(position):
                return Sampled(self._says(position), request=command.request)
        raise AssertionError(command)

    def _says(self, position: int) -> int:
        assert self.first_row <= position <= len(self.cache.tokens), "no row was kept for this position"
        assert tuple(self.cache.tokens[:position]) == self.text[:position], "the row is of another context"
        return self.text[position]


class ScriptDraft:
    """A draft that writes the same text, but for the positions in `wrong`."""

    def __init__(self, text: Sequence[int], wrong: Collection[int] = ()) -> None:
        self.text = tuple(text)
        self.wrong = frozenset(wrong)
        self.cache = Cache()

    def execute(self, command: object) -> object | None:
        match command:
            case Open():
                return None
            case Rollback(length):
                self.cache.rollback(length)
                return None
            case Draft(start, tokens, budget):
                self.cache.feed(start, tokens)
                return Drafted((self._says(len(self.cache.tokens)),) if budget else ())
        raise AssertionError(command)

    def _says(self, position: int) -> int:
        if tuple(self.cache.tokens) != self.text[:position]:
            return LOST
        return WRONG if position in self.wrong else self.text[position]


class ChokingDraft(ScriptDraft):
    """A draft whose logits are not finite for a position in `chokes`."""

    def __init__(self, text: Sequence[int], wrong: Collection[int] = (), chokes: Collection[int] = ()) -> None:
        super().__init__(text, wrong)
        self.chokes = chokes

    def execute(self, command: object) -> object | None:
        event = super().execute(command)
        if isinstance(event, Drafted) and event.tokens and len(self.cache.tokens) in self.chokes:
            return Drafted(failure="not finite")
        return event


@dataclass
class Result:
    """What the front of one request was told."""

    prompt: int  # tokens
    tokens: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    previews: list[Preview] = field(default_factory=list)
    end: End | None = None

    @property
    def counts(self) -> Counts:
        assert self.end is not None
        return self.end.counts


class Pair:
    """A coordinator and a drafter, two FIFO wires, and at most one computation running on either side.

    Args:
        submits: handed in one after another, each by a move of its own.
        draft: makes the executor of a draft, each time one joins.
        draft_context: None: no draft is there at first.
    """

    def __init__(
        self,
        submits: Iterable[Submit],
        target: Executor,
        draft: Callable[[], Executor],
        draft_context: int | None = 1 << 20,
        speeds: Speeds | None = None,
    ) -> None:
        self.coordinator = Coordinator(speeds)
        self.drafter: Drafter | None = None
        self.target = target
        self.draft: Executor | None = None
        self.new_draft = draft
        self.to_target: deque[object] = deque()
        self.to_draft: deque[object] = deque()
        self.target_answer: object | None = None
        self.draft_answer: object | None = None
        self.submits = deque(submits)
        self.results: dict[int, Result] = {}
        self.log: list[object] = []  # every command of either side
        self.stalls = 0  # since a message arrived
        self.lossy = False  # whether a message was lost
        if draft_context is not None:
            self.join_draft(draft_context)
            self.move("to_target")

    # ---- what can happen ----

    @property
    def moves(self) -> list[str]:
        enabled = {
            "submit": self.submits,
            "to_target": self.to_target,
            "to_draft": self.to_draft and self.drafter,
            "target": self.target_answer,
            "draft": self.draft_answer,
        }
        return [move for move, what in enabled.items() if what] or self._stalled

    @property
    def _stalled(self) -> list[str]:
        """Time passes where nothing else can happen: a draft at rest beats, and a target that waits for it sees.

        Only after a loss: that both wait while nothing was lost is a deadlock, though time would resolve it.
        """
        waits = self.coordinator.state in (State.HELD, State.GATHERING)
        return ["stall"] if self.lossy and waits and self.drafter is not None and self.stalls < STALLS else []

    @property
    def done(self) -> bool:
        return not self.submits and all(result.end for result in self.results.values())

    def move(self, move: str) -> None:
        match move:
            case "submit":
                submit = self.submits.popleft()
                self.results[submit.request] = Result(len(submit.prompt))
                self.tell_target(submit)
            case "to_target":
                self.stalls = 0
                self.tell_target(self.to_target.popleft())
            case "to_draft":
                self.tell_draft(self.to_draft.popleft())
            case "target":
                answer, self.target_answer = self.target_answer, None
                self.tell_target(answer)
            case "draft":
                answer, self.draft_answer = self.draft_answer, None
                self.tell_draft(answer)
            case "stall":
                self.stalls += 1
                self.tell_target(Stalled(request=self.working))
            case _:
                raise AssertionError(move)
        self.check_invariants()

    @property
    def working(self) -> int:
        """The number of the request that is worked on."""
        assert self.coordinator.request is not None
        return self.coordinator.request.request

    def check_invariants(self) -> None:
        """What holds between any two moves (DESIGN section 3)."""
        target = self.coordinator
        for sequence in [target.sequence] + ([self.drafter.sequence] if self.drafter else []):
            assert 0 <= sequence.fed <= sequence.cached, "a rollback only shortens"
            assert sequence.committed <= len(sequence.tokens)
            assert sequence.digest == extend_digest(0, sequence.tokens[: sequence.committed])
        if self.drafter is not None and self.drafter.begun is not None and target.request is not None:
            theirs = self.drafter.begun.request, self.drafter.epoch
            ours = target.request.request, target.epoch
            assert theirs <= ours, "a draft ahead of its target"
            prefix = self.drafter.sequence.tokens[: self.drafter.sequence.committed]
            if theirs[0] == ours[0] and self.drafter.state is not DraftState.LOST:
                assert target.sequence.tokens[: len(prefix)] == prefix, "only what the target committed is final"
                assert len(prefix) <= target.sequence.committed

    def run(self, pick: Callable[[list[str]], str], limit: int = 20_000) -> None:
        """Makes moves until every request has ended. Fails where nothing can move any more: a deadlock."""
        for _ in range(limit):
            if self.done:
                return
            assert self.moves, f"deadlock: target {self.coordinator.state}, draft {self.drafter and self.drafter.state}"
            self.move(pick(self.moves))
        raise AssertionError(f"not done after {limit} moves")

    # ---- the draft's comings and goings ----

    def join_draft(self, context: int = 1 << 20) -> None:
        self.drafter, self.draft = Drafter(context), self.new_draft()
        self.to_draft.clear()
        self.to_target.append(DraftJoined(context))

    def kill_draft(self) -> None:
        """What it has sent still arrives, then the news that it is gone."""
        self.drafter = self.draft = self.draft_answer = None
        self.to_draft.clear()
        self.to_target.append(DraftGone("killed"))

    def fail_target(self) -> None:
        """What it computes gives nothing that can be used."""
        self.target_answer = None
        self.tell_target(Failed("on purpose", request=self.working))

    # ---- carrying out commands ----

    def tell_target(self, event: object) -> None:
        for command in self.coordinator.handle(event):
            self.log.append(command)
            match command:
                case Send(message):
                    if self.drafter:
                        self.to_draft.append(message)
                case Deliver(Committed() as committed):
                    self._committed(committed)
                case Deliver(Preview() as preview):
                    self.results[preview.request].previews.append(preview)
                case End():
                    assert self.results[command.request].end is None, "ended twice"
                    self.results[command.request].end = command
                case Wait():
                    pass
                case _:
                    assert self.target_answer is None, f"{command} while {self.target_answer} is being computed"
                    self.target_answer = self.target.execute(command)

    def _committed(self, message: Committed) -> None:
        result = self.results[message.request]
        assert result.end is None, "committed after the end"
        assert message.start == result.prompt + len(result.tokens), "committed out of order"
        result.tokens += message.tokens
        result.provenance += message.provenance

    def tell_draft(self, event: object) -> None:
        assert self.drafter is not None
        assert self.draft is not None
        for command in self.drafter.handle(event):
            self.log.append(command)
            match command:
                case Send(Error(request, _, why)):
                    self.to_target.append(DraftGone(why, request))  # as the worker
                case Send(message):
                    self.to_target.append(message)
                case Wait():
                    pass
                case Open():  # a Begin does not wait for the forward that it overtakes
                    self.draft.execute(command)
                case _:
                    assert self.draft_answer is None, f"{command} while {self.draft_answer} is being computed"
                    self.draft_answer = self.draft.execute(command)


def at_random(seed: int) -> Callable[[list[str]], str]:
    """A scheduler with whims: each kind of move has a weight of its own, drawn anew now and then."""
    chance = random.Random(seed)
    weights: dict[str, float] = {}

    def pick(moves: list[str]) -> str:
        if not weights or chance.random() < 0.05:
            weights.update(
                {
                    m: chance.choice((0.05, 1, 10))
                    for m in ("submit", "to_target", "to_draft", "target", "draft", "stall")
                }
            )
        return chance.choices(moves, [weights[m] for m in moves])[0]

    return pick


def check_counts(result: Result) -> None:
    """The statistics agree with what was committed, and with themselves."""
    counts = result.counts
    for kind in Provenance:
        assert counts.provenance[kind] == result.provenance.count(kind), kind
    assert sum(counts.provenance.values()) == len(result.tokens)
    assert counts.accepted == counts.provenance[Provenance.ACCEPTED]
    assert counts.judged == counts.accepted + counts.provenance[Provenance.CORRECTED]
    assert counts.judged <= counts.drafted


def make_pair(method: str = "pearl", wrong: tuple[int, ...] = (), **settings: Any) -> Pair:
    submit = submission(TEXT, method, **{"window": "fixed", "gamma": 2, **settings})
    return Pair([submit], ScriptTarget(TEXT), partial(ScriptDraft, TEXT, wrong))


def until(pair: Pair, there: Callable[[Pair], bool], picker: Callable[[list[str]], str] | None = None) -> Pair:
    """Runs a pair up to a point that it must come to."""
    picker = picker or at_random(0)
    for _ in range(2000):
        if there(pair):
            return pair
        pair.move(picker(pair.moves))
    raise AssertionError("never came to this point")


def draft_in(state: DraftState) -> Drafter:
    machine = Drafter(100)
    begin = Begin(1, 0, PROMPT, 3, Sampling(), "ratio", extend_digest(0, PROMPT))
    paths: dict[DraftState, list[object]] = {
        DraftState.IDLE: [],
        DraftState.DRAFTING: [begin],
        DraftState.WAITING: [begin, Drafted((7,))],
        DraftState.LOST: [begin, Drafted((7,)), Verdict(1, 1, 2, (8,), 5, 12345)],
    }
    for step in paths[state]:
        machine.handle(step)
    assert machine.state is state
    return machine
