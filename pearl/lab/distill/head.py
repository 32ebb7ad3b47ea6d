"""Trains an EAGLE-3 head of the target, on the target's answers and hidden states.

A head's first draft step reads the target's states. Its later steps read the head's own outputs,
because the target's states are not known yet. The head is trained in the same way ("training-time
test"): for several steps, each of which reads the outputs of the step before.

Source: "EAGLE-3", Li et al. 2025, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import log_softmax
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from pearl.lab.distill.answers import RecordedAnswer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.learning import Batch, Learner
from pearl.lab.distill.pair import Teacher, embeddings
from pearl.models.forward.layers import tapped

_DEPTHS = 4  # draft steps that are trained
_LATER = 0.8  # weight of a step's loss / weight of the previous step's loss


class _Layer(nn.Module):
    """A Llama layer whose attention reads each token's embedding and state, concatenated."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * hidden, narrow.out_features, bias=False))
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)

    def forward(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        is_seen: torch.Tensor,
        cache: DynamicCache,
    ) -> torch.Tensor:
        read = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        mixed, _ = self.self_attn(read, rope, is_seen, cache)
        states = states + mixed
        return states + self.mlp(self.post_attention_layernorm(states))


class HeadModel(nn.Module):
    """An EAGLE-3 head. Its weights are named as in EAGLE-3 checkpoints.

    Args:
        config: the target's configuration.
        embedding: the target's input embeddings, [vocab, hidden].
        ids: the target's ids of the tokens that the head knows, [tokens].
        seed: seed of the first weights.
    """

    def __init__(self, config: Any, embedding: torch.Tensor, ids: torch.Tensor, seed: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.ids = ids
        self.config = LlamaConfig(  # type: ignore[call-arg]
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None),
            rms_norm_eps=float(config.rms_norm_eps),
            attn_implementation="sdpa",
        )
        self._table = embedding.detach()
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, len(ids), bias=False)
        self.norm = LlamaRMSNorm(hidden, self.config.rms_norm_eps)
        self.midlayer = _Layer(self.config)
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim == 2:
                    weight.copy_(torch.randn(weight.shape, generator=random) * 0.02)
            self.to(embedding.device)
            self.lm_head.weight.copy_(embedding[ids])

    def steps(
        self, features: torch.Tensor, ids: torch.Tensor, rope: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield the outputs [batch, n - 1 - d, hidden] of each step d, from 0.

        Item i of step d predicts the token at position i + 2 + d.

        Args:
            features: the target's hidden states of three layers, [batch, n, 3 * hidden].
            ids: the tokens, [batch, n].
            rope: cosines and sines of positions, [2, n, dim].
        """
        count = ids.shape[1] - 1
        states = self.fc(features[:, :count])
        cache = DynamicCache()
        # A position attends to the first step's keys up to its own position and, of each later
        # step, to the one key that belongs to its own chain of guesses.
        is_seen = torch.ones(count, count, dtype=torch.bool, device=ids.device).tril()
        for depth in range(min(_DEPTHS, count)):
            length = count - depth
            if depth:
                own = torch.eye(length, dtype=torch.bool, device=ids.device)
                is_seen = torch.cat((is_seen[:length], own), 1)
            cos, sin = rope[:, None, depth : depth + length]
            embedded = self._table[ids[:, 1 + depth :]]
            states = self.midlayer(
                states[:, :length], embedded, (cos, sin), is_seen[None, None], cache
            )
            yield states

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(outputs))
        return logits.float()


class _Judged(NamedTuple):
    """One step's logits for answer tokens, and the target's likeliest tokens at the same places.

    Attributes:
        logits: [tokens, the head's vocabulary].
        ids: [tokens, top], the target's likeliest tokens as ids of the head; -1 for tokens that the
            head does not know.
        probs: [tokens, top], the target's probabilities of these tokens.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor


class HeadLearner(Learner):
    """Trains an EAGLE-3 head."""

    def __init__(
        self, config: DistillConfig, teacher: Teacher, answers: Iterable[RecordedAnswer]
    ) -> None:
        """Make a head that knows the `head_tokens` likeliest tokens.

        These are the tokens with the highest sum of the target's probabilities in `answers`.
        """
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
        weights = dict(self.head.named_parameters())
        super().__init__(config, weights, {"lm_head.weight"}, table.device)

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
        """Return for each token whether the head's first step agrees with the target's likeliest.

        If a prompt has only one token, its first answer token is left out, because no step predicts
        it.
        """
        step = next(self._judged(batch))
        return step.logits.argmax(-1) == step.ids[:, 0]

    def _judged(self, batch: Batch) -> Iterator[_Judged]:
        length = batch.ids.shape[1]
        texts = batch.rows // length
        # The target's state at position j predicts position j + 1. Item i of the head's first step
        # predicts position i + 2, so that i = j - 1.
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
        """Return the target's features and rope for ids [batch, n].

        The features are [batch, n, 3 * hidden], the rope is [2, n, dim].
        """
        model: Any = self._target.base_model
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        layers = tapped(self._target.config.num_hidden_layers)
        features = torch.cat([states[layer] for layer in layers], -1)
        positions = torch.arange(ids.shape[1], device=features.device)
        return features, torch.cat(model.rotary_emb(features.float(), positions[None]))

    def _write(self, target: str, directory: Path) -> None:
        """Write an EAGLE-3 checkpoint."""
        head = self.head
        config = head.config
        offsets = head.ids - torch.arange(len(head.ids), device=head.ids.device)
        tensors = {"d2t": offsets, "t2d": self._place >= 0}
        for name, weight in head.named_parameters():
            tensors[name] = weight.detach().to(torch.bfloat16).contiguous()
        save_file(tensors, directory / "model.safetensors")
        settings = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": self._target.config.rope_parameters,
            "vocab_size": len(self._place),
            "draft_vocab_size": len(head.ids),
            "torch_dtype": "bfloat16",
        }
        (directory / "config.json").write_text(json.dumps(settings, indent=1))
