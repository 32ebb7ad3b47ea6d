"""One request in the target: its text, the proposals for it, and what its client (front) has received.

Only the request's `RequestMachine` and its parts (`AutoText`, `DraftState`, `LookAhead`) change a `Request`.
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
    """What is counted of one request. `pearl.metrics.Statistics` adds times and rates.

    Attributes:
        num_cached_tokens: prompt tokens whose KV was reused from the request before.
        num_prefill_tokens: tokens committed before the first step: the prefill's row gives one.
        num_draft_tokens: draft tokens that reached the target, judged or not.
        num_judged_draft_tokens: draft tokens that were accepted or corrected. The others were discarded after an
            earlier rejection.
        num_accepted_draft_tokens: draft tokens that were accepted.
        run_histogram: accepted tokens of a finished run -> number of such runs.
        provenance: committed tokens by where they came from.
        num_guesses: guesses that the target was fed. `provenance`'s "guessed" counts the committed guesses.
        num_siblings: fed guesses that are runners-up of the draft.
        guessed_by_source: committed guesses by who guessed them (`Source`); if two did, by the surer one.
        accepted_by_source: accepted draft tokens by who drafted them: "model"; "lookup" where a guess that the draft
            confirmed saved the draft a forward; "branch" where they were prepared for the outcome of a rejection.
        num_draft_stops: windows that the stop policy ended before their bound.
        num_rejections: draft tokens corrected, where the rule knows the draft's distributions (rule coupled does not).
        num_foreseen_rejections: rejections whose outcome the draft had prepared for, in time.
        num_foreseen_bonuses: bonus tokens that the draft had prepared for, in time (method ssd).
        ways: method auto: committed tokens by the way that was in use (see `method_choice`).
        rates: method auto: tokens per second of each way as timed so far, in this and earlier texts.
        draft_speedup: method auto: speed of the best way with a draft / speed of `ngram`, by the comparisons in this
            and earlier texts; None if no such way was compared yet.
        settled: method auto: the best way at the end of this text; empty if no way with a draft was ever compared.
        compared: method auto: for each other way, speed of the best way at the end of this text / speed of the other
            way, by this text's comparisons.
        target_steps: forwards by phase.
        stale: messages of the draft dropped because their tokens were of no use any more.
        duplicate: messages of the draft dropped because their tokens had come before.
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
        """Target forwards after the prefill."""
        return sum(self.target_steps.values()) - self.target_steps.get(Phase.PREFILL, 0)


@dataclass
class Counts(Tally):
    """The counters of a running request.

    Attributes:
        odds: sum of the `Odds` of all judgements that have them.
        late: draft tokens that agree, but came after the target had committed its own draw.
        loss: why the draft was lost; empty if it was not.
        run: accepted tokens since the last correction or bonus.
        lone_forwards: this text's forwards of one token. The target alone takes about as long for each token.
        lone_seconds: total time of these forwards.
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
        sequence: the text. It belongs to the slot, because it says what the KV cache holds.
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
        #: Whether a new window begins here: the last committed token was not a draft token (or none was committed yet).
        self.is_fresh = True
        #: (position, token) whose commit began this epoch; None if something else did.
        self.opened_by: tuple[int, int] | None = None
        #: End position of the branch that this epoch began with; 0: there was none.
        self.foreseen_end = 0
        #: Tokens in the last forward that were not of this request's text.
        self.beside = 0
        #: Whether a forward after the prefill has begun.
        self.has_stepped = False
        #: The finish reason once the request is to end; nothing is committed after that.
        self.ending: FinishReason | None = None
        #: Block length: tokens that the rule judges as a whole. 1 except for block rules.
        self.block = submit.options.rule_in_force.block(submit.options.parameters)
        self._decode_by(submit.options)
        self._indexed = 0  # length of the text that the guessing index has
        self._delivered = 0  # length of the prefix that the front has
        self._undelivered: list[Provenance] = []

    def use(self, way: str) -> None:
        """Decode with `way` from now on (method auto)."""
        options = self.submit.options.changed_method(way)
        self._decode_by(options)

    def _decode_by(self, options: RequestOptions) -> None:
        """Set the options, and compute once what follows from them: it is read a dozen times between two forwards."""
        method = options.method_spec
        #: The options with the method in use: the requested method, or the way that method auto has chosen.
        self.options = options
        self.method = method
        #: Whether the draft's runners-up are fed to the target too.
        self.takes_siblings = options.sends_runners_up
        is_of_use = self.block == 1 or not method.drafts
        has_index = options.look_ahead > 0 and method.look_ahead > 0
        #: Whether guesses are fed to the target. Not with a draft under a block rule: guesses are not part of a block.
        self.looks_ahead = (has_index and is_of_use) or self.takes_siblings
        overlaps = (method.pre_verify or method.post_verify) and options.commits_draws
        #: Whether the target commits its own draws right away instead of waiting for the draft's tokens.
        self.runs_ahead = self.looks_ahead and (overlaps or not method.drafts)

    def begin(self) -> None:
        """Begin with the prompt; a prefix of it may be in the KV cache already."""
        self.sequence.restart(self.submit.prompt)
        self.counts.num_cached_tokens = self.sequence.fed
        self._delivered = self._indexed = self.sequence.committed

    def take_unindexed(self) -> tuple[int, tuple[int, ...]]:
        """Return (start, tokens): the end of the text that the guessing index does not have yet.

        The caller adds it to the index.
        """
        start = self._indexed
        self._indexed = len(self.sequence.tokens)
        return start, tuple(self.sequence.tokens[start:])

    def propose(self, proposal: Proposal) -> None:
        """Append draft tokens to the text, as pending."""
        self.sequence.extend(proposal.tokens)
        self.proposals.add(proposal)
        self.counts.num_draft_tokens += len(proposal.tokens)

    def commit(self, token: int | None, provenance: Provenance, is_stop: bool) -> None:
        """Commit `token`, or the first pending token if `token` is None. Does nothing once the request is ending.

        `is_stop`: whether the token completes a stop string.
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
        """Commit `token`, discard what is pending, and go on with the branch for this outcome if there is one."""
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
        """Update `foresight` after the target has drawn `token` at the position of the first pending token.

        It learns from what the draft's row said of the pending token; without a row it learns nothing.
        """
        (seen,) = self.proposals.seen(1)
        if seen is not None:
            foresight.learn(seen, self.sequence.tokens[self.sequence.committed], token)

    def count_guess(self, guesser: Source | None) -> None:
        """Count a committed token by who guessed it; None if nobody did."""
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
        """Send the client the committed tokens that it has not received yet."""
        seq = self.sequence
        start = self._delivered
        if start < seq.committed:
            tokens = tuple(seq.tokens[start : seq.committed])
            do(Deliver(Committed(self.number, start, tokens, tuple(self._undelivered))))
            self._delivered = seq.committed
            self._undelivered.clear()

    def preview(self, do: Do) -> None:
        """Send the client the pending tokens, if it asked for previews."""
        if self.submit.preview:
            do(Deliver(Preview(self.number, self.sequence.committed, tuple(self.sequence.pending))))
