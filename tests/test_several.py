"""Rules that judge several tokens at a root, batch and spectr: exact by enumeration and by chi-square; rejections are
as the theory of batch drafts says; one text a seed. And bild, whose bias is as told.
"""

from __future__ import annotations

from itertools import product
from math import log, prod

import pytest
import torch

from pearl.decoding.rules import make_target_half, several, tokenwise
from pearl.decoding.rules.biased import BildTarget
from pearl.decoding.rules.several import BatchTarget, SpectrTarget
from pearl.lab.simulate import Timing, paired_executors, simulate
from pearl.models.toy import ToyRunner
from pearl.protocol.messages import Provenance, Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.rules import Parameters
from tests.rejection_theory import expected_batch_rejections
from tests.replace import replace
from tests.test_verification import CASES, DRAFT, NEVER, TARGET, Table, generate, p_value

WARM = Sampling(1.0, seed=3)


def candidates(count: int) -> Parameters:
    return (("candidates", float(count)),)


# ---- enumeration ----


class Outcomes:
    """All ways in which one position may be decided: what is drawn, and whether each that is judged is accepted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script: list[bool] = []
        self._told: list[float] = []
        self._rest: list[torch.Tensor] = []
        self._drawn: tuple[int, ...] = ()
        monkeypatch.setattr(several, "probabilities", lambda logits, sampling: logits)
        monkeypatch.setattr(several, "candidate", lambda draft, sampling, position, number: self._drawn[number])
        monkeypatch.setattr(several, "accepts", self._accepts)
        monkeypatch.setattr(several, "pick", self._pick)

    def _accepts(self, u: float, target_prob: float, draft_prob: float) -> bool:
        chance = min(1.0, target_prob / draft_prob)
        decision = self._script[len(self._told)] if len(self._told) < len(self._script) else False
        self._told.append(chance if decision else 1 - chance)
        return decision

    def _pick(self, rest: torch.Tensor, key: int, otherwise: torch.Tensor) -> torch.Tensor:
        self._rest.append(rest if rest.any() else otherwise)
        return torch.zeros(2)

    def law(self, target: torch.Tensor, draft: torch.Tensor, rule: BatchTarget, count: int) -> tuple[Table, float]:
        """What is committed, and how often a correction is."""
        law, corrected = torch.zeros(len(target), dtype=torch.float64), 0.0
        for drawn in product(range(len(draft)), repeat=count):
            weight = prod(draft[token].item() for token in drawn)
            for accepted in range(count + 1 if weight else 0):
                self._drawn, self._told, self._rest = drawn, [], []
                self._script = [number == accepted for number in range(count)]
                verdict = rule.judge(target[None], [drawn[0]], [draft], 7)
                chance = weight * prod(self._told)
                if accepted < count and len(self._told) <= accepted:  # nothing was left to judge it against
                    continue
                if verdict.accepted:
                    law[drawn[0]] += chance
                elif verdict.is_candidate:
                    assert verdict.token is not None
                    law[verdict.token] += chance
                else:
                    corrected += chance
                    law += chance * self._rest[0].double() / self._rest[0].sum().item()
        return law, corrected


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rule", [BatchTarget, SpectrTarget])
@pytest.mark.parametrize(("target", "draft"), CASES)
def test_several_candidates_are_judged_exactly(
    rule: type[BatchTarget],
    target: tuple[int, ...],
    draft: tuple[int, ...],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over all that may be drawn and accepted; and a correction comes as often as the verdict says."""
    p, q = torch.tensor(target) / 64, torch.tensor(draft) / 64
    judge = rule(Sampling(1.0), count)
    law, corrected = Outcomes(monkeypatch).law(p, q, judge, count)
    assert law.tolist() == pytest.approx(p.tolist(), abs=1e-6)
    judge._next = -1
    odds = judge.judge(p[None], [draft.index(max(draft))], [q], 7).odds
    assert odds is not None
    assert odds.rejections == pytest.approx(corrected, abs=1e-6)


def test_enumeration_notices_planted_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates judged against the target anew instead of what is left; a K-SEQ that divides by nothing."""
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    with monkeypatch.context() as planted:
        planted.setattr(several, "residual", lambda target, draft: target)
        law, _ = Outcomes(planted).law(p, q, BatchTarget(Sampling(1.0), 2), 2)
        assert law.tolist() != pytest.approx(p.tolist(), abs=1e-3)
    with monkeypatch.context() as planted:
        planted.setattr(several, "_divisor", lambda target, draft, candidates: 1.0)
        law, _ = Outcomes(planted).law(p, q, SpectrTarget(Sampling(1.0), 3), 3)
        assert law.tolist() != pytest.approx(p.tolist(), abs=1e-3)


def test_one_candidate_is_the_ratio_rule() -> None:
    """Bit for bit, in whole texts, whatever the method."""
    for method, window in [("pearl", "stream"), ("pearl", "fixed"), ("sd", "fixed")]:
        plain = generate(RequestOptions(method, window, 3), 5, 300)
        assert generate(RequestOptions(method, window, 3, "batch", candidates(1)), 5, 300) == plain


@pytest.mark.parametrize("count", [2, 4, 8])
def test_of_more_candidates_one_is_accepted_more_often(count: int) -> None:
    """By the closed form of one position; spectr's is at least that of one draft and at most the optimum."""
    p, q = TARGET[0], DRAFT[0]
    distance = float((p - q).abs().sum()) / 2
    for rule in (BatchTarget, SpectrTarget):
        odds = rule(WARM, count).judge(p.log()[None], [0], [q], 7).odds
        assert odds is not None
        assert odds.rejections < distance - 0.01


# ---- whole texts ----


def texts(decoding: RequestOptions, count: int = 3, tokens: int = 500) -> list[list[int]]:
    return [generate(decoding, seed, tokens) for seed in range(count)]


@pytest.mark.parametrize(("method", "window"), [("pearl", "stream"), ("pearl", "fixed"), ("sd", "fixed")])
@pytest.mark.parametrize("rule", ["batch", "spectr"])
def test_texts_have_the_targets_distribution(rule: str, method: str, window: str) -> None:
    assert p_value(texts(RequestOptions(method, window, 3, rule, candidates(3)))) > NEVER


def test_chi_square_notices_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate is judged against the whole target."""
    monkeypatch.setattr(several, "residual", lambda target, draft: target)
    assert p_value(texts(RequestOptions("pearl", "fixed", 3, "batch", candidates(3)), tokens=900)) < NEVER


@pytest.mark.parametrize("rule", ["batch", "spectr", "bild"])
def test_one_text_a_seed_whatever_the_timing(rule: str) -> None:
    """Windows, their sizes, branches and speeds change no text."""
    found = set()
    for window, gamma, ratio_, branches in product(["stream", "fixed"], [1, 4], [1.5, 5.0], [0, 4]):
        executors = paired_executors(
            ToyRunner(3, lambda seen: TARGET[seen[-1]]), ToyRunner(3, lambda seen: DRAFT[seen[-1]])
        )
        decoding = RequestOptions("pearl", window, gamma, rule, branches=branches)
        submit = Submit(1, (0,), 121, replace(decoding, sampling=WARM))
        found.add(tuple(simulate(submit, *executors, Timing(1.0, lambda _, ratio_=ratio_: ratio_)).tokens))
    assert len(found) == 1


def test_a_candidate_counts_as_accepted_and_a_branch_may_wait_for_it() -> None:
    executors = paired_executors(
        ToyRunner(3, lambda seen: TARGET[seen[-1]]), ToyRunner(3, lambda seen: DRAFT[seen[-1]])
    )
    decoding = RequestOptions("pearl", "stream", 3, "batch", candidates(4), branches=8)
    run = simulate(Submit(1, (0,), 301, replace(decoding, sampling=WARM)), *executors, Timing(1.0, lambda _: 4.0))
    counts = run.counts
    assert counts.provenance[Provenance.ACCEPTED] == counts.accepted == sum(counts.sources.values())
    assert counts.rejected == counts.provenance[Provenance.CORRECTED]
    assert counts.foreseen > 0


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_as_many_are_rejected_as_the_theory_of_batch_drafts_says(count: int) -> None:
    """Theorem 3 of Yin et al., for a whole text: the law of the number of corrections, not of given distributions."""
    tokens, runs = 4, 400
    expected = expected_batch_rejections([TARGET.tolist()] * tokens, [DRAFT.tolist()] * tokens, 0, count)
    found = 0
    for seed in range(runs):
        executors = paired_executors(
            ToyRunner(3, lambda seen: TARGET[seen[-1]]), ToyRunner(3, lambda seen: DRAFT[seen[-1]])
        )
        decoding = RequestOptions("pearl", "fixed", 2, "batch", candidates(count))
        submit = Submit(1, (0,), 1 + tokens, replace(decoding, sampling=Sampling(1.0, seed=seed)))
        found += simulate(submit, *executors, Timing(1.0, lambda _: 2.0)).counts.rejected
    assert found / runs == pytest.approx(expected, abs=4 * (tokens / 4 / runs) ** 0.5)


# ---- bild ----


@pytest.mark.parametrize("rollback", [0.3, 0.8, 1.4])
@pytest.mark.parametrize(("target", "draft"), CASES)
def test_bild_is_as_biased_as_it_says(
    target: tuple[int, ...], draft: tuple[int, ...], rollback: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q = torch.tensor(target) / 64, torch.tensor(draft) / 64
    judge = BildTarget(Sampling(1.0), rollback)
    monkeypatch.setattr(tokenwise, "probabilities", lambda logits, sampling: logits)
    rests: list[torch.Tensor] = []

    def remember(probs: torch.Tensor, key: int, otherwise: torch.Tensor) -> torch.Tensor:
        rests.append(probs)
        return torch.zeros(2)

    monkeypatch.setattr(tokenwise, "pick", remember)
    law, rejected = torch.zeros(len(p)), 0.0
    for token, weight in enumerate(q.tolist()):
        verdict = judge.judge(p[None], [token], [q], 0)
        if verdict.accepted:
            law[token] += weight
        else:
            rejected += weight
            law += weight * rests.pop()
        told = verdict.odds
    assert told is not None
    assert told.rejections == pytest.approx(rejected, abs=1e-6)
    assert told.bias == pytest.approx(float((law - p).relu().sum()), abs=1e-6)


def test_bild_with_no_rollback_accepts_what_the_target_is_sure_of() -> None:
    verdict = make_target_half("bild", WARM, (("rollback", 0.0),)).judge(
        torch.tensor([[0.0, -40.0]]), [0], [torch.tensor([0.5, 0.5])], 3
    )
    assert verdict.accepted == 1


@pytest.mark.parametrize("window", ["stream", "fixed"])
def test_biased_texts_of_bild_have_the_distribution_that_is_told(window: str) -> None:
    """And not the target's."""
    least = 0.3
    accepted = torch.where(TARGET.ge(least), DRAFT, 0.0)
    law = accepted + (1 - accepted.sum(-1, keepdim=True)) * TARGET
    texts_ = texts(RequestOptions("pearl", window, 3, "bild", (("rollback", -log(least)),)), tokens=900)
    assert p_value(texts_, law) > NEVER
    assert p_value(texts_) < NEVER
