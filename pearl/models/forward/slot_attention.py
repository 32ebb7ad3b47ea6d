"""Attention of a forward's rows to the positions in their slots, in C and by torch's operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pearl.models.cpu import native
from pearl.models.forward import attention
from pearl.models.forward.slots import Slots

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of positions [positions, 1, head_dim]


class SlotAttention(Protocol):
    """Computes the attention of rows to their slots, and writes the rows' keys and values there."""

    def attend(
        self,
        layer: int,
        queries_keys: torch.Tensor,
        values: torch.Tensor,
        rope: Rope | None,
    ) -> torch.Tensor:
        """See `TorchAttention.attend`."""
        ...


class NativeAttention:
    """Computes the attention of a `Layout` with `attention.c`.

    The C code also normalises and rotates queries and keys.

    Attributes:
        states: if there are trees, keys and values [2, layers, rows, kv_heads, head_dim] of all
            rows, because those of trees are not in the slots yet; else None.
        given: the arguments that all layers share; `keys` and `values` are those of the first layer.
        strides: two distances, counted in numbers: from one layer's keys to the next layer's keys
            in the cache, and the same in the rows' new keys (0 if there are no trees).

    Args:
        table: see `Layout`.
        end: see `Layout`.
        has_trees: whether there are rows of trees.
    """

    def __init__(
        self,
        table: torch.Tensor,
        end: int,
        has_trees: bool,
        slots: Slots,
        scoring: attention.Scoring,
        heads: attention.Heads,
        eps: float,
    ) -> None:
        self._scoring = scoring
        self._itemsize = slots.keys.itemsize
        threads = native.threads()
        rows = len(table)
        keys = slots.keys
        positions = attention.whole_blocks(end)
        layers = keys.shape[1] if has_trees else 1
        new = torch.empty(2, layers, rows, heads.kv, heads.dim, dtype=keys.dtype)
        self.states: torch.Tensor | None = None
        new_stride = 0
        if has_trees:
            self.states = new
            new_stride = new.stride(1)
        self.strides = (keys.stride(1), new_stride)
        queries = torch.empty(rows, heads.query, heads.dim)
        group = heads.query // heads.kv
        states_of_rows = native.ROWS_TOGETHER * group * (positions + heads.dim)
        scores = torch.empty(threads, states_of_rows + 16 * heads.dim)
        self._buffers = (table, queries, scores, new)  # kept alive: the C holds their addresses
        self.given = native.Attention(
            rows=rows,
            heads=heads.query,
            kv_heads=heads.kv,
            dim=heads.dim,
            slot_stride=keys.stride(0),
            head_stride=keys.stride(2),
            positions=positions,
            table=table.data_ptr(),
            queries=queries.data_ptr(),
            scores=scores.data_ptr(),
            keys=keys.data_ptr(),
            values=slots.values.data_ptr(),
            new_keys=new[0].data_ptr(),
            new_values=new[1].data_ptr(),
            scale=scoring.scale,
            cap=scoring.cap,
            eps=eps,
            cache_is_float32=keys.dtype == torch.float32,
            threads=threads,
        )

    def attend_states(
        self,
        layer: int,
        states: torch.Tensor,
        norms: Sequence[torch.Tensor | None],
        rope: Rope | None,
    ) -> torch.Tensor:
        """Return the attention output [n, heads * head_dim] of rows.

        Args:
            states: queries, keys and values [n, heads + 2 * kv_heads, head_dim].
            norms: weights of the norm of queries and of the norm of keys; None for a norm that is
                absent.
            rope: cosines and sines of all positions; None: nothing is rotated.
        """
        arguments = native.Attention.from_buffer_copy(self.given)
        out = torch.empty(len(states), arguments.heads * arguments.dim, dtype=states.dtype)
        arguments.window = self._scoring.windows[layer]
        arguments.states = states.data_ptr()
        arguments.out = out.data_ptr()
        arguments.is_float32 = states.dtype == torch.float32
        q_norm, k_norm = norms
        arguments.norm_width = 0
        arguments.norm_is_float32 = False
        if q_norm is not None:
            arguments.norm_width = len(q_norm)
            arguments.norm_is_float32 = q_norm.dtype == torch.float32
        arguments.q_norm = native.address_of(q_norm)
        arguments.k_norm = native.address_of(k_norm)
        arguments.sinks = native.address_of(self._scoring.sinks_of(layer))
        cos, sin = rope or (None, None)
        arguments.cos = native.address_of(cos)
        arguments.sin = native.address_of(sin)
        cached_offset, new_offset = (layer * stride * self._itemsize for stride in self.strides)
        arguments.keys += cached_offset
        arguments.values += cached_offset
        arguments.new_keys += new_offset
        arguments.new_values += new_offset
        native.attend(arguments)
        return out


@dataclass
class TorchAttention:
    """Computes attention with torch's operations.

    It is the reference for our kernels, and serves heads on a GPU.

    Args:
        slot: the slot of all rows.
        start: the position of the first row; each row sees the positions up to its own.
    """

    slots: Slots
    slot: int
    start: int
    scoring: attention.Scoring

    def attend(
        self,
        layer: int,
        queries_keys: torch.Tensor,
        values: torch.Tensor,
        rope: Rope | None,
    ) -> torch.Tensor:
        """Write the rows' keys and values to the cache; return the attention output [n, heads * head_dim].

        Args:
            queries_keys: queries and keys [n, heads + kv_heads, head_dim], not rotated.
            values: [n, kv_heads, head_dim].
            rope: cosines and sines of all positions; None: nothing is rotated.
        """
        n, kv_heads, _ = values.shape
        heads = queries_keys.shape[1] - kv_heads
        end = self.start + n
        queries_keys = self.write(layer, queries_keys, values, rope)
        keys = self.slots.keys[self.slot, layer, :, :end]
        all_values = self.slots.values[self.slot, layer, :, :end]
        queries = queries_keys[:, :heads].unflatten(1, (kv_heads, -1))
        queries = queries.permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(queries, keys.mT) * self.scoring.scale
        scores = attention.cap_scores(scores, self.scoring.cap)
        scores = scores.unflatten(1, (-1, n))
        shares = self._shares(layer, scores).flatten(1, 2)
        mixed = torch.bmm(shares, all_values).unflatten(1, (-1, n))
        return mixed.permute(2, 0, 1, 3).reshape(n, -1)

    def write(
        self,
        layer: int,
        queries_keys: torch.Tensor,
        values: torch.Tensor,
        rope: Rope | None,
    ) -> torch.Tensor:
        """Write the rows' keys and values to the cache; return `queries_keys` rotated, in the cache's dtype.

        Args:
            queries_keys: queries and keys as in `attend`, or the keys alone.
        """
        n, kv_heads, dim = values.shape
        rows = slice(self.start, self.start + n)
        if rope is not None:
            cos, sin = rope
            queries_keys = queries_keys * cos[rows] + queries_keys.roll(dim // 2, -1) * sin[rows]
        queries_keys = queries_keys.to(self.slots.keys.dtype)
        self.slots.keys[self.slot, layer, :, rows] = queries_keys[:, -kv_heads:].transpose(0, 1)
        self.slots.values[self.slot, layer, :, rows] = values.transpose(0, 1)
        return queries_keys

    def _shares(
        self,
        layer: int,
        scores: torch.Tensor,
    ) -> torch.Tensor:
        """Return the softmax of scores [kv_heads, group, n, end] over the positions that each row sees."""
        kv_heads, group, n, end = scores.shape
        positions = torch.arange(end, device=scores.device)
        is_hidden = self._is_hidden(layer, positions, positions[self.start :, None])
        scores = scores.masked_fill(is_hidden, -torch.inf)
        sinks = self.scoring.sinks_of(layer)
        if sinks is None:
            return scores.softmax(-1)
        sink_scores = sinks.view(kv_heads, group, 1, 1).expand(-1, -1, n, -1)
        return torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]

    def _is_hidden(
        self,
        layer: int,
        positions: torch.Tensor,
        own_positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return a mask [n, end] that is true where a row must not see a position.

        Args:
            positions: [end], all positions up to the last row's.
            own_positions: [n, 1], the position of each row.
        """
        window = self.scoring.windows[layer]
        is_hidden = positions > own_positions
        if window:
            is_hidden |= positions <= own_positions - window
        return is_hidden


class BlockMask(NamedTuple):
    """Which rows of a block, and which positions before the block, each row of the block sees.

    Attributes:
        windows: for each layer, the attention window in positions; 0: a row sees all positions
            before the block.
        is_causal: for each layer, whether later rows of the block are hidden from a row.
        has_one_start: whether the windows of all rows end just before the block, so that all rows
            see the same positions before it. Otherwise each row's window ends with the row's own
            position, as in ordinary layers.
    """

    windows: tuple[int, ...]
    is_causal: tuple[bool, ...]
    has_one_start: bool


@dataclass
class BlockAttention(TorchAttention):
    """Computes the attention of a block of rows that a `BlockMask` describes."""

    mask: BlockMask

    def _is_hidden(
        self,
        layer: int,
        positions: torch.Tensor,
        own_positions: torch.Tensor,
    ) -> torch.Tensor:
        """See `TorchAttention._is_hidden`."""
        mask = self.mask
        is_hidden = (positions < 0).expand(len(own_positions), -1)
        if mask.is_causal[layer]:
            is_hidden = positions > own_positions
        window = mask.windows[layer]
        if window:
            starts = own_positions - window + 1
            if mask.has_one_start:
                starts = own_positions[:1] - window
            starts = starts.clamp_max(self.start)  # a window hides no row of the block
            is_hidden = is_hidden | (positions < starts)
        return is_hidden
