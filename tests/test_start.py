"""A start: what each process imports, and what the log says of its steps."""

import json
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from gguf import GGUFWriter

from pearl.cache import Count
from pearl.models.checkpoints import description
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.gguf import read_header
from pearl.models.cpu import meta_device
from pearl.steps import Steps
from pearl.text.tokenizer import FileTokenizer
from tests.gguf_files import FAMILIES, write_gguf
from tests.tiny import tiny_model

BOUND = 300.0  # seconds
# Writes the names of the modules of each process when it ends; a worker ends by os._exit.
AT_THE_END = """
import atexit, os, sys

def write():
    name = "worker" if "pearl.worker" in sys.orig_argv else "front"
    with open(os.path.join(os.environ["MODULES"], f"{name}-{os.getpid()}"), "w") as file:
        file.write("\\n".join(sys.modules))

def leave(code, leave=os._exit):
    write()
    leave(code)

os._exit = leave
atexit.register(write)
"""
LIBRARIES = {"transformers", "huggingface_hub", "torch._dynamo", "torch._inductor", "sympy", "gguf"}
OF_A_FRONT = {"rich", "jinja2", "click", "pearl.cli", "pearl.engine"}
KERNELS = (
    {"torch._prims", "torch._decomp", "torch._refs"}
    if version("torch").startswith("2.13")
    else set[str]()
)


class Start(NamedTuple):
    """A command, and the modules that its processes must not import."""

    command: list[str]
    front: set[str]
    worker: set[str]


GENERATE = ["generate", "hello\n", "--max-tokens", "1", "--profile", "none", "--log-level", "debug"]
STARTS = {
    "toy": Start([*GENERATE, "--target", "toy", "--draft", "toy"], {"torch"}, {"tokenizers"}),
    "checkpoint, gguf": Start([*GENERATE, "--target", "TINY", "--draft", "FILE"], {"torch"}, set()),
    "show": Start(["show", "FILE"], KERNELS, set()),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_a_process_imports(name: str, tmp_path: Path) -> None:
    """Each of these once cost every start up to four seconds of a process."""
    start = STARTS[name]
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    places = {"TINY": str(tiny_model()), "FILE": str(file)}
    command = [places.get(word, word) for word in start.command]
    sites = tmp_path / "sites"
    sites.mkdir()
    modules = tmp_path / "modules"
    modules.mkdir()
    (sites / "sitecustomize.py").write_text(AT_THE_END)
    paths = os.pathsep.join([str(sites), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "MODULES": str(modules),
        "PEARL_CACHE": str(tmp_path / "cache"),
    }
    pearl = [sys.executable, "-m", "pearl", *command]
    done = subprocess.run(
        pearl, capture_output=True, text=True, timeout=BOUND, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    forbidden = {
        "front": LIBRARIES - {"gguf"} | start.front,
        "worker": LIBRARIES | OF_A_FRONT | KERNELS | start.worker,
    }
    processes = [file.name.partition("-")[0] for file in modules.iterdir()]
    assert sorted(processes) == (["front"] if name == "show" else ["front", "worker", "worker"])
    for file in modules.iterdir():
        imported = set(file.read_text().split("\n"))
        assert imported & forbidden[file.name.partition("-")[0]] == set(), file.name
    if name != "show":
        _check_steps(done.stderr)


def _check_steps(log: str) -> None:
    """The log has the steps of each process."""
    for process, steps in {
        "front": (
            "checking the settings, and starting the workers",
            "reading the tokenizer",
            "waiting for the workers",
        ),
        "target": ("importing torch", "reading the tokenizers", "loading the model"),
        "draft": ("importing torch", "reading the tokenizers", "loading the model"),
    }.items():
        lines = [
            line
            for line in log.splitlines()
            if line.startswith(f"[{process}] DEBUG") and " start: " in line
        ]
        for step in steps:
            assert sum(f" start: {step}: " in line and "s of CPU" in line for line in lines) == 1, (
                process,
                step,
            )


def test_a_step_has_its_own_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 12.0, 15.5])
    cpu_times = iter([1.5, 1.75])
    monkeypatch.setattr("pearl.steps.time.monotonic", lambda: next(times))
    monkeypatch.setattr("pearl.steps.time.process_time", lambda: next(cpu_times))
    caplog.set_level(logging.DEBUG)
    steps = Steps(logging.getLogger("start"))
    steps.done("one")
    steps.done("two")
    assert caplog.messages == [
        "start: one: 2.00 s, 1.50 s of CPU",
        "start: two: 3.50 s, 0.25 s of CPU",
    ]


def test_long_work_is_counted() -> None:
    """Short work says nothing, so that a log has a line every two seconds at most."""
    now = [0.0]
    messages = list[str]()
    count = Count(messages.append, "layer", 6, lambda: now[0])
    for now[0] in (1.0, 1.9, 2.1, 3.0, 4.0, 4.2):
        count.advance()
    assert messages == ["layer 3 of 6", "layer 6 of 6"]


class TestTheKernelsOfTheMetaDevice:
    def run(self, code: str) -> list[str]:
        """What `code` prints in a process that has imported torch as a worker does."""
        before = (
            "import sys\nfrom pearl.models.cpu.meta_device import postpone_kernels\n"
            "postpone_kernels()\nimport torch\n"
        )
        after = "\nprint('torch._prims' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", before + code + after],
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    @pytest.mark.skipif(not KERNELS, reason="a release of torch that was not checked")
    def test_what_our_forward_does_needs_none(self) -> None:
        toy = "from pearl.models.toy import load_toy\nload_toy('toy', 'draft')\n"
        assert self.run(f"{toy}torch.ones(3) @ torch.ones(3)") == ["False"]

    @pytest.mark.parametrize(
        "needs",
        [
            "import transformers.modeling_utils",
            "import torch._dynamo",
            "torch._meta_registrations.meta_index_Tensor",
        ],
    )
    def test_what_needs_them_has_them(self, needs: str) -> None:
        assert self.run(needs) == ["True"]

    def test_a_model_on_the_meta_device(self) -> None:
        """As transformers builds each model that it loads."""
        code = f"""
from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({str(tiny_model())!r}))
    print(model(torch.zeros(1, 3, dtype=torch.long)).logits.shape[1])
"""
        assert self.run(code) == ["3", "True"]

    def test_another_release_has_them_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        finders = [*sys.meta_path]
        monkeypatch.setattr(sys, "meta_path", [*finders])
        monkeypatch.setattr(meta_device, "version", lambda _: "2.99.0+cpu")
        meta_device.postpone_kernels()
        assert sys.meta_path == finders


@pytest.mark.parametrize(
    "kind", ["llama-tied", "qwen3", "gemma2-caps", "phi3-partial", "qwen3-moe", "mixtral"]
)
def test_a_gguf_file_is_described_as_its_model_is(kind: str, tmp_path: Path, cache: Path) -> None:
    """From the table of its weights, without a model of transformers."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_model(kind), **FAMILIES[kind])
    directory = resolve_checkpoint(str(file))
    assert description.of_gguf(directory) == description.of_model(directory)


def test_arrays_of_a_gguf_file_are_read_at_once(tmp_path: Path) -> None:
    """As gguf-py reads them, item by item."""
    arrays: dict[str, list[str] | list[int] | list[float] | list[bool] | list[list[int]]] = {
        "strings": ["", "a", "▁中文", "b" * 300],
        "whole": [1, -2, 3],
        "numbers": [0.5, -1.25],
        "flags": [True, False, True],
        "nested": [[1, 2], [3]],
    }
    file = tmp_path / "arrays.gguf"
    writer = GGUFWriter(file, "llama")
    for name, values in arrays.items():
        writer.add_array(name, values)
    writer.add_string("after", "them")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields, _ = read_header(file)
    assert {name: fields[name] for name in arrays} == arrays | {"nested": [1, 2, 3]}, (
        "gguf-py reads them flat"
    )
    assert fields["after"] == "them"
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index(b"b" * 300) + 100])
    with pytest.raises(ValueError, match="cut off or damaged"):
        read_header(file)


def test_no_merges_are_read_for_decoding(tmp_path: Path) -> None:
    """They take most of the time to load a large tokenizer, and a worker only decodes."""
    source = json.loads((tiny_model() / "tokenizer.json").read_text())
    whole = FileTokenizer(tiny_model())
    source["model"]["merges"] = [["not", "there"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    (tmp_path / "tokenizer_config.json").write_text(
        (tiny_model() / "tokenizer_config.json").read_text()
    )
    decoding = FileTokenizer(tmp_path, encodes=False)
    assert decoding.tokens() == whole.tokens()
    assert decoding.decode(range(20)) == whole.decode(range(20))
    with pytest.raises(Exception, match="not"):
        decoding.encode("the cat")
    with pytest.raises(Exception, match="not"):
        FileTokenizer(tmp_path)
