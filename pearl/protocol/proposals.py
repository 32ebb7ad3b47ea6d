"""Proposals: tokens guessed for a text and not judged yet.

A draft model's tokens, n-grams, a datastore's continuations and branches prepared for another outcome are all
proposals; a `ProposalStore` keeps those of one request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.messages import Source


class Proposal(Struct, frozen=True):
    """Tokens guessed for the positions from `start` on.

    Attributes:
        rows: a draft distribution for each token, opaque here; None for each if the rule needs none.
        after: None for the main line; else the outcome (position, token) under which it holds: that this token is
            committed at this position, just before `start`, where the main line has another.
        seen: what the draft's row says of each token and its runners-up; empty where it does not.
    """

    start: int
    tokens: tuple[int, ...]
    rows: tuple[Any, ...] = ()
    source: Source = Source.MODEL
    after: tuple[int, int] | None = None
    seen: tuple[Seen, ...] = ()

    def __post_init__(self) -> None:
        assert not self.rows or len(self.rows) == len(self.tokens)
        assert self.after is None or self.after[0] + 1 == self.start, (self.after, self.start)

    def followed_by(self, more: Proposal) -> Proposal:
        """This one and the tokens that continue it."""
        return replace(
            self,
            tokens=self.tokens + more.tokens,
            rows=self.rows + more.rows,
            seen=self.seen + more.seen,
        )

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Of each token. The first token of a forward is the model's; later ones come from its lookup."""
        if self.source is Source.MODEL:
            return (Source.MODEL, *[Source.LOOKUP] * (len(self.tokens) - 1))
        return (self.source,) * len(self.tokens)


class _Token(NamedTuple):
    """A token of the main line: its draft distribution, who guessed it, what its row says of it."""

    row: Any
    source: Source
    seen: Seen | None


class ProposalStore:
    """The proposals of one request: the main line, which follows the prefix, and branches for other outcomes."""

    def __init__(self) -> None:
        self._line: list[_Token] = []
        self.branches: dict[tuple[int, int], Proposal] = {}  # by outcome

    def add(self, proposal: Proposal) -> None:
        """Take a proposal: the next tokens of the main line, a branch, or the next tokens of a branch."""
        outcome = proposal.after
        if outcome is not None:
            branch = self.branches.get(outcome)
            self.branches[outcome] = branch.followed_by(proposal) if branch else proposal
            return
        nothing = [None] * len(proposal.tokens)
        rows = proposal.rows or nothing
        self._line += map(_Token, rows, proposal.sources, proposal.seen or nothing)

    def seen(self, count: int) -> list[Seen | None]:
        """What the draft says of the first `count` tokens of the main line; None where it says nothing."""
        return [token.seen for token in self._line[:count]]

    def rows(self, count: int) -> tuple[Any, ...]:
        """The draft distributions of the first `count` tokens of the main line."""
        return tuple([token.row for token in self._line[:count]])

    def accept(self, committed: int) -> Source:
        """The main line's first token was committed, as the last of `committed` tokens; return who guessed it.

        Drops branches for other outcomes there.
        """
        if self.branches:
            self.branches = {
                outcome: branch
                for outcome, branch in self.branches.items()
                if outcome[0] >= committed
            }
        return self._line.pop(0).source

    def branch(self, position: int, token: int) -> Proposal | None:
        """The branch that holds where `token` is committed at `position`, as a proposal of the main line."""
        branch = self.branches.get((position, token))
        return branch and replace(branch, after=None)

    def clear(self) -> None:
        """Drop all of them."""
        self._line.clear()
        self.branches.clear()
