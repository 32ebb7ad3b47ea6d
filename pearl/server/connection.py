"""uvicorn's connection with limits that uvicorn lacks: on slow clients, and per address."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_HEADER = 32 << 10  # bytes of a request line and headers

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """uvicorn's connection with time limits; the class attributes are its limits."""

    header_seconds = 10.0  # for headers to arrive; more bytes of the same header do not restart it
    take_seconds = 60.0  # for a client to read what was sent to it
    most_connections = 512  # one address may hold at most seven eighths of them
    _header_timer: asyncio.TimerHandle | None = None
    _take_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # calls pause_writing for any data that a client does not read
        host = self.client and self.client[0]
        own = sum(isinstance(one, H11Protocol) and (one.client and one.client[0]) == host for one in self.connections)
        if len(self.connections) > self.most_connections or own > self.most_connections * 7 // 8:
            transport.write(_FULL)
            transport.close()
        else:
            self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._take_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # In parts, for h11 checks the size of headers only while they are incomplete.
        for start in range(0, len(data), MOST_HEADER):
            if self.transport.is_closing():
                return
            try:
                super().data_received(data[start : start + MOST_HEADER])
            except h11.LocalProtocolError:  # malformed input during an answer, so no error can be sent
                self.transport.abort()
        self._update_header_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answering:  # the next request, which has arrived already
            self._update_header_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _update_header_timer(self) -> None:
        if self._is_answering and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif not self._is_answering and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._take_timer = self.loop.call_later(self.take_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._take_timer is not None:
            self._take_timer.cancel()
            self._take_timer = None
