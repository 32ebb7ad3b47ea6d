"""Python programs for tests, forked from a process that has imported what they need.

The imports take a second of computing for a worker of a toy, 5 seconds for one of a checkpoint, 3
for torchrun, and half a second for a front; a fork takes less than a tenth. The tests start
hundreds of these processes. A forked program has the parent, the session, the environment, the
files and the command of a new process (see test_warm), and the programs that it starts are forked,
too. The memory of what was imported is not freed at its end.

Some programs are still started as new processes: programs whose environment may change what an
import does, programs that a shell starts, and programs of tests that use the fixture `anew`.
"""

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

AS_NEW_PROCESS = subprocess.Popen._execute_child
FORKED = "# forked from tests.warm\n"  # begins the code that `python -c` may run in a fork
_FAULTY = str(Path(__file__).parents[1] / "scripts" / "faulty.py")
_FRONT = ("pearl.cli.chat", "pearl.cli.generate", "pearl.cli.serve", "pearl.engine")
_TORCHRUN = (
    "torch.distributed.argparse_util",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.elastic.rendezvous.registry",
    "torch.distributed.launcher.api",
)
_WORKER = (
    "pearl.models.own_forward",
    "pearl.models.transformers.runner",
    "pearl.worker.build",
    "pearl.worker.lifeline",
)
# Classes of transformers that are imported when they are first used.
_LAZY = (
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "GenerationConfig",
    "LlamaForCausalLM",
)
# Programs that may be forked, and what is imported before the first one is. Their own modules are
# not imported, as `runpy` would warn that it runs them twice.
_IMPORTS = {
    "pearl.worker": _WORKER,
    _FAULTY: _WORKER,
    "pearl": _FRONT,
    "-c": _FRONT,
    "torch.distributed.run": (*_FRONT, *_TORCHRUN),
}
_START_NO_OTHERS = ("pearl.worker", _FAULTY)
# Environment variables that no import reads, and prefixes of others.
_READ_LATE = {
    "COLUMNS",
    "EDITOR",
    "LINES",
    "MKL_NUM_THREADS",  # a worker that is pinned sets them itself besides
    "OMP_NUM_THREADS",
    "PADDING",
    "PYTEST_CURRENT_TEST",
    "PYTHONUNBUFFERED",  # a fork opens its streams by itself
    "RANK",
    "TERM",
    "TMPDIR",
    "TOKENIZERS_PARALLELISM",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
}
_ALL_READ_LATE = ("GROUP_", "LOCAL_", "MASTER_", "PEARL_", "ROLE_", "TORCHELASTIC_")
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_PR_SET_CHILD_SUBREAPER = 36
_MOST = 1 << 17  # bytes of a request
_ROOM = 1 << 14  # bytes for a command in /proc, and for an environment


def take_terminal() -> None:
    """Make the terminal on standard input that of this process's session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Program(NamedTuple):
    """A Python program, as `subprocess.Popen` is asked to start it.

    Attributes:
        name: a module, the path of a script, or "-c".
        arguments: the words of `command` after the name.
        has_session: whether it gets a session of its own.
        has_terminal: whether its standard input is the terminal of this session.
    """

    command: list[str]
    name: str
    arguments: list[str]
    directory: str
    environment: dict[str, str]
    has_session: bool
    has_terminal: bool

    @property
    def is_unbuffered(self) -> bool:
        return self.command[1] == "-u" or bool(self.environment.get("PYTHONUNBUFFERED"))

    def become(self, files: list[int]) -> None:
        """Turn this process, which was forked for the program, into what would run it."""
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        tempfile.tempdir = None
        _show_in_proc(self.command, self.environment)
        if self.has_terminal:
            take_terminal()
        self._open_streams()
        sys.path[0] = self.directory
        sys.orig_argv = self.command
        sys.argv = [self.name, *self.arguments]

    def _open_streams(self) -> None:
        """Open the standard streams as the interpreter does when it starts."""
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            nursery_stream = getattr(sys, name)
            mode = "wb" if number else "rb"
            buffering = 0 if number and self.is_unbuffered else -1
            is_line_buffered = number == 2 or os.isatty(number)
            stream = io.TextIOWrapper(
                open(number, mode, buffering, closefd=False),  # noqa: SIM115
                nursery_stream.encoding,
                nursery_stream.errors,
                newline="\n",
                line_buffering=is_line_buffered and not self.is_unbuffered,
                write_through=self.is_unbuffered,
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def exit_code(self) -> int:
        """Run the program; return its exit code, or minus the signal that ends it."""
        try:
            self._run()
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            print(end.code, file=sys.stderr)
            return 1
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def _run(self) -> None:
        bug = self.environment.get("PEARL_PLANTED")
        if bug:
            from tests.planted import plant

            plant(bug)
        if self.name == "-c":
            exec(sys.argv.pop(1), sys.modules["__main__"].__dict__)
        elif self.name == _FAULTY:
            runpy.run_path(_FAULTY, run_name="__main__")
        else:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)


class Nursery:
    """Has programs forked by another process. Their parent is this one nevertheless."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._inherited = _inherited()
        self._environment = _read_by_imports(os.environ)

    @property
    def execute_child(self) -> object:
        """Replaces the method of `subprocess.Popen` that makes the process."""
        return partialmethod(_execute_child, self)

    def can_fork(self, program: Program) -> bool:
        """Return whether a fork would inherit what a new process would inherit from this one."""
        is_owner = os.getpid() == self._owner
        environment = _read_by_imports(program.environment)
        return is_owner and self._inherited == _inherited() and self._environment == environment

    def fork(self, program: Program, files: list[int]) -> int:
        """Have a program forked with these files as its standard streams. Return its process id."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # it is born an orphan, and given to us
            try:
                socket.send_fds(self._requests, [json.dumps(program).encode()], files)
                answer = self._requests.recv(64)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the process that programs are forked from has died"
        return int(answer)


def start() -> tuple[Nursery, Callable[[], None]]:
    """Start the process that programs are forked from. It imports while the first tests run.

    Also returns a function that ends it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import sys\nfrom tests.warm import serve\nserve(int(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno()), "x" * _ROOM],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PADDING": "x" * _ROOM},
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.kill()  # it may still be importing
        process.wait()

    return Nursery(ours), end


def serve(requests: int) -> NoReturn:
    """Fork programs for whoever holds the other end of the socket with this number.

    Does not return, neither here nor in the forks.
    """
    gc.disable()  # as a worker does while it imports
    import transformers

    for name in _WORKER:
        import_module(name)
    for name in _LAZY:
        getattr(transformers, name)
    gc.collect()
    gc.freeze()
    gc.enable()
    program, files = _forked(socket.socket(fileno=requests))
    nursery_socket = None
    while program.name not in _START_NO_OTHERS:
        nursery_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():  # this process runs the program; the other one forks those that it starts
            theirs.close()
            break
        nursery_socket.close()
        for file in files:
            os.close(file)
        os.setsid()
        program, files = _forked(theirs)
        nursery_socket = None
    program.become(files)
    if nursery_socket:
        subprocess.Popen._execute_child = Nursery(nursery_socket).execute_child
    _end(program.exit_code())


def _forked(requests: socket.socket) -> tuple[Program, list[int]]:
    """Fork a process for each request. Return its program and files in the fork.

    This process ends once nobody holds the other end of the socket.
    """
    while True:
        message, files, *_ = socket.recv_fds(requests, _MOST, 3)
        if not message:
            os._exit(0)
        program = Program(*json.loads(message))
        for name in _IMPORTS[program.name]:
            import_module(name)
        gc.freeze()  # a collection in a fork would copy all that it looks at
        assert len(os.listdir("/proc/self/task")) == 1, "a fork never gets what a thread holds"
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            if program.has_session:
                os.setsid()  # before anybody knows of it: who kills it kills its session
            requests.send(str(os.getpid()).encode())
            requests.close()
            return program, files
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _end(code: int) -> NoReturn:
    """End this process as the interpreter does, but let the kernel free what it has imported."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _execute_child(
    process: Any,
    nursery: Nursery,
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Any,
    *others: Any,
) -> None:
    """Fork the program of `process`, a `subprocess.Popen`. Start others as new processes.

    The arguments are those of the method that this function replaces.
    """
    pipes = others[3:9]  # for each standard stream the end to read from and the end to write to
    start_new_session = others[-2]
    program = _program(args, cwd, env, start_new_session, preexec_fn is take_terminal)
    is_plain = preexec_fn in (None, take_terminal) and not pass_fds
    if program is None or not is_plain or not nursery.can_fork(program):
        details = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
        AS_NEW_PROCESS(process, *details, *others)
        return
    files = [pipes[0], pipes[3], pipes[5]]
    for number in range(3):
        if files[number] == -1:  # not redirected
            files[number] = number
    process.pid = nursery.fork(program, files)
    process._child_created = True
    process._close_pipe_fds(*pipes)


def _program(
    args: Any, cwd: Any, env: Any, has_session: bool, has_terminal: bool
) -> Program | None:
    """Return the program that a command runs, if it may be forked."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    command = [os.fsdecode(word) for word in args]
    words = command[1:]
    for flag in ("-u", "-m"):
        if words[:1] == [flag]:
            del words[0]
    if command[0] != sys.executable or not words or words[0] not in _IMPORTS:
        return None
    if words[0] == "-c" and not words[1].startswith(FORKED):
        return None
    directory = os.path.abspath(os.fsdecode(cwd or "."))
    environment = dict(os.environ if env is None else env)
    return Program(command, words[0], words[1:], directory, environment, has_session, has_terminal)


def _inherited() -> tuple[set[int], list[tuple[int, int]]]:
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    return os.sched_getaffinity(0), limits


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _READ_LATE and not name.startswith(_ALL_READ_LATE)
    }


def _show_in_proc(command: list[str], environment: dict[str, str]) -> None:
    """Write a command and an environment where the kernel reads those of this process for /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments_start, arguments_end, variables_start, variables_end = map(int, fields[45:49])
    variables = [f"{name}={value}" for name, value in environment.items()]
    _write_words(command, arguments_start, arguments_end)
    _write_words(variables, variables_start, variables_end)


def _write_words(words: list[str], start: int, end: int) -> None:
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    room = end - start
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
