"""Settings: which are refused and with what words; profiles; and that every configuration here is valid."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

from pearl.config import (
    SETTING_NAMES,
    EngineConfig,
    RequestOptions,
    SamplingParams,
    load_settings,
    read_file,
)
from pearl.config.option_names import bounds_of, sampling_of, type_of
from pearl.config.option_values import MAX_GRAMMAR
from pearl.config.options import OPTIONS
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.lab.distill.config import DistillConfig
from pearl.protocol.speeds import Cores, Profile, Speeds
from pearl.worker import speed_profile
from pearl.worker.settings import WorkerSettings
from tests.conftest import TOY
from tests.tiny import tiny_model

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


# ---- bad values ----


def beyond(kind: Any, bounds: Iterable[Any]) -> Iterator[object]:
    """Values that are just beyond a field's bounds, and of another type."""
    is_whole = kind is int
    for bound in bounds:
        for name, change in (("ge", -1), ("le", 1), ("gt", 0), ("lt", 0)):
            if (at := getattr(bound, name, None)) is not None:
                yield (
                    at + (change if is_whole else change / 100) if abs(at) < 1e300 else float("inf")
                )
        if kind is str and getattr(bound, "max_length", None) is not None:
            yield "x" * (bound.max_length + 1)
        if kind is str and getattr(bound, "min_length", None) is not None:
            yield "x" * (bound.min_length - 1)
    if kind in (int, float, bool):
        yield "nonsense"
    if kind is float:
        yield from (float("nan"), float("inf"))
    if get_origin(kind) is Literal:
        yield from ("nonsense", None)


def test_values_out_of_range_are_refused_by_name() -> None:
    fields: list[tuple[Any, str, Any, list[Any]]] = []
    for name, field in EngineConfig.model_fields.items():
        fields.append((EngineConfig, name, type_of(field.annotation), field.metadata))
    for name, option in OPTIONS.items():
        fields.append((RequestOptions, name, type_of(option.type), bounds_of(option.type)))
    tried = 0
    for section, name, kind, bounds in fields:
        for value in beyond(kind, bounds):
            with pytest.raises(ConfigError, match=f"{name}: .*got ") as caught:
                section(**{name: value})
            assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)
            tried += 1
    assert tried > 100


STOP = {"draft_stop": "heuristic"}
BIAS = "logit_bias: takes at most 1024 token ids, and numbers from -100 to 100"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1e-40}, "0 is greedy"),  # logits overflowed and took the target with them
    ({"temperature": 1e308}, "temperature: the greatest temperature is 1e\\+30"),
    ({"top_p": 5e-324}, "top_p: the least top_p is 1e-30"),  # float32 makes 0 of it: NaN
    ({"min_p": 5e-324}, "min_p: 0 is off"),
    ({"stop": ["a", ""]}, "stop string must not be empty"),
    ({"stop": ""}, "stop string must not be empty"),
    ({"stop": "caf\udce9"}, "stop: .*half a surrogate pair"),  # of Latin-1
    *(({"logit_bias": bias}, BIAS) for bias in ({-1: 1}, {1: 100.5})),
    *(
        ({"logit_bias": bias}, "logit_bias")
        for bias in ({1: float("nan")}, dict.fromkeys(range(1025), 1.0), 5)
    ),
    ({"logit_bias": [(1, 2.0), (1, 3.0)]}, "logit_bias: has a token id twice"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": "7"}, "json_schema: must be a JSON object"),
    (
        {"json_schema": {"enum": ["x" * MAX_GRAMMAR]}},
        "json_schema: has 65,550 characters, at most 32,768 are read",
    ),
    ({"json_schema": {1j: 2}}, "json_schema: cannot be written as JSON"),
    ({"regex": "a", "json_schema": {}}, "two grammars"),
    ({"regex": "a", "ignore_eos": True}, "which ignore_eos forbids"),
    ({"control": "udp"}, "control"),
    ({"control": "tcp://10.0.0.1"}, "control: use ipc, or tcp://HOST:PORT"),
    ({"control": "tcp://a b:1", "keys": "k"}, "control"),
    ({"control": "tcp://10.0.0.1:1"}, r"keys: .*pearl keys FILE"),
    (
        {"control": "tcp://10.0.0.1:*", "keys": "k", "tensors": "nccl"},
        "tensors: it is not encrypted",
    ),
    *(
        ({"method": m, "look_ahead": 4}, f"methods auto, ngram, head, pearl, .*not {m}")
        for m in ("ar", "sd")
    ),
    ({"method": "ngram", "look_ahead": 0}, "is method ar"),
    ({"method": "ngram", "draft_lookup": 4}, "methods with a draft, not ngram"),
    ({"method": "sd", "branches": 2}, "branches is for methods auto, ssd, pearl, not sd"),
    *(
        ({"rule": "joint", **given}, "whole blocks; it takes draft_stop fixed, not ssd")
        for given in ({"method": "ssd"}, {"method": "sd", **STOP})
    ),
    (
        {"draft_stop": "disko"},
        "unknown stop policy 'disko'; choose one of fixed, threshold, heuristic, disco",
    ),
    ({**STOP, "confidence": 0.5}, "no parameter 'confidence'; heuristic takes no parameters"),
    (
        {"confidence": 0.5},
        "draft_stop fixed has no parameter 'confidence'.* one of draft_stop threshold",
    ),
    *(
        ({"method": method, **STOP}, f"for methods auto, sd, .*, not {method}, which takes fixed")
        for method in ("ar", "ngram", "ssd", "pearl-no-post-verify")
    ),
]


@pytest.mark.parametrize(("values", "words"), REFUSED)
def test_bad_values_are_refused_with_what_to_do(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_settings(None, values)
    assert "\n" not in str(caught.value)


def test_what_is_no_setting_of_a_section_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'temperature'"):
        EngineConfig(temperature=1.0)  # type: ignore[call-arg]


def test_no_setting_is_in_two_sections() -> None:
    """A file is flat and a flag has one meaning."""
    assert len(SETTING_NAMES) == len(set(SETTING_NAMES))


@pytest.mark.parametrize(
    ("name", "value"), [("gamma", 4), ("window", "fixed"), ("rule", "uno"), ("candidates", 2)]
)
@pytest.mark.parametrize("method", ["ar", "ngram"])
def test_a_setting_that_the_method_does_not_read_is_refused(
    tmp_path: Path, name: str, value: object, method: str
) -> None:
    """It was ignored without a word. A file for another method can still be used with one flag."""
    both = {"rule": "spectr", name: value} if name == "candidates" else {name: value}
    path = tmp_path / "pair.yaml"
    path.write_text("\n".join(f"{key}: {given}" for key, given in both.items()))
    with pytest.raises(ConfigError, match=f"is for methods with a draft, and {method} has none"):
        load_settings(None, {"method": method, **both})
    assert load_settings(path, {"method": method}).options.method == method
    path.write_text(path.read_text() + f"\nmethod: {method}\n")
    with pytest.raises(ConfigError, match=f"and {method} has none"):
        load_settings(path, {})
    assert load_settings(path, {"method": "pearl"}).options.method == "pearl"


# ---- good values ----


def test_an_address_takes_keys_and_means_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for control in (
        "tcp://10.0.0.1:5555",
        "tcp://10.0.0.1:*",
        "tcp://eth0:*",
        "tcp://[2001:db8::1]:1",
    ):
        assert not EngineConfig(control=control, keys=str(tmp_path / "keys")).one_host
    assert EngineConfig().one_host
    assert EngineConfig(tensors="nccl").one_host
    monkeypatch.chdir(tmp_path)
    assert EngineConfig(keys="mine").keys == str(tmp_path / "mine"), (
        "to be found from another directory"
    )


def test_seeds_are_drawn_only_where_none_was_given() -> None:
    assert SamplingParams(seed=0).with_seed().seed == 0
    drawn = [SamplingParams().with_seed().seed or 0 for _ in range(16)]
    assert len(set(drawn)) == 16
    assert 0 < max(drawn) < 2**53, (
        "JavaScript, which reads usage.pearl.seed, has no other whole numbers"
    )


@pytest.mark.parametrize("name", ["look_ahead", "draft_lookup", "branches", "siblings"])
def test_a_bound_is_a_number_or_a_word(name: str, tmp_path: Path) -> None:
    """YAML reads `off` as false."""
    path = tmp_path / "mine.yaml"
    defaults = RequestOptions(method="pearl")
    for written, meant in (("auto", defaults.guesses), ("off", None), ("0", None), ('"off"', None)):
        path.write_text(f"{name}: {written}\nmethod: pearl\n")
        options = load_settings(path, {}).options
        assert options.guesses == (meant or RequestOptions(method="pearl", **{name: 0}).guesses)  # type: ignore[arg-type]
    assert load_settings(path, {name: "auto"}).options.guesses == defaults.guesses, (
        "a flag wins over the file"
    )
    with pytest.raises(ConfigError, match=name):
        RequestOptions(method="pearl", **{name: "on"})  # type: ignore[arg-type]


def test_a_model_has_the_settings_of_its_role_and_those_of_both(tmp_path: Path) -> None:
    """Also on the other side of the worker's stdin."""
    own = {"device": "cpu", "dtype": "int8", "pace": 0.1}
    both = {
        "rows": "int8",
        "forwards": "transformers",
        "exact": True,
        "max_context": 7,
        "slots": 3,
        "trust_remote_code": True,
    }
    named = {f"draft_{name}": value for name, value in own.items()}
    config = EngineConfig(draft="toy", **named, **both)  # type: ignore[arg-type]
    settings = WorkerSettings(role="draft", config=config, address="a", directory=tmp_path)
    assert WorkerSettings.model_validate_json(settings.model_dump_json()) == settings
    assert asdict(settings.model) == {"role": "draft", "spec": "toy", **own, **both}
    target = {"device": "auto", "dtype": "auto", "pace": None}
    expected = {"role": "target", "spec": "embedded", **target, **both}
    assert asdict(config.model("target")) == expected


def test_models_are_located_and_names_stay_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in the working directory under such a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("embedded", "toy", "mine"):
        (tmp_path / name).mkdir()
    assert EngineConfig().located()["target"] == "embedded"
    assert EngineConfig(target="toy").located()["draft"] == "toy"
    located = EngineConfig(target="mine", draft="none", head="mine").located()
    assert (located["target"], located["draft"]) == (str(tmp_path / "mine"), "none")
    assert located["head"] == str(tmp_path / "mine")


def test_what_is_measured_keeps_how_tokens_are_drawn_and_no_more() -> None:
    drawn = {"temperature": 0.5, "stop": ("x",), "logit_bias": ((1, 2.0),), "presence_penalty": 1.0}
    options = RequestOptions(
        method="sd", window="fixed", rule="opt", parameters={"epsilon": 0.1}, gamma=4, **drawn
    )
    assert sampling_of(options) == RequestOptions(**drawn)


def test_data_types_have_short_names_too() -> None:
    for short, name in (
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("int8", "int8"),
    ):
        config = EngineConfig(target_dtype=short)  # type: ignore[arg-type]
        assert config.target_dtype == name
    assert DistillConfig(out="x", dtype="bf16").dtype == "bfloat16"  # type: ignore[arg-type]


def test_a_toy_target_drafts_for_itself_unless_another_draft_is_named() -> None:
    """The embedded draft, which is the default, has other tokens."""
    assert EngineConfig(target=TOY).draft == TOY
    assert EngineConfig(target=TOY).model_fields_set == {"target"}
    assert EngineConfig(target=TOY, draft="toy:vocab=32").draft == "toy:vocab=32"
    assert EngineConfig(target=TOY, draft="none").draft == "none"
    assert (
        EngineConfig(target="embedded").draft
        == EngineConfig(target="models/toy").draft
        == "embedded-draft"
    )


# ---- files ----


def test_bad_files_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for content, words in {
        b"- a\n- b\n": "must hold a mapping of settings, not a list",
        b"just text": "not a str",
        b"a: b: c": "is not YAML",
        b"\xff\xfe\x00\x80": "is not YAML",
        b"temprature: 1.0\n": r"unknown setting 'temprature': did you mean temperature\?$",
        b"zzz: 1.0\n": r"unknown setting 'zzz': allowed are .*top_p",
        b"gamma: three\n": "gamma: .*got 'three'",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            load_settings(path, {})
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.yaml")


def test_flags_win_over_the_file_and_are_not_mixed_up_with_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("gamma: 3\ntemperature: 0.5\n")
    settings = load_settings(path, {"gamma": 5})
    assert (settings.options.gamma, settings.options.temperature) == (5, 0.5)
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {"gamma": -1})
    assert str(path) not in str(caught.value)
    path.write_text("target_device: cpu:100000\n")
    assert load_settings(path, {"target_device": "cpu"}).engine.target_device == "cpu"
    path.write_text("")
    assert load_settings(path, {}) == load_settings(None, {})


def test_every_configuration_in_the_repository_loads() -> None:
    assert CONFIGS
    for path in CONFIGS:
        assert read_file(path).keys() <= set(SETTING_NAMES), path
        assert load_settings(path, {}).engine.has_draft, path


# ---- the package ----


def test_a_type_checker_without_our_plugin_takes_what_the_settings_take(tmp_path: Path) -> None:
    """Every field seemed to be required, for they see only a default that is named. README's `stop` is a list."""
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*,numpy.*,rich.*,pearl.engine.*]\nfollow_imports = skip\n"
    )
    (tmp_path / "use.py").write_text(
        "from pearl import EngineConfig, RequestOptions, SamplingParams\n"
        'SamplingParams(temperature=0.7, stop=["end"], logit_bias={3: 1.0}, json_schema={"type": "object"})\n'
        'RequestOptions(method="sd"), EngineConfig(target="toy")\n'
        'SamplingParams(temperature="hot")\n'
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=mypy.ini",
        "--cache-dir=cache",
        "use.py",
    ]
    environment = os.environ | {"MYPYPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    (error, _) = done.stdout.splitlines()
    assert error.startswith('use.py:4: error: Argument "temperature"')


WAYS = (("ngram", 0.0, 4), ("pearl", 0.5, 4), ("sd", -0.4, 2), ("ssd", 0.0, 0))
FOUND = Profile(0.01, 0.6, ((1, 0.04), (4, 0.05)), ((1, 0.03),), "pearl", WAYS)


def test_what_is_kept_comes_back(cache: Path) -> None:
    config = EngineConfig(target=TOY, draft=TOY)
    assert speed_profile.load(config) is None
    path = speed_profile.save(config, FOUND)
    assert path.parent.parent == cache
    assert speed_profile.load(config) == FOUND
    assert speed_profile.load(config.model_copy(update={"profile": "none"})) is None


def test_it_is_of_one_pair_on_its_devices_and_of_one_machine(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose files have changed is another, and so is a machine with other cores or threads."""
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    pair = {"target": str(model), "draft": TOY}
    speed_profile.save(EngineConfig(**pair), FOUND)  # type: ignore[arg-type]
    others: list[dict[str, Any]] = [
        {"draft": "toy:vocab=32,alpha=0.5"},
        {"target_dtype": "float32"},
    ]
    others += [{"draft_device": "cpu:0"}, {"forwards": "transformers"}, {"target_pace": 0.1}]
    others += [{"rows": "int8"}, {"head": "some/head"}]
    for other in others:
        assert speed_profile.load(EngineConfig(**(pair | other))) is None, other
    config = EngineConfig(**pair)  # type: ignore[arg-type]
    assert speed_profile.load(config) == FOUND
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert speed_profile.load(config) is None
    (model / "config.json").write_text('{"a": 1}')
    assert speed_profile.load(config) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: "{",
        lambda d: "[" * 100_000,
        lambda d: json.dumps(d | {"format": 1}),
        lambda d: json.dumps(d | {"profile": {"t_draft": "fast"}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"t_draft": -1}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"t_target": [[1, 1e300]]}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"best": "guess"}}),
        lambda d: json.dumps(d | {"profile": d["profile"] | {"ways": [["pearl", 1e9, 1]]}}),
    ],
)
def test_a_damaged_one_is_passed_over(
    cache: Path, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(target=TOY, draft=TOY)
    path = speed_profile.save(config, FOUND)
    path.write_text(spoil(json.loads(path.read_text())))
    assert speed_profile.load(config) is None
    assert str(path) in caplog.text


def test_speeds_and_profile_are_inverse() -> None:
    assert Speeds.of(FOUND).profile == FOUND
    speeds = Speeds.of(FOUND)
    assert speeds.auto.begin(40) == "pearl"
    speeds.spread(Cores.ALL)
    assert speeds.t_target(1) == 0.03
    assert speeds.profile == FOUND, "whichever cores the target has at the moment"


def test_an_engine_begins_with_it(cache: Path) -> None:
    """The draft does not rest first, for it is known to pay; and of the target's times what was known is there."""
    known = Profile(
        0.01, 0.6, ((200, 0.25),), (), "pearl", WAYS
    )  # 200 tokens: more than any forward takes
    speed_profile.save(EngineConfig(target=TOY, draft=TOY), known)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with Engine(TOY, TOY) as engine:
        assert engine.welcome.t_target == ((200, 0.25),), "what is known is not measured again"
        (result,) = engine.generate([[1, 2, 3]], params, method="auto")
    s = result.statistics
    assert "ngram" not in s.ways
    assert s.draft_speedup == pytest.approx(1.649, abs=0.01)
    assert s.t_target[200] == 0.25


def test_what_a_start_has_measured_the_next_one_does_not(cache: Path) -> None:
    pair: dict[str, Any] = {
        "target": str(tiny_model("llama")),
        "draft": str(tiny_model("qwen2")),
        "max_context": 64,
    }
    found = []
    for _ in range(2):
        with Engine(**pair) as engine:
            assert engine.welcome.t_draft > 0
            found.append(engine.welcome.t_target)
    assert [fed for fed, _ in found[0]] == [1, 2, 4, 8]
    assert found[0] == found[1], "no two measurements are equal"
    (file,) = (cache / "profiles").iterdir()
    kept = speed_profile.load(EngineConfig(**pair))
    assert kept.t_target == found[0]
    has_further_cores = len(os.sched_getaffinity(0)) > 1
    assert bool(kept.t_elsewhere) == has_further_cores, "those on the draft's cores too"
    os.utime(file, (1, 1))
    assert speed_profile.load(EngineConfig(**pair)) is None, "of long ago"
