"""Decoder layers on a CPU in one call of `layers.c`: many short calls take as long as the products of a small model."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pearl.models.cpu import native
from pearl.models.cpu.native import Native
from pearl.models.forward.linear_layers import SideBySide

if TYPE_CHECKING:
    from pearl.models.forward.layers import DecoderLayers, Layer, Rope
    from pearl.models.forward.linear_layers import Matrix
    from pearl.models.forward.slot_attention import NativeAttention

_SIDES = 3  # matrices of one product, side by side
_Products = Sequence[Sequence[Native]]


class _Layer(ctypes.Structure):
    _fields_ = (
        ("products", ctypes.c_void_p * (4 * _SIDES)),
        ("norms", ctypes.c_void_p * 4),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "sinks", "cos", "sin")),
        ("window", ctypes.c_int64),
    )


class _Forward(ctypes.Structure):
    _fields_ = (
        ("attention", native.Attention),
        *((name, ctypes.c_void_p) for name in ("layers", "hidden", "room")),
        *(
            (name, ctypes.c_int64)
            for name in ("first", "end", "width", "inner", "layer_stride", "new_stride")
        ),
        ("residual", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("hidden_is_float32", "is_gelu")),
    )


class NativeLayers:
    """The layers of a model whose matrices are all `Native`.

    Args:
        products: of each layer the four products, each as matrices side by side.
        ropes: of all positions, by kind.
    """

    def __init__(
        self, layers: DecoderLayers, products: Sequence[_Products], ropes: Mapping[str, Rope]
    ) -> None:
        self._ropes = ropes  # whose memory is read; all else is that of `layers`, which hold this
        made = [_layer(number, layers, each, ropes) for number, each in enumerate(products)]
        self._layers = (_Layer * len(made))(*made)
        self._width, self._inner = layers.embedding.shape[1], products[0][-1][0].shape[1]
        self._is_float32 = layers.dtype == torch.float32
        self._norm_is_float32 = _norm_dtypes(layers) == {torch.float32}
        self._norm_width = next(
            (len(layer.q_norm) for layer in layers.layers if layer.q_norm is not None), 0
        )
        heads, scratch = (
            layers.heads,
            max(part.scratch for each in products for parts in each for part in parts),
        )
        self._room = (
            3 * (self._width + self._inner) + 2 * (heads.query + heads.kv) * heads.dim + scratch
        )
        self._residual, self._is_gelu = layers.scales.residual, layers.gate == "gelu"

    @staticmethod
    def of(layers: DecoderLayers, ropes: Mapping[str, Rope]) -> NativeLayers | None:
        """None where layers have what `layers.c` has not.

        That is experts, matrices in other layouts, norms of two dtypes, gates of several sizes.
        """
        if (
            not native.computes(layers.embedding)
            or any(layer.experts for layer in layers.layers)
            or len(_norm_dtypes(layers)) != 1
        ):
            return None
        products = [
            [_parts(each) for each in (at.qkv, at.out, at.gate_up, at.down)] for at in layers.layers
        ]
        if (
            not all(all(each) for each in products)
            or len({down.shape for *_, (down, *_) in products}) != 1
        ):
            return None
        return NativeLayers(layers, products, ropes)

    def __call__(
        self, attends: NativeAttention, hidden: torch.Tensor, first: int, end: int
    ) -> None:
        """Change the hidden states [n, width] to those behind the layers from `first` to `end` - 1."""
        room = torch.empty(len(hidden) * self._room)
        attention = native.Attention.from_buffer_copy(attends.given)
        attention.is_float32, attention.norm_is_float32 = self._is_float32, self._norm_is_float32
        attention.norm_width = self._norm_width
        given = _Forward(
            attention=attention,
            layers=ctypes.addressof(self._layers),
            hidden=hidden.data_ptr(),
            room=room.data_ptr(),
            first=first,
            end=end,
            width=self._width,
            inner=self._inner,
            layer_stride=attends.strides[0],
            new_stride=attends.strides[1],
            residual=self._residual,
            hidden_is_float32=hidden.dtype == torch.float32,
            is_gelu=self._is_gelu,
        )
        native.compute_layers(ctypes.byref(given))


def _layer(
    number: int, layers: DecoderLayers, products: _Products, ropes: Mapping[str, Rope]
) -> _Layer:
    made, layer = _Layer(), layers.layers[number]
    for at, parts in enumerate(products):
        for side, part in enumerate(parts):
            made.products[_SIDES * at + side] = part.address
    for at, norm in enumerate(_norms(layer)[:4]):
        made.norms[at] = None if norm is None else norm.data_ptr()
    cos, sin = (None, None) if layer.rope is None else ropes[layer.rope]
    given = {
        "q_norm": layer.q_norm,
        "k_norm": layer.k_norm,
        "sinks": layers.scoring.sinks_of(number),
    }
    for name, tensor in {**given, "cos": cos, "sin": sin}.items():
        setattr(made, name, None if tensor is None else tensor.data_ptr())
    made.window = layers.scoring.windows[number]
    return made


def _norms(layer: Layer) -> tuple[torch.Tensor | None, ...]:
    return (
        layer.attention_norm,
        layer.after_attention,
        layer.mlp_norm,
        layer.after_mlp,
        layer.q_norm,
        layer.k_norm,
    )


def _norm_dtypes(layers: DecoderLayers) -> set[torch.dtype]:
    return {norm.dtype for layer in layers.layers for norm in _norms(layer) if norm is not None}


def _parts(product: Matrix) -> list[Native]:
    """The matrices of a product, side by side; none where `layers.c` does not take them."""
    parts = product.parts if isinstance(product, SideBySide) else [product]
    taken = [part for part in parts if isinstance(part, Native) and part.address is not None]
    return taken if len(taken) == len(parts) <= _SIDES else []
