"""Continuations for other outcomes: what is prepared is what would be drafted, and no text differs by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.config import DecodingConfig
from pearl.drafting.branches import Branches, Foresight, Seen
from pearl.drafting.model import ModelProposer
from pearl.errors import ConfigError, NumericalError
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.loading import load_runner
from pearl.models.runner import Feed, ModelRunner, WrappedRunner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.messages import Source, Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.protocol.proposals import Proposal
from pearl.protocol.speeds import ForwardTimes
from pearl.spec.methods import BRANCHES
from tests.pairwise import combined
from tests.replace import replace
from tests.test_look_ahead import PROMPT, SAMPLINGS, TIMINGS, TOKENS, VOCAB
from tests.tiny import tiny_model

Setting = tuple[str, str, int | None]  # method, window, gamma
SETTINGS: list[Setting] = [
    ("pearl", "stream", None),
    ("pearl", "fixed", 1),
    ("pearl", "fixed", 3),
    ("pearl", "stream", 7),
]


# ---- texts ----


def decode(
    setting: Setting,
    rule: str,
    temperature: float,
    timing: Timing,
    extras: Sequence[int],
    seed: int = 5,
) -> Outcome:
    """`extras`: look-ahead, draft lookup, branches. The models' text repeats: the next token depends on the last."""
    target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.6, order=1))
    method, window, gamma = setting
    decoding = RequestOptions(method, window, gamma, rule, (), *extras)
    submit = Submit(1, PROMPT, len(PROMPT) + TOKENS, replace(decoding, sampling=Sampling(temperature, seed=seed)))
    return simulate(submit, *paired_executors(target, draft), timing)


@combined
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(("rule", "temperature"), SAMPLINGS)
def test_no_acceleration_changes_a_text(rule: str, temperature: float, setting: Setting, combined: Any) -> None:
    """Look-ahead, lookup and branches, alone and together, whatever the forwards and messages take."""
    plain = decode(setting, rule, temperature, TIMINGS[0], (0, 0, 0))
    foreseen = 0
    for *extras, timing in combined((0, 8), (0, 8), (0, 7), TIMINGS):
        outcome = decode(setting, rule, temperature, timing, extras)
        assert outcome.tokens == plain.tokens, (extras, timing.seed)
        assert outcome.counts.resyncs == 0, "both sides always agreed on which continuation holds"
        assert extras[2] or not outcome.counts.foreseen
        foreseen += outcome.counts.foreseen
    # A greedy text is a short loop, of which the draft is right or wrong for ever; a window of 1 has no room.
    assert foreseen > 0 or temperature == 0 or setting[2] == 1
    assert plain.counts.sources.keys() <= {Source.MODEL}


def test_a_foreseen_rejection_costs_no_window() -> None:
    """With a draft that is as fast as can be, a branch makes fewer steps of the same text."""
    timing = Timing(1.0, lambda _: 6.0)
    setting = ("pearl", "stream", 6)
    plain, ahead = (decode(setting, "coupled", 1.0, timing, (0, 0, branches)) for branches in (0, 7))
    assert ahead.tokens == plain.tokens
    assert ahead.target_steps < plain.target_steps
    assert ahead.counts.sources[Source.BRANCH] > 0
    assert ahead.counts.foreseen >= ahead.counts.sources[Source.BRANCH] / 6


@pytest.mark.parametrize(("rule", "temperature"), SAMPLINGS)
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_sd_whose_draft_prepares_writes_the_text_of_sd(rule: str, temperature: float, gamma: int) -> None:
    """Under ratio too, for its windows end where those of sd do."""
    plain = decode(("sd", "fixed", gamma), rule, temperature, TIMINGS[0], (0, 0, 0))
    foreseen = bonuses = 0
    for timing in TIMINGS:
        outcome = decode(("ssd", "fixed", gamma), rule, temperature, timing, (0, 0, 7))
        assert outcome.tokens == plain.tokens, timing.seed
        assert outcome.provenance == plain.provenance
        assert outcome.target_steps == plain.target_steps, "the same windows, only sooner"
        assert outcome.counts.resyncs == 0
        foreseen += outcome.counts.foreseen
        bonuses += outcome.counts.foreseen_bonuses
    assert bonuses > 0 or gamma == 5, "all five are seldom right"
    assert foreseen > 0 or temperature == 0


def test_sd_whose_draft_prepares_waits_less() -> None:
    """While the target verifies, the window for what it may decide is drafted: where it was foreseen, at once."""
    timing = Timing(1.0, lambda _: 12.0)
    plain, ahead = (
        decode((method, "fixed", 3), "coupled", 1.0, timing, (0, 0, branches))
        for method, branches in (("sd", 0), ("ssd", 7))
    )
    known = ahead.counts.foreseen + ahead.counts.foreseen_bonuses
    assert known > 0.5 * ahead.target_steps, "of the few tokens that there are it foresees most"
    assert ahead.seconds < 0.9 * plain.seconds
    # A round that was foreseen costs the target's forward alone; another the window's three draft forwards too.
    assert ahead.seconds == pytest.approx(plain.seconds - 3 * known, rel=0.05)


# ---- what is prepared ----


@cache
def model(kind: str) -> ModelRunner:
    path = str(tiny_model(kind, noise=0.05))
    return load_runner(path, device=torch.device("cpu"), dtype="float32", spare=5)


class Counting(WrappedRunner):
    """Remembers what each forward was fed."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.fed: list[list[Feed]] = []

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        self.fed.append(list(feeds))
        return super().forward(feeds)


def opened(runner: ModelRunner, prompt: tuple[int, ...], rule: str, temperature: float, most: int) -> ModelProposer:
    for slot in range(runner.capabilities.slots):
        runner.rollback(0, slot)
    proposer = ModelProposer(runner, runner.vocab_size)
    proposer.open(
        Open(
            prompt, RequestOptions(rule=rule, branches=most, sampling=Sampling(temperature, top_k=5, seed=8)), request=1
        )
    )
    return proposer


def drafted(proposer: ModelProposer, start: int, tokens: tuple[int, ...], budget: int, pending: int) -> Drafted:
    return proposer.collect(proposer.launch(Draft(start, tokens, budget, pending, request=1)))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("rule", "temperature"), SAMPLINGS)
def test_what_is_prepared_is_what_would_be_drafted(
    kind: str, rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and distributions, bit by bit; and where the outcome comes, nothing is computed again."""
    monkeypatch.setattr(ForwardTimes, "observe", lambda *_: None)  # while no time is known, all rows are used
    monkeypatch.setattr("pearl.drafting.branches._LEAST_CHANCE", 0.0)
    runner = Counting(model(kind))
    prompt = tuple(range(3, 20))
    proposer = opened(runner, prompt, rule, temperature, 5)
    text, start, fed = list(prompt), 0, prompt
    for pending in range(6):
        found = drafted(proposer, start, fed, 8 - pending, pending)
        start, fed = len(text), found.tokens
        text += found.tokens
    assert len(found.branches) == 5
    assert max(len(branch.tokens) for branch in found.branches) > 2
    for branch in found.branches:
        assert branch.after is not None
        position, other = branch.after
        assert text[position] != other
        alone = opened(model("llama") if kind == "llama" else model(kind), prompt, rule, temperature, 0)
        prefix, at = (*text[:position], other), 0
        for i, token in enumerate(branch.tokens):
            one = drafted(alone, at, prefix, 1, 0)
            assert one.tokens == (token,)
            if one.rows:
                assert torch.equal(one.rows[0], branch.rows[i])
            at, prefix = at + len(prefix), one.tokens
    # The cache has been used for that: once more, and now the outcome of one of them comes.
    proposer = opened(runner, prompt, rule, temperature, 5)
    start, fed = 0, prompt
    for pending in range(6):
        found = drafted(proposer, start, fed, 8 - pending, pending)
        start, fed = start + len(fed), found.tokens
    branch = max(found.branches, key=lambda each: len(each.tokens))
    assert branch.after is not None
    position, other = branch.after
    proposer.rollback(position, 1)
    runner.fed.clear()
    after = drafted(proposer, position, (other, *branch.tokens), 3, len(branch.tokens))
    (feeds,) = runner.fed
    assert list(feeds[0].tokens) == [branch.tokens[-1]], "all else is in the cache"
    alone = opened(model(kind), prompt, rule, temperature, 0)
    assert after.tokens == drafted(alone, 0, (*text[:position], other, *branch.tokens), 1, 0).tokens


class NoTimes(ForwardTimes):
    """While no time is known all rows are used: what happens depends on no clock."""

    def observe(self, fed: int, seconds: float) -> None:
        pass


@settings(max_examples=60)
@given(st.data())
def test_slots_hold_what_their_continuations_say(data: st.DataObject) -> None:
    """Whatever is accepted, rejected and foreseen: each slot has its text, and none has two."""
    runner = ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5, order=2)[1])
    proposer = ModelProposer(runner, VOCAB)
    proposer.model.times = NoTimes()
    proposer.open(Open(PROMPT, RequestOptions(rule="coupled", branches=5, sampling=Sampling(1.0, seed=4)), request=1))
    known: list[int] = []
    text, pending = list(PROMPT), 0
    for _ in range(20):
        budget = 12 - pending
        found = drafted(proposer, len(known), tuple(text[len(known) :]), budget, pending) if budget > 0 else Drafted()
        known = list(text) if found.tokens else known
        text += found.tokens
        pending += len(found.tokens)
        branches = proposer._texts[1].branches
        assert branches is not None
        place = proposer._texts[1].slot
        assert runner._tokens[place] == known
        assert place not in branches.slots
        assert len(branches.slots) == runner.capabilities.slots - 1
        for branch in branches._live.values():
            prefix = [*text[: branch.position], branch.after[1]]
            held = [*prefix, *branch.tokens[:-1]] if branch.tokens else text[: branch.position]
            assert runner._tokens[branch.slot] == held
            assert branches._shared[branch.slot] == branch.position
        for slot, shared in branches._shared.items():
            assert runner._tokens[slot][:shared] == text[:shared]
        committed = len(text) - pending
        match data.draw(st.sampled_from(["nothing", "accept", "reject", "foreseen"])):
            case "accept" if pending:
                pending -= data.draw(st.integers(1, pending))
            case "reject" if pending:
                at = committed + data.draw(st.integers(0, pending - 1))
                text = [*text[:at], (text[at] + 1) % VOCAB]
                pending = 0
                known = text[: min(at, len(known))]
                proposer.rollback(len(known), 1)
            case "foreseen" if branches.proposals:
                branch_ = data.draw(st.sampled_from(branches.proposals))
                assert branch_.after is not None
                at, token = branch_.after
                tokens = branch_.tokens[: data.draw(st.integers(0, len(branch_.tokens)))]
                text, pending = [*text[:at], token, *tokens], len(tokens)
                known = text[: min(at, len(known))]
                proposer.rollback(len(known), 1)


def test_rates_are_learned_from_what_is_decided() -> None:
    foresight, right, wrong = Foresight(), Seen(1, 7, (2, 3)), Seen(1, 0, (2, 3))
    for _ in range(200):
        foresight.learn(right, 1)
        foresight.learn(wrong, 3)
    assert foresight.agrees(right) > 0.99
    assert foresight.agrees(wrong) < 0.01
    first, second = foresight.others(wrong)
    assert first[0] < 0.01
    assert second == (pytest.approx(1, abs=0.02), 3)


def test_no_row_is_used_where_each_costs_a_forward() -> None:
    runner = Counting(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.9, order=1)[1]))
    proposer = opened(runner, PROMPT, "coupled", 1.0, 5)
    for fed in (*range(1, 8), *range(1, 8)):
        proposer.model.times.observe(fed, float(fed))
    start, tokens = 0, PROMPT
    for pending in range(3):
        found = drafted(proposer, start, tokens, 8, pending)
        start, tokens = start + len(tokens), found.tokens
        assert found.branches == ()
    assert all(len(feeds) == 1 for feeds in runner.fed)


def test_a_continuation_that_cannot_be_drawn_ends_alone() -> None:
    class Partly(WrappedRunner):
        """NaN in every slot but the first."""

        def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
            found = super().forward(feeds)
            return [each if feed.slot == 0 else each * torch.nan for feed, each in zip(feeds, found, strict=True)]

    proposer = opened(Partly(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5)[1])), PROMPT, "coupled", 1.0, 5)
    start, tokens = 0, PROMPT
    for pending in range(4):
        found = drafted(proposer, start, tokens, 8, pending)
        assert len(found.tokens) == 1
        assert found.branches == ()
        start, tokens = start + len(tokens), found.tokens
    branches = proposer._texts[1].branches
    assert branches is not None
    assert not branches._live
    assert len(branches._free) == 7


def test_the_text_itself_must_be_drawn() -> None:
    nan = ToyRunner(VOCAB, lambda _: torch.full((VOCAB,), torch.nan))
    proposer = opened(nan, PROMPT, "coupled", 1.0, 5)
    with pytest.raises(NumericalError):
        drafted(proposer, 0, PROMPT, 8, 0)


def test_branches_of_one_slot_are_none() -> None:
    class One(WrappedRunner):
        """As the general path: no room beside the text."""

        @property
        def capabilities(self) -> Any:
            return type(super().capabilities)()

    proposer = opened(One(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5)[1])), PROMPT, "coupled", 1.0, 5)
    assert proposer._texts[1].branches is None
    assert len(drafted(proposer, 0, PROMPT, 8, 0).tokens) == 1


def test_a_cache_that_has_moved_is_found_by_who_has_no_request() -> None:
    """Between two texts: a recording begins with an empty cache, and the next text where the last one's cache is."""
    proposer = opened(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5)[1]), PROMPT, "coupled", 1.0, 5)
    found = drafted(proposer, 0, PROMPT, 8, 0)
    found = drafted(proposer, 3, found.tokens, 7, 1)
    after = found.branches[0].after
    assert after is not None
    proposer.rollback(after[0], 1)
    drafted(proposer, after[0], (after[1], *found.branches[0].tokens), 4, 0)
    place = proposer._texts[1].slot
    assert place != 0
    proposer.rollback(0, -1)
    assert proposer.runner.length(place) == 0
    proposer.open(Open(PROMPT, RequestOptions(rule="coupled", branches=5), request=2))
    assert proposer._texts[2].slot == place
    assert len(drafted_for(proposer, 2).tokens) == 1


def drafted_for(proposer: ModelProposer, request: int) -> Drafted:
    return proposer.collect(proposer.launch(Draft(0, PROMPT, 8, 0, request=request)))


def test_a_slot_that_shares_most_is_taken_first() -> None:
    runner = ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5)[1])
    runner.forward([Feed([1, 2, 3, 4, 5], 0)])
    branches = Branches(runner, [1, 2, 3], Foresight())
    first = branches.branch((2, 9), 0)
    assert first is not None
    branches.end(first)
    second = branches.branch((4, 9), 0)
    assert second is not None
    assert second.slot == first.slot
    assert runner.length(second.slot) == 4
    assert branches.branch((4, 9), 0) is second


# ---- settings ----


def test_a_branch_is_whole_from_its_outcome_on() -> None:
    first = Proposal(7, (1, 2), after=(6, 9))
    assert first.end == 9
    assert first.followed_by(Proposal(7, (3,), after=(6, 9))).tokens == (1, 2, 3)


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"branches": BRANCHES + 1}, f"less than or equal to {BRANCHES}"),
        ({"method": "sd", "branches": 2}, "branches is for methods auto, ssd, pearl, not sd"),
    ],
)
def test_settings_that_cannot_be(given_: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DecodingConfig(**given_)
