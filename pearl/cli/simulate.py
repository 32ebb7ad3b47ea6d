"""`pearl simulate`: all methods in virtual time. Arguments and tables; the numbers are of `pearl.lab.experiments`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pearl.cli.check import check
from pearl.cli.numbers import POSITIVE, STDOUT, Number, Times, json_option, refuse_options, write_json
from pearl.cli.sweep import sweep
from pearl.errors import ConfigError
from pearl.lab.experiments.compare import compare
from pearl.lab.experiments.recorded import Recorded, interpolated, recorded
from pearl.lab.experiments.workload import Totals, Workload, independent, run
from pearl.lab.simulate import Timing
from pearl.trace.reading import read

_COUNT = click.IntRange(min=1)


@click.group(invoke_without_command=True)
@click.option("--t-draft", type=POSITIVE, metavar="MS", help="Of a draft forward.  [default: 10]")
@click.option("--t-target", type=Times(), help="Of a target forward; 1:50,4:55,8:60: by tokens fed.  [default: 50]")
@click.option("--acceptance", type=Number(0, 1), metavar="X", help="Rate, i.i.d.  [default: 0.8]")
@click.option("--requests", type=_COUNT, metavar="N", help="Texts.  [default: 200]")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Of each text.  [default: 128]")
@click.option("--trace", type=click.Path(path_type=Path), help="Take all these from a recorded run instead.")
@click.option(
    "--jitter", type=Number(0), default=0.0, metavar="X", help="Standard deviation of a forward, as a share of it."
)
@click.option("--delay", type=Number(0), default=0.0, metavar="MS", help="Of a message, one way.")
@click.option("--seed", type=int, default=0, metavar="N")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context, trace: Path | None, jitter: float, delay: float, seed: int, to: Path | None, **texts: Any
) -> None:
    """All methods side by side in virtual time, without a model.

    The coordinator is the real one. Only forwards and messages take time. Each model has a device of its own; ar has
    the target's alone. A replay (--trace) takes from a recorded run which positions the draft got right, and how long
    forwards took.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    began = time.monotonic()
    record = _recorded(trace, texts, delay, jitter, seed) if trace else None
    workload = record.workload if record else _independent(delay=delay, jitter=jitter, seed=seed, **texts)
    done = compare(workload)
    again = run(workload, record.decoding) if record else None
    if to is not None:
        write_json(to, _document(workload, done, record, again))
    if to != STDOUT:
        _print(workload, done, time.monotonic() - began)
        if record and again:
            _print_replay(trace, record, again)


def _recorded(trace: Path, texts: dict[str, Any], delay: float, jitter: float, seed: int) -> Recorded:
    for name, value in texts.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is what --trace tells: leave one of them out")
    return recorded(read(trace), delay / 1e3, jitter, seed)


def _independent(
    t_draft: float | None,
    t_target: dict[int, float] | None,
    acceptance: float | None,
    requests: int | None,
    tokens: int | None,
    delay: float,
    jitter: float,
    seed: int,
) -> Workload:
    times = {n: ms / 1e3 for n, ms in (t_target or {1: 50.0}).items()}
    timing = Timing((t_draft or 10.0) / 1e3, interpolated(times), delay / 1e3, jitter)
    return independent(timing, 0.8 if acceptance is None else acceptance, requests or 200, tokens or 128, seed)


def _document(
    workload: Workload, done: Sequence[Totals], record: Recorded | None, again: Totals | None
) -> dict[str, Any]:
    """Seconds, as everywhere but on the command line."""
    timing, plain = workload.timing, done[0].tokens_per_second
    settings = {
        "t_draft": timing.t_draft,
        "t_target": {n: timing.t_target(n) for n in (1, 2, 4, 8, 16)},
        "acceptance": workload.acceptance,
        "jitter": timing.jitter,
        "delay": timing.delay,
        "texts": len(workload.texts),
        "tokens": workload.tokens,
        "seed": workload.seed,
    }
    methods = [totals.as_dict() | {"speedup": totals.tokens_per_second / plain} for totals in done]
    document: dict[str, Any] = {"settings": settings, "methods": methods}
    if record and again:
        document["recorded"] = {"tokens_per_second": record.tokens_per_second, "known_positions": record.known}
        document["replayed"] = again.as_dict()
    return document


def _print(workload: Workload, done: Sequence[Totals], seconds: float) -> None:
    console, timing = Console(highlight=False), workload.timing
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for column in (
        "tokens/s",
        "over ar",
        "tokens\na step",
        "accepted",
        "tokens\na run",
        "target\nwaits",
        "draft\nwaits",
    ):
        table.add_column(column, justify="right")
    for totals in done:
        table.add_row(totals.name, *_row(totals, done[0]))
    console.print(table)
    console.print(
        f"\nt_draft {timing.t_draft * 1e3:.4g} ms, t_target(1) {timing.t_target(1) * 1e3:.4g} ms, acceptance "
        f"{workload.acceptance:.3g}, jitter {timing.jitter:g}, delay {timing.delay * 1e3:g} ms; c = {done[-1].window}\n"
        "tokens/s: after a text's first commit; step: a target forward after the prefill; "
        "run: up to a correction or bonus, it included\n"
        f"{len(workload.texts)} texts, {workload.tokens} tokens by each method; this took {seconds:.1f} s",
        soft_wrap=True,
    )


def _row(totals: Totals, plain: Totals) -> list[str]:
    accepted, run_length = totals.acceptance_rate, totals.mean_acceptance_length
    return [
        f"{totals.tokens_per_second:.2f}",
        f"{totals.tokens_per_second / plain.tokens_per_second:.3f}",
        f"{totals.tokens_per_step:.3f}",
        "-" if accepted is None else f"{accepted:.3f}",
        "-" if run_length is None else f"{run_length:.2f}",
        f"{sum(totals.target_waits.values()) / totals.whole:.1%}",
        "-" if accepted is None else f"{totals.draft_waits / totals.whole:.1%}",
    ]


def _print_replay(trace: Path | None, record: Recorded, again: Totals) -> None:
    share = again.tokens_per_second / record.tokens_per_second
    click.echo(
        f"{trace}: {again.name}: {record.tokens_per_second:.2f} tokens/s as recorded, {again.tokens_per_second:.2f} "
        f"replayed ({share:.3f} of it); {record.known} of {record.workload.tokens} positions were judged in it"
    )


simulate.add_command(check)
simulate.add_command(sweep)
