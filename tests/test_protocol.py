"""The two state machines, step by step: their tables, what a peer may send, and a draft's comings and goings.

That every interleaving comes to a good end is for test_model_check; here are single steps, and long random runs.
"""

from __future__ import annotations

from functools import partial
from itertools import count, product

import pytest

from pearl.errors import RemoteProtocolError
from pearl.protocol import coordinator as target_side
from pearl.protocol import drafter as draft_side
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Deliver,
    Draft,
    Drafted,
    End,
    Forward,
    Open,
    Phase,
    Rollback,
    Send,
)
from pearl.protocol.messages import (
    Begin,
    Cancel,
    Committed,
    DraftTokens,
    FinishReason,
    Provenance,
    Resync,
    Verdict,
)
from pearl.protocol.options import RequestOptions
from pearl.protocol.sequence import TokenSequence, common_prefix, extend_digest
from pearl.spec.methods import METHODS
from tests.protocol_pair import (
    LOST,
    PROMPT,
    TEXT,
    WRONG,
    ChokingDraft,
    Pair,
    ScriptDraft,
    ScriptTarget,
    at_random,
    check_counts,
    draft_in,
    make_pair,
    script,
    submission,
    until,
)
from tests.replace import replace
from tests.test_model_check import freeze


def finish(pair: Pair, text: tuple[int, ...] = TEXT, seed: int = 0) -> None:
    """Runs to the end and checks the text."""
    pair.run(at_random(seed))
    for result in pair.results.values():
        assert tuple(result.tokens) == text[result.prompt :]
        check_counts(result)


def garble(verdict: object) -> Verdict:
    assert isinstance(verdict, Verdict)
    return replace(verdict, digest=verdict.digest ^ 1)


# ---- messages of the draft (invariant 6) ----


def held(wrong: tuple[int, ...] = (), branches: int = 0) -> Pair:
    """A target that holds its first row, for a draft that has sent nothing yet."""
    pair = make_pair(wrong=wrong, branches=branches)
    return until(
        pair,
        lambda p: p.coordinator.state is target_side.State.HELD,
        lambda moves: "target" if "target" in moves else moves[0],
    )


@pytest.mark.parametrize("message", [DraftTokens(7, 0, 2, (99,)), DraftTokens(1, -1, 2, (99,))])
def test_stale_tokens_are_dropped_and_counted(message: DraftTokens) -> None:
    pair = held()
    before = freeze(pair.coordinator)
    assert pair.coordinator.handle(message) == []
    assert freeze(pair.coordinator) == before
    assert pair.coordinator.counts.stale == 1
    finish(pair)


def test_tokens_of_an_older_epoch_are_dropped_after_a_rejection() -> None:
    """What the draft sent before it learned of the rejection."""
    pair = until(make_pair(wrong=(4,), window="stream"), lambda p: p.coordinator.epoch == 1)
    late = DraftTokens(1, 0, len(pair.coordinator.sequence.tokens), (99,))
    stale = pair.coordinator.counts.stale
    pair.tell_target(late)
    assert pair.coordinator.counts.stale == stale + 1
    finish(pair)


def test_a_known_start_is_a_duplicate() -> None:
    pair = until(make_pair(), lambda p: len(p.coordinator.sequence.pending) == 1)
    known = len(pair.coordinator.sequence.tokens) - 1
    pending = list(pair.coordinator.sequence.pending)
    pair.tell_target(DraftTokens(1, pair.coordinator.epoch, known, (99,)))
    assert pair.coordinator.counts.duplicate == 1
    assert pair.coordinator.sequence.pending == pending
    finish(pair)


def test_a_gap_resynchronises_with_the_whole_prefix() -> None:
    pair = held()
    commands = pair.coordinator.handle(DraftTokens(1, 0, 3, (99,)))
    (begin,) = [c.message for c in commands if isinstance(c, Send)]
    assert isinstance(begin, Begin)
    assert (begin.epoch, begin.tokens) == (1, PROMPT)
    assert pair.coordinator.counts.resyncs == 1
    pair.to_draft.append(begin)
    finish(pair)


def test_a_gap_during_a_judgement_waits_for_it() -> None:
    """As the draft's going and coming do: the verdict being computed stands."""
    pair = until(make_pair(), lambda p: p.coordinator.state is target_side.State.JUDGING)
    pair.tell_target(DraftTokens(1, 0, len(pair.coordinator.sequence.tokens) + 1, ()))
    finish(pair)


@pytest.mark.parametrize(
    "message",
    [
        DraftTokens(1, 1, 2, (9,)),
        DraftTokens(1, 0, 2, (9,) * 3),
        DraftTokens(1, 0, 4, (9,)),
        DraftTokens(1, 0, 1 << 40, (9,)),
    ],
    ids=["future epoch", "too many", "beyond its bound", "far beyond"],
)
def test_what_the_draft_had_no_right_to_send_is_refused(message: DraftTokens) -> None:
    """It may draft positions 2 and 3, in epoch 0. Refused, and the machine is as it was."""
    pair = held()
    before = freeze(pair.coordinator)
    with pytest.raises(RemoteProtocolError, match="epoch 0"):
        pair.coordinator.handle(message)
    assert freeze(pair.coordinator) == before
    finish(pair)


@pytest.mark.parametrize("branches", [0, 4])
def test_a_draft_prepares_no_further_than_it_may_draft(branches: int) -> None:
    """It could give the target 64 branches to keep, each as long as the text may become, with a row a token."""
    pair = held(branches=branches)
    request = pair.coordinator.running[1]
    assert request.draft._furthest == 2
    request.sequence.extend((9, 9))
    stale = pair.coordinator.counts.stale
    for start in range(3, 9):
        pair.coordinator.handle(DraftTokens(1, 0, start, (7,), known=2, after=(2, 8)))
    pair.coordinator.handle(DraftTokens(1, 0, 3, (7,) * 5, known=2, after=(2, 6)))
    assert [branch.tokens for branch in request.request.proposals.branches] == ([(7, 7)] if branches else [])
    assert pair.coordinator.counts.stale - stale == (5 if branches else 7)


def test_a_begin_that_contradicts_itself_is_refused() -> None:
    begin = Begin(1, 0, PROMPT, 9, extend_digest(0, PROMPT), RequestOptions())
    for bad in (
        replace(begin, digest=begin.digest ^ 1),
        replace(begin, tokens=(), digest=0),
        replace(begin, tokens=(3, 2)),
    ):
        machine = Drafter(100)
        before = freeze(machine)
        with pytest.raises(RemoteProtocolError, match="digest"):
            machine.handle(bad)
        assert freeze(machine) == before


# ---- divergence (invariant 7) ----


def test_a_digest_that_does_not_match_brings_the_whole_prefix() -> None:
    pair = until(make_pair(window="stream"), lambda p: any(isinstance(m, Verdict) for m in p.to_draft))
    assert isinstance(pair.to_draft[-1], Verdict)
    pair.to_draft[-1] = garble(pair.to_draft[-1])
    until(
        pair,
        lambda p: any(isinstance(m, Resync) for m in p.to_target),
        lambda moves: "to_draft" if "to_draft" in moves else "draft",
    )
    finish(pair)
    assert pair.results[1].counts.resyncs == 1


def test_a_verdict_with_a_gap_brings_the_whole_prefix() -> None:
    """As after a verdict that was lost."""
    pair = until(make_pair(window="stream"), lambda p: any(isinstance(m, Verdict) for m in p.to_draft))
    pair.to_draft.pop()
    finish(pair)
    assert pair.results[1].counts.resyncs >= 1


def test_a_resync_that_a_rejection_has_overtaken_is_answered() -> None:
    """The draft is lost in epoch 0; before its Resync arrives a rejection begins epoch 1. Someone has to speak."""
    machine = draft_in(draft_side.State.WAITING)
    commands = machine.handle(Verdict(1, 0, 2, (7,), 5, digest=1))
    assert Send(Resync(1, 0)) in commands
    pair = until(
        make_pair(wrong=(2,)), lambda p: p.coordinator.state is target_side.State.HELD and p.coordinator.epoch == 1
    )
    answer = pair.coordinator.handle(Resync(1, 0))
    again = machine.handle(Verdict(1, 1, 3, (8,), 6, digest=2))
    assert any(isinstance(c, Send) for c in [*answer, *again])


def test_digests_tell_prefixes_apart() -> None:
    prefixes = [(), (0,), (0, 0), (1,), (1, 2), (2, 1), (1, 2, 3), (1, 2, 4)]
    assert len({extend_digest(0, prefix) for prefix in prefixes}) == len(prefixes)
    assert extend_digest(extend_digest(0, (1, 2)), (3,)) == extend_digest(0, (1, 2, 3))
    assert extend_digest(0, range(100_000)) < 2**61


# ---- a draft that goes and comes (invariant 9), a request that is cancelled ----


def moves_of(method: str, window: str, seed: int) -> int:
    pair = make_pair(method, (4, 9, 10), window=window)
    picker = at_random(seed)
    for n in count():
        if pair.done:
            return n
        pair.move(picker(pair.moves))
    raise AssertionError


@pytest.mark.parametrize("window", ["fixed", "stream"])
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_may_die_at_any_point(method: str, window: str) -> None:
    runs = [(seed, point) for seed in range(2) for point in range(1, moves_of(method, window, seed), 3)]
    for seed, point in runs:
        pair = make_pair(method, (4, 9, 10), window=window)
        picker = at_random(seed)
        for _ in range(point):
            pair.move(picker(pair.moves))
        pair.kill_draft()
        finish(pair, seed=seed)


def test_a_draft_may_return_at_any_point() -> None:
    """It is given the whole prefix; tokens of its former life, or of another request, change nothing."""
    for method in ("pearl", "pearl-no-post-verify"):
        for seed in range(6):
            for gone in range(2, moves_of(method, "stream", seed), 8):
                pair = make_pair(method, (4, 9, 10), window="stream")
                picker = at_random(seed)
                for moves in range(2000):
                    if moves == gone:
                        pair.kill_draft()
                    if moves >= gone + 3 * seed and not pair.drafter:
                        pair.join_draft()
                    if pair.done:
                        break
                    pair.move(picker(pair.moves))
                finish(pair)


def test_a_draft_that_returns_is_used_again() -> None:
    pair = make_pair()
    until(pair, lambda p: bool(p.coordinator.counts.accepted))
    pair.kill_draft()
    until(pair, lambda p: p.coordinator.counts.provenance[Provenance.DIRECT] > 1)
    alone = pair.coordinator.counts.accepted
    pair.join_draft()
    until(pair, lambda p: p.coordinator.counts.accepted > alone + 3)


def test_without_a_draft_the_target_decodes_alone() -> None:
    pair = Pair([submission(TEXT)], ScriptTarget(TEXT), partial(ScriptDraft, TEXT), draft_context=None)
    finish(pair)
    assert set(pair.results[1].provenance) == {Provenance.DIRECT}


@pytest.mark.parametrize("method", ["ar", "pearl", "pearl-no-pre-verify", "pearl-no-post-verify"])
def test_a_request_may_be_cancelled_at_any_point(method: str) -> None:
    """What was committed stands, nothing is committed after, and the next request is served as if nothing had been."""
    for point in range(1, moves_of(method, "stream", 3), 2):
        pair = make_pair(method, (4, 9, 10), window="stream")
        picker = at_random(3)
        for _ in range(point):
            pair.move(picker(pair.moves))
        pair.tell_target(Cancel(1))
        pair.run(picker)
        result = pair.results[1]
        assert tuple(result.tokens) == TEXT[len(PROMPT) : len(PROMPT) + len(result.tokens)]
        assert result.end is not None
        assert result.end.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        check_counts(result)
        pair.submits.append(submission(TEXT, method, request=2, gamma=2))
        pair.run(picker)
        assert tuple(pair.results[2].tokens) == TEXT[len(PROMPT) :]


def test_a_cancelled_request_is_not_resynchronised() -> None:
    """While its last forward runs, the draft is left alone."""
    pair = until(make_pair(window="stream", gamma=8), lambda p: p.coordinator.state is target_side.State.POST_VERIFY)
    pair.tell_target(Cancel(1))
    until(pair, lambda p: p.moves == ["target"] or p.coordinator.counts.resyncs > 0, _busy_target)
    assert pair.coordinator.counts.resyncs == 0


def _busy_target(moves: list[str]) -> str:
    return next((move for move in moves if move != "target"), "target")


def test_cancelling_an_unknown_request_does_nothing() -> None:
    pair = held()
    before = freeze(pair.coordinator)
    assert pair.coordinator.handle(Cancel(5)) == []
    assert freeze(pair.coordinator) == before


# ---- a draft that cannot go on with a request ----


@pytest.mark.parametrize("window", ["fixed", "stream"])
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_may_choke_at_any_position(method: str, window: str) -> None:
    """The text goes on with the target alone; the next request, of which it does not choke, is drafted."""
    other = script(40, (5, 6))
    for seed, chokes in product(range(6), range(2, len(TEXT))):
        settings = {"window": window, "gamma": 2}
        submits = [submission(TEXT, method, **settings), submission(other, method, request=2, **settings)]
        target = BothTargets(TEXT, other)
        pair = Pair(submits, target, lambda chokes=chokes: BothDrafts(TEXT, other, chokes))  # type: ignore[misc]
        pair.run(at_random(seed))
        for request, text in ((1, TEXT), (2, other)):
            assert tuple(pair.results[request].tokens) == text[len(PROMPT) :]
            check_counts(pair.results[request])
        drafts = METHODS[method].drafts
        assert bool(pair.results[2].counts.accepted) == drafts
        if chokes == len(PROMPT):
            assert not pair.results[1].counts.judged


class BothTargets(ScriptTarget):
    """A target that would write either text, by how it begins."""

    def __init__(self, *texts: tuple[int, ...]) -> None:
        super().__init__(texts[0])
        self.texts = texts

    def execute(self, command: object) -> object | None:
        if isinstance(command, Open):
            self.text = next(text for text in self.texts if text[0] == command.prompt[0])
        return super().execute(command)


class BothDrafts(ChokingDraft):
    """Likewise; it chokes on the first text only."""

    def __init__(self, first: tuple[int, ...], second: tuple[int, ...], chokes: int) -> None:
        super().__init__(first, (9,))
        self.texts, self.position = (first, second), chokes

    def execute(self, command: object) -> object | None:
        if isinstance(command, Draft):
            held = (*self.cache.tokens[: command.start], *command.tokens)
            self.text = next(text for text in self.texts if text[0] == held[0])
            self.chokes = (self.position,) if self.text is self.texts[0] else ()
        return super().execute(command)


def test_a_draft_that_chokes_keeps_nothing_of_its_cache() -> None:
    """What it holds may be what it choked on."""
    machine = draft_in(draft_side.State.DRAFTING)
    machine.handle(Drafted(failure="not finite"))
    assert machine.state is draft_side.State.IDLE
    again = machine.handle(Begin(2, 0, PROMPT, 3, extend_digest(0, PROMPT), RequestOptions()))
    assert [type(command) for command in again] == [Open, Rollback, Draft]
    assert again[1] == Rollback(0, request=2)


def test_a_failed_draw_that_was_overtaken_ends_nothing() -> None:
    """The prefix that it choked on no longer stands: a verdict, or another request, came meanwhile."""
    machine = draft_in(draft_side.State.DRAFTING)
    machine.handle(Begin(2, 0, (*PROMPT, 8), 9, extend_digest(0, (*PROMPT, 8)), RequestOptions()))
    commands = machine.handle(Drafted(failure="not finite"))
    assert not any(isinstance(command, Send) for command in commands)
    assert commands[-1] == Draft(0, (*PROMPT, 8), 6, prompt=True, request=2)


# ---- several requests ----


@pytest.mark.parametrize("seed", range(10))
def test_requests_queue_and_come_in_order(seed: int) -> None:
    """Submitted all at once; each is decoded whole, in its turn."""
    submits = [submission(TEXT, method, request=i, gamma=2) for i, method in enumerate(("pearl", "ar", "pearl"))]
    pair = Pair(submits, ScriptTarget(TEXT), partial(ScriptDraft, TEXT, (4, 9)))
    for _ in submits:
        pair.move("submit")
    finish(pair, seed=seed)
    ended = [command.request for command in pair.log if isinstance(command, End)]
    assert ended == [0, 1, 2]


def test_a_queued_request_can_be_cancelled() -> None:
    pair = Pair([submission(TEXT, request=i) for i in range(3)], ScriptTarget(TEXT), partial(ScriptDraft, TEXT))
    for _ in range(3):
        pair.move("submit")
    pair.tell_target(Cancel(1))
    end = pair.results[1].end
    assert end is not None
    assert end.reason is FinishReason.CANCELLED
    pair.run(at_random(0))
    assert not pair.results[1].tokens
    assert len(pair.results[2].tokens) == len(TEXT) - len(PROMPT)


def test_both_caches_keep_what_two_requests_have_in_common() -> None:
    """Only the last prompt token and what differs is fed again (the scripted caches check that it is right)."""
    chat = TEXT[:20]
    pair = Pair([submission(chat, gamma=2)], ScriptTarget(TEXT), partial(ScriptDraft, TEXT, (9,)))
    pair.run(at_random(0))
    pair.log.clear()
    pair.submits.append(submission(TEXT, prompt=18, request=2, gamma=2))
    pair.run(at_random(0))
    assert tuple(pair.results[2].tokens) == TEXT[18:]
    fed = {kind: next(c for c in pair.log if isinstance(c, kind)) for kind in (Forward, Draft)}
    assert fed[Forward].start == 17
    assert fed[Draft].start >= 16
    assert fed[Forward].tokens == TEXT[17:18]


def test_caches_roll_back_where_prompts_part() -> None:
    other = (*TEXT[:4], 7, 8, 9)
    machine = TokenSequence()
    machine.restart(TEXT[:6])
    machine.feed(6)
    machine.restart(other)
    assert (machine.fed, machine.cached) == (4, 6)
    assert machine.feed(10) == [7, 8, 9]
    assert machine.cached == 7
    assert common_prefix(TEXT, other) == 4


# ---- what is told ----


def test_verdicts_are_what_was_committed_once_each() -> None:
    pair = make_pair(wrong=(4, 9))
    finish(pair)
    verdicts = [c.message for c in pair.log if isinstance(c, Send) and isinstance(c.message, Verdict)]
    told = [token for verdict in verdicts for token in verdict.tokens]
    assert tuple(told) == TEXT[len(PROMPT) : len(PROMPT) + len(told)]
    assert [v.epoch for v in verdicts] == sorted(v.epoch for v in verdicts)
    for verdict in verdicts:
        assert verdict.digest == extend_digest(0, TEXT[: verdict.start + len(verdict.tokens)])
        assert verdict.draft_until <= len(TEXT)


def test_previews_are_sent_only_on_request_and_only_what_is_pending() -> None:
    guessed = (*TEXT[:9], WRONG, *[LOST] * len(TEXT))
    for preview in (False, True):
        pair = make_pair(wrong=(9,), limit=9, preview=preview, window="stream")
        finish(pair, TEXT[:9])
        assert bool(pair.results[1].previews) is preview
        for guess in pair.results[1].previews:
            assert guess.tokens == guessed[guess.start : guess.start + len(guess.tokens)]


def test_the_target_rolls_back_only_what_is_invalid() -> None:
    """A text that the draft gets right needs no rollback; one that it gets wrong does."""
    for wrong in ((), (9,)):
        pair = make_pair(wrong=wrong)
        finish(pair)
        target_rollbacks = [c for c in pair.log if isinstance(c, Rollback)]
        assert bool(target_rollbacks) is bool(wrong)


def test_phases_follow_what_is_unfed() -> None:
    pair = make_pair(wrong=(9,))
    finish(pair)
    for forward in (c for c in pair.log if isinstance(c, Forward)):
        if forward.phase is not Phase.PREFILL:
            assert (forward.phase is Phase.PRE_VERIFY) == (len(forward.tokens) == 1)


def test_every_delivery_is_final() -> None:
    pair = make_pair(wrong=(4, 9))
    finish(pair)
    messages = [c.message for c in pair.log if isinstance(c, Deliver)]
    positions = [(m.start, len(m.tokens)) for m in messages if isinstance(m, Committed)]
    assert len(positions) > 5
    assert [start for start, _ in positions] == [
        len(PROMPT) + sum(n for _, n in positions[:i]) for i in range(len(positions))
    ]
