"""A head that is the target's own layer for multi-token prediction, computed by transformers.

The layer reads each token with the target's last hidden state of the token before it.  For drafted
tokens, it reads its own outputs in place of the target's.  If a target has several such layers, the
first one drafts all tokens.

Source: "DeepSeek-V3 Technical Report", 2024, section 2.2.
"""

from __future__ import annotations

from typing import Any

import torch

from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.gguf import table_in
from pearl.models.heads.chain import ChainHead
from pearl.printable import cause_of


class MtpHead(ChainHead):
    """A head for a target that runs through transformers, and so holds a single text.

    Args:
        model: transformers' `MtpModel`, which shares embedding and output head with the target.
        cache: transformers' `MtpCache` for this model.
    """

    def __init__(self, model: Any, cache: Any, vocab_size: int, context: int) -> None:
        super().__init__()
        self._model = model
        self._cache = cache
        weight = model.layers[0].eh_proj.weight
        self.context = context
        self.device = weight.device
        self.dtype = weight.dtype
        self.ids = torch.arange(vocab_size, device=self.device)
        self.lengths = [0]

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """See `ChainHead.fused`."""
        return features.to(self.device, self.dtype)

    def read(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int = 0
    ) -> torch.Tensor:
        """See `ChainHead.read`."""
        start = self.lengths[slot]
        end = start + len(tokens)
        surplus = self._cache.get_seq_length() - start
        if surplus > 0:
            self._cache.crop(-surplus)
        positions = torch.arange(start + 1, end + 1, device=self.device)[None]
        outputs = self._model.forward_layer(
            0, states[None], positions, self._cache, input_ids=tokens[None]
        )
        self.lengths[slot] = end
        output: torch.Tensor = outputs[0]
        return output

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `ChainHead.logits`."""
        logits: torch.Tensor = self._model._project_to_logits(outputs)
        return logits[:, : len(self.ids)].float()


def load_mtp(spec: str, runner: Any) -> MtpHead:
    """Load the target's layer for multi-token prediction from the target's checkpoint.

    Raises `ModelError` if the checkpoint has no such layer, or transformers cannot load it.

    Args:
        spec: the name of the target.
        runner: the target's runner through transformers.
    """
    from transformers import cache_utils, modeling_layers

    model = runner.model
    kind = getattr(modeling_layers, "MtpModel", None)
    config = model.config.get_text_config(decoder=True)
    if kind is None or not hasattr(kind, "forward_layer"):
        raise ModelError(
            f"Head {spec!r}: layers for multi-token prediction need transformers 5.24 or newer."
        )
    # transformers ignores the tensors of such layers only under the names of the published sizes.
    # Qwen's configurations do not say how many such layers there are.
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{config.num_hidden_layers}\..*",
        r"^mtp\..*",
    ]
    config.num_mtp_layers = getattr(config, "num_mtp_layers", None) or 1
    if getattr(config, "layer_types", None) and not hasattr(config, "mtp_layer_types"):
        config.mtp_layer_types = ["full_attention"] * config.num_mtp_layers
    try:
        if table_in(resolve_checkpoint(spec)) is not None:
            raise ValueError("GGUF files are read without one")
        layers = kind.from_pretrained(model, device_map={"": runner.device}).eval()
        cache = cache_utils.MtpCache(config=layers.config)
        return MtpHead(layers, cache, runner.vocab_size, runner.context)
    except Exception as error:  # files, layouts and versions: transformers raises anything
        raise ModelError(
            f"Head {spec!r}: the target has no layer for multi-token prediction that could be loaded: "
            f"{cause_of(error)}. Leave --head away, or name an EAGLE-3 head."
        ) from error
