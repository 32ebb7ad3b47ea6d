"""How the draft sends its distributions: within the message, or over the tensor channel. Knows no sockets."""

from collections.abc import Sequence

import torch

from pearl.decoding.distribution import AnnouncedRow, is_sparse, pack
from pearl.protocol.messages import DraftTokens, Message
from pearl.transport.base import TensorChannel


class RowPacker:
    """Decides how each distribution travels: sparse ones inline, dense ones over the channel if there is one.

    A row goes over the channel only after the message that announces it is out: the target waits for announced rows
    only.
    """

    def __init__(self, channel: TensorChannel | None = None) -> None:
        self._channel = channel

    def prepare(self, message: DraftTokens) -> tuple[DraftTokens, list[torch.Tensor]]:
        """Announce the distributions that go over the channel, and copy the others to the host; `packed` makes bytes of
        these.

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
        """Send the rows that the last message announced; call once that message is out."""
        for probs in announced:
            assert self._channel is not None
            self._channel.send(probs)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def packed(message: Message, waited: float = 0.0) -> Message:
    """Return the message as it is sent: with distributions as bytes,
    and the seconds that the draft has waited so far.
    """
    if not isinstance(message, DraftTokens) or not (message.rows or waited):
        return message
    rows = list(message.rows)
    for index, row in enumerate(rows):
        if isinstance(row, torch.Tensor):
            rows[index] = pack(row)
    return message.changed(rows=tuple(rows), waited=waited)


def _on_host(probs: torch.Tensor) -> torch.Tensor:
    """Return `probs` [vocab] on the host; from a GPU it is copied into pinned memory, and the copy is waited for."""
    if probs.is_cpu:
        return probs
    copied = probs.to("cpu", non_blocking=True)
    torch.cuda.current_stream(probs.device).synchronize()
    return copied
