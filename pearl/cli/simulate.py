"""`pearl simulate`: all methods in virtual time. Arguments and tables. Subcommands: `recorded`, `studies`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pearl.cli import listed, recorded, studies
from pearl.cli.numbers import STDOUT, json_option, refuse_options, write_json
from pearl.cli.recorded import t_draft_option, t_target_option
from pearl.cli.tables import Bars, Column, print_columns, shown
from pearl.errors import ConfigError
from pearl.lab.experiments.estimate import Estimate, speedup

if TYPE_CHECKING:
    from pearl.lab.experiments.workload import Totals, Workload

_BLOCK = 20  # texts whose luck is drawn together
_MOST = 1e6  # of what would be infinite
_COUNT = click.IntRange(min=1)
_DRAFTERS = ("model", "lookup", "branch")  # names in `Totals.sources`


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
    "--datastore",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --texts: where look-ahead and lookup guess from too.",
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
    datastore: Path | None,
    jitter: float,
    delay: float,
    seed: int,
    to: Path | None,
    **given: Any,
) -> None:
    """All methods side by side in virtual time, without a model.

    Runs the real coordinator; only forwards and messages take time. Each model has its own device. Recorded texts
    (--texts) are also decoded with look-ahead, lookup and branches, alone and together.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    if datastore is not None and file is None:
        raise ConfigError("--datastore is for recorded texts: name them with --texts")
    from pearl.lab.experiments.workload import compare

    began, workload = time.monotonic(), _workload(file, given, delay, jitter, seed)
    guessed: list[Totals] = []
    with Bars() as bars:
        done = compare(workload, bars.step)
        if file is not None:
            bars.step("look-ahead, lookup and branches, alone and together")
            guessed = _ablations(file, workload, datastore)
    if to is not None:
        write_json(to, _document(workload, [*done, *guessed]))
    if to != STDOUT:
        _print(workload, done, time.monotonic() - began)
        if guessed:
            _print_ablations(guessed, done[0])


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


def _ablations(file: Path, workload: Workload, directory: Path | None) -> list[Totals]:
    from pearl.drafting.datastore import Datastore
    from pearl.lab.experiments import texts
    from pearl.models.recorded import read_texts

    recorded = read_texts(file)
    store = Datastore(directory, recorded.header.vocab_size, verified=True) if directory is not None else None
    return list(texts.compare(recorded, workload.timing, workload.seed, store))


def _document(workload: Workload, done: Sequence[Totals]) -> dict[str, Any]:
    """The result as JSON, in seconds."""
    timing = workload.timing
    settings = {
        "t_draft": timing.t_draft,
        "t_draft_fed": {n: timing.draft(n) for n in (1, 2, 4, 8, 16)},
        "t_target": {n: timing.t_target(n) for n in (1, 2, 4, 8, 16)},
        "acceptance": workload.acceptance,
        "jitter": timing.jitter,
        "delay": timing.delay,
        "texts": len(workload.texts),
        "tokens": workload.tokens,
        "seed": workload.seed,
    }
    over = [speedup(totals, done[0], workload.block) for totals in done]
    methods = [
        totals.as_dict() | {"speedup": one.value, "speedup_low": one.low, "speedup_high": one.high}
        for totals, one in zip(done, over, strict=True)
    ]
    return {"settings": settings, "methods": methods}


def _print(workload: Workload, done: Sequence[Totals], seconds: float) -> None:
    timing = workload.timing

    def over_ar(one: Totals) -> Estimate:
        return speedup(one, done[0], workload.block)

    columns: list[Column[Totals]] = [
        ("method", lambda one: one.name),
        # tokens/s is about ten times as large as over_ar
        ("tokens/s", lambda one: f"{one.tokens_per_second:.{max(0, over_ar(one).digits - 1)}f}"),
        ("over ar, 95%", lambda one: str(over_ar(one))),
        ("tokens\na step", lambda one: f"{one.tokens_per_step:.{over_ar(one).digits}f}"),
        ("accepted", lambda one: shown(one.acceptance_rate, 3)),
        ("tokens\na run", lambda one: shown(one.mean_run_length)),
        ("target\nwaits", lambda one: f"{sum(one.target_waits.values()) / one.whole:.1%}"),
        ("draft\nwaits", lambda one: "-" if one.acceptance_rate is None else f"{one.draft_waits / one.whole:.1%}"),
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


def _print_ablations(done: Sequence[Totals], plain: Totals) -> None:
    """`plain`: of `ar`; the first of `done` is `pearl` as published."""
    guessers = sorted({name for totals in done for name in totals.guessed}, reverse=True)
    drafted, guessed = ",\n".join(_DRAFTERS), ",\n".join(guessers)

    def counts(names: Sequence[str], found: Mapping[str, int]) -> str:
        return ", ".join(str(found.get(name, 0)) for name in names) if found else "-"

    columns: list[Column[Totals]] = [
        ("method", lambda one: one.name),
        ("tokens/s", lambda one: f"{one.tokens_per_second:.{max(0, speedup(one, plain, 1).digits - 1)}f}"),
        ("over ar, 95%", lambda one: str(speedup(one, plain, 1))),
        ("over published", lambda one: str(speedup(one, done[0], 1))),
        ("tokens\na step", lambda one: f"{one.tokens_per_step:.{speedup(one, plain, 1).digits}f}"),
        ("fore-\nseen", lambda one: f"{one.foreseen_share:.1%}" if one.foreseen_share else "-"),
        (f"accepted:\n{drafted}", lambda one: counts(_DRAFTERS, one.sources if one.accepted else {})),
        (f"guessed:\n{guessed}", lambda one: counts(guessers, one.guessed)),
    ]
    print_columns(
        columns,
        done,
        "foreseen: share of the rejections (of ssd: and bonus tokens) for whose outcome a branch was there; "
        "accepted: tokens by who drafted them; guessed: tokens by who guessed them for the target",
    )


for command in (studies.check, recorded.record, studies.rejections, recorded.stops):
    simulate.add_command(command)
