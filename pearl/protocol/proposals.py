"""Proposals: tokens that were guessed for a text and are not judged yet.

The draft model's tokens are proposals, and so are its branches.  A branch prepares for one token
that the target may commit: instead of the drafted token, or as a bonus token.  A `ProposalStore`
keeps the proposals of one request.
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
        rows: the draft distribution of each token, which this file does not look into. If the rule
            needs none, `rows` is empty or has None for each token.
        source: who guessed the tokens.
        after: None for the main line, which follows the text. For a branch, the outcome (position,
            token) that it was prepared for: the target commits this token at this position, just
            before `start`, where the main line has another token.
        seen: what the draft's distribution says of each token (see `Seen`); empty if unknown.
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
        """Return this proposal, extended by the tokens of `more`, which start at its end."""
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
        """Who guessed each token.

        If the draft model proposed several tokens in one forward, it drew the first token. The
        later tokens are n-gram guesses that the draft model confirmed (`Source.LOOKUP`).
        """
        if self.source is Source.MODEL:
            return (Source.MODEL, *[Source.LOOKUP] * (len(self.tokens) - 1))
        return (self.source,) * len(self.tokens)


class _Token(NamedTuple):
    """A token of the main line, with the fields that `Proposal` has for each token."""

    row: Any
    source: Source
    seen: Seen | None


class ProposalStore:
    """The proposals of one request.

    They are the main line, which follows the committed prefix, and the branches for other outcomes.
    """

    def __init__(self) -> None:
        self._line: list[_Token] = []
        self.branches: dict[tuple[int, int], Proposal] = {}  # by outcome

    def add(self, proposal: Proposal) -> None:
        """Append a proposal to the main line, or to the branch for the outcome `proposal.after`."""
        outcome = proposal.after
        if outcome is not None:
            branch = self.branches.get(outcome)
            self.branches[outcome] = branch.followed_by(proposal) if branch else proposal
            return
        nothing = [None] * len(proposal.tokens)
        rows = proposal.rows or nothing
        self._line += map(_Token, rows, proposal.sources, proposal.seen or nothing)

    def seen(self, count: int) -> list[Seen | None]:
        """Return the `Seen` of the first `count` tokens of the main line; None where unknown."""
        return [token.seen for token in self._line[:count]]

    def rows(self, count: int) -> tuple[Any, ...]:
        """Return the draft distributions of the first `count` tokens of the main line."""
        return tuple([token.row for token in self._line[:count]])

    def accept(self, committed: int) -> Source:
        """Remove the main line's first token, which was accepted; return who guessed it.

        Also drop the branches for positions that are committed now.

        Args:
            committed: number of committed tokens, the accepted one included.
        """
        if self.branches:
            self.branches = {
                outcome: branch
                for outcome, branch in self.branches.items()
                if outcome[0] >= committed
            }
        return self._line.pop(0).source

    def branch(self, position: int, token: int) -> Proposal | None:
        """Return the branch for `token` at `position`; None if there is no such branch.

        Its `after` is None, so that it can be added to the main line.
        """
        branch = self.branches.get((position, token))
        return branch and replace(branch, after=None)

    def clear(self) -> None:
        """Drop all proposals."""
        self._line.clear()
        self.branches.clear()
