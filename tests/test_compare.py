"""`pearl compare`: settings named in a line; bias, perplexity and energy; the table and the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from pearl.cli import cli
from pearl.config import DecodingConfig, EngineConfig
from pearl.errors import ConfigError
from pearl.lab.bench import energy
from pearl.lab.bench.energy import Meter
from pearl.lab.bench.figures import Surprise
from pearl.lab.bench.rows import COMPARED, named_rows, parse_settings
from pearl.lab.bench.runner import Text
from pearl.models.toy import ToyRunner, alpha_pair
from tests.conftest import TOY

SLOW_TOY = ["--target", TOY, "--draft", TOY, "--raw", "--ignore-eos", "--max-tokens", "40"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *arguments], catch_exceptions=True)


# ---- naming ----


def test_a_row_is_a_method_and_its_settings() -> None:
    for text, settings in {
        "ar": {"method": "ar"},
        "pearl,rule=opt,epsilon=0.1": {"method": "pearl", "rule": "opt", "epsilon": 0.1},
        "sd,gamma=4,draft-stop=threshold,confidence=0.5": {
            "method": "sd",
            "gamma": 4,
            "draft_stop": "threshold",
            "confidence": 0.5,
        },
        "published": {"method": "pearl", "look_ahead": 0, "draft_lookup": 0, "branches": 0},
    }.items():
        assert parse_settings(text) == DecodingConfig(**settings)  # type: ignore[arg-type]
    assert parse_settings("pearl,branches=off").guesses[2] == 0
    assert all(parse_settings(name) for name in COMPARED)
    rows = named_rows(EngineConfig(target=TOY, draft=TOY), ["sd", "ar", "ngram"])
    assert [row.name for row in rows] == ["ar", "sd", "ngram"], "ar is there once and first"


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("perl", "method"),
        ("pearl,rule=optt", "rule"),
        ("pearl,rule=opt,epsilon=2", "epsilon"),
        ("pearl,epsilon", "write METHOD,NAME=VALUE"),
        ("pearl,epsilon=0.1", "epsilon"),
        ("pearl,ruel=opt", "ruel"),
        ("ar,look_ahead=3", "look_ahead"),
        ("", "method"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(way: str, message: str) -> None:
    error = invoke("sd", way, *SLOW_TOY).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sd", "sd"], "'sd' is named twice"),
        (["sd", "--rule", "opt"], "--rule: say it with each way"),
        (["sd", "--draft", "none"], "'sd' needs a draft"),
        (["ar", "--max-context", "20"], "no prompt fits the context"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(arguments: list[str], message: str) -> None:
    error = invoke(*SLOW_TOY, *arguments).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)


# ---- figures ----


def test_a_surprise_is_the_targets_own_probability() -> None:
    """Against the distributions of which the toy is made, over more positions than one forward takes."""
    target, _ = alpha_pair(16, 0.7, order=2)
    prompt, tokens = (1, 2, 3), list[int]()
    generator = torch.Generator().manual_seed(1)
    while len(tokens) < 150:
        tokens.append(int(torch.multinomial(target([*prompt, *tokens]), 1, generator=generator)))
    wanted = -sum(math.log(target([*prompt, *tokens[:i]])[token]) for i, token in enumerate(tokens))
    surprise = Surprise(EngineConfig(target=TOY, draft=TOY), ToyRunner(16, target))
    assert surprise(Text("ar", prompt, tuple(tokens))) == pytest.approx(wanted, rel=1e-4)
    assert surprise(Text("sd", prompt[:1], tuple(tokens[:1]))) == pytest.approx(-math.log(target([1])[tokens[0]]))


def test_a_biased_row_is_shown_with_its_bias(tmp_path: Path) -> None:
    """Three real rows, of which one is biased: its figure is that of its statistics; the picture has them all."""
    path, png, prompts = tmp_path / "it.json", tmp_path / "it.png", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "123"}\n{"prompt": "4567"}\n')
    ways = ["published", "published,rule=opt,epsilon=0.3", "pearl,rule=coupled"]
    pair = TOY + ",coin=1"  # no token of it is impossible, so relaxed acceptance applies
    files = ["--prompts", str(prompts), "--json", str(path), "--png", str(png)]
    result = invoke(*ways, *SLOW_TOY, "--target", pair, "--draft", pair, *files)
    assert result.exception is None, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "exact" in lines["ar"]
    assert "exact" in lines["pearl,rule=coupled"]
    assert "biased by 0." in lines["published,rule=opt,epsilon=0.3"]
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert [*rows] == ["ar", *ways]
    assert {name: row["exact"] for name, row in rows.items()} == dict.fromkeys(rows, True) | {ways[1]: False}
    bias = rows[ways[1]]["bias"]
    assert 0 < bias["low"] <= bias["value"] <= bias["high"] < 1
    assert all(rows[name]["bias"]["value"] == 0 for name in rows if name != ways[1])
    assert rows["ar"]["speedup"]["value"] == 1
    # Half the tokens of a toy have no probability: biased texts have some of these.
    assert rows["ar"]["perplexity"]["value"] == rows[ways[2]]["perplexity"]["value"] < 32
    assert rows[ways[1]]["perplexity"]["value"] > rows["ar"]["perplexity"]["value"]
    assert document["settings"]["sampling"]["temperature"] == 1
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "energy: no counters here" in result.stdout or document["energy_of"]


# ---- energy ----


def domain(folder: Path, name: str, microjoules: int, largest: int = 10**9) -> Path:
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    return folder


def test_the_energy_of_a_processor(tmp_path: Path) -> None:
    """Packages and memory; cores are in their package's count, and a platform's would count all twice."""
    first = domain(tmp_path / "intel-rapl:0", "package-0", 999_000_000)
    second = domain(tmp_path / "intel-rapl:1", "package-1", 5)
    memory = domain(tmp_path / "intel-rapl:0:1", "dram", 0)
    for folder, name in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys")):
        domain(tmp_path / folder, name, 7)
    meter = Meter((), cores=True, powercap=tmp_path)
    assert (meter.source, meter.joules()) == ("processor (RAPL)", 0)
    (first / "energy_uj").write_text("1999999\n")  # of 10**9 + 1: it wrapped around
    (second / "energy_uj").write_text("500005\n")
    (memory / "energy_uj").write_text("250000\n")
    assert meter.joules() == pytest.approx(3.0 + 0.5 + 0.25)
    (memory / "energy_uj").write_text("")
    assert meter.joules() is None


def test_a_part_of_the_energy_is_not_taken_for_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for meter in (Meter((), cores=True, powercap=tmp_path), Meter((), cores=False, powercap=tmp_path)):
        assert (meter.source, meter.joules()) == ("", None)
    domain(tmp_path / "intel-rapl:0", "package-0", 1)
    monkeypatch.setattr(energy, "_gpu_counters", lambda gpus: [])
    assert Meter((0,), cores=True, powercap=tmp_path).source == ""
    monkeypatch.setattr(energy, "_gpu_counters", lambda gpus: [lambda: 2.0] * len(gpus))
    both = Meter((0, 1), cores=True, powercap=tmp_path)
    assert (both.source, both.joules()) == ("2 GPUs (NVML) and processor (RAPL)", 4.0)


def test_gpus_are_found_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML numbers all cards of a host, torch the visible ones; its counter is in millijoules."""

    class Nvml:
        NVMLError = type("NVMLError", (Exception,), {})

        @staticmethod
        def nvmlInit() -> None: ...

        @staticmethod
        def nvmlDeviceGetHandleByUUID(name: str) -> str:
            return name

        @staticmethod
        def nvmlDeviceGetTotalEnergyConsumption(handle: str) -> int:
            if handle.endswith("old"):
                raise Nvml.NVMLError
            return {"GPU-a": 1500, "GPU-b": 500}[handle]

    class Properties:
        def __init__(self, number: int) -> None:
            self.uuid = ["a", "b", "old"][number]

    monkeypatch.setitem(__import__("sys").modules, "pynvml", Nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    assert Meter((0, 1), cores=False).joules() == 2.0
    assert Meter((0, 2), cores=False).source == ""
