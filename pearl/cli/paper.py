"""`pearl bench paper`: the paper's tables. Arguments and tables; `pearl.lab.bench.tables` measures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs
from rich.console import Console
from rich.table import Table

from pearl.cli.console import SafeConsole
from pearl.cli.distill import Bars
from pearl.cli.numbers import STDOUT, json_option, named_file, read_json, table_console, write_json
from pearl.cli.texts import replay_pairs
from pearl.config import EngineConfig
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Stolen, hardware, in_words
from pearl.lab.bench.paper import TABLES, Pair, pairs
from pearl.lab.bench.tasks import HUMANEVAL, OURS, Task, read_tasks

if TYPE_CHECKING:
    from pearl.lab.bench.baselines import Baseline

_COUNT = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)
STUDIES = ("theory", "disco", "sssd", "mjsd")  # of `lab.bench.others`, which takes torch; a test compares the two
_QUICK = {"tokens": 60, "texts": 1}
GUESSES = "sssd"  # the paper of which tables by source, cost and temperature are made
_GUESSED, _GUESSED_QUICK = 12, 2  # texts of each set of prompts that these are made of
_EMBEDDED, _EMBEDDED_QUICK = {"tokens": 96, "texts": 4}, {"tokens": 48, "texts": 1}  # texts of each set of prompts


@click.command()
@click.option("--pair", "names", multiple=True, metavar="NAME", help="Only pairs whose name holds this. Repeatable.")
@click.option("--table", "wanted", multiple=True, type=click.Choice(list(TABLES)), help="Only this one. Repeatable.")
@click.option("--pairs", "path", type=_PATH, help="YAML of pairs with published figures, in place of the built-in one.")
@click.option("--tokens", type=click.IntRange(min=50), default=250, show_default=True, metavar="N", help="Of a text.")
@click.option("--repeats", type=_COUNT, default=2, show_default=True, metavar="N", help="Texts for each row.")
@click.option(
    "--quick", is_flag=True, help="One text of 60 tokens: a first look, in 8 minutes; with --paper one prompt."
)
@click.option("--simulate-only", is_flag=True, help="No real processes: closed forms and simulator alone.")
@click.option(
    "--prompts",
    multiple=True,
    metavar="[NAME=]FILE",
    help="For baselines and --paper: as those of pearl bench. Repeatable.  [default: humaneval, edits]",
)
@click.option("--no-baselines", is_flag=True, help="Leave out prompt lookup on the embedded target.")
@click.option(
    "--paper",
    "other",
    type=click.Choice(STUDIES),
    help="Of another paper: what of it can be measured on the embedded pair, with --prompts.",
)
@click.option(
    "--datastore",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --paper sssd: where guesses come from too; see pearl datastore.",
)
@click.option("--texts", "file", type=_PATH, help="Recorded texts in place of toys: see pearl simulate record.")
@click.option(
    "--parts", is_flag=True, help="With --texts: look-ahead, lookup and branches each alone too, and sd and ssd."
)
@click.option("--limit", type=_COUNT, default=12, show_default=True, metavar="N", help="Of these, in real processes.")
@click.option("--seed", type=int, default=0, metavar="N")
@click.option(
    "--results", "page", type=_PATH, help="Write the section of this page, its JSON and its picture beside it."
)
@click.option(
    "--from", "earlier", type=_PATH, help="Print, or write with --results, an earlier run's JSON; run nothing."
)
@json_option
def paper(
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    path: Path | None,
    tokens: int,
    repeats: int,
    quick: bool,
    simulate_only: bool,
    prompts: tuple[str, ...],
    no_baselines: bool,
    other: str | None,
    datastore: Path | None,
    file: Path | None,
    parts: bool,
    limit: int,
    seed: int,
    page: Path | None,
    earlier: Path | None,
    to: Path | None,
) -> None:
    """The paper's tables from this runtime, by EMULATION of its pairs.

    Toys stand in for the models, with the pair's vocabulary, forward times and acceptance rate. Two real processes
    decode, so the figures include the runtime's own cost. With --texts the pairs replay recorded texts at these forward
    times: PEARL as published beside look-ahead, lookup and branches.
    """
    from pearl.lab.bench.baselines import Baseline

    embedded = _EMBEDDED_QUICK if quick else _EMBEDDED
    if parts and file is None:
        raise ConfigError("--parts is for recorded texts: --texts FILE")
    if datastore is not None and other != GUESSES:
        raise ConfigError(f"--datastore is for --paper {GUESSES}")
    if other is not None:
        guessed = _tasks(prompts, _GUESSED_QUICK if quick else _GUESSED) if other == GUESSES else []
        _study(other, _tasks(prompts, embedded["texts"]), embedded["tokens"], guessed, datastore, to)
        return
    if earlier is not None:
        result = read_json(earlier)
    else:
        found = _pairs(path, names)
        if quick:
            tokens, repeats = _QUICK["tokens"], _QUICK["texts"]
        if file is not None:
            run = 0 if simulate_only else limit
            replay_pairs(_once(found), file, run=run, tokens=tokens, seed=seed, parts=parts, to=to)
            return
        tasks = [] if simulate_only or no_baselines or wanted or names else _tasks(prompts, embedded["texts"])
        baseline = Baseline(tasks, embedded["tokens"])
        result = _run(found, wanted or tuple(TABLES), baseline, tokens, repeats, seed, simulate_only)
    try:
        if to is not None:
            write_json(to, result)
        if page is not None:
            _write(page, result)
        if to != STDOUT:
            _print(result)
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{earlier} is no result of pearl bench paper, or of another version") from None


def _pairs(path: Path | None, names: Sequence[str]) -> list[Pair]:
    every = pairs(path)
    found = [pair for pair in every if not names or any(name.lower() in pair.title.lower() for name in names)]
    if not found:
        raise ConfigError(f"no pair is called {names[0]!r}; there are {'; '.join(pair.title for pair in every)}")
    return found


def _once(found: Sequence[Pair]) -> list[Pair]:
    """Each pair of models once: recorded texts are no benchmark of the paper's."""
    return list({pair.config: pair for pair in reversed(found)}.values())[::-1]


def _tasks(prompts: Sequence[str], limit: int) -> list[Task]:
    found: list[Task] = []
    for given in prompts or (HUMANEVAL, "edits"):
        name, path = (given, None) if given in (HUMANEVAL, *OURS) else named_file(given)
        found += read_tasks(name, path, limit)
    return found


def _run(
    found: Sequence[Pair],
    wanted: Sequence[str],
    baseline: Baseline,
    tokens: int,
    texts: int,
    seed: int,
    simulate_only: bool,
) -> dict[str, Any]:
    from pearl.lab.bench import tables
    from pearl.lab.bench.baselines import expected_seconds, measured_baselines

    began, stolen, done, measured = time.monotonic(), Stolen(), [], []
    with Bars(SafeConsole(stderr=True)) as bars:
        if not simulate_only:
            seconds = tables.expected_seconds(found, wanted, tokens, texts)
            seconds += expected_seconds(baseline)
            bars.say(f"about {seconds / 60:.0f} minutes")
        if baseline.tasks:
            bars.say("baselines on the embedded target, first: what is missing for them is told at once")
            measured = measured_baselines(baseline, bars)
        for pair in found:
            bars.say(pair.title)
            done.append(
                tables.emulate(pair, wanted, bars, tokens=tokens, texts=texts, seed=seed, runtime=not simulate_only)
            )
    settings = {"tokens": tokens, "texts": texts, "seed": seed, "runtime": not simulate_only}
    about = {"kind": "paper", "emulated": True, "settings": settings, "seconds": time.monotonic() - began}
    result = about | asdict(stolen.taken()) | {"hardware": hardware()} | tables.document(done) | {"baselines": measured}
    as_read: dict[str, Any] = json.loads(json.dumps(result, default=structs.asdict))
    return as_read


def _study(
    name: str, tasks: Sequence[Task], tokens: int, guessed: Sequence[Task], datastore: Path | None, to: Path | None
) -> None:
    """`guessed`: what is answered for the tables of guesses, which need more texts than times do; none: no tables."""
    from pearl.lab.bench import guesses, others

    began, stolen, about = time.monotonic(), Stolen(), others.STUDIES[name]
    config = EngineConfig(datastore=None if datastore is None else str(datastore))
    with Bars(SafeConsole(stderr=True)) as bars:
        found = others.study(name, tasks, tokens, bars, config)
        sources = guesses.study(config, guessed, tokens, bars) if guessed else None
    seconds, taken = time.monotonic() - began, stolen.taken()
    if to is not None:
        settings = {"paper": name, "tokens": tokens, "texts": len(tasks)}
        told = {"title": about.title, "differs": about.differs, "left_out": about.left_out}
        document = {"kind": "study", "settings": settings, "seconds": seconds} | asdict(taken) | told
        write_json(to, document | {"hardware": hardware(), "rows": found, "guesses": sources})
    if to != STDOUT:
        console = table_console()
        console.print(_table(about.title, others.COLUMNS, 2, others.in_words(found)))
        sets = ", ".join(dict.fromkeys(task.set for task in tasks))
        console.print(
            f"{about.differs}\nLeft out: {about.left_out}\n{len(tasks)} prompts ({sets}), up to {tokens} "
            f"tokens; {seconds:.0f} s; {taken}; {in_words(hardware())}",
            soft_wrap=True,
        )
        if sources is not None:
            _print_guesses(console, sources)


def _print_guesses(console: Console, found: dict[str, Any]) -> None:
    from pearl.lab.bench import guesses

    console.print("", _table("Tokens in a forward", guesses.SIZE_COLUMNS, 1, guesses.sizes_in_words(found)))
    rows = guesses.temperatures_in_words(found)
    console.print("", _table("Temperatures", guesses.TEMPERATURE_COLUMNS, 2, rows))
    console.print(guesses.explained(found), soft_wrap=True)


def _write(page: Path, result: dict[str, Any]) -> None:
    """The page's section; beside the page the JSON and the picture that it is made of."""
    from pearl.lab.bench import plots, results

    picture = page.with_name("paper.png")
    plots.draw(result, picture)
    results.write_page(page, result, picture.name)
    write_json(page.with_name("paper.json"), result)


def _print(result: dict[str, Any]) -> None:
    from pearl.lab.bench import results

    console = table_console()
    for name, cells in result["tables"].items():
        console.print(_table(results.title(name), results.COLUMNS, 2, results.rows(cells)))
        for note in results.NOTES.get(name, []):
            console.print(f"  {note}", soft_wrap=True)
        console.print("")
    if result["baselines"]:
        rows = results.baseline_rows(result)
        console.print(_table(results.BASELINES, results.BASELINE_COLUMNS, 1, rows), "")
    for line in (*results.pair_lines(result), *results.short_cells(result)):
        console.print(line, soft_wrap=True)
    console.print(f"{results.explained()}\n{results.conditions(result)}", soft_wrap=True)


def _table(title: str, columns: Sequence[str], words: int, rows: Sequence[Sequence[str]]) -> Table:
    """`words`: number of leading columns that hold words."""
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for place, column in enumerate(columns):
        if place < words:
            table.add_column(column, no_wrap=True)
        else:
            table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
