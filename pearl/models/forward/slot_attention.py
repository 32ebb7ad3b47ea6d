"""Attention of a forward's rows to their slots: in any number on a CPU, in fixed sizes on a GPU."""

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
    """The rows of a `Layout` by the functions of `attention.c`: normalises and turns queries and keys, too.

    Attributes:
        states: (keys, values) of every layer, where there are trees.
        given: what is the same in all layers; its keys and values are those of the first one.
        strides: numbers between layers, of cached keys and of new ones.

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
        threads, rows_ = native.threads(), len(table)
        positions = attention.whole_blocks(int(table[:, 1].max()) + 1)
        layers = slots.keys.shape[1] if has_trees else 1
        new = torch.empty(2, layers, rows_, heads.kv, heads.dim, dtype=slots.keys.dtype)
        self.states = list(zip(*new, strict=True)) if has_trees else None
        self.strides = slots.keys.stride(1), new.stride(1) if has_trees else 0
        self._kept = (
            table,
            torch.empty(rows_, heads.query, heads.dim),
            torch.empty(
                threads, heads.query // heads.kv * (positions + heads.dim) + 16 * heads.dim
            ),
            new,
        )
        self.given = native.Attention(
            rows=rows_,
            heads=heads.query,
            kv_heads=heads.kv,
            dim=heads.dim,
            slot_stride=slots.keys.stride(0),
            head_stride=slots.keys.stride(2),
            positions=positions,
            table=table.data_ptr(),
            queries=self._kept[1].data_ptr(),
            scores=self._kept[2].data_ptr(),
            keys=slots.keys.data_ptr(),
            values=slots.values.data_ptr(),
            new_keys=new[0].data_ptr(),
            new_values=new[1].data_ptr(),
            scale=scoring.scale,
            cap=scoring.cap,
            eps=eps,
            cache_is_float32=slots.keys.dtype == torch.float32,
            threads=threads,
        )

    def attend_states(
        self,
        layer: int,
        states: torch.Tensor,
        norms: Sequence[torch.Tensor | None],
        rope: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """The attention output of rows with states [n, heads + 2 * kv_heads, head_dim]."""
        given = native.Attention.from_buffer_copy(self.given)
        out = torch.empty(len(states), given.heads * given.dim, dtype=states.dtype)
        q_norm, (cached, new) = norms[0], self.strides
        given.window, given.norm_width = (
            self._scoring.windows[layer],
            0 if q_norm is None else len(q_norm),
        )
        given.states, given.out, given.is_float32 = (
            states.data_ptr(),
            out.data_ptr(),
            states.dtype == torch.float32,
        )
        given.norm_is_float32 = q_norm is not None and q_norm.dtype == torch.float32
        given.q_norm, given.k_norm = (None if norm is None else norm.data_ptr() for norm in norms)
        sinks = self._scoring.sinks_of(layer)
        given.sinks = None if sinks is None else sinks.data_ptr()
        given.cos, given.sin = (None, None) if rope is None else (each.data_ptr() for each in rope)
        for name, stride in (
            ("keys", cached),
            ("values", cached),
            ("new_keys", new),
            ("new_values", new),
        ):
            setattr(
                given,
                name,
                getattr(given, name) + layer * stride * (4 if given.cache_is_float32 else 2),
            )
        native.attend(given)
        return out


class FixedAttention:
    """The rows of a `graphs.Piece`.

    Args:
        at: [n], positions at which keys and values are written.
        end: positions looked at.
        masks: by window, [n, end]; None: the rows are the last of these positions, and each sees all up to its own.
            With a cap, sinks or a window, there is a mask.
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
        self._slots, self._slot, self._at, self._end = slots, slot, at, end
        self._masks, self._scoring = masks, scoring

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Write keys and values [n, kv_heads, head_dim] to the cache; return the attention output of each row.

        queries [n, heads, head_dim] -> [n, heads * head_dim]
        """
        (n, heads, dim), kv_heads, mask = (
            queries.shape,
            keys.shape[1],
            self._masks[self._scoring.windows[layer]],
        )
        _, scale, cap, _ = self._scoring
        all_keys, all_values = (
            self._slots.keys[self._slot, layer],
            self._slots.values[self._slot, layer],
        )
        all_keys[:, self._at] = keys.transpose(0, 1)
        all_values[:, self._at] = values.transpose(0, 1)
        all_keys, all_values = all_keys[:, : self._end], all_values[:, : self._end]
        if mask is None:
            from torch.nn.attention.bias import (
                causal_lower_right,  # imports torch's compiler: seconds
            )

            sees: Any = causal_lower_right(n, self._end)
            given, more = (
                (queries.transpose(0, 1)[None], all_keys[None], all_values[None]),
                heads != kv_heads,
            )
            mixed = scaled_dot_product_attention(*given, sees, scale=scale, enable_gqa=more)[0]
            return mixed.transpose(0, 1).reshape(n, -1)
        stacked = queries.view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        mask = mask.repeat(heads // kv_heads, 1)
        if cap:
            scores = attention.cap_scores(torch.bmm(stacked, all_keys.transpose(1, 2)) * scale, cap)
            mixed = torch.bmm((scores + mask).softmax(-1), all_values)
        elif (
            n <= FED or self._scoring.sinks
        ):  # fused attention has few blocks to work with where there are few rows
            sinks = self._scoring.sinks_of(layer)
            parts = []
            for at in range(
                0, kv_heads, kv_heads if n <= FED else 1
            ):  # all scores of a prompt's piece take gigabytes
                some = slice(at, kv_heads if n <= FED else at + 1)
                scores = torch.baddbmm(
                    mask, stacked[some], all_keys[some].transpose(1, 2), alpha=scale
                )
                own = None if sinks is None else sinks.view(kv_heads, -1)[some].flatten()
                parts.append(torch.bmm(attention.weigh(scores, n, own), all_values[some]))
            mixed = torch.cat(parts)
        else:
            given = stacked[None], all_keys[None], all_values[None]
            mixed = scaled_dot_product_attention(*given, mask, scale=scale)[0]
        return mixed.view(kv_heads, -1, n, dim).permute(2, 0, 1, 3).reshape(n, -1)


class PromptAttention:
    """The rows of a prompt's piece, by the kernels of `prompt_kernels`: rotates queries and keys, too.

    Args:
        given: slot, position of the first row, and number of tokens, on the device.
    """

    def __init__(self, given: torch.Tensor, slots: Slots, scoring: attention.Scoring) -> None:
        self._given, self._slots, self._scoring = given, slots, scoring

    def attend_unturned(
        self,
        layer: int,
        facing: torch.Tensor,
        values: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """The attention output [n, heads * head_dim] of rows with queries and keys [n, heads + kv_heads, head_dim].

        Args:
            values: [n, kv_heads, head_dim].
            rope: tables of all positions; None: nothing is rotated.
        """
        from pearl.models.gpu import prefill_kernels as kernels

        (n, both, dim), kv_heads, slots = facing.shape, values.shape[1], self._slots
        keys, all_values, heads = slots.keys[:, layer], slots.values[:, layer], both - kv_heads
        windows, scale, cap, _ = self._scoring
        sinks, out = self._scoring.sinks_of(layer), facing.new_empty(n, heads * dim)
        cos, sin = (facing, facing) if rope is None else rope
        strides = keys.stride(0), keys.stride(1), facing.stride(0)
        sizes, log2e = {"HQ": heads, "D": dim, "TURNS": rope is not None}, 1 / math.log(2)
        some = min(32, n)
        kernels.write[(n // some, kv_heads)](
            self._given,
            facing,
            values,
            cos,
            sin,
            keys,
            all_values,
            *strides,
            values.stride(0),
            BM=some,
            **sizes,
        )
        tile = kernels.tile_of(dim)
        rows = min(tile.rows, n)
        kernels.attend[(heads, n // rows)](
            self._given, facing, keys, all_values, cos, sin, facing if sinks is None else sinks, out, *strides,
            2 * scale * log2e / cap if cap else scale * log2e, cap * log2e, HK=kv_heads, BM=rows, BN=tile.positions,
            WINDOW=windows[layer], CAPS=cap != 0, SINKS=sinks is not None, **sizes, **tile.options(facing.device),
        )  # fmt: skip
        return out
