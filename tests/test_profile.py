"""Profiles: what a calibration leaves for the engines that come after."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pearl.config import EngineConfig, SamplingParams
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.protocol.speeds import Profile, Speeds
from pearl.worker import profile
from tests.conftest import TOY
from tests.tiny import tiny_model

WAYS = (("ngram", 0.0, 4), ("pearl", 0.5, 4), ("sd", -0.4, 2), ("ssd", 0.0, 0))
FOUND = Profile(0.01, 0.6, ((1, 0.04), (4, 0.05)), ((1, 0.03),), "pearl", WAYS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path))
    return tmp_path


def test_what_is_kept_comes_back(cache: Path) -> None:
    config = EngineConfig(target=TOY, draft=TOY)
    assert profile.load(config) is None
    path = profile.save(config, FOUND)
    assert path.parent.parent == cache
    assert profile.load(config) == FOUND
    assert profile.load(config.model_copy(update={"profile": "none"})) is None
    assert profile.load(EngineConfig(target=TOY, draft=TOY, profile=str(path))) == FOUND


@pytest.mark.parametrize(
    "other",
    [
        {"draft": "toy:vocab=32,alpha=0.5"},
        {"target_dtype": "float32"},
        {"draft_device": "cpu:0"},
        {"forwards": "eager"},
        {"target_pace": 0.1},
    ],
)
def test_it_is_of_one_pair_on_its_devices(cache: Path, other: dict[str, Any]) -> None:
    profile.save(EngineConfig(target=TOY, draft=TOY), FOUND)
    assert profile.load(EngineConfig(**({"target": TOY, "draft": TOY} | other))) is None


def test_a_model_that_has_changed_is_another(cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = EngineConfig(target=str(model), draft=TOY)
    profile.save(config, FOUND)
    assert profile.load(config) == FOUND
    (model / "config.json").write_text('{"a": 1}')
    assert profile.load(config) is None


def test_another_number_of_threads_or_cores_is_another_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(target=TOY, draft=TOY)
    profile.save(config, FOUND)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert profile.load(config) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: "{",
        lambda d: "[]",
        lambda d: "[" * 100_000,
        lambda d: json.dumps(d | {"format": 1}),
        lambda d: json.dumps(d | {"profile": {"t_draft": "fast"}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"t_draft": -1}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"t_target": [[1, 1e300]]}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"best": "guess"}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"ways": [["pearl", 1e9, 1]]}}),
    ],
)
def test_a_damaged_one_is_refused_where_it_is_named_and_passed_over_elsewhere(
    cache: Path, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(target=TOY, draft=TOY)
    path = profile.save(config, FOUND)
    path.write_text(spoil(json.loads(path.read_text())))
    assert profile.load(config) is None
    assert str(path) in caplog.text
    with pytest.raises(ConfigError, match=r"profile .*\.json"):
        Engine(TOY, TOY, profile=str(path))


def test_one_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Engine(TOY, TOY, profile=str(tmp_path / "none.json"))


def test_speeds_and_profile_are_inverse() -> None:
    assert Speeds.of(FOUND).profile == FOUND
    speeds = Speeds.of(FOUND)
    assert speeds.auto.begin(40) == "pearl"
    speeds.spread(True)
    assert speeds.t_target(1) == 0.03
    assert speeds.profile == FOUND, "whichever cores the target has at the moment"


def test_an_engine_begins_with_it(cache: Path, tmp_path: Path) -> None:
    """The draft does not rest first, for it is known to pay; and of the target's times what was known is there."""
    path = tmp_path / "profile.json"
    known = Profile(0.01, 0.6, ((200, 0.25),), (), "pearl", WAYS)  # no forward is fed so many
    config = EngineConfig(target=TOY, draft=TOY)
    path.write_text(profile.save(config, known).read_text())
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with Engine(TOY, TOY, profile=str(path)) as engine:
        assert engine.welcome.t_target == ((200, 0.25),), "what is known is not measured again"
        (result,) = engine.generate([[1, 2, 3]], params, method="auto")
    s = result.statistics
    assert s.num_tokens_without_draft == 0
    assert s.draft_speedup == pytest.approx(1.649, abs=0.01)
    assert s.t_target["200"] == 0.25


def measured(**settings: Any) -> tuple[tuple[int, float], ...]:
    """What an engine of a pair knows of its target's times when it has started."""
    with Engine(str(tiny_model("llama")), str(tiny_model("qwen2")), max_context=64, **settings) as engine:
        assert engine.welcome.t_draft > 0
        return engine.welcome.t_target


def test_what_a_start_has_measured_the_next_one_does_not(cache: Path) -> None:
    first = measured()
    assert [fed for fed, _ in first] == [1, 2, 4, 8]
    (file,) = (cache / "profiles").iterdir()
    written = file.read_text()
    assert measured() == first
    assert file.read_text() == written
    assert measured(profile="none") != first, "no two measurements are equal"
    assert measured(target_dtype="float32", draft_dtype="float32") != first
    file.write_text(written[:99])
    assert measured() != first
    file.write_text(written)
    os.utime(file, (1, 1))
    (other := file.with_name("other-times.json")).touch()
    os.utime(other, (1, 1))
    assert measured() != first, "of long ago"
    assert file.read_text() != written
    assert not other.exists(), "nobody takes it any more"


def test_a_profile_goes_before_what_a_start_has_measured(cache: Path) -> None:
    pair = {"target": str(tiny_model("llama")), "draft": str(tiny_model("qwen2")), "max_context": 64}
    measured()
    profile.save(EngineConfig(**pair), FOUND)
    assert measured() == FOUND.t_target


def test_of_toys_nothing_is_kept(cache: Path) -> None:
    with Engine(TOY, TOY):
        pass
    assert not (cache / "profiles").exists()
