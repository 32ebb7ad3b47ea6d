"""Training of a draft: batches, the learning rate, the optimizers and a training step.

All random numbers are keyed by the seed and the position in the run.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

from pearl.errors import DistillError
from pearl.lab.distill.answers import RecordedAnswer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.loss import head_loss
from pearl.lab.distill.pair import embeddings, head, hidden_states, replacing
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.text.tokenizer import copy_tokenizer

# Random groups of 64 batches are sorted by the length of their answers, which saves padding.
_BATCHES_PER_SORT = 64
_ADAM_BETAS = (0.9, 0.95)
_WARMUP = 0.03  # share of a run in which the learning rate rises
_DECAY = 0.4  # share of a run in which the learning rate falls
_CLIP = 1.0  # largest norm of a gradient
_MEASURED = 4096  # tokens of a batch when agreement is measured, padding included
_LOGIT_ROWS = 256  # rows of logits in memory at a time when agreement is measured


def generator(seed: int, *place: object) -> torch.Generator:
    """Return a random generator on the host, for one place in a run.

    A place is named by strings and numbers, such as ("round-003-001", "answers"). Generators of
    different places or seeds are independent.
    """
    key = blake2b("/".join(map(str, (seed, *place))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)


# ---- schedules ----


def plan(config: DistillConfig, round: int, lengths: Sequence[int], fresh: int) -> list[list[int]]:
    """Return the batches of a round, as indices of answers.

    The batches contain fresh * config.passes answers in random order. Each answer of this round
    occurs once. The remaining answers are drawn at random from all rounds so far.

    Args:
        round: number of the round, from 0.
        lengths: tokens of each answer with its prompt, in the order of the rounds.
        fresh: number of answers of this round; they are the last ones.
    """
    draw = random.Random(f"{config.seed}/{round}/plan")
    chosen = list(range(len(lengths) - fresh, len(lengths)))
    count = fresh * config.passes
    while len(chosen) < count:
        answers = list(range(len(lengths)))
        draw.shuffle(answers)
        chosen += answers[: count - len(chosen)]
    draw.shuffle(chosen)
    tokens = max(1, sum(map(lengths.__getitem__, chosen)))
    group = max(1, _BATCHES_PER_SORT * config.batch_tokens * len(chosen) // tokens)
    batches: list[list[int]] = []
    for start in range(0, len(chosen), group):
        batches += packed(chosen[start : start + group], lengths, config.batch_tokens)
    draw.shuffle(batches)
    return batches


def packed(numbers: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return batches of answers of similar length, each of up to `limit` tokens with padding."""
    batches: list[list[int]] = []
    for number in sorted(numbers, key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[number] <= limit:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def rate(progress: float) -> float:
    """Return the learning rate as a share of the highest one.

    It rises linearly, stays, and at the end falls linearly to a hundredth.

    Args:
        progress: share of the run that is done, in [0, 1].

    Source: "Scaling laws and compute-optimal training beyond fixed training durations", Hägele et
    al. 2024.
    """
    return max(0.01, min(1.0, progress / _WARMUP, (1 - progress) / _DECAY))


def optimizers(
    weights: Mapping[str, torch.nn.Parameter], tables: Collection[str], config: DistillConfig
) -> list[Optimizer]:
    """Make AdamW, or Muon for the layers' matrices and AdamW for all other weights.

    Muon (Jordan et al. 2024) makes each matrix's step orthogonal.  Its steps are scaled to the size of AdamW's (Liu et
    al. 2025, "Muon is scalable for LLM training"), so one learning rate serves both.

    Args:
        weights: the trained weights, by name.
        tables: names of the weights that have a row for each token.
    """
    rate = config.learning_rate
    for_adamw = []
    for_muon = []
    for name, weight in weights.items():
        if config.optimizer == "muon" and weight.ndim == 2 and name not in tables:
            for_muon.append(weight)
        else:
            for_adamw.append(weight)
    optimizers: list[Optimizer] = []
    if for_adamw:
        adamw = torch.optim.AdamW(for_adamw, lr=rate, betas=_ADAM_BETAS, weight_decay=0.0)
        optimizers.append(adamw)
    if for_muon:
        muon = torch.optim.Muon(for_muon, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    return optimizers


# ---- steps ----


@dataclass
class Batch:
    """Right-padded answers with their prompts.

    Attributes:
        ids: the tokens that are fed.
        rows: indices into the flattened `ids`: the positions whose outputs predict the answer
            tokens.
        top_ids, top_probs: for each answer token, the target's likeliest tokens and their
            probabilities.
    """

    ids: torch.Tensor  # [answers, length]
    rows: torch.Tensor  # [tokens]
    top_ids: torch.Tensor  # [tokens, top]
    top_probs: torch.Tensor


def batch_of(answers: Sequence[RecordedAnswer], device: torch.device) -> Batch:
    length = max(map(attrgetter("length"), answers)) - 1  # the last token is predicted, never fed
    ids = torch.zeros(len(answers), length, dtype=torch.long)
    rows = []
    for i, answer in enumerate(answers):
        fed = (answer.prompt + answer.tokens)[:-1]
        ids[i, : len(fed)] = torch.tensor(fed)
        start = i * length + len(answer.prompt) - 1
        rows.append(torch.arange(start, start + len(answer.tokens)))
    top_ids = torch.cat([answer.top_ids for answer in answers])
    top_probs = torch.cat([answer.top_probs for answer in answers])
    return Batch(
        ids.to(device),
        torch.cat(rows).to(device),
        top_ids.long().to(device),
        top_probs.float().to(device),
    )


class Learner:
    """The draft of a run, with its optimizers."""

    def __init__(self, config: DistillConfig, draft: PreTrainedModel) -> None:
        self.draft = draft
        shared = {id(embeddings(draft)), id(head(draft))}
        self._weights: dict[str, torch.nn.Parameter] = {}
        tables = []
        for name, weight in draft.named_parameters():
            if weight.requires_grad:
                self._weights[name] = weight
                if id(weight) in shared:
                    tables.append(name)
        self._config = config
        self._optimizers = optimizers(self._weights, tables, config)
        self._dtype = getattr(torch, config.dtype)
        self._device = draft.device

    def state(self) -> dict[str, Any]:
        """Return the trained weights and the optimizers, for `restore`."""
        return {
            "weights": {name: weight.detach() for name, weight in self._weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` returned. Raises `DistillError` if its weights have other names."""
        if state["weights"].keys() != self._weights.keys():
            raise DistillError(
                "the checkpoint belongs to another draft than these settings describe"
            )
        for name, weight in self._weights.items():
            weight.copy_(state["weights"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def step(
        self, answers: Sequence[RecordedAnswer], progress: float, step: int
    ) -> tuple[float, int]:
        """Make one optimizer step; return (loss, number of answer tokens).

        Raises `DistillError` if the loss or the gradient is not finite; the weights are then
        unchanged.

        Args:
            progress: see `rate`.
            step: number of steps before this one.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._config.learning_rate * rate(progress)
            optimizer.zero_grad(set_to_none=True)
        batch = batch_of(answers, self._device)
        loss = self._loss(batch, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), _CLIP)
        if not torch.isfinite(loss + norm):
            raise DistillError(
                f"the loss is {loss.item()} and the gradient's norm {norm.item()} at step {step}. The last good "
                "checkpoint is kept; begin anew in another directory with a lower learning_rate"
            )
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.item(), len(batch.rows)

    @torch.no_grad()
    def agreement(self, answers: Sequence[RecordedAnswer]) -> float:
        """Return the share of the answer tokens at which learner and target agree.

        They agree if both find the same token likeliest.
        """
        lengths = list(map(attrgetter("length"), answers))
        agreed = 0
        total = 0
        for numbers in packed(range(len(answers)), lengths, _MEASURED):
            batch = batch_of(list(map(answers.__getitem__, numbers)), self._device)
            agreed += int(self._agreed(batch).sum())
            total += len(batch.rows)
        return agreed / total

    def export(self, target: str, directory: Path, about: dict[str, Any]) -> None:
        """Write a checkpoint of the trained weights, and `about` as distillation.json.

        Raises `DistillError` if the directory cannot be written.
        """
        with replacing(directory) as building:
            self._write(target, building)
            (building / "distillation.json").write_text(json.dumps(about, indent=1))

    def _autocast(self) -> torch.autocast:
        is_enabled = self._dtype is torch.bfloat16
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_enabled)

    def _loss(self, batch: Batch, step: int) -> torch.Tensor:
        with self._autocast():
            states = self._states(batch)
        return head_loss(
            states.to(self._dtype),
            head(self.draft),
            batch.top_ids,
            batch.top_probs,
            negatives=self._config.negatives,
            generator=generator(self._config.seed, step, "negatives"),
            divergence=self._config.divergence,
        )

    def _agreed(self, batch: Batch) -> torch.Tensor:
        """Return for each answer token whether draft and target find the same token likeliest."""
        chosen = []
        for rows in self._states(batch).split(_LOGIT_ROWS):
            chosen.append((rows @ head(self.draft).T).argmax(-1))
        return torch.cat(chosen) == batch.top_ids[:, 0]

    def _states(self, batch: Batch) -> torch.Tensor:
        """Return the draft's last hidden states [tokens, width] that predict the answer tokens."""
        return hidden_states(self.draft, batch.ids).flatten(0, 1)[batch.rows]

    def _write(self, target: str, directory: Path) -> None:
        """Write an ordinary checkpoint in bfloat16, with the target's tokenizer."""
        checkpoint: Any = copy.deepcopy(self.draft)
        checkpoint.to(torch.bfloat16).save_pretrained(directory)
        copy_tokenizer(resolve_checkpoint(target), directory)
