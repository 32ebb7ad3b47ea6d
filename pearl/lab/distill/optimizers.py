"""The optimizers of a run: AdamW, or Muon for the layers' matrices and AdamW for all else."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

from pearl.lab.distill.checkpoints import trainable_parameters
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.draft import embeddings, head

_ADAM_BETAS = (0.9, 0.95)


def optimizers_of(draft: PreTrainedModel, config: DistillConfig) -> list[Optimizer]:
    """The optimizers of a draft's trainable weights; each weight belongs to one.

    Muon (Jordan et al. 2024) makes each matrix's step orthogonal. Its steps are scaled to the size of AdamW's (Liu et
    al. 2025, "Muon is scalable for LLM training"), so one learning rate serves both. Tables, whose rows are tokens,
    stay with AdamW.
    """
    weights = list(trainable_parameters(draft).values())
    tables = {id(embeddings(draft)), id(head(draft))}
    matrices = [w for w in weights if config.optimizer == "muon" and w.ndim == 2 and id(w) not in tables]
    taken = {id(weight) for weight in matrices}
    others = [weight for weight in weights if id(weight) not in taken]
    rate, decay = config.learning_rate, config.weight_decay
    found: list[Optimizer] = []
    if others:
        found.append(torch.optim.AdamW(others, lr=rate, betas=_ADAM_BETAS, weight_decay=decay))
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return found
