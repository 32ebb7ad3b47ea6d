"""The decoder layers of our own forward pass: from token ids to logits, over one model's weights laid out anew.

Query, key and value are one matrix, gate and up another, packed for the CPU.  Must not know feeds and slots: the caller
provides positions and attends (see `slot_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pearl.models.forward.matrices import Matrix, Rounding, matrix, normalise, swiglu
from pearl.models.forward.probe import Heads, attention_is_invariant, least_rows, probe_rows
from pearl.models.forward.shard import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.checkpoints.direct import Decoder

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [rows, 1, head_dim] each


class Attends(Protocol):
    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write keys and values [n, kv_heads, head_dim] to the cache; return the attention output of each row.

        queries [n, heads, head_dim] -> [n, heads * head_dim]
        """
        ...


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its matrices, and the weights of its norms; q_norm and k_norm in Qwen3 only."""

    attention_norm: torch.Tensor
    qkv: Matrix
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix

    @staticmethod
    def of(layer: Any, one: Callable[..., Matrix]) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        q_norm, k_norm = (norm.weight if norm is not None else None for norm in norms)
        return Layer(
            layer.input_layernorm.weight,
            one(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm,
            k_norm,
            one(attention.o_proj),
            layer.post_attention_layernorm.weight,
            one(mlp.gate_proj, mlp.up_proj),
            one(mlp.down_proj),
        )


class DecoderLayers:
    """The weights of `model`, which it takes away, and what they compute.

    Attributes:
        heads: of this rank's part, where a `group` of several ranks shares the model.
        embedding: [vocab, hidden]. norm: the weights of the last norm.

    Args:
        cache_dtype: of keys and values, and so of queries.
        plain: leave matrices as they are, for the kernel of `decode`.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        group: Group,
        rounding: Rounding,
        cache_dtype: torch.dtype,
        plain: bool = False,
    ) -> None:
        config, inner = model.config, model.model
        heads = int(config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.heads = Heads(heads, int(config.num_key_value_heads), width)
        self.vocab_size, self.dtype = int(config.vocab_size), model.dtype
        self._group, self.eps, self._cache_dtype = group, float(config.rms_norm_eps), cache_dtype
        one = partial(matrix, rounding=rounding, plain=plain)
        # Rounded matrices round each result once more: sums over the layers in float32 make up for half of that.
        self._residual = torch.float32 if rounding else model.dtype
        self.embedding = inner.embed_tokens.weight
        self.layers = [Layer.of(layer, one) for layer in inner.layers]
        self.norm = inner.norm.weight
        self.head = one(model.lm_head, wide=True)

    def __len__(self) -> int:
        return len(self.layers)

    def probe(self) -> tuple[int, bool]:
        """(the least number of rows from which on rows are independent on this CPU, whether there is one)."""
        layer, hidden = self.layers[0], self.embedding.shape[1]
        inner = layer.gate_up(probe_rows(hidden, self.dtype)[:1], None).shape[1] // 2
        outputs = self.heads.query * self.heads.dim
        products = [(layer.qkv, hidden), (layer.out, outputs), (layer.gate_up, hidden), (layer.down, inner)]
        found = [
            least_rows(lambda x, by=by: by(x, None), probe_rows(width, self.dtype))  # type: ignore[misc]
            for by, width in [*products, (self.head, hidden)]
        ]
        return max(found), all(found) and attention_is_invariant(self.heads)

    def angles(self, rotary: Any, positions: torch.Tensor) -> Rope:
        """Cosines and sines of `positions` [n].

        The first half of the sines is negated: rotating a vector swaps its halves and negates one; `roll` only swaps.
        """
        half = self.heads.dim // 2
        like = torch.empty(0, dtype=self._cache_dtype, device=positions.device)
        cos, sin = (table[0, :, None] for table in rotary(like, positions[None]))
        return cos.contiguous(), torch.cat((-sin[..., :half], sin[..., half:]), -1)

    def hidden_states(self, ids: torch.Tensor, rope: Rope, slots: Attends) -> torch.Tensor:
        """The last layer's states [n, hidden] of `ids` [n], on every rank."""
        hidden = self.embedding[ids].to(self._residual)
        leads = self._group.rank == 0  # only one rank adds the residual, for the sum must contain it once
        for number, layer in enumerate(self.layers):
            mixed = self._attend(layer, number, hidden, rope, slots)
            hidden = self._group.sum(layer.out(mixed, hidden if leads else None))
            inner = swiglu(layer.gate_up(normalise(hidden, layer.mlp_norm, self.eps), None))
            hidden = self._group.sum(layer.down(inner, hidden if leads else None))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab]."""
        head = self.head(normalise(hidden, self.norm, self.eps), None)
        return self._group.gather(head)[:, : self.vocab_size]

    def _attend(self, layer: Layer, number: int, hidden: torch.Tensor, rope: Rope, slots: Attends) -> torch.Tensor:
        """The attention output of each row, over this rank's heads: [n, heads * head_dim]."""
        n, heads, both, dim = len(hidden), self.heads.query, self.heads.query + self.heads.kv, self.heads.dim
        states = layer.qkv(normalise(hidden, layer.attention_norm, self.eps), None).view(n, -1, dim)
        facing = states[:, :both]  # queries and keys
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = (facing[:, :heads], layer.q_norm), (facing[:, heads:], layer.k_norm)
            facing = torch.cat([normalise(part, norm, self.eps) for part, norm in parts], 1)
        facing = facing.to(self._cache_dtype)
        # Two products and a sum, each rounded by itself: a fused multiply-add would be one only where it is vectorised.
        rotated = (facing * rope[0]).add_(facing.roll(dim // 2, -1).mul_(rope[1]))
        return slots.attend(number, rotated[:, :heads], rotated[:, heads:], states[:, both:]).to(self.dtype)
