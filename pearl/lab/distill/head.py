"""How a head learns: an EAGLE-3 head of the target, from the target's answers and hidden states.

A head reads the target's states where they are known, and its own outputs where it drafts further; so it learns as it
drafts, several steps deep, each from the outputs of the step before ("training-time test").

Source: "EAGLE-3", Li et al. 2025, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, log_softmax, rms_norm, silu

from pearl.lab.distill.answers import Answer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.learning import Batch, Learner, batch_of
from pearl.lab.distill.pair import Teacher, embeddings, replacing
from pearl.models.forward.layers import tapped

_DEPTHS = 4  # steps that are learned
_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")  # of the layer
_LATER = 0.8  # weight of a step's loss over that of the step before
_LAYER = "midlayer."


class HeadModel:
    """The weights of a head by their names in checkpoints, and its steps. `ids`: of its vocabulary, [tokens]."""

    def __init__(self, config: Any, embedding: torch.Tensor, ids: torch.Tensor, seed: int) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or hidden // self.heads
        self.eps, self._table, self.ids = float(config.rms_norm_eps), embedding, ids
        random = torch.Generator().manual_seed(seed)

        def matrix(outputs: int, inputs: int) -> nn.Parameter:
            return nn.Parameter(
                (torch.randn(outputs, inputs, generator=random) * 0.02).to(embedding.device)
            )

        self.weights: dict[str, nn.Parameter] = {}
        queries, keys = self.heads * self.dim, self.kv_heads * self.dim
        shapes = {"fc": (hidden, 3 * hidden), "lm_head": (len(ids), hidden)}
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{_LAYER}self_attn.{name}_proj"] = (outputs, 2 * hidden)
        shapes[f"{_LAYER}self_attn.o_proj"] = (hidden, queries)
        shapes |= {f"{_LAYER}mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{_LAYER}mlp.down_proj"] = (hidden, inner)
        for name, shape in shapes.items():
            self.weights[name] = matrix(*shape)
        for name in ("norm", *(f"{_LAYER}{each}" for each in _NORMS)):
            self.weights[name] = nn.Parameter(torch.ones(hidden, device=embedding.device))
        with torch.no_grad():
            self.weights["lm_head"].copy_(embedding[ids])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x.float(), x.shape[-1:], self.weights[name].float(), self.eps)

    def steps(
        self, features: torch.Tensor, ids: torch.Tensor, turns: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """The outputs [batch, n - 1 - depth, hidden] of each step: item i of step d is for position i + 2 + d.

        Args:
            features: the target's [batch, n, 3 * hidden]. ids: [batch, n].
            turns: cosines and sines of positions, [2, n, dim].
        """
        count = ids.shape[1] - 1
        states = linear(features[:, :count], self.weights["fc"])
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of the steps before
        for depth in range(_DEPTHS):
            if count - depth < 1:
                return
            states = self._layer(
                states[:, : count - depth], ids[:, 1 + depth :], turns, depth, seen
            )
            yield states

    def _layer(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        turns: torch.Tensor,
        depth: int,
        seen: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        batch, n, _ = states.shape
        read = (
            self._norm(self._table[tokens], f"{_LAYER}input_layernorm"),
            self._norm(states, f"{_LAYER}hidden_norm"),
        )
        x = torch.cat(read, -1)

        def part(name: str, heads: int) -> torch.Tensor:
            found = linear(x, self.weights[f"{_LAYER}self_attn.{name}_proj"])
            return found.view(batch, n, heads, self.dim).transpose(1, 2)

        cos, sin = turns[:, depth : depth + n]
        groups = self.heads // self.kv_heads
        queries = _turned(part("q", self.heads), cos, sin)
        keys = _turned(part("k", self.kv_heads), cos, sin).repeat_interleave(groups, 1)
        values = part("v", self.kv_heads).repeat_interleave(groups, 1)
        seen.append((keys, values))
        first_keys, first_values = (each[:, :, :n] for each in seen[0])
        scores = [
            (queries @ first_keys.mT).masked_fill(
                torch.ones(n, n, dtype=torch.bool).triu(1).to(x.device), -1e30
            )
        ]
        scores += [(queries * keys[:, :, :n]).sum(-1, keepdim=True) for keys, _ in seen[1:]]
        shares = (torch.cat(scores, -1).float() / self.dim**0.5).softmax(-1).to(values.dtype)
        mixed = shares[..., :n] @ first_values
        for number, (_, values) in enumerate(seen[1:]):
            mixed = mixed + shares[..., n + number, None] * values[:, :, :n]
        states = states + linear(
            mixed.transpose(1, 2).reshape(batch, n, -1), self.weights[f"{_LAYER}self_attn.o_proj"]
        )
        fed = self._norm(states, f"{_LAYER}post_attention_layernorm")
        gate, up = (
            linear(fed, self.weights[f"{_LAYER}mlp.{name}_proj"]) for name in ("gate", "up")
        )
        return states + linear(silu(gate) * up, self.weights[f"{_LAYER}mlp.down_proj"])

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return linear(self._norm(outputs, "norm"), self.weights["lm_head"]).float()


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class HeadLearner(Learner):
    """A head that learns."""

    def __init__(self, config: DistillConfig, teacher: Teacher, answers: Iterable[Answer]) -> None:
        """`answers`: whose likeliest tokens are the head's vocabulary."""
        self._target = teacher.model
        table = embeddings(teacher.model).detach()
        vocab, wanted = len(table), config.head_tokens or len(table)
        counts = torch.zeros(vocab, dtype=torch.float64)
        for one in answers:
            counts.index_add_(0, one.top_ids.flatten().long(), one.top_probs.flatten().double())
        ids = counts.topk(min(wanted, vocab)).indices.sort().values.to(table.device)
        self._place = torch.full((vocab,), -1, device=table.device)
        self._place[ids] = torch.arange(len(ids), device=table.device)
        self.head = HeadModel(teacher.model.config, table.float(), ids, config.seed)
        super().__init__(config, self.head.weights, {"lm_head"})

    def step(self, answers: Sequence[Answer], progress: float, step: int) -> tuple[float, int]:
        batch = batch_of(answers, self.head.ids.device)
        losses, weight = [], 1.0
        for logits, ids, probs in self._judged(batch):
            known = ids >= 0
            chances = log_softmax(logits, -1).gather(1, ids.clamp_min(0))
            losses.append(-(probs * known * chances).sum() / len(batch.rows) * weight)
            weight *= _LATER
        loss = torch.stack(losses).sum()
        self._descend(loss, progress, step)
        return losses[0].item(), len(batch.rows)

    def _judged(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each step its logits [tokens, own vocabulary] for tokens of answers, and what the target gives there: ids
        of the own vocabulary, -1 for others, and probabilities [tokens, top].
        """
        length = batch.ids.shape[1]
        with torch.no_grad():
            read: Any = self._target.base_model
            states = read(
                input_ids=batch.ids, use_cache=False, output_hidden_states=True
            ).hidden_states
            features = torch.cat(
                [states[layer] for layer in tapped(self._target.config.num_hidden_layers)], -1
            )
            like, positions = (
                features.new_zeros(1, dtype=torch.float32),
                torch.arange(length, device=features.device),
            )
            turns = torch.stack([each[0] for each in read.rotary_emb(like, positions[None])])
        with torch.autocast(
            features.device.type, torch.bfloat16, enabled=self._dtype is torch.bfloat16
        ):
            for depth, outputs in enumerate(self.head.steps(features.float(), batch.ids, turns)):
                at = (
                    batch.rows % length - 1 - depth
                )  # rows stand before the positions that are predicted
                has, of = at >= 0, batch.rows // length
                rows = outputs[of[has], at[has]]
                yield self.head.logits(rows), self._place[batch.top_ids[has]], batch.top_probs[has]

    def _agreed(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Of the head's first step."""
        logits, ids, _ = next(self._judged(batch_of(answers, self.head.ids.device)))
        return logits.argmax(-1) == ids[:, 0]

    def export(self, target: str, directory: Path, about: dict[str, Any]) -> None:
        """In bfloat16."""
        config, head = self._target.config, self.head
        own = torch.arange(len(head.ids), device=head.ids.device)
        weights = head.weights.items()
        tensors = {
            f"{name}.weight": weight.detach().to(torch.bfloat16).contiguous()
            for name, weight in weights
        }
        written = {
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
        with replacing(directory) as building:
            save_file(
                tensors | {"d2t": head.ids - own, "t2d": self._place >= 0},
                building / "model.safetensors",
            )
            (building / "config.json").write_text(json.dumps(written, indent=1))
            (building / "distillation.json").write_text(json.dumps(about, indent=1))
