"""The papers' tables and figures, and their formulas against enumeration and simulation."""

import itertools
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import convert

from pearl.cli.console import print_table
from pearl.config import EngineConfig
from pearl.lab.bench.tasks import Task
from pearl.lab.studies import chains as theory
from pearl.lab.studies import emulate, energy, lengths
from pearl.lab.studies.chains import Chains
from pearl.lab.studies.estimate import Estimate, bootstrap
from pearl.lab.studies.pearl import OTHERS, TABLES, Pair, cells_of, pairs
from pearl.lab.studies.simulate import Timing
from pearl.lab.studies.sssd import roofline_speedups
from pearl.lab.studies.tables import COLUMNS, STUDIES, in_words, run_study, sweeps
from pearl.lab.studies.theory import (
    acceptance_of,
    free_in_theory,
    roofline_seconds,
    sd_improvement,
    sd_tokens_per_step,
)
from pearl.lab.studies.workload import decode, independent
from pearl.metrics import Sums
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.window import expected_rate
from tests.conftest import TOY, Quiet, ran
from tests.options import resolved

# ---- PEARL's own ----


def test_the_pairs_are_the_papers() -> None:
    """Seven of them, whose rates are those of Table 4 where it has them.

    Tables 1 and 2 follow from Tables 4 and 7: no cell of PEARL is off by more than 6% in closed form.
    """
    found = pairs()
    assert [pair.published.speedup["pearl"] for pair in found] == [
        2.35,
        3.79,
        3.01,
        2.75,
        3.48,
        2.87,
        2.48,
    ]
    assert [pair.vocabulary for pair in found] == [32000, 32000, 32000, 32256, 32256, 32000, 32000]
    for pair in found:
        (a, origin), c = pair.acceptance(), pair.t_target / pair.t_draft
        assert (Path(__file__).parent.parent / "configs" / f"{pair.config}.yaml").exists()
        if pair.published.mean_accepted:
            assert origin == "from Table 4"
            assert 1 / (1 - a) == pytest.approx(pair.published.mean_accepted["pearl"])
        else:
            assert sd_improvement(a, pair.gamma, 1 / c) == pytest.approx(
                pair.published.speedup["sd"]
            )
        predicted = pearl_improvement(a, pair.window, c)
        assert predicted == pytest.approx(pair.published.speedup["pearl"], rel=0.06)


def test_each_table_has_the_cells_of_the_paper() -> None:
    cells = {name: [cell for pair in pairs() for cell in cells_of(pair, name)] for name in TABLES}
    known = {name: sum(cell.paper is not None for cell in some) for name, some in cells.items()}
    # Table 1 has no row for its first, 1.00; PEARL's figure stands beside fixed and beside stream. Table 4's stands
    # beside either way to count.
    assert known == {"1": 25, "2": 11, "3": 12, "4": 16, "5": 15, "6": 15, "7": 7, "figure 2a": 2}
    assert not any(cell.run for some in cells.values() for cell in some if cell.label in OTHERS)


@pytest.mark.slow
def test_simulator_and_runtime_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every cell; the runtime has each."""
    out = tmp_path / "it.json"
    small = {
        "name": "Small",
        "tables": ["1", "3", "4", "5", "figure 2a"],
        "config": "toy",
        "vocabulary": 500,
        "draft_speed": 1000,
        "target_speed": 250,
        "window": 4,
        "gamma": 4,
        "published": {
            "speedup": {"pearl": 2.5, "sd": 1.9, "lookahead": 1.1},
            "mean_accepted": {"pearl": 5},
            "windows": {3: 500},
            "idle": {"draft": 0.004, "target": 0.004},
        },
    }
    monkeypatch.setattr("pearl.cli.paper.pairs", lambda: [convert(small, Pair)])
    monkeypatch.setattr(emulate, "SIMULATED_TEXTS", 4)
    arguments = ("--quick", "--json", out)
    ran("paper", "pearl", *arguments)
    made = json.loads(out.read_text())
    assert made["emulated"] is True
    assert list(made["tables"]) == ["1", "3", "4", "5", "7", "figure 2a"]
    for cell in (
        cell for rows in made["tables"].values() for cell in rows if cell["label"] != "lookahead"
    ):
        assert cell["runtime"] > 0
        if cell["unit"] in ("draft idle", "target idle"):
            assert cell["simulator"] == pytest.approx(cell["paper"], rel=0.02), cell
        if cell["unit"] == "speed-up" and cell["run"]["window"]:
            wanted = FORMS[cell["run"]["method"]](0.8, cell["run"]["window"], 4)
            assert cell["simulator"] == pytest.approx(wanted, rel=0.02), cell
    assert [cell["runtime"] for cell in made["tables"]["1"]][-1] is None


def test_simulating_alone_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "measure", None)
    monkeypatch.setattr(emulate, "SIMULATED_TEXTS", 1)
    done = ran(
        "paper", "pearl", "--simulate-only", "--pair", "7B & 34B", "--table", "1", "--json", "-"
    )
    made = json.loads(done.stdout)
    assert [cell["runtime"] for cell in made["tables"]["1"]] == [None] * 5
    assert [cell["simulator"] is None for cell in made["tables"]["1"]] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_tables_fit_the_terminal_and_cut_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """They were squeezed into columns of a few letters, with an ellipsis for the rest."""
    monkeypatch.setenv("COLUMNS", str(width))
    row = [
        "sd, joint, 2 beams",
        "",
        "0.391 (0.386-0.4)",
        "22: 22.0, sd 0.1, of 85",
        *(f"{i}, sd 1" for i in range(5)),
    ]
    print_table(
        ["row", "theirs", *COLUMNS],
        [row] * 3,
        "A note of several words. " * 9,
        words=2,
        title="A title of words. " * 9,
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(sum(cell in line for line in lines) >= 3 for cell in row)
    assert not any("theirs" in line for line in lines), "no cell"


# ---- studies of other papers ----

DRAWN = {  # the files of each study's figures
    "theory": {"theory-rejections", "theory-candidates", "theory-improvement", "theory-pareto"},
    "disco": {"disco-improvement", "disco-steps", "disco-progress", "disco-histogram"},
    "mjsd": {"mjsd-tau", "mjsd-beams", "mjsd-block-length", "mjsd-tokens-decoded-jointly"},
}


@pytest.mark.slow
def test_studies_of_rejections_and_of_perplexity() -> None:
    """On a pair of toys; the first has a coin, so that no token is impossible."""
    config, tasks = (
        EngineConfig(target=TOY + ",coin=1", draft=TOY + ",coin=1"),
        [Task("x", 1, ("hello",))],
    )
    found = run_study(STUDIES["theory"], tasks, 60, Quiet(), config)
    assert [one.name for one in found] == [row.name for row in STUDIES["theory"].rows]
    ar, ratio, *relaxed = found
    assert ar.speedup == Estimate(1.0, 1.0, 1.0)
    assert ar.rejections is None
    assert ratio.rejections is not None
    assert ratio.rejections.bias == 0
    assert ratio.tokens_per_step is not None
    assert ratio.tokens_per_step >= 1  # how early drafts arrive is a matter of time
    for one in relaxed:
        assert one.rejections is not None
        assert one.rejections.bias is not None
        assert (one.rejections.bias > 0) == (not one.name.startswith("batch"))
    mjsd = STUDIES["mjsd"]
    found = run_study(mjsd, tasks, 24, Quiet(), EngineConfig(target=TOY, draft=TOY))
    assert len(found) == len(mjsd.rows) + len(mjsd.joint)
    read = [one.perplexity.value for one in found if one.perplexity]
    assert len(read) == len(found)
    assert min(read) >= 1
    assert max(read[-len(mjsd.joint) :]) < read[0], "sampling is no search"
    assert {len(words) for words in in_words(mjsd, found).rows} == {2 + len(COLUMNS)}
    assert {plot.name for plot in sweeps(mjsd, found)} == DRAWN["mjsd"]


def test_the_figures_of_chains() -> None:
    assert {plot.name for plot in theory.measure(2, Quiet()).plots} == DRAWN["theory"]


# ---- theory ----


def rejections(chains: Chains, candidates: int) -> float:
    """By enumeration of all texts: the text's law, and the sum over what batch does at each position."""

    def step(
        position: int, last: int, is_root: bool
    ) -> tuple[dict[tuple[int, bool], float], float]:
        """(law of (next token, whether it stands in place of rejected ones), P(rejection))."""
        target, draft = chains.target[position, last], chains.draft[position, last]
        law: dict[tuple[int, bool], float] = {}
        left, reached = target, 1.0
        for _ in range(candidates if is_root else 1):
            for token, accepted in enumerate((reached * torch.minimum(left, draft)).tolist()):
                law[token, False] = law.get((token, False), 0.0) + accepted
            residual = (left - draft).clamp_min(0)
            reached *= float(residual.sum())
            left = residual / residual.sum()
        for token, share in enumerate((reached * left).tolist()):
            law[token, True] = share
        return law, reached

    states = {(0, True): 1.0}
    total = 0.0
    for position in range(chains.horizon):
        following: dict[tuple[int, bool], float] = {}
        for (last, is_root), mass in states.items():
            law, rejected = step(position, last, is_root)
            total += mass * rejected
            for state, share in law.items():
                following[state] = following.get(state, 0.0) + mass * share
        states = following
    return total


@pytest.mark.parametrize("candidates", [1, 2, 3, 8])
def test_theorems_1_and_3_are_the_algorithms_rejections(candidates: int) -> None:
    chains = Chains.of_seed(3, states=4, horizon=6)
    assert theory.expected_rejections(chains, candidates) == pytest.approx(
        rejections(chains, candidates)
    )


def test_the_runtime_has_the_theorems_rejections() -> None:
    """Within four standard errors, by the state machines of method pearl."""
    chains = Chains.of_seed(1, states=4, horizon=12)
    for candidates in (1, 4):
        found = torch.tensor(theory.simulated(chains, 120, candidates), dtype=torch.float64)
        error = float(found.std()) / len(found) ** 0.5
        assert abs(float(found.mean()) - theory.expected_rejections(chains, candidates)) < 4 * error


def test_no_unbiased_rule_has_fewer_rejections_than_theorem_2_says() -> None:
    """Unbiased are those that accept no more of a token than the target has of it, by any share."""
    chains, noise = Chains.of_seed(2, states=4, horizon=5), torch.Generator().manual_seed(0)
    bound = theory.expected_rejections(chains)
    for share in (0.0, 0.5, 0.999, 1.0):
        law, total = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), 0.0
        for target, draft in zip(chains.target, chains.draft, strict=True):
            low = share + (1 - share) * torch.rand(4, 4, generator=noise, dtype=torch.float64)
            accepted = torch.minimum(target, draft) * low  # b * draft
            total += float(law @ (1 - accepted.sum(-1)))
            written = accepted + (target - accepted)
            law = law @ written
        assert total >= bound - 1e-9
        assert share < 1 or total == pytest.approx(bound)


@pytest.mark.parametrize("epsilon", theory.EPSILONS)
def test_opt_is_on_the_front_and_uno_above_it(epsilon: float) -> None:
    chains = Chains.of_seed(4)
    varied = theory.pareto(chains, 0.0, True)[0]
    rejected, bias = theory.pareto(chains, epsilon, True)
    assert rejected + bias == pytest.approx(varied), "one for one"
    assert theory.pareto(chains, epsilon, False)[1] >= bias
    assert theory.pareto(chains, 0.0, True)[1] == pytest.approx(0)


def test_improvements_of_one_token_are_those_of_enumeration() -> None:
    """Of a chain of one position: rejections with one candidate less those with several."""
    for (u, v), count in product(((0.9, 0.5), (0.6, 0.1)), (2, 5)):
        rows = (torch.tensor([[[1 - p, p]] * 2], dtype=torch.float64) for p in (v, u))
        chains = Chains(*rows)
        fewer = theory.expected_rejections(chains) - theory.expected_rejections(chains, count)
        assert fewer == pytest.approx(theory.batch_improvement(u, v, count))
    uniform = Chains(
        torch.tensor([[[0.5, 0.5, 0, 0]] * 4]).double(), torch.full((1, 4, 4), 0.25).double()
    )
    fewer = theory.expected_rejections(uniform) - theory.expected_rejections(uniform, 3)
    assert fewer == pytest.approx(theory.uniform_improvement(0.5, 3))


# ---- lengths ----


def test_oracle_lengths_and_forwards() -> None:
    right = [True, True, False, False, True, True, True, False, True]
    assert lengths.oracle_lengths(right) == [2, 0, 3, 1]
    assert lengths.forwards(right, 2) == (5, 7), "a window ends where the text does"
    assert lengths.forwards(right, 64) == (4, 8 + 5 + 4 + 0)
    assert lengths.f1([(True, True)] * 3 + [(True, False), (False, True)]) == pytest.approx(0.75)
    assert lengths.f1([(False, True)]) == 0


# ---- batches and energy ----


def test_the_roofline_has_the_papers_free_tokens() -> None:
    assert [round(free_in_theory(batch), 1) for batch in (8, 16, 32, 64)] == [52.8, 26.4, 13.2, 6.6]
    assert roofline_seconds(1, 16, 500) == pytest.approx(roofline_seconds(1, 1, 500)), (
        "free at batch 1"
    )
    table, figure = roofline_speedups({1: 1.0, 8: 2.0, 32: 2.4})
    for points in figure.lines.values():
        assert points[0][1] == pytest.approx(2.4, abs=0.01)
        assert all(speedup >= 1 for _, speedup in points)
    short, long = figure.lines["500 tokens"], figure.lines["32,000 tokens"]
    assert short[-1][1] < long[-1][1], "a long context leaves room for guesses in a large batch"
    assert len(table.rows) == 4


class Nvml:
    """Stands in for nvidia-ml-py, where there is no GPU: two joules between any two reads, in millijoules."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.reads = itertools.count(0, 2000)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if handle != "GPU-the-first":
            raise self.NVMLError
        return next(self.reads)


@pytest.mark.parametrize(("uuid", "has_energy"), [("the-first", True), ("an-older-one", False)])
def test_energy_by_batch(uuid: str, has_energy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "SECONDS", 0.05)
    target = ToyRunner(8, alpha_pair(8, 0.5)[0])
    assert energy.by_batch(target, Quiet()).notes, "a CPU has no such counter"
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid)
    )
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    monkeypatch.setattr(target, "synchronize", lambda: None)
    table = energy.by_batch(target, Quiet())
    assert bool(table.notes) != has_energy
    assert [row[0] for row in table.rows] == ["1", "2", "4", "8"]
    for batch, *times, joules, _, theirs in table.rows:
        assert float(theirs) == energy.PAPER[int(batch)]
        assert float(times[0]) >= 0
        assert bool(joules) == has_energy


# ---- commands ----


@pytest.mark.parametrize(
    "name", ["disco", *(pytest.param(name, marks=pytest.mark.long) for name in ("theory", "mjsd"))]
)
def test_a_paper_is_tables_and_figures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(energy, "SECONDS", 0.05)
    (tmp_path / "some.jsonl").write_text('{"prompt": "an"}\n{"prompt": "the"}\n')
    where = (
        "--target",
        f"{TOY},coin=1",
        "--draft",
        f"{TOY},coin=1",
        "--prompts",
        tmp_path / "some.jsonl",
    )
    ran("paper", name, *where, "--quick", "--figures", tmp_path / "drawn")
    drawn = {path.stem for path in (tmp_path / "drawn").iterdir()}
    assert drawn == DRAWN[name]
    assert all(
        path.read_text().lstrip().startswith("<?xml") for path in (tmp_path / "drawn").iterdir()
    )


# ---- closed forms, against the simulator ----

STEADY = Timing(1.0, lambda _: 5.0)
STREAM, FIXED = resolved("pearl", "stream"), resolved("pearl", "fixed")


def pearl_tokens_per_step(a: float, c: int) -> float:
    """Committed tokens per target step with the fixed window c; at t_target = c t_draft also the speed-up over `ar`.

    A pre-verify step yields 1 token, a post-verify step (1 - a^c) / (1 - a). Pre leads to post with probability a,
    post to post with a^c; the rest leads to pre. Source: the Markov chain of these two phases.
    """
    post = a / (1 + a - a**c)  # stationary share of post-verify steps
    return 1 - post + post * sd_tokens_per_step(a, c - 1)


def pearl_improvement(a: float, window: int, ratio: float) -> float:
    """Speed-up over the target alone with any fixed window.

    A step lasts as long as a target forward; after a full acceptance, until the next window is drafted if that is
    later.

    Args:
        ratio: t_target / t_draft, at least 1.

    Source: the chain of `pearl_tokens_per_step`.
    """
    post = a / (1 + a - a**window)
    late = max(window / ratio - 1, 0.0)  # by how much drafting a window outlasts a target forward
    return pearl_tokens_per_step(a, window) / (1 + late * ((1 - post) * a + post * a**window))


def no_pre_verify_improvement(a: float, window: int, ratio: float) -> float:
    """`pearl_improvement` without pre-verify. Source: renewals at corrections.

    After a correction the target waits for a whole window and verifies it with the token behind it; then each step
    verifies one window, until a token is rejected.
    """
    late = max(window / ratio - 1, 0.0)
    if a == 1:
        return window / (1 + late)
    again = a ** (window + 1) / (1 - a**window)  # steps of a renewal after its first
    tokens = sd_tokens_per_step(a, window) + again * sd_tokens_per_step(a, window - 1)
    seconds = window / ratio + 1 + late * a ** (window + 1) + again * (1 + late * a**window)
    return tokens / seconds


def no_post_verify_improvement(a: float, window: int, ratio: float) -> float:
    """`pearl_improvement` without post-verify. Source: renewals, each with a pre-verify.

    If that accepts, the target waits until the window is full, verifies the rest and draws a bonus token.
    """
    tokens = 1 + a * sd_tokens_per_step(a, window - 1)
    return tokens / (1 - a + a * (max(window / ratio, 1.0) + 1))


FORMS: dict[str, Callable[[float, int, float], float]] = {  # of acceptance, window and speed ratio
    "sd": lambda a, window, ratio: sd_improvement(a, window, 1 / ratio),
    "pearl": pearl_improvement,
    "pearl-no-pre-verify": no_pre_verify_improvement,
    "pearl-no-post-verify": no_post_verify_improvement,
}


@pytest.mark.parametrize(
    ("method", "window", "a"), [*product(FORMS, [5], [0.8]), ("sd", 3, 0.4), ("pearl", 3, 0.4)]
)
def test_any_window_is_as_fast_as_its_closed_form(method: str, window: int, a: float) -> None:
    """Within a hundredth. And so are tokens a step, of sd as Leviathan et al. have it, and runs, by theorem 2."""
    found = decode(independent(a, 20, 1000, 1), STEADY, resolved(method, "fixed", window))
    tokens_per_step = found.total("late_tokens") / found.total("steps")
    assert found.rate * 5 == pytest.approx(FORMS[method](a, window, 5), rel=0.01)
    if method == "sd":
        assert tokens_per_step == pytest.approx(sd_tokens_per_step(a, window), rel=0.01)
    if (method, window) == ("pearl", 5):
        assert tokens_per_step == pytest.approx(pearl_tokens_per_step(a, 5), rel=0.01)
        assert tokens_per_step == pytest.approx(2.28, rel=0.01) or a != 0.8, "as the paper states"
        assert found.accepted_per_run == pytest.approx(a / (1 - a), rel=0.01)
        assert expected_rate(5, a, 1.0, 5.0, 5.0) == pytest.approx(pearl_tokens_per_step(a, 5) / 5)
    assert pearl_tokens_per_step(1.0, window) == sd_tokens_per_step(1.0, window - 1) == window


@pytest.mark.parametrize("tokens", [60, 1000])
def test_long_runs_count_however_short_the_texts_are(tokens: int) -> None:
    """A run that a text's end cuts off was left out: of runs of 40 tokens, texts of 60 had 20."""
    found = decode(independent(0.975, 20_000 // tokens, tokens, 1), STEADY, FIXED)
    assert found.mean_run_length == pytest.approx(40, rel=0.1)
    assert found.mean_run_length == pytest.approx(1 / (1 - found.acceptance_rate))
    text = found.texts[0]
    assert Sums(texts=[text]).mean_run_length == text.mean_run_length, (
        "as in the text's own figures"
    )


def test_the_papers_other_forms() -> None:
    """Run lengths are those of a geometric distribution."""
    assert acceptance_of(1 + sum(n * 0.8**n * 0.2 for n in range(500))) == pytest.approx(0.8)


# ---- workloads ----


def test_every_method_meets_the_same_luck() -> None:
    """Where every position is judged, as many draft tokens are right by any window and delay."""
    texts = independent(0.7, 4, 100)
    expected = sum(sum(text.right) for text in texts)
    for decoding in (STREAM, FIXED, resolved("pearl", "fixed", 2), resolved("pearl-no-pre-verify")):
        for timing in ({}, {"delay": 2.0}, {"jitter": 0.4}):
            done = decode(texts, replace(STEADY, **timing), decoding)
            sums = [done.total(f"num_{kind}_draft_tokens") for kind in ("judged", "accepted")]
            assert sums == [400, expected]


def test_an_interval_holds_its_statistic_and_covers_the_truth() -> None:
    """95% intervals of 200 samples, deterministic."""
    found = bootstrap([1.0, 2.0, 4.0, 8.0, 16.0])
    assert (found.value, found) == (4.0, bootstrap([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert 1 <= found.low < 4 < found.high <= 16
    assert bootstrap([3.0]) == Estimate(3.0, 3.0, 3.0)
    noise = random.Random(1)
    samples = [[noise.gauss(10, 1) for _ in range(25)] for _ in range(200)]
    intervals = [bootstrap(sample, resamples=400) for sample in samples]
    assert sum(one.low <= 10 <= one.high for one in intervals) in range(180, 201)
