"""A worker's connection to its launcher: settings come in, status goes out, and the worker ends with its launcher.

The launcher writes the settings to the worker's stdin, and then holds the other end of stdin while
it lives. So end-of-file means that the launcher is gone. A child that the launcher has forked may
hold that end as well, and then no end-of-file comes. So the worker ends, too, if its parent's
process id changes, or if more input comes: the launcher sends a byte to end it.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.worker.settings import WorkerSettings

DIRECTORY = "PEARL_DIRECTORY"  # environment variable: the directory of the sockets
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 3.0  # for the loop to end by itself before the process is killed


def _continue_when_orphaned() -> None:
    """Let the kernel send SIGCONT when the launcher dies, so that even a stopped worker ends.

    The kernel sends the signal when the *thread* that created this process ends. The launcher may
    live longer than this thread, but SIGCONT does no harm to a process that is not stopped.
    """
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


class Lifeline:
    """Reads the settings, and then watches stdin in a thread.

    Attributes:
        closed: set once the launcher is gone.
    """

    def __init__(self) -> None:
        line = sys.stdin.buffer.readline()
        if not line:  # the launcher was killed at once, and nobody else knows its directory
            shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
            os._exit(1)
        self.settings = WorkerSettings.model_validate_json(line)
        self.closed = threading.Event()
        self._launcher = os.getppid()
        _continue_when_orphaned()
        self._ended = threading.Event()
        self._status = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print must not mix with our status lines

    def watch(self, directory: Path) -> None:
        """Start a thread that ends this process once the launcher is gone.

        Before the thread ends the process, it removes `directory`, the engine's directory with the
        sockets.
        """
        self._watcher = threading.Thread(
            target=self._watch, args=(directory,), daemon=True, name="lifeline"
        )
        self._watcher.start()

    def _watch(self, directory: Path) -> None:
        while os.getppid() == self._launcher and not select.select([0], [], [], 1.0)[0]:
            pass
        self.closed.set()
        ended = self._ended.wait(_GRACE_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)
        if not ended:  # it may be waiting for a child process, such as a download
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(0)

    def tell(self, state: str, **details: Any) -> None:
        """Send one status line, if the launcher is still there."""
        try:
            self._status.write(json.dumps({"state": state, **details}) + "\n")
        except (OSError, ValueError):
            self.closed.set()

    def beat(self, allowance: float) -> None:
        """Send a sign of life, unless this would block.

        It would block if the launcher is stopped, and has not read earlier signs.

        Args:
            allowance: for how many seconds the worker may be silent from now on.
        """
        if select.select([], [self._status], [], 0)[1]:
            self.tell("beat", allowance=allowance)

    def progress(self) -> Callable[[str], None]:
        return lambda message: self.tell("loading", message=message)

    def note(self, message: str) -> None:
        """Send a sentence that the user should read before the first text."""
        self.tell("note", message=message)

    def end(self) -> None:
        """Tell the watcher thread that the worker's work loop has ended and need not be waited for.

        If the launcher is gone, wait up to 3 s for the watcher to remove the directory and end the process. If the main
        thread ended the process first, the directory might be left behind.
        """
        self._ended.set()
        if self.closed.is_set():
            self._watcher.join(_GRACE_SECONDS)
