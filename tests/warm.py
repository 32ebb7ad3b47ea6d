"""Worker processes for tests, forked from a process that has imported torch and transformers.

The imports take 2 seconds of computing for a worker of a toy, and 5 for one of a checkpoint. The
tests start hundreds of workers. A forked worker differs only in how it came about: it has the
parent, the session, the environment, the files and the command of one that was started as a new
process.

Some workers are still started as new processes: those of fronts that are processes of their own
(`pearl`, torchrun, scripts), those whose environment may change what an import does, and those of
tests with the fixture `anew`.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, Any

from pearl.device import Device
from pearl.engine.processes import environment_for

_PR_SET_CHILD_SUBREAPER = 36
# By no import.
_READ_LATE = {
    "PEARL_FAULT",
    "PEARL_CACHE",
    "PEARL_DIRECTORY",
    "PYTEST_CURRENT_TEST",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
}
_READ_LATE |= {"PEARL_PLANTED"}  # names one of `tests.planted.BUGS`
_SET_LATER = {
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
}  # a worker that is pinned sets them itself besides
_MOST = 1 << 20  # bytes of a request


class Forked:
    """Stands in for a `subprocess.Popen`, with the methods that the engine uses.

    The worker was forked by another process, but this process is its parent.
    """

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                with suppress(ChildProcessError):  # in a fork of its parent
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        try:
            ended = os.pidfd_open(self.pid)
        except ProcessLookupError:  # another thread has collected it
            ended = os.open(os.devnull, os.O_RDONLY)
        try:
            select.select([ended], [], [], timeout)
        finally:
            os.close(ended)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process from which workers are forked. It imports while the first tests run."""

    def __init__(self) -> None:
        self._owner, self._affinity = os.getpid(), os.sched_getaffinity(0)
        self._lock = threading.Lock()
        env = environment_for(Device("auto"))
        self._environment = _relevant(env)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(
        self, command: list[str], env: dict[str, str], **options: Any
    ) -> subprocess.Popen[bytes] | Forked:
        """Start a worker; replaces `subprocess.Popen`."""
        mine = os.getpid() == self._owner and os.sched_getaffinity(0) == self._affinity
        if mine and _relevant(env) == self._environment:
            with self._lock:
                return self._fork(env)
        return subprocess.Popen(command, env=env, **options)

    def _fork(self, env: dict[str, str]) -> Forked:
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        theirs = [their_stdin, their_stdout, 2]
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # it is born an orphan, and given to us
        try:
            socket.send_fds(self._ours, [json.dumps([env, os.getcwd()]).encode()], theirs)
            said = self._ours.recv(64)
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
            for end in theirs[:2]:
                os.close(end)
        assert said, "the process that workers are forked from has died"
        return Forked(int(said), os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))

    def close(self) -> None:
        self._ours.close()
        self._process.kill()  # it may still be importing
        self._process.wait()


def _relevant(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _READ_LATE | _SET_LATER}


def _become(env: dict[str, str], directory: str, files: list[int]) -> None:
    """Turn this fork into a worker.

    Once the process that forked it has ended, its parent is the launcher.
    """
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    os.chdir(directory)
    from pearl.worker.__main__ import main

    if bug := os.environ.get("PEARL_PLANTED"):
        from tests.planted import plant

        plant(bug)
    if "PEARL_FAULT" in os.environ:
        from scripts.faulty import make_faulty

        make_faulty()
    code = main()
    sys.stderr.flush()
    os._exit(code)


def _serve(requests: socket.socket) -> None:
    gc.disable()  # as a worker does while it imports
    import transformers

    import pearl.models.own_forward
    import pearl.models.transformers.runner
    import pearl.worker.__main__
    import pearl.worker.build  # noqa: F401

    for lazy in (
        "AutoConfig",
        "AutoModelForCausalLM",
        "AutoTokenizer",
        "GenerationConfig",
        "LlamaForCausalLM",
    ):
        getattr(transformers, lazy)
    assert len(os.listdir("/proc/self/task")) == 1, "what a thread holds at a fork is never let go"
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        said, files, *_ = socket.recv_fds(requests, _MOST, 3)
        if not said:
            return
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            os.setsid()  # before anybody knows of it: who kills it kills its session
            requests.send(str(os.getpid()).encode())
            requests.close()
            _become(*json.loads(said), files)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
