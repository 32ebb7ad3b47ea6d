"""Bugs that a test plants into the workers of its engines (see `tests.warm`).

Every bug changes texts, except `LAW`, which changes the distribution of texts.
"""

from collections.abc import Callable
from typing import Any

from pearl.decoding.rules import Proposed, ratio
from pearl.decoding.rules.direct import DirectTarget
from pearl.decoding.shaping import Shaper
from pearl.execution.target import TargetExecutor
from pearl.models import feeds
from pearl.models.cpu import runner as cpu_runner
from pearl.models.forward.runner import ForwardRunner
from pearl.models.forward.slots import Slots
from pearl.protocol.events import Judged
from pearl.protocol.messages import FinishReason
from pearl.protocol.request import Request
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import ForwardTimes
from pearl.text.grammar import Guide
from tests.replace import replace

LAW = "a correction from the target, not the residual"


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that replaces `owner.name` by `make(owner.name)`."""
    return lambda: setattr(owner, name, make(getattr(owner, name)))


def restart(plain: Any) -> Any:
    def one_too_long(self: TokenSequence, prefix: Any) -> None:
        plain(self, prefix)
        self.fed = min(self.fed + 1, self.cached, len(prefix) - 1)

    return one_too_long


def rollback(plain: Any) -> Any:
    def one_too_many(self: Slots, length: int, slot: int) -> None:
        if 0 < length < self.lengths[slot]:
            self.keys[slot, :, :, length - 1].zero_()
        plain(self, length, slot)

    return one_too_many


def parent_rows(plain: Any) -> Any:
    def sees_a_sibling(parents: Any, first: int) -> Any:
        found = plain(parents, first)
        for node, parent in enumerate(parents):
            others = [i for i, one in enumerate(parents) if one == parent >= 0 and i != node]
            found[node] = first + others[-1] if others else found[node]
        return found

    return sees_a_sibling


def keep(plain: Any) -> Any:
    def first_rows(self: Slots, path: Any, slot: int) -> None:
        tree = self._trees[slot]
        assert tree is not None
        if tree.rows is not None:
            rows = [*tree.rows]
            for at, node in enumerate(path):
                rows[node] = tree.rows[at]
            self._trees[slot] = replace(tree, rows=rows)
        plain(self, path, slot)

    return first_rows


def lay_out(plain: Any) -> Any:
    def too_far(*given: Any) -> Any:
        layout = plain(*given)
        parents = layout.table[:, 3].tolist()
        for row, parent in enumerate(parents):
            if parent >= 0 and parents.index(parent) != row:
                layout.table[row, 1] += 5
        return layout

    return too_far


def sampled(plain: Any) -> Any:
    return lambda self, sample: plain(
        self, sample if sample.follow else replace(sample, node=max(0, sample.node - 1))
    )


def commit(plain: Any) -> Any:
    def goes_on(self: Request, token: int | None, *more: Any) -> None:
        plain(self, token, *more)
        if token is None and self.ending is FinishReason.EOS:
            self.ending = None

    return goes_on


def hold(plain: Any) -> Any:
    def counts_on(self: Shaper, length: int) -> None:
        written = dict(self._written)
        plain(self, length)
        self._written = written | {
            token: max(n, written.get(token, 0)) for token, n in self._written.items()
        }

    return counts_on


def forward(plain: Any) -> Any:
    def mixed_up(self: ForwardRunner, feeds: Any) -> Any:
        rows = plain(self, feeds)
        return rows[::-1] if len({each.shape for each in rows}) == 1 else rows

    return mixed_up


def judge(plain: Any) -> Any:
    def forgives_the_last(self: DirectTarget, proposed: Proposed) -> Judged:
        judged: Judged = plain(self, proposed)
        if judged.accepted == len(proposed.tokens) - 1:
            return Judged(len(proposed.tokens), None)
        return judged

    return forgives_the_last


def plant(bug: str) -> None:
    """Plant a bug into this process.

    Every forward also seems to take the same time, whatever it is fed, so that trees are fed on any
    machine.
    """
    BUGS[bug]()
    ForwardTimes.seconds = ForwardTimes.hoped = lambda self, fed: 1.0  # type: ignore


BUGS = {
    "a KV prefix one too long on reuse": wrapped(TokenSequence, "restart", restart),
    "a rollback that clears one position too many": wrapped(Slots, "rollback", rollback),
    "a tree's node that sees a sibling, not its parent": wrapped(feeds, "parent_rows", parent_rows),
    "the wrong rows of a tree kept": wrapped(Slots, "keep", keep),
    "positions too far on behind a fork of a tree": wrapped(cpu_runner, "lay_out", lay_out),
    "a bonus token from the row before": wrapped(TargetExecutor, "sample", sampled),
    "an end of text inside of a window passed over": wrapped(Request, "commit", commit),
    "penalties for tokens that were rejected": wrapped(Shaper, "hold", hold),
    "a grammar that is not rolled back": wrapped(Guide, "cut", lambda _: lambda self, length: None),
    "slots mixed up": wrapped(ForwardRunner, "forward", forward),
    "the last token of a window accepted unseen": wrapped(DirectTarget, "judge", judge),
    LAW: wrapped(ratio, "residual", lambda _: lambda target, draft: target),
}
