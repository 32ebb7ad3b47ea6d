"""Reads lines from the user's terminal in a chat, and watches keys during a reply.

Ctrl-C is always read as a key, because as a signal it would not reach the chat under torchrun.
There this process has no controlling terminal: the signal of Ctrl-C would go to torchrun's agent,
and the signal of a resize (SIGWINCH) to no process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.styles import Style

_MARK_PASTES = b"\x1b[?2004h"  # bracketed paste on
_MARK_NO_PASTES = b"\x1b[?2004l"  # bracketed paste off
_RERAISE_SECONDS = 1.0
_QUOTES = '"""'


def state_directory() -> Path:
    """Return the directory for this user's private state, by the XDG Base Directory Specification."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".local" / "state"
    return base / "pearl"


def private_file(name: str) -> Path:
    """Return the path of a file in the state directory; make the file if it is missing.

    Raises `OSError`, or `RuntimeError` if the user has no home directory.
    """
    path = state_directory() / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Turn off the terminal's line editing, echo and signals inside the block: Ctrl-C and Ctrl-D are ordinary keys.

    SIGTERM and SIGHUP raise `SystemExit` in the block, so that the terminal's settings are restored. An event loop or a
    destructor may swallow this exception, so a timer raises it again every second until the block ends.
    """
    number = 0

    def end(received: int, _: object) -> None:
        nonlocal number
        number = number or received
        signal.setitimer(signal.ITIMER_REAL, _RERAISE_SECONDS)
        sys.exit(128 + number)

    for caught in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(caught, end)
    with get_app_session().input.raw_mode():
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


class KeyWatcher:
    """A context manager that reads the terminal's keys during a reply, in raw mode.

    Ctrl-C calls `interrupt` in a thread. All other keys are kept and given to the next prompts, as
    if they were typed there: each prompt takes the keys up to an Enter, and the last prompt the
    keys after the last Enter.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._input = get_app_session().input
        self._keys: list[KeyPress] = []

    def __enter__(self) -> KeyWatcher:
        self._mark_pastes(_MARK_PASTES)  # line breaks in a pasted text do not end the line
        self._wakeup, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="keys")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._waker, b"!")
        self._thread.join()
        os.close(self._wakeup)
        os.close(self._waker)
        self._mark_pastes(_MARK_NO_PASTES)
        store_typeahead(self._input, self._keys + self._input.flush_keys())

    def _mark_pastes(self, sequence: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(1, sequence)  # not to sys.stdout: the reply's display may have replaced it

    def _watch(self) -> None:
        events = select.poll()
        events.register(self._input.fileno(), select.POLLIN)
        events.register(self._wakeup, select.POLLIN)
        while True:
            ready = dict(events.poll())
            if self._wakeup in ready:
                return
            presses = self._input.read_keys()
            is_gone = self._input.closed
            if ready[self._input.fileno()] & (select.POLLHUP | select.POLLERR):
                is_gone = True
            typed = [press for press in presses if press.key != Keys.ControlC]
            if is_gone or len(typed) < len(presses):
                self._interrupt()
            if is_gone:
                return
            self._keys += typed


@dataclass
class _Commands(Completer):
    """Completes the names of commands and, after a name, the command's arguments."""

    commands: Mapping[str, str]
    arguments: Mapping[str, Completer]

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        typed, space, argument = document.text_before_cursor.partition(" ")
        if space and typed in self.arguments:
            yield from self.arguments[typed].get_completions(Document(argument), complete_event)
        elif not space and typed.startswith("/"):
            for command, description in self.commands.items():
                if command.startswith(typed):
                    yield Completion(command, -len(typed), display_meta=description)


class LineReader:
    """Reads messages from a terminal, with editing, history and completion of commands.

    Triple quotes begin and end a message of several lines.

    Args:
        commands: command -> description.
        arguments: command -> completer of the command's argument.
        remember: whether to keep the history in a file, for later chats.
    """

    def __init__(
        self, commands: Mapping[str, str], arguments: Mapping[str, Completer], remember: bool
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history() if remember else InMemoryHistory(),
            completer=_Commands(commands, arguments),
            complete_while_typing=True,
            key_bindings=self._key_bindings(),
            style=Style.from_dict({"placeholder": "ansibrightblack", "prompt": "bold"}),
            enable_open_in_editor=True,
            reserve_space_for_menu=4,
        )

    def read(self) -> str:
        """Return the next message.

        If the line is empty, Ctrl-D raises `EOFError` and Ctrl-C raises `KeyboardInterrupt`.
        """
        hint = HTML("<placeholder>Send a message (/? for help)</placeholder>")
        text = self._session.prompt(">>> ", placeholder=hint)
        while text.count(_QUOTES) % 2:
            try:
                text += "\n" + self._session.prompt("... ")
            except (KeyboardInterrupt, EOFError):
                return ""
        text = text.encode("utf-8", "replace").decode()  # surrogates, from invalid bytes
        return _without_quotes(text)

    def _key_bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add(Keys.BracketedPaste)
        def paste(event: KeyPressEvent) -> None:
            data = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(data)

        @keys.add("escape", "enter")
        def newline(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def interrupt(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt())

        return keys


def _without_quotes(text: str) -> str:
    """Remove the triple quotes around a message, or around the argument of a command."""
    command, quotes, message = text.partition(_QUOTES)
    if quotes and (not command.strip() or command.startswith("/")):
        return command + message.replace(_QUOTES, "", 1).strip("\n")
    return text


def _history() -> History:
    """Return the history of messages, in a file that only this user can read.

    If that file cannot be written, the history is in memory.
    """
    try:
        path = private_file("history")
        with path.open("a"):
            return FileHistory(path)
    except (OSError, RuntimeError):  # no writable state directory, or no home
        return InMemoryHistory()
