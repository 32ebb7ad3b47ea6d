"""The chat, as a person uses it: at a terminal that is driven and read, through pipes, under torchrun.

Replies are paced where a test has to do something while they are made.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pearl import RequestOptions, SamplingParams
from pearl.cli.chat import ChatSession, save_last_chat
from pearl.cli.slash_commands import COMMANDS
from pearl.colours import SOURCES
from pearl.engine import Engine
from pearl.text.conversation import Conversation
from tests.conftest import (
    AS_PUBLISHED,
    CHARACTERS,
    TOY,
    files_of_at_most,
    output,
    ran,
    started_in,
    wanted,
)
from tests.screen import CTRL_C, CTRL_D, Person, home

__all__ = ["home"]  # a fixture

Run = Callable[..., subprocess.CompletedProcess[str]]
TOYS = ["--target", TOY, "--draft", TOY, "--raw", "--ignore-eos"]
SLOW = [*TOYS, "--target-pace", "0.05", "--draft-pace", "0.01"]
STATUS = "tokens/s"


def workers(environment: dict[str, str]) -> list[psutil.Process]:
    """Target and draft, which is the younger one."""
    found = [p for p in started_in(environment["TMPDIR"]) if "pearl.worker" in p.cmdline()]
    return sorted(found, key=lambda p: p.create_time())


@pytest.fixture
def attached(toy: Engine) -> list[str]:
    """Arguments of a chat with the engine that runs already: no models to load."""
    return ["--connect", str(toy.directory), "--raw", "--ignore-eos"]


@pytest.fixture(scope="module")
def paced() -> Iterator[list[str]]:
    """Arguments of a chat with an engine that runs already, and is slow enough to be met amid a reply."""
    with Engine(TOY, TOY, target_pace=0.05, draft_pace=0.01) as engine:
        yield ["--connect", str(engine.directory), "--raw", "--ignore-eos"]


@contextmanager
def chatting(environment: dict[str, str], *arguments: str, columns: int = 100) -> Iterator[Person]:
    """A chat that has shown its prompt."""
    with Person(
        [sys.executable, "-m", "pearl", "chat", *arguments], environment, columns=columns
    ) as person:
        person.sees(">>>")
        yield person


# ---- at a terminal ----


def test_ctrl_c_ends_the_reply(home: dict[str, str], paced: list[str], anew: None) -> None:
    with chatting(home, *paced, "--temperature", "0") as person:
        person.send("123", wanted("123", 10))
        person.type(CTRL_C)
        person.sees("stopped after")
        person.sees(" tokens")
        text = " ".join(person.text.split())
        assert int(re.search(r"stopped after (\d+) tokens", text)[1]) >= 10
        person.send("/show", "1 turns")
        person.send("/set max_tokens 5", "max_tokens 5")
        person.send("4", STATUS)
        person.type(CTRL_C)  # in an empty line it only says how to leave
        person.sees("Ctrl-D or /bye leaves")
        person.send("/exit")
        assert person.leaves() == 0
        assert person.echoes


def test_what_is_typed_while_a_reply_is_made_is_kept(
    home: dict[str, str], paced: list[str]
) -> None:
    """Messages and commands in their order, edited as at a prompt; a pasted text waits until the user ends it."""
    with chatting(
        home, *paced, "--temperature", "0", "--max-tokens", "20", "--no-history"
    ) as person:
        person.send("123")
        first = wanted("123", 20)
        person.sees(first[:3])
        person.send("4")
        person.send("/set max_tokens 5x\x7f")
        person.send("6")
        person.paste("7\r8")
        person.sees(STATUS)
        second = wanted("123" + first + "4", 20)
        person.sees(f">>> 4 {second}")
        person.sees("max_tokens 5")
        person.sees(f">>> 6 {wanted('123' + first + '4' + second + '6', 5)}")
        person.sees(STATUS, 3)
        person.sees(">>> 7 8")
        person.type(CTRL_C)
        person.send("/show", "3 turns")
        person.send("/clear")
        person.send("/set max_tokens 20", "max_tokens 20")
        person.send("1" * 440, "1" * 20)
        person.type("/he")
        person.sees(">>> /he")
        person.send("lp", "/exit")


def test_workers_killed_amid_replies(home: dict[str, str]) -> None:
    """Without its draft the reply goes on; without its target the error is named, and the conversation saved."""
    with chatting(home, *SLOW, "--temperature", "0", "--max-tokens", "5") as person:
        person.send("123", STATUS)
        person.send("/show")
        person.sees(
            f"target {TOY} on c"
        )  # what auto has come to, not "auto"; the toy has no weights, so no dtype
        person.send("/set max_tokens 60")
        target, draft = workers(home)
        text = wanted("123" + wanted("123", 5) + "4", 60)
        person.send("4", text[:5])
        draft.kill()
        person.sees(text)
        person.sees("the draft was lost during the reply")
        person.sees(STATUS, 2)
        person.send("/set max_tokens default")
        person.send("5", wanted("123" + wanted("123", 5) + "4" + text + "5", 5))
        target.kill()
        assert person.leaves() == 4
        text = " ".join(person.text.split())
        assert "error: target worker was killed by signal 9" in text
        assert "pearl chat --continue goes on with this conversation" in text
        assert "Traceback" not in text
        assert person.echoes
    kept = json.loads(Path(home["XDG_STATE_HOME"], "pearl", "last-chat.json").read_text())
    assert [turn["user"] for turn in kept["turns"]] == ["123", "4"]


@pytest.mark.parametrize(("number", "own"), [(signal.SIGTERM, False), (signal.SIGHUP, True)])
def test_a_chat_that_is_ended_puts_the_terminal_back(
    home: dict[str, str], paced: list[str], number: signal.Signals, own: bool
) -> None:
    """And leaves nothing of an engine of its own."""
    with chatting(home, *(SLOW if own else paced), "--temperature", "0") as person:
        person.send("123", wanted("123", 5))
        assert not person.echoes
        person.process.send_signal(number)
        assert person.leaves() == 128 + number
        assert person.echoes


def test_a_command_that_is_ended_shows_the_cursor_again(home: dict[str, str]) -> None:
    """While a spinner hid it. And it leaves nothing of an engine."""
    command = [sys.executable, "-m", "pearl", "generate", "1", *TOYS]
    with Person(command, home) as person:
        person.sees("starting the workers")
        assert person.hides_cursor
        person.process.send_signal(signal.SIGTERM)
        assert person.leaves() == 128 + signal.SIGTERM
        assert not person.hides_cursor


def test_the_draft_is_shown_ahead_in_colours_and_a_resize_leaves_one_whole_reply(
    home: dict[str, str], paced: list[str], toy: Engine
) -> None:
    shown = (
        "--method",
        "pearl",
        "--look-ahead",
        "0",
        "--siblings",
        "0",
        "--show-draft",
        "--no-markdown",
        "--stats",
    )
    with chatting(home, *paced, *shown, "--temperature", "0", "--max-tokens", "40") as person:
        person.sees("/? for help")
        person.send("123", STATUS)
        for part in (
            "tokens/s",
            "tokens a step",
            "accepted of judged",
            "window c",
            "target waited",
            "max_tokens",
        ):
            person.sees(part)
        reply = wanted("123", 40)
        colours = person.colours(reply)
        meant = {source: person.colours(meaning)[0] for source, (_, meaning) in SOURCES.items()}
        assert len({*meant.values()}) == len(SOURCES), "a legend"
        guesses = {text for text in person.italics if text and " " not in text}  # not the legend
        person.send("/clear")
        person.send("/set max_tokens 150", "max_tokens 150")
        person.send("321")
        text = wanted("321", 150)
        person.sees(text[:50])
        person.resize(20, 60)
        person.until(lambda: text in person.screen.replace("\n", ""), "the whole reply")
        person.until(lambda: STATUS in person.screen, "the line below it")
        assert person.screen.replace("\n", "").count(text[:40]) == 1
        assert person.text.count("not judged yet") <= 1, "said once"
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (same,) = toy.generate([[1, 2, 3]], params.overridden_by(AS_PUBLISHED))
    assert colours == [meant[source.value] for source in same.provenance]
    assert any(guess in reply for guess in guesses)
    assert any(guess not in reply for guess in guesses), "half of what the draft says is refused"


def test_commands_and_what_they_say_of_mistakes(
    home: dict[str, str], attached: list[str], tmp_path: Path
) -> None:
    hostile = {"target": "x", "system": "\x1b[2J\x1b[31mSYSTEM", "tokens": [], "turns": []}
    (tmp_path / "hostile.json").write_text(json.dumps(hostile))
    text = wanted("123", 10)
    with chatting(home, *attached, "--temperature", "0", "--max-tokens", "10") as person:
        for alias in ("/help", "/?"):
            person.send(alias)
        person.sees("/exit and Ctrl-D too", 2)
        assert all(command in person.text for command in COMMANDS)
        for line, words in (
            ("/frobnicate", "unknown command /frobnicate"),
            ("/set temperature hot", "temperature: "),
            ("/set top_p 0.5", "top_p 0.5"),
            ("/set top_p default", "top_p 1.0 (default)"),
            ("/set rule", "rule coupled (default)"),
            ("/set min_p 0.1", "min_p 0.1"),
            ("/set system Be terse.", "system prompt: Be terse."),
            ("/file /nowhere", "cannot read /nowhere: No such file"),
            ("/set nonsense", "no setting 'nonsense'"),
            ("/method sad", "unknown method 'sad'"),
            ("/system Be brief.", "system prompt: Be brief."),
            ("/undo", "there is nothing to undo"),
            ("/regen", "there is no reply yet"),
            ("/stats", "nothing has been measured yet"),
            ("/load ~nobody-of-this-name/x", "cannot find ~nobody-of-this-name/x"),
            ("/save " + "x" * 300, "File name too long"),
            ("/load /nowhere", "cannot read /nowhere: No such file"),
            (f"/load {tmp_path / 'hostile.json'}", "0 turns from"),
            ("/system", "␛[2J␛[31mSYSTEM"),
            ("/system none", "system prompt: none"),
        ):
            person.send(line, words)
        for i, method in enumerate(("pearl", "ar", "sd"), start=1):
            person.send(f"/method {method}", f"method: {method}")
            person.send("123")
            person.sees(text, i)  # all methods say the same in the same place
            person.sees(STATUS, i)
            person.send("/undo", "forgotten: 123", i)
        person.send("/stats")
        lines = [["pearl", "ar", "sd"], ["replies", "1", "1", "1"], ["tokens", "10", "10", "10"]]
        person.until(
            lambda: all(line in [row.split() for row in person.lines] for line in lines),
            "a column a method",
        )
        person.send("/bye")
        assert person.leaves() == 0


def test_undo_regen_save_load_and_clear(
    home: dict[str, str], attached: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    with chatting(
        home, *attached, "--temperature", "1", "--seed", "1", "--max-tokens", "10"
    ) as person:
        person.send("123", STATUS)
        replies = []
        for times in (1, 2):
            person.send(f"/save {path}", "1 turns are in", times)
            replies.append(json.loads(path.read_text())["turns"][0]["reply"])
            if times == 1:
                person.send("/regen", STATUS, 2)
        assert replies[0] != replies[1], "another sample under the same seed"
        person.send("/clear", "the conversation is forgotten")
        person.send(f"/load {path}", "1 turns from")
        person.send("/undo", "forgotten: 123")
        (tmp_path / "mine.txt").write_text("mine")
        person.send(f"/save {tmp_path / 'mine.txt'}", "no saved conversation: name another file")
        path.write_text("hello")
        person.send(f"/load {path}", "no saved conversation: file")
        person.send("4", STATUS, 3)
        assert person.frames > 3, "replies are drawn, as Markdown: see test_reply"


def test_several_lines_long_pastes_history_and_a_full_context(
    home: dict[str, str], attached: list[str]
) -> None:
    with chatting(home, *attached, "--temperature", "0", "--max-tokens", "5") as person:
        person.send('"""12', "...")
        person.send('3"""', wanted("12" + CHARACTERS[ord("\n") % 32] + "3", 5))
        person.sees(STATUS)
        person.send("/clear", "the conversation is forgotten")
        person.paste("0123456789abcdef" * 1000)  # longer than what the terminal holds at once
        person.type("\r")
        person.sees("your message alone has too many tokens")
        person.send("77", STATUS, 2)
        person.type("\x1b[A\x1b[A\x1b[A")
        person.sees(">>> /clear", 2)
        person.type(CTRL_C)
        person.send("/clear")
        person.send("/set max_tokens 150")
        for i, message in enumerate(("1" * 100, "2" * 100), start=3):
            person.send(message, STATUS, i)
        person.send("3" * 10, "the context is full: the oldest 1 turns are forgotten")
        person.sees(STATUS, 5)
        person.send("/show", "2 turns")
        person.send("/clear")
        person.send("/set max_tokens default")
        person.send("1" * 480, "the reply was cut: the context of 512 tokens is full")
        person.type(CTRL_D)
        assert person.leaves() == 0
    history = Path(home["XDG_STATE_HOME"], "pearl", "history")
    assert history.stat().st_mode & 0o077 == 0
    assert "/clear" in history.read_text()


def test_files_an_editor_completion_and_the_last_conversation(
    home: dict[str, str],
    toy: Engine,
    attached: list[str],
    pearl_here: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next message has the file, what follows a command is completed, and --continue goes on where a chat ended."""
    editor = tmp_path / "editor"
    code = tmp_path / "abc.txt"
    editor.write_text('#!/bin/sh\necho 12 > "$1"\n')
    editor.chmod(0o755)
    code.write_text("7\n")
    short = ["--temperature", "0", "--max-tokens", "5"]
    with chatting(home | {"EDITOR": str(editor)}, *TOYS, *short, columns=120) as person:
        person.sees("/? for help")
        person.type("\x18\x05")  # Ctrl-X Ctrl-E
        person.sees(">>> 12")
        person.type("\r")
        person.sees(STATUS)
        for typed, seen in (
            ("/set ru", "rule"),
            ("/metho", "show the method"),
            ("/method s", "ssd"),
        ):
            person.type(typed)
            person.sees(seen)
            person.type(CTRL_C)
            person.until(lambda: ">>> Send a message" in person.screen, "an empty line")
        person.type(f"/file {tmp_path}/ab")
        person.sees("abc.txt")
        person.type("\t")
        person.sees(f"/file {code}")
        person.type("\r")
        person.sees("abc.txt, 1 lines: your next message has it")
        person.send("9", STATUS, 2)
        person.send("/bye")
        assert person.leaves() == 0
    last = Path(home["XDG_STATE_HOME"], "pearl", "last-chat.json")
    assert last.stat().st_mode & 0o077 == 0
    turns = json.loads(last.read_text())["turns"]
    assert [turn["user"] for turn in turns] == ["12", "abc.txt:\n```\n7\n```\n\n9"]
    monkeypatch.setenv("XDG_STATE_HOME", home["XDG_STATE_HOME"])
    text = "".join(turn["user"] + turn["reply"] for turn in turns)
    (reply,) = toy.generate(
        text + "8", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    )
    for how in (["--continue"], ["--load", str(last)]):
        went_on = pearl_here("chat", *attached, *short, *how, "-q", "8")
        assert went_on.stdout == reply.text + "\n", went_on.stderr
    last.unlink()
    refused = pearl_here("chat", "--continue")
    assert (refused.returncode, "there is no conversation to go on with" in refused.stderr) == (
        2,
        True,
    )


def test_a_system_prompt_stands_before_that_of_a_saved_chat(
    attached: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it.json"
    path.write_text('{"target": "any", "system": "old", "turns": []}')
    systems = []
    monkeypatch.setattr(
        ChatSession, "answer", lambda self, message: systems.append(self.conversation.system)
    )
    without_raw = [word for word in attached if word != "--raw"]
    for more in ((), ("--system", "new")):
        ran("chat", *without_raw, "--load", path, "-q", "1", *more)
    assert systems == ["old", "new"]


def test_a_full_disk_keeps_the_chat_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy: Engine
) -> None:
    """It was emptied before the new one was written, which nobody saw."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "pearl" / "last-chat.json"
    session = ChatSession(toy, RequestOptions(), Conversation(toy.tokenizer, raw=True))
    session.conversation.add("a" * 100, "b")
    save_last_chat(session)
    before = path.read_text()
    session.conversation.add("c" * 100, "d")
    with files_of_at_most(len(before)):
        save_last_chat(session)
    assert path.read_text() == before
    save_last_chat(session)
    assert "cccc" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


# ---- no terminal ----


def test_each_line_of_a_pipe_is_a_message(home: dict[str, str], attached: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pearl",
        "chat",
        *attached,
        "--temperature",
        "0",
        "--max-tokens",
        "8",
    ]
    said = output(*command, input="123\n\n/4\n", env=home)
    first = wanted("123", 8)
    slash = CHARACTERS[ord("/") % 32]
    assert said == f"{first}\n{wanted('123' + first + slash + '4', 8)}\n"


# ---- under torchrun ----


@pytest.mark.slow
def test_under_torchrun_ctrl_c_is_a_key(home: dict[str, str], tmp_path: Path) -> None:
    """The terminal is the agent's: were Ctrl-C a signal, it would end the job."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*agent, "-m", "pearl", "chat", *SLOW, "--temperature", "0"]
    with Person(command, home) as person:
        person.sees(">>>")
        person.send("123", wanted("123", 10))
        person.type(CTRL_C)
        person.sees("stopped after")
        person.resize(24, 70)
        person.send(
            "/load " + str(fifo)
        )  # waits for a writer; Ctrl-C must not reach the agent meanwhile
        person.type(CTRL_C)
        fifo.write_text("hello")
        person.sees("no saved conversation")
        person.send("/set max_tokens 5", "max_tokens 5")
        person.send("4", STATUS)
        person.type(CTRL_D)
        assert person.leaves() == 0
        assert person.echoes
