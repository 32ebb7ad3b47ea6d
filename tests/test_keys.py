"""Key files, and what they are for: a peer without the key gets nothing, and is no burden to those who have it."""

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from pearl.errors import ConfigError, TransportError
from pearl.protocol.messages import Heartbeat, Ping
from pearl.transport.base import SOLE_PEER
from pearl.transport.keys import Keys, read_keys, write_keys
from pearl.transport.zeromq import ZmqConnection, ZmqListener, new_keys
from tests.peers import WAIT, collect, stranger


@pytest.fixture(scope="module")
def keys() -> Keys:
    return new_keys()


# ---- the file ----


def test_a_key_file_is_private_whatever_the_umask_and_comes_back(
    tmp_path: Path, keys: Keys
) -> None:
    before = os.umask(0)
    try:
        write_keys(tmp_path / "keys", keys)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert read_keys(tmp_path / "keys") == keys


def test_keys_differ_and_do_not_show(keys: Keys) -> None:
    """A repr ends up in logs and tracebacks."""
    assert len({keys.server, keys.client, new_keys().server}) == 3
    assert keys.server not in repr(keys)
    assert keys.client not in repr(keys)


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path, keys: Keys) -> None:
    """Not through a link either."""
    path = tmp_path / "keys"
    path.write_text("precious")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("keys", "link", "dangling"):
        with pytest.raises(ConfigError, match="is there already"):
            write_keys(tmp_path / name, keys)
    assert path.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


GOOD = "k" * 40
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "others may read it": (lambda path: path.chmod(0o640), "has mode 0640.*chmod 600"),
    "others may write it": (lambda path: path.chmod(0o602), "has mode 0602.*chmod 600"),
    "another user's": (lambda path: os.chown(path, 12345, -1), "another user's"),
    "a pipe": (
        lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
        "is no file",
    ),  # it would be waited for
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "irectory"),
    "not there": (lambda path: path.unlink(), "No such file"),
    **{
        repr(content[:40]): (
            lambda path, content=content: path.write_text(content, "latin-1"),
            "pearl keys FILE",
        )  # type: ignore[misc]
        for content in (
            *("", "\xff\xfe", "[]", "{}", "[" * 4000),
            *(
                json.dumps({"pearl_keys": 1, "server": GOOD, "client": GOOD} | changed)
                for changed in (
                    *({"pearl_keys": 2}, {"client": None}, {"client": 7}, {"client": GOOD + "k"}),
                    *({"client": GOOD[:-1] + "\n"}, {"more": "x" * 5000}),
                )
            ),
        )
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_private_file_of_two_keys_is_refused(
    tmp_path: Path, keys: Keys, kind: str
) -> None:
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    spoil, said = REFUSED[kind]
    write_keys(path := tmp_path / "keys", keys)
    spoil(path)
    with pytest.raises(ConfigError, match=said):
        read_keys(path)


def test_characters_that_stand_for_no_key_are_refused() -> None:
    """Forty of the highest digit exceed 32 bytes: ZeroMQ decodes them to something else, or fails."""
    with pytest.raises(ConfigError, match="no key"):
        ZmqListener("tcp://127.0.0.1:*", Keys("#" * 40, "#" * 40))


# ---- who is let in ----


@pytest.fixture
def listener(keys: Keys) -> Iterator[ZmqListener]:
    made = ZmqListener("tcp://127.0.0.1:*", keys)
    before = threading.active_count()
    yield made
    made.close()
    assert threading.active_count() < before, "the thread that looks at keys is left"


@pytest.mark.parametrize(
    "who", ["no key", "a password", "another server's key", "a client's key that is not admitted"]
)
def test_a_peer_without_the_key_gets_nothing(listener: ZmqListener, keys: Keys, who: str) -> None:
    """No Welcome and no Error: not a byte of a message, and what it says is not heard; a good peer is served."""
    other = new_keys()
    wrong = {"another server's key": Keys(other.server, keys.client)}
    wrong["a client's key that is not admitted"] = Keys(keys.server, other.client)
    with stranger(wrong.get(who)) as peer:
        if who == "a password":
            peer.plain_username, peer.plain_password = b"a", b"b"
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        peer.connect(listener.address)
        with contextlib.suppress(
            zmq.Again
        ):  # it may have been refused already, and would wait for ever
            peer.send_multipart([b"\x91\x63"], zmq.NOBLOCK)
        assert monitor.poll(WAIT * 1000), "it was neither refused nor let in"
        assert parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED
        connection = ZmqConnection(listener.address, keys)
        connection.send(Ping(1))
        ((name, message),) = collect(listener, 1)  # what the stranger said came first, had it come
        assert message == Ping(1)
        listener.send(Ping(2), name)
        assert [message for _, message in collect(connection, 1)] == [Ping(2)]
        assert peer.poll(0) == 0
        assert listener.receive(0) == []
        peer.disable_monitor()
        monitor.close(0)
        connection.close()


def test_nobody_is_let_in_once_the_authenticator_is_gone(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's own default would admit every key then: while the listener closes, say."""
    # Where the authenticator has taken the question and not answered, it is refused when the handshake is overdue.
    monkeypatch.setattr("pearl.transport.zeromq.HANDSHAKE_SECONDS", 2)
    monkeypatch.setattr(ThreadAuthenticator, "start", lambda authenticator: None)
    listener = ZmqListener("tcp://127.0.0.1:*", keys)
    connection = ZmqConnection(listener.address, keys)
    try:
        assert "did not let us in" in told(connection)
        assert listener.receive(0) == []
    finally:
        connection.close()
        listener.close()


def told(connection: ZmqConnection) -> str:
    """The one thing that a connection which was not let in receives."""
    ((peer, fault),) = collect(connection, 1)
    assert peer == SOLE_PEER
    assert isinstance(fault, TransportError)
    return str(fault)


def test_a_connection_that_is_not_let_in_learns_it(listener: ZmqListener, keys: Keys) -> None:
    """Once, and long before any time-out: nothing else will ever come."""
    for wrong, said in (
        (new_keys(), "not its own"),
        (Keys(keys.server, new_keys().client), "not"),
    ):
        connection = ZmqConnection(listener.address, wrong)
        with suppress(TransportError):  # it may have learned it by now
            connection.send(Ping(1))
        assert said in told(connection)
        assert connection.receive(0) == []
        with pytest.raises(TransportError, match="did not let us in"):
            connection.send(Ping(2))
        connection.close()


def test_a_listener_that_does_not_prove_its_key_is_told_nothing(keys: Keys) -> None:
    """Whoever took the address of a target that is gone must not get the prompts."""
    impostor = ZmqListener("tcp://127.0.0.1:*", new_keys())
    connection = ZmqConnection(impostor.address, keys)
    with suppress(TransportError):  # it may have learned it by now
        connection.send(Ping(1))
    assert "did not let us in" in told(connection)
    assert impostor.receive(0) == []
    connection.close()
    impostor.close()


def test_prompts_cannot_be_read_on_the_way(keys: Keys) -> None:
    """A relay records what passes."""
    listener, seen = ZmqListener("tcp://127.0.0.1:*", keys), bytearray()

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                seen.extend(data)
                sink.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as pool:
        connection = ZmqConnection(f"tcp://127.0.0.1:{server.getsockname()[1]}", keys)
        near, _ = server.accept()
        far = socket.create_connection(("127.0.0.1", int(listener.address.rsplit(":", 1)[1])))
        with near, far:
            ends = [pool.submit(pass_on, *way) for way in ((near, far), (far, near))]
            connection.send(Heartbeat(0, "heartbeat", 0))
            assert len(collect(listener, 1)) == 1
            connection.close()
            listener.close()
            for end in ends:
                end.result(WAIT)
    assert len(seen) > 200
    assert b"heartbeat" not in seen
