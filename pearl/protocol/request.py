"""One request as the target keeps it: its text, what is proposed for it, and what has been told to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.protocol.events import Phase
from pearl.protocol.messages import FinishReason, Provenance, Submit
from pearl.protocol.proposals import ProposalStore
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.window import METHODS, Method


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
        is_paused: whether the draft's stop policy has ended its drafting until a verdict comes.
        opened_by: the outcome (position, token) that began this epoch; None where no rejection did.
        ending: why the request ends with what is committed, once that is known.
        told_draft, told_front: prefix lengths that these know of; 0: the draft does not take part.
        draft_until: the position up to which the draft was allowed to draft.
        grants: how often the draft was told so.
        window: c as last chosen.
        in_flight: tokens that the running forward was fed.
        untold: provenance of the tokens that the front does not know of.
    """

    submit: Submit
    sequence: TokenSequence
    proposals: ProposalStore = field(default_factory=ProposalStore)
    counts: Counts = field(default_factory=Counts)
    epoch: int = 0
    is_fresh: bool = True
    is_undraftable: bool = False
    is_paused: bool = False
    opened_by: tuple[int, int] | None = None
    ending: FinishReason | None = None
    told_draft: int = 0
    told_front: int = 0
    draft_until: int = 0
    grants: int = 0
    in_flight: int = 0
    window: int = 0
    untold: list[Provenance] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.submit.request

    @property
    def method(self) -> Method:
        return METHODS[self.submit.decoding.method]
