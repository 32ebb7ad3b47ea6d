"""Cached matrices: a second start makes none of them, and its logits are the same bits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pearl.cache
from pearl.models import matrices, matrix_cache
from pearl.models.layers import DecoderLayers
from pearl.models.llama import LlamaRunner
from pearl.models.loading import load_runner
from pearl.models.matrices import Packed, multiplies_bf16, pack
from pearl.models.probe import irregular
from pearl.models.runner import feed_chain
from tests.tiny import tiny_model

CPU = torch.device("cpu")
DTYPES = ["float32", "int8", "int4", *(["bfloat16"] if multiplies_bf16() else [])]  # others are not laid out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(matrix_cache, "_LEAST", 1)
    return tmp_path / "cache" / "converted"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama-biased"), tmp_path / "model"))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done that a second start need not do."""
    done: list[str] = []
    for module, name in ((matrices, "_lay_out"), (DecoderLayers, "probe")):
        before = getattr(module, name)

        def noted(*args: Any, before: Any = before, name: str = name) -> Any:
            done.append(name)
            return before(*args)

        monkeypatch.setattr(module, name, noted)
    return done


def logits(checkpoint: Path, dtype: str) -> torch.Tensor:
    """Of a prompt, and of a token fed alone behind it, from a runner of its own; and the probe's result."""
    runner = load_runner(str(checkpoint), device=CPU, dtype=dtype, max_context=64)
    assert isinstance(runner, LlamaRunner)
    found = [feed_chain(runner, range(5, 18), 13), feed_chain(runner, [3], 1)]
    return torch.cat([*found, torch.tensor([[runner._least_rows]]).float().expand(1, runner.vocab_size)])


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("matrices-*[!k]")) if cache.is_dir() else []


def test_a_second_start_lays_nothing_out_and_gives_the_same_bits(
    cache: Path, checkpoint: Path, work: list[str]
) -> None:
    """And another dtype takes none of it."""
    for number, dtype in enumerate(DTYPES, start=1):
        first = logits(checkpoint, dtype)
        assert set(work) == {"probe", "_lay_out"}
        assert len(entries(cache)) == number
        work.clear()
        assert torch.equal(logits(checkpoint, dtype), first)
        assert work == []


@pytest.mark.parametrize("name", ["matrices", "about.json"])
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_what_is_damaged_is_made_anew(cache: Path, checkpoint: Path, work: list[str], dtype: str, name: str) -> None:
    """Also where all sizes are right: a bit in the middle of a matrix would change the text."""
    first = logits(checkpoint, dtype)
    (file,) = cache.glob(f"matrices-*/{name}")
    whole = file.read_bytes()
    a_bit = bytearray(whole)
    a_bit[100 if name == "matrices" else len(whole) // 2] ^= 4  # there is air between matrices
    for damaged in (a_bit, bytes(len(whole)), whole[:-7], None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        for is_made in (True, False):
            work.clear()
            assert torch.equal(logits(checkpoint, dtype), first)
            assert bool(work) == is_made


@pytest.mark.parametrize("other", ["processor", "capability", "environment", "threads", "torch", "code", "file"])
def test_what_it_depends_on_is_its_name(
    cache: Path, checkpoint: Path, work: list[str], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    logits(checkpoint, "int8")
    work.clear()
    read = Path.read_text

    def elsewhere(path: Path, *args: Any, **options: Any) -> str:
        found = read(path, *args, **options)
        return found.replace("flags", "flags\t\t: amx", 1) if str(path) == "/proc/cpuinfo" else found

    match other:
        case "processor":
            monkeypatch.setattr(Path, "read_text", elsewhere)
        case "capability":
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        case "environment":
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        case "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        case "torch":
            monkeypatch.setattr(torch, "__version__", f"{torch.__version__}.1")
        case "code":
            monkeypatch.setattr(matrix_cache, "_CODE", (*matrix_cache._CODE, "slots"))
        case _:
            os.utime(checkpoint / "model.safetensors", (1, 1))
    logits(checkpoint, "int8")
    assert work
    assert len(entries(cache)) == 2


@pytest.mark.parametrize("why", ["cache", "bound", "disk", "small", "torch", "differs"])
def test_where_it_cannot_be_cached_the_model_works(
    cache: Path, checkpoint: Path, work: list[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    cached_before = logits(checkpoint, "float32")
    shutil.rmtree(cache)
    match why:
        case "cache":
            cache.parent.rmdir()
            cache.parent.touch()
        case "bound":
            monkeypatch.setenv("PEARL_CACHE_GB", "1e-6")
        case "disk":
            monkeypatch.setattr(pearl.cache.shutil, "disk_usage", lambda root: SimpleNamespace(free=10))
        case "small":
            monkeypatch.setattr(matrix_cache, "_LEAST", 1 << 30)
        case "torch":
            monkeypatch.setattr(matrix_cache, "_library", lambda: object())
        case _:
            monkeypatch.setattr(matrix_cache, "_unpacked", lambda shape, **_: pack(torch.zeros(shape)))
    for _ in range(2):
        work.clear()
        assert torch.equal(logits(checkpoint, "float32"), cached_before)
        assert work
    assert entries(cache) == []


def test_it_takes_no_room_from_what_is_in_use(cache: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that made room for it would displace it in turn, at every start; one of long ago goes."""
    logits(checkpoint, "float32")
    size = sum(path.stat().st_size for path in entries(cache)[0].iterdir())
    shutil.rmtree(entries(cache)[0])

    def conversion(building: Path, progress: object) -> None:
        building.mkdir()
        (building / "weights").write_bytes(bytes(size))

    monkeypatch.setenv("PEARL_CACHE_GB", str(1.5 * size / 1e9))
    model = pearl.cache.converted("model", conversion, pearl.cache.silent)
    logits(checkpoint, "float32")
    assert model.is_dir()
    assert entries(cache) == []
    os.utime(model, (1, 1))
    logits(checkpoint, "float32")
    assert not model.is_dir()
    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    ("shape", "dtype"), [((7, 33), torch.float32), ((4200, 72), torch.float32), ((64, 96), torch.bfloat16)]
)
def test_packed_matrices_come_back(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not multiplies_bf16():
        pytest.skip("are not packed here")
    weight, x = irregular(*shape, dtype), irregular(9, shape[1], dtype)
    packed = Packed(pack(weight))
    with (file := tmp_path / "saved").open("wb") as opened:
        written = matrix_cache._write(opened, matrix_cache._contents(packed))
    data = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    again = matrix_cache._restore(matrix_cache._mapped(data, written))
    assert isinstance(again, Packed)
    with torch.inference_mode():
        assert torch.equal(again(x), packed(x))
        wanted = x.float() @ weight.float().T
        assert (again(x).float() - wanted).abs().max() < 0.01 * wanted.abs().max()
