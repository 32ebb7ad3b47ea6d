"""Draft distributions on their way: which form they travel in, and back to a tensor. Knows no sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pearl.protocol.messages import RowKind, Rows
from pearl.transport.base import TensorChannel

_SPARSE_SHARE = 8  # a row with fewer than vocab / 8 possible tokens travels as (ids, probs): exact and small
_SMALL = 128  # so does one with fewer than this, whatever the vocabulary: a message of one frame is cheaper than of two


class RowPacker:
    """On the draft's side: a distribution [vocab], float32 -> Rows; dense ones go over the channel if there is one.

    A channel row is sent by `flush`, after its announcement: the target never waits for what was not announced.
    """

    def __init__(self, channel: TensorChannel | None = None) -> None:
        self._channel = channel
        self._outbox: list[torch.Tensor] = []

    def pack(self, probs: torch.Tensor) -> Rows:
        weights = probs.cpu().numpy()
        if len(weights) < _SMALL or np.count_nonzero(weights) < max(_SMALL, len(weights) // _SPARSE_SHARE):
            ids = np.flatnonzero(weights > 0)
            return Rows(RowKind.SPARSE, ((ids.astype(np.int32).tobytes(), weights[ids].tobytes()),))
        if self._channel is None:
            return Rows(RowKind.FRAMES, (weights.tobytes(),))
        self._outbox.append(probs)
        return Rows(RowKind.CHANNEL)

    def flush(self, announced: bool) -> None:
        """Sends the rows of the message that has just gone out, or forgets them where none went out."""
        rows, self._outbox = self._outbox, []
        if announced and self._channel is not None:
            for row in rows:
                self._channel.send(row)


def unpack(row: Any, vocab_size: int, device: torch.device) -> torch.Tensor:
    """One entry of `Rows.data` -> [vocab_size], float32, on `device`."""
    if isinstance(row, torch.Tensor):
        return row.to(device)
    if isinstance(row, tuple):
        ids, probs = (
            torch.frombuffer(bytearray(b), dtype=t) for b, t in zip(row, (torch.int32, torch.float32), strict=True)
        )
        return torch.zeros(vocab_size).index_copy_(0, ids.long(), probs).to(device)
    return torch.frombuffer(bytearray(row), dtype=torch.float32).to(device)


def fits(rows: Rows, vocab_size: int) -> bool:
    """Whether what a peer sent inline are distributions over this vocabulary. A broken draft model says NaN."""
    for row in rows.data:
        if isinstance(row, tuple):
            ids, probs = np.frombuffer(row[0], np.int32), np.frombuffer(row[1], np.float32)
            if not ids.size or ids.min() < 0 or ids.max() >= vocab_size or not are_probabilities(probs):
                return False
        elif len(row) != 4 * vocab_size or not are_probabilities(np.frombuffer(row, np.float32)):
            return False
    return True


def are_probabilities(values: Any) -> bool:
    """A NaN fails every comparison, and is the minimum of what it is in."""
    return bool(values.min() >= 0 and values.max() <= 1.001)
