"""What only processes can show: how an engine starts, fails and ends, and that it leaves nothing behind.

Fronts that are to die run as scripts of their own, with a temporary directory of their own.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from pearl.config import EngineConfig, RequestOptions, SamplingParams
from pearl.engine import Engine
from pearl.engine.processes import DraftKeeper
from pearl.errors import EngineClosed, ModelError, StartError, TargetLost
from pearl.worker.settings import WorkerSettings
from tests.conftest import BOUND, TOY, children, eventually, gone, greedy_text
from tests.warm import FORKED

PROMPT = [1, 2, 5]
LONG_TOY = "toy:vocab=32,alpha=0.5"  # room for a million tokens
ENDLESS = SamplingParams(temperature=0, max_tokens=500_000, ignore_eos=True)
PACED = {"target_pace": 0.02, "draft_pace": 0.01}  # slow enough to be hit in the middle of a text


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


# ---- nothing is left behind ----

SCRIPT = (
    FORKED
    + """
import json, sys
from pearl.config import SamplingParams
from pearl.engine import Engine
endless = SamplingParams(temperature=0, max_tokens=500_000, ignore_eos=True)
engine = Engine("toy:vocab=32,alpha=0.5", "toy:vocab=32,alpha=0.5")
workers = engine.target_worker.pid, engine.draft.worker.pid
print(json.dumps([str(engine.directory), *workers]), flush=True)
sys.stdin.readline()
{body}
"""
)
STREAM = """
with engine:
    for piece in engine.stream([1, 2, 5], endless):
        print(flush=True)
"""


def start_front(body: str) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """A front in a process of its own: it, its engine's directory and its workers' process ids."""
    script = SCRIPT.format(body=body)
    pipe = subprocess.PIPE
    front = subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    line = front.stdout.readline()
    assert line, front.communicate(timeout=BOUND)[1]
    directory, *workers = json.loads(line)
    assert Path(directory).is_dir()
    assert not any(map(gone, workers))
    print(file=front.stdin, flush=True)  # it goes on from here: it may end at once
    return front, Path(directory), workers


def check_nothing_left(front: subprocess.Popen[str], directory: Path, workers: list[int]) -> str:
    """Returns what it said on stderr."""
    _, said = front.communicate(timeout=BOUND)
    eventually(lambda: all(map(gone, workers)), "the workers are gone")
    eventually(lambda: not directory.exists(), "the directory is gone")
    return said


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("engine.close()", 0, ""),
        ("pass", 0, ""),  # forgotten
        ("del engine", 0, ""),
        ("with engine: raise ValueError('mine')", 1, "ValueError: mine"),
        (
            "with engine:\n  s = engine.stream([1], endless)\n  next(s)\n  raise SystemExit(7)",
            7,
            "",
        ),
        ("import os\nos._exit(5)", 5, ""),
    ],
    ids=["closed", "forgotten", "dropped", "exception", "in mid-text", "without a word"],
)
def test_nothing_is_left_after_a_front_that_ends(
    anew: None, temporary: Path, body: str, code: int, says: str
) -> None:
    front, directory, workers = start_front(body)
    said = check_nothing_left(front, directory, workers)
    assert front.returncode == code, said
    assert says in said
    assert says or not said, "and it ends quietly"


@pytest.mark.parametrize(
    ("number", "stopped"),
    [
        (signal.SIGINT, None),
        *(pytest.param(n, None, marks=pytest.mark.long) for n in (signal.SIGTERM, signal.SIGKILL)),
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_after_a_front_that_is_ended(
    temporary: Path, number: signal.Signals, stopped: int | None
) -> None:
    """In the middle of a text that would take hours. A stopped worker cannot notice: the kernel wakes it for that."""
    front, directory, workers = start_front(STREAM)
    front.stdout.readline()
    if stopped is not None:
        os.kill(workers[stopped], signal.SIGSTOP)
    front.send_signal(number)
    said = check_nothing_left(front, directory, workers)
    assert front.returncode == -number
    assert said.count("KeyboardInterrupt") == (number == signal.SIGINT)


def test_nothing_is_left_where_the_front_is_killed_while_models_load(
    anew: None, temporary: Path
) -> None:
    front = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body="")], stdout=subprocess.DEVNULL
    )
    eventually(lambda: bool(psutil.Process(front.pid).children()), "a worker has been started")
    workers = [child.pid for child in psutil.Process(front.pid).children()]
    front.kill()
    front.wait()
    eventually(lambda: all(map(gone, workers)), "the workers are gone")


# ---- failing to start ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"draft": "/nowhere/model"},
            "/nowhere/model",
        ),  # what else is seen before any process starts is in test_cli
        *(
            ({f"{role}_device": "cuda:1"}, f"{role}: device cuda:1 is not there")
            for role in ("target", "draft")
        ),
        ({"startup_timeout": 0.01}, "startup_timeout"),
    ],
)
def test_an_engine_that_cannot_start_names_the_cause_and_leaves_nothing(
    temporary: Path, settings: Any, message: str
) -> None:
    if torch.cuda.is_available() and "cuda" in message:
        pytest.skip("it would be there")
    before = children()
    with pytest.raises((ModelError, StartError), match=message) as caught:
        Engine(**{"target": TOY, "draft": TOY} | settings)
    assert str(caught.value).count(message) == 1
    assert caught.value.exit_code == 3
    assert children() <= before


# ---- workers that die, in mid-text ----


def dead(ready_since: float) -> Mock:
    """A draft worker that has ended; ready since then, 0: never."""
    return Mock(alive=False, ready_since=ready_since, exit_error=lambda: StartError("it has died"))


DIED, LIVED_LONG = dead(0.0), dead(time.monotonic() - 601)


class RunAtOnce:
    """A thread that has ended when `start` returns."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


# At the limit of open files there is no process, so none that has died.
SHORT = [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]


@pytest.mark.parametrize(
    ("drafts", "restarts", "expected"),
    [
        ([DIED] * 4, 3, [1, 2, 4]),
        ([DIED] * 8, 7, [1, 2, 4, 8, 16, 30, 30]),
        ([DIED, DIED, LIVED_LONG, DIED, DIED], 2, [1, 2, 1, 2]),
        ([DIED], 0, []),
        ([DIED, *SHORT * 3, DIED, *SHORT, DIED], 2, [1, 1, 2, 4, 8, 16, 30, 2, 1, 2]),
    ],
)
def test_a_draft_is_restarted_with_back_off(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    drafts: list[Any],
    restarts: int,
    expected: list[float],
) -> None:
    """Which starts again after one that lived long."""
    launch, closing = Mock(side_effect=drafts), Mock(wait=Mock(return_value=False))
    monkeypatch.setattr("pearl.engine.processes.Worker", launch)
    at_once = SimpleNamespace(Event=lambda: closing, Thread=RunAtOnce)
    monkeypatch.setattr("pearl.engine.processes.threading", at_once)
    config = EngineConfig(draft_restarts=restarts)
    keeper = DraftKeeper(WorkerSettings(role="draft", config=config, directory=tmp_path))
    keeper.keep()
    assert launch.call_count == len(drafts)
    waits = [call.args[0] for call in closing.wait.call_args_list]
    assert [seconds for seconds in waits if seconds >= 1] == expected


def test_all_who_wait_are_told_the_same(temporary: Path) -> None:
    """Only the first finds the target silent; by then it has been ended, which is not why it was lost."""
    with Engine(LONG_TOY, LONG_TOY, target_timeout=2.0) as engine:
        streams = [engine.stream(PROMPT, ENDLESS) for _ in range(3)]
        next(streams[0])
        os.kill(engine.target_worker.pid, signal.SIGSTOP)

        def lost(read: Callable[[], object]) -> str:
            with pytest.raises(TargetLost, match="silent for 2 s") as caught:
                read()
            return str(caught.value)

        with ThreadPoolExecutor(3) as pool:
            said = {*pool.map(lost, [partial(list, stream) for stream in streams], timeout=BOUND)}
        assert said == {lost(lambda: engine.generate(PROMPT, greedy(5)))}


def test_device_names_pin_the_workers(temporary: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    with Engine(TOY, TOY, target_device=f"cpu:{last}", draft_device=f"cpu:{first}") as engine:
        pinned = [
            psutil.Process(w.pid).cpu_affinity()
            for w in (engine.target_worker, engine.draft.worker)
        ]
        threads = psutil.Process(engine.target_worker.pid).environ()["OMP_NUM_THREADS"]
    assert pinned == [[last], [first]]
    assert threads == "1"


# ---- for a long time ----


@pytest.mark.long
def test_a_thousand_requests_leave_memory_files_and_threads_flat(temporary: Path) -> None:
    """Of all three processes; the first requests fill caches, so they are not counted."""
    # The same thirty texts again and again: what a toy model remembers of a context is then known soon.
    warm = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)

    def footprints(engine: Engine) -> list[tuple[int, int, int]]:
        ours = [
            psutil.Process(),
            psutil.Process(engine.target_worker.pid),
            psutil.Process(engine.draft.worker.pid),
        ]
        return [(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in ours]

    prompts = [[(i * j) % 30 + 1 for j in range(256)] for i in range(30)]
    usual = RequestOptions(
        branches=0
    )  # of what is prepared the toy model would meet ever new contexts
    with Engine(
        "toy:vocab=32,alpha=0.5,context=512", "toy:vocab=32,alpha=0.5,context=512"
    ) as engine:
        for i in range(300):
            engine.generate([prompts[i % 30]], warm.overridden_by(usual))
        before = footprints(engine)
        for i in range(1000):
            engine.generate([prompts[i % 30]], warm.overridden_by(usual))
        after = footprints(engine)
    for (files, threads, memory), (files_now, threads_now, memory_now) in zip(
        before, after, strict=True
    ):
        assert files_now <= files
        assert threads_now <= threads
        # A kept prompt takes 2 kB as a list of numbers that are there anyway, 1 kB as bytes: either would show.
        assert memory_now - memory < 1 << 20


# ---- a fork of the front ----


@contextmanager
def forked(body: Callable[[], None]) -> Iterator[int]:
    """Runs `body` in a fork of this process, which ends with 0 once it has returned, and with 3 where it raised."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def ended(pid: int) -> int | None:
    """Its exit code; None where it has none for as long as nothing here takes."""
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def test_an_engine_belongs_to_the_process_that_made_it(temporary: Path) -> None:
    """A fork's copy closes at once, though a thread of the parent holds the engine's locks, and harms nothing."""
    with Engine(TOY, TOY, **PACED) as engine:
        expected = greedy_text(PROMPT, 60)
        open_stream = engine.stream(PROMPT, greedy(60))
        next(open_stream)
        held, let_go = threading.Event(), threading.Event()

        def is_let_go() -> bool:
            """Called while `wait_until` holds the client's lock."""
            held.set()
            return let_go.wait(BOUND)

        def hold() -> None:
            with engine._launcher._ending:
                engine.client.wait_until(is_let_go)

        def use_and_close() -> None:
            for use in (
                lambda: engine.generate([PROMPT], greedy(5)),
                lambda: next(open_stream),
                lambda: engine.client.wait_until(lambda: False),
            ):
                with pytest.raises(EngineClosed, match=f"belongs to process {os.getppid()}"):
                    use()
            open_stream.close()
            with engine:
                pass
            engine.close()
            engine.client.__del__()
            with pytest.raises(EngineClosed):
                engine.generate([PROMPT], greedy(5))

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(BOUND)
        with forked(use_and_close) as child:
            code = ended(child)
            let_go.set()
            thread.join()
            assert code == 0
        for _ in open_stream:
            pass
        assert open_stream.result.tokens == expected
        assert engine.directory.exists()
        assert engine.generate([PROMPT], greedy(60))[0].tokens == expected


def test_a_fork_that_ends_harms_nothing(anew: None, temporary: Path) -> None:
    """Its copy of the engine is dropped, and the interpreter's own end comes."""
    front, directory, workers = start_front(
        "import gc, os, sys\nif (child := os.fork()) == 0:\n  del engine\n  gc.collect()\n  sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)\n"
        "print(len(engine.generate([[1, 2, 5]], greedy)[0].tokens))\n"
        "engine.close()"
    )
    assert front.stdout.readline() == "9\n"
    assert check_nothing_left(front, directory, workers) == ""
    assert front.returncode == 0


def test_a_fork_makes_an_engine_of_its_own_and_the_parents_ends_meanwhile(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork inherits the other ends of the workers' stdin: they did not end by themselves, and had to be killed."""
    with Engine(TOY, TOY) as engine:

        def use_another() -> None:
            engine.close()
            with Engine(TOY, TOY) as own:
                assert own.generate([PROMPT], greedy(20))[0].tokens == greedy_text(PROMPT, 20)

        with forked(use_another) as child:
            assert ended(child) == 0
        assert engine.generate([PROMPT], greedy(20))[0].tokens == greedy_text(PROMPT, 20)
        with forked(lambda: time.sleep(2 * BOUND)):
            engine.close()
    assert "killing it" not in caplog.text
