"""Computes decoder layers on a CPU in one call of `layers.c`.

In a small model, many short calls from Python would take as long as the products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pearl.models.cpu import native
from pearl.models.cpu.native import Native
from pearl.models.forward.linear_layers import SideBySide

if TYPE_CHECKING:
    from pearl.models.forward.layers import DecoderLayers, Layer
    from pearl.models.forward.linear_layers import Matrix
    from pearl.models.forward.slot_attention import NativeAttention, Rope

_SIDES = 3  # most matrices of one product, side by side
_Parts = Sequence[Native]  # the matrices of one product, side by side


class _Products(NamedTuple):
    """The matrices of a layer, in the order of `layers.c`.

    Each consists of one or several parts, whose outputs are side by side.
    """

    qkv: _Parts
    out: _Parts
    gate_up: _Parts
    down: _Parts


class _Layer(ctypes.Structure):
    _fields_ = (
        native.fields_of(ctypes.c_void_p * (4 * _SIDES), "products")
        + native.fields_of(ctypes.c_void_p * 4, "norms")
        + native.fields_of(ctypes.c_void_p, "q_norm k_norm sinks cos sin")
        + native.fields_of(ctypes.c_int64, "window")
    )


class _Forward(ctypes.Structure):
    _fields_ = (
        native.fields_of(native.Attention, "attention")
        + native.fields_of(ctypes.c_void_p, "layers hidden room")
        + native.fields_of(ctypes.c_int64, "first end width inner layer_stride new_stride")
        + native.fields_of(ctypes.c_float, "residual")
        + native.fields_of(ctypes.c_int32, "hidden_is_float32 is_gelu")
    )


class NativeLayers:
    """Computes the layers of a model whose matrices are all `Native`.

    Args:
        products: the matrices of each layer.
        ropes: cosines and sines of all positions, by the rope's name; see `DecoderLayers.angles`.
    """

    def __init__(
        self, layers: DecoderLayers, products: Sequence[_Products], ropes: Mapping[str, Rope]
    ) -> None:
        self._ropes = ropes  # kept alive: the C reads their memory. All else belongs to `layers`
        self._layers = (_Layer * len(products))()
        scratch = 0
        for number, matrices in enumerate(products):
            _fill(self._layers[number], number, layers, matrices, ropes)
            for parts in matrices:
                for part in parts:
                    scratch = max(scratch, part.scratch)
        self._width = layers.embedding.shape[1]
        self._inner = products[0].down[0].shape[1]
        self._is_float32 = layers.dtype == torch.float32
        self._norm_is_float32 = _norm_dtypes(layers) == {torch.float32}
        self._norm_width = 0
        for layer in layers.layers:
            if layer.q_norm is not None:
                self._norm_width = len(layer.q_norm)
                break
        heads = layers.heads
        attention = 2 * (heads.query + heads.kv) * heads.dim
        self._room = 3 * (self._width + self._inner) + attention + scratch
        self._residual = layers.scales.residual
        self._is_gelu = layers.gate == "gelu"

    @staticmethod
    def of(layers: DecoderLayers, ropes: Mapping[str, Rope]) -> NativeLayers | None:
        """Return the layers for `layers.c`; None if it cannot compute them.

        It cannot compute experts, matrices that are not `Native`, norms of two dtypes, or MLPs of
        several sizes.
        """
        if not native.computes(layers.embedding) or len(_norm_dtypes(layers)) != 1:
            return None
        products = []
        down_shapes = set()
        for layer in layers.layers:
            if layer.experts is not None:
                return None
            matrices = _Products(
                _parts(layer.qkv), _parts(layer.out), _parts(layer.gate_up), _parts(layer.down)
            )
            if not all(matrices):
                return None
            products.append(matrices)
            down_shapes.add(matrices.down[0].shape)
        if len(down_shapes) == 1:
            return NativeLayers(layers, products, ropes)
        return None

    def __call__(
        self, attends: NativeAttention, hidden: torch.Tensor, start: int, end: int
    ) -> None:
        """Apply the layers from `start` to `end` - 1 to the hidden states [n, width], in place."""
        room = torch.empty(len(hidden) * self._room)
        attention = native.Attention.from_buffer_copy(attends.given)
        attention.is_float32 = self._is_float32
        attention.norm_is_float32 = self._norm_is_float32
        attention.norm_width = self._norm_width
        layer_stride, new_stride = attends.strides
        forward = _Forward(
            attention=attention,
            layers=ctypes.addressof(self._layers),
            hidden=hidden.data_ptr(),
            room=room.data_ptr(),
            first=start,
            end=end,
            width=self._width,
            inner=self._inner,
            layer_stride=layer_stride,
            new_stride=new_stride,
            residual=self._residual,
            hidden_is_float32=hidden.dtype == torch.float32,
            is_gelu=self._is_gelu,
        )
        native.compute_layers(ctypes.byref(forward))


def _fill(
    fields: _Layer,
    number: int,
    layers: DecoderLayers,
    products: _Products,
    ropes: Mapping[str, Rope],
) -> None:
    """Write the addresses of the tensors of layer `number` into `fields`."""
    layer = layers.layers[number]
    for place, parts in enumerate(products):
        for side, part in enumerate(parts):
            fields.products[_SIDES * place + side] = part.address
    for place, norm in enumerate(_layer_norms(layer)):
        fields.norms[place] = native.address_of(norm)
    fields.q_norm = native.address_of(layer.q_norm)
    fields.k_norm = native.address_of(layer.k_norm)
    fields.sinks = native.address_of(layers.scoring.sinks_of(number))
    if layer.rope is not None:
        cos, sin = ropes[layer.rope]
        fields.cos = cos.data_ptr()
        fields.sin = sin.data_ptr()
    fields.window = layers.scoring.windows[number]


def _layer_norms(layer: Layer) -> tuple[torch.Tensor | None, ...]:
    return layer.attention_norm, layer.after_attention, layer.mlp_norm, layer.after_mlp


def _norm_dtypes(layers: DecoderLayers) -> set[torch.dtype]:
    dtypes = set()
    for layer in layers.layers:
        for norm in (*_layer_norms(layer), layer.q_norm, layer.k_norm):
            if norm is not None:
                dtypes.add(norm.dtype)
    return dtypes


def _parts(product: Matrix) -> _Parts:
    """Return the parts of a product's matrix; none if `layers.c` cannot multiply by one of them."""
    matrices = product.parts if isinstance(product, SideBySide) else (product,)
    if len(matrices) > _SIDES:
        return ()
    parts = []
    for matrix in matrices:
        if not isinstance(matrix, Native) or matrix.address is None:
            return ()
        parts.append(matrix)
    return parts
