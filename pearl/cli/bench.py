"""`pearl bench`: methods side by side on real runs. Arguments and tables; `pearl.lab.bench` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pearl.cli import listed
from pearl.cli.console import SafeConsole
from pearl.cli.distill import Bars
from pearl.cli.numbers import (
    STDOUT,
    Column,
    json_option,
    print_lines,
    print_table,
    read_json,
    refuse_options,
    shown,
    table_console,
    write_json,
)
from pearl.cli.numbers import (
    read_sets as read_sets,
)
from pearl.cli.options import SettingsGroup, settings_options
from pearl.cli.paper import paper
from pearl.config import SamplingParams, Settings
from pearl.config.engine import MAX_SLOTS
from pearl.errors import ConfigError
from pearl.lab.bench.interval import Interval
from pearl.lab.bench.machine import Conditions
from pearl.models.checkpoint import is_toy
from pearl.printable import log_to_stderr

if TYPE_CHECKING:
    from pearl.lab.bench.figures import Figures
    from pearl.lab.bench.runner import Measured, Plan

_COUNT = click.IntRange(min=1)
_MOST_AT_ONCE = 64  # requests of one front
_PATH = click.Path(path_type=Path)
_DEFAULT, _QUICK, _EMULATED = (4, 128), (1, 64), (3, 500)  # prompts of each set, max tokens


@listed("Measure", 'pearl bench --prompts summaries --limit 5 --rows auto --rows "ar, all devices"')
@click.group(invoke_without_command=True, cls=SettingsGroup)
@click.option(
    "--prompts",
    multiple=True,
    metavar="[NAME=]FILE",
    help="humaneval; questions, summaries or edits, 20 of ours each; or a .jsonl file of prompts, questions or turns. "
    "Repeatable.  [default: these three of ours]",
)
@click.option("--limit", type=_COUNT, metavar="N", help="Prompts of each set.  [default: 4]")
@click.option("--repeats", type=_COUNT, default=1, show_default=True, metavar="N", help="Rounds over all prompts.")
@click.option("--rows", multiple=True, metavar="NAME", help="Only this row, and ar. Repeatable; a wrong one lists all.")
@click.option("--quick", is_flag=True, help="A prompt of each set, 64 tokens: a first look in a few minutes.")
@click.option("--no-baselines", is_flag=True, help="Leave transformers' generate out.")
@click.option(
    "--together/--apart",
    default=None,
    help="All models loaded at once, taking turns; or one after the other.  [default: apart on GPUs]",
)
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@json_option
@settings_options
@click.pass_context
def bench(ctx: click.Context, settings: Settings, to: Path | None, **options: Any) -> None:
    """All methods side by side on the same prompts.

    The methods take turns. ar runs on the target's device, and in a row of its own on all devices that PEARL uses. sd
    runs with its fastest gamma. transformers' generate, with and without an assistant, is an outside baseline. Greedy
    unless --temperature is given; only committed tokens up to EOS count.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    from pearl.lab.bench.figures import document, figures
    from pearl.lab.bench.runner import measure

    for name in ("method", "window", "trace"):  # a configuration file may set them for other commands
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name}: a benchmark runs all methods and windows, untraced; choose some with --rows")
    plan = _plan(settings, **options)
    log_to_stderr(settings.engine.log_level, "front")
    conditions = Conditions()
    with Bars(SafeConsole(stderr=True)) as bars:
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
    quick: bool,
    no_baselines: bool,
    together: bool | None,
    raw: bool,
) -> Plan:
    from pearl.lab.bench.rows import AR, AR_ON_ALL, NGRAM_ON_ALL, check_comparable, is_emulated, rows_for
    from pearl.lab.bench.runner import Plan, devices_of

    config = settings.engine
    check_comparable(config)
    if not config.has_draft:
        raise ConfigError("--draft none: there is nothing to compare with ar")
    toys = is_emulated(config)
    texts, tokens = _EMULATED if toys else _QUICK if quick else _DEFAULT
    known = rows_for(config, not no_baselines and not is_toy(config.target), settings.decoding.rule)
    wanted = {*rows, AR} if rows else {row.name for row in known}
    target, draft = devices_of(config)
    if target == target | draft:
        wanted -= {AR_ON_ALL, NGRAM_ON_ALL}  # ar and ngram have all devices already
    if unknown := wanted - {row.name for row in known}:
        raise ConfigError(f"no row {sorted(unknown)[0]!r}; there are {'; '.join(row.name for row in known)}")
    return Plan(
        config,
        [row for row in known if row.name in wanted],
        read_sets(prompts, limit or texts, toys),
        _sampling(settings.sampling, tokens, toys),
        raw=raw,
        repeats=repeats,
        together=together if together is not None else not target.gpus,
        gamma=settings.decoding.gamma,
        attempts=3 if toys else 1,
    )


def _sampling(given: SamplingParams, max_tokens: int, toys: bool) -> SamplingParams:
    """Greedy by default; temperature 1 for an emulated pair, whose acceptance rate is defined for sampling."""
    temperature = (1.0 if toys else 0.0) if given.temperature is None else given.temperature
    seed = 0 if given.seed is None else given.seed
    changes = {"temperature": temperature, "seed": seed, "max_tokens": given.max_tokens or max_tokens}
    return given.model_copy(update=changes)


def _print(plan: Plan, measured: Measured, found: Sequence[Figures], conditions: Conditions) -> None:
    from pearl.lab.bench.figures import over_alone

    def between(one: Interval | None) -> str:
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
        ("tokens\na run", lambda one: shown(one.tokens_per_run)),
        ("tokens\na step", lambda one: shown(one.tokens_per_step)),
    ]
    if any(one.of_simulated for one in found):
        columns.append(("of simu-\nlated", lambda one: shown(one.of_simulated, 3)))
    console = table_console(sum(len(name) + 1 for name in sets))
    print_table(console, [name for name, _ in columns], ([cell(one) for _, cell in columns] for one in found), words=2)
    tried = ", ".join(f"{g}: {rate:.1f}" for g, rate in sorted(measured.gammas.items()))
    lines = [
        "tokens/s: after a text's first commit, median over texts; over ar: median over texts of the ratio on the same "
        "text; 95%: bootstrap; first token (without the queue) and ITL (between two tokens): ms, medians over texts",
        f"sd's gamma, tried (tokens/s): {tried}" if tried else "",
        *result_lines(plan, measured, conditions),
        str(over_alone(plan, measured) or ""),
    ]
    print_lines(console, lines)


def result_lines(plan: Plan, measured: Measured, conditions: Conditions) -> list[str]:
    """Settings and conditions of a benchmark, in words."""
    repeats = f" x {plan.repeats}" if plan.repeats != 1 else ""
    sampled = f"temperature {plan.params.temperature:g}" if plan.params.temperature else "greedy"
    tokens = sum(sample.tokens for sample in measured.samples)
    lines = [
        f"{len(plan.tasks)} texts of up to {plan.params.max_tokens} tokens{repeats}, {sampled}, seed "
        f"{plan.params.seed}; {tokens} tokens in {conditions}"
    ]
    if measured.gamma is not None:
        lines.insert(0, f"sd without a gamma of its own: the fastest tried, {measured.gamma}")
    if measured.skipped:
        lines.insert(0, f"left out, because the context is too small: {', '.join(measured.skipped)}")
    return lines


bench.add_command(paper)


# ---- several requests at once ----


@bench.command("slots")
@click.argument("counts", nargs=-1, type=click.IntRange(1, MAX_SLOTS))
@click.option("--prompts", multiple=True, metavar="[NAME=]FILE", help="As of pearl bench.")
@click.option("--limit", type=_COUNT, metavar="N", help="Prompts of each set.  [default: 5]")
@click.option("--rounds", type=_COUNT, default=3, show_default=True, metavar="N", help="After one to warm up.")
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@click.option("--png", type=_PATH, help="A picture.")
@json_option
@settings_options
def slots_(
    settings: Settings,
    counts: tuple[int, ...],
    prompts: tuple[str, ...],
    limit: int | None,
    rounds: int,
    raw: bool,
    png: Path | None,
    to: Path | None,
) -> None:
    """Tokens a second by the number of slots.

    All texts are submitted at once to an engine with each of COUNTS slots (1 2 4 8 unless given); these take turns.
    An emulated pair is compared with the same requests under a virtual clock, in which only forwards take time.
    """
    from pearl.lab.bench import plots
    from pearl.lab.bench.rows import check_comparable, is_emulated
    from pearl.lab.bench.slots import measure_slots

    config, toys = settings.engine, is_emulated(settings.engine)
    check_comparable(config)
    if config.slots != 1:
        raise ConfigError("--slots: name the numbers of slots as arguments, such as: pearl bench slots 1 2 4 8")
    tasks = read_sets(prompts, limit or 5, toys)
    if len(tasks) > _MOST_AT_ONCE:
        raise ConfigError(f"{len(tasks)} texts at once are too many, an engine takes {_MOST_AT_ONCE}: give --limit")
    params = _sampling(settings.sampling, 300 if toys else 64, toys)
    counts, conditions = tuple(dict.fromkeys(counts or (1, 2, 4, 8))), Conditions()
    with Bars(SafeConsole(stderr=True)) as bars:
        served = measure_slots(config, settings.decoding, params, tasks, counts, rounds, raw, bars)
    conditions.stop()
    about = {"pair": [config.target, config.draft], "method": settings.decoding.method}
    size = {"texts": len(tasks), "tokens": params.max_tokens, "rounds": rounds}
    result = {"kind": "slots", "slots": [asdict(one) for one in served], **about, **size, **conditions.as_dict()}
    if to is not None:
        write_json(to, result)
    if png is not None:
        plots.draw(result, png)
    if to != STDOUT:
        _print_slots(result, conditions)


def _print_slots(result: dict[str, Any], conditions: Conditions) -> None:
    rows = result["slots"]
    columns: list[Column[dict[str, Any]]] = [
        ("slots", lambda row: str(row["slots"])),
        ("tokens/s", lambda row: f"{row['rate']:.1f}"),
        ("rounds", lambda row: f"{min(row['rates']):.1f}-{max(row['rates']):.1f}"),
        (f"over\n{rows[0]['slots']} slot{'s' * (rows[0]['slots'] > 1)}", lambda row: f"{row['over_one']:.2f}"),
        ("a text:\ntokens/s", lambda row: shown(row["each"], 1)),
        ("ITL\np99", lambda row: "-" if row["p99"] is None else f"{row['p99'] * 1e3:.0f} ms"),
        ("s to\nits end", lambda row: f"{row['whole']:.1f}"),
        ("differ", lambda row: str(row["differing"])),
    ]
    if rows[0]["of_simulated"] is not None:
        columns.insert(4, ("of simu-\nlated", lambda row: shown(row["of_simulated"], 3)))
    console = table_console()
    print_table(console, [name for name, _ in columns], ([cell(row) for _, cell in columns] for row in rows), words=0)
    lines = [
        "tokens/s: of all texts together, median of the rounds; a text: after its first commit, median over texts; "
        "s to its end: from the submission of all; differ: texts that differ from those of the first row",
        f"{result['texts']} texts of up to {result['tokens']} tokens at once, method {result['method']}, "
        f"{result['rounds']} rounds in turns, {conditions}",
    ]
    print_lines(console, lines)


# ---- pictures ----


@bench.command()
@click.argument("result", type=_PATH)
@click.option("--png", type=_PATH, required=True, help="The picture.")
def plot(result: Path, png: Path) -> None:
    """Draw RESULT, the --json of pearl bench, its subcommands or pearl compare."""
    from pearl.lab.bench import plots

    plots.draw(read_json(result), png)
    click.echo(png)
