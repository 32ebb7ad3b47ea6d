"""`pearl calibrate`: how fast a pair is here, and which method to use. Arguments and tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from pearl.cli import listed
from pearl.cli.console import SafeConsole
from pearl.cli.numbers import STDOUT, Number, json_option, table_console, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Stolen, Taken, hardware, in_words
from pearl.lab.distill.prompts import read_prompts
from pearl.printable import log_to_stderr
from pearl.worker import profile

if TYPE_CHECKING:
    from pearl.lab.bench.calibrate import Calibration

_TOKENS = 64


@listed("Measure", "pearl calibrate --target my-model --draft my-small-model")
@click.command("calibrate", cls=SettingsCommand)
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="File of prompts to measure on.  [default: four of ours]"
)
@click.option("--limit", type=click.IntRange(min=1), default=4, show_default=True, metavar="N", help="Prompts of it.")
@click.option("--acceptance", type=Number(0, 1), metavar="X", help="Predict for this rate, not for the measured one.")
@json_option
@settings_options
def calibrate_pair(
    settings: Settings, prompts: Path | None, limit: int, acceptance: float | None, to: Path | None
) -> None:
    """Measure a pair on this machine: which method to use.

    Measures t_draft and t_target(n), alone and with both at work, and the window c. Decodes a few texts by each method
    (up to --max-tokens, 64 by default), reads the times from traces, and predicts each method's speed by the simulator.
    Says so when speculation does not pay. Engines of this pair on this machine begin with what it found, unless other
    processes took so much of the machine that it is noise.
    """
    from pearl.lab.bench.calibrate import PROMPTS, calibrate
    from pearl.lab.bench.run import check_comparable, emulated

    if not settings.engine.has_draft:
        raise ConfigError("--draft none: there is no pair to measure")
    check_comparable(settings.engine)
    log_to_stderr(settings.engine.log_level, "front")
    given, toys = settings.sampling, emulated(settings.engine)
    defaults = {"temperature": 1.0 if toys else 0.0, "max_tokens": _TOKENS, "seed": 0}
    params = given.model_copy(update={k: v for k, v in defaults.items() if getattr(given, k) is None})
    asked = read_prompts(prompts, limit) if prompts else ["hello"] * limit if toys else list(PROMPTS[:limit])
    stolen = Stolen()
    console = SafeConsole(stderr=True)
    with console.status("starting"):
        found = calibrate(settings.engine, asked, params, acceptance, lambda what: console.print(what, style="dim"))
    taken = stolen.taken()
    kept = None if toys or taken.is_too_much else profile.save(settings.engine, found.profile)
    if to is not None:
        document = asdict(found) | {"ratio": found.ratio, "hardware": hardware()} | asdict(taken)
        write_json(to, document | {"settings": settings.engine.model_dump()})
    if to != STDOUT:
        _print(found, taken, kept)


def _print(found: Calibration, taken: Taken, kept: Path | None) -> None:
    console = table_console()
    times = Table(box=None, padding=(0, 2, 0, 0))
    times.add_column("a forward, ms")
    for column in ("alone", "both at work", "slower by"):
        times.add_column(column, justify="right")
    times.add_row("t_draft", *_row(found.alone.draft, found.both.draft))
    for n in sorted({*found.alone.target, *found.both.target}):
        times.add_row(f"t_target({n})", *_row(found.alone.target.get(n), found.both.target.get(n)))
    console.print(times)
    origin = "as given" if found.given else "measured on these texts"
    console.print(
        f"\nspeed ratio t_target(1) / t_draft {found.ratio:.2f}; window c = {found.c}; acceptance "
        f"{found.acceptance:.2f}, {origin}; jitter {found.alone.jitter:.0%} alone, {found.both.jitter:.0%} with both\n",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("method")
    for column in ("predicted, over ar", "measured, over ar (95%)"):
        table.add_column(column, justify="right")
    for verdict in found.verdicts:
        interval = verdict.measured
        measured = "-" if interval is None else f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
        table.add_row(verdict.method, "-" if verdict.predicted is None else f"{verdict.predicted:.2f}", measured)
    console.print(table)
    pays = (
        "at no acceptance rate" if found.pays_from is None else f"from an acceptance rate of {found.pays_from:.2f} on"
    )
    console.print(
        f"\nar: {found.ar:.1f} tokens/s. PEARL pays {pays}, by its closed form at these times.\n"
        f"[bold]{found.advice}[/bold]\n  {found.flags}\n"
        f"{taken}; {in_words(hardware())}",
        soft_wrap=True,
    )
    if taken.is_too_much:
        console.print("not kept: calibrate again when the machine has nothing else to do", soft_wrap=True)
    if kept is not None:
        console.print(f"kept: engines of this pair begin with it (--profile none: afresh): {kept}", soft_wrap=True)


def _row(alone: float | None, both: float | None) -> list[str]:
    slower = f"{both / alone - 1:.0%}" if alone and both else ""
    return [*("-" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in (alone, both)), slower]
