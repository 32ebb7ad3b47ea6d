"""Forwards of a row table by the kernels of `kernels`, recorded once and replayed: on a GPU, with Triton.

How a product is cut into programs decides how fast it reads its weights, and the best cut differs between shapes and
GPUs: a few are timed when a model is first loaded on a GPU, and the fastest kept in a file (`cuts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pearl.models.feeds import Feed
from pearl.models.forward import cuts, kernels
from pearl.models.forward.cuts import ADDING, Cut
from pearl.models.forward.expert_kernels import add_mixed
from pearl.models.forward.experts import Experts
from pearl.models.forward.graphs import Record, Rows
from pearl.models.forward.layers import DecoderLayers, Layer
from pearl.models.forward.matrices import Plain, Quantised, normalise
from pearl.models.forward.row_table import MOST_PARTS, NUMBERS, ROWS, lay_tables, numbers
from pearl.models.forward.slots import Slots

log = logging.getLogger(__name__)

_SQUARED = 16  # see `kernels.SQUARED`; also columns of a tile of the embedding
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
_BESIDE_EXPERTS = ("qkv", "out", "head")
_OVERLAPS_FROM = (9, 0)  # compute capability

# (product, shape, kind of weights, launch with a cut) -> the cut
Choose = Callable[[str, tuple[int, int], Mapping[str, Any], Callable[[Cut], object]], Cut]


def make_decode(
    layers: DecoderLayers, slots: Slots, angles: tuple[torch.Tensor, torch.Tensor], record: Record
) -> Decode | None:
    """The kernels of a model, checked; None where they do not fit it: bfloat16, and heads of a power of two.

    Logs why, where they should fit.
    """
    device = layers.embedding.device
    if (device.type == "cuda" and layers.dtype != torch.bfloat16) or layers.heads.dim & (layers.heads.dim - 1):
        return None
    try:
        overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OVERLAPS_FROM
        with cuts.one_at_a_time():
            decode = Decode(layers, slots, *angles, partial(cuts.choose, device=device), record, overlaps)
    except Exception as problem:  # of Triton: its compilers' errors have no common base
        log.warning("our kernels do not run here, forwards are torch's operations: %s", problem)
        return None
    if not decode.is_invariant():
        log.warning("rows of our kernels depend on their company here: forwards are torch's operations")
        return None
    return decode


def _kernels(matrix: object) -> Plain | Quantised:
    assert isinstance(matrix, Plain | Quantised), matrix
    return matrix


class Decode:
    """The forward of `layers` over the rows of a table, for all slots.

    Args:
        cos, sin: [positions, 1, head_dim]; see `DecoderLayers.angles`.
        choose: chooses the cut of each product.
        record: records the launches, to be replayed.
        overlaps: see `kernels`.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        cos: torch.Tensor,
        sin: torch.Tensor,
        choose: Choose,
        record: Record,
        overlaps: bool = False,
    ) -> None:
        self._layers, self._slots, self._angles = layers, slots, (cos, sin)
        self._device = layers.embedding.device
        (hq, hk, dim), self._hidden = layers.heads, layers.embedding.shape[1]
        self._outputs, self._width = hq * dim, (hq + 2 * hk) * dim
        self._inner = _kernels(layers.layers[0].down).shape[1]

        def room(*shape: int, dtype: torch.dtype = layers.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._table = room(NUMBERS, dtype=torch.long)
        self._x, self._qkv = room(ROWS, self._hidden), room(ROWS, self._width)
        self._mixed, self._act = room(ROWS, self._outputs), room(ROWS, self._inner)
        self._logits = room(ROWS, layers.vocab_size, dtype=torch.float32)
        self._features = room(ROWS, len(layers.taps) * self._hidden)
        self._squares = room(2, self._hidden // _SQUARED, ROWS, dtype=torch.float32)  # before qkv, before gate-up
        widest = max(self._width, self._hidden) + 256  # columns, of a last tile too
        parts = ROWS * MOST_PARTS * hq * ROWS
        self._sums = room(max(8 * ROWS * widest, parts * dim), dtype=torch.float32)
        self._stats = room(parts, 2, dtype=torch.float32)
        self._counts = room(widest // 16, dtype=torch.int32)
        self._options: dict[str, bool] = {"OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {})}
        self._cuts: dict[str, Cut] = {}
        for name in PRODUCTS if layers.layers[0].experts is None else _BESIDE_EXPERTS:
            self._cuts[name] = choose(name, self.shape(name), self._matrix(name).options(), partial(self._each, name))
        self._replay = record(self._launch)

    def is_invariant(self) -> bool:
        """Whether rows have the same bits in another cut and in other rows of the table. Overwrites slot 0."""
        vocab, slot = self._layers.vocab_size, self._slots
        slot.rollback(0, 0)
        tokens = tuple((7 + 11 * i) % vocab for i in range(ROWS))
        together = self.forward([Feed(tokens, ROWS)])[0][0].clone()
        apart = []
        for begin, end in ((0, 1), (1, 4), (4, ROWS)):
            slot.lengths[0] = begin
            apart.append(self.forward([Feed(tokens[begin:end], end - begin)])[0][0].clone())
        slot.wrote(0, ROWS)
        slot.lengths[0] = ROWS
        slot.rollback(0, 0)
        return torch.equal(together, torch.cat(apart))

    def shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a product; of gate-up the outputs of both."""
        outputs, inputs = self._matrix(name).shape
        return outputs, inputs

    def _matrix(self, name: str, layer: Layer | None = None) -> Plain | Quantised:
        return _kernels(self._layers.head if name == "head" else getattr(layer or self._layers.layers[0], name))

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """What each feed asks for, perhaps in buffers that the next forward overwrites; logits in float32.

        Writes keys and values, but does not change the slots' lengths.
        """
        found: list[list[torch.Tensor]] = [[] for _ in feeds]
        seen: list[list[torch.Tensor]] = [[] for _ in feeds]
        tables = lay_tables(feeds, self._slots.lengths)
        for number, pieces in enumerate(tables):
            self._fill(feeds, pieces)
            logits, features = self._replay()
            for piece in pieces:
                feed, stop = feeds[piece.feed], piece.row + piece.end - piece.begin
                asked = max(0, piece.end - max(piece.begin, len(feed.tokens) - feed.rows))
                if asked or piece.end == len(feed.tokens):
                    rows = logits[stop - asked : stop]
                    found[piece.feed].append(rows.clone() if number + 1 < len(tables) else rows)
                if features is not None:
                    seen[piece.feed].append(features[piece.row : stop].clone())
        whole = [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in found]
        return [(rows, torch.cat(more) if more else None) for rows, more in zip(whole, seen, strict=True)]

    def _fill(self, feeds: Sequence[Feed], pieces: Sequence[Any]) -> None:
        given = torch.tensor(numbers(feeds, pieces), pin_memory=self._device.type == "cuda")
        self._table.copy_(given, non_blocking=True)
        for piece in pieces:
            tokens = feeds[piece.feed].tokens
            if isinstance(tokens, torch.Tensor):
                begin = 1 + piece.row
                self._table[begin : begin + piece.end - piece.begin] = tokens[piece.begin : piece.end]

    def _launch(self) -> Rows:
        kernels.embed[(self._hidden // _SQUARED,)](
            self._table, self._layers.embedding, self._x, self._squares[0], self._hidden, _SQUARED, **self._options
        )
        for number, layer in enumerate(self._layers.layers):
            for place, tap in enumerate(self._layers.taps):
                if tap == number:
                    self._features[:, place * self._hidden : (place + 1) * self._hidden] = self._x
            self._product("qkv", layer, self._cuts["qkv"])
            self._attend(number, layer)
            for name in ("out", "gate_up", "down") if layer.experts is None else ("out",):
                self._product(name, layer, self._cuts[name])
            if layer.experts is not None:
                self._mix(layer.experts, layer.mlp_norm)
        self._product("head", None, self._cuts["head"])
        return self._logits, self._features if self._layers.taps else None

    def _each(self, name: str, cut: Cut) -> None:
        """A product of every layer: for timing."""
        for layer in [None] if name == "head" else self._layers.layers:
            self._product(name, layer, cut)

    def _product(self, name: str, layer: Layer | None, cut: Cut) -> None:
        """Launch one product."""
        layers, matrix = self._layers, self._matrix(name, layer)
        (outputs, inputs), (before, after) = matrix.shape, self._squares
        weights = matrix.weight, matrix.weight if isinstance(matrix, Plain) else matrix.scales
        more = cut.options(self._device) | self._options | matrix.options()
        if layer is not None and name == "gate_up":
            tiles = -(-self._inner // cut.columns)
            kernels.gate_up[(tiles,)](
                self._x, after, layer.mlp_norm, *weights, self._act, layers.eps, K=inputs, N=self._inner,
                BN=cut.columns, BK=cut.inputs, **more,
            )  # fmt: skip
            return
        x, out, squares = self._x, self._x, before if name == "down" else after
        norm: torch.Tensor | None = layers.norm
        if layer is None:
            out, outputs = self._logits, layers.vocab_size
        elif name == "qkv":
            norm, out = layer.attention_norm, self._qkv
        else:
            x = self._mixed if name == "out" else self._act
        kernels.multiply[(-(-outputs // cut.columns), cut.parts)](
            x, before, norm, *weights, weights[0] if matrix.bias is None else matrix.bias, out, squares, self._sums,
            self._counts, layers.eps, K=inputs, N=outputs, BN=cut.columns, BK=cut.inputs, PARTS=cut.parts,
            NORMS=name not in ADDING, ADDS=name in ADDING, BIAS=matrix.bias is not None, **more,
        )  # fmt: skip

    def _mix(self, experts: Experts, norm: torch.Tensor | None) -> None:
        """Add what the experts of a layer give."""
        assert norm is not None
        is_fed = self._table[1 + 2 * ROWS : 1 + 3 * ROWS] != 0
        mixed = experts(normalise(self._x, norm, self._layers.eps), is_fed)
        add_mixed[(self._hidden // _SQUARED,)](self._x, mixed, self._squares[0], self._hidden, _SQUARED)

    def _attend(self, number: int, layer: Layer) -> None:
        (hq, hk, dim), slots, (cos, sin) = self._layers.heads, self._slots, self._angles
        keys, values = slots.keys[:, number], slots.values[:, number]
        norms = layer.q_norm, layer.k_norm
        q_norm, k_norm = (self._x if norm is None else norm for norm in norms)
        kernels.attend[(hk * MOST_PARTS if self._device.type == "cuda" else 3,)](
            self._table, self._qkv, keys, values, q_norm, k_norm, cos, sin, self._sums, self._stats, keys.stride(0),
            keys.stride(1), dim**-0.5, self._layers.eps, HQ=hq, HK=hk, D=dim, NORMS=layer.q_norm is not None,
            **self._options,
        )  # fmt: skip
        kernels.add_parts[(hq,)](self._table, self._sums, self._stats, self._mixed, HQ=hq, D=dim, **self._options)
