"""Ranks that share a model: the leader has the worker's loop, the others repeat its forwards.

Followers never judge and never draw. A forward names the position it starts at, so rollbacks need no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pearl.errors import DraftLost, TargetLost, TransportError
from pearl.models.runner import Capabilities, Feed, ModelRunner, WrappedRunner, check_feeds

if TYPE_CHECKING:
    from pearl.transport.torch_dist import RankGroup

_FORWARD, _KEEP, _FORK = range(3)


class LeadingRunner(WrappedRunner):
    """The leader's `ModelRunner`: wraps its part of the model and has the followers do each forward too.

    `lost`: the error to raise when the ranks are out of step.
    """

    def __init__(
        self, runner: ModelRunner, group: RankGroup, lost: type[TargetLost] | type[DraftLost] = TargetLost
    ) -> None:
        super().__init__(runner)
        self._group, self._lost = group, lost

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, launches=False)  # the followers need the token itself

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """See `ModelRunner.forward`. Raises `lost` for an error that leaves the ranks out of step."""
        feeds = [replace(feed, tokens=[int(token) for token in feed.tokens]) for feed in feeds]
        check_feeds(feeds, self, "a shared model")
        self._group.tell([_FORWARD, *(word for feed in feeds for word in _words(feed, self.length(feed.slot)))])
        try:
            return self._runner.forward(feeds)
        except TransportError:
            raise  # another rank's fault
        except Exception as error:
            cause = str(error).partition("\n")[0]
            raise self._lost(
                f"a forward failed and its ranks are out of step: {type(error).__name__}: {cause}"
            ) from error

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        self._group.tell([_KEEP, slot, *path])
        self._runner.keep(path, slot)

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        length = self.length(slot) if length is None else length
        self._group.tell([_FORK, slot, into, self.length(slot), length, shared])
        self._runner.fork(slot, into, length, shared)


def _words(feed: Feed, start: int) -> list[int]:
    """A feed in numbers: slot, start, rows, is prompt, number of tokens, tokens; then 0, or 1 and the parents."""
    parents = [] if feed.parents is None else [1, *feed.parents]
    return [feed.slot, start, feed.rows, int(feed.prompt), len(feed.tokens), *map(int, feed.tokens), *(parents or [0])]


def _feeds(words: list[int]) -> Iterator[tuple[Feed, int]]:
    """The inverse of `_words`: each feed and where it starts."""
    while words:
        slot, start, rows, prompt, count = words[:5]
        tokens, is_tree, words = words[5 : 5 + count], words[5 + count], words[6 + count :]
        parents, words = (tuple(words[:count]), words[count:]) if is_tree else (None, words)
        yield Feed(tokens, rows, slot, parents, bool(prompt)), start


def dismiss(group: RankGroup) -> None:
    """End the followers' loops."""
    group.tell([])


def follow(runner: ModelRunner, group: RankGroup) -> None:
    """A follower's loop: returns when the leader dismisses it; raises `TransportError` if the leader is gone."""
    while words := group.told():
        match words:
            case [kind, slot, *path] if kind == _KEEP:
                runner.keep(path, slot)
            case [kind, slot, into, held, length, shared] if kind == _FORK:
                runner.rollback(held, slot)
                runner.fork(slot, into, length, shared)
            case [_, *told]:
                feeds = list(_feeds(told))
                for feed, start in feeds:
                    runner.rollback(start, feed.slot)
                runner.forward([feed for feed, _ in feeds])
