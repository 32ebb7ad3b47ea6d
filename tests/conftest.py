"""What several test files share: one running engine on toy models, since starting two workers takes seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

os.environ.pop("COLUMNS", None)  # tests that run side by side have them, and a program in a terminal would believe them
os.environ.pop("LINES", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the workers' threads are enough

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job ignores Ctrl-C, and so would every process that the tests start, and mean to interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pearl.engine import Engine
from pearl.models.toy import alpha_pair

TOY = "toy:vocab=32,alpha=0.5,context=512,eos=3"  # half of what the draft says is refused


def greedy_text(prompt: Sequence[int], length: int, vocab: int = 32, alpha: float = 0.5) -> list[int]:
    """What the toy target says by itself, found without any of the runtime."""
    target, _ = alpha_pair(vocab, alpha)
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(target(tokens).argmax()))
    return tokens[len(prompt) :]


# Fixtures that take seconds, by module: the tests that use one run on one of the workers, where it is made once.
_SHARED = {"test_engine": "tiny", "test_distill": "whole", "test_tables": "reached", "test_bench": "system"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come first: at the end short ones keep all workers busy."""
    for item in items:
        shared = _SHARED.get(item.path.stem)
        if shared in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{shared}"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def toy() -> Iterator[Engine]:
    """A running pair of `TOY`; a test that harms its workers takes an engine of its own."""
    with Engine(TOY, TOY, startup_timeout=120) as engine:
        yield engine
