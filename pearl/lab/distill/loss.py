"""The training loss: how far the draft is from the target over its recorded tokens and the rest of the vocabulary.

The recorded tokens are the target's likeliest.  All other tokens together are one more outcome, with the probability
that the recorded ones leave.  Divergences are those of DistillSpec (Zhou et al. 2024), over these outcomes.  The output
head is part of the loss, which computes forward and gradient chunk by chunk: logits exist for `_CHUNK_ROWS` rows at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CHUNK_ROWS = 512  # rows of logits in memory at a time
_MIN_PROB = 1e-9


def _forward(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return -p * q.log(), -p / q  # cross-entropy: less than KL(p, q) by the target's entropy, which is constant


def _reverse(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ratio = (q / p).log()
    return q * ratio, ratio + 1


def _jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    middle = (p + q) / 2
    ratio = (q / middle).log()
    return (p * (p / middle).log() + q * ratio) / 2, ratio / 2


def _total_variation(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (p - q).abs() / 2, (q - p).sign() / 2


# Of target p and draft q, for each outcome: (its part of the divergence, the derivative by q).
DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "fkl": _forward,
    "rkl": _reverse,
    "jsd": _jensen_shannon,
    "tvd": _total_variation,
}


class HeadLoss(torch.autograd.Function):
    """`head_loss` as an autograd function; gradients for the hidden states and, if it is trained, the head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        offsets: torch.Tensor | None,
        divergence: str,
    ) -> torch.Tensor:
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            loss, grad = _rows_loss(hidden[rows] @ head.T, ids[rows], probs[rows], offsets, divergence)
            total += loss.double()
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ head
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[rows]).float()
        count = len(hidden)
        ctx.save_for_backward(grad_hidden / count, grad_weight / count if grad_weight is not None else None)
        return (total / count).float()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        return hidden * outer[0], None if weight is None else weight * outer[0], None, None, None, None


def _rows_loss(
    logits: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, offsets: torch.Tensor | None, divergence: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the rows' losses, its gradient with respect to the logits [rows, tokens]).

    Args:
        logits: [rows, tokens], of the draft, for all tokens that the loss considers.
        ids, probs: [rows, top], as in `head_loss`; `ids` are columns of `logits`.
        offsets: [tokens], added to the logits.
    """
    logits = logits.float() if offsets is None else logits.float() + offsets
    draft = logits.softmax(-1)
    known = draft.gather(1, ids)
    # Outcomes [rows, top + 1]: the recorded tokens, and all others.
    target = torch.cat((probs, 1 - probs.sum(-1, keepdim=True)), -1).clamp_min(_MIN_PROB)
    own = torch.cat((known, 1 - known.sum(-1, keepdim=True)), -1).clamp_min(_MIN_PROB)
    parts, slopes = DIVERGENCES[divergence](target, own)
    slopes = slopes - (slopes * own).sum(-1, keepdim=True)  # of the softmax
    return parts.sum(), draft.mul_(slopes[:, -1:]).scatter_(1, ids, own[:, :-1] * slopes[:, :-1])


def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    *,
    negatives: int = 0,
    generator: torch.Generator | None = None,
    divergence: str = "fkl",
) -> torch.Tensor:
    """Mean divergence per row, in nats (tvd: a share).

    Args:
        hidden: [rows, width], the draft's last states.
        weight: [vocab, width], its head.
        ids, probs: [rows, top], the target's likeliest tokens and their probabilities.
        negatives: restrict the softmax to the batch's `ids` and this many random others, which are weighted to stand
            for all others; 0: use the whole vocabulary.
        generator: a host generator, for the negatives.
        divergence: a name in `DIVERGENCES`.
    """
    if not negatives or negatives >= len(weight):
        return HeadLoss.apply(hidden, weight, ids, probs, None, divergence)
    known, places = ids.unique(return_inverse=True)
    others = torch.randint(len(weight), (negatives,), generator=generator).to(ids.device).unique()
    others = others[~torch.isin(others, known)]
    offsets = torch.zeros(len(known) + len(others), device=ids.device)
    offsets[len(known) :] = torch.tensor((len(weight) - len(known)) / max(1, len(others))).log()
    chosen = weight[torch.cat((known, others))]
    return HeadLoss.apply(hidden, chosen, places, probs, offsets, divergence)
