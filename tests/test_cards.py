"""Engines that run already: served, found by their cards, attached to, and stopped; none that is another's."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pearl import SamplingParams
from pearl.cli.cards import find_card, table
from pearl.engine import Engine
from pearl.engine.registry import read_card, running_engines, stop
from pearl.errors import ConfigError, TargetLost
from tests.conftest import BOUND, TOY, ran, wanted
from tests.tiny import tiny_model

Run = Callable[..., subprocess.CompletedProcess[str]]
ONE = ["--raw", "--ignore-eos", "--temperature", "0", "--max-tokens", "8", "-q", "123"]
REPLY = wanted("123", 8) + "\n"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's runtime directory, with no engine in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    return tmp_path


def put_card(runtime: Path, name: str, card: object) -> Path:
    directory = runtime / f"pearl-{name}"
    directory.mkdir(mode=0o700)
    (directory / "engine.json").write_text(card if isinstance(card, str) else json.dumps(card))
    return directory


def test_what_another_user_could_have_left_is_no_engine(toy: Engine, tmp_path: Path) -> None:
    """A card names models to load and a place to connect to."""
    card = json.loads((toy.directory / "engine.json").read_text())
    for mode, address in ((0o777, card["address"]), (0o700, "tcp://10.9.9.9:1")):
        directory = tmp_path / oct(mode)
        directory.mkdir()
        directory.chmod(mode)
        (directory / "engine.json").write_text(json.dumps(card | {"address": address}))
        with pytest.raises(ConfigError, match="no running engine of yours is named"):
            find_card(str(directory))


def test_an_attached_front_is_told_when_the_engine_goes() -> None:
    with Engine(TOY, TOY) as engine:
        other = Engine.attach(engine.directory)
        stream = other.stream([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
    began = time.monotonic()
    with pytest.raises(TargetLost), other:
        other.generate([[1, 2, 3]], SamplingParams(max_tokens=400, ignore_eos=True))
    assert time.monotonic() - began < other.config.target_timeout / 2
    with pytest.raises(ConfigError, match="no running engine of yours is named"):
        find_card(str(engine.directory))


def serving() -> tuple[subprocess.Popen[str], str]:
    """An engine in this user's runtime directory, and its own directory."""
    command = [sys.executable, "-m", "pearl", "serve", "--target", TOY, "--draft", TOY]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = iter(server.stderr.readline, "")
    return server, next(
        line.split()[2].rstrip(";") for line in lines if line.startswith("serving in")
    )


def test_engines_are_served_listed_and_stopped(runtime: Path, pearl_here: Run) -> None:
    """Stopped by directory, all at once, and by Ctrl-C. With several running, a client is given their names."""
    servers = [serving() for _ in range(2)]
    (one, other), (first, _) = (
        [server for server, _ in servers],
        [directory for _, directory in servers],
    )
    listed: list[dict[str, Any]] = json.loads(pearl_here("ps", "--json").stdout)
    assert {(each["pid"], each["directory"]) for each in listed} == {
        (s.pid, directory) for s, directory in servers
    }
    for each in listed:
        assert (each["target"], each["draft"], each["program"]) == (TOY, TOY, "pearl serve")
        assert each["target_device"].startswith(("cpu:", "cuda:")), "what auto has come to"
        assert 0 <= each["age_seconds"] < BOUND
    choice = pearl_here("chat", "-q", "1", "--connect")
    assert choice.returncode == 2
    for said in (pearl_here("ps").stdout, choice.stderr):
        rows = [row.split() for row in said.splitlines() if "pearl serve" in row]
        assert {row[0] for row in rows} == {str(one.pid), str(other.pid)}
        assert all(directory in said for _, directory in servers)
    run = pearl_here("chat", *ONE, "--connect", str(one.pid))
    assert (run.returncode, run.stdout) == (0, REPLY), run.stderr
    run = pearl_here("stop", first)
    assert run.returncode == 0, run.stderr
    assert f"stopped PID {one.pid}: pearl serve with {TOY}" in run.stderr
    assert one.wait(0.1) == 128 + signal.SIGTERM, "it has ended when the command returns"
    run = pearl_here("chat", *ONE, "--connect")  # the only one
    assert (run.returncode, run.stdout) == (0, REPLY), run.stderr
    other.send_signal(signal.SIGINT)
    assert other.wait(BOUND) == 0
    third, _ = serving()
    assert pearl_here("stop", "--all").returncode == 0
    assert third.wait(0.1) == 128 + signal.SIGTERM
    assert pearl_here("ps").stderr == "no engine is running\n"
    assert not list(runtime.glob("pearl-*")), "no directory is left"
    for server in (one, other, third):
        server.stderr.close()


def test_a_client_may_name_the_same_model_as_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path relative to its directory: both may have one configuration file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(tiny_model())
    asked = ("--max-tokens", 2, "--temperature", 0, "--raw", "the")
    with Engine("mine", "none", max_context=64) as engine:
        connected = ("generate", "--connect", engine.directory, *asked)
        ran(*connected, "--target", "mine", "--draft", "none")
        with pytest.raises(ConfigError, match="has max_context 64, not 32: leave that out"):
            ran(*connected, "--max-context", 32)


def test_a_program_is_not_stopped_for_an_engine_that_is_gone(toy: Engine, runtime: Path) -> None:
    """A card outlives an engine that was killed, and another process may have got its PID."""
    card = json.loads((toy.directory / "engine.json").read_text())
    directory = put_card(runtime, "12345678", card | {"started": card["started"] - 1})
    assert running_engines() == []
    assert stop(read_card(directory), 0.0), "it is gone; this process, which has the PID, goes on"
    with pytest.raises(ConfigError, match="no running engine of yours is named"):
        find_card(str(os.getpid()))


def test_a_damaged_card_hides_no_other(toy: Engine, runtime: Path) -> None:
    card = json.loads((toy.directory / "engine.json").read_text())
    put_card(runtime, "12345678", card)
    changes = [("pid", float("inf")), ("config", {}), ("config", []), ("places", {"target": 3})]
    changes += [("program", "\ud800"), ("address", None)]
    for number, damaged in enumerate(
        ("[" * 100_000, "{}", *(card | {name: value} for name, value in changes))
    ):
        put_card(runtime, str(23456780 + number), damaged)
    assert [Path(each.directory).name for each in running_engines()] == ["pearl-12345678"]
    assert f"{runtime}/pearl-12345678" in table(running_engines())


def test_stop_without_a_name_asks_or_wants_one(
    toy: Engine, runtime: Path, pearl_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that forgot the name ended the server that another program had started."""
    card = json.loads((toy.directory / "engine.json").read_text()) | {"program": "pearl serve"}
    put_card(runtime, "12345678", card)
    stopped: list[int] = []
    monkeypatch.setattr(
        "pearl.engine.registry.stop", lambda card, seconds: stopped.append(card.pid) or True
    )
    run = pearl_here("stop")
    assert run.returncode == 2
    assert "name the engine by its PID or directory, or give --all" in run.stderr
    assert str(os.getpid()) in run.stderr
    monkeypatch.setattr("pearl.cli.engines.sys", Mock(stdin=Mock(isatty=lambda: True)))
    for answer, code in ((False, 130), (True, 0)):
        assert stopped == []
        monkeypatch.setattr(
            "click.termui.visible_prompt_func", lambda _, answer=answer: "y" if answer else "n"
        )
        assert pearl_here("stop").returncode == code
    assert stopped == [os.getpid()]
    put_card(runtime, "23456789", card)
    run = pearl_here("stop")
    assert (run.returncode, stopped) == (2, [os.getpid()]), "of several none is the one"
    assert pearl_here("stop", "--all").returncode == 0
    assert len(stopped) == 3


def test_an_engine_of_another_program_is_not_stopped_with_all(
    toy: Engine, runtime: Path, pearl_here: Run
) -> None:
    """This one's: the program would end."""
    put_card(runtime, "12345678", (toy.directory / "engine.json").read_text())
    for arguments in (["stop"], ["stop", "--all"]):
        run = pearl_here(*arguments)
        assert run.returncode == 2
        assert f"left alone: PID {os.getpid()}" in run.stderr
