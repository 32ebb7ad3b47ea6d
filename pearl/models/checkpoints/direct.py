"""Reads checkpoints of our own forward's families straight from their files, without transformers.

To import transformers' models would take seconds, most of that time for torch's compiler.
`read_decoder` raises `Unsupported` for every checkpoint that is not exactly as expected; the caller
then lets transformers load or refuse the checkpoint.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from pearl.cache import Progress, silent
from pearl.models.checkpoints import packed
from pearl.models.checkpoints.checkpoint import config_in
from pearl.models.checkpoints.formats import Make, mxfp4
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.gguf_weights import GgufWeights
from pearl.models.checkpoints.packed import is_of_cache, module_of
from pearl.models.checkpoints.recipes import Unread
from pearl.models.checkpoints.rope import RotaryEmbedding, parameters_of_rope, rope_of
from pearl.models.cpu import native
from pearl.models.families import OWN_FORWARD, Config, Forward, Shapes, not_computed, weight_shapes
from pearl.models.forward.decoder import Decoder
from pearl.models.forward.layers import set_weight
from pearl.models.forward.quantised import Embedding, QuantisedMatrix, Weights

log = logging.getLogger(__name__)

_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "hidden_act",
    "tie_word_embeddings",
)
_NEEDED_BY = {  # model type -> settings that it needs in addition
    "gpt_oss": ("layer_types", "num_local_experts", "num_experts_per_tok", "swiglu_limit"),
    "qwen3_moe": ("num_experts_per_tok", "norm_topk_prob"),
}
_DTYPES = ("float32", "bfloat16", "float16")
_BLOCKS = "_blocks"  # suffixes of tensors in MXFP4
_SCALES = "_scales"
# Files of gpt-oss stack the matrices of all experts, in MXFP4 or transposed.
# A matrix -> (name of its stack, its rows within an expert's part of the stack).
_STACKS = {
    "gate": ("gate_up_proj", slice(0, None, 2)),
    "up": ("gate_up_proj", slice(1, None, 2)),
    "down": ("down_proj", slice(None)),
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


class Unsupported(Exception):
    """A checkpoint is not read directly. The text is the reason; transformers may still load it."""


class UnsupportedWeights(Unsupported):
    """The quantised weights of a checkpoint are not read; the text names the setting or the tensor."""


class Weight(nn.Module):
    """A module with a weight and perhaps a bias: a linear layer, a norm, or the embedding.

    A quantised matrix is made only when `weight` is first read.  Until the matrix is laid out for
    our products, it takes a byte for each of its weights.

    Args:
        weight: the weight, or a function that makes it.
    """

    def __init__(
        self, weight: Embedding | Callable[[], Weights], bias: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        if callable(weight):
            self._make = weight
        else:
            set_weight(self, weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "_make" in self.__dict__:
            set_weight(self, self.__dict__.pop("_make")())
            return self.weight
        return super().__getattr__(name)


def read_decoder(
    directory: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: Progress = silent,
    keeps_bits: bool = False,
    only: Collection[str] = (),
) -> Decoder:
    """Read the checkpoint in `directory` as a `Decoder`.

    Weights whose dtype does not change are mapped, not read.  If there are several files, each is
    reported to `progress`.  Raises `Unsupported`, and what safetensors raises for a damaged file.

    Args:
        dtype: the dtype of the weights; None: the checkpoint's own.
        keeps_bits: whether quantised matrices are kept, as `QuantisedMatrix`.  Otherwise they are
            dequantised to `dtype`.
        only: names of the weights to read: the embedding's (`EMBEDDING`), the output matrix's
            (`OUTPUT`) or both; empty: all weights of the model.
    """
    config = _config(directory)
    scheme = config.pop("quantization_config", None)
    stored_dtype = config.get("dtype") or config.get("torch_dtype")
    if stored_dtype not in _DTYPES:
        raise Unsupported(f"its dtype is {stored_dtype!r}")
    forward, rope = _forward(config, device)
    shapes = weight_shapes(forward, config)
    table = table_in(directory)
    stored: GgufWeights | _Source
    if table is None:
        stored = _source(directory, forward, scheme, shapes, progress)
        if not only and stored.has_scales_of_cache:
            log.warning(
                "%s: keys and values stay whole, and the scales of a smaller cache unused",
                directory,
            )
    else:
        stored = GgufWeights(table, forward)
    if keeps_bits and stored.matrices:
        # The other weights keep their dtype, even on a CPU without instructions for it; float16 becomes
        # bfloat16.
        dtype = None
        if stored_dtype == "float16":
            stored_dtype = "bfloat16"
    if only:
        shapes = {name: shape for name, shape in shapes.items() if name in only}
        config["tie_word_embeddings"] = config["tie_word_embeddings"] and OUTPUT in only
    builder = _Builder(stored, shapes, device, dtype or getattr(torch, stored_dtype), keeps_bits)
    decoder = builder.decoder(config)
    decoder.place("model.rotary_emb", rope)
    return decoder


def _forward(config: Config, device: torch.device) -> tuple[Forward, RotaryEmbedding]:
    """Return how our own forward computes the model, and its rope.

    Raises `Unsupported` if our own forward cannot compute the model on `device`.
    """
    architecture = config["architectures"][0]
    reason = not_computed(architecture, config)
    if reason:
        raise Unsupported(reason)
    rope = rope_of(config)
    if rope is None:
        raise Unsupported(f"its rope is not computed: {config['rope_parameters']}")
    forward = OWN_FORWARD[architecture].forward
    if not native.takes_model(device, config):
        raise Unsupported(f"its sizes are not computed on {device}")
    return forward, rope


def _source(
    directory: Path,
    forward: Forward,
    scheme: Mapping[str, Any] | None,
    shapes: Shapes,
    progress: Progress,
) -> _Source:
    """Return the source of the tensors in safetensors files.

    Raises `Unsupported` unless the files have exactly the tensors that `shapes` names.

    Args:
        scheme: the checkpoint's `quantization_config`; None: it has none.
    """
    files = files_of(directory)
    if files is None:
        raise Unsupported("it has no safetensors files")
    if not forward.reads_directly:
        raise Unsupported("transformers completes the configurations of its family")
    source_type = _StackedSource if forward.clamps_experts else _Source
    source = source_type(directory, files, shapes, progress)
    if scheme:
        try:
            source.matrices = packed.matrices(scheme, files, source.get)
        except Unread as cause:
            raise UnsupportedWeights(str(cause)) from cause
    plain_shapes = {name: shape for name, shape in shapes.items() if name not in source.matrices}
    differing = source.plain_shapes().items() ^ plain_shapes.items()
    if differing:
        name, shape = min(differing)
        raise Unsupported(f"its tensors are not those of its family: {name} {list(shape)} differs")
    return source


@dataclass(frozen=True)
class _Builder:
    """Makes a `Decoder` with the weights that `shapes` names; see `read_decoder`."""

    stored: GgufWeights | _Source
    shapes: Shapes
    device: torch.device
    dtype: torch.dtype
    keeps_bits: bool

    def decoder(self, config: dict[str, Any]) -> Decoder:
        settings = SimpleNamespace(**config)
        settings.get_text_config = lambda decoder=True: settings
        decoder = Decoder(settings)
        for name in self.shapes:
            module, _, kind = name.rpartition(".")
            if kind == "weight":
                bias = f"{module}.bias"
                has_bias = bias in self.shapes
                decoder.place(
                    module, Weight(self._weight(name), self._plain(bias) if has_bias else None)
                )
            elif kind != "bias":
                decoder.place(name, nn.Parameter(self._plain(name), requires_grad=False))
        if config["tie_word_embeddings"]:
            decoder.place("lm_head", Weight(self._tied_head(decoder)))
        return decoder

    def _tied_head(self, decoder: Decoder) -> Embedding | Callable[[], Weights]:
        """Return the weight of the output head, for a model whose head is the embedding.

        The head and the embedding are two modules, which both hold this weight. The runner will
        take the weight out of the head's module, and still needs the one in the embedding's module.
        """
        if OUTPUT in self.stored.matrices:
            return self._weight(OUTPUT)
        weight: Embedding = decoder.model.embed_tokens.weight
        is_whole = isinstance(weight, torch.Tensor)
        if is_whole and self.keeps_bits and EMBEDDING in self.stored.matrices:
            return partial(self._matrix, EMBEDDING)
        return weight

    def _weight(self, name: str) -> Embedding | Callable[[], Weights]:
        if not self.keeps_bits or name not in self.stored.matrices:
            return self._plain(name)
        is_large = self.device.type == "cpu" and name in (EMBEDDING, OUTPUT)
        if is_large and isinstance(self.stored, GgufWeights):
            return self.stored.in_file(name, self.dtype)
        if name == EMBEDDING:
            return self._plain(name)
        return partial(self._matrix, name)

    def _plain(self, name: str) -> torch.Tensor:
        weight = self.stored.plain(name, self.device, self.dtype)
        self._check_shape(name, weight)
        return weight

    def _matrix(self, name: str) -> QuantisedMatrix:
        matrix = self.stored.matrices[name]()
        self._check_shape(name, matrix)
        return matrix.changed(lambda tensor: tensor.to(self.device))

    def _check_shape(self, name: str, weight: Weights) -> None:
        if weight.shape != self.shapes.get(name, weight.shape):
            raise ValueError(f"its weight {name} has the shape {list(weight.shape)}")


class _Source:
    """The tensors in a checkpoint's files.

    Args:
        files: name of a tensor -> its file.
        expected: shapes of the model's weights.

    Attributes:
        matrices: functions that load the quantised matrices, by the weight's name.
    """

    matrices: Mapping[str, Make]

    def __init__(
        self, directory: Path, files: dict[str, str], expected: Shapes, progress: Progress
    ) -> None:
        self._directory = directory
        self._files = files
        self._expected = expected
        self._progress = progress
        self._opened = {}
        for file in set(files.values()):
            self._opened[file] = safe_open(directory / file, framework="pt")
        self._begun: set[str] = set()
        self.matrices = {}

    @property
    def has_scales_of_cache(self) -> bool:
        return any(map(is_of_cache, self._files))

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor as it is in its file."""
        file = self._files[name]
        if len(self._opened) > 1 and file not in self._begun:
            self._begun.add(file)
            self._progress(
                f"loading {self._directory.name}: file {len(self._begun)} of {len(self._opened)}"
            )
        tensor: torch.Tensor = self._opened[file].get_tensor(name)
        return tensor

    def plain(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight, dequantised if it is quantised."""
        if name in self.matrices:
            weight = self.matrices[name]().dequantised()
        else:
            weight = self.get(name)
        return weight.to(device=device, dtype=dtype)

    def plain_shapes(self) -> Shapes:
        """Return the shapes of the tensors that are not quantised, by name.

        Tensors of a quantised KV cache are left out.  The files may have an output head although
        config.json says that the model uses the embedding.  Such a head is left out if it equals
        the embedding.  Otherwise it was trained by itself, and transformers keeps it, too.
        """
        shapes = {}
        for name, file in self._files.items():
            is_quantised = f"{module_of(name)}.weight" in self.matrices
            if name.endswith(".bias") or not (is_quantised or is_of_cache(name)):
                shapes[name] = tuple(self._opened[file].get_slice(name).get_shape())
        has_surplus_head = OUTPUT in shapes and OUTPUT not in self._expected
        if has_surplus_head and torch.equal(self.get(OUTPUT), self.get(EMBEDDING)):
            del shapes[OUTPUT]
        return shapes


class _Slice(NamedTuple):
    """The place of an expert's weight or bias in a stack of all experts.

    Attributes:
        stack: name of the stack.
        expert: index of the expert in the stack's first dimension.
        rows: the weight's rows within the expert's part.
    """

    stack: str
    expert: int
    rows: slice


class _StackedSource(_Source):
    """The tensors of gpt-oss's files, with stacks of experts split into single experts."""

    def __init__(
        self, directory: Path, files: dict[str, str], expected: Shapes, progress: Progress
    ) -> None:
        super().__init__(directory, files, expected, progress)
        matrices = {}
        for name in expected:
            place = self._slice(name)
            if place is not None and place.stack + _BLOCKS in files:
                matrices[name] = partial(self._mxfp4, place)
        self.matrices = matrices

    def _slice(self, name: str) -> _Slice | None:
        """Return the place of a weight or bias of an expert; None for other tensors.

        Example: "model.layers.0.mlp.experts.3.up_proj.bias" is [3, 1::2] of
        "model.layers.0.mlp.experts.gate_up_proj_bias".
        """
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        experts, number, matrix, kind = match.groups()
        stack, rows = _STACKS[matrix]
        suffix = "_bias" if kind == "bias" else ""
        return _Slice(f"{experts}.{stack}{suffix}", int(number), rows)

    def get(self, name: str) -> torch.Tensor:
        place = self._slice(name)
        if place is None:
            return super().get(name)
        tensor = self._part(place, "")
        if name.endswith(".weight"):
            tensor = tensor.mT
        return tensor[place.rows].contiguous()

    def _part(self, place: _Slice, suffix: str) -> torch.Tensor:
        """Return an expert's part of a stack. The stack's name is `place.stack` plus `suffix`."""
        stack = f"{place.stack}{suffix}"
        tensor: torch.Tensor = self._opened[self._files[stack]].get_slice(stack)[place.expert]
        return tensor

    def _mxfp4(self, place: _Slice) -> QuantisedMatrix:
        blocks = self._part(place, _BLOCKS)
        scales = self._part(place, _SCALES)
        return mxfp4(blocks[place.rows], scales[place.rows])

    def plain_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for name, shape in super().plain_shapes().items():
            if ".experts." not in name:
                shapes[name] = shape
            elif not name.endswith((_BLOCKS, _SCALES)):  # checked when their matrices are made
                shapes |= _shapes_in_stack(name, shape)
        return shapes


def _shapes_in_stack(name: str, shape: tuple[int, ...]) -> Shapes:
    """Return the shape of each weight or bias in a stack [experts, inputs, outputs] or [experts, outputs]."""
    stem, _, part = name.rpartition(".")
    kind = "weight"
    if part.endswith("_bias"):
        kind = "bias"
    count, *inputs, outputs = shape
    shapes = {}
    for matrix, (stack, _) in _STACKS.items():
        if part.startswith(stack):
            if matrix == "down":
                rows = outputs
            else:
                rows = outputs // 2
            for number in range(count):
                shapes[f"{stem}.{number}.{matrix}_proj.{kind}"] = (rows, *inputs)
    return shapes


def _config(directory: Path) -> dict[str, Any]:
    """Return config.json, with `rope_parameters` and `head_dim`.

    Raises `Unsupported` unless it is exactly as expected of one of the families.
    """
    config = config_in(directory)
    try:
        family = OWN_FORWARD[config["architectures"][0]]
    except (LookupError, TypeError):
        raise Unsupported("its architecture is none that our own forward computes") from None
    for name in (*_NEEDED, *_NEEDED_BY.get(family.model_type, ())):
        if config.get(name) is None:
            raise Unsupported(f"its config.json has no {name}")
    if config.get("model_type") != family.model_type:
        raise Unsupported(f"its model_type is not {family.model_type!r}")
    if family.forward.clamps_experts and "quantization_config" in config:
        _drop_mxfp4(config)
    # With auto_map the model has code of its own. transformers prefers this
    # original_max_position_embeddings to the rope's own. per_layer_config changes single layers.
    for name in ("auto_map", "original_max_position_embeddings", "per_layer_config"):
        if name in config:
            raise Unsupported(f"its config.json has {name}")
    rope = parameters_of_rope(config)
    if rope is None:
        raise Unsupported("its config.json has both rope_parameters and rope_scaling")
    config["rope_parameters"] = rope
    if not config.get("head_dim"):
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def _drop_mxfp4(config: dict[str, Any]) -> None:
    """Remove `quantization_config` if it states MXFP4, which `_StackedSource` reads without it.

    gpt-oss is published in this format.
    """
    scheme = config["quantization_config"]
    if not isinstance(scheme, Mapping):
        raise Unsupported("its quantization_config is not a table of settings")
    if scheme.get("quant_method") == "mxfp4":
        del config["quantization_config"]
        config.setdefault("dtype", "bfloat16")


def files_of(directory: Path) -> dict[str, str] | None:
    """Return the file of each tensor, by name; None if there is neither model.safetensors nor its index."""
    if (directory / _FILE).is_file():
        with safe_open(directory / _FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _FILE)
    try:
        return dict(json.loads((directory / f"{_FILE}.index.json").read_text())["weight_map"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
