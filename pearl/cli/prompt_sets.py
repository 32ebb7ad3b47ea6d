"""Reads prompts and writes JSON files, for the commands that simulate or measure."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from pearl.config import RequestOptions
from pearl.config.option_names import sampling_of
from pearl.errors import ConfigError
from pearl.lab.bench.tasks import HUMANEVAL, OURS, Task, read_tasks

STDOUT = Path("-")


def _writable(_: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Raise `ConfigError` now if a file cannot be written, not after minutes of work on its contents."""
    if path is None or path == STDOUT:
        return path
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"{option.opts[0]}: cannot write {path}: name a file in a directory that exists"
        )
    return path


def output_option(name: str, *names: str, **form: Any) -> Callable[[Any], Any]:
    """Make an option that names a file to write.

    A file that cannot be written is refused before the command begins its work.
    """
    kind: click.Path = click.Path(path_type=Path, allow_dash=form.pop("allow_dash", False))
    return click.option(name, *names, type=kind, callback=_writable, **form)


json_option = output_option(
    "--json", "to", allow_dash=True, help="Write JSON here; - is standard output."
)


def read_sets(
    prompts: Sequence[str], limit: int, toys: bool = False, default: Sequence[str] = OURS
) -> list[Task]:
    """Return the first `limit` tasks of each set named by `--prompts`. Raises `ConfigError`.

    Args:
        toys: whether toy models stand in for the pair. They know no language, so without `prompts` all tasks have the
            same prompt, and differ only in the seed with which they are decoded.
    """
    if toys and not prompts:
        return [Task("emulated", number, ("hello",)) for number in range(1, limit + 1)]
    tasks: list[Task] = []
    for prompt_set in prompts or default:
        name, path = _name_and_file(prompt_set)
        if any(task.set == name for task in tasks):
            raise ConfigError(f"two sets of prompts are called {name!r}: write NAME=FILE")
        tasks += read_tasks(name, path, limit)
    return tasks


def _name_and_file(prompt_set: str) -> tuple[str, Path | None]:
    """Return (name of the set, its file); the file is None for a built-in set.

    For example, "questions" gives ("questions", None), and "a/b.jsonl" gives ("b", Path("a/b.jsonl")).
    """
    if prompt_set in (HUMANEVAL, *OURS):
        return prompt_set, None
    name, equals, file = prompt_set.partition("=")
    if not equals:
        file = prompt_set
        name = Path(file).stem
    if not file or not (equals or name):
        raise ConfigError(f"{prompt_set!r}: write FILE or NAME=FILE")
    return name, Path(file)


def measured_with(options: RequestOptions, max_tokens: int, temperature: float) -> RequestOptions:
    """Return the options of a benchmark's rows, with defaults for those that are not set.

    The defaults are the arguments `max_tokens` and `temperature`, and seed 0. Options of drafting
    and judging, which a configuration file may set for other commands, are left out: each row has
    its own.
    """
    return sampling_of(options).changed(
        temperature=temperature if options.temperature is None else options.temperature,
        seed=options.seed or 0,
        max_tokens=options.max_tokens or max_tokens,
    )


def reported(to: Path | None, document: object) -> bool:
    """Write the document to the file of --json, if it is given; return whether to print tables.

    Tables are not printed if the JSON goes to standard output.
    """
    if to is not None:
        write_json(to, document)
    return to != STDOUT


def write_json(path: Path, document: object) -> None:
    """Write a document as JSON to a file; to standard output if `path` is `STDOUT`.

    The document may contain dataclasses and msgspec structs. Raises `ConfigError` if the file cannot be written.
    """
    text = msgspec.json.encode(document).decode()
    if path == STDOUT:
        click.echo(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
