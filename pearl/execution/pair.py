"""Target and draft in one process, which take turns.

Both models use the state machines and executors of the workers, but no other process and no clock.
"""

from collections import deque
from collections.abc import Iterator

from pearl import errors
from pearl.drafting.proposer import ModelProposer
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.models.runner import ModelRunner
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Deliver,
    DraftDropped,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Send,
    Wait,
)
from pearl.protocol.messages import Committed, Error, Submit


def decode(
    submit: Submit, target: ModelRunner, draft: ModelRunner | None = None
) -> Iterator[Committed]:
    """Decode one request; yield messages with the tokens that are committed.

    Both KV caches must be empty. Speeds are learned from this request alone. If the two models are
    on devices of different kinds, the rule must not need draft distributions. If a result of the
    draft cannot be used, the target goes on alone. Raises `ForwardError` if a result of the target
    cannot be used.
    """
    executor = TargetExecutor(target)
    coordinator = Coordinator(executor, piece=target.capabilities.prompt_piece)
    drafter = Drafter(0)
    executors: list[TargetExecutor | DraftExecutor] = [executor]
    events: deque[tuple[int, object]] = deque()  # (0: the target's, 1: the draft's; event)
    if draft is not None:
        drafter = Drafter(draft.context, piece=draft.capabilities.prompt_piece)
        executors.append(DraftExecutor(ModelProposer(draft, target.vocab_size)))
        events.append((0, DraftJoined(draft.context)))
    events.append((0, submit))
    while True:
        actor, event = events.popleft()
        for command in (coordinator, drafter)[actor].handle(event):
            match command:
                case Send(Error(request, _, why)):
                    events.append((0, DraftGone(why, request)))
                case Send(message):
                    events.append((1 - actor, message))
                case Deliver(Committed() as message):
                    yield message
                case End(failure=Failed(reason, kind)):
                    raise getattr(errors, kind)(reason)
                case End():
                    return
                case Deliver() | Wait() | DraftDropped():
                    pass
                case _:
                    answer = executors[actor].execute(command)
                    if answer is not None:
                        events.append((actor, answer))
