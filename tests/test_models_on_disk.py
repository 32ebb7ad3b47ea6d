"""`pearl list`, `pull`, `show` and `rm`: a hub of our own on this machine, and caches in a temporary directory."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.models.checkpoints import checkpoint, recipes
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.description import describe
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.stored import kind_of
from pearl.models.cpu import native
from pearl.models.families import QUANTISED
from pearl.models.forward.runner import ForwardRunner
from tests.gguf_files import write_gguf
from tests.tiny import VOCAB_SIZE, on_cpu, tiny_model, tiny_wrapper

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMIT = "0123456789012345678901234567890123456789"


class Hub(BaseHTTPRequestHandler):
    """The few requests that a download makes. `repositories`: id -> name of a file -> its bytes."""

    repositories: dict[str, dict[str, bytes]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models").strip("/")
        name = "/".join(path.split("/")[:2])
        files = self.repositories.get(name)
        if files is None:
            self._send(401, code="RepoNotFound")
        elif "/revision/" in path and path.rpartition("/")[2] not in ("main", COMMIT):
            self._send(404, code="RevisionNotFound")
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": n, "size": len(b), "oid": _digest(b)}
                for n, b in files.items()
            ]
            self._send(200, json.dumps(entries).encode())
        elif "/resolve/" not in path:
            siblings = [
                {"rfilename": n, "size": len(b), "blobId": _digest(b)} for n, b in files.items()
            ]
            self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
        elif name == "some/gated":
            self._send(403, code="GatedRepo")
        else:
            self._send(200, files[path.split("/", 4)[4]])

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes = b"", code: str = "") -> None:
        self.send_response(status)
        headers = {
            "ETag": f'"{_digest(body)}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": len(body),
        }
        for header, value in (headers | ({"X-Error-Code": code} if code else {})).items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model, more = (
        files_of(tiny_model(chat=True)),
        dict.fromkeys(("pytorch_model.bin", "README.md"), b"x" * 99),
    )
    more |= {
        "original/params.json": b"{}",
        "original/tokenizer.model": b"x",
        "onnx/model.onnx": b"x",
    }
    gguf = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    write_gguf(gguf, tiny_model())
    Hub.repositories = {
        "some/model": model | more,
        "some/gated": model,
        "some/ggufs": {"tiny-Q8_0.gguf": gguf.read_bytes(), "tiny-F16.gguf": b"GGUF"},
        "some/gguf": {"tiny-Q8_0.gguf": gguf.read_bytes()},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this test alone, and no network in this process."""
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path / "ours"))
    for name in ("constants", "utils._cache_manager"):
        monkeypatch.setattr(f"huggingface_hub.{name}.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def pull(hub: str, tmp_path: Path) -> Run:
    def run(model: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pearl", "pull", model]
        env = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf")} | more
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=180, check=False
        )

    return run


def names(run: Run) -> list[str]:
    return [each["name"] for each in json.loads(run("list", "--json").stdout)]


def test_a_model_is_pulled_shown_and_removed(caches: None, pull: Run, pearl_here: Run) -> None:
    """Only the files that are loaded; it is there without the network."""
    assert names(pearl_here) == []
    pulled = pull("some/model")
    assert " in 6 files, " in pulled.stderr.splitlines()[0], "before the download"
    directory = Path(pulled.stdout.strip())
    assert {file.name for file in directory.iterdir()} == {
        file.name for file in tiny_model(chat=True).iterdir()
    }
    assert "to download" not in pull("some/model@main").stderr
    (row,) = json.loads(pearl_here("list", "--json").stdout)
    assert (row["name"], row["weights"], row["forward"]) == ("some/model", "float32", "own")
    assert re.search(
        r"\nsome/model +0\.2 MB +\d{4}-\d\d-\d\d +float32 +own", pearl_here("list").stdout
    )
    shown = json.loads(pearl_here("show", "some/model", "--json").stdout)
    assert shown["path"] == str(directory)
    assert (shown["architecture"], shown["vocabulary"], shown["context"]) == (
        "LlamaForCausalLM",
        VOCAB_SIZE,
        256,
    )
    assert (shown["chat_template"], shown["tools"], shown["reasoning"]) == (True, None, False)
    assert resolve_checkpoint("some/model") == resolve_checkpoint("some/model@main") == directory
    asked = pearl_here("rm", "some/model")
    assert (asked.returncode, names(pearl_here)) == (2, ["some/model"]), "nobody can be asked"
    assert "this would free 0.2 MB: give --yes" in asked.stderr
    assert pearl_here("rm", f"some/model@{COMMIT}", "--yes").returncode == 0
    assert not directory.exists()
    assert names(pearl_here) == []
    for again in (pearl_here("rm", "some/model", "--yes"), pearl_here("show", "some/model")):
        assert again.returncode == 3
        assert "is in no cache" in again.stderr or "pearl pull some/model" in again.stderr


@pytest.mark.parametrize("model", ["some/model", "some/model@main"])
def test_a_model_is_fetched_as_it_is_loaded(hub: str, tmp_path: Path, model: str) -> None:
    """For the tokenizer without its weights, which are not taken for a whole model then; they are read straight from
    their files."""
    code = """
import sys, torch
from pearl.config import ModelConfig
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer
load_tokenizer(sys.argv[1], progress=print)
load_runner(ModelConfig(sys.argv[1]), torch.device("cpu"), print)
load_runner(ModelConfig(sys.argv[1]), torch.device("cpu"), print)
print([name for name in ("transformers",) if name in sys.modules])
"""
    env = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, model], env=env, capture_output=True, text=True, check=True
    )
    tokenizer, weights, *rest = done.stdout.splitlines()
    assert re.fullmatch(model + r": 0\.0 MB in 5 files, 0\.0 MB to download", tokenizer)
    assert re.fullmatch(model + r": 0\.2 MB in 6 files, 0\.1 MB to download", weights)
    assert rest == [f"loading {model}", f"loading {model}", "[]"]


def test_the_hub_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each process, while the files are there: a hub that does not answer takes ten seconds each time."""
    asked: list[bool] = []

    def pull(spec: str, progress: object, weights: bool = True) -> Path:
        asked.append(weights)
        (tmp_path / "files").mkdir(exist_ok=True)
        return tmp_path / "files"

    monkeypatch.setattr(checkpoint, "pull", pull)
    for weights in (False, True, True):
        assert resolve_checkpoint("some/model", weights=weights) == tmp_path / "files"
    assert asked == [False, True]
    (tmp_path / "files").rmdir()
    resolve_checkpoint("some/model")
    assert asked == [False, True, True]


def test_a_gguf_file_is_named_by_a_part_of_its_name(
    caches: None, pull: Run, pearl_here: Run
) -> None:
    pulled = pull("some/ggufs:q8_0")
    file = Path(pulled.stdout.strip())
    assert file.name == "tiny-Q8_0.gguf"
    shown = pearl_here("show", "some/ggufs:q8_0")
    assert "LlamaForCausalLM" in shown.stdout, shown.stderr
    assert "reading the header of tiny-Q8_0.gguf" in shown.stderr
    assert names(pearl_here) == ["some/ggufs"]
    assert "some/ggufs:FILE" in pearl_here("show", "some/ggufs").stderr
    assert "`pearl rm some/ggufs`" in pearl_here("rm", "some/ggufs:q8_0", "--yes").stderr
    pearl_here("rm", "some/ggufs", "--yes")
    assert not file.exists()
    assert names(pearl_here) == []


def test_the_only_gguf_file_of_a_repository_needs_no_name(caches: None, pull: Run) -> None:
    file = Path(pull("some/gguf").stdout.strip())
    assert file.name == "tiny-Q8_0.gguf"
    assert table_in(resolve_checkpoint("some/gguf")) is not None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "some/gated",
            "is gated: accept its terms at https://huggingface.co/some/gated, then `hf auth login`",
        ),
        ("no/such", "no such model that you may read"),
        ("some/model@v9", "it has no revision v9"),
        ("some/ggufs", "tiny-F16.gguf, tiny-Q8_0.gguf: name one"),
        ("some/ggufs:Q2", "tiny-F16.gguf, tiny-Q8_0.gguf: name one"),
        ("a b", "is no hub id"),
        ("offline/model", "Check the network"),
    ],
)
def test_what_cannot_be_pulled_is_one_line_with_what_to_do(
    caches: None,
    hub: str,
    pearl_here: Run,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    words: str,
) -> None:
    files = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", f"{hub}/{files}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", model == "offline/model")
    done = pearl_here("pull", model)
    assert done.returncode == 3
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3-short", "phi3-long", "gpt2", "falcon", "gpt-oss", "llama-dynamic"]
)
def test_show_says_which_forward_computes_a_model(kind: str) -> None:
    directory = tiny_model(kind)
    about = describe(str(directory), print)
    runner = on_cpu(directory, max_context=32)
    assert (about["forward"] == "own") == isinstance(runner, ForwardRunner)
    assert (about["why"] is None) == isinstance(runner, ForwardRunner)
    assert about["parameters"] == AutoModelForCausalLM.from_pretrained(directory).num_parameters()


@pytest.mark.parametrize(
    ("model", "forward"),
    [
        (tiny_model, "own"),
        (partial(tiny_model, "gemma3-short"), "transformers"),
        (partial(tiny_wrapper, "qwen2_5_vl"), "transformers"),
    ],
)
def test_where_quantised_weights_are_read(
    model: Callable[[], Path], forward: str, tmp_path: Path
) -> None:
    """Only straight from the files: neither those of a Gemma nor of a model of pictures."""
    directory = tmp_path / "model"
    shutil.copytree(model(), directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))
    assert kind_of(directory).forward == forward
    assert describe(str(directory), print)["forward"] == forward


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes all sizes")
def test_show_says_what_this_machine_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    about = describe(str(tiny_model()), print)
    assert (about["forward"], about["why"]) == (
        "transformers",
        "our own forward does not compute its layers or sizes here",
    )


def test_the_quantised_weights_that_are_read_are_listed_once() -> None:
    assert set(QUANTISED) == {*recipes.METHODS, "mxfp4"}
