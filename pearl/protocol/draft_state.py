"""The target's view of the draft in one request.

It covers the prefix that the draft was sent, how far the draft may draft, and what the draft has
sent.
This file decides nothing about the text; `RequestMachine` decides when to send the draft something.
"""

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

# Choosing c takes as long as all other work after a judgement, and speeds change slowly.
_GRANTS_PER_CHOICE = 8
# A request may have 16 resyncs, and one more for every four generated tokens.
_RESYNCS = 16
_TOKENS_PER_RESYNC = 4


class Received(Enum):
    """What `DraftState.receive` did with a message of draft tokens."""

    NOTHING = "nothing"  # the message was dropped or kept as a branch; pending tokens are unchanged
    PENDING = "pending"  # its tokens were appended to the pending tokens
    COMPARED = "compared"  # its tokens were compared with committed tokens; none was appended
    GAP = "gap"  # the tokens before its first token are missing


class DraftState:
    """What the target knows about the draft in one request.

    Args:
        context: the draft model's context length; 0 if there is no draft.
        window: the window length c to begin with. It is the c with which the last request ended.
    """

    def __init__(self, request: Request, speeds: Speeds, context: int, window: int) -> None:
        self._request = request
        self._speeds = speeds
        self.context = context
        self.window = window
        #: Length of the prefix that the draft was sent; 0 if it does not draft for this request.
        self.known = 0
        #: Whether the draft has failed on this request and is not used for it again.
        self.is_lost = False
        #: Whether the draft has sent anything since it last began.
        self.has_sent = False
        self._grants = 0
        # The most tokens after the prefix that `grant` has ever allowed. No branch may be longer.
        self.furthest = 0
        # Reset at each new epoch:
        self._epoch = 0
        self._until = 0  # the draft may draft positions before this one
        # Whether the draft's stop policy ended drafting until all pending tokens are judged.
        self._is_paused = False
        self._withheld = -1  # the position for which the draft sends no token
        self._received = 0  # the position after the last token received, used or not
        # The first position where the draft diverged, if no verdict has reported that yet; -1: none.
        self._diverged = -1

    # ---- what the draft may do ----

    @property
    def is_drafting(self) -> bool:
        """Whether the draft will send a token for the position after the committed prefix.

        This depends only on the method, the draft's presence and the position. It must not depend
        on what was drafted, or sampled text would lose the target's distribution.
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
        """Whether the draft, by its stop policy, sends no token for the position after the pending tokens."""
        return (
            self._withheld == len(self._request.sequence.tokens)
            and self._epoch == self._request.epoch
        )

    @property
    def resyncs_too_often(self) -> bool:
        """Whether the draft was resynced more often than is allowed, so that this request goes on without it."""
        num_generated = self._request.sequence.committed - len(self._request.submit.prompt)
        allowed = _RESYNCS + num_generated // _TOKENS_PER_RESYNC
        return not self.is_lost and self._request.counts.resyncs > allowed

    @property
    def needed(self) -> int:
        """How many unfed tokens the target waits for before it starts a forward.

        The window sets this number (`Window.needed`). It is lower where fewer tokens can come: near
        the request's limit, near the end of the draft's context, and after the draft has paused.
        """
        request = self._request
        if not self.is_drafting:
            return 1
        if request.block > 1:
            if self.is_paused:
                return 1 + self.next_block
            return min(self._bounds.needed, 1 + self._num_draftable)
        if self.is_paused or self.withholds:
            return 1
        text_left = request.submit.limit - request.sequence.committed
        return min(self._bounds.needed, text_left, 1 + self._num_draftable)

    @property
    def next_block(self) -> int:
        """Length of the next block: the pending tokens that a block rule judges as a whole.

        A block is shorter than `Request.block` if fewer tokens can come: near the end of the text,
        near the end of the draft's context, and after the draft has paused. A bonus token belongs
        to no block, so the block leaves a position for the bonus token at the end of the text.
        """
        request = self._request
        text_left = request.submit.limit - request.sequence.committed - request.method.bonus
        length = min(request.block, self._num_draftable, max(1, text_left))
        if self.is_paused:
            return min(length, len(request.sequence.pending))
        return length

    @property
    def _num_draftable(self) -> int:
        """How many more positions can be drafted.

        The draft stops at the request's limit, or where its own context is full.
        """
        return min(self._request.submit.limit, self.context) - self._request.sequence.committed

    @property
    def _bounds(self) -> Window:
        request = self._request
        length = request.sequence.committed
        num_pending = len(request.sequence.tokens) - length
        c = self.window
        if request.block > 1:
            c = whole_blocks(c, request.block)
        window = Window.after(
            request.method, request.options.window, c, length, request.is_fresh, num_pending
        )
        if request.block > 1:
            window = window.in_blocks(request.block, length)
        return window

    def grant(self) -> int:
        """Return the first position that the draft may not draft: the draft's limit.

        Within an epoch the limit only grows. Every 8th call also chooses the window c anew. c
        changes only here, where the draft gets a new limit. If c changed at other times, the target
        could wait for tokens beyond the draft's limit. If the text depends on c, c stays as first
        chosen, so that the text is reproducible.
        """
        request = self._request
        keeps = request.method.bonus and not request.options.commits_draws
        if self._grants % _GRANTS_PER_CHOICE == 0 and not (self._grants and keeps):
            self.window = request.options.gamma or self._speeds.best_window(request.beside)
        self._grants += 1
        if self._epoch != request.epoch:
            self._enter_epoch()
        until = min(self._bounds.draft_until, request.submit.limit, self.context)
        self._until = max(self._until, until)
        self.furthest = max(self.furthest, self._until - request.sequence.committed)
        return self._until

    def _enter_epoch(self) -> None:
        self._epoch = self._request.epoch
        self._until = 0
        self._is_paused = False
        self._withheld = -1
        self._received = self._request.foreseen_end
        self._diverged = -1

    # ---- what the draft is sent ----

    def begin(self, do: Do) -> None:
        """Send the draft the whole committed prefix, if `is_drafting`."""
        if not self.is_drafting:
            return
        request = self._request
        seq = request.sequence
        until = self.grant()
        self.known = seq.committed
        self._is_paused = False
        self._withheld = -1
        self.has_sent = False
        prefix = tuple(seq.tokens[: seq.committed])
        do(Send(Begin(request.number, request.epoch, prefix, until, seq.digest, request.options)))

    def announce(self, do: Do) -> None:
        """Send the draft a verdict: the tokens committed since the last verdict, and its new limit.

        Does nothing if no token was committed since then, or if the draft has no prefix to
        continue.
        """
        request = self._request
        seq = request.sequence
        start = self.known
        if not (start and self.is_drafting and start < seq.committed):
            return
        tokens = tuple(seq.tokens[start : seq.committed])
        do(Send(Verdict(request.number, request.epoch, start, tokens, self.grant(), seq.digest)))
        self.known = seq.committed
        self._is_paused = self._is_paused and seq.first_pending is not None

    def finish(self, do: Do) -> None:
        """Tell the draft to stop drafting for this request; `begin` can start it again."""
        if self.known:
            do(Send(Finish(self._request.number)))
        self.known = 0
        self.has_sent = False

    # ---- what the draft sends ----

    def receive(self, message: DraftTokens) -> Received:
        """Handle a message of draft tokens; return what was done with it.

        Raises `RemoteProtocolError` for tokens of a future epoch or beyond the draft's limit; the
        error leaves everything unchanged.
        """
        request = self._request
        if self._is_outdated(message):
            return self._drop()
        if self._epoch != request.epoch:
            self._enter_epoch()
        self._check(message)
        if message.start >= request.submit.limit:
            return self._drop()
        if message.after is not None:
            # A branch may exceed `_until`, because its length counts from its outcome.
            end = message.start + len(message.tokens)
            if end > message.after[0] + 1 + self.furthest:
                return self._drop()
        # The draft does not know the request's limit, so a branch may exceed that limit. The main
        # line ends at `_until`, which is never beyond the limit.
        message = _part(message, 0, request.submit.limit - message.start)
        self._speeds.observe_draft(message.seconds)
        self.has_sent = True
        if message.after is not None and message.epoch == request.epoch:
            return self._keep_branch(message)
        return self._take(message)

    def _take(self, message: DraftTokens) -> Received:
        """Handle tokens of the main line, which is the draft's own continuation of the text.

        A branch is a continuation behind one token that the target may commit. The branch becomes
        the main line if the target commits that token.
        """
        request = self._request
        is_committed = message.start < request.sequence.committed
        if request.runs_ahead and (is_committed or self._is_astray(message)):
            return self._compare(message)
        length = len(request.sequence.tokens)
        if message.start > length:
            return Received.GAP
        if message.start < length:
            request.counts.duplicate += 1
            return Received.NOTHING
        return self._append(message)

    def _is_outdated(self, message: DraftTokens) -> bool:
        """Return whether the tokens are of no use.

        They are of no use if the request is ending, if the method takes no draft tokens, or if
        their epoch is over. Tokens of the branch that began the new epoch are still of use.
        """
        request = self._request
        if request.ending or not request.method.drafts:
            return True
        return message.epoch < request.epoch and not self._is_foreseen(message)

    def _check(self, message: DraftTokens) -> None:
        """Raise `RemoteProtocolError` if the draft had no right to send this message."""
        request = self._request
        if not message.tokens and not request.options.withholds:
            raise RemoteProtocolError("draft sent no tokens, though the rule withholds none")
        end = message.start + len(message.tokens)
        is_too_far = message.after is None and end > self._until
        if message.epoch > request.epoch or is_too_far:
            raise RemoteProtocolError(
                f"draft sent {len(message.tokens)} tokens from position {message.start} in epoch {message.epoch}; "
                f"allowed: up to {self._until} in epoch {request.epoch}"
            )

    def _drop(self) -> Received:
        self._request.counts.stale += 1
        return Received.NOTHING

    def _append(self, message: DraftTokens) -> Received:
        request = self._request
        if message.paused:
            request.counts.num_draft_stops += 1
        if message.tokens:
            request.propose(self._proposal(message, message.start))
        length = len(request.sequence.tokens)
        if not request.options.withholds:
            self._is_paused = message.paused
        elif message.paused:
            self._withheld = length
        else:
            self._withheld = -1
        self._received = length
        return Received.PENDING

    def _compare(self, message: DraftTokens) -> Received:
        """Compare a late message's draft tokens with the tokens that were committed meanwhile.

        If the message follows a wrong draft token, drop it. If all its tokens at committed
        positions agree, its tokens at later positions become pending tokens.
        """
        request = self._request
        counts = request.counts
        seq = request.sequence
        if self._is_astray(message):
            return self._drop()
        if message.start < self._received:
            counts.duplicate += 1
            return Received.NOTHING
        committed_tokens = seq.tokens[message.start : seq.committed]
        num_agreed = common_prefix(committed_tokens, message.tokens)
        is_wrong = num_agreed < min(len(committed_tokens), len(message.tokens))
        num_compared = num_agreed + is_wrong
        counts.num_draft_tokens += num_compared
        counts.num_judged_draft_tokens += num_compared
        counts.num_accepted_draft_tokens += num_agreed
        counts.late += num_agreed
        self._speeds.observe_judgement(num_agreed, num_compared)
        self._received = message.start + num_compared
        if is_wrong:
            self._diverged = message.start + num_agreed
            request.is_fresh = True
        elif len(message.tokens) > num_agreed:
            return self._append(_part(message, num_agreed, len(message.tokens)))
        return Received.COMPARED

    def _keep_branch(self, message: DraftTokens) -> Received:
        """Keep the tokens of a branch, if the outcome that it was prepared for is still possible.

        The target may have committed that outcome already, in place of a wrong draft token. The
        branch's tokens are then compared with the committed tokens instead.
        """
        assert message.after is not None
        position, token = message.after
        request = self._request
        tokens = request.sequence.tokens
        if position == self._diverged and tokens[position] == token:
            if message.start > len(tokens):
                return self._drop()
            return self._compare(message)
        branches = request.proposals.branches
        branch = branches.get(message.after)
        if branch is not None:
            is_next = message.start == branch.end
        else:
            is_next = message.start == position + 1 and len(branches) < MAX_BRANCHES
        if not (request.options.branches and is_next and self._is_open(position, token)):
            return self._drop()
        if self._is_astray(message):
            return self._drop()
        request.proposals.add(self._proposal(message, position + 1, message.after))
        return Received.NOTHING

    def _is_open(self, position: int, token: int) -> bool:
        """Return whether a branch for `token` at `position` may still be needed.

        The branch may be needed if the position is not committed, and the main line has another
        token there. It may also be needed if the main line ends just before the position, and the
        method has bonus tokens.
        """
        request = self._request
        tokens = request.sequence.tokens
        if position < request.sequence.committed:
            return False
        if position < len(tokens):
            return tokens[position] != token
        return request.method.bonus and position == len(tokens)

    def _is_astray(self, message: DraftTokens) -> bool:
        """Return whether these tokens cannot be right, because they follow a wrong draft token.

        The draft sent them before it knew that the target had replaced the wrong draft token.
        """
        is_correction = message.after is not None and message.after[0] == self._diverged
        return message.known <= self._diverged and not is_correction

    def _is_foreseen(self, message: DraftTokens) -> bool:
        """Return whether these tokens continue the branch that began this epoch.

        The draft sent them before it received the verdict that began the epoch, so they still carry
        the number of the epoch before.
        """
        is_previous = message.epoch == self._request.epoch - 1
        return (
            message.after is not None and is_previous and message.after == self._request.opened_by
        )

    def _proposal(
        self, message: DraftTokens, start: int, outcome: tuple[int, int] | None = None
    ) -> Proposal:
        runners_up = message.runners_up if self._request.takes_siblings else ()
        return Proposal(start, message.tokens, message.rows, message.source, outcome, runners_up)


def _part(message: DraftTokens, start: int, end: int) -> DraftTokens:
    """Return a copy of the message with only its tokens[start:end]."""
    if start == 0 and end >= len(message.tokens):
        return message
    is_lookup = start > 0 and message.source is Source.MODEL
    return message.changed(
        start=message.start + start,
        tokens=message.tokens[start:end],
        rows=message.rows[start:end],
        source=Source.LOOKUP if is_lookup else message.source,
        runners_up=message.runners_up[start:end],
    )
