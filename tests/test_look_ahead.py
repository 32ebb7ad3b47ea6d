"""Guesses without a model: what is guessed changes no text, only when it is known (invariant 10)."""

import random
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from pearl.drafting.ngram import MOST_MATCHED, NgramIndex, anchored, guess_tree
from pearl.drafting.proposer import ModelProposer
from pearl.models.toy import ToyRunner
from pearl.protocol.events import Draft, Open
from tests.options import resolved
from tests.stop_policies import Noted

VOCAB, PROMPT = 6, (1, 2, 3)


# ---- the index ----

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def brute_force(text: Sequence[int], position: int) -> dict[int, int]:
    """Position after each occurrence of what stands before `position` -> tokens before it that match."""
    found = {}
    for end in range(1, position):
        matched = 0
        while (
            matched < min(end, MOST_MATCHED)
            and text[end - 1 - matched] == text[position - 1 - matched]
        ):
            matched += 1
        if matched:
            found[end] = matched
    return found


@given(text=TEXTS, at=st.integers(1, 40))
def test_candidates_are_what_followed_where_the_text_matched(text: list[int], at: int) -> None:
    position = min(at, len(text))
    expected = brute_force(text, position)
    given_ = [
        pair
        for candidate in NgramIndex(text).candidates(position)
        for pair in candidate.occurrences
    ]
    assert len(given_) == len(set(given_))
    assert all(expected[end] == matched for end, matched in given_), "only true matches"
    longest = [end for end, matched in expected.items() if matched == max(expected.values())]
    if longest:
        # The most recent of those that match longest is never missed, and what followed it is a candidate.
        assert max(longest) in [end for end, _ in given_]


@given(text=TEXTS, more=TEXTS, least=st.integers(0, 40))
def test_what_is_cut_off_leaves_no_trace(text: list[int], more: list[int], least: int) -> None:
    length = min(least, len(text))
    index, plain = NgramIndex(), NgramIndex()
    index.extend(text)
    index.cut(length)
    index.extend(more)
    plain.extend([*text[:length], *more])
    assert index.tokens == plain.tokens
    assert index.table == plain.table


def test_rates_are_learned_from_the_text() -> None:
    repeats = NgramIndex([1, 2, 3, 4, 5] * 40)
    chance = random.Random(1)
    noise = NgramIndex([chance.randrange(4) for _ in range(200)])
    sure, unsure = repeats.candidates(200)[0], noise.candidates(200)[0]
    assert sure.token == 1
    assert sure.chance > 0.9
    assert unsure.chance < 0.5


@given(text=TEXTS, pending=st.integers(0, 6), most=st.integers(0, 20), room=st.integers(0, 8))
def test_a_tree_has_its_parents_first_and_each_child_once(
    text: list[int], pending: int, most: int, room: int
) -> None:
    committed = max(1, len(text) - pending)
    limit, end = len(text) + room, len(text)
    tokens, parents, chances, _ = guess_tree(
        NgramIndex(text), anchored(text, committed, (0.7,) * (len(text) - committed)), most, limit
    )
    assert len(tokens) == len(parents) == len(chances) <= most
    assert chances == sorted(chances, reverse=True)
    seen = {(position - 1, text[position]) for position in range(committed, end)}
    depth = {position: position for position in range(end)}
    for i, (token, parent, chance) in enumerate(zip(tokens, parents, chances, strict=True)):
        assert committed - 1 <= parent < end + i
        assert (parent, token) not in seen, (
            "what is drafted there already, or guessed, is not guessed again"
        )
        seen.add((parent, token))
        depth[end + i] = depth[parent] + 1
        assert depth[end + i] < limit
        assert 0 < chance <= (chances[parent - end] if parent >= end else 1)


# ---- a draft that guesses what it will say itself ----


def test_a_stop_policy_sees_each_token_once_however_many_come_of_a_forward() -> None:
    policy = Noted(3)
    repeats = ToyRunner(
        4, lambda seen: torch.nn.functional.one_hot(torch.tensor((seen[-1] + 1) % 4), 4).float()
    )
    proposer = ModelProposer(repeats, 4, lambda opened: policy)
    proposer.open(Open((0, 1, 2, 3) * 3, resolved(rule="coupled", draft_lookup=8), request=1))
    found = proposer.collect(proposer.launch(Draft(0, (0, 1, 2, 3) * 3, 20, request=1)))
    assert (found.tokens, found.cached, found.paused) == ((0, 1, 2), 2, True)
    assert [index for _, index in policy.asked] == [0, 1, 2]
    assert repeats.length() == 14
