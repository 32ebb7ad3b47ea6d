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
from pearl.engine import Engine
from pearl.models.tokenizers import ToyTokenizer
from pearl.printable import PrintableFormatter, printable
from tests.screen import Person

# A window title, a colour, a cleared screen, a C1 control sequence, a bell, a carriage return, a right-to-left mark.
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x1b[2J\x9b31m\x07\rover\u202egnp"
BOUND = 120.0


def is_harmless(written: str) -> bool:
    return not any(c in written for c in "\x1b\x07\r\x9b\u202e")


def test_controls_are_shown_and_text_is_left() -> None:
    """Colours, titles, the cursor, 8-bit controls and the direction of writing; newline and tab stay."""
    assert is_harmless(printable(HOSTILE))
    assert not is_harmless(HOSTILE)
    assert printable("a\x1b[31mb\x07\x08\r\x7f\x9b1m\u202ec") == "a\u241b[31mb\u2407\u2408\u240d\u2421\ufffd1m\ufffdc"
    assert printable("a\tb\r\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"
    characters = ToyTokenizer(4000).decode(range(4000))
    assert printable(characters) == characters, "the toy vocabulary has no control character"


def test_a_console_and_a_log_obey_neither_escapes_nor_markup(capsys: pytest.CaptureFixture[str]) -> None:
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
    record = logging.LogRecord("pearl", logging.WARNING, __file__, 1, "dropped: %s", (HOSTILE,), None)
    assert is_harmless(PrintableFormatter("%(message)s").format(record))


# The toy tokenizer writes one character a token: this one writes an escape for each.
ESCAPING = f"""
from pearl.models.tokenizers import ToyTokenizer
ToyTokenizer.decode = lambda self, ids: {HOSTILE!r} * len(ids)
from pearl.cli import main
main()
"""
SHORT = ["--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--method", "ar", "123"]


def test_generated_escapes_are_shown_at_a_terminal_and_pass_unchanged_into_a_pipe(toy: Engine) -> None:
    """A file must hold the model's own text: how to show it is up to its reader."""
    command = [sys.executable, "-c", ESCAPING, "generate", "--connect", str(toy.directory), *SHORT]
    with Person(command) as person:
        person.sees("ended by length")
        assert person.leaves() == 0
        assert "␛]0;owned" in person.text
        assert person.title == ""
    run = subprocess.run(command, capture_output=True, timeout=BOUND, check=True)
    assert run.stdout.decode().count(HOSTILE) == 3


def test_a_model_named_with_escapes_is_told_harmlessly() -> None:
    with Person([sys.executable, "-m", "pearl", "generate", "--target", f"/no/{HOSTILE}", "1"]) as person:
        assert person.leaves() != 0
        assert "no such directory" in " ".join(person.text.split())
        assert person.title == ""


def test_a_trace_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Names, labels and problems of a file that came with a bug report."""
    event = {"ph": "X", "name": HOSTILE, "cat": HOSTILE, "pid": 1, "tid": HOSTILE, "ts": -1, "dur": 1, "args": {}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event, {"ph": HOSTILE}], "metadata": {"pearl_trace": HOSTILE}}))
    program = (
        "import sys\nfrom pearl.cli import main\n"
        "for command in ('check', 'report', 'show --png it.png', 'replay', f'compare {sys.argv[1]}'):\n"
        "    sys.argv = ['pearl', 'trace', *command.split(), sys.argv[-1]]\n"
        "    try:\n        main()\n"
        "    except SystemExit as ended:\n        print('ended', ended.code)\n"
    )
    with Person([sys.executable, "-c", program, str(path)]) as person:
        assert person.leaves() == 0
        assert person.text.count("ended 2") == 5
        assert person.text.count("rror: ") >= 5
        assert person.title == ""


def test_the_screen_would_show_it() -> None:
    """The planted fault: a program that writes the same as it is, changes the title. So the tests above can fail."""
    with Person([sys.executable, "-c", f"print({HOSTILE!r})"]) as person:
        assert person.leaves() == 0
        assert person.title == "owned"
