"""Both rules are exact: by enumeration, and by chi-square on what whole runs commit. Planted bugs must be noticed.

The chi-square is over windows of three committed tokens under a first-order target: it sees a wrong distribution of a
token and one that depends on how the token before it was drawn.
"""

from fractions import Fraction
from itertools import product
from math import log, prod
from typing import Any

import pytest
import torch

from pearl.config import RequestOptions
from pearl.decoding.rules import Proposed, ratio, several
from pearl.decoding.rules.biased import BildTarget, OptTarget, UnoTarget
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.rules.ratio import RatioTarget, residual
from pearl.decoding.rules.several import BatchTarget, SpectrTarget
from pearl.decoding.sampling import pick, pick_on_device, read_draw
from pearl.errors import NumericalError
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import Outcome
from pearl.models.toy import ToyRunner
from pearl.protocol.events import Forward, Odds, Open, Phase, Sample, Sampled
from pearl.spec.rules import RULES, Parameters
from tests.options import drawn_by, resolved
from tests.virtual import DRAFT, NEVER, TARGET, WAYS, Table, decoded, first_order, p_value

GRID = 64

# ---- enumeration ----

# In 64ths: exact in float32. Draft probabilities are powers of two, so that every threshold falls on the grid of u.
CASES = [
    ((32, 32), (32, 32)),
    ((40, 24), (32, 32)),
    ((32, 16, 16), (16, 32, 16)),
    ((0, 40, 24), (32, 16, 16)),
    ((64, 0, 0), (16, 32, 16)),
    ((1, 2, 61), (32, 32, 0)),
    ((21, 22, 21), (16, 16, 32)),
    ((16, 16, 32), (16, 16, 32)),
    ((7, 0, 20, 37), (8, 8, 16, 32)),
]


def committed(
    target: tuple[int, ...],
    draft: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    rule: RatioTarget | None = None,
) -> tuple[list[Fraction], Fraction]:
    """What the rule (default: ratio) commits at one position: over every draft token, u of the grid and correction.

    And how often a correction is.
    """
    rule = rule or RatioTarget(drawn_by(1.0))
    target_probs, draft_probs = (torch.tensor(p).float() / 64 for p in (target, draft))
    result, corrected = [Fraction(0)] * len(target), Fraction(0)
    rests: list[torch.Tensor] = []
    monkeypatch.setattr(ratio, "probabilities", lambda logits, sampling: logits)

    def remember(probs: torch.Tensor, key: int, otherwise: torch.Tensor) -> torch.Tensor:
        rests.append(probs if probs.any() else otherwise)
        return torch.zeros(2)

    monkeypatch.setattr(ratio, "pick", remember)
    for (token, weight), k in product(enumerate(draft), range(GRID)):
        if not weight:
            continue
        chance = Fraction(weight, 64) / GRID
        monkeypatch.setattr(ratio, "uniform", lambda key, k=k: k / GRID)
        if rule.judge(Proposed(target_probs[None], [token], [draft_probs], 0)).accepted:
            result[token] += chance
            continue
        rest, corrected = [Fraction(float(r)) for r in rests.pop()], corrected + chance
        for i, share in enumerate(rest):
            result[i] += chance * share / sum(rest)
    return result, corrected


def distance(one: list[Fraction], other: list[Fraction]) -> Fraction:
    """Total variation."""
    return sum((abs(a - b) for a, b in zip(one, other, strict=True)), Fraction(0)) / 2


RULES_OF_64THS: list[Any] = [
    (RatioTarget, 0),
    *product((OptTarget, UnoTarget), (0, 4, 8, 64)),
]  # 64ths
RULES_OF_64THS += [(BildTarget, 64 * rollback) for rollback in (0.3, 0.8, 1.4)]


@pytest.mark.parametrize(("rule", "parameter"), RULES_OF_64THS)
@pytest.mark.parametrize(("target", "draft"), CASES)
def test_bias_and_rejections_are_as_told(
    rule: Any,
    target: tuple[int, ...],
    draft: tuple[int, ...],
    parameter: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As fractions; for opt the two add up to the distance of the models, and no replacement has less bias."""
    judge = rule(drawn_by(1.0), *([] if rule is RatioTarget else [parameter / 64]))
    p, q = ([Fraction(each, 64) for each in weights] for weights in (target, draft))
    law, rejected = committed(target, draft, monkeypatch, judge)
    likeliest = draft.index(max(draft))
    rows = [torch.tensor(draft) / 64]
    told = judge.judge(Proposed(torch.tensor([target]) / 64, [likeliest], rows, 0)).odds
    bias = distance(law, p)
    assert told.rejections == pytest.approx(float(rejected), abs=1e-6)
    assert told.variance == pytest.approx(float(rejected * (1 - rejected)), abs=1e-6)
    assert told.bias == pytest.approx(float(bias), abs=1e-6)
    if rule is BildTarget:
        return
    accepted = [
        min(b, a + Fraction(int(parameter), 64)) if a else Fraction(0)
        for a, b in zip(p, q, strict=True)
    ]
    assert rejected == 1 - sum(accepted)
    if rule is OptTarget:
        assert rejected + bias == distance(p, q)
        uno = [a + rejected * each for a, each in zip(accepted, p, strict=True)]
        assert bias <= distance(uno, p)
    elif rule is UnoTarget:
        assert law == [a + rejected * each for a, each in zip(accepted, p, strict=True)]
    else:
        assert bias == 0


def exact_in_all(monkeypatch: pytest.MonkeyPatch) -> bool:
    return all(committed(t, d, monkeypatch)[0] == [Fraction(p, 64) for p in t] for t, d in CASES)


def lenient(u: float, target_prob: float, draft_prob: float) -> bool:
    return u * draft_prob <= target_prob


PLANTED_IN_RULE: dict[str, Any] = {
    "accepts": lenient,
    "residual": lambda target_probs, draft_probs: target_probs,
}


@pytest.mark.parametrize("name", PLANTED_IN_RULE)
def test_enumeration_notices_planted_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`u <= ratio`, and a correction drawn from the target instead of the residual."""
    assert exact_in_all(monkeypatch)
    monkeypatch.setattr(ratio, name, PLANTED_IN_RULE[name])
    assert not exact_in_all(monkeypatch)


@pytest.mark.parametrize("size", [2, 1000])
def test_from_a_residual_of_nothing_the_target_is_drawn(size: int) -> None:
    """Rounding can reject where the two distributions are equal; there is then nothing else to draw from."""
    probs = torch.rand(size, generator=torch.Generator().manual_seed(2))
    rest = residual(probs, probs)
    assert not rest.any()
    for key in range(0, 1 << 64, 1 << 58):
        found = pick(rest, key, probs), pick(probs, key), pick_on_device(rest, key, probs)
        assert len({read_draw(draw) for draw in found}) == 1
    with pytest.raises(NumericalError):
        read_draw(pick(rest, 5))
    some = residual(torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75]))
    assert torch.equal(some, torch.tensor([0.5, 0.0]))
    for draw in (pick, pick_on_device):
        assert read_draw(draw(some, 5, torch.tensor([0.0, 1.0]))) == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_direct_draw_is_one_under_either_rule(rule: str, temperature: float) -> None:
    """`ar`, bonus tokens and going alone give the same text whichever rule was asked for."""
    sampling = drawn_by(temperature, top_k=7, seed=4)
    draw = DirectDraw(sampling)
    probs = torch.softmax(torch.randn(50, 20, generator=torch.Generator().manual_seed(1)), -1)
    executor = TargetExecutor(ToyRunner(20, lambda seen: probs[len(seen) - 1]))
    executor.execute(Open((0,), resolved(rule=rule, sampling=sampling)))
    executor.execute(Forward(Phase.PREFILL, 0, (0,) * 50, 50))
    for position in range(1, 51):
        expected = read_draw(draw(torch.log(probs[position - 1]), position))
        assert executor.sample(Sample(position, position - 1)) == Sampled((expected,))


# ---- whole runs ----


def run(decoding: RequestOptions, seed: int, tokens: int) -> Outcome:
    return decoded(first_order(TARGET, DRAFT), 3, decoding, drawn_by(1.0, seed=seed), tokens)


def texts(decoding: RequestOptions, count: int, tokens: int) -> list[list[int]]:
    return [run(decoding, seed, tokens).tokens for seed in range(count)]


def biased_law(rule: str, value: float) -> Table:
    """What each token is committed by under a rule that is not exact."""
    accepted = (
        torch.where(TARGET.ge(value), DRAFT, 0.0)
        if rule == "bild"
        else torch.minimum(DRAFT, TARGET + value)
    )
    rest = (TARGET - DRAFT).relu() if rule == "opt" else TARGET
    return accepted + (1 - accepted.sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True)


# Of ways that write one text (test_texts has which do) one is enough.
EXACT = [
    resolved("pearl", "fixed", 2),
    *(resolved(m, "fixed", g) for m in ("sd", "pearl-no-post-verify") for g in (1, 2, 4)),
    resolved("ar"),
    *(
        resolved(*way, 3, rule, (("candidates", 3.0),))
        for rule in ("batch", "spectr")
        for way in WAYS[1:]
    ),
    *(
        resolved("sd", "fixed", 4, draft_stop="threshold", stop_parameters=(("confidence", least),))
        for least in (0.3, 0.6)
    ),
]
BIASED = [
    (resolved("pearl", "stream", 4, rule, ((name, given),)), biased_law(rule, value))
    for rule, name, given, value in (
        *(
            ("opt", "epsilon", 0.125, 0.125),
            ("uno", "epsilon", 0.125, 0.125),
            ("bild", "rollback", -log(0.3), 0.3),
        ),
    )
]


def name(value: object) -> str:
    return (
        f"{value.method}-{value.window}-{value.gamma}-{value.rule}"
        if isinstance(value, RequestOptions)
        else ""
    )


@pytest.mark.parametrize("decoding", EXACT, ids=name)
def test_long_texts_have_the_targets_distribution(decoding: RequestOptions) -> None:
    assert p_value(texts(decoding, 3, 400)) > NEVER


@pytest.mark.parametrize("decoding", EXACT[::3], ids=name)
def test_the_first_tokens_have_the_targets_distribution(decoding: RequestOptions) -> None:
    """Jointly: the prompt's own rows are judged in a way of their own."""
    assert p_value(texts(decoding, 500, 3)) > NEVER


@pytest.mark.parametrize(("decoding", "law"), BIASED, ids=name)
def test_biased_texts_have_the_distribution_that_is_told(
    decoding: RequestOptions, law: Table
) -> None:
    """And not the target's: what chi-square says of the one it does not say of the other."""
    written = texts(decoding, 3, 900)
    assert p_value(written, law) > NEVER
    assert p_value(written) < NEVER


def rejections(decoding: RequestOptions) -> float:
    """How many standard deviations more were rejected than the distributions at hand let expect."""
    found, odds = 0, Odds()
    for seed in range(6):
        counts = run(decoding, seed, 600).counts
        found, odds = found + counts.num_rejections, odds + counts.odds
    return (found - odds.rejections) / odds.variance**0.5


@pytest.mark.parametrize(
    ("method", "rule", "window"),
    [("pearl", "ratio", "stream"), ("pearl-no-pre-verify", "opt", "fixed"), ("sd", "uno", "fixed")],
)
def test_as_many_are_rejected_as_the_distributions_say(method: str, rule: str, window: str) -> None:
    """Theorem 1 of Yin et al. at each position judged; a bonus token or a direct draw counts on neither side."""
    parameters = () if rule == "ratio" else (("epsilon", 0.1),)
    assert abs(rejections(resolved(method, window, 3, rule, parameters))) < 4


def generous(u: float, target_prob: float, draft_prob: float) -> bool:
    return lenient(u - 0.2, target_prob, draft_prob)


@pytest.mark.parametrize("bug", PLANTED_IN_RULE)
def test_chi_square_notices_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as under enumeration, in whole runs. (u = 0 is rare, so here acceptance is lenient by 0.2.)"""
    planted = PLANTED_IN_RULE | {"accepts": generous}
    monkeypatch.setattr(ratio, bug, planted[bug])
    assert p_value(texts(resolved("pearl", "fixed", 4), 3, 1000)) < NEVER


# ---- several tokens at a root: batch and spectr ----


def candidates(count: int) -> Parameters:
    return (("candidates", float(count)),)


class Outcomes:
    """All ways in which one position may be decided: what is drawn, and whether each that is judged is accepted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script: list[bool] = []
        self._told: list[float] = []
        self._rest: list[torch.Tensor] = []
        self._drawn: tuple[int, ...] = ()
        monkeypatch.setattr(ratio, "probabilities", lambda logits, sampling: logits)
        monkeypatch.setattr(
            several, "candidate", lambda draft, sampling, position, number: self._drawn[number]
        )
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

    def law(
        self, target: torch.Tensor, draft: torch.Tensor, rule: BatchTarget, count: int
    ) -> tuple[Table, float]:
        """What is committed, and how often a correction is."""
        law, corrected = torch.zeros(len(target), dtype=torch.float64), 0.0
        for drawn in product(range(len(draft)), repeat=count):
            weight = prod(draft[token].item() for token in drawn)
            for accepted in range(count + 1 if weight else 0):
                self._drawn, self._told, self._rest = drawn, [], []
                self._script = [number == accepted for number in range(count)]
                verdict = rule.judge(Proposed(target[None], [drawn[0]], [draft], 7))
                chance = weight * prod(self._told)
                if (
                    accepted < count and len(self._told) <= accepted
                ):  # nothing was left to judge it against
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
    judge = rule(drawn_by(1.0), count)
    law, corrected = Outcomes(monkeypatch).law(p, q, judge, count)
    assert law.tolist() == pytest.approx(p.tolist(), abs=1e-6)
    odds = (
        rule(drawn_by(1.0), count).judge(Proposed(p[None], [draft.index(max(draft))], [q], 7)).odds
    )
    assert odds.rejections == pytest.approx(corrected, abs=1e-6)


def test_enumeration_of_several_notices_planted_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: candidates are judged against the whole distribution, not the residual; K-SEQ divides by 1."""
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    with monkeypatch.context() as planted:
        planted.setattr(several, "residual", lambda target, draft: target)
        law, _ = Outcomes(planted).law(p, q, BatchTarget(drawn_by(1.0), 2), 2)
        assert law.tolist() != pytest.approx(p.tolist(), abs=1e-3)
    with monkeypatch.context() as planted:
        planted.setattr(several, "k_seq_divisor", lambda target, draft, candidates: 1.0)
        law, _ = Outcomes(planted).law(p, q, SpectrTarget(drawn_by(1.0), 3), 3)
        assert law.tolist() != pytest.approx(p.tolist(), abs=1e-3)


def test_one_candidate_is_the_ratio_rule() -> None:
    """Bit for bit, in whole texts, whatever the method."""
    for way in WAYS:
        one = run(resolved(*way, 3, "batch", candidates(1)), 5, 300)
        assert one.tokens == run(resolved(*way, 3), 5, 300).tokens
