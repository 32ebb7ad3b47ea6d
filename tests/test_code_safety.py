"""What must not be in the package at all, read from its syntax trees; and that files of weights run no code."""

import ast
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pearl.errors import ModelError
from pearl.models.runner import ModelRunner, feed_chain
from tests.layers import modules
from tests.tiny import changed_model, on_cpu

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once, as for test_imports

# Of a source as `ast.unparse` writes it: without comments, each statement a line.
FORBIDDEN = {
    "imports what unpickles": r"^\s*(import|from) (.*, )?(c?pickle|marshal|shelve|dill|cloudpickle|joblib|telnetlib)\b",
    "runs a text": r"(?<![\w.])(eval|exec|compile|__import__|os\.system|os\.popen)\(",
    "starts a shell": r"\bshell=True|subprocess\.(getoutput|getstatusoutput)\(",
    "makes objects of YAML": r"yaml\.(load|unsafe_load|full_load)\(",
    "loads a pickle that may hold anything": r"torch\.load\((?!([^()]|\([^()]*\))*weights_only=True)|allow_pickle=True",
    "sends or takes pickles": r"\b((send|recv)_(pyobj|object)|broadcast_object_list)\(",
    "trusts remote code": r"trust_remote_code(=|': )True",
}


def dangers(tree: ast.AST) -> list[str]:
    source = ast.unparse(tree)
    return [
        what for what, pattern in FORBIDDEN.items() for _ in re.finditer(f"(?mi){pattern}", source)
    ]


def test_nothing_that_runs_what_it_reads() -> None:
    wrong = [f"{name} {danger}" for name, tree in modules().items() for danger in dangers(tree)]
    assert not wrong, wrong


def test_each_of_them_is_noticed() -> None:
    for source in (
        "import pickle",
        "import os, pickle",
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
        assert len(dangers(ast.parse(source))) == 1, source
    source = "torch.load(x, weights_only=True)\nyaml.safe_load(x)\njson.loads(x)\nre.compile(x)\nf(trust_remote_code=t)"
    assert dangers(ast.parse(source)) == []


# ---- weights ----


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


def load(directory: Path) -> ModelRunner:
    return on_cpu(directory, dtype="float32")


def test_no_weights_run_code(tmp_path: Path) -> None:
    """Safetensors come first; of pickles, also bare ones without torch's archive, only weights are read."""
    checkpoint, bomb = changed_model(tmp_path / "model"), tmp_path / "went-off"
    torch.save({"model.embed_tokens.weight": Bomb(bomb)}, checkpoint / "pytorch_model.bin")
    torch.load(checkpoint / "pytorch_model.bin", weights_only=False)
    bomb.unlink()  # loaded without care it goes off
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


def test_code_in_a_checkpoint_does_not_run_unless_asked(tmp_path: Path) -> None:
    goes_off = tmp_path / "ran"
    classes = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}
    checkpoint = changed_model(tmp_path / "model", model_type="theirs", auto_map=classes)
    (checkpoint / "theirs.py").write_text(
        f"open({str(goes_off)!r}, 'w')\nraise SystemExit('ran')\n"
    )
    with pytest.raises(
        ModelError, match=r"trust_remote_code|does not recognize|could not be loaded"
    ):
        load(checkpoint)
    assert not goes_off.exists()
