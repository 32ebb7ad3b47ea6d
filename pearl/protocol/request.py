"""One request as the target keeps it: its text, what is proposed for it, and what has been told to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.protocol.events import Odds, Phase
from pearl.protocol.fed import Fed
from pearl.protocol.messages import FinishReason, Provenance, Source, Submit
from pearl.protocol.options import RequestOptions
from pearl.protocol.proposals import Proposal, ProposalStore
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.window import Window, whole_blocks
from pearl.spec.methods import Method

_RESYNCS, _TOKENS_A_RESYNC = 16, 4  # whole prefixes that a draft may have again: at first, and one for so many tokens


@dataclass
class Counts:
    """What happened to one request, in tokens and steps; folded into statistics by `pearl.metrics`."""

    cached: int = 0  # prompt tokens that the cache still held from the request before
    drafted: int = 0  # draft tokens that arrived in time to count
    judged: int = 0
    accepted: int = 0
    stale: int = 0  # dropped: older epoch or another request
    duplicate: int = 0  # dropped: known start again
    resyncs: int = 0
    foreseen: int = 0  # rejections for whose outcome a branch was there
    foreseen_bonuses: int = 0  # bonus tokens likewise
    sources: dict[Source, int] = field(default_factory=dict)  # who drafted the accepted tokens
    guesses: int = 0  # made without a model, that the target was fed
    guessed: dict[Source, int] = field(default_factory=dict)  # guesses that became text, by who made them
    rested: int = 0  # tokens committed while the draft rested, for it did not pay
    rates: dict[bool, float] = field(default_factory=dict)  # tokens a second, by whether the draft rested
    speedup: float | None = None  # with the draft over without, as is decided by: of earlier texts too
    measured: tuple[float | None, int] = (None, 0)  # likewise in this text alone, and of how many tokens that is
    rejected: int = 0  # runs that ended in a rejection, of judgements whose odds are known
    odds: Odds | None = None  # of these judgements
    pauses: int = 0  # windows that the draft's stop policy has ended
    late: int = 0  # draft tokens that agreed with what the target had committed before they came
    steps: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    provenance: dict[Provenance, int] = field(default_factory=lambda: dict.fromkeys(Provenance, 0))
    runs: dict[int, int] = field(default_factory=dict)  # accepted tokens of a run -> how many such runs
    run: int = 0  # accepted tokens of the run that is going on


@dataclass
class RequestState:
    """What the target knows of one request.

    Attributes:
        submit: what was asked.
        sequence: the text; it stays with the slot whose cache holds it.
        proposals: for the tokens that are pending in the sequence, and others.
        epoch: raised whenever pending tokens are discarded.
        is_fresh: whether the last commit was no accepted draft token (or there was none yet).
        is_undraftable: whether the draft cannot go on with this request.
        is_resting: whether the draft is not asked, for it does not pay.
        has_drafted: whether anything has come of the draft since it last began.
        is_paused: whether the draft's stop policy has ended its drafting until all that is pending is judged.
        opened_by: the outcome (position, token) that began this epoch; None where no rejection did.
        ending: why the request ends with what is committed, once that is known.
        told_draft, told_front: prefix lengths that these know of; 0: the draft does not take part.
        draft_until: the position up to which the draft was allowed to draft.
        furthest: how far ahead of the prefix that was at most; no branch is longer.
        grants: how often the draft was told so.
        window: c as last chosen.
        keeps_window: whether c is chosen once: a text that depends on it is then one that can be made again.
        draft_context: tokens that the draft's model holds; 0: no draft.
        in_flight: tokens that the running forward was fed.
        beside: tokens that other requests had in the last forward.
        fed: what the last forward was fed.
        told_guesser: how much of the text those who guess without a model know.
        parted: the position at which the draft was wrong though it has not been told so yet: what it sends is of use
            once it knows more than that; -1: none.
        received: the position up to which the draft's tokens have come in this epoch, used or not.
        untold: provenance of the tokens that the front does not know of.
        block: tokens that the rule judges as a whole.
    """

    submit: Submit
    sequence: TokenSequence
    proposals: ProposalStore = field(default_factory=ProposalStore)
    counts: Counts = field(default_factory=Counts)
    epoch: int = 0
    is_fresh: bool = True
    is_undraftable: bool = False
    is_resting: bool = False
    has_drafted: bool = False
    is_paused: bool = False
    opened_by: tuple[int, int] | None = None
    ending: FinishReason | None = None
    told_draft: int = 0
    told_front: int = 0
    draft_until: int = 0
    furthest: int = 0
    grants: int = 0
    in_flight: int = 0
    beside: int = 0
    fed: Fed = field(default_factory=lambda: Fed(0, ()))
    told_guesser: int = 0
    parted: int = -1
    received: int = 0
    window: int = 0
    draft_context: int = 0
    untold: list[Provenance] = field(default_factory=list)
    block: int = 1
    keeps_window: bool = False

    @property
    def number(self) -> int:
        return self.submit.request

    @property
    def options(self) -> RequestOptions:
        return self.submit.options

    @property
    def method(self) -> Method:
        return self.options.method_spec

    @property
    def looks_ahead(self) -> bool:
        """Whether the target verifies guesses, made without a model, too. They make no block whole."""
        is_of_use = self.block == 1 or not self.method.drafts
        return self.options.look_ahead > 0 and self.method.look_ahead > 0 and is_of_use

    @property
    def is_drafting(self) -> bool:
        """Whether a draft token will come for the position after the prefix.

        Depends on the draft's being there and on the position, never on what it drafted (invariant 9).
        """
        can_draft = self.method.drafts and not self.is_undraftable and not self.is_resting
        return can_draft and self.sequence.committed < self.draft_context

    @property
    def begins_too_often(self) -> bool:
        """Whether the draft was given the whole prefix again so often that it is not to have it once more."""
        written = self.sequence.committed - len(self.submit.prompt)
        return self.counts.resyncs > _RESYNCS + max(0, written) // _TOKENS_A_RESYNC

    @property
    def needed(self) -> int:
        """Unfed tokens to wait for. Near the limit, or the draft's context, fewer can ever come."""
        length = self.sequence.committed
        if self.block > 1 and self.is_drafting:
            return 1 + self.next_block if self.is_paused else min(self._bounds.needed, 1 + self._can_come)
        can_come = min(self.submit.limit - length, 1 + max(0, self.draft_context - length))
        return min(self._bounds.needed, can_come) if self.is_drafting and not self.is_paused else 1

    @property
    def _can_come(self) -> int:
        """How many tokens may be drafted behind the prefix."""
        length = self.sequence.committed
        return min(self.submit.limit, self.draft_context) - length

    @property
    def next_block(self) -> int:
        """How many pending tokens are judged together next. Where the text's last token is a bonus it is in no block.

        A draft that has paused sends no more: then it is what has come.
        """
        most = min(self._can_come, max(1, self.submit.limit - self.sequence.committed - self.method.bonus))
        return min(self.block, most, len(self.sequence.pending) if self.is_paused else most)

    @property
    def may_draft_until(self) -> int:
        """The position up to which the draft may draft as things are."""
        return min(self._bounds.draft_until, self.submit.limit, self.draft_context)

    @property
    def _bounds(self) -> Window:
        policy, committed, pending = self.options.window, self.sequence.committed, len(self.sequence.pending)
        c = self.window if self.block == 1 else whole_blocks(self.window, self.block)
        window = Window.after(self.method, policy, c, committed, fresh=self.is_fresh, pending=pending)
        return window if self.block == 1 else window.in_blocks(self.block, committed)

    def propose(self, proposal: Proposal) -> None:
        """Takes the next tokens of the main line."""
        self.sequence.extend(proposal.tokens)
        self.proposals.add(proposal)
        self.counts.drafted += len(proposal.tokens)

    def commit(self, token: int | None, provenance: Provenance, stop: bool) -> None:
        """Commits the first pending token, or `token` in its place. After the end nothing is committed any more."""
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
            foreseen = self.proposals.branch(self.sequence.committed, token)
            self.discard_pending()
            self.opened_by = self.sequence.committed, token
            self.sequence.correct(token)
            if foreseen is not None:
                is_bonus = provenance is Provenance.BONUS
                self.counts.foreseen += not is_bonus
                self.counts.foreseen_bonuses += is_bonus
                self.propose(foreseen)
                self.received = foreseen.end
            if provenance is Provenance.ACCEPTED:  # another of the model's than it went on from
                self._count_accepted(Source.MODEL)
            else:
                self._end_run(provenance is not Provenance.DIRECT)
        self.counts.judged += provenance in (Provenance.ACCEPTED, Provenance.CORRECTED)
        self.counts.rested += self.is_resting
        self.untold.append(provenance)
        self.counts.provenance[provenance] += 1
        if self.sequence.tokens[self.sequence.committed - 1] in self.submit.eos:
            self.ending = FinishReason.EOS
        elif stop:
            self.ending = FinishReason.STOP
        elif self.sequence.committed >= self.submit.limit:
            self.ending = FinishReason.LENGTH

    def _count_accepted(self, source: Source) -> None:
        self.counts.sources[source] = self.counts.sources.get(source, 0) + 1
        self.counts.accepted += 1
        self.counts.run += 1

    def _end_run(self, is_known: bool) -> None:
        """`is_known`: whether it counts as one that a correction or a bonus token has ended."""
        runs, run = self.counts.runs, self.counts.run
        if is_known:
            runs[run] = runs.get(run, 0) + 1
        self.counts.run = 0

    def discard_pending(self) -> None:
        """What was drafted counts no more."""
        self.epoch += 1
        self.is_paused = False
        self.draft_until = 0
        self.opened_by = None
        self.parted, self.received = -1, 0
        self.told_guesser = min(self.told_guesser, self.sequence.committed)
        self.proposals.clear()
        self.sequence.drop_pending()
