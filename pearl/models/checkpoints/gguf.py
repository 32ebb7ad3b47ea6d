"""GGUF files: read in place.  What a file states is written once, as the files of a Hugging Face directory.

Reading a vocabulary takes Python seconds, and every process of a run would do it.  So config.json, the tokenizer and
how to sample are cached, with a table of where each weight is in the file; `gguf_weights` maps them from there.  What a
file states is what runs, or it is refused: `families.GGUF` declares what each architecture must state.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pearl.cache import GGUF_FILES, Progress, built_once, cache_directory, stamp
from pearl.errors import ModelError
from pearl.models.families import GGUF, Family, weight_shapes

TABLE, _GENERATION = "gguf.json", "generation_config.json"
_LOOK_SECONDS = 0.5
_HEADER = 32 << 20  # bytes, more than a vocabulary takes
_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_NEEDED_BY_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
# The rope of Llama 3.1 and later, except its factor. A file has the resulting frequencies instead.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# llama.cpp's defaults for what a config.json cannot state otherwise.
_FIXED = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "alpha": 0.0,
    "finetuned": True,
}


class Tensor(NamedTuple):
    """Where a tensor is: its type, its shape as torch has it, and its bytes in the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Table(NamedTuple):
    """Where the weights of a model are.

    Attributes:
        file: in it.
        interleaved: the width of a head, where rows of queries and keys have its halves in turns; else 0.
        tensors: by their names in transformers.
    """

    file: Path
    interleaved: int
    tensors: dict[str, Tensor]

    def write(self, directory: Path) -> None:
        (directory / TABLE).write_text(json.dumps([str(self.file), *self[1:]]))


def table_in(directory: Path) -> Table | None:
    """That of the GGUF file which `directory` describes; None where it is an ordinary checkpoint."""
    if not (directory / TABLE).is_file():
        return None
    file, interleaved, tensors = json.loads((directory / TABLE).read_text())
    found = {name: Tensor(kind, tuple(shape), *where) for name, (kind, shape, *where) in tensors.items()}
    return Table(directory / file, interleaved, found)


def directory_of(file: Path, progress: Progress) -> Path:
    """The directory that describes `file`, made once: config.json, tokenizer, how to sample, and where weights are.

    Raises `ModelError`.
    """

    def build(building: Path, progress: Progress) -> None:
        _check_file(file)
        progress(f"reading the header of {file.name} (once)")
        building.mkdir()
        describe_file(file, building)

    made = described_in(file)
    return built_once(made.name, build, progress, made.parent)


def described_in(file: Path) -> Path:
    """Where `directory_of` puts what `file` states."""
    beside = file.parent / _GENERATION
    stem = re.sub(r"[^\w.-]", "_", file.stem)[:80]
    name = f"{stem}-{stamp([file, *([beside] if beside.is_file() else [])])}"
    return cache_directory() / GGUF_FILES / name


def _check_file(file: Path) -> None:
    """Refuse other files, and one of several parts, before anything reads a vocabulary."""
    try:
        with file.open("rb") as opened:
            header = opened.read(_HEADER)
    except OSError as error:
        raise ModelError(f"Model {str(file)!r} could not be loaded: {error.strerror}.") from error
    if not header.startswith(b"GGUF"):
        raise ModelError(f"Model {str(file)!r} could not be loaded: it is no GGUF file. Get it again.")
    count = re.search(rb"split\.count\x02\0\0\0(..)", header, re.DOTALL)  # a number of 16 bits
    if count and (parts := int.from_bytes(count[1], "little")) > 1:
        raise ModelError(
            f"Model {str(file)!r} could not be loaded: it is one of {parts} parts. Merge them with llama.cpp's "
            "`llama-gguf-split --merge FIRST-PART WHOLE.gguf`, and name WHOLE.gguf."
        )


def describe_file(file: Path, directory: Path) -> None:
    """Write into `directory` what `file` states, in a child process, which ends with this one. Raises `ModelError`.

    The GGUF reader prints, and its memory is freed when the process ends.
    """
    command = [sys.executable, "-m", "pearl.models.checkpoints.gguf", str(file), str(directory), str(os.getpid())]
    ours = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=os.environ | ours
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        cause = f"{lines[-1].rstrip('.') if lines else 'no reason given'} (exit status {done.returncode})"
        raise ModelError(
            f"Model {str(file)!r} could not be loaded: {cause}. Check that the file is complete and of a causal "
            "language model; other architectures run from safetensors."
        )


def _describe_here(file: Path, directory: Path) -> None:
    from gguf import GGUFReader

    from pearl.text.gguf_tokenizer import tokenizer_of

    reader = GGUFReader(file)
    architecture, stated = _stated(reader)
    family = _family_of(architecture, stated)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(family, stated, tensors)
    place = Path(file.name) if file.parent == directory else file.absolute()
    interleaved = config["head_dim"] if family.gguf.interleaves else 0
    table = Table(place, interleaved, _located(family, config, tensors))
    tokenizer, ends = tokenizer_of(reader)
    tokenizer.save_pretrained(directory)
    beside = file.parent / _GENERATION  # the file's header names no option but ends
    generation = json.loads(beside.read_text()) if beside.is_file() else {}
    if generation.get("eos_token_id") is None:
        generation["eos_token_id"] = ends or None
    (directory / _GENERATION).write_text(json.dumps(generation))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    table.write(directory)


def _stated(reader: Any) -> tuple[str, dict[str, Any]]:
    """A file's architecture, and what the file states of it."""
    field = reader.fields.get("general.architecture")
    architecture = str(field.contents()) if field else ""
    start = f"{architecture}."
    names = {name: field for name, field in reader.fields.items() if name.startswith(start)}
    return architecture, {name.removeprefix(start): field.contents() for name, field in names.items()}


def _family_of(architecture: str, stated: Mapping[str, Any]) -> Family:
    """The family of a file. Exits where the file leaves something open, or states what a configuration cannot."""
    experts, used = stated.get("expert_count", 0), stated.get("expert_used_count", 0)
    family = GGUF.get((architecture, experts > 0))
    if family is None:
        if architecture not in {name for name, _ in GGUF}:
            sys.exit(f"files of the architecture {architecture!r} are not read")
        sys.exit(f"it has {experts} experts, which {architecture!r} files are not read with")
    needed = {**_NEEDED, **family.gguf.needed, **(_NEEDED_BY_EXPERTS if family.forward.has_experts else {})}
    if "expert_feed_forward_length" in stated:
        needed.pop("feed_forward_length")  # every layer has experts
    for name in needed:
        if name not in stated:
            sys.exit(f"it does not say {name!r}, without which {architecture!r} files are not read")
    for name in (*needed, "attention.head_count_kv"):
        if isinstance(stated.get(name), list):
            sys.exit(f"it says {name!r} for each layer, and {architecture!r} files are read with one for all")
    if family.forward.has_experts and not 0 < used <= experts:
        sys.exit(f"it uses {used} experts of {experts}")
    if stated.get("expert_weights_scale", 0) not in (0, 1):
        sys.exit(f"it scales what its experts say by {stated['expert_weights_scale']}, which is not computed")
    return family


def _config(family: Family, stated: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a file. Exits where none can state what the file does."""
    gguf = family.gguf
    assert gguf is not None
    names = {**_NEEDED, **_NEEDED_BY_EXPERTS, **gguf.needed, **gguf.optional}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **gguf.settings,
        **{attribute: stated[name] for name, attribute in names.items() if name in stated},
    }
    heads, hidden, layers = (config[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    width = stated.get("attention.key_length", hidden // heads)
    config |= {
        "head_dim": width,
        "num_key_value_heads": stated.get("attention.head_count_kv", heads),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    if family.forward.has_experts:
        config["num_experts"] = config["num_local_experts"]  # families differ in the name
    if gguf.ropeless:
        config["no_rope_layers"] = [int((number + 1) % gguf.ropeless != 0) for number in range(layers)]
    if gguf.layers_of_27b:  # as llama.cpp, for no file states it
        config["query_pre_attn_scalar"] = hidden // heads if layers == gguf.layers_of_27b else width
    config |= _windows(family, stated, layers)
    config["rope_parameters"] = _ropes(family, stated, config, tensors)
    return config


def _windows(family: Family, stated: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """How far attention looks back, and in which layers, as in config.json."""
    period, window = family.gguf.window
    window = stated.get("attention.sliding_window", window)  # 0 where there is none
    if period:
        period = stated.get("attention.sliding_window_pattern", period)
        slide = period if isinstance(period, list) else [not period or n % period < period - 1 for n in range(layers)]
        if len(slide) != layers:
            sys.exit(f"it says of {len(slide)} layers whether they have a window, and has {layers}")
        types = [f"{'sliding' if each and window else 'full'}_attention" for each in slide]
        return {"layer_types": types, "sliding_window": window or stated["context_length"]}
    if family.forward.default_window is not None:
        return {"sliding_window": window or None}
    if 0 < window < stated["context_length"]:
        of = family.gguf.architecture
        sys.exit(f"its attention has a window of {window} tokens, which {of!r} files are not read with")
    return {}


def _ropes(
    family: Family, stated: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """The `rope_parameters`: their base, how many of a head's dimensions they turn, and how the file scales them.

    llama.cpp's defaults where a file states nothing. Without a scaling a text differs from its first token on.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(stated.get("rope.freq_base", 1e4))}
    turned, width = stated.get("rope.dimension_count", config["head_dim"]), config["head_dim"]
    if family.forward.rotates:
        rope["partial_rotary_factor"] = turned / width
    elif turned != width:
        of = family.gguf.architecture
        sys.exit(f"its rope turns {turned} of {width} dimensions, which {of!r} files are not read with")
    scaled = rope | _scaling(stated, config["max_position_embeddings"])
    if divisors := {name: tensor.data for name, tensor in tensors.items() if name.startswith("rope_f")}:
        if scaled != rope or list(divisors) != ["rope_freqs.weight"] or family.gguf.has_two_ropes:
            sys.exit(f"its rope is scaled by tensors that are not read from such files: {', '.join(divisors)}")
        scaled |= _llama3(rope, divisors["rope_freqs.weight"])
    if not family.gguf.has_two_ropes:
        return scaled
    sliding = rope | {"rope_theta": float(stated.get("rope.freq_base_swa", 1e4))}  # is not scaled
    return {"full_attention": scaled, "sliding_attention": sliding}


def _scaling(stated: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Of a rope, as in config.json. Exits where that cannot state it."""
    stated = {name.removeprefix("rope.scaling."): stated[name] for name in stated if name.startswith("rope.scal")}
    factor = float(stated.get("factor") or stated.get("rope.scale_linear") or 1.0)
    kind = stated.get("type", "linear")  # as llama.cpp
    if any(stated.get(name, usual) != usual for name, usual in _FIXED.items()):
        sys.exit(f"its rope is scaled in a way that is not computed: {stated}")
    if kind == "yarn":
        length = stated.get("original_context_length") or positions
        betas = {name: float(stated[f"yarn_{name}"]) for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in stated}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(length), **betas}
    if kind not in ("linear", "none"):
        sys.exit(f"its rope is scaled by {kind!r}, which is not read from such files")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}


def _llama3(rope: Mapping[str, Any], divisors: Any) -> dict[str, Any]:
    """The rope whose frequencies are the plain ones divided by `divisors` [head_dim / 2]."""
    import torch

    from pearl.models.checkpoints.direct import llama3_frequencies

    found = {"rope_type": "llama3", "factor": round(float(divisors.max()), 3), **_LLAMA3}
    count = len(divisors)
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(count, dtype=torch.float) / count))
    if not torch.allclose(
        plain / torch.from_numpy(divisors.copy()), llama3_frequencies(plain, found), rtol=1e-3, atol=0
    ):
        sys.exit("its rope has frequencies that are not those of Llama 3.1, and others are not read from such files")
    return found


def _located(family: Family, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Each weight of the model. Exits where the file has not exactly these."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family.gguf.architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    shapes = weight_shapes(family.forward, config)
    held = {name: str(names.get_name(name, (".weight", ".bias"))) for name in shapes}
    if missing := sorted(name for name in shapes if held[name] not in tensors):
        sys.exit(f"{len(missing)} of its weights are in no file, {missing[0]} for one")
    found = {}
    for name, wanted in shapes.items():
        tensor = tensors[held[name]]
        shape = tuple(map(int, tensor.shape[::-1]))
        if shape != wanted:
            sys.exit(f"its weight {name} has the shape {list(shape)} where {list(wanted)} is expected")
        found[name] = Tensor(tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes))
    left = sum(int(tensors[name].n_elements) for name in {*tensors} - {*held.values()} if name[:6] != "rope_f")
    if left:
        sys.exit(f"{left} of its weights have no place in a {family.architecture} as it is read from such files")
    return found


def _end_with(parent: int) -> None:
    """End this process once `parent`, which started it, is gone."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[3]),), daemon=True).start()
    _describe_here(Path(sys.argv[1]), Path(sys.argv[2]))
