"""`pearl calibrate`: how fast a pair is here, and which method to use. Arguments and tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pearl.cli import listed
from pearl.cli.numbers import STDOUT, json_option, read_sets, sampling_of, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.tables import Bars, Column, print_columns, shown
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
from pearl.printable import log_to_stderr
from pearl.worker import profile

if TYPE_CHECKING:
    from pearl.lab.bench.calibrate import Calibration
    from pearl.lab.bench.figures import Figures

_TOKENS = 64


@listed("Measure", "pearl calibrate --target my-model --draft my-small-model")
@click.command("calibrate", cls=SettingsCommand)
@click.option(
    "--prompts", metavar="[NAME=]FILE", help="Prompts to measure on, as of pearl bench.  [default: questions]"
)
@click.option("--limit", type=click.IntRange(min=1), default=4, show_default=True, metavar="N", help="Prompts of it.")
@json_option
@settings_options
def calibrate_pair(settings: Settings, prompts: str | None, limit: int, to: Path | None) -> None:
    """Measure a pair on this machine: which method to use.

    Decodes a few texts (up to --max-tokens, 64 by default) with the target alone and with each method that auto chooses
    from, in turns. Says whether speculation pays, and names the fastest method. Later engines of this pair on this
    machine start with these figures, unless the machine was too busy to measure.
    """
    from pearl.lab.bench.calibrate import calibrate
    from pearl.lab.bench.rows import is_emulated

    if not settings.engine.has_draft:
        raise ConfigError("--draft none: there is no pair to measure")
    log_to_stderr(settings.engine.log_level, "front")
    toys = is_emulated(settings.engine)
    params = sampling_of(settings.sampling, _TOKENS, 1.0 if toys else 0.0)
    tasks = read_sets([prompts] if prompts else [], limit, toys, default=("questions",))
    conditions = Conditions()
    with Bars() as bars:
        found = calibrate(settings.engine, tasks, params, bars)
    conditions.stop()
    is_saved = not toys and not conditions.are_noisy
    saved = profile.save(settings.engine, found.profile) if is_saved else None
    if to is not None:
        write_json(to, asdict(found) | conditions.as_dict() | {"settings": settings.engine.model_dump()})
    if to != STDOUT:
        _print(found, conditions, saved)


def _print(found: Calibration, conditions: Conditions, saved: Path | None) -> None:
    columns: list[Column[Figures]] = [
        ("method", lambda one: one.name),
        ("on", lambda one: one.devices),
        ("tokens/s", lambda one: shown(one.rate, 1)),
        ("over ar, 95%", lambda one: str(one.speedup)),
    ]
    times = ", ".join(f"t_target({n}) {seconds * 1e3:.2f}" for n, seconds in found.profile.t_target)
    print_columns(
        columns,
        found.rows,
        f"ms a forward: t_draft {found.profile.t_draft * 1e3:.2f}, {times}",
        f"window c = {found.c}; gamma of sd and ssd {found.gamma}; acceptance {found.acceptance:.2f}",
        f"[bold]{found.advice}[/bold]\n  {found.flags}\n{conditions}",
        "not kept: calibrate again when the machine has nothing else to do" if conditions.are_noisy else "",
        f"kept: engines of this pair begin with it (--profile none: afresh): {saved}" if saved else "",
        words=2,
    )
