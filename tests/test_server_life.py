"""The HTTP server's start and end: a lost engine, signals, the command, and how it runs as a service."""

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pearl.cli.serve import serve
from pearl.config import RequestOptions
from pearl.errors import ConfigError, TargetLost, installing
from pearl.server import listen
from pearl.server.listen import bind
from tests.conftest import TOY, eventually, ran
from tests.served import BOUND, LONG, SLOWLY, Served, chatting_engine, serving, target_of

LAUNCH = Path(__file__).parents[1] / "launch"


@pytest.mark.parametrize(
    ("number", "settings"), [(signal.SIGKILL, {}), (signal.SIGSTOP, {"target_timeout": 3.5})]
)
def test_a_lost_engine_is_reported(number: signal.Signals, settings: dict[str, float]) -> None:
    """To a client that waits for a text, to later ones, and to probes.

    One that hangs is noticed by who waits for it, though another thread watches the engine meanwhile, to whom its
    silence means nothing.
    """
    with serving(**settings, **SLOWLY) as served, ThreadPoolExecutor(1) as pool:
        unfinished = pool.submit(lambda: served.post(**LONG))
        eventually(lambda: served.figure("vllm:generation_tokens_total") > 0)
        os.kill(target_of(served.service.engine), number)
        assert unfinished.result(BOUND).status_code == 503
        eventually(lambda: served.get("/health").status_code == 503)
        response = served.post()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_lost")


def test_a_server_that_ends_informs_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in progress have a moment more; then their streams end with an error, and so do those that wait."""
    monkeypatch.setattr(listen, "STOP_SECONDS", 0.2)
    with chatting_engine(**SLOWLY) as engine, ThreadPoolExecutor(2) as pool:
        with Served(engine) as served:
            first = pool.submit(lambda: served.post(stream=True, **LONG))
            eventually(lambda: served.figure("vllm:generation_tokens_total") > 0)
            second = pool.submit(served.post)
            served.until_running(waiting=1)
        assert "shutting down" in first.result(BOUND).text.strip().split("\n\n")[-1]
        assert second.result(BOUND).status_code == 503


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 0)]
)
def test_the_command_serves_until_a_signal(anew: None, number: signal.Signals, code: int) -> None:
    command = [
        sys.executable,
        "-m",
        "pearl",
        "serve",
        "--http",
        "127.0.0.1:0",
        "--target",
        TOY,
        "--draft",
        TOY,
    ]
    settings = ["--http-model", "toy", "--max-tokens", "5", "--ignore-eos", "--target-pace", "0.1"]
    server = subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True)
    url = next(line.split()[-1] for line in server.stderr if line.startswith("OpenAI's API: "))
    asked = {"model": "toy", "prompt": "123"}
    assert (
        httpx.post(f"{url}/completions", json=asked, timeout=BOUND).json()["usage"][
            "completion_tokens"
        ]
        == 5
    )
    asked_long = {**asked, "max_tokens": 500, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=asked_long, timeout=BOUND) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.send_signal(number)
        assert "shutting_down" in "".join(lines)
    assert server.wait(BOUND) == code
    assert "Traceback" not in server.stderr.read()
    server.stderr.close()
    unit = (LAUNCH / "pearl.service").read_text()
    assert code == 0 or f"SuccessExitStatus={code}\n" in unit, (
        "else systemctl stop leaves the unit failed"
    )
    assert f"\n| {code} | |" in (LAUNCH.parent / "pearl" / "protocol" / "README.md").read_text()


def test_the_command_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after its target is lost, even while nobody asks, with the error that has its exit code."""
    monkeypatch.setattr(listen, "LOST_SECONDS", 0.1)

    def answers() -> bool:
        try:
            return httpx.get(f"{door.url}/health", timeout=BOUND).status_code == 200
        except httpx.HTTPError:
            return False

    with chatting_engine() as engine, ThreadPoolExecutor(1) as pool:
        door = bind("127.0.0.1:0")
        ended = pool.submit(door.serve, engine, RequestOptions())
        eventually(answers)
        os.kill(target_of(engine), signal.SIGKILL)
        assert isinstance(ended.exception(BOUND), TargetLost)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pearl.server", sys.modules["pearl.server"]
    )  # an import puts a new one there, to be undone too
    for name in [name for name in sys.modules if name.startswith("pearl.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=re.escape(installing("server"))):
        ran("serve", "--http", "127.0.0.1:0")


@pytest.mark.parametrize("name", ["serve.sh", "pearl.service", "Dockerfile"])
def test_files_that_start_it_use_flags_that_exist(name: str) -> None:
    text = (LAUNCH / name).read_text()
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?=[ \"'=,\n])", text))
    ours = {flag for parameter in serve.params for flag in parameter.opts}
    others = {"--timeout", "--retries", "--index-url"}  # pip's
    others |= {
        "--dry-run",
        "--build-arg",
        "--rm",
        "--gpus",
        "--now",
        "--no-cache-dir",
        "--create-home",
        "--interval",
    }
    assert "--http" in used
    assert used <= ours | others | {"--start-period"}, used - ours


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (
        (LAUNCH / "pearl.service").read_text().replace("/opt/pearl/.venv/bin/pearl", sys.executable)
    )
    (tmp_path / "pearl.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "pearl.service")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, "pearl.service" in run.stderr) == (0, False), run.stderr
