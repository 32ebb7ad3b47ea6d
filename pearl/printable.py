"""Makes text from a model, a peer or a file harmless for terminals and logs."""

import logging
import re

# Control characters -> Unicode's symbols for them. Newline and tab are kept.
_PICTURES = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {0x7F: 0x2421}
_HALVES = re.compile("[\ud800-\udfff]")
# Other control characters, and marks that change the direction of writing. They could disguise a
# line.
_UNSEEN = re.compile("[\u0080-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate.

    For example, Python puts a lone surrogate in place of a byte of a file name that is not UTF-8.
    """
    return _HALVES.search(text) is None


def printable(text: str) -> str:
    """Return `text` with visible symbols for control characters other than newline and tab."""
    return _UNSEEN.sub("\ufffd", text.replace("\r\n", "\n").translate(_PICTURES))


def shortened(text: str, limit: int) -> str:
    """Return `text`, cut to its first `limit` characters and an ellipsis if it is longer."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}..."


class PrintableFormatter(logging.Formatter):
    """Formats log records, and replaces control characters, because a record may quote a peer."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(level: str, who: str) -> None:
    """Log to standard error; each line begins with `who` in brackets."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"[{who}] %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def cause_of(error: BaseException) -> str:
    """Return the first line of an error's message, without a final full stop.

    If there is no message, return the name of the error's type.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
