"""`pearl paper`: tables and figures of the five papers. Arguments and output; `pearl.lab.studies` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pearl.cli.commands import example
from pearl.cli.console import Bars, print_lines, print_table
from pearl.cli.prompt_sets import json_option, read_sets, reported
from pearl.config import EngineConfig
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.tasks import HUMANEVAL, Task
from pearl.lab.studies.figures import Plot, Table, check_drawing, draw
from pearl.lab.studies.pearl import TABLES, Cell, Pair, pairs

if TYPE_CHECKING:
    from pearl.lab.studies.recorded_texts import RecordedTexts

_COUNT = click.IntRange(min=1)
_SETS = (HUMANEVAL, "edits")
_EMULATED = {"tokens": 250, "texts": 2}  # texts of each row
_EMULATED_QUICK = {"tokens": 60, "texts": 1}

figures_option = click.option(
    "--figures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Draw the paper's figures there, as SVG; needs matplotlib.",
)
quick_option = click.option("--quick", is_flag=True, help="Fewer and shorter texts: a first look.")


class _StudySize(NamedTuple):
    """How much a study decodes: prompts of each set for the study, and for measurements that take less time."""

    study_prompts: int
    prompts: int
    tokens: int


_SIZE = _StudySize(study_prompts=4, prompts=12, tokens=96)
_QUICK_SIZE = _StudySize(study_prompts=1, prompts=2, tokens=48)


@dataclass(frozen=True)
class _Arguments:
    """The arguments that all commands on a real pair take.

    Attributes:
        study_tasks: the first of `tasks`, for the study itself, which takes longest.
    """

    config: EngineConfig
    study_tasks: list[Task]
    tasks: list[Task]
    tokens: int
    quick: bool
    figures: Path | None
    to: Path | None


def _on_a_pair(command: Any) -> Any:
    """Add the options of `_Arguments`."""
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


def _arguments(
    *,
    target: str | None,
    draft: str | None,
    prompts: Sequence[str],
    quick: bool,
    figures: Path | None,
    to: Path | None,
    **settings: Any,
) -> _Arguments:
    """Return the arguments, with the prompts read. `settings`: further ones of the engine."""
    if figures is not None:
        check_drawing()
    if target is not None:
        settings["target"] = target
    if draft is not None:
        settings["draft"] = draft
    size = _QUICK_SIZE if quick else _SIZE
    tasks = read_sets(prompts, size.prompts, default=_SETS)
    study_tasks = [task for task in tasks if task.number <= size.study_prompts]
    config = EngineConfig(**settings)
    return _Arguments(config, study_tasks, tasks, size.tokens, quick, figures, to)


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
    "tables",
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
    tables: tuple[str, ...],
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
    conditions = Conditions()
    cells: dict[str, list[Cell]] = {name: [] for name in TABLES}
    descriptions = []
    selected = _pairs(names)
    with Bars() as bars:
        for pair in selected:
            bars.say(pair.title)
            cells_of_pair, description = emulate(pair, tables or tuple(TABLES), bars, **settings)
            descriptions.append(description)
            for name, additions in cells_of_pair.items():
                cells[name] += additions
    conditions.stop()
    cells = {name: rows for name, rows in cells.items() if rows}
    document = {"kind": "paper", "emulated": True, "settings": settings, **conditions.as_dict()}
    if reported(to, document | {"tables": cells, "pairs": descriptions}):
        texts = f"{size['texts']} texts of {size['tokens']} tokens for each row, seed 0"
        for name, rows in cells.items():
            _print(table(name, rows))
        print_lines(*map(pair_line, selected), EXPLAINED, f"{texts}; {conditions}")
    if figures is not None:
        _draw(_optimal_lengths(), figures)


def _pairs(names: Sequence[str]) -> list[Pair]:
    """Return the pairs whose title holds one of `names`; all pairs without names. Raises `ConfigError`."""
    all_pairs = pairs()
    if not names:
        return all_pairs
    selected = []
    for pair in all_pairs:
        title = pair.title.lower()
        if any(name.lower() in title for name in names):
            selected.append(pair)
    if not selected:
        titles = "; ".join(pair.title for pair in all_pairs)
        raise ConfigError(f"no pair is called {names[0]!r}; there are {titles}")
    return selected


def _optimal_lengths() -> list[Plot]:
    """Draw figure 2b for the embedded pair."""
    from pearl.lab.studies.lengths import step_by_step

    tasks = read_sets((), 1, default=_SETS[1:])
    with Bars() as bars:
        recorded, _ = _recorded(EngineConfig(), tasks, _SIZE.tokens, bars)
    title = "The optimal draft length changes from step to step (figure 2b)"
    return [step_by_step(recorded.texts[0], "pearl-lengths", title)]


def _recorded(
    config: EngineConfig, tasks: Sequence[Task], tokens: int, bars: Bars
) -> tuple[RecordedTexts, list[str]]:
    """Record greedy answers with the draft's tokens. Returns them, and the prompt set of each."""
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
def theory(texts: int, **options: Any) -> None:
    """Yin et al.: rejections and bias, on Markov chains by theorem and simulation, and on a pair."""
    from pearl.lab.studies import chains

    arguments = _arguments(**options)
    with Bars() as bars:
        table, figures = chains.measure(10 if arguments.quick else texts, bars)
    _study("theory", arguments, [table], figures)


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
def disco(t_draft: float, t_target: float, **options: Any) -> None:
    """DISCO: static and dynamic speculation lengths, stop policies, the oracle's lengths, and the classifier's F1."""
    from pearl.lab.studies import lengths
    from pearl.lab.studies.simulate import timing_of

    arguments = _arguments(**options)
    with Bars() as bars:
        recorded, sets = _recorded(arguments.config, arguments.tasks, arguments.tokens, bars)
        tables, figures = lengths.measure(recorded, timing_of(t_draft, t_target), sets)
    _study("disco", arguments, tables, figures)


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
def sssd(datastore: str | None, most_batch: int, most_context: int, **options: Any) -> None:
    """SSSD: guesses without a draft by source, number, temperature, batch and context, beside other papers'."""
    from pearl.lab.studies import sssd as guesses

    arguments = _arguments(**options, datastore=datastore)
    if arguments.quick:
        most_batch = min(most_batch, 4)
        most_context = min(most_context, 1000)
    with Bars() as bars:
        tables, figures = guesses.measure_guesses(
            arguments.config, arguments.tasks, arguments.tokens, bars, most_batch, most_context
        )
    _study("sssd", arguments, tables, figures)


@paper.command()
@_on_a_pair
def mjsd(**options: Any) -> None:
    """MJSD: joint decoding, its thresholds, beams and lengths, speed and perplexity, and energy by batch."""
    from pearl.lab.studies import energy

    arguments = _arguments(**options)
    with Bars() as bars:
        table = energy.measure(arguments.config, bars)
    _study("mjsd", arguments, [table], [])


def _study(
    name: str, arguments: _Arguments, tables: Sequence[Table], figures: Sequence[Plot]
) -> None:
    """Run the study of a paper; print `tables` and its own, and draw `figures` and its own."""
    from pearl.lab.studies.tables import STUDIES, in_words, run_study, sweeps

    study = STUDIES[name]
    tasks = arguments.study_tasks
    tokens = arguments.tokens
    conditions = Conditions()
    with Bars() as bars:
        rows = run_study(study, tasks, tokens, bars, arguments.config)
    conditions.stop()
    figures = [*figures, *sweeps(name, rows)]
    table = in_words(study, rows)
    document = {
        "kind": "study",
        "settings": {"paper": name, "tokens": tokens, "texts": len(tasks)},
        **conditions.as_dict(),
        "rows": rows,
        "tables": [*tables, table],
        "figures": figures,
    }
    if reported(arguments.to, document):
        for preliminary in tables:
            _print(preliminary)
        _print(table, words=2)
        sets = ", ".join(dict.fromkeys(task.set for task in tasks))
        print_lines(f"{len(tasks)} prompts ({sets}), up to {tokens} tokens; {conditions}", "")
    if arguments.figures is not None:
        _draw(figures, arguments.figures)


def _draw(figures: Sequence[Plot], directory: Path) -> None:
    for path in draw(figures, directory):
        click.echo(f"drawn: {path}", err=True)


def _print(table: Table, words: int = 1) -> None:
    notes = [f"  {note}" for note in table.notes]
    print_table(table.columns, table.rows, *notes, " ", words=words, title=table.title)
