"""How a datastore's counts become chances: a search over `Weights`, by replaying texts that a model has generated.

Source: SSSD (Marzollo et al. 2024), whose weights come from such a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from pearl.document import parse_json
from pearl.drafting.datastore import BINS, Datastore, Header, Weights, Writer, read_header
from pearl.drafting.guesser import StoreGuesses
from pearl.drafting.ngram import MOST_MATCHED
from pearl.errors import ConfigError
from pearl.lab.experiments.guessing import Generated, Replayed, replay

GRID = {"damping": (1.0, 1.5, 3.0), "few": (1, 8, 24), "fade": (1.0, 0.9, 0.8)}
_BELIEF = 10  # cases that the rate of a row counts as, where a cell of it has seen few


class Watcher(Protocol):
    """Who is told how far it is; `total` and `count` are weights tried."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...


def read_generated(paths: Sequence[Path], vocab_size: int) -> list[Generated]:
    """The texts in files of what `pearl generate --json` has printed, one a line. Raises `ConfigError`."""
    texts = [text for path in paths for text in _lines(path, vocab_size)]
    if not texts:
        raise ConfigError("there are no generated texts to tune on")
    return texts


def _lines(path: Path, vocab_size: int) -> Iterator[Generated]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _generated(line, vocab_size, f"{path} line {number}")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _generated(line: str, vocab_size: int, where: str) -> Generated:
    try:
        record: Any = parse_json(line)
        prompt, tokens = record["prompt_tokens"], record["tokens"]
        known = all(type(token) is int and 0 <= token < vocab_size for token in [*prompt, *tokens])
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ConfigError(f"{where} is not what `pearl generate --json` prints, for a model with this tokenizer")
    return Generated((*prompt, *tokens), len(prompt))


def measured_rates(texts: Sequence[Generated], store: Datastore) -> tuple[tuple[float, ...], ...]:
    """How often the store's candidates are right on these texts, as `Weights.rates`: the store's own are not looked at.

    A cell that has seen few cases leans to what its row has seen, and an empty row to the store's.
    """
    cases = [[[0, 0] for _ in range(MOST_MATCHED)] for _ in range(len(BINS) + 1)]
    for text in texts:
        guesses = StoreGuesses(store, text.tokens, len(text.tokens))
        for position in range(max(1, text.start), len(text.tokens)):
            for candidate, share in guesses.shares(position):
                cell = cases[share][candidate.matched - 1]
                cell[0] += 1
                cell[1] += candidate.token == text.tokens[position]
    rates = []
    for row, known in zip(cases, store.weights.rates, strict=True):
        seen, right = map(sum, zip(*row, strict=True))
        rate = (right + _BELIEF * sum(known) / len(known)) / (seen + _BELIEF)
        rates.append(tuple(round((hits + _BELIEF * rate) / (count + _BELIEF), 4) for count, hits in row))
    return tuple(rates)


def search(texts: Sequence[Generated], store: Datastore, most: int, watcher: Watcher) -> tuple[Weights, Replayed]:
    """The weights of `GRID` with which most tokens are made a step, with rates measured; and what they come to.

    Every text is replayed with rates that the other half of the texts gave: on few texts they would fit themselves.
    """
    halves = texts[::2], texts[1::2]
    best: tuple[Weights, Replayed] | None = None
    grid = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    watcher.begin("tuning", len(grid))
    given = store.weights
    for values in grid:
        parts = []
        for learned, tried in (halves, halves[::-1]):
            store.weights = given.model_copy(update=values)
            store.weights = store.weights.model_copy(update={"rates": measured_rates(learned, store)})
            parts.append(replay(tried, store, most))
        one, other = parts
        found = one + other
        if best is None or found.tokens_per_step > best[1].tokens_per_step:
            best = given.model_copy(update=values), found
        watcher.advance(1, f"{best[1].tokens_per_step:.3f} tokens a step")
    assert best is not None
    store.weights = best[0]
    return best[0].model_copy(update={"rates": measured_rates(texts, store)}), best[1]


def save(directory: Path, weights: Weights, tuned: str) -> Header:
    """Puts the weights into the datastore's header. Raises `ConfigError`."""
    with Writer(directory) as writer:
        header = Header(**{**dict(read_header(directory)), "weights": weights, "tuned": tuned})
        writer.publish(header)
    return header
