"""Rules that are no greedy decoding at temperature 0, against the papers' definitions: by trying all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from math import log, prod
from typing import Any

import pytest
import torch

from pearl.decoding.rules.biased import GreedyBildTarget
from pearl.decoding.rules.joint import JointTarget
from pearl.lab.simulate import Outcome
from pearl.protocol.messages import Provenance
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.rules import RULES
from tests.loops import MakeLoops, loops, simulated, submission
from tests.virtual import TIMINGS, Chains, decoded

__all__ = ["loops"]  # a fixture

VOCAB, TOKENS = 5, 40
GENERATOR = torch.Generator().manual_seed(11)
TARGET, OTHER = (torch.softmax(1.5 * torch.randn(99 * VOCAB, VOCAB, generator=GENERATOR), -1) for _ in range(2))
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
    options: RequestOptions, timing: int = 0, tokens: int = TOKENS, sampling: Sampling | None = None, **more: Any
) -> Outcome:
    return decoded(PAIR, VOCAB, options, sampling or Sampling(), tokens, TIMINGS[timing], PROMPT, **more)


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


def bild(method: str, rollback: float, confidence: float, gamma: int, **more: Any) -> RequestOptions:
    stop = ("threshold", (("confidence", confidence),)) if confidence else ("fixed", ())
    how = method, more.pop("window", "stream"), gamma, "bild", (("rollback", rollback),)
    return RequestOptions(*how, draft_stop=stop[0], stop_parameters=stop[1])


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("method", ["sd", "pearl", "pearl-no-pre-verify"])
def test_bild_falls_back_and_rolls_back_as_in_its_paper(method: str, gamma: int) -> None:
    """Whatever the timing and window."""
    found = set()
    for rollback, confidence in product(ROLLBACKS, CONFIDENCES):
        expected = bild_text(method, rollback, confidence, gamma)
        for window, timing in [("stream", 0), ("stream", 1), ("fixed", 2)]:
            run = decode(bild(method, rollback, confidence, gamma, window=window), timing, TOKENS + gamma)
            assert run.tokens[:TOKENS] == expected, (rollback, confidence, window, timing)
            assert bool(run.counts.num_draft_stops) == (confidence > 0)
            assert run.counts.resyncs == 0
        found.add(tuple(expected))
    assert len(found) >= 4


def test_what_guesses_changes_no_text_of_bild() -> None:
    for confidence, rollback, wrap in product(CONFIDENCES, (1.0, 20.0), (Chains, lambda runner: runner)):
        plain = bild("pearl", rollback, confidence, 4)
        more = plain.changed(look_ahead=8, draft_lookup=8, branches=7, siblings=16)
        assert decode(more, wrap=wrap).tokens == bild_text("pearl", rollback, confidence, 4)


def test_a_token_that_the_draft_is_unsure_of_is_not_sent() -> None:
    """Not even to be refused: with a confidence of 1 the draft proposes none, and each token is the target's."""
    run = decode(bild("sd", 20.0, 1.0, 4))
    assert run.counts.num_draft_tokens == 0
    assert run.counts.num_draft_stops == TOKENS
    assert run.tokens == decode(RequestOptions("ar")).tokens
    assert set(run.provenance) == {Provenance.DIRECT}


@pytest.mark.parametrize("method", ["sd", "pearl"])
def test_workers_write_the_same(loops: MakeLoops, method: str) -> None:
    pair = loops(alpha=0.3)
    pair.draft()
    more: dict[str, Any] = {"rule": "bild", "draft_stop": "threshold", "stop_parameters": (("confidence", 0.9),)}
    submit = submission(60, method, gamma=3, sampling=Sampling(), **more)
    assert pair.front().ask(submit).tokens == simulated(submit, alpha=0.3)


# ---- MJSD (Qin et al. 2024): the joint argmax, its longest part by joint likelihood, the target's likeliest token ----


def joint_text(method: str, tau: float, depth: int, until: int) -> list[int]:
    def chances(table: list[list[float]], text: Sequence[int], block: Sequence[int]) -> list[float]:
        whole = (*text, *block)
        return [table[state(whole[: len(text) + i])][token] for i, token in enumerate(block)]

    text, known = list(PROMPT), dict[int, tuple[int, ...]]()
    while len(text) < until + len(PROMPT):
        every = product(range(VOCAB), repeat=depth)
        if state(text) not in known:
            known[state(text)] = max(every, key=lambda block: prod(chances(TABLES[1], text, block)))
        block = known[state(text)]
        pairs = list(zip(*(chances(table, text, block) for table in TABLES), strict=True))
        passed = [i for i in range(1, depth + 1) if min(1.0, prod(p / q for p, q in pairs[:i])) > tau]
        text += block[: max(passed, default=0)]
        has_bonus = method == "sd" and (depth > 1 or len(text) > len(PROMPT) + 1)  # a block of 1: see `bild_text`
        if max(passed, default=0) < depth or has_bonus:
            text.append(likeliest(TABLES[0][state(text)]))
    return text[len(PROMPT) :][:until]


def joint(method: str, tau: float, depth: int, window: str = "stream") -> RequestOptions:
    parameters = (("tau", tau), ("depth", float(depth)), ("width", 16.0))
    return RequestOptions(method, window, depth, "joint", parameters)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ["sd", "pearl"])
def test_joint_takes_the_joint_argmax_and_accepts_by_joint_likelihood(method: str, depth: int) -> None:
    """Whatever the timing. At the end of a text blocks are shorter, so it is compared up to there."""
    found = set()
    for tau in TAUS:
        expected = joint_text(method, tau, depth, TOKENS - depth)
        for window, timing in [("stream", 0), ("fixed", 1)]:
            assert decode(joint(method, tau, depth, window), timing).tokens[: TOKENS - depth] == expected
        found.add(tuple(expected))
    assert len(found) >= 2
    assert tuple(decode(RequestOptions("ar")).tokens[: TOKENS - depth]) in found, "at tau 1 nothing passes"


def test_filters_are_of_no_account_at_temperature_0() -> None:
    for options in (bild("sd", 2.0, 0.4, 4), joint("sd", 0.1, 3)):
        assert decode(options, sampling=Sampling(0.0, 1, 0.2, 0.5)).tokens == decode(options).tokens


# ---- what it all is good for, and what it is called ----


def test_the_bias_is_the_number_of_tokens_that_are_not_the_targets() -> None:
    for options in (bild("pearl", 2.0, 0.4, 4), joint("pearl", 0.0, 3)):
        run, text = decode(options, tokens=61), list(PROMPT)
        off = 0
        for token in run.tokens:
            off += token != likeliest(TABLES[0][state(text)])
            text.append(token)
        assert run.counts.odds is not None
        assert off - 3 <= run.counts.odds.bias <= off + 3, "a block may end behind the text's end"
        assert off > 5


@pytest.mark.parametrize("rule", RULES)
def test_other_rules_are_greedy_decoding(rule: str) -> None:
    is_greedy = decode(RequestOptions("pearl", rule=rule)).tokens == decode(RequestOptions("ar")).tokens
    assert is_greedy == RULES[rule].at(0).is_exact == (rule not in ("bild", "joint"))
    assert RequestOptions("pearl", rule=rule).commits_draws == is_greedy


# ---- planted bugs ----


def by_token(self: JointTarget, *given: Any) -> Any:
    """Ends a block at the first part that does not pass."""
    judged = _JOINT(self, *given)
    logits, tokens, rows, start = given[:4]
    for count in range(1, judged.accepted):
        if _JOINT(self, logits[:count], tokens[:count], rows[:count], start).accepted < count:
            return _JOINT(self, logits[:count], tokens[:count], rows[:count], start)
    return judged


def by_argmax(self: GreedyBildTarget, *given: Any) -> Any:
    self._rollback = 0.0
    return _BILD(self, *given)


_JOINT, _BILD = JointTarget.judge, GreedyBildTarget.judge
PLANTED: dict[str, tuple[type, str, Any]] = {
    "a part that fails ends the block": (JointTarget, "judge", by_token),
    "greedy decoding after all": (GreedyBildTarget, "judge", by_argmax),
    "the unsure token is sent": (RequestOptions, "withholds", False),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, bug = PLANTED[name]
    monkeypatch.setattr(where, what, bug)
    if where is JointTarget:
        test: Any = partial(test_joint_takes_the_joint_argmax_and_accepts_by_joint_likelihood, "pearl", 3)
    else:
        test = partial(test_bild_falls_back_and_rolls_back_as_in_its_paper, "sd", 4)
    with pytest.raises(AssertionError):
        test()
