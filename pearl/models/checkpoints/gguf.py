"""Makes a directory in Hugging Face's format for a GGUF file, whose weights stay in the file.

Making a tokenizer takes seconds, and every process of a run would have to do it.  So config.json,
the tokenizer and the sampling settings are written to the cache once, with a table of where each
weight is in the file; `gguf_weights` reads the weights.  A model runs exactly as its file states,
or the file is refused: `families.GGUF` declares what the files of each architecture must state.
This module must not import torch.
"""

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
from pearl.models.families import GGUF, Config, Family, weight_shapes
from pearl.printable import cause_of

TABLE = "gguf.json"
_GENERATION = "generation_config.json"
# Enumerations of the `gguf` package -> what their numbers are types of; and the text of the error
# that they raise for an unknown number.
_UNKNOWN = {"GGMLQuantizationType": "weights", "GGUFValueType": "fields"}
_UNKNOWN_NUMBER = re.compile(rf"(?P<number>\d+)\)? is not a valid (?P<kind>{'|'.join(_UNKNOWN)})")
_LEAST_DAMAGED = 256  # a number from here on means a damaged file, not a newer one
_OTHER_FILE = "take another file of the model"
_ARRAY = struct.Struct("<IQ")  # header of an array: type of its items, number of its items
_LENGTH = struct.Struct("<Q")  # length of a string, in bytes
_EXPERT = re.compile(r"(?<=\.experts)\.\d+")  # an expert's number in the name of a weight
NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
NEEDED_BY_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
# The settings of the rope of Llama 3.1 and later, except its factor. A file has the resulting
# frequencies instead of these settings.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FACTORS = {  # tensors of a longrope -> their settings
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
_FREQUENCIES = "rope_freqs.weight"
# Settings of a rope that a config.json cannot state, with llama.cpp's defaults. Other values are refused.
_FIXED = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "alpha": 0.0,
    "finetuned": True,
}


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        kind: GGUF's name of its type.
        shape: as in torch.
        offset: position of its first byte in the file.
        size: number of its bytes.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


Fields = Mapping[str, Any]  # fields of a file, by name; an architecture's fields without its prefix
Tensors = Mapping[str, Tensor]  # by their names in the file


class GgufTable(NamedTuple):
    """Where the weights of a model are in its file.

    Attributes:
        file: path of the file; a relative path begins at the directory of the table.
        interleaved: head_dim, if the rows of queries and keys interleave the two halves of each
            head; else 0.
        tensors: the weights, by their names in transformers.
    """

    file: str
    interleaved: int
    tensors: dict[str, Tensor]

    def write(self, directory: Path) -> None:
        (directory / TABLE).write_bytes(msgspec.json.encode(self))


def table_in(directory: Path) -> GgufTable | None:
    """Return the table of the GGUF file that `directory` describes; None for an ordinary checkpoint."""
    if not (directory / TABLE).is_file():
        return None
    table = msgspec.json.decode((directory / TABLE).read_bytes(), type=GgufTable)
    return table._replace(file=str(directory / table.file))


def directory_of(file: Path, progress: Progress) -> Path:
    """Return the directory in the cache that describes `file`.

    The first call makes the directory with `describe_file`.  Raises `ModelError` if the file cannot
    be read or is refused.
    """

    def build(building: Path, progress: Progress) -> None:
        progress(f"reading the header of {file.name} (once)")
        building.mkdir()
        describe_file(file, building)

    sources = [file]
    generation = file.parent / _GENERATION
    if generation.is_file():
        sources.append(generation)
    name = re.sub(r"[^\w.-]", "_", file.stem)[:80]
    return built_once(f"{name}-{stamp(sources)}", build, progress, cache_directory() / GGUF_FILES)


def describe_file(file: Path, directory: Path) -> None:
    """Write config.json, tokenizer, generation_config.json and the table of weights of `file` into `directory`.

    A generation_config.json beside the file has priority over the file's own sampling settings.
    Raises `ModelError` if the file cannot be read or is refused.
    """
    from pearl.text.gguf_tokenizer import tokenizer_of

    try:
        fields, tensors = read_header(file)
        parts = fields.get("split.count", 1)
        if parts > 1:
            raise ValueError(
                f"it is one of {parts} parts. Merge them with llama.cpp's `llama-gguf-split --merge FIRST-PART "
                "WHOLE.gguf`, and name WHOLE.gguf"
            )
        architecture = str(fields.get("general.architecture"))
        stated = _below(f"{architecture}.", fields)
        family = family_of(architecture, stated)
        config = _config(family, stated, tensors)
        config["rope_parameters"] = _ropes(family, stated, config, file, tensors)
        table = GgufTable(
            file=file.name if file.parent == directory else str(file.absolute()),
            interleaved=config["head_dim"] if family.gguf.interleaves else 0,
            tensors=_located(family, config, tensors),
        )
        _check_types(table.tensors)
        tokenizer, settings, ends = tokenizer_of(fields)
        stated_generation = file.parent / _GENERATION
        if stated_generation.is_file():
            generation = json.loads(stated_generation.read_text())
        else:
            generation = generation_config(fields)
    except Exception as error:  # files and their readers raise anything
        raise ModelError(f"Model {str(file)!r} could not be loaded: {cause_of(error)}.") from error
    if generation.get("eos_token_id") is None:
        generation["eos_token_id"] = ends or None
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / _GENERATION).write_text(json.dumps(generation))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    table.write(directory)


def _below(prefix: str, fields: Fields) -> dict[str, Any]:
    """Return the fields whose names begin with `prefix`, which is removed from the names."""
    return {
        name.removeprefix(prefix): value
        for name, value in fields.items()
        if name.startswith(prefix)
    }


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a file's fields and tensors, by name.

    Raises `ValueError` with the reason if the file is damaged or too new, and `OSError` if it
    cannot be opened.
    """
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
    for tensor in reader.tensors:
        tensors[tensor.name] = Tensor(
            kind=tensor.tensor_type.name,
            shape=tuple(tensor.shape.tolist()[::-1]),
            offset=int(tensor.data_offset),
            size=int(tensor.n_bytes),
        )
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def _problem(error: Exception) -> str:
    """Return the reason why the `gguf` package cannot read a file, from the error that it raised.

    The file may use a type that `gguf` does not know. `gguf` has no class of error for that, so the
    error's text decides.
    """
    import gguf

    unknown = _UNKNOWN_NUMBER.search(str(error))
    number = _LEAST_DAMAGED
    if unknown:
        number = int(unknown["number"])
    if unknown is None or number >= _LEAST_DAMAGED:
        return f"it is cut off or damaged ({cause_of(error)})"
    newest = max(getattr(gguf, unknown["kind"]))
    values = f"{_UNKNOWN[unknown['kind']]} of the type {number}"
    if number < newest:
        return f"it has {values}, which was withdrawn: {_OTHER_FILE}"
    return f"it has {values}{_newer_than(newest)}"


def _newer_than(newest: int) -> str:
    return (
        f", which is newer than the reader: gguf {version('gguf')} knows none above {newest:d}. Update it "
        f"(pip install --upgrade gguf), or {_OTHER_FILE}"
    )


def _check_types(tensors: Tensors) -> None:
    """Raise `ValueError` if there is a type of weight that `gguf` does not dequantise."""
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
    """Return a reader that is faster than gguf-py's own.

    gguf-py's reader takes four seconds for a vocabulary of 262,144 tokens.
    """
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            """Keep the data as a plain array: to slice a memmap takes four times as long."""
            if name == "data":
                value = np.asarray(value)
            super().__setattr__(name, value)

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[Any]]:
            """Return the parts of a field, as gguf-py's method does, with two differences.

            The numbers of an array are a single part, and strings come without their lengths.
            """
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
            return end - orig_offs, strings, list(range(count)), kinds

    return Reader(file)


def _strings(data: memoryview, start: int, count: int) -> tuple[list[memoryview], int]:
    """Read `count` strings, each after its length; return them and the position after the last.

    Raises `ValueError` if a string is longer than the data.
    """
    strings = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if start + length > len(data):
            raise ValueError("a string is longer than the file")
        strings.append(data[start : start + length])
        start += length
    return strings, start


def family_of(architecture: str, stated: Fields) -> Family:
    """Return the family of a file.

    Raises `ValueError` if a needed field is missing, or a value is not supported.

    Args:
        stated: the fields whose names begin with the architecture's name, such as
            "llama.block_count", by the rest of the name ("block_count").
    """
    experts = stated.get("expert_count", 0)
    family = GGUF.get((architecture, experts > 0))
    if family is None:
        if (architecture, experts == 0) in GGUF:
            raise ValueError(
                f"it has {experts} experts, which {architecture!r} files are not read with"
            )
        raise ValueError(
            f"files of the architecture {architecture!r} are not read. Take the model as safetensors"
        )
    needed = NEEDED | dict(family.gguf.needed)
    if family.forward.has_experts:
        needed |= NEEDED_BY_EXPERTS
    if "expert_feed_forward_length" in stated:
        needed.pop("feed_forward_length")  # not needed, because every layer has experts
    for name in needed:
        if name not in stated:
            raise ValueError(
                f"it does not say {name!r}, without which {architecture!r} files are not read"
            )
        _check_is_single(name, stated, architecture)
    _check_is_single("attention.head_count_kv", stated, architecture)
    used = stated.get("expert_used_count", 0)
    if family.forward.has_experts and not 0 < used <= experts:
        raise ValueError(f"it uses {used} experts of {experts}")
    if stated.get("expert_weights_scale", 0) not in (0, 1):
        raise ValueError(
            f"it scales what its experts say by {stated['expert_weights_scale']}, which is not computed"
        )
    return family


def _check_is_single(name: str, stated: Fields, architecture: str) -> None:
    if isinstance(stated.get(name), list):
        raise ValueError(
            f"it says {name!r} for each layer, and {architecture!r} files are read with one for all"
        )


def _config(family: Family, stated: Fields, tensors: Tensors) -> dict[str, Any]:
    """Return the config.json of a file, without its ropes.

    Raises `ValueError` if no config.json of the family can state the same as the file.
    """
    gguf = family.gguf
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config |= gguf.settings
    for settings in (NEEDED, NEEDED_BY_EXPERTS, gguf.needed, gguf.optional):
        for name, setting in settings.items():
            if name in stated:
                config[setting] = stated[name]
    embedding = tensors.get("token_embd.weight")
    config["vocab_size"] = 0 if embedding is None else embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    width = config["hidden_size"] // heads
    config["head_dim"] = stated.get("attention.key_length", width)
    config["num_key_value_heads"] = stated.get("attention.head_count_kv", heads)
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    if family.forward.has_experts:
        config["num_experts"] = config["num_local_experts"]  # families use one name or the other
    if gguf.ropeless:
        config["no_rope_layers"] = [int(n % gguf.ropeless != 0) for n in range(1, layers + 1)]
    if gguf.layers_of_27b:  # as in llama.cpp: no file states it
        is_27b = layers == gguf.layers_of_27b
        config["query_pre_attn_scalar"] = width if is_27b else config["head_dim"]
    return config | window_settings(family, stated, layers)


def window_settings(family: Family, stated: Fields, layers: int) -> dict[str, Any]:
    """Return the settings of config.json on sliding windows, and on the layers that have them."""
    period, window = family.gguf.window
    window = stated.get("attention.sliding_window", window)  # 0: there is none
    if period:
        has_window = stated.get("attention.sliding_window_pattern", period)
        if not isinstance(has_window, list):
            period = has_window
            has_window = [not period or n % period < period - 1 for n in range(layers)]
        if len(has_window) != layers:
            raise ValueError(
                f"it says of {len(has_window)} layers whether they have a window, and has {layers}"
            )
        types = []
        for slides in has_window:
            types.append("sliding_attention" if slides and window else "full_attention")
        return {"layer_types": types, "sliding_window": window or stated["context_length"]}
    if family.forward.default_window is not None:
        return {"sliding_window": window or None}
    if 0 < window < stated["context_length"]:
        raise ValueError(
            f"its attention has a window of {window} tokens, "
            f"which {family.gguf.architecture!r} files are not read with"
        )
    return {}


def _ropes(
    family: Family,
    stated: Fields,
    config: Config,
    file: Path,
    tensors: Tensors,
) -> dict[str, Any]:
    """Return the `rope_parameters`: the base, the share of a head that is rotated, and the scaling.

    A setting that the file does not state gets llama.cpp's default.  Raises `ValueError` for a
    scaling that is not read, because a model without its scaling would write other texts from the
    first token on.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(stated.get("rope.freq_base", 1e4)),
    }
    width = config["head_dim"]
    turned = stated.get("rope.dimension_count", width)
    if family.forward.rotates:
        rope["partial_rotary_factor"] = turned / width
    elif turned != width:
        raise ValueError(
            f"its rope turns {turned} of {width} dimensions, "
            f"which {family.gguf.architecture!r} files are not read with"
        )
    factors = {}
    for name, tensor in tensors.items():
        if name.startswith("rope_f"):
            factors[name] = _numbers(file, tensor)
    is_long = factors.keys() == _FACTORS.keys()
    has_two_ropes = family.gguf.has_two_ropes
    scaling = _scaling(stated, config["max_position_embeddings"], is_long)
    if is_long and scaling.get("rope_type") == "longrope":
        for name, setting in _FACTORS.items():
            scaling[setting] = factors[name].tolist()
    elif factors.keys() == {_FREQUENCIES} and not scaling and not has_two_ropes:
        scaling = _llama3(rope["rope_theta"], factors[_FREQUENCIES])
    elif factors:
        raise ValueError(
            f"its rope is scaled by tensors that are not read from such files: {', '.join(factors)}"
        )
    if not has_two_ropes:
        return rope | scaling | dict(family.gguf.rope)
    sliding = rope | {"rope_theta": float(stated.get("rope.freq_base_swa", 1e4))}
    return {"full_attention": rope | scaling, "sliding_attention": sliding}


def _scaling(stated: Fields, positions: int, is_long: bool) -> dict[str, Any]:
    """Return a rope's scaling as in config.json; empty if there is none.

    Raises `ValueError` if config.json cannot state the scaling.

    Args:
        positions: `max_position_embeddings` of the config.json.
        is_long: whether the file has a longrope's factors.
    """
    scaling = _below("rope.scaling.", stated)
    factor = float(scaling.get("factor") or stated.get("rope.scale_linear") or 1.0)
    kind = scaling.get("type", "longrope" if is_long else "linear")  # as llama.cpp
    length = int(scaling.get("original_context_length") or positions)
    attention = 1.0
    if is_long:
        attention = float(scaling.pop("attn_factor", 1.0))
    if any(scaling.get(name, default) != default for name, default in _FIXED.items()):
        raise ValueError(f"its rope is scaled in a way that is not computed: {scaling}")
    if kind == "longrope" and is_long:
        return {
            "rope_type": kind,
            "attention_factor": attention,
            "original_max_position_embeddings": length,
        }
    if kind == "yarn":
        yarn = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
        }
        for name in ("beta_fast", "beta_slow"):
            if f"yarn_{name}" in scaling:
                yarn[name] = float(scaling[f"yarn_{name}"])
        return yarn
    if kind not in ("linear", "none"):
        raise ValueError(f"its rope is scaled by {kind!r}, which is not read from such files")
    if kind == "linear" and factor != 1:
        return {"rope_type": "linear", "factor": factor}
    return {}


def _numbers(file: Path, tensor: Tensor) -> Any:
    """Read the numbers [n] of a rope's tensor. Raises `ValueError` if they are not float32."""
    import numpy as np

    (count,) = tensor.shape
    if tensor.kind != "F32":
        raise ValueError(
            f"its rope is scaled by numbers of the type {tensor.kind}, which are not read"
        )
    return np.fromfile(file, np.float32, count, offset=tensor.offset)


def _llama3(base: float, divisors: Any) -> dict[str, Any]:
    """Return the Llama 3.1 scaling that divides the frequencies by `divisors` [head_dim / 2].

    The scaling's `factor` is the greatest divisor.  Raises `ValueError` if the scaling with this
    factor does not give these divisors.
    """
    import torch

    from pearl.models.checkpoints.rope import frequencies

    factors = torch.from_numpy(divisors)
    config = {"head_dim": 2 * len(divisors)}
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 3)} | _LLAMA3
    plain = frequencies({"rope_theta": base, "rope_type": "default"}, config)
    scaled = frequencies({"rope_theta": base} | scaling, config)
    if not torch.allclose(plain.angles / factors, scaled.angles, rtol=1e-3, atol=0):
        raise ValueError(
            "its rope has frequencies that are not those of Llama 3.1, and no others are read"
        )
    return scaling


def _located(family: Family, config: Config, tensors: Tensors) -> dict[str, Tensor]:
    """Return where each weight of the model is, by its name in transformers.

    Raises `ValueError` unless the file has exactly the weights of the model.
    """
    in_file = _names_in_file(family, config)
    stored = _unstacked(tensors)
    missing = sorted(name for name, source in in_file.items() if source not in stored)
    if missing:
        raise ValueError(f"{len(missing)} of its weights are in no file, {missing[0]} for one")
    located = {name: stored[source] for name, source in in_file.items()}
    for name, shape in weight_shapes(family.forward, config).items():
        if located[name].shape != shape:
            raise ValueError(
                f"its weight {name} has the shape {list(located[name].shape)} where {list(shape)} is expected"
            )
    unplaced = stored.keys() - in_file.values()
    surplus = sorted(name for name in unplaced if not name.startswith("rope_f"))
    if surplus:
        raise ValueError(
            f"{len(surplus)} of its weights have no place in a {family.architecture}, {surplus[0]} for one"
        )
    return located


def _names_in_file(family: Family, config: Config) -> dict[str, str]:
    """Return the name that a file gives each weight, by the weight's name in transformers.

    The weight of expert 3 in the stack NAME has the name NAME.3, as in `_unstacked`.
    """
    import gguf

    architectures = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        architectures[family.gguf.architecture], config["num_hidden_layers"]
    )
    in_file = {}
    for name in weight_shapes(family.forward, config):
        source = names.get_name(_EXPERT.sub("", name), (".weight", ".bias"))
        if name.endswith(".sinks"):
            source = f"{source}.weight"
        in_file[name] = f"{source}{''.join(_EXPERT.findall(name))}"
    return in_file


def _unstacked(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors, with each stack NAME of experts split into NAME.0, NAME.1 ..."""
    unstacked = {}
    for name, tensor in tensors.items():
        if "_exps." not in name:
            unstacked[name] = tensor
            continue
        count, *shape = tensor.shape
        size = tensor.size // count
        for number in range(count):
            offset = tensor.offset + number * size
            unstacked[f"{name}.{number}"] = Tensor(tensor.kind, tuple(shape), offset, size)
    return unstacked
