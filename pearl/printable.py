"""Makes text from a model, a peer or a file harmless for a terminal and a log."""

import logging
import re

# Unicode's pictures of control characters. Newline and tab stay.
_PICTURES = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {0x7F: 0x2421}
_HALVES = re.compile("[\ud800-\udfff]")
# Other controls, and marks that change the direction of writing: they could disguise a line.
_UNSEEN = re.compile("[\u0080-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate, such as Python's stand-in for a byte that is not UTF-8."""
    return _HALVES.search(text) is None


def printable(text: str) -> str:
    """Return `text` with visible symbols for control characters other than newline and tab."""
    return _UNSEEN.sub("\ufffd", text.replace("\r\n", "\n").translate(_PICTURES))


def shortened(text: str, limit: int) -> str:
    """Return `text` if it has at most `limit` characters, otherwise its first `limit` characters and an ellipsis."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}..."


class PrintableFormatter(logging.Formatter):
    """Formats log records and replaces their control characters: a record may quote a peer."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(level: str, who: str) -> None:
    """Log to standard error; each line begins with `who` in brackets."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"[{who}] %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def cause_of(error: BaseException) -> str:
    """Return the first line of an error's message, without a final full stop; its type if it has no message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
