"""Benchmarks, the paper's tables and calibration: what is measured, in which order, and what is made of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from pearl import SamplingParams
from pearl.cli import cli
from pearl.config import DecodingConfig, EngineConfig
from pearl.engine import Engine
from pearl.errors import ConfigError, ModelError, RequestError, StartError
from pearl.lab import theory
from pearl.lab.bench import calibrate, paper, plots, run, tasks
from pearl.lab.bench.calibrate import ALL_DEVICES, Times, Verdict
from pearl.lab.bench.emulation import simulated
from pearl.lab.bench.interval import bootstrapped, median_of
from pearl.lab.bench.machine import Stolen, hardware, in_words
from pearl.lab.bench.run import AR, FIXED, PEARL, SD, Measured, Plan, Row, Sample, measure, rows_for
from pearl.lab.bench.summary import document, figures
from pearl.lab.bench.systems import Decoded, Devices, Generate, OurSystem, devices_of
from pearl.lab.bench.tasks import Task, read_tasks
from pearl.metrics import Statistics
from pearl.models.tokenizer import GenerationDefaults
from tests.conftest import TOY
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
    assert 0 <= Stolen().share <= 1


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
    with pytest.raises(ConfigError, match=r"pearl-runtime\[bench\]"):
        read_tasks("humaneval", None, None)


def test_files_of_prompts_questions_and_turns(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b", "answer": "no"}\n\n{"turns": ["c", "d"]}\n')
    assert [task.turns for task in read_tasks("some", path, None)] == [("a",), ("b",), ("c", "d")]
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
            draft_acceptance_rate=0.8,
            num_judged_draft_tokens=10,
            num_accepted_draft_tokens=8,
            acceptance_histogram={"4": 2},
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
    samples += [sample(PEARL, i, rate, judged=10, accepted=6, runs=2) for i, rate in enumerate((20.0, 200.0, 1500.0))]
    plain, fast = figures(plan_of(rows, []), Measured(samples))
    assert plain.speedup is not None
    assert fast.speedup is not None
    assert fast.rate is not None
    assert (plain.speedup.value, fast.speedup.value, fast.rate.value) == (1.0, 2.0, 200.0)
    assert (fast.acceptance, fast.tokens_per_run) == (0.6, 4.0)
    assert plain.acceptance is None


def test_a_text_of_one_commit_has_no_rate() -> None:
    rows = [Row(AR, "pair", ONE)]
    one = replace(sample(AR, 1, 10.0), late_tokens=0, late_seconds=0.0)
    (found,) = figures(plan_of(rows, []), Measured([one]))
    assert (found.rate, found.speedup, found.tokens) == (None, None, 101)


def test_the_document_says_what_was_measured_and_is_drawn(tmp_path: Path) -> None:
    rows = [Row(AR, "pair", ONE), Row(PEARL, "pair", TWO)]
    some = [Task("x", 1, ("a",)), Task("y", 1, ("a",))]
    samples = [sample(row, 1, rate, of) for row, rate in ((AR, 10.0), (PEARL, 20.0)) for of in "xy"]
    made = json.loads(json.dumps(document(plan_of(rows, some), Measured(samples), 3.0, 0.0)))
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
        "pearl-no-pre-verify",
        "pearl-no-post-verify",
        FIXED,
        PEARL,
    ]
    assert all(0 < row["of_simulated"]["value"] <= 1.01 for row in made["rows"])
    assert pearl("bench", "plot", path, "--png", tmp_path / "it.png").exit_code == 0
    assert (tmp_path / "it.png").stat().st_size > 10_000


@pytest.mark.slow
def test_bench_on_prompts(tiny_pair: EngineConfig, tmp_path: Path) -> None:
    """A pair of checkpoints, two sets, one of them of two turns, and transformers beside it: all say the same."""
    rows = ("ar", "sd", "pearl", "ar, all devices", "generate, assisted")
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
    """Table 1's speeds, and acceptance rates that make them."""
    found = paper.pairs()
    assert [pair.published.speedup["pearl"] for pair in found] == [2.35, 3.79, 3.01, 2.75, 3.48]
    for pair in found:
        a, origin = pair.acceptance()
        assert theory.pearl_tokens_per_step(a, pair.window) == pytest.approx(pair.published.speedup["pearl"], abs=1e-6)
        assert "fitted" in origin
        assert (Path(__file__).parent.parent / "configs" / f"{pair.config}.yaml").exists()


def pair_of(**published: Any) -> paper.Pair:
    return paper.Pair.model_validate({"name": "p", "config": "toy", "t_target": 0.004, "c": 4, "gamma": 4, **published})


def test_published_figures_settle_the_acceptance_rate_in_this_order() -> None:
    known = {"mean_accepted": {"pearl": 5.0}, "speedup": {"sd": 1.8, "pearl": 2.0}}
    assert pair_of(published=known).acceptance() == (pytest.approx(0.8), "from the mean accepted tokens")
    del known["mean_accepted"]
    a, origin = pair_of(published=known).acceptance()
    assert theory.sd_improvement(a, 4, 1 / 4) == pytest.approx(1.8)
    assert origin == "fitted to sd's speed"
    with pytest.raises(ConfigError, match=r"no acceptance rate makes it 4\.5 times as fast"):
        pair_of(published={"speedup": {"pearl": 4.5}}).acceptance()
    with pytest.raises(ConfigError, match="no published figure"):
        pair_of().acceptance()


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
def test_the_tables_theory_simulator_and_runtime(tmp_path: Path) -> None:
    """Theory and simulator agree in every cell; the runtime has each, and is never faster than its simulation."""
    pairs, out = tmp_path / "pairs.yaml", tmp_path / "it.json"
    pairs.write_text(
        "- {name: Small, config: toy, t_target: 0.004, c: 4, gamma: 4, published: {speedup: {pearl: 2.5, sd: 1.9},"
        " windows: {3: 2.2}}}\n"
    )
    done = pearl("bench", "paper", "--pairs", pairs, "--tokens", 50, "--repeats", 1, "--json", out)
    assert done.exit_code == 0, done.output
    assert done.output.count("emulated") >= 4
    made = json.loads(out.read_text())
    assert made["emulated"] is True
    assert list(made["tables"]) == ["1", "3", "5", "6"]
    cells = [cell for rows in made["tables"].values() for cell in rows]
    assert all({"pair", "method", "paper", "theory", "simulator", "runtime"} <= set(cell) for cell in cells)
    for cell in cells:
        assert cell["runtime"] > 0
        if cell["theory"] is not None:
            assert cell["simulator"] == pytest.approx(cell["theory"], rel=0.02), cell
        if cell["of_simulated"]:
            assert cell["of_simulated"][2] <= 1.01
    assert [cell["method"] for cell in made["tables"]["6"]] == [f"fixed({c})" for c in (2, 3, 4, 5, 6)]
    assert [cell["paper"] for cell in made["tables"]["6"]] == [None, 2.2, None, None, None]
    assert pearl("bench", "plot", out, "--png", tmp_path / "it.png").exit_code == 0


def test_simulating_alone_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "measure", None)
    done = pearl("bench", "paper", "--simulate-only", "--pair", "7B & 34B", "--table", "1", "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [cell["runtime"] for cell in made["tables"]["1"]] == [None, None, None]


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
    assert methods == ["ar", "sd", "pearl-no-pre-verify", "pearl-no-post-verify", "pearl", "pearl"]


@pytest.mark.slow
def test_calibration_tries_the_target_on_all_devices(tiny_pair: EngineConfig) -> None:
    models = ("--target", tiny_pair.target, "--draft", tiny_pair.draft)
    done = pearl("calibrate", *models, "--limit", 1, "--max-tokens", 32, "--json", "-")
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout)["verdicts"][-1]
    assert (last["method"], last["predicted"]) == (ALL_DEVICES, None)
    assert last["measured"] > 0


def times(draft: float, target: float) -> Times:
    return Times(draft, {1: target}, draft, {1: target})


def test_a_good_draft_pays_and_a_bad_one_does_not() -> None:
    good = calibrate._verdicts(times(1, 5), times(1, 5), 0.8, {})
    by_name = {v.method: v.predicted for v in good}
    assert by_name["pearl, fixed"] == pytest.approx(theory.pearl_tokens_per_step(0.8, 5), rel=0.02)
    assert "fixed" in calibrate._advice(good, EngineConfig())[1]
    bad = calibrate._verdicts(times(1, 1), times(1.5, 1.5), 0.3, {})
    words, flags = calibrate._advice(bad, EngineConfig())
    assert "does not pay" in words
    assert flags == "--draft none --method ar"


def test_it_pays_from_a_rate_that_shared_memory_raises() -> None:
    alone = calibrate._pays_from(times(1, 5), times(1, 5))
    shared = calibrate._pays_from(times(1, 5), times(1.3, 6.5))
    assert alone is not None
    assert shared is not None
    assert 0 < alone < shared < 1
    assert calibrate._pays_from(times(1, 1), times(2, 2)) is None


def test_all_devices_for_the_target_may_be_the_best_advice() -> None:
    verdicts = [Verdict("ar", 1.0, 1.0), Verdict("pearl, stream", 1.2, 1.1), Verdict(ALL_DEVICES, None, 1.5)]
    words, flags = calibrate._advice(verdicts, EngineConfig())
    assert "all devices" in words
    assert flags.startswith("--draft none --method ar --target-device cpu:")
    verdicts[-1] = Verdict(ALL_DEVICES, None, 1.1)
    assert calibrate._advice(verdicts, EngineConfig())[1] == "--method pearl --window stream"
    verdicts[1] = Verdict("sd, gamma 3", 1.3, None)
    assert calibrate._advice(verdicts, EngineConfig())[1] == "--method sd --gamma 3"


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
    assert names[:6] == [AR, SD, "pearl-no-pre-verify", "pearl-no-post-verify", FIXED, PEARL]
    assert names[6:] == ["ar, all devices", "generate", "generate, all devices", "generate, assisted"]


def test_rows_for_a_pair_that_shares_its_device_have_no_second_ar() -> None:
    shared = rows_for(EngineConfig(target_device="cpu:0", draft_device="cpu:0"), baselines=True)
    assert "ar, all devices" not in [row.name for row in shared]
    assert "generate, assisted" in [row.name for row in shared]
