"""Where an engine may listen."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from pearl.errors import ConfigError, LocalProtocolError
from pearl.protocol.messages import Ping
from pearl.transport.address import bind_address, check_bind, private_directory
from pearl.transport.zeromq import ZmqConnection, ZmqListener
from tests.test_transport import WAIT, directory, messages  # noqa: F401


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://192.168.0.1:5555", "tcp://127.0.0.1:5555;tcp://0.0.0.0:1"),
        *("tcp://127.0.0.1.example.org:5555", "tcp://localhost:5555", "tcp://[::]:5555", "tcp://127.0.0.1:5555\n"),
        *("inproc://pearl", "ws://127.0.0.1:5555", "", "ipc://@abstract", "ipc://relative/control"),
    ],
)
def test_foreign_binds_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"until|Until"):
        check_bind(address)
    with pytest.raises(ConfigError):
        ZmqListener(address)


def test_loopback_binds_are_allowed_and_with_keys_others_that_tell_a_peer_where_to_connect() -> None:
    for address in ("tcp://127.0.0.1:*", "tcp://127.0.0.1:5555", "tcp://[::1]:0"):
        check_bind(address)
    for address in ("tcp://192.0.2.1:5555", "tcp://eth0:*", "tcp://[2001:db8::1]:5555"):
        with pytest.raises(ConfigError, match=r"until there are keys.*pearl keys FILE"):
            check_bind(address)
        check_bind(address, keys=True)
    for host in ("*", "0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]"):
        with pytest.raises(ConfigError, match="wildcard"):
            check_bind(f"tcp://{host}:5555", keys=True)


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """So are a link, whose owner decides where it leads, and a missing one."""
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    os.chown(other, 12345, -1)
    with pytest.raises(ConfigError, match="owned"):
        check_bind(f"ipc://{other}/control")


def test_a_path_too_long_for_a_socket_is_named_as_such(tmp_path: Path) -> None:
    """The kernel's limit; ZeroMQ says only `File name too long`, if that."""
    with pytest.raises(ConfigError, match="107"):
        check_bind(f"ipc://{tmp_path}/{'x' * 107}")


def test_private_directories_and_socket_files_whatever_the_umask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    before = os.umask(0)
    try:
        one, other = private_directory(), private_directory()
        listener = ZmqListener(bind_address("ipc", one))
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


def test_an_address_in_use_is_not_taken_over(directory: Path) -> None:  # noqa: F811
    """ZeroMQ unlinks an existing file and binds: the first engine would silently receive nothing more."""
    listener = ZmqListener(bind_address("ipc", directory))
    with pytest.raises(ConfigError, match="exists"):
        ZmqListener(listener.address)
    connection = ZmqConnection(listener.address)
    connection.send(Ping(1))
    assert messages(listener, 1) == [Ping(1)]
    with pytest.raises(LocalProtocolError, match="name the peer"):
        listener.send(Ping(1))
    connection.close()
    listener.close()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot bind"):
        ZmqListener(f"tcp://127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("address", ["nonsense", "ipc://", "tcp://127.0.0.1"])
def test_an_address_that_cannot_be_connected_to_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot connect"):
        ZmqConnection(address)
