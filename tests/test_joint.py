"""The joint rule: blocks that a search finds are judged whole, by one text a seed whatever the timing."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from math import log, prod

import pytest
import torch

from pearl.config import RequestOptions
from pearl.decoding.rules import Proposed, make_half
from pearl.drafting.beams import Search
from pearl.errors import NumericalError
from pearl.lab.studies import mjgd
from pearl.models.runner import Feed, feed_chain
from pearl.models.toy import ToyRunner
from pearl.protocol.messages import Provenance
from tests.joint import DRAFT, PAIR, TARGET, decode, parameters
from tests.options import resolved, shaped
from tests.virtual import NEVER, WARM, Chains, chi_square

# ---- what is judged ----


def joint(options: RequestOptions, **values: int) -> RequestOptions:
    return options.changed(rule="joint", parameters=parameters(**values))


@cache
def likeliest_block(first: int, depth: int) -> tuple[int, ...]:
    """By trying all."""

    def chance(block: Sequence[int]) -> float:
        return prod(DRAFT[a, b].item() for a, b in zip((first, *block), block, strict=False))

    return max(
        product(range(4), repeat=depth),
        key=lambda block: (round(chance(block), 9), [-t for t in block]),
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("first", range(4))
def test_a_search_that_keeps_enough_finds_the_likeliest_block(first: int, depth: int) -> None:
    half = make_half("draft", joint(WARM, depth=depth, width=16))
    search, runner = Search(half, 1, first, depth), ToyRunner(4, PAIR[1])
    feed_chain(runner, [first], 0)
    while not search.is_done:
        nodes, parents = search.tree()
        if nodes:
            rows = runner.forward([Feed(nodes, len(search.sequences), 0, tuple(parents))])[0]
        else:
            runner.rollback(0)
            rows = feed_chain(runner, [first], 1)
        search.grow(rows)
    tokens = search.block.tokens
    probs = search.block.probs
    assert tokens == likeliest_block(first, depth)
    assert probs == pytest.approx(
        [DRAFT[a, b].item() for a, b in zip((first, *tokens), tokens, strict=False)]
    )


def test_a_narrow_search_may_miss_it_and_logits_that_are_not_finite_are_told() -> None:
    half = make_half("draft", joint(WARM, width=1))
    search = Search(half, 1, 0, 2)
    search.tree()
    search.grow(DRAFT[:1].log())
    assert search.sequences == [(1,)], "the likeliest token, whatever follows it"
    search.tree()
    with pytest.raises(NumericalError, match="not finite"):
        search.grow(torch.full((1, 4), torch.nan))


def test_what_the_target_rules_out_is_not_accepted_whatever_the_draft_says() -> None:
    """A draft that gives its tokens next to nothing makes the joint ratio infinite; that times 0 passed for 1."""
    half = make_half("target", joint(WARM.changed(top_k=1), depth=8))
    logits = torch.zeros(8, 4)
    logits[:, 2] = 1.0
    tokens = [2] * 7 + [3]
    rows = [torch.zeros(4).index_fill_(0, torch.tensor([token]), 1e-45) for token in tokens]
    judged = half.judge(Proposed(logits, tokens, rows, 1))
    assert (judged.accepted, judged.token) == (7, 2)


def follow(
    text: Sequence[int], tau: float, depth: int, planted: bool = False
) -> list[tuple[int, int]]:
    """Reads a text as the rule writes it, by a search of its own; returns what was drawn freely: (before it, token)."""
    at, last, drawn = 0, 0, []
    while at + depth < len(text):
        block = likeliest_block(last, depth)
        states = (last, *block)
        passed, ratio = 0, 1.0
        for i, (a, b) in enumerate(zip(states, block, strict=False), start=1):
            ratio *= (TARGET[a, b] / DRAFT[a, b]).item()
            passed = i if min(1.0, ratio) > tau else passed
            if planted and min(1.0, ratio) <= tau:
                break
        assert tuple(text[at : at + passed]) == block[:passed]
        at, last = at + passed, states[passed]
        if passed < depth:
            drawn.append((last, text[at]))
            last, at = text[at], at + 1
    return drawn


@pytest.mark.parametrize(("window", "tau"), [("stream", 0.55), ("fixed", 0.9)])
def test_texts_are_what_the_rule_writes(window: str, tau: float) -> None:
    """All that is accepted follows from the two models; what is not has the target's distribution."""
    decoding = resolved("pearl", window, 4, "joint", parameters(tau, 3, 16))
    drawn = [
        each for seed in range(6) for each in follow(decode(decoding, seed, 400).tokens, tau, 3)
    ]
    pvalues = []
    for state in range(4):
        tokens = [token for last, token in drawn if last == state]
        if len(tokens) > 100:
            counts = [tokens.count(token) for token in range(4)]
            pvalues.append(chi_square(counts, (len(tokens) * TARGET[state].double()).tolist()))
    assert pvalues
    assert min(pvalues) > NEVER


def test_the_bias_is_what_the_text_had_no_choice_in() -> None:
    """At an accepted position one token could come: the distance from the target is 1 less its probability there."""
    run = decode(resolved("pearl", "stream", 4, "joint", parameters(0.55, 3, 16)), 5, 300)
    states = [0, *run.tokens]
    expected = sum(
        1 - TARGET[a, b].item()
        for a, b, origin in zip(states, run.tokens, run.provenance, strict=False)
        if origin is Provenance.ACCEPTED
    )
    assert run.counts.odds.bias == pytest.approx(
        expected, rel=0.02
    )  # a block may end behind the text's end


def test_reading_it_so_notices_a_planted_bug() -> None:
    """A prefix that does not pass ends the block: the text of the rule is not that."""
    decoding = resolved("pearl", "stream", 4, "joint", parameters(0.7, 3, 16))
    text = decode(decoding, 1, 400).tokens
    follow(text, 0.7, 3)
    with pytest.raises(AssertionError):
        follow(text, 0.7, 3, planted=True)
    with pytest.raises(AssertionError):
        follow(text, 0.3, 3)


# ---- whatever the timing ----


@pytest.mark.parametrize("methods", [("pearl", "pearl-no-pre-verify"), ("sd",)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 60])
def test_one_text_a_seed_whatever_the_timing(methods: Sequence[str], tokens: int) -> None:
    """Windows and speeds say what is judged when, and never what is judged together."""
    found = set()
    for method, window, gamma, ratio in product(
        methods, ["stream", "fixed"], [1, 4, 7], [0.5, 4.0, 9.0]
    ):
        if method == "sd" and gamma > 4:
            continue  # where its bonus tokens stand depends on the window
        text = decode(
            resolved(method, window, gamma, "joint", parameters(0.6, 4)), tokens=tokens, ratio=ratio
        ).tokens
        assert len(text) == tokens
        found.add(tuple(text))
    assert len(found) == 1


@pytest.mark.parametrize(
    "shaping", [None, shaped(1, 1.3, 0.5, 0.1), shaped(1, logit_bias=((2, 3.0),))]
)
def test_a_draft_that_takes_no_trees_finds_the_same(shaping: RequestOptions | None) -> None:
    """What the search leaves in the cache is text to the penalties too: a draft that did not hold it ended."""
    decoding = resolved("pearl", "stream", 4, "joint", parameters())
    found, other = (
        decode(decoding, shaping=shaping, wrap=wrap) for wrap in (lambda runner: runner, Chains)
    )
    assert found.tokens == other.tokens
    assert found.counts.num_accepted_draft_tokens == other.counts.num_accepted_draft_tokens


# ---- joint greedy decoding (MJGD): the likeliest tokens together ----

# A text of these is the likelier, the more of its tokens are chosen together.
ROWS = torch.softmax(2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(9)), -1)


def runner() -> ToyRunner:
    return ToyRunner(6, lambda seen: ROWS[seen[-1]])


def surprise(first: int, tokens: tuple[int, ...] | list[int]) -> float:
    return -sum(log(ROWS[a, b].item()) for a, b in zip((first, *tokens), tokens, strict=False))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_step_takes_the_likeliest_tokens_together(count: int) -> None:
    written = mjgd.decode(runner(), [0], 12, count)
    assert len(written.tokens) == 12
    last = 0
    for at in range(0, 12, count):
        block = tuple(written.tokens[at : at + count])
        best = min(
            product(range(6), repeat=count), key=lambda tokens, last=last: surprise(last, tokens)
        )
        assert surprise(last, block) == pytest.approx(surprise(last, best))
        last = block[-1]
    assert written.surprise == pytest.approx(surprise(0, written.tokens), abs=1e-5)


def test_it_ends_behind_an_end() -> None:
    whole = mjgd.decode(runner(), [0], 12, 3).tokens
    end = whole[4]
    cut = mjgd.decode(runner(), [0], 12, 3, {end}).tokens
    assert cut == whole[: whole.index(end) + 1]
    assert len(mjgd.decode(runner(), [0], 7, 3).tokens) == 7
