"""A person at a terminal, who starts a program, types, and reads the screen.

The terminal is a pseudo-terminal of the test.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.conftest import eventually, started_in
from tests.warm import take_terminal

BOUND = 120.0  # seconds; far more than anything takes

_KEPT = 2_000  # bytes of the program's first and last output, shown if something was not seen
_FRAME_ENDS = b"\x1b[?2026l"
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return an environment in which all directories are this test's own.

    At the end, no engine may have left a directory or a process.
    """
    for name in ("tmp", "state"):
        (tmp_path / name).mkdir()
    variables = {
        "TMPDIR": str(tmp_path / "tmp"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }
    environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"} | variables
    yield environment
    eventually(lambda: not list((tmp_path / "tmp").glob("pearl-*")), "no directory is left")
    eventually(lambda: not started_in(environment["TMPDIR"]), "no process is left")


class _Screen(pyte.HistoryScreen):
    """Answers a program that asks for the position of the cursor, as a terminal does."""

    answer: Callable[[str], None]
    # pyte puts two calls, which turn pages, around each event, and looks for events at every access to an attribute.
    __getattribute__ = object.__getattribute__

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Person:
    """A person at a terminal of `rows` and `columns`, in which `command` runs.

    Attributes:
        frames: how many frames the terminal has shown as a whole.
        italics: texts in italics, one for each row in which any were seen.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        rows: int = 30,
        columns: int = 100,
    ) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self._screen = _Screen(columns, rows, history=5000, ratio=1.0)
        self._screen.answer = self._answer
        self._stream = pyte.ByteStream(self._screen)
        self._began = self._written = self._unsent = b""
        self._read_lines: list[str] | None = None
        self.frames, self.italics = 0, set[str]()
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.leaves()
        os.close(self._master)

    def type(self, text: str) -> None:
        self._unsent += text.encode()
        while (
            self._write()
        ):  # the program has not read it yet, and may wait for its own output to be read
            self.read(0.01)

    def _answer(self, text: str) -> None:
        """Send an answer of the terminal itself, after what is still to be sent.

        This must not read, because `read` calls it.
        """
        self._unsent += text.encode()
        self._write()

    def _write(self) -> bool:
        """Write as much as the program accepts now; return whether anything is left to write."""
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._master, self._unsent[:4096]) :]
            except BlockingIOError:
                return True
        return False

    def send(self, line: str, shown: str = "", times: int = 1) -> None:
        """Type a line. If `shown` is given, wait until it has appeared."""
        self.type(line + ENTER)
        if shown:
            self.sees(shown, times)

    def paste(self, text: str) -> None:
        """Paste a text, as a terminal with bracketed paste does."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, rows: int, columns: int) -> None:
        self._screen.resize(rows, columns)
        self._read_lines = None
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds: float) -> bool:
        """Read what the program writes within `seconds`; return whether it has written anything."""
        self._write()
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the program is gone, and its side of the terminal with it
            return False
        self._read_lines = None
        self._began = (self._began + data)[:_KEPT] if len(self._began) < _KEPT else self._began
        self._written = (self._written + data)[-_KEPT:]
        for part in re.split(b"(?<=" + re.escape(_FRAME_ENDS) + b")", data):
            self._stream.feed(part)
            if part.endswith(
                _FRAME_ENDS
            ):  # a terminal that waits for the end of each frame shows this
                self.frames += 1
                rows = self._screen.buffer.values()
                self.italics |= {
                    "".join(c.data for _, c in sorted(row.items()) if c.italics) for row in rows
                }
        return bool(data)

    @property
    def lines(self) -> list[str]:
        """The lines that have scrolled away, and those on the screen."""
        return self._texts(self._screen.history.top) + self._visible

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def screen(self) -> str:
        """The text on the screen."""
        return "\n".join(self._visible)

    @property
    def hides_cursor(self) -> bool:
        return self._screen.cursor.hidden

    @property
    def _visible(self) -> list[str]:
        """The lines on the screen; they are read once until the program writes again."""
        if self._read_lines is None:
            buffer = self._screen.buffer
            self._read_lines = self._texts(buffer[row] for row in range(self._screen.lines))
        return self._read_lines

    def _texts(self, rows: Iterable[Any]) -> list[str]:
        columns = range(self._screen.columns)
        return ["".join(row[column].data for column in columns).rstrip() for row in rows]

    def colours(self, text: str) -> list[str]:
        """Return the foreground colour of each character of `text`, which must be on the screen."""
        for row, line in enumerate(self._visible):
            at = line.find(text)
            if at >= 0:
                return [self._screen.buffer[row][i].fg for i in range(at, at + len(text))]
        raise AssertionError(f"{text!r} is not on the screen:\n{self.screen}")

    def sees(self, text: str, times: int = 1) -> None:
        """Wait until `text` has appeared `times` times in all, whether broken into lines or not."""
        self.until(
            lambda: " ".join(self.text.split()).count(text) >= times,
            f"{text!r} is seen {times} times",
        )

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + BOUND
        while not condition():
            written = f"{self._began!r}\nand last: {self._written!r}"
            assert time.monotonic() < deadline, (
                f"not within {BOUND} s: {what}\n{self.text}\nwritten: {written}"
            )
            if not self.read(0.05) and self.process.poll() is not None:
                while self.read(0.05):
                    pass
                assert condition(), (
                    f"the program ended ({self.process.returncode}) before: {what}\n{self.text}"
                )

    def leaves(self) -> int:
        """Wait for the program's end; return its exit code."""
        deadline = time.monotonic() + BOUND
        while self.process.poll() is None:
            self.read(0.05)
            if time.monotonic() > deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise AssertionError(f"still running after {BOUND} s\n{self.text}")
        while self.read(0.05):
            pass
        return self.process.returncode

    @property
    def echoes(self) -> bool:
        """Whether a shell can use the terminal: typed characters appear, Ctrl-C sends a signal."""
        flags = termios.tcgetattr(self._master)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON and flags & termios.ISIG)
