"""scripts/setup and the container's file, with a pip that notes what it is asked for and has what the case says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.errors import installing

ROOT = Path(__file__).parents[1]
PIP = """#!/bin/sh
case "$*" in *"import torch"*) exit 1 ;; esac
echo "$@" >>"$PIP_LOG"
case "$*" in *whl/cpu*) has=$INDEX ;; *2.13.0+cpu*) has=$MIRROR ;; *) has=yes ;; esac
[ "$has" = yes ] || { echo "ERROR: No matching distribution found" >&2; exit 1; }
"""
# whether the mirror and the index have torch's CPU build -> words of the commands until one succeeds
CASES = {
    ("yes", "no"): ["+cpu"],
    ("no", "yes"): ["+cpu", "whl/cpu"],
    ("no", "no"): ["+cpu", "whl/cpu", "torch==2.13.0"],
}


class Machine:
    """A copy of the scripts, and the commands that pip got."""

    def __init__(self, place: Path) -> None:
        self.place, self._log = place, place / "pip.log"
        (place / ".venv/bin").mkdir(parents=True)
        for name in ("scripts/setup", "pyproject.toml"):
            (place / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, place / name)
        for name in (".venv/bin/python", "python3"):
            (place / name).write_text(PIP)
            (place / name).chmod(0o755)

    def run(
        self, *command: str, mirror: str = "yes", index: str = "no"
    ) -> subprocess.CompletedProcess[str]:
        told = {
            "PYTHON": sys.executable,
            "PIP_LOG": str(self._log),
            "MIRROR": mirror,
            "INDEX": index,
        }
        told |= {"PATH": f"{self.place}:/usr/bin:/bin", "TORCH": "torch==2.13.0+cpu"}
        self._log.write_text("")
        return subprocess.run(
            command,
            cwd=self.place,
            env=os.environ | told,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def asked(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="with a GPU torch is another one"
)
@pytest.mark.parametrize("has", CASES)
def test_torch_is_the_cpu_build_wherever_there_is_one(tmp_path: Path, has: tuple[str, str]) -> None:
    """Gigabytes of CUDA came under the title "0.2 GB", and pip's own words were lost. Here and in the container."""
    (step,) = re.findall(
        r"^RUN (python3 -c (?:.*\\\n)*.*)$", (ROOT / "launch/Dockerfile").read_text(), re.MULTILINE
    )
    for place, command, more in (
        (tmp_path / "here", ["scripts/setup"], 1),
        (tmp_path / "there", ["sh", "-c", step], 0),
    ):
        machine = Machine(place)
        done = machine.run(*command, mirror=has[0], index=has[1])
        assert done.returncode == 0, done.stderr
        assert len(machine.asked) == len(CASES[has]) + more, "and PEARL itself"
        assert all(words in asked for words, asked in zip(CASES[has], machine.asked, strict=False))
        assert ("several GB" in done.stderr) == (has == ("no", "no"))
        assert "several GB" not in done.stderr or "No matching distribution" in done.stderr


def test_extras_are_installed_once_and_where_type_checkers_find_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run("scripts/setup", "plot", "server")
    assert machine.asked[-1].endswith(".[plot,server] --disable-pip-version-check -q")
    assert "editable_mode=compat" in machine.asked[-1], "through an import hook they find no types"
    machine.run("scripts/setup", "server")
    assert machine.asked == []
    machine.run("scripts/setup", "server", "bench")
    assert "[server,bench]" in machine.asked[-1]
    refused = machine.run("scripts/setup", "plots")
    assert refused.returncode == 1
    assert "no extra 'plots'" in refused.stderr


def test_what_is_missing_can_be_installed_as_told() -> None:
    """`pip install 'pearl-runtime[plot]'` works nowhere: no index has the package."""
    assert "`scripts/setup plot`" in installing("plot")
    for path in (ROOT / "pearl").rglob("*.py"):
        assert "pip install 'pearl-runtime[" not in path.read_text(), path
