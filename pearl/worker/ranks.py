"""Several ranks that share a model: the leader has the worker's loop, the others repeat its forwards.

Followers never judge and never draw.  What they are told of a forward says where it starts: a rollback needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pearl.errors import DraftLost, TargetLost, TransportError
from pearl.models.runner import ModelRunner, Tokens, WrappedRunner, check_room


class Telling(Protocol):
    """What `tell` is given on the leader `told` returns on every follower, in order."""

    def tell(self, words: Sequence[int]) -> None: ...
    def told(self) -> list[int]: ...


class LeadingRunner(WrappedRunner):
    """The leader's `ModelRunner`: wraps its part of the model, and has the followers do each forward too."""

    def __init__(
        self, runner: ModelRunner, group: Telling, lost: type[TargetLost] | type[DraftLost] = TargetLost
    ) -> None:
        """`lost`: what it means that the ranks are out of step."""
        super().__init__(runner)
        self._group, self._lost = group, lost

    @property
    def launches(self) -> bool:
        return False  # the others have to be told which token it is

    def forward(self, tokens: Tokens, rows: int) -> torch.Tensor:
        """See `ModelRunner.forward`. Whatever fails in the midst of it leaves the ranks out of step: `lost`."""
        ids = [int(token) for token in tokens]  # the others have to be told which
        check_room(ids, self.length + len(ids), self.context, self.vocab_size)
        self._group.tell([self.length, rows, *ids])
        try:
            return self._runner.forward(ids, rows)
        except TransportError:
            raise  # another rank's fault
        except Exception as error:
            cause = str(error).partition("\n")[0]
            raise self._lost(
                f"a forward failed and its ranks are out of step: {type(error).__name__}: {cause}"
            ) from error


def dismiss(group: Telling) -> None:
    """Ends the followers' loops."""
    group.tell([])


def follow(runner: ModelRunner, group: Telling) -> None:
    """A follower's loop: returns when the leader dismisses it, raises `TransportError` when it is gone."""
    while words := group.told():
        start, rows, *tokens = words
        runner.rollback(start)
        runner.forward(tokens, rows)
