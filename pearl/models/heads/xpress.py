"""XPress: a block drafter whose refiner makes each token of a block depend on the tokens before it.

It is a DFlash head with a refiner, which adds a bias to the logits of each row.  Let h be a row's state
after the last norm, g the mean of h over the block, and e the embedding of the token before the row's:

    a = in_proj [down_h h, down_g g, e]
    x = a + sum over rows j up to this one of mix[row, j] * a_j
    bias = readout (x + mlp_down (silu (mlp_gate x) * mlp_up x))

The trainer and the authors compute all rows at once, in several passes (`num_jacobi_passes`).  Each
pass reads the tokens that the pass before has drawn, so the first k rows are final after pass k.
Here the rows are computed one after the other.  This gives the same tokens as if there were as many
passes as rows, and multiplies each row by the largest matrix, `readout`, only once.

Source: speculators 0.9.0.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from pearl.models.families import Config, Shapes
from pearl.models.forward.linear_layers import Rounding
from pearl.models.heads.dflash import BlockSettings, DFlashHead, TextEnd, checked, target_layers
from pearl.models.heads.head import Block, HeadTarget, Tensors

__all__ = ["make", "target_layers"]

_REFINER = "refiner_head."
_READOUT = f"{_REFINER}readout.weight"
_RANK = 256  # if config.json does not say
_MLP_RATIO = 2


def refiner_shapes(config: Config, hidden: int, vocab_size: int, num_logits: int) -> Shapes:
    """Return the shapes of the refiner's tensors.

    Args:
        vocab_size: number of the target's tokens.
        num_logits: number of tokens in the head's vocabulary.
    """
    size = int(config["block_size"])
    rank = int(config.get("xpress_rank", _RANK))
    inner = rank * int(config.get("xpress_mlp_ratio", _MLP_RATIO))
    shapes: Shapes = {
        "token_embed.weight": (vocab_size, rank),
        "down_h.weight": (rank, hidden),
        "down_g.weight": (rank, hidden),
        "in_proj.weight": (rank, 3 * rank),
        "mix_l": (rank, size, size),
        "mlp_gate.weight": (inner, rank),
        "mlp_up.weight": (inner, rank),
        "mlp_down.weight": (rank, inner),
        "readout.weight": (num_logits, rank),
    }
    return {_REFINER + name: shape for name, shape in shapes.items()}


def make(
    config: Config,
    tensors: Tensors,
    target: HeadTarget,
    rounding: Rounding,
) -> XPressHead:
    """See `HeadKind`."""
    settings = BlockSettings.of(config)
    hidden = int(settings.layer["hidden_size"])
    num_logits = len(tensors.get("lm_head.weight", range(target.vocab_size)))
    shapes = refiner_shapes(config, hidden, target.vocab_size, num_logits)
    weights = checked(settings, tensors, target, shapes)
    return XPressHead(settings, weights, target, rounding)


class XPressHead(DFlashHead):
    """See `DFlashHead`. Rows are drawn one after the other, because each depends on the tokens before."""

    def __init__(
        self,
        settings: BlockSettings,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        super().__init__(settings, tensors, target, rounding)
        self._refiner: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith(_REFINER) and name != _READOUT:
                self._refiner[name.removeprefix(_REFINER)] = tensor.to(self.dtype)
        self._readout = self._matrix(tensors[_READOUT])

    def add_levels(self, block: Block, states: torch.Tensor, end: TextEnd) -> None:
        """See `DFlashHead.add_levels`."""
        first = self._settings.first
        all_logits = self.logits(states)
        state_inputs = self._of_states(states)
        inputs: list[torch.Tensor] = []  # of each row so far [rank]
        token = end.before if first else end.anchor
        for row, logits in enumerate(all_logits):
            embedded = self._refiner["token_embed.weight"][token]
            inputs.append(self._project("in_proj", torch.cat((state_inputs[row], embedded))))
            if row < first:
                token = end.anchor
                continue
            token = block.add(logits + self._bias(torch.stack(inputs)))
            if not block.wants_more:
                return

    def _of_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return the part of each row's input that depends on no token [size, 2 * rank]."""
        mean = states.mean(0, keepdim=True).expand_as(states)
        return torch.cat((self._project("down_h", states), self._project("down_g", mean)), -1)

    def _bias(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the bias of the last row's logits [len(ids)], float32.

        Args:
            inputs: [rows, rank], the value `a` of each of the block's first rows.
        """
        count = len(inputs)
        mix = self._refiner["mix_l"][:, count - 1, :count].T
        x = inputs[-1] + (mix * inputs).sum(0)
        gate = silu(self._project("mlp_gate", x))
        x = x + self._project("mlp_down", gate * self._project("mlp_up", x))
        (bias,) = self._readout(x[None])
        return bias.float()

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._refiner[f"{name}.weight"])
