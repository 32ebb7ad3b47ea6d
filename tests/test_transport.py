"""One contract for every endpoint and one for every tensor channel within a process; then what is ZeroMQ's own.

Two-process channels are in test_torch_dist.py.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest
import torch
import zmq

from pearl.decoding.distribution import PackedRow
from pearl.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TransportError
from pearl.protocol.messages import (
    Cancel,
    DraftTokens,
    Finish,
    Message,
    Ping,
    Pong,
)
from pearl.transport import address as addresses
from pearl.transport.address import bind_address, check_bind, private_directory
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Endpoint, Peer
from pearl.transport.codec import MAX_FRAME, received
from pearl.transport.keys import Keys
from pearl.transport.mailbox import Mailbox
from pearl.transport.memory import memory_channels, memory_hub
from pearl.transport.zeromq import ZmqConnection, ZmqListener, new_keys

WAIT = 20.0  # seconds: a bound for a slow machine, never reached where all is well


@dataclass
class Link:
    """A listener and ways to reach it: as a peer should, and with bytes of one's own."""

    listener: Endpoint
    connect: Callable[[], Endpoint]
    send_raw: Callable[[Sequence[bytes]], None]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = private_directory()
    yield path
    path.rmdir()  # fails where a listener has left anything behind


@pytest.fixture(params=["memory", "zeromq-ipc", "zeromq-tcp", "zeromq-tcp-keys"])
def new_link(request: pytest.FixtureRequest) -> Iterator[Callable[[], Link]]:
    """Makes links of one transport, as many as asked for, and closes all that came of them."""
    ends: list[Endpoint] = []
    directories: list[Path] = []

    def keep(end: Endpoint) -> Endpoint:
        ends.append(end)
        return end

    def memory() -> Link:
        hub = memory_hub()
        return Link(keep(hub.listener), lambda: keep(hub.connect()), hub.connect().send_frames)

    def zeromq_link() -> Link:
        directories.append(private_directory())
        keys = new_keys() if request.param.endswith("keys") else None
        listener = ZmqListener(bind_address(request.param.split("-")[1], directories[-1]), keys)
        return Link(
            keep(listener),
            lambda: keep(ZmqConnection(listener.address, keys)),
            lambda frames: send_raw(listener.address, frames, keys),
        )

    yield memory if request.param == "memory" else zeromq_link
    for end in ends:
        end.close()
    for path in directories:
        path.rmdir()


@pytest.fixture
def link(new_link: Callable[[], Link]) -> Link:
    return new_link()


def send_raw(address: str, frames: Sequence[bytes], keys: Keys | None = None) -> None:
    """What a program that is no PEARL might send."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        if keys is not None:
            show_keys(stranger, server=keys.server, client=keys.client)
        stranger.connect(address)
        stranger.send_multipart(frames)
        stranger.setsockopt(zmq.LINGER, int(WAIT * 1000))


def show_keys(stranger: zmq.Socket[bytes], server: str, client: str) -> None:
    """As one that believes in these two secrets."""
    stranger.curve_serverkey, stranger.curve_publickey = (zmq.curve_public(k.encode()) for k in (server, client))
    stranger.curve_secretkey = client.encode()


def collect(end: Endpoint | Mailbox, count: int) -> list[tuple[Peer, Message | RemoteProtocolError]]:
    """The next `count` messages, or fewer once `WAIT` is over."""
    got: list[tuple[Peer, Message | RemoteProtocolError]] = []
    deadline = time.monotonic() + WAIT
    while len(got) < count and time.monotonic() < deadline:
        got += end.receive(0.2)
    return got


def send_until_refused(send: Callable[[], None]) -> None:
    """A peer's absence is noticed soon, not at once."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        send()
        time.sleep(0.005)


def send_many(count: int, send: Callable[[], None]) -> None:
    for _ in range(count):
        send()


class TestEndpoints:
    def test_messages_arrive_in_order_and_once(self, link: Link) -> None:
        connection = link.connect()
        sent = [Ping(number) for number in range(500)]
        for message in sent:
            connection.send(message)
        assert [message for _, message in collect(link.listener, 500)] == sent
        assert link.listener.receive(0) == []

    def test_the_listener_answers_the_peer_that_asked(self, link: Link) -> None:
        """Two peers, each with its own name: an answer to one must not reach the other."""
        one, other = link.connect(), link.connect()
        one.send(Ping(1))
        other.send(Ping(2))
        names = {message.sent: peer for peer, message in collect(link.listener, 2)}
        assert len(set(names.values())) == 2
        link.listener.send(Finish(2), names[2])
        link.listener.send(Finish(1), names[1])
        assert collect(one, 1) == [(SOLE_PEER, Finish(1))]
        assert collect(other, 1) == [(SOLE_PEER, Finish(2))]
        assert one.receive(0) == other.receive(0) == []

    def test_a_peer_keeps_its_name(self, link: Link) -> None:
        connection = link.connect()
        connection.send(Ping(1))
        first = collect(link.listener, 1)
        connection.send(Ping(2))
        assert collect(link.listener, 1)[0][0] == first[0][0]

    def test_big_rows_arrive_whole(self, link: Link) -> None:
        rows = tuple(PackedRow(os.urandom(200_000)) for _ in range(5))
        message = DraftTokens(1, 0, 3, (1, 2, 3, 4, 5), 0.1, rows)
        draft = link.connect()
        draft.send(Ping(1))
        ((peer, _),) = collect(link.listener, 1)
        link.listener.trust(peer)
        draft.send(message)
        assert [got for _, got in collect(link.listener, 1)] == [message]

    @pytest.mark.parametrize(
        "frames", [[b""], [b"\xc1"], [b"\x91\x63"], [b"x", b"y"], [b"\xdd\xff\xff\xff\xff"]], ids=repr
    )
    def test_malformed_input_is_an_error_and_the_endpoint_lives(self, link: Link, frames: list[bytes]) -> None:
        """One bad peer must not take the engine from the others."""
        connection = link.connect()
        connection.send(Ping(1))
        assert [message for _, message in collect(link.listener, 1)] == [Ping(1)]
        link.send_raw(frames)
        ((stranger, error),) = collect(link.listener, 1)
        assert isinstance(error, RemoteProtocolError)
        connection.send(Ping(2))
        ((peer, message),) = collect(link.listener, 1)
        assert message == Ping(2)
        assert peer != stranger

    def test_malformed_input_does_not_hide_what_follows(self, link: Link) -> None:
        """Several messages may come out of one receive: the good ones behind a bad one must be among them."""
        link.send_raw([b"\xc1"])
        link.connect().send(Ping(1))
        got = [message for _, message in collect(link.listener, 2)]
        assert Ping(1) in got
        assert any(isinstance(message, RemoteProtocolError) for message in got)

    def test_sending_to_a_vanished_connection_raises(self, link: Link) -> None:
        connection = link.connect()
        connection.send(Ping(1))
        ((peer, _),) = collect(link.listener, 1)
        connection.close()
        with pytest.raises(TransportError, match="gone"):
            send_until_refused(lambda: link.listener.send(Finish(1), peer))

    def test_sending_to_a_vanished_listener_raises_and_goes_on_raising(self, link: Link) -> None:
        connection = link.connect()
        connection.send(Ping(1))
        collect(link.listener, 1)
        link.listener.close()
        with pytest.raises(TransportError, match="gone"):
            send_until_refused(lambda: connection.send(Ping(2)))
        with pytest.raises(TransportError, match="gone"):
            connection.send(Ping(3))

    def test_sending_to_an_unknown_peer_raises(self, link: Link) -> None:
        with pytest.raises(TransportError):
            link.listener.send(Finish(1), b"nobody")

    def test_a_peer_that_stops_receiving_fills_its_queue(self, link: Link) -> None:
        """Neither blocking nor unbounded memory: a hung draft must not hang the target.

        What is sent here overflows the queues on both sides and the kernel's buffers between them.
        """
        connection = link.connect()
        connection.send(Ping(1))
        ((peer, _),) = collect(link.listener, 1)
        message = DraftTokens(1, 0, 0, tuple(range(200)))
        with pytest.raises(TransportError, match="full"):
            send_many(200_000, lambda: link.listener.send(message, peer))

    def test_wake_ends_a_wait_now_or_later(self, link: Link) -> None:
        for early in (True, False):
            timer = threading.Timer(0.0 if early else 0.2, link.listener.wake)
            timer.start()
            if early:
                timer.join()
            started = time.monotonic()
            link.listener.wait(10 * WAIT)
            assert time.monotonic() - started < WAIT
        assert link.listener.receive(0) == []

    def test_one_thread_waits_while_another_sends(self, link: Link) -> None:
        """What arrives while the socket is sending is told of once, to the sender: it must reach who waits."""
        connection = link.connect()
        connection.send(Ping(0))
        ((peer, _),) = collect(link.listener, 1)
        got: list[Message | Exception] = []

        def read() -> None:
            while len(got) < 2000:
                got.extend(message for _, message in connection.receive(WAIT))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for number in range(2000):
            link.listener.send(Finish(number), peer)
            connection.send(Ping(number))
        reader.join(2 * WAIT)
        assert got == [Finish(number) for number in range(2000)]

    def test_receive_without_waiting_returns_at_once(self, link: Link) -> None:
        """It is asked between any two forwards: 200 times a second's timeout would show."""
        connection = link.connect()
        started = time.monotonic()
        for _ in range(200):
            assert link.listener.receive(0) == []
            assert connection.receive(0) == []
        assert time.monotonic() - started < WAIT

    def test_receive_waits_no_longer_than_told(self, link: Link) -> None:
        started = time.monotonic()
        assert link.listener.receive(0.1) == []
        assert 0.09 < time.monotonic() - started < WAIT

    def test_receive_returns_when_something_comes(self, link: Link) -> None:
        connection = link.connect()
        timer = threading.Timer(0.2, connection.send, [Ping(1)])  # the only thread that uses it
        timer.start()
        started = time.monotonic()
        got = link.listener.receive(10 * WAIT)
        timer.join()
        assert [message for _, message in got] == [Ping(1)]
        assert time.monotonic() - started < WAIT

    def test_one_receive_is_bounded(self, link: Link) -> None:
        """A flooding peer must not keep the loop from its other work."""
        connection = link.connect()
        for number in range(MAX_BATCH + 500):
            connection.send(Ping(number))
        sizes = []
        while sum(sizes) < MAX_BATCH + 500:
            sizes.append(len(link.listener.receive(WAIT)))
            assert sizes[-1], "messages were lost"
        assert max(sizes) <= MAX_BATCH
        assert sum(sizes) == MAX_BATCH + 500

    def test_two_links_side_by_side_are_strangers(self, new_link: Callable[[], Link]) -> None:
        """Fixed ports or names would make the second engine fail, or talk to the first."""
        links = [new_link(), new_link()]
        for number, link in enumerate(links):
            link.connect().send(Ping(number))
        for number, link in enumerate(links):
            assert [message for _, message in collect(link.listener, 1)] == [Ping(number)]
            assert link.listener.receive(0) == []

    def test_closing_twice_is_harmless_and_a_closed_end_says_so(self, link: Link) -> None:
        connection = link.connect()
        connection.close()
        connection.close()
        with pytest.raises(TransportError, match="closed"):
            connection.send(Ping(1))
        with pytest.raises(TransportError, match="closed"):
            connection.receive(0)


class TestMailbox:
    def test_posts_and_sends_keep_their_order(self, link: Link) -> None:
        with Mailbox(link.connect()) as mail:
            for number in range(500):
                (mail.send if number % 7 == 0 else mail.post)(Ping(number))
            assert [message for _, message in collect(link.listener, 500)] == [Ping(number) for number in range(500)]

    def test_what_is_queued_leaves_before_it_closes(self, link: Link) -> None:
        connection = link.connect()
        with Mailbox(connection) as mail:
            for number in range(100):
                mail.post(Ping(number))
        assert len(collect(link.listener, 100)) == 100
        connection.send(Ping(1))  # the endpoint itself is still open
        assert len(collect(link.listener, 1)) == 1

    def test_receives_while_its_owner_is_busy_and_when_it_waits(self, link: Link) -> None:
        connection = link.connect()
        with Mailbox(link.listener) as mail:
            for number in range(3):
                connection.send(Ping(number))
            time.sleep(0.1)  # a forward
            got = collect(mail, 3)
            assert [message for _, message in got] == [Ping(0), Ping(1), Ping(2)]
            timer = threading.Timer(0.2, connection.send, [Ping(3)])
            timer.start()
            assert [message for _, message in mail.receive(WAIT)] == [Ping(3)]
            connection.send(Ping(4))
            deadline = time.monotonic() + WAIT
            while mail.is_empty and time.monotonic() < deadline:
                time.sleep(0.01)
            assert [message for _, message in mail.receive(0)] == [Ping(4)]
            mail.post(Finish(4), got[0][0])
            assert [message for _, message in collect(connection, 1)] == [Finish(4)]
            assert mail.receive(0) == []

    def test_what_cannot_be_sent_comes_back_as_that_peers_error(self, link: Link) -> None:
        with Mailbox(link.listener) as mail:
            mail.post(Finish(1), b"nobody")
            ((peer, error),) = collect(mail, 1)
            assert peer == b"nobody"
            assert isinstance(error, TransportError)
            mail.send(Finish(1))  # a listener must name the peer
            ((_, error),) = collect(mail, 1)
            assert isinstance(error, LocalProtocolError if isinstance(link.listener, ZmqListener) else TransportError)

    def test_messages_pass_through_both_hooks(self, link: Link) -> None:
        def incoming(peer: Peer, message: Message) -> Message:
            if message == Ping(2):
                raise RemoteProtocolError("not two")
            return Ping(-message.sent)  # type: ignore[union-attr]

        with (
            Mailbox(link.connect(), outgoing=lambda message: Ping(message.sent + 1)) as out,  # type: ignore[union-attr]
            Mailbox(link.listener, incoming=incoming) as into,
        ):
            for number in range(3):
                out.post(Ping(number))
            one, two, three = (message for _, message in collect(into, 3))
            assert (one, three) == (Ping(-1), Ping(-3))
            assert isinstance(two, RemoteProtocolError)

    def test_a_thread_that_failed_tells_its_owner(self, link: Link) -> None:
        def incoming(peer: Peer, message: Message) -> Message:
            raise ZeroDivisionError

        link.connect().send(Ping(1))
        with Mailbox(link.listener, incoming=incoming) as mail, pytest.raises(ZeroDivisionError):
            collect(mail, 1)

    def test_a_flood_waits_outside(self, link: Link) -> None:
        connection = link.connect()
        with Mailbox(link.listener) as mail:
            connection.send(Ping(-1))
            ((peer, _),) = collect(mail, 1)
            link.listener.trust(peer)  # how much a stranger may send at once is not asked here
            for number in range(3 * MAX_BATCH):
                connection.send(Ping(number))
            time.sleep(0.3)
            assert mail._inbox.qsize() <= 2 * MAX_BATCH
            assert [message for _, message in collect(mail, 3 * MAX_BATCH)] == [*map(Ping, range(3 * MAX_BATCH))]

    def test_what_becomes_large_waits_as_it_came(self, link: Link) -> None:
        """A thousand messages, however small on the wire, may become gigabytes while a forward runs."""
        large: list[Message] = []

        def incoming(peer: Peer, message: Message) -> Message:
            large.append(message)
            return message

        connection = link.connect()
        with Mailbox(link.listener, incoming=incoming, weigh=lambda message: 24 << 20) as mail:
            for number in range(100):
                connection.send(Ping(number))
            time.sleep(0.3)
            assert len(large) == 3, "the last of them may be as large as it likes"
            assert [message for _, message in collect(mail, 100)] == [*map(Ping, range(100))]


class TestZeroMQ:
    def test_the_control_channel_does_without_torch(self) -> None:
        """The front holds no model: a torch import would add seconds to every command."""
        code = "import sys, pearl.transport.zeromq; sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_a_connection_may_come_before_its_listener(self, directory: Path) -> None:
        """Workers start at the same time; what the quicker one says first must not be lost."""
        address = bind_address("ipc", directory)
        connection = ZmqConnection(address)
        connection.send(Ping(1))
        listener = ZmqListener(address)
        assert [message for _, message in collect(listener, 1)] == [Ping(1)]
        connection.close()
        listener.close()

    def test_a_frame_beyond_the_limit_costs_its_sender_the_connection(self, directory: Path) -> None:
        """ZeroMQ must refuse it on its header, before it is in memory; the other peers notice nothing."""
        listener = ZmqListener(bind_address("ipc", directory))
        send_frames = [b"\x91\x63", bytes(MAX_FRAME + 1)]
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.connect(listener.address)
            stranger.send_multipart(send_frames)
            assert monitor.poll(WAIT * 1000)
            stranger.disable_monitor()
            monitor.close(0)
        connection = ZmqConnection(listener.address)
        connection.send(Ping(1))
        assert [message for _, message in collect(listener, 1)] == [Ping(1)]
        connection.close()
        listener.close()

    def test_of_very_many_frames_the_rest_is_read_with_few_pauses(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody else is heard before it is: with a pause after each few, 200,000 in a fifth of a second took four."""
        pauses: list[float] = []
        listener = ZmqListener(bind_address("ipc", directory))
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.SNDHWM, 0)
            stranger.connect(listener.address)
            stranger.send_multipart([b""] * 200_000)
            monkeypatch.setattr("pearl.transport.zeromq.time.sleep", pauses.append)
            ((_, error),) = collect(listener, 1)
            assert isinstance(error, RemoteProtocolError)
            connection = ZmqConnection(listener.address)
            connection.send(Ping(1))
            heard = collect(listener, 1)
            connection.close()
        listener.close()
        assert [message for _, message in heard] == [Ping(1)]
        assert sum(pauses) < 0.1

    @pytest.mark.parametrize("control", ["ipc", "tcp"])
    @pytest.mark.parametrize("number", [2, 200, 20_000])
    def test_frames_where_one_belongs_cost_their_sender_the_connection(
        self, directory: Path, control: str, number: int
    ) -> None:
        """To read them is work, and ZeroMQ has no limit of its own. The rest of them hides nobody's messages."""
        listener = ZmqListener(bind_address(control, directory))
        connection = ZmqConnection(listener.address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.connect(listener.address)
            stranger.send_multipart([b"\x91\x63"] * number)
            ((peer, error),) = collect(listener, 1)
            assert isinstance(error, RemoteProtocolError)
            assert monitor.poll(WAIT * 1000)
            stranger.disable_monitor()
            monitor.close(0)
        connection.send(Ping(1))
        ((other, message),) = collect(listener, 1)
        assert (message, other != peer) == (Ping(1), True)
        listener.send(Pong(1, 2), other)
        assert [message for _, message in collect(connection, 1)] == [Pong(1, 2)]
        connection.close()
        listener.close()

    def test_many_who_connect_do_not_end_the_listener(self, directory: Path) -> None:
        """ZeroMQ aborts where an accepted connection finds no descriptor; a shell's limit of them is often 1,024."""
        address = bind_address("ipc", directory)
        code = (
            "import resource, sys; from pearl.transport.zeromq import ZmqListener\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
            "listener = ZmqListener(sys.argv[1]); print('there', flush=True); sys.stdin.read()\n"
            "print(*(message for _, message in listener.receive(5)), flush=True); listener.close()"
        )
        command = [sys.executable, "-c", code, address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            clients = [socket.socket(socket.AF_UNIX) for _ in range(120)]
            for client in clients:
                client.connect(address.removeprefix("ipc://"))
            connection = ZmqConnection(address)
            connection.send(Ping(1))
            time.sleep(0.5)
            said, _ = process.communicate(timeout=WAIT)
            connection.close()
            for client in clients:
                client.close()
        assert said == f"{Ping(1)}\n"

    @pytest.mark.parametrize("is_draft", [False, True])
    def test_what_only_a_target_says_is_not_looked_into(self, directory: Path, is_draft: bool) -> None:
        """One message with the log probabilities of four million tokens took eight seconds, and half a gigabyte."""
        listener = ZmqListener(bind_address("ipc", directory))
        connection = ZmqConnection(listener.address)
        connection.send(Ping(1))
        ((peer, _),) = collect(listener, 1)
        if is_draft:
            listener.trust(peer)
        lines = b"\0\0" + b"\0\0\x80\xbf" * ((MAX_FRAME >> 2) - 2048)
        connection._send([msgpack.packb([4, 1, 0, bytes(4), b"\0", lines])])
        began = time.process_time()
        ((_, error),) = collect(listener, 1)
        assert "target does not expect Committed" in str(error)
        assert time.process_time() - began < 3
        connection.close()
        listener.close()

    def test_only_who_sends_too_many_frames_is_cut_off(self, directory: Path) -> None:
        """The number of a file descriptor may be another's by the time that a message is read."""
        listener = ZmqListener(bind_address("ipc", directory))
        connection = ZmqConnection(listener.address)
        connection.send(Ping(1))
        assert collect(listener, 1)
        with socket.socketpair()[0] as other, open(directory / "file", "wb") as file:
            for descriptor in (other.fileno(), file.fileno(), 9999):
                listener._disconnect(descriptor)
            other.getpeername()  # still connected
        (directory / "file").unlink()
        connection.send(Ping(2))
        assert [message for _, message in collect(listener, 1)] == [Ping(2)]
        connection.close()
        listener.close()

    def test_closing_drops_what_nobody_will_take_and_does_not_wait(self, directory: Path) -> None:
        """ZeroMQ's default lingers for ever: the front would never exit after its target died."""
        connection = ZmqConnection(bind_address("ipc", directory))
        connection.send(Ping(1))
        started = time.monotonic()
        connection.close()
        assert time.monotonic() - started < WAIT

    def test_closing_with_flush_lets_the_last_words_out(self, directory: Path) -> None:
        listener = ZmqListener(bind_address("ipc", directory))
        for number in range(20):
            connection = ZmqConnection(listener.address)
            connection.send(Cancel(number))
            connection.close(flush=WAIT)
        assert sorted(message.request for _, message in collect(listener, 20)) == list(range(20))
        listener.close()

    def test_tcp_tells_its_real_port(self, directory: Path) -> None:
        listener = ZmqListener(bind_address("tcp", directory))
        port = int(listener.address.rsplit(":", 1)[1])
        assert listener.address == f"tcp://127.0.0.1:{port}"
        assert port > 0
        listener.close()

    def test_a_listener_must_say_to_whom(self, directory: Path) -> None:
        listener = ZmqListener(bind_address("ipc", directory))
        with pytest.raises(LocalProtocolError):
            listener.send(Ping(1))
        listener.close()

    def test_the_socket_file_is_private_whatever_the_umask(self, directory: Path) -> None:
        before = os.umask(0)
        try:
            listener = ZmqListener(bind_address("ipc", directory))
        finally:
            os.umask(before)
        assert stat.S_IMODE((directory / "control").stat().st_mode) == 0o600
        listener.close()

    def test_a_socket_in_use_is_not_taken_over(self, directory: Path) -> None:
        """ZeroMQ unlinks an existing file and binds: the first engine would go deaf without a word."""
        listener = ZmqListener(bind_address("ipc", directory))
        with pytest.raises(ConfigError, match="exists"):
            ZmqListener(listener.address)
        connection = ZmqConnection(listener.address)
        connection.send(Ping(1))
        assert [message for _, message in collect(listener, 1)] == [Ping(1)]
        connection.close()
        listener.close()

    def test_a_port_in_use_is_an_error(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(ConfigError, match="cannot bind"):
                ZmqListener(f"tcp://127.0.0.1:{taken.getsockname()[1]}")

    @pytest.mark.parametrize("address", ["nonsense", "ipc://", "tcp://127.0.0.1"])
    def test_an_address_that_cannot_be_connected_to_is_an_error(self, address: str) -> None:
        with pytest.raises(ConfigError, match="cannot connect"):
            ZmqConnection(address)

    def test_a_collection_of_garbage_is_not_charged_to_a_peer(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a large process it takes half a second, which as decoding would be more than a peer has."""
        decoding, collections = False, 0

        def decode(frames: Sequence[bytes], to_target: bool) -> Message | RemoteProtocolError:
            nonlocal decoding
            decoding = True
            garbage = [[] for _ in range(10 * gc.get_threshold()[0])]  # type: ignore[var-annotated]
            decoding = False
            assert garbage
            return received(frames, to_target)

        def collect_slowly(phase: str, info: dict[str, int]) -> None:
            nonlocal collections
            if decoding and phase == "start":
                collections += 1
                until = time.thread_time() + 0.3 * (collections == 1)
                while time.thread_time() < until:
                    pass

        monkeypatch.setattr("pearl.transport.zeromq.received", decode)
        listener = ZmqListener(bind_address("ipc", directory))
        connection = ZmqConnection(listener.address)
        gc.callbacks.append(collect_slowly)
        try:
            for number in range(5):
                connection.send(Ping(number))
            assert [message for _, message in collect(listener, 5)] == [Ping(number) for number in range(5)]
        finally:
            gc.callbacks.remove(collect_slowly)
            connection.close()
            listener.close()
        assert gc.isenabled()


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            "tcp://*:5555",
            "tcp://0.0.0.0:5555",
            "tcp://192.168.0.1:5555",
            "tcp://127.0.0.1:5555;tcp://0.0.0.0:1",
            "tcp://127.0.0.1.example.org:5555",
            "tcp://localhost:5555",
            "tcp://[::]:5555",
            "tcp://127.0.0.1:5555\n",
            "inproc://pearl",
            "ws://127.0.0.1:5555",
            "",
            "ipc://@abstract",
            "ipc://relative/control",
        ],
    )
    def test_foreign_binds_are_refused(self, address: str) -> None:
        with pytest.raises(ConfigError, match=r"until|Until"):
            check_bind(address)
        with pytest.raises(ConfigError):
            ZmqListener(address)

    @pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:5555", "tcp://[::1]:0"])
    def test_loopback_binds_are_allowed(self, address: str) -> None:
        check_bind(address)

    @pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
    def test_a_directory_that_others_can_enter_is_refused(self, tmp_path: Path, mode: int) -> None:
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o700)
        check_bind(f"ipc://{shared}/control")
        shared.chmod(mode)
        with pytest.raises(ConfigError, match="0700"):
            check_bind(f"ipc://{shared}/control")

    def test_a_link_to_a_directory_and_a_missing_one_are_refused(self, tmp_path: Path) -> None:
        """Whoever owns the link decides where it leads."""
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        for name in ("link", "missing"):
            with pytest.raises(ConfigError, match="0700"):
                check_bind(f"ipc://{tmp_path / name}/control")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    def test_a_directory_of_another_user_is_refused(self, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir(mode=0o700)
        os.chown(other, 12345, -1)
        with pytest.raises(ConfigError, match="owned"):
            check_bind(f"ipc://{other}/control")

    def test_a_path_too_long_for_a_socket_is_named_as_such(self, tmp_path: Path) -> None:
        """The kernel's limit; ZeroMQ says only `File name too long`, if that."""
        with pytest.raises(ConfigError, match="107"):
            check_bind(f"ipc://{tmp_path}/{'x' * 107}")

    def test_an_unknown_control_channel(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="pigeon"):
            bind_address("pigeon", tmp_path)

    def test_a_private_directory_is_fresh_and_private(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        before = os.umask(0)
        try:
            one, other = private_directory(), private_directory()
        finally:
            os.umask(before)
        try:
            assert one != other
            for path in (one, other):
                assert path.name.startswith("pearl-")
                assert stat.S_IMODE(path.stat().st_mode) == 0o700
                check_bind(bind_address("ipc", path))
        finally:
            one.rmdir()
            other.rmdir()

    @pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, False)])
    def test_the_runtime_directory_is_used_if_it_is_private(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, used: bool
    ) -> None:
        runtime = tmp_path / "runtime"
        runtime.mkdir()
        runtime.chmod(mode)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        path = private_directory()
        path.rmdir()
        assert (path.parent == runtime) is used

    def test_only_the_loopback_pattern_is_matched_whole(self) -> None:
        """A `match` in place of a `fullmatch` would let a suffix through."""
        assert addresses._LOOPBACK.match("tcp://127.0.0.1:5555;tcp://0.0.0.0:1")
        with pytest.raises(ConfigError):
            check_bind("tcp://127.0.0.1:5555;tcp://0.0.0.0:1")


class TestMemoryChannel:
    def test_rows_arrive_in_order_bit_for_bit(self) -> None:
        """NaN, infinities, zeros with a sign and denormals too: a row is bits, not numbers."""
        target, draft = memory_channels(6, timeout=WAIT)
        odd = struct.unpack("<6f", struct.pack("<6I", 0x7FC00001, 0xFF800000, 0x80000000, 1, 0x3F800001, 0))
        rows = [torch.tensor(odd), *torch.rand(4, 6).unbind()]
        for row in rows:
            draft.send(row)
        got = torch.cat([target.receive(2), target.receive(3)])
        assert torch.equal(got.view(torch.int32), torch.stack(rows).view(torch.int32))
        target.send(rows[1])
        assert torch.equal(draft.receive(1)[0], rows[1])

    def test_a_receive_past_its_deadline_kills_the_channel(self) -> None:
        target, draft = memory_channels(4, timeout=0.05)
        draft.send(torch.rand(4))
        with pytest.raises(TransportError, match="1 of 2"):
            target.receive(2)
        for action in (lambda: target.receive(1), lambda: target.send(torch.rand(4))):
            with pytest.raises(TransportError, match="dead"):
                action()
        with pytest.raises(TransportError, match="gone"):
            draft.send(torch.rand(4))

    @pytest.mark.parametrize("row", [torch.ones(3), torch.ones(1, 4), torch.ones(4).double()], ids=str)
    def test_what_is_no_row_is_not_sent(self, row: torch.Tensor) -> None:
        with pytest.raises(LocalProtocolError):
            memory_channels(4, timeout=1.0)[0].send(row)

    def test_no_rows_are_an_empty_tensor(self) -> None:
        assert memory_channels(4, timeout=1.0)[0].receive(0).shape == (0, 4)
