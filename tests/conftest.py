"""What several test files share.

Starting two workers takes seconds, so many tests share one running engine on toy models.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.pop(
    "COLUMNS", None
)  # tests that run side by side have them, and a program in a terminal would believe them
os.environ.pop("LINES", None)
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: the workers' threads are enough

import hypothesis
import psutil
import pytest
import torch
from click.testing import CliRunner, Result
from msgspec import Struct
from torch import dtype

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before our kernels are imported

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job ignores Ctrl-C, and so would every process that the tests start, and mean to interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pearl.cli import cli, main
from pearl.config import RequestOptions
from pearl.engine import Engine
from pearl.models.toy import alpha_pair
from pearl.spec import methods
from tests import warm
from tests.loops import loops

if TYPE_CHECKING:
    from tests.served import Served

__all__ = ["loops"]  # a fixture

hypothesis.settings.register_profile(
    "pearl", deadline=None
)  # a machine that is busy says nothing about our code
hypothesis.settings.load_profile("pearl")

# PEARL as in the paper: the target waits for its draft
AS_PUBLISHED = RequestOptions(method="pearl", **methods.AS_PUBLISHED)
# Whether this user can have hosts of its own: tests/test_two_hosts.py needs them.
HAS_NAMESPACES = (
    bool(shutil.which("ip") and shutil.which("unshare"))
    and not subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, check=False
    ).returncode
)
BOUND = 180.0  # seconds that nothing here takes
TOY = "toy:vocab=32,alpha=0.5,context=512,eos=3"  # half of what the draft says is refused
CHARACTERS = "0123456789abcdefghijklmnopqrstuv"  # of its tokens


def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Wait for a condition, with a bound that a busy machine can keep. `what`: named on failure."""
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND} s: {what}"
        time.sleep(0.02)


def output(*command: object, timeout: float = BOUND, **options: Any) -> str:
    """Return what a program prints on standard output. It must end without an error."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-6000:]
    return done.stdout


def ran(*arguments: object) -> Result:
    """Run a command of the command line in this process. It must end without an error.

    An exception in the command is raised here.
    """
    ended = CliRunner().invoke(
        cli, [*map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "120"}
    )
    assert ended.exit_code == 0, ended.output
    return ended


def started_in(directory: Path | str) -> list[psutil.Process]:
    """Return the running processes whose TMPDIR is this directory."""
    variable = f"\0TMPDIR={directory}\0".encode()
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # it has ended, or is another user's
            environment = Path(f"/proc/{pid}/environ").read_bytes()  # a zombie has none
            if variable in b"\0" + environment:
                found.append(psutil.Process(pid))
    return found


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make the kernel refuse to write files longer than `size`, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Quiet:
    """A progress watcher that only records what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.total = self.done = 0

    def begin(self, what: str, total: int) -> None:
        self.total, self.done = total, 0

    def advance(self, count: int, note: str = "") -> None:
        self.done += count

    def say(self, message: str) -> None:
        self.said.append(message)


def greedy_text(prompt: Sequence[int], length: int) -> list[int]:
    """Return the toy target's greedy text, computed without any code of the runtime."""
    target, _ = alpha_pair(32, 0.5)
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(target(tokens).argmax()))
    return tokens[len(prompt) :]


def wanted(text: str, length: int) -> str:
    """Return the toy's greedy continuation of a text of its own characters."""
    return "".join(CHARACTERS[t] for t in greedy_text([CHARACTERS.index(c) for c in text], length))


# Fixtures that take seconds, by module: the tests that use any of these run on one of the workers, where they are made
# once.
_SHARED: dict[str, set[str]] = {
    "test_agents": {"tooled"},
    "test_bench": {"engine", "system"},
    "test_blocks": {"texts"},
    "test_chat": {"paced"},
    "test_distill": {"whole"},
    "test_eagle3": {"texts"},
    "test_heads": {"trained"},
    "test_limits": {"engine"},
    "test_protocol": {"reached"},
    "test_server": {"engine", "served"},
    "test_server_limits": {"served", "slow"},
    "test_server_requests": {"served"},
    "test_server_tools": {"served"},
    "test_slots": {"several"},
    "test_trace": {"run"},
    "test_trace_commands": {"run", "sd"},
    "test_translation": {"engine"},
    "test_wheel": {"installed"},
}


_LONGEST_NAME = 60  # characters of a case's name
_TEMPORARY = tempfile.gettempdir()


def _words(value: object) -> str | None:
    """Return a parameter as text that is the same in every process.

    Returns None for a value that has no such text, such as a tensor.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, dtype | type):
        return str(value).removeprefix("torch.")
    if isinstance(value, RequestOptions):
        return _words(value.given())
    if isinstance(value, Struct):
        return repr(value)
    if isinstance(value, dict):
        parts = {name: _words(part) for name, part in value.items()}
        if None in parts.values():
            return None
        return " ".join(f"{name}={part}" for name, part in parts.items()) or "nothing"
    if isinstance(value, list | tuple):
        items = [_words(item) for item in value]
        if None in items:
            return None
        return " ".join(map(str, items)) or "nothing"
    return None


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case that is a dictionary, list or tuple by its contents.

    So a failure says which case has failed.
    """
    words = _words(val) if isinstance(val, dict | list | tuple | dtype | Struct) else None
    if words is None or _TEMPORARY in words:  # a path that is another one in each process
        return None
    printable = "".join(character if character.isprintable() else " " for character in words)
    return printable[:_LONGEST_NAME]


_LONG = set(Path(__file__).with_name("long.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)  # xdist looks for groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and sort the tests.

    Slow tests come first; short ones keep all workers busy at the end.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        if item.nodeid in _LONG:
            item.add_marker(pytest.mark.long)
        if _SHARED.get(item.path.stem, set()) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn garbage collection off during the imports, and exempt the collected tests from it.

    A collection that looks at all of them costs 0.2 s each time.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session", autouse=True)
def warm_programs() -> Iterator[None]:
    """Have the programs of the tests forked from a process that has imported torch."""
    if (
        torch.cuda.is_available()
    ):  # an import may look for GPUs, and who is forked after that cannot use them
        yield
        return
    nursery, end = warm.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", nursery.execute_child)
        yield
    end()


@pytest.fixture(autouse=True)
def nothing_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which models other tests have fetched, as each test may have a hub and a cache."""
    monkeypatch.setattr("pearl.models.checkpoints.checkpoint.fetched", {})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of an empty cache for this test (PEARL_CACHE)."""
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test start its programs, and these their workers, as new processes, as for users."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.AS_NEW_PROCESS)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory for the directories of this test's engines; none may remain."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield tmp_path
    eventually(
        lambda: not list(tmp_path.glob("pearl-*")), f"no directory in {list(tmp_path.iterdir())}"
    )


@pytest.fixture(scope="session")
def toy() -> Iterator[Engine]:
    """Return a running engine on the pair `TOY`.

    A test that harms the workers must start an engine of its own.
    """
    with Engine(TOY, TOY, startup_timeout=120) as engine:
        yield engine


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Return a running HTTP server for an engine on the pair `TOY`.

    A test that harms the engine must start a server of its own.
    """
    from tests.served import serving

    with serving() as server:
        yield server


@pytest.fixture
def pearl_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command line in this process, which starts faster.

    Standard input is empty.
    """

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["pearl", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def unchecked_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of our kernels at load, which takes seconds in the interpreter."""
    token_forward = pytest.importorskip("pearl.models.gpu.token_forward")
    monkeypatch.setattr(token_forward.Decode, "problem", lambda self: "")


@pytest.fixture
def small_tables(unchecked_tables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give our kernels only the smallest table of rows, and skip their check at load."""
    from pearl.models.gpu.token_forward import Decode

    (sizes,) = Decode.__init__.__defaults__
    monkeypatch.setattr(Decode.__init__, "__defaults__", (sizes[:1],))


def gone(pid: int) -> bool:
    """Return whether a process has ended. A zombie that nobody collects counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children() -> set[int]:
    return {
        child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    }
