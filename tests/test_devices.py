"""Devices: their names, each rank's part of one, and where `auto` puts a worker."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pearl.config import EngineConfig
from pearl.device import Device
from pearl.errors import ConfigError, ModelError
from pearl.worker.placement import _equal_part, place

CORE = min(os.sched_getaffinity(0))


def test_device_names() -> None:
    for name, device in {
        "auto": Device("auto"),
        "cpu": Device("cpu"),
        f"cpu:{CORE}": Device("cpu", cores=(CORE,)),
        f"cpu:{CORE},{CORE}": Device("cpu", cores=(CORE,)),
        "cuda": Device("cuda", gpus=(0,)),
        "cuda:1": Device("cuda", gpus=(1,)),
        "cuda:0-2": Device("cuda", gpus=(0, 1, 2)),
        "cuda:3,1": Device("cuda", gpus=(3, 1)),
    }.items():
        assert Device.parse(name) == device
    cpus, gpus = ("cpu:", "cpu:x", "cpu:1-", "cpu:2-1", "cpu:-1", "cpu:1.5"), ("cuda:", "cuda:a", "cuda:1-0", "CUDA")
    for name in ("", "gpu", "auto:0", *cpus, *gpus):
        with pytest.raises(ValueError, match=r"use auto, cpu, cpu:0"):
            Device.parse(name)
    with pytest.raises(ConfigError, match=r"target_device.*CPU cores \[100000\] are not there"):
        EngineConfig(target_device="cpu:100000")


def test_each_rank_has_its_part_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    for name, ranks, parts in (
        ("cuda:0-1", 2, [Device("cuda", (0,)), Device("cuda", (1,))]),
        ("cuda:2,5,7", 3, [Device("cuda", (2,)), Device("cuda", (5,)), Device("cuda", (7,))]),
        ("cpu:0,1", 2, [Device("cpu", cores=(0,)), Device("cpu", cores=(1,))]),
        ("cpu:0-3", 2, [Device("cpu", cores=(0, 1)), Device("cpu", cores=(2, 3))]),
        ("cpu", 2, [Device("cpu"), Device("cpu")]),
        ("auto", 2, [Device("auto"), Device("auto")]),
    ):
        for role in ("target", "draft"):
            config = EngineConfig(**{f"{role}_device": name, f"{role}_tp": ranks})  # type: ignore[arg-type]
            assert [config.model(role).part(rank) for rank in range(ranks)] == parts  # type: ignore[arg-type]
    assert EngineConfig(target_device="cuda:0-1").model("target").part() == Device("cuda", (0, 1)), "layer by layer"
    with pytest.raises(ConfigError, match="draft_tp: draft_device cuda:0-1: a draft is not spread"):
        EngineConfig(draft_device="cuda:0-1")
    for name in ("cuda", "cuda:0-2", "cuda:0-3", "cpu:0-2", "cpu:0"):
        for role in ("target", "draft"):
            with pytest.raises(ConfigError, match=rf"{role}_tp: {role}_device {name} cannot be shared.*got 2"):
                EngineConfig(**{f"{role}_device": name, f"{role}_tp": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cores", "of", "parts"),
    [
        (2, 2, [(0,), (1,)]),
        (5, 2, [(0, 1, 2), (3, 4)]),
        (8, 3, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        (2, 3, [(0,), (1,), (0,)]),
    ],
)
def test_workers_of_a_host_have_cores_of_their_own(cores: int, of: int, parts: list[tuple[int, ...]]) -> None:
    assert [_equal_part(list(range(cores)), which, of) for which in range(of)] == parts


@pytest.mark.parametrize(
    ("gpus", "settings", "role", "expected"),
    [
        (4, {"target_tp": 2}, "target", [0, 1]),
        (4, {"target_tp": 2}, "draft", [2]),
        (3, {"target_tp": 2}, "draft", [2]),
        (2, {"target_tp": 2}, "draft", [1]),  # where none is left the draft shares the target's last
        (4, {"target_tp": 2, "draft_tp": 2}, "draft", [2, 3]),
        (4, {"target_device": "cpu", "draft_tp": 2}, "draft", [0, 1]),
        (4, {"target_device": "cuda:1", "draft_tp": 3}, "draft", [0, 2, 3]),
        (4, {"target_tp": 3, "draft_tp": 2, "control": "tcp://host:1", "keys": "k"}, "draft", [0, 1]),  # another host
        (4, {"control": "tcp://host:1", "keys": "k"}, "draft", [1]),
        (1, {"target_tp": 2}, "target", "target_tp 2 takes a GPU a rank, and torch sees 1 for it"),
        (1, {"target_tp": 2}, "draft", [0]),  # it may be on another host, which has fewer
        (1, {"draft_tp": 2}, "draft", "draft_tp 2 takes a GPU a rank, and torch sees 0 for it"),
    ],
)
def test_auto_gives_each_rank_a_gpu(
    gpus: int, settings: dict[str, Any], role: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    config = EngineConfig(**settings)
    ranks = range(config.model(role).tp)
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            place(config, role, 0)
    else:
        assert [place(config, role, rank).index for rank in ranks] == expected
