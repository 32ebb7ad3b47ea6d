"""Checkpoints of the families of our own forward, read straight from their files, without transformers.

Importing what builds a model there takes a worker seconds, most of them in torch's compiler.  `read_decoder` returns
None for every checkpoint that is not exactly as expected: transformers then loads or refuses it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from pearl.cache import Progress, silent
from pearl.models.checkpoints import packed
from pearl.models.checkpoints.checkpoint import config_in
from pearl.models.checkpoints.formats import Make, mxfp4
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.gguf_weights import GgufWeights
from pearl.models.checkpoints.packed import is_of_cache
from pearl.models.checkpoints.recipes import Unread
from pearl.models.cpu import native
from pearl.models.families import OWN_FORWARD, ROPES, forward_of, weight_shapes
from pearl.models.forward.experts import computes_experts
from pearl.models.forward.layers import set_weight
from pearl.models.forward.quantised import QuantisedMatrix, Weights

log = logging.getLogger(__name__)

_NEEDED = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("rms_norm_eps", "vocab_size", "max_position_embeddings", "hidden_act", "tie_word_embeddings"),
)
_NEEDED_BY_EXPERTS = ("layer_types", "num_local_experts", "num_experts_per_tok", "swiglu_limit")
_DTYPES = ("float32", "bfloat16", "float16")
# gpt-oss's experts, which files have stacked, in MXFP4 or transposed: (stack, the rows of an expert there).
_BLOCKS, _SCALES = "_blocks", "_scales"  # behind the names of tensors in MXFP4
_STACKS = {
    "gate": ("gate_up_proj", slice(0, None, 2)),
    "up": ("gate_up_proj", slice(1, None, 2)),
    "down": ("down_proj", slice(None)),
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_FILE, _EMBEDDING, _HEAD = "model.safetensors", "model.embed_tokens.weight", "lm_head.weight"

Frequencies = tuple[torch.Tensor, float]  # [rotated / 2], and yarn's scale of what is rotated


class Weight(nn.Module):
    """A weight, and a bias if any: a linear layer, a norm, or the embedding.

    A quantised matrix is made when it is first asked for: it takes a byte a weight until our products have laid it out.
    """

    def __init__(
        self, weight: Weights | Callable[[], Weights], bias: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        if isinstance(weight, torch.Tensor | QuantisedMatrix):
            set_weight(self, weight)
        else:
            self._make = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "_make" in self.__dict__:
            set_weight(self, self.__dict__.pop("_make")())
            return self.weight
        return super().__getattr__(name)


class Rope(nn.Module):
    """Cosines and sines of positions, bit for bit those of transformers."""

    def __init__(self, each: Mapping[str, Frequencies]) -> None:
        super().__init__()
        self._each = each  # by the kind of layer, "" if there is one; no buffers, for they stay float32 on the CPU

    def forward(
        self, like: torch.Tensor, positions: torch.Tensor, kind: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [1, positions, head_dim], with the dtype and device of `like`. positions [1, n]."""
        frequencies, scale = self._each[kind]
        angles = positions[..., None].float() * frequencies.to(like.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)


class Decoder(nn.Module):
    """Weights and config of a model, with their names in transformers. Computes nothing."""

    model: Any
    lm_head: Any

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config: Any = config

    def place(self, name: str, module: nn.Module | nn.Parameter) -> None:
        """Add `module` under its dotted name; the modules above it are made where they are missing."""
        above: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if not hasattr(above, part):
                above.add_module(
                    part, nn.ModuleList() if part in ("layers", "experts") else nn.Module()
                )
            above = getattr(above, part)
        setattr(above, last, module)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.embed_tokens.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.embed_tokens.weight.device
        return device


def read_decoder(
    directory: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: Progress = silent,
    keeps_bits: bool = False,
    only_embedding: bool = False,
) -> Decoder | None:
    """The checkpoint in `directory`, with weights in `dtype`; None for the checkpoint's own.

    Weights whose dtype does not change are mapped, not read.  Reports each of several files to `progress`.  Raises
    what safetensors raises for a damaged file.

    Args:
        keeps_bits: quantised matrices stay so, as `QuantisedMatrix`; otherwise they are dequantised to `dtype`.
        only_embedding: all other weights are left out.
    """
    if (config := _config(directory)) is None:
        return None
    scheme = config.pop("quantization_config", None)
    forward, rope = forward_of(config["architectures"][0], config), rope_of(config)
    own = config.get("dtype") or config.get("torch_dtype")
    if forward is None or rope is None or own not in _DTYPES:
        return None
    if (forward.has_experts and not computes_experts(device)) or not native.takes_model(
        device, config
    ):
        return None
    expected = weight_shapes(forward, config)
    if (table := table_in(directory)) is not None:
        mapped = GgufWeights(table, forward)
        plain, quantised = mapped.plain, mapped.matrices() if keeps_bits else {}
    elif (files := files_of(directory)) is None or not forward.reads_directly:
        return None
    else:
        source = (_StackedSource if forward.clamps_experts else _Source)(directory, files, progress)
        try:
            quantised = (
                packed.matrices(scheme, files, source.get) if scheme else source.matrices(expected)
            )
        except Unread as cause:
            told = "our own forward does not read its weights, transformers may:"
            log.warning("%s (quantization_config of config.json): %s %s", directory, told, cause)
            return None
        if source.shapes(quantised, expected) != {
            name: expected[name] for name in {*expected} - {*quantised}
        }:
            return None
        plain = partial(source.plain_or_dequantised, quantised)
        if any(map(is_of_cache, files)) and not only_embedding:
            log.warning(
                "%s: keys and values stay whole, and the scales of a smaller cache unused",
                directory,
            )
    if (
        keeps_bits and quantised
    ):  # the rest is in the products' dtype, without instructions for it too
        own, dtype = "bfloat16" if own == "float16" else own, None
    wanted = dtype or getattr(torch, own)
    if only_embedding:
        expected, config["tie_word_embeddings"] = {_EMBEDDING: expected[_EMBEDDING]}, False
    decoder = _placed(config, plain, quantised, expected, device, wanted, keeps_bits)
    decoder.place("model.rotary_emb", rope)
    return decoder


def _placed(
    config: dict[str, Any],
    plain: Callable[[str, torch.device, torch.dtype], torch.Tensor],
    quantised: Mapping[str, Make],
    expected: Mapping[str, tuple[int, ...]],
    device: torch.device,
    wanted: torch.dtype,
    keeps_bits: bool,
) -> Decoder:
    """The weights that are expected, in their modules."""
    settings = SimpleNamespace(**config)
    settings.get_text_config = lambda decoder=True: settings
    decoder = Decoder(settings)

    def matrix(name: str) -> Weights:
        made = quantised[name]()
        if made.shape != expected.get(name, made.shape):
            raise ValueError(f"its weight {name} has the shape {list(made.shape)}")
        return (
            made.changed(lambda tensor: tensor.to(device))
            if keeps_bits
            else made.dequantised().to(device, wanted)
        )

    for name in expected:
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            is_matrix = name in quantised and not (keeps_bits and name == _EMBEDDING)
            bias = plain(f"{module}.bias", device, wanted) if f"{module}.bias" in expected else None
            decoder.place(
                module,
                Weight(partial(matrix, name) if is_matrix else plain(name, device, wanted), bias),
            )
        elif kind != "bias":
            decoder.place(name, nn.Parameter(plain(name, device, wanted), requires_grad=False))
    if config[
        "tie_word_embeddings"
    ]:  # a module of its own: the runner takes the head's weight away
        head = next((name for name in (_HEAD, _EMBEDDING) if name in quantised), None)
        decoder.place(
            "lm_head", Weight(partial(matrix, head) if head else decoder.model.embed_tokens.weight)
        )
    return decoder


class _Source:
    """The tensors in a checkpoint's files. `files`: name of a tensor -> its file."""

    def __init__(self, directory: Path, files: dict[str, str], progress: Progress) -> None:
        self._directory, self._files, self._progress = directory, files, progress
        self._opened = {
            name: safe_open(directory / name, framework="pt") for name in set(files.values())
        }
        self._begun: set[str] = set()

    def get(self, name: str) -> torch.Tensor:
        """A tensor as it is in its file."""
        file = self._files[name]
        if len(self._opened) > 1 and file not in self._begun:
            self._begun.add(file)
            self._progress(
                f"loading {self._directory.name}: file {len(self._begun)} of {len(self._opened)}"
            )
        tensor: torch.Tensor = self._opened[file].get_tensor(name)
        return tensor

    def part(self, name: str, number: int) -> torch.Tensor:
        """One of the tensors that are stacked in one."""
        tensor: torch.Tensor = self._opened[self._files[name]].get_slice(name)[number]
        return tensor

    def plain(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self.get(name).to(device=device, dtype=dtype)

    def plain_or_dequantised(
        self, quantised: Mapping[str, Make], name: str, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """A weight that is no matrix of ours, such as the embedding, which may be quantised."""
        if name in quantised:
            return quantised[name]().dequantised().to(device=device, dtype=dtype)
        return self.plain(name, device, dtype)

    def matrices(self, names: Collection[str]) -> dict[str, Make]:
        """What makes those of these weights that the model's makers have quantised."""
        return {}

    def shapes(
        self, quantised: Collection[str], expected: Collection[str]
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors, without those of quantised modules and of a quantised cache.

        Also without a head that is the embedding; transformers ties no other, which is trained by itself.
        """
        found = {
            name: tuple(self._opened[file].get_slice(name).get_shape())
            for name, file in self._files.items()
            if not is_of_cache(name)
            and (
                name.endswith(".bias")
                or not {f"{name.rpartition('.')[0]}.weight", _weight(name)} & {*quantised}
            )
        }
        if _HEAD in {*found} - {*expected} and torch.equal(self.get(_HEAD), self.get(_EMBEDDING)):
            del found[_HEAD]
        return found


class _StackedSource(_Source):
    """Of gpt-oss, with each expert by itself."""

    def _stack(self, name: str) -> tuple[str, int, slice] | None:
        """The stack that has a weight or bias of an expert, the expert's number and its rows."""
        if (found := _EXPERT.fullmatch(name)) is None:
            return None
        stack, rows = _STACKS[found[3]]
        return f"{found[1]}.{stack}{'_bias' * (found[4] == 'bias')}", int(found[2]), rows

    def plain(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if (its := self._stack(name)) is None:
            return super().plain(name, device, dtype)
        stack, number, rows = its
        whole = self.part(stack, number)
        return (
            (whole.mT if name.endswith(".weight") else whole)[rows].contiguous().to(device, dtype)
        )

    def matrices(self, names: Collection[str]) -> dict[str, Make]:
        def maker(stack: str, number: int, rows: slice) -> Make:
            return lambda: mxfp4(
                *(self.part(stack + part, number)[rows] for part in (_BLOCKS, _SCALES))
            )

        found = {name: its for name in names if (its := self._stack(name)) is not None}
        return {name: maker(*its) for name, its in found.items() if its[0] + _BLOCKS in self._files}

    def shapes(
        self, quantised: Collection[str], expected: Collection[str]
    ) -> dict[str, tuple[int, ...]]:
        found = super().shapes(quantised, expected)
        for name in [name for name in found if ".experts." in name]:
            count, *shape = found.pop(name)
            stem, _, part = name.rpartition(".")
            if part.endswith((_BLOCKS, _SCALES)):  # their matrices are checked as they are made
                continue
            kind = "bias" if part.endswith("_bias") else "weight"
            for each, (stack, _) in _STACKS.items():
                if part.startswith(stack):
                    own = shape[-1] // (2 if each != "down" else 1), *shape[:-1]
                    found |= {f"{stem}.{number}.{each}_proj.{kind}": own for number in range(count)}
        return found


def _weight(name: str) -> str:
    """The weight that a tensor is part of, in files that name it so."""
    weight, dot, _ = name.partition(".weight")
    return weight + dot


def _config(directory: Path) -> dict[str, Any] | None:
    """config.json, with `rope_parameters` and `head_dim`; None where it is not exactly of one of the families."""
    try:
        config = config_in(directory)
        architecture = config["architectures"][0]
        family = OWN_FORWARD[architecture]
        has_experts = family.forward.clamps_experts
        needed = (*_NEEDED, *(_NEEDED_BY_EXPERTS if has_experts else ()))
        if (
            any(config[name] is None for name in needed)
            or family.model_type != config["model_type"]
        ):
            return None
        if has_experts and config.get("quantization_config", {}).get("quant_method") == "mxfp4":
            del config["quantization_config"]
            config.setdefault("dtype", "bfloat16")
    except (LookupError, TypeError, AttributeError):
        return None
    # Code of its own; a scaling or a length that transformers reads before that of the rope.
    if "auto_map" in config or "original_max_position_embeddings" in config:
        return None
    if (rope := parameters_of_rope(config)) is None:
        return None
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {**config, "rope_parameters": rope, "head_dim": width}


def parameters_of_rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_parameters`, of the notation before transformers 5 too; None where both are given."""
    rope, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    if rope and scaling:
        return None
    if rope is None:  # the notation before transformers 5; a scaling's own base has priority
        scaling = scaling or {}
        rope = {"rope_theta": config.get("rope_theta"), **scaling}
        rope["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    return dict(rope)


def rope_of(config: Mapping[str, Any]) -> Rope | None:
    """`config`: with `rope_parameters` and `head_dim`. None for an unknown one."""
    named = config["rope_parameters"]
    each = {"": named} if "rope_type" in named else named
    try:
        return Rope({kind: frequencies(rope, config) for kind, rope in each.items()})
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def frequencies(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Frequencies:
    """Of one kind of layer; a longrope's up to the length at which they change. Raises where `rope` does not say."""
    kind = rope["rope_type"]
    if kind == "default":
        dim = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    if kind not in ROPES:
        raise ValueError(kind)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes half a second

    given: Any = SimpleNamespace(
        **{**config, "rope_parameters": rope}, standardize_rope_params=lambda: None
    )
    return ROPE_INIT_FUNCTIONS[kind](given, torch.device("cpu"))


def files_of(directory: Path) -> dict[str, str] | None:
    """Name of a tensor -> its file; None where there is neither model.safetensors nor its index."""
    if (directory / _FILE).is_file():
        with safe_open(directory / _FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _FILE)
    try:
        return dict(json.loads((directory / f"{_FILE}.index.json").read_text())["weight_map"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
