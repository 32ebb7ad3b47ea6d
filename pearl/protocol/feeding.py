"""What the target's cache holds of one request, what is fed to it next, and which rows of the last forward judge what.

Writes the request's sequence (fed and cached tokens), and commits draws from rows.  Sends nothing to the draft.
"""

from __future__ import annotations

from collections.abc import Sized

from pearl.protocol.draft_view import DraftView
from pearl.protocol.events import Forward, Guess, Guessed, Judge, Keep, Phase, Rollback, Sample
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.machine import Do
from pearl.protocol.messages import Provenance
from pearl.protocol.request import Request
from pearl.protocol.scheduler import prefill_chunk
from pearl.protocol.speeds import Speeds
from pearl.protocol.window import worthwhile


class Feeding:
    """Forwards of one request and their rows.

    Args:
        running: the running requests; alone, a prompt is fed in larger chunks.
    """

    def __init__(self, request: Request, draft: DraftView, speeds: Speeds, running: Sized) -> None:
        self._request, self._draft, self._speeds, self._running = request, draft, speeds, running
        self._sequence = request.sequence
        self._fed = FedTokens(0, ())

    @property
    def num_fed(self) -> int:
        """Tokens of the last forward, guesses included."""
        return len(self._fed.tokens)

    def follow(self) -> None:
        """Count guesses of the last forward that the text has come to follow as fed."""
        if self._request.looks_ahead:
            self._fed.follow(self._sequence)

    def judge(self, do: Do) -> None:
        """Have the pending tokens judged whose rows are there."""
        seq, run = self._sequence, self.num_judged
        tokens, nodes = tuple(seq.pending[:run]), self._fed.nodes(seq.committed, run)
        do(Judge(seq.committed, tokens, self._request.proposals.rows(run), nodes, request=self._request.number))

    def sample(self, do: Do) -> None:
        """Have the next position drawn from the target alone, and those after it that the last forward allows."""
        (node,) = self._fed.nodes(self._sequence.committed, 1)
        do(Sample(self._sequence.committed, node, self._request.looks_ahead, request=self._request.number))

    @property
    def num_judged(self) -> int:
        """How many pending tokens are to be judged with the rows at hand."""
        run = 0 if self._request.runs_ahead else min(len(self._sequence.pending), self._num_judgeable)
        if self._request.block == 1 or not run:
            return run
        return self._draft.next_block if run >= self._draft.next_block else 0

    @property
    def _num_judgeable(self) -> int:
        """Positions after the prefix whose row is to be judged: all rows but a bonus row.

        A bonus token is drawn even where a draft token has come for it: which it is must not depend on timing.
        """
        rows = self._sequence.fed + 1 - self._sequence.committed
        return rows - 1 if self._request.method.bonus and (rows > 1 or not self._request.is_fresh) else rows

    @property
    def row_is_direct(self) -> bool:
        """Whether no draft token is to come for the row at hand: the target draws from it alone."""
        return not self._draft.is_drafting or (self._request.method.bonus and not self._request.is_fresh)

    def guess(self, do: Do) -> None:
        """Have guesses made for what may follow the text."""
        request, seq, known = self._request, self._sequence, self._request.indexed
        acceptance = self._speeds.acceptance if self._draft.is_drafting else 1.0
        # The token before the limit is not fed.
        limit, most = request.submit.limit - 1, request.options.look_ahead
        do(Guess(known, tuple(seq.tokens[known:]), seq.committed, limit, acceptance, most, request=request.number))
        request.indexed = len(seq.tokens)

    def settle(self, do: Do) -> None:
        """Make the KV cache hold the fed tokens, and nothing else."""
        seq = self._sequence
        if seq.cached > seq.fed:
            do(Rollback(seq.fed, request=self._request.number))
        elif seq.cached < seq.fed:
            do(Keep(tuple(self._fed.path[: seq.fed - seq.cached]), request=self._request.number))
        seq.cached = seq.fed

    def forward(self, phase: Phase, do: Do, guessed: Guessed | None = None) -> Phase:
        """Start a forward of unfed tokens; return what it is for.

        The last position before the limit needs no feeding: no row follows.
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
        self._fed = fed = FedTokens.of(start, tokens, guessed, guesses, len(seq.tokens))
        seq.cached = start + len(fed.tokens) if fed.parents is None else start  # a tree's tokens are kept by path
        self._request.counts.guesses += guesses
        self._request.counts.steps[phase] += 1
        rows = max(0, start + len(fed.tokens) + 1 - seq.committed)
        do(Forward(phase, start, fed.tokens, rows, fed.parents, request=self._request.number))
        return phase

    def _num_worthwhile(self, guessed: Guessed, fed: int) -> int:
        """How many of the guesses to feed beside `fed` tokens of the text."""
        if not guessed.tokens:
            return 0
        chances, acceptance = guessed.chances, self._speeds.acceptance
        if not self._request.runs_ahead:  # a guess is of use only where the draft comes to guess the same
            chances = tuple(chance * acceptance for chance in chances)
        pending = self._sequence.fed - self._sequence.committed
        expected = sum(acceptance**i for i in range(pending + 1))
        return worthwhile(chances, fed + self._draft.beside, expected, self._speeds.target.hoped)

    def commit_draws(self, tokens: tuple[int, ...], stops: list[bool]) -> None:
        """Commit the target's draws, whether or not the draft's tokens for these positions are there yet."""
        request, counts = self._request, self._request.counts
        agreed = undrafted = 0
        is_wrong = False
        guessers = self._fed.guessers(self._sequence.committed, tokens)
        for token, stop, guesser in zip(tokens, stops, guessers, strict=True):
            if request.ending:
                break
            pending = self._sequence.first_pending
            is_node = agreed + undrafted + is_wrong + 1 < len(tokens)
            if pending is None:
                undrafted += 1
                request.commit(token, Provenance.GUESSED if is_node else Provenance.DIRECT, stop)
            elif pending == token:
                agreed += 1
                request.commit(None, Provenance.ACCEPTED, stop)
            else:
                is_wrong = True
                counts.judged += is_node
                request.commit(token, Provenance.GUESSED if is_node else Provenance.CORRECTED, stop)
            if guesser is not None and pending != token:
                counts.guessed[guesser] = counts.guessed.get(guesser, 0) + 1
        self._speeds.observe_judgement(agreed, agreed + is_wrong)
        # A target one token past its draft is still in step with it, if the draft has been right so far.
        request.is_fresh = is_wrong or not agreed or undrafted > 1
