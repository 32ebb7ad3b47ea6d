"""No text steers the terminal: not a model's, not a peer's, not a file's."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from pearl.cli.console import SafeConsole
from pearl.models.tokenizers import ToyTokenizer
from pearl.printable import PrintableFormatter, printable
from tests.conftest import TOY
from tests.screen import Person

# A window title, a colour, a cleared screen, a C1 control sequence, a bell, a carriage return, a right-to-left mark.
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x1b[2J\x9b31m\x07\rover\u202egnp"
BOUND = 120.0


def is_harmless(written: str) -> bool:
    return not any(c in written for c in "\x1b\x07\r\x9b\u202e")


def test_controls_are_shown_and_text_is_left() -> None:
    assert is_harmless(printable(HOSTILE))
    assert not is_harmless(HOSTILE)
    assert printable("a\tb\r\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"


def test_a_console_obeys_neither_escapes_nor_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """In cells, texts, strings and status lines alike."""
    table = Table("head", HOSTILE)
    table.add_row(HOSTILE, "[link=https://example.org]here[/link] :smile:")
    console = SafeConsole()
    for one in (table, HOSTILE, Text(HOSTILE, "dim"), "[red]x[/red]"):
        console.print(one)
    written = capsys.readouterr().out
    assert is_harmless(written)
    assert "[red]x[/red]" in written
    assert ":smile:" in written


def test_a_log_shows_what_it_quotes(caplog: pytest.LogCaptureFixture) -> None:
    record = logging.LogRecord("pearl", logging.WARNING, __file__, 1, "dropped: %s", (HOSTILE,), None)
    assert is_harmless(PrintableFormatter("%(message)s").format(record))


def shown_by(program: str, *arguments: str) -> Person:
    """A program of the test's own that runs `pearl` with something in it replaced, at a terminal."""
    return Person([sys.executable, "-c", program, *arguments], {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"})


# The toy tokenizer writes one character a token: this one writes an escape for each.
ESCAPING = f"""
import sys
from pearl.models.tokenizers import ToyTokenizer
written = ToyTokenizer.decode
ToyTokenizer.decode = lambda self, ids: {HOSTILE!r} * len(ids)
from pearl.cli import main
main()
"""
SHORT = ["--target", TOY, "--draft", TOY, "--max-tokens", "3", "--temperature", "0", "--ignore-eos"]


def test_generated_escapes_are_shown_at_a_terminal() -> None:
    with shown_by(ESCAPING, "generate", *SHORT, "--method", "ar", "123") as person:
        person.sees("ended by length")
        assert person.leaves() == 0
        assert "␛]0;owned" in person.text
        assert person.title == ""


def test_generated_escapes_pass_unchanged_into_a_pipe() -> None:
    """What a text is, is for its reader to say; a file must hold what the model wrote."""
    command = [sys.executable, "-c", ESCAPING, "generate", *SHORT, "--method", "ar", "123"]
    run = subprocess.run(command, capture_output=True, timeout=BOUND, check=True)
    assert run.stdout.decode().count(HOSTILE) == 3


def test_a_model_named_with_escapes_is_told_harmlessly() -> None:
    with Person([sys.executable, "-m", "pearl", "generate", "--target", f"/no/{HOSTILE}", "1"]) as person:
        assert person.leaves() != 0
        assert "no such directory" in " ".join(person.text.split())
        assert person.title == ""


def test_a_trace_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Names, labels and problems of a file that somebody has sent with a bug report."""
    event = {"ph": "X", "name": HOSTILE, "cat": HOSTILE, "pid": 1, "tid": HOSTILE, "ts": -1, "dur": 1, "args": {}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event, {"ph": HOSTILE}], "metadata": {"pearl_trace": HOSTILE}}))
    for command in ("check", "report", "show --png it.png", "replay", "compare"):
        files = [str(path)] * (2 if command == "compare" else 1)
        with Person([sys.executable, "-m", "pearl", "trace", *command.split(), *files]) as person:
            assert person.leaves() != 0
            assert "rror" in person.text
            assert person.title == ""


def test_the_screen_would_show_it() -> None:
    """The planted fault: a program that writes the same as it is, changes the title. So the tests above can fail."""
    with Person([sys.executable, "-c", f"print({HOSTILE!r})"]) as person:
        assert person.leaves() == 0
        assert person.title == "owned"


def test_the_toy_vocabulary_has_no_control_character() -> None:
    characters = ToyTokenizer(4000).decode(range(4000))
    assert printable(characters) == characters
