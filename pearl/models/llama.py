"""Our own forward pass for the Llama family, chains and trees: Llama, Mistral (no sliding window), Qwen2, Qwen3.

The same weights as the `transformers` model it is made from, laid out anew: query, key and value in one matrix, gate
and up in another, packed for the CPU.  Keys and values stand in buffers allocated once.  What `hf` does for every model
this does for one shape of them; `hf` is its reference in the tests.

**Rows do not depend on their company**: the logits of a position are the same bits however its sequence was cut into
forwards.  On a CPU `matrices` and `attention` see to that.  On a GPU a prompt is computed in pieces of one size and all
other tokens in recordings of another (`graphs`), and how far a forward looks depends on the positions of its tokens
alone; of a cache another text takes only whole pieces of a prompt.

Several ranks can share a model: each has the weights that `shard.cut` leaves it, and its group completes partial sums
and partial logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from pearl.models import attention
from pearl.models.feeds import Feed, Layout, Span, lay_out
from pearl.models.graphs import FED, PREFILL, Graphs, Piece, Record, ends, record_on_gpu
from pearl.models.kept_matrices import Findings
from pearl.models.matrices import (
    Matrix,
    Rounding,
    irregular,
    least_rows,
    matrix,
    normalise,
    packs,
    probe_rows,
    swiglu,
)
from pearl.models.runner import Capabilities, check_feeds
from pearl.models.shard import ALONE, Group
from pearl.models.slots import Slots, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.direct import Decoder

FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # whose angles do not depend on how long the text is
_TREE_NODES = 256  # of a tree, on a CPU
_FAST_ROWS = 4  # packed bf16 matrices multiply three to six rows in less time than one or two


def is_llama(model: PreTrainedModel) -> bool:
    """Whether `LlamaRunner` computes what this model does."""
    config, name = model.config, type(model).__name__
    if name not in FAMILY or getattr(config, "quantization_config", None) is not None:
        return False  # of some kinds a matrix is a Linear still, whose weight cannot be laid out anew
    rotation = config.rope_parameters
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        (name != "MistralForCausalLM" or config.sliding_window is None)
        and not getattr(config, "use_sliding_window", False)
        and layers == {"full_attention"}
        and getattr(config, "is_causal", True)
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


class _Spans:
    """The spans of a forward, and what each sees.

    Attributes:
        parts: of the rows, one after the other: a span with its mask; or a tree whose nodes are attended to at once, as
            one span with their place.
        states: collects (keys, values) of every layer where there are trees.

    Args:
        lengths: tokens of each slot.
        together: whether trees of several chains are attended to at once.
    """

    def __init__(self, layout: Layout, lengths: Sequence[int], dtype: torch.dtype, together: bool) -> None:
        self.parts: list[tuple[Span, torch.Tensor | attention.TreePlace]] = []
        self.states: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if layout.trees else None
        for tree, group in groupby(layout.spans, attrgetter("tree")):
            spans = list(group)
            if tree < 0 or len(spans) == 1 or not together or len(layout.trees[tree][1]) > attention.TOGETHER:
                self.parts += [(span, attention.masks(span.start, span.size, dtype)) for span in spans]
                continue
            feed, rows = layout.trees[tree]
            assert feed.parents is not None
            slot, first = feed.slot, min(rows)
            nodes = sorted(range(len(rows)), key=rows.__getitem__)  # in the order of their rows
            parents = [feed.parents[node] for node in nodes]
            above = [rows[parent] - first if parent >= 0 else -1 for parent in parents]
            whole = Span(slot, lengths[slot], first, len(rows), tree)
            self.parts.append((whole, attention.tree_place(lengths[slot], above, dtype)))

    @property
    def end(self) -> int:
        """Rows that are not padding."""
        return self.parts[-1][0].rows.stop


class _Fixed(NamedTuple):
    """Slot and positions `at` [n] of the rows of a piece, and their `mask` [n, positions looked at]."""

    slot: int
    at: torch.Tensor
    mask: torch.Tensor


class LlamaRunner:
    """`ModelRunner` over the weights of `model`, a `Decoder` or one for which `is_llama` holds; takes them away.

    In a `group` of several the model is this rank's part of it, and all ranks make the same calls.

    Args:
        slots: how many sequences the cache holds.
        records: whether forwards of up to `FED` tokens are recorded on a GPU, as CUDA graphs.
        record: replaces the recorder of CUDA graphs, and makes a CPU compute in the fixed sizes of a GPU (for tests).
        rounding: how matrices are rounded, or stored, on a CPU: see `matrices.matrix`.
        findings: what was found out about these weights before, on this CPU.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        context: int,
        group: Group = ALONE,
        *,
        slots: int = 1,
        records: bool = True,
        record: Record | None = None,
        rounding: Rounding = "",
        findings: Findings | None = None,
    ) -> None:
        config, inner, findings = model.config, model.model, findings or Findings()
        self._group = group
        self.context, self.vocab_size = context, int(config.vocab_size)
        self.device, self.dtype = model.device, model.dtype
        self.weights = {"": str(model.dtype).removeprefix("torch."), "stored": "4 bits"}.get(rounding, rounding)
        # Of rounded matrices each result is rounded once more: sums of all layers in float32 make up for half of it.
        self._residual = torch.float32 if rounding else model.dtype
        self._eps = float(config.rms_norm_eps)
        self._heads, self._kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        launches = record is not None or (records and self.device.type == "cuda")
        self._graphs: Graphs | None = None
        self._room = room = attention.whole_blocks(context)
        if record is not None or self.device.type == "cuda":
            # Rows of a piece that stand beyond the text are computed too. Of whole blocks: attention copies a mask
            # whose rows are not a multiple of a few elements, once a layer.
            self._room = room = attention.whole_blocks(context) + PREFILL
            if record is None:
                attention.plan_no_shapes(self.device)
                record = record_on_gpu(self.device) if records else lambda work: work
            self._graphs = Graphs(self._fixed, room, record)
        with torch.inference_mode():
            self._embedding = inner.embed_tokens.weight
            is_bf16 = packs(self._embedding) and self.dtype == torch.bfloat16
            self._layers = [_layer(layer, rounding, findings) for layer in inner.layers]
            self._norm = inner.norm.weight
            self._head = matrix(model.lm_head, rounding=rounding, wide=True, laid=findings.laid)
            self._least_rows = _FAST_ROWS if is_bf16 and not rounding else 1
            cache_dtype, invariant = self.dtype, True
            if self._graphs is None:
                # Products of bfloat16 take two to four times as long there: keys are laid out anew for each of them.
                cache_dtype = torch.float32
                self._least_rows, invariant = findings.probed(self._probe)
            self._positions = torch.arange(room + PREFILL, device=self.device)
            self._cos, self._sin = self._angles(inner.rotary_emb, cache_dtype)
            shape = (slots, len(self._layers), self._kv_heads, room, self._head_dim)
            self._slots = Slots(shape, cache_dtype, self.device)
            self._trees_at_once = self._graphs is None and self._trees_are_chains()
            if launches:
                self._record_all(slots)
        self.capabilities = Capabilities(
            slots=slots,
            tree_nodes=FED if self._graphs else _TREE_NODES,
            launches=launches,
            row_invariant=invariant,
            prompt_piece=PREFILL if self._graphs else 1,
            trees_row_invariant=invariant and self._graphs is None,
        )

    def _record_all(self, slots: int) -> None:
        """Make every recording, the largest first: the smaller ones find room in the memory that it took."""
        assert self._graphs is not None
        for slot in range(slots):
            for end in ends(self.context, self._room):
                self._graphs.record(slot, end, self.device)
            self._slots.wrote(slot, FED)
            self._slots.rollback(0, slot)

    def _probe(self) -> tuple[int, bool]:
        """Find how rows become independent of one another on this CPU.

        Returns to how many rows forwards are padded, and whether rows are independent then.
        """
        layer, hidden = self._layers[0], self._embedding.shape[1]
        inner = layer.gate_up(probe_rows(hidden, self.dtype)[:1], None).shape[1] // 2
        heads = self._heads * self._head_dim
        products = [(layer.qkv, hidden), (layer.out, heads), (layer.gate_up, hidden), (layer.down, inner)]
        found = [
            least_rows(lambda x, by=by: by(x, None), probe_rows(width, self.dtype))  # type: ignore[misc]
            for by, width in [*products, (self._head, hidden)]
        ]
        return max(self._least_rows, *found), all(found) and self._attention_is_invariant(torch.float32)

    def _trees_are_chains(self) -> bool:
        """Whether nodes that are attended to at once get the bits that their paths get one after the other."""
        dtype = self._slots.dtype
        positions, most = 3 * attention.BLOCK, attention.TOGETHER
        shape = 2, self._kv_heads, positions, self._head_dim
        shared = irregular(2 * self._kv_heads, positions * self._head_dim, dtype).view(shape)
        own = irregular(2 * most, self._kv_heads * self._head_dim, dtype).view(2, most, self._kv_heads, -1)
        queries = irregular(most, self._heads * self._head_dim, dtype).view(most, -1, self._head_dim)
        few = (-1, 0, 0, 1, 1, 2, 3, 5)
        many = [-1, *(max(0, node - 1 - node % 3) for node in range(1, most))]
        return all(
            attention.tree_is_chains(queries[:n], shared[0], shared[1], (own[0, :n], own[1, :n]), start, nodes[:n])
            for start, nodes, n in [
                *((start, few, len(few)) for start in (1, attention.BLOCK - 2, 2 * attention.BLOCK + 5)),
                *((attention.BLOCK - 2, nodes, n) for nodes, n in ((few, 1), (few, 3), (many, most))),
            ]
        )

    def _attention_is_invariant(self, dtype: torch.dtype) -> bool:
        """Whether attention to four blocks of keys gives a query the same bits whatever stands beside it."""
        keys, values = irregular(2 * self._kv_heads, 4 * attention.BLOCK * self._head_dim, dtype).view(
            2, self._kv_heads, -1, self._head_dim
        )

        def product(x: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(len(x), attention.BLOCK, dtype=dtype)
            return attention.attend(x.view(len(x), -1, self._head_dim), keys, values, mask)

        return least_rows(product, probe_rows(self._heads * self._head_dim, dtype)) == 1

    def _angles(self, rotary: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, 1, head_dim].

        The first half of the sines is negated: rotating a vector swaps its halves and negates one; `roll` only swaps.
        """
        like = torch.empty(0, dtype=dtype, device=self.device)
        cos, sin = (table[0, :, None] for table in rotary(like, self._positions[None]))
        return cos.contiguous(), torch.cat((-sin[..., : self._head_dim // 2], sin[..., self._head_dim // 2 :]), -1)

    def length(self, slot: int = 0) -> int:
        """See `ModelRunner.length`."""
        return self._slots.lengths[slot]

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """See `ModelRunner.forward`. On a GPU feeds are computed one after the other, elsewhere together."""
        check_feeds(feeds, self, "our own forward")
        with torch.inference_mode():
            found = self._together(feeds) if self._graphs is None else [self._replayed(feed) for feed in feeds]
        for feed in feeds:
            if feed.parents is None:
                self._slots.extend(feed.slot, len(feed.tokens))
        # Copied outside of inference mode: the caller's rows are ordinary tensors, and writable.
        return [rows.to(torch.float32, copy=True) for rows in found]

    # ---- all feeds at once, each chain at its place: on a CPU ----

    def _together(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Logits of each feed [rows, vocab]."""
        layout = lay_out(feeds, self._slots.lengths, self._least_rows)
        for feed in feeds:
            self._slots.wrote(feed.slot, self._slots.lengths[feed.slot] + feed.depth)
        spans = _Spans(layout, self._slots.lengths, self._slots.dtype, self._trees_at_once)
        hidden = self._decoder_layers(layout.ids, self._rope(layout), spans)
        for feed, rows in layout.trees:
            assert feed.parents is not None
            self._slots.hold(feed.slot, Tree(feed.parents, rows, spans.states))
        return self._asked(hidden, layout.asked)

    def _rope(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rows, those of padding rows included."""
        padding = len(layout.ids) - layout.spans[-1].rows.stop
        parts = [*(span.at for span in layout.spans), *([slice(0, padding)] if padding else [])]
        if len(parts) == 1:
            return self._cos[parts[0]], self._sin[parts[0]]
        return torch.cat([self._cos[at] for at in parts]), torch.cat([self._sin[at] for at in parts])

    def _asked(self, hidden: torch.Tensor, rows_of: list[list[int]]) -> list[torch.Tensor]:
        """Logits of the asked rows, computed together with other rows where there are fewer than `_least_rows`."""
        asked = [row for rows in rows_of for row in rows]
        if not asked:
            return [torch.empty(0, self.vocab_size) for _ in rows_of]
        every = asked
        if len(asked) < self._least_rows:
            others = (row for row in range(len(hidden)) if row not in asked)
            every = [*asked, *islice(others, self._least_rows - len(asked))]
        is_run = every == list(range(every[0], every[0] + len(every)))
        chosen = hidden[every[0] : every[0] + len(every)] if is_run else hidden[every]
        return list(self._logits(chosen)[: len(asked)].split([len(rows) for rows in rows_of]))

    # ---- in fixed sizes: on a GPU ----

    def _replayed(self, feed: Feed) -> torch.Tensor:
        assert self._graphs is not None
        start = self._slots.lengths[feed.slot]
        logits, written = self._graphs.forward(feed, start, self.device)
        self._slots.wrote(feed.slot, written)
        if feed.parents is not None:
            self._slots.hold(feed.slot, Tree(feed.parents))
        return logits

    def _fixed(self, piece: Piece, slot: int, end: int, rows: int) -> torch.Tensor:
        """Logits [rows, vocab] of the first `rows` tokens of a piece; only the sizes decide what is computed.

        Args:
            end: how many positions are looked at.
        """
        at = piece.start + self._positions[: len(piece.ids)]  # where keys and values are written
        if piece.sees is None:
            sees, standing = self._positions[:end] <= at[:, None], at
        else:
            standing = piece.start + piece.depths  # positions in the sequence
            behind = self._positions[:end] - piece.start  # nodes, counted from the first
            is_node = (behind >= 0) & (behind < len(piece.ids))
            seen = (piece.sees[:, None] >> behind.clamp(0, len(piece.ids) - 1)) & 1
            sees = (behind < 0) | (is_node & (seen == 1))
        mask = torch.zeros(sees.shape, dtype=self.dtype, device=self.device).masked_fill_(~sees, -torch.inf)
        rope = self._cos[standing], self._sin[standing]
        return self._logits(self._decoder_layers(piece.ids, rope, _Fixed(slot, at, mask))[:rows])

    # ---- layers ----

    def _decoder_layers(
        self, ids: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], place: _Spans | _Fixed
    ) -> torch.Tensor:
        """The last layer's states [n, hidden] of `ids` [n], on every rank. `rope`: cosines and sines of each."""
        hidden = self._embedding[ids].to(self._residual)
        leads = self._group.rank == 0  # the residual is added on one rank only: the sum must hold it once
        for number, layer in enumerate(self._layers):
            mixed = self._attend(layer, number, hidden, rope, place)
            hidden = self._group.sum(layer.out(mixed, hidden if leads else None))
            inner = swiglu(layer.gate_up(self._normal(hidden, layer.mlp_norm), None))
            hidden = self._group.sum(layer.down(inner, hidden if leads else None))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self._head(self._normal(hidden, self._norm), None))[:, : self.vocab_size]

    def _attend(
        self,
        layer: _Layer,
        number: int,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        place: _Spans | _Fixed,
    ) -> torch.Tensor:
        """Return the attention output of each row: [n, heads * head_dim], of this rank's heads.

        Writes the rows' keys and values to layer `number` of the slots.
        """
        n, heads, both, head_dim = len(hidden), self._heads, self._heads + self._kv_heads, self._head_dim
        states = layer.qkv(self._normal(hidden, layer.attention_norm), None).view(n, -1, head_dim)
        facing = states[:, :both]  # queries and keys
        if layer.q_norm is not None and layer.k_norm is not None:
            normal = self._normal(facing[:, :heads], layer.q_norm), self._normal(facing[:, heads:], layer.k_norm)
            facing = torch.cat(normal, 1)
        facing = facing.to(self._slots.dtype)
        # Two products and a sum, each rounded by itself: a fused multiply-add would be one only where it is vectorised.
        rotated = (facing * rope[0]).add_(facing.roll(head_dim // 2, -1).mul_(rope[1]))
        queries, keys, values = rotated[:, :heads], rotated[:, heads:], states[:, both:]
        if isinstance(place, _Fixed):
            return self._attend_fixed(number, queries, keys, values, place)
        return self._attend_spans(number, queries * head_dim**-0.5, keys, values, place).to(self.dtype)

    def _attend_spans(
        self, number: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: _Spans
    ) -> torch.Tensor:
        """Attention of each span to its slot. A tree's chains are attended to at once where that gives the same bits,
        elsewhere one after the other, each where its ancestors are.
        """
        if place.states is not None:
            place.states.append((keys, values))
        mixed, dtype = [], self._slots.dtype
        for span, sees in place.parts:
            all_keys, all_values = self._slots.keys[span.slot, number], self._slots.values[span.slot, number]
            if isinstance(sees, attention.TreePlace):
                own = keys[span.rows].to(dtype), values[span.rows].to(dtype)
                mixed.append(attention.attend_tree(queries[span.rows], all_keys, all_values, own, sees))
                continue
            seen = attention.whole_blocks(span.at.stop)
            all_keys[:, span.at] = keys[span.rows].transpose(0, 1)
            all_values[:, span.at] = values[span.rows].transpose(0, 1)
            mixed.append(attention.attend(queries[span.rows], all_keys[:, :seen], all_values[:, :seen], sees))
        done = place.end
        if done < len(queries):
            mixed.append(queries.new_zeros(len(queries) - done, mixed[0].shape[1]))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_fixed(
        self, number: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: _Fixed
    ) -> torch.Tensor:
        """As `attention.attend`, with one product for the scores and one for the output: sizes are fixed."""
        n, _, head_dim = queries.shape
        all_keys, all_values = self._slots.keys[place.slot, number], self._slots.values[place.slot, number]
        all_keys[:, place.at] = keys.transpose(0, 1)
        all_values[:, place.at] = values.transpose(0, 1)
        all_keys, all_values = all_keys[:, : place.mask.shape[1]], all_values[:, : place.mask.shape[1]]
        stacked = queries.view(n, self._kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        stacked = stacked.reshape(self._kv_heads, -1, head_dim)
        mask = place.mask.repeat(self._heads // self._kv_heads, 1)
        if n <= FED:  # fused attention has few blocks to work with where there are few rows
            scores = torch.baddbmm(mask, stacked, all_keys.transpose(1, 2), alpha=head_dim**-0.5)
            mixed = torch.bmm(scores.softmax(-1), all_values)
        else:
            mixed = scaled_dot_product_attention(stacked[None], all_keys[None], all_values[None], mask)[0]
        return mixed.view(self._kv_heads, -1, n, head_dim).permute(2, 0, 1, 3).reshape(n, -1)

    def _normal(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normalise(hidden, weight, self._eps)

    def rollback(self, length: int, slot: int = 0) -> None:
        """See `ModelRunner.rollback`."""
        self._slots.rollback(length, slot)

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        """See `ModelRunner.keep`."""
        self._slots.keep(path, slot)

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        """See `ModelRunner.fork`."""
        self._slots.fork(slot, into, self.length(slot) if length is None else length, shared)

    def synchronize(self) -> None:
        """See `ModelRunner.synchronize`."""
        if self.device.type == "cuda":
            # This stream only, not the one that sends rows to the other worker.
            torch.cuda.current_stream(self.device).synchronize()


def _layer(layer: Any, rounding: Rounding, findings: Findings) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    one = partial(matrix, rounding=rounding, laid=findings.laid)
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (norm.weight if norm is not None else None for norm in norms)
    return _Layer(
        layer.input_layernorm.weight,
        one(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm,
        k_norm,
        one(attention.o_proj),
        layer.post_attention_layernorm.weight,
        one(mlp.gate_proj, mlp.up_proj),
        one(mlp.down_proj),
    )
