"""Target forwards of one request: which tokens to feed, which logits (rows) judge which tokens, KV cache upkeep.

Updates the sequence's fed and cached counts, and commits the target's draws.  Sends nothing to the draft.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import accumulate
from operator import mul

from pearl.protocol.draft_state import DraftState
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
        self.start = start
        self.tokens = chain + guessed.tokens[:count]
        self._chain = len(chain)
        self._sources = guessed.sources
        self.path = list(range(len(chain)))
        parents = list(range(-1, len(chain) - 1))
        for parent in guessed.parents[:count]:
            # A token of the text, by position, or another guess, numbered from the text's length on.
            if parent < length:
                parents.append(parent - start)
            else:
                parents.append(parent - length + len(chain))
        is_chain = parents == list(range(-1, len(self.tokens) - 1))
        self.parents = None if is_chain else tuple(parents)
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        if count:
            edges = zip(parents, self.tokens, strict=True)
            self._children = {edge: node for node, edge in enumerate(edges)}

    def nodes(self, position: int, count: int) -> tuple[int, ...]:
        """Indices of the tokens whose rows are for `position` and the `count` - 1 positions after it."""
        index = position - 1 - self.start
        return tuple(self.path[index : index + count])

    def guessers(self, position: int, tokens: Sequence[int]) -> list[Source | None]:
        """Who guessed each of `tokens`, which stand from `position` on; None for a token that was no guess."""
        (node,) = self.nodes(position, 1)
        guessers: list[Source | None] = []
        for token in tokens:
            node = self._children.get((node, token), -2)  # -1 is the first token's parent
            is_guess = node >= self._chain
            guessers.append(self._sources[node - self._chain] if is_guess else None)
        return guessers

    def follow(self, sequence: TokenSequence) -> None:
        """Count unfed tokens of the sequence that are among the guesses as fed."""
        del self.path[max(0, sequence.fed - self.start) :]
        while self.path and sequence.fed < len(sequence.tokens):
            node = self._children.get((self.path[-1], sequence.tokens[sequence.fed]))
            if node is None:
                break
            self.path.append(node)
            sequence.fed += 1


class TargetSteps:
    """The target forwards of one request.

    Args:
        running: all running requests; if this is the only one, its prompt is fed in larger chunks.
    """

    def __init__(self, request: Request, draft: DraftState, speeds: Speeds, running: Sized) -> None:
        self._request = request
        self._draft = draft
        self._speeds = speeds
        self._running = running
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
        seq = self._sequence
        count = self.num_judged
        judge = Judge(
            seq.committed,
            tuple(seq.pending[:count]),
            self._request.proposals.rows(count),
            self._fed.nodes(seq.committed, count),
            request=self._request.number,
        )
        do(judge)

    def sample(self, do: Do) -> None:
        """Start drawing the next token from the target's row, and those after it while the draw was fed as a guess."""
        (node,) = self._fed.nodes(self._sequence.committed, 1)
        # In place of a withheld token comes one token: the draft proposes those behind it.
        follow = self._request.looks_ahead and not self._draft.withholds
        do(Sample(self._sequence.committed, node, follow, request=self._request.number))

    @property
    def num_judged(self) -> int:
        """How many pending tokens the rows of the last forward can judge: for a block rule, a block or none."""
        if self._request.runs_ahead:
            return 0
        count = min(len(self._sequence.pending), self._num_judgeable)
        if self._request.block == 1 or not count:
            return count
        block = self._draft.next_block
        return block if count >= block else 0

    @property
    def _num_judgeable(self) -> int:
        """Number of rows after the prefix that judge draft tokens: all but the bonus row.

        The bonus token is drawn from the target even if a draft token for it has come: the text must not depend on
        timing.
        """
        rows = self._sequence.fed + 1 - self._sequence.committed
        has_bonus_row = self._request.method.bonus and (rows > 1 or not self._request.is_fresh)
        return rows - has_bonus_row

    @property
    def row_is_direct(self) -> bool:
        """Whether the next row judges no draft token but is drawn from: for a bonus, or where none will come."""
        has_bonus = self._request.method.bonus and not self._request.is_fresh
        is_withheld = self._draft.withholds and not self._sequence.pending
        return not self._draft.is_drafting or has_bonus or is_withheld

    def guess(self, do: Do) -> None:
        """Start looking for guesses of what may follow the text, or stand in place of what is pending."""
        request = self._request
        seq = self._sequence
        trust = self._trust(len(seq.pending))
        guess = Guess(
            base=request.indexed,
            tokens=tuple(seq.tokens[request.indexed :]),
            committed=seq.committed,
            # No row follows the last position before `limit`, so a guess for it would not be fed.
            limit=request.submit.limit - 1,
            trust=trust,
            most=request.options.look_ahead,
            alternatives=self._alternatives(trust),
            head=request.method.takes_head,
            request=request.number,
        )
        do(guess)
        request.indexed = len(seq.tokens)

    def _trust(self, pending: int) -> tuple[float, ...]:
        """For each of the first `pending` tokens, the probability that it is right if those before it are."""
        chances: list[float] = []
        for seen in self._request.proposals.seen[:pending]:
            if seen is None:
                chances.append(self._speeds.acceptance)
            else:
                chances.append(self._speeds.foresight.agrees(seen))
        return tuple(chances)

    def _alternatives(self, trust: tuple[float, ...]) -> tuple[Alternative, ...]:
        """The likeliest runners-up of pending tokens, each with what the draft has prepared behind it."""
        request = self._request
        if not request.takes_siblings:
            return ()
        foresight = self._speeds.foresight
        candidates: list[tuple[float, Alternative]] = []
        reached = 1.0  # the probability that all tokens before this position are right
        position = request.sequence.committed
        for chance, seen in zip(trust, request.proposals.seen, strict=False):
            rivals = [] if seen is None else foresight.others(seen)
            for share, rival in rivals:
                candidates.append((reached * share, self._alternative(position, share, rival)))
            reached *= chance
            position += 1
        candidates.sort(key=lambda candidate: -candidate[0])
        return tuple(alternative for _, alternative in candidates[: request.options.siblings])

    def _alternative(self, position: int, share: float, rival: int) -> Alternative:
        """The runner-up `rival`, of probability `share`, and the branch behind it."""
        tokens: tuple[int, ...] = (rival,)
        chances: tuple[float, ...] = (share,)
        branch = self._request.proposals.branch(position, rival)
        if branch is not None:
            tokens += branch.tokens[: len(branch.seen)]
            chances += tuple(map(self._speeds.foresight.agrees, branch.seen))
        return Alternative(position, tokens, chances)

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
        start = seq.fed
        tokens = tuple(seq.feed(count))
        guessed = guessed or Guessed()
        guesses = self._num_worthwhile(guessed, len(tokens))
        fed = FedTokens(start, tokens, guessed, guesses, len(seq.tokens))
        self._fed = fed
        if fed.parents is None:
            seq.cached = start + len(fed.tokens)
        else:
            seq.cached = start  # of a tree, `settle` keeps one path
        counts = self._request.counts
        counts.num_guesses += guesses
        counts.num_siblings += guessed.sources[:guesses].count(Source.RUNNER_UP)
        counts.target_steps[phase] += 1
        rows = max(0, start + len(fed.tokens) + 1 - seq.committed)
        do(Forward(phase, start, fed.tokens, rows, fed.parents, request=self._request.number))
        return phase

    def _num_worthwhile(self, guessed: Guessed, fed: int) -> int:
        """How many guesses to feed together with `fed` tokens of the text."""
        if not guessed.tokens:
            return 0
        chances = guessed.chances
        pending = self._sequence.fed - self._sequence.committed
        if not self._request.runs_ahead:
            # A guess helps only if the draft's own token turns out the same.
            chances = tuple(chance * self._speeds.acceptance for chance in chances)
        expected = sum(accumulate(self._trust(pending), mul, initial=1.0))
        return worthwhile(chances, fed + self._draft.beside, expected, self._speeds.target.hoped)

    def commit_draws(self, tokens: tuple[int, ...], stops: list[bool]) -> None:
        """Commit the target's draws, comparing them with the draft's tokens as far as these have come.

        All draws but the last are guesses that were fed; the last follows them.
        """
        request = self._request
        num_accepted = 0
        num_undrafted = 0
        is_wrong = False
        guessers = self._fed.guessers(self._sequence.committed, tokens)
        for index, token in enumerate(tokens):
            if request.ending:
                break
            is_last = index == len(tokens) - 1
            draft_token = self._sequence.first_pending
            self._learn(draft_token, token)
            if draft_token == token:
                num_accepted += 1
                request.commit(None, Provenance.ACCEPTED, stops[index])
                continue
            provenance = Provenance.GUESSED
            if draft_token is None:
                num_undrafted += 1
                if is_last:
                    provenance = Provenance.DIRECT
            else:
                is_wrong = True
                if is_last:
                    provenance = Provenance.CORRECTED
                else:  # `commit` counts only a correction as judged
                    request.counts.num_judged_draft_tokens += 1
            request.commit(token, provenance, stops[index])
            self._count_guess(guessers[index])
        self._speeds.observe_judgement(num_accepted, num_accepted + is_wrong)
        # One token ahead of a draft that was right so far is still the same window.
        request.is_fresh = is_wrong or not num_accepted or num_undrafted > 1

    def _learn(self, draft_token: int | None, token: int) -> None:
        """Take in what the draft's row said of its token, now that the target's is known."""
        if draft_token is None:
            return
        seen = self._request.proposals.seen[0]
        if seen is not None:
            self._speeds.foresight.learn(seen, draft_token, token)

    def _count_guess(self, guesser: Source | None) -> None:
        if guesser is not None:
            by_source = self._request.counts.guessed_by_source
            by_source[guesser] = by_source.get(guesser, 0) + 1
