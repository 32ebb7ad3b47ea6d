"""`pearl paper`: tables and figures of the five papers. Arguments and output; `pearl.lab.studies` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pearl.cli.commands import example
from pearl.cli.console import Bars, print_lines, print_table
from pearl.cli.prompt_sets import json_option, read_sets, reported
from pearl.config import EngineConfig
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.tasks import HUMANEVAL, Task
from pearl.lab.studies.figures import Figure, Table, check_drawing, draw
from pearl.lab.studies.pearl import TABLES, Cell, Pair, pairs

if TYPE_CHECKING:
    from pearl.lab.studies.recorded_texts import RecordedTexts

_COUNT = click.IntRange(min=1)
_SETS = (HUMANEVAL, "edits")
_EMULATED, _EMULATED_QUICK = (
    {"tokens": 250, "texts": 2},
    {"tokens": 60, "texts": 1},
)  # texts of each row
_Command = TypeVar("_Command", bound=Callable[..., Any])

figures_option = click.option(
    "--figures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Draw the paper's figures there, as SVG; needs matplotlib.",
)
quick_option = click.option("--quick", is_flag=True, help="Fewer and shorter texts: a first look.")


@dataclass(frozen=True)
class _Asked:
    """What the commands on a real pair have in common. `tasks`: of the study; `more`: for what takes less time."""

    config: EngineConfig
    tasks: list[Task]
    more: list[Task]
    tokens: int
    quick: bool
    figures: Path | None
    to: Path | None


def _on_a_pair(command: _Command) -> _Command:
    """The options of `_Asked`."""
    options = (
        click.option("--target", default=None, metavar="MODEL", help="[default: embedded]"),
        click.option("--draft", default=None, metavar="MODEL", help="[default: embedded-draft]"),
        click.option(
            "--prompts",
            multiple=True,
            metavar="[NAME=]FILE",
            help="As those of pearl bench. Repeatable.  [default: humaneval, edits]",
        ),
        quick_option,
        figures_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def _asked(given: dict[str, Any], **settings: Any) -> _Asked:
    if given["figures"] is not None:
        check_drawing()
    names = {name: given[name] for name in ("target", "draft") if given[name] is not None}
    few, many, tokens = (1, 2, 48) if given["quick"] else (4, 12, 96)
    more = read_sets(given["prompts"], many, default=_SETS)
    tasks = [task for task in more if task.number <= few]
    return _Asked(
        EngineConfig(**names, **settings),
        tasks,
        more,
        tokens,
        given["quick"],
        given["figures"],
        given["to"],
    )


@click.group(epilog=example("pearl paper theory --figures theory/"))
def paper() -> None:
    """Tables and figures of the five papers, by runs of this runtime.

    The page pearl/lab/studies/README.md has each of the papers' items, and what differs.
    """


@paper.command("pearl")
@click.option(
    "--pair",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only pairs whose name holds this. Repeatable.",
)
@click.option(
    "--table",
    "wanted",
    multiple=True,
    type=click.Choice(list(TABLES)),
    help="Only this one. Repeatable.",
)
@click.option("--simulate-only", is_flag=True, help="No real processes: the simulator alone.")
@quick_option
@figures_option
@json_option
def of_pearl(
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    simulate_only: bool,
    quick: bool,
    figures: Path | None,
    to: Path | None,
) -> None:
    """PEARL's tables, by EMULATION of its pairs.

    Toys stand in for the models, with the pair's vocabulary, forward times and acceptance rate. Two real processes
    decode, so the figures include the runtime's own cost. --quick: 8 minutes; everything: half an hour.
    """
    if figures is not None:
        check_drawing()
    from pearl.lab.studies.emulate import EXPLAINED, emulate, pair_line, table

    size = _EMULATED_QUICK if quick else _EMULATED
    settings: dict[str, Any] = size | {"seed": 0, "runtime": not simulate_only}
    clock, cells, about = Conditions(), dict[str, list[Cell]](), []
    asked = _pairs(names)
    with Bars() as bars:
        for pair in asked:
            bars.say(pair.title)
            found, known = emulate(pair, wanted or tuple(TABLES), bars, **settings)
            about.append(known)
            cells |= {name: cells.get(name, []) + some for name, some in found.items() if some}
    clock.stop()
    cells = {name: cells[name] for name in TABLES if name in cells}
    kind = {"kind": "paper", "emulated": True, "settings": settings, **clock.as_dict()}
    if reported(to, kind | {"tables": cells, "pairs": about}):
        texts = f"{size['texts']} texts of {size['tokens']} tokens for each row, seed 0; {clock}"
        _print(*(table(name, some) for name, some in cells.items()))
        print_lines(*map(pair_line, asked), EXPLAINED, texts)
    if figures is not None:
        _draw(_optimal_lengths(), figures)


def _pairs(names: Sequence[str]) -> list[Pair]:
    every = pairs()
    found = [
        pair
        for pair in every
        if not names or any(name.lower() in pair.title.lower() for name in names)
    ]
    if not found:
        raise ConfigError(
            f"no pair is called {names[0]!r}; there are {'; '.join(pair.title for pair in every)}"
        )
    return found


def _optimal_lengths() -> list[Figure]:
    """Figure 2b, of the embedded pair."""
    from pearl.lab.studies.lengths import step_by_step

    with Bars() as bars:
        recorded, _ = _recorded(EngineConfig(), read_sets((), 1, default=_SETS[1:]), 96, bars)
    title = "The optimal draft length changes from step to step (figure 2b)"
    return [step_by_step(recorded.texts[0], "pearl-lengths", title)]


def _recorded(
    config: EngineConfig, tasks: Sequence[Task], tokens: int, bars: Bars
) -> tuple[RecordedTexts, list[str]]:
    """Greedy answers with the draft's tokens, and the set of each."""
    from pearl.lab.studies.recorded_texts import record_pair

    bars.begin("recording", len(tasks))
    recorded, numbers = record_pair(
        config, [task.turns[:1] for task in tasks], tokens, tick=bars.step
    )
    return recorded, [tasks[number].set for number in numbers]


# ---- on a real pair ----


@paper.command()
@_on_a_pair
@click.option(
    "--texts",
    type=_COUNT,
    default=100,
    show_default=True,
    metavar="N",
    help="Simulated on Markov chains.",
)
def theory(texts: int, **given: Any) -> None:
    """Yin et al.: rejections and bias, on Markov chains by theorem and simulation, and on a pair."""
    from pearl.lab.studies import chains

    asked = _asked(given)
    with Bars() as bars:
        table, figures = chains.measure(10 if asked.quick else texts, bars)
    _study("theory", asked, [table], figures)


@paper.command()
@_on_a_pair
@click.option(
    "--t-draft",
    type=float,
    default=5.0,
    show_default=True,
    metavar="MS",
    help="To train the classifier for.",
)
@click.option(
    "--t-target", type=float, default=40.0, show_default=True, metavar="MS", help="Likewise."
)
def disco(t_draft: float, t_target: float, **given: Any) -> None:
    """DISCO: static and dynamic speculation lengths, stop policies, the oracle's lengths, and the classifier's F1."""
    from pearl.lab.studies import lengths
    from pearl.lab.studies.simulate import timing_of

    asked = _asked(given)
    with Bars() as bars:
        recorded, sets = _recorded(asked.config, asked.more, asked.tokens, bars)
        found, figures = lengths.measure(recorded, timing_of(t_draft, t_target), sets)
    _study("disco", asked, found, figures)


@paper.command()
@_on_a_pair
@click.option(
    "--datastore", type=click.Path(file_okay=False), help="For guesses; see pearl datastore."
)
@click.option(
    "--most-batch", type=click.IntRange(1, 64), default=64, show_default=True, metavar="N"
)
@click.option(
    "--most-context",
    type=_COUNT,
    default=8192,
    show_default=True,
    metavar="N",
    help="Tokens in a cache.",
)
def sssd(datastore: str | None, most_batch: int, most_context: int, **given: Any) -> None:
    """SSSD: guesses without a draft by source, number, temperature, batch and context, beside other papers'."""
    from pearl.lab.studies import sssd as guesses

    asked = _asked(given, datastore=datastore)
    if asked.quick:
        most_batch, most_context = min(most_batch, 4), min(most_context, 1000)
    with Bars() as bars:
        limits = most_batch, most_context
        tables, figures = guesses.measure_guesses(
            asked.config, asked.more, asked.tokens, bars, *limits
        )
    _study("sssd", asked, tables, figures)


@paper.command()
@_on_a_pair
def mjsd(**given: Any) -> None:
    """MJSD: joint decoding, its thresholds, beams and lengths, speed and perplexity, and energy by batch."""
    from pearl.lab.studies import energy

    asked = _asked(given)
    with Bars() as bars:
        table = energy.measure(asked.config, bars)
    _study("mjsd", asked, [table], [])


def _study(name: str, asked: _Asked, more: Sequence[Table], figures: Sequence[Figure]) -> None:
    """Run the study; print it and `more`, and draw the figures."""
    from pearl.lab.studies.tables import STUDIES, in_words, run_study, sweeps

    clock, about = Conditions(), STUDIES[name]
    with Bars() as bars:
        found = run_study(about, asked.tasks, asked.tokens, bars, asked.config)
    clock.stop()
    figures, table = [*figures, *sweeps(name, found)], in_words(about, found)
    settings = {"paper": name, "tokens": asked.tokens, "texts": len(asked.tasks)}
    found_all = {"rows": found, "tables": [*more, table], "figures": figures}
    if reported(asked.to, {"kind": "study", "settings": settings, **clock.as_dict(), **found_all}):
        _print(*more)
        _print(table, words=2)
        sets = ", ".join(dict.fromkeys(task.set for task in asked.tasks))
        print_lines(
            f"{len(asked.tasks)} prompts ({sets}), up to {asked.tokens} tokens; {clock}", ""
        )
    if asked.figures is not None:
        _draw(figures, asked.figures)


def _draw(figures: Sequence[Figure], directory: Path) -> None:
    for path in draw(figures, directory):
        click.echo(f"drawn: {path}", err=True)


def _print(*tables: Table, words: int = 1) -> None:
    for table in tables:
        notes = (f"  {note}" for note in table.notes)
        print_table(table.columns, table.rows, *notes, " ", words=words, title=table.title)
