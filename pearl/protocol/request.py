"""One request in the target: its text, what is proposed for it, and what its front has received.

Only `RequestMachine` and what belongs to it (`DraftView`) change a `Request`, through its methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.protocol.events import Deliver, Odds, Phase
from pearl.protocol.machine import Do
from pearl.protocol.messages import Committed, FinishReason, Preview, Provenance, Source, Submit
from pearl.protocol.options import RequestOptions
from pearl.protocol.proposals import Proposal, ProposalStore
from pearl.protocol.sequence import TokenSequence
from pearl.spec.methods import METHODS, Method


@dataclass
class Counts:
    """What happened to one request, in tokens and steps; folded into statistics by `pearl.metrics`."""

    cached: int = 0  # prompt tokens that the cache still held from the request before
    drafted: int = 0  # draft tokens that arrived in time to count
    judged: int = 0
    accepted: int = 0
    stale: int = 0  # dropped: older epoch or another request
    duplicate: int = 0  # dropped: start already known
    resyncs: int = 0
    foreseen: int = 0  # rejections for whose outcome a branch was there
    foreseen_bonuses: int = 0  # bonus tokens likewise
    sources: dict[Source, int] = field(default_factory=dict)  # accepted tokens by who drafted them
    guesses: int = 0  # made without a model and fed to the target
    guessed: dict[Source, int] = field(default_factory=dict)  # committed guesses by who made them
    ways: dict[str, int] = field(default_factory=dict)  # method auto: committed tokens by the way in use
    rates: dict[str, float] = field(default_factory=dict)  # method auto: tokens per second of each way, so far
    speedup: float | None = None  # method auto: the best way with a draft over the target with guesses alone
    rejected: int = 0  # runs that ended in a rejection, of judgements whose odds are known
    odds: Odds | None = None  # of these judgements
    pauses: int = 0  # windows that the draft's stop policy has ended
    late: int = 0  # draft tokens equal to what the target had committed before they came
    draft_lost: str = ""  # why the draft was lost on the way
    steps: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    provenance: dict[Provenance, int] = field(default_factory=lambda: dict.fromkeys(Provenance, 0))
    runs: dict[int, int] = field(default_factory=dict)  # accepted tokens of a run -> number of such runs
    run: int = 0  # accepted tokens of the current run


class Request:
    """The text of one request and its proposals.

    Args:
        submit: what the front submitted.
        sequence: the text; it stays with the slot whose cache holds it.
    """

    def __init__(self, submit: Submit, sequence: TokenSequence) -> None:
        self.submit, self.sequence = submit, sequence
        self.options: RequestOptions = submit.options
        #: What decodes now: the method of the request, or the way that method auto uses.
        self.method: Method = submit.options.method_spec
        #: Proposals for the pending tokens of the sequence, and branches.
        self.proposals = ProposalStore()
        self.counts = Counts()
        #: Raised whenever pending tokens are discarded.
        self.epoch = 0
        #: Whether the last commit was no accepted draft token (or there was none yet).
        self.is_fresh = True
        #: The outcome (position, token) that began this epoch; None where no rejection did.
        self.opened_by: tuple[int, int] | None = None
        #: Where the branch ends that became the text when this epoch began; 0: none did.
        self.foreseen_end = 0
        #: Length of the text that whoever guesses without a model has.
        self.indexed = 0
        #: Why the request ends with what is committed, once that is decided.
        self.ending: FinishReason | None = None
        #: Tokens that the rule judges together: 1 but for block rules, which greedy decoding does not need.
        self.block = (
            1 if submit.options.sampling.temperature == 0 else self.options.rule_spec.block(self.options.parameters)
        )
        self._delivered = 0  # length of the prefix that the front has
        self._undelivered: list[Provenance] = []

    @property
    def number(self) -> int:
        return self.submit.request

    @property
    def commits_draws(self) -> bool:
        """Whether the rule commits the target's own draw whatever was proposed: no proposal changes the text."""
        return self.options.rule_spec.is_proposal_invariant or self.options.sampling.temperature == 0

    @property
    def looks_ahead(self) -> bool:
        """Whether the target is fed guesses made without a model. They cannot fill a draft's blocks."""
        is_of_use = self.block == 1 or not self.method.drafts
        return self.options.look_ahead > 0 and self.method.look_ahead > 0 and is_of_use

    @property
    def runs_ahead(self) -> bool:
        """Whether the target commits its own draws at once, without waiting for the draft's tokens."""
        return self.looks_ahead and (self.commits_draws or not self.method.drafts)

    def use(self, way: str) -> None:
        """Decode with another method from here on."""
        self.method = METHODS[way]
        branches = self.submit.options.branches if self.method.branches else 0
        self.options = self.submit.options.changed(method=way, branches=branches)

    def begin(self) -> None:
        """The sequence begins with the prompt, of which its cache may have a part."""
        self.sequence.restart(self.submit.prompt)
        self.counts.cached = self.sequence.fed
        self._delivered = self.indexed = self.sequence.committed

    def end(self, reason: FinishReason) -> None:
        self.ending = reason

    def propose(self, proposal: Proposal) -> None:
        """Append the next tokens of the main line."""
        self.sequence.extend(proposal.tokens)
        self.proposals.add(proposal)
        self.counts.drafted += len(proposal.tokens)

    def commit(self, token: int | None, provenance: Provenance, is_stop: bool) -> None:
        """Commit the first pending token, or `token` in its place. After the end nothing is committed any more."""
        if self.ending:
            return
        self.is_fresh = token is not None
        if token is None:
            self.sequence.accept()
            self._count_accepted(self.proposals.accept(self.sequence.committed))
        elif self.looks_ahead and self.sequence.first_pending is None:
            self.sequence.correct(token)  # contradicts nothing that was drafted
            self.counts.run += provenance is Provenance.GUESSED
        else:
            self._correct(token, provenance)
        self.counts.judged += provenance in (Provenance.ACCEPTED, Provenance.CORRECTED)
        if self.submit.options.method_spec.adapts:
            self.counts.ways[self.method.name] = self.counts.ways.get(self.method.name, 0) + 1
        self._undelivered.append(provenance)
        self.counts.provenance[provenance] += 1
        if self.sequence.tokens[self.sequence.committed - 1] in self.submit.eos:
            self.end(FinishReason.EOS)
        elif is_stop:
            self.end(FinishReason.STOP)
        elif self.sequence.committed >= self.submit.limit:
            self.end(FinishReason.LENGTH)

    def _correct(self, token: int, provenance: Provenance) -> None:
        """Commit `token` in place of what was drafted, and go on with the branch for this outcome if there is one."""
        outcome = self.sequence.committed, token
        foreseen = self.proposals.branch(*outcome)
        self.discard_pending()
        self.opened_by = outcome
        self.sequence.correct(token)
        if foreseen is not None:
            is_bonus = provenance is Provenance.BONUS
            self.counts.foreseen += not is_bonus
            self.counts.foreseen_bonuses += is_bonus
            self.propose(foreseen)
            self.foreseen_end = foreseen.end
        if provenance is Provenance.ACCEPTED:  # another of the draft's candidates than the one it went on from
            self._count_accepted(Source.MODEL)
            return
        if provenance is not Provenance.DIRECT:  # a correction or a bonus token ends a run that counts
            self.counts.runs[self.counts.run] = self.counts.runs.get(self.counts.run, 0) + 1
        self.counts.run = 0

    def _count_accepted(self, source: Source) -> None:
        self.counts.sources[source] = self.counts.sources.get(source, 0) + 1
        self.counts.accepted += 1
        self.counts.run += 1

    def discard_pending(self) -> None:
        """Drop what was drafted, in a new epoch."""
        self.epoch += 1
        self.opened_by, self.foreseen_end = None, 0
        self.indexed = min(self.indexed, self.sequence.committed)
        self.proposals.clear()
        self.sequence.drop_pending()

    def deliver(self, do: Do) -> None:
        """Send the front what it has not received of the committed tokens."""
        seq, start = self.sequence, self._delivered
        if start < seq.committed:
            new = tuple(seq.tokens[start : seq.committed])
            do(Deliver(Committed(self.number, start, new, tuple(self._undelivered))))
            self._delivered = seq.committed
            self._undelivered.clear()

    def preview(self, do: Do) -> None:
        """Show the front the pending tokens, if it asked for that."""
        if self.submit.preview:
            do(Deliver(Preview(self.number, self.sequence.committed, tuple(self.sequence.pending))))
