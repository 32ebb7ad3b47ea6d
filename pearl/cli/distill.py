"""`pearl distill`: make a draft for a target. Arguments and progress bars; `pearl.lab.distill` does the work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pearl.cli import listed
from pearl.cli.options import field_option
from pearl.lab.distill.config import DistillConfig, load_config


class Bars:
    """A `Watcher`: a progress bar with ETA on a terminal, elsewhere a line every 20%."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("[dim]{task.fields[note]}"), console=console, transient=True)
        self._task: TaskID | None = None
        self._next_percentage = 0.0

    def __enter__(self) -> Bars:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task, self._next_percentage = self._progress.add_task(what, total=total, note=""), 0.0

    def advance(self, count: int, note: str = "") -> None:
        assert self._task is not None
        self._progress.update(self._task, advance=count, note=note)
        task = self._progress.tasks[-1]
        if not self._console.is_terminal and task.percentage >= self._next_percentage:
            self._next_percentage = task.percentage + 20
            left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
            self._console.print(f"{task.description} {task.percentage:.0f}%{left}  {note}", soft_wrap=True)

    def say(self, message: str) -> None:
        self._console.print(message, soft_wrap=True)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and a flag for every field to a command, which gets them as `config: DistillConfig`."""

    @functools.wraps(command)
    def wrapped(config: Path | None, **given: Any) -> Any:
        fields = {name: given.pop(name) for name in DistillConfig.model_fields}
        return command(config=load_config(config, {k: v for k, v in fields.items() if v not in (None, ())}), **given)

    wrapped_all: Any = wrapped
    for name, field in reversed(DistillConfig.model_fields.items()):
        wrapped_all = field_option(name, field)(wrapped_all)
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("--config", type=kind, help="YAML file of these settings; see configs/distill/embedded.yaml.")(
        wrapped_all
    )


@listed("Make a draft", "pearl distill --target my-model --out my-draft")
@click.command()
@click.option("--resume", is_flag=True, help="Go on with the run in --out, from its last checkpoint.")
@click.option(
    "--answers-only", is_flag=True, help="Only answer: write OUT/answers.jsonl, as for `pearl datastore build`."
)
@config_options
def distill(config: DistillConfig, resume: bool, answers_only: bool) -> None:
    """Make a draft for a target, out of the target's own answers.

    The target answers prompts, which it invents itself or which you give; the draft learns the target's distribution
    on them. --resume continues a killed run from its last checkpoint, goes on to learn after --answers-only, or works
    at a run beside another process. The draft is OUT/draft, an ordinary checkpoint.
    """
    from pearl.lab.distill.run import Distillation

    logging.basicConfig(level="WARNING")
    console = Console(stderr=True, highlight=False)
    with Bars(console) as bars:
        distillation = Distillation(config, bars, resume=resume)
        made = distillation.answer() if answers_only else distillation.run()
    click.echo(made)
