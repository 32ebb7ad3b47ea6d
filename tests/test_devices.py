"""Devices: their names, and where `auto` puts a worker."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pearl.config import EngineConfig
from pearl.device import Device
from pearl.errors import ConfigError, ModelError
from pearl.worker import placement
from pearl.worker.placement import equal_part, pin, place

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
    cpus, gpus = (
        ("cpu:", "cpu:x", "cpu:1-", "cpu:2-1", "cpu:-1", "cpu:1.5"),
        ("cuda:", "cuda:a", "cuda:1-0", "CUDA"),
    )
    for name in ("", "gpu", "auto:0", *cpus, *gpus):
        with pytest.raises(ValueError, match=r"use auto, cpu, cpu:0"):
            Device.parse(name)
    with pytest.raises(ConfigError, match=r"target_device.*CPU cores \[100000\] are not there"):
        EngineConfig(target_device="cpu:100000")


def test_a_target_is_spread_and_a_draft_is_not() -> None:
    assert EngineConfig(target_device="cuda:0-1").model("target").place == Device("cuda", (0, 1)), (
        "layer by layer"
    )
    with pytest.raises(ConfigError, match="draft_device: cuda:0-1: a draft is not spread"):
        EngineConfig(draft_device="cuda:0-1")


@pytest.mark.parametrize(
    ("cores", "of", "parts"),
    [
        (2, 2, [(0,), (1,)]),
        (5, 2, [(0, 1, 2), (3, 4)]),
        (8, 3, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        (2, 3, [(0,), (1,), (0,)]),
    ],
)
def test_workers_of_a_host_have_cores_of_their_own(
    cores: int, of: int, parts: list[tuple[int, ...]]
) -> None:
    assert [equal_part(list(range(cores)), which, of) for which in range(of)] == parts


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other core")
def test_a_worker_without_cores_of_its_own_leaves_the_others_alone() -> None:
    """That of a GPU, say: the draft's forward would wait for the thread on the core that they share."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(
            pin, EngineConfig(target_device="cuda", draft_device=f"cpu:{CORE}"), "target"
        ).result()
        found = pool.submit(os.sched_getaffinity, 0).result()
    assert found == os.sched_getaffinity(0) - {CORE}


def test_a_draft_beside_a_gpu_leaves_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "usable_cores", lambda: set(range(16)))
    for named, cores in (("cuda", tuple(range(8))), ("cpu", None)):
        config = EngineConfig(target_device=named, draft_device="cpu")
        assert placement.settled(config, "draft") == Device("cpu", cores=cores)


@pytest.mark.parametrize(
    ("gpus", "settings", "role", "expected"),
    [
        (4, {}, "target", 0),
        (4, {}, "draft", 1),
        (4, {"target_device": "cuda:0-1"}, "draft", 2),
        (
            2,
            {"target_device": "cuda:0-1"},
            "draft",
            1,
        ),  # where none is left the draft shares the last
        (4, {"target_device": "cpu"}, "draft", 0),
        (4, {"target_device": "cuda:1"}, "draft", 0),
        (4, {"control": "tcp://host:1", "keys": "k"}, "draft", 1),
        (1, {}, "draft", 0),  # it may be on another host, which has fewer
        (
            1,
            {"target_device": "cuda:0-1"},
            "target",
            "device cuda:0-1 is not there: torch sees 1 GPUs",
        ),
    ],
)
def test_auto_gives_each_model_a_gpu(
    gpus: int, settings: dict[str, Any], role: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    config = EngineConfig(**settings)
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            place(config, role)
    else:
        assert place(config, role).index == expected
