"""A draft service for the benchmarks of the proposer: `pearl draft serve` as a process on core 1."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


@contextmanager
def draft_service(draft: str, address: str, *flags: str) -> Iterator[None]:
    """Run a service until the block ends; the block begins once it is ready. `flags`: more of `pearl draft serve`."""
    command = [sys.executable, "-m", "pearl", "draft", "serve", "--draft", draft]
    command += ["--listen", address, "--draft-device", "cpu:1", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "drafting on" in line:
                break
        yield
    finally:
        process.terminate()
        process.wait(60)
