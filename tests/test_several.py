"""Rules that judge several tokens at a root, batch and spectr: exact by enumeration."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from pearl.decoding.rules import several
from pearl.decoding.rules.several import BatchTarget, SpectrTarget
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.rules import Parameters
from tests.test_verification import CASES, WAYS, Table, run

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
    for way in WAYS:
        one = run(RequestOptions(*way, 3, "batch", candidates(1)), 5, 300)
        assert one.tokens == run(RequestOptions(*way, 3), 5, 300).tokens
