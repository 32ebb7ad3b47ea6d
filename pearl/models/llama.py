"""Our own forward pass for the Llama family, batch 1: Llama, Mistral (no sliding window), Qwen2, Qwen3.

The same weights as the `transformers` model it is made from, laid out anew: query, key and value in one matrix, gate
and up in another, packed for the CPU.  Keys and values stand in buffers allocated once.  What `hf` does for every model
this does for one shape of them; `hf` is its reference in the tests.

**Rows do not depend on their company**: the logits of a position are the same bits however its sequence was cut into
forwards.  On a CPU `matrices` and `attention` see to that.  On a GPU all forwards of few tokens replay recordings of
one size (`graphs`), longer ones are computed in pieces of one size, and how far a forward looks depends on the
positions of its tokens alone.

Several ranks can share a model: each has the weights that `shard.cut` leaves it, and its group completes partial sums
and partial logits.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel

from pearl.models import attention
from pearl.models.graphs import FED, PREFILL, Graphs, Record, record_on_gpu
from pearl.models.matrices import (
    Matrix,
    irregular,
    least_rows,
    matrix,
    multiplies_bf16,
    normalise,
    packs,
    probe_rows,
    swiglu,
)
from pearl.models.runner import Tokens, check_room
from pearl.models.shard import ALONE, Group

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # whose angles do not depend on how long the text is
_FAST_ROWS = 4  # packed bf16 matrices multiply three to six rows in less time than one or two


def is_llama(model: PreTrainedModel) -> bool:
    """Whether `LlamaRunner` computes what this model does."""
    config, name = model.config, type(model).__name__
    if name not in _FAMILY:
        return False
    rotation = config.rope_parameters
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        (name != "MistralForCausalLM" or config.sliding_window is None)
        and not getattr(config, "use_sliding_window", False)
        and layers == {"full_attention"}
        and config.hidden_act in ("silu", "swish")
        and rotation["rope_type"] in _ROTATIONS
        and rotation.get("partial_rotary_factor", 1.0) == 1.0
        and len({(weight.device, weight.dtype) for weight in model.parameters()}) == 1
        and all(type(part) is torch.nn.Linear for part in model.modules() if isinstance(part, torch.nn.Linear))
        and all(type(layer.mlp.down_proj) is torch.nn.Linear for layer in model.model.layers)  # not quantised
    )


@dataclass(frozen=True)
class _Layer:
    """One decoder layer: its matrices, and the weights of its norms; q_norm and k_norm in Qwen3 only."""

    attention_norm: torch.Tensor
    qkv: Matrix
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


class LlamaRunner:
    """`ModelRunner` over the weights of `model`, for which `is_llama` holds; they are taken from it.

    In a `group` of several the model is this rank's part of it, and all ranks make the same calls.

    Args:
        records: whether forwards of up to `FED` tokens are recorded on a GPU, as CUDA graphs.
        record: how else they are recorded; also makes a CPU compute in a GPU's fixed sizes (for tests).
        int8: rounds the matrices, each row to 255 steps. On a CPU one token is then fed faster, several are slower.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: int,
        group: Group = ALONE,
        *,
        records: bool = True,
        record: Record | None = None,
        int8: bool = False,
    ) -> None:
        config, inner = model.config, model.model
        self._group = group
        self.context, self.vocab_size = context, int(config.vocab_size)
        self.device, self.dtype = model.device, model.dtype
        self._length = 0
        self._written = 0  # positions of the cache that may hold something
        self._eps = float(config.rms_norm_eps)
        self._heads, self._kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        self.launches = record is not None or (records and self.device.type == "cuda")
        self._graphs: Graphs | None = None
        room = attention.whole_blocks(context)
        if record is not None or self.device.type == "cuda":
            room = context + PREFILL  # rows of a piece that stand beyond the text are computed too
            if record is None:
                torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every length of a prompt
                record = record_on_gpu(self.device) if records else lambda work: work
            self._graphs = Graphs(self._fixed, room, record)
        with torch.inference_mode():
            self._embedding = inner.embed_tokens.weight
            is_bf16 = packs(self._embedding) and self.dtype == torch.bfloat16
            self._layers = [_layer(layer, int8) for layer in inner.layers]
            self._norm = inner.norm.weight
            self._head = matrix(model.lm_head, int8=int8)
            self._least_rows = _FAST_ROWS if is_bf16 and not int8 else 1
            cache_dtype, self.row_invariant = self.dtype, True
            if self._graphs is None:
                cache_dtype = self._probe()
            self._positions = torch.arange(room + _FAST_ROWS + attention.ROWS, device=self.device)
            self._cos, self._sin = self._angles(inner.rotary_emb, cache_dtype)
            # [layers, kv_heads, positions, head_dim]; zeros, for a forward looks beyond the text, and there must not
            # be a NaN, which a mask would let through.
            shape = (len(self._layers), self._kv_heads, room, self._head_dim)
            self._keys, self._values = (_zeros(shape, cache_dtype, self.device) for _ in range(2))

    def _probe(self) -> torch.dtype:
        """Find the least rows of a forward that make its rows independent on this CPU; return the cache's dtype.

        Raises `self._least_rows` as needed; `self.row_invariant` says whether any number up to 16 will do.
        """
        layer, hidden = self._layers[0], self._embedding.shape[1]
        probed = [layer.qkv, layer.out, layer.gate_up, layer.down, self._head]
        inner = layer.gate_up(probe_rows(hidden, self.dtype)[:1], None).shape[1] // 2
        widths = [hidden, self._heads * self._head_dim, hidden, inner, hidden]
        found = [
            least_rows(lambda x, by=by: by(x, None), probe_rows(width, self.dtype))  # type: ignore[misc]
            for by, width in zip(probed, widths, strict=True)
        ]
        dtype = torch.float32
        if self.dtype == torch.bfloat16 and multiplies_bf16() and self._attention_rows(torch.bfloat16) == 1:
            dtype = torch.bfloat16
        found.append(self._attention_rows(dtype))
        self.row_invariant = all(found)
        self._least_rows = max(self._least_rows, *found)
        return dtype

    def _attention_rows(self, dtype: torch.dtype) -> int:
        """As `least_rows`, of attention to four blocks of keys."""
        keys, values = irregular(2 * self._kv_heads, 4 * attention.BLOCK * self._head_dim, dtype).view(
            2, self._kv_heads, -1, self._head_dim
        )

        def product(x: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(len(x), attention.BLOCK, dtype=dtype)
            return attention.attend(x.view(len(x), -1, self._head_dim), keys, values, mask)

        return least_rows(product, probe_rows(self._heads * self._head_dim, dtype))

    def _angles(self, rotary: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, 1, head_dim].

        The first half of the sines is negated: rotating a vector swaps its halves and negates one; `roll` only swaps.
        """
        like = torch.empty(0, dtype=dtype, device=self.device)
        cos, sin = (table[0, :, None] for table in rotary(like, self._positions[None]))
        return cos.contiguous(), torch.cat((-sin[..., : self._head_dim // 2], sin[..., self._head_dim // 2 :]), -1)

    @property
    def length(self) -> int:
        return self._length

    def forward(self, tokens: Tokens, rows: int) -> torch.Tensor:
        """See `ModelRunner.forward`."""
        end = self._length + len(tokens)
        check_room(tokens, end, self.context, self.vocab_size)
        with torch.inference_mode():
            if self._graphs is None:
                self._written = max(self._written, end)
                logits = self._forward(tokens, self._length, rows)
            else:
                logits, written = self._graphs.forward(tokens, self._length, rows, self.device)
                self._written = max(self._written, written)
        self._length = end
        # Copied outside of inference mode: the caller's rows are ordinary tensors, and writable.
        return logits.to(torch.float32, copy=True)

    def _forward(self, tokens: Tokens, start: int, rows: int) -> torch.Tensor:
        """Logits [rows, vocab] of a forward on a CPU."""
        fed = len(tokens)
        more = max(0, self._least_rows - fed)  # padding rows, discarded
        ids = pad(tokens, (0, more)) if isinstance(tokens, torch.Tensor) else torch.tensor([*tokens, *[0] * more])
        at = slice(start, start + len(ids))
        mask = attention.masks(start, len(ids), self._keys.dtype)
        hidden = self._decoder_layers(ids, (self._cos[at], self._sin[at]), slice(start, start + fed), mask)
        if not rows:
            return torch.empty(0, self.vocab_size)
        asked = hidden[: len(ids) if more else fed][-max(rows, self._least_rows) :]
        return self._logits(asked)[len(asked) - more - rows : len(asked) - more]

    def _fixed(self, start: torch.Tensor, ids: torch.Tensor, end: int, rows: int) -> torch.Tensor:
        """Logits [rows, vocab] of the first `rows` of `ids` [n], a piece that begins at position `start` [1].

        Only the sizes and `end`, how many positions are looked at, decide what is computed: it can be recorded.
        """
        at = start + self._positions[: len(ids)]
        after = self._positions[:end] > at[:, None]
        mask = torch.zeros(after.shape, dtype=self.dtype, device=self.device).masked_fill_(after, -torch.inf)
        hidden = self._decoder_layers(ids, (self._cos[at], self._sin[at]), at, mask)
        return self._logits(hidden[:rows])

    def _decoder_layers(
        self,
        ids: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        at: slice | torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """The last layer's states [n, hidden], on every rank. `at`: positions of the ids (a slice: of those fed)."""
        hidden = self._embedding[ids]
        leads = self._group.rank == 0  # what the sums add to must be in them once
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            mixed = self._attend(layer, hidden, rope, keys, values, at, mask)
            hidden = self._group.sum(layer.out(mixed, hidden if leads else None))
            inner = swiglu(layer.gate_up(self._normal(hidden, layer.mlp_norm), None))
            hidden = self._group.sum(layer.down(inner, hidden if leads else None))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self._head(self._normal(hidden, self._norm), None))[:, : self.vocab_size]

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        at: slice | torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """What each row takes from the tokens up to it: [n, heads * head_dim], of this rank's heads.

        Args:
            keys, values: [kv_heads, positions, head_dim]; those `at` which rows stand are written here.
        """
        n, heads, both, head_dim = len(hidden), self._heads, self._heads + self._kv_heads, self._head_dim
        states = layer.qkv(self._normal(hidden, layer.attention_norm), None).view(n, -1, head_dim)
        facing = states[:, :both]  # queries and keys
        if layer.q_norm is not None and layer.k_norm is not None:
            normal = self._normal(facing[:, :heads], layer.q_norm), self._normal(facing[:, heads:], layer.k_norm)
            facing = torch.cat(normal, 1)
        facing = facing.to(keys.dtype)
        # Two products and a sum, each rounded by itself: a fused multiply-add would be one only where it is vectorised.
        rotated = (facing * rope[0]).add_(facing.roll(head_dim // 2, -1).mul_(rope[1]))
        fed = at.stop - at.start if isinstance(at, slice) else n
        keys[:, at] = rotated[:fed, heads:].transpose(0, 1)
        values[:, at] = states[:fed, both:].transpose(0, 1)
        queries = rotated[:, :heads]
        if isinstance(at, slice):
            seen = attention.whole_blocks(at.start + n)
            keys, values = keys[:, :seen], values[:, :seen]
            return attention.attend(queries * head_dim**-0.5, keys, values, mask).to(hidden.dtype)
        return self._attend_fixed(queries, keys[:, : mask.shape[1]], values[:, : mask.shape[1]], mask)

    def _attend_fixed(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """As `attention.attend`, in one product each; for sizes that do not vary. Scales the queries."""
        n, _, head_dim = queries.shape
        stacked = (
            queries.view(n, self._kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(self._kv_heads, -1, head_dim)
        )
        mask = mask.repeat(self._heads // self._kv_heads, 1)
        if n <= FED:  # fused attention has few blocks to work with where there are few rows
            scores = torch.baddbmm(mask, stacked, keys.transpose(1, 2), alpha=head_dim**-0.5)
            mixed = torch.bmm(scores.softmax(-1), values)
        else:
            mixed = scaled_dot_product_attention(stacked[None], keys[None], values[None], mask)[0]
        return mixed.view(self._kv_heads, -1, n, head_dim).permute(2, 0, 1, 3).reshape(n, -1)

    def _normal(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normalise(hidden, weight, self._eps)

    def rollback(self, length: int) -> None:
        """See `ModelRunner.rollback`."""
        assert 0 <= length <= self._length
        forgets, self._length = length < self._length or length == 0, length
        if forgets:
            # A forward looks beyond the text, and there must not be the NaN of what was fed there before.
            with torch.inference_mode():
                self._keys[:, :, length : self._written].zero_()
                self._values[:, :, length : self._written].zero_()
            self._written = length

    def synchronize(self) -> None:
        """See `ModelRunner.synchronize`."""
        if self.device.type == "cuda":
            # This stream only: rows on their way to the other worker are not the forward's business.
            torch.cuda.current_stream(self.device).synchronize()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU pages of a fresh mapping, which take no memory until they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def _layer(layer: Any, int8: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (norm.weight if norm is not None else None for norm in norms)
    return _Layer(
        layer.input_layernorm.weight,
        matrix(attention.q_proj, attention.k_proj, attention.v_proj, int8=int8),
        q_norm,
        k_norm,
        matrix(attention.o_proj, int8=int8),
        layer.post_attention_layernorm.weight,
        matrix(mlp.gate_proj, mlp.up_proj, int8=int8),
        matrix(mlp.down_proj, int8=int8),
    )
