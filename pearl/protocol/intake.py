"""What the target makes of the draft's tokens: pending, compared with what is committed, kept for another outcome, or
dropped.

Changes one `RequestState` and sends nothing; what follows from it is the state machine's business.
"""

from __future__ import annotations

from enum import Enum

from pearl.errors import RemoteProtocolError
from pearl.protocol.messages import DraftTokens, Source
from pearl.protocol.proposals import Proposal
from pearl.protocol.request import RequestState
from pearl.protocol.sequence import common_prefix
from pearl.protocol.window import Speeds
from pearl.spec.methods import MAX_BRANCHES


class Taken(Enum):
    """What became of a message."""

    NOTHING = "nothing"  # nothing is pending that was not: it was dropped, or is for another outcome
    PENDING = "pending"  # the main line goes on with it
    COMPARED = "compared"  # with tokens that the target has committed meanwhile; none of it is pending
    GAP = "gap"  # tokens before it never came


def take(request: RequestState, speeds: Speeds, message: DraftTokens, runs_ahead: bool) -> Taken:
    """Takes a message of the draft into `request`.

    Args:
        speeds: learn how long a token took, and whether it was right.
        runs_ahead: whether the target commits its own draws without waiting for the draft's tokens.

    Raises `RemoteProtocolError` for what the draft had no right to send; nothing has changed then.
    """
    is_old = message.epoch < request.epoch and not _is_foreseen(request, message)
    if request.ending or is_old or request.is_resting:
        return _drop(request)
    most, end = request.draft_until, message.start + len(message.tokens)
    if message.epoch > request.epoch or (message.after is None and end > most):
        raise RemoteProtocolError(
            f"draft sent {len(message.tokens)} tokens from position {message.start} in epoch {message.epoch}; "
            f"allowed: up to {most} in epoch {request.epoch}"
        )
    limit = request.submit.limit
    if message.start >= limit:
        return _drop(request)
    if end > limit:  # of a branch: the draft does not know of the limit
        message = _part(message, 0, limit - message.start)
    if message.after is not None and not _is_near(request, message, message.after):
        return _drop(request)
    speeds.observe_draft(message.seconds)
    request.has_drafted = True
    if message.after is not None and message.epoch == request.epoch:
        return _keep_branch(request, speeds, message, message.after)
    if runs_ahead and (message.start < request.sequence.committed or _is_astray(request, message)):
        return _compare(request, speeds, message)
    known = len(request.sequence.tokens)
    if message.start < known:
        request.counts.duplicate += 1
        return Taken.NOTHING
    return Taken.GAP if message.start > known else _append(request, message)


def _append(request: RequestState, message: DraftTokens) -> Taken:
    request.is_paused = message.paused
    request.counts.pauses += message.paused
    request.propose(Proposal(message.start, message.tokens, message.rows, message.source))
    request.received = len(request.sequence.tokens)
    return Taken.PENDING


def _compare(request: RequestState, speeds: Speeds, message: DraftTokens) -> Taken:
    """Takes tokens that were drafted before the draft knew what the target has committed since."""
    seq, counts = request.sequence, request.counts
    if _is_astray(request, message):
        return _drop(request)
    if message.start < request.received:
        counts.duplicate += 1
        return Taken.NOTHING
    own = seq.tokens[message.start : seq.committed]
    agreed = common_prefix(own, message.tokens)
    is_wrong = agreed < min(len(own), len(message.tokens))
    counts.drafted += agreed + is_wrong
    counts.judged += agreed + is_wrong
    counts.accepted += agreed
    counts.late += agreed
    speeds.observe_judgement(agreed, agreed + is_wrong)
    request.received = message.start + agreed + is_wrong
    if is_wrong:
        request.parted, request.is_fresh = message.start + agreed, True
    elif len(message.tokens) > agreed:
        return _append(request, _part(message, agreed, len(message.tokens)))
    return Taken.COMPARED


def _keep_branch(request: RequestState, speeds: Speeds, message: DraftTokens, after: tuple[int, int]) -> Taken:
    """Keeps a continuation for another outcome at a position that is not decided yet, or takes it where it is."""
    position, token = after
    tokens, committed = request.sequence.tokens, request.sequence.committed
    if position == request.parted and tokens[position] == token:
        return _compare(request, speeds, message) if message.start <= len(tokens) else _drop(request)
    known = request.proposals.branch(position, token)
    is_bonus = request.method.bonus and position == len(tokens)
    is_other = position < len(tokens) and tokens[position] != token
    is_open = committed <= position and (is_other or is_bonus) and not _is_astray(request, message)
    is_next = message.start == (position + 1 if known is None else known.end)
    is_one_more = known is None and len(request.proposals.branches) >= MAX_BRANCHES
    if not (request.options.branches and is_open and is_next) or is_one_more:
        return _drop(request)
    request.proposals.add(Proposal(position + 1, message.tokens, message.rows, message.source, after))
    return Taken.NOTHING


def _is_near(request: RequestState, message: DraftTokens, after: tuple[int, int]) -> bool:
    """Whether what was prepared for an outcome is no longer than a draft was allowed to be ahead.

    `draft_until` is no bound for it: it counts from the outcome on, also where that is the text already.
    """
    return message.start + len(message.tokens) <= after[0] + 1 + request.furthest


def _is_astray(request: RequestState, message: DraftTokens) -> bool:
    """Whether the draft did not know that it had been wrong before these. What it prepared for that is right."""
    parted = request.parted
    return message.known <= parted and (message.after is None or message.after[0] != parted)


def _is_foreseen(request: RequestState, message: DraftTokens) -> bool:
    """Whether it is the branch for the very outcome that opened this epoch: the verdict has only overtaken it."""
    is_before = message.epoch == request.epoch - 1
    return message.after is not None and is_before and message.after == request.opened_by


def _drop(request: RequestState) -> Taken:
    request.counts.stale += 1
    return Taken.NOTHING


def _part(message: DraftTokens, start: int, end: int) -> DraftTokens:
    """Its tokens from the one with index `start` to before that with `end`."""
    tokens, rows = message.tokens[start:end], message.rows[start:end]
    source = Source.LOOKUP if start and message.source is Source.MODEL else message.source
    return message.changed(start=message.start + start, tokens=tokens, rows=rows, source=source)
