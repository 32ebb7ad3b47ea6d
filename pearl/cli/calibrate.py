"""`pearl calibrate`: how fast a pair is here, and which method to use. Arguments and tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pearl.cli import listed
from pearl.cli.console import SafeConsole
from pearl.cli.numbers import STDOUT, Number, json_option, print_lines, print_table, shown, table_console, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
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
    Says whether speculation pays. Later engines of this pair on this machine start with these figures, unless the
    machine was too busy to measure.
    """
    from pearl.lab.bench.calibrate import PROMPTS, calibrate
    from pearl.lab.bench.rows import check_comparable, is_emulated

    if not settings.engine.has_draft:
        raise ConfigError("--draft none: there is no pair to measure")
    check_comparable(settings.engine)
    log_to_stderr(settings.engine.log_level, "front")
    given, toys = settings.sampling, is_emulated(settings.engine)
    defaults = {"temperature": 1.0 if toys else 0.0, "max_tokens": _TOKENS, "seed": 0}
    params = given.model_copy(update={k: v for k, v in defaults.items() if getattr(given, k) is None})
    asked = read_prompts(prompts, limit) if prompts else ["hello"] * limit if toys else list(PROMPTS[:limit])
    conditions, console = Conditions(), SafeConsole(stderr=True)
    with console.status("starting"):
        found = calibrate(settings.engine, asked, params, acceptance, lambda what: console.print(what, style="dim"))
    conditions.stop()
    is_saved = not toys and not conditions.load.is_too_much
    saved = profile.save(settings.engine, found.profile) if is_saved else None
    if to is not None:
        document = asdict(found) | {"ratio": found.ratio} | conditions.as_dict()
        write_json(to, document | {"settings": settings.engine.model_dump()})
    if to != STDOUT:
        _print(found, conditions, saved)


def _print(found: Calibration, conditions: Conditions, saved: Path | None) -> None:
    console, alone, both = table_console(), found.alone, found.both
    rows = [_row("t_draft", alone.draft, both.draft)]
    for n in sorted({*alone.target, *both.target}):
        rows.append(_row(f"t_target({n})", alone.target.get(n), both.target.get(n)))
    print_table(console, ("a forward, ms", "alone", "both at work", "slower by"), rows)
    origin = "as given" if found.given else "measured on these texts"
    ratio = f"speed ratio t_target(1) / t_draft {found.ratio:.2f}; window c = {found.c}; acceptance "
    jitter = f"; jitter {alone.jitter:.0%} alone, {both.jitter:.0%} with both"
    print_lines(console, [f"{ratio}{found.acceptance:.2f}, {origin}{jitter}", "\n"])
    verdicts = (
        [one.method, shown(one.predicted), "-" if one.measured is None else one.measured.in_words()]
        for one in found.verdicts
    )
    print_table(console, ("method", "predicted, over ar", "measured, over ar (95%)"), verdicts)
    rate = found.pays_from
    pays = "at no acceptance rate" if rate is None else f"from an acceptance rate of {rate:.2f} on"
    lines = [
        f"ar: {found.ar:.1f} tokens/s. PEARL pays {pays}, by its closed form at these times.",
        f"[bold]{found.advice}[/bold]\n  {found.flags}\n{conditions}",
        "not kept: calibrate again when the machine has nothing else to do" if conditions.load.is_too_much else "",
        f"kept: engines of this pair begin with it (--profile none: afresh): {saved}" if saved else "",
    ]
    print_lines(console, lines)


def _row(name: str, alone: float | None, both: float | None) -> list[str]:
    slower = f"{both / alone - 1:.0%}" if alone and both else ""
    return [name, *("-" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in (alone, both)), slower]
