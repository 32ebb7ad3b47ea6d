"""Text for the user's terminal, printed without obeying its control characters.

Separate from `terminal`, which imports prompt_toolkit: every command prints, but only the chat reads lines.
"""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterable
from typing import TextIO

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pearl.printable import printable


class SafeConsole(Console):
    """Prints text literally: shows control characters as symbols, ignores markup, applies only our styles."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def text_input(errors: str, newline: str | None = "") -> TextIO:
    """Standard input without a byte order mark; `errors` and `newline` as of `open`. To be called before reading."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        encoding = codecs.lookup(sys.stdin.encoding).name
        wider = "utf-8-sig" if encoding in ("utf-8", "ascii") else encoding
        sys.stdin.reconfigure(encoding=wider, errors=errors, newline=newline)
    return sys.stdin


def say(text: str) -> None:
    """Print a line to standard error."""
    click.echo(printable(text), err=True)
