"""The same command under torchrun: real agents, real ranks, real workers; no fixed port anywhere."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pearl.config import EngineConfig, RequestOptions, SamplingParams
from pearl.engine import torchrun
from pearl.errors import ConfigError, StartError
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.transport.address import private_directory
from pearl.transport.keys import write_keys
from pearl.transport.zeromq import new_keys
from tests.conftest import BOUND, HAS_NAMESPACES, eventually, gone, greedy_text, output, started_in
from tests.screen import home as temporary
from tests.virtual import emulated

__all__ = ["temporary"]  # a fixture

SPEC = "toy:vocab=32,alpha=0.5"
SEEDED = ["--target", SPEC, "--draft", SPEC, "--temperature", "1", "--seed", "5"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ROOT = Path(__file__).parent.parent
ALONE = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "pearl", "generate"]
PLAIN = (
    "--look-ahead",
    "0",
    "--siblings",
    "0",
)  # otherwise the target would not wait for its draft


def plain(length: int) -> list[int]:
    """The text of `SEEDED` and "123" without torchrun, and without processes: under the virtual clock."""
    config = EngineConfig(target=SPEC, draft=SPEC, target_pace=1.0, draft_pace=0.2)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=length)
    return list(emulated(config, RequestOptions(), [1, 2, 3], params).tokens)


def launch(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def workers(directory: str, count: int = 2, last: str = "draft") -> dict[str, int]:
    """Process ids of PEARL's workers by role, once there are `count`. `last`: whose the last rank is."""
    found: dict[str, int] = {}

    def look() -> bool:
        for process in started_in(Path(directory)):
            try:
                if "pearl.worker" in process.cmdline():
                    rank = psutil.Process(process.ppid()).environ().get("RANK")
                    assert rank is not None
                    name = last if int(rank) == count - 1 else f"target rank {rank}"
                    found["target" if rank == "0" else name] = process.pid
            except psutil.Error:
                continue
        return len(found) == count

    eventually(look, f"{count} workers run")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_torchrun_is_ended(
    temporary: dict[str, str], number: signal.Signals
) -> None:
    """SIGKILL gives it no chance to end its ranks: they and their workers have to notice by themselves."""
    run = launch([*ALONE, *SEEDED, "--max-tokens", "500000", "1"], temporary)
    assert run.stdout is not None
    assert run.stdout.read(1)
    workers(temporary["TMPDIR"])
    run.send_signal(number)
    run.communicate(timeout=BOUND)
    assert run.returncode != 0  # what is left is looked at by the fixture


@pytest.mark.slow
def test_draft_worker_that_is_lost_does_not_take_the_job_down(temporary: dict[str, str]) -> None:
    """Rank 1 only keeps it: torchrun must not hear of it, and the text is the same; and it starts another.

    It is stopped, so that its keeper has to notice, to end it and to start it again: what it does to one that is
    killed is a part of that.
    """
    paces = ["--temperature", "0", "--target-pace", "0.1", "--draft-pace", "0.02"]
    arguments = ["--target", SPEC, "--draft", SPEC, *paces]
    run = launch(
        [*ALONE, *arguments, *PLAIN, "--draft-timeout", "1", "--max-tokens", "200", "123"],
        temporary,
    )
    assert run.stdout is not None
    first = run.stdout.read(1)
    draft = workers(temporary["TMPDIR"])["draft"]
    os.kill(draft, signal.SIGSTOP)
    eventually(lambda: gone(draft), "a draft that is stopped is ended")
    assert workers(temporary["TMPDIR"])["draft"] != draft
    rest, said = run.communicate(timeout=BOUND)
    assert run.returncode == 0, said
    assert first + rest == ToyTokenizer(32).decode(greedy_text([1, 2, 3], 200)) + "\n"
    assert "lost during the text" in said
    assert "starting it again (1)" in said


@pytest.mark.slow
def test_failing_start_is_told_with_its_cause(temporary: dict[str, str]) -> None:
    arguments = ["--target", SPEC, "--draft", "/nowhere/model", "--max-tokens", "5", "1"]
    run = launch([*ALONE, *arguments], temporary)
    out, said = run.communicate(timeout=BOUND)
    assert run.returncode != 0
    assert out == ""
    # the front's or either worker's, for all read its vocabulary; but told once
    assert said.count("Model '/nowhere/model': no such directory") == 1
    assert "log-level debug" not in said, "the advice is that of the error as it was"


def test_the_number_of_ranks_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for world, settings, message in (
        (3, {}, r"started 3 .* takes one for the target and one for the draft.*--nproc-per-node 2"),
        (2, {"draft": "none"}, r"directly"),
    ):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        with pytest.raises(ConfigError, match=message):
            torchrun.check_world(EngineConfig(**settings))  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    torchrun.check_world(EngineConfig())


# ---- two hosts ----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_hosts(temporary: dict[str, str], keys: list[Path]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of both ranks, as launch/two_hosts.sh starts them; they share no directory."""
    common = {
        "HOST": "127.0.0.1",
        "PORT": str(free_port()),
        "CONTROL_PORT": "*",
        "PYTHON": sys.executable,
    }
    runs = []
    for rank, path in enumerate(keys):
        home = Path(temporary["TMPDIR"], f"host{rank}")
        home.mkdir()
        environment = (
            temporary | common | {"RANK": str(rank), "KEYS": str(path), "TMPDIR": str(home)}
        )
        arguments = [
            *SEEDED,
            *PLAIN,
            "--method",
            "pearl",
            "--rule",
            "coupled",
            "--max-tokens",
            "80",
            "--json",
            "123",
        ]
        runs.append(launch([str(ROOT / "launch" / "two_hosts.sh"), *arguments], environment))
    said = [run.communicate(timeout=BOUND) for run in runs]
    for rank in range(2):
        home = Path(temporary["TMPDIR"], f"host{rank}")
        eventually(lambda home=home: not list(home.glob("pearl-*")), "no directory is left")  # type: ignore[misc]
        eventually(lambda home=home: not started_in(home), "no process is left")  # type: ignore[misc]
    return [(run.returncode, *texts) for run, texts in zip(runs, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "host", [pytest.param("loopback", marks=[pytest.mark.long] * HAS_NAMESPACES)]
)
def test_two_hosts_give_the_same_text(temporary: dict[str, str], tmp_path: Path, host: str) -> None:
    """Nothing in common but an address and the keys; the draft's distributions, dense here, go the same way.

    Where there are namespaces, test_two_hosts has this between two of them.
    """
    keys = tmp_path / "keys"
    write_keys(keys, new_keys())
    (zero, out, said), (one, nothing, also_said) = two_hosts(temporary, [keys, keys])
    assert (zero, one) == (0, 0), said + also_said
    document = json.loads(out)
    assert document["tokens"] == plain(80)
    assert document["statistics"]["num_accepted_draft_tokens"] > 0
    assert nothing == ""


class Store:
    """torchrun's, in which a stranger has written."""

    def __init__(self, **values: str) -> None:
        self._values = values

    def get(self, key: str, timeout: float) -> str:
        return self._values[key]


def test_a_directory_that_the_store_names_is_looked_at_before_it_is_believed(
    tmp_path: Path,
) -> None:
    """The draft worker removes its directory at the end: a stranger's word must not make it the user's home."""
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    ours = private_directory()
    config = EngineConfig()

    def found(directory: Path, address: str) -> Path:
        with torchrun.draft_directory(config, Store(directory=str(directory)), address) as got:  # type: ignore[arg-type]
            return got

    ours.chmod(0o755)
    for directory in (precious, Path("relative/pearl-1"), tmp_path / "pearl-nowhere", ours):
        with pytest.raises(StartError, match="not on this machine, or not this user's"):
            found(directory, "tcp://127.0.0.1:5")
    ours.chmod(0o700)
    for address in ("tcp://192.0.2.1:5", "ipc://@abstract"):
        with pytest.raises(StartError, match="not on this machine"):
            found(ours, address)
    assert found(ours, f"ipc://{ours}/control") == ours
    ours.rmdir()


def test_a_rank_on_another_host_is_at_home_in_a_directory_of_its_own(tmp_path: Path) -> None:
    config = EngineConfig(control="tcp://192.0.2.1:*", keys="/keys")
    store = Store(directory=str(tmp_path))
    with torchrun.draft_directory(config, store, "tcp://192.0.2.1:5") as home:  # type: ignore[arg-type]
        assert home.is_dir()
        assert home != tmp_path
    assert not home.exists()
    with (
        pytest.raises(StartError, match="same --control"),
        torchrun.draft_directory(config, store, "ipc:///x/y"),
    ):  # type: ignore[arg-type]
        pytest.fail("it was believed")


# ---- launchers ----

LAUNCHERS = sorted(
    path for path in (ROOT / "launch").iterdir() if path.is_file() and os.access(path, os.X_OK)
)


def dry(launcher: Path, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return output(launcher, "--dry-run", "--max-tokens", "5", "two words", env=kept | environment)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.name)
def test_launchers_show_their_command_and_pass_arguments_whole(launcher: Path) -> None:
    shown = dry(
        launcher, PYTHON="/a python", PORT="5555", RANK="0", HOST="192.0.2.1", KEYS="/my keys"
    )
    words = [shlex.split(line) for line in shown.splitlines()]
    assert words
    for line in words:
        assert line[-3:] == ["--max-tokens", "5", "two words"]


def test_the_second_host_runs_the_same_line_but_its_rank() -> None:
    lines = [
        shlex.split(
            dry(ROOT / "launch" / "two_hosts.sh", RANK=rank, HOST="192.0.2.1", KEYS="/my keys")
        )
        for rank in ("0", "1")
    ]
    assert [(a, b) for a, b in zip(*lines, strict=True) if a != b] == [("0", "1")]
    assert lines[0][lines[0].index("--control") + 1] == "tcp://192.0.2.1:29501"
    assert lines[0][lines[0].index("--keys") + 1] == "/my keys"
    assert (
        lines[0][lines[0].index("--rdzv-backend") + 1] == "static"
    )  # the others unpickle what strangers may send


def test_two_hosts_ask_for_what_is_missing() -> None:
    command = [str(ROOT / "launch" / "two_hosts.sh"), "--dry-run", "x"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "HOST", "KEYS")}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BOUND, check=False
    )
    assert run.returncode != 0
    assert "RANK" in run.stderr


def test_two_jobs_on_a_node_have_ports_of_their_own() -> None:
    script = ROOT / "launch" / "slurm_two_hosts.sbatch"
    shown = [dry(script, SLURM_JOB_ID=job, HOST="192.0.2.1", KEYS="/k") for job in ("7", "8")]
    ports = [set(re.findall(r"PORT=(\d+)", text)) for text in shown]
    assert all(len(found) == 2 for found in ports)
    assert not ports[0] & ports[1]


def test_under_slurm_the_first_node_is_asked_for_its_address(tmp_path: Path) -> None:
    """With a Slurm of the test's own: what each task would run, by its number."""
    for name, script in (
        ("scontrol", 'test "$3" = "n[1-2]" && echo n1 && echo n2'),
        (
            "srun",
            'if [ "$1" = --nodes ]; then echo "192.0.2.1 10.0.0.1"; else shift; SLURM_PROCID=1 exec "$@"; fi',
        ),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "python").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "HOST"} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    words = output(
        ROOT / "launch" / "slurm_two_hosts.sbatch", "two words", env=environment
    ).splitlines()
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == "192.0.2.1"
    assert words[words.index("--control") + 1].startswith("tcp://192.0.2.1:")
    assert words[-1] == "two words"
