"""The training loss: cross-entropy of the draft against the target's recorded tokens and the rest of the vocabulary.

The recorded tokens are the target's likeliest.  All other tokens together are one more outcome, with the probability
that the recorded ones leave.  The output head is part of the loss, which computes forward and gradient chunk by chunk:
logits exist for `_CHUNK_ROWS` rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch

_CHUNK_ROWS = 512  # rows of logits in memory at a time
_MIN_PROB = 1e-9


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
    ) -> torch.Tensor:
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            loss, grad = _rows_loss(hidden[rows] @ head.T, ids[rows], probs[rows], offsets)
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
        return hidden * outer[0], None if weight is None else weight * outer[0], None, None, None


def _rows_loss(
    logits: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, offsets: torch.Tensor | None
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
    rest = (1 - probs.sum(-1, keepdim=True)).clamp_min(0)
    draft_rest = (1 - known.sum(-1, keepdim=True)).clamp_min(_MIN_PROB)
    loss = -(probs * known.clamp_min(_MIN_PROB).log()).sum() - (rest * draft_rest.log()).sum()
    return loss, draft.mul_(1 - rest / draft_rest).scatter_(1, ids, known - probs)


def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    *,
    negatives: int = 0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Mean cross-entropy per row, in nats.

    Args:
        hidden: [rows, width], the draft's last states.
        weight: [vocab, width], its head.
        ids, probs: [rows, top], the target's likeliest tokens and their probabilities.
        negatives: restrict the softmax to the batch's `ids` and this many random others, which are weighted to stand
            for all others; 0: use the whole vocabulary.
        generator: a host generator, for the negatives.
    """
    if not negatives or negatives >= len(weight):
        return HeadLoss.apply(hidden, weight, ids, probs, None)
    known, places = ids.unique(return_inverse=True)
    others = torch.randint(len(weight), (negatives,), generator=generator).to(ids.device).unique()
    others = others[~torch.isin(others, known)]
    offsets = torch.zeros(len(known) + len(others), device=ids.device)
    offsets[len(known) :] = torch.tensor((len(weight) - len(known)) / max(1, len(others))).log()
    chosen = weight[torch.cat((known, others))]
    return HeadLoss.apply(hidden, chosen, places, probs, offsets)
