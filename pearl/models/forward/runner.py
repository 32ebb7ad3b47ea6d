"""Our own forward pass for the families of `families.OWN_FORWARD`, chains and trees, as a `ModelRunner`.

What `hf` does for every model this does for one shape of them; `hf` is its reference in the tests.

**Rows do not depend on their company**: the logits of a position are the same bits however its sequence was cut into
forwards.  On a CPU our C ensures that.  On a GPU a prompt is computed in pieces of one size and all
other tokens in recordings of another (`graphs`), and how far a forward looks depends on the positions of its tokens
alone; another text reuses the cache of a prompt in whole pieces only.  Where our kernels run (`decode`), the feeds of
all slots are rows of one table, and a row's bits depend on its own tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pearl.cache import Progress, silent
from pearl.models.cpu import native
from pearl.models.cpu.native_layers import NativeLayers
from pearl.models.families import forward_of
from pearl.models.feeds import Feed, lay_out
from pearl.models.forward import attention
from pearl.models.forward.experts import computes_experts
from pearl.models.forward.layers import DecoderLayers
from pearl.models.forward.linear_layers import Rounding
from pearl.models.forward.slot_attention import FixedAttention, NativeAttention
from pearl.models.forward.slots import Slots, Tree
from pearl.models.gpu.recordings import (
    FED,
    PREFILL,
    Graphs,
    Piece,
    Record,
    Rows,
    ends,
    record_on_gpu,
)
from pearl.models.runner import Capabilities, ModelRunner, check_feeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.forward.decoder import Decoder
    from pearl.models.gpu.token_forward import Decode

log = logging.getLogger(__name__)

_TREE_NODES = 256  # most nodes of a tree, on a CPU


def has_own_forward(model: PreTrainedModel, device: torch.device | None = None) -> bool:
    """Whether `ForwardRunner` computes what this model does, on `device`; None: where it is."""
    device = device or model.device
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    forward = forward_of(type(model).__name__, model.config.to_dict())
    return (
        forward is not None
        and model.dtype in (torch.float32, torch.bfloat16, torch.float16)
        # Norms may be wider.
        and len(
            {(weight.device, weight.dtype) for weight in model.parameters() if weight.dim() > 1}
        )
        == 1
        and all(
            type(part) is torch.nn.Linear for part in linears
        )  # else quantised: it cannot be laid out anew
        and all(_has_plain_mlp(layer.mlp) for layer in model.model.layers)
        and (not forward.has_experts or computes_experts(device))
        and native.takes_model(device, model.config.to_dict())
    )


def _has_plain_mlp(mlp: torch.nn.Module) -> bool:
    if hasattr(mlp, "experts"):
        return isinstance(getattr(mlp.experts, "gate_up_proj", None), torch.nn.Parameter)
    return type(mlp.down_proj) is torch.nn.Linear


class ForwardRunner(ModelRunner):
    """Runs the weights of `model`, a `Decoder` or one for which `has_own_forward` holds; takes them away.

    Args:
        slots: how many sequences the cache holds.
        spare: further ones, where the feeds of several slots are one forward.
        records: whether forwards of up to `FED` tokens are recorded on a GPU, as CUDA graphs.
        record: replaces the recorder of CUDA graphs, and makes a CPU compute in the fixed sizes of a GPU (for tests).
        rounding: how matrices are rounded: see `quantised.rounded`.
        kernels: whether tokens are computed by our own kernels (`decode`, `prompts`); None: on a GPU,
            if forwards are recorded, Triton is installed and they fit the model.
        taps: layers whose inputs are kept for a head; see `DecoderLayers`.
        progress: see `DecoderLayers`.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        context: int,
        *,
        slots: int = 1,
        spare: int = 0,
        records: bool = True,
        record: Record | None = None,
        rounding: Rounding = "",
        kernels: bool | None = None,
        taps: Sequence[int] = (),
        progress: Progress = silent,
    ) -> None:
        self.context, self.device, rotary = context, model.device, model.model.rotary_emb
        is_fixed = record is not None or self.device.type == "cuda"
        # Pieces of a fixed size write padding after the text.  Whole blocks: masks of other widths are copied.
        self._room = attention.whole_blocks(context) + (PREFILL if is_fixed else 0)
        self._graphs: Graphs | None = None
        if is_fixed:
            attention.plan_no_shapes(self.device)
            recorder = record or (record_on_gpu(self.device) if records else lambda work: work)
            self._graphs = Graphs(self._fixed, self._room, recorder)
        self._decode: Decode | None = None
        with torch.inference_mode():
            self._layers = DecoderLayers(
                model, context, rounding, is_fixed, bool(kernels), taps, progress=progress
            )
            self._seen: dict[int, torch.Tensor] = {}  # features of each slot's last feed
            self.vocab_size, self.dtype = self._layers.vocab_size, self._layers.dtype
            self.weights, self.embedding = rounding or self._layers.weights, self._layers.embedding
            self._positions = torch.arange(self._room + PREFILL, device=self.device)
            known = self._positions.clamp_max(
                context - 1
            )  # a longrope chooses its angles by the greatest one
            self._ropes = self._layers.angles(rotary, known)
            has_kernels = kernels or (kernels is None and records and self.device.type == "cuda")
            self._slots = self._make_slots(slots + (spare if has_kernels or not is_fixed else 0))
            self._layers.in_one_call = (
                None if is_fixed else NativeLayers.of(self._layers, self._ropes)
            )
            if has_kernels:
                self._make_kernels(slots, record, records)
            if (launches := is_fixed and (record is not None or records)) and self._decode is None:
                self._record_all(slots)
        self.capabilities = Capabilities(
            slots=len(self._slots.lengths),
            # In fixed sizes only our kernels give a tree's nodes the bits of their path.
            tree_nodes=self._decode.most if self._decode else 0 if is_fixed else _TREE_NODES,
            launches=launches,
            row_invariant=True,
            features=len(self._layers.taps) * self._layers.embedding.shape[1],
            together=self._decode is not None or not is_fixed,
            prompt_piece=PREFILL if is_fixed else 1,
        )

    def _make_slots(self, slots: int) -> Slots:
        heads = self._layers.heads
        return Slots(
            (slots, len(self._layers), heads.kv, self._room, heads.dim), self.dtype, self.device
        )

    def _make_kernels(self, slots: int, record: Record | None, records: bool) -> None:
        """Our kernels, of tokens and of prompts, where there is Triton and they fit, else the reason in the log.

        Without those of tokens each slot would have recordings of its own: then there are no more than `slots`.
        """
        assert self._graphs is not None
        make: Any = None

        def expected(piece: Piece) -> torch.Tensor:
            return self._hidden_states(piece, 0, len(piece.ids))

        try:
            from pearl.models.gpu.prefill import make_prompts as make
            from pearl.models.gpu.token_forward import make_decode
        except ImportError as missing:
            log.info("forwards are torch's operations, recorded: %s", missing)
        else:
            # Apart from other recordings: refused kernels free theirs, and with them the workspaces of their stream.
            own = record or (record_on_gpu(self.device) if records else lambda work: work)
            self._decode = make_decode(self._layers, self._slots, self._ropes, own, expected)
        if self._decode is None and len(self._slots.lengths) > slots:
            del self._slots
            self._slots = self._make_slots(slots)
        if make is not None:
            given = self._layers, self._slots, self._ropes
            self._graphs.prompts = make(*given, self._graphs.recorder, expected)

    def _record_all(self, slots: int) -> None:
        """Make every recording, the largest first: the smaller ones fit into the memory that it took."""
        assert self._graphs is not None
        for slot in range(slots):
            for end in ends(self.context, self._room):
                self._graphs.record(slot, end, self.device)
            self._slots.wrote(slot, FED)
            self._slots.rollback(0, slot)

    def length(self, slot: int = 0) -> int:
        return self._slots.lengths[slot]

    def features(self, slot: int = 0) -> torch.Tensor:
        """Hidden states of the tokens that the slot was fed last [n, capabilities.features], in their order."""
        return self._seen[slot]

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Without our kernels a GPU computes feeds one after the other."""
        check_feeds(feeds, self, "our own forward")
        with torch.inference_mode():
            if self._decode is not None:
                found = self._tabled(self._decode, feeds)
            else:
                found = (
                    self._together(feeds)
                    if self._graphs is None
                    else [self._replayed(feed) for feed in feeds]
                )
        for feed in feeds:
            if feed.parents is None:
                self._slots.extend(feed.slot, len(feed.tokens))
        # Copied outside of inference mode: the caller's rows are ordinary tensors, and writable.
        return [rows.to(torch.float32, copy=True) for rows in found]

    # ---- all feeds at once, in any size: on a CPU ----

    def _together(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Logits of each feed [rows, vocab]."""
        layout = lay_out(feeds, self._slots.lengths)
        for feed in feeds:
            self._slots.wrote(feed.slot, self._slots.lengths[feed.slot] + feed.depth)
        layers, has_trees = self._layers, any(feed.parents is not None for feed in feeds)
        attends = NativeAttention(
            layout.table, has_trees, self._slots, layers.scoring, layers.heads, layers.eps
        )
        hidden = layers.hidden_states(layout.ids, self._ropes, attends)
        for feed, rows in zip(feeds, layout.fed, strict=True):
            if feed.parents is not None:
                self._slots.hold(feed.slot, Tree(feed.parents, rows, attends.states))
            if layers.features is not None:
                self._seen[feed.slot] = layers.features[rows.start : rows.stop]
        asked = [
            row
            for feed, rows in zip(feeds, layout.fed, strict=True)
            for row in rows[len(rows) - feed.rows :]
        ]
        if not asked:
            return [torch.empty(0, self.vocab_size) for _ in feeds]
        return list(layers.logits(hidden[asked]).split([feed.rows for feed in feeds]))

    # ---- in fixed sizes: on a GPU ----

    def _tabled(self, decode: Decode, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Prompts one after the other, all other feeds together."""
        few = [feed for feed in feeds if not feed.prompt or feed.parents is not None]
        found: dict[int, torch.Tensor] = {}
        for feed, (logits, features) in zip(few, decode.forward(few) if few else [], strict=True):
            found[id(feed)] = logits
            if features is not None:
                self._seen[feed.slot] = features
            self._slots.wrote(feed.slot, self._slots.lengths[feed.slot] + len(feed.tokens))
            if feed.parents is not None:
                self._slots.hold(feed.slot, Tree(feed.parents))
        return [found[id(feed)] if id(feed) in found else self._replayed(feed) for feed in feeds]

    def _replayed(self, feed: Feed) -> torch.Tensor:
        assert self._graphs is not None
        start = self._slots.lengths[feed.slot]
        (logits, features), written = self._graphs.forward(feed, start, self.device)
        if features is not None:
            self._seen[feed.slot] = features.clone()
        self._slots.wrote(feed.slot, written)
        return logits

    def _fixed(self, piece: Piece, slot: int, end: int, rows: int) -> Rows:
        """Logits of the first `rows` tokens of a piece, and features; only the sizes decide what is computed."""
        hidden = self._hidden_states(piece, slot, end)
        return self._layers.logits(hidden[:rows]), self._layers.features

    def _hidden_states(self, piece: Piece, slot: int, end: int) -> torch.Tensor:
        """[n, hidden] after the last layer.

        Args:
            end: how many positions are looked at; a prompt's piece ends there.
        """
        rows = self._positions[: len(piece.ids)]
        at, scoring = piece.start + rows, self._layers.scoring
        ropes = {name: (cos[at], sin[at]) for name, (cos, sin) in self._ropes.items()}
        is_fed = None if piece.fed is None else rows < piece.fed
        masks = {
            window: self._mask(at, end, window, is_fed is None) for window in {*scoring.windows}
        }
        attends = FixedAttention(self._slots, slot, at, end, masks, scoring)
        return self._layers.hidden_states(piece.ids, ropes, attends, is_fed)

    def _mask(
        self, at: torch.Tensor, end: int, window: int, is_prompt: bool
    ) -> torch.Tensor | None:
        """The mask [n, end] of rows at the positions `at`; None: see `FixedAttention`."""
        scoring = self._layers.scoring
        if is_prompt and not window and not scoring.cap and not scoring.sinks:
            return None
        return attention.causal_mask(self._positions[:end], at, window, self.dtype)

    def use_threads(self, count: int) -> Sequence[int]:
        return super().use_threads(count) if self._graphs else native.use_threads(count)

    def rollback(self, length: int, slot: int = 0) -> None:
        self._slots.rollback(length, slot)

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        self._slots.keep(path, slot)

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        self._slots.fork(slot, into, self.length(slot) if length is None else length, shared)
