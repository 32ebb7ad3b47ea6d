"""Benchmarks and calibration: what is measured, in which order, and the figures made from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pearl import SamplingParams
from pearl.cli.prompt_sets import read_sets
from pearl.config import EngineConfig, RequestOptions
from pearl.device import Device
from pearl.engine import Engine
from pearl.engine.stream import Result as Text
from pearl.errors import ConfigError
from pearl.lab.bench import machine, runner
from pearl.lab.bench.calibrate import Calibration, advise
from pearl.lab.bench.figures import Figures, figures
from pearl.lab.bench.rows import (
    AR,
    AR_ON_ALL,
    AUTO,
    PEARL,
    SD,
    Row,
    device_of_row,
    devices_of,
    rows_for,
)
from pearl.lab.bench.runner import Measured, TaskSample, forget, measure
from pearl.lab.bench.tasks import OURS, Task, read_tasks
from pearl.lab.studies.estimate import Estimate
from pearl.metrics import Statistics
from pearl.protocol.method_choice import WAYS
from pearl.protocol.speeds import Profile
from scripts import demo
from tests.block_heads import write_block_head
from tests.conftest import TOY, Quiet, ran
from tests.plans import plan_of, row_of
from tests.replace import replace
from tests.tiny import tiny_model
from tests.virtual import emulated

PACED = EngineConfig(target=TOY, draft=TOY, target_pace=0.004, draft_pace=0.001)
ONE, ANY = Device("cpu", cores=(0,)), Device("cpu")
METHODS = [
    "ar",
    "sd",
    "ssd",
    "pearl-no-pre-verify",
    "pearl-no-post-verify",
    "published,window=fixed",
]
METHODS += ["published", "ngram", "pearl", "auto"]


# ---- hardware, devices ----


def test_devices_are_named_joined_and_counted() -> None:
    gpus = Device("cuda", gpus=(0, 1)) | Device("cuda", gpus=(2,))
    assert (gpus.name, gpus.in_words) == ("cuda:0-2", "3 GPUs")
    assert (ONE | Device("cuda", gpus=(1,))).name == "cuda:1"
    assert (ONE | Device("cpu", cores=(1,))).name == "cpu:0,1"
    assert (ONE.in_words, ANY.name, ANY.in_words) == ("1 core", "cpu", "all cores")
    assert ONE | ANY == ANY, "one of them may use any core"
    target, both = devices_of(EngineConfig())
    assert target != both
    assert devices_of(EngineConfig(draft="none")) == (both, both), "auto is a half for each"
    assert devices_of(EngineConfig(target_device="cuda:1-2"))[0].gpus == (1, 2)


# ---- tasks ----


def test_prompts_are_read_from_our_sets_humaneval_and_files(tmp_path: Path) -> None:
    """By default only sets of this package: HumanEval's package may be missing."""
    assert [task.set for task in read_sets((), 1, False)] == ["questions", "summaries", "edits"]
    humaneval = read_tasks("humaneval", None, None)
    assert len(humaneval) == 164
    assert "has_close_elements" in humaneval[0].turns[0]
    assert read_tasks("humaneval", None, 2) == humaneval[:2]
    for ours in OURS:
        assert len({task.turns for task in read_tasks(ours, None, None)}) == 20
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b", "answer": "no"}\n\n{"turns": ["c", "d"]}\n')
    assert [task.turns for task in read_tasks("some", path, None)] == [("a",), ("b",), ("c", "d")]
    for bad in ("{", '{"turns": ["a", 1]}', "[1]"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="prompt 1"):
            read_tasks("some", path, None)


# ---- engines ----


@pytest.fixture(scope="module")
def tiny_pair() -> EngineConfig:
    return EngineConfig(
        target=str(tiny_model(chat=True)), draft=str(tiny_model(chat=True, noise=0.3))
    )


@pytest.fixture(scope="module")
def engine(tiny_pair: EngineConfig) -> Iterator[Engine]:
    with Engine(config=tiny_pair) as made:
        yield made


def test_a_row_does_not_profit_from_the_cache_of_the_one_before(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=5)
    for decoding in (RequestOptions(method="pearl"), RequestOptions(method="ar")):
        cached = []
        for again in (False, False, True):
            if not again:
                forget(engine, decoding, [0, 6, 7, 8])
            (result,) = engine.generate([0, 6, 7, 8], params.overridden_by(decoding))
            cached.append(result.statistics.num_cached_tokens)
        assert cached == [0, 0, 3]


@pytest.mark.parametrize("slots", [1, 3])
def test_no_row_finds_its_prompt_in_a_slot(slots: int) -> None:
    """In another slot than the one that forgot it: all rows but the first began with the prompt computed."""
    plan = replace(
        plan_of([row_of(AR), row_of("ngram")], [Task("x", 1, ("123456",))]),
        config=EngineConfig(target=TOY, draft="none", slots=slots),
    )
    samples = measure(plan, Quiet()).samples
    assert [sample.texts[0].num_cached_tokens for sample in samples] == [0, 0]


# ---- the order of work, with fake engines ----


def statistics_of(tokens: int, rate: float, **more: Any) -> Statistics:
    """Of a text whose first token came after 0.1 s."""
    seconds = 0.1 + (tokens - 1) / rate
    times = {"seconds": seconds, "seconds_to_first_token": 0.1, "tokens_per_second": rate}
    return Statistics(num_generated_tokens=tokens, **times, **more)


class FakeEngine:
    """Decodes at given speeds: sd by its gamma, the others 20 tokens per second."""

    log: ClassVar[list[tuple[str, int | None, int]]] = []  # method, gamma, seed
    rules: ClassVar[list[str | None]] = []
    prompts: ClassVar[list[list[int]]] = []
    gammas: ClassVar[dict[int, float]] = {g: 30.0 - (g - 6) ** 2 for g in range(1, 12)}

    context = 200

    def __init__(self, config: EngineConfig) -> None:
        pass

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompt: list[int], params: SamplingParams) -> list[Text]:
        self.log.append((params.method, params.gamma, params.seed or 0))
        self.rules.append(params.rule)
        self.prompts.append(list(prompt))
        rate = self.gammas.get(params.gamma or 0, 1.0) if params.method == "sd" else 20.0
        more = {
            "num_judged_draft_tokens": 10,
            "num_accepted_draft_tokens": 8,
            "run_histogram": {4: 2},
        }
        statistics = statistics_of(
            11, rate, acceptance_rate=0.8, t_draft=0.01, t_target={1: 0.05}, **more
        )
        return [Text(tokens=[*range(5, 5 + 11)], prompt_tokens=prompt, statistics=statistics)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr(runner, "Engine", FakeEngine)
    monkeypatch.setattr(runner, "forget", lambda *_: None)
    for name, value in (("log", []), ("rules", []), ("prompts", [])):
        monkeypatch.setattr(FakeEngine, name, value)
    return FakeEngine


ABC = [Task("x", 1, ("abc",))]


def test_rows_take_turns_and_the_first_place_goes_round(fake: type[FakeEngine]) -> None:
    rows = [row_of(AR), row_of("pearl-no-pre-verify"), row_of(PEARL)]
    some = [Task("x", number, ("abc",)) for number in (1, 2, 3)]
    watcher = Quiet()
    found = measure(plan_of(rows, some), watcher)
    order = [method for method, _, _ in fake.log[len(rows) :]]  # the first of each warms up
    assert order == [
        *("ar", "pearl-no-pre-verify", "pearl"),
        *("pearl-no-pre-verify", "pearl", "ar"),
        *("pearl", "ar", "pearl-no-pre-verify"),
    ]
    assert len(order) == watcher.total == watcher.done == 9
    assert {(s.row, s.task) for s in found.samples} == {
        (row.name, task.number) for row in rows for task in some
    }
    seeds: dict[int, set[int]] = {}
    for (_, _, seed), one in zip(fake.log[len(rows) :], found.samples, strict=True):
        seeds.setdefault(one.task, set()).add(seed)
    assert all(len(same) == 1 for same in seeds.values()), "all rows have a text's seed"
    assert len(set.union(*seeds.values())) == 3


def test_gamma_is_found_by_trying(fake: type[FakeEngine]) -> None:
    """Up to where the next two are slower. Rows with a gamma or a stop policy keep theirs."""
    found = measure(plan_of([row_of(SD)], ABC), Quiet())
    assert (found.gamma, set(found.gammas), fake.log[-1][:2]) == (6, {*range(1, 9)}, ("sd", 6))
    given = measure(plan_of([row_of(SD)], ABC, gamma=2), Quiet())
    assert (given.gamma, fake.log[-1][:2]) == (2, ("sd", 2))
    rows = [row_of(SD), row_of(SD, "3", gamma=3), row_of(SD, "stops", draft_stop="heuristic")]
    assert measure(plan_of(rows, ABC), Quiet()).gamma == 6
    assert [gamma for _, gamma, _ in fake.log[-3:]] == [6, 3, None]
    fake.rules.clear()
    measure(plan_of([row_of("ssd", rule="coupled", branches=2)], ABC), Quiet())
    assert set(fake.rules) == {"coupled"}, "by the rule of the row"


def test_a_later_turn_continues_from_the_reply_and_is_summed_up(fake: type[FakeEngine]) -> None:
    found = measure(plan_of([row_of(AR)], [Task("x", 1, ("abc", "de"))]), Quiet())
    first, second = fake.prompts[-2:]
    assert second[: len(first) + 11] == [*first, *range(5, 16)]
    assert len(second) == len(first) + 11 + 2
    (one,) = found.samples
    sums = [
        one.total(name)
        for name in ("num_generated_tokens", "late_tokens", "num_judged_draft_tokens")
    ]
    assert sums == [one.tokens, 20, 20] == [22, 20, 20]
    assert one.total("late_seconds") == pytest.approx(1.0)
    assert one.rate == pytest.approx(20)


# ---- figures ----


def sample(row: str, task: int, rate: float, of: str = "x", **more: Any) -> TaskSample:
    return TaskSample(row, of, task, texts=[statistics_of(101, rate, **more)])


def test_speedups_are_ratios_over_the_same_text() -> None:
    """Texts of very different speeds: the ratio of medians would be another. A row may have another base."""
    rows = [row_of(AR), row_of(PEARL), Row("again", base=PEARL)]
    drafted = {
        "num_judged_draft_tokens": 10,
        "num_accepted_draft_tokens": 6,
        "run_histogram": {3: 2},
    }
    drafted |= {"target_steps": {"prefill": 1, "post-verify": 50}, "num_prefill_tokens": 1}
    samples = [sample(AR, i, rate) for i, rate in enumerate((10.0, 100.0, 1000.0))]
    samples += [
        sample(name, i, rate, **drafted)
        for name in (PEARL, "again")
        for i, rate in enumerate((20.0, 200.0, 1500.0))
    ]
    plain, fast, again = figures(plan_of(rows), Measured(samples))
    assert (plain.speedup.value, fast.speedup.value, fast.rate.value) == (1.0, 2.0, 200.0)
    assert again.speedup.value == 1.0
    assert (fast.acceptance, fast.tokens_per_run) == (0.6, 4.0)
    assert fast.tokens_per_step == (fast.tokens - 3) / 150, "without the tokens of three prefills"
    assert plain.acceptance is None


# ---- real processes ----


def test_an_emulated_run_decodes_the_text_of_its_simulation() -> None:
    """The text of `sd`, which has bonus tokens, depends on its window; that of `pearl` does not."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
    with Engine(config=PACED) as engine:
        for method, gamma in (("ar", None), ("sd", 3), ("pearl", None)):
            decoding = RequestOptions(method=method, gamma=gamma)
            real = engine.generate("hello", params.overridden_by(decoding))[0]
            virtual = emulated(PACED, decoding, engine.encode("hello"), params)
            assert real.tokens == virtual.tokens
            assert real.statistics.seconds >= 0.99 * virtual.seconds, (
                "the simulator is an upper bound"
            )


def test_bench_on_an_emulated_pair(tmp_path: Path) -> None:
    """The command, with its JSON."""
    path, config = tmp_path / "bench.json", tmp_path / "toy.yaml"
    config.write_text(
        f"target: {TOY}\ndraft: {TOY}\ntarget_pace: 0.004\ndraft_pace: 0.001\nmethod: pearl\n"
    )
    done = ran("bench", "--config", config, "--limit", 1, "--max-tokens", 30, "--json", path)
    for row in (
        "ar",
        "sd, gamma",
        "pearl-no-pre-verify",
        "pearl-no-post-verify",
        "published, window",
    ):
        assert row in done.output
    made = json.loads(path.read_text())
    assert [row["name"] for row in made["rows"]] == METHODS
    assert all(row["tokens_per_step"] for row in made["rows"])
    assert " times the target on " in demo.by_kind(made)
    adaptive = {text["row"] for text in made["texts"] if text["texts"][0]["ways"]}
    assert adaptive == {AUTO}, "the method of the file is not that of the row"


def test_rows_depend_on_the_devices_of_the_pair(tiny_pair: EngineConfig, tmp_path: Path) -> None:
    """A second row on all devices only where these are more than the target's; asking for it is no error.

    On checkpoints, of two sets, one with two turns: all rows decode the same number of tokens.
    """
    names = [
        row.name for row in rows_for(EngineConfig(target_device="cpu:0", draft_device="cpu:1"))
    ]
    assert names[:10] == METHODS
    assert names[10:12] == ["ar, all devices", "ngram, all devices"]
    assert not names[12:]
    alone = rows_for(EngineConfig(draft="none", head="some"))
    assert [row.name for row in alone] == ["ar", "ngram", "head", "auto"]
    shared = rows_for(EngineConfig(target_device="cpu:0", draft_device="cpu:0"))
    assert [row.name for row in shared] == METHODS
    config = EngineConfig(head="some", draft_device="cpu:1")
    with_head = {row.name: device_of_row(row, config) for row in rows_for(config)}
    assert with_head["head"] == with_head["ar"] != with_head["sd"]
    (tmp_path / "one.jsonl").write_text('{"prompt": "an"}\n')
    (tmp_path / "two.jsonl").write_text('{"turns": ["the", "and"]}\n')
    where = ("--target-device", "cpu:0", "--draft-device", "cpu:0")
    where += ("--prompts", tmp_path / "one.jsonl", "--prompts", f"b={tmp_path / 'two.jsonl'}")
    asked = ("auto", AR_ON_ALL, "--max-tokens", 8, "--json", "-")
    done = ran("bench", "--target", tiny_pair.target, "--draft", tiny_pair.draft, *where, *asked)
    made = json.loads(done.stdout)
    assert [row["name"] for row in made["rows"]] == [AR, AUTO]
    for of in ("one", "b"):
        texts = [text["texts"] for text in made["texts"] if text["set"] == of]
        assert len({sum(turn["num_generated_tokens"] for turn in turns) for turns in texts}) == 1
    assert made["rows"][0]["speedup"]["value"] == 1


# ---- calibration ----


def test_calibration_of_an_emulated_pair(tmp_path: Path) -> None:
    """The target alone, each way of auto, and auto; no forward is shorter than its pace.

    The file's method was that of the row auto, too: then nothing was known of any way.
    """
    (tmp_path / "it.yaml").write_text("method: pearl\n")
    arguments = ("--target", TOY, "--draft", TOY, "--target-pace", 0.008, "--draft-pace", 0.002)
    arguments += ("--config", tmp_path / "it.yaml")
    done = ran(
        "calibrate", *arguments, "--limit", 1, "--max-tokens", 60, "--json", tmp_path / "it.json"
    )
    for word in ("t_draft", "t_target(1)", "acceptance", "--method"):
        assert word in done.output
    made = json.loads((tmp_path / "it.json").read_text())
    assert [row["name"] for row in made["rows"]] == ["ar", "sd", "ssd", "ngram", "pearl", "auto"]
    assert 0.2 < made["acceptance"] < 0.8, "0.5 is the toy's"
    assert made["profile"]["t_draft"] > 0
    assert all(seconds >= 0.008 for _, seconds in made["profile"]["t_target"])
    assert made["profile"]["ways"]
    assert {made["profile"]["best"], *(way for way, _, _ in made["profile"]["ways"])} <= set(WAYS)


def test_calibration_of_a_target_with_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a draft: it was refused before anyone looked whether there was a head."""
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path / "cache"))
    head = write_block_head(tmp_path / "head", "dspark")
    prompts = tmp_path / "some.jsonl"
    prompts.write_text('{"prompt": "an"}\n')
    target = tiny_model("llama-tied", layers=4, chat=True)
    pair = ("--target", target, "--draft", "none", "--head", head)
    sizes = ("--prompts", prompts, "--limit", 1, "--max-tokens", 60)
    done = ran("calibrate", *pair, *sizes, "--json", tmp_path / "it.json")
    assert "acceptance" not in done.output
    made = json.loads((tmp_path / "it.json").read_text())
    assert [row["name"] for row in made["rows"]] == ["ar", "ngram", "head", "auto"]
    assert made["profile"]["best"] in ("ngram", "head", "ar")
    assert (made["gamma"], made["c"], made["profile"]["t_draft"]) == (0, 0, 0.0)


def test_advice_without_a_draft_names_the_head() -> None:
    rows = [Figures(AR, speedup=Estimate(1.0, 1.0, 1.0))]
    rows.append(Figures("head", speedup=Estimate(1.4, 1.3, 1.5)))
    words, flags = advise(rows, 0, EngineConfig(draft="none", head="my-head"))
    assert words == "head: 1.40 times as fast as the target alone"
    assert flags == "--draft none --method head --head my-head"


@pytest.mark.parametrize("others", [0.01, 0.2])
def test_a_calibration_on_a_busy_machine_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: float
) -> None:
    """Later engines would start with its figures."""
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path))
    known = Calibration((), 0.9, 3, 5, "words", "flags", Profile(acceptance=0.9))
    monkeypatch.setattr("pearl.lab.bench.calibrate.calibrate", lambda *_: known)
    monkeypatch.setattr(machine.Conditions, "stop", lambda self: setattr(self, "others", others))
    done = ran("calibrate", "--target", str(tmp_path), "--draft", str(tmp_path))
    assert (tmp_path / "profiles").exists() == ("not kept" not in done.output) == (others < 0.05)


def test_advice_names_the_fastest_and_what_ties_with_it() -> None:
    def advice(**speedups: tuple[float, float]) -> tuple[str, str]:
        """`speedups`: value and margin of each method."""
        names = {"wide": "ar, all devices"}
        rows = [row_of(AR), *(row_of("ar", names.get(name, name)) for name in speedups)]
        plain = figures(
            plan_of(rows), Measured([sample(row.name, i, 10.0) for row in rows for i in range(2)])
        )
        estimates = (
            Estimate(value, value - margin, value + margin) for value, margin in speedups.values()
        )
        found = [
            replace(one, speedup=speed) for one, speed in zip(plain[1:], estimates, strict=True)
        ]
        return advise([plain[0], *found], 3, EngineConfig())

    words, flags = advice(pearl=(1.1, 0.05), wide=(1.5, 0.05))
    assert "no draft pays here; ar, all devices: 1.50" in words
    assert flags.startswith("--draft none --method ar --target-device cpu:")
    assert advice(pearl=(1.1, 0.05), ngram=(1.4, 0.05))[1] == "--draft none --method ngram"
    assert advice(pearl=(1.4, 0.05)) == (
        "pearl: 1.40 times as fast as the target alone",
        "--method pearl",
    )
    assert advice(sd=(1.3, 0.05))[1] == "--method sd --gamma 3"
    assert "nothing is faster" in advice(pearl=(1.1, 0.2))[0], "1 lies in the interval"
    assert advice(pearl=(1.01, 0.0))[1] == "--draft none --method ar"
    assert "not told apart from ngram" in advice(ngram=(1.4, 0.05), pearl=(1.44, 0.05))[0]
    assert "told apart" not in advice(ngram=(1.2, 0.05), pearl=(1.44, 0.05))[0]
    unsure = advice(ngram=(1.4, 0.05), pearl=(1.5, 0.6))
    assert unsure[1] == "--draft none --method ngram", "what may be noise hides nothing"
