"""Draft distributions on their way: which form they travel in, and back to a tensor. Knows no sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pearl.errors import RemoteProtocolError
from pearl.protocol.messages import DraftTokens, Message, RowKind, Rows
from pearl.transport.base import TensorChannel

_SPARSE_SHARE = 8  # a row with fewer than vocab / 8 possible tokens travels as (ids, probs): exact and small
_MOST = 1.001  # of a probability, however it was rounded


class RowPacker:
    """On the draft's side: how a distribution [vocab], float32, travels; dense ones over the channel if there is one.

    A channel row is sent by `send`, after its announcement: the target never waits for what was not announced.
    """

    def __init__(self, channel: TensorChannel | None = None) -> None:
        self._channel = channel

    def pack(self, message: DraftTokens) -> DraftTokens:
        """A message whose distribution is as it was drawn from, for `inline` and `send`: it is still in memory."""
        if not message.rows.data:
            return message
        (probs,) = message.rows.data
        if self._channel is not None and not is_sparse(probs):
            return message
        copy = probs.to("cpu", non_blocking=True)  # of a GPU's into pinned memory
        if probs.is_cuda:
            torch.cuda.current_stream(probs.device).synchronize()
        return with_rows(message, Rows(RowKind.FRAMES, (copy,)), message.waited)

    def send(self, rows: Rows) -> None:
        """Sends over the channel what belongs there, of a message that has just gone out."""
        if self._channel is not None and rows.kind is RowKind.CHANNEL:
            for row in rows.data:
                self._channel.send(row)


def is_sparse(probs: torch.Tensor) -> bool:
    """Whether a distribution [vocab] travels as (ids, probs): it has fewer than vocab / 8 possible tokens."""
    return int(torch.count_nonzero(probs)) < probs.numel() // _SPARSE_SHARE


def inline(message: Message, waited: float = 0.0) -> Message:
    """The message as it travels: a distribution that it holds in memory becomes bytes, or its announcement."""
    return with_rows(message, _inline(message.rows), waited) if isinstance(message, DraftTokens) else message


def with_rows(message: DraftTokens, rows: Rows, waited: float) -> DraftTokens:
    """The message with these instead of its own; half the time that `replace` takes."""
    return DraftTokens(message.request, message.epoch, message.start, message.tokens, message.seconds, rows, waited)


def _inline(rows: Rows) -> Rows:
    if rows.kind is RowKind.CHANNEL:
        return Rows(RowKind.CHANNEL)
    if rows.kind is not RowKind.FRAMES:
        return rows
    (probs,) = rows.data
    weights = probs.numpy()
    if is_sparse(probs):
        ids = np.flatnonzero(weights > 0)
        return Rows(RowKind.SPARSE, ((ids.astype(np.int32).tobytes(), weights[ids].tobytes()),))
    return Rows(RowKind.FRAMES, (weights.tobytes(),))


def unpack(row: Any, vocab_size: int) -> torch.Tensor:
    """What a peer sent inline, one entry of `Rows.data` -> [vocab_size], float32.

    Raises `RemoteProtocolError` where it is no distribution over this vocabulary. A broken draft model says NaN.
    """
    ids, frame = row if isinstance(row, tuple) else (None, row)
    weights = np.frombuffer(frame, np.float32)
    if ids is None:
        sound, probs = weights.size == vocab_size, weights.copy()
    else:
        places = np.frombuffer(ids, np.uint32)
        sound, probs = places.size > 0 and bool(places.max() < vocab_size), np.zeros(vocab_size, np.float32)
        if sound:  # what was negative is largest
            probs[places] = weights
    if not sound or not are_probabilities(weights):
        raise RemoteProtocolError(f"draft sent what is no distribution over {vocab_size} tokens")
    return torch.from_numpy(probs)


def are_probabilities(values: Any) -> bool:
    """A NaN fails every comparison, and is the minimum of what it is in."""
    return bool(values.min() >= 0 and values.max() <= _MOST)
