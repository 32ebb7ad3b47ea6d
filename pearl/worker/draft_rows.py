"""The draft's side of how draft distributions travel. Knows no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.decoding.distribution import AnnouncedRow, is_sparse, pack
from pearl.protocol.messages import DraftTokens, Message
from pearl.transport.base import TensorChannel


class RowPacker:
    """Decides how each distribution travels: sparse ones inline, dense ones over the channel if there is one.

    `send` sends a channel row after its announcement, so the target never waits for what was not announced.
    """

    def __init__(self, channel: TensorChannel | None = None) -> None:
        self._channel = channel

    def prepare(self, message: DraftTokens) -> tuple[DraftTokens, list[torch.Tensor]]:
        """Announce distributions, or copy them to the host; `packed` does the rest.

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
        """Send the rows that the last message announced, once it is out."""
        for probs in announced:
            assert self._channel is not None
            self._channel.send(probs)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def packed(message: Message, waited: float = 0.0) -> Message:
    """The message as it travels: distributions as bytes, and how long the draft has waited so far."""
    if not isinstance(message, DraftTokens) or not (message.rows or waited):
        return message
    rows = list(message.rows)
    for index, row in enumerate(rows):
        if isinstance(row, torch.Tensor):
            rows[index] = pack(row)
    return message.changed(rows=tuple(rows), waited=waited)


def _on_host(probs: torch.Tensor) -> torch.Tensor:
    """Copy [vocab] to the host, from a GPU into pinned memory; waits for the copy."""
    if probs.is_cpu:
        return probs
    copied = probs.to("cpu", non_blocking=True)
    torch.cuda.current_stream(probs.device).synchronize()
    return copied
