"""The user's terminal: lines in, keys while a reply is made, and text that cannot steer it.

Under torchrun this process has no controlling terminal: Ctrl-C would be a signal to torchrun's agent, and a change of
size is told to nobody.  So Ctrl-C is read as the key that it is, here and without torchrun alike.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from prompt_toolkit import PromptSession, prompt
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.styles import Style
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pearl.errors import RequestError
from pearl.printable import printable

_INTERRUPT = b"\x03"
_LONG_PASTE = 2000  # characters; more than that stands as a note in the line, for the screen holds no more
_NOTE = re.compile(r"\[pasted text \d+: [\d,]+ characters\]")
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[@-~]|O.|.)?")  # keys that write nothing, and the brackets around a paste
_AGAIN_SECONDS = 1.0
_QUOTES = '"""'


class SafeConsole(Console):
    """A console on which text is text: no escape and no markup in it is obeyed, only styles that we give it."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def say(text: str) -> None:
    """A line to standard error."""
    click.echo(printable(text), err=True)


def state_directory() -> Path:
    """Where this user's programs keep what is theirs alone, such as a history."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "pearl"


@contextlib.contextmanager
def keys_are_keys() -> Iterator[None]:
    """While it is open the terminal makes nothing of what is typed, neither a signal of Ctrl-C nor an end of Ctrl-D.

    Who reads next gets it, be it typed while nobody does.
    """
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    attributes = termios.tcgetattr(file)
    attributes[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    attributes[6][termios.VMIN], attributes[6][termios.VTIME] = 1, 0
    termios.tcsetattr(file, termios.TCSADRAIN, attributes)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(file, termios.TCSADRAIN, before)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """While it is open SIGTERM and SIGHUP end the program by `SystemExit`, so that the terminal is put back as it was.

    What they raise, event loops and destructors may swallow: it is raised again until it gets through.
    """
    number = 0

    def end(received: int, _: object) -> None:
        nonlocal number
        number = number or received
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(each, end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class WatchKeys:
    """While it is open the keys of a terminal, whose `keys_are_keys`, are read here.

    Ctrl-C calls `interrupt`, the rest is kept in `typed`. A context manager.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self.typed = ""
        self._interrupt = interrupt
        self._bytes = bytearray()

    def __enter__(self) -> WatchKeys:
        self._file = sys.stdin.fileno()
        self._wakeup, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="keys")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._waker, b"!")
        self._thread.join()
        os.close(self._wakeup)
        os.close(self._waker)
        self.typed = _as_typed(self._bytes.decode(errors="ignore"))

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._file, self._wakeup], [], [])
            if self._wakeup in ready:
                return
            try:
                keys = os.read(self._file, 4096)
            except OSError:
                keys = b""
            if not keys or _INTERRUPT in keys:
                self._interrupt()
            if not keys:
                return  # the terminal is gone
            self._bytes += keys.replace(_INTERRUPT, b"")


def _as_typed(keys: str) -> str:
    """The text that these keys would have left in a line."""
    text = ""
    for key in _ESCAPES.sub("", keys).replace("\r\n", "\n").replace("\r", "\n"):
        if key in "\x7f\b":
            text = text[:-1]
        elif key.isprintable() or key == "\n":
            text += key
    return text.strip("\n")


class Commands(Completer):
    """Completes the first word of a line that begins with a slash. `known`: command -> what it does."""

    def __init__(self, known: dict[str, str]) -> None:
        self._known = known

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if typed.startswith("/") and " " not in typed and "\n" not in typed:
            for name, what in self._known.items():
                if name.startswith(typed):
                    yield Completion(name, start_position=-len(typed), display_meta=what)


class LineReader:
    """Reads messages from a terminal, with editing and history.

    Triple quotes open a message of several lines and close it. A long paste stands in the line as a note.
    """

    def __init__(self, commands: dict[str, str], remember: bool) -> None:
        self._pastes: dict[str, str] = {}
        self._session: PromptSession[str] = PromptSession(
            history=_history() if remember else InMemoryHistory(),
            completer=Commands(commands),
            complete_while_typing=True,
            key_bindings=self._keys(),
            style=Style.from_dict({"placeholder": "ansibrightblack", "prompt": "bold"}),
            enable_open_in_editor=False,
            reserve_space_for_menu=4,
        )

    def read(self, typed: str = "") -> str:
        """The next message. `typed`: what the line holds at first.

        Raises `EOFError` for Ctrl-D, `KeyboardInterrupt` for Ctrl-C in an empty line, and `RequestError` where it names
        a paste that is not known any more.
        """
        hint = HTML("<placeholder>Send a message (/? for help)</placeholder>")
        text = self._session.prompt(">>> ", placeholder=hint, default=typed)
        while text.count(_QUOTES) % 2:
            try:
                text += "\n" + self._session.prompt("... ")
            except (KeyboardInterrupt, EOFError):
                return ""
        text = text.encode("utf-8", "replace").decode()  # a byte that was no character
        return _NOTE.sub(self._pasted, _without_quotes(text))

    def agrees(self, question: str) -> bool:
        """Asks for a yes or no; whatever is no yes is a no."""
        try:
            return prompt(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            return False

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add(Keys.BracketedPaste)
        def paste(event: KeyPressEvent) -> None:
            data = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(self._folded(data))

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

    def _folded(self, data: str) -> str:
        if len(data) <= _LONG_PASTE:
            return data
        note = f"[pasted text {len(self._pastes) + 1}: {len(data):,} characters]"
        self._pastes[note] = data
        return note

    def _pasted(self, note: re.Match[str]) -> str:
        if note[0] not in self._pastes:
            raise RequestError(f"what {note[0]} stood for is not known any more: paste it again")
        return self._pastes[note[0]]


def _without_quotes(text: str) -> str:
    """`\"\"\"a message\"\"\"`, or a command with such an argument, without the quotes."""
    head, quotes, rest = text.partition(_QUOTES)
    if quotes and (not head.strip() or head.startswith("/")):
        return head + rest.replace(_QUOTES, "", 1).strip("\n")
    return text


def _history() -> History:
    """In a file that only this user can read; in memory where there can be none."""
    try:
        path = state_directory() / "history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("a"):
            return FileHistory(path)
    except (OSError, RuntimeError):  # no place, or no home
        return InMemoryHistory()
