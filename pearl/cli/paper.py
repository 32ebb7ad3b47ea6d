"""`pearl paper`: tables and figures of the five papers whose methods this package implements.

This file has arguments and output only; `pearl.lab.studies` measures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
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
from pearl.lab.studies.figures import Report, Table, check_drawing, draw
from pearl.lab.studies.pearl import TABLES, Pair, pairs

if TYPE_CHECKING:
    from pearl.lab.studies.recorded_texts import RecordedTexts

_COUNT = click.IntRange(min=1)
_SETS = (HUMANEVAL, "edits")
_EMULATED = {"tokens": 250, "texts": 2}  # tokens of each text, and texts of each row
_EMULATED_QUICK = {"tokens": 60, "texts": 1}


def _check_figures(_: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Make the directory that --figures names, before the command begins its work.

    Raises `ConfigError` if figures cannot be drawn, or not be written in that directory.
    """
    if path is not None:
        check_drawing()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--figures: cannot make {path}: {error.strerror}") from None
        if not os.access(path, os.W_OK):
            raise ConfigError(f"--figures: cannot write in {path}")
    return path


figures_option = click.option(
    "--figures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    callback=_check_figures,
    help="Draw the paper's figures there, as SVG; needs matplotlib.",
)
quick_option = click.option("--quick", is_flag=True, help="Fewer and shorter texts: a first look.")


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

    Toys stand in for the models; they have the pair's vocabulary, forward times and acceptance
    rate. Two real processes decode, so the figures include the runtime's own cost. --quick takes 8
    minutes, everything half an hour.
    """
    from pearl.lab.studies.emulate import EXPLAINED, emulate, pair_line, table

    size = _EMULATED_QUICK if quick else _EMULATED
    settings: dict[str, Any] = size | {"seed": 0, "runtime": not simulate_only}
    conditions = Conditions()
    selected = _pairs(names)
    with Bars() as bars:
        cells, descriptions = emulate(selected, tables or tuple(TABLES), bars, **settings)
    conditions.stop()
    if not cells:
        titles = "; ".join(pair.title for pair in selected)
        raise ConfigError(f"the paper's table {', '.join(tables)} does not have {titles}")
    document = {"kind": "paper", "emulated": True, "settings": settings, **conditions.as_dict()}
    if reported(to, document | {"tables": cells, "pairs": descriptions}):
        texts = f"{size['texts']} texts of {size['tokens']} tokens for each row, seed 0"
        for name, rows in cells.items():
            _print(table(name, rows))
        print_lines(*map(pair_line, selected), EXPLAINED, f"{texts}; {conditions}")
    if figures is not None:
        _draw(_optimal_lengths(), figures)


def _pairs(names: Sequence[str]) -> list[Pair]:
    """Return the pairs whose title contains one of `names`; all pairs if `names` is empty.

    Raises `ConfigError` for a name that no title contains.
    """
    all_pairs = pairs()
    if not names:
        return all_pairs
    selected: dict[str, Pair] = {}
    for name in names:
        matches = [pair for pair in all_pairs if name.lower() in pair.title.lower()]
        if not matches:
            titles = "; ".join(pair.title for pair in all_pairs)
            raise ConfigError(f"no pair is called {name!r}; there are {titles}")
        selected |= {pair.title: pair for pair in matches}
    return [pair for pair in all_pairs if pair.title in selected]


def _optimal_lengths() -> Report:
    """Return figure 2b of the paper PEARL, measured with the pair of models in this package."""
    from pearl.lab.studies.lengths import step_by_step

    tasks = read_sets((), 1, default=_SETS[1:])
    with Bars() as bars:
        recorded = _recorded(EngineConfig(), tasks, _SIZE.tokens, bars)
    title = "The optimal draft length changes from step to step (figure 2b)"
    return Report(plots=[step_by_step(recorded.texts[0], "pearl-lengths", title)])


def _recorded(
    config: EngineConfig, tasks: Sequence[Task], tokens: int, bars: Bars
) -> RecordedTexts:
    """Record a target's greedy answers to the first turn of each task.

    At each position of an answer, the token that the draft would draw is recorded too.
    """
    from pearl.lab.studies.recorded_texts import record_pair

    bars.begin("recording", len(tasks))
    return record_pair(config, [task.turns[:1] for task in tasks], tokens, tick=bars.step)


# ---- on a real pair ----


class _StudySize(NamedTuple):
    """How much a study decodes.

    Attributes:
        row_prompts: prompts of each set for the rows of the study's table, which take longest.
        prompts: prompts of each set for the other measurements.
        tokens: most tokens of a text.
    """

    row_prompts: int
    prompts: int
    tokens: int


_SIZE = _StudySize(row_prompts=4, prompts=12, tokens=96)
_QUICK_SIZE = _StudySize(row_prompts=1, prompts=2, tokens=48)


@dataclass(frozen=True)
class _Asked:
    """The arguments that all studies of a real pair have."""

    config: EngineConfig
    tasks: list[Task]
    tokens: int
    quick: bool


Measure = Callable[..., Report]  # takes `_Asked`, bars and the study's own options


def _study(*own_options: Any) -> Callable[[Measure], Any]:
    """Return a decorator that turns a function into a command of `pearl paper`.

    The function measures tables of a paper. The command prints these tables, and after them the
    table of the study that `studies.yaml` has for this paper. The function gets the values of
    `own_options`, except `datastore`, which becomes part of the engine's configuration.
    """
    options = (
        click.option("--target", default="embedded", show_default=True, metavar="MODEL"),
        click.option("--draft", default="embedded-draft", show_default=True, metavar="MODEL"),
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

    def command(measure: Measure) -> Any:
        @wraps(measure)
        def run(
            *,
            target: str,
            draft: str,
            datastore: str | None = None,
            prompts: Sequence[str],
            quick: bool,
            figures: Path | None,
            to: Path | None,
            **own: Any,
        ) -> None:
            size = _QUICK_SIZE if quick else _SIZE
            tasks = read_sets(prompts, size.prompts, default=_SETS)
            config = EngineConfig(target=target, draft=draft, datastore=datastore)
            asked = _Asked(config, tasks, size.tokens, quick)
            with Bars() as bars:
                report = measure(asked, bars, **own)
            _run_rows(measure.__name__, asked, size.row_prompts, report, to)
            if figures is not None:
                _draw(report, figures)

        for option in reversed((*options, *own_options)):
            run = option(run)
        return paper.command()(run)

    return command


def _run_rows(name: str, asked: _Asked, prompts: int, report: Report, to: Path | None) -> None:
    """Run a study's rows on the first `prompts` prompts of each set; print or write all tables.

    A row is a method with its settings.

    Args:
        report: tables and plots that were measured before; the rows' plots are added to it.
    """
    from pearl.lab.studies.tables import STUDIES, in_words, run_study, sweeps

    study = STUDIES[name]
    tasks = [task for task in asked.tasks if task.number <= prompts]
    conditions = Conditions()
    with Bars() as bars:
        rows = run_study(study, tasks, asked.tokens, bars, asked.config)
    conditions.stop()
    table = in_words(study, rows)
    report.plots += sweeps(study, rows)
    document = {
        "kind": "study",
        "settings": {"paper": name, "tokens": asked.tokens, "texts": len(tasks)},
        **conditions.as_dict(),
        "rows": rows,
        "tables": [*report.tables, table],
        "figures": report.plots,
    }
    if reported(to, document):
        for preliminary in report.tables:
            _print(preliminary)
        _print(table, words=2)
        sets = ", ".join(dict.fromkeys(task.set for task in tasks))
        print_lines(f"{len(tasks)} prompts ({sets}), up to {asked.tokens} tokens; {conditions}", "")


@_study()
def theory(asked: _Asked, bars: Bars) -> Report:
    """Yin et al.: rejections and bias of Markov chains, in theory and simulated, and of a pair."""
    from pearl.lab.studies import chains

    return chains.measure(10 if asked.quick else 100, bars)


_MILLISECONDS: dict[str, Any] = {"type": float, "show_default": True, "metavar": "MS"}


@_study(
    click.option("--t-draft", default=5.0, help="Time of a draft forward.", **_MILLISECONDS),
    click.option("--t-target", default=40.0, help="Time of a target forward.", **_MILLISECONDS),
)
def disco(asked: _Asked, bars: Bars, t_draft: float, t_target: float) -> Report:
    """DISCO: static and dynamic speculation lengths, stop policies, the oracle's lengths, and the classifier's F1."""
    from pearl.lab.studies import lengths
    from pearl.lab.studies.simulate import timing_of

    recorded = _recorded(asked.config, asked.tasks, asked.tokens, bars)
    sets = [task.set for task in asked.tasks]
    return lengths.measure(recorded, timing_of(t_draft, t_target), sets)


@_study(
    click.option(
        "--datastore", type=click.Path(file_okay=False), help="For guesses; see pearl datastore."
    ),
    click.option(
        "--most-batch", type=click.IntRange(1, 64), default=64, show_default=True, metavar="N"
    ),
    click.option(
        "--most-context",
        type=_COUNT,
        default=8192,
        show_default=True,
        metavar="N",
        help="Tokens in a cache.",
    ),
)
def sssd(asked: _Asked, bars: Bars, most_batch: int, most_context: int) -> Report:
    """SSSD: the gain of guesses without a draft, by source, number, temperature, batch, context."""
    from pearl.lab.studies import sssd as guesses

    if asked.quick:
        most_batch = min(most_batch, 4)
        most_context = min(most_context, 1000)
    return guesses.measure(asked.config, asked.tasks, asked.tokens, bars, most_batch, most_context)


@_study()
def mjsd(asked: _Asked, bars: Bars) -> Report:
    """MJSD: joint decoding, its thresholds, beams and lengths, speed and perplexity, and energy by batch."""
    from pearl.lab.studies import energy

    return Report([energy.measure(asked.config, bars)])


def _draw(report: Report, directory: Path) -> None:
    for path in draw(report.plots, directory):
        click.echo(f"drawn: {path}", err=True)


def _print(table: Table, words: int = 1) -> None:
    notes = map("  {}".format, table.notes)
    print_table(table.columns, table.rows, *notes, " ", words=words, title=table.title)
