"""Guesses replayed on texts: what is counted is what decoding does, and what it costs is what was measured.

And guesses as published: what is copied, counted by enumeration, taken from discarded tokens, or from lookahead.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pearl.config import EngineConfig, RequestOptions, SamplingParams
from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import index_factory, text_index
from pearl.drafting.ngram import LONGEST, NgramIndex
from pearl.drafting.output_ngrams import Habits
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.execution.target import TargetExecutor
from pearl.lab.bench.tasks import Task
from pearl.lab.guesses.phrases import COLUMNS, KEPT, LEVELS, JacobiIndex
from pearl.lab.guesses.published import Counted
from pearl.lab.studies import sssd as guesses
from pearl.lab.studies.guessing import Generated, replay, store_alone
from pearl.lab.studies.recorded_texts import answers
from pearl.lab.studies.simulate import Timing, paired_executors, simulate
from pearl.models.runner import ModelRunner, feed_chain
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.events import Forward, Forwarded, Judge, Keep, Open, Phase
from pearl.protocol.messages import Source, Submit
from pearl.protocol.window import Payoff
from pearl.spec.methods import METHODS
from tests.conftest import TOY, Quiet, greedy_text
from tests.datastores import VOCAB, make
from tests.opened import OpenExecutor
from tests.options import drawn_by, resolved
from tests.replace import replace
from tests.tiny import VOCAB_SIZE, on_cpu, tiny_model
from tests.trees import TreeExecutor, guess_after
from tests.virtual import decoded


def toy_text(seed: int) -> Generated:
    asked, prompt = resolved("ar"), (1, 2, 3)
    found = decoded(
        alpha_pair(VOCAB, 0.7, order=1), VOCAB, asked, drawn_by(1.0, seed=seed), 57, prompt=prompt
    )
    return Generated((*prompt, *found.tokens), 3)


# ---- replays ----


@pytest.mark.parametrize("slope", [0.0, 0.3, 5.0])
def test_a_replay_feeds_and_accepts_what_decoding_does(
    slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every forward takes those guesses that make most tokens a second at these times; none where none pays."""

    def seconds(fed: int) -> float:
        return 1.0 + slope * (fed - 1)

    text = toy_text(4)
    target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.7, order=1))
    submit = Submit(
        1,
        text.tokens[:3],
        len(text.tokens),
        resolved("ngram", look_ahead=8, sampling=drawn_by(1.0, seed=4)),
    )
    drawn, sample = list[object](), TargetExecutor.sample
    monkeypatch.setattr(
        TargetExecutor, "sample", lambda *given: drawn.append(given) or sample(*given)
    )
    outcome = simulate(submit, *paired_executors(target, draft), Timing(1.0, seconds))
    replayed = replay([text], None, 8, seconds=seconds)
    assert tuple(outcome.tokens) == text.tokens[3:]
    assert (replayed.steps, dict(replayed.accepted)) == (
        outcome.counts.steps,
        outcome.counts.guessed_by_source,
    )
    assert (
        sum((size - 1) * count for size, count in replayed.fed.items())
        == outcome.counts.num_guesses
    )
    assert slope < 5 or replayed.fed == {1: replayed.steps}
    assert len(drawn) == outcome.counts.steps + 1, (
        "the prompt's, and of a forward one along its guesses"
    )


def test_each_source_alone_and_both(tmp_path: Path) -> None:
    """A text that repeats itself, of which the datastore has seen another part."""
    text = Generated((*(1, 2, 3, 4) * 6, *(5, 0, 2, 5, 4, 0, 1, 1, 3)), 4)
    store = make(tmp_path / "store", [[4, 5, 0, 2, 5, 4, 0, 1, 1, 3]] * 30)
    own, alone, both = (
        replay([text], None, 8),
        replay([text], store, 8, make=store_alone),
        replay([text], store, 8),
    )
    assert set(own.accepted) == {Source.NGRAM}
    assert set(alone.accepted) == {Source.DATASTORE}
    assert both.accepted[Source.NGRAM] > 0 < both.accepted[Source.DATASTORE]
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
    assert (three.context, three.rate[0]) == ((1, 2, 3), 1)
    assert sum(c.chance for c in habits.candidates([2])) <= 1


def test_habits_are_bounded_and_forget_what_was_not_seen_for_long() -> None:
    habits = Habits(contexts=30)
    for token in range(500):
        habits.learn((token % 40, 1), token)
        habits.learn((7,), 8)
    assert len(habits) == 30
    assert habits.candidates((7,))[0].token == 8
    assert habits.candidates((25, 1))[0].rate[0] == 0, (
        "25 1 is forgotten, and 1 has been seen all the time"
    )
    assert habits.candidates((3, 1))[0].rate[0] == 1
    latest = {candidate.token for candidate in habits.candidates((1,))}
    assert latest < {*range(484, 500)}, "16 tokens are counted for a context"


def test_the_next_text_is_guessed_from_the_last(tmp_path: Path) -> None:
    """Where it has nothing to repeat itself; also beside a datastore, and as paths of several tokens."""
    text = Generated((7, *range(10, 40)), 1)
    for store in (None, make(tmp_path / "store", [[1, 2]], 70)):
        habits = Habits()
        make_index = lambda tokens, store, *_, habits=habits: text_index(tokens, store, habits)  # noqa: E731
        first, second = (replay([text], store, 8, make=make_index) for _ in range(2))
        assert first.tokens_per_step == 1
        assert second.tokens_per_step > 4
        assert replay([text] * 2, store, 8).tokens_per_step == 1, (
            "without habits nothing outlives a text"
        )


def test_an_engine_keeps_habits() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    with Engine(
        TOY, "none", habits=True, target_pace=0.004
    ) as engine:  # forwards of any size last as long: all pay
        alone, *ahead = (
            engine.generate(
                [[1, 2, 3]], params.overridden_by(RequestOptions(method=method, rule="coupled"))
            )[0]
            for method in ("ar", "ngram", "ngram")
        )
    assert [one.tokens for one in ahead] == [alone.tokens] * 2
    first, second = (sum(one.statistics.guessed_by_source.values()) for one in ahead)
    assert second > first + 10


# ---- answers ----


def test_answers_are_those_of_one_at_a_time() -> None:
    """More prompts than slots, of different lengths, each with a seed of its own; some end early."""
    runner = on_cpu(tiny_model("llama"), dtype="float32", slots=3)
    prompts = [[5, 9, 40], [7], [12, 33, 8, 2], [5, 9, 40], [1, 2]]
    samplings = [drawn_by(1.0, top_k=20, seed=seed) for seed in range(5)]
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
    report = guesses.measure(config, asked, 20, Quiet(), most_batch=2, most_context=300)
    tables = report.tables
    for table in tables:
        assert {len(row) for row in table.rows} <= {len(table.columns)}
    assert all(float(row[3]) >= 1 and float(row[-1]) > 0 for row in tables[0].rows)
    assert [float(row[0]) for row in tables[1].rows] == list(guesses.TEMPERATURES)
    assert f"datastore {directory} of {len(Datastore(directory))} tokens" in tables[1].notes[0]
    beside = {row[0]: [float(tokens) for tokens in row[1:]] for row in tables[2].rows}
    assert list(beside) == ["pld", "llma", "rest", "sssd", "ngram"]
    assert all(tokens[0] == 1 and tokens[-1] >= 1 for tokens in beside.values())
    assert [row[0] for row in tables[-1].rows] == ["1", "2"], "batches"


# ---- as published ----

TEXT = (1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3)


def published(method: str, tokens: Sequence[int], store: Datastore | None = None) -> NgramIndex:
    """The index of a method, by the name that the registry has for it."""
    return index_factory(METHODS[method].guesses)(tokens, store, None, None, ())


def paths(index: NgramIndex, most: int) -> list[list[int]]:
    """The likeliest path of guesses behind each candidate."""
    found = []
    for candidate in index.candidates(len(index)):
        path, below = [candidate.token], index.following(candidate)
        while below and len(path) < most:
            path, below = [*path, below[0].token], index.following(below[0])
        found.append(path)
    return found


def test_pld_copies_behind_the_earliest_of_the_longest_matches() -> None:
    index = published("pld", TEXT)
    assert paths(index, 5) == [[9, 8, 2, 3, 7]], "1 2 3 is at the beginning"
    index.cut(11)
    index.extend([7, 2, 3])
    assert paths(index, 3) == [[9, 8, 2]], "7 2 3 is new, 2 3 is not: its earliest place"
    index.extend([99])
    assert paths(index, 3) == []


def test_llma_copies_from_the_prompt_alone() -> None:
    index = published("llma", TEXT[:8])
    index.extend([5, 4, 5])
    assert paths(index, 3) == [], "5 is in the text, and not in the prompt"
    index.extend([2, 3])
    assert paths(index, 99) == [[9, 8, 2, 3, 7]], "up to the prompt's end"
    longer = published("llma", (0, 2, 3, 4, 5, 11, 1, 2, 3, 4, 5, 12))
    longer.extend([1, 2, 3, 4, 5])
    assert paths(longer, 1) == [[12]], "a match of five tokens"


def counted(text: list[int], path: tuple[int, ...]) -> dict[int, float]:
    """By enumeration of the text: the probability of each token behind a path; see `Counted`."""
    factor, damping, depth = Counted.weights
    best: dict[int, float] = {}
    for n in range(1, LONGEST + 1):
        prefix = (*text[len(text) - n :], *path)
        ends = [
            end
            for end in range(len(prefix), len(text))
            if tuple(text[end - len(prefix) : end]) == prefix
        ]
        for token in {text[end] for end in ends}:
            share = sum(text[end] == token for end in ends) / len(ends)
            best[token] = max(
                best.get(token, 0.0), factor * depth * (1 - damping ** len(prefix)) * share
            )
    total = max(1.0, sum(best.values()))  # of the trees of several prefixes
    return {token: chance / total for token, chance in best.items()}


@pytest.mark.parametrize("seed", range(4))
def test_sssd_has_the_shares_of_enumeration(seed: int) -> None:
    noise = random.Random(seed)
    text = [noise.randrange(3) for _ in range(60)]
    index = published("sssd", text)
    waiting = [((), index.candidates(len(text)))]
    for path, candidates in waiting:
        assert {each.token: each.chance for each in candidates} == pytest.approx(
            counted(text, path)
        ), path
        if len(path) < 3:
            waiting += [((*path, each.token), index.following(each)) for each in candidates]
    assert len(waiting) > 20


def test_rest_guesses_from_the_longest_match_of_a_datastore(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [[1, 2, 3], [1, 2, 3], [1, 2, 4], [9, 2, 5]], 10)
    index = published("rest", [1, 2, 7, 1, 2], store)
    found = index.candidates(5)
    assert {each.token: each.chance for each in found} == pytest.approx({3: 2 / 3, 4: 1 / 3})
    assert {each.source for each in found} == {Source.DATASTORE}, "not the 7 of the text"
    both = published("sssd", [1, 2, 7, 1, 2], store).candidates(5)
    assert {7, 3, 4} <= {each.token for each in both}


def drawn(runner: ModelRunner, tokens: Sequence[int]) -> int:
    runner.rollback(0)
    return int(feed_chain(runner, tokens, 1)[0].argmax())


def test_ouroboros_keeps_what_the_target_drew_behind_discarded_tokens() -> None:
    """As plain forwards draw it, while the draft had drawn the same; and phrases of the text."""
    runner, alone = (on_cpu(tiny_model(layers=4)) for _ in range(2))
    executor, prompt = OpenExecutor(runner), (5, 40, 7, 93, 11, 12, 200, 3)

    wrong = (drawn(alone, prompt) + 1) % 200
    agreed = drawn(alone, [*prompt, wrong])
    window = (wrong, agreed, 17, 18)
    draws = [drawn(alone, [*prompt, *window[:length]]) for length in range(1, 4)]
    assert draws[0] == agreed
    executor.execute(Open(prompt, resolved("ouroboros", sampling=drawn_by(0.0)), request=1))
    executor.execute(Forward(Phase.PREFILL, 0, prompt[:-1], 0, request=1))
    guess = guess_after((*prompt, *window), pending=4)
    guess = replace(guess, payoff=lambda fed, most: Payoff(1.0, [1.0, *[99.0] * most]))
    executor.execute(
        Forward(Phase.POST_VERIFY, len(prompt) - 1, (prompt[-1], *window), 5, guess, request=1)
    )
    executor.judge(Judge(len(prompt), window, (None,) * 4, (0, 1, 2, 3), request=1))
    pool = executor.index(1).phrases  # type: ignore[attr-defined]
    assert pool[wrong] == [(agreed, draws[1])]
    assert pool[agreed][-1] == (draws[1],)
    assert pool[5] == [prompt[1:5]]


def test_methods_that_need_a_setting_are_refused_without() -> None:
    for method, needed in (("rest", "--datastore"), ("pia", "--habits"), ("head", "--head")):
        with pytest.raises(ConfigError, match=needed):
            EngineConfig(target=TOY, draft="none").check_options(RequestOptions(method=method))  # type: ignore[call-arg]


PROMPT = (5, 40, 7, 93, 11, 12, 200, 3)


def test_the_window_is_the_targets_own_writing() -> None:
    """Each new level is what the target draws behind each column, beside guesses and without them."""
    runner, alone = (on_cpu(tiny_model(layers=4)) for _ in range(2))
    executor = TreeExecutor(runner)
    executor.execute(Open(PROMPT, resolved("lookahead", sampling=drawn_by(0.0)), request=1))
    executor.execute(Forward(Phase.PREFILL, 0, PROMPT[:-1], 0, request=1))
    index = executor.index(1)
    assert isinstance(index, JacobiIndex)
    text = [*PROMPT]
    for step in range(3 * LEVELS):
        known = len(text) - 1 if step else 0
        before = [list(level) for level in index.levels]
        start, guesses = len(text) - 1, (7, 9) if step % 2 else ()
        executor.tokens, executor.parents = guesses, (start,) * len(guesses)
        guess = guess_after(text, known)
        command = Forward(Phase.PRE_VERIFY, start, (text[-1],), 1, guess, request=1)
        forwarded = executor.execute(command)
        assert isinstance(forwarded, Forwarded)
        assert forwarded.beside == COLUMNS * LEVELS, "it passed for a forward of one token"
        if guesses:
            executor.execute(Keep((0,), request=1))
        assert runner.length() == len(text)
        assert index.levels[:-1] == before[1:]
        for column in range(COLUMNS):
            chain = [*text, *before[0][: column + 1], *(level[column] for level in before[1:])]
            assert index.levels[-1][column] == drawn(alone, chain)
        text.append(int(executor.logits(1)[0].argmax()))


def test_the_pool_guesses_what_has_followed_a_token() -> None:
    """The latest first; a bound for each token; and the chance of a place is learned."""
    index = JacobiIndex([1, 2, 3])
    index.levels = [[level * 10 + column for column in range(COLUMNS)] for level in range(LEVELS)]
    index.take([90] * COLUMNS)
    index.extend([2])
    (first,) = index.candidates(4)
    path = [first.token]
    while below := index.following(first):
        (first,) = below
        path.append(first.token)
    assert path == [12, 22, 32, 90]
    for number in range(2 * KEPT):
        index.levels = [[5] * COLUMNS, *([number + level] * COLUMNS for level in range(1, LEVELS))]
        index.take([number])
    index.extend([5])
    likeliest = index.candidates(5)
    assert [each.token for each in likeliest] == [2 * KEPT - number for number in range(KEPT)]
    assert sum(each.chance for each in likeliest) <= 1
    before = index.hits[0]
    index.extend([2 * KEPT])
    index.learn(6)
    assert index.hits[0] > before
    assert index.window(LEVELS - 1, room=99) is index.window(-1, room=99) is None
    assert index.window(2 * LEVELS, room=COLUMNS + LEVELS) is None, "the context ends"
    small = index.window(2 * LEVELS, room=COLUMNS + LEVELS + 1)
    assert (small.columns, small.parents) == (2, (-1, 0, *range(2 * LEVELS - 2)))


def test_no_text_changes() -> None:
    """In several slots, up to the context's end, and where n-grams of the text say the same."""
    prompts = [[5, 40, 7], [9, 9, 9, 9], list(range(20, 40))]
    with Engine(str(tiny_model(layers=4)), "none", slots=2, max_context=56) as engine:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=36, ignore_eos=True)
            wanted = [each.tokens for each in engine.generate(prompts, params, method="ar")]
            found = engine.generate(prompts, params, method="lookahead")
            assert [each.tokens for each in found] == wanted
            assert temperature or any(
                each.statistics.guessed_by_source.get("jacobi") for each in found
            )
            assert max(max(each) for each in wanted) < VOCAB_SIZE
