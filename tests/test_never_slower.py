"""Never slower than the target alone: whole texts in virtual time, at forward times of CPUs where each row costs.

`answers.json` has greedy answers of real models to prompts of six sets: {model: {set: [[prompt, answer]]}}.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import harmonic_mean, median

import pytest
import torch

from pearl.lab.studies.simulate import Timing, interpolated, paired_executors, simulate
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import Submit
from pearl.protocol.speeds import Cores, Speeds
from pearl.spec.methods import METHODS
from tests.auto import VOCAB, asked
from tests.options import resolved
from tests.test_auto import many_cores

ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text())
SETS = [(model, name) for model, sets in ANSWERS.items() for name in sets]
# Forward times over that of one token, by tokens fed, on a core with AVX2, and with AVX-512 and VNNI.
CORES = {
    "AVX2": {1: 1.0, 2: 1.45, 4: 2.35, 8: 4.2, 16: 7.1},
    "VNNI": {1: 1.0, 2: 1.38, 4: 2.1, 8: 3.6, 16: 6.8},
}


def gain(prompt: Sequence[int], answer: Sequence[int], times: dict[int, float]) -> float:
    """Return the speed of `ngram`, which knows the times of calibration at first, over the target alone's."""
    text = [*prompt, *answer]
    ids = {token: number for number, token in enumerate(dict.fromkeys(text))}
    tokens = tuple(ids[token] for token in text)
    wrong = torch.zeros(len(ids)).index_fill(0, torch.tensor([0]), 1.0)

    def distribution(seen: Sequence[int]) -> torch.Tensor:
        if tuple(seen) != tokens[: len(seen)] or len(seen) == len(tokens):
            return wrong
        return torch.nn.functional.one_hot(torch.tensor(tokens[len(seen)]), len(ids)).float()

    t_target = interpolated(times)
    speeds = Speeds()
    for fed in (1, 2, 4, 8):
        speeds.observe_target(fed, t_target(fed))
    speeds.target.settle()
    runner = ToyRunner(len(ids), distribution)
    executors = paired_executors(runner, ToyRunner(len(ids), distribution))
    options = resolved("ngram", look_ahead=METHODS["ngram"].look_ahead)
    submit = Submit(1, tokens[: len(prompt)], len(tokens), options)
    outcome = simulate(submit, *executors, Timing(1.0, t_target), speeds=speeds)
    assert tuple(outcome.tokens) == tokens[len(prompt) :]
    seconds = outcome.seconds - t_target(len(prompt))
    return (len(answer) - 1) * times[1] / seconds


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize(("model", "name"), SETS)
def test_guesses_that_do_not_pay_are_not_fed(model: str, name: str, cores: str) -> None:
    """From the first token on. Sizes that had not been measured passed for cheap, and nothing had to be gained."""
    gains = [gain(prompt, answer, CORES[cores]) for prompt, answer in ANSWERS[model][name]]
    assert min(gains) >= 0.96
    assert harmonic_mean(gains) >= 0.98


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_auto_from_a_cold_start_writes_short_texts_as_fast_as_the_target_on_all_cores(
    alpha: float,
) -> None:
    """Each of twenty; the first of them tried a way with the draft for 24 of their 64 tokens."""
    spread: list[Cores] = []
    own = interpolated(CORES["AVX2"])
    all_cores = 0.55

    def t_target(fed: int) -> float:
        return own(fed) * (all_cores if spread[-1:] == [Cores.ALL] else 1.0)

    timing = Timing(0.33, t_target)
    speeds = Speeds(auto=many_cores())
    speeds.observe_draft(timing.t_draft)
    for fed in (1, 2, 4, 8):
        speeds.observe_target(fed, own(fed))
    speeds.target.settle()
    gains: list[float] = []
    for seed in range(20):
        target, draft = paired_executors(
            *(ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, alpha, order=3))
        )
        target.spread = spread.append
        submit = asked("auto", 64, temperature=1.0, seed=seed)
        outcome = simulate(submit, target, draft, timing, speeds=speeds)
        prompt_seconds = all_cores * own(len(submit.prompt))
        gains.append(64 * all_cores / (outcome.seconds - prompt_seconds + all_cores))
    assert min(gains) >= 0.95
    assert median(gains) >= 0.98
