"""The papers' formulas against enumeration and simulation, and their figures as files."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from pearl.lab.papers import chains as theory
from pearl.lab.papers import energy, lengths
from pearl.lab.papers.batches import PAPER, roofline_speedups
from pearl.lab.papers.chains import Chains
from pearl.models.toy import ToyRunner, alpha_pair
from tests.conftest import TOY, Quiet
from tests.test_bench import pearl

# ---- theory ----


def rejections(chains: Chains, candidates: int) -> float:
    """By enumeration of all texts: the text's law, and the sum over what batch does at each position."""

    def step(position: int, last: int, is_root: bool) -> tuple[dict[tuple[int, bool], float], float]:
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
    assert theory.expected_rejections(chains, candidates) == pytest.approx(rejections(chains, candidates))


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
    uniform = Chains(torch.tensor([[[0.5, 0.5, 0, 0]] * 4]).double(), torch.full((1, 4, 4), 0.25).double())
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
    assert [round(PAPER.free(batch), 1) for batch in (8, 16, 32, 64)] == [52.8, 26.4, 13.2, 6.6]
    assert PAPER.seconds(1, 16, 500) == pytest.approx(PAPER.seconds(1, 1, 500)), "free at batch 1"
    table, figure = roofline_speedups({1: 1.0, 8: 2.0, 32: 2.4})
    for points in figure.lines.values():
        assert points[0][1] == pytest.approx(2.4, abs=0.01)
        assert all(speedup >= 1 for _, speedup in points)
    short, long = figure.lines["500 tokens"], figure.lines["32,000 tokens"]
    assert short[-1][1] < long[-1][1], "a long context leaves room for guesses in a large batch"
    assert len(table.rows) == 4


def test_energy_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a processor's counter, where there is one."""
    monkeypatch.setattr(energy, "_SECONDS", 0.05)
    target = ToyRunner(8, alpha_pair(8, 0.5)[0])
    assert energy.by_batch(target, Quiet(), str(tmp_path / "none:?")).notes
    (tmp_path / "rapl:0").mkdir()
    counter = tmp_path / "rapl:0" / "energy_uj"
    reads = iter(range(0, 10**9, 2_000_000))  # two joules between any two reads
    monkeypatch.setattr(Path, "read_text", lambda path, *_: str(next(reads)) if path == counter else "")
    table = energy.by_batch(target, Quiet(), str(tmp_path / "rapl:?"))
    assert [row[0] for row in table.rows] == ["1", "2", "4", "8"]
    for batch, *times, run, _, theirs in table.rows:
        assert float(theirs) == energy.PAPER[int(batch)]
        assert float(times[0]) >= 0
        assert float(run) >= 0


# ---- commands ----


@pytest.mark.parametrize("name", ["theory", "disco", "mjsd"])
def test_a_paper_is_tables_and_figures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(energy, "_SECONDS", 0.05)
    (tmp_path / "some.jsonl").write_text('{"prompt": "an"}\n{"prompt": "the"}\n')
    where = ("--target", f"{TOY},coin=1", "--draft", f"{TOY},coin=1", "--prompts", tmp_path / "some.jsonl")
    done = pearl("paper", name, *where, "--quick", "--figures", tmp_path / "drawn")
    assert done.exit_code == 0, done.output
    drawn = {path.stem for path in (tmp_path / "drawn").iterdir()}
    wanted = {
        "theory": {"theory-rejections", "theory-candidates", "theory-improvement", "theory-pareto"},
        "disco": {"disco-improvement", "disco-steps", "disco-progress", "disco-histogram"},
        "mjsd": {"mjsd-tau", "mjsd-beams", "mjsd-block-length", "mjsd-tokens-decoded-jointly"},
    }
    assert drawn == wanted[name]
    assert all(path.read_text().lstrip().startswith("<?xml") for path in (tmp_path / "drawn").iterdir())


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    for arguments, words in (
        (("pearl", "--pair", "GPT"), "no pair is called 'GPT'"),
        (("sssd", "--prompts", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("Pearl",), "No such command"),
    ):
        done = pearl("paper", *arguments)
        assert done.exit_code
        assert words in done.output + str(done.exception)
