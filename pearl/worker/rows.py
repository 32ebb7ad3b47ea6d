"""The draft's side of how draft distributions travel. Knows no sockets."""

from __future__ import annotations

from pearl.decoding.distribution import Distribution, Form
from pearl.protocol.messages import DraftTokens, Message
from pearl.transport.base import TensorChannel


class RowPacker:
    """Decides how each distribution travels: sparse ones inline, dense ones over the channel if there is one.

    A channel row is sent by `send`, after its announcement: the target never waits for what was not announced.
    """

    def __init__(self, channel: TensorChannel | None = None) -> None:
        self._channel = channel

    def pack(self, rows: tuple[Distribution, ...]) -> None:
        """Announce, or bring to the host; `packed` does the rest."""
        for row in rows:
            if self._channel is not None and not row.is_sparse:
                row.announce()
            else:
                row.to_host()

    def send(self, rows: tuple[Distribution, ...]) -> None:
        """Send over the channel what was announced in a message that has just gone out."""
        for row in rows:
            if row.form is Form.CHANNEL:
                assert self._channel is not None
                self._channel.send(row.data)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def packed(message: Message, waited: float = 0.0) -> Message:
    """The message as it travels: distributions as bytes, and how long the draft has waited so far."""
    if not isinstance(message, DraftTokens):
        return message
    for row in message.rows:
        row.pack()
    return message.changed(waited=waited) if waited else message
