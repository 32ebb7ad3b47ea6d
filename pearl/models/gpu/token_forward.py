"""Decode forwards on a GPU: Triton kernels over row tables, recorded once and replayed.

There is a recording for each size of table: one of 16 rows, which takes as long as a single row
would, and one of 64 rows. The tile sizes of a product decide how fast its weights are read, and the
best ones differ between shapes and GPUs: `autotune` chooses them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pearl.models.feeds import Feed
from pearl.models.forward.attention import cap_scores
from pearl.models.forward.layers import DecoderLayers, Layer, Rope
from pearl.models.forward.linear_layers import Plain, Quantised, normalise
from pearl.models.forward.slots import Slots
from pearl.models.gpu import attention_kernels, autotune, product_kernels
from pearl.models.gpu.autotune import FAILURES, Cut, Cuts, Product
from pearl.models.gpu.recordings import (
    MOST_OFF,
    PieceInputs,
    Record,
    Reference,
    Rows,
    joined,
    relative_errors,
    sample_ids,
)
from pearl.models.gpu.row_table import (
    MOST_PARTS,
    SIZES,
    TILE_ROWS,
    TablePiece,
    lay_tables,
    numbers,
    numbers_of,
    rows_of,
)

log = logging.getLogger(__name__)

_SQUARED = 16  # see `product_kernels.SQUARED`; also columns of a tile of the embedding
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
_OVERLAPS_FROM = (9, 0)  # compute capability
# Tokens before the rows that are checked at load: three parts, whose sum has an order.
_CHECKED = 150


def make_decode(
    layers: DecoderLayers,
    slots: Slots,
    angles: Mapping[str, Rope],
    record: Record,
    expected: Reference,
    sizes: Sequence[int] = SIZES,
) -> Decode | None:
    """Build a model's decode kernels and check them; return None, and log why, if they do not fit.

    On a GPU the kernels need bfloat16, and everywhere keys of whole 16 numbers.

    Args:
        expected: computes the hidden states of a piece at position 0 of slot 0 by torch's operations.
    """
    device = layers.embedding.device
    is_gpu = device.type == "cuda"
    if is_gpu and layers.dtype != torch.bfloat16:
        return None
    if layers.heads.kv * layers.heads.dim % _SQUARED:
        return None
    try:
        overlaps = is_gpu and torch.cuda.get_device_capability(device) >= _OVERLAPS_FROM
        with autotune.one_at_a_time():
            decode = Decode(layers, slots, angles, Cuts(device), record, overlaps, sizes)
        problem = decode.problem(expected)
    except Exception as error:  # of Triton: its compilers' errors have no common base
        log.warning("our kernels do not run here, forwards are torch's operations: %s", error)
        return None
    if problem:
        log.warning("%s: forwards are torch's operations", problem)
        return None
    return decode


class _Recording(NamedTuple):
    """A recorded forward; `cost` is how many milliseconds a replay takes on a GPU, and 1 elsewhere."""

    forward: _TableForward
    replay: Callable[[], Rows]
    cost: float

    @property
    def size(self) -> int:
        return self.forward.size


class Decode:
    """Runs `layers` over the rows of a table, for all slots.

    Args:
        angles: cosines and sines [positions, 1, head_dim] of each rope; see `DecoderLayers.angles`.
        cuts: chooses the tile sizes of the products.
        record: records the launches, to be replayed.
        overlaps: whether a kernel may start before the previous one has ended; see `product_kernels`.
        sizes: rows of the tables, ascending. Layers with experts use the first size only.

    Attributes:
        most: rows of the largest table.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        angles: Mapping[str, Rope],
        cuts: Cuts,
        record: Record,
        overlaps: bool = False,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._device = layers.embedding.device
        self._has_experts = any(layer.experts for layer in layers.layers)
        self._recordings: list[_Recording] = []
        if self._has_experts:
            sizes = sizes[:1]
        smallest: _TableForward | None = None
        for size in sizes:
            try:
                forward = _TableForward(layers, slots, angles, cuts, smallest, overlaps, size)
                replay = record(forward.launch)
            except FAILURES as error:
                if smallest is None:
                    raise
                log.info("tables have %d rows at most here: %s", self.most, error)
                break
            cost = 1.0
            if self._device.type == "cuda":
                cost = autotune.milliseconds(replay)
            self._recordings.append(_Recording(forward, replay, cost))
            smallest = self._recordings[0].forward

    @property
    def most(self) -> int:
        return self._recordings[-1].size

    def problem(self, expected: Reference) -> str:
        """Check the rows after a text of three parts; return what is wrong with them, or "".

        The rows must be near torch's, and have the same bits however they are cut into forwards and
        whichever rows of a table they are in. Larger tables whose rows have other bits are dropped.
        Slot 0 is overwritten.
        """
        slots = self._slots
        count = self._recordings[0].size
        start = _CHECKED
        slots.rollback(0, 0)
        text = sample_ids(start + count, self._layers.vocab_size)
        ids = torch.tensor(text, device=self._device)
        states = expected(PieceInputs(torch.zeros_like(ids[:1]), ids, None))
        reference = self._layers.logits(states[start:]).float()
        self.forward([Feed(text[:start], 0)])
        tokens = text[start:]
        together = self._logits_at(start, tokens).clone()
        self._drop_other_bits(start, tokens, together)
        parts = []
        for begin, end in ((0, 1), (1, 4), (4, count)):
            parts.append(self._logits_at(start + begin, tokens[begin:end]).clone())
        # A path of every second node, between siblings.
        parents = tuple(max(-1, node - 2 + node % 2) for node in range(count))
        nodes = [tokens[node // 2] for node in range(count)]
        tree = self._logits_at(start, nodes, parents)
        slots.wrote(0, start + self.most)
        slots.lengths[0] = start + count
        slots.rollback(0, 0)
        is_invariant = torch.equal(together, torch.cat(parts))
        if not is_invariant or not torch.equal(tree[::2], together[: count // 2]):
            return "rows of our kernels depend on their company here"
        errors = relative_errors(together, reference)
        # A few rows may have chosen other experts, whose probabilities nearly tie.
        error = errors.median() if self._has_experts else errors.max()
        if error < MOST_OFF:
            return ""
        return "our kernels give wrong rows here"

    def _logits_at(
        self, start: int, tokens: Sequence[int], parents: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Compute the logits of tokens that slot 0 is fed at position `start`."""
        self._slots.lengths[0] = start
        logits, _ = self.forward([Feed(tokens, len(tokens), 0, parents)])[0]
        return logits

    def _drop_other_bits(self, start: int, tokens: Sequence[int], expected: torch.Tensor) -> None:
        """Drop the larger tables in whose last rows the tokens have other logits than `expected`."""
        count = len(tokens)
        feed = Feed(tokens, count)
        while len(self._recordings) > 1:
            piece = TablePiece(0, 0, count, self.most - count, start)
            logits, _ = self._run(-1, [feed], [piece])
            if torch.equal(logits[-count:], expected):
                return
            log.info(
                "rows of tables of %d have other bits here: tables have %d at most",
                self.most,
                count,
            )
            del self._recordings[-1]

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """Return the float32 logits that each feed asks for, and the features of its tokens.

        They may be in buffers that the next forward overwrites. Keys and values are written, but the
        slots' lengths do not change.
        """
        logits: list[list[torch.Tensor]] = [[] for _ in feeds]
        features: list[list[torch.Tensor]] = [[] for _ in feeds]
        tables = self._cheapest(feeds)
        for number, (which, pieces) in enumerate(tables, 1):
            table_logits, table_features = self._run(which, feeds, pieces)
            for piece in pieces:
                feed = feeds[piece.feed]
                length = len(feed.tokens)
                count = max(0, piece.end - max(piece.begin, length - feed.rows))
                if count or piece.end == length:
                    rows = table_logits[piece.stop - count : piece.stop]
                    if number < len(tables):
                        rows = rows.clone()
                    logits[piece.feed].append(rows)
                if table_features is not None:
                    features[piece.feed].append(table_features[piece.row : piece.stop].clone())
        return list(map(joined, logits, features))

    def _cheapest(self, feeds: Sequence[Feed]) -> list[tuple[int, list[TablePiece]]]:
        """Distribute the feeds over tables that take the least time.

        Returns:
            the number of the recording that computes each table, and the table's pieces.
        """
        largest_tree = 0
        for feed in feeds:
            if feed.parents is not None:
                largest_tree = max(largest_tree, len(feed.tokens))
        cheapest: list[tuple[int, list[TablePiece]]] = []
        least_cost = math.inf
        for recording in self._recordings:
            if recording.size < largest_tree:
                continue
            tables = lay_tables(feeds, self._slots.lengths, recording.size)
            plan = []
            cost = 0.0
            for pieces in tables:
                number = self._smallest(rows_of(pieces))
                plan.append((number, pieces))
                cost += self._recordings[number].cost
            if cost < least_cost:
                cheapest = plan
                least_cost = cost
            if len(tables) == 1:
                break
        return cheapest

    def _smallest(self, rows: int) -> int:
        """Return the number of the smallest recording that has this many rows."""
        return [recording.size >= rows for recording in self._recordings].index(True)

    def _run(self, which: int, feeds: Sequence[Feed], pieces: Sequence[TablePiece]) -> Rows:
        """Compute one table by the recording of this number."""
        recording = self._recordings[which]
        table = recording.forward.table
        entries = torch.tensor(
            numbers(feeds, pieces, recording.size), pin_memory=self._device.type == "cuda"
        )
        table[: len(entries)].copy_(entries, non_blocking=True)
        for piece in pieces:
            tokens = feeds[piece.feed].tokens
            if isinstance(tokens, torch.Tensor):
                table[1 + piece.row : 1 + piece.stop] = tokens[piece.begin : piece.end]
        return recording.replay()


class _TableForward:
    """Kernel launches and buffers for batches padded to `size` rows.

    Args:
        smaller: the forward of smaller tables, whose cuts add sums in the order that is needed here.

    Attributes:
        table: the numbers to fill in before a launch; see `row_table.numbers`.
        cuts: the cut of each product.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        angles: Mapping[str, Rope],
        cuts: Cuts,
        smaller: _TableForward | None,
        overlaps: bool,
        size: int,
    ) -> None:
        self.size = size
        self._layers = layers
        self._slots = slots
        self._angles = angles
        self._device = layers.embedding.device
        self._hidden = layers.embedding.shape[1]
        heads = layers.heads
        width = (heads.query + 2 * heads.kv) * heads.dim
        inner = 1
        for layer in layers.layers:
            if layer.experts is None:
                inner = max(inner, self._matrix("down", layer).shape[1])

        def zeros(*shape: int, dtype: torch.dtype = layers.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self.table = zeros(numbers_of(size), dtype=torch.long)
        self._x = zeros(size, self._hidden)
        self._qkv = zeros(size, width)
        self._part = zeros(size, self._hidden)
        self._mixed = zeros(size, heads.query * heads.dim)
        self._act = zeros(size, inner)
        self._logits = zeros(size, layers.vocab_size, dtype=torch.float32)
        self._features = zeros(size, len(layers.taps) * self._hidden)
        widest = max(width, self._hidden)
        # Sums of squares: before qkv, before gate-up, and of qkv or of what is added after its norm.
        squares = zeros(3, -(-widest // _SQUARED) + 256 // _SQUARED, size, dtype=torch.float32)
        self._qkv_squares, self._mlp_squares, self._part_squares = squares
        parts = size * MOST_PARTS * heads.query
        # Of as many parts of a product, and of a last tile too.
        sums = max(8 * (widest + 256), 4 * (2 * inner + 256)) * size
        self._sums = zeros(max(sums, parts * heads.dim), dtype=torch.float32)
        self._stats = zeros(parts, 2, dtype=torch.float32)
        self._counts = zeros((max(widest, inner) + 256) // 16, dtype=torch.int32)
        self._constants: dict[str, Any] = {"ROWS": size, "OVERLAPS": overlaps}
        if overlaps:
            self._constants["launch_pdl"] = True
        self.cuts: dict[Product, Cut] = {}
        self._is_compiling = True  # kernels are compiled, not launched
        self._choose(cuts, smaller)

    @property
    def _is_fed(self) -> torch.Tensor:
        """[rows] of the table: 0 for padding."""
        return self.table[1 + 2 * self.size : 1 + 3 * self.size]

    def _choose(self, cuts: Cuts, smaller: _TableForward | None) -> None:
        """Have the kernels compiled, and choose the cuts."""
        fitting: dict[Product, list[Cut]] = {}
        for product in self._products():
            if product not in fitting:
                fewer = None
                if smaller is not None:
                    fewer = smaller.cuts.get(product._replace(rows=smaller.size))
                fitting[product] = cuts.fitting(product, fewer)
                self.cuts[product] = fitting[product][0]
        if self._device.type == "cuda":
            with autotune.compiling():
                self.launch()
                for product, candidates in fitting.items():
                    for cut in candidates:
                        self._launch_all(product, cut)
        self._is_compiling = False
        self._is_fed[:] = 1  # timed as if all rows were needed
        for product, candidates in fitting.items():
            launch = partial(self._launch_all, product)
            self.cuts[product] = cuts.fastest(product, candidates, launch)

    def _products(self) -> Iterator[Product]:
        for layer in self._layers.layers:
            for name in self._launches(layer):
                yield self._key(name, layer)
        yield self._key("head", None)

    def _start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch a kernel, or have it compiled."""
        constants |= self._constants
        if self._is_compiling:
            kernel.warmup(*arguments, grid=grid, **constants)
        else:
            kernel[grid](*arguments, **constants)

    def _matrix(self, name: str, layer: Layer | None) -> Plain | Quantised:
        matrix = self._layers.head if layer is None else getattr(layer, name)
        assert isinstance(matrix, Plain | Quantised), matrix
        return matrix

    def _key(self, name: str, layer: Layer | None) -> Product:
        matrix = self._matrix(name, layer)
        outputs, inputs = matrix.shape
        return Product(name, (outputs, inputs), tuple(matrix.options().items()), self.size)

    def launch(self) -> Rows:
        """Launch the whole forward; return its logits and features, which stay in the buffers."""
        layers = self._layers
        self._start(
            product_kernels.embed,
            (self._hidden // _SQUARED,),
            self.table,
            layers.embedding,
            self._x,
            self._qkv_squares,
            layers.scales.embedding,
            self._hidden,
            _SQUARED,
        )
        for number, layer in enumerate(layers.layers):
            self._keep_features(number)
            self._launch_qkv(layer)
            self._attend(number, layer)
            self._launch_out(layer)
            self._add_normed(layer.after_attention, self._mlp_squares)
            if layer.experts is None:
                self._launch_gate_up(layer)
                self._launch_down(layer)
                self._add_normed(layer.after_mlp, self._qkv_squares)
            else:
                self._add_experts(layer)
        self._keep_features(len(layers))
        self._launch_head()
        if layers.scales.logits != 1:
            self._logits.mul_(layers.scales.logits)
        cap_scores(self._logits, layers.scales.logits_cap)
        return self._logits, self._features if layers.taps else None

    def _keep_features(self, number: int) -> None:
        """Copy the states before layer `number` for a head, if it reads them."""
        for place, tap in enumerate(self._layers.taps):
            if tap == number:
                self._features[:, place * self._hidden : (place + 1) * self._hidden] = self._x

    def _launches(self, layer: Layer) -> Mapping[str, Callable[[Layer, Cut], None]]:
        """Return the launches of a layer's products by name; those of experts are not among them."""
        launches = {"qkv": self._launch_qkv, "out": self._launch_out}
        if layer.experts is None:
            launches["gate_up"] = self._launch_gate_up
            launches["down"] = self._launch_down
        return launches

    def _launch_all(self, product: Product, cut: Cut) -> None:
        """Launch a product of every layer that has it, for timing."""
        if product.name == "head":
            self._launch_head(cut)
            return
        for layer in self._layers.layers:
            launch = self._launches(layer).get(product.name)
            if launch is not None and self._key(product.name, layer) == product:
                launch(layer, cut)

    def _launch_qkv(self, layer: Layer, cut: Cut | None = None) -> None:
        self._multiply(
            "qkv",
            layer,
            cut,
            self._x,
            layer.attention_norm,
            self._qkv,
            self._part_squares,
            keeps_squares=self._norms(layer) == 2,
        )

    def _launch_out(self, layer: Layer, cut: Cut | None = None) -> None:
        self._project("out", layer, cut, self._mixed, layer.after_attention, self._mlp_squares)

    def _launch_down(self, layer: Layer, cut: Cut | None = None) -> None:
        self._project("down", layer, cut, self._act, layer.after_mlp, self._qkv_squares)

    def _project(
        self,
        name: str,
        layer: Layer,
        cut: Cut | None,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        squares: torch.Tensor,
    ) -> None:
        """Launch a product that is added to the hidden state: at once, or after its norm from `_part`.

        Args:
            squares: receives the sums of squares of the hidden state.
        """
        out = self._x
        if norm is not None:
            out = self._part
            squares = self._part_squares
        self._multiply(name, layer, cut, x, None, out, squares, adds=norm is None)

    def _launch_head(self, cut: Cut | None = None) -> None:
        self._multiply(
            "head",
            None,
            cut,
            self._x,
            self._layers.norm,
            self._logits,
            self._part_squares,
            keeps_squares=False,
        )

    def _multiply(
        self,
        name: str,
        layer: Layer | None,
        cut: Cut | None,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        out: torch.Tensor,
        squares: torch.Tensor,
        adds: bool = False,
        keeps_squares: bool = True,
    ) -> None:
        """Launch out = x times a matrix, where x is normalised if there is a norm.

        Args:
            squares: receives the sums of squares of the outputs, if `keeps_squares`.
            adds: add the product, times the residual multiplier, to `out`.
        """
        matrix = self._matrix(name, layer)
        cut = cut or self.cuts[self._key(name, layer)]
        outputs = matrix.shape[0]
        self._start(
            product_kernels.multiply,
            (-(-outputs // cut.columns), cut.parts),
            self.table,
            x,
            self._qkv_squares,
            self._or_unread(norm),
            *_tensors(matrix),
            out,
            squares,
            self._sums,
            self._counts,
            self._layers.scales.residual,
            self._layers.eps,
            N=outputs,
            NORMS=norm is not None,
            ADDS=adds,
            SQUARES=keeps_squares,
            **self._options(matrix, cut),
        )

    def _launch_gate_up(self, layer: Layer, cut: Cut | None = None) -> None:
        """Launch both products and the activation of the gate."""
        matrix = self._matrix("gate_up", layer)
        cut = cut or self.cuts[self._key("gate_up", layer)]
        inner = matrix.shape[0] // 2
        self._start(
            product_kernels.gate_up,
            (-(-inner // cut.columns), cut.parts),
            self.table,
            self._x,
            self._mlp_squares,
            self._or_unread(layer.mlp_norm),
            *_tensors(matrix),
            self._act,
            self._sums,
            self._counts,
            self._layers.eps,
            N=inner,
            NORMS=layer.mlp_norm is not None,
            GELU=self._layers.gate == "gelu",
            **self._options(matrix, cut),
        )

    def _options(self, matrix: Plain | Quantised, cut: Cut) -> dict[str, Any]:
        """Return the constants of a product's kernel, and the options of its launch."""
        return {
            **cut.options(self._device),
            **matrix.options(),
            "BIAS": matrix.bias is not None,
            "K": matrix.shape[1],
            "BN": cut.columns,
            "BK": cut.inputs,
            "S": cut.warps,
            "PARTS": cut.parts,
        }

    def _or_unread(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor, or for None any other: kernels take one that they do not read."""
        if tensor is None:
            return self._x
        return tensor

    def _add_experts(self, layer: Layer) -> None:
        layers = self._layers
        assert layer.experts is not None
        is_fed = self._is_fed != 0
        x = self._x
        if layer.mlp_norm is not None:
            x = normalise(x, layer.mlp_norm, layers.eps, layers.dtype)
        self._add_part(layer.experts(x, is_fed), None, 1.0, self._qkv_squares)

    def _add_normed(self, norm: torch.Tensor | None, squares: torch.Tensor) -> None:
        """Add `_part` to the hidden state after its norm; without a norm the product was added."""
        if norm is not None:
            self._add_part(self._part, norm, self._layers.scales.residual, squares)

    def _add_part(
        self,
        part: torch.Tensor,
        norm: torch.Tensor | None,
        multiplier: float,
        squares: torch.Tensor,
    ) -> None:
        """Add `part` to the hidden state, whose sums of squares `squares` receives."""
        self._start(
            product_kernels.add,
            (self._hidden // _SQUARED,),
            self._x,
            part,
            self._part_squares,
            self._or_unread(norm),
            squares,
            multiplier,
            self._layers.eps,
            self._hidden,
            _SQUARED,
            NORMS=norm is not None,
        )

    def _norms(self, layer: Layer) -> int:
        """Return NORMS of `attention_kernels.attend`."""
        if layer.q_norm is None:
            return 0
        if len(layer.q_norm) == self._layers.heads.dim:
            return 1
        return 2

    def _attend(self, number: int, layer: Layer) -> None:
        heads = self._layers.heads
        scoring = self._layers.scoring
        sinks = scoring.sinks_of(number)
        keys = self._slots.keys[:, number]
        values = self._slots.values[:, number]
        cos = self._x
        sin = self._x
        if layer.rope is not None:
            cos, sin = self._angles[layer.rope]
        self._start(
            attention_kernels.attend,
            (heads.kv * MOST_PARTS if self._device.type == "cuda" else 3,),
            self.table,
            self._qkv,
            keys,
            values,
            self._or_unread(layer.q_norm),
            self._or_unread(layer.k_norm),
            self._part_squares,
            cos,
            sin,
            self._sums,
            self._stats,
            keys.stride(0),
            keys.stride(1),
            scoring.scale,
            self._layers.eps,
            HQ=heads.query,
            HK=heads.kv,
            D=heads.dim,
            NORMS=self._norms(layer),
            TURNS=layer.rope is not None,
            WINDOW=scoring.windows[number],
            CAP=scoring.cap,
        )
        self._start(
            attention_kernels.add_parts,
            (heads.query, self.size // TILE_ROWS),
            self.table,
            self._sums,
            self._stats,
            self._or_unread(sinks),
            self._mixed,
            HQ=heads.query,
            D=heads.dim,
            SINKS=sinks is not None,
        )


def _tensors(matrix: Plain | Quantised) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights, scales and bias; the weights stand for those that there are not."""
    scales = matrix.weight if isinstance(matrix, Plain) else matrix.scales
    bias = matrix.weight if matrix.bias is None else matrix.bias
    return matrix.weight, scales, bias
