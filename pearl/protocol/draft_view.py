"""The target's view of the draft in one request: the prefix that it has, how far it may draft, what it has sent.

Decides nothing about the text; `RequestMachine` decides when to send the draft something.
"""

from __future__ import annotations

from enum import Enum

from pearl.errors import RemoteProtocolError
from pearl.protocol.events import Send
from pearl.protocol.machine import Do
from pearl.protocol.messages import Begin, DraftTokens, Finish, Source, Verdict
from pearl.protocol.proposals import Proposal
from pearl.protocol.request import Request
from pearl.protocol.sequence import common_prefix
from pearl.protocol.speeds import Speeds
from pearl.protocol.window import Window, whole_blocks
from pearl.spec.methods import MAX_BRANCHES

_GRANTS_PER_CHOICE = (
    8  # choosing c takes as long as all other work after a judgement, and speeds change slowly
)
_RESYNCS, _TOKENS_PER_RESYNC = 16, 4  # allowed resyncs: 16, and one more per four generated tokens


class Received(Enum):
    """What became of a message with draft tokens."""

    NOTHING = "nothing"  # dropped, or kept as a branch: pending tokens are as before
    PENDING = "pending"  # its tokens are pending now
    COMPARED = "compared"  # compared with tokens already committed; no token left to be pending
    GAP = "gap"  # earlier tokens are missing


class DraftView:
    """What the target knows of the draft's part in one request.

    Args:
        context: the draft model's context length; 0: there is no draft.
        window: initial c: the last one used.
    """

    def __init__(self, request: Request, speeds: Speeds, context: int, window: int) -> None:
        self._request, self._speeds = request, speeds
        self.context, self.window = context, window
        #: Length of the prefix that was sent to the draft; 0: it is not drafting for this request.
        self.known = 0
        #: Whether the draft has failed on this request and is not used for it again.
        self.is_lost = False
        #: Whether the draft has sent anything since it last began.
        self.has_sent = False
        #: Other requests' tokens in the last target forward.
        self.beside = 0
        self._grants = 0
        self._furthest = (
            0  # the most tokens that any grant allowed beyond the prefix: the bound for a branch
        )
        # Reset at each new epoch:
        self._epoch = 0
        self._until = 0  # the draft may draft positions before this one
        self._is_paused = (
            False  # by its stop policy, the draft sends no more until all pending tokens are judged
        )
        self._withheld = -1  # the position for which the draft sends no token
        self._received = 0  # end of the tokens received, used or not
        self._diverged = (
            -1
        )  # first position where the draft diverged and no verdict has reported it; -1: none

    # ---- what the draft may do ----

    @property
    def is_drafting(self) -> bool:
        """Whether the draft will send a token for the position after the committed prefix.

        Must not depend on what was drafted (invariant 9): only on the method, the draft's presence and the position.
        """
        return (
            self._request.method.drafts
            and not self.is_lost
            and self._request.sequence.committed < self.context
        )

    @property
    def is_paused(self) -> bool:
        return self._is_paused and self._epoch == self._request.epoch

    @property
    def withholds(self) -> bool:
        """Whether the draft sends no token for the position behind what is pending, by its stop policy."""
        return (
            self._withheld == len(self._request.sequence.tokens)
            and self._epoch == self._request.epoch
        )

    @property
    def resyncs_too_often(self) -> bool:
        """Whether the draft was resynced more often than is allowed, so that this request drops it."""
        written = self._request.sequence.committed - len(self._request.submit.prompt)
        return self._request.counts.resyncs > _RESYNCS + max(0, written) // _TOKENS_PER_RESYNC

    @property
    def needed(self) -> int:
        """How many unfed tokens the target waits for before a forward; fewer near `limit` and the draft's context."""
        request, most = self._request, self._can_come
        if not self.is_drafting:
            return 1
        if request.block > 1:
            return 1 + self.next_block if self.is_paused else min(self._bounds.needed, 1 + most)
        can_come = min(request.submit.limit - request.sequence.committed, 1 + max(0, most))
        return 1 if self.is_paused or self.withholds else min(self._bounds.needed, can_come)

    @property
    def next_block(self) -> int:
        """Length of the next block: pending tokens that are judged as a whole.

        Shorter at the end of the text (a bonus token there is in no block), and if the draft has paused: no more come.
        """
        request, length = self._request, self._request.sequence.committed
        most = min(self._can_come, max(1, request.submit.limit - length - request.method.bonus))
        return min(request.block, most, len(request.sequence.pending) if self.is_paused else most)

    @property
    def _can_come(self) -> int:
        """Positions after the prefix that can be drafted at all: up to `limit` and the draft's context."""
        return min(self._request.submit.limit, self.context) - self._request.sequence.committed

    @property
    def _bounds(self) -> Window:
        request, length = self._request, self._request.sequence.committed
        c = self.window if request.block == 1 else whole_blocks(self.window, request.block)
        pending = len(request.sequence.pending)
        window = Window.after(
            request.method, request.options.window, c, length, request.is_fresh, pending
        )
        return window if request.block == 1 else window.in_blocks(request.block, length)

    def _grant(self) -> int:
        """Return the draft's limit, a position; it never falls within an epoch. Re-choose c every 8 grants.

        c changes only here, where the draft learns of it: otherwise, the target could wait for tokens beyond the
        draft's limit. If the text depends on c, c stays as first chosen, so that the text is reproducible.
        """
        request = self._request
        keeps = request.method.bonus and not request.options.commits_draws
        if self._grants % _GRANTS_PER_CHOICE == 0 and not (self._grants and keeps):
            self.window = request.options.gamma or self._speeds.best_window(self.beside)
        self._grants += 1
        self._enter_epoch()
        self._until = max(
            self._until, min(self._bounds.draft_until, request.submit.limit, self.context)
        )
        self._furthest = max(self._furthest, self._until - request.sequence.committed)
        return self._until

    def _enter_epoch(self) -> None:
        if self._epoch != self._request.epoch:
            self._epoch, self._until, self._is_paused, self._withheld = (
                self._request.epoch,
                0,
                False,
                -1,
            )
            self._received, self._diverged = self._request.foreseen_end, -1

    # ---- what the draft is sent ----

    def begin(self, do: Do) -> None:
        """Send the draft the whole prefix, if it is to draft for this request."""
        if not self.is_drafting:
            return
        request, seq = self._request, self._request.sequence
        self._enter_epoch()
        self.known, self._is_paused, self._withheld, self.has_sent = seq.committed, False, -1, False
        prefix = tuple(seq.tokens[: seq.committed])
        do(
            Send(
                Begin(
                    request.number,
                    request.epoch,
                    prefix,
                    self._grant(),
                    seq.digest,
                    request.options,
                )
            )
        )

    def announce(self, do: Do) -> None:
        """Send the draft a verdict: the tokens committed since the last one, and its new limit."""
        request, seq, start = self._request, self._request.sequence, self.known
        if not (start and self.is_drafting and start < seq.committed):
            return
        self._enter_epoch()
        new = tuple(seq.tokens[start : seq.committed])
        do(Send(Verdict(request.number, request.epoch, start, new, self._grant(), seq.digest)))
        self.known = seq.committed
        self._is_paused = self._is_paused and seq.first_pending is not None

    def finish(self, do: Do) -> None:
        """Tell the draft to stop drafting for this request; `begin` can start it again."""
        if self.known:
            do(Send(Finish(self._request.number)))
        self.known = 0

    # ---- what the draft sends ----

    def receive(self, message: DraftTokens) -> Received:
        """Handle a message of draft tokens; see `Received` for what may become of it.

        Raises `RemoteProtocolError` for tokens of a future epoch or beyond the draft's limit, before any change.
        """
        request = self._request
        is_old = message.epoch < request.epoch and not self._is_foreseen(message)
        if request.ending or is_old or not request.method.drafts:
            return _dropped(self._request)
        self._enter_epoch()
        if not message.tokens and not request.options.withholds:
            raise RemoteProtocolError("draft sent no tokens, though the rule withholds none")
        end, limit = message.start + len(message.tokens), request.submit.limit
        if message.epoch > request.epoch or (message.after is None and end > self._until):
            raise RemoteProtocolError(
                f"draft sent {len(message.tokens)} tokens from position {message.start} in epoch {message.epoch}; "
                f"allowed: up to {self._until} in epoch {request.epoch}"
            )
        if message.start >= limit:
            return _dropped(self._request)
        if (
            end > limit
        ):  # only a branch: the main line ends at `_until`, the draft does not know `limit`
            message = _part(message, 0, limit - message.start)
        # A branch may exceed `_until`: its length counts from its outcome.
        if message.after is not None and end > message.after[0] + 1 + self._furthest:
            return _dropped(self._request)
        self._speeds.observe_draft(message.seconds)
        self.has_sent = True
        if message.after is not None and message.epoch == request.epoch:
            return self._keep_branch(message, message.after)
        if request.runs_ahead and (
            message.start < request.sequence.committed or self._is_astray(message)
        ):
            return self._compare(message)
        length = len(request.sequence.tokens)
        if message.start < length:
            request.counts.duplicate += 1
            return Received.NOTHING
        return Received.GAP if message.start > length else self._append(message)

    def _append(self, message: DraftTokens) -> Received:
        request = self._request
        request.counts.num_draft_stops += message.paused
        if message.tokens:
            request.propose(_proposal(request, message))
        if request.options.withholds:
            self._withheld = len(request.sequence.tokens) if message.paused else -1
        else:
            self._is_paused = message.paused
        self._received = len(request.sequence.tokens)
        return Received.PENDING

    def _compare(self, message: DraftTokens) -> Received:
        """Compare tokens that came too late to be judged with what the target has committed; append those beyond it."""
        request, counts, seq = self._request, self._request.counts, self._request.sequence
        if self._is_astray(message):
            return _dropped(self._request)
        if message.start < self._received:
            counts.duplicate += 1
            return Received.NOTHING
        own = seq.tokens[message.start : seq.committed]
        agreed = common_prefix(own, message.tokens)
        is_wrong = agreed < min(len(own), len(message.tokens))
        counts.num_draft_tokens += agreed + is_wrong
        counts.num_judged_draft_tokens += agreed + is_wrong
        counts.num_accepted_draft_tokens += agreed
        counts.late += agreed
        self._speeds.observe_judgement(agreed, agreed + is_wrong)
        self._received = message.start + agreed + is_wrong
        if is_wrong:
            self._diverged, request.is_fresh = message.start + agreed, True
        elif len(message.tokens) > agreed:
            return self._append(_part(message, agreed, len(message.tokens)))
        return Received.COMPARED

    def _keep_branch(self, message: DraftTokens, after: tuple[int, int]) -> Received:
        """Keep a branch if its position is not committed yet; if exactly its outcome was committed, `_compare` it."""
        request, (position, token) = self._request, after
        tokens, committed = request.sequence.tokens, request.sequence.committed
        if position == self._diverged and tokens[position] == token:
            return (
                self._compare(message) if message.start <= len(tokens) else _dropped(self._request)
            )
        known = request.proposals.branch(position, token)
        is_bonus = request.method.bonus and position == len(tokens)
        is_other = position < len(tokens) and tokens[position] != token
        is_open = committed <= position and (is_other or is_bonus) and not self._is_astray(message)
        is_next = message.start == (position + 1 if known is None else known.end)
        is_one_more = known is None and len(request.proposals.branches) >= MAX_BRANCHES
        if not (request.options.branches and is_open and is_next) or is_one_more:
            return _dropped(self._request)
        request.proposals.add(_proposal(request, message, after))
        return Received.NOTHING

    def _is_astray(self, message: DraftTokens) -> bool:
        """Whether these tokens continue a wrong draft token that the draft did not know of, so cannot be right."""
        is_correction = message.after is not None and message.after[0] == self._diverged
        return message.known <= self._diverged and not is_correction

    def _is_foreseen(self, message: DraftTokens) -> bool:
        """Whether these tokens are of the branch that this epoch began with, sent before the draft had our verdict."""
        is_before = message.epoch == self._request.epoch - 1
        return message.after is not None and is_before and message.after == self._request.opened_by


def _proposal(
    request: Request, message: DraftTokens, after: tuple[int, int] | None = None
) -> Proposal:
    start = message.start if after is None else after[0] + 1
    seen = message.runners_up if request.takes_siblings else ()
    return Proposal(start, message.tokens, message.rows, message.source, after, seen)


def _part(message: DraftTokens, start: int, end: int) -> DraftTokens:
    """The message with only its tokens [`start`:`end`]."""
    tokens, rows, seen = (
        message.tokens[start:end],
        message.rows[start:end],
        message.runners_up[start:end],
    )
    source = Source.LOOKUP if start and message.source is Source.MODEL else message.source
    return message.changed(
        start=message.start + start, tokens=tokens, rows=rows, source=source, runners_up=seen
    )


def _dropped(request: Request) -> Received:
    request.counts.stale += 1
    return Received.NOTHING
