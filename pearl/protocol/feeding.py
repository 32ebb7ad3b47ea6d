"""Target forwards of one request: which tokens to feed, which logits (rows) judge which tokens, KV cache upkeep.

Updates the sequence's fed and cached counts, and commits the target's draws.  Sends nothing to the draft.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import accumulate
from operator import mul

from pearl.protocol.draft_view import DraftView
from pearl.protocol.events import (
    Alternative,
    Forward,
    Guess,
    Guessed,
    Judge,
    Keep,
    Phase,
    Rollback,
    Sample,
)
from pearl.protocol.machine import Do
from pearl.protocol.messages import Provenance, Source
from pearl.protocol.request import Request
from pearl.protocol.scheduler import prefill_chunk
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds
from pearl.protocol.window import worthwhile


class FedTokens:
    """The tokens of one forward: a chain of the text, and guesses behind or beside it.

    Args:
        start: position of the first token.
        chain: tokens of the text.
        guessed: guesses behind a text of `length` tokens, of which the first `count` were fed.

    Attributes:
        tokens: chain and guesses.
        parents: as `Forward.parents`; None: each follows the one before it.
        path: indices of the tokens that the text has from `start` on.
    """

    def __init__(
        self, start: int, chain: tuple[int, ...], guessed: Guessed, count: int, length: int
    ) -> None:
        self.start, self.tokens = start, chain + guessed.tokens[:count]
        self._chain, self._sources = len(chain), guessed.sources
        self.path = list(range(len(chain)))
        # A guess's parent is a token of the text, by position, or another guess, numbered from the text's length on.
        above = [
            each - start if each < length else each - length + len(chain)
            for each in guessed.parents[:count]
        ]
        parents = (*range(-1, len(chain) - 1), *above)
        self.parents = None if parents == tuple(range(-1, len(self.tokens) - 1)) else parents
        followed = zip(parents, self.tokens, strict=True) if count else ()
        self._children = {edge: node for node, edge in enumerate(followed)}

    def nodes(self, position: int, count: int) -> tuple[int, ...]:
        """Indices of the tokens whose rows are for `position` and the `count` - 1 positions after it."""
        first = position - 1 - self.start
        return tuple(self.path[first : first + count])

    def guessers(self, position: int, tokens: Sequence[int]) -> list[Source | None]:
        """Who guessed each of `tokens`, which stand from `position` on; None for a token that was no guess."""
        (node,) = self.nodes(position, 1)
        found: list[Source | None] = []
        for token in tokens:
            node = self._children.get((node, token), -2)  # -1 is the first token's parent
            found.append(self._sources[node - self._chain] if node >= self._chain else None)
        return found

    def follow(self, sequence: TokenSequence) -> None:
        """Count unfed tokens of the sequence that are among the guesses as fed."""
        del self.path[max(0, sequence.fed - self.start) :]
        while self.path and sequence.fed < len(sequence.tokens):
            node = self._children.get((self.path[-1], sequence.tokens[sequence.fed]))
            if node is None:
                break
            self.path.append(node)
            sequence.fed += 1


class Feeding:
    """The target forwards of one request.

    Args:
        running: all running requests; if this is the only one, its prompt is fed in larger chunks.
    """

    def __init__(self, request: Request, draft: DraftView, speeds: Speeds, running: Sized) -> None:
        self._request, self._draft, self._speeds, self._running = request, draft, speeds, running
        self._sequence = request.sequence
        self._fed = FedTokens(0, (), Guessed(), 0, 0)

    @property
    def num_fed(self) -> int:
        """Number of tokens in the last forward, guesses included."""
        return len(self._fed.tokens)

    def follow(self) -> None:
        """Mark unfed tokens as fed if the last forward already computed them as guesses."""
        if self._request.looks_ahead:
            self._fed.follow(self._sequence)

    def judge(self, do: Do) -> None:
        """Start judging the pending tokens for which the last forward gave rows."""
        seq, run = self._sequence, self.num_judged
        tokens, nodes = tuple(seq.pending[:run]), self._fed.nodes(seq.committed, run)
        do(
            Judge(
                seq.committed,
                tokens,
                self._request.proposals.rows(run),
                nodes,
                request=self._request.number,
            )
        )

    def sample(self, do: Do) -> None:
        """Start drawing the next token from the target's row, and those after it while the draw was fed as a guess."""
        (node,) = self._fed.nodes(self._sequence.committed, 1)
        # In place of a withheld token comes one token: the draft proposes those behind it.
        follow = self._request.looks_ahead and not self._draft.withholds
        do(Sample(self._sequence.committed, node, follow, request=self._request.number))

    @property
    def num_judged(self) -> int:
        """How many pending tokens the rows of the last forward can judge: for a block rule, a block or none."""
        run = (
            0 if self._request.runs_ahead else min(len(self._sequence.pending), self._num_judgeable)
        )
        if self._request.block == 1 or not run:
            return run
        return self._draft.next_block if run >= self._draft.next_block else 0

    @property
    def _num_judgeable(self) -> int:
        """Number of rows after the prefix that judge draft tokens: all but the bonus row.

        The bonus token is drawn from the target even if a draft token for it has come: the text must not depend on
        timing.
        """
        rows = self._sequence.fed + 1 - self._sequence.committed
        return (
            rows - 1
            if self._request.method.bonus and (rows > 1 or not self._request.is_fresh)
            else rows
        )

    @property
    def row_is_direct(self) -> bool:
        """Whether the next row judges no draft token but is drawn from: for a bonus, or where none will come."""
        has_bonus = self._request.method.bonus and not self._request.is_fresh
        is_withheld = self._draft.withholds and not self._sequence.pending
        return not self._draft.is_drafting or has_bonus or is_withheld

    def guess(self, do: Do) -> None:
        """Start looking for guesses of what may follow the text, or stand in place of what is pending."""
        request, seq, known = self._request, self._sequence, self._request.indexed
        trust = self._trust(len(seq.pending))
        # No row follows the last position before `limit`, so a guess for it would not be fed.
        limit, most = request.submit.limit - 1, request.options.look_ahead
        tokens, others = tuple(seq.tokens[known:]), self._alternatives(trust)
        has_head = request.method.takes_head
        do(
            Guess(
                known,
                tokens,
                seq.committed,
                limit,
                trust,
                most,
                others,
                has_head,
                request=request.number,
            )
        )
        request.indexed = len(seq.tokens)

    def _trust(self, pending: int) -> tuple[float, ...]:
        """Of each of the first `pending` tokens the probability that it is right if those before it are."""
        seen, speeds = self._request.proposals.seen[:pending], self._speeds
        return tuple(
            speeds.acceptance if each is None else speeds.foresight.agrees(each) for each in seen
        )

    def _alternatives(self, trust: tuple[float, ...]) -> tuple[Alternative, ...]:
        """The likeliest runners-up of pending tokens, each with what the draft has prepared behind it."""
        request, foresight = self._request, self._speeds.foresight
        if not request.takes_siblings:
            return ()
        found: list[tuple[float, Alternative]] = []
        reached = accumulate(trust, mul, initial=1.0)
        for position, (chance, seen) in enumerate(
            zip(reached, request.proposals.seen, strict=False), request.sequence.committed
        ):
            for share, rival in [] if seen is None else foresight.others(seen):
                branch = request.proposals.branch(position, rival)
                behind = branch.seen if branch is not None else ()
                tokens = (rival, *(branch.tokens[: len(behind)] if branch is not None else ()))
                chances = (share, *map(foresight.agrees, behind))
                found.append((chance * share, Alternative(position, tokens, chances)))
        found.sort(key=lambda each: -each[0])
        return tuple(alternative for _, alternative in found[: request.options.siblings])

    def settle(self, do: Do) -> None:
        """Make the KV cache hold exactly the fed tokens: roll back, or keep one path of the last tree."""
        seq = self._sequence
        if seq.cached > seq.fed:
            do(Rollback(seq.fed, request=self._request.number))
        elif seq.cached < seq.fed:
            do(Keep(tuple(self._fed.path[: seq.fed - seq.cached]), request=self._request.number))
        seq.cached = seq.fed

    def forward(self, phase: Phase, do: Do, guessed: Guessed | None = None) -> Phase:
        """Start a forward of unfed tokens and worthwhile guesses; return its phase.

        The token at the last position before `limit` is not fed: no token follows it.
        """
        seq = self._sequence
        if phase is Phase.PREFILL:
            count = prefill_chunk(seq, is_alone=len(self._running) == 1)
        else:
            count = min(len(seq.unfed), self._request.submit.limit - 1 - seq.fed)
            phase = Phase.POST_VERIFY if count > 1 else Phase.PRE_VERIFY
        self.settle(do)
        start, tokens = seq.fed, tuple(seq.feed(count))
        guessed = guessed or Guessed()
        guesses = self._num_worthwhile(guessed, len(tokens))
        self._fed = fed = FedTokens(start, tokens, guessed, guesses, len(seq.tokens))
        seq.cached = (
            start + len(fed.tokens) if fed.parents is None else start
        )  # of a tree, `settle` keeps one path
        self._request.counts.num_guesses += guesses
        self._request.counts.num_siblings += guessed.sources[:guesses].count(Source.RUNNER_UP)
        self._request.counts.target_steps[phase] += 1
        rows = max(0, start + len(fed.tokens) + 1 - seq.committed)
        do(Forward(phase, start, fed.tokens, rows, fed.parents, request=self._request.number))
        return phase

    def _num_worthwhile(self, guessed: Guessed, fed: int) -> int:
        """How many guesses to feed together with `fed` tokens of the text."""
        if not guessed.tokens:
            return 0
        chances, pending = guessed.chances, self._sequence.fed - self._sequence.committed
        if (
            not self._request.runs_ahead
        ):  # a guess helps only if the draft's own token turns out the same
            chances = tuple(chance * self._speeds.acceptance for chance in chances)
        expected = sum(accumulate(self._trust(pending), mul, initial=1.0))
        return worthwhile(chances, fed + self._draft.beside, expected, self._speeds.target.hoped)

    def commit_draws(self, tokens: tuple[int, ...], stops: list[bool]) -> None:
        """Commit the target's draws, comparing them with the draft's tokens as far as these have come."""
        request, counts = self._request, self._request.counts
        agreed = undrafted = 0
        is_wrong = False
        guessers = self._fed.guessers(self._sequence.committed, tokens)
        for token, stop, guesser in zip(tokens, stops, guessers, strict=True):
            if request.ending:
                break
            pending = self._sequence.first_pending
            if pending is not None and (seen := request.proposals.seen[0]) is not None:
                self._speeds.foresight.learn(seen, pending, token)
            is_node = agreed + undrafted + is_wrong + 1 < len(tokens)
            if pending is None:
                undrafted += 1
                request.commit(token, Provenance.GUESSED if is_node else Provenance.DIRECT, stop)
            elif pending == token:
                agreed += 1
                request.commit(None, Provenance.ACCEPTED, stop)
            else:
                is_wrong = True
                counts.num_judged_draft_tokens += is_node
                request.commit(token, Provenance.GUESSED if is_node else Provenance.CORRECTED, stop)
            if guesser is not None and pending != token:
                counts.guessed_by_source[guesser] = counts.guessed_by_source.get(guesser, 0) + 1
        self._speeds.observe_judgement(agreed, agreed + is_wrong)
        # One token ahead of a draft that was right so far is still the same window.
        request.is_fresh = is_wrong or not agreed or undrafted > 1
