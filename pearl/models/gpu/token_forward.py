"""Decode forwards on a GPU: Triton kernels over row tables, recorded once and replayed.

There is a recording (a CUDA graph) for each size of table: one for 16 rows, which takes as long as
a single row would, and one for 64 rows. The tile sizes of a product decide how fast its weights are
read. The best sizes differ between shapes and GPUs, so `autotune` chooses them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from pearl.models.feeds import Feed
from pearl.models.forward.attention import cap_scores
from pearl.models.forward.layers import DecoderLayers, Layer, Rope
from pearl.models.forward.linear_layers import KernelMatrix, normalise
from pearl.models.forward.slots import Slots
from pearl.models.gpu import attention_kernels, autotune, product_kernels
from pearl.models.gpu.autotune import FAILURES, Cut, Cuts, Product
from pearl.models.gpu.check import MOST_OFF, relative_errors, sample_ids, torch_states
from pearl.models.gpu.recordings import Record, Rows, joined
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

_SQUARED = 16  # see `product_kernels.SQUARED`; also the columns of a tile in `embed` and `add`
_OVERLAPS_FROM = (9, 0)  # least compute capability for OVERLAPS of `product_kernels`
# Tokens before the rows that are checked at load. They make three parts, which must be added in order.
CHECKED = 150


class _Recording(NamedTuple):
    """A recorded forward.

    Attributes:
        replay: computes the forward for the current contents of its table.
        cost: milliseconds of a replay on a GPU; 1 elsewhere.
    """

    forward: _TableForward
    replay: Callable[[], Rows]
    cost: float

    @property
    def size(self) -> int:
        return self.forward.size


class Decode:
    """Runs `layers` over the rows of tables, for all slots.

    Raises:
        ValueError: the kernels do not fit the sizes of the model.

    Args:
        angles: cosines and sines of all positions, by the rope's name; see `DecoderLayers.angles`.
        record: records the launches, and returns a function that replays them.
        sizes: rows of the tables, ascending. Layers with experts use the first size only.

    Attributes:
        most: rows of the largest table.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        angles: Mapping[str, Rope],
        record: Record,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._angles = angles
        self._is_gpu = layers.embedding.is_cuda
        self._recordings: list[_Recording] = []
        if layers.heads.kv * layers.heads.dim % _SQUARED:
            raise ValueError(f"keys of a position are no multiple of {_SQUARED} numbers")
        if layers.has_experts:
            sizes = sizes[:1]
        for size in sizes:
            try:
                self._record(record, size)
            except FAILURES as error:
                if not self._recordings:
                    raise
                log.info("tables have %d rows at most here: %s", self.most, error)
                break

    def _record(
        self,
        record: Record,
        size: int,
    ) -> None:
        """Record the forward of tables of `size` rows.

        This forward adds sums in the same order as the forward of the smallest tables.
        """
        smaller = self._recordings[0].forward if self._recordings else None
        forward = _TableForward(self._layers, self._slots, self._angles, smaller, size)
        replay = record(forward.launch)
        cost = 1.0
        if self._is_gpu:
            cost = autotune.milliseconds(replay)
        self._recordings.append(_Recording(forward, replay, cost))

    @property
    def most(self) -> int:
        return self._recordings[-1].size

    def problem(self) -> str:
        """Check the kernels on a sample text. Return what is wrong with them; "" if nothing is.

        Logits are checked after a text that is long enough for three parts (see `row_table`). They
        must be near those of torch's operations. Their bits must not depend on how the rows are cut
        into forwards, nor on their place in a table. Larger tables whose rows have other bits are
        dropped. Slot 0 is overwritten.
        """
        slots = self._slots
        count = self._recordings[0].size
        start = CHECKED
        text = sample_ids(start + count, self._layers.vocab_size)
        states = torch_states(self._layers, slots, self._angles, text)
        reference = self._layers.logits(states[start:])
        self.forward([Feed(text[:start], 0)])
        tokens = text[start:]
        together = self._logits_at(start, tokens).clone()
        self._drop_other_bits(start, tokens, together)
        pieces = []
        for begin, end in ((0, 1), (1, 4), (4, count)):
            pieces.append(self._logits_at(start + begin, tokens[begin:end]).clone())
        # A tree in which the even nodes are the text, and each of them but the first has a sibling.
        parents = tuple(max(-1, node - 2 + node % 2) for node in range(count))
        nodes = [tokens[node // 2] for node in range(count)]
        tree = self._logits_at(start, nodes, parents)
        slots.wrote(0, start + self.most)
        slots.rollback(0, 0)
        is_invariant = torch.equal(together, torch.cat(pieces))
        if not is_invariant or not torch.equal(tree[::2], together[: count // 2]):
            return "rows of our kernels depend on their company here"
        errors = relative_errors(together, reference)
        # In a few rows other experts may be chosen, because their probabilities nearly tie.
        error = errors.median() if self._layers.has_experts else errors.max()
        if error < MOST_OFF:
            return ""
        return "our kernels give wrong rows here"

    def _logits_at(
        self,
        start: int,
        tokens: Sequence[int],
        parents: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Feed tokens to slot 0 from position `start` on, and return their logits."""
        self._slots.lengths[0] = start
        logits, _ = self.forward([Feed(tokens, len(tokens), 0, parents)])[0]
        return logits

    def _drop_other_bits(
        self,
        start: int,
        tokens: Sequence[int],
        expected: torch.Tensor,
    ) -> None:
        """Drop the larger tables that do not give the `expected` bits.

        For this the tokens are fed in the last rows of each larger table, to slot 0 from position
        `start` on.
        """
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
        """Return for each feed the float32 logits that it asks for, and the states for a head.

        The states are those hidden states of the feed's tokens that a drafting head reads; None if
        no head reads states.
        The logits may be in buffers that the next forward overwrites. Keys and values are written
        to the slots, but the slots' lengths do not change.
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
        """Distribute the feeds over tables so that these take the least time.

        Return, for each table, the index of the recording that computes it, and the table's pieces.
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
        """Return the index of the smallest recording that has at least `rows` rows."""
        return [recording.size >= rows for recording in self._recordings].index(True)

    def _run(
        self,
        which: int,
        feeds: Sequence[Feed],
        pieces: Sequence[TablePiece],
    ) -> Rows:
        """Compute one table with the recording at index `which`."""
        recording = self._recordings[which]
        table = recording.forward.table
        entries = torch.tensor(numbers(feeds, pieces, recording.size), pin_memory=self._is_gpu)
        table[: len(entries)].copy_(entries, non_blocking=True)
        for piece in pieces:
            tokens = feeds[piece.feed].tokens
            if isinstance(tokens, torch.Tensor):
                table[1 + piece.row : 1 + piece.stop] = tokens[piece.begin : piece.end]
        return recording.replay()


class _TableForward:
    """The kernel launches and buffers of a forward over a table of `size` rows.

    Args:
        smaller: the forward of smaller tables, if there is one. Only cuts are chosen that add sums
            in the same order as the cuts of `smaller`.

    Attributes:
        table: the numbers to fill in before a launch; see `row_table.numbers`.
        cuts: for each product, how its kernel cuts the matrix into tiles.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        angles: Mapping[str, Rope],
        smaller: _TableForward | None,
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
                inner = max(inner, _for_kernels(layer.down).shape[1])

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
        # Sums of squares of three tensors: x before qkv, x before gate-up, and qkv or `_part`.
        squares = zeros(3, -(-widest // _SQUARED) + 256 // _SQUARED, size, dtype=torch.float32)
        self._qkv_squares, self._mlp_squares, self._part_squares = squares
        parts = size * MOST_PARTS * heads.query
        self._sums = zeros(parts, heads.dim, dtype=torch.float32)
        self._stats = zeros(parts, 2, dtype=torch.float32)
        self._constants: dict[str, Any] = {"ROWS": size, "OVERLAPS": False}
        is_gpu = self._device.type == "cuda"
        # A kernel may start before the previous one has ended; see `product_kernels`.
        if is_gpu and torch.cuda.get_device_capability(self._device) >= _OVERLAPS_FROM:
            self._constants |= {"OVERLAPS": True, "launch_pdl": True}
        self.cuts: dict[Product, Cut] = {}
        self._steps: list[Callable[[], object]] = []
        self._products: dict[Product, list[Callable[[Cut], None]]] = {}  # launches of each product
        self._is_compiling = False  # whether kernels are compiled instead of launched
        self._plan()
        self._choose(smaller)

    @property
    def _is_fed(self) -> torch.Tensor:
        """[rows]: 0 for padding rows of the table."""
        return self.table[1 + 2 * self.size : 1 + 3 * self.size]

    def launch(self) -> Rows:
        """Launch the whole forward; return its buffers of logits and of states for a head."""
        for step in self._steps:
            step()
        return self._logits, self._features if self._layers.taps else None

    def _choose(self, smaller: _TableForward | None) -> None:
        """Compile the kernels, and choose a cut for each product."""
        cuts = Cuts(self._device)
        candidates: dict[Product, list[Cut]] = {}
        for product in self._products:
            fewer = None
            if smaller is not None:
                fewer = smaller.cuts[product._replace(rows=smaller.size)]
            candidates[product] = cuts.fitting(product, fewer)
            self.cuts[product] = candidates[product][0]
        if self._device.type == "cuda":
            with autotune.compiling():
                self._is_compiling = True
                self.launch()
                for product, product_cuts in candidates.items():
                    for cut in product_cuts:
                        self._launch_all(product, cut)
            self._is_compiling = False
        self._is_fed[:] = 1  # timed as if all rows were needed
        for product, product_cuts in candidates.items():
            launch = partial(self._launch_all, product)
            self.cuts[product] = cuts.fastest(product, product_cuts, launch)

    def _launch_all(
        self,
        product: Product,
        cut: Cut,
    ) -> None:
        """Launch a product for every layer that has a product of this shape, to time the cut."""
        for launch in self._products[product]:
            launch(cut)

    def _start(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: dict[str, Any],
    ) -> None:
        """Launch a kernel or, while `_choose` compiles all kernels, only compile this one."""
        constants = constants | self._constants
        if self._is_compiling:
            kernel.warmup(*arguments, grid=grid, **constants)
        else:
            kernel[grid](*arguments, **constants)

    # ---- the steps of a forward ----

    def _plan(self) -> None:
        """Make the list of the forward's steps, which `launch` executes in order."""
        layers = self._layers
        self._add(
            product_kernels.embed,
            (self._hidden // _SQUARED,),
            self.table,
            layers.embedding,
            self._x,
            self._qkv_squares,
            layers.scales.embedding,
            H=self._hidden,
            BN=_SQUARED,
        )
        for number, layer in enumerate(layers.layers):
            self._add_features(number)
            self._add_attention(number, layer)
            self._add_mlp(layer)
        self._add_features(len(layers))
        self._add_product("head", layers.head, self._x, layers.norm, self._logits, squares=None)
        self._steps.append(self._finish_logits)

    def _add(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        **constants: Any,
    ) -> None:
        """Add the launch of a kernel to the forward's steps."""
        self._steps.append(partial(self._start, kernel, grid, arguments, constants))

    def _add_features(self, number: int) -> None:
        """If a head reads the states before layer `number`, add the step that copies them."""
        for place, tap in enumerate(self._layers.taps):
            if tap == number:
                columns = self._features[:, place * self._hidden : (place + 1) * self._hidden]
                self._steps.append(partial(columns.copy_, self._x))

    def _add_attention(
        self,
        number: int,
        layer: Layer,
    ) -> None:
        squares = None
        if self._norms(layer) == 2:
            squares = self._part_squares
        self._add_product("qkv", layer.qkv, self._x, layer.attention_norm, self._qkv, squares)
        self._attend(number, layer)
        self._add_residual("out", layer.out, self._mixed, layer.after_attention, self._mlp_squares)

    def _add_mlp(self, layer: Layer) -> None:
        if layer.experts is not None:
            self._steps.append(partial(self._compute_experts, layer))
            return
        self._add_gate_up(layer)
        self._add_residual("down", layer.down, self._act, layer.after_mlp, self._qkv_squares)

    def _finish_logits(self) -> None:
        scales = self._layers.scales
        if scales.logits != 1:
            self._logits.mul_(scales.logits)
        cap_scores(self._logits, scales.logits_cap)

    def _add_residual(
        self,
        name: str,
        matrix: Any,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        squares: torch.Tensor,
    ) -> None:
        """Add the steps that add a product to the hidden state.

        If there is no norm, the kernel that computes the product also adds it. Otherwise this
        kernel stores the product in the buffer `_part`, and a second kernel normalises and adds it.

        Args:
            squares: receives the sums of squares of the hidden state.
        """
        if norm is None:
            self._add_product(name, matrix, x, None, self._x, squares, adds=True)
            return
        self._add_product(name, matrix, x, None, self._part, self._part_squares)
        multiplier = self._layers.scales.residual
        self._steps.append(partial(self._sum, self._part, norm, multiplier, squares))

    def _add_product(
        self,
        name: str,
        matrix: Any,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        out: torch.Tensor,
        squares: torch.Tensor | None,
        adds: bool = False,
    ) -> None:
        """Add the step out = x times a matrix.

        Args:
            norm: the weights with which x is normalised first; None: x is not normalised.
            squares: receives the sums of squares of `out`; None: they are not stored.
            adds: whether the product, times the residual multiplier, is added to `out`.
        """
        weights = _for_kernels(matrix)
        arguments = (
            self.table,
            x,
            self._qkv_squares,
            self._or_unread(norm),
            *weights.tensors(),
            out,
            self._or_unread(squares),
            self._layers.scales.residual,
            self._layers.eps,
        )
        constants = {"NORMS": norm is not None, "ADDS": adds, "SQUARES": squares is not None}
        outputs = weights.shape[0]
        self._add_cut(name, product_kernels.multiply, weights, outputs, arguments, constants)

    def _add_gate_up(self, layer: Layer) -> None:
        """Add the step act = activation(gate) * up."""
        weights = _for_kernels(layer.gate_up)
        arguments = (
            self.table,
            self._x,
            self._mlp_squares,
            self._or_unread(layer.mlp_norm),
            *weights.tensors(),
            self._act,
            self._layers.eps,
        )
        constants = {"NORMS": layer.mlp_norm is not None, "GELU": self._layers.gate == "gelu"}
        inner = weights.shape[0] // 2
        self._add_cut("gate_up", product_kernels.gate_up, weights, inner, arguments, constants)

    def _add_cut(
        self,
        name: str,
        kernel: Any,
        weights: KernelMatrix,
        outputs: int,
        arguments: Sequence[Any],
        constants: dict[str, Any],
    ) -> None:
        """Add the launch of a product to the forward's steps, with the cut chosen for its shape."""
        product = Product(name, weights.shape, tuple(weights.options().items()), self.size)

        def launch(cut: Cut) -> None:
            tiles = triton.cdiv(outputs, cut.columns)
            more = {"N": outputs, **weights.constants(), **cut.constants()}
            self._start(kernel, (tiles,), arguments, constants | more)

        self._products.setdefault(product, []).append(launch)
        self._steps.append(lambda: launch(self.cuts[product]))

    def _or_unread(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor; for None return some tensor, which the kernel will not read."""
        if tensor is None:
            return self._x
        return tensor

    def _compute_experts(self, layer: Layer) -> None:
        """Add the sum of each row's experts to the hidden state."""
        layers = self._layers
        assert layer.experts is not None
        x = self._x
        if layer.mlp_norm is not None:
            x = normalise(x, layer.mlp_norm, layers.eps, layers.dtype)
        part = layer.experts(x, self._is_fed != 0)
        self._sum(part, None, 1.0, self._qkv_squares)

    def _sum(
        self,
        part: torch.Tensor,
        norm: torch.Tensor | None,
        multiplier: float,
        squares: torch.Tensor,
    ) -> None:
        """Launch x += multiplier * part, where x is the hidden state.

        Args:
            norm: the weights with which `part` is normalised first; None: it is not normalised.
            squares: receives the sums of squares of the new hidden state.
        """
        arguments = (
            self._x,
            part,
            self._part_squares,
            self._or_unread(norm),
            squares,
            multiplier,
            self._layers.eps,
        )
        constants = {"H": self._hidden, "BN": _SQUARED, "NORMS": norm is not None}
        self._start(product_kernels.add, (self._hidden // _SQUARED,), arguments, constants)

    def _norms(self, layer: Layer) -> int:
        """Return how queries and keys are normalised: see NORMS in `AttentionShape`."""
        if layer.q_norm is None:
            return 0
        if len(layer.q_norm) == self._layers.heads.dim:
            return 1
        return 2

    def _attend(
        self,
        number: int,
        layer: Layer,
    ) -> None:
        """Add the steps of attention: `attend` for the parts of the positions, then `add_parts`."""
        heads = self._layers.heads
        scoring = self._layers.scoring
        sinks = scoring.sinks_of(number)
        keys = self._slots.keys[:, number]
        values = self._slots.values[:, number]
        cos = self._x
        sin = self._x
        if layer.rope is not None:
            cos, sin = self._angles[layer.rope]
        self._add(
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
        self._add(
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


def _for_kernels(matrix: Any) -> KernelMatrix:
    assert isinstance(matrix, KernelMatrix), matrix
    return matrix
