"""`pearl compare`: methods, rules and stop policies side by side. Arguments and a table; `pearl.lab.bench` measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pearl.cli import listed
from pearl.cli.bench import result_lines
from pearl.cli.numbers import STDOUT, json_option, read_sets, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.tables import Bars, Column, print_columns, shown
from pearl.config import DecodingConfig, Settings
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
from pearl.printable import log_to_stderr

if TYPE_CHECKING:
    from pearl.lab.bench.figures import Figures
    from pearl.lab.bench.runner import Measured, Plan

_COUNT = click.IntRange(min=1)


@listed("Measure", "pearl compare sd pearl,rule=coupled pearl,rule=opt,epsilon=0.1 --temperature 1")
@click.command(cls=SettingsCommand)
@click.argument("ways", nargs=-1, metavar="[METHOD[,NAME=VALUE...]]...")
@click.option("--prompts", multiple=True, metavar="[NAME=]FILE", help="As of pearl bench.")
@click.option("--limit", type=_COUNT, default=2, show_default=True, metavar="N", help="Prompts of each set.")
@click.option("--repeats", type=_COUNT, default=1, show_default=True, metavar="N", help="Rounds over all prompts.")
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@click.option("--no-perplexity", is_flag=True, help="Skip perplexity, for which the target is loaded once more.")
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
    to: Path | None,
) -> None:
    """Methods, rules and stop policies of your choice, in one table.

    Each row is a method and its settings, such as sd,draft_stop=threshold,confidence=0.4 or
    pearl,rule=opt,epsilon=0.1; "published" is pearl without look-ahead, lookup and branches. The default is a dozen.
    They take turns, text by text, beside ar, at temperature 1 unless --temperature is given. Perplexity is that of
    their texts under the target.
    """
    from pearl.lab.bench.figures import Surprise, document, figures
    from pearl.lab.bench.runner import measure

    for name in DecodingConfig.model_fields:  # a configuration file may set them for other commands
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: say it with each way that has it, such as: pearl compare pearl,{name}=...")
    plan = _plan(settings, ways, prompts, limit, repeats, raw)
    log_to_stderr(settings.engine.log_level, "front")
    conditions = Conditions()
    with Bars() as bars:
        measured = measure(plan, bars)
        if not measured.samples:
            raise ConfigError("no prompt fits the context: shorten them, lower max_tokens, or raise max_context")
        conditions.stop()
        surprise = None
        if not no_perplexity:
            bars.say("reading the texts for their perplexity")
            surprise = Surprise(plan.config)
        found = figures(plan, measured, surprise)
    if to is not None:
        write_json(to, document("compare", plan, measured, found, conditions))
    if to != STDOUT:
        _print(plan, measured, found, conditions)


def _plan(settings: Settings, ways: Sequence[str], prompts: Sequence[str], limit: int, repeats: int, raw: bool) -> Plan:
    from pearl.lab.bench.rows import COMPARED, check_comparable, is_emulated, named_rows
    from pearl.lab.bench.runner import Plan
    from pearl.lab.bench.systems import devices_of

    config = settings.engine
    check_comparable(config)
    rows = named_rows(config, ways or [name for name in COMPARED if config.has_draft or name == "ngram"])
    if not config.has_draft and (drafted := [row.name for row in rows if row.decoding.method not in ("ar", "ngram")]):
        raise ConfigError(f"--draft none: {drafted[0]!r} needs a draft")
    given = settings.sampling
    seed, temperature = given.seed or 0, 1.0 if given.temperature is None else given.temperature
    return Plan(
        config,
        rows,
        read_sets(prompts, limit, is_emulated(config)),
        given.model_copy(update={"temperature": temperature, "seed": seed, "max_tokens": given.max_tokens or 96}),
        raw=raw,
        repeats=repeats,
        together=not devices_of(config)[0].gpus,
    )


def _print(plan: Plan, measured: Measured, found: Sequence[Figures], conditions: Conditions) -> None:
    has_perplexity = any(one.perplexity for one in found)
    columns: list[Column[Figures]] = [
        ("way", lambda one: one.name),
        ("exact?", lambda one: "exact" if one.exact else f"biased by {one.bias.value:.3f}"),
        ("accepted", lambda one: shown(one.acceptance)),
        ("tokens\na step", lambda one: shown(one.tokens_per_step)),
        ("tokens/s", lambda one: shown(one.rate, 1)),
        ("over ar, 95%", lambda one: str(one.speedup or "-")),
    ]
    columns += [("perplexity", lambda one: str(one.perplexity or "-"))] if has_perplexity else []
    about = [
        "biased by: total variation distance between the distribution sampled from and the target's, per token",
        "over ar: median over texts of the ratio on the same text; 95%: bootstrap over texts"
        + ("; perplexity of the texts under the target, at temperature 1" if has_perplexity else ""),
    ]
    print_columns(columns, found, *about, *result_lines(plan, measured, conditions), words=2)
