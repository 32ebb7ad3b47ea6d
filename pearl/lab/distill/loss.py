"""The training loss: how far the draft is from the target over its recorded tokens and the rest of the vocabulary.

The recorded tokens are the target's likeliest.  All other tokens together are one more outcome, with the probability
that the recorded ones leave.  Divergences are those of DistillSpec (Zhou et al. 2024), over these outcomes.  The output
head is part of the loss, whose gradient is computed with it, chunk by chunk: logits exist for `_CHUNK_ROWS` rows at a
time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_CHUNK_ROWS = 512  # rows of logits in memory at a time
_MIN_PROB = 1e-9
# Logit of a token that is none of the others; finite, because all of them may be recorded.
_LEFT_OUT = -1e4


def _jensen_shannon(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Compute (p log(p / m) + q log(q / m)) / 2, with m = (p + q) / 2."""
    q = log_q.exp()
    middle = ((p + q) / 2).log()
    return (p * (p.log() - middle) + q * (log_q - middle)) / 2


# Each outcome's part of the divergence, from target p and the logarithm of draft q. For fkl that is the cross-entropy,
# which differs from KL(p, q) by the target's entropy, a constant.
DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fkl": lambda p, log_q: -p * log_q,
    "rkl": lambda p, log_q: log_q.exp() * (log_q - p.log()),
    "jsd": _jensen_shannon,
    "tvd": lambda p, log_q: (p - log_q.exp()).abs() / 2,
}


def _rows_loss(
    logits: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, divergence: str
) -> torch.Tensor:
    """Return the sum of the rows' losses.

    Args:
        logits: [rows, tokens], of the draft, for all tokens that the loss considers.
        ids, probs: [rows, top], as in `head_loss`; `ids` are columns of `logits`.
    """
    # Not 1 minus the recorded ones: where the draft is very sure that is a rounding error, and so is its gradient.
    others = logits.scatter(1, ids, _LEFT_OUT).logsumexp(-1, keepdim=True)
    draft = torch.cat((logits.gather(1, ids), others), -1).log_softmax(-1)
    target = torch.cat((probs, 1 - probs.sum(-1, keepdim=True)), -1).clamp_min(_MIN_PROB)
    return DIVERGENCES[divergence](target, draft).sum()


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
    offsets: torch.Tensor | None = None
    vocab = len(weight)
    if 0 < negatives < vocab:
        recorded, ids = ids.unique(return_inverse=True)
        draws = torch.randint(vocab, (negatives,), generator=generator).to(ids.device).unique()
        others = draws[~torch.isin(draws, recorded)]
        offsets = torch.zeros(len(recorded) + len(others), device=ids.device)
        stands_for = (vocab - len(recorded)) / max(1, len(others))
        offsets[len(recorded) :] = torch.tensor(stands_for).log()
        weight = weight[torch.cat((recorded, others))]
    states = hidden.detach().requires_grad_()
    head = weight.detach().requires_grad_(weight.requires_grad)
    matrix = head.to(hidden.dtype).T
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start in range(0, len(hidden), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        logits = (states[rows] @ matrix).float()
        if offsets is not None:
            logits = logits + offsets
        loss = _rows_loss(logits, ids[rows], probs[rows], divergence)
        loss.backward()
        total += loss.detach()
    count = len(hidden)
    # Of value 0, and linear in states and head: autograd takes the gradients computed above for its own.
    terms = []
    for tensor, leaf in ((hidden, states), (weight, head)):
        if leaf.grad is not None:
            terms.append((tensor * leaf.grad / count).sum().float())
    gradient = torch.stack(terms).sum()
    return (total / count).float() + (gradient - gradient.detach())
