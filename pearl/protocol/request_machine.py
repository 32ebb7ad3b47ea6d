"""The target's state machine for one request, which owns the prefix and issues every verdict.

`handle` takes an event and returns commands. All decoding methods are settings of this one machine
(`spec.methods`). What differs between acceptance rules, models and transports is hidden behind the
commands and the verifier.

A forward is fed the unfed tokens: the last committed token and the pending ones, which are drafted
and not judged yet. It yields one row of logits for the position after each fed token. Then
`_decide` uses the available rows:

* there is a row and a draft token for its position: judge the token;
* there is a row, and no draft token will come: draw from the row;
* there is a row, and its draft token is still to come: hold the row;
* there is no row: feed the unfed tokens, once the window is full enough.

The target may also be fed guesses, which come from n-grams, a datastore or a head. They form a tree
together with the unfed tokens. If the text turns out to follow a guess, the row after the guess is
there already. Under some rules the target commits its own draw, whatever was proposed. If such a
rule is used with guesses, no row is held: the target draws at once, and the draft continues from
the tokens that the target sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from pearl.errors import ForwardError, RemoteProtocolError
from pearl.protocol.draft_state import DraftState, Received
from pearl.protocol.events import (
    Cause,
    DraftDropped,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Forward,
    Forwarded,
    Judge,
    Keep,
    Odds,
    Open,
    Phase,
    Rollback,
    Sample,
    Sampled,
    Verifier,
    Wait,
)
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.look_ahead import LookAhead
from pearl.protocol.machine import Do, Machine, Table
from pearl.protocol.messages import (
    Cancel,
    DraftTokens,
    FinishReason,
    Provenance,
    Resync,
    Source,
    Submit,
)
from pearl.protocol.method_trials import AutoText
from pearl.protocol.request import Request
from pearl.protocol.scheduler import prefill_chunk
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds


class State(Enum):
    IDLE = "idle"  # not begun, or ended
    PREFILL = "prefill"  # a forward of the prompt is running
    PRE_VERIFY = "pre-verify"  # a forward of one token (and guesses) is running
    POST_VERIFY = "post-verify"  # a forward of several tokens (and guesses) is running
    HELD = "held"  # a row is there, but the draft token that it judges is not
    GATHERING = "gathering"  # waits for enough draft tokens to start a forward


WAITING = frozenset({State.HELD, State.GATHERING})  # the machine waits for draft tokens
_ENDED = frozenset({State.IDLE})
_ALONE = frozenset({State.PRE_VERIFY})
_STEPS = frozenset({State.PRE_VERIFY, State.POST_VERIFY})
_DECIDED = WAITING | _STEPS | _ENDED

# state -> event -> the states that may follow; anything else is illegal. The README's diagram is generated from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.IDLE: {Submit: frozenset({State.PREFILL})},
    State.PREFILL: {Forwarded: _DECIDED | {State.PREFILL}, Failed: _ENDED},
    State.PRE_VERIFY: {Forwarded: _DECIDED, Failed: _ENDED},
    State.POST_VERIFY: {Forwarded: _DECIDED, Failed: _ENDED},
    State.HELD: {DraftTokens: _DECIDED, DraftGone: _ALONE | _ENDED, Cancel: _ENDED},
    State.GATHERING: {DraftTokens: _STEPS, DraftGone: _ALONE, Cancel: _ENDED},
}
# Legal in every state, because peers do not wait for our forwards. An event of these that
# TRANSITIONS does not list for a state leaves that state unchanged.
ANYTIME = (Submit, Cancel, DraftTokens, DraftGone, DraftJoined, Resync)


class RequestMachine(Machine):
    """The target's machine for one request, in slot `slot`.

    Args:
        sequence: the slot's sequence. It still has the text of the slot's last request, whose KV
            cache this request may reuse.
        speeds: the measured speeds of the engine, which this machine updates.
        verifier: judges draft tokens and draws tokens, with the logits of the request's last
            forward.
        draft_context: how many tokens the draft model holds; 0 if there is no draft.
        window: the window length c to begin with.
        running: the machines of all running requests, this one included.
    """

    role: ClassVar[str] = "target"
    transitions: ClassVar[Table[Any]] = TRANSITIONS
    anytime: ClassVar[tuple[type, ...]] = ANYTIME

    def __init__(
        self,
        submit: Submit,
        sequence: TokenSequence,
        slot: int,
        speeds: Speeds,
        verifier: Verifier,
        draft_context: int,
        window: int,
        running: Mapping[int, RequestMachine],
    ) -> None:
        super().__init__()
        self.state = State.IDLE
        self.sequence = sequence
        self.slot = slot
        self._speeds = speeds
        self._verifier = verifier
        self._running = running
        self.request = Request(submit, sequence)
        self.draft = DraftState(self.request, speeds, draft_context, window)
        self.auto = AutoText(self.request, self.draft, speeds, running)
        self._look_ahead = LookAhead(self.request, speeds)
        self.fed = FedTokens(0, ())  # what the last forward was fed

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self.request.epoch

    # ---- events ----

    def _submit(self, submit: Submit, do: Do) -> None:
        self.request.begin()
        do(Open(submit.prompt, submit.options, self.slot, request=submit.request))
        self.auto.begin(do)
        self.draft.begin(do)
        self._forward(Phase.PREFILL, do)

    def _cancel(self, _: Cancel, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        if self.state in WAITING:
            self._decide(do)

    def _forwarded(self, event: Forwarded, do: Do) -> None:
        if event.fed is not None and event.fed.guessers:
            self._take_guesses(event.fed)
        is_prompt = self.state is State.PREFILL
        if not is_prompt:  # the time of a prompt's forward tells nothing about that of a window
            self._observe_step(event)
            self.auto.step(event.at, do)
        has_prompt_left = is_prompt and self.sequence.fed < self.sequence.committed
        if has_prompt_left and not self.request.ending:
            self._forward(Phase.PREFILL, do)
        else:
            self._decide(do)

    def _take_guesses(self, fed: FedTokens) -> None:
        self.fed = fed
        self.sequence.cached = fed.start  # `_settle` keeps one path of a tree
        if fed.parents is None:
            self.sequence.cached += len(fed.tokens)
        counts = self.request.counts
        counts.num_guesses += len(fed.guessers)
        counts.num_siblings += fed.guessers.count(Source.RUNNER_UP)

    def _observe_step(self, event: Forwarded) -> None:
        request = self.request
        request.counts.was_shared |= len(self._running) > 1
        if event.beside is None:
            return
        fed = len(self.fed.tokens) + event.beside
        request.beside = event.beside
        self._speeds.observe_target(fed, event.seconds)
        if fed == 1:
            request.counts.lone_forwards += 1
            request.counts.lone_seconds += event.seconds

    def _failed(self, event: Failed, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        self.sequence.fed = 0  # the cache may hold what the model failed on
        self._finish(do, event)

    def _draft_tokens(self, message: DraftTokens, do: Do) -> None:
        received = self.draft.receive(message)
        if received is Received.GAP:
            self._resynchronise(do)
        elif received is Received.PENDING:
            self.request.preview(do)
            if self.state in WAITING:
                self._decide(do)
        elif received is Received.COMPARED and self.state is State.GATHERING:
            self._decide(do)

    def _draft_joined(self, event: DraftJoined, do: Do) -> None:
        self.draft.context = event.context
        if not self.request.ending:
            self._resynchronise(do)

    def _draft_gone(self, event: DraftGone, do: Do) -> None:
        if event.request is not None and self.draft.is_lost:
            return
        self.request.counts.loss = event.reason
        if event.request is None:
            self.draft.context = self.draft.known = 0
            self.auto.lose_draft()
        else:
            self.draft.is_lost = True
            self.draft.finish(do)  # the draft may have been sent the prefix again since
            do(DraftDropped(event.reason, request=event.request))
        self.request.discard_pending()
        if self.state in WAITING:
            self._decide(do)

    def _resync(self, message: Resync, do: Do) -> None:
        if message.epoch < self.epoch or self.request.ending or not self.request.method.drafts:
            self.request.counts.stale += 1
        elif message.epoch > self.epoch:
            raise RemoteProtocolError(
                f"draft asks to resynchronise epoch {message.epoch}; it is epoch {self.epoch}"
            )
        else:
            self._resynchronise(do)

    # ---- what to do next ----

    def _decide(self, do: Do) -> None:
        """Use the available rows, then finish, wait, or start a forward.

        Called whenever no forward is running; this is the only place that chooses the next step.
        """
        request = self.request
        try:
            is_held = self._use_rows()
        except ForwardError as error:
            failed = Failed(str(error), type(error).__name__, request=request.number)
            self._failed(failed, do)
            return
        if request.ending:
            self._finish(do)
            return
        self._announce(do)
        if is_held:
            self.state = State.HELD
            do(Wait(Cause.HELD_ROW, request=request.number))
        elif len(self.sequence.tokens) - self.sequence.fed < self.draft.needed:
            self.state = State.GATHERING
            do(Wait(Cause.WINDOW, request=request.number))
        else:
            self._forward(Phase.PRE_VERIFY, do)

    def _use_rows(self) -> bool:
        """Judge and draw with the available rows.

        Return whether the next row has to wait for its draft token.
        """
        request = self.request
        seq = self.sequence
        while not request.ending:
            if seq.fed < len(seq.tokens):
                self.fed.follow(seq)
            if seq.fed < seq.committed:  # no row for the position after the prefix
                return False
            count = self._num_judged()
            if count:
                self._judge(count)
            elif request.runs_ahead or self._row_is_direct:
                self._sample()
            elif request.block == 1:
                return True
            else:
                # Feed the last committed token again, with a block, for the row after it.
                seq.fed = seq.committed - 1
                return False
        return False

    def _num_judged(self) -> int:
        """Return how many pending tokens the rows of the last forward can judge.

        Under a block rule this is a whole block or 0. The row for a bonus token judges nothing,
        even if a draft token for its position has come, because the text must not depend on timing.
        """
        request = self.request
        seq = self.sequence
        if request.runs_ahead:
            return 0
        rows = seq.fed + 1 - seq.committed
        if request.method.bonus and (rows > 1 or not request.is_fresh):
            rows -= 1
        count = min(len(seq.tokens) - seq.committed, rows)
        if request.block == 1 or not count:
            return count
        block = self.draft.next_block
        return block if count >= block else 0

    @property
    def _row_is_direct(self) -> bool:
        """Whether the next token is drawn from its row, without a draft token to judge.

        This is so for a bonus token, and if no draft token will come.
        """
        if self._has_bonus or not self.draft.is_drafting:
            return True
        return self.draft.withholds and self.sequence.first_pending is None

    @property
    def _has_bonus(self) -> bool:
        return self.request.method.bonus and not self.request.is_fresh

    def _judge(self, count: int) -> None:
        """Judge the first `count` pending tokens, and commit the result."""
        request = self.request
        start = self.sequence.committed
        judge = Judge(
            start,
            tuple(self.sequence.tokens[start : start + count]),
            request.proposals.rows(count),
            self.fed.nodes(start, count),
            request=request.number,
        )
        judged = self._verifier.judge(judge)
        num_judged = judged.accepted + (judged.token is not None)
        self._speeds.observe_judgement(judged.accepted, num_judged)
        if judged.odds is not None:
            request.counts.odds = judged.odds + (request.counts.odds or Odds())
            request.counts.num_rejections += judged.token is not None and not judged.is_candidate
        for number in range(1, judged.accepted + 1):
            request.commit(None, Provenance.ACCEPTED, judged.stop_after == number)
        if judged.token is not None:
            provenance = Provenance.CORRECTED
            if judged.is_candidate:
                provenance = Provenance.ACCEPTED
            request.commit(judged.token, provenance, judged.stop_after == num_judged)

    def _sample(self) -> None:
        """Draw the next token from the target's row, and commit it.

        If the drawn token was fed as a guess, the row after the guess gives a further token, and so
        on.
        """
        request = self.request
        position = self.sequence.committed
        (node,) = self.fed.nodes(position, 1)
        # The target draws a withheld token itself; the draft goes on after it.
        follow = request.looks_ahead and not self.draft.withholds
        sampled = self._verifier.sample(Sample(position, node, follow, request=request.number))
        if request.looks_ahead:
            self.commit_draws(sampled, node)
            return
        provenance = Provenance.DIRECT
        if self._has_bonus and self.draft.is_drafting:
            provenance = Provenance.BONUS
        request.commit(sampled.tokens[0], provenance, sampled.stop_after == 1)

    def commit_draws(self, sampled: Sampled, node: int) -> None:
        """Commit the target's own draws, and count the draft tokens that agree with them.

        All draws but the last were fed as guesses. In the tree of guesses they are a path that
        begins after `node`.
        """
        request = self.request
        num_accepted = 0
        num_undrafted = 0
        is_wrong = False
        nodes = self.fed.walk(node, sampled.tokens)
        for index, token in enumerate(sampled.tokens):
            if request.ending:
                break
            is_stop = sampled.stop_after == index + 1
            is_last = index == len(sampled.tokens) - 1
            draft_token = self.sequence.first_pending
            if draft_token is not None:
                request.learn(self._speeds.foresight, token)
            if draft_token == token:
                num_accepted += 1
                request.commit(None, Provenance.ACCEPTED, is_stop)
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
            request.commit(token, provenance, is_stop)
            if index < len(nodes):
                request.count_guess(self.fed.guesser(nodes[index]))
        self._speeds.observe_judgement(num_accepted, num_accepted + is_wrong)
        # A window goes on if all draft tokens that came were right, and at most one token was
        # committed that the draft has not sent yet.
        request.is_fresh = is_wrong or not num_accepted or num_undrafted > 1

    # ---- forwards ----

    def _forward(self, phase: Phase, do: Do) -> None:
        """Start a forward.

        In phase PREFILL it is fed the prompt's next chunk, otherwise all unfed tokens and guesses.
        PRE_VERIFY becomes POST_VERIFY if several tokens are fed. The token at the last position
        before the request's limit is not fed, because no token follows it.
        """
        request = self.request
        seq = self.sequence
        guess = None
        if phase is Phase.PREFILL:
            count = prefill_chunk(seq, is_alone=len(self._running) == 1)
        else:
            count = min(len(seq.tokens), request.submit.limit - 1) - seq.fed
            if count > 1:
                phase = Phase.POST_VERIFY
            if request.looks_ahead:
                guess = self._look_ahead.guess()
        self._settle(do)
        start = seq.fed
        tokens = tuple(seq.feed(count))
        self.fed = FedTokens(start, tokens)
        request.counts.target_steps[phase] += 1
        request.has_stepped |= phase is not Phase.PREFILL
        rows = max(0, seq.fed + 1 - seq.committed)
        do(Forward(phase, start, tokens, rows, guess, request=request.number))
        self.state = State(phase.value)  # states are named like phases

    def _settle(self, do: Do) -> None:
        """Make the KV cache hold exactly the fed tokens.

        Sends a command to roll back the cache, or to keep one path of the last tree of guesses.
        """
        seq = self.sequence
        if seq.cached > seq.fed:
            do(Rollback(seq.fed, request=self.request.number))
        elif seq.cached < seq.fed:
            do(Keep(tuple(self.fed.path[: seq.fed - seq.cached]), request=self.request.number))
        seq.cached = seq.fed

    # ---- the end, and beginning again ----

    def _announce(self, do: Do) -> None:
        """Send the new committed tokens to the draft and to the front.

        A front that wants previews is sent the pending tokens too.
        """
        self.draft.announce(do)
        self.request.deliver(do)
        if self.request.submit.preview and self.sequence.first_pending is not None:
            self.request.preview(do)

    def _resynchronise(self, do: Do) -> None:
        """Give the draft the whole prefix again, in a new epoch."""
        self.request.counts.resyncs += 1
        self.request.discard_pending()
        self.draft.begin(do)

    def _finish(self, do: Do, failure: Failed | None = None) -> None:
        request = self.request
        request.deliver(do)
        self.draft.finish(do)
        self.auto.end()
        assert request.ending is not None
        end = End(
            request.number,
            request.ending,
            len(request.submit.prompt),
            request.counts,
            self.draft.window,
            failure,
        )
        do(end)
        self.sequence.drop_pending()
        if self.sequence.cached < self.sequence.fed:
            # The slot's next request does not know this request's last tree.
            self._settle(do)
        request.proposals.clear()
        self.state = State.IDLE
        do(Wait(Cause.IDLE))


RequestMachine.handlers = {
    Submit: RequestMachine._submit,
    Cancel: RequestMachine._cancel,
    Forwarded: RequestMachine._forwarded,
    Failed: RequestMachine._failed,
    DraftTokens: RequestMachine._draft_tokens,
    DraftJoined: RequestMachine._draft_joined,
    DraftGone: RequestMachine._draft_gone,
    Resync: RequestMachine._resync,
}
