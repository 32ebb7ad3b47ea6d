"""How a head learns: an EAGLE-3 head of the target, from the target's answers and hidden states.

A head reads the target's states where they are known, and its own outputs where it drafts further; so it learns as it
drafts, several steps deep, each from the outputs of the step before ("training-time test").

Source: "EAGLE-3", Li et al. 2025, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import (
    linear,
    log_softmax,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from pearl.lab.distill.answers import RecordedAnswer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.learning import Batch, Learner
from pearl.lab.distill.pair import Teacher, embeddings
from pearl.models.forward.layers import tapped

_DEPTHS = 4  # steps that are learned
_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")  # of the layer
_LATER = 0.8  # weight of a step's loss over that of the step before
_LAYER = "midlayer."


class _KeysValues(NamedTuple):
    """Keys and values of one step, each [batch, heads, n, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class HeadModel:
    """The weights of a head by their names in checkpoints, and its steps. `ids`: of its vocabulary, [tokens]."""

    def __init__(self, config: Any, embedding: torch.Tensor, ids: torch.Tensor, seed: int) -> None:
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or hidden // self.heads
        self.eps = float(config.rms_norm_eps)
        self.ids = ids
        self._table = embedding
        # The order of the matrices is that in which they are drawn from the seed.
        queries = self.heads * self.dim
        keys = self.kv_heads * self.dim
        shapes = {
            "fc": (hidden, 3 * hidden),
            "lm_head": (len(ids), hidden),
            f"{_LAYER}self_attn.q_proj": (queries, 2 * hidden),
            f"{_LAYER}self_attn.k_proj": (keys, 2 * hidden),
            f"{_LAYER}self_attn.v_proj": (keys, 2 * hidden),
            f"{_LAYER}self_attn.o_proj": (hidden, queries),
            f"{_LAYER}mlp.gate_proj": (inner, hidden),
            f"{_LAYER}mlp.up_proj": (inner, hidden),
            f"{_LAYER}mlp.down_proj": (hidden, inner),
        }
        random = torch.Generator().manual_seed(seed)
        self.weights: dict[str, nn.Parameter] = {}
        for name, shape in shapes.items():
            matrix = torch.randn(shape, generator=random) * 0.02
            self.weights[name] = nn.Parameter(matrix.to(embedding.device))
        for name in ("norm", *(_LAYER + norm for norm in _NORMS)):
            self.weights[name] = nn.Parameter(torch.ones(hidden, device=embedding.device))
        with torch.no_grad():
            self.weights["lm_head"].copy_(embedding[ids])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x.float(), x.shape[-1:], self.weights[name].float(), self.eps)

    def steps(
        self, features: torch.Tensor, ids: torch.Tensor, rope: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield the outputs [batch, n - 1 - depth, hidden] of each step: item i of step d is for position i + 2 + d.

        Args:
            features: the target's [batch, n, 3 * hidden]. ids: [batch, n].
            rope: cosines and sines of positions, [2, n, dim].
        """
        count = ids.shape[1] - 1
        states = linear(features[:, :count], self.weights["fc"])
        cache: list[_KeysValues] = []
        for depth in range(_DEPTHS):
            if count - depth < 1:
                return
            length = count - depth
            rotations = rope[:, depth : depth + length]
            states = self._layer(states[:, :length], ids[:, 1 + depth :], rotations, cache)
            yield states

    def _layer(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        rope: torch.Tensor,
        cache: list[_KeysValues],
    ) -> torch.Tensor:
        """Run the layer on states [batch, n, hidden]; add its keys and values to `cache`, which has earlier steps'."""
        embedded = self._norm(self._table[tokens], f"{_LAYER}input_layernorm")
        read = torch.cat((embedded, self._norm(states, f"{_LAYER}hidden_norm")), -1)
        queries = _rotated(self._project(read, "q", self.heads), rope)
        keys = _rotated(self._project(read, "k", self.kv_heads), rope)
        cache.append(_KeysValues(keys, self._project(read, "v", self.kv_heads)))
        states = states + self._linear(_attend(queries, cache), "self_attn.o_proj")
        fed = self._norm(states, f"{_LAYER}post_attention_layernorm")
        gated = silu(self._linear(fed, "mlp.gate_proj")) * self._linear(fed, "mlp.up_proj")
        return states + self._linear(gated, "mlp.down_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.weights[_LAYER + name])

    def _project(self, x: torch.Tensor, name: str, heads: int) -> torch.Tensor:
        """Project x [batch, n, 2 * hidden] to [batch, heads, n, dim]."""
        batch, n, _ = x.shape
        projected = self._linear(x, f"self_attn.{name}_proj")
        return projected.view(batch, n, heads, self.dim).transpose(1, 2)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return linear(self._norm(outputs, "norm"), self.weights["lm_head"]).float()


def _attend(queries: torch.Tensor, cache: Sequence[_KeysValues]) -> torch.Tensor:
    """Attend to all earlier positions of the first step, and to the same place of each later one."""
    count = queries.shape[2]
    keys = torch.cat([step.keys[:, :, :count] for step in cache], 2)
    values = torch.cat([step.values[:, :, :count] for step in cache], 2)
    is_seen = torch.eye(count, dtype=torch.bool, device=queries.device).repeat(1, len(cache))
    is_seen[:, :count] = torch.ones_like(is_seen[:, :count]).tril()
    mixed = scaled_dot_product_attention(
        queries.to(values.dtype), keys.to(values.dtype), values, is_seen, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(2)


def _rotated(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _Judged(NamedTuple):
    """A step's logits [tokens, own vocabulary] for tokens of answers, and the target's likeliest tokens there.

    Attributes:
        ids: [tokens, top], of the head's own vocabulary; -1 for tokens that are not in it.
        probs: [tokens, top].
    """

    logits: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor


class HeadLearner(Learner):
    """A head, as learner."""

    def __init__(
        self, config: DistillConfig, teacher: Teacher, answers: Iterable[RecordedAnswer]
    ) -> None:
        """Make a head. `answers`: their likeliest tokens are its vocabulary."""
        self._target = teacher.model
        table = embeddings(teacher.model).detach()
        vocab = len(table)
        counts = torch.zeros(vocab, dtype=torch.float64)
        for answer in answers:
            ids = answer.top_ids.flatten().long()
            counts.index_add_(0, ids, answer.top_probs.flatten().double())
        size = min(config.head_tokens or vocab, vocab)
        ids = counts.topk(size).indices.sort().values.to(table.device)
        self._place = torch.full((vocab,), -1, device=table.device)
        self._place[ids] = torch.arange(len(ids), device=table.device)
        self.head = HeadModel(teacher.model.config, table.float(), ids, config.seed)
        super().__init__(config, self.head.weights, {"lm_head"}, table.device)

    def _losses(self, batch: Batch, step: int) -> list[torch.Tensor]:
        losses = []
        weight = 1.0
        for logits, ids, probs in self._judged(batch):
            log_probs = log_softmax(logits, -1).gather(1, ids.clamp_min(0))
            cross_entropy = -(probs * (ids >= 0) * log_probs).sum() / len(batch.rows)
            losses.append(cross_entropy * weight)
            weight *= _LATER
        return losses

    def _agreed(self, batch: Batch) -> torch.Tensor:
        """Compare the head's first step with the target."""
        first = next(self._judged(batch))
        return first.logits.argmax(-1) == first.ids[:, 0]

    def _judged(self, batch: Batch) -> Iterator[_Judged]:
        length = batch.ids.shape[1]
        texts = batch.rows // length
        # The batch's rows stand before the positions that are predicted.
        columns = batch.rows % length - 1
        features, rope = self._read(batch.ids)
        with self._autocast():
            for outputs in self.head.steps(features.float(), batch.ids, rope):
                exists = columns >= 0
                rows = outputs[texts[exists], columns[exists]]
                ids = self._place[batch.top_ids[exists]]
                yield _Judged(self.head.logits(rows), ids, batch.top_probs[exists])
                columns = columns - 1

    @torch.no_grad()
    def _read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's (features [batch, n, 3 * hidden], rope [2, n, dim]) for ids [batch, n]."""
        model: Any = self._target.base_model
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        layers = tapped(self._target.config.num_hidden_layers)
        features = torch.cat([states[layer] for layer in layers], -1)
        positions = torch.arange(ids.shape[1], device=features.device)
        return features, torch.cat(model.rotary_emb(features.float(), positions[None]))

    def _write(self, target: str, directory: Path) -> None:
        """Write an EAGLE-3 checkpoint."""
        config = self._target.config
        head = self.head
        offsets = head.ids - torch.arange(len(head.ids), device=head.ids.device)
        tensors = {"d2t": offsets, "t2d": self._place >= 0}
        for name, weight in head.weights.items():
            tensors[f"{name}.weight"] = weight.detach().to(torch.bfloat16).contiguous()
        save_file(tensors, directory / "model.safetensors")
        settings = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": head.heads,
            "num_key_value_heads": head.kv_heads,
            "head_dim": head.dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": head.eps,
            "rope_parameters": config.rope_parameters,
            "vocab_size": len(self._place),
            "draft_vocab_size": len(head.ids),
            "torch_dtype": "bfloat16",
        }
        (directory / "config.json").write_text(json.dumps(settings, indent=1))
