"""The control channel over ZeroMQ: the one file that imports zmq.

The target worker binds a `ZmqListener` (ROUTER); the draft and each front (a user's process) make a
`ZmqConnection` (DEALER).

* If both ends are on the same host, the address is a socket file (`ipc://`), which is protected by
  its directory (see `address`).
* If the ends are on two hosts (`tcp://`), both have keys (CURVE, ZeroMQ RFC 26). Everything is
  encrypted; the listener proves its key to its peers, and admits only one client key.

This module knows frames and peers, but not what messages mean.
"""

import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from errno import ENODEV
from math import ceil
from pathlib import Path

import zmq

from pearl.errors import ConfigError, LocalProtocolError, TransportError
from pearl.protocol.messages import Message
from pearl.transport.address import check_bind, file_of, is_file, raise_limit
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Peer, Received
from pearl.transport.codec import MAX_FRAME, encode, received
from pearl.transport.keys import Keys

# Most messages in an end's queue to send, and in a connection's queue to receive. A text has fewer,
# so a front may read slowly.
_QUEUE = 1 << 16
# Messages of one peer that a listener queues; further messages wait with the peer. Full queues of
# frames of `MAX_FRAME` take 256 MiB over TCP, and 16 GiB over a socket file, which only a process of
# this user can flood.
#
# A socket file needs the longer queue: if a peer closes its end while the queue is full, ZeroMQ
# (4.3.5) drops what the kernel still holds for it. A front has at most 128 requests and their
# cancellations under way, so its queue is never full when it leaves.
_TCP_LISTENER_QUEUE = 16
_FILE_LISTENER_QUEUE = 1 << 10
# Connections that may wait for ZeroMQ's thread, which takes one at a time; the kernel refuses more
# than this (or net.core.somaxconn). ZeroMQ's default of 100 fills in a millisecond's burst.
_BACKLOG = 4096
HANDSHAKE_SECONDS = 30  # for a peer to prove its key; a worker that loads its model may be slow
_RETRY_SECONDS = 0.01  # between two attempts to connect to a socket file
# Time limit of one attempt to connect, because after a long outage the kernel's own attempts come a
# minute apart.
_CONNECT_SECONDS = 5
# If the peer's kernel acknowledges nothing for so long, the link is cut or the host is gone.
_LOST_SECONDS = 15
# Plain numbers, because a call that is given pyzmq's enums takes twice as long.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.SNDMORE)
_EVENT = struct.Struct("=H")  # the start of a monitor's message; pyzmq's own parser imports asyncio
_ZAP_DOMAIN = "pearl"  # names the listener to the authenticator (RFC 27)
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def new_keys() -> Keys:
    """Return fresh keys. Raises `ConfigError` if ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq was built without CURVE: install one of its binary wheels")
    _, server = zmq.curve_keypair()
    _, client = zmq.curve_keypair()
    return Keys(server.decode(), client.decode())


def _public(secret: str) -> bytes:
    try:
        return zmq.curve_public(secret.encode())
    except (zmq.ZMQError, ValueError):  # forty valid characters may encode more than 32 bytes
        raise ConfigError(
            "the key file holds what is no key: copy it anew, or make one with `pearl keys FILE`"
        ) from None


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


class _Socket:
    """An end of the control channel.

    Its ZeroMQ socket has a context of its own, so that closing waits for no other socket. One thread may wait while
    others send and receive.
    """

    is_listener = False
    is_target = False  # whether messages that only targets send are refused

    def __init__(self, kind: int, queue: int) -> None:
        self._is_closed = False
        self._is_woken = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # ZeroMQ's sockets are for one thread at a time
        self._helpers = ExitStack()  # closed before the context can end
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = 0  # nothing may wait for a socket that is dropped unclosed
        self._socket.sndhwm = _QUEUE
        self._socket.rcvhwm = queue
        self._socket.handshake_ivl = HANDSHAKE_SECONDS * 1000
        self._socket.maxmsgsize = MAX_FRAME  # of a frame; ZeroMQ disconnects a peer that exceeds it
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)
        self._poll.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)

    def send(self, message: Message, peer: Peer | None = None) -> None:
        if peer is None and self.is_listener:
            raise LocalProtocolError("a listener must name the peer to which it sends")
        self.send_frames(encode(message), peer)

    def send_frames(self, frames: Sequence[bytes], peer: Peer | None = None) -> None:
        """Send an encoded message. Raises `TransportError`."""
        with self._lock:
            self._check_open()
            self._send(SOLE_PEER if peer is None else peer, frames)

    def receive(self, timeout: float) -> list[Received]:
        deadline = time.monotonic() + timeout
        is_woken = False
        arrivals = self._take()
        while not arrivals and not is_woken and time.monotonic() < deadline:
            is_woken = self._wait(deadline - time.monotonic())
            arrivals = self._take()
        return [(peer, received(frames, to_target=self.is_target)) for peer, frames in arrivals]

    def wait(self, timeout: float) -> None:
        self._wait(timeout)

    def _wait(self, timeout: float) -> bool:
        """Wait for a message or a call of `wake`, at most `timeout` seconds. May return earlier.

        Return whether `wake` was called.
        """
        ready = self._poll.poll(ceil(max(timeout, 0.0) * 1000))
        if self._wakeup in dict(ready):
            os.eventfd_read(self._wakeup)
        is_woken = self._is_woken
        self._is_woken = False
        return is_woken

    def wake(self) -> None:
        self._is_woken = True
        self._rouse()

    def _rouse(self) -> None:
        """Make the waiting thread check the socket."""
        if not self._is_closed:
            os.eventfd_write(self._wakeup, 1)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("this end of the control channel was closed")

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        """Send the frames. Raises `TransportError`. The caller must hold the lock."""
        raise NotImplementedError

    def _write(self, frames: Sequence[bytes]) -> None:
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _NOBLOCK | _SNDMORE)
            self._socket.send(frames[-1], _NOBLOCK)
        except zmq.Again:
            raise TransportError("the peer's queue is full: it has stopped receiving") from None
        except zmq.ZMQError as error:
            raise TransportError(f"the peer is gone ({error.strerror})") from None
        finally:
            self._pass_on()

    def _take(self) -> list[tuple[Peer, list[bytes]]]:
        """Return what has arrived."""
        arrivals: list[tuple[Peer, list[bytes]]] = []
        with self._lock:
            self._check_open()
            while len(arrivals) < MAX_BATCH and _is_readable(self._socket):
                frames = self._socket.recv_multipart(_NOBLOCK)
                peer = frames.pop(0) if self.is_listener else SOLE_PEER
                arrivals.append((peer, frames))
            self._pass_on()
        return arrivals

    def _pass_on(self) -> None:
        """Wake the waiting thread if more messages can be read.

        Without this call the thread could sleep on, because ZeroMQ's file descriptor signals new
        messages only once.
        """
        if _is_readable(self._socket):
            self._rouse()

    def close(self, flush: float = 0.0) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._helpers.close()
            self._socket.close(linger=int(flush * 1000))
            self._context.term()  # waits for that linger only
            os.close(self._wakeup)


class _OneKey:
    """Credentials provider for `zmq.auth`: admits one public key, in Z85."""

    def __init__(self, admitted: bytes) -> None:
        self._admitted = admitted

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._admitted


class ZmqListener(_Socket):
    """The end that others connect to. A peer is named by its ZeroMQ identity, which is new for every connection."""

    is_listener = True

    def __init__(self, address: str, keys: Keys | None = None, *, is_target: bool = True) -> None:
        """Bind `address`. The attribute `address` then includes the port.

        Raises `ConfigError` as `check_bind` does, or if the address cannot be bound.

        Args:
            keys: keys for a network address; a socket file needs none. A peer that has other keys
                gets no answer, and is disconnected before more than one of its frames is in memory.
            is_target: whether the listener is a target; otherwise it is a draft service.
        """
        self.is_target = is_target
        check_bind(address, keys is not None)
        if is_file(address):
            super().__init__(zmq.ROUTER, _FILE_LISTENER_QUEUE)
        else:
            assert keys is not None
            admitted = _public(keys.client)  # before there is a socket to close
            super().__init__(zmq.ROUTER, _TCP_LISTENER_QUEUE)
            self._admit(keys, admitted)
        raise_limit()
        self._socket.backlog = _BACKLOG
        self._socket.ipv6 = "[" in address
        self._socket.router_mandatory = 1  # else messages to a vanished peer are dropped silently
        try:
            self._socket.bind(address)
            if is_file(address):
                path = Path(file_of(address))
                self._helpers.callback(path.unlink, missing_ok=True)  # ZeroMQ leaves it behind
                path.chmod(0o600)  # whatever the umask was
        except zmq.ZMQError as error:
            self.close()
            problem = f"cannot bind {address}: {error.strerror}"
            if error.errno == ENODEV:
                problem += "; HOST must be an address or a network interface of this machine"
            raise ConfigError(problem) from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _admit(self, keys: Keys, admitted: bytes) -> None:
        """Encrypt the channel, and admit only peers whose public key is `admitted`."""
        # Imports asyncio (0.1 s), and only listeners need it.
        from zmq.auth.thread import ThreadAuthenticator

        authenticator = ThreadAuthenticator(self._context)
        authenticator.configure_curve_callback(_ZAP_DOMAIN, _OneKey(admitted))
        authenticator.start()
        self._helpers.callback(authenticator.stop)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server.encode()
        self._socket.zap_domain = _ZAP_DOMAIN.encode()
        # Without an authenticator nobody is admitted.
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        self._write([peer, *frames])


class ZmqConnection(_Socket):
    """The end that connects. Until the listener exists, messages wait in the queue.

    It does not reconnect after a disconnection, because another engine might answer. If the
    listener refuses the connection, `receive` returns a `TransportError` once, because no message
    will ever come.
    """

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        if is_file(address):
            keys = None
            if not os.path.isabs(file_of(address)):
                raise ConfigError(f"cannot connect to {address}: it names no socket file")
        elif keys is None:
            raise ConfigError(f"cannot connect to {address} without its keys (--keys FILE)")
        if keys is not None:  # before there is a socket to close
            server_key = _public(keys.server)
            client_key = _public(keys.client)
        super().__init__(zmq.DEALER, _QUEUE)
        self._failure = ""  # why the connection cannot be used any more
        self._is_pending = True  # `receive` has returned neither a message nor a refusal yet
        if keys is not None:
            self._socket.curve_serverkey = server_key
            self._socket.curve_publickey = client_key
            self._socket.curve_secretkey = keys.client.encode()
            self._socket.ipv6 = "[" in address
            self._socket.connect_timeout = _CONNECT_SECONDS * 1000
            self._socket.tcp_maxrt = _LOST_SECONDS * 1000  # the kernel would try for 15 minutes
        else:
            self._socket.reconnect_ivl = int(_RETRY_SECONDS * 1000)
        # A DEALER queues messages whether its peer is slow or gone; the socket's monitor tells which.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED)
        self._monitor.linger = 0
        self._helpers.callback(self._monitor.close)
        self._helpers.callback(self._socket.disable_monitor)
        self.address = address
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to {address}: {error.strerror}") from None

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        self._check_monitor()
        if self._failure:
            raise TransportError(self._failure)
        self._write(frames)

    def receive(self, timeout: float) -> list[Received]:
        messages = super().receive(timeout)
        if self._is_pending and (messages or not self.connected):
            self._is_pending = False
            if not messages:
                return [(SOLE_PEER, TransportError(self._failure))]
        return messages

    @property
    def connected(self) -> bool:
        """Whether the connection can still be used; true also before there is a listener."""
        with self._lock:
            self._check_monitor()
        return not self._failure

    def _check_monitor(self) -> None:
        if not self._failure and not self._is_closed and _is_readable(self._monitor):
            frames = self._monitor.recv_multipart(_NOBLOCK)
            (event,) = _EVENT.unpack_from(frames[0])
            self._failure = self._explain(event)

    def _explain(self, event: int) -> str:
        if event == zmq.EVENT_DISCONNECTED:
            return f"the peer at {self.address} is gone"
        return (
            f"the peer at {self.address} did not let us in: our key file is not its own, or it "
            "went away at that moment"
        )


listen = ZmqListener
connect = ZmqConnection
