"""A stretch of network in the test's hands: passes bytes on between a client and a port, and keeps what it saw."""

from __future__ import annotations

import socket
import threading


class Relay:
    """Listens on `port` of the loopback and connects to `target`. A context manager."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.seen = bytearray()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        try:
            client, _ = self._server.accept()
        except OSError:  # nobody came
            return
        server = socket.create_connection(("127.0.0.1", self._target))
        self._ends += [client, server]
        for source, sink in ((client, server), (server, client)):
            self._threads.append(threading.Thread(target=self._pass, args=(source, sink), daemon=True))
            self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
        except OSError:
            pass  # one end is gone

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for end in [self._server, *self._ends]:
            end.close()
