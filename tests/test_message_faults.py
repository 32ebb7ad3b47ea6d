"""The cells of FAULTS.md about messages: real sockets between loops in threads of this process, one message changed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pearl.config import EngineConfig
from pearl.engine import Engine
from pearl.engine.card import write_card
from pearl.errors import PearlError, StartError, TargetLost
from pearl.protocol.messages import (
    Begin,
    Committed,
    DraftTokens,
    Finish,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Verdict,
    Welcome,
)
from pearl.transport.address import bind_address, private_directory
from pearl.transport.base import Endpoint, Peer
from pearl.transport.codec import MAX_FRAME, encode
from pearl.transport.zeromq import ZmqConnection, ZmqListener
from tests.conftest import TOY, eventually
from tests.loops import Loops
from tests.replace import replace
from tests.test_faults import MESSAGE_FAULTS, Cell, nothing_left, text, those
from tests.test_processes import temporary

__all__ = ["temporary"]  # a fixture


# which message of its link is tampered with: its type, and the how-manieth that fits
Chosen = tuple[Callable[[Message], bool], int]


def of(kind: type, number: int = 1, **fields: object) -> Chosen:
    return (
        lambda message: (
            isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items())
        ),
        number,
    )


CHOSEN: dict[str, dict[str, Chosen]] = {
    "draft": {
        "start-up": of(Hello),
        "prefill": of(Heartbeat, work="prefill"),
        "drafting": of(DraftTokens),
        "verifying": of(DraftTokens, 5),
        "idle": of(Heartbeat, work="idle"),
    },
    "target to draft": {
        "start-up": of(Welcome),
        "prefill": of(Begin),
        "drafting": of(Verdict),
        "verifying": of(Verdict, 3),
        "idle": of(Finish),
    },
    "target to front": {
        "start-up": of(Welcome, 2),  # the draft's is the first
        "prefill": of(Committed),
        "drafting": of(Committed, 2),
        "verifying": of(Committed, 4),
        "idle": of(Finished),
    },
}
REFUSALS = {
    "garbage": "no message that version",
    "oversize": "is gone",
    "truncated": "no message that version",
    "wrong version": r"speaks version|version \d",
    "wrong vocabulary": "does not fit the target",
}
_DELAY_SECONDS = 0.3


class Tampered:
    """Makes `endpoint` do `fault` to one of the messages that it sends."""

    def __init__(self, endpoint: Any, fault: str, chosen: Chosen) -> None:
        self.struck = threading.Event()
        self._endpoint, self._whole, self._fault = endpoint, endpoint.send, fault
        self._fits, self._left = chosen
        self._held: list[tuple[Message, Peer | None]] = []
        self._lock = threading.RLock()
        endpoint.send = self.send

    def send(self, message: Message, peer: Peer | None = None) -> None:
        with self._lock:
            self._left -= self._fits(message)
            if self._left == 0 and not self.struck.is_set():
                self.struck.set()
                self._tamper(message, peer)
            elif self._held and self._fault == "delayed":
                self._held.append((message, peer))  # a connection delays, it does not reorder
            else:
                self._whole(message, peer)
                if self._held and self._held[0][1] == peer:
                    self._release()

    def _tamper(self, message: Message, peer: Peer | None) -> None:
        header = encode(message)[0]
        match self._fault:
            case "garbage":
                self._raw(b"\xc1 is no message that version", peer)
            case "oversize":
                self._raw(bytes(MAX_FRAME + 1), peer)
            case "truncated":
                self._raw(header[:-1], peer)
            case "duplicate":
                self._whole(message, peer)
                self._whole(message, peer)
            case "reordered":
                self._held.append((message, peer))
            case "delayed":
                self._held.append((message, peer))
                threading.Timer(_DELAY_SECONDS, self._release).start()
            case "lost":
                pass
            case "wrong version":
                self._whole(replace(message, version=message.version + 1), peer)  # type: ignore[union-attr, call-arg]
            case "wrong vocabulary":
                self._whole(replace(message, vocab_digest=b"other tokens"), peer)  # type: ignore[call-arg]

    def _raw(self, frame: bytes, peer: Peer | None) -> None:
        self._endpoint._send([frame] if peer is None else [peer, frame])

    def _release(self) -> None:
        with self._lock:
            held, self._held = self._held, []
            for message, peer in held:
                self._whole(message, peer)


class FaultyLoops(Loops):
    """Loops over a Unix socket, one of whose links is tampered with. What ends a draft is kept, as its exit is."""

    def __init__(self, directory: Path, cell: Cell) -> None:
        self.ended: list[BaseException] = []
        self.directory = directory
        listener = ZmqListener(bind_address("ipc", directory))
        self.address = listener.address
        chosen = CHOSEN[cell.of][cell.phase]
        tampered: list[Tampered] = []
        if cell.of != "draft":
            tampered.append(Tampered(listener, cell.fault, chosen))
        super().__init__(listener, lambda: ZmqConnection(listener.address), draft_timeout=2.0)

        def wrap(endpoint: Endpoint) -> Endpoint:
            if cell.of == "draft":
                tampered.append(Tampered(endpoint, cell.fault, chosen))
            return endpoint

        self.draft(wrap=wrap)
        (self.tampered,) = tampered

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except PearlError as error:
                self.ended.append(error)

        return super()._start(guarded)


def front_of(pair: FaultyLoops) -> Engine:
    """A front of a target that is a loop and runs already."""
    config = EngineConfig(target=TOY, draft=TOY, target_timeout=4.0).model_dump(mode="json")
    write_card(pair.directory, pair.address, config, {})
    return Engine.attach(pair.directory)


def check_refused(cell: Cell, pair: FaultyLoops) -> None:
    if cell.of == "target to front":
        pair.wait_ready()
        with pytest.raises(StartError, match=REFUSALS[cell.fault]):
            front_of(pair)
    else:
        eventually(lambda: bool(pair.ended), "the draft has ended, with an error")
        assert re.search(REFUSALS[cell.fault], str(pair.ended[0])), pair.ended
        assert not pair._ready.is_set()


def check_served(cell: Cell, pair: FaultyLoops) -> None:
    pair.wait_ready()
    with front_of(pair) as engine:
        if cell.outcome == "TargetLost":
            with pytest.raises(TargetLost, match="Start an engine again"):
                text(engine)
            return
        text(engine)
        if cell.phase == "idle":
            eventually(pair.tampered.struck.is_set, "the idle loop has sent that message")
        for _ in range(2):
            text(engine)


@pytest.mark.parametrize("cell", those(MESSAGE_FAULTS))
def test_message_fault(cell: Cell, temporary: Path) -> None:
    with nothing_left():
        directory = private_directory()
        pair = FaultyLoops(directory, cell)
        try:
            (check_refused if cell.outcome == "refused" else check_served)(cell, pair)
            assert pair.tampered.struck.is_set()
        finally:
            pair.close()
            (directory / "engine.json").unlink(missing_ok=True)
            directory.rmdir()
        assert not pair.errors
