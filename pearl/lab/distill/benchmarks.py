"""Recognise prompts of HumanEval, GSM8K and MT-bench and near copies of them, which must not be trained on.

`benchmarks.npy` holds a 32-bit hash of every run of five words in these prompts, and of every whole prompt.  The
prompts cannot be recovered from it.  `scripts/fingerprint_benchmarks.py` writes the file.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import blake2b
from pathlib import Path

FINGERPRINTS = Path(__file__).parent / "benchmarks.npy"
RUN = 5  # successive words
# A prompt counts as a benchmark's if it shares more runs with benchmarks than either limit allows.
MOST_SHARE = 0.25  # of the prompt's runs
MOST_RUNS = 7  # if successive, they cover eleven words


def words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation.

    Every number becomes 0, because a question with other numbers is still the same question.
    """
    return re.findall(r"\w+", re.sub(r"\d+", "0", text.lower()))


def fingerprints(text: str) -> set[int]:
    """Return the hashes of every run of `RUN` successive words in the text, and of the whole text.

    A text of fewer than `RUN` words has one run, of all its words.
    """
    text_words = words(text)
    hashes = {_whole(text_words)}
    if text_words:
        for i in range(max(1, len(text_words) - RUN + 1)):
            hashes.add(_hash(text_words[i : i + RUN]))
    return hashes


def _whole(text_words: list[str]) -> int:
    return _hash(["whole", *text_words])


def _hash(run: list[str]) -> int:
    return int.from_bytes(blake2b(" ".join(run).encode(), digest_size=4).digest(), "little")


def is_benchmark(text: str) -> bool:
    """Return whether `text` is a benchmark's prompt, is close to one, or contains one."""
    hashes = fingerprints(text)
    shared = len(hashes & _benchmark_hashes())
    limit = min(MOST_RUNS, MOST_SHARE * len(hashes))
    return _whole(words(text)) in _benchmark_hashes() or shared > limit


@cache
def _benchmark_hashes() -> frozenset[int]:
    import numpy as np

    return frozenset(np.load(FINGERPRINTS).tolist())
