"""The two state machines, step by step: their tables, what a peer may send, and a draft's comings and goings.

That every interleaving comes to a good end is for test_model_check; here are single steps, and long random runs.
"""

from __future__ import annotations

from functools import partial

import pytest

from pearl.errors import RemoteProtocolError
from pearl.protocol import coordinator as target_side
from pearl.protocol import drafter as draft_side
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import Draft, Drafted, Forward, Send
from pearl.protocol.messages import Begin, DraftTokens
from pearl.protocol.options import RequestOptions
from pearl.protocol.sequence import extend_digest
from tests.exploration import freeze
from tests.protocol_pair import Pair, at_random, check_counts, draft_in, make_pair, until
from tests.replace import replace
from tests.scripted import LOST, PROMPT, TEXT, WRONG, ScriptDraft, ScriptTarget, submission


def finish(pair: Pair, text: tuple[int, ...] = TEXT, seed: int = 0) -> None:
    """Runs to the end and checks the text."""
    pair.run(at_random(seed))
    for result in pair.results.values():
        assert tuple(result.tokens) == text[result.prompt :]
        check_counts(result)


# ---- messages of the draft (invariant 6) ----


def held(wrong: tuple[int, ...] = (), branches: int = 0) -> Pair:
    """A target that holds its first row, for a draft that has sent nothing yet."""
    pair = make_pair(wrong=wrong, branches=branches)
    return until(
        pair,
        lambda p: p.coordinator.state is target_side.State.HELD,
        lambda moves: "target" if "target" in moves else moves[0],
    )


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
    stale = request.request.counts.stale
    for start in range(3, 9):
        pair.coordinator.handle(DraftTokens(1, 0, start, (7,), known=2, after=(2, 8)))
    pair.coordinator.handle(DraftTokens(1, 0, 3, (7,) * 5, known=2, after=(2, 6)))
    assert [branch.tokens for branch in request.request.proposals.branches.values()] == ([(7, 7)] if branches else [])
    assert request.request.counts.stale - stale == (5 if branches else 7)


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


def test_digests_tell_prefixes_apart() -> None:
    prefixes = [(), (0,), (0, 0), (1,), (1, 2), (2, 1), (1, 2, 3), (1, 2, 4)]
    assert len({extend_digest(0, prefix) for prefix in prefixes}) == len(prefixes)
    assert extend_digest(extend_digest(0, (1, 2)), (3,)) == extend_digest(0, (1, 2, 3))
    assert extend_digest(0, range(100_000)) < 2**61


# ---- a draft that cannot go on with a request ----


def test_a_failed_draw_that_was_overtaken_ends_nothing() -> None:
    """The prefix that it choked on no longer stands: a verdict, or another request, came meanwhile."""
    machine = draft_in(draft_side.State.DRAFTING)
    machine.handle(Begin(2, 0, (*PROMPT, 8), 9, extend_digest(0, (*PROMPT, 8)), RequestOptions()))
    commands = machine.handle(Drafted(failure="not finite"))
    assert not any(isinstance(command, Send) for command in commands)
    assert commands[-1] == Draft(0, (*PROMPT, 8), 6, prompt=True, request=2)


# ---- several requests ----


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


# ---- what is told ----


def test_previews_are_sent_only_on_request_and_only_what_is_pending() -> None:
    guessed = (*TEXT[:9], WRONG, *[LOST] * len(TEXT))
    for preview in (False, True):
        pair = make_pair(wrong=(9,), limit=9, preview=preview, window="stream")
        finish(pair, TEXT[:9])
        assert bool(pair.results[1].previews) is preview
        for guess in pair.results[1].previews:
            assert guess.tokens == guessed[guess.start : guess.start + len(guess.tokens)]
