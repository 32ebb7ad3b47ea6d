"""The room for several requests and many proposals: schedules, stores, and what an illegal event tells."""

from collections.abc import Sequence
from typing import Any

import pytest

from pearl.errors import LocalProtocolError
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import Drafted, DraftJoined, Forwarded, Judged, Sampled
from pearl.protocol.messages import DraftTokens, Source, Submit
from pearl.protocol.proposals import Proposal, ProposalStore
from pearl.spec.methods import MAX_BRANCHES
from tests.options import drawn_by, resolved
from tests.replace import replace
from tests.scripted import Told


def submit(
    number: int,
    prompt: Sequence[int],
    length: int,
    seed: int = 3,
    method: str = "ar",
    **settings: Any,
) -> Submit:
    decoding = resolved(method, **({"gamma": 2} | settings))
    return Submit(
        number,
        tuple(prompt),
        len(prompt) + length,
        replace(decoding, sampling=drawn_by(1.0, seed=seed)),
    )


def test_an_illegal_event_tells_the_story_that_led_to_it() -> None:
    coordinator = Coordinator(Told(Sampled((4,))))
    coordinator.handle(submit(1, (3, 1), 5))
    coordinator.handle(Forwarded(request=1))
    with pytest.raises(
        LocalProtocolError, match=r"state pre-verify .* idle -Submit-> prefill, prefill -Forwarded"
    ):
        coordinator.handle(Drafted(request=1))
    with pytest.raises(LocalProtocolError, match=r"cannot take Forwarded.* running are \[1\]"):
        coordinator.handle(Forwarded(request=7))
    with pytest.raises(LocalProtocolError, match=r"draft in state idle .* before: nothing"):
        Drafter(10).handle(Forwarded(request=1))


# ---- proposals ----


def test_a_branch_holds_under_its_outcome_and_no_other() -> None:
    store = ProposalStore()
    store.add(Proposal(5, (10, 11, 12)))
    foreseen = Proposal(7, (30, 31), source=Source.BRANCH, after=(6, 99))
    store.add(foreseen)
    store.add(Proposal(6, (40,), source=Source.BRANCH, after=(5, 77)))
    store.accept(6)
    assert [*store.branches.values()] == [foreseen]
    assert store.branch(6, 98) is None
    taken = store.branch(6, 99)
    assert taken == Proposal(7, (30, 31), source=Source.BRANCH)
    store.clear()
    store.add(taken)
    assert (len(store.seen(9)), store.branches) == (2, {})


# ---- branches ----


def reading(*verdicts: Judged | Sampled, **settings: Any) -> Coordinator:
    """The target, whose forward of the prompt runs."""
    coordinator = Coordinator(Told(*verdicts))
    coordinator.handle(DraftJoined(100))
    coordinator.handle(
        Submit(
            1,
            (3, 1),
            12,
            resolved("pearl", **({"gamma": 3, "branches": 8} | settings), sampling=drawn_by()),
        )
    )
    return coordinator


def working(*verdicts: Judged | Sampled, **settings: Any) -> Coordinator:
    """The target at position 2, that has fed the prompt and holds the row for it."""
    coordinator = reading(*verdicts, **settings)
    coordinator.handle(Forwarded(1.0, request=1))
    return coordinator


def branch(
    epoch: int = 0, after: tuple[int, int] = (3, 20), tokens: tuple[int, ...] = (21, 22)
) -> DraftTokens:
    return DraftTokens(1, epoch, after[0] + 1, tokens, source=Source.BRANCH, after=after)


REJECTED = Judged(1, None), Judged(0, 20)  # position 2 is accepted, and 20 stands at 3 instead


def rejected_at_3(coordinator: Coordinator) -> None:
    """Position 2 is accepted, and 20 committed at 3 in place of the draft's."""
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    coordinator.handle(Forwarded(1.0, request=1))


def test_a_branch_that_the_verdict_has_overtaken_still_counts() -> None:
    coordinator = working(*REJECTED, window="fixed")
    rejected_at_3(coordinator)
    coordinator.handle(branch())
    assert coordinator.running[1].sequence.tokens == [3, 1, 8, 20, 21, 22]
    coordinator.handle(branch())  # comes twice
    assert coordinator.running[1].sequence.tokens == [3, 1, 8, 20, 21, 22]
    assert coordinator.running[1].request.counts.duplicate == 1


@pytest.mark.parametrize(
    "stale",
    [
        branch(after=(3, 99)),  # another outcome came
        branch(after=(2, 20)),  # decided long ago
        branch(after=(7, 20)),  # of a position that nothing is drafted for
    ],
    ids=str,
)
def test_a_branch_for_another_outcome_is_dropped_and_counted(stale: DraftTokens) -> None:
    coordinator = working(*REJECTED)
    rejected_at_3(coordinator)
    coordinator.handle(stale)
    coordinator.handle(replace(stale, epoch=1))
    assert coordinator.running[1].sequence.tokens == [3, 1, 8, 20]
    assert coordinator.running[1].request.counts.stale == 2
    assert coordinator.running[1].request.counts.num_foreseen_rejections == 0


def test_branches_are_bounded() -> None:
    coordinator = working(REJECTED[0])
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    for token in range(100, 300):
        coordinator.handle(branch(after=(3, token)))
    assert len(coordinator.running[1].request.proposals.branches) == MAX_BRANCHES
    coordinator = working(REJECTED[0], gamma=9)
    coordinator.handle(DraftTokens(1, 0, 2, (8, 9, 10)))
    coordinator.handle(branch(tokens=(1,) * 9))
    branches = coordinator.running[1].request.proposals.branches.values()
    assert max(known.end for known in branches) == 12, "no further than the limit"


def test_a_branch_that_the_verdict_has_overtaken_is_no_longer_than_one_that_waits() -> None:
    """It went on as far as the text may, with a distribution for each token, all fed in one forward."""
    coordinator = Coordinator(Told(*REJECTED))
    coordinator.handle(DraftJoined(1000))
    coordinator.handle(
        Submit(1, (3, 1), 500, resolved("pearl", "fixed", 3, branches=8, sampling=drawn_by()))
    )
    coordinator.handle(Forwarded(1.0, request=1))
    rejected_at_3(coordinator)
    request = coordinator.running[1]
    for size in (1, 40, 1, 40):
        start = len(request.sequence.tokens)
        coordinator.handle(replace(branch(tokens=(21,) * size), start=start))
    assert coordinator.running[1].sequence.tokens == [3, 1, 8, 20, 21, 21]
    assert len(request.sequence.tokens) <= request.sequence.committed + request.draft.furthest
    assert coordinator.running[1].request.counts.stale == 2


def test_what_a_draft_repeats_beside_a_branch_that_came_is_not_put_behind_it() -> None:
    """It stood at positions that it was not drafted for, and beyond the limit of the text."""
    coordinator = reading(Sampled((20,)), look_ahead=4, gamma=9)
    coordinator.handle(DraftTokens(1, 0, 2, (8,)))
    coordinator.handle(branch(after=(2, 20), tokens=(21,) * 9))
    coordinator.handle(Forwarded(1.0, request=1))
    expected = [3, 1, 20, *(21,) * 9]
    assert coordinator.running[1].sequence.tokens == expected
    coordinator.handle(DraftTokens(1, 1, 2, (20, 40, 41), known=2))
    assert coordinator.running[1].sequence.tokens == expected
    assert coordinator.running[1].request.counts.duplicate == 1
