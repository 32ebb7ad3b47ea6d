"""Our own forward pass for the families of `families.OWN_FORWARD`, chains and trees, as a `ModelRunner`.

It computes what transformers computes for these families, which is its reference in the tests.

**Rows do not depend on their company**: the logits of a position have the same bits however its
sequence was cut into forwards. On a CPU our C ensures that. On a GPU a prompt is computed in pieces
of one size and all other tokens in recordings of another (`recordings`); how many positions a forward
attends to depends on its own tokens' positions alone, and another text reuses the cache of a prompt
in whole pieces only. Where our kernels run (`token_forward`), the feeds of all slots are rows of one
table, and a row's bits depend on its own tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
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
    PieceInputs,
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
    """Whether `ForwardRunner` can compute this model on `device`; None: on the model's own."""
    device = device or model.device
    settings = model.config.to_dict()
    forward = forward_of(type(model).__name__, settings)
    if forward is None or (forward.has_experts and not computes_experts(device)):
        return False
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    # Norms may have a wider dtype.
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    if len({(weight.device, weight.dtype) for weight in matrices}) != 1:
        return False
    for module in model.modules():
        # Subclasses are quantised layers, which cannot be laid out anew.
        if isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear:
            return False
    has_plain_mlps = all(_has_plain_mlp(layer.mlp) for layer in model.model.layers)
    return has_plain_mlps and native.takes_model(device, settings)


def _has_plain_mlp(mlp: torch.nn.Module) -> bool:
    if hasattr(mlp, "experts"):
        return isinstance(getattr(mlp.experts, "gate_up_proj", None), torch.nn.Parameter)
    return type(mlp.down_proj) is torch.nn.Linear


def _recorder(record: Record | None, records: bool, device: torch.device) -> Record:
    """Return `record` if there is one; else a recorder of CUDA graphs, or of nothing."""
    if record is not None:
        return record
    if records:
        return record_on_gpu(device)
    return lambda work: work


class ForwardRunner(ModelRunner):
    """Runs the weights of `model`, a `Decoder` or a model for which `has_own_forward` holds.

    It takes the weights away from the model.

    Args:
        slots: how many sequences the cache holds.
        spare: further slots, if the feeds of several slots are one forward.
        records: whether forwards of up to `FED` tokens are recorded on a GPU, as CUDA graphs.
        record: replaces the recorder of CUDA graphs, and makes a CPU compute in the fixed sizes of a
            GPU (for tests).
        rounding: how matrices are rounded: see `quantised.rounded`.
        kernels: whether tokens are computed by our own kernels (`token_forward`, `prefill`); None: on
            a GPU, if forwards are recorded, Triton is installed and the kernels fit the model.
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
        self.context = context
        self.device = model.device
        rotary = model.model.rotary_emb
        is_gpu = self.device.type == "cuda"
        is_fixed = record is not None or is_gpu
        launches = is_fixed and (record is not None or records)
        has_kernels = kernels
        if kernels is None:
            has_kernels = records and is_gpu
        make_recorder = partial(_recorder, record, records, self.device)
        # Whole blocks: masks of other widths are copied.
        self._room = attention.whole_blocks(context)
        self._graphs: Graphs | None = None
        self._decode: Decode | None = None
        if is_fixed:
            self._room += PREFILL  # pieces of a fixed size write padding after the text
            attention.plan_no_shapes(self.device)
            self._graphs = Graphs(self._fixed, self._room, make_recorder(), self.device)
        with torch.inference_mode():
            layers = DecoderLayers(
                model, context, rounding, is_fixed, bool(kernels), taps, progress=progress
            )
            self._layers = layers
            self._seen: dict[int, torch.Tensor] = {}  # features of each slot's last feed
            self.vocab_size = layers.vocab_size
            self.dtype = layers.dtype
            self.weights = rounding or layers.weights
            self.embedding = layers.embedding
            self._positions = torch.arange(self._room + PREFILL, device=self.device)
            # A longrope chooses its angles by the greatest position.
            positions = self._positions.clamp_max(context - 1)
            self._ropes = layers.angles(rotary, positions)
            if not has_kernels and is_fixed:
                spare = 0
            self._slots = self._make_slots(slots + spare)
            if not is_fixed:
                layers.in_one_call = NativeLayers.of(layers, self._ropes)
            if has_kernels:
                self._make_kernels(slots, make_recorder)
            if launches and self._decode is None:
                self._record_all(slots)
        self.capabilities = self._capabilities(launches)

    def _capabilities(self, launches: bool) -> Capabilities:
        is_fixed = self._graphs is not None
        tree_nodes = 0 if is_fixed else _TREE_NODES
        if self._decode is not None:
            # In fixed sizes only our kernels give a tree's nodes the bits of their path.
            tree_nodes = self._decode.most
        return Capabilities(
            slots=len(self._slots.lengths),
            tree_nodes=tree_nodes,
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

    def _make_kernels(self, slots: int, make_recorder: Callable[[], Record]) -> None:
        """Make our kernels of tokens and of prompts, or log why there are none.

        Without those of tokens each slot would have recordings of its own, so that the spare slots are
        given up.
        """
        assert self._graphs is not None
        make_prompts: Any = None

        def expected(piece: PieceInputs) -> torch.Tensor:
            return self._hidden_states(piece, 0, len(piece.ids))

        try:
            from pearl.models.gpu.prefill import make_prompts
            from pearl.models.gpu.token_forward import make_decode
        except ImportError as missing:
            log.info("forwards are torch's operations, recorded: %s", missing)
        else:
            # A recorder apart from the other recordings': refused kernels free their recordings, and
            # with them the workspaces of their stream.
            self._decode = make_decode(
                self._layers, self._slots, self._ropes, make_recorder(), expected
            )
        if self._decode is None and len(self._slots.lengths) > slots:
            del self._slots
            self._slots = self._make_slots(slots)
        if make_prompts is not None:
            self._graphs.prompts = make_prompts(
                self._layers, self._slots, self._ropes, self._graphs.recorder, expected
            )

    def _record_all(self, slots: int) -> None:
        """Make every recording, the largest first: the smaller ones fit into its memory."""
        assert self._graphs is not None
        for slot in range(slots):
            for end in ends(self.context, self._room):
                self._graphs.record(slot, end)
            self._slots.wrote(slot, FED)
            self._slots.rollback(0, slot)

    def length(self, slot: int = 0) -> int:
        return self._slots.lengths[slot]

    def features(self, slot: int = 0) -> torch.Tensor:
        """Return the features [n, capabilities.features] of the tokens that the slot was fed last."""
        return self._seen[slot]

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Compute the feeds; without our kernels a GPU computes one after the other."""
        check_feeds(feeds, self, "our own forward")
        with torch.inference_mode():
            if self._decode is not None:
                logits = self._tabled(self._decode, feeds)
            elif self._graphs is not None:
                logits = [self._replayed(feed) for feed in feeds]
            else:
                logits = self._together(feeds)
        for feed in feeds:
            if feed.parents is None:
                self._slots.extend(feed.slot, len(feed.tokens))
        # Copied outside of inference mode: the caller's rows are ordinary tensors, and writable.
        return [rows.to(torch.float32, copy=True) for rows in logits]

    # ---- all feeds at once, in any size: on a CPU ----

    def _together(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Return the logits of each feed [rows, vocab]."""
        layers = self._layers
        layout = lay_out(feeds, self._slots.lengths)
        has_trees = False
        for feed in feeds:
            self._slots.wrote(feed.slot, self._slots.lengths[feed.slot] + feed.depth)
            has_trees |= feed.parents is not None
        attends = NativeAttention(
            layout.table, has_trees, self._slots, layers.scoring, layers.heads, layers.eps
        )
        hidden = layers.hidden_states(layout.ids, self._ropes, attends)
        needed_rows: list[int] = []
        for feed, rows in zip(feeds, layout.fed, strict=True):
            if feed.parents is not None:
                self._slots.hold(feed.slot, Tree(feed.parents, rows, attends.states))
            if layers.features is not None:
                self._seen[feed.slot] = layers.features[rows.start : rows.stop]
            needed_rows += rows[len(rows) - feed.rows :]
        if not needed_rows:
            return [torch.empty(0, self.vocab_size) for _ in feeds]
        return list(layers.logits(hidden[needed_rows]).split([feed.rows for feed in feeds]))

    # ---- in fixed sizes: on a GPU ----

    def _tabled(self, decode: Decode, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Compute prompts one after the other, and before them all other feeds together."""
        few = [feed for feed in feeds if not feed.prompt or feed.parents is not None]
        outputs = iter(decode.forward(few) if few else ())
        logits: list[torch.Tensor] = []
        for feed in feeds:
            if feed.prompt and feed.parents is None:
                logits.append(self._replayed(feed))
                continue
            rows, features = next(outputs)
            logits.append(rows)
            if features is not None:
                self._seen[feed.slot] = features
            self._slots.wrote(feed.slot, self._slots.lengths[feed.slot] + len(feed.tokens))
            if feed.parents is not None:
                self._slots.hold(feed.slot, Tree(feed.parents))
        return logits

    def _replayed(self, feed: Feed) -> torch.Tensor:
        assert self._graphs is not None
        start = self._slots.lengths[feed.slot]
        (logits, features), written = self._graphs.forward(feed, start)
        if features is not None:
            self._seen[feed.slot] = features
        self._slots.wrote(feed.slot, written)
        return logits

    def _fixed(self, piece: PieceInputs, slot: int, end: int, rows: int) -> Rows:
        """Return logits of the first `rows` tokens of a piece, and features.

        Only the sizes decide what is computed.
        """
        hidden = self._hidden_states(piece, slot, end)
        return self._layers.logits(hidden[:rows]), self._layers.features

    def _hidden_states(self, piece: PieceInputs, slot: int, end: int) -> torch.Tensor:
        """Return the states [n, hidden] after the last layer.

        Args:
            end: how many positions are attended to; a prompt's piece ends there.
        """
        rows = self._positions[: len(piece.ids)]
        at = piece.start + rows
        scoring = self._layers.scoring
        ropes = {name: (cos[at], sin[at]) for name, (cos, sin) in self._ropes.items()}
        is_fed = None if piece.fed is None else rows < piece.fed
        masks = {}
        for window in set(scoring.windows):
            masks[window] = self._mask(at, end, window, is_fed is None)
        attends = FixedAttention(self._slots, slot, at, end, masks, scoring)
        return self._layers.hidden_states(piece.ids, ropes, attends, is_fed)

    def _mask(
        self, at: torch.Tensor, end: int, window: int, is_prompt: bool
    ) -> torch.Tensor | None:
        """Return the mask [n, end] of rows at the positions `at`; None: see `FixedAttention`."""
        scoring = self._layers.scoring
        if is_prompt and not window and not scoring.cap and not scoring.sinks:
            return None
        return attention.causal_mask(self._positions[:end], at, window, self.dtype)

    def use_threads(self, count: int) -> Sequence[int]:
        if self._graphs:
            return super().use_threads(count)
        return native.use_threads(count)

    def rollback(self, length: int, slot: int = 0) -> None:
        self._slots.rollback(length, slot)

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        self._slots.keep(path, slot)

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        if length is None:
            length = self.length(slot)
        self._slots.fork(slot, into, length, shared)
