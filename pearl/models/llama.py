"""A fast forward for the Llama family, batch 1: Llama, Mistral (no sliding window), Qwen2, Qwen3, and what shares them.

The same weights as the `transformers` model it is made from, laid out anew: query, key and value in one matrix, gate
and up in another, packed for the CPU's bf16 instructions where there are any.  Keys and values stand in buffers
allocated once.  What `hf` does for every model this does for one shape of them; `hf` is its reference in the tests.

On a GPU a forward of few tokens is recorded once and replayed (`graphs`).

Several ranks can share a model: each has the weights that `shard.cut` leaves it, and where its part of a sum or of the
logits is not the whole, its group makes it so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from pearl.models.graphs import MOST_FED, Graphs, Record, record_on_gpu
from pearl.models.runner import Tokens, check_room
from pearl.models.shard import ALONE, Group

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # whose angles do not depend on how long the text is
_LEAST_ROWS = 4  # packed matrices multiply three to six rows in less time than one or two
# From here on two plain products of bf16 take 60 to 85% of the fused attention's time on a CPU. Their scores are
# rounded to bf16, as in transformers' eager attention; the logits are no further from float32's than its default's.
_MANY_ROWS = 16

Matrix = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # (x, y) -> x times the matrix, plus y if any


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
        records: whether forwards of up to `MOST_FED` tokens are recorded on a GPU, as CUDA graphs.
        record: how else they are recorded.
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
        self._width = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        packs = _packs(inner.embed_tokens.weight)
        self._least_rows = _LEAST_ROWS if packs and not int8 else 1
        self._many_rows = _MANY_ROWS if packs else context + 1
        if record is None and records and self.device.type == "cuda":
            record = record_on_gpu(self.device)
        self._graphs = None if record is None else Graphs(self._recorded, context + MOST_FED, record)
        room = context + (MOST_FED if self._graphs else self._least_rows)  # more rows than were fed may be computed
        self._positions = torch.arange(room, device=self.device)
        with torch.inference_mode():
            self._cos, self._sin = self._angles(inner.rotary_emb)
            self._embedding = inner.embed_tokens.weight
            self._layers = [_layer(layer, int8) for layer in inner.layers]
            self._norm = inner.norm.weight
            self._head = _matrix(model.lm_head, int8=int8)
            # [layers, kv_heads, context, head_dim]; empty, not zeros: the pages of an unused context are never touched.
            # But what is recorded looks further than the text, and a NaN that it must not see would still come through.
            shape = (len(self._layers), self._kv_heads, room if self._graphs else context, self._width)
            made = torch.zeros if self._graphs else torch.empty
            self._keys = made(shape, dtype=self.dtype, device=self.device)
            self._values = made(shape, dtype=self.dtype, device=self.device)

    def _angles(self, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, 1, head_dim].

        The sines' first half is negated: turning a vector swaps its halves and negates one, and `roll` only swaps.
        """
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = (table[0, :, None] for table in rotary(like, self._positions[None]))
        return cos.contiguous(), torch.cat((-sin[..., : self._width // 2], sin[..., self._width // 2 :]), -1)

    @property
    def length(self) -> int:
        return self._length

    @property
    def launches(self) -> bool:
        """Whether a forward of few tokens returns before it is done: it can then be fed a token yet to be drawn."""
        return self._graphs is not None

    def forward(self, tokens: Tokens, rows: int) -> torch.Tensor:
        """See `ModelRunner.forward`."""
        fed, end = len(tokens), self._length + len(tokens)
        check_room(tokens, end, self.context, self.vocab_size)
        self._written = max(self._written, end, self._length + MOST_FED)
        with torch.inference_mode():
            if self._graphs is not None and fed <= MOST_FED:
                logits = self._graphs.forward(tokens, self._length, self.device)[fed - rows : fed]
            else:
                logits = self._forward(tokens, self._length, rows)
        self._length = end
        # Copied outside of inference mode: the caller's rows are ordinary tensors, and writable.
        if not rows:
            return torch.empty(0, self.vocab_size, device=self.device)
        return logits.to(torch.float32, copy=True)

    def _forward(self, tokens: Tokens, start: int, rows: int) -> torch.Tensor:
        fed, end = len(tokens), start + len(tokens)
        more = max(0, self._least_rows - fed)  # rows, whose results nobody looks at
        if isinstance(tokens, torch.Tensor):
            ids = pad(tokens, (0, more))
        else:
            ids = torch.tensor([*tokens, *[0] * more], pin_memory=self.device.type == "cuda")
            ids = ids.to(self.device, non_blocking=True)
        at = slice(start, start + len(ids))
        mask = self._mask(end, self._positions[at]) if fed > 1 else None  # a single one sees all that there is
        hidden = self._through(ids, (self._cos[at], self._sin[at]), slice(start, end), end, mask)[:fed]
        return self._logits(hidden[fed - rows :]) if rows else hidden

    def _recorded(self, start: torch.Tensor, ids: torch.Tensor, end: int) -> torch.Tensor:
        """Logits [n, vocab] of `ids` [n] from position `start` [1] on, with a look at the first `end` positions."""
        at = start + self._positions[: len(ids)]
        mask = self._mask(end, at)
        return self._logits(self._through(ids, (self._cos[at], self._sin[at]), at, end, mask))

    def _through(
        self,
        ids: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        at: slice | torch.Tensor,
        end: int,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """The last layer's states [n, hidden], on every rank; the ids stand at the positions `at`, one by one."""
        hidden = self._embedding[ids]
        leads = self._group.rank == 0  # what the sums add to must be in them once
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            mixed = self._attend(layer, hidden, turn, keys, values, at, end, mask)
            hidden = self._group.sum(layer.out(mixed, hidden if leads else None))
            gate, up = layer.gate_up(self._normal(hidden, layer.mlp_norm), None).chunk(2, -1)
            hidden = self._group.sum(layer.down(silu(gate).mul_(up), hidden if leads else None))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self._head(self._normal(hidden, self._norm), None))[:, : self.vocab_size]

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        at: slice | torch.Tensor,
        end: int,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """What each row takes from the tokens up to it: [n, heads * head_dim], of this rank's heads.

        Args:
            keys, values: [kv_heads, context or a few more, head_dim]; those `at` which rows stand are written here.
            end: how many of them may be looked at, as far as `mask` lets.
        """
        n, heads, both, width = len(hidden), self._heads, self._heads + self._kv_heads, self._width
        states = layer.qkv(self._normal(hidden, layer.attention_norm), None).view(n, -1, width)
        facing = states[:, :both]  # queries and keys
        if layer.q_norm is not None and layer.k_norm is not None:
            normal = self._normal(facing[:, :heads], layer.q_norm), self._normal(facing[:, heads:], layer.k_norm)
            facing = torch.cat(normal, 1)
        turned = torch.addcmul(facing * turn[0], facing.roll(width // 2, -1), turn[1])
        fed = at.stop - at.start if isinstance(at, slice) else n
        keys[:, at] = turned[:fed, heads:].transpose(0, 1)
        values[:, at] = states[:fed, both:].transpose(0, 1)
        keys, values = keys[:, :end], values[:, :end]
        # Queries that share keys stand one below the other, so that no key is copied: [1, kv_heads, group * n, width].
        queries = turned[:, :heads].view(n, self._kv_heads, -1, width).permute(1, 2, 0, 3)
        queries = queries.reshape(1, self._kv_heads, -1, width)
        # What is recorded is for a GPU, whose fused attention has few blocks to work with where there are few rows.
        if mask is not None and (n >= self._many_rows or not isinstance(at, slice)):
            scores = torch.baddbmm(mask, queries[0], keys.transpose(1, 2), alpha=width**-0.5)
            mixed = torch.bmm(scores.softmax(-1), values)
        else:
            mixed = scaled_dot_product_attention(queries, keys[None], values[None], mask)
        return mixed.view(self._kv_heads, -1, n, width).permute(2, 0, 1, 3).reshape(n, -1)

    def _mask(self, end: int, at: torch.Tensor) -> torch.Tensor:
        """[group * n, end]: 0 where a query may look, minus infinity at what comes after it; they stand `at` [n]."""
        after = self._positions[:end] > at[:, None]
        mask = torch.zeros(after.shape, dtype=self.dtype, device=self.device).masked_fill_(after, -torch.inf)
        return mask.repeat(self._heads // self._kv_heads, 1)

    def _normal(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight.shape, weight, self._eps)

    def rollback(self, length: int) -> None:
        """See `ModelRunner.rollback`."""
        assert 0 <= length <= self._length
        forgets, self._length = length < self._length or length == 0, length
        if forgets and self._graphs is not None:
            # What is recorded looks beyond the text, and there must not be the NaN of what was fed there before.
            with torch.inference_mode():
                self._keys[:, :, length : self._written].zero_()
                self._values[:, :, length : self._written].zero_()
            self._written = length

    def synchronize(self) -> None:
        """See `ModelRunner.synchronize`."""
        if self.device.type == "cuda":
            # This stream only: rows on their way to the other worker are not the forward's business.
            torch.cuda.current_stream(self.device).synchronize()


def _layer(layer: Any, int8: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (norm.weight if norm is not None else None for norm in norms)
    return _Layer(
        layer.input_layernorm.weight,
        _matrix(attention.q_proj, attention.k_proj, attention.v_proj, int8=int8),
        q_norm,
        k_norm,
        _matrix(attention.o_proj, int8=int8),
        layer.post_attention_layernorm.weight,
        _matrix(mlp.gate_proj, mlp.up_proj, int8=int8),
        _matrix(mlp.down_proj, int8=int8),
    )


def _matrix(*linears: Any, int8: bool = False) -> Matrix:
    """Several matrices of one input as one, their outputs side by side.

    Takes the weights away from where they were: a large model is then never there twice.
    """
    weight = torch.cat([each.weight for each in linears]) if len(linears) > 1 else linears[0].weight.detach()
    bias = torch.cat([each.bias for each in linears]) if linears[0].bias is not None else None
    for each in linears:
        each.weight = None
    if int8:
        return _rounded(weight, bias)
    if _packs(weight):
        packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise
        return lambda x, y: (
            multiply(x, packed, bias, "none", [], "") if y is None else multiply.binary(x, y, packed, bias, "add")
        )
    return lambda x, y: linear(x, weight, bias) if y is None else y + linear(x, weight, bias)


def _rounded(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny)
    steps = torch.empty(weight.shape, dtype=torch.int8)
    for some, into, scale in zip(weight.split(1024), steps.split(1024), scales.split(1024), strict=True):
        into.copy_((some.float() / scale[:, None].float()).round_().clamp_(-127, 127))

    def multiply(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        product = torch._weight_int8pack_mm(x, steps, scales)
        for more in (bias, y):
            product = product if more is None else product + more
        return product

    return multiply


def _packs(weight: torch.Tensor) -> bool:
    """Whether torch can lay this matrix out for the CPU beforehand: it otherwise does so in every multiplication."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
