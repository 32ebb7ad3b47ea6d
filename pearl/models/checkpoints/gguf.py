"""GGUF files: read in place.  What a file states is written once, as the files of a Hugging Face directory.

Making a tokenizer takes seconds, and every process of a run would do it.  So config.json, the tokenizer and how to
sample are cached, with a table of where each weight is; `gguf_weights` maps them from the file.  What a file states is
what runs, or it is refused: `families.GGUF` declares what each architecture must state.  Must not import torch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pearl.cache import GGUF_FILES, Progress, built_once, cache_directory, stamp
from pearl.errors import ModelError
from pearl.models.checkpoints.gguf_sampling import generation_config
from pearl.models.families import GGUF, Family, weight_shapes
from pearl.printable import cause_of

TABLE, _GENERATION = "gguf.json", "generation_config.json"
# What the enumerations of `gguf` say of a number that they do not have, and what each of them numbers.
_UNKNOWN = {"GGMLQuantizationType": "weights", "GGUFValueType": "fields"}
_UNKNOWN_NUMBER = re.compile(rf"(?P<number>\d+)\)? is not a valid (?P<kind>{'|'.join(_UNKNOWN)})")
_LEAST_DAMAGED = 256  # numbers from here on are those of a damaged file, not of a newer one
_OTHER_FILE = "take another file of the model"
_ARRAY = struct.Struct("<IQ")  # the type and the number of its items
_LENGTH = struct.Struct("<Q")  # of a string, in bytes
_EXPERT = re.compile(r"(?<=\.experts)\.\d+")  # in the name of a weight
_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_NEEDED_BY_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
# The rope of Llama 3.1 and later, except its factor. A file has the resulting frequencies instead.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FACTORS = {
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}  # a longrope's
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
        file: in this one, in the table's directory or elsewhere.
        interleaved: the width of a head, where rows of queries and keys have its halves in turns; else 0.
        tensors: by their names in transformers.
    """

    file: str
    interleaved: int
    tensors: dict[str, Tensor]

    def write(self, directory: Path) -> None:
        (directory / TABLE).write_bytes(msgspec.json.encode(self))


def table_in(directory: Path) -> Table | None:
    """That of the GGUF file which `directory` describes; None where it is an ordinary checkpoint."""
    if not (directory / TABLE).is_file():
        return None
    table = msgspec.json.decode((directory / TABLE).read_bytes(), type=Table)
    return table._replace(file=str(directory / table.file))


def directory_of(file: Path, progress: Progress) -> Path:
    """The directory that describes `file`, made once: config.json, tokenizer, how to sample, and where weights are.

    Raises `ModelError`.
    """

    def build(building: Path, progress: Progress) -> None:
        progress(f"reading the header of {file.name} (once)")
        building.mkdir()
        describe_file(file, building)

    beside = file.parent / _GENERATION
    name = (
        re.sub(r"[^\w.-]", "_", file.stem)[:80]
        + f"-{stamp([file, *([beside] if beside.is_file() else [])])}"
    )
    return built_once(name, build, progress, cache_directory() / GGUF_FILES)


def describe_file(file: Path, directory: Path) -> None:
    """Write into `directory` what `file` states. Raises `ModelError`."""
    from pearl.text.gguf_tokenizer import tokenizer_of

    try:
        fields, tensors = read_header(file)
        if (parts := fields.get("split.count", 1)) > 1:
            raise ValueError(
                f"it is one of {parts} parts. Merge them with llama.cpp's `llama-gguf-split --merge FIRST-PART "
                "WHOLE.gguf`, and name WHOLE.gguf"
            )
        architecture = str(fields.get("general.architecture"))
        start = f"{architecture}."
        stated = {
            name.removeprefix(start): value
            for name, value in fields.items()
            if name.startswith(start)
        }
        family = _family_of(architecture, stated)
        config = _config(family, stated, tensors)
        config["rope_parameters"] = _ropes(family, stated, config, file, tensors)
        table = Table(
            file.name if file.parent == directory else str(file.absolute()),
            config["head_dim"] if family.gguf.interleaves else 0,
            _located(family, config, tensors),
        )
        _check_types(table.tensors)
        tokenizer, settings, ends = tokenizer_of(fields)
        beside = file.parent / _GENERATION
        generation = (
            json.loads(beside.read_text()) if beside.is_file() else generation_config(fields)
        )
    except Exception as error:  # files and their readers raise anything
        raise ModelError(f"Model {str(file)!r} could not be loaded: {cause_of(error)}.") from error
    if generation.get("eos_token_id") is None:
        generation["eos_token_id"] = ends or None
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / _GENERATION).write_text(json.dumps(generation))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    table.write(directory)


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors by name. Raises `ValueError` for a file that cannot be read, with the reason; `OSError`."""
    from gguf import GGUF_VERSION

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file. Get it again")
        number = int.from_bytes(opened.read(4), "little")
    if GGUF_VERSION < number < _LEAST_DAMAGED:
        raise ValueError(f"it has the version {number} of GGUF{_newer_than(GGUF_VERSION)}")
    try:
        reader = _reader_of(file)
    except Exception as error:
        raise ValueError(_problem(error)) from error
    tensors = {}
    for each in reader.tensors:
        shape = tuple(each.shape.tolist()[::-1])
        tensors[each.name] = Tensor(
            each.tensor_type.name, shape, int(each.data_offset), int(each.n_bytes)
        )
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def _problem(error: Exception) -> str:
    """Why `gguf` cannot read a file: it may know less than the file states, and has no class of error for that."""
    import gguf

    unknown = _UNKNOWN_NUMBER.search(str(error))
    number = int(unknown["number"]) if unknown else _LEAST_DAMAGED
    if unknown is None or number >= _LEAST_DAMAGED:
        return f"it is cut off or damaged ({cause_of(error)})"
    newest = max(getattr(gguf, unknown["kind"]))
    if number < newest:
        return f"it has {_UNKNOWN[unknown['kind']]} of the type {number}, which was withdrawn: {_OTHER_FILE}"
    return f"it has {_UNKNOWN[unknown['kind']]} of the type {number}{_newer_than(newest)}"


def _newer_than(newest: int) -> str:
    return (
        f", which is newer than the reader: gguf {version('gguf')} knows none above {newest:d}. Update it "
        f"(pip install --upgrade gguf), or {_OTHER_FILE}"
    )


def _check_types(tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` where neither we nor `gguf` know how to dequantise a weight."""
    import gguf
    import numpy as np

    for kind in {tensor.kind for tensor in tensors.values()}:
        type_of_weights = gguf.GGMLQuantizationType[kind]
        _, size = gguf.GGML_QUANT_SIZES[type_of_weights]
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), type_of_weights)
        except NotImplementedError:
            raise ValueError(
                f"it has weights of the type {kind}, which gguf {version('gguf')} does not dequantise: {_OTHER_FILE}"
            ) from None


def _reader_of(file: Path) -> Any:
    """gguf-py's reader, made fast for vocabularies: by itself it takes four seconds for 262,144 tokens."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            """Reads from a plain array: slices of a memmap take four times as long."""
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[Any]]:
            """The parts of a field. An array's numbers are one part, and its strings have no parts of their lengths."""
            kind = GGUFValueType(raw_type)
            if kind != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            item_kind, count = _ARRAY.unpack_from(data, orig_offs)
            start = orig_offs + _ARRAY.size
            kinds = [kind, GGUFValueType(item_kind)]
            number = self.gguf_scalar_to_np.get(kinds[1])
            if number is not None:
                numbers = self._get(start, number, count)
                return _ARRAY.size + numbers.nbytes, [numbers], [0], kinds
            if kinds[1] != GGUFValueType.STRING:
                return super()._get_field_parts(orig_offs, raw_type)
            strings, end = _strings(memoryview(data), start, count)
            return end - orig_offs, strings, [*range(count)], kinds

    return Reader(file)


def _strings(data: memoryview, start: int, count: int) -> tuple[list[memoryview], int]:
    """`count` strings, each behind its length, and where they end. Raises `ValueError` where the data end first."""
    strings = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if start + length > len(data):
            raise ValueError("a string is longer than the file")
        strings.append(data[start : start + length])
        start += length
    return strings, start


def _family_of(architecture: str, stated: Mapping[str, Any]) -> Family:
    """The family of a file. Raises `ValueError` where the file leaves something open, or cannot be computed."""
    experts, used = stated.get("expert_count", 0), stated.get("expert_used_count", 0)
    family = GGUF.get((architecture, experts > 0))
    if family is None and architecture in {name for name, _ in GGUF}:
        raise ValueError(
            f"it has {experts} experts, which {architecture!r} files are not read with"
        )
    if family is None:
        raise ValueError(
            f"files of the architecture {architecture!r} are not read. Take the model as safetensors"
        )
    needed = {
        **_NEEDED,
        **family.gguf.needed,
        **(_NEEDED_BY_EXPERTS if family.forward.has_experts else {}),
    }
    if "expert_feed_forward_length" in stated:
        needed.pop("feed_forward_length")  # every layer has experts
    for name in (*needed, "attention.head_count_kv"):
        if name in needed and name not in stated:
            raise ValueError(
                f"it does not say {name!r}, without which {architecture!r} files are not read"
            )
        if isinstance(stated.get(name), list):
            raise ValueError(
                f"it says {name!r} for each layer, and {architecture!r} files are read with one for all"
            )
    if family.forward.has_experts and not 0 < used <= experts:
        raise ValueError(f"it uses {used} experts of {experts}")
    if stated.get("expert_weights_scale", 0) not in (0, 1):
        raise ValueError(
            f"it scales what its experts say by {stated['expert_weights_scale']}, which is not computed"
        )
    return family


def _config(
    family: Family, stated: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The config.json of a file, but its ropes. Raises `ValueError` where none can state what the file does."""
    gguf = family.gguf
    names = {**_NEEDED, **_NEEDED_BY_EXPERTS, **gguf.needed, **gguf.optional}
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **gguf.settings,
        **{attribute: stated[name] for name, attribute in names.items() if name in stated},
        "vocab_size": tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in tensors
        else 0,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    heads, hidden, layers = (
        config[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    config["head_dim"] = width = stated.get("attention.key_length", hidden // heads)
    config["num_key_value_heads"] = stated.get("attention.head_count_kv", heads)
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    if family.forward.has_experts:
        config["num_experts"] = config["num_local_experts"]  # families differ in the name
    if gguf.ropeless:
        config["no_rope_layers"] = [
            int((number + 1) % gguf.ropeless != 0) for number in range(layers)
        ]
    if gguf.layers_of_27b:  # as llama.cpp, for no file states it
        config["query_pre_attn_scalar"] = hidden // heads if layers == gguf.layers_of_27b else width
    return config | _windows(family, stated, layers)


def _windows(family: Family, stated: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """How far attention looks back, and in which layers, as in config.json."""
    period, window = family.gguf.window
    window = stated.get("attention.sliding_window", window)  # 0 where there is none
    if period:
        period = stated.get("attention.sliding_window_pattern", period)
        slide = (
            period
            if isinstance(period, list)
            else [not period or n % period < period - 1 for n in range(layers)]
        )
        if len(slide) != layers:
            raise ValueError(
                f"it says of {len(slide)} layers whether they have a window, and has {layers}"
            )
        types = [f"{'sliding' if each and window else 'full'}_attention" for each in slide]
        return {"layer_types": types, "sliding_window": window or stated["context_length"]}
    if family.forward.default_window is not None:
        return {"sliding_window": window or None}
    if 0 < window < stated["context_length"]:
        of = family.gguf.architecture
        raise ValueError(
            f"its attention has a window of {window} tokens, which {of!r} files are not read with"
        )
    return {}


def _ropes(
    family: Family,
    stated: Mapping[str, Any],
    config: Mapping[str, Any],
    file: Path,
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The `rope_parameters`: their base, how many of a head's dimensions they turn, and how the file scales them.

    llama.cpp's defaults where a file states nothing. Without a scaling a text differs from its first token on.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(stated.get("rope.freq_base", 1e4)),
    }
    turned, width = stated.get("rope.dimension_count", config["head_dim"]), config["head_dim"]
    if family.forward.rotates:
        rope["partial_rotary_factor"] = turned / width
    elif turned != width:
        of = family.gguf.architecture
        raise ValueError(
            f"its rope turns {turned} of {width} dimensions, which {of!r} files are not read with"
        )
    given = {
        name: _numbers(file, tensor)
        for name, tensor in tensors.items()
        if name.startswith("rope_f")
    }
    scaling = _scaling(stated, config["max_position_embeddings"], {*given} == {*_FACTORS})
    if {*given} == {*_FACTORS} and scaling.get("rope_type") == "longrope":
        scaling |= {attribute: given[name].tolist() for name, attribute in _FACTORS.items()}
    elif [*given] == ["rope_freqs.weight"] and not scaling and not family.gguf.has_two_ropes:
        scaling = _llama3(rope["rope_theta"], given["rope_freqs.weight"])
    elif given:
        raise ValueError(
            f"its rope is scaled by tensors that are not read from such files: {', '.join(given)}"
        )
    if not family.gguf.has_two_ropes:
        return {**rope, **scaling, **family.gguf.rope}
    sliding = rope | {"rope_theta": float(stated.get("rope.freq_base_swa", 1e4))}
    return {"full_attention": rope | scaling, "sliding_attention": sliding}


def _scaling(stated: Mapping[str, Any], positions: int, is_long: bool) -> dict[str, Any]:
    """Of a rope, as in config.json. Raises `ValueError` where that cannot state it.

    is_long: the file has a longrope's factors.
    """
    stated = {
        name.removeprefix("rope.scaling."): stated[name]
        for name in stated
        if name.startswith("rope.scal")
    }
    factor = float(stated.get("factor") or stated.get("rope.scale_linear") or 1.0)
    kind = stated.get("type", "longrope" if is_long else "linear")  # as llama.cpp
    length = int(stated.get("original_context_length") or positions)
    attention = float(stated.pop("attn_factor", 1.0)) if is_long else 1.0
    if any(stated.get(name, usual) != usual for name, usual in _FIXED.items()):
        raise ValueError(f"its rope is scaled in a way that is not computed: {stated}")
    if kind == "longrope" and is_long:
        return {
            "rope_type": kind,
            "attention_factor": attention,
            "original_max_position_embeddings": length,
        }
    if kind == "yarn":
        betas = {
            name: float(stated[f"yarn_{name}"])
            for name in ("beta_fast", "beta_slow")
            if f"yarn_{name}" in stated
        }
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            **betas,
        }
    if kind not in ("linear", "none"):
        raise ValueError(f"its rope is scaled by {kind!r}, which is not read from such files")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}


def _numbers(file: Path, tensor: Tensor) -> Any:
    """A tensor of a rope, [n]."""
    import numpy as np

    (count,) = tensor.shape
    if tensor.kind != "F32":
        raise ValueError(
            f"its rope is scaled by numbers of the type {tensor.kind}, which are not read"
        )
    return np.fromfile(file, np.float32, count, offset=tensor.offset)


def _llama3(base: float, divisors: Any) -> dict[str, Any]:
    """The scaling whose frequencies are the plain ones divided by `divisors` [head_dim / 2]."""
    import torch

    from pearl.models.checkpoints.direct import frequencies

    given, size, theta = (
        torch.from_numpy(divisors),
        {"head_dim": 2 * len(divisors)},
        {"rope_theta": base},
    )
    found = {"rope_type": "llama3", "factor": round(float(given.max()), 3), **_LLAMA3}
    (plain, _), (scaled, _) = (
        frequencies(theta | rope, size) for rope in ({"rope_type": "default"}, found)
    )
    if not torch.allclose(plain / given, scaled, rtol=1e-3, atol=0):
        raise ValueError(
            "its rope has frequencies that are not those of Llama 3.1, and no others are read"
        )
    return found


def _located(
    family: Family, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Each weight of the model. Raises `ValueError` where the file has not exactly these."""
    import gguf

    kind = next(
        kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family.gguf.architecture
    )
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    shapes, there, held = weight_shapes(family.forward, config), _apart(tensors), {}
    for name in shapes:
        number = _EXPERT.search(name)
        its = names.get_name(_EXPERT.sub("", name), (".weight", ".bias"))
        held[name] = f"{its}{'.weight' * name.endswith('.sinks')}{number[0] if number else ''}"
    if missing := sorted(name for name in shapes if held[name] not in there):
        raise ValueError(f"{len(missing)} of its weights are in no file, {missing[0]} for one")
    for name, wanted in shapes.items():
        if (shape := there[held[name]].shape) != wanted:
            raise ValueError(
                f"its weight {name} has the shape {list(shape)} where {list(wanted)} is expected"
            )
    if left := sorted(
        name for name in {*there} - {*held.values()} if not name.startswith("rope_f")
    ):
        raise ValueError(
            f"{len(left)} of its weights have no place in a {family.architecture}, {left[0]} for one"
        )
    return {name: there[its] for name, its in held.items()}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the matrices of experts, which files have stacked, each by itself: NAME.3 out of NAME."""
    found = dict(tensors)
    for name in [name for name in tensors if "_exps." in name]:
        kind, (count, *shape), offset, size = found.pop(name)
        each = size // count
        found |= {
            f"{name}.{at}": Tensor(kind, (*shape,), offset + at * each, each) for at in range(count)
        }
    return found
