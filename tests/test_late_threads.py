"""Threads of `threads.c` that are late: a piece that the caller takes back is written once, and reads nothing later."""

import subprocess
from pathlib import Path
from shutil import which

import pytest

from pearl.models.cpu import native

SOURCES = Path(native.__file__).parent / "c"
COMPILER = which("cc") or which("gcc")
pytestmark = pytest.mark.skipif(
    COMPILER is None or native.library() is None, reason="our products are not built: no compiler"
)

COMPARE_AND_SWAP = "atomic_compare_exchange_strong(&helper->held, &held, held - from + to)"
PLAIN_STORE = "(atomic_store(&helper->held, held - from + to), 1)"
SIGNAL = "syscall(SYS_tgkill, getpid(), helper->id, pool.signal)"


def exit_status(folder: Path, planted: tuple[str, str] | None = None) -> int:
    """Build `late_threads.c` with our threads, in which the first text of `planted` becomes the second, and run it."""
    threads = (SOURCES / "threads.c").read_text()
    if planted is not None:
        right, wrong = planted
        assert threads.count(right) == 1
        threads = threads.replace(right, wrong)
    source = folder / "threads.c"
    source.write_text(threads)
    program = folder / "late_threads"
    stress = Path(__file__).with_name("late_threads.c")
    assert COMPILER is not None
    command = [COMPILER, "-O2", "-pthread", "-Wno-psabi", f"-I{SOURCES}"]
    subprocess.run([*command, "-o", program, source, stress], check=True)
    return subprocess.run([program], check=False).returncode


def test_a_piece_is_written_once_and_late_threads_read_nothing(tmp_path: Path) -> None:
    """Whoever is late, and wherever: before a piece, before its results are claimed, before they are written, and
    between a piece that was taken back and the signal that says so."""
    assert exit_status(tmp_path) == 0


@pytest.mark.parametrize(
    "planted",
    [(COMPARE_AND_SWAP, PLAIN_STORE), (SIGNAL, "0")],
    ids=["a claim by a plain store", "no signal"],
)
def test_the_stress_finds_planted_bugs(tmp_path: Path, planted: tuple[str, str]) -> None:
    """The first writes a piece twice. With the second, a late thread reads memory that is no longer there."""
    assert exit_status(tmp_path, planted) != 0
