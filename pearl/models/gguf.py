"""GGUF files: converted once to ordinary Hugging Face directories, which are read in a fraction of the time.

Reading such a file takes Python tens of seconds (its vocabulary is a list of a hundred thousand fields, and weights are
dequantised block by block), and every process of a run would do it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pearl.errors import ModelError
from pearl.models.kept import CONVERTED, Progress, cache_directory, converted, stamp

_GENERATION = "generation_config.json"


def directory_of(file: Path, dtype: str, progress: Progress) -> Path:
    """The directory that `file` is converted to: weights, tokenizer and generation settings.

    `dtype` of the weights: float32 and float16 are themselves, everything else is bfloat16; "any" where only the
    tokenizer is wanted.  Raises `ModelError` for a file that cannot be converted.
    """
    _check_magic(file)
    beside = file.parent / _GENERATION
    name = f"{_plain(file.stem)}-{stamp([file, *([beside] if beside.is_file() else [])])}"
    if dtype == "any":
        made = (cache_directory() / CONVERTED).glob(f"{name}-*")
        dtype = next((path.name.rpartition("-")[2] for path in sorted(made) if path.is_dir()), "bfloat16")
    elif dtype not in ("float32", "float16"):
        dtype = "bfloat16"

    def build(building: Path, progress: Progress) -> None:
        progress(f"converting {file.name} to {dtype} (once, about a minute for a billion weights)")
        convert(file, building, dtype)

    return converted(f"{name}-{dtype}", build, progress)


def _check_magic(file: Path) -> None:
    """A file of something else is refused at once, not by a process that imports torch first."""
    try:
        with file.open("rb") as opened:
            is_gguf = opened.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"Model {str(file)!r} could not be loaded: {error.strerror}.") from error
    if not is_gguf:
        raise ModelError(f"Model {str(file)!r} could not be loaded: it is no GGUF file. Get it again.")


def convert(file: Path, directory: Path, dtype: str) -> None:
    """In a child process: the GGUF reader prints, and its gigabytes of memory are freed when the process ends.

    Raises `ModelError`.
    """
    command = [sys.executable, "-m", "pearl.models.gguf", str(file), str(directory), dtype]
    ours = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=os.environ | ours
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        cause = f"{lines[-1].rstrip('.') if lines else 'no reason given'} (exit status {done.returncode})"
        raise ModelError(
            f"Model {str(file)!r} could not be loaded: {cause}. Check that the file is complete and of a causal "
            "language model, that memory is free for its weights in float32, and disk space in $PEARL_CACHE."
        )


def _plain(name: str) -> str:
    """As the name of a directory."""
    return re.sub(r"[^\w.-]", "_", name)[:80]


def _convert_here(file: Path, directory: Path, dtype: str) -> None:
    """Write the model of a GGUF file, dequantised to `dtype`, its tokenizer and its generation settings."""
    import torch
    import transformers

    place, name = str(file.parent), file.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=getattr(torch, dtype), **_dequantised()
    )
    model.config.__dict__.pop("quantization_config", None)  # the weights are plain from here on
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    free = shutil.disk_usage(directory.parent).free
    if needed > free:
        sys.exit(f"its weights take {needed / 1e9:.1f} GB in {directory.parent}, where {free / 1e9:.1f} GB are free")
    model.save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
    tokenizer.save_pretrained(directory)
    if (file.parent / _GENERATION).is_file():
        generation = transformers.GenerationConfig.from_pretrained(place)
    else:  # the file's header names no other option
        generation = transformers.GenerationConfig()
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    generation.save_pretrained(directory)


def _dequantised() -> dict[str, object]:
    """Arguments of `from_pretrained` that dequantise. Older releases always do, and take no option."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
