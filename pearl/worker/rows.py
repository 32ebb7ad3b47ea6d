"""The draft's side of how draft distributions travel. Knows no sockets."""

from __future__ import annotations

import torch

from pearl.decoding.distribution import pack
from pearl.protocol.messages import DraftTokens, Message


def on_host(message: DraftTokens) -> DraftTokens:
    """With its distributions [vocab] on the host, from a GPU by pinned memory; waits for the copies."""
    return message.changed(rows=tuple(map(_copied, message.rows))) if message.rows else message


def packed(message: Message, waited: float = 0.0) -> Message:
    """The message as it travels: distributions as bytes, and how long the draft has waited so far."""
    if not isinstance(message, DraftTokens):
        return message
    if message.rows:
        return message.changed(rows=tuple(map(pack, message.rows)), waited=waited)
    return message.changed(waited=waited) if waited else message


def _copied(probs: torch.Tensor) -> torch.Tensor:
    if probs.is_cpu:
        return probs
    copied = probs.to("cpu", non_blocking=True)
    torch.cuda.current_stream(probs.device).synchronize()
    return copied
