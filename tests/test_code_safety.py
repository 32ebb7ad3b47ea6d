"""What must not be in the package at all, read from its syntax trees; and that files of weights run no code."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pearl.errors import ModelError
from pearl.models.checkpoints.loading import load_runner
from pearl.models.runner import ModelRunner, feed_chain
from tests.test_imports import modules
from tests.tiny import tiny_model

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "telnetlib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN_CALLS |= {"yaml.full_load", "subprocess.getoutput", "subprocess.getstatusoutput"}
SOCKET_PICKLES = {"send_pyobj", "recv_pyobj", "send_object", "recv_object", "broadcast_object_list"}


def called(node: ast.expr) -> str:
    """The dotted name that is called: `torch.load`."""
    if isinstance(node, ast.Attribute):
        return f"{called(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {n}" for n in names if n.partition(".")[0] in FORBIDDEN_IMPORTS)
        elif isinstance(node, ast.Call):
            yield from _dangerous_call(node, called(node.func))
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and is_true(value):
                    yield "trusts remote code"


def _dangerous_call(node: ast.Call, name: str) -> Iterator[str]:
    if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in SOCKET_PICKLES:
        yield f"calls {name}"
    if name == "torch.load" and not is_true(keyword(node, "weights_only")):
        yield "loads a pickle that may hold anything"
    if is_true(keyword(node, "allow_pickle")):
        yield "lets numpy unpickle"
    if is_true(keyword(node, "shell")):
        yield "starts a shell"
    if is_true(keyword(node, "trust_remote_code")):
        yield "trusts remote code"


def test_nothing_that_runs_what_it_reads() -> None:
    wrong = [f"{name} {danger}" for name, tree in modules().items() for danger in dangers(tree)]
    assert not wrong, wrong


def test_each_of_them_is_noticed() -> None:
    for source in (
        "import pickle",
        "def f():\n    from marshal import loads",
        "eval(x)",
        "exec(x)",
        "import os\nos.system(x)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "import torch\ntorch.load(x)",
        "import torch\ntorch.load(x, weights_only=False)",
        "f(trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
        "yaml.load(x)",
        "numpy.load(x, allow_pickle=True)",
        "socket.recv_pyobj()",
    ):
        assert len(list(dangers(ast.parse(source)))) == 1, source
    source = "torch.load(x, weights_only=True)\nyaml.safe_load(x)\njson.loads(x)\nre.compile(x)\nf(trust_remote_code=t)"
    assert list(dangers(ast.parse(source))) == []


# ---- weights ----


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a tiny model, its weights in model.safetensors."""
    source, copy = tiny_model("llama"), tmp_path / "model"
    copy.mkdir()
    for path in Path(source).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def load(directory: Path) -> ModelRunner:
    return load_runner(str(directory), device=torch.device("cpu"), dtype="float32")


@pytest.fixture
def bomb(checkpoint: Path, tmp_path: Path) -> Path:
    """The file that a bomb in pytorch_model.bin would leave."""
    goes_off = tmp_path / "went-off"
    torch.save({"model.embed_tokens.weight": Bomb(goes_off)}, checkpoint / "pytorch_model.bin")
    with pytest.raises(Exception):  # noqa: B017, PT011 - what it is does not matter
        torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    assert not goes_off.exists()
    return goes_off


def test_the_bomb_is_one(bomb: Path, checkpoint: Path) -> None:
    """Loaded without care it goes off: so the test below can fail."""
    torch.load(checkpoint / "pytorch_model.bin", weights_only=False)
    assert bomb.exists()


def test_no_weights_run_code(bomb: Path, checkpoint: Path) -> None:
    """Safetensors come first; of pickles, also bare ones without torch's archive, only weights are read."""
    logits = feed_chain(load(checkpoint), [5, 6, 7], 1)
    assert torch.isfinite(logits).all()
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        load(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(bomb)))
    with pytest.raises(ModelError):
        load(checkpoint)
    assert not bomb.exists()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    assert torch.equal(feed_chain(load(checkpoint), [5, 6, 7], 1), logits)


def test_code_in_a_checkpoint_does_not_run_unless_asked(checkpoint: Path, tmp_path: Path) -> None:
    goes_off = tmp_path / "ran"
    (checkpoint / "theirs.py").write_text(f"open({str(goes_off)!r}, 'w')\nraise SystemExit('ran')\n")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"trust_remote_code|does not recognize|could not be loaded"):
        load(checkpoint)
    assert not goes_off.exists()
