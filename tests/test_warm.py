"""Programs that are forked for the tests, which are to be as new processes are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import BOUND, files_of_at_most
from tests.warm import FORKED

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is forked beside a GPU")

ABOUT = """
import json, os, sys

def shown(name):
    with open(f"/proc/self/{name}") as file:
        return [word for word in file.read().split("\\0") if word]

about = {
    "arguments": [sys.argv, sys.orig_argv, shown("cmdline")],
    "environment": [dict(os.environ), sorted(shown("environ"))],
    "directory": os.getcwd(),
    "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "input": sys.stdin.read(),
    "name": __name__,
}
for name in ("stdin", "stdout", "stderr"):
    stream = getattr(sys, name)
    about[name] = [stream.encoding, stream.errors, stream.line_buffering, stream.write_through]
print(json.dumps([about, "torch" in sys.modules]))
"""


@pytest.fixture(autouse=True)
def _streams_have_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test gives the flag -u where it wants none."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def run(code: str, directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", FORKED + code, "an argument"],
        input="typed",
        env=os.environ | {"PEARL_OF_THIS_TEST": "yes"},
        cwd=directory,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_a_fork_is_what_a_new_process_is(
    flags: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """But in what it has imported."""
    descriptions: list[Any] = []
    for is_forked in (True, False):
        done = run(ABOUT, tmp_path, *flags)
        assert done.returncode == 0, done.stderr
        description, has_torch = json.loads(done.stdout)
        assert has_torch == is_forked
        descriptions.append(description)
        request.getfixturevalue("anew")
    assert descriptions[0] == descriptions[1]
    assert descriptions[0]["parent"] == os.getpid()


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('a message')", 1),
        ("raise ValueError('mine')", 1),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)", -2),
        ("import os\nos.close(1)\nprint('lost')", 120),
        ("import atexit\natexit.register(print, 'at the end')", 0),
    ],
)
def test_a_fork_ends_as_a_new_process_does(
    code: str, returncode: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    endings: list[Any] = []
    for _ in range(2):
        done = run(code, tmp_path)
        endings.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
        request.getfixturevalue("anew")
    assert endings[0] == endings[1]
    assert endings[0][0] == returncode


def test_programs_of_a_fork_are_forked(tmp_path: Path) -> None:
    inner = f"{FORKED}import os, sys\nprint('torch' in sys.modules, os.getppid())"
    code = f"""
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {inner!r}])
"""
    pid, has_torch, parent = run(code, tmp_path).stdout.split()
    assert has_torch == "True"
    assert parent == pid


def test_a_program_that_would_inherit_something_else_is_a_new_process(tmp_path: Path) -> None:
    """A limit on the size of files is set after the process that forks was started."""
    code = "import sys\nprint('torch' in sys.modules)"
    assert run(code, tmp_path).stdout == "True\n"
    with files_of_at_most(1 << 30):
        assert run(code, tmp_path).stdout == "False\n"
