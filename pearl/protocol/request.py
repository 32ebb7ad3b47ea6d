"""One request in the target: its text, the proposals for it, and what its front has received.

The front is the user's process. Only the request's `RequestMachine` and the parts of that machine
(`AutoText`, `DraftState`, `LookAhead`) change a `Request`.
"""

from dataclasses import dataclass, field

from pearl.config.options import RequestOptions
from pearl.protocol.acceptance_estimates import Foresight
from pearl.protocol.events import Deliver, Odds, Phase
from pearl.protocol.machine import Do
from pearl.protocol.messages import Committed, FinishReason, Preview, Provenance, Source, Submit
from pearl.protocol.proposals import Proposal, ProposalStore
from pearl.protocol.sequence import TokenSequence


@dataclass
class Tally:
    """The counters of one request, which its statistics report.

    `pearl.metrics.Statistics` adds times and rates. The "ways" of method auto are the decoding
    methods that it chooses from, see `method_choice`.

    Attributes:
        num_cached_tokens: prompt tokens whose KV cache entries were reused from an earlier request.
        num_prefill_tokens: tokens committed before the first step after the prefill. This is one
            token, drawn from the prefill's last logits, or none.
        num_draft_tokens: draft tokens that reached the target, judged or not.
        num_judged_draft_tokens: draft tokens that were accepted or corrected. All other draft
            tokens were discarded after an earlier rejection.
        num_accepted_draft_tokens: draft tokens that were accepted.
        run_histogram: maps a length to the number of runs of accepted tokens that had this length.
            A rejection or a bonus token ends a run.
        provenance: number of committed tokens by `Provenance`.
        num_guesses: guesses that the target was fed. Of these, `provenance["guessed"]` were
            committed.
        num_siblings: runners-up of the draft that the target was fed as guesses.
        guessed_by_source: committed guesses by who guessed them (`Source`). A token that several
            sources guessed counts for the source that gave it the highest chance.
        accepted_by_source: accepted draft tokens by how they were drafted: "model"; "lookup" if the
            draft confirmed an n-gram guess, which saved it a forward; "branch" if they belong to a
            branch that was prepared for the outcome of a rejection.
        num_draft_stops: windows that the stop policy ended early.
        num_rejections: draft tokens that were corrected. They are counted only if the rule sees the
            draft's distributions. Rule coupled does not see them.
        num_foreseen_rejections: rejections for which the draft had already sent the branch that
            continues the correction.
        num_foreseen_bonuses: bonus tokens for which the draft had already sent the branch that
            continues the bonus token (method ssd).
        ways: for method auto, number of committed tokens by the way in use.
        rates: for method auto, tokens per second of each way as timed in this and earlier texts.
        draft_speedup: for method auto, speed of the best way with a draft / speed of `ngram`, by
            the comparisons in this and earlier texts; None if no way with a draft was compared yet.
        settled: for method auto, the best way at the end of this text; empty if no way with a draft
            was ever compared.
        compared: for method auto, speed of the best way at the end of this text / speed of each
            other way, by this text's comparisons.
        target_steps: number of target forwards by phase.
        stale: messages of the draft that were dropped because their tokens were of no use any more.
        duplicate: messages of the draft that were dropped because their tokens had come before.
        resyncs: how often the draft was sent the whole prefix again.
    """

    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    num_draft_tokens: int = 0
    num_judged_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    run_histogram: dict[int, int] = field(default_factory=dict)
    provenance: dict[str, int] = field(default_factory=dict)
    num_guesses: int = 0
    num_siblings: int = 0
    guessed_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    num_draft_stops: int = 0
    num_rejections: int = 0
    num_foreseen_rejections: int = 0
    num_foreseen_bonuses: int = 0
    ways: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    draft_speedup: float | None = None
    settled: str = ""
    compared: dict[str, float] = field(default_factory=dict)
    target_steps: dict[str, int] = field(default_factory=dict)
    stale: int = 0
    duplicate: int = 0
    resyncs: int = 0

    @property
    def steps(self) -> int:
        """Number of target forwards after the prefill."""
        return sum(self.target_steps.values()) - self.target_steps.get(Phase.PREFILL, 0)

    @property
    def num_runs(self) -> int:
        """Number of runs that a rejection or a bonus token has ended."""
        return sum(self.run_histogram.values())


@dataclass
class Counts(Tally):
    """The counters of a running request.

    Attributes:
        odds: sum of `Judged.odds` over all judgements; None if no judgement had any.
        late: draft tokens that agree with the text, but came after the target had committed its own
            draw for their position.
        loss: why the draft was lost; empty if it was not lost.
        run: number of accepted tokens since the last correction or bonus token.
        lone_forwards: number of forwards that were fed one token only. Their mean time is about
            what the target alone would take per token.
        lone_seconds: total seconds of these forwards.
        was_shared: whether other requests were running during any step of this one.
    """

    provenance: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Provenance, 0))
    target_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    odds: Odds | None = None
    late: int = 0
    loss: str = ""
    run: int = 0
    lone_forwards: int = 0
    lone_seconds: float = 0.0
    was_shared: bool = False


class Request:
    """The text of one request and its proposals.

    Args:
        submit: what the front submitted.
        sequence: the text. It belongs to the slot, because it says what the slot's KV cache holds.
    """

    def __init__(self, submit: Submit, sequence: TokenSequence) -> None:
        self.submit = submit
        self.number = submit.request
        self.sequence = sequence
        #: Proposals for the pending tokens of the sequence, and branches.
        self.proposals = ProposalStore()
        self.counts = Counts()
        #: Incremented whenever pending tokens are discarded; draft tokens of older epochs are stale.
        self.epoch = 0
        #: Whether a new window begins here, because the last committed token was no draft token.
        self.is_fresh = True
        #: (position, token) of the commit that began this epoch; None if something else began it.
        self.opened_by: tuple[int, int] | None = None
        #: The position after the branch that this epoch began with; 0 if it began without a branch.
        self.foreseen_end = 0
        #: Number of tokens in the last forward that were not of this request's text.
        self.beside = 0
        #: Whether a forward after the prefill has begun.
        self.has_stepped = False
        #: The finish reason once the request is to end. Nothing is committed after that.
        self.ending: FinishReason | None = None
        #: How many tokens the acceptance rule judges as a whole; 1 except for block rules.
        self.block = submit.options.rule_in_force.block(submit.options.parameters)
        self._decode_by(submit.options)
        self._indexed = 0  # length of the text that the index of guesses has
        self._delivered = 0  # length of the prefix that the front has received
        self._undelivered: list[Provenance] = []

    def use(self, way: str) -> None:
        """Decode with the method `way` from now on; method auto has chosen it."""
        options = self.submit.options.changed_method(way)
        self._decode_by(options)

    def _decode_by(self, options: RequestOptions) -> None:
        """Set the options, and the attributes that follow from them.

        The attributes are computed once, because they are read a dozen times between two forwards.
        """
        method = options.method_spec
        #: The options with the method in use: the requested method, or the way that method auto has chosen.
        self.options = options
        self.method = method
        #: Whether the draft's runners-up are fed to the target too.
        self.takes_siblings = options.sends_runners_up
        is_of_use = self.block == 1 or not method.drafts
        has_index = options.look_ahead > 0 and method.look_ahead > 0
        # With a draft under a block rule there are no guesses, because they are no part of a block.
        #: Whether guesses are fed to the target.
        self.looks_ahead = (has_index and is_of_use) or self.takes_siblings
        overlaps = (method.pre_verify or method.post_verify) and options.commits_draws
        #: Whether the target commits its own draws right away instead of waiting for the draft's tokens.
        self.runs_ahead = self.looks_ahead and (overlaps or not method.drafts)

    def begin(self) -> None:
        """Begin with the prompt. The KV cache may hold some of its first tokens already."""
        self.sequence.restart(self.submit.prompt)
        self.counts.num_cached_tokens = self.sequence.fed
        self._delivered = self._indexed = self.sequence.committed

    def take_unindexed(self) -> tuple[int, tuple[int, ...]]:
        """Return (start, tokens): the end of the text that is not in the index yet.

        The caller adds it to the index. Guesses from n-grams of the text are looked up there.
        """
        start = self._indexed
        self._indexed = len(self.sequence.tokens)
        return start, tuple(self.sequence.tokens[start:])

    def propose(self, proposal: Proposal) -> None:
        """Append draft tokens to the text as pending tokens."""
        self.sequence.extend(proposal.tokens)
        self.proposals.add(proposal)
        self.counts.num_draft_tokens += len(proposal.tokens)

    def commit(self, token: int | None, provenance: Provenance, is_stop: bool) -> None:
        """Commit `token`, or the first pending token if `token` is None.

        Does nothing once the request is ending. `is_stop`: whether the token completes a stop
        string.
        """
        if self.ending:
            return
        self.is_fresh = token is not None
        if token is None:
            self.sequence.accept()
            self._count_accepted(self.proposals.accept(self.sequence.committed))
        elif self.looks_ahead and self.sequence.first_pending is None:
            self.sequence.correct(token)  # nothing is pending, so nothing is rejected
            if provenance is Provenance.GUESSED:
                self.counts.run += 1
        else:
            self._correct(token, provenance)
        if provenance in (Provenance.ACCEPTED, Provenance.CORRECTED):
            self.counts.num_judged_draft_tokens += 1
        if self.submit.options.method_spec.adapts:
            ways = self.counts.ways
            ways[self.method.name] = ways.get(self.method.name, 0) + 1
        self._undelivered.append(provenance)
        if not self.has_stepped:
            self.counts.num_prefill_tokens += 1
        self.counts.provenance[provenance] += 1
        if self.sequence.tokens[self.sequence.committed - 1] in self.submit.eos:
            self.ending = FinishReason.EOS
        elif is_stop:
            self.ending = FinishReason.STOP
        elif self.sequence.committed >= self.submit.limit:
            self.ending = FinishReason.LENGTH

    def _correct(self, token: int, provenance: Provenance) -> None:
        """Commit `token` and discard the pending tokens.

        If there is a branch that continues `token`, its tokens become the pending tokens.
        """
        outcome = self.sequence.committed, token
        foreseen = self.proposals.branch(*outcome)
        self.discard_pending()
        self.opened_by = outcome
        self.sequence.correct(token)
        if foreseen is not None:
            if provenance is Provenance.BONUS:
                self.counts.num_foreseen_bonuses += 1
            else:
                self.counts.num_foreseen_rejections += 1
            self.propose(foreseen)
            self.foreseen_end = foreseen.end
        if provenance is Provenance.ACCEPTED:
            # One of several candidates, but not the one that the draft continued.
            self._count_accepted(Source.MODEL)
            return
        if provenance is not Provenance.DIRECT:
            # A correction or bonus token ends a run of accepted tokens.
            length = self.counts.run
            histogram = self.counts.run_histogram
            histogram[length] = histogram.get(length, 0) + 1
        self.counts.run = 0

    def learn(self, foresight: Foresight, token: int) -> None:
        """Update the acceptance estimates: the target drew `token` for the first pending position.

        Does nothing if the draft did not report a `Seen` for its own token at this position.
        """
        (seen,) = self.proposals.seen(1)
        if seen is not None:
            foresight.learn(seen, self.sequence.tokens[self.sequence.committed], token)

    def count_guess(self, guesser: Source | None) -> None:
        """Count a committed token by who guessed it; do nothing if `guesser` is None."""
        if guesser is not None:
            by_source = self.counts.guessed_by_source
            by_source[guesser] = by_source.get(guesser, 0) + 1

    def _count_accepted(self, source: Source) -> None:
        by_source = self.counts.accepted_by_source
        by_source[source] = by_source.get(source, 0) + 1
        self.counts.num_accepted_draft_tokens += 1
        self.counts.run += 1

    def discard_pending(self) -> None:
        """Discard pending tokens and branches, and begin a new epoch."""
        self.epoch += 1
        self.opened_by = None
        self.foreseen_end = 0
        self._indexed = min(self._indexed, self.sequence.committed)
        self.proposals.clear()
        self.sequence.drop_pending()

    def deliver(self, do: Do) -> None:
        """Send the front the committed tokens that it has not received yet."""
        seq = self.sequence
        start = self._delivered
        if start < seq.committed:
            tokens = tuple(seq.tokens[start : seq.committed])
            do(Deliver(Committed(self.number, start, tokens, tuple(self._undelivered))))
            self._delivered = seq.committed
            self._undelivered.clear()

    def preview(self, do: Do) -> None:
        """Send the front the pending tokens, if it asked for previews."""
        if self.submit.preview:
            do(Deliver(Preview(self.number, self.sequence.committed, tuple(self.sequence.pending))))
