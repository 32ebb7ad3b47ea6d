"""`pearl compare`: methods, rules and stop policies side by side. Arguments and a table; `lab.bench.ways` measures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from pearl.cli import listed
from pearl.cli.bench import read_sets
from pearl.cli.console import SafeConsole
from pearl.cli.distill import Bars
from pearl.cli.numbers import STDOUT, json_option, table_console, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import DecodingConfig, Settings
from pearl.errors import ConfigError
from pearl.lab.bench.interval import Interval
from pearl.lab.bench.machine import Stolen, Taken, hardware, in_words
from pearl.printable import log_to_stderr

if TYPE_CHECKING:
    from pearl.lab.bench.run import Measured, Plan
    from pearl.lab.bench.ways import Compared

_COUNT = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)


@listed("Measure", "pearl compare sd pearl,rule=coupled pearl,rule=opt,epsilon=0.1 --temperature 1")
@click.command(cls=SettingsCommand)
@click.argument("ways", nargs=-1, metavar="[METHOD[,NAME=VALUE...]]...")
@click.option("--prompts", multiple=True, metavar="[NAME=]FILE", help="As of pearl bench.")
@click.option("--limit", type=_COUNT, default=2, show_default=True, metavar="N", help="Prompts of each set.")
@click.option("--repeats", type=_COUNT, default=1, show_default=True, metavar="N", help="Rounds over all prompts.")
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@click.option("--no-perplexity", is_flag=True, help="Do not load the target once more to read what was written.")
@click.option("--png", type=_PATH, help="A picture: speed against bias.")
@json_option
@settings_options
@click.pass_context
def compare(
    ctx: click.Context,
    settings: Settings,
    ways: tuple[str, ...],
    prompts: tuple[str, ...],
    limit: int,
    repeats: int,
    raw: bool,
    no_perplexity: bool,
    png: Path | None,
    to: Path | None,
) -> None:
    """Methods, rules and stop policies of your choice, in one table.

    Each way is a method and settings of it, such as sd,draft_stop=threshold,confidence=0.4 or
    pearl,rule=opt,epsilon=0.1; "published" is pearl without look-ahead, lookup and branches. Without any there are a
    dozen. They take turns, text by text, beside ar, at temperature 1 unless --temperature says otherwise. Perplexity is
    that of their texts under the target; energy is told where the machine tells it.
    """
    from pearl.lab.bench import plots
    from pearl.lab.bench.run import measure
    from pearl.lab.bench.ways import Surprise, compared, document

    for name in DecodingConfig.model_fields:  # a configuration file may set them for other commands
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: say it with each way that has it, such as: pearl compare pearl,{name}=...")
    plan = _plan(settings, ways, prompts, limit, repeats, raw)
    log_to_stderr(settings.engine.log_level, "front")
    began, stolen = time.monotonic(), Stolen()
    with Bars(SafeConsole(stderr=True)) as bars:
        measured = measure(plan, bars)
        if not measured.samples:
            raise ConfigError("no prompt fits the context: shorten them, lower max_tokens, or raise max_context")
        seconds, taken = time.monotonic() - began, stolen.taken()
        surprise = None
        if not no_perplexity:
            bars.say("reading what was written")
            surprise = Surprise(plan.config)
        found = compared(plan, measured, surprise)
    result = document(plan, measured, found, seconds, taken)
    if to is not None:
        write_json(to, result)
    if png is not None:
        plots.draw(result, png)
    if to != STDOUT:
        _print(plan, measured, found, seconds, taken)


def _plan(settings: Settings, ways: Sequence[str], prompts: Sequence[str], limit: int, repeats: int, raw: bool) -> Plan:
    from pearl.lab.bench.run import Plan, check_comparable, devices_of, emulated
    from pearl.lab.bench.ways import DEFAULT, rows_of

    config = settings.engine
    check_comparable(config)
    rows = rows_of(config, ways or [way for way in DEFAULT if config.has_draft or way == "ngram"])
    if not config.has_draft and (drafted := [row.name for row in rows if row.decoding.method not in ("ar", "ngram")]):
        raise ConfigError(f"--draft none: {drafted[0]!r} needs a draft")
    given = settings.sampling
    seed, temperature = given.seed or 0, 1.0 if given.temperature is None else given.temperature
    return Plan(
        config,
        rows,
        read_sets(prompts, limit, emulated(config)),
        given.model_copy(update={"temperature": temperature, "seed": seed, "max_tokens": given.max_tokens or 96}),
        raw=raw,
        repeats=repeats,
        together=not devices_of(config)[0].gpus,
    )


def _print(plan: Plan, measured: Measured, found: Sequence[Compared], seconds: float, taken: Taken) -> None:
    console = table_console()
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    table.add_column("exact?", no_wrap=True)
    energy, perplexity = bool(measured.energy_of), any(one.perplexity for one in found)
    more = (*(["perplexity"] if perplexity else []), *(["J a\ntoken"] if energy else []))
    for column in ("accepted", "tokens\na step", "tokens/s", "over\nar", "95%", *more):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        cells = [one.name, "exact" if one.exact else f"biased by {one.bias.value:.3f}"]
        cells += [_shown(one.acceptance), _shown(one.tokens_per_step), _shown(one.rate, 1), _shown(one.speedup)]
        cells += ["" if one.speedup is None else f"{one.speedup.low:.2f}-{one.speedup.high:.2f}"]
        if perplexity:
            cells.append(_between(one.perplexity))
        if energy:
            cells.append(_shown(one.energy))
        table.add_row(*cells)
    console.print(table)
    sampled = f"temperature {plan.params.temperature:g}" if plan.params.temperature else "greedy"
    lines = [
        "biased by: total variation distance of what was committed from the target's distribution, a committed token",
        "over ar: median over texts of the ratio on the same text; 95%: bootstrap over texts"
        + ("; perplexity of the texts under the target, at temperature 1" if perplexity else ""),
        f"energy: {measured.energy_of}, whatever ran there" if energy else "energy: this machine does not tell",
        f"{len(plan.tasks)} texts of up to {plan.params.max_tokens} tokens, {sampled}, seed {plan.params.seed}; "
        f"{seconds:.0f} s; {taken}",
        in_words(hardware()),
    ]
    if measured.gamma is not None:
        lines.insert(1, f"sd without a gamma of its own: the fastest tried, {measured.gamma}")
    if measured.skipped:
        lines.insert(1, f"left out, for the context is too small: {', '.join(measured.skipped)}")
    console.print("\n" + "\n".join(lines), soft_wrap=True)


def _shown(value: Interval | float | None, digits: int = 2) -> str:
    number = value.value if isinstance(value, Interval) else value
    return "-" if number is None else f"{number:.{digits}f}"


def _between(one: Interval | None) -> str:
    return "-" if one is None else f"{one.value:.2f} ({one.low:.2f}-{one.high:.2f})"
