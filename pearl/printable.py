"""Text that cannot steer a terminal, and a log of it, whoever wrote it: a model, a peer, a file.

Knows no terminal.
"""

from __future__ import annotations

import logging
import re

# What Unicode has to show a control character with. The two that a text is made of stay.
_PICTURES = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {0x7F: 0x2421}
_HALVES = re.compile("[\ud800-\udfff]")
# Other controls, and what turns the direction of writing: it could make a line read as what it is not.
_UNSEEN = re.compile("[\u0080-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair: Python makes such of bytes that are not UTF-8, and of JSON."""
    return _HALVES.search(text) is None


def printable(text: str) -> str:
    """`text` with control characters shown, not obeyed (but newline and tab)."""
    return _UNSEEN.sub("\ufffd", text.replace("\r\n", "\n").translate(_PICTURES))


class PrintableFormatter(logging.Formatter):
    """For a log that a terminal shows: what it quotes may be a peer's."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(level: str, who: str) -> None:
    """This process's log, as lines that begin with `who`."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"[{who}] %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def cause_of(error: BaseException) -> str:
    """The first line of what another library's error says, without its full stop; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
