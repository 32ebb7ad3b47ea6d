"""The registry of acceptance rules: what a rule declares is true, is read everywhere, and is all a new rule needs."""

import random
from itertools import cycle, pairwise, product

import click
import pytest
import torch

from pearl.cli.options import field_options, of_option
from pearl.config import RequestOptions
from pearl.config.option_names import by_flag, options_of
from pearl.decoding.rules import Proposed, make_half, ratio
from pearl.decoding.rules.ratio import RatioTarget
from pearl.decoding.sampling import read_draw, read_shortlist, shortlist
from pearl.errors import ConfigError
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import paired_executors
from pearl.models.toy import NextToken, ToyRunner
from pearl.protocol.events import Judged, Open
from pearl.protocol.messages import Submit
from pearl.spec.rules import (
    BLOCK_LENGTH,
    MAX_PARAMETERS,
    RULES,
    Needs,
    Parameter,
    Parameters,
    RuleSpec,
    find,
    named_parameters,
)
from tests import loops as worker_loops
from tests.loops import MakeLoops, submission
from tests.options import drawn_by, resolved
from tests.protocol_pair import Pair, at_random
from tests.replace import replace
from tests.virtual import NEVER, TARGET, WARM, WAYS, decoded, first_order, p_value

NAMES = [*RULES, "lenient"]
DRAFTED = [name for name in RULES if not find(name).judges_blocks]
FAR = (
    torch.tensor([[4, 44, 16], [36, 4, 24], [40, 16, 8]]) / 64
)  # a draft that is refused half of what it says
PAIR = first_order(TARGET, FAR)


# What the registry asks of whoever adds a rule, and nothing else. It judges as ratio does, but against (1 - epsilon)
# times the draft's probabilities: at 0 it is ratio bit for bit, at 1 it accepts every token that the target allows.
LENIENT = RuleSpec(
    "lenient",
    "as ratio, against (1 - epsilon) times the draft's probabilities",
    target=f"{__name__}:LenientTarget",
    parameters=(Parameter("epsilon", 0, 1, 0.0, "how much to forgive"),),
)


class LenientTarget(RatioTarget):
    def __init__(self, sampling: RequestOptions, epsilon: float) -> None:
        super().__init__(sampling)
        self._share = 1 - epsilon

    def judge(self, proposed: Proposed) -> Judged:
        return super().judge(proposed._replace(rows=[self._share * row for row in proposed.rows]))


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> RuleSpec:
    monkeypatch.setitem(RULES, LENIENT.name, LENIENT)
    return LENIENT


def table(vocab: int, seed: int) -> torch.Tensor:
    return torch.softmax(
        torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)), -1
    )


def overlapping(vocab: int, alpha: float, seed: int = 0) -> tuple[NextToken, NextToken]:
    """(target, draft) distributions, both above 0 everywhere; the larger `alpha`, the closer."""
    target, other = table(vocab, 1), table(vocab, 2 + seed)
    draft = alpha * target + (1 - alpha) * other
    return lambda seen: target[seen[-1]], lambda seen: draft[seen[-1]]


def text(
    rule: str,
    parameters: Parameters = (),
    sampling: RequestOptions = WARM,
    draft: int = 0,
    alpha: float = 0.3,
) -> list[int]:
    asked = resolved("pearl", rule=rule, parameters=parameters)
    return decoded(overlapping(32, alpha, draft), 32, asked, sampling).tokens


# ---- a third rule, end to end ----


@pytest.mark.parametrize("method", ["pearl", "sd"])
def test_every_rule_goes_through_the_runtime(
    loops: MakeLoops, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Through both workers' loops and the codec; neither names the third rule or its parameter."""
    monkeypatch.setattr(worker_loops, "alpha_pair", overlapping)
    pair = loops(alpha=0.3)
    pair.draft()
    front, rates = pair.front(), dict[tuple[str, float], float]()
    for request, (rule, epsilon) in enumerate(
        [*((rule, 0.0) for rule in RULES), ("lenient", 0.5), ("lenient", 1.0)]
    ):
        parameters = (("epsilon", epsilon),) if epsilon else ()
        submit = submission(60, method, request=request, rule=rule, parameters=parameters, gamma=3)  # type: ignore[arg-type]
        told = front.ask(submit)
        assert told.tokens == worker_loops.simulated(submit, alpha=0.3), rule
        assert told.statistics.num_accepted_draft_tokens > 0, rule
        rates[rule, epsilon] = told.statistics.acceptance_rate or 0.0
    assert rates["lenient", 0.0] == rates["ratio", 0.0], "at its default it is ratio"
    assert rates["lenient", 0.0] < rates["lenient", 0.5] < rates["lenient", 1.0] == 1


@pytest.mark.parametrize("sampling", [WARM, drawn_by(0.7, top_k=20, seed=5), drawn_by(0.0)])
@pytest.mark.parametrize("vocab", [32, 5000])
@pytest.mark.parametrize("rule", [*DRAFTED, "lenient"])
def test_branches_draw_together_what_they_would_draw_one_by_one(
    rule: str, vocab: int, sampling: RequestOptions
) -> None:
    together, alone = (make_half("draft", sampling.changed(rule=rule)) for _ in range(2))
    rows = list(3 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)))
    positions, tops = [5, 9, 5, 6, 7, 9], read_shortlist(*map(shortlist, rows))
    drafted = together.draft(rows, positions)
    for row, position, top, (draw, probs) in zip(rows, positions, tops, drafted, strict=True):
        ((wanted, wanted_probs),) = alone.draft([row], [position])
        assert read_draw(draw) == read_draw(wanted)
        assert together.likeliest(top, position, 5) == alone.likeliest(top, position, 5)
        assert (probs is None) == (wanted_probs is None)
        assert probs is None or torch.equal(probs, wanted_probs)


@pytest.mark.parametrize("rule", RULES)
def test_what_a_filter_rules_out_is_no_text_under_any_rule(rule: str) -> None:
    """The draft's two likeliest tokens are hardly ever among the target's; `opt` and `uno` forgave that too."""
    names = [parameter.name for parameter in find(rule).parameters]
    sampling = drawn_by(1.0, top_k=2, seed=3)
    written = text(rule, (("epsilon", 0.5),) if "epsilon" in names else (), sampling, alpha=0.0)
    likeliest = table(32, 1).topk(2).indices.tolist()
    assert len(written) == 100
    assert [
        token for before, token in pairwise([0, *written]) if token not in likeliest[before]
    ] == []


# ---- the draft's death ----

EXACT_AT = {"opt": (("epsilon", 0.0),)}  # a biased rule, where it is not


def text_that_loses_drafts(
    rule: str, seed: int, tokens: int, method: str, window: str
) -> tuple[list[int], int]:
    """Drafts come and go while it is written; and how many went."""
    sampling = drawn_by(1.0, seed=seed)
    decoding = resolved(method, window, 3, rule, EXACT_AT.get(rule, ()), branches=4)
    make = lambda: paired_executors(*(ToyRunner(3, each) for each in PAIR))  # noqa: E731
    submit = Submit(1, (0,), 1 + tokens, replace(decoding, sampling=sampling))
    pair = Pair([submit], make()[0], lambda: make()[1])
    chance, pick, lost = random.Random(seed), at_random(seed), 0
    while not pair.done:
        if pair.drafter is not None:
            if chance.random() < 0.01:
                pair.kill_draft()
                lost += pair.results != {}
        elif (
            not pair.to_target and chance.random() < 0.2
        ):  # the news that the last one is gone has arrived
            pair.join_draft()
        pair.move(pick(pair.moves))
    return pair.results[1].tokens, lost


KEEPING = [
    rule for rule in DRAFTED if rule != "ratio" and (find(rule).is_exact or rule in EXACT_AT)
]


@pytest.mark.parametrize(
    ("rule", "method", "window"),
    [
        *(("ratio", *way) for way in WAYS),
        *((rule, *way) for rule, way in zip(KEEPING, cycle(WAYS), strict=False)),
    ],
)
def test_texts_keep_the_targets_distribution_while_drafts_come_and_go(
    rule: str, method: str, window: str
) -> None:
    texts, lost = zip(
        *(text_that_loses_drafts(rule, seed, 100, method, window) for seed in range(9)), strict=True
    )
    assert sum(lost) > 10
    assert p_value(list(texts)) > NEVER


@pytest.mark.parametrize(("method", "window"), WAYS)
def test_that_would_notice_a_correction_from_the_target(
    method: str, window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted, in place of one from the residual: texts that the draft has too small a part in hide it."""
    monkeypatch.setattr(ratio, "residual", lambda target, draft: target)
    texts = [text_that_loses_drafts("ratio", seed, 100, method, window)[0] for seed in range(16)]
    assert p_value(texts) < NEVER


# ---- what is declared is true ----


@pytest.mark.parametrize("name", NAMES)
def test_halves_and_needs_are_as_declared(name: str) -> None:
    target, logits = (
        make_half("target", WARM.changed(rule=name)),
        8 * torch.log(table(8, 0)[:1]),
    )  # sure enough for any rule
    if find(name).judges_blocks:
        row = make_half("draft", WARM.changed(rule=name)).score(logits[0])
        token = int(row.argmax())
    else:
        ((draw, row),) = make_half("draft", WARM.changed(rule=name)).draft(logits, [1])  # type: ignore[assignment]
        token = read_draw(draw)
    assert (row is None) == (find(name).needs is Needs.NOTHING)
    rows = [] if row is None else [row]
    assert target.judge(Proposed(logits, [token], rows, 1)).accepted == 1, "the models agree"
    executor = TargetExecutor(ToyRunner(8, lambda seen: table(8, 0)[seen[-1]]))
    assert not executor.needs_rows(-1), "nothing is open"
    executor.execute(Open((0,), resolved(rule=name, sampling=WARM)))
    assert executor.needs_rows(-1) == (find(name).needs is not Needs.NOTHING)
    executor.execute(Open((0,), resolved(rule=name)))
    assert executor.needs_rows(-1) == (name == "joint"), "greedy decoding needs none"


@pytest.mark.parametrize("name", NAMES)
def test_proposal_invariance_is_as_declared(name: str) -> None:
    assert (text(name) == text(name, draft=1)) == find(name).is_proposal_invariant
    is_greedy = text(name, sampling=drawn_by()) == text(name, sampling=drawn_by(), draft=1)
    assert is_greedy == (find(name).greedy is None) == find(name).at(0).is_exact
    assert find(name).label(0) == name + (" (not exact)" if find(name).greedy else "")


# ---- configuration and flags ----


def test_configuration_and_flags_are_made_from_the_registry(lenient: RuleSpec) -> None:
    chosen = options_of({"rule": "lenient", "epsilon": 0.25})
    assert chosen.parameters == (("epsilon", 0.25),)
    assert RequestOptions(rule="lenient").parameters == ()
    assert by_flag(chosen, is_given=True) == {"rule": "lenient", "epsilon": 0.25}

    @click.command()
    @field_options({name: of_option(name) for name in ("rule", "epsilon")}, "a file")
    def command(config: object, **given: object) -> None:
        raise AssertionError(given)

    with pytest.raises(AssertionError, match=r"'epsilon': 0\.5"):
        command.main(["--epsilon", "0.5"], standalone_mode=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rule": "lenien"}, ", ".join([*RULES, "lenient"])),
        (
            {"rule": "lenient", "epsilon": 1.5},
            r"epsilon 1\.5 is not allowed; it takes epsilon \(float in \[0, 1\]",
        ),
        (
            {"rule": "ratio", "epsilon": 0.5},
            "rule ratio has no parameter 'epsilon'; ratio takes no parameters",
        ),
        (
            {"rule": "lenient", "delta": 0.5},
            "unknown setting 'delta': did you mean depth[?]",
        ),
    ],
)
def test_what_a_rule_does_not_take_is_refused_in_one_line(
    lenient: RuleSpec, given: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        options_of(given)
    assert "\n" not in str(caught.value)


# ---- the registry itself ----


def test_values_are_checked_and_defaults_filled_in(lenient: RuleSpec) -> None:
    count = Parameter("drafts", 1, 8, 2, "drafts at the root")
    spec = replace(lenient, name="wide", parameters=(*lenient.parameters, count))
    assert spec.values(()) == {"epsilon": 0, "drafts": 2}
    values = spec.values((("drafts", 3.0),))
    assert values == {"epsilon": 0, "drafts": 3}
    assert type(values["drafts"]) is int
    for name, value in product(
        ["epsilon", "drafts"], [float("nan"), float("inf"), -1.0, 8.5, 1e300]
    ):
        with pytest.raises(ValueError, match=rf"is not allowed; it takes {name} \("):
            spec.values(((name, value),))
    with pytest.raises(ValueError, match="it takes drafts"):
        spec.values((("drafts", 2.5),))


def test_declarations_fit_the_wire_and_the_command_line() -> None:
    """A flag is of one kind whatever the rule, and a rule's parameters fit its message."""
    for spec in RULES.values():
        names = [parameter.name for parameter in spec.parameters]
        assert len(set(names)) == len(names) <= MAX_PARAMETERS
        assert spec.judges_blocks == (BLOCK_LENGTH in names)
    for owners in named_parameters(RULES.values()).values():
        assert len({parameter.kind for parameter in owners.values()}) == 1


def test_a_parameter_that_cannot_be_a_flag_is_refused(lenient: RuleSpec) -> None:
    one = lenient.parameters[0]
    for changes in (
        {"name": "Epsilon"},
        {"name": "draft-share"},
        {"default": 2},
        {"default": float("nan")},
    ):
        with pytest.raises(ValueError, match=r"lower-case identifier|not allowed"):
            replace(one, **changes)  # type: ignore[arg-type]
    assert list(RULES) == NAMES
