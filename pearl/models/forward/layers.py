"""The core of our own forward pass: computes a model's decoder layers, from token ids to logits.

The matrices of query, key and value are joined into one, and so are those of gate and up; each is
packed for the device. This module must not know feeds and slots, so the caller provides the
attention (see `slot_attention`).
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
from pearl.models.forward.quantised import QuantisedMatrix, StoredMatrix, Weights
from pearl.models.forward.slot_attention import NativeAttention, Rope, SlotAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.forward.decoder import Decoder


@dataclass(frozen=True)
class Scales:
    """A model's multipliers, and its caps of attention scores and of logits.

    A cap of 0 means that there is none. `residual` multiplies the outputs of attention and of the
    MLP before they are added to the hidden state.
    """

    embedding: float
    attention: float
    residual: float
    logits: float
    attention_cap: float = 0.0
    logits_cap: float = 0.0

    @staticmethod
    def of(
        forward: Forward,
        config: Mapping[str, Any],
        dim: int,
        dtype: torch.dtype,
    ) -> Scales:
        attention = (config.get("query_pre_attn_scalar") or dim) ** -0.5
        if forward.has_multipliers:
            return Scales(
                embedding=config.get("embedding_multiplier", 1.0),
                attention=config.get("attention_multiplier", 1.0),
                residual=config.get("residual_multiplier", 1.0),
                logits=1 / config.get("logits_scaling", 1.0),
            )
        embedding = 1.0
        if forward.scales_embedding:
            embedding = torch.tensor(config["hidden_size"] ** 0.5).to(dtype).item()
        attention_cap, logits_cap = (float(config.get(name) or 0.0) for name in CAPS)
        return Scales(
            embedding=embedding,
            attention=attention,
            residual=1.0,
            logits=1.0,
            attention_cap=attention_cap,
            logits_cap=logits_cap,
        )


@dataclass(frozen=True)
class LayerSpec:
    """How a model's layers are computed, as its family and its configuration say.

    Attributes:
        rotated: how many of a head's numbers are rotated.
        gate: name of the gate's activation, as `linear_layers.gated` takes it.
        windows: each layer's attention window; 0 if it is unlimited, or at least as long as the
            context.
        ropes: the name of each layer's rope; see `layer_kinds`.
    """

    forward: Forward
    settings: Mapping[str, Any]
    vocab_size: int
    heads: Heads
    rotated: int
    eps: float
    scales: Scales
    gate: str
    windows: tuple[int, ...]
    ropes: tuple[str | None, ...]

    @staticmethod
    def of(
        forward: Forward,
        settings: Mapping[str, Any],
        dtype: torch.dtype,
        context: int,
    ) -> LayerSpec:
        heads = int(settings["num_attention_heads"])
        width = int(settings.get("head_dim") or settings["hidden_size"] // heads)
        windows = []
        ropes = []
        for window, rope in layer_kinds(forward, settings):
            windows.append(window if window < context else 0)
            ropes.append(rope)
        return LayerSpec(
            forward=forward,
            settings=settings,
            vocab_size=int(settings["vocab_size"]),
            heads=Heads(heads, int(settings["num_key_value_heads"]), width),
            rotated=rotated(forward, settings, width),
            eps=float(settings["rms_norm_eps"]),
            scales=Scales.of(forward, settings, width, dtype),
            gate=HEAD_ACTIVATIONS[activation_of(settings) or ""],
            windows=tuple(windows),
            ropes=tuple(ropes),
        )


class Layer:
    """Holds a decoder layer's matrices and the weights of its norms. A norm that the layer lacks is None.

    Args:
        module: a layer of transformers, or a module with the same attributes.
        rope: the name of the layer's rope; see `layer_kinds`.
        lay_out: makes a matrix of linear layers; see `linear_layers.matrix`.
        is_native: see `DecoderLayers`.
        dtype: the dtype of rows.

    Attributes:
        experts: the layer's experts; None if it has none.
        gate_up, down: the matrices of the MLP; in a layer with experts, those of the first expert.
    """

    def __init__(
        self,
        module: Any,
        rope: str | None,
        spec: LayerSpec,
        lay_out: Callable[..., Matrix],
        is_native: bool,
        dtype: torch.dtype,
    ) -> None:
        attention = module.self_attn
        mlp = module.mlp

        def norm(parent: Any, name: str) -> torch.Tensor | None:
            if not name or not hasattr(parent, name):
                return None
            return norm_weights(getattr(parent, name), spec.forward, dtype)

        self.rope = rope
        self.experts: Experts | None = None
        if hasattr(mlp, "experts"):
            self.experts = Experts(mlp, spec.settings, lay_out, kernels=not is_native)
        before_attention, after_attention, before_mlp, after_mlp = spec.forward.norms
        self.attention_norm = norm(module, before_attention)
        self.qkv = lay_out(attention.q_proj, attention.k_proj, attention.v_proj)
        self.q_norm = norm(attention, "q_norm")
        self.k_norm = norm(attention, "k_norm")
        self.out = lay_out(attention.o_proj)
        self.after_attention = norm(module, after_attention)
        self.mlp_norm = norm(module, before_mlp)
        if self.experts is None:
            self.gate_up = lay_out(mlp.gate_proj, mlp.up_proj)
            self.down = lay_out(mlp.down_proj)
        else:
            self.gate_up, self.down = self.experts.each[0]
        self.after_mlp = norm(module, after_mlp)


def tapped(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 head reads by default, in a model with `layers` layers."""
    numbers = (2, layers // 2, layers - 3)
    return tuple(min(max(number, 0), layers - 1) for number in numbers)


def norm_weights(
    norm: Any,
    forward: Forward,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a norm's weights, in the dtype that their product with rows of `dtype` has in torch.

    If the family has a `norm_shift`, the shift is added, and the result is float32.
    """
    weight: torch.Tensor = norm.weight.detach()
    weight = weight.to(torch.promote_types(weight.dtype, dtype))
    if forward.norm_shift is None:
        return weight
    return weight.float() + forward.norm_shift


class DecoderLayers:
    """Computes the decoder layers of a model and its logits. It takes the weights away from `model`.

    Attributes:
        weights: the dtype of the weights or, if matrices are quantised, their bits: "4 and 6 bits".
        embedding: [vocab, hidden].
        norm: the weights of the last norm.
        taps: numbers of the layers whose inputs are kept as `features`, in the order of `features`.
            If the model has N layers, the number N stands for the input of the last norm.
        features: [n, len(taps) * hidden], the states that the last forward kept; None if `taps` is
            empty.
        scoring: how positions are scored, with a window for each layer.
        residual_dtype: the dtype of the states between layers.
        in_one_call: in_one_call(attention, states, start, end) applies the layers from `start` to
            `end` - 1 to the states, in place, for a `NativeAttention`. None: layers are computed
            one by one.

    Args:
        context: most positions of a text; attention windows of at least this length are left out.
        rounding: see `linear_layers.matrix`.
        is_native: whether our C computes the layers. Otherwise matrices are laid out for our GPU
            kernels, and queries and keys are rotated in the dtype of rows.
        rounds_rows: see `linear_layers.matrix`.
        family: (forward, configuration) of `model`; None: as `described` returns them.
        output: the matrix that computes logits; None: the output matrix of `model`.
        progress: called with the number of layers that are laid out.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        context: int,
        rounding: Rounding,
        is_native: bool,
        rounds_rows: bool = False,
        taps: Sequence[int] = (),
        family: tuple[Forward, dict[str, Any]] | None = None,
        output: Matrix | None = None,
        progress: Progress = silent,
    ) -> None:
        inner = model.model
        forward, settings = family or described(model)
        spec = LayerSpec.of(forward, settings, model.dtype, context)
        self.heads = spec.heads
        self.vocab_size = spec.vocab_size
        self.eps = spec.eps
        self.scales = spec.scales
        self.gate = spec.gate
        self._rotated = spec.rotated
        self.embedding = inner.embed_tokens.weight
        self.dtype = model.dtype
        self._cache_dtype = model.dtype
        if is_native:
            self.dtype = dtype_of_rows(model.dtype)
            self._cache_dtype = torch.float32
        make_matrix = partial(
            matrix,
            dtype=self.dtype,
            is_native=is_native,
            rounding=rounding,
            rounds_rows=rounds_rows,
        )
        self.scoring = Scoring(
            windows=spec.windows,
            scale=spec.scales.attention,
            cap=spec.scales.attention_cap,
            sinks=self._sinks(model, spec),
        )
        self.layers: list[Layer] = []
        bits: set[int] = set()

        def lay_out(*linears: Any, **options: Any) -> Matrix:
            bits.update(bits_of(linears))
            return make_matrix(*linears, **options)

        count = Count(progress, "layer", len(inner.layers))
        for layer, rope in zip(inner.layers, spec.ropes, strict=True):
            # Reading `weight` makes a quantised matrix, so no layer is touched before its turn.
            split_fused(layer, forward, settings)
            pair_up(layer, spec)
            self.layers.append(Layer(layer, rope, spec, lay_out, is_native, self.dtype))
            native.give_back()
            count.advance()
        self.weights, self.residual_dtype = self._precision(model.dtype, rounding, bits)
        self.norm = norm_weights(inner.norm, forward, self.dtype)
        self.taps = tuple(taps)
        self.features: torch.Tensor | None = None
        self.in_one_call: Callable[[NativeAttention, torch.Tensor, int, int], None] | None = None
        self.head = output or make_matrix(model.lm_head, wide=True)
        native.give_back()

    def _precision(
        self,
        dtype: torch.dtype,
        rounding: Rounding,
        bits: set[int],
    ) -> tuple[str, torch.dtype]:
        """Return the attribute `weights`, and the dtype of the states between layers.

        Args:
            dtype: the dtype of the model.
            bits: the bits of the layers' quantised matrices.
        """
        if rounding:
            bits = {int(rounding[-1])}
        if not bits:
            return str(dtype).removeprefix("torch."), self.dtype
        # Quantised matrices add an error to each result. Keeping the states between layers in
        # float32 makes up for half of that error.
        return f"{' and '.join(map(str, sorted(bits)))} bits", torch.float32

    def _sinks(
        self,
        model: PreTrainedModel | Decoder,
        spec: LayerSpec,
    ) -> tuple[torch.Tensor, ...]:
        if not spec.forward.has_sinks:
            return ()
        sinks = []
        for layer in model.model.layers:
            sinks.append(layer.self_attn.sinks.detach().to(self._cache_dtype))
        return tuple(sinks)

    @property
    def rounds_rows(self) -> bool:
        """Whether some of the products round their rows to 8 bits."""
        for layer in self.layers:
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if getattr(product, "rounds_rows", False):
                    return True
        return False

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def angles(
        self,
        rotary: Any,
        positions: torch.Tensor,
    ) -> dict[str, Rope]:
        """Return cosines and sines of `positions` [n] for each of the layers' ropes, by its name.

        They are for the formula rotated(x) = x * cos + roll(x) * sin, where roll(x) swaps the two
        halves of x. The first half of the sines is negated, because a rotation subtracts there.

        Args:
            rotary: the model's rope module, such as `checkpoints.rope.RotaryEmbedding`.
        """
        half = self._rotated // 2
        unrotated = self.heads.dim // 2 - half
        like = torch.empty(0, dtype=self._cache_dtype, device=positions.device)
        ropes = {}
        for layer in self.layers:
            name = layer.rope
            if name is None or name in ropes:
                continue
            arguments = [name] if name else []
            tables = torch.cat(rotary(like, positions[None], *arguments))
            # Tables of gpt-oss have each angle once, those of other models twice.
            cos, sin = tables[:, :, None, :half].to(self._cache_dtype)
            cos = pad(cos, (0, unrotated), value=1.0)
            sin = pad(sin, (0, unrotated))
            both_cos = torch.cat((cos, cos), -1)
            both_sin = torch.cat((-sin, sin), -1)
            ropes[name] = (both_cos, both_sin)
        return ropes

    def hidden_states(
        self,
        ids: torch.Tensor,
        ropes: Mapping[str, Rope],
        attends: NativeAttention | SlotAttention,
    ) -> torch.Tensor:
        """Compute all layers for the tokens `ids` [n]; return the last layer's states [n, hidden].

        Args:
            ropes: cosines and sines of all positions, as `angles` returns them.
            attends: computes the attention of these tokens.
        """
        hidden = self.embedding[ids]
        if self.scales.embedding != 1:
            hidden = hidden * self.scales.embedding
        hidden = hidden.to(self.residual_dtype)
        tapped = {}
        if isinstance(attends, NativeAttention) and self.in_one_call is not None:
            limits = {0, len(self.layers)}
            limits.update(self.taps)
            for start, end in itertools.pairwise(sorted(limits)):
                if start in self.taps:
                    tapped[start] = hidden.to(self.dtype, copy=True)
                self.in_one_call(attends, hidden, start, end)
            return self._finished(hidden, tapped)
        for number, layer in enumerate(self.layers):
            if number in self.taps:
                tapped[number] = hidden.to(self.dtype, copy=True)
            x = self.normalise(hidden, layer.attention_norm)
            hidden = self.layer_states(number, hidden, x, ropes, attends)
        return self._finished(hidden, tapped)

    def _finished(
        self,
        hidden: torch.Tensor,
        tapped: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        if len(self.layers) in self.taps:
            tapped[len(self.layers)] = hidden.to(self.dtype, copy=True)
        self.features = None
        if self.taps:
            self.features = torch.cat([tapped[number] for number in self.taps], -1)
        return hidden

    def layer_states(
        self,
        number: int,
        hidden: torch.Tensor,
        x: torch.Tensor,
        ropes: Mapping[str, Rope],
        attends: NativeAttention | SlotAttention,
    ) -> torch.Tensor:
        """Return the states [n, hidden] after one layer.

        Args:
            hidden: the states before the layer, to which the layer adds its outputs.
            x: the input of the layer's qkv matrix; as a rule `hidden` after the layer's norm.
        """
        layer = self.layers[number]
        attention_output = self.attend(number, x, ropes, attends)
        hidden = self._add(hidden, layer.out, attention_output, layer.after_attention)
        mlp_input = self.normalise(hidden, layer.mlp_norm)
        if layer.experts is not None:
            return hidden + layer.experts(mlp_input)
        act = gated(layer.gate_up(mlp_input), self.gate)
        return self._add(hidden, layer.down, act, layer.after_mlp)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits: [n, hidden] -> [n, vocab]."""
        logits = self.head(self.normalise(hidden, self.norm))
        if self.scales.logits != 1:
            logits = logits * self.scales.logits
        if self.scales.logits_cap:
            for row in logits:  # one by one, so that torch cuts all rows into vectors alike
                cap_scores(row, self.scales.logits_cap)
        return logits

    def normalise(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the RMS norm of x, or x itself if `norm` is None, in the dtype of rows."""
        if norm is None:
            return x.to(self.dtype)
        return normalise(x, norm, self.eps, self.dtype)

    def _add(
        self,
        hidden: torch.Tensor,
        product: Matrix,
        x: torch.Tensor,
        norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return hidden + multiplier * normalise(product(x)).

        The multiplier is `residual` of the model's `Scales`. If `norm` is None, the product is not
        normalised.
        """
        multiplier = self.scales.residual
        if norm is None and multiplier == 1:
            return product(x, hidden)
        update = product(x)
        if norm is not None:
            update = self.normalise(update, norm)
        if multiplier != 1:
            update = update * multiplier
        return hidden + update

    def attend(
        self,
        number: int,
        x: torch.Tensor,
        ropes: Mapping[str, Rope],
        attends: NativeAttention | SlotAttention,
    ) -> torch.Tensor:
        """Return the attention output of each row in a layer, [n, heads * head_dim]."""
        layer = self.layers[number]
        rope = None if layer.rope is None else ropes[layer.rope]
        if isinstance(attends, NativeAttention):
            states = layer.qkv(x).view(x.shape[0], -1, self.heads.dim)
            return attends.attend_states(number, states, (layer.q_norm, layer.k_norm), rope)
        queries, keys, values = self.queries_keys_values(layer, x)
        return attends.attend(number, torch.cat([queries, keys], 1), values, rope)

    def queries_keys_values(
        self,
        layer: Layer,
        x: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each row's queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim].

        Queries and keys are normalised if the layer has norms for them. They are not rotated yet.
        """
        heads = self.heads
        states = layer.qkv(x).view(x.shape[0], -1, heads.dim)
        queries, keys, values = states.split((heads.query, heads.kv, heads.kv), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = self._head_norm(queries, layer.q_norm)
            keys = self._head_norm(keys, layer.k_norm)
        return queries, keys, values

    def _head_norm(
        self,
        states: torch.Tensor,
        norm: torch.Tensor,
    ) -> torch.Tensor:
        """Normalise states [n, heads, head_dim].

        Each head is normalised alone or, if `norm` has weights for all heads, all heads together.
        """
        wide = states if len(norm) == states.shape[-1] else states.flatten(1)
        return self.normalise(wide, norm).view(states.shape)


def bits_of(linears: Sequence[Any]) -> set[int]:
    """Return the numbers of bits that occur among the linear layers that are quantised."""
    bits = set()
    for linear in linears:
        if isinstance(linear.weight, QuantisedMatrix):
            bits.add(linear.weight.bits)
    return bits


def described(model: PreTrainedModel | Decoder) -> tuple[Forward, dict[str, Any]]:
    """Return how our own forward computes a model's family, and the model's configuration."""
    config = model.config
    if hasattr(config, "to_dict"):
        settings = config.to_dict()
        name = type(model).__name__
    else:
        settings = vars(config)
        name = settings["architectures"][0]
    forward = forward_of(name, settings)
    assert forward is not None, name
    return forward, settings


def split_fused(
    layer: torch.nn.Module,
    forward: Forward,
    settings: Mapping[str, Any],
) -> None:
    """Replace each fused matrix of a layer by its parts, which are views of the matrix.

    Phi-3's `qkv_proj`, for example, becomes `q_proj`, `k_proj` and `v_proj`. A second call changes
    nothing.
    """
    if not forward.fused:
        return
    heads = settings["num_attention_heads"]
    width = settings.get("head_dim") or settings["hidden_size"] // heads
    size = dimensions({**settings, "head_dim": width})
    for name, parts in forward.fused.items():
        path, _, attribute = name.rpartition(".")
        module = layer.get_submodule(path)
        fused = getattr(module, attribute, None)
        if fused is None:
            continue
        start = 0
        for part in parts:
            end = start + size[MATRICES[part][0]]
            linear = Linear(1, 1, bias=False, device="meta")
            set_weight(linear, _changed(fused.weight, itemgetter(slice(start, end))))
            module.add_module(part.rpartition(".")[2], linear)
            start = end
        delattr(module, attribute)


def _changed(weight: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    """Return a weight whose rows `change` has cut or reordered."""
    if isinstance(weight, QuantisedMatrix):
        return weight.changed(change)
    return change(weight.detach())


def set_weight(module: torch.nn.Module, weight: Weights | StoredMatrix) -> None:
    """Set a module's weight: a tensor as a parameter, a quantised weight as an attribute."""
    if isinstance(weight, torch.Tensor):
        module.weight = Parameter(weight, requires_grad=False)
    else:
        module._parameters.pop("weight", None)
        module.__dict__["weight"] = weight


def pair_up(layer: Any, spec: LayerSpec) -> None:
    """Reorder the rows of each head in the matrices of a layer's queries and keys.

    After this, a rotation pairs row i of a head with row i + head_dim / 2. Scores do not depend on
    the order, because queries and keys have the same. For example, if all 4 numbers of a head are
    rotated in the pairs (0, 1) and (2, 3), the order becomes 0, 2, 1, 3.
    """
    count = spec.rotated
    width = spec.heads.dim
    stride = 1
    partner = count // 2
    if spec.forward.rotates == "pairs":
        stride = 2
        partner = 1
    lower = [stride * number for number in range(count // 2)]
    upper = [number + partner for number in lower]
    unrotated = list(range(count, width))
    middle = (width - count) // 2
    order = lower + unrotated[:middle] + upper + unrotated[middle:]
    if order == list(range(width)):
        return

    def moved(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, width))[:, order].flatten(0, 1)

    for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
        set_weight(linear, _changed(linear.weight, moved))
        if linear.bias is not None:
            linear.bias = Parameter(moved(linear.bias.detach()), requires_grad=False)
