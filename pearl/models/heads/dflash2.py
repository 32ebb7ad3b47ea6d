"""DFlash 2: a block drafter with convolutions within the block, and with a selector of candidates.

It is a DFlash head with two changes.

First, each attention and each MLP has a convolution before it and another after it.  A convolution
sums a row of the block and the rows before it, with a coefficient for each distance and channel.
The coefficient is a weight plus a number that is computed from the row; all channels of a group
have the same number.

Second, a selector chooses among each row's likeliest tokens, the candidates.  It adds a score to
each candidate's logit: the dot product of successor[candidate] with predecessor[token before] *
(hidden_projection h), where h is the row's state.  Only candidates can be drawn.

Source: "DFlash 2", Z Lab 2026; speculators 0.9.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad

from pearl.models.families import Config, Shapes
from pearl.models.forward.layers import DecoderLayers
from pearl.models.forward.linear_layers import Rounding, gated
from pearl.models.forward.slot_attention import BlockAttention, NativeAttention
from pearl.models.heads.dflash import BlockSettings, DFlashHead, TextEnd, checked, target_layers
from pearl.models.heads.head import Block, HeadTarget, Tensors

__all__ = ["make", "target_layers"]

_PREDECESSORS = "candidate_selector.predecessor_codebook"
_SUCCESSORS = "candidate_selector.successor_codebook"
_PROJECTION = "candidate_selector.hidden_projection.weight"


class DFlash2Settings(NamedTuple):
    """The settings of the convolutions and of the selector.

    Attributes:
        taps: how many rows a convolution sums: the row itself and those before it.
        group: number of channels that share the computed part of a coefficient.
        rank: width of the selector's tables.
        candidates: how many tokens of each row the selector scores.
    """

    taps: int
    group: int
    rank: int
    candidates: int

    @staticmethod
    def of(config: Config, hidden: int) -> DFlash2Settings:
        """Read config.json. Raises `ValueError` for sizes that do not fit each other."""
        settings = DFlash2Settings(
            taps=int(config["conv_kernel_size"]),
            group=int(config["conv_group_size"]),
            rank=int(config["selector_rank"]),
            candidates=int(config["selector_top_k"]),
        )
        if hidden % settings.group:
            raise ValueError(
                f"its conv_group_size {settings.group} does not divide its hidden_size {hidden}"
            )
        return settings

    def shapes(self, layers: int, hidden: int, vocab_size: int) -> Shapes:
        """Return the shapes of the tensors that the head has in addition to a DFlash head's."""
        shapes: Shapes = {
            _PREDECESSORS: (vocab_size, self.rank),
            _SUCCESSORS: (vocab_size, self.rank),
            _PROJECTION: (self.rank, hidden),
        }
        for number in range(layers):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{number}.{part}"
                shapes[f"{name}.base_kernel"] = (2, self.taps, hidden)
                outputs = 2 * self.taps * (hidden // self.group)
                shapes[f"{name}.kernel_projection.weight"] = (outputs, hidden)
        return shapes


class Convolutions(NamedTuple):
    """The two convolutions around attention or around an MLP.

    Attributes:
        weights: [2, taps, channels]; index 0 is the convolution before, 1 that after.
        projection: [2 * taps * groups, channels], computes the numbers that are added to the weights.
        group: number of channels in a group.
    """

    weights: torch.Tensor
    projection: torch.Tensor
    group: int

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """Return the coefficients [2, taps, n, channels] for rows x [n, channels]."""
        taps = self.weights.shape[1]
        added = linear(x, self.projection).view(len(x), 2, taps, -1)
        added = added.permute(1, 2, 0, 3).repeat_interleave(self.group, -1)
        return self.weights[:, :, None] + added


def convolved(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return y [n, channels], where y[i] is the sum over t of coefficients[t, i] * x[i - t].

    Args:
        x: [n, channels]; rows before the first count as zero.
        coefficients: [taps, n, channels].
    """
    total = torch.zeros_like(x)
    for tap, coefficient in enumerate(coefficients):
        shifted = pad(x, (0, 0, tap, 0))[: len(x)]
        total = total + shifted * coefficient
    return total


def make(
    config: Config,
    tensors: Tensors,
    target: HeadTarget,
    rounding: Rounding,
) -> DFlash2Head:
    """See `HeadKind`."""
    settings = BlockSettings.of(config)
    hidden = int(settings.layer["hidden_size"])
    dflash2 = DFlash2Settings.of(config, hidden)
    if "d2t" in tensors:
        raise ValueError("it has a vocabulary of its own (d2t), which such heads do not have")
    shapes = dflash2.shapes(settings.layer["num_hidden_layers"], hidden, target.vocab_size)
    weights = checked(settings, tensors, target, shapes)
    return DFlash2Head(settings, dflash2, weights, target, rounding)


class DFlash2Head(DFlashHead):
    """See `DFlashHead`."""

    def __init__(
        self,
        settings: BlockSettings,
        dflash2: DFlash2Settings,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        super().__init__(settings, tensors, target, rounding)
        self._dflash2 = dflash2
        self._around_attention: list[Convolutions] = []
        self._around_mlp: list[Convolutions] = []
        for number in range(len(self._layers)):
            for part, convolutions in (
                ("attention_conv", self._around_attention),
                ("mlp_conv", self._around_mlp),
            ):
                name = f"layers.{number}.{part}"
                weights = tensors[f"{name}.base_kernel"].to(self.dtype)
                projection = tensors[f"{name}.kernel_projection.weight"].to(self.dtype)
                convolutions.append(Convolutions(weights, projection, dflash2.group))
        self._predecessors = tensors[_PREDECESSORS].to(self.dtype)
        self._successors = tensors[_SUCCESSORS].to(self.dtype)
        self._projection = tensors[_PROJECTION].to(self.dtype)

    def layer_states(
        self, number: int, hidden: torch.Tensor, attends: NativeAttention | BlockAttention
    ) -> torch.Tensor:
        """See `DFlashHead.layer_states`."""
        layers: DecoderLayers = self._layers
        layer = layers.layers[number]
        x = layers.normalise(hidden, layer.attention_norm)
        before, after = self._around_attention[number].coefficients(x)
        x = layers.attend(number, convolved(x, before), self._ropes, attends)
        hidden = hidden + convolved(layer.out(x), after)
        x = layers.normalise(hidden, layer.mlp_norm)
        before, after = self._around_mlp[number].coefficients(x)
        x = gated(layer.gate_up(convolved(x, before)), layers.gate)
        return hidden + convolved(layer.down(x), after)

    def add_levels(self, block: Block, states: torch.Tensor, end: TextEnd) -> None:
        """See `DFlashHead.add_levels`."""
        states = states[self._settings.first :]
        projected = linear(states, self._projection)
        token = end.anchor
        for logits, row in zip(self.logits(states), projected, strict=True):
            top_logits, candidates = logits.topk(self._dflash2.candidates)
            context = self._predecessors[token] * row
            scores = top_logits + (self._successors[candidates] @ context).float()
            selected = torch.full_like(logits, -torch.inf)
            selected[candidates] = scores
            token = block.add(selected)
            if not block.wants_more:
                return
