"""GGUF files: converted once to ordinary Hugging Face directories, which are read in a fraction of the time.

Reading such a file takes Python tens of seconds (its vocabulary is a list of a hundred thousand fields, and weights are
dequantised block by block), and every process of a run would do it.  What a file states is what runs, or it is refused:
`families.GGUF` declares what its architecture must state.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pearl.cache import CONVERTED, Progress, built_once, cache_directory, stamp
from pearl.errors import ModelError
from pearl.models.families import GGUF

_GENERATION = "generation_config.json"
_LOOK_SECONDS = 0.5
_HEADER = 32 << 20  # bytes, more than a vocabulary takes
_ALWAYS = ("block_count", "context_length", "embedding_length", "attention.head_count", "feed_forward_length")
_SIGMOID = 2  # a value of `expert_gating_func`
# The rope of Llama 3.1 and later, except its factor. A file has the resulting frequencies instead.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# llama.cpp's defaults for what a config.json cannot state otherwise.
_FIXED = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}


def directory_of(file: Path, dtype: str, progress: Progress) -> Path:
    """The directory that `file` is converted to, once: weights, tokenizer and generation settings.

    `dtype` of the weights: float32, float16, else bfloat16; "any" where only the tokenizer is needed.  Raises
    `ModelError`.
    """
    _check_magic(file)
    name = _name(file)
    if dtype == "any":
        dtype = next((path.name.rpartition("-")[2] for path in conversions(file)), "bfloat16")
    elif dtype not in ("float32", "float16"):
        dtype = "bfloat16"

    def build(building: Path, progress: Progress) -> None:
        _check_whole(file)
        progress(f"converting {file.name} to {dtype} (once, about a minute for a billion weights)")
        convert(file, building, dtype)

    return built_once(f"{name}-{dtype}", build, progress, cache_directory() / CONVERTED)


def _name(file: Path) -> str:
    beside = file.parent / _GENERATION
    stem = re.sub(r"[^\w.-]", "_", file.stem)[:80]
    return f"{stem}-{stamp([file, *([beside] if beside.is_file() else [])])}"


def conversions(file: Path) -> list[Path]:
    """The directories that `file` has been converted to."""
    found = (cache_directory() / CONVERTED).glob(f"{glob.escape(_name(file))}-*")
    return sorted(path for path in found if path.is_dir())


def _check_magic(file: Path) -> None:
    """Refuse other files at once, before a process imports torch."""
    try:
        with file.open("rb") as opened:
            is_gguf = opened.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"Model {str(file)!r} could not be loaded: {error.strerror}.") from error
    if not is_gguf:
        raise ModelError(f"Model {str(file)!r} could not be loaded: it is no GGUF file. Get it again.")


def _check_whole(file: Path) -> None:
    """Refuse one of several parts before anything reads its vocabulary."""
    with file.open("rb") as opened:
        count = re.search(rb"split\.count\x02\0\0\0(..)", opened.read(_HEADER), re.DOTALL)  # a number of 16 bits
    if count and (parts := int.from_bytes(count[1], "little")) > 1:
        raise ModelError(
            f"Model {str(file)!r} could not be loaded: it is one of {parts} parts. Merge them with llama.cpp's "
            "`llama-gguf-split --merge FIRST-PART WHOLE.gguf`, and name WHOLE.gguf."
        )


def convert(file: Path, directory: Path, dtype: str) -> None:
    """Convert in a child process, which ends with this one. Raises `ModelError`.

    The GGUF reader prints, and its gigabytes of memory are freed when the process ends.
    """
    command = [
        sys.executable,
        "-m",
        "pearl.models.checkpoints.gguf",
        str(file),
        str(directory),
        dtype,
        str(os.getpid()),
    ]
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


def _convert_here(file: Path, directory: Path, dtype: str) -> None:
    """Write the model of a GGUF file, dequantised to `dtype`, its tokenizer and its generation settings."""
    from gguf import GGUFReader

    from pearl.models.checkpoints.formats import keep
    from pearl.text.gguf_tokenizer import tokenizer_of

    reader = GGUFReader(file)
    architecture, stated = _stated(reader)
    _check_stated(architecture, stated)

    import torch  # which takes seconds
    import transformers

    tokenizer, ends = tokenizer_of(reader)
    place, name = str(file.parent), file.name
    config = transformers.AutoConfig.from_pretrained(place, gguf_file=name)
    if architecture == "llama" and config.model_type == "mistral":
        # transformers makes one of a file with that name, and then finds no place for its tensors.
        settings = {name: value for name, value in config.to_dict().items() if name != "sliding_window"}
        config = transformers.LlamaConfig.from_dict(settings | {"model_type": architecture})
    _complete(config, architecture, stated)
    _scale_rope(config, stated, reader)
    quantised: Any = getattr(transformers, "GgufConfig", None)  # older releases always dequantise
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        place,
        gguf_file=name,
        config=config,
        dtype=getattr(torch, dtype),
        ignore_mismatched_sizes=True,  # reported below
        output_loading_info=True,
        **({"quantization_config": quantised(dequantize=True)} if quantised else {}),
    )
    model, found = loaded
    if unfit := unfit_weights(model, found):
        sys.exit(unfit)
    model.config.__dict__.pop("quantization_config", None)  # the weights are plain from here on
    _check_all_read(model, reader)
    _check_disk(model, directory)
    model.save_pretrained(directory)
    keep(directory, dict(_rows(model, reader, architecture)))
    tokenizer.save_pretrained(directory)
    has_generation = (file.parent / _GENERATION).is_file()  # else the file's header names no option but ends
    made = transformers.GenerationConfig
    generation = made.from_pretrained(place) if has_generation else made()
    if generation.eos_token_id is None:
        generation.eos_token_id = ends or None
    generation.save_pretrained(directory)


def _check_disk(model: Any, directory: Path) -> None:
    """Exit where the weights would not fit."""
    needed = sum(weight.nbytes for weight in model.parameters())
    free = shutil.disk_usage(directory.parent).free
    if needed > free:
        sys.exit(f"its weights take {needed / 1e9:.1f} GB in {directory.parent}, where {free / 1e9:.1f} GB are free")


def _rows(model: Any, reader: Any, architecture: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Matrices as the file has them, by their names in the model: (type, bytes of each row).

    Only those that are the model's weights, bit for bit, once dequantised.
    """
    import gguf
    import torch

    from pearl.models.checkpoints.formats import GGUF_BLOCKS, from_gguf

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        tensor = tensors.get(names.get_name(name, (".weight",)))
        if weight.dim() != 2 or tensor is None or tensor.tensor_type.name not in GGUF_BLOCKS:
            continue
        rows = torch.from_numpy(tensor.data)
        # llama.cpp has the halves of a head that rope turns in turns.
        for width in (
            0,
            weight.shape[0] // model.config.num_attention_heads,
            getattr(model.config, "head_dim", 0) or 0,
        ):
            if width and weight.shape[0] % width:
                continue
            some = rows.view(-1, width // 2, 2, rows.shape[1]).transpose(1, 2).flatten(0, 2) if width else rows
            if torch.equal(from_gguf(tensor.tensor_type.name, some).dequantised().to(weight.dtype), weight):
                yield name, (tensor.tensor_type.name, some)
                break


def unfit_weights(model: Any, found: dict[str, Any]) -> str:
    """A sentence on weights that are in no file, or have another shape there; empty where there are none.

    transformers fills missing weights with random numbers, and missing learned buffers with zeros or ones. Buffers that
    it computes from the configuration, frequencies and masks, have other values.

    Args:
        found: the loading info of `from_pretrained` with `ignore_mismatched_sizes`.
    """
    absent = found["missing_keys"]
    learned = {name for name, _ in model.named_parameters()}
    learned |= {name for name, buffer in model.named_buffers() if name in absent and _is_flat(buffer)}
    if missing := sorted(absent & learned):
        return f"{len(missing)} of its weights are in no file, {missing[0]} for one"
    for name, shape, wanted in sorted(found["mismatched_keys"]):
        return f"its weight {name} has the shape {list(shape)} where {list(wanted)} is expected"
    return ""


def _is_flat(buffer: Any) -> bool:
    """Whether it is all zeros or all ones."""
    return buffer.is_floating_point() and any(bool((buffer == usual).all()) for usual in (0, 1))


def _check_all_read(model: Any, reader: Any) -> None:
    """Exit where transformers has left out weights of the file, such as biases that a family lacks there."""
    read = sum({weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}.values())
    again = {"output.weight"} if model.config.tie_word_embeddings else set()  # Falcon's and Bloom's, a second time
    held = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors if not tensor.name.startswith("rope_f")}
    left = sum(held.values()) - sum(held.get(name, 0) for name in again) - read
    if left > 0:
        sys.exit(f"{left} of its weights have no place in a {type(model).__name__} as it is read from such files")


def _stated(reader: Any) -> tuple[str, dict[str, Any]]:
    """A file's architecture, and what the file states of it."""
    field = reader.fields.get("general.architecture")
    architecture = str(field.contents()) if field else ""
    start = f"{architecture}."
    names = {name: field for name, field in reader.fields.items() if name.startswith(start)}
    return architecture, {name.removeprefix(start): field.contents() for name, field in names.items()}


def _check_stated(architecture: str, stated: dict[str, Any]) -> None:
    """Exit where the file leaves something open, or states what a configuration cannot."""
    if architecture not in GGUF:
        sys.exit(f"files of the architecture {architecture!r} are not read")
    needed = dict.fromkeys((*_ALWAYS, *GGUF[architecture].needed))
    if "expert_feed_forward_length" in stated:
        needed.pop("feed_forward_length")  # every layer has experts
    for name in needed:
        if name not in stated:
            sys.exit(f"it does not say {name!r}, without which {architecture!r} files are not read")
    for name in (*needed, "attention.head_count_kv"):
        if isinstance(stated.get(name), list):
            sys.exit(f"it says {name!r} for each layer, and {architecture!r} files are read with one for all")
    experts, used = stated.get("expert_count", 0), stated.get("expert_used_count", 0)
    if experts and "expert_count" not in needed:
        sys.exit(f"it has {experts} experts, which {architecture!r} files are not read with")
    if "expert_count" in needed and not 0 < used <= experts:
        sys.exit(f"it uses {used} experts of {experts}")
    if stated.get("expert_weights_scale", 0) not in (0, 1):
        sys.exit(f"it scales what its experts say by {stated['expert_weights_scale']}, which transformers does not")
    if architecture == "minimax-m2" and stated.get("expert_gating_func") != _SIGMOID:
        sys.exit(f"its experts are not chosen by a sigmoid: expert_gating_func is {stated.get('expert_gating_func')}")


def _complete(config: Any, architecture: str, stated: dict[str, Any]) -> None:
    """Set what the file states and transformers does not read. Exits where a configuration cannot state it."""
    gguf = GGUF[architecture]
    for name, attribute in {**gguf.needed, **gguf.optional}.items():
        if name in stated:
            setattr(config, attribute, stated[name])
    width = stated.get("attention.key_length") or config.hidden_size // config.num_attention_heads
    if "head_dim" in vars(config):
        config.head_dim = width
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in stated and hasattr(config, name):
            setattr(config, name, float(stated[name]))
    if gguf.layers_of_27b:  # as llama.cpp, for no file states it
        is_27b = config.num_hidden_layers == gguf.layers_of_27b
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else width
    _complete_window(config, architecture, stated)
    _complete_rope(config, architecture, stated, width)


def _complete_window(config: Any, architecture: str, stated: dict[str, Any]) -> None:
    """Set how far attention looks back, and in which layers."""
    period, window = GGUF[architecture].window
    window = stated.get("attention.sliding_window", window)  # 0 where there is none
    if period:
        period, count = stated.get("attention.sliding_window_pattern", period), config.num_hidden_layers
        slide = period if isinstance(period, list) else [not period or n % period < period - 1 for n in range(count)]
        if len(slide) != count:
            sys.exit(f"it says of {len(slide)} layers whether they have a window, and has {count}")
        config.layer_types = [f"{'sliding' if each and window else 'full'}_attention" for each in slide]
        config.sliding_window = window or config.max_position_embeddings
    elif hasattr(config, "sliding_window") and "attention.sliding_window" in stated:
        config.sliding_window = window or None
    elif 0 < window < stated["context_length"]:
        sys.exit(f"its attention has a window of {window} tokens, which {architecture!r} files are not read with")


def _complete_rope(config: Any, architecture: str, stated: dict[str, Any], width: int) -> None:
    """Set the rope's base, and how many of a head's `width` dimensions it turns; llama.cpp's where a file has none."""
    ropes = getattr(config, "rope_parameters", None)
    if not ropes:
        return
    rope = ropes.get("full_attention", ropes)
    for each, name in ((rope, "rope.freq_base"), (ropes.get("sliding_attention"), "rope.freq_base_swa")):
        if each:
            each["rope_theta"] = float(stated.get(name, 1e4))
    turned = stated.get("rope.dimension_count", width)
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = turned / width
    elif turned != width:
        sys.exit(f"its rope turns {turned} of {width} dimensions, which {architecture!r} files are not read with")


def _scale_rope(config: Any, stated: dict[str, Any], reader: Any) -> None:
    """Set the file's scaling of the rope, which transformers does not read. Exits where a configuration has none such.

    Without it a text differs from its first token on.
    """
    stated = {name.removeprefix("rope.scaling."): stated[name] for name in stated if name.startswith("rope.scal")}
    factor = float(stated.get("factor") or stated.get("rope.scale_linear") or 1.0)
    kind = stated.get("type", "linear")  # as llama.cpp
    divisors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    if any(stated.get(name, usual) != usual for name, usual in _FIXED.items()):
        sys.exit(f"its rope is scaled in a way that transformers has not: {stated}")
    scaling: dict[str, Any] = {}
    if kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        length = stated.get("original_context_length") or config.max_position_embeddings
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(length)}
        scaling |= {
            name: float(stated[f"yarn_{name}"]) for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in stated
        }
    elif kind not in ("linear", "none"):
        sys.exit(f"its rope is scaled by {kind!r}, which is not read from such files")
    if not scaling and not divisors:
        return
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)  # the other layers' is not scaled
    if divisors:
        if scaling or list(divisors) != ["rope_freqs.weight"] or ropes is not rope:
            sys.exit(f"its rope is scaled by tensors that are not read from such files: {', '.join(divisors)}")
        scaling = _llama3(rope, divisors["rope_freqs.weight"])
    rope.update(scaling)


def _llama3(rope: dict[str, Any], divisors: Any) -> dict[str, Any]:
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


def _end_with(parent: int) -> None:
    """End this process once `parent`, which started it, is gone."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[4]),), daemon=True).start()
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
