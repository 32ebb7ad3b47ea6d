"""`pearl bench`: compares methods on real runs. Parses arguments and prints tables; `pearl.lab.bench` measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pearl.cli import listed
from pearl.cli.numbers import STDOUT, json_option, read_sets, refuse_options, write_json
from pearl.cli.options import SettingsGroup, settings_options
from pearl.cli.paper import paper
from pearl.cli.tables import Bars, Column, print_columns, shown
from pearl.config import SamplingParams, Settings
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
from pearl.lab.experiments.estimate import Estimate
from pearl.models.checkpoint import is_toy
from pearl.printable import log_to_stderr

if TYPE_CHECKING:
    from pearl.lab.bench.figures import Figures
    from pearl.lab.bench.runner import Measured, Plan

_COUNT = click.IntRange(min=1)
_DEFAULT, _EMULATED = (4, 128), (3, 500)  # (prompts per set, max_tokens)


@listed("Measure", 'pearl bench --prompts summaries --limit 5 --rows auto --rows "ar, all devices"')
@click.group(invoke_without_command=True, cls=SettingsGroup)
@click.option(
    "--prompts",
    multiple=True,
    metavar="[NAME=]FILE",
    help="A prompt set: humaneval; questions, summaries or edits (built in, 20 prompts each); or a .jsonl file of "
    "prompts, questions or turns. Repeatable.  [default: the three built-in sets]",
)
@click.option("--limit", type=_COUNT, metavar="N", help="Prompts of each set.  [default: 4]")
@click.option("--repeats", type=_COUNT, default=1, show_default=True, metavar="N", help="Rounds over all prompts.")
@click.option("--rows", multiple=True, metavar="NAME", help="Only this row and ar. Repeatable; a wrong name lists all.")
@click.option("--no-baselines", is_flag=True, help="Leave transformers' generate out.")
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@json_option
@settings_options
@click.pass_context
def bench(ctx: click.Context, settings: Settings, to: Path | None, **options: Any) -> None:
    """Compare all methods on the same prompts.

    Methods take turns, unless --apart. ar runs on the target's device, and again on all devices that PEARL uses. sd
    runs with its fastest gamma. transformers' generate, with and without an assistant model, is an outside
    baseline. Decoding is greedy unless --temperature is given; only committed tokens up to EOS count.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    from pearl.lab.bench.figures import document, figures
    from pearl.lab.bench.runner import measure

    for name in ("method", "window", "trace"):  # a configuration file may set them for other commands
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name}: pearl bench runs all methods and windows, untraced; select with --rows")
    plan = _plan(settings, **options)
    log_to_stderr(settings.engine.log_level, "front")
    conditions = Conditions()
    with Bars() as bars:
        measured = measure(plan, bars)
    conditions.stop()
    found = figures(plan, measured)
    if to is not None:
        write_json(to, document("bench", plan, measured, found, conditions))
    if to != STDOUT:
        _print(plan, measured, found, conditions)


def _plan(
    settings: Settings,
    prompts: Sequence[str],
    limit: int | None,
    repeats: int,
    rows: Sequence[str],
    no_baselines: bool,
    raw: bool,
) -> Plan:
    from pearl.lab.bench.rows import AR, AR_ON_ALL, NGRAM_ON_ALL, check_comparable, is_emulated, rows_for
    from pearl.lab.bench.runner import Plan
    from pearl.lab.bench.systems import devices_of

    config = settings.engine
    check_comparable(config)
    if not config.has_draft:
        raise ConfigError("--draft none: there is nothing to compare with ar")
    toys = is_emulated(config)
    texts, tokens = _EMULATED if toys else _DEFAULT
    known = rows_for(config, not no_baselines and not is_toy(config.target), settings.decoding.rule)
    wanted = {*rows, AR} if rows else {row.name for row in known}
    target, draft = devices_of(config)
    if target == target | draft:
        wanted -= {AR_ON_ALL, NGRAM_ON_ALL}  # ar and ngram already run on all devices
    if unknown := wanted - {row.name for row in known}:
        raise ConfigError(f"no row {sorted(unknown)[0]!r}; there are {'; '.join(row.name for row in known)}")
    return Plan(
        config,
        [row for row in known if row.name in wanted],
        read_sets(prompts, limit or texts, toys),
        _sampling(settings.sampling, tokens, toys),
        raw=raw,
        repeats=repeats,
        together=not target.gpus,
        gamma=settings.decoding.gamma,
    )


def _sampling(given: SamplingParams, max_tokens: int, toys: bool) -> SamplingParams:
    """Default temperature: 0; 1 for an emulated pair, because its acceptance rate is defined under sampling."""
    temperature = (1.0 if toys else 0.0) if given.temperature is None else given.temperature
    seed = 0 if given.seed is None else given.seed
    changes = {"temperature": temperature, "seed": seed, "max_tokens": given.max_tokens or max_tokens}
    return given.model_copy(update=changes)


def _print(plan: Plan, measured: Measured, found: Sequence[Figures], conditions: Conditions) -> None:
    def between(one: Estimate | None) -> str:
        return "" if one is None or one.low == one.high else f"{one.low:.2f}-{one.high:.2f}"

    def named(one: Figures) -> str:
        special = {"sd": f"sd, gamma {measured.gamma}", "pearl, fixed": f"pearl, fixed({one.window})"}
        return special.get(one.name, one.name)

    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.0f}"

    names = list(dict.fromkeys(task.set for task in plan.tasks))
    sets = names if len(names) > 1 else []
    columns: list[Column[Figures]] = [
        ("method", named),
        ("on", lambda one: one.devices),
        ("tokens/s", lambda one: shown(one.rate)),
        ("95%", lambda one: between(one.rate)),
        ("over\nar", lambda one: shown(one.speedup)),
        ("95%", lambda one: between(one.speedup)),
        *((name, lambda one, name=name: shown(one.by_set.get(name))) for name in sets),
        ("first\ntoken", lambda one: milliseconds(one.first_seconds)),
        ("ITL\np50", lambda one: milliseconds(one.itl_p50)),
        ("ITL\np99", lambda one: milliseconds(one.itl_p99)),
        ("accepted", lambda one: shown(one.acceptance)),
        ("accepted\nlength", lambda one: shown(one.tokens_per_run)),
        ("tokens\na step", lambda one: shown(one.tokens_per_step)),
    ]
    if any(one.of_simulated for one in found):
        columns.append(("of simu-\nlated", lambda one: shown(one.of_simulated, 3)))
    tried = ", ".join(f"{g}: {rate:.1f}" for g, rate in sorted(measured.gammas.items()))
    lines = [
        "tokens/s: after a text's first commit, median over texts; over ar: speedup on the same text, median over "
        "texts; 95%: bootstrap interval; first token (without queueing), ITL (inter-token latency): ms, medians over "
        "texts; accepted length: mean, including the correction or bonus token",
        f"tokens/s of sd by gamma: {tried}" if tried else "",
        *result_lines(plan, measured, conditions),
    ]
    print_columns(columns, found, *lines, words=2, more_width=sum(len(name) + 1 for name in sets))


def result_lines(plan: Plan, measured: Measured, conditions: Conditions) -> list[str]:
    """The lines below the table: settings and conditions."""
    repeats = f" x {plan.repeats}" if plan.repeats != 1 else ""
    sampled = f"temperature {plan.params.temperature:g}" if plan.params.temperature else "greedy"
    tokens = sum(sample.tokens for sample in measured.samples)
    lines = [
        f"{len(plan.tasks)} texts of up to {plan.params.max_tokens} tokens{repeats}, {sampled}, seed "
        f"{plan.params.seed}; {tokens} tokens in {conditions}"
    ]
    if measured.gamma is not None:
        lines.insert(0, f"sd rows that set no gamma use the fastest one tried, {measured.gamma}")
    if measured.skipped:
        lines.insert(0, f"skipped, because the context is too small: {', '.join(measured.skipped)}")
    return lines


bench.add_command(paper)
