"""Text for the user's terminal, printed without obeying its control characters.

Apart from `terminal`, which imports the library that the chat's line takes: every command prints, and few read.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pearl.printable import printable


class SafeConsole(Console):
    """Prints text literally: shows control characters as symbols, ignores markup, applies only our styles."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def say(text: str) -> None:
    """Print a line to standard error."""
    click.echo(printable(text), err=True)
