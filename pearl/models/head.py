"""A head: one decoder layer that reads the target's hidden states and guesses what the target writes next.

For each token but the first it takes the token and the target's states at the token before it, and its last output
guesses the token that follows.  From there on it goes on by itself, with its own output in place of those states.
Its text is never used, only verified; so nothing here needs to be exact.

Source: "EAGLE-3", Li et al. 2025; its published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

from pearl.models.forward.attention import Heads
from pearl.models.forward.matrices import Matrix, Rounding, dtype_of_rows, gated, matrix, normalise

_PIECE = 512  # tokens of a prompt that are computed together


class Head:
    """The weights of a head, and a cache for each slot.

    Args:
        weights: by their names in EAGLE-3's checkpoints; without an embedding, that of the target is used.
        norms_residual: whether the layer adds to the normalised states.
        embedding: the target's [vocab, hidden].
        cos, sin: [positions, dim].
        rounding: of the products' weights; see `matrices.matrix`.

    Attributes:
        lengths: of each slot, how many tokens its cache holds.
        features: numbers of the target's states that it reads of each token.
        kind: of its weights.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        heads: Heads,
        eps: float,
        norms_residual: bool,
        embedding: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: int,
        rounding: Rounding = "",
    ) -> None:
        self._heads, self._eps, self._norms_residual, self._cos, self._sin = heads, eps, norms_residual, cos, sin
        self._embedding = weights.get("embed_tokens.weight", embedding)
        self.dtype, self.device = dtype_of_rows(embedding.dtype, embedding.device), embedding.device
        self._norms = {name: weight.to(self.dtype) for name, weight in weights.items() if name.endswith("norm.weight")}
        self.hidden, self.context = embedding.shape[1], len(cos)
        self.kind = rounding or str(embedding.dtype).removeprefix("torch.")

        def product(*names: str, wide: bool = False) -> Matrix:
            parts = [
                SimpleNamespace(weight=weights[f"{name}.weight"], bias=weights.get(f"{name}.bias")) for name in names
            ]
            return matrix(*parts, dtype=self.dtype, rounding=rounding, wide=wide)

        layer = "midlayer."
        self._fuse, self.features = product("fc"), weights["fc.weight"].shape[1]
        self._qkv = product(*(f"{layer}self_attn.{name}_proj" for name in "qkv"))
        self._out = product(f"{layer}self_attn.o_proj")
        self._gate_up = product(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj")
        self._down = product(f"{layer}mlp.down_proj")
        self._head = product("lm_head", wide=True)
        ids = torch.arange(len(weights["lm_head.weight"]), device=self.device)
        self.ids = ids + weights["d2t"].to(self.device) if "d2t" in weights else ids  # of the target's vocabulary
        room = (slots, 2, heads.kv, len(cos), heads.dim)
        self._cache = torch.zeros(
            room, dtype=torch.float32 if self.device.type == "cpu" else self.dtype, device=self.device
        )
        self.lengths = [0] * slots

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """The target's states [n, features] -> [n, hidden]."""
        found: torch.Tensor = self._fuse(features.to(self.dtype), None)
        return found

    def read(self, tokens: torch.Tensor, states: torch.Tensor, slot: int) -> torch.Tensor:
        """Take in tokens [n] with the states [n, hidden] before each; their outputs [n, hidden]."""
        pieces = [slice(begin, begin + _PIECE) for begin in range(0, len(tokens), _PIECE)]
        return torch.cat([self._layer(tokens[some], states[some], slot) for some in pieces])

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, the head's own vocabulary], float32: of the tokens `ids`."""
        found: torch.Tensor = self._head(self._norm(outputs, "norm"), None)
        return found.float()

    def copy(self, slot: int, into: int, start: int, end: int) -> None:
        """Copy what `slot` has of its tokens from number `start` to `end` to another slot."""
        self._cache[into, :, :, start:end] = self._cache[slot, :, :, start:end]
        self.lengths[into] = end

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return normalise(x, self._norms[f"{name}.weight"], self._eps, self.dtype)

    def _layer(self, tokens: torch.Tensor, states: torch.Tensor, slot: int) -> torch.Tensor:
        heads, n, start = self._heads, len(tokens), self.lengths[slot]
        end = start + n
        normed = self._norm(states, "midlayer.hidden_norm")
        x = torch.cat((self._norm(self._embedding[tokens].to(self.dtype), "midlayer.input_layernorm"), normed), -1)
        mixed = self._qkv(x, None).view(n, -1, heads.dim).transpose(0, 1).to(self._cache.dtype)
        queries, keys, values = mixed.split((heads.query, heads.kv, heads.kv))
        cache = self._cache[slot, :, :, :end]
        cache[0, :, start:], cache[1, :, start:] = self._rotated(keys, start), values
        mask = None
        if n > 1:
            mask = torch.ones(n, end, dtype=torch.bool, device=self.device).tril_(start)
        found = scaled_dot_product_attention(
            self._rotated(queries, start)[None], cache[None, 0], cache[None, 1], mask, enable_gqa=True
        )
        residual = normed if self._norms_residual else states
        hidden = self._out(found[0].transpose(0, 1).reshape(n, -1).to(self.dtype), residual)
        fed = self._norm(hidden, "midlayer.post_attention_layernorm")
        self.lengths[slot] = end
        return self._down(gated(self._gate_up(fed, None), "silu"), hidden)

    def _rotated(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """[heads, n, dim], turned by positions from `start` on."""
        at = slice(start, start + x.shape[1])
        first, second = x.chunk(2, -1)
        return x * self._cos[at] + torch.cat((-second, first), -1) * self._sin[at]
