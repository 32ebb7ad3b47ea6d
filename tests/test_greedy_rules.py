"""Rules that are no greedy decoding at temperature 0, against the papers' definitions: by trying all."""

from collections.abc import Sequence
from itertools import product
from math import log, prod
from typing import Any

import pytest
import torch

from pearl.config import RequestOptions
from pearl.decoding.rules import biased
from pearl.decoding.rules import joint as joint_rule
from pearl.lab.studies.simulate import Outcome
from pearl.protocol.messages import Provenance
from tests.options import drawn_by, resolved
from tests.pairwise import combined, pairwise
from tests.virtual import TIMINGS, Chains, decoded

VOCAB, TOKENS = 5, 40
GENERATOR = torch.Generator().manual_seed(11)
TARGET, OTHER = (
    torch.softmax(1.5 * torch.randn(99 * VOCAB, VOCAB, generator=GENERATOR), -1) for _ in range(2)
)
DRAFT = 0.6 * TARGET + 0.4 * OTHER
TABLES = TARGET.tolist(), DRAFT.tolist()
ROLLBACKS, CONFIDENCES, TAUS = (0.3, 1.0, 20.0), (0.0, 0.5, 0.7), (0.0, 0.5, 0.9, 1.0)


def state(seen: Sequence[int]) -> int:
    """What the next token depends on. On the position too, as a greedy text is a short loop otherwise."""
    return VOCAB * len(seen) + seen[-1]


PAIR = tuple((lambda seen, table=table: table[state(seen)]) for table in (TARGET, DRAFT))
PROMPT = (1, 0)


def likeliest(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda token: (row[token], -token))


def decode(
    options: RequestOptions,
    timing: int = 0,
    tokens: int = TOKENS,
    sampling: RequestOptions | None = None,
    **more: Any,
) -> Outcome:
    return decoded(
        PAIR, VOCAB, options, sampling or drawn_by(), tokens, TIMINGS[timing], PROMPT, **more
    )


# ---- BiLD (Kim et al. 2023): fallback and rollback ----


def bild_text(method: str, rollback: float, confidence: float, gamma: int) -> list[int]:
    """`sd`: up to `gamma` tokens until the draft is unsure; the target rolls back to the first that is too unlikely.

    Either way the target's own likeliest token follows. But the prompt's row judges a token by itself, as all rows do
    under `pearl`, and then none follows.
    """
    text = list(PROMPT)
    while len(text) < TOKENS + len(PROMPT):
        is_window = method == "sd" and len(text) > len(PROMPT)
        for _ in range(gamma if is_window else 1):
            target, draft = (table[state(text)] for table in TABLES)
            token = likeliest(draft)
            if draft[token] < confidence or -log(target[token]) > rollback:
                text.append(likeliest(target))
                break
            text.append(token)
        else:
            if is_window:
                text.append(likeliest(TABLES[0][state(text)]))
    return text[len(PROMPT) :][:TOKENS]


def bild(
    method: str, rollback: float, confidence: float, gamma: int, window: str = "stream"
) -> RequestOptions:
    how = method, window, gamma, "bild", (("rollback", rollback),), 0, 0, 0, 0
    return resolved(*how, *(("threshold", (("confidence", confidence),)) if confidence else ()))


@combined
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("method", ["sd", "pearl", "pearl-no-pre-verify"])
def test_bild_is_as_in_its_paper(method: str, gamma: int, combined: Any) -> None:
    """Whatever the timing and window."""
    found = set()
    for rollback, confidence, (window, timing) in combined(
        ROLLBACKS, CONFIDENCES, [("stream", 0), ("stream", 1), ("fixed", 2)]
    ):
        expected = bild_text(method, rollback, confidence, gamma)
        run = decode(bild(method, rollback, confidence, gamma, window), timing, TOKENS + gamma)
        assert run.tokens[:TOKENS] == expected, (rollback, confidence, window, timing)
        assert bool(run.counts.num_draft_stops) == (confidence > 0)
        assert run.counts.resyncs == 0
        found.add(tuple(expected))
    assert len(found) >= 4


def test_what_guesses_changes_no_text_of_bild() -> None:
    for confidence, rollback, wrap in product(
        CONFIDENCES, (1.0, 20.0), (Chains, lambda runner: runner)
    ):
        plain = bild("pearl", rollback, confidence, 4)
        more = plain.changed(look_ahead=8, draft_lookup=8, branches=7, siblings=16)
        assert decode(more, wrap=wrap).tokens == bild_text("pearl", rollback, confidence, 4)


def test_a_token_that_the_draft_is_unsure_of_is_not_sent() -> None:
    """Not even to be refused: with a confidence of 1 the draft proposes none, and each token is the target's."""
    run = decode(bild("sd", 20.0, 1.0, 4))
    assert run.counts.num_draft_tokens == 0
    assert run.counts.num_draft_stops == TOKENS
    assert run.tokens == decode(resolved("ar")).tokens
    assert set(run.provenance) == {Provenance.DIRECT}


# ---- MJSD (Qin et al. 2024): the joint argmax, its longest part by joint likelihood, the target's likeliest token ----


def joint_text(method: str, tau: float, depth: int, until: int) -> list[int]:
    def chances(table: list[list[float]], text: Sequence[int], block: Sequence[int]) -> list[float]:
        whole = (*text, *block)
        return [table[state(whole[: len(text) + i])][token] for i, token in enumerate(block)]

    text = list(PROMPT)
    while len(text) < until + len(PROMPT):
        block = max(
            product(range(VOCAB), repeat=depth),
            key=lambda block: prod(chances(TABLES[1], text, block)),
        )
        pairs = list(zip(*(chances(table, text, block) for table in TABLES), strict=True))
        passed = [
            i for i in range(1, depth + 1) if min(1.0, prod(p / q for p, q in pairs[:i])) > tau
        ]
        text += block[: max(passed, default=0)]
        has_bonus = method == "sd" and (
            depth > 1 or len(text) > len(PROMPT) + 1
        )  # a block of 1: see `bild_text`
        if max(passed, default=0) < depth or has_bonus:
            text.append(likeliest(TABLES[0][state(text)]))
    return text[len(PROMPT) :][:until]


def joint(method: str, tau: float, depth: int, window: str = "stream") -> RequestOptions:
    parameters = (("tau", tau), ("depth", float(depth)), ("width", 16.0))
    return resolved(method, window, depth, "joint", parameters)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ["sd", "pearl"])
def test_joint_is_as_in_its_paper(method: str, depth: int) -> None:
    """Whatever the timing. At the end of a text blocks are shorter, so it is compared up to there."""
    found = set()
    for tau in TAUS:
        expected = joint_text(method, tau, depth, TOKENS - depth)
        for window, timing in [("stream", 0), ("fixed", 1)]:
            assert (
                decode(joint(method, tau, depth, window), timing).tokens[: TOKENS - depth]
                == expected
            )
        found.add(tuple(expected))
    assert len(found) >= 2
    assert tuple(decode(resolved("ar")).tokens[: TOKENS - depth]) in found, (
        "at tau 1 nothing passes"
    )


def test_the_bias_is_the_number_of_tokens_that_are_not_the_targets() -> None:
    for options in (bild("pearl", 2.0, 0.4, 4), joint("pearl", 0.0, 3)):
        run, text = decode(options, tokens=61), list(PROMPT)
        off = sum(
            token != likeliest(TABLES[0][state(text + run.tokens[:i])])
            for i, token in enumerate(run.tokens)
        )
        assert run.counts.odds is not None
        assert off - 3 <= run.counts.odds.bias <= off + 3, "a block may end behind the text's end"
        assert off > 5


# ---- planted bugs ----

PLANTED: dict[str, tuple[object, str, Any]] = {
    "likelihoods at another temperature": (joint_rule, "unwarped", lambda _: drawn_by(0.5)),
    "greedy decoding after all": (
        biased.GreedyBildTarget,
        "launch",
        lambda self, logits, _: 99 * logits,
    ),
    "the unsure token is sent": (RequestOptions, "withholds", False),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[name])
    with pytest.raises(AssertionError):
        [test_bild_is_as_in_its_paper("sd", 4, pairwise), test_joint_is_as_in_its_paper("pearl", 3)]
