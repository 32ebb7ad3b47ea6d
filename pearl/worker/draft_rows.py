"""Packs the draft's distributions: into the message, or for the tensor channel.

This module knows no sockets.
"""

from collections.abc import Sequence

import torch

from pearl.decoding.distribution import AnnouncedRow, is_sparse, pack
from pearl.protocol.messages import DraftTokens, Message
from pearl.transport.base import TensorChannel


class RowPacker:
    """Decides how each distribution is sent.

    Sparse distributions are sent in the message.  Dense ones ("rows") go over the tensor channel,
    if there is one.  A row is sent only after the message that announces it, because the target
    waits for announced rows only.
    """

    def __init__(self, channel: TensorChannel | None = None) -> None:
        self._channel = channel

    def prepare(self, message: DraftTokens) -> tuple[DraftTokens, list[torch.Tensor]]:
        """Announce the distributions that go over the channel, and copy the others to the host.

        `packed` will make bytes of the copies.

        Returns:
            The message, and the announced tensors for `send`.
        """
        rows: list[torch.Tensor | AnnouncedRow] = []
        announced: list[torch.Tensor] = []
        for probs in message.rows:
            if self._channel is not None and not is_sparse(probs):
                rows.append(AnnouncedRow())
                announced.append(probs)
            else:
                rows.append(_on_host(probs))
        if rows:
            message = message.changed(rows=tuple(rows))
        return message, announced

    def send(self, announced: Sequence[torch.Tensor]) -> None:
        """Send the rows that the last message announced. Call this after the message was sent."""
        for probs in announced:
            assert self._channel is not None
            self._channel.send(probs)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def packed(message: Message) -> Message:
    """Return the message as it is sent, with its distributions as bytes."""
    if not isinstance(message, DraftTokens) or not message.rows:
        return message
    rows = list(message.rows)
    for index, row in enumerate(rows):
        if isinstance(row, torch.Tensor):
            rows[index] = pack(row)
    return message.changed(rows=tuple(rows))


def _on_host(probs: torch.Tensor) -> torch.Tensor:
    """Return `probs` [vocab] on the host. On a GPU, wait until it is copied into pinned memory."""
    if probs.is_cpu:
        return probs
    copied = probs.to("cpu", non_blocking=True)
    torch.cuda.current_stream(probs.device).synchronize()
    return copied
