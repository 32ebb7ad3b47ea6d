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
_LEFT_OUT = (
    -1e4
)  # logit of a token that is none of the others; finite, because all of them may be recorded


def _jensen_shannon(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    q = log_q.exp()
    middle = ((p + q) / 2).log()
    return (p * (p.log() - middle) + q * (log_q - middle)) / 2


# Of target p and the logarithm of draft q, for each outcome: its part of the divergence.
DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fkl": lambda p, log_q: (
        -p * log_q
    ),  # cross-entropy: less than KL(p, q) by the target's entropy, which is constant
    "rkl": lambda p, log_q: log_q.exp() * (log_q - p.log()),
    "jsd": _jensen_shannon,
    "tvd": lambda p, log_q: (p - log_q.exp()).abs() / 2,
}


def _rows_loss(
    logits: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, divergence: str
) -> torch.Tensor:
    """The sum of the rows' losses.

    Args:
        logits: [rows, tokens], of the draft, for all tokens that the loss considers.
        ids, probs: [rows, top], as in `head_loss`; `ids` are columns of `logits`.
    """
    # Not by 1 minus the recorded ones: where the draft is very sure that is a rounding error, and so is its gradient.
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
    if 0 < negatives < len(weight):
        known, ids = ids.unique(return_inverse=True)
        others = (
            torch.randint(len(weight), (negatives,), generator=generator).to(ids.device).unique()
        )
        others = others[~torch.isin(others, known)]
        offsets = torch.zeros(len(known) + len(others), device=ids.device)
        offsets[len(known) :] = torch.tensor((len(weight) - len(known)) / max(1, len(others))).log()
        weight = weight[torch.cat((known, others))]
    states, head = (
        hidden.detach().requires_grad_(),
        weight.detach().requires_grad_(weight.requires_grad),
    )
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start in range(0, len(hidden), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        logits = (states[rows] @ head.to(hidden.dtype).T).float()
        logits = logits if offsets is None else logits + offsets
        loss = _rows_loss(logits, ids[rows], probs[rows], divergence)
        loss.backward()
        total += loss.detach()
    count = len(hidden)
    computed = (
        (each, leaf.grad)
        for each, leaf in ((hidden, states), (weight, head))
        if leaf.grad is not None
    )
    # Of value 0, and linear in states and head: autograd takes the gradients computed above for its own.
    gradient = torch.stack([(each * slope / count).sum().float() for each, slope in computed]).sum()
    return (total / count).float() + (gradient - gradient.detach())
