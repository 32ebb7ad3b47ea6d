"""Benchmarks, the paper's tables and calibration: what is measured, in which order, and what is made of it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pearl import SamplingParams
from pearl.cli import cli
from pearl.cli import paper as cli_paper
from pearl.cli.bench import read_sets
from pearl.cli.distill import Bars
from pearl.config import DecodingConfig, EngineConfig
from pearl.engine import Engine
from pearl.errors import ConfigError, ModelError, RequestError, StartError
from pearl.extras import installing
from pearl.lab import theory
from pearl.lab.bench import baselines, calibrate, machine, others, paper, plots, results, run, tables, tasks
from pearl.lab.bench.calibrate import Times, Verdict
from pearl.lab.bench.emulation import simulated
from pearl.lab.bench.interval import Interval, bootstrapped, median_of
from pearl.lab.bench.machine import Stolen, Taken, hardware, in_words
from pearl.lab.bench.run import (
    AHEAD,
    AR,
    AR_ON_ALL,
    AUTO,
    FIXED,
    NGRAM,
    PEARL,
    SD,
    SSD,
    Measured,
    Plan,
    Row,
    Sample,
    _sample,
    measure,
    rows_for,
)
from pearl.lab.bench.summary import document, figures, over_alone
from pearl.lab.bench.systems import Decoded, Devices, Generate, OurSystem, devices_of
from pearl.lab.bench.tasks import OURS, Task, read_tasks
from pearl.metrics import Statistics
from pearl.protocol.speeds import Profile
from pearl.text.tokenizer import GenerationDefaults
from tests.conftest import TOY
from tests.replace import replace
from tests.tiny import EOS_ID, tiny_model

PACED = EngineConfig(target=TOY, draft=TOY, target_pace=0.004, draft_pace=0.001)
ONE, TWO = Devices(cores=(0,)), Devices(cores=(0, 1))


class Quiet:
    """A watcher that only remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, what: str, total: int) -> None:
        self.total, self.done = total, 0

    def advance(self, count: int, note: str = "") -> None:
        self.done += count

    def say(self, message: str) -> None:
        self.said.append(message)


def pearl(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


# ---- intervals ----


def test_an_interval_holds_its_median_and_is_the_same_every_time() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = median_of(values)
    assert (found.value, found) == (4.0, median_of(values))
    assert 1 <= found.low < 4 < found.high <= 16
    assert median_of([3.0]) == bootstrapped([3.0], median)
    assert median_of([3.0]).low == median_of([3.0]).high == 3


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    noise = random.Random(1)
    samples = [[noise.gauss(10, 1) for _ in range(25)] for _ in range(200)]
    found = [median_of(sample, 400) for sample in samples]
    assert sum(one.low <= 10 <= one.high for one in found) in range(180, 201)


# ---- where ----


def test_hardware_is_told() -> None:
    where = hardware()
    assert where["cores"]
    assert "torch" in where["versions"]
    assert str(len(where["cores"])) in in_words(where)
    taken = Stolen().taken()
    assert 0 <= taken.stolen <= 1
    assert taken.others >= 0
    assert "too much" not in str(Taken(0.02, 0.02))
    assert "too much" in str(Taken(0.0, 0.9))
    assert "other processes 90.0%, load 20.5 on " in str(Taken(0.0, 0.9, 20.5))


def test_our_own_work_is_not_that_of_others() -> None:
    """This process's, and that of a process which it has started and waited for."""
    before, began = machine._our_ticks(), time.process_time()
    while time.process_time() < began + 0.3:
        pass
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert (machine._our_ticks() - before) / os.sysconf("SC_CLK_TCK") >= 0.55


def test_devices_are_named_joined_and_counted() -> None:
    gpus = Devices(gpus=(0, 1)) | Devices(gpus=(2,))
    assert (gpus.name, gpus.in_words()) == ("cuda:0,1,2", "3 GPUs")
    assert (ONE | Devices(cores=(1,))).name == "cpu:0,1"
    assert (ONE.in_words(), Devices().name, Devices().in_words()) == ("1 core", "cpu", "all cores")
    assert ONE | Devices() == Devices(), "one of them may use any core"


def test_what_auto_comes_to_is_each_a_half() -> None:
    target, draft = devices_of(EngineConfig())
    assert target != draft
    alone, _ = devices_of(EngineConfig(draft="none"))
    assert alone == target | draft
    named, _ = devices_of(EngineConfig(target_device="cuda:1-2"))
    assert named.gpus == (1, 2)


# ---- tasks ----


def test_prompts_that_nobody_names_come_with_the_package() -> None:
    """HumanEval's are of another package, which a first `pearl bench` lacked."""
    assert [task.set for task in read_sets((), 1, False)] == ["questions", "summaries", "edits"]


def test_humaneval_comes_from_its_package() -> None:
    found = read_tasks("humaneval", None, None)
    assert len(found) == 164
    assert all(len(task.turns) == 1 for task in found)
    assert "has_close_elements" in found[0].turns[0]
    assert read_tasks("humaneval", None, 2) == found[:2]


def test_humaneval_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tasks, "files", missing)
    with pytest.raises(ConfigError, match=re.escape(installing("bench"))):
        read_tasks("humaneval", None, None)


def test_files_of_prompts_questions_and_turns(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b", "answer": "no"}\n\n{"turns": ["c", "d"]}\n')
    assert [task.turns for task in read_tasks("some", path, None)] == [("a",), ("b",), ("c", "d")]
    for ours in OURS:
        tasks = read_tasks(ours, None, None)
        assert len({task.turns for task in tasks}) == len(tasks) == 20
    for bad in ("{", '{"turns": []}', '{"turns": ["a", 1]}', '{"prompt": 3}', "[1]"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="prompt 1"):
            read_tasks("some", path, None)


# ---- transformers' generate ----


@pytest.fixture(scope="module")
def tiny_pair() -> EngineConfig:
    return EngineConfig(target=str(tiny_model(chat=True)), draft=str(tiny_model(chat=True, noise=0.3)))


@pytest.fixture(scope="module")
def system(tiny_pair: EngineConfig) -> Iterator[OurSystem]:
    made = OurSystem(tiny_pair)
    yield made
    made.close()


@pytest.mark.slow
def test_generate_says_what_ours_says(tiny_pair: EngineConfig, system: OurSystem) -> None:
    """Alone, assisted, and up to an EOS, whose place its times do not change."""
    defaults, params = GenerationDefaults(eos=(EOS_ID,)), SamplingParams(temperature=0.0, max_tokens=20, seed=1)
    prompt = [5, 6, 7, 8]
    wanted = system.engine.generate(prompt, params)[0].tokens
    for assisted in (False, True):
        other = Generate(tiny_pair, ONE, defaults, assisted)
        try:
            found = other.decode(DecodingConfig(), prompt, params)
            assert list(found.tokens) == wanted
            assert 0 < found.late_tokens < len(wanted)
            assert min(found.first_seconds, found.late_seconds) > 0
            sampled = params.model_copy(update={"temperature": 1.0, "top_k": 5})
            drawn = [other.decode(DecodingConfig(), prompt, sampled).tokens for _ in range(2)]
            assert drawn[0] == drawn[1], "of one seed"
        finally:
            other.close()


def test_generate_that_cannot_start_is_told(tiny_pair: EngineConfig) -> None:
    with pytest.raises(StartError, match="nowhere"):
        Generate(tiny_pair.model_copy(update={"target": "./nowhere"}), ONE, GenerationDefaults(), assisted=False)


def test_generate_that_died_is_told(tiny_pair: EngineConfig) -> None:
    system = Generate(tiny_pair, ONE, GenerationDefaults(), assisted=False)
    system._process.kill()
    with pytest.raises(StartError, match="has ended"):
        system.decode(DecodingConfig(), [5], SamplingParams(temperature=0.0, max_tokens=2, seed=0))


# ---- the order of work, with systems that only pretend ----


class Pretender:
    """Decodes at speeds that are given: method -> tokens a second; of sd by gamma."""

    log: ClassVar[list[tuple[str, int | None, int]]] = []  # method, gamma, seed
    prompts: ClassVar[list[list[int]]] = []
    gammas: ClassVar[dict[int, float]] = {}

    class engine:
        context = 200

    def __init__(self, config: EngineConfig, *_: object, **__: object) -> None:
        self.closed = False

    def decode(self, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        self.log.append((decoding.method, decoding.gamma, params.seed or 0))
        self.prompts.append(list(prompt))
        rate = self.gammas.get(decoding.gamma or 0, 1.0) if decoding.method == "sd" else 20.0
        statistics = Statistics(
            acceptance_rate=0.8,
            num_judged_draft_tokens=10,
            num_accepted_draft_tokens=8,
            run_histogram={"4": 2},
            t_draft=0.01,
            t_target={"1": 0.05},
        )
        return Decoded(tuple(range(5, 5 + 11)), 0.1, 10, 10 / rate, statistics)

    def forget(self, decoding: DecodingConfig, prompt: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pretender(monkeypatch: pytest.MonkeyPatch) -> type[Pretender]:
    monkeypatch.setattr(run, "OurSystem", Pretender)
    monkeypatch.setattr(run, "Generate", Pretender)
    monkeypatch.setattr(Pretender, "log", [])
    monkeypatch.setattr(Pretender, "prompts", [])
    monkeypatch.setattr(Pretender, "gammas", {g: 30.0 - (g - 6) ** 2 for g in range(1, 12)})
    return Pretender


def plan_of(rows: Sequence[Row], some: Sequence[Task], **more: Any) -> Plan:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=20)
    return Plan(EngineConfig(target="toy", draft="toy"), rows, some, params, raw=True, **more)


def test_rows_take_turns_and_the_first_place_goes_round(pretender: type[Pretender]) -> None:
    rows = [
        Row(AR, "pair", ONE, DecodingConfig(method="ar")),
        Row("pearl-no-pre-verify", "pair", TWO, DecodingConfig(method="pearl-no-pre-verify")),
        Row(PEARL, "pair", TWO, DecodingConfig(method="pearl")),
    ]
    some = [Task("x", number, ("abc",)) for number in (1, 2, 3)]
    watcher = Quiet()
    found = measure(plan_of(rows, some, repeats=2), watcher)
    order = [method for method, _, _ in pretender.log[len(rows) :]]  # the first of each warms up
    assert order[:9] == [
        *("ar", "pearl-no-pre-verify", "pearl"),
        *("pearl-no-pre-verify", "pearl", "ar"),
        *("pearl", "ar", "pearl-no-pre-verify"),
    ]
    assert order[9:12] == ["pearl-no-pre-verify", "pearl", "ar"], "the next repeat begins with the next"
    assert len(order) == watcher.total == watcher.done == 18
    assert {(s.row, s.task, s.repeat) for s in found.samples} == {
        (row.name, task.number, repeat) for row in rows for task in some for repeat in (0, 1)
    }
    seeds = {}
    for (_, _, seed), sample in zip(pretender.log[len(rows) :], found.samples, strict=True):
        seeds.setdefault((sample.task, sample.repeat), set()).add(seed)
    assert all(len(same) == 1 for same in seeds.values()), "all rows have a text's seed"
    assert len(set.union(*seeds.values())) == 6


def test_gamma_is_found_by_climbing(pretender: type[Pretender]) -> None:
    """Theory starts at 4 for these speeds; measured, 6 is the best."""
    assert theory.sd_best_gamma(0.8, 0.01, lambda _: 0.05) == 4
    rows = [Row(SD, "pair", TWO, DecodingConfig(method="sd"))]
    found = measure(plan_of(rows, [Task("x", 1, ("abc",))]), Quiet())
    assert found.gamma == 6
    assert set(found.gammas) == {3, 4, 5, 6, 7}
    assert pretender.log[-1][:2] == ("sd", 6), "with it the row is measured"
    given = measure(plan_of(rows, [Task("x", 1, ("abc",))], gamma=2), Quiet())
    assert (given.gamma, pretender.log[-1][:2]) == (2, ("sd", 2))


def test_a_row_keeps_the_window_that_was_chosen_for_it(pretender: type[Pretender]) -> None:
    """sd with neither a gamma nor a stop policy takes the fastest; a policy ends windows of its own bound."""
    ways = [{}, {"gamma": 3}, {"draft_stop": "heuristic"}]
    rows = [Row(str(way), "pair", TWO, DecodingConfig(method="sd", **way)) for way in ways]  # type: ignore[arg-type]
    assert measure(plan_of(rows, [Task("x", 1, ("abc",))]), Quiet()).gamma == 6
    assert [gamma for _, gamma, _ in pretender.log[-3:]] == [6, 3, None]


def test_systems_apart_are_never_open_together(pretender: type[Pretender], monkeypatch: pytest.MonkeyPatch) -> None:
    live: list[Pretender] = []
    most = []

    class Counted(Pretender):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            live.append(self)
            most.append(sum(not one.closed for one in live))

    for name in ("OurSystem", "Generate"):
        monkeypatch.setattr(run, name, Counted)
    rows = [Row(AR, "pair", ONE, DecodingConfig(method="ar")), Row("generate", "generate", ONE)]
    measure(plan_of(rows, [Task("x", 1, ("abc",))], together=False), Quiet())
    assert max(most) == 1
    measure(plan_of(rows, [Task("x", 1, ("abc",))], together=True), Quiet())
    assert max(most) == 2
    assert all(one.closed for one in live)


def test_a_model_that_all_devices_cannot_share_costs_that_row_alone(
    pretender: type[Pretender], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(Pretender):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            if config.target_tp == 3:
                raise ModelError("9 heads")

    monkeypatch.setattr(run, "OurSystem", Picky)
    three = Devices(gpus=(0, 1, 2))
    rows = [Row(AR, "pair", ONE, DecodingConfig(method="ar")), Row("ar, all devices", "all devices", three)]
    watcher = Quiet()
    found = measure(plan_of(rows, [Task("x", 1, ("abc",))]), watcher)
    assert {s.row for s in found.samples} == {AR}
    assert any("9 heads" in said for said in watcher.said)
    assert len(measure(plan_of(rows, [Task("x", 1, ("abc",))], together=False), Quiet()).samples) == 1


def test_a_later_turn_goes_on_from_the_reply_and_sums_up(pretender: type[Pretender]) -> None:
    rows = [Row(AR, "pair", ONE, DecodingConfig(method="ar"))]
    found = measure(plan_of(rows, [Task("x", 1, ("abc", "de"))]), Quiet())
    first, second = pretender.prompts[-2:]
    assert second[: len(first) + 11] == [*first, *range(5, 16)]
    assert len(second) == len(first) + 11 + 2
    (sample,) = found.samples
    assert (sample.tokens, sample.late_tokens, sample.judged) == (22, 20, 20)
    assert sample.late_seconds == pytest.approx(1.0)
    assert sample.rate == pytest.approx(20)


def test_what_does_not_fit_is_left_out_and_told(pretender: type[Pretender]) -> None:
    rows = [Row(AR, "pair", ONE, DecodingConfig(method="ar"))]
    some = [Task("x", 1, ("abc", "d" * 190)), Task("x", 2, ("e" * 190,))]
    found = measure(plan_of(rows, some), Quiet())
    assert [(s.task, s.tokens) for s in found.samples] == [(1, 11)]
    assert found.skipped == ["x 1, turn 2", "x 2, turn 1"]
    with pytest.raises(RequestError, match="no prompt fits"):
        measure(plan_of([Row(SD, "pair", TWO, DecodingConfig(method="sd"))], some[1:]), Quiet())


# ---- what is made of it ----


def sample(row: str, task: int, rate: float, of: str = "x", **more: Any) -> Sample:
    return Sample(row, of, task, 0, 101, 10.0, 0.1, 100, 100 / rate, 0.0, **more)


def test_speedups_are_ratios_over_the_same_text() -> None:
    """Texts of very different speeds: the ratio of medians would be another."""
    rows = [Row(AR, "pair", ONE), Row(PEARL, "pair", TWO)]
    samples = [sample(AR, i, rate) for i, rate in enumerate((10.0, 100.0, 1000.0))]
    samples += [
        sample(PEARL, i, rate, judged=10, accepted=6, runs=2, steps=50) for i, rate in enumerate((20.0, 200.0, 1500.0))
    ]
    plain, fast = figures(plan_of(rows, []), Measured(samples))
    assert plain.speedup is not None
    assert fast.speedup is not None
    assert fast.rate is not None
    assert (plain.speedup.value, fast.speedup.value, fast.rate.value) == (1.0, 2.0, 200.0)
    assert (fast.acceptance, fast.tokens_per_run) == (0.6, 4.0)
    assert fast.tokens_per_step == fast.tokens / 150
    assert plain.acceptance is None


def test_auto_is_set_against_the_target_alone_at_its_fastest() -> None:
    """Where that is, its rate says; all tokens over all seconds of either, and the ratio of these."""
    rows = [Row(AR, "pair", ONE), Row(AUTO, "pair", TWO), Row(AR_ON_ALL, "all devices", TWO)]
    plain = [sample(AR, i, 10.0, of) for i in (1, 2) for of in "xy"]
    wide = [sample(AR_ON_ALL, i, 20.0 * i, of) for i in (1, 2) for of in "xy"]
    auto = [sample(AUTO, i, 20.0 * i * times, of) for i in (1, 2) for of, times in (("x", 2.0), ("y", 1.0))]
    plan = plan_of(rows, [])
    over = over_alone(plan, Measured([*plain, *auto, *wide]))
    assert over is not None
    assert (over.base, over.devices, over.base_rate, over.rate) == (AR_ON_ALL, "2 cores", 400 / 15, 400 / 11.25)
    assert (over.speedup.value, over.by_set["x"].value, over.by_set["y"].value) == (4 / 3, 2.0, 1.0)
    assert "(on 2 cores) 26.7: 1.33 times" in str(over)
    narrow = over_alone(plan, Measured([*plain, *auto]))
    assert narrow is not None
    assert (narrow.base, narrow.by_set["y"].value) == (AR, pytest.approx(8 / 3))
    assert over_alone(plan, Measured([*plain, *wide])) is None
    assert over_alone(plan, Measured(auto)) is None


def test_the_last_line_of_the_demo_agrees_with_itself(tmp_path: Path) -> None:
    """The ratio that it tells is the ratio of the two rates beside it, also where that is not the median of ratios."""
    rates = {AR: (50.0, 35.0, 20.0, 30.0), AUTO: (33.0, 40.0, 23.0, 36.0)}
    samples = [sample(row, i, rate) for row, all_of in rates.items() for i, rate in enumerate(all_of)]
    over = over_alone(plan_of([Row(name, "pair", ONE) for name in rates], []), Measured(samples))
    assert over is not None
    (tmp_path / "it.json").write_text(json.dumps({"over_alone": asdict(over)}))
    program = (Path(__file__).parents[1] / "scripts/demo").read_text().split("<<'PYTHON'\n")[1].split("\nPYTHON\n")[0]
    command = [sys.executable, "-", str(tmp_path / "it.json")]
    told = subprocess.run(command, input=program, capture_output=True, text=True, check=True).stdout
    alone, pearl_, times_ = map(float, re.findall(r"\d+\.\d+", told))
    assert pearl_ / alone == pytest.approx(times_, abs=0.01)


def test_latencies_are_medians_over_texts() -> None:
    """Of a text of several turns: the median of its p50, the largest of its p99."""
    turns = [Decoded((1, 2, 3), 0.1, 2, 0.2, None, p50, p99) for p50, p99 in ((0.01, 0.5), (0.03, 0.2), (None, None))]
    row = Row(AR, "pair", ONE)
    one = _sample(row, Task("x", 1, ("a",)), 0, turns, 0.0)
    assert (one.itl_p50, one.itl_p99) == (0.02, 0.5)
    more = [sample(AR, i, 10.0, itl_p50=0.02, itl_p99=p99) for i, p99 in enumerate((0.1, 0.3, None))]
    (found,) = figures(plan_of([row], []), Measured([one, *more]))
    assert (found.itl_p50, found.itl_p99) == (0.02, 0.3)


def test_a_text_of_one_commit_has_no_rate() -> None:
    rows = [Row(AR, "pair", ONE)]
    one = replace(sample(AR, 1, 10.0), late_tokens=0, late_seconds=0.0)
    (found,) = figures(plan_of(rows, []), Measured([one]))
    assert (found.rate, found.speedup, found.tokens) == (None, None, 101)


def test_the_document_says_what_was_measured_and_is_drawn(tmp_path: Path) -> None:
    rows = [Row(AR, "pair", ONE), Row(PEARL, "pair", TWO)]
    some = [Task("x", 1, ("a",)), Task("y", 1, ("a",))]
    samples = [sample(row, 1, rate, of) for row, rate in ((AR, 10.0), (PEARL, 20.0)) for of in "xy"]
    made = json.loads(json.dumps(document(plan_of(rows, some), Measured(samples), 3.0, Taken(0.0, 0.0))))
    assert made["settings"]["sets"] == {"x": 1, "y": 1}
    assert made["rows"][1]["by_set"]["y"]["value"] == 2
    assert len(made["texts"]) == 4
    plots.draw(made, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("bad", [[], {}, {"kind": "bench"}, {"kind": "paper", "tables": {"1": [{}]}}])
def test_what_is_no_result_is_not_drawn(bad: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="result"):
        plots.draw(bad, tmp_path / "no.png")
    assert not (tmp_path / "no.png").exists()


# ---- real processes ----


def test_an_emulated_run_says_what_its_simulation_says() -> None:
    """The text of `sd`, which has bonus tokens, is also its window's; that of `pearl` is not."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
    with Engine(config=PACED) as engine:
        for method, gamma in (("ar", None), ("sd", 3), ("pearl", None)):
            decoding = DecodingConfig(method=method, gamma=gamma)
            real = engine.generate("hello", params, decoding=decoding)[0]
            virtual = simulated(PACED, decoding, engine.encode("hello"), params)
            assert real.tokens == virtual.tokens
            assert real.statistics.seconds >= 0.99 * virtual.seconds, "nothing is faster than what costs nothing"


def test_a_row_does_not_profit_from_the_one_before(system: OurSystem) -> None:
    """The same prompt again would find itself in the KV cache."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=5)
    for decoding in (DecodingConfig(method="pearl"), DecodingConfig(method="ar")):
        cached = []
        for again in (False, False, True):
            if not again:
                system.forget(decoding, [0, 6, 7, 8])
            statistics = system.decode(decoding, [0, 6, 7, 8], params).statistics
            assert statistics is not None
            cached.append(statistics.num_cached_tokens)
        assert cached == [0, 0, 3]


def test_bench_on_an_emulated_pair(tmp_path: Path) -> None:
    """The command, with its JSON and its picture."""
    path, config = tmp_path / "bench.json", tmp_path / "toy.yaml"
    config.write_text(f"target: {TOY}\ndraft: {TOY}\ntarget_pace: 0.004\ndraft_pace: 0.001\nmethod: pearl\n")
    done = pearl("bench", "--config", config, "--limit", 2, "--max-tokens", 30, "--json", path)
    assert done.exit_code == 0, done.output
    for row in ("ar", "sd, gamma", "pearl-no-pre-verify", "pearl-no-post-verify", "pearl, fixed(", "lated"):
        assert row in done.output
    made = json.loads(path.read_text())
    assert [row["name"] for row in made["rows"]] == [
        AR,
        SD,
        SSD,
        "pearl-no-pre-verify",
        "pearl-no-post-verify",
        FIXED,
        PEARL,
        NGRAM,
        AHEAD,
        AUTO,
    ]
    assert all(0 < row["of_simulated"]["value"] <= 1.01 for row in made["rows"])
    assert pearl("bench", "plot", path, "--png", tmp_path / "it.png").exit_code == 0
    assert (tmp_path / "it.png").stat().st_size > 10_000


@pytest.mark.slow
def test_bench_on_prompts(tiny_pair: EngineConfig, tmp_path: Path) -> None:
    """A pair of checkpoints, two sets, one of them of two turns, and transformers beside it: all say the same."""
    rows = ("ar", "sd", "pearl", "ar, all devices", "generate, assisted", "generate, prompt lookup")
    asked = [argument for row in rows for argument in ("--rows", row)]
    (tmp_path / "one.jsonl").write_text('{"prompt": "an"}\n')
    (tmp_path / "two.jsonl").write_text('{"turns": ["the", "and"]}\n')
    files = ("--prompts", tmp_path / "one.jsonl", "--prompts", f"b={tmp_path / 'two.jsonl'}")
    models = ("--target", tiny_pair.target, "--draft", tiny_pair.draft)
    done = pearl("bench", *models, *files, *asked, "--max-tokens", 12, "--json", tmp_path / "it.json")
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "it.json").read_text())
    assert [row["name"] for row in made["rows"]] == list(rows)
    for of in ("one", "b"):
        tokens = {text["tokens"] for text in made["texts"] if text["set"] == of}
        assert len(tokens) == 1, "greedy text is the target's, whoever decodes it"
    assert made["gamma"]["best"] == int(max(made["gamma"]["tried"], key=made["gamma"]["tried"].get))
    assert made["rows"][0]["speedup"]["value"] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--draft", "none"), "nothing to compare"),
        (("--method", "sd"), "--rows"),
        (("--rows", "fast"), "there are ar; sd"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--prompts", "a=/x", "--prompts", "a=/y"), "/x"),
        (("--limit", "0"), "--limit"),
        (("--quick", "plot", "x", "--png", "y"), "go behind it: pearl bench plot"),
        (("plot", "/nowhere.json", "--png", "/tmp/no.png"), "cannot read /nowhere.json"),
        (("paper", "--pair", "GPT"), "no pair is called 'GPT'"),
        (("paper", "--pairs", "/nowhere.yaml"), "cannot read the pairs"),
    ],
)
def test_wrong_input_is_told(arguments: tuple[str, ...], told: str) -> None:
    done = pearl("bench", *arguments)
    assert done.exit_code
    assert told in done.output + str(done.exception)


# ---- the paper ----


def test_the_pairs_are_the_papers() -> None:
    """Seven of them, whose rates are those of Table 4 where it has them, and one with another vocabulary."""
    found = paper.pairs()
    assert [pair.published.speedup["pearl"] for pair in found[:7]] == [2.35, 3.79, 3.01, 2.75, 3.48, 2.87, 2.48]
    assert [pair.vocabulary for pair in found] == [32000, 32000, 32000, 32256, 32256, 32000, 32000, 128256]
    for pair in found:
        a, origin = pair.acceptance()
        assert (Path(__file__).parent.parent / "configs" / f"{pair.config}.yaml").exists()
        if pair.published.mean_accepted:
            assert origin == "from Table 4"
            assert 1 / (1 - a) == pytest.approx(pair.published.mean_accepted["pearl"])
        else:
            assert paper.Run("sd", pair.gamma).closed(pair) == pytest.approx(pair.published.speedup["sd"])


def test_what_was_measured_of_two_models_predicts_pearl() -> None:
    """Table 1 and 2 from Tables 4 and 7: no cell of PEARL is off by more than 6% in closed form."""
    for pair in paper.pairs()[:7]:
        predicted = paper.Run("pearl", pair.window).closed(pair)
        assert predicted == pytest.approx(pair.published.speedup["pearl"], rel=0.06)


def test_each_table_has_the_cells_of_the_paper() -> None:
    cells = {name: [cell for pair in paper.pairs() for cell in paper.wanted(pair, name)] for name in paper.TABLES}
    known = {name: sum(cell.paper is not None for cell in some) for name, some in cells.items()}
    # Table 1 has no row for its first, 1.00; PEARL's figure stands beside fixed and beside stream. Table 4's stands
    # beside either way to count.
    assert known == {"1": 25, "2": 11, "3": 12, "4": 16, "5": 15, "6": 15, "7": 7, "figure 2a": 2, "vocabulary": 0}
    assert not any(cell.run for some in cells.values() for cell in some if cell.label in paper.OTHERS)


def test_all_tables_take_less_than_forty_minutes() -> None:
    """By the closed forms, with what the command has for default values."""
    defaults = {option.name: option.default for option in cli_paper.paper.params}
    seconds = tables.expected_seconds(paper.pairs(), list(paper.TABLES), defaults["tokens"], defaults["repeats"])
    prompts = [tasks.Task("x", 1, ("?",))] * 8
    assert (
        seconds + baselines.expected_seconds(baselines.Baseline(prompts, 96)) < 36 * 60
    )  # what is not foreseen has four minutes


def pair_of(**published: Any) -> paper.Pair:
    speeds = {"target_speed": 250, "draft_speed": 1000, "window": 4, "gamma": 4}
    return paper.Pair.model_validate({"name": "p", "config": "toy", **speeds, **published})


def test_published_figures_settle_the_acceptance_rate_in_this_order() -> None:
    known = {"mean_accepted": {"pearl": 5.0}, "speedup": {"sd": 1.8, "pearl": 2.0}}
    assert pair_of(published=known).acceptance() == (pytest.approx(0.8), "from Table 4")
    del known["mean_accepted"]
    a, origin = pair_of(published=known).acceptance()
    assert theory.sd_improvement(a, 4, 1 / 4) == pytest.approx(1.8)
    assert origin == "fitted to the row of sd"
    with pytest.raises(ConfigError, match=r"no acceptance rate makes it 4\.5 times as fast"):
        pair_of(published={"speedup": {"sd": 4.5}}).acceptance()
    with pytest.raises(ConfigError, match="no published figure"):
        pair_of(published={"speedup": {"pearl": 2.0}}).acceptance()


@pytest.mark.parametrize(
    ("text", "told"),
    [("[", "not YAML"), ("a: 1", "valid list"), ("- {name: x}", "0.config"), ("- {nme: x}", "0.")],
)
def test_a_bad_file_of_pairs_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        paper.pairs(path)


@pytest.mark.slow
def test_the_tables_closed_form_simulator_and_runtime(tmp_path: Path) -> None:
    """They agree in every cell; the runtime has each, is never faster than its simulation, and tells where it lost."""
    file, out, page = tmp_path / "pairs.yaml", tmp_path / "it.json", tmp_path / "RESULTS.md"
    file.write_text(
        '- {name: Small, tables: ["1", "3", "4", "5", "figure 2a"], config: toy, vocabulary: 500, draft_speed: 1000,'
        " target_speed: 250, window: 4, gamma: 4, published: {speedup: {pearl: 2.5, sd: 1.9, lookahead: 1.1},"
        " mean_accepted: {pearl: 5}, windows: {3: 500}, idle: {draft: 0.004, target: 0.004}}}\n"
    )
    page.write_text("above\n<!-- paper -->\nstale\n<!-- /paper -->\nbelow\n")
    arguments = ("--pairs", file, "--tokens", 50, "--repeats", 1, "--no-baselines", "--results", page, "--json", out)
    done = pearl("bench", "paper", *arguments)
    assert done.exit_code == 0, done.output
    made = json.loads(out.read_text())
    assert made == json.loads((tmp_path / "paper.json").read_text())
    assert made["emulated"] is True
    assert list(made["tables"]) == ["1", "3", "4", "5", "7", "figure 2a", "vocabulary"]
    for cell in (cell for rows in made["tables"].values() for cell in rows if cell["label"] != "lookahead"):
        assert cell["runtime"] > 0
        if cell["theory"] is not None:
            assert cell["simulator"] == pytest.approx(cell["theory"], rel=0.02), cell
        if cell["of_simulated"]:
            assert cell["of_simulated"][2] <= 1.01
            assert sum(cell["lost"].values()) == pytest.approx(1 - cell["of_simulated"][0], abs=0.02)
    assert [cell["runtime"] for cell in made["tables"]["1"]][-1] is None
    written = page.read_text()
    assert written.startswith("above\n<!-- paper -->\nEMULATION")
    assert written.endswith("<!-- /paper -->\nbelow\n")
    assert "stale" not in written
    assert (tmp_path / "paper.png").stat().st_size > 10_000
    assert pearl("bench", "plot", out, "--png", tmp_path / "it.png").exit_code == 0
    again = pearl("bench", "paper", "--from", out)
    assert again.stdout == done.stdout, "an earlier run is printed as it was"


def test_simulating_alone_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "measure", None)
    done = pearl("bench", "paper", "--simulate-only", "--pair", "7B & 34B", "--table", "1", "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [cell["runtime"] for cell in made["tables"]["1"]] == [None] * 5
    assert [cell["simulator"] is None for cell in made["tables"]["1"]] == [False, False, False, True, True]


def test_the_page_says_what_its_run_has_measured() -> None:
    """Where it does not: `pearl bench paper --from paper.json --results RESULTS.md`, in its folder, writes it anew."""
    folder = Path(paper.__file__).parent
    page, run_ = (folder / "RESULTS.md").read_text(), json.loads((folder / "paper.json").read_text())
    assert results.page_with(page, run_, "paper.png") == page
    cell = next(cell for cell in run_["tables"]["1"] if cell["runtime"])
    cell["runtime"] += 1.0
    assert results.page_with(page, run_, "paper.png") != page, "a figure that changes changes the page"


def test_a_page_without_a_place_for_the_tables_is_told() -> None:
    with pytest.raises(ConfigError, match="between which"):
        results.page_with("nothing", {}, None)


def test_what_falls_short_is_told_with_its_reason() -> None:
    cell = {"pair": "A & B", "label": "sd, gamma 4", "of_simulated": [0.95, 0.94, 0.96], "lost": {"waits": 0.04}}
    good = cell | {"label": "ar", "of_simulated": [0.99, 0.98, 0.99]}
    again = cell | {"label": "sd, gamma 4, accepted"}
    result = {"tables": {"1": [cell, good], "4": [again]}}
    assert results.short_cells(result) == ["A & B, sd, gamma 4: 0.950; 4.0% waits"]
    assert results.shares(result) == (2, 1)


# ---- other papers ----


def test_each_row_of_a_study_is_compared_with_one_of_it() -> None:
    for about in others.STUDIES.values():
        labels = [row.label for row in about.rows]
        assert len(labels) == len(set(labels))
        assert {row.base for row in about.rows} <= set(labels)
        assert about.differs
        assert about.left_out


def test_a_row_of_a_study_adds_its_texts_up() -> None:
    """Rejections, their expectation and its deviation, as of one long text; runs with mean and deviation."""
    plain = [Statistics(tokens_per_second=10.0), Statistics(tokens_per_second=20.0)]
    own = [
        Statistics(
            tokens_per_second=rate,
            num_generated_tokens=30,
            num_judged_draft_tokens=20,
            num_accepted_draft_tokens=15,
            num_rejections=5,
            expected_rejections=4.0,
            expected_rejections_sd=3.0 if rate == 20.0 else 4.0,
            bias=1.0,
            run_histogram={"1": 1, "3": 1},
            target_steps={"prefill": 1, "pre-verify": 5, "post-verify": 10},
        )
        for rate in (20.0, 40.0)
    ]
    found = others._figures(others.STUDIES["theory"].rows[1], own, plain)
    assert found["speedup"] == [2.0, 2.0, 2.0]
    assert found["tokens_per_step"] == 2.0
    assert found["acceptance"] == 0.75
    assert found["run"] == [2.0, 1.0]
    assert (found["rejected"], found["expected"], found["sd"], found["bias"]) == (10, 8.0, 5.0, 0.05)
    words = others.in_words([found])[0]
    assert words[0] == "ratio"
    assert words[2:] == ["2.00 (2.00-2.00)", "2.00", "0.75", "2.0, sd 1.0", "10: 8.0, sd 5.0, of 40", "0.050", ""]


@pytest.mark.slow
def test_a_study_of_another_paper(tmp_path: Path) -> None:
    """On a pair of toys in place of the embedded one, of which no token is impossible."""
    config = EngineConfig(target=TOY + ",coin=1", draft=TOY + ",coin=1")
    with Bars(Console(file=(tmp_path / "log").open("w"))) as bars:
        found = others.study("theory", [Task("x", 1, ("hello",))], 60, bars, config)
    assert [one["label"] for one in found] == [row.label for row in others.STUDIES["theory"].rows]
    ar, ratio, *relaxed = found
    assert ar["speedup"] == [1.0, 1.0, 1.0]
    assert ar["expected"] is None
    assert ratio["bias"] == 0
    assert ratio["tokens_per_step"] > 1
    assert all((one["bias"] > 0) == (not one["label"].startswith("batch")) for one in relaxed)
    assert len(others.in_words(found)[0]) == len(others.COLUMNS)


@pytest.mark.slow
def test_a_study_whose_texts_are_read(tmp_path: Path) -> None:
    """Perplexity of what each row wrote; and joint greedy decoding, of which more tokens a step are no less likely."""
    config = EngineConfig(target=TOY, draft=TOY)
    with Bars(Console(file=(tmp_path / "log").open("w"))) as bars:
        found = others.study("mjsd", [Task("x", 1, ("hello",))], 24, bars, config)
    assert len(found) == len(others.STUDIES["mjsd"].rows) + len(others.JOINT)
    assert all(one["perplexity"] >= 1 for one in found)
    ar, *_ = found
    greedy, *joint = found[-len(others.JOINT) :]
    assert all(one["perplexity"] < ar["perplexity"] for one in (greedy, *joint)), "sampling is no search"
    assert greedy["speedup"] is None
    assert {len(words) for words in others.in_words(found)} == {len(others.COLUMNS)}


# ---- calibration ----


def test_calibration_of_an_emulated_pair(tmp_path: Path) -> None:
    """No forward is shorter than its pace; what is predicted is what the simulator has for these times."""
    arguments = ("--target", TOY, "--draft", TOY, "--target-pace", 0.008, "--draft-pace", 0.002)
    done = pearl("calibrate", *arguments, "--limit", 2, "--max-tokens", 40, "--json", tmp_path / "it.json")
    assert done.exit_code == 0, done.output
    for word in ("t_draft", "t_target(1)", "both at work", "acceptance", "--method"):
        assert word in done.output
    made = json.loads((tmp_path / "it.json").read_text())
    for of in (made["alone"], made["both"]):
        assert of["draft"] >= 0.002
        assert all(seconds >= 0.008 for seconds in of["target"].values())
        assert of["draft_step"] >= of["draft"] * 0.9
    assert {"1", "2", "4", "8"} <= set(made["alone"]["target"])
    assert 0.2 < made["acceptance"] < 0.8, "0.5 is the toy's"
    methods = [verdict["method"].partition(",")[0] for verdict in made["verdicts"]]
    assert methods[:6] == ["ar", "sd", "pearl-no-pre-verify", "pearl-no-post-verify", "pearl", "pearl"]
    assert {"ngram", "pearl"} <= set(methods[6:])
    for verdict in made["verdicts"][2:]:
        assert 0 < verdict["measured"]["low"] <= verdict["measured"]["value"] <= verdict["measured"]["high"]


@pytest.mark.slow
def test_calibration_tries_the_target_on_all_devices(tiny_pair: EngineConfig) -> None:
    models = ("--target", tiny_pair.target, "--draft", tiny_pair.draft)
    done = pearl("calibrate", *models, "--limit", 1, "--max-tokens", 32, "--json", "-")
    assert done.exit_code == 0, done.output
    wide = json.loads(done.stdout)["verdicts"][-2:]
    assert [(v["method"], v["predicted"]) for v in wide] == [("ar, all devices", None), ("ngram, all devices", None)]
    assert all(v["measured"]["value"] > 0 for v in wide)


@pytest.mark.parametrize("others", [0.01, 0.2])
def test_a_calibration_that_is_noise_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: float
) -> None:
    """The engines after it would begin with its figures."""
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path))
    ar = Verdict("ar", 1.0, about(1, 0))
    known = Profile(gain=1.0, comparisons=8.0)
    found = calibrate.Calibration(times(1, 5), times(1, 5), 0.8, False, 5, 9.0, (ar,), None, "words", "flags", known)
    monkeypatch.setattr("pearl.lab.bench.calibrate.calibrate", lambda *_: found)
    monkeypatch.setattr("pearl.lab.bench.run.check_comparable", lambda _: None)
    monkeypatch.setattr(machine.Stolen, "taken", lambda _: machine.Taken(0.0, others))
    done = pearl("calibrate", "--target", str(tmp_path), "--draft", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "profiles").exists() == ("not kept" not in done.output) == (others < 0.05)


def times(draft: float, target: float) -> Times:
    return Times(draft, {1: target}, draft, {1: target})


def test_a_good_draft_pays_and_a_bad_one_does_not() -> None:
    good = calibrate._verdicts(times(1, 5), times(1, 5), 0.8, {})
    by_name = {v.method: v.predicted for v in good}
    assert by_name["pearl, fixed"] == pytest.approx(theory.pearl_tokens_per_step(0.8, 5), rel=0.02)
    words, flags = calibrate._advice(good, EngineConfig())
    assert "as predicted" in words
    assert flags == "--method pearl --window fixed --look-ahead 0 --draft-lookup 0 --branches 0"
    bad = calibrate._verdicts(times(1, 1), times(1.5, 1.5), 0.3, {})
    words, flags = calibrate._advice(bad, EngineConfig())
    assert "nothing is faster" in words
    assert flags == "--draft none --method ar"


def test_it_pays_from_a_rate_that_shared_memory_raises() -> None:
    alone = calibrate._pays_from(times(1, 5), times(1, 5))
    shared = calibrate._pays_from(times(1, 5), times(1.3, 6.5))
    assert alone is not None
    assert shared is not None
    assert 0 < alone < shared < 1
    assert calibrate._pays_from(times(1, 1), times(2, 2)) is None


def about(value: float, by: float = 0.05) -> Interval:
    return Interval(value, value - by, value + by)


def test_advice_goes_by_what_was_measured() -> None:
    def advice(*verdicts: Verdict) -> tuple[str, str]:
        return calibrate._advice([Verdict("ar", 1.0, about(1, 0)), *verdicts], EngineConfig())

    stream, wide = Verdict("pearl, stream", 2.0, about(1.1)), Verdict("ar, all devices", None, about(1.5))
    words, flags = advice(stream, wide)
    assert "no draft pays here; ar, all devices: 1.50" in words
    assert flags.startswith("--draft none --method ar --target-device cpu:")
    assert advice(stream, Verdict("ngram", None, about(1.4)))[1] == "--draft none --method ngram"
    assert advice(stream, Verdict("pearl, ahead", None, about(1.4))) == (
        "pearl, ahead: 1.40 times as fast as the target alone, as measured",
        "--method pearl",
    )
    assert advice(stream)[1] == "--method pearl --window stream --look-ahead 0 --draft-lookup 0 --branches 0"
    assert advice(stream, Verdict("sd, gamma 3", 1.3, None))[1] == "--method sd --gamma 3"
    assert "nothing is faster" in advice(Verdict("pearl, stream", 2.0, about(1.1, 0.2)))[0], "1 lies in the interval"


def test_a_tie_is_called_a_tie() -> None:
    rows = [
        Verdict("ar", 1.0, about(1, 0)),
        Verdict("ngram", None, about(1.4)),
        Verdict("pearl, ahead", None, about(1.44)),
    ]
    assert "not told apart from ngram" in calibrate._advice(rows, EngineConfig())[0]
    rows[1] = Verdict("ngram", None, about(1.2))
    assert "told apart" not in calibrate._advice(rows, EngineConfig())[0]


def test_calibration_needs_a_pair_and_a_text() -> None:
    assert "no pair" in str(pearl("calibrate", "--draft", "none").exception)
    arguments = ("--target", TOY, "--draft", TOY, "--limit", 1, "--max-tokens", 1)
    assert "ended too soon" in str(pearl("calibrate", *arguments).exception)


def test_a_draft_that_is_always_right_is_calibrated_too() -> None:
    """Then the target hardly ever verifies a single token."""
    right = "toy:vocab=32,alpha=1,context=512"
    arguments = ("--target", right, "--draft", right, "--target-pace", 0.004, "--draft-pace", 0.001)
    done = pearl("calibrate", *arguments, "--limit", 1, "--max-tokens", 60, "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["acceptance"] == 1
    assert made["ratio"] > 1


def test_rows_for_a_pair_on_two_devices() -> None:
    names = [row.name for row in rows_for(EngineConfig(target_device="cpu:0", draft_device="cpu:1"), baselines=True)]
    assert names[:7] == [AR, SD, SSD, "pearl-no-pre-verify", "pearl-no-post-verify", FIXED, PEARL]
    assert names[7:10] == [NGRAM, AHEAD, AUTO]
    assert names[10:12] == ["ar, all devices", "ngram, all devices"]
    assert names[12:] == ["generate", "generate, all devices", "generate, assisted", "generate, prompt lookup"]


def test_rows_for_a_pair_that_shares_its_device_have_no_second_ar() -> None:
    shared = rows_for(EngineConfig(target_device="cpu:0", draft_device="cpu:0"), baselines=True)
    assert "ar, all devices" not in [row.name for row in shared]
    assert "generate, assisted" in [row.name for row in shared]


@pytest.mark.slow
def test_a_row_on_all_devices_can_be_asked_for_where_the_target_has_them(
    tiny_pair: EngineConfig, tmp_path: Path
) -> None:
    (tmp_path / "some.jsonl").write_text('{"prompt": "an"}\n')
    where = ("--target-device", "cpu:0", "--draft-device", "cpu:0", "--prompts", tmp_path / "some.jsonl")
    asked = ("--rows", "auto", "--rows", AR_ON_ALL, "--max-tokens", 8, "--json", tmp_path / "it.json")
    done = pearl("bench", "--target", tiny_pair.target, "--draft", tiny_pair.draft, *where, *asked)
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "it.json").read_text())
    assert [row["name"] for row in made["rows"]] == [AR, AUTO]
    assert made["over_alone"]["base"] == AR
