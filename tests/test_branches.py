"""Continuations for other outcomes: what is prepared is what would be drafted, and no text differs by it."""

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.drafting.draft_text import DraftText
from pearl.drafting.proposer import ModelProposer
from pearl.drafting.step import Step
from pearl.lab.studies.simulate import Outcome, Timing
from pearl.models.gpu.recordings import FED
from pearl.models.runner import Capabilities, Feed, ModelRunner, feed_chain
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.messages import Source
from pearl.protocol.speeds import ForwardTimes
from tests.loops import PROMPT
from tests.opened import OpenProposer
from tests.options import drawn_by, resolved
from tests.tiny import on_cpu, tiny_model
from tests.virtual import Counting
from tests.virtual import decoded as simulated
from tests.wrapped import WrappedRunner

VOCAB = 6


def decode(
    method: str, window: str, gamma: int, branches: int, seconds: float, chains: bool = False
) -> Outcome:
    """By the models of a text that repeats: the next token depends on the last."""
    asked = resolved(method, window, gamma, "coupled", branches=branches)
    timing = Timing(1.0, lambda _: seconds)
    return simulated(
        alpha_pair(VOCAB, 0.6, order=1),
        VOCAB,
        asked,
        drawn_by(1.0, seed=5),
        60,
        timing,
        PROMPT,
        chains=chains,
    )


@pytest.mark.parametrize("idle", [None, 0.5, 1e6])
def test_a_foreseen_rejection_costs_no_window(
    idle: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft that is as fast as can be, a branch makes fewer steps and forwards of the same text.

    `idle`: forward times that a device loses where the next one is not chained; None: forwards are not chained.
    """
    monkeypatch.setattr("pearl.execution.early_drafts.LEAST_LEAD", idle or 0.0)
    launched, real = list[str](), ModelProposer.launch

    def launch(proposer: ModelProposer, command: Draft, after: Step | None = None) -> Step:
        step = real(proposer, command, after)
        kind = "waited for" if command.budget and step.following is None else "launched"
        launched.append("hedge" if command.hedge else "chained" if after else kind)
        return step

    monkeypatch.setattr(ModelProposer, "launch", launch)
    plain = decode("pearl", "stream", 6, 0, 6.0, idle is not None)
    before = Counter(launched)
    launched.clear()
    ahead = decode("pearl", "stream", 6, 7, 6.0, idle is not None)
    now = Counter(launched)
    assert now["hedge"]
    assert (
        before["chained"] > 0.8 * before.total() if idle else not before["chained"] + now["chained"]
    )
    if idle == 1e6:
        assert not now["waited for"], "at the look-ahead limit alone branches cost no chain"
    else:
        assert bool(now["chained"]) == bool(idle), "where none is worth a wait it still chains"
        assert now.total() - now["hedge"] < 0.8 * before.total()
    assert ahead.tokens == plain.tokens
    assert ahead.counts.steps < plain.counts.steps
    assert ahead.counts.accepted_by_source[Source.BRANCH] > 0
    assert (
        ahead.counts.num_foreseen_rejections >= ahead.counts.accepted_by_source[Source.BRANCH] / 6
    )


def test_sd_whose_draft_prepares_waits_less() -> None:
    """While the target verifies, the window for what it may decide is drafted: where it was foreseen, at once."""
    plain, ahead = (
        decode(method, "fixed", 3, branches, 12.0) for method, branches in (("sd", 0), ("ssd", 7))
    )
    known = ahead.counts.num_foreseen_rejections + ahead.counts.num_foreseen_bonuses
    assert known > 0.5 * ahead.counts.steps, "of the few tokens that there are it foresees most"
    assert ahead.seconds < 0.9 * plain.seconds
    # A round that was foreseen costs the target's forward alone; another the window's three draft forwards too.
    assert ahead.seconds == pytest.approx(plain.seconds - 3 * known, rel=0.05)


@pytest.mark.parametrize("method", ["pearl", "ssd"])
def test_the_drafts_index_misses_no_token(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that was fed by a forward for branches alone, and is followed by the target's own."""
    real = DraftText.guess
    hedges = 0

    def guess(text: DraftText, command: Draft) -> tuple[list[int], list[float]]:
        nonlocal hedges
        guessed = real(text, command)
        assert text.index is not None
        assert len(text.index) == command.start + len(command.tokens)
        hedges += command.hedge > 0
        return guessed

    monkeypatch.setattr(DraftText, "guess", guess)
    asked = resolved(method, "stream", 4, "coupled", branches=7, draft_lookup=8)
    if method == "pearl":
        asked = asked.changed(look_ahead=8)
    pair = alpha_pair(VOCAB, 0.6, order=1)
    timing = Timing(1.0, lambda _: 12.0)
    simulated(pair, VOCAB, asked, drawn_by(1.0, seed=5), 100, timing, PROMPT)
    assert hedges


# ---- what is prepared ----


@cache
def model(kind: str) -> ModelRunner:
    path = str(tiny_model(kind, noise=0.05))
    return on_cpu(path, dtype="float32", spare=5)


class NoTimes(ForwardTimes):
    """While no time is known all rows are used: what happens depends on no clock."""

    def observe(self, fed: int, seconds: float) -> None:
        pass


def opened(
    runner: ModelRunner, prompt: tuple[int, ...], rule: str, temperature: float, most: int
) -> OpenProposer:
    for slot in range(runner.capabilities.slots):
        runner.rollback(0, slot)
    proposer = OpenProposer(runner, runner.vocab_size)
    proposer.open(
        Open(
            prompt,
            resolved(rule=rule, branches=most, sampling=drawn_by(temperature, top_k=5, seed=8)),
            request=1,
        )
    )
    return proposer


def drafted(
    proposer: ModelProposer,
    start: int,
    tokens: tuple[int, ...],
    budget: int,
    pending: int,
    request: int = 1,
) -> Drafted:
    return proposer.collect(proposer.launch(Draft(start, tokens, budget, pending, request=request)))


def drafted_on(
    proposer: ModelProposer, prompt: tuple[int, ...], forwards: int = 6
) -> tuple[list[int], Drafted]:
    """Draft from `prompt` for some forwards: the text, and the event of the last forward."""
    text, start, fed, found = list(prompt), 0, prompt, Drafted()
    for pending in range(forwards):
        found = drafted(proposer, start, fed, 8 - pending, pending)
        start, fed = len(text), found.tokens
        text += found.tokens
    return text, found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("rule", "temperature"), [("coupled", 0.0), ("coupled", 1.0), ("ratio", 1.0)]
)
def test_what_is_prepared_is_what_would_be_drafted(
    kind: str, rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and distributions, bit by bit; and where the outcome comes, nothing is computed again."""
    monkeypatch.setattr(
        ForwardTimes, "observe", lambda *_: None
    )  # while no time is known, all rows are used
    monkeypatch.setattr("pearl.drafting.branches._LEAST_CHANCE", 0.0)
    runner = Counting(model(kind))
    prompt = tuple(range(3, 20))
    text, found = drafted_on(opened(runner, prompt, rule, temperature, 5), prompt)
    assert len(found.branches) == 5
    assert max(len(branch.tokens) for branch in found.branches) > 2
    for branch in found.branches:
        assert branch.after is not None
        position, other = branch.after
        assert text[position] != other
        alone = opened(model(kind), prompt, rule, temperature, 0)
        prefix, at = (*text[:position], other), 0
        for i, token in enumerate(branch.tokens):
            one = drafted(alone, at, prefix, 1, 0)
            assert one.tokens == (token,)
            if one.rows:
                assert torch.equal(one.rows[0], branch.rows[i])
            at, prefix = at + len(prefix), one.tokens
    # The cache has been used for that: once more, and now the outcome of one of them comes.
    proposer = opened(runner, prompt, rule, temperature, 5)
    _, found = drafted_on(proposer, prompt)
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


@settings(max_examples=60)
@given(st.data())
def test_slots_hold_what_their_continuations_say(data: st.DataObject) -> None:
    """Whatever is accepted, rejected and foreseen: each slot has its text, and none has two."""
    runner = ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5, order=2)[1])
    proposer = OpenProposer(runner, VOCAB)
    proposer.model.times = NoTimes()
    options = resolved(rule="coupled", branches=5, sampling=drawn_by(1.0, seed=4))
    proposer.open(Open(PROMPT, options, request=1))
    known: list[int] = []
    text, pending = list(PROMPT), 0
    for _ in range(20):
        budget = 12 - pending
        found = (
            drafted(proposer, len(known), tuple(text[len(known) :]), budget, pending)
            if budget > 0
            else Drafted()
        )
        known = list(text) if found.tokens else known
        text += found.tokens
        pending += len(found.tokens)
        branches = proposer.text(1).branches
        assert branches is not None
        place = proposer.text(1).slot
        assert runner.tokens[place] == known
        assert place not in branches.slots
        assert len(branches.slots) == runner.capabilities.slots - 1
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
    proposer.open(Open(PROMPT, options, request=2))
    branches = proposer.text(2).branches
    assert branches is not None
    assert len(branches.slots) == runner.capabilities.slots - 1, "the next text has as many"


class Fixed(Counting):
    """A runner of a GPU's fixed sizes: forwards of `FED` rows, launched ahead."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.capabilities = Capabilities(slots=40, tree_nodes=FED, launches=True)


@pytest.mark.parametrize("texts", [1, 3])
def test_no_forward_of_a_fixed_size_has_more_rows(
    texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the texts' own tokens, guesses and branches; at the look-ahead limit all are branches, shared equally."""
    monkeypatch.setattr("pearl.drafting.branches._LEAST_CHANCE", 0.0)
    runner = Fixed(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5, order=1)[1], slots=40))
    proposer = ModelProposer(runner, VOCAB, texts=texts)
    proposer.model.times = NoTimes()
    options = resolved(rule="coupled", branches=30, draft_lookup=8, sampling=drawn_by(1.0, seed=4))
    drafts = [Draft(0, PROMPT, 20, request=slot) for slot in range(texts)]
    for draft in drafts:
        proposer.open(Open(PROMPT, options, draft.request, request=draft.request))
    for _ in range(8):
        found = [
            proposer.collect(each)
            for each in proposer.launch_together(drafts)
            if isinstance(each, Step)
        ]
        for slot, (draft, each) in enumerate(zip(drafts, found, strict=True)):
            start, pending = (
                draft.start + len(draft.tokens) + each.cached,
                draft.pending + len(each.tokens),
            )
            drafts[slot] = Draft(start, each.tokens[each.cached :], 20, pending, request=slot)
    hedging = proposer.launch_together(
        [Draft(each.start, (), 0, each.pending, 20, request=each.request) for each in drafts]
    )
    rows = [sum(len(feed.tokens) for feed in feeds) for feeds in runner.fed]
    assert max(rows[:-1]) == rows[-1] == FED
    assert {step.tokens for step in hedging if isinstance(step, Step)} <= {
        FED // texts,
        -(-FED // texts),
    }


def test_a_continuation_that_cannot_be_drawn_ends_alone() -> None:
    class Partly(WrappedRunner):
        """NaN in every slot but the first, while it is broken."""

        is_broken = True

        def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
            found = super().forward(feeds)
            return [
                each * torch.nan if feed.slot and self.is_broken else each
                for feed, each in zip(feeds, found, strict=True)
            ]

    runner = Partly(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5)[1]))
    proposer = opened(runner, PROMPT, "coupled", 1.0, 5)
    proposer.model.times = NoTimes()
    text, found = drafted_on(proposer, PROMPT, 4)
    assert (len(text), found.branches) == (len(PROMPT) + 4, ())
    runner.is_broken = False
    found = drafted(proposer, len(text) - 1, (text[-1],), 4, 4)
    assert len(found.branches) == 5, "their slots are free again"


def test_a_cache_that_has_moved_is_found_by_who_has_no_request() -> None:
    """Between two texts: a recording begins with an empty cache, and the next text where the last one's cache is."""
    proposer = opened(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.5)[1]), PROMPT, "coupled", 1.0, 5)
    _, found = drafted_on(proposer, PROMPT, 2)
    after = found.branches[0].after
    assert after is not None
    proposer.rollback(after[0], 1)
    drafted(proposer, after[0], (after[1], *found.branches[0].tokens), 4, 0)
    place = proposer.text(1).slot
    assert place != 0
    proposer.rollback(0, -1)
    assert proposer.runner.length(place) == 0
    proposer.open(Open(PROMPT, resolved(rule="coupled", branches=5), request=2))
    assert proposer.text(2).slot == place
    assert len(drafted(proposer, 0, PROMPT, 8, 0, request=2).tokens) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_runners_up_are_the_next_of_the_row(temperature: float) -> None:
    """The same whether forwards are chained (as on a GPU) or not, with branches or without."""
    runner = ToyRunner(VOCAB, alpha_pair(VOCAB, 0.7)[1])
    found = []
    for chains, branches, rule in (
        (False, 0, "coupled"),
        (True, 0, "coupled"),
        (False, 4, "coupled"),
        (False, 4, "ratio"),
    ):
        runner.rollback(0, 0)
        proposer = ModelProposer(runner, VOCAB, chains=chains)
        asked = resolved(
            rule=rule, branches=branches, siblings=8, sampling=drawn_by(temperature, seed=8)
        )
        proposer.open(Open(PROMPT, asked, request=1))
        found.append(drafted(proposer, 0, PROMPT, 5, 0))
    (token,), (seen,) = found[0].tokens, found[0].seen
    assert [(each.tokens, each.seen) for each in found[1:3]] == [((token,), (seen,))] * 2
    assert bool(found[3].seen) == (temperature == 0)
    runner.rollback(0)
    row = torch.softmax(feed_chain(runner, PROMPT, 1)[0], -1)
    draw = DirectDraw(drawn_by(temperature, seed=8))
    others = list(range(VOCAB))
    for expected in (token, *seen.rivals):  # each wins among those that are left
        left = torch.zeros(VOCAB)
        left[others] = row[others]
        assert read_draw(draw(left.log(), len(PROMPT))) == expected
        others.remove(expected)
