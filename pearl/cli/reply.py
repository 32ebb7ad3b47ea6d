"""How a reply appears while it is made. Takes pieces of text; knows no engine.

What can no longer change is printed for good and scrolls away with the rest.  Only what is unfinished (a paragraph, a
list, the draft's guesses) is redrawn, and never more of it than fits the screen.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from pearl.printable import printable
from pearl.protocol.messages import Provenance

STYLES = {
    Provenance.ACCEPTED: "green",
    Provenance.CORRECTED: "bold yellow",
    Provenance.DIRECT: "",
    Provenance.BONUS: "cyan",
}
GUESSED = "dim italic"
_FRAME_SECONDS = 0.04  # between two redrawings: a reader sees no more
_REST = 3.0  # times what a drawing took: a long block must not keep a core busy
# With HTML a text would lose what only looks like it: std::vector<int>, <think>.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_MARGIN = 2  # rows of the screen left to what is below
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"  # a terminal that knows these shows a frame only when whole


class Reply(Protocol):
    """What a reply is written to."""

    def add(self, texts: Sequence[str], provenance: Sequence[Provenance]) -> None:
        """Final text, by token."""
        ...

    def guess(self, text: str) -> None:
        """What the draft believes comes next; it replaces its last guess."""
        ...

    def finish(self) -> None:
        """Nothing more comes."""
        ...


class PlainReply:
    """As it comes: for a file or a pipe, or a terminal that can do no more."""

    def add(self, texts: Sequence[str], provenance: Sequence[Provenance]) -> None:
        text = "".join(texts)
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def guess(self, text: str) -> None:
        pass

    def finish(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class _Bottom:
    """The last rows of a renderable: as many as fit the screen."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for line in lines[-max(1, console.size.height - _MARGIN) :]:
            yield from line
            yield Segment.line()


class _Screen:
    """A place at the bottom of the screen that is redrawn, and what leaves it upwards for good.

    A thread draws, so that the latest is always shown soon, and a slow drawing holds nothing up.

    Args:
        compose: what is to be printed for good now, if anything, and what stands below it; called with `lock` held.
    """

    def __init__(self, console: Console, compose: Callable[[], tuple[RenderableType | None, RenderableType]]) -> None:
        self.lock = threading.Lock()
        self._console = console
        self._compose = compose
        self._size = console.size
        self._live = self._started()
        self._changed, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._paint, daemon=True, name="screen")
        self._thread.start()

    def _started(self) -> Live:
        live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="visible")
        live.start()
        return live

    def changed(self) -> None:
        """There is something new to be drawn."""
        self._changed.set()

    def _paint(self) -> None:
        while not self._closing.is_set():
            self._changed.wait()
            self._changed.clear()
            began = time.monotonic()
            with self.lock:
                done, rest = self._compose()
            self._draw(done, rest)
            self._closing.wait(max(_FRAME_SECONDS, _REST * (time.monotonic() - began)))

    def _draw(self, done: RenderableType | None, rest: RenderableType) -> None:
        if self._console.size != self._size:
            self._after_resize()
        self._console.file.write(_BEGIN_FRAME)
        with self._console:  # one write
            self._live.update(_Bottom(rest), refresh=done is None)
            if done is not None:
                self._console.print(done)
        self._console.file.write(_END_FRAME)
        self._console.file.flush()

    def _after_resize(self) -> None:
        """The terminal has wrapped its rows anew, so where ours began is lost: goes on with a clean screen.

        What was printed for good is above, to be scrolled back to.
        """
        self._live.update(Text(), refresh=False)
        self._live.stop()
        self._size = self._console.size
        self._console.file.write("\n" * (self._size.height - 1) + "\x1b[H\x1b[J")
        self._live = self._started()

    def finish(self, last: RenderableType | None) -> None:
        """Prints what is left for good."""
        self._closing.set()
        self._changed.set()
        self._thread.join()
        self._draw(last, Text())
        self._live.stop()


class MarkdownReply:
    """Rendered Markdown, block by block."""

    def __init__(self, console: Console) -> None:
        self._rest = ""  # source of what is not printed for good
        self._screen = _Screen(console, self._compose)

    def add(self, texts: Sequence[str], provenance: Sequence[Provenance]) -> None:
        with self._screen.lock:
            self._rest += printable("".join(texts))
        self._screen.changed()

    def guess(self, text: str) -> None:
        pass  # amid a table or a list it could not be told from the text

    def _compose(self) -> tuple[RenderableType | None, RenderableType]:
        done, self._rest = _finished_blocks(self._rest)
        return Group(_markdown(done), "") if done else None, _markdown(self._rest)

    def finish(self) -> None:
        self._screen.finish(_markdown(self._rest) if self._rest.strip() else None)


class TokenReply:
    """Plain text, each token coloured by where it came from, the draft's guess behind it."""

    def __init__(self, console: Console) -> None:
        self._line = Text()  # since the last newline that was printed for good
        self._guess = ""
        self._screen = _Screen(console, self._compose)

    def add(self, texts: Sequence[str], provenance: Sequence[Provenance]) -> None:
        with self._screen.lock:
            for text, source in zip(map(printable, texts), provenance, strict=True):
                self._line.append(text, STYLES[source])
                self._guess = self._guess.removeprefix(text) if self._guess.startswith(text) else ""
        self._screen.changed()

    def guess(self, text: str) -> None:
        with self._screen.lock:
            self._guess = printable(text)
        self._screen.changed()

    def _compose(self) -> tuple[RenderableType | None, RenderableType]:
        done = None
        if "\n" in self._line.plain:
            *lines, self._line = self._line.split("\n", allow_blank=True)
            done = Text("\n").join(lines)
        return done, self._line + Text(self._guess, GUESSED)

    def finish(self) -> None:
        self._screen.finish(self._line or None)


def _finished_blocks(source: str) -> tuple[str, str]:
    """`source` up to its last block, which more text could still change, and from there on."""
    starts = [token.map[0] for token in _PARSER.parse(source) if token.level == 0 and token.map and token.nesting >= 0]
    if len(starts) < 2:
        return "", source
    lines = source.split("\n")
    return "\n".join(lines[: starts[-1]]), "\n".join(lines[starts[-1] :])


def _markdown(source: str) -> Markdown:
    """Links are shown with where they lead, for a text must not hide that; lines end where the model ended them."""
    rendered = Markdown("", hyperlinks=False, code_theme="ansi_dark")
    rendered.parsed = _PARSER.parse(source)
    for token in rendered.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return rendered
