"""One contract for every endpoint and for the mailbox; then what one transport has, and where an engine may listen.

test_torch_dist has tensor channels between two processes.
"""

import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest
import zmq

from pearl.decoding.distribution import PackedRow
from pearl.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TransportError
from pearl.protocol.messages import Cancel, DraftTokens, Finish, Message, Ping, Pong
from pearl.transport import connect, listen
from pearl.transport.address import (
    bind_address,
    check_bind,
    is_private,
    private_directories,
    private_directory,
)
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Connection, Endpoint, Listener, Peer
from pearl.transport.codec import MAX_FRAME
from pearl.transport.keys import write_keys
from pearl.transport.mailbox import Mailbox
from pearl.transport.zeromq import new_keys
from tests.peers import WAIT, collect, stranger

KEYS = new_keys()
HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # of open files


@dataclass
class Link:
    """A listener and ways to reach it: as a peer should, and with any bytes."""

    listener: Endpoint
    connect: Callable[[], Endpoint]
    send_raw: Callable[[Sequence[bytes]], None]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = private_directory()
    yield path
    path.rmdir()  # fails if a listener has left anything behind


@pytest.fixture(params=["ipc", "tcp"])
def link(request: pytest.FixtureRequest, directory: Path) -> Iterator[Link]:
    """Over one transport; closes all that came of it."""
    with ExitStack() as stack:

        def keep(end: Endpoint) -> Endpoint:
            stack.callback(end.close)
            return end

        listener = listen(address_of(request.param, directory), KEYS)
        yield Link(
            keep(listener),
            lambda: keep(connect(listener.address, KEYS)),
            lambda frames: send_raw(listener.address, frames),
        )


def address_of(scheme: str, directory: Path) -> str:
    return bind_address(scheme, directory) if scheme == "ipc" else "tcp://127.0.0.1:*"


def send_raw(address: str, frames: Sequence[bytes]) -> None:
    """What a program that is no PEARL might send."""
    with stranger_to(address) as peer:
        peer.connect(address)
        peer.send_multipart(frames)
        peer.setsockopt(zmq.LINGER, int(WAIT * 1000))


def stranger_to(address: str) -> AbstractContextManager[zmq.Socket[bytes]]:
    """A socket that is no PEARL's, with the keys where there are some."""
    return stranger(KEYS if address.startswith("tcp") else None)


def opened(address: str) -> socket.socket:
    """A bare connection, which says nothing."""
    if address.startswith("tcp"):
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        return socket.create_connection((host, int(port)), WAIT)
    file = socket.socket(socket.AF_UNIX)
    file.settimeout(WAIT)
    file.connect(address.removeprefix("ipc://"))
    return file


def messages(end: Endpoint | Mailbox, count: int) -> list[Message | RemoteProtocolError]:
    return [message for _, message in collect(end, count)]


def met(link: Link) -> tuple[Endpoint, Peer]:
    """A connection, and its name at the listener."""
    connection = link.connect()
    connection.send(Ping(-1))
    ((peer, _),) = collect(link.listener, 1)
    return connection, peer


def send_until_refused(send: Callable[[], None]) -> None:
    """A peer's absence is noticed after a while."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        send()
        time.sleep(0.005)


def send_many(count: int, send: Callable[[], None]) -> None:
    for _ in range(count):
        send()


class TestEndpoints:
    def test_the_listener_answers_the_peer_that_asked(self, link: Link) -> None:
        """Each peer keeps a name of its own: an answer to one must not reach another."""
        (one, first), (other, second) = met(link), met(link)
        assert first != second
        one.send(Ping(1))
        assert collect(link.listener, 1) == [(first, Ping(1))]
        link.listener.send(Finish(2), second)
        link.listener.send(Finish(1), first)
        assert collect(one, 1) == [(SOLE_PEER, Finish(1))]
        assert collect(other, 1) == [(SOLE_PEER, Finish(2))]
        assert one.receive(0) == other.receive(0) == []

    def test_big_rows_arrive_whole(self, link: Link) -> None:
        rows = tuple(PackedRow(os.urandom(200_000)) for _ in range(5))
        draft, _ = met(link)
        with Mailbox(draft) as mail:
            mail.send(message := DraftTokens(1, 0, 3, (1, 2, 3, 4, 5), 0.1, rows))
            assert messages(link.listener, 1) == [message]

    @pytest.mark.parametrize(
        "frames",
        [[b""], [b"\xc1"], [b"\x91\x63"], [b"x", b"y"], [b"\xdd\xff\xff\xff\xff"]],
        ids=repr,
    )
    def test_malformed_input_is_an_error_and_hides_nothing(
        self, link: Link, frames: list[bytes]
    ) -> None:
        """One bad peer must not take the engine from the others: the good messages behind a bad one are received."""
        connection, peer = met(link)
        link.send_raw(frames)
        connection.send(Ping(2))
        got = dict(collect(link.listener, 2))
        assert got.pop(peer) == Ping(2)
        assert [type(error) for error in got.values()] == [RemoteProtocolError]

    def test_sending_to_a_vanished_connection_raises(self, link: Link) -> None:
        connection, peer = met(link)
        connection.close()
        with pytest.raises(TransportError, match="gone"):
            send_until_refused(lambda: link.listener.send(Finish(1), peer))
        with pytest.raises(TransportError):
            link.listener.send(Finish(1), b"nobody")

    def test_sending_to_a_vanished_listener_raises_and_goes_on_raising(self, link: Link) -> None:
        connection, _ = met(link)
        link.listener.close()
        for _ in range(2):
            with pytest.raises(TransportError, match="gone"):
                send_until_refused(lambda: connection.send(Ping(2)))

    def test_a_peer_that_stops_receiving_fills_its_queue(self, link: Link) -> None:
        """Neither blocking nor unbounded memory: a hung draft must not hang the target.

        What is sent here overflows the queues on both sides and the kernel's buffers between them.
        """
        _, peer = met(link)
        message = DraftTokens(1, 0, 0, tuple(range(200)))
        with pytest.raises(TransportError, match="full"):
            send_many(200_000, lambda: link.listener.send(message, peer))

    def test_waits_end_in_time(self, link: Link) -> None:
        """By `wake`, before or during the wait; by a message; by the time-out; and not to wait is possible."""
        connection, _ = met(link)
        for act, delay in ((link.listener.wake, 0.0), (link.listener.wake, 0.2)):
            timer = threading.Timer(delay, act)
            timer.start()
            if not delay:
                timer.join()
            started = time.monotonic()
            link.listener.wait(10 * WAIT)
            assert time.monotonic() - started < WAIT
        timer = threading.Timer(0.2, connection.send, [Ping(1)])
        timer.start()
        started = time.monotonic()
        assert [message for _, message in link.listener.receive(10 * WAIT)] == [Ping(1)]
        timer.join()
        assert time.monotonic() - started < WAIT
        started = time.monotonic()
        assert link.listener.receive(0.1) == []
        assert 0.09 < time.monotonic() - started < WAIT
        started = time.monotonic()
        for _ in range(200):  # between any two forwards
            assert link.listener.receive(0) == connection.receive(0) == []
        assert time.monotonic() - started < WAIT

    def test_one_thread_waits_while_another_sends(self, link: Link) -> None:
        """What arrives while the socket sends is signalled once, to the sender: it must reach the waiting thread."""
        connection, peer = met(link)
        got: list[Message | Exception] = []

        def read() -> None:
            while len(got) < 2000:
                got.extend(message for _, message in connection.receive(WAIT))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for number in range(2000):
            link.listener.send(Finish(number), peer)
            connection.send(Ping(number))
        while reader.is_alive():
            link.listener.receive(0.1)
        assert got == [*map(Finish, range(2000))]

    def test_one_receive_is_bounded(self, link: Link) -> None:
        """A flooding peer must not keep the loop from its other work."""
        sizes = []
        with Mailbox(link.connect()) as mail:
            for number in range(MAX_BATCH + 500):
                mail.send(Ping(number))
            while sum(sizes) < MAX_BATCH + 500:
                sizes.append(len(link.listener.receive(WAIT)))
                assert sizes[-1], "messages were lost"
        assert max(sizes) <= MAX_BATCH
        assert sum(sizes) == MAX_BATCH + 500

    def test_closing_twice_is_harmless_and_a_closed_end_raises(self, link: Link) -> None:
        connection = link.connect()
        connection.close()
        connection.close()
        for act in (lambda: connection.send(Ping(1)), lambda: connection.receive(0)):
            with pytest.raises(TransportError, match="closed"):
                act()


class TestMailbox:
    def test_order_is_kept_and_what_is_queued_leaves_before_it_closes(self, link: Link) -> None:
        connection = link.connect()
        with Mailbox(connection) as mail:
            for number in range(500):
                (mail.send if number % 7 == 0 else mail.post)(Ping(number))
        connection.send(Ping(500))  # the endpoint itself is still open
        threading.Thread(target=connection.close, args=(WAIT,)).start()
        assert messages(link.listener, 501) == [*map(Ping, range(501))]
        assert link.listener.receive(0) == [], "each once"

    def test_what_cannot_be_sent_comes_back_as_that_peers_error(self, link: Link) -> None:
        with Mailbox(link.listener) as mail:
            mail.post(Finish(1), b"nobody")
            ((peer, error),) = collect(mail, 1)
            assert (peer, type(error)) == (b"nobody", TransportError)
            mail.send(Finish(1))  # a listener must name the peer
            ((_, error),) = collect(mail, 1)
            assert isinstance(error, LocalProtocolError)

    def test_messages_pass_through_both_hooks(self, link: Link) -> None:
        def incoming(peer: Peer, message: Message) -> Message:
            assert isinstance(message, Ping)
            if message == Ping(2):
                raise RemoteProtocolError("not two")
            if message == Ping(4):
                raise ZeroDivisionError  # a bug of ours ends the thread
            return Ping(-message.sent)

        with (
            Mailbox(link.connect(), outgoing=lambda message: Ping(message.sent + 1)) as out,  # type: ignore[union-attr]
            Mailbox(link.listener, incoming=incoming) as into,
        ):
            for number in range(3):
                out.post(Ping(number))
            one, two, three = messages(into, 3)
            assert (one, three) == (Ping(-1), Ping(-3))
            assert isinstance(two, RemoteProtocolError)
            out.post(Ping(3))
            with pytest.raises(ZeroDivisionError):
                collect(into, 1)

    def test_a_flood_waits_outside(self, link: Link) -> None:
        taken: list[Message] = []

        def incoming(_: Peer, message: Message) -> Message:
            taken.append(message)
            return message

        with (
            Mailbox(link.connect()) as out,
            Mailbox(link.listener, incoming=incoming) as mail,
        ):
            for number in range(3 * MAX_BATCH):
                out.send(Ping(number))
            time.sleep(0.3)
            assert len(taken) <= 2 * MAX_BATCH
            assert messages(mail, 3 * MAX_BATCH) == [*map(Ping, range(3 * MAX_BATCH))]


@pytest.fixture(params=["ipc", "tcp"])
def listener(request: pytest.FixtureRequest, directory: Path) -> Iterator[Listener]:
    made = listen(address_of(request.param, directory), KEYS)
    yield made
    made.close()


@pytest.fixture
def connection(listener: Listener) -> Iterator[Connection]:
    made = connect(listener.address, KEYS)
    yield made
    made.close()


class TestTransports:
    def test_a_connection_may_come_before_its_listener(self, directory: Path) -> None:
        """Workers start at the same time; the first messages of the quicker one must not be lost."""
        address = bind_address("ipc", directory)
        with Mailbox(connect(address)) as mail:
            mail.send(Ping(1))
            mail.post(Ping(2))
            listener = listen(address)
            (peer, first), (_, second) = collect(listener, 2)
            assert (first, second) == (Ping(1), Ping(2))
            listener.send(Pong(1, 2), peer)
            assert messages(mail, 1) == [Pong(1, 2)]
        listener.close()

    def test_what_a_peer_sent_before_its_end_is_read(
        self, listener: Listener, connection: Connection
    ) -> None:
        """Though something was sent to it in vain meanwhile."""
        connection.send(Ping(1))
        ((peer, _),) = collect(listener, 1)
        connection.send(Ping(2))
        connection.close(flush=WAIT)
        with pytest.raises(TransportError, match="gone"):
            send_until_refused(lambda: listener.send(Finish(1), peer))
        assert messages(listener, 1) == [Ping(2)]

    def test_a_path_that_cannot_be_bound_is_an_error(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pearl.transport.zeromq.check_bind", lambda address, keys: None)
        with pytest.raises(ConfigError, match="cannot bind"):
            listen(f"ipc://{directory}/nowhere/control")

    def test_a_frame_beyond_the_limit_costs_its_sender_the_connection(
        self, listener: Listener, connection: Connection
    ) -> None:
        """It is refused on its header, before it is in memory; the other peers notice nothing."""
        with stranger_to(listener.address) as peer:
            peer.connect(listener.address)
            monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            peer.send_multipart([b"\x91\x63", bytes(MAX_FRAME + 1)])
            assert monitor.poll(WAIT * 1000)
            peer.disable_monitor()
            monitor.close(0)
        connection.send(Ping(1))
        assert messages(listener, 1) == [Ping(1)]

    @pytest.mark.parametrize(
        ("scheme", "descriptors"),
        [("ipc", HARD_LIMIT), ("tcp", HARD_LIMIT), ("tcp", 64)],
        ids=["ipc", "tcp", "tcp without descriptors"],
    )
    def test_many_connections_do_not_end_the_listener(
        self, scheme: str, descriptors: int, directory: Path, tmp_path: Path
    ) -> None:
        """A burst exceeds ZeroMQ's own backlog, and a shell's limit of descriptors is often low.

        Without descriptors, a listener at a socket file is aborted by ZeroMQ (see SECURITY.md).
        """
        key_file = tmp_path / "keys"
        write_keys(key_file, KEYS)
        code = (
            "import resource, sys; from pathlib import Path\n"
            "from pearl.transport import listen; from pearl.transport.keys import read_keys\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[3])))\n"
            "listener = listen(sys.argv[1], read_keys(Path(sys.argv[2])))\n"
            "print(listener.address, flush=True); sys.stdin.read()\n"
            "print(*(message for _, message in listener.receive(20)), flush=True); listener.close()"
        )
        address = address_of(scheme, directory)
        command = [sys.executable, "-c", code, address, str(key_file), str(descriptors)]
        with (
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process,
            ExitStack() as clients,
        ):
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            for _ in range(120):
                clients.enter_context(opened(address))
            connection = connect(address, KEYS)
            connection.send(Ping(1))
            if descriptors == 64:
                clients.close()
            printed, _ = process.communicate(timeout=2 * WAIT)
            connection.close()
        assert printed == f"{Ping(1)}\n"

    def test_what_only_a_target_sends_is_not_decoded(
        self, listener: Listener, connection: Connection
    ) -> None:
        """One message with the log probabilities of four million tokens took eight seconds, and half a gigabyte."""
        lines = b"\0\0" + b"\0\0\x80\xbf" * ((MAX_FRAME >> 2) - 2048)
        message = [msgpack.packb([4, 1, 0, bytes(4), b"\0", lines])]
        threading.Thread(target=send_raw, args=(listener.address, message)).start()
        began = time.process_time()
        (error,) = messages(listener, 1)
        assert "Invalid value 4" in str(error), "by its type, the first thing in it"
        assert time.process_time() - began < 3

    def test_closing_drops_what_nobody_will_take_unless_it_is_flushed(
        self, listener: Listener, tmp_path: Path
    ) -> None:
        """ZeroMQ's default lingers forever: the front would never exit after its target died."""
        is_file = listener.address.startswith("ipc")
        connection = connect(f"ipc://{tmp_path}/nobody" if is_file else "tcp://127.0.0.1:1", KEYS)
        connection.send(Ping(1))
        started = time.monotonic()
        connection.close()
        assert time.monotonic() - started < WAIT
        for number in range(20):
            connection = connect(listener.address, KEYS)
            connection.send(Cancel(number))
            connection.close(flush=WAIT)
        assert sorted(message.request for message in messages(listener, 20)) == list(range(20))  # type: ignore[union-attr]


# ---- addresses ----


@pytest.mark.parametrize(
    "address",
    [
        *(
            "tcp://*:5555",
            "tcp://0.0.0.0:5555",
            "tcp://192.168.0.1:5555",
            "tcp://127.0.0.1:5555;tcp://0.0.0.0:1",
        ),
        *(
            "tcp://127.0.0.1.example.org:5555",
            "tcp://localhost:5555",
            "tcp://[::]:5555",
            "tcp://127.0.0.1:5555\n",
        ),
        *("inproc://pearl", "ws://127.0.0.1:5555", "", "ipc://@abstract", "ipc://relative/control"),
    ],
)
def test_foreign_binds_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"until|Until"):
        check_bind(address)
    with pytest.raises(ConfigError):
        listen(address)


def test_with_keys_addresses_are_allowed_that_tell_a_peer_where_to_connect() -> None:
    for address in (
        "tcp://127.0.0.1:*",
        "tcp://[::1]:0",
        "tcp://192.0.2.1:5555",
        "tcp://eth0:*",
        "tcp://[2001:db8::1]:5555",
    ):
        with pytest.raises(ConfigError, match=r"until there are keys.*pearl keys FILE"):
            check_bind(address)
        check_bind(address, keys=True)
    for host in ("*", "0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]"):
        with pytest.raises(ConfigError, match="wildcard"):
            check_bind(f"tcp://{host}:5555", keys=True)


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """So are a link, whose owner decides where it leads, a missing one, and another user's."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    check_bind(f"ipc://{shared}/control")
    (tmp_path / "link").symlink_to(shared)
    for name in ("link", "missing"):
        with pytest.raises(ConfigError, match="0700"):
            check_bind(f"ipc://{tmp_path / name}/control")
    for mode in (0o755, 0o750, 0o701, 0o777):
        shared.chmod(mode)
        with pytest.raises(ConfigError, match="0700"):
            check_bind(f"ipc://{shared}/control")
    if os.geteuid() == 0:  # only root can give a directory away
        shared.chmod(0o700)
        os.chown(shared, 12345, -1)
        with pytest.raises(ConfigError, match="owned"):
            check_bind(f"ipc://{shared}/control")


def test_a_temporary_directory_too_long_for_a_socket_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine started there, as on clusters that set TMPDIR for each job. A directory of others is refused."""
    long = tmp_path / ("long" * 25)
    long.mkdir(mode=0o700)
    short = tmp_path.parent / "short"
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr("pearl.transport.address.SHORT_DIRECTORY", str(short))
    for runtime in ("", str(long)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        directory = private_directory()
        try:
            assert directory.parent == short
            assert is_private(short)
            assert private_directories() == [directory]
        finally:
            directory.rmdir()
    short.chmod(0o755)
    with pytest.raises(ConfigError, match=r"too long for a Unix socket.*shorter directory"):
        private_directory()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path.parent))
    directory = private_directory()
    directory.rmdir()
    assert directory.parent == tmp_path.parent


def test_a_path_too_long_for_a_socket_is_named_as_such(tmp_path: Path) -> None:
    """The kernel's limit; ZeroMQ says only `File name too long`, if that."""
    with pytest.raises(ConfigError, match="107"):
        check_bind(f"ipc://{tmp_path}/{'x' * 107}")


def test_private_directories_and_socket_files_whatever_the_umask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    before = os.umask(0)
    try:
        one, other = private_directory(), private_directory()
        listener = listen(bind_address("ipc", one))
    finally:
        os.umask(before)
    assert one != other
    assert stat.S_IMODE((one / "control").stat().st_mode) == 0o600
    listener.close()
    for path in (one, other):
        assert path.name.startswith("pearl-")
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        check_bind(bind_address("ipc", path))
        path.rmdir()


@pytest.mark.parametrize(("mode", "is_used"), [(0o700, True), (0o755, False)])
def test_the_runtime_directory_is_used_if_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_used: bool
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    runtime.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    path = private_directory()
    path.rmdir()
    assert (path.parent == runtime) is is_used


def test_an_address_in_use_is_not_taken_over(directory: Path) -> None:
    """ZeroMQ unlinks an existing file and binds: the first engine would silently receive nothing more."""
    listener = listen(bind_address("ipc", directory))
    with pytest.raises(ConfigError, match="exists"):
        listen(listener.address)
    connection = connect(listener.address)
    connection.send(Ping(1))
    assert messages(listener, 1) == [Ping(1)]
    with pytest.raises(LocalProtocolError, match="name the peer"):
        listener.send(Ping(1))
    connection.close()
    listener.close()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot bind"),
    ):
        listen(f"tcp://127.0.0.1:{taken.getsockname()[1]}", KEYS)


@pytest.mark.parametrize("address", ["nonsense", "ipc://", "tcp://127.0.0.1"])
def test_an_address_that_cannot_be_connected_to_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot connect"):
        connect(address, KEYS)
