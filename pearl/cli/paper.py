"""`pearl bench paper`: the papers' tables. Arguments and tables; `pearl.lab.papers` measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pearl.cli.numbers import STDOUT, json_option, read_sets, write_json
from pearl.cli.tables import Bars, print_lines, print_table
from pearl.config import EngineConfig
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.tasks import HUMANEVAL, Task
from pearl.lab.papers.page import EXPLAINED, Table, conditions, pair_lines, tables
from pearl.lab.papers.pearl import TABLES, Pair, pairs
from pearl.lab.papers.studies import STUDIES

_SETS = (HUMANEVAL, "edits")
_EMULATED, _QUICK = {"tokens": 250, "texts": 2}, {"tokens": 60, "texts": 1}  # texts of each row
_GUESSES = "sssd"  # the paper with tables by source, number and temperature of guesses
_GUESSED, _GUESSED_QUICK = 12, 2  # texts of each set of prompts for these
_EMBEDDED, _EMBEDDED_QUICK = {"tokens": 96, "texts": 4}, {"tokens": 48, "texts": 1}  # texts of each set of prompts


@click.command()
@click.option("--pair", "names", multiple=True, metavar="NAME", help="Only pairs whose name holds this. Repeatable.")
@click.option("--table", "wanted", multiple=True, type=click.Choice(list(TABLES)), help="Only this one. Repeatable.")
@click.option(
    "--quick", is_flag=True, help="One text of 60 tokens: a first look, in 8 minutes; with --paper one prompt."
)
@click.option("--simulate-only", is_flag=True, help="No real processes: closed forms and simulator alone.")
@click.option(
    "--prompts",
    multiple=True,
    metavar="[NAME=]FILE",
    help="For --paper: as those of pearl bench. Repeatable.  [default: humaneval, edits]",
)
@click.option(
    "--paper",
    "other",
    type=click.Choice(list(STUDIES)),
    help="Another paper: its tables, as far as the embedded pair can fill them, with --prompts.",
)
@click.option(
    "--datastore",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --paper sssd: a datastore for guesses; see pearl datastore.",
)
@json_option
def paper(
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    quick: bool,
    simulate_only: bool,
    prompts: tuple[str, ...],
    other: str | None,
    datastore: Path | None,
    to: Path | None,
) -> None:
    """The paper's tables from this runtime, by EMULATION of its pairs.

    Toys stand in for the models, with the pair's vocabulary, forward times and acceptance rate. Two real processes
    decode, so the figures include the runtime's own cost.
    """
    if datastore is not None and other != _GUESSES:
        raise ConfigError(f"--datastore is for --paper {_GUESSES}")
    embedded = _EMBEDDED_QUICK if quick else _EMBEDDED
    if other is not None:
        guessed = read_sets(prompts, _GUESSED_QUICK if quick else _GUESSED, default=_SETS) if other == _GUESSES else []
        _study(other, read_sets(prompts, embedded["texts"], default=_SETS), embedded["tokens"], guessed, datastore, to)
    else:
        settings = (_QUICK if quick else _EMULATED) | {"seed": 0, "runtime": not simulate_only}
        _show(_run(_pairs(names), wanted or tuple(TABLES), settings), to)


def _pairs(names: Sequence[str]) -> list[Pair]:
    every = pairs()
    found = [pair for pair in every if not names or any(name.lower() in pair.title.lower() for name in names)]
    if not found:
        raise ConfigError(f"no pair is called {names[0]!r}; there are {'; '.join(pair.title for pair in every)}")
    return found


def _run(found: Sequence[Pair], wanted: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    from pearl.lab.papers import emulate

    clock, done = Conditions(), []
    with Bars() as bars:
        for pair in found:
            bars.say(pair.title)
            done.append(emulate.emulate(pair, wanted, bars, **settings))
    clock.stop()
    names = [name for name in TABLES if any(cells.get(name) for cells, _ in done)]
    about = {"kind": "paper", "emulated": True, "settings": settings} | clock.as_dict()
    tables = {name: [{"pair": one["title"], **asdict(c)} for cells, one in done for c in cells[name]] for name in names}
    result: dict[str, Any] = json.loads(json.dumps(about | {"tables": tables, "pairs": [one for _, one in done]}))
    return result


def _show(result: dict[str, Any], to: Path | None) -> None:
    if to is not None:
        write_json(to, result)
    if to != STDOUT:
        for table in tables(result):
            _print(table)
        print_lines(*pair_lines(result), EXPLAINED, conditions(result))


def _study(
    name: str, tasks: Sequence[Task], tokens: int, guessed: Sequence[Task], datastore: Path | None, to: Path | None
) -> None:
    """`guessed`: prompts for the tables of guesses, which need more texts; none: no such tables."""
    from pearl.lab.papers import sssd, study

    clock, about = Conditions(), STUDIES[name]
    config = EngineConfig(datastore=None if datastore is None else str(datastore))
    with Bars() as bars:
        found = study.run_study(about, tasks, tokens, bars, config)
        guesses = sssd.measure_guesses(config, guessed, tokens, bars) if guessed else None
    clock.stop()
    if to is not None:
        settings = {"paper": name, "tokens": tokens, "texts": len(tasks)}
        words = {"title": about.title, "differs": about.differs, "left_out": about.left_out}
        document = {"kind": "study", "settings": settings, **words, **clock.as_dict()}
        write_json(to, document | {"rows": found, "guesses": guesses})
    if to != STDOUT:
        _print(study.in_words(about, found), words=2)
        sets = ", ".join(dict.fromkeys(task.set for task in tasks))
        print_lines(f"{len(tasks)} prompts ({sets}), up to {tokens} tokens; {clock}", "")
        for table in sssd.in_words(guesses) if guesses else ():
            _print(table)


def _print(table: Table, words: int = 1) -> None:
    notes = (f"  {note}" for note in table.notes)
    print_table(table.columns, table.rows, *notes, " ", words=words, title=table.title)
