"""`pearl bench`: methods side by side on real runs. Arguments and tables; `pearl.lab.bench` measures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from pearl.cli import listed
from pearl.cli.console import SafeConsole
from pearl.cli.distill import Bars
from pearl.cli.numbers import STDOUT, json_option, named_file, read_json, refuse_options, table_console, write_json
from pearl.cli.options import SettingsGroup, settings_options
from pearl.cli.paper import paper
from pearl.config import SamplingParams, Settings
from pearl.config.engine import MAX_SLOTS
from pearl.errors import ConfigError
from pearl.lab.bench.interval import Interval
from pearl.lab.bench.machine import Stolen, Taken, hardware, in_words
from pearl.lab.bench.tasks import HUMANEVAL, OURS, Task, read_tasks
from pearl.models.checkpoint import is_toy
from pearl.printable import log_to_stderr

if TYPE_CHECKING:
    from pearl.lab.bench.run import Measured, Plan
    from pearl.lab.bench.summary import Figures

_COUNT = click.IntRange(min=1)
_MOST_AT_ONCE = 64  # requests of one front
_PATH = click.Path(path_type=Path)
_QUICK = {"limit": 1, "max_tokens": 64, "repeats": 1}
_DEFAULT = {"limit": 4, "max_tokens": 128, "repeats": 1}
_EMULATED = {"limit": 3, "max_tokens": 500, "repeats": 1}


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
@click.option("--repeats", type=_COUNT, metavar="N", help="Rounds over all prompts.  [default: 1]")
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
def bench(
    ctx: click.Context,
    settings: Settings,
    prompts: tuple[str, ...],
    limit: int | None,
    repeats: int | None,
    rows: tuple[str, ...],
    quick: bool,
    no_baselines: bool,
    together: bool | None,
    raw: bool,
    to: Path | None,
) -> None:
    """All methods side by side on the same prompts.

    The methods take turns. ar runs on the target's device, and in a row of its own on all devices that PEARL uses. sd
    runs with its fastest gamma. transformers' generate, with and without an assistant, is an outside baseline. Greedy
    unless --temperature is given; only committed tokens up to EOS count.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    from pearl.lab.bench.run import measure
    from pearl.lab.bench.summary import document

    for name in ("method", "window", "trace"):  # a configuration file may set them for other commands
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name}: a benchmark runs all methods and windows, untraced; choose some with --rows")
    plan = _plan(settings, prompts, limit, repeats, rows, quick, not no_baselines, together, raw)
    console = SafeConsole(stderr=True)
    log_to_stderr(settings.engine.log_level, "front")
    began, stolen = time.monotonic(), Stolen()
    with Bars(console) as bars:
        measured = measure(plan, bars)
    seconds, taken = time.monotonic() - began, stolen.taken()
    if to is not None:
        write_json(to, document(plan, measured, seconds, taken))
    if to != STDOUT:
        _print(plan, measured, seconds, taken)


def _plan(
    settings: Settings,
    prompts: Sequence[str],
    limit: int | None,
    repeats: int | None,
    rows: Sequence[str],
    quick: bool,
    baselines: bool,
    together: bool | None,
    raw: bool,
) -> Plan:
    from pearl.lab.bench.run import AR, AR_ON_ALL, NGRAM_ON_ALL, Plan, check_comparable, devices_of, emulated, rows_for

    config = settings.engine
    check_comparable(config)
    if not config.has_draft:
        raise ConfigError("--draft none: there is nothing to compare with ar")
    toys = emulated(config)
    defaults = _EMULATED if toys else _QUICK if quick else _DEFAULT
    known = rows_for(config, baselines and not is_toy(config.target), settings.decoding.rule)
    wanted = {*rows, AR} if rows else {row.name for row in known}
    target, draft = devices_of(config)
    if target == target | draft:
        wanted -= {AR_ON_ALL, NGRAM_ON_ALL}  # ar and ngram have all devices as it is
    if unknown := wanted - {row.name for row in known}:
        raise ConfigError(f"no row {sorted(unknown)[0]!r}; there are {'; '.join(row.name for row in known)}")
    return Plan(
        config,
        [row for row in known if row.name in wanted],
        read_sets(prompts, limit or defaults["limit"], toys),
        _sampling(settings.sampling, defaults["max_tokens"], toys),
        raw=raw,
        repeats=repeats or defaults["repeats"],
        together=together if together is not None else not target.gpus,
        gamma=settings.decoding.gamma,
        attempts=3 if toys else 1,
    )


def read_sets(prompts: Sequence[str], limit: int, toys: bool) -> list[Task]:
    """The sets that `--prompts` names. For an emulated pair, whose toys know no language: one prompt, several seeds."""
    if toys and not prompts:
        return [Task("emulated", number, ("hello",)) for number in range(1, limit + 1)]
    found: list[Task] = []
    for given in prompts or OURS:
        name, path = (given, None) if given in (HUMANEVAL, *OURS) else named_file(given)
        if any(task.set == name for task in found):
            raise ConfigError(f"two sets of prompts are called {name!r}: write NAME=FILE")
        found += read_tasks(name, path, limit)
    return found


def _sampling(given: SamplingParams, max_tokens: int, toys: bool) -> SamplingParams:
    """Greedy by default; temperature 1 for an emulated pair, whose acceptance rate is defined for sampling."""
    temperature = (1.0 if toys else 0.0) if given.temperature is None else given.temperature
    seed = 0 if given.seed is None else given.seed
    changes = {"temperature": temperature, "seed": seed, "max_tokens": given.max_tokens or max_tokens}
    return given.model_copy(update=changes)


def _print(plan: Plan, measured: Measured, seconds: float, taken: Taken) -> None:
    from pearl.lab.bench.summary import figures, over_alone

    found = figures(plan, measured)
    sets = list(dict.fromkeys(task.set for task in plan.tasks))
    console = table_console(sum(len(name) + 1 for name in sets if len(sets) > 1))
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("on", no_wrap=True)
    for column in ("tokens/s", "95%", "over\nar", "95%", *(sets if len(sets) > 1 else ()), "first\ntoken"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("ITL\np50", "ITL\np99", "accepted"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tokens\na run", justify="right")
    table.add_column("tokens\na step", justify="right")
    toys = any(row.of_simulated for row in found)
    if toys:
        table.add_column("of simu-\nlated", justify="right")
    for row in found:
        table.add_row(*_cells(row, measured, sets if len(sets) > 1 else [], toys))
    console.print(table)
    tokens = sum(row.tokens for row in found)
    lines = [
        "tokens/s: after a text's first commit, median over texts; over ar: median over texts of the ratio on the same "
        "text; 95%: bootstrap; first token (without the queue) and ITL (between two tokens): ms, medians over texts",
        f"{len(plan.tasks)} texts of up to {plan.params.max_tokens} tokens"
        + (f" x {plan.repeats}" if plan.repeats != 1 else "")
        + f", {'greedy' if not plan.params.temperature else f'temperature {plan.params.temperature:g}'}; "
        f"{tokens} tokens in {seconds:.0f} s; {taken}",
        in_words(hardware()),
    ]
    if measured.gammas:
        tried = ", ".join(f"{g}: {rate:.1f}" for g, rate in sorted(measured.gammas.items()))
        lines.insert(1, f"sd's gamma, tried (tokens/s): {tried}")
    if (over := over_alone(plan, measured)) is not None:
        lines.append(str(over))
    if measured.skipped:
        lines.insert(1, f"left out, for the context is too small: {', '.join(measured.skipped)}")
    console.print("\n" + "\n".join(lines), soft_wrap=True)


def _cells(row: Figures, measured: Measured, sets: Sequence[str], toys: bool) -> list[str]:
    name = f"{row.name}, gamma {measured.gamma}" if row.name == "sd" else row.name
    name = f"{row.name}({row.window})" if row.name == "pearl, fixed" else name
    cells = [name, row.devices, _value(row.rate), _range(row.rate), _value(row.speedup), _range(row.speedup)]
    cells += [_value(row.by_set.get(name)) for name in sets]
    latencies = ("-" if t is None else f"{t * 1e3:.0f}" for t in (row.itl_p50, row.itl_p99))
    cells += [f"{row.first_seconds * 1e3:.0f}", *latencies, _number(row.acceptance)]
    cells += [_number(row.tokens_per_run), _number(row.tokens_per_step)]
    return [*cells, _value(row.of_simulated, 3)] if toys else cells


def _value(one: Interval | None, digits: int = 2) -> str:
    return "-" if one is None else f"{one.value:.{digits}f}"


def _range(one: Interval | None) -> str:
    return "" if one is None or one.low == one.high else f"{one.low:.2f}-{one.high:.2f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


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
    An emulated pair is set against the same requests under a virtual clock, in which nothing but forwards takes time.
    """
    from pearl.lab.bench import plots
    from pearl.lab.bench.run import check_comparable, emulated
    from pearl.lab.bench.slots import measure_slots

    config, toys = settings.engine, emulated(settings.engine)
    check_comparable(config)
    if config.slots != 1:
        raise ConfigError("--slots: name the numbers of slots as arguments, such as: pearl bench slots 1 2 4 8")
    tasks = read_sets(prompts, limit or 5, toys)
    if len(tasks) > _MOST_AT_ONCE:
        raise ConfigError(f"{len(tasks)} texts at once are too many, an engine takes {_MOST_AT_ONCE}: give --limit")
    params = _sampling(settings.sampling, 300 if toys else 64, toys)
    began, stolen = time.monotonic(), Stolen()
    counts = tuple(dict.fromkeys(counts or (1, 2, 4, 8)))
    with Bars(SafeConsole(stderr=True)) as bars:
        served = measure_slots(config, settings.decoding, params, tasks, counts, rounds, raw, bars)
    seconds, taken = time.monotonic() - began, stolen.taken()
    result = {
        "kind": "slots",
        "slots": [one.as_dict() for one in served],
        "pair": [config.target, config.draft],
        "method": settings.decoding.method,
        "texts": len(tasks),
        "tokens": params.max_tokens,
        "rounds": rounds,
        "seconds": seconds,
        "hardware": hardware(),
        **asdict(taken),
    }
    if to is not None:
        write_json(to, result)
    if png is not None:
        plots.draw(result, png)
    if to != STDOUT:
        _print_slots(result, seconds, taken)


def _print_slots(result: dict[str, Any], seconds: float, taken: Taken) -> None:
    console, rows = table_console(), result["slots"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    over = f"over\n{rows[0]['slots']} slot{'s' * (rows[0]['slots'] > 1)}"
    ideal = ["of simu-\nlated"] if rows[0]["of_simulated"] is not None else []
    of_each = ("a text:\ntokens/s", "ITL\np99", "s to\nits end", "differ")
    for column in ("slots", "tokens/s", "rounds", over, *ideal, *of_each):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row["slots"]), f"{row['rate']:.1f}", f"{min(row['rates']):.1f}-{max(row['rates']):.1f}"]
        cells += [f"{row['over_one']:.2f}", *([_number(row["of_simulated"], 3)] if ideal else [])]
        cells += [_number(row["each"], 1), "-" if row["p99"] is None else f"{row['p99'] * 1e3:.0f} ms"]
        table.add_row(*cells, f"{row['whole']:.1f}", str(row["differing"]))
    console.print(table)
    lines = [
        "tokens/s: of all texts together, median of the rounds; a text: while it is written, median over texts; "
        "s to its end: from the submission of all; differ: texts that are not those of the first row",
        f"{result['texts']} texts of up to {result['tokens']} tokens at once, method {result['method']}, "
        f"{result['rounds']} rounds in turns, {seconds:.0f} s; {taken}",
        in_words(hardware()),
    ]
    console.print("\n" + "\n".join(lines), soft_wrap=True)


# ---- pictures ----


@bench.command()
@click.argument("result", type=_PATH)
@click.option("--png", type=_PATH, required=True, help="The picture.")
def plot(result: Path, png: Path) -> None:
    """Draw RESULT, the --json of pearl bench or of pearl bench paper."""
    from pearl.lab.bench import plots

    plots.draw(read_json(result), png)
    click.echo(png)
