"""Displays a reply while it is generated.

This module takes pieces of text, and must not know the engine.

Text that can no longer change is printed once and scrolls away. Only the unfinished part (a
paragraph, a list, the draft's guesses) is redrawn, and of this part only as much as fits the
screen.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from pearl.cli.console import write_text
from pearl.colours import SOURCES
from pearl.printable import printable
from pearl.protocol.messages import Provenance
from pearl.text.reply import Delta, ReplyParser

STYLES = {Provenance(source): colour for source, (colour, _) in SOURCES.items()}
STYLES[Provenance.DIRECT] = ""
PENDING = "dim italic"
THOUGHT = "dim italic"
FRAME_SECONDS = 0.04  # least time between two frames, as faster changes cannot be seen
# Pause after a frame / time to draw it, so that redrawing a long block does not keep a core busy.
_REST_PER_FRAME = 3.0
# HTML is off: it would swallow text that looks like a tag, such as std::vector<int> or <think>.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_MARGIN = 2  # screen rows left free below the reply
# Synchronized output: the terminal shows only whole frames.
_BEGIN_FRAME = "\x1b[?2026h"
END_FRAME = "\x1b[?2026l"


def legend() -> Text:
    """Return the meaning of the colours of `TokenReply`."""
    meanings = []
    for source, (_, meaning) in SOURCES.items():
        meanings.append(Text(meaning, f"dim {STYLES[Provenance(source)]}"))
    meanings.append(Text("not judged yet", PENDING))
    return Text(" · ", "dim").join(meanings)


class Reply:
    """A display for one reply. This base class writes text as it comes, for files, pipes and dumb terminals."""

    def add(
        self,
        texts: Sequence[str],
        provenance: Sequence[Provenance],
        tokens: Sequence[int] = (),
    ) -> None:
        """Append final text: each token's text, where each token came from, and the tokens if they are known."""
        write_text("".join(texts))

    def guess(self, text: str) -> None:
        """Show the draft's guess of the following text, in place of the previous guess."""

    def finish(self) -> None:
        """End the display: no more text comes."""
        write_text("\n")


@dataclass
class _LastRows:
    """Shows a renderable, cut to as many of its last rows as fit the screen."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        for line in lines[-max(1, console.size.height - _MARGIN) :]:
            yield from line
            yield Segment.line()


class _ScreenReply(Reply):
    """Redraws unfinished text at the bottom of the screen, and prints finished text above it.

    A thread of its own draws, because drawing may be slow.
    """

    def __init__(self, console: Console) -> None:
        self._lock = threading.Lock()
        self._console = console
        self._size = console.size
        self._live = self._start_live()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._redraw_on_change, daemon=True, name="screen")
        self._thread.start()

    def _compose(self) -> tuple[RenderableType | None, RenderableType]:
        """Return the finished text to print once, or None, and the unfinished text to redraw.

        The caller holds `_lock`.
        """
        raise NotImplementedError

    def _last(self) -> RenderableType | None:
        """Return the text that is unfinished when the reply ends; None if all text is finished."""
        raise NotImplementedError

    def _start_live(self) -> Live:
        live = Live(
            console=self._console, auto_refresh=False, transient=True, vertical_overflow="visible"
        )
        live.start()
        return live

    def _redraw_on_change(self) -> None:
        while not self._closing.is_set():
            self._changed.wait()
            self._changed.clear()
            began = time.monotonic()
            with self._lock:
                finished, unfinished = self._compose()
            self._draw(finished, unfinished)
            drawing_seconds = time.monotonic() - began
            self._closing.wait(max(FRAME_SECONDS, _REST_PER_FRAME * drawing_seconds))

    def _draw(self, finished: RenderableType | None, unfinished: RenderableType) -> None:
        if self._console.size != self._size:
            self._restart_after_resize()
        self._console.file.write(_BEGIN_FRAME)
        with self._console:  # one write
            self._live.update(_LastRows(unfinished), refresh=finished is None)
            if finished is not None:
                self._console.print(finished)
        self._console.file.write(END_FRAME)
        self._console.file.flush()

    def _restart_after_resize(self) -> None:
        """Go on with a clean screen after a resize; finished text stays in the scrollback.

        The terminal has wrapped its lines anew, so it is unknown where the unfinished text stands.
        """
        self._live.update(Text(), refresh=False)
        self._live.stop()
        self._size = self._console.size
        self._console.file.write("\n" * (self._size.height - 1) + "\x1b[H\x1b[J")
        self._live = self._start_live()

    def finish(self) -> None:
        self._closing.set()
        self._changed.set()
        self._thread.join()
        self._draw(self._last(), Text())
        self._live.stop()


class MarkdownReply(_ScreenReply):
    """Rendered Markdown: finished blocks are printed once, and the last block is redrawn.

    It shows no guesses, because a guess inside a table or a list would look like the text.
    Reasoning, which a `parser` finds, is dimmed and not rendered.
    """

    def __init__(self, console: Console, parser: ReplyParser | None = None) -> None:
        self._answer = ""  # Markdown source not yet printed
        self._thought = ""  # reasoning not yet printed
        self._parser = parser
        super().__init__(console)

    def add(
        self,
        texts: Sequence[str],
        provenance: Sequence[Provenance],
        tokens: Sequence[int] = (),
    ) -> None:
        if self._parser is None:
            self._append(Delta.of_content("".join(texts)))
        else:
            self._append(self._parser.feed(texts, tokens))
        self._changed.set()

    def _append(self, new: Delta) -> None:
        with self._lock:
            self._thought += printable(new.reasoning)
            self._answer += printable(new.content)

    def _compose(self) -> tuple[RenderableType | None, RenderableType]:
        if self._thought and not self._answer:
            lines, newline, self._thought = self._thought.rpartition("\n")
            finished_lines = Text(lines, THOUGHT) if newline else None
            return finished_lines, Text(self._thought, THOUGHT)
        parts: list[RenderableType] = []
        if self._thought:
            parts.append(Text(self._thought + "\n", THOUGHT))
            self._thought = ""
        blocks, self._answer = _finished_blocks(self._answer)
        if blocks:
            parts.append(_markdown(blocks))
            parts.append("")
        return _group(parts), _markdown(self._answer)

    def _last(self) -> RenderableType | None:
        if self._parser is not None:
            self._append(self._parser.finish())
        has_answer = bool(self._answer.strip())
        parts: list[RenderableType] = []
        if self._thought:
            blank_line = "\n" if has_answer else ""
            parts.append(Text(self._thought + blank_line, THOUGHT))
        if has_answer:
            parts.append(_markdown(self._answer))
        return _group(parts)


def _group(parts: list[RenderableType]) -> Group | None:
    return Group(*parts) if parts else None


class TokenReply(_ScreenReply):
    """Plain text, in which colours show the tokens' sources; the draft's guess follows the text."""

    def __init__(self, console: Console) -> None:
        self._line = Text()  # text since the last newline printed
        self._guess = ""
        super().__init__(console)

    def add(
        self,
        texts: Sequence[str],
        provenance: Sequence[Provenance],
        tokens: Sequence[int] = (),
    ) -> None:
        with self._lock:
            for text, source in zip(map(printable, texts), provenance, strict=True):
                self._line.append(text, STYLES[source])
                if self._guess.startswith(text):
                    self._guess = self._guess.removeprefix(text)
                else:
                    self._guess = ""
        self._changed.set()

    def guess(self, text: str) -> None:
        with self._lock:
            self._guess = printable(text)
        self._changed.set()

    def _compose(self) -> tuple[RenderableType | None, RenderableType]:
        finished = None
        if "\n" in self._line.plain:
            lines = self._line.split("\n", allow_blank=True)
            self._line = lines.pop()
            finished = Text("\n").join(lines)
        return finished, self._line + Text(self._guess, PENDING)

    def _last(self) -> RenderableType | None:
        return self._line or None


def _finished_blocks(source: str) -> tuple[str, str]:
    """Split Markdown before its last block, which further text could still change.

    "One\\n\\nTwo" gives ("One\\n", "Two"), and "One" gives ("", "One").
    """
    starts = []  # the first line of each block
    for token in _PARSER.parse(source):
        if token.level == 0 and token.map and token.nesting >= 0:
            starts.append(token.map[0])
    if len(starts) < 2:
        return "", source
    lines = source.split("\n")
    last_start = starts[-1]
    return "\n".join(lines[:last_start]), "\n".join(lines[last_start:])


class _Code(CodeBlock):
    """A code block without rich's space before each line, which users would copy with the code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = str(self.text).rstrip()
        yield Syntax(text, self.lexer_name, theme=self.theme, word_wrap=True, padding=(1, 0))


class _Markdown(Markdown):
    elements: ClassVar = {**Markdown.elements, "fence": _Code, "code_block": _Code}


def _markdown(source: str) -> Markdown:
    """Render Markdown, with the model's line breaks.

    Each link's target is shown, so that a text cannot hide where a link leads.
    """
    rendered = _Markdown("", hyperlinks=False, code_theme="ansi_dark")
    rendered.parsed = _PARSER.parse(source)
    for token in rendered.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return rendered
