"""The same command under torchrun: real agents, real ranks, real workers; no fixed port anywhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pearl.models.tokenizer import ToyTokenizer
from tests.conftest import greedy_text
from tests.test_processes import eventually, gone

BOUND = 120.0  # seconds; far more than anything here takes
SPEC = "toy:vocab=32,alpha=0.5"
SEEDED = ["--target", SPEC, "--draft", SPEC, "--temperature", "1", "--seed", "5"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "pearl", "generate"]


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary directory is this test's own; at the end no engine may have left anything."""
    environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    yield environment | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    eventually(lambda: not list(tmp_path.glob("pearl-*")), "no directory is left")
    eventually(lambda: not _with_temporary(tmp_path), "no process is left")


def _with_temporary(directory: Path) -> list[int]:
    """Processes that were started with this temporary directory: ours, and theirs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == str(directory):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def plain(*arguments: str) -> dict[str, object]:
    """The document of the same run without torchrun."""
    command = [sys.executable, "-m", "pearl", "generate", *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=True).stdout)


def launch(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def workers(directory: str, count: int = 2) -> dict[str, int]:
    """Process ids of PEARL's workers by role, once there are `count`."""
    found: dict[str, int] = {}

    def look() -> bool:
        for pid in _with_temporary(Path(directory)):
            try:
                process = psutil.Process(pid)
                if process.cmdline()[-1:] == ["pearl.worker"]:
                    rank = psutil.Process(process.ppid()).environ().get("RANK")
                    found["target" if rank == "0" else "draft"] = pid
            except psutil.Error:
                continue
        return len(found) == count

    eventually(look, f"{count} workers run")
    return found


def test_text_is_the_plain_launchs(temporary: dict[str, str]) -> None:
    """Exactly one document on stdout, whatever the second rank does."""
    run = launch([*ALONE, *SEEDED, "--max-tokens", "80", "--json", "123"], temporary)
    out, said = run.communicate(timeout=BOUND)
    assert run.returncode == 0, said
    document = json.loads(out)
    assert document["tokens"] == plain(*SEEDED, "--max-tokens", "80", "123")["tokens"]
    assert document["statistics"]["num_accepted_draft_tokens"] > 0
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_torchrun_is_ended(temporary: dict[str, str], number: signal.Signals) -> None:
    """SIGKILL gives it no chance to end its ranks: they and their workers have to notice by themselves."""
    run = launch([*ALONE, *SEEDED, "--max-tokens", "500000", "1"], temporary)
    assert run.stdout is not None
    assert run.stdout.read(1)
    workers(temporary["TMPDIR"])
    run.send_signal(number)
    run.communicate(timeout=BOUND)
    assert run.returncode != 0  # what is left is looked at by the fixture


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_draft_worker_that_is_lost_does_not_take_the_job_down(
    temporary: dict[str, str], number: signal.Signals
) -> None:
    """Rank 1 only keeps it: torchrun must not hear of it, and the text is the same; and it starts another."""
    arguments = ["--target", SPEC, "--draft", SPEC, "--temperature", "0", "--target-pace", "0.03"]
    run = launch([*ALONE, *arguments, "--draft-timeout", "1", "--max-tokens", "700", "123"], temporary)
    assert run.stdout is not None
    first = run.stdout.read(1)
    draft = workers(temporary["TMPDIR"])["draft"]
    os.kill(draft, number)
    eventually(lambda: gone(draft), "a draft that is stopped is ended")
    assert workers(temporary["TMPDIR"])["draft"] != draft
    rest, said = run.communicate(timeout=BOUND)
    assert run.returncode == 0, said
    assert first + rest == ToyTokenizer(32).decode(greedy_text([1, 2, 3], 700)) + "\n"
    assert "lost on the way" in said
    assert "starting it again (1)" in said


def test_failing_start_is_told_with_its_cause(temporary: dict[str, str]) -> None:
    arguments = ["--target", SPEC, "--draft", "/nowhere/model", "--max-tokens", "5", "1"]
    run = launch([*ALONE, *arguments], temporary)
    out, said = run.communicate(timeout=BOUND)
    assert run.returncode != 0
    assert out == ""
    assert "worker: Model '/nowhere/model': no such directory" in said  # either worker's: both read its vocabulary


@pytest.mark.slow
def test_wrong_number_of_ranks_is_told(temporary: dict[str, str]) -> None:
    run = launch(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "3", "-m", "pearl", "generate", *SEEDED, "1"], temporary
    )
    _, said = run.communicate(timeout=BOUND)
    assert run.returncode != 0
    assert "PEARL takes two" in said


@pytest.mark.slow
def test_two_agents_give_the_same_text(temporary: dict[str, str]) -> None:
    """Two nodes as torchrun sees it, both on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    command = [*TORCHRUN, *rendezvous, "--rdzv-id", "pearl", "--local-addr", "127.0.0.1"]
    arguments = ["-m", "pearl", "generate", *SEEDED, "--max-tokens", "80", "--json", "123"]
    agents = [launch([*command, *arguments], temporary) for _ in range(2)]
    said = [agent.communicate(timeout=BOUND) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    documents = [json.loads(out) for out, _ in said if out]
    assert len(documents) == 1
    assert documents[0]["tokens"] == plain(*SEEDED, "--max-tokens", "80", "123")["tokens"]
