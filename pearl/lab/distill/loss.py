"""The training loss of a draft model: its divergence from the target, averaged over tokens.

The divergence is over these outcomes: each of the target's likeliest tokens, which are recorded,
and all other tokens together as one more outcome. The divergences are those of DistillSpec (Zhou et
al. 2024).

The loss includes the output head, so that logits exist for only `_CHUNK_ROWS` rows at a time. The
loss and its gradient are computed together, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_CHUNK_ROWS = 512  # rows of logits in memory at a time
_MIN_PROB = 1e-9
# Logit that excludes a recorded token from the sum over all others. It is finite, because there
# may be no others.
_LEFT_OUT = -1e4


def _jensen_shannon(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Compute (p log(p / m) + q log(q / m)) / 2, with m = (p + q) / 2."""
    q = log_q.exp()
    middle = ((p + q) / 2).log()
    return (p * (p.log() - middle) + q * (log_q - middle)) / 2


# Each outcome's term of the divergence, from the target's probability p and log q of the draft.
# For fkl the sum is the cross-entropy, which is KL(p, q) plus the target's entropy, a constant.
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
        logits: [rows, tokens], the draft's, for all tokens that the loss considers.
        ids: [rows, top], the recorded tokens, as columns of `logits`.
        probs: [rows, top], the target's probabilities of these tokens.
        divergence: a name in `DIVERGENCES`.
    """
    # The draft's probability of all other tokens is a sum over them. If the draft is very sure,
    # 1 minus its probabilities of the recorded tokens would be a rounding error.
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
    """Return the mean divergence per row, in nats (tvd has no unit, and is in [0, 1]).

    Args:
        hidden: [rows, width], the draft's last hidden states.
        weight: [vocab, width], the draft's output head.
        ids, probs: [rows, top], the target's likeliest tokens and their probabilities.
        negatives: 0 to compute the softmax over the whole vocabulary. Otherwise the softmax is over
            the `ids` of all rows and this number of random other tokens. The random tokens are
            weighted to represent all tokens that are not in `ids`.
        generator: a host generator, for the random tokens.
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
    # The term that is added has the value 0. It is linear in states and head, and its gradients are
    # those computed above, so autograd returns them.
    terms = []
    for tensor, leaf in ((hidden, states), (weight, head)):
        if leaf.grad is not None:
            terms.append((tensor * leaf.grad / count).sum().float())
    gradient = torch.stack(terms).sum()
    return (total / count).float() + (gradient - gradient.detach())
