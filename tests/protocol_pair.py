"""Both state machines in one thread, in whatever order the test chooses.

A `Pair` knows no clock. Its `moves` are all events that could happen next (a forward ends, a
message arrives, a front submits), and the test picks one. The scripted executors decode a text that
is known beforehand and watch the KV caches: they fail if a command disagrees with what the cache
holds.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.drafter import DrafterState as DraftState
from pearl.protocol.events import (
    Deliver,
    DraftDropped,
    Drafted,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Open,
    Send,
    Wait,
)
from pearl.protocol.messages import (
    Begin,
    Committed,
    Error,
    Preview,
    Provenance,
    Resync,
    Submit,
    Verdict,
)
from pearl.protocol.method_choice import Auto
from pearl.protocol.request import Counts
from pearl.protocol.request_machine import State
from pearl.protocol.sequence import extend_digest
from pearl.protocol.speeds import Speeds
from tests.options import resolved
from tests.scripted import PROMPT, TEXT, Executor, ScriptDraft, ScriptTarget, submission

MOVES = ("submit", "to_target", "to_draft", "target", "draft", "stall")
STALLS = 3  # so many in a row, and the worker gives the draft up: more would be a deadlock that only time resolves


@dataclass
class Result:
    """What the front of one request has been told."""

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
    """A coordinator and a drafter, two FIFO wires, and at most one computation on either side.

    Args:
        submits: requests, which are submitted one after another, each in a move of its own.
        draft: makes the executor of a draft; called each time a draft joins.
        draft_context: the context of the draft; None if there is no draft at first.
    """

    def __init__(
        self,
        submits: Iterable[Submit],
        target: ScriptTarget,
        draft: Callable[[], Executor],
        draft_context: int | None = 1 << 20,
    ) -> None:
        # Where nothing is known yet auto does without a draft, and these texts are too short to try one.
        self.coordinator = Coordinator(target, Speeds(auto=Auto("pearl")))
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
        """The move in which only time passes; empty if it is not possible now.

        It is possible if nothing else can happen. A waiting draft then sends a heartbeat, by which
        a target that waits for the draft sees that both wait. This counts only after a message was
        lost: if both wait while nothing was lost, that is a deadlock, although time would resolve
        it.
        """
        waits = self.coordinator.state in (State.HELD, State.GATHERING)
        return (
            ["stall"]
            if self.lossy and waits and self.drafter is not None and self.stalls < STALLS
            else []
        )

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
                self.stall()
            case _:
                raise AssertionError(move)
        self.check_invariants()

    def stall(self) -> None:
        """Tell the target that both sides wait, because a message was lost."""
        self.tell_target(Resync(self.working, self.coordinator.running[self.working].epoch))

    @property
    def working(self) -> int:
        """The number of the request that is running."""
        (number,) = self.coordinator.running
        return number

    def check_invariants(self) -> None:
        """Check what must hold between any two moves (DESIGN section 3)."""
        running = list(self.coordinator.running.values())
        (text,) = self.coordinator.scheduler.sequences
        draft = self.drafter.machines[0] if self.drafter else None
        for sequence in [text] + ([draft.sequence] if draft else []):
            # What the cache lacks waits in a tree, whose path the next forward begins by keeping.
            waits = sequence is text and any(machine.fed.parents for machine in running)
            assert sequence.fed >= 0
            assert sequence.fed <= sequence.cached or waits, "a rollback only shortens"
            assert sequence.committed <= len(sequence.tokens)
            assert sequence.digest == extend_digest(0, sequence.tokens[: sequence.committed])
        if draft is not None and draft.begun is not None and running:
            theirs = draft.begun.request, draft.epoch
            ours = running[0].request.number, running[0].epoch
            assert theirs <= ours, "a draft ahead of its target"
            prefix = draft.sequence.tokens[: draft.sequence.committed]
            if theirs[0] == ours[0] and draft.state is not DraftState.LOST:
                assert text.tokens[: len(prefix)] == prefix, (
                    "only what the target committed is final"
                )
                assert len(prefix) <= text.committed

    def run(self, pick: Callable[[list[str]], str], limit: int = 20_000) -> None:
        """Make moves until every request has ended. Fails if no move is possible before."""
        for _ in range(limit):
            if self.done:
                return
            assert self.moves, (
                f"deadlock: target {self.coordinator.state}, draft {self.drafter and self.drafter.state}"
            )
            self.move(pick(self.moves))
        raise AssertionError(f"not done after {limit} moves")

    # ---- the draft's comings and goings ----

    def join_draft(self, context: int = 1 << 20) -> None:
        self.drafter, self.draft = Drafter(context), self.new_draft()
        self.to_draft.clear()
        self.to_target.append(DraftJoined(context))

    def kill_draft(self) -> None:
        """Kill the draft. What it has sent still arrives, and then the news that it is gone."""
        self.drafter = self.draft = self.draft_answer = None
        self.to_draft.clear()
        self.to_target.append(DraftGone("killed"))

    def fail_target(self) -> None:
        """Let the target's running computation fail."""
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
                case Wait() | DraftDropped():
                    pass
                case _:
                    assert self.target_answer is None, (
                        f"{command} while {self.target_answer} is being computed"
                    )
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
                    assert self.draft_answer is None, (
                        f"{command} while {self.draft_answer} is being computed"
                    )
                    self.draft_answer = self.draft.execute(command)


def at_random(seed: int) -> Callable[[list[str]], str]:
    """Return a function that picks a random move.

    Each kind of move has a random weight, which changes now and then.
    """
    chance = random.Random(seed)
    weights: dict[str, float] = {}

    def pick(moves: list[str]) -> str:
        if not weights or chance.random() < 0.05:
            weights.update({move: chance.choice((0.05, 1, 10)) for move in MOVES})
        return chance.choices(moves, [weights[m] for m in moves])[0]

    return pick


def check_counts(result: Result, runs_ahead: bool = False) -> None:
    """Check that the statistics agree with what was committed, and with each other.

    `runs_ahead`: whether the target may commit draws of its own before the draft's token for the
    position has come.
    """
    counts = result.counts
    for kind in Provenance:
        assert counts.provenance[kind] == result.provenance.count(kind), kind
    assert sum(counts.provenance.values()) == len(result.tokens)
    assert counts.num_accepted_draft_tokens - counts.late == counts.provenance[Provenance.ACCEPTED]
    wrong = counts.num_judged_draft_tokens - counts.num_accepted_draft_tokens
    corrected = counts.provenance[Provenance.CORRECTED]
    assert wrong == corrected or (
        runs_ahead and wrong > corrected
    )  # drafted wrongly, and committed before that came
    assert counts.num_judged_draft_tokens <= counts.num_draft_tokens


def make_pair(method: str = "pearl", wrong: tuple[int, ...] = (), **settings: Any) -> Pair:
    submit = submission(TEXT, method, **{"window": "fixed", "gamma": 2, **settings})
    return Pair([submit], ScriptTarget(TEXT), partial(ScriptDraft, TEXT, wrong))


def until(
    pair: Pair, there: Callable[[Pair], bool], picker: Callable[[list[str]], str] | None = None
) -> Pair:
    """Make moves until `there` is true of the pair; fail if it does not become true."""
    picker = picker or at_random(0)
    for _ in range(2000):
        if there(pair):
            return pair
        pair.move(picker(pair.moves))
    raise AssertionError("never came to this point")


def draft_in(state: DraftState) -> Drafter:
    machine = Drafter(100)
    begin = Begin(1, 0, PROMPT, 3, extend_digest(0, PROMPT), resolved())
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
