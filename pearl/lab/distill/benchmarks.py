"""Recognise prompts of HumanEval, GSM8K and MT-bench and near copies of them, which must not be trained on.

`benchmarks.npy` holds a 32-bit hash of every run of five words in these prompts, and of every whole prompt; the prompts
cannot be recovered from it.  `scripts/fingerprint_benchmarks.py` makes it.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

FINGERPRINTS = Path(__file__).parent / "benchmarks.npy"
RUN = 5  # words
MOST_SHARE = 0.25  # of a prompt's runs that may also be in a benchmark
MOST_RUNS = 7  # of them that may also be in a benchmark: 7 successive runs are eleven words


def words(text: str) -> list[str]:
    """The words in lower case, without punctuation; every number becomes 0: a changed number is no new question."""
    return [re.sub(r"\d+", "0", word) for word in re.findall(r"\w+", text.lower())]


def fingerprints(text: str) -> set[int]:
    """Hashes of every run of `RUN` words in the text (of all its words if it is shorter), and of the whole text."""
    found = words(text)
    runs = [found[i : i + RUN] for i in range(max(1, len(found) - RUN + 1))] if found else []
    return {_hash(run) for run in runs} | {_hash(["whole", *found])}


def _hash(run: list[str]) -> int:
    return int.from_bytes(blake2b(" ".join(run).encode(), digest_size=4).digest(), "little")


def is_benchmark(text: str) -> bool:
    """Whether `text` is a benchmark's prompt, is close to one, or contains one."""
    own = fingerprints(text)
    shared = len(own & _known())
    return _hash(["whole", *words(text)]) in _known() or shared > min(
        MOST_RUNS, MOST_SHARE * len(own)
    )


@cache
def _known() -> frozenset[int]:
    known: npt.NDArray[np.uint32] = np.load(FINGERPRINTS)
    return frozenset(known.tolist())
