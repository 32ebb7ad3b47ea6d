"""DSpark: a block drafter whose tokens depend on each other, and that predicts their acceptance.

It is a DFlash head with two small additions.  The "Markov head" adds a bias to the logits of each
row, which depends on the token before.  The "confidence head" predicts the probability that the
target accepts the row's token.

The Markov head has two matrices with a row for each token, w1 and w2.  Let h be the state of a block's
row, and e the row of w1 for the token before.  The bias is w2 x, and x depends on the kind of head:

- vanilla: x = e
- gated: x = sigmoid(gate_proj [h, e]) * e
- rnn: x = tanh(output), where (gate, candidate, output) = joint_proj [memory, e, h].  The next
  row's memory is sigmoid(gate) * memory + (1 - sigmoid(gate)) * tanh(candidate); the first row's
  is zero

Source: speculators 0.9.0; specforge 0.2.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from pearl.models.families import Config, Shapes
from pearl.models.forward.linear_layers import Rounding
from pearl.models.heads.dflash import (
    BlockSettings,
    DFlashHead,
    TextEnd,
    checked,
    is_of_speculators,
    options_of,
    target_layers,
)
from pearl.models.heads.head import Block, HeadTarget, Tensors

__all__ = ["make", "target_layers"]

_W1 = "markov_head.markov_w1.weight"
_W2 = "markov_head.markov_w2.weight"
_CONFIDENCE = "confidence_head.proj"
_COMPUTED = ("enable_confidence_head", "confidence_head_with_markov")
_NESTED = "logit_head."  # under this name, SpecForge's early checkpoints have the two heads
_GATE = "markov_head.gate_proj"
_JOINT = "markov_head.joint_proj"


class DSparkSettings(NamedTuple):
    """The settings of the Markov head and of the confidence head.

    Attributes:
        rank: width of the Markov head's tables; 0: there is no Markov head.
        kind: how the Markov head computes its bias: "vanilla", "gated" or "rnn".
        has_confidence: whether there is a confidence head.
        reads_token: whether the confidence head also reads the token before.
    """

    rank: int
    kind: str
    has_confidence: bool
    reads_token: bool

    @staticmethod
    def of(config: Config) -> DSparkSettings:
        """Read config.json. Raises `ValueError` for an unknown kind of Markov head.

        A setting that config.json leaves out gets the default of the trainer that wrote the file.
        """
        options = options_of(config)
        if is_of_speculators(config):
            rank = 256
            has_confidence = True
        else:
            rank = 0
            has_confidence = bool(options.get("confidence_head_alpha"))
        settings = DSparkSettings(
            rank=int(options.get("markov_rank", rank) or 0),
            kind=str(options.get("markov_head_type", "vanilla")),
            has_confidence=bool(options.get("enable_confidence_head", has_confidence)),
            reads_token=bool(options.get("confidence_head_with_markov", is_of_speculators(config))),
        )
        if settings.kind not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"its markov_head_type {settings.kind!r} is not computed")
        return settings

    def shapes(self, hidden: int, target: HeadTarget, known: int) -> Shapes:
        """Return the shapes of the tensors of the Markov head and of the confidence head.

        Args:
            known: number of tokens in the head's vocabulary.
        """
        rank = self.rank
        shapes: Shapes = {}
        if rank:
            shapes[_W1] = (target.vocab_size, rank)
            shapes[_W2] = (known, rank)
        if rank and self.kind == "gated":
            shapes[f"{_GATE}.weight"] = (rank, hidden + rank)
            shapes[f"{_GATE}.bias"] = (rank,)
        if rank and self.kind == "rnn":
            shapes[f"{_JOINT}.weight"] = (3 * rank, hidden + 2 * rank)
            shapes[f"{_JOINT}.bias"] = (3 * rank,)
        if self.has_confidence:
            inputs = hidden
            if self.reads_token:
                inputs += rank
            shapes[f"{_CONFIDENCE}.weight"] = (1, inputs)
            shapes[f"{_CONFIDENCE}.bias"] = (1,)
        return shapes


def make(
    config: Config,
    tensors: Tensors,
    target: HeadTarget,
    rounding: Rounding,
) -> DSparkHead:
    """See `HeadKind`."""
    settings = BlockSettings.of(config, _COMPUTED, samples_from_anchor=True)
    dspark = DSparkSettings.of(config)
    tensors = {name.removeprefix(_NESTED): tensor for name, tensor in tensors.items()}
    hidden = int(settings.layer["hidden_size"])
    known = len(tensors.get("lm_head.weight", range(target.vocab_size)))
    weights = checked(settings, tensors, target, dspark.shapes(hidden, target, known))
    return DSparkHead(settings, dspark, weights, target, rounding)


class DSparkHead(DFlashHead):
    """See `DFlashHead`. Rows are drawn one after the other, because each depends on the token before."""

    def __init__(
        self,
        settings: BlockSettings,
        dspark: DSparkSettings,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        super().__init__(settings, tensors, target, rounding)
        self._dspark = dspark
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith(("markov_head.", "confidence_head.")) and name != _W2:
                self._tensors[name] = tensor.to(self.dtype)
        if dspark.rank:
            self._bias = self._matrix(tensors[_W2])

    def add_levels(self, block: Block, states: torch.Tensor, end: TextEnd) -> None:
        """See `DFlashHead.add_levels`."""
        all_logits = self.logits(states)
        memory = states.new_zeros(self._dspark.rank)
        token = end.anchor
        for row, state in enumerate(states):
            embedded = self._embedded(token)
            bias, memory = self._markov(embedded, state, memory)
            if row < self._settings.first:
                continue
            logits = all_logits[row] + bias
            token = block.add(logits, self._confidence(state, embedded))
            if not block.wants_more:
                return

    def _embedded(self, token: int) -> torch.Tensor:
        """Return the row of a token in w1 [rank]; it is empty if there is no Markov head."""
        if not self._dspark.rank:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return self._tensors[_W1][token]

    def _markov(
        self, embedded: torch.Tensor, state: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bias of a row's logits [len(ids)], and the memory [rank] for the next row.

        If there is no Markov head, the bias is zero.
        """
        dspark = self._dspark
        if not dspark.rank:
            return state.new_zeros(()), memory
        x = embedded
        if dspark.kind == "gated":
            gate = self._project(_GATE, state, embedded)
            x = gate.sigmoid() * embedded
        elif dspark.kind == "rnn":
            joint = self._project(_JOINT, memory, embedded, state)
            gate, candidate, output = joint.chunk(3)
            gate = gate.sigmoid()
            memory = gate * memory + (1 - gate) * candidate.tanh()
            x = output.tanh()
        (bias,) = self._bias(x[None])
        return bias.float(), memory

    def _project(self, name: str, *inputs: torch.Tensor) -> torch.Tensor:
        weight = self._tensors[f"{name}.weight"]
        return linear(torch.cat(inputs), weight, self._tensors[f"{name}.bias"])

    def _confidence(self, state: torch.Tensor, embedded: torch.Tensor) -> float | None:
        """Return the predicted probability that the target accepts a row's token; None if it is not predicted."""
        dspark = self._dspark
        if not dspark.has_confidence:
            return None
        inputs = [state]
        if dspark.reads_token:
            inputs.append(embedded)
        return float(self._project(_CONFIDENCE, *inputs).float().sigmoid())
