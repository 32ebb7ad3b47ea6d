"""Forwards of row tables by the kernels of `kernels`, recorded once and replayed: on a GPU, with Triton.

There is a recording for each size of table: one of 16 rows, which takes as long as one row would, and one of 64, for
what needs more.  How a product is cut into programs decides how fast it reads its weights, and the best cut differs
between shapes and GPUs: a few are timed when a model is first loaded on a GPU, and the fastest kept in a file (`cuts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from pearl.models.feeds import Feed
from pearl.models.forward.attention import cap_scores
from pearl.models.forward.layers import DecoderLayers, Layer, Rope
from pearl.models.forward.linear_layers import Plain, Quantised, normalise
from pearl.models.forward.slots import Slots
from pearl.models.gpu import attention_kernels, autotune, product_kernels
from pearl.models.gpu.autotune import ADDING, FAILURES, Cut, Cuts, Product
from pearl.models.gpu.recordings import MOST_OFF, Piece, Record, Rows
from pearl.models.gpu.row_table import (
    MOST_PARTS,
    SIZES,
    TILE_ROWS,
    lay_tables,
    numbers,
    numbers_of,
    rows_of,
)
from pearl.models.gpu.row_table import Piece as TablePiece

log = logging.getLogger(__name__)

_SQUARED = 16  # see `product_kernels.SQUARED`; also columns of a tile of the embedding
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
_BESIDE_EXPERTS = ("qkv", "out")
_OVERLAPS_FROM = (9, 0)  # compute capability
_CHECKED = (
    150  # tokens before the rows that are checked at load: three parts, whose sum has an order
)


def make_decode(
    layers: DecoderLayers,
    slots: Slots,
    angles: Mapping[str, Rope],
    record: Record,
    expected: Callable[[Piece], torch.Tensor],
    sizes: Sequence[int] = SIZES,
) -> Decode | None:
    """The kernels of a model, checked; None where they do not fit it, with the reason in the log.

    On a GPU they take bfloat16, and everywhere keys of whole 16 numbers.

    Args:
        expected: hidden states by torch's operations of a piece at position 0 of slot 0.
    """
    device = layers.embedding.device
    if (
        device.type == "cuda" and layers.dtype != torch.bfloat16
    ) or layers.heads.kv * layers.heads.dim % _SQUARED:
        return None
    try:
        overlaps = (
            device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OVERLAPS_FROM
        )
        with autotune.one_at_a_time():
            decode = Decode(layers, slots, angles, Cuts(device), record, overlaps, sizes)
        wrong = decode.problem(expected)
    except Exception as problem:  # of Triton: its compilers' errors have no common base
        log.warning("our kernels do not run here, forwards are torch's operations: %s", problem)
        return None
    if wrong:
        log.warning("%s: forwards are torch's operations", wrong)
    return None if wrong else decode


def _kernels(matrix: object) -> Plain | Quantised:
    assert isinstance(matrix, Plain | Quantised), matrix
    return matrix


class Decode:
    """The forward of `layers` over the rows of a table, for all slots.

    Args:
        angles: cosines and sines [positions, 1, head_dim] of each rotation; see `DecoderLayers.angles`.
        given: the cuts of products.
        record: records the launches, to be replayed.
        overlaps: see `kernels`.
        sizes: rows of the tables, ascending. Layers with experts have the first only.

    Attributes:
        most: rows of the largest table.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        angles: Mapping[str, Rope],
        given: Cuts,
        record: Record,
        overlaps: bool = False,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self._layers, self._slots = layers, slots
        self._device = layers.embedding.device
        self._tables: list[_TableForward] = []
        self._replays: list[Callable[[], Rows]] = []
        self._costs: list[float] = []  # of each
        for size in sizes[:1] if any(layer.experts for layer in layers.layers) else sizes:
            smaller = self._tables[0].cuts if self._tables else {}
            try:
                table = _TableForward(layers, slots, angles, given, smaller, overlaps, size)
                replay = record(table.launch)
            except FAILURES as problem:
                if not self._tables:
                    raise
                log.info("tables have %d rows at most here: %s", self.most, problem)
                break
            self._tables.append(table)
            self._replays.append(replay)
            self._costs.append(
                autotune.milliseconds(replay) if self._device.type == "cuda" else 1.0
            )

    @property
    def most(self) -> int:
        return self._tables[-1].size

    def problem(self, expected: Callable[[Piece], torch.Tensor]) -> str:
        """What is wrong with rows behind a text of three parts; empty: nothing.

        They may not be near torch's, or have other bits in another cut or in other rows of a table. Gives up larger
        tables whose rows have other bits. Overwrites slot 0.
        """
        slot, least, before = self._slots, self._tables[0].size, _CHECKED
        slot.rollback(0, 0)
        tokens = tuple((7 + 11 * i) % self._layers.vocab_size for i in range(before + least))
        ids = torch.tensor(tokens, device=self._device)
        wanted = self._layers.logits(
            expected(Piece(torch.zeros_like(ids[:1]), ids, None))[before:]
        ).float()
        self.forward([Feed(tokens[:before], 0)])
        last = Feed(tokens[before:], least)
        slot.lengths[0] = before
        together = self.forward([last])[0][0].clone()
        while len(self._tables) > 1:
            found = self._run(-1, [last], [TablePiece(0, 0, least, self.most - least, before)])[0][
                -least:
            ]
            if torch.equal(found, together):
                break
            log.info(
                "rows of tables of %d have other bits here: tables have %d at most",
                self.most,
                least,
            )
            del self._tables[-1], self._replays[-1], self._costs[-1]
        apart = []
        for begin, end in ((0, 1), (1, 4), (4, least)):
            slot.lengths[0] = before + begin
            apart.append(self.forward([Feed(last.tokens[begin:end], end - begin)])[0][0].clone())
        slot.lengths[0] = before
        line = [
            max(-1, node - 2 + node % 2) for node in range(least)
        ]  # a path of every second node, between others
        twice = [tokens[before + node // 2] for node in range(least)]
        tree = self.forward([Feed(twice, least, 0, tuple(line))])[0][0]
        slot.wrote(0, before + self.most)
        slot.lengths[0] = before + least
        slot.rollback(0, 0)
        if not torch.equal(together, torch.cat(apart)) or not torch.equal(
            tree[::2], together[: least // 2]
        ):
            return "rows of our kernels depend on their company here"
        off = (together - wanted).norm(dim=1) / wanted.norm(dim=1)
        # Where there are experts, a few rows may have chosen others, whose probabilities nearly tie.
        worst = off.median() if any(layer.experts for layer in self._layers.layers) else off.max()
        return "" if worst < MOST_OFF else "our kernels give wrong rows here"

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """What each feed asks for, perhaps in buffers that the next forward overwrites; logits in float32.

        Writes keys and values, but does not change the slots' lengths.
        """
        found: list[list[torch.Tensor]] = [[] for _ in feeds]
        seen: list[list[torch.Tensor]] = [[] for _ in feeds]
        tables = self._cheapest(feeds)
        for number, (which, pieces) in enumerate(tables):
            logits, features = self._run(which, feeds, pieces)
            for piece in pieces:
                feed, stop = feeds[piece.feed], piece.row + piece.end - piece.begin
                asked = max(0, piece.end - max(piece.begin, len(feed.tokens) - feed.rows))
                if asked or piece.end == len(feed.tokens):
                    rows = logits[stop - asked : stop]
                    found[piece.feed].append(rows.clone() if number + 1 < len(tables) else rows)
                if features is not None:
                    seen[piece.feed].append(features[piece.row : stop].clone())
        whole = [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in found]
        return [
            (rows, torch.cat(more) if more else None)
            for rows, more in zip(whole, seen, strict=True)
        ]

    def _cheapest(self, feeds: Sequence[Feed]) -> list[tuple[int, list[TablePiece]]]:
        """The tables for these feeds, each with the recording that computes it, that take the least time."""
        widest, ways = (
            max((len(feed.tokens) for feed in feeds if feed.parents is not None), default=0),
            [],
        )
        for most in (table.size for table in self._tables if table.size >= widest):
            laid = lay_tables(feeds, self._slots.lengths, most)
            fits = [
                [table.size >= rows_of(pieces) for table in self._tables].index(True)
                for pieces in laid
            ]
            ways.append(
                (sum(self._costs[which] for which in fits), list(zip(fits, laid, strict=True)))
            )
            if len(laid) == 1:
                break
        return min(ways, key=itemgetter(0))[1]

    def _run(self, which: int, feeds: Sequence[Feed], pieces: Sequence[TablePiece]) -> Rows:
        """One table by one of the recordings."""
        table = self._tables[which].table
        given = torch.tensor(
            numbers(feeds, pieces, self._tables[which].size), pin_memory=self._device.type == "cuda"
        )
        table[: len(given)].copy_(given, non_blocking=True)
        for piece in pieces:
            tokens = feeds[piece.feed].tokens
            if isinstance(tokens, torch.Tensor):
                begin = 1 + piece.row
                table[begin : begin + piece.end - piece.begin] = tokens[piece.begin : piece.end]
        return self._replays[which]()


class _TableForward:
    """The launches of a forward of tables of `size` rows, and their buffers.

    Args:
        smaller: the cuts of the smaller table.

    Attributes:
        table: the numbers to fill in before a launch; see `row_table.numbers`.
        cuts: of each product.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        angles: Mapping[str, Rope],
        given: Cuts,
        smaller: Mapping[Product, Cut],
        overlaps: bool,
        size: int,
    ) -> None:
        self.size, self._layers, self._slots, self._angles = size, layers, slots, angles
        self._device = layers.embedding.device
        (hq, hk, dim), self._hidden = layers.heads, layers.embedding.shape[1]
        self._outputs, self._width = hq * dim, (hq + 2 * hk) * dim
        inner = max(
            (_kernels(each.down).shape[1] for each in layers.layers if each.experts is None),
            default=1,
        )

        def room(*shape: int, dtype: torch.dtype = layers.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self.table = room(numbers_of(size), dtype=torch.long)
        self._x, self._qkv, self._part = (
            room(size, self._hidden),
            room(size, self._width),
            room(size, self._hidden),
        )
        self._mixed, self._act = room(size, self._outputs), room(size, inner)
        self._logits = room(size, layers.vocab_size, dtype=torch.float32)
        self._features = room(size, len(layers.taps) * self._hidden)
        widest = max(self._width, self._hidden)
        # Sums of squares: before qkv, before gate-up, of qkv or of what is added after its norm.
        self._squares = room(3, -(-widest // _SQUARED) + 256 // _SQUARED, size, dtype=torch.float32)
        parts = size * MOST_PARTS * hq
        most = max(
            8 * (widest + 256), 4 * (2 * inner + 256)
        )  # of as many parts of a product, and of a last tile too
        self._sums = room(max(most * size, parts * dim), dtype=torch.float32)
        self._stats = room(parts, 2, dtype=torch.float32)
        self._counts = room((max(widest, inner) + 256) // 16, dtype=torch.int32)
        self._options: dict[str, Any] = {
            "ROWS": size, "OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {}),
        }  # fmt: skip
        self.cuts: dict[Product, Cut] = {}
        self._prepares = True  # kernels are compiled only
        self._choose(given, smaller)

    def _choose(self, given: Cuts, smaller: Mapping[Product, Cut]) -> None:
        """Have the kernels compiled, and choose the cuts."""
        fitting: dict[Product, list[Cut]] = {}
        for layer, names in [
            *((each, _names(each)) for each in self._layers.layers),
            (None, ("head",)),
        ]:
            for product in (self._key(name, layer) for name in names):
                known = next(
                    (cut for other, cut in smaller.items() if other[:3] == product[:3]), None
                )
                if product not in fitting:
                    fitting[product] = given.fitting(product, known)
                    self.cuts[product] = fitting[product][0]
        if self._device.type == "cuda":
            with autotune.compiling():
                self.launch()
                for product, some in fitting.items():
                    for cut in some:
                        self._launch_all(product, cut)
        self._prepares = False
        self.table[1 + 2 * self.size : 1 + 3 * self.size] = 1  # timed as if all rows were needed
        for product, some in fitting.items():
            self.cuts[product] = given.fastest(product, some, partial(self._launch_all, product))

    def _start(self, kernel: Any, grid: tuple[int, ...], *given: Any, **more: Any) -> None:
        """Launch a kernel, or have it compiled."""
        more |= self._options
        if self._prepares:
            kernel.warmup(*given, grid=grid, **more)
        else:
            kernel[grid](*given, **more)

    def _matrix(self, name: str, layer: Layer | None) -> Plain | Quantised:
        return _kernels(self._layers.head if layer is None else getattr(layer, name))

    def _key(self, name: str, layer: Layer | None) -> Product:
        matrix = self._matrix(name, layer)
        outputs, inputs = matrix.shape
        return Product(name, (outputs, inputs), tuple(matrix.options().items()), self.size)

    def launch(self) -> Rows:
        """Launch the whole forward; what it leaves in the buffers."""
        layers = self._layers
        self._start(
            product_kernels.embed, (self._hidden // _SQUARED,), self.table, layers.embedding, self._x, self._squares[0],
            layers.scales.embedding, self._hidden, _SQUARED,
        )  # fmt: skip
        for number, layer in enumerate(layers.layers):
            self._keep_features(number)
            self._product("qkv", layer)
            self._attend(number, layer)
            self._add("out", layer, layer.after_attention)
            if layer.experts is None:
                self._product("gate_up", layer)
                self._add("down", layer, layer.after_mlp)
            else:
                is_fed = self.table[1 + 2 * self.size : 1 + 3 * self.size] != 0
                x = (
                    self._x
                    if layer.mlp_norm is None
                    else normalise(self._x, layer.mlp_norm, layers.eps, layers.dtype)
                )
                self._add_part(layer.experts(x, is_fed), None, 1.0, 0)
        self._keep_features(len(layers))
        self._product("head", None)
        if layers.scales.logits != 1:
            self._logits.mul_(layers.scales.logits)
        cap_scores(self._logits, layers.scales.logits_cap)
        return self._logits, self._features if layers.taps else None

    def _keep_features(self, number: int) -> None:
        """Copy the states before layer `number` for a head, if it reads them."""
        for place, tap in enumerate(self._layers.taps):
            if tap == number:
                self._features[:, place * self._hidden : (place + 1) * self._hidden] = self._x

    def _launch_all(self, product: Product, cut: Cut) -> None:
        """A product of every layer that has it: for timing."""
        for layer in [None] if product.name == "head" else self._layers.layers:
            if layer is None or (
                product.name in _names(layer) and self._key(product.name, layer) == product
            ):
                norm = {
                    "out": layer and layer.after_attention,
                    "down": layer and layer.after_mlp,
                }.get(product.name)
                self._product(product.name, layer, cut=cut, aside=norm is not None)

    def _add(self, name: str, layer: Layer, norm: torch.Tensor | None) -> None:
        """A product that is added to the hidden state, after its norm if there is one."""
        if norm is None:
            self._product(name, layer)
            return
        self._product(name, layer, aside=True)
        self._add_part(self._part, norm, self._layers.scales.residual, 0 if name == "down" else 1)

    def _add_part(
        self, part: torch.Tensor, norm: torch.Tensor | None, multiplier: float, to: int
    ) -> None:
        """to: which of the sums of squares to keep."""
        self._start(
            product_kernels.add, (self._hidden // _SQUARED,), self._x, part, self._squares[2],
            self._x if norm is None else norm, self._squares[to], multiplier, self._layers.eps, self._hidden, _SQUARED,
            NORMS=norm is not None,
        )  # fmt: skip

    def _product(
        self, name: str, layer: Layer | None, cut: Cut | None = None, aside: bool = False
    ) -> None:
        """Launch one product. aside: into `_part`, in place of adding it to the hidden state."""
        layers, matrix, (before, after, other) = (
            self._layers,
            self._matrix(name, layer),
            self._squares,
        )
        (outputs, inputs), cut = matrix.shape, cut or self.cuts[self._key(name, layer)]
        weights = matrix.weight, matrix.weight if isinstance(matrix, Plain) else matrix.scales
        bias = weights[0] if matrix.bias is None else matrix.bias
        more = cut.options(self._device) | matrix.options() | {"BIAS": matrix.bias is not None}
        more |= {
            "K": inputs,
            "BN": cut.columns,
            "BK": cut.inputs,
            "S": cut.warps,
            "PARTS": cut.parts,
        }
        if layer is not None and name == "gate_up":
            norm = layer.mlp_norm
            self._start(
                product_kernels.gate_up, (-(-outputs // 2 // cut.columns), cut.parts), self.table, self._x, after,
                self._x if norm is None else norm, *weights, bias, self._act, self._sums, self._counts, layers.eps,
                N=outputs // 2, NORMS=norm is not None, GELU=layers.gate == "gelu", **more,
            )  # fmt: skip
            return
        adds, squares, norm = name in ADDING and not aside, other, layers.norm
        x, out = self._x, self._part
        if layer is None:
            out = self._logits
        elif name == "qkv":
            norm, out = layer.attention_norm, self._qkv
        else:
            x, norm = (self._mixed if name == "out" else self._act), None
            out, squares = (
                (self._x, before if name == "down" else after) if adds else (self._part, other)
            )
        self._start(
            product_kernels.multiply, (-(-outputs // cut.columns), cut.parts), self.table, x, before,
            self._x if norm is None else norm, *weights, bias, out, squares, self._sums, self._counts,
            layers.scales.residual, layers.eps, N=outputs, NORMS=norm is not None, ADDS=adds,
            SQUARES=layer is not None and (name != "qkv" or self._norms(layer) == 2), **more,
        )  # fmt: skip

    def _norms(self, layer: Layer) -> int:
        """NORMS of `attention_kernels.attend`."""
        if layer.q_norm is None:
            return 0
        return 1 if len(layer.q_norm) == self._layers.heads.dim else 2

    def _attend(self, number: int, layer: Layer) -> None:
        layers, slots = self._layers, self._slots
        (hq, hk, dim), scoring, sinks = (
            layers.heads,
            layers.scoring,
            layers.scoring.sinks_of(number),
        )
        keys, values = slots.keys[:, number], slots.values[:, number]
        q_norm, k_norm = (
            self._x if norm is None else norm for norm in (layer.q_norm, layer.k_norm)
        )
        cos, sin = (self._x, self._x) if layer.rope is None else self._angles[layer.rope]
        self._start(
            attention_kernels.attend, (hk * MOST_PARTS if self._device.type == "cuda" else 3,), self.table, self._qkv,
            keys, values, q_norm, k_norm, self._squares[2], cos, sin, self._sums, self._stats, keys.stride(0),
            keys.stride(1), scoring.scale, layers.eps, HQ=hq, HK=hk, D=dim, NORMS=self._norms(layer),
            TURNS=layer.rope is not None, WINDOW=scoring.windows[number], CAP=scoring.cap,
        )  # fmt: skip
        self._start(
            attention_kernels.add_parts, (hq, self.size // TILE_ROWS), self.table, self._sums, self._stats,
            self._x if sinks is None else sinks, self._mixed, HQ=hq, D=dim, SINKS=sinks is not None,
        )  # fmt: skip


def _names(layer: Layer) -> tuple[str, ...]:
    return PRODUCTS[:-1] if layer.experts is None else _BESIDE_EXPERTS
