"""P-EAGLE: an EAGLE-3 head that proposes a block of tokens with one forward.

The row of the text's last token guesses the next token, as in EAGLE-3.  After this row come rows
for mask tokens.  Each of them guesses the token one position further on.  A mask row reads the
embedding of `mask_token_id`, and `mask_hidden` in place of the target's hidden states.  It attends
to the text and to the mask rows before it.  The text's new tokens are computed in the same forward.

A checkpoint has one of two layouts: that of vLLM's speculators, or that of SpecForge, which does
not say which token the mask token is.

Source: "P-EAGLE: Parallel-Drafting EAGLE", 2026; speculators 0.9.0; specforge 0.2.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pearl.models.families import Config
from pearl.models.forward.linear_layers import Rounding
from pearl.models.heads import eagle3
from pearl.models.heads.eagle3 import Eagle3Head, target_layers
from pearl.models.heads.head import Block, HeadTarget, Tensors
from pearl.models.heads.layers import check_shapes

__all__ = ["make", "target_layers"]

_SIZE = 8  # tokens of a block if config.json does not say: both trainers' default
_MASK = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # the last two are vLLM's names


class BlockSettings(NamedTuple):
    """The settings that a P-EAGLE head has in addition to those of EAGLE-3.

    Attributes:
        size: tokens of a block.
        mask_token: the token of the mask rows.
    """

    size: int
    mask_token: int

    @staticmethod
    def of(config: Config) -> BlockSettings:
        """Read config.json. Raises `ValueError` if it does not name the mask token."""
        size = _SIZE
        if "speculators_config" in config:
            size = int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
        for name in _MASK_TOKENS:
            if config.get(name) is not None:
                return BlockSettings(size, int(config[name]))
        raise ValueError(
            "its config.json has no mask_token_id: add the token that the head was trained with "
            "(SpecForge's trainer does not save it)"
        )


def make(
    config: Config,
    tensors: Tensors,
    target: HeadTarget,
    rounding: Rounding,
) -> PeagleHead:
    """See `HeadKind`."""
    settings = BlockSettings.of(config)
    mask = {name: tensor for name, tensor in tensors.items() if name == _MASK}
    eagle_tensors = {name: tensor for name, tensor in tensors.items() if name != _MASK}
    head = eagle3.make(_as_trained(config), eagle_tensors, target, rounding)
    check_shapes(mask, {_MASK: (1, 1, target.features)}, {})
    vocab_size = len(eagle_tensors.get("embed_tokens.weight", target.embedding))
    if settings.mask_token >= vocab_size:
        raise ValueError(
            f"its mask_token_id {settings.mask_token} is not in its vocabulary of {vocab_size} tokens"
        )
    for window in head.windows:
        if 0 < window < settings.size:
            raise ValueError(
                f"its sliding_window {window} is shorter than its block of {settings.size} tokens "
                "(speculative_tokens), which is not computed: lower speculative_tokens"
            )
    return PeagleHead(head, settings, mask[_MASK])


def _as_trained(config: Config) -> Config:
    """Return the settings with which the head was trained.

    SpecForge's trainer ignores the rope scaling that config.json states.  So the scaling is removed
    from the settings of SpecForge's heads.
    """
    if "speculators_model_type" in config:
        return config
    rope: Config = config.get("rope_parameters") or config
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4)}
    return {**config, "rope_parameters": plain, "rope_scaling": None}


class Waiting(NamedTuple):
    """The last tokens that a slot was given, which the next proposal computes together with its mask rows.

    Attributes:
        start: number of tokens in the slot before `tokens`.
        tokens: [n].
        states: [n, hidden], for each token the target's hidden states of the token before it, projected to `hidden`.
    """

    start: int
    tokens: torch.Tensor
    states: torch.Tensor


class PeagleHead:
    """An EAGLE-3 head with the rows of mask tokens; see `Head`.

    Args:
        head: the EAGLE-3 head that computes all rows.
        mask_states: [1, 1, features], read by mask rows in place of the target's hidden states.
    """

    def __init__(
        self, head: Eagle3Head, settings: BlockSettings, mask_states: torch.Tensor
    ) -> None:
        self._head = head
        self.ids = head.ids
        self.lengths = head.lengths
        self.context = head.context
        self.device = head.device
        self.dtype = head.dtype
        self.deepest = settings.size
        count = settings.size - 1
        self._mask_tokens = torch.full((count,), settings.mask_token, device=self.device)
        fused = head.fused(mask_states[0].to(self.device))
        self._mask_states = fused.expand(count, -1)
        self._last: dict[int, Waiting] = {}  # by slot
        self._uncomputed: set[int] = set()  # slots whose last tokens no proposal has computed

    def extend(self, tokens: torch.Tensor, features: torch.Tensor, slot: int) -> None:
        """See `Head.extend`."""
        if slot in self._uncomputed:
            self._compute(slot)
        start = self.lengths[slot]
        self._last[slot] = Waiting(start, tokens, self._head.fused(features))
        self._uncomputed.add(slot)
        self.lengths[slot] = start + len(tokens)

    def _compute(self, slot: int) -> None:
        """Compute the last tokens that `extend` was given, and cache their keys and values.

        If the slot's length was lowered in the meantime, tokens beyond it are left out.
        """
        start, tokens, states = self._last[slot]
        end = self.lengths[slot]
        if end > start:
            self.lengths[slot] = start
            self._head.read(tokens[: end - start], states[: end - start], slot)

    def propose(self, block: Block, slot: int) -> None:
        """See `Head.propose`."""
        start, tokens, states = self._last[slot]
        head = self._head
        self.lengths[slot] = start
        outputs = head.read(
            torch.cat((tokens, self._mask_tokens)), torch.cat((states, self._mask_states)), slot
        )
        self.lengths[slot] = start + len(tokens)
        self._uncomputed.discard(slot)
        for logits in head.logits(outputs[-self.deepest :]):
            block.add(logits)
            if not block.wants_more:
                return
