"""Guesses replayed on texts: what is counted is what decoding does, and what it costs is what was measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pearl.cli import cli
from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.drafting.datastore import Datastore
from pearl.drafting.guesser import text_index
from pearl.drafting.habits import Habits
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.guessing import Generated, replay, store_alone
from pearl.lab.experiments.texts import answers
from pearl.lab.papers import sssd as guesses
from pearl.lab.simulate import Timing, paired_executors, simulate
from pearl.models.checkpoints.loading import load_runner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import Source, Submit
from pearl.protocol.options import RequestOptions, Sampling
from tests.conftest import TOY, Quiet, greedy_text
from tests.test_datastore import VOCAB, make
from tests.tiny import tiny_model


def toy_text(seed: int, length: int = 60) -> Generated:
    executors = paired_executors(*(ToyRunner(VOCAB, alpha_pair(VOCAB, 0.7, order=1)[0]) for _ in range(2)))
    submit = Submit(1, (1, 2, 3), length, RequestOptions("ar", sampling=Sampling(1.0, seed=seed)))
    return Generated((1, 2, 3, *simulate(submit, *executors, Timing(1.0, lambda n: 1.0)).tokens), 3)


# ---- replays ----


@pytest.mark.parametrize("slope", [0.0, 0.3, 5.0])
def test_a_replay_feeds_and_accepts_what_decoding_does(slope: float) -> None:
    """Where every forward takes those guesses that make most tokens a second at these times; none where none pays."""

    def seconds(fed: int) -> float:
        return 1.0 + slope * (fed - 1)

    text = toy_text(4)
    target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.7, order=1))
    submit = Submit(
        1, text.tokens[:3], len(text.tokens), RequestOptions("ngram", look_ahead=8, sampling=Sampling(1.0, seed=4))
    )
    executors = paired_executors(target, draft)
    outcome = simulate(submit, *executors, Timing(1.0, seconds))
    replayed = replay([text], None, 8, seconds=seconds)
    assert tuple(outcome.tokens) == text.tokens[3:]
    assert (replayed.steps, dict(replayed.accepted)) == (outcome.target_steps, outcome.counts.guessed_by_source)
    assert sum((size - 1) * count for size, count in replayed.fed.items()) == outcome.counts.num_guesses
    assert slope < 5 or replayed.fed == {1: replayed.steps}


def test_each_source_alone_and_both(tmp_path: Path) -> None:
    """A text that repeats itself, of which the datastore has seen another part."""
    text = Generated((*(1, 2, 3, 4) * 6, *(5, 0, 2, 5, 4, 0, 1, 1, 3)), 4)
    store = make(tmp_path / "store", [[4, 5, 0, 2, 5, 4, 0, 1, 1, 3]] * 30)
    own, alone, both = replay([text], None, 8), replay([text], store, 8, make=store_alone), replay([text], store, 8)
    assert set(own.accepted) == {Source.NGRAM}
    assert set(alone.accepted) == {Source.DATASTORE}
    assert both.accepted_per_step(Source.NGRAM) > 0 < both.accepted_per_step(Source.DATASTORE)
    assert both.tokens_per_step > max(own.tokens_per_step, alone.tokens_per_step)
    assert own.tokens == alone.tokens == both.tokens == len(text.tokens) - text.start - 1


# ---- habits ----


def test_what_followed_the_longest_known_context_is_named() -> None:
    habits = Habits()
    for before, token in [((1, 2), 3)] * 3 + [((1, 2), 4)] + [((5, 2), 0)] * 9:
        habits.learn(before, token)
    assert [c.token for c in habits.candidates([7, 1, 2])] == [3, 4], "1 2 is known, 7 1 2 is not"
    assert [c.token for c in habits.candidates([9, 9, 2])] == [0, 3, 4], "of 2 all that followed it"
    assert habits.candidates([2, 9]) == habits.candidates([]) == []
    three = habits.candidates([7, 1, 2])[0]
    assert (three.context, three.matched) == ((1, 2, 3), 2)
    assert sum(c.chance for c in habits.candidates([2])) <= 1


def test_habits_are_bounded_and_forget_what_was_not_seen_for_long() -> None:
    habits = Habits(contexts=30)
    for token in range(500):
        habits.learn((token % 40, 1), token)
        habits.learn((7,), 8)
    assert len(habits) == 30
    assert habits.candidates((7,))[0].token == 8
    assert habits.candidates((25, 1))[0].matched == 1, "25 1 is forgotten, and 1 has been seen all the time"
    assert habits.candidates((3, 1))[0].matched == 2
    assert max(map(len, habits._followers.values())) <= 16


def test_the_next_text_is_guessed_from_the_last(tmp_path: Path) -> None:
    """Where it has nothing to repeat itself; also beside a datastore, and as paths of several tokens."""
    text = Generated((7, *range(10, 40)), 1)
    for store in (None, make(tmp_path / "store", [[1, 2]], 70)):
        habits = Habits()
        first, second = (replay([text], store, 8, make=partial(text_index, habits=habits)) for _ in range(2))
        assert first.tokens_per_step == 1
        assert second.tokens_per_step > 4
        assert replay([text] * 2, store, 8).tokens_per_step == 1, "without habits nothing outlives a text"


def test_an_engine_keeps_habits() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    with Engine(TOY, "none", habits=True, target_pace=0.004) as engine:  # forwards of any size last as long: all pay
        alone, *ahead = (
            engine.generate([[1, 2, 3]], params, decoding=DecodingConfig(method=method, rule="coupled"))[0]
            for method in ("ar", "ngram", "ngram")
        )
    assert [one.tokens for one in ahead] == [alone.tokens] * 2
    first, second = (sum(one.statistics.guessed_by_source.values()) for one in ahead)
    assert second > first + 10


def test_where_texts_come_again_habits_are_refused() -> None:
    for command in (["bench"], ["compare"], ["calibrate"]):
        result = CliRunner().invoke(cli, [*command, "--habits", "--target", TOY, "--draft", TOY])
        assert isinstance(result.exception, ConfigError), command
        assert str(result.exception).startswith("--habits: ")


# ---- answers ----


def test_answers_are_those_of_one_at_a_time() -> None:
    """More prompts than slots, of different lengths, each with a seed of its own; some end early."""
    runner = load_runner(str(tiny_model("llama")), device=torch.device("cpu"), dtype="float32", slots=3)
    prompts = [[5, 9, 40], [7], [12, 33, 8, 2], [5, 9, 40], [1, 2]]
    samplings = [Sampling(1.0, top_k=20, seed=seed) for seed in range(5)]
    eos = answers(runner, prompts[1:2], samplings[1:2], (), 12)[0][3:4]
    drawn: list[int] = []
    together = answers(runner, prompts, samplings, eos, 12, drawn.append)
    apart = [answers(runner, [p], [s], eos, 12)[0] for p, s in zip(prompts, samplings, strict=True)]
    assert together == apart
    assert together[0] != together[3], "the same prompt, another seed"
    assert len(together[1]) <= 4
    assert sum(drawn) == sum(map(len, together))


# ---- the tables ----


def test_the_study_of_a_toy(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    make(directory, [[1, 2, 3, *greedy_text([1, 2, 3], 60)]] * 3, 32)
    config = EngineConfig(target=TOY, draft="none", datastore=str(directory))
    asked = [Task("x", 1, ("123",)), Task("x", 2, ("321",))]
    tables, _ = guesses.measure_guesses(config, asked, 20, Quiet(), most_batch=2, most_context=300)
    for table in tables:
        assert {len(row) for row in table.rows} <= {len(table.columns)}
    assert all(float(row[3]) >= 1 and float(row[-1]) > 0 for row in tables[0].rows)
    assert [float(row[0]) for row in tables[1].rows] == list(guesses.TEMPERATURES)
    assert f"datastore {directory} of {len(Datastore(directory))} tokens" in tables[1].notes[0]
    beside = {row[0]: [float(tokens) for tokens in row[1:]] for row in tables[2].rows}
    assert list(beside) == ["pld", "llma", "rest", "sssd", "ngram"]
    assert all(tokens[0] == 1 and tokens[-1] >= 1 for tokens in beside.values())
    assert [row[0] for row in tables[-1].rows] == ["1", "2"], "batches"
