"""`pearl bench`: methods side by side on real runs. Arguments and tables; the measuring is `pearl.lab.bench`'s."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from pearl.cli.distill import Bars
from pearl.cli.numbers import STDOUT, json_option, named_file, read_json, refuse_options, table_console, write_json
from pearl.cli.options import settings_options
from pearl.cli.terminal import SafeConsole
from pearl.config import SamplingParams, Settings
from pearl.errors import ConfigError
from pearl.lab.bench import paper as tables
from pearl.lab.bench import plots
from pearl.lab.bench.interval import Interval
from pearl.lab.bench.machine import Stolen, hardware, in_words
from pearl.lab.bench.run import Measured, Plan, devices_of, emulated, measure, rows_for
from pearl.lab.bench.summary import Figures, document, figures
from pearl.lab.bench.tasks import HUMANEVAL, Task, read_tasks
from pearl.models.checkpoint import is_toy
from pearl.printable import log_to_stderr

_COUNT = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)
_QUICK = {"limit": 2, "max_tokens": 64, "repeats": 1}
_USUAL = {"limit": 10, "max_tokens": 128, "repeats": 1}
_EMULATED = {"limit": 3, "max_tokens": 500, "repeats": 1}


@click.group(invoke_without_command=True)
@click.option(
    "--prompts",
    multiple=True,
    metavar="[NAME=]FILE",
    help="humaneval, or a .jsonl file of prompts, questions or turns. Repeatable.  [default: humaneval]",
)
@click.option("--limit", type=_COUNT, metavar="N", help="Prompts of each set.  [default: 10]")
@click.option("--repeats", type=_COUNT, metavar="N", help="Rounds over all prompts.  [default: 1]")
@click.option("--rows", multiple=True, metavar="NAME", help="Only this row, and ar. Repeatable; a wrong one lists all.")
@click.option("--quick", is_flag=True, help="2 prompts of each set, 64 tokens: a first look in a few minutes.")
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

    They take turns. ar has the target's device; a row of its own gives it all that PEARL uses. sd runs with the gamma
    that is found best. transformers' generate, with and without an assistant, is there as an outside baseline. Greedy
    unless --temperature says otherwise; only committed tokens up to EOS count.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    for name in ("method", "window", "trace"):  # in a file they are what other commands want
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name}: a benchmark runs all methods and windows, untraced; choose some with --rows")
    plan = _plan(settings, prompts, limit, repeats, rows, quick, not no_baselines, together, raw)
    console = SafeConsole(stderr=True)
    log_to_stderr(settings.engine.log_level, "front")
    began, stolen = time.monotonic(), Stolen()
    with Bars(console) as bars:
        measured = measure(plan, bars)
    seconds, share = time.monotonic() - began, stolen.share
    if to is not None:
        write_json(to, document(plan, measured, seconds, share))
    if to != STDOUT:
        _print(plan, measured, seconds, share)


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
    config = settings.engine
    if not config.has_draft:
        raise ConfigError("--draft none: there is nothing to compare with ar")
    toys = emulated(config)
    usual = _EMULATED if toys else _QUICK if quick else _USUAL
    known = rows_for(config, baselines and not is_toy(config.target), settings.decoding.rule)
    wanted = {*rows, "ar"} if rows else {row.name for row in known}
    if unknown := wanted - {row.name for row in known}:
        raise ConfigError(f"no row {sorted(unknown)[0]!r}; there are {'; '.join(row.name for row in known)}")
    return Plan(
        config,
        [row for row in known if row.name in wanted],
        _tasks(prompts, limit or usual["limit"], toys),
        _sampling(settings.sampling, usual["max_tokens"], toys),
        raw=raw,
        repeats=repeats or usual["repeats"],
        together=together if together is not None else not devices_of(config)[0].gpus,
        gamma=settings.decoding.gamma,
        attempts=3 if toys else 1,
    )


def _tasks(prompts: Sequence[str], limit: int, toys: bool) -> list[Task]:
    """Of an emulated pair, whose distributions know no language: texts that differ by their seeds."""
    if toys and not prompts:
        return [Task("emulated", number, ("hello",)) for number in range(1, limit + 1)]
    found: list[Task] = []
    for given in prompts or (HUMANEVAL,):
        name, path = (HUMANEVAL, None) if given == HUMANEVAL else named_file(given)
        if any(task.set == name for task in found):
            raise ConfigError(f"two sets of prompts are called {name!r}: write NAME=FILE")
        found += read_tasks(name, path, limit)
    return found


def _sampling(given: SamplingParams, most: int, toys: bool) -> SamplingParams:
    """Greedy, but for an emulated pair, whose acceptance rate is that of sampling."""
    temperature = (1.0 if toys else 0.0) if given.temperature is None else given.temperature
    seed = 0 if given.seed is None else given.seed
    changes = {"temperature": temperature, "seed": seed, "max_tokens": given.max_tokens or most}
    return given.model_copy(update=changes)


def _print(plan: Plan, measured: Measured, seconds: float, stolen: float) -> None:
    console, found = table_console(), figures(plan, measured)
    sets = list(dict.fromkeys(task.set for task in plan.tasks))
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("on", no_wrap=True)
    for column in ("tokens/s", "95%", "over\nar", "95%", *(sets if len(sets) > 1 else ()), "first\ntoken", "accepted"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tokens\na run", justify="right")
    toys = any(row.of_simulated for row in found)
    if toys:
        table.add_column("of simu-\nlated", justify="right")
    for row in found:
        table.add_row(*_cells(row, measured, sets if len(sets) > 1 else [], toys))
    console.print(table)
    tokens = sum(row.tokens for row in found)
    lines = [
        "tokens/s: after a text's first commit, median over texts; over ar: median over texts of the ratio on the same "
        "text; 95%: bootstrap; first token: ms",
        f"{len(plan.tasks)} texts of up to {plan.params.max_tokens} tokens"
        + (f" x {plan.repeats}" if plan.repeats != 1 else "")
        + f", {'greedy' if not plan.params.temperature else f'temperature {plan.params.temperature:g}'}; "
        f"{tokens} tokens in {seconds:.0f} s; {stolen:.1%} of the cores' time was taken by the host",
        in_words(hardware()),
    ]
    if measured.gammas:
        tried = ", ".join(f"{g}: {rate:.1f}" for g, rate in sorted(measured.gammas.items()))
        lines.insert(1, f"sd's gamma, tried (tokens/s): {tried}")
    if measured.skipped:
        lines.insert(1, f"left out, for the context is too small: {', '.join(measured.skipped)}")
    console.print("\n" + "\n".join(lines), soft_wrap=True)


def _cells(row: Figures, measured: Measured, sets: Sequence[str], toys: bool) -> list[str]:
    name = f"{row.name}, gamma {measured.gamma}" if row.name == "sd" else row.name
    name = f"{row.name}({row.window})" if row.name == "pearl, fixed" else name
    cells = [name, row.devices, _value(row.rate), _range(row.rate), _value(row.speedup), _range(row.speedup)]
    cells += [_value(row.by_set.get(name)) for name in sets]
    cells += [f"{row.first_seconds * 1e3:.0f}", _plain(row.acceptance), _plain(row.tokens_per_run)]
    return [*cells, _value(row.of_simulated, 3)] if toys else cells


def _value(one: Interval | None, digits: int = 2) -> str:
    return "-" if one is None else f"{one.value:.{digits}f}"


def _range(one: Interval | None) -> str:
    return "" if one is None or one.low == one.high else f"{one.low:.2f}-{one.high:.2f}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# ---- the paper ----


@bench.command()
@click.option("--pair", "names", multiple=True, metavar="NAME", help="Only pairs whose name holds this. Repeatable.")
@click.option("--table", "wanted", multiple=True, type=click.Choice(list(tables.TABLES)), help="Only this one.")
@click.option("--pairs", "path", type=_PATH, help="YAML of pairs with published figures, in place of the built-in one.")
@click.option("--tokens", type=click.IntRange(min=50), default=600, show_default=True, metavar="N", help="Of a text.")
@click.option("--repeats", type=_COUNT, default=5, show_default=True, metavar="N", help="Of pearl and sd.")
@click.option("--other-repeats", type=_COUNT, default=1, show_default=True, metavar="N", help="Of all else.")
@click.option("--quick", is_flag=True, help="200 tokens, one repeat.")
@click.option("--simulate-only", is_flag=True, help="No real processes: theory and simulator alone.")
@click.option("--seed", type=int, default=0, metavar="N")
@json_option
def paper(
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    path: Path | None,
    tokens: int,
    repeats: int,
    other_repeats: int,
    quick: bool,
    simulate_only: bool,
    seed: int,
    to: Path | None,
) -> None:
    """The paper's tables 1, 3, 5 and 6 from this runtime, by EMULATION of its pairs.

    Toys stand in for the models: each forward lasts what the pair's would, each draft token is accepted as often. Two
    real processes decode, so what the runtime itself costs is in the figures.
    """
    found = [pair for pair in tables.pairs(path) if not names or any(n.lower() in pair.name.lower() for n in names)]
    if not found:
        raise ConfigError(f"no pair is called {names[0]!r}; there are {', '.join(p.name for p in tables.pairs(path))}")
    if quick:
        tokens, repeats, other_repeats = 200, 1, 1
    began, stolen, done = time.monotonic(), Stolen(), []
    with Bars(SafeConsole(stderr=True)) as bars:
        for pair in found:
            bars.say(pair.name)
            done.append(
                tables.emulate(
                    pair,
                    wanted or tuple(tables.TABLES),
                    bars,
                    tokens=tokens,
                    repeats=repeats,
                    other_repeats=other_repeats,
                    seed=seed,
                    runtime=not simulate_only,
                )
            )
    seconds, share = time.monotonic() - began, stolen.share
    if to is not None:
        settings = {"tokens": tokens, "repeats": repeats, "other_repeats": other_repeats, "seed": seed}
        about = {"kind": "paper", "emulated": True, "settings": settings, "seconds": seconds, "stolen": share}
        write_json(to, about | {"hardware": hardware()} | tables.document(done))
    if to != STDOUT:
        _print_paper(done, tokens, repeats, seconds, share)


def _print_paper(done: Sequence[tables.Emulated], tokens: int, repeats: int, seconds: float, stolen: float) -> None:
    console = table_console()
    for name, title in tables.TABLES.items():
        cells = [cell for one in done for cell in one.tables.get(name, ())]
        if not cells:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), title=f"Table {name}, emulated: {title}", title_justify="left")
        table.add_column("pair", no_wrap=True)
        table.add_column("method", no_wrap=True)
        for column in ("paper", "theory", "simulator", "runtime", "of simulated"):
            table.add_column(column, justify="right")
        for cell in cells:
            shares = "{:.3f} ({:.3f}-{:.3f})".format(*cell.of_simulated) if cell.of_simulated else ""
            numbers = [_plain(value) for value in (cell.paper, cell.theory, cell.simulator, cell.runtime)]
            table.add_row(cell.pair, cell.method, *numbers, shares)
        console.print(table, "")
    for one in done:
        console.print(
            f"{one.pair.name}: t_draft {one.pair.t_draft * 1e3:.3g} ms, t_target {one.pair.t_target * 1e3:.3g} ms, "
            f"acceptance {one.acceptance:.3f} ({one.acceptance_from}); real pair: configs/{one.pair.config}.yaml",
            soft_wrap=True,
        )
    console.print(
        f"EMULATION: toys of these speeds and acceptance rates, {tokens} tokens x {repeats}; of simulated: speed over "
        "the virtual clock's on the same seed, median, least and most.\n"
        f"{seconds:.0f} s; {stolen:.1%} of the cores' time was taken by the host; {in_words(hardware())}",
        soft_wrap=True,
    )


# ---- pictures ----


@bench.command()
@click.argument("result", type=_PATH)
@click.option("--png", type=_PATH, required=True, help="The picture.")
def plot(result: Path, png: Path) -> None:
    """Draws RESULT, the --json of pearl bench or of pearl bench paper."""
    plots.draw(read_json(result), png)
    click.echo(png)
