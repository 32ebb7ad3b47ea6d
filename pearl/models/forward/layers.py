"""The decoder layers of our own forward pass: from token ids to logits, over the weights of one model.

Query, key and value are one matrix, gate and up another, packed for the CPU.  Must not know feeds and slots: the caller
provides positions and attends (see `slot_attention`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Linear, Parameter
from torch.nn.functional import pad

from pearl.cache import Count, Progress, silent
from pearl.models.cpu import native
from pearl.models.families import (
    CAPS,
    HEAD_ACTIVATIONS,
    MATRICES,
    Forward,
    activation_of,
    dimensions,
    forward_of,
    layer_kinds,
    rotated,
)
from pearl.models.forward.attention import Heads, Scoring, cap_scores
from pearl.models.forward.experts import Experts
from pearl.models.forward.linear_layers import (
    Matrix,
    Rounding,
    dtype_of_rows,
    gated,
    matrix,
    normalise,
)
from pearl.models.forward.quantised import QuantisedMatrix, Weights
from pearl.models.forward.slot_attention import FixedAttention, NativeAttention, PromptAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.cpu.native_layers import NativeLayers
    from pearl.models.forward.decoder import Decoder

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [rows, 1, head_dim] each


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its matrices, and the weights of its norms, None where there is none."""

    rope: str | None  # see `layer_kinds`
    attention_norm: torch.Tensor | None
    qkv: Matrix
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Matrix
    after_attention: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    gate_up: Matrix
    down: Matrix
    after_mlp: torch.Tensor | None
    experts: Experts | None = None  # in place of `gate_up` and `down`

    @staticmethod
    def of(
        layer: Any,
        rope: str | None,
        forward: Forward,
        config: Mapping[str, Any],
        one: Callable[..., Matrix],
        kernels: bool,
        dtype: torch.dtype,
    ) -> Layer:
        """`kernels`: see `Experts`. `dtype`: of rows."""
        attention, mlp = layer.self_attn, layer.mlp
        experts = Experts(mlp, config, one, kernels) if hasattr(mlp, "experts") else None

        def norm(of: Any, name: str) -> torch.Tensor | None:
            return (
                norm_weights(getattr(of, name), forward, dtype)
                if name and hasattr(of, name)
                else None
            )

        before, after, before_mlp, after_mlp = (norm(layer, name) for name in forward.norms)
        return Layer(
            rope,
            before,
            one(attention.q_proj, attention.k_proj, attention.v_proj),
            norm(attention, "q_norm"),
            norm(attention, "k_norm"),
            one(attention.o_proj),
            after,
            before_mlp,
            experts.each[0][0] if experts else one(mlp.gate_proj, mlp.up_proj),
            experts.each[0][1] if experts else one(mlp.down_proj),
            after_mlp,
            experts,
        )


def tapped(layers: int) -> tuple[int, ...]:
    """Numbers of the layers whose inputs an EAGLE-3 head reads that names none, in a model of `layers` layers."""
    return tuple(min(max(number, 0), layers - 1) for number in (2, layers // 2, layers - 3))


def norm_weights(norm: Any, forward: Forward, dtype: torch.dtype) -> torch.Tensor:
    """In a dtype that holds both them and `dtype`, that of rows."""
    weight: torch.Tensor = norm.weight.detach()
    weight = weight.to(torch.promote_types(weight.dtype, dtype))
    return weight if forward.norm_shift is None else weight.float() + forward.norm_shift


@dataclass(frozen=True)
class Scales:
    """Multipliers: of embeddings, of attention scores, of what a block adds to the hidden state, and of logits.

    Caps, of attention scores and of logits; 0: none.
    """

    embedding: float
    attention: float
    residual: float
    logits: float
    attention_cap: float = 0.0
    logits_cap: float = 0.0

    @staticmethod
    def of(forward: Forward, config: Mapping[str, Any], dim: int, dtype: torch.dtype) -> Scales:
        attention = (config.get("query_pre_attn_scalar") or dim) ** -0.5
        if forward.has_multipliers:
            names = (
                "embedding_multiplier",
                "attention_multiplier",
                "residual_multiplier",
                "logits_scaling",
            )
            embedding, attention, residual, logits = (config.get(name, 1.0) for name in names)
            return Scales(embedding, attention, residual, 1 / logits)
        root = (
            torch.tensor(config["hidden_size"] ** 0.5).to(dtype).item()
            if forward.scales_embedding
            else 1.0
        )
        return Scales(root, attention, 1.0, 1.0, *(float(config.get(name) or 0.0) for name in CAPS))


class DecoderLayers:
    """The weights of `model`, which it takes away, and what they compute.

    Attributes:
        weights: their dtype or, of quantised matrices, bits.
        embedding: [vocab, hidden]. norm: the weights of the last norm.
        taps: layers whose inputs `features` has, in that order; the number of layers: what the last norm reads.
        features: of the last forward [n, len(taps) * hidden].
        scoring: with a window for each layer.
        residual_dtype: of the states between layers.
        in_one_call: what computes the layers where a `NativeAttention` attends, if not one by one.
        scales, gate: multipliers and caps, and the activation of the gate.

    Args:
        context: a window at least as long is none.
        is_fixed: whether sizes are fixed, as on a GPU: keys, and so queries, are then turned in the dtype of rows.
        plain: for the kernels of `decode`: see `matrices.matrix`.
        family: the forward and the configuration, of a model that `described` does not know.
        progress: called with the number of layers that are laid out.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        context: int,
        rounding: Rounding,
        is_fixed: bool,
        plain: bool = False,
        taps: Sequence[int] = (),
        family: tuple[Forward, dict[str, Any]] | None = None,
        progress: Progress = silent,
    ) -> None:
        config, inner = model.config, model.model
        forward, settings = family or described(model)
        heads = int(config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.heads = Heads(heads, int(config.num_key_value_heads), width)
        self.vocab_size, self.embedding = int(config.vocab_size), inner.embed_tokens.weight
        self.dtype = model.dtype if plain else dtype_of_rows(model.dtype, self.embedding.device)
        self.eps, self._cache_dtype = (
            float(config.rms_norm_eps),
            self.dtype if is_fixed else torch.float32,
        )
        self._rotated = rotated(forward, settings, width)
        self.scales = Scales.of(forward, settings, width, model.dtype)
        self.gate = HEAD_ACTIVATIONS[activation_of(settings) or ""]
        one = partial(matrix, dtype=self.dtype, rounding=rounding, plain=plain)
        split_fused(model, forward)
        pair_up(model, forward, self._rotated, width)
        kinds = layer_kinds(forward, settings)
        windows = tuple(0 if window >= context else window for window, _ in kinds)
        sinks = tuple(
            each.self_attn.sinks.detach().to(self._cache_dtype)
            for each in inner.layers
            if forward.has_sinks
        )
        self.scoring = Scoring(windows, self.scales.attention, self.scales.attention_cap, sinks)
        self.layers: list[Layer] = []
        bits = {int(rounding[-1])} if rounding else set()
        count = Count(progress, "layer", len(inner.layers))
        for layer, (_, rope) in zip(inner.layers, kinds, strict=True):
            bits |= set() if rounding else bits_of(layer)
            self.layers.append(
                Layer.of(
                    layer, rope, forward, settings, one, plain or self.embedding.is_cuda, self.dtype
                )
            )
            native.give_back()
            count.advance()
        self.weights = (
            f"{' and '.join(map(str, sorted(bits)))} bits"
            if bits
            else str(model.dtype).removeprefix("torch.")
        )
        # Rounded matrices round each result once more: sums over the layers in float32 make up for half of that.
        self.residual_dtype = torch.float32 if bits else self.dtype
        self.norm = norm_weights(inner.norm, forward, self.dtype)
        self.taps = tuple(taps)
        self.features: torch.Tensor | None = None
        self.in_one_call: NativeLayers | None = None
        self.head = one(model.lm_head, wide=True)
        native.give_back()

    def __len__(self) -> int:
        return len(self.layers)

    def angles(self, rotary: Any, positions: torch.Tensor) -> dict[str, Rope]:
        """Cosines and sines of `positions` [n], of each rotation that layers have; see `layer_kinds`.

        The first half of the sines is negated: rotating a vector swaps its halves and negates one; `roll` only swaps.
        """
        half, found = self._rotated // 2, dict[str, Rope]()
        rest = self.heads.dim // 2 - half  # numbers that are not rotated
        like = torch.empty(0, dtype=self._cache_dtype, device=positions.device)
        for name in sorted({layer.rope for layer in self.layers if layer.rope is not None}):
            tables = rotary(like, positions[None], *([name] if name else []))
            # gpt-oss's tables have each angle once, others' twice.
            cos, sin = (table[0, :, None, :half].to(self._cache_dtype) for table in tables)
            cos, sin = pad(cos, (0, rest), value=1.0), pad(sin, (0, rest))
            found[name] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return found

    def hidden_states(
        self,
        ids: torch.Tensor,
        ropes: Mapping[str, Rope],
        slots: FixedAttention | NativeAttention | PromptAttention,
        is_fed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last layer's states [n, hidden] of `ids` [n].

        Args:
            ropes: of the rows, or of all positions: see `slots`. is_fed: see `Experts`.
        """
        hidden = self.embedding[ids]
        if self.scales.embedding != 1:
            hidden = hidden * self.scales.embedding
        hidden = hidden.to(self.residual_dtype)
        tapped: dict[int, torch.Tensor] = {}
        if isinstance(slots, NativeAttention) and self.in_one_call is not None:
            for first, end in itertools.pairwise(sorted({0, *self.taps, len(self.layers)})):
                if first in self.taps:
                    tapped[first] = hidden.to(self.dtype, copy=True)
                self.in_one_call(slots, hidden, first, end)
            return self._finished(hidden, tapped)
        for number, layer in enumerate(self.layers):
            if number in self.taps:
                tapped[number] = hidden.to(self.dtype, copy=True)
            x = self.normalise(hidden, layer.attention_norm)
            hidden = self.layer_states(number, hidden, x, ropes, slots, is_fed)
        return self._finished(hidden, tapped)

    def _finished(self, hidden: torch.Tensor, tapped: dict[int, torch.Tensor]) -> torch.Tensor:
        if len(self.layers) in self.taps:
            tapped[len(self.layers)] = hidden.to(self.dtype, copy=True)
        self.features = (
            torch.cat([tapped[number] for number in self.taps], -1) if self.taps else None
        )
        return hidden

    def layer_states(
        self,
        number: int,
        hidden: torch.Tensor,
        x: torch.Tensor,
        ropes: Mapping[str, Rope],
        slots: FixedAttention | NativeAttention | PromptAttention,
        is_fed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The states [n, hidden] after one layer.

        Args:
            hidden: the states before it, to which it adds.
            x: what its queries, keys and values are computed from; as a rule `hidden` after the layer's norm.
        """
        layer = self.layers[number]
        mixed = self._attend(layer, number, x, ropes, slots)
        hidden = self._add(hidden, layer.out, mixed, layer.after_attention)
        fed = self.normalise(hidden, layer.mlp_norm)
        if layer.experts is not None:
            return hidden + layer.experts(fed, is_fed)
        return self._add(
            hidden, layer.down, gated(layer.gate_up(fed, None), self.gate), layer.after_mlp
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab]."""
        head = self.head(self.normalise(hidden, self.norm), None)
        if self.scales.logits != 1:
            head = head * self.scales.logits
        for row in (
            head if self.scales.logits_cap else ()
        ):  # one by one: the last elements of a row are no vector
            cap_scores(row, self.scales.logits_cap)
        return head

    def normalise(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """RMS norm of x, in the dtype of rows; None: x as it is."""
        return x.to(self.dtype) if norm is None else normalise(x, norm, self.eps, self.dtype)

    def _add(
        self, hidden: torch.Tensor, product: Matrix, x: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """`hidden` plus the product of x, after its norm and multiplier."""
        if norm is None and self.scales.residual == 1:
            return product(x, hidden)
        part = product(x, None)
        part = part if norm is None else self.normalise(part, norm)
        return hidden + (part if self.scales.residual == 1 else part * self.scales.residual)

    def _attend(
        self,
        layer: Layer,
        number: int,
        x: torch.Tensor,
        ropes: Mapping[str, Rope],
        slots: FixedAttention | NativeAttention | PromptAttention,
    ) -> torch.Tensor:
        """The attention output of each row, [n, heads * head_dim]."""
        n, heads, both, dim = (
            x.shape[0],
            self.heads.query,
            self.heads.query + self.heads.kv,
            self.heads.dim,
        )
        states = layer.qkv(x, None).view(n, -1, dim)
        rope = None if layer.rope is None else ropes[layer.rope]
        if isinstance(slots, NativeAttention):
            return slots.attend_states(number, states, (layer.q_norm, layer.k_norm), rope)
        facing = states[:, :both]  # queries and keys
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = (facing[:, :heads], layer.q_norm), (facing[:, heads:], layer.k_norm)
            facing = torch.cat([self._head_norm(part, norm) for part, norm in parts], 1)
        facing = facing.to(self._cache_dtype)
        if isinstance(slots, PromptAttention):
            return slots.attend_unturned(number, facing, states[:, both:], rope)
        if rope is not None:
            cos, sin = rope
            # Two products and a sum, each rounded by itself: a fused multiply-add would be one only where it is
            # vectorised.
            facing = (facing * cos).add_(facing.roll(dim // 2, -1).mul_(sin))
        return slots.attend(number, facing[:, :heads], facing[:, heads:], states[:, both:]).to(
            self.dtype
        )

    def _head_norm(self, states: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """States [n, heads, head_dim], normalised by head or, where the norm is as wide as all of them, together."""
        wide = states if len(norm) == states.shape[-1] else states.flatten(1)
        return self.normalise(wide, norm).view(states.shape)


def bits_of(layer: torch.nn.Module) -> set[int]:
    """Bits of a layer's quantised matrices."""
    weights = (getattr(module, "weight", None) for module in layer.modules())
    return {weight.bits for weight in weights if isinstance(weight, QuantisedMatrix)}


def described(model: PreTrainedModel | Decoder) -> tuple[Forward, dict[str, Any]]:
    """(its family's forward, its configuration)."""
    config = model.config
    settings = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    name = type(model).__name__ if hasattr(config, "to_dict") else settings["architectures"][0]
    forward = forward_of(name, settings)
    assert forward is not None, name
    return forward, settings


def split_fused(model: PreTrainedModel | Decoder, forward: Forward) -> None:
    """Replace matrices that a checkpoint has as one by their parts, which stay views of it. Does nothing twice."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = dimensions({**vars(config), "head_dim": width})
    for layer in model.model.layers if forward.fused else ():
        for name, parts in forward.fused.items():
            above = layer.get_submodule(name.rpartition(".")[0])
            if (fused := getattr(above, name.rpartition(".")[2], None)) is None:
                continue
            rows = [size[MATRICES[part][0]] for part in parts]
            for number, part in enumerate(parts):
                some = slice(sum(rows[:number]), sum(rows[: number + 1]))
                linear = Linear(1, 1, bias=False, device="meta")
                set_weight(linear, _changed(fused.weight, itemgetter(some)))
                above.add_module(part.rpartition(".")[2], linear)
            delattr(above, name.rpartition(".")[2])


def _changed(weight: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    """The weights with their rows cut, or in another order."""
    return (
        weight.changed(change) if isinstance(weight, QuantisedMatrix) else change(weight.detach())
    )


def set_weight(module: torch.nn.Module, weight: Weights) -> None:
    """Give a module its weight, which a torch module takes only as a parameter."""
    if isinstance(weight, QuantisedMatrix):
        module._parameters.pop("weight", None)
        module.__dict__["weight"] = weight
    else:
        module.weight = Parameter(weight, requires_grad=False)


def pair_up(model: PreTrainedModel | Decoder, forward: Forward, count: int, width: int) -> None:
    """Put the numbers of queries and keys in the order in which the halves of a head are rotated together.

    Scores are the same in any order.

    Args:
        count: of a head's `width` numbers are rotated.
    """
    step = (2, 1) if forward.rotates == "pairs" else (1, count // 2)
    first = [step[0] * number for number in range(count // 2)]
    rest, middle = [*range(count, width)], (width - count) // 2
    order = [*first, *rest[:middle], *(number + step[1] for number in first), *rest[middle:]]

    def moved(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, width))[:, order].flatten(0, 1)

    for layer in model.model.layers if order != [*range(width)] else ():
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            set_weight(linear, _changed(linear.weight, moved))
            if linear.bias is not None:
                linear.bias = Parameter(moved(linear.bias.detach()), requires_grad=False)
