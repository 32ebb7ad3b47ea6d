"""Attention of a forward's rows to their slots: any number of rows on a CPU, fixed sizes on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pearl.models.cpu import native
from pearl.models.forward import attention
from pearl.models.forward.slots import Slots
from pearl.models.gpu.recordings import FED


class NativeAttention:
    """Attends for the rows of a `Layout` by `attention.c`, which normalises and rotates them, too.

    Attributes:
        states: (keys, values) of every layer, if there are trees.
        given: the arguments that all layers share; its keys and values are the first layer's.
        strides: numbers between layers, of cached keys and of new keys.

    Args:
        table: see `Layout`.
        has_trees: whether there are rows of trees.
    """

    def __init__(
        self,
        table: torch.Tensor,
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
        positions = attention.whole_blocks(int(table[:, 1].max()) + 1)
        layers = keys.shape[1] if has_trees else 1
        new = torch.empty(2, layers, rows, heads.kv, heads.dim, dtype=keys.dtype)
        self.states: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        new_stride = 0
        if has_trees:
            self.states = list(zip(*new, strict=True))
            new_stride = new.stride(1)
        self.strides = (keys.stride(1), new_stride)
        queries = torch.empty(rows, heads.query, heads.dim)
        group = heads.query // heads.kv
        scores = torch.empty(threads, group * (positions + heads.dim) + 16 * heads.dim)
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
        rope: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return the attention output of rows with states [n, heads + 2 * kv_heads, head_dim]."""
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


class FixedAttention:
    """Attends for the rows of a `recordings.PieceInputs`.

    Args:
        at: [n], positions at which keys and values are written.
        end: how many positions are attended to.
        masks: [n, end] by window. None: the rows are the last of these positions, and each sees all up
            to its own. With a cap, sinks or a window, there is a mask.
    """

    def __init__(
        self,
        slots: Slots,
        slot: int,
        at: torch.Tensor,
        end: int,
        masks: Mapping[int, torch.Tensor | None],
        scoring: attention.Scoring,
    ) -> None:
        self._slots = slots
        self._slot = slot
        self._at = at
        self._end = end
        self._masks = masks
        self._scoring = scoring

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Write keys and values [n, kv_heads, head_dim] to the cache; return each row's output.

        queries [n, heads, head_dim] -> [n, heads * head_dim]
        """
        n, heads, dim = queries.shape
        scoring = self._scoring
        kv_heads = keys.shape[1]
        scale = scoring.scale
        cap = scoring.cap
        mask = self._masks[scoring.windows[layer]]
        all_keys = self._slots.keys[self._slot, layer]
        all_values = self._slots.values[self._slot, layer]
        all_keys[:, self._at] = keys.transpose(0, 1)
        all_values[:, self._at] = values.transpose(0, 1)
        all_keys = all_keys[:, : self._end]
        all_values = all_values[:, : self._end]
        if mask is None:
            # This import takes seconds: it imports torch's compiler.
            from torch.nn.attention.bias import causal_lower_right

            sees: Any = causal_lower_right(n, self._end)
            mixed = scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                all_keys[None],
                all_values[None],
                sees,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )
            return mixed[0].transpose(0, 1).reshape(n, -1)
        stacked = queries.view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        mask = mask.repeat(heads // kv_heads, 1)
        if cap:
            scores = attention.cap_scores(torch.bmm(stacked, all_keys.transpose(1, 2)) * scale, cap)
            mixed = torch.bmm((scores + mask).softmax(-1), all_values)
        elif n <= FED or scoring.sinks:
            # Fused attention has few blocks to work with where there are few rows.
            mixed = self._weighed(layer, stacked, all_keys, all_values, mask, n)
        else:
            mixed = scaled_dot_product_attention(
                stacked[None], all_keys[None], all_values[None], mask, scale=scale
            )[0]
        return mixed.view(kv_heads, -1, n, dim).permute(2, 0, 1, 3).reshape(n, -1)

    def _weighed(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        n: int,
    ) -> torch.Tensor:
        """Attend by separate products; queries are [kv_heads, group * n, head_dim].

        A prompt's piece is computed one key-value head at a time: all of its scores take gigabytes.
        """
        kv_heads = len(keys)
        sinks = self._scoring.sinks_of(layer)
        step = kv_heads if n <= FED else 1
        parts = []
        for head in range(0, kv_heads, step):
            heads = slice(head, head + step)
            scores = torch.baddbmm(
                mask, queries[heads], keys[heads].transpose(1, 2), alpha=self._scoring.scale
            )
            head_sinks = None
            if sinks is not None:
                head_sinks = sinks.view(kv_heads, -1)[heads].flatten()
            parts.append(torch.bmm(attention.weigh(scores, n, head_sinks), values[heads]))
        return torch.cat(parts)


class PromptAttention:
    """Attends for the rows of a prompt's piece by `prefill_kernels`, which rotate them, too.

    Args:
        given: slot, position of the first row, and number of tokens, on the device.
    """

    def __init__(self, given: torch.Tensor, slots: Slots, scoring: attention.Scoring) -> None:
        self._given = given
        self._slots = slots
        self._scoring = scoring

    def attend_unturned(
        self,
        layer: int,
        facing: torch.Tensor,
        values: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return the attention output [n, heads * head_dim] of rows.

        Args:
            facing: queries and keys [n, heads + kv_heads, head_dim], not rotated.
            values: [n, kv_heads, head_dim].
            rope: tables of all positions; None: nothing is rotated.
        """
        from pearl.models.gpu import prefill_kernels as kernels

        n, facing_heads, dim = facing.shape
        scoring = self._scoring
        kv_heads = values.shape[1]
        heads = facing_heads - kv_heads
        keys = self._slots.keys[:, layer]
        all_values = self._slots.values[:, layer]
        scale = scoring.scale
        cap = scoring.cap
        sinks = scoring.sinks_of(layer)
        out = facing.new_empty(n, heads * dim)
        cos, sin = rope or (facing, facing)
        strides = (keys.stride(0), keys.stride(1), facing.stride(0))
        sizes = {"HQ": heads, "D": dim, "TURNS": rope is not None}
        log2e = 1 / math.log(2)
        written_rows = min(32, n)
        kernels.write[(n // written_rows, kv_heads)](
            self._given,
            facing,
            values,
            cos,
            sin,
            keys,
            all_values,
            *strides,
            values.stride(0),
            BM=written_rows,
            **sizes,
        )
        tile = kernels.tile_of(dim)
        rows = min(tile.rows, n)
        inner = scale * log2e
        if cap:
            inner = 2 * scale * log2e / cap
        kernels.attend[(heads, n // rows)](
            self._given,
            facing,
            keys,
            all_values,
            cos,
            sin,
            facing if sinks is None else sinks,
            out,
            *strides,
            inner,
            cap * log2e,
            HK=kv_heads,
            BM=rows,
            BN=tile.positions,
            WINDOW=scoring.windows[layer],
            CAPS=cap != 0,
            SINKS=sinks is not None,
            **sizes,
            **tile.options(facing.device),
        )
        return out
