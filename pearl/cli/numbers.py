"""Prompts and JSON files of the commands that simulate or measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from pearl.config import RequestOptions
from pearl.errors import ConfigError
from pearl.lab.bench.tasks import HUMANEVAL, OURS, Task, read_tasks

json_option = click.option(
    "--json", "to", type=click.Path(path_type=Path, allow_dash=True), help="Write JSON here; - is standard output."
)
STDOUT = Path("-")


def read_sets(prompts: Sequence[str], limit: int, toys: bool = False, default: Sequence[str] = OURS) -> list[Task]:
    """The first `limit` tasks of each set named by `--prompts`. Raises `ConfigError`.

    `toys`: of an emulated pair, whose toys know no language: by default one prompt, decoded with several seeds.
    """
    if toys and not prompts:
        return [Task("emulated", number, ("hello",)) for number in range(1, limit + 1)]
    found: list[Task] = []
    for given in prompts or default:
        name, equals, file = given.partition("=")
        path = None if given in (HUMANEVAL, *OURS) else Path(file if equals else given)
        name = name if equals or path is None else path.stem
        if not (file if equals else name):
            raise ConfigError(f"{given!r}: write FILE or NAME=FILE")
        if any(task.set == name for task in found):
            raise ConfigError(f"two sets of prompts are called {name!r}: write NAME=FILE")
        found += read_tasks(name, path, limit)
    return found


def sampling_of(given: RequestOptions, max_tokens: int, temperature: float) -> RequestOptions:
    """With these defaults, and seed 0."""
    defaults = {"temperature": temperature, "seed": 0, "max_tokens": max_tokens}
    return given.changed(**{name: value for name, value in defaults.items() if getattr(given, name) is None})


def reported(to: Path | None, document: object) -> bool:
    """Write the document where --json names a file. Whether to print tables: not beside JSON on standard output."""
    if to is not None:
        write_json(to, document)
    return to != STDOUT


def write_json(path: Path, document: object) -> None:
    """Write to a file, or to standard output for `STDOUT`. Raises `ConfigError` if the file cannot be written.

    `document`: may hold dataclasses and records.
    """
    text = msgspec.json.encode(document).decode()
    if path == STDOUT:
        click.echo(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
