"""`pearl simulate`: all methods in virtual time. Arguments and tables. Subcommands: `recorded`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pearl.cli import listed, recorded
from pearl.cli.numbers import STDOUT, json_option, refuse_options, write_json
from pearl.cli.recorded import t_draft_option, t_target_option
from pearl.cli.tables import Bars, Column, print_columns, shown
from pearl.errors import ConfigError
from pearl.lab.experiments.estimate import Estimate, speedup

if TYPE_CHECKING:
    from pearl.lab.experiments.workload import Totals, Workload
    from pearl.metrics import Statistics

_BLOCK = 20  # texts whose luck is drawn together
_MOST = 1e6  # of what would be infinite
_COUNT = click.IntRange(min=1)


@listed("Measure", "pearl simulate --t-draft 10 --t-target 1:50,8:60 --acceptance 0.7")
@click.group(invoke_without_command=True)
@t_draft_option
@t_target_option
@click.option("--acceptance", type=click.FloatRange(0, 1), metavar="X", help="Rate, i.i.d.  [default: 0.8]")
@click.option("--requests", type=_COUNT, metavar="N", help="Texts.  [default: 200]")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Of each text.  [default: 128]")
@click.option(
    "--texts",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Decode texts that pearl simulate record wrote, at these times.",
)
@click.option(
    "--jitter",
    type=click.FloatRange(0, _MOST),
    default=0.0,
    metavar="X",
    help="Standard deviation of a forward, as a share of it.",
)
@click.option("--delay", type=click.FloatRange(0, _MOST), default=0.0, metavar="MS", help="Of a message, one way.")
@click.option("--seed", type=int, default=0, metavar="N")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    file: Path | None,
    jitter: float,
    delay: float,
    seed: int,
    to: Path | None,
    **given: Any,
) -> None:
    """All methods side by side in virtual time, without a model.

    Runs the real coordinator; only forwards and messages take time. Each model has its own device.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    from pearl.lab.experiments.workload import compare

    began, workload = time.monotonic(), _workload(file, given, delay, jitter, seed)
    with Bars() as bars:
        done = compare(workload, bars.step)
    if to is not None:
        write_json(to, _document(workload, done))
    if to != STDOUT:
        _print(workload, done, time.monotonic() - began)


def _workload(file: Path | None, given: dict[str, Any], delay: float, jitter: float, seed: int) -> Workload:
    """Of recorded texts, or with i.i.d. acceptance."""
    from pearl.lab.experiments import texts
    from pearl.lab.experiments.workload import independent
    from pearl.lab.simulate import timing_of
    from pearl.models.recorded import read_texts

    timing = timing_of(given.pop("t_draft"), given.pop("t_target"), delay, jitter)
    if file is not None:
        if fixed := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"--texts determines --{fixed[0]}: leave one of them out")
        return texts.workload(read_texts(file), timing, seed)
    acceptance = 0.8 if given["acceptance"] is None else given["acceptance"]
    return independent(timing, acceptance, given["requests"] or 200, given["tokens"] or 128, seed, _BLOCK)


def _document(workload: Workload, done: Sequence[Totals]) -> dict[str, Any]:
    """The result as JSON, in seconds."""
    timing = workload.timing
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
    methods = [one.as_dict() | {"speedup": asdict(speedup(one, done[0], workload.block))} for one in done]
    return {"settings": settings, "methods": methods}


def _print(workload: Workload, done: Sequence[Totals], seconds: float) -> None:
    timing = workload.timing

    def over_ar(one: Totals) -> Estimate:
        return speedup(one, done[0], workload.block)

    def waited(one: Totals, seconds: Callable[[Statistics], float]) -> str:
        return f"{sum(map(seconds, one.texts)) / one.total('seconds'):.1%}"

    columns: list[Column[Totals]] = [
        ("method", lambda one: one.name),
        # tokens/s is about ten times as large as over_ar
        ("tokens/s", lambda one: f"{one.tokens_per_second:.{max(0, over_ar(one).digits - 1)}f}"),
        ("over ar, 95%", lambda one: str(over_ar(one))),
        ("tokens\na step", lambda one: f"{one.tokens_per_step:.{over_ar(one).digits}f}"),
        ("accepted", lambda one: shown(one.acceptance_rate, 3)),
        ("tokens\na run", lambda one: shown(one.mean_run_length)),
        ("target\nwaits", lambda one: waited(one, lambda s: sum(s.target_wait_seconds.values()))),
        (
            "draft\nwaits",
            lambda one: waited(one, lambda s: s.draft_wait_seconds) if one.acceptance_rate else "-",
        ),
    ]
    is_unknown = len(workload.texts) <= workload.block
    print_columns(
        columns,
        done,
        f"t_draft {timing.t_draft * 1e3:.4g} ms, t_target(1) {timing.t_target(1) * 1e3:.4g} ms, acceptance "
        f"{workload.acceptance:.3g}, jitter {timing.jitter:g}, delay {timing.delay * 1e3:g} ms; c = {done[-1].window}",
        "tokens/s: after a text's first commit; step: a target forward after the prefill; "
        "run: up to a correction or bonus, it included",
        "one block of texts: the noise of these figures is unknown" if is_unknown else "",
        f"{len(workload.texts)} texts, {workload.tokens} tokens by each method; this took {seconds:.1f} s",
    )


for command in (recorded.record, recorded.stops):
    simulate.add_command(command)
