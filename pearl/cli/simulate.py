"""`pearl simulate`: all methods in virtual time. Arguments and tables; the numbers are of `pearl.lab.experiments`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from pearl.cli import listed
from pearl.cli.check import check
from pearl.cli.console import SafeConsole
from pearl.cli.disco import stops
from pearl.cli.front import front_command
from pearl.cli.numbers import STDOUT, Number, Times, json_option, refuse_options, write_json
from pearl.cli.record import record
from pearl.cli.rejections import rejections_command
from pearl.cli.sweep import sweep
from pearl.cli.texts import ablations, print_ablations
from pearl.document import damaged
from pearl.errors import ConfigError, TraceError
from pearl.lab.experiments.estimate import Estimate, speedup
from pearl.protocol.options import RequestOptions
from pearl.trace.reading import read

if TYPE_CHECKING:
    from pearl.lab.experiments.recorded import Recorded
    from pearl.lab.experiments.workload import Totals, Workload

_SILENT_SECONDS = 5.0  # without a line, where there is no terminal
_BLOCK = 20  # texts whose luck balances
_COUNT = click.IntRange(min=1)
_FILE = click.Path(dir_okay=False, path_type=Path)


@listed("Measure", "pearl simulate --t-draft 10 --t-target 1:50,8:60 --acceptance 0.7")
@click.group(invoke_without_command=True)
@click.option("--t-draft", type=Times(), help="Of a draft forward; 1:10,4:12: by tokens fed.  [default: 10]")
@click.option("--t-target", type=Times(), help="Of a target forward; 1:50,4:55,8:60: by tokens fed.  [default: 50]")
@click.option("--acceptance", type=Number(0, 1), metavar="X", help="Rate, i.i.d.  [default: 0.8]")
@click.option("--requests", type=_COUNT, metavar="N", help="Texts.  [default: 200]")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Of each text.  [default: 128]")
@click.option("--trace", type=click.Path(path_type=Path), help="Take all these from a recorded run instead.")
@click.option("--texts", "file", type=_FILE, help="Decode texts that pearl simulate record wrote, at these times.")
@click.option(
    "--datastore",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --texts or --trace: where look-ahead and lookup guess from too.",
)
@click.option(
    "--jitter", type=Number(0), default=0.0, metavar="X", help="Standard deviation of a forward, as a share of it."
)
@click.option("--delay", type=Number(0), default=0.0, metavar="MS", help="Of a message, one way.")
@click.option("--seed", type=int, default=0, metavar="N")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    trace: Path | None,
    file: Path | None,
    datastore: Path | None,
    jitter: float,
    delay: float,
    seed: int,
    to: Path | None,
    **given: Any,
) -> None:
    """All methods side by side in virtual time, without a model.

    The coordinator is the real one. Only forwards and messages take time. Each model has a device of its own; ar has
    the target's alone. A replay (--trace) takes from a recorded run its texts, which positions the draft got right,
    what its next best were, and how long forwards took. Like recorded texts (--texts) it is decoded with look-ahead,
    lookup and branches too, alone and together.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return
    from pearl.lab.experiments.compare import compare
    from pearl.models.recorded import read_texts

    if datastore is not None and file is None and trace is None:
        raise ConfigError("--datastore is for recorded texts: name them with --texts or --trace")
    began = time.monotonic()
    record = _recorded(trace, given | {"texts": file}, delay, jitter, seed) if trace else None
    known = read_texts(file) if file is not None else None
    if record:
        workload, known = record.workload, record.texts
    elif file is not None:
        workload = _of_texts(file, delay=delay, jitter=jitter, seed=seed, **given)
    else:
        workload = _independent(delay=delay, jitter=jitter, seed=seed, **given)
    with _told() as tell:
        done = compare(workload, tell)
        if record:
            tell("the recording's own method")
        again = _again(record, seed) if record else None
        if known is not None:
            tell("look-ahead, lookup and branches, alone and together")
        guessed = ablations(known, workload, datastore) if known is not None else []
    if to is not None:
        write_json(to, _document(workload, [*done, *guessed], record, again))
    if to != STDOUT:
        _print(workload, done, time.monotonic() - began)
        if record and again:
            _print_replay(trace, record, again)
        if guessed:
            print_ablations(guessed, done[0])


@contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """Shows what is simulated: with a spinner on a terminal, elsewhere a line for what comes after long work."""
    console = SafeConsole(stderr=True)
    if console.is_terminal:
        with console.status("simulating") as status:
            yield lambda what: status.update(f"simulating {what}")
        return
    last = time.monotonic()

    def tell(what: str) -> None:
        nonlocal last
        if time.monotonic() - last > _SILENT_SECONDS:
            last = time.monotonic()
            console.print(f"simulating {what}")

    yield tell


def _of_texts(
    file: Path,
    t_draft: dict[int, float] | None,
    t_target: dict[int, float] | None,
    delay: float,
    jitter: float,
    seed: int,
    **others: Any,
) -> Workload:
    from pearl.lab.experiments import texts
    from pearl.lab.experiments.recorded import timing_of
    from pearl.models.recorded import read_texts

    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"--{name} is what --texts tells: leave one of them out")
    return texts.workload(read_texts(file), timing_of(t_draft, t_target, delay, jitter), seed)


def _recorded(trace: Path, given: dict[str, Any], delay: float, jitter: float, seed: int) -> Recorded:
    from pearl.lab.experiments.recorded import recorded

    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is what --trace tells: leave one of them out")
    read_in = read(trace)
    with damaged(trace, TraceError):
        return recorded(read_in, delay / 1e3, jitter, seed)


def _again(record: Recorded, seed: int) -> Totals:
    """The recording's own method, with all that guessed beside the draft where the trace tells enough of it."""
    from pearl.lab.experiments import texts
    from pearl.lab.experiments.workload import run

    if record.texts is None:
        return run(record.workload, record.published)
    decoding = record.decoding
    plain = RequestOptions(decoding.method, decoding.window, decoding.gamma, texts.RULE)
    guessed = {name: getattr(decoding, name) for name in ("look_ahead", "draft_lookup", "branches")}
    return texts.run(record.texts, plain.changed(**guessed), record.workload.timing, seed)


def _independent(
    t_draft: dict[int, float] | None,
    t_target: dict[int, float] | None,
    acceptance: float | None,
    requests: int | None,
    tokens: int | None,
    delay: float,
    jitter: float,
    seed: int,
) -> Workload:
    from pearl.lab.experiments.recorded import timing_of
    from pearl.lab.experiments.workload import independent

    timing = timing_of(t_draft, t_target, delay, jitter)
    return independent(timing, 0.8 if acceptance is None else acceptance, requests or 200, tokens or 128, seed, _BLOCK)


def _document(
    workload: Workload, done: Sequence[Totals], record: Recorded | None, again: Totals | None
) -> dict[str, Any]:
    """Seconds, as everywhere but on the command line."""
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
    speedups = [speedup(totals, done[0], workload.block) for totals in done]
    told = [{"speedup": one.value, "speedup_margin": one.margin} for one in speedups]
    methods = [totals.as_dict() | each for totals, each in zip(done, told, strict=True)]
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
        "over ar, 95%",
        "tokens\na step",
        "accepted",
        "tokens\na run",
        "target\nwaits",
        "draft\nwaits",
    ):
        table.add_column(column, justify="right")
    for totals in done:
        table.add_row(totals.name, *_row(totals, speedup(totals, done[0], workload.block)))
    console.print(table)
    one_block = len(workload.texts) <= workload.block
    unknown = "one block of texts: nothing tells how far these figures are noise\n" if one_block else ""
    console.print(
        f"\nt_draft {timing.t_draft * 1e3:.4g} ms, t_target(1) {timing.t_target(1) * 1e3:.4g} ms, acceptance "
        f"{workload.acceptance:.3g}, jitter {timing.jitter:g}, delay {timing.delay * 1e3:g} ms; c = {done[-1].window}\n"
        "tokens/s: after a text's first commit; step: a target forward after the prefill; "
        "run: up to a correction or bonus, it included\n"
        f"{unknown}{len(workload.texts)} texts, {workload.tokens} tokens by each method; this took {seconds:.1f} s",
        soft_wrap=True,
    )


def _row(totals: Totals, over_ar: Estimate) -> list[str]:
    accepted, run_length = totals.acceptance_rate, totals.mean_run_length
    return [
        f"{totals.tokens_per_second:.{max(0, over_ar.digits - 1)}f}",  # some ten times as large
        str(over_ar),
        f"{totals.tokens_per_step:.{over_ar.digits}f}",
        "-" if accepted is None else f"{accepted:.3f}",
        "-" if run_length is None else f"{run_length:.2f}",
        f"{sum(totals.target_waits.values()) / totals.whole:.1%}",
        "-" if accepted is None else f"{totals.draft_waits / totals.whole:.1%}",
    ]


def _print_replay(trace: Path | None, record: Recorded, again: Totals) -> None:
    from pearl.lab.experiments.workload import guessers

    share = again.tokens_per_second / record.tokens_per_second
    click.echo(
        f"{trace}: {again.name}: {record.tokens_per_second:.2f} tokens/s as recorded, {again.tokens_per_second:.2f} "
        f"replayed ({share:.3f} of it); {record.known} of {record.workload.tokens} positions had a draft token"
    )
    left_out = guessers(record.decoding) if record.texts is None else []
    if left_out:
        click.echo(
            f"Replayed without {', '.join(left_out)}: the trace does not tell what the draft's rows said, or has two "
            "answers to one prompt."
        )


simulate.add_command(check)
simulate.add_command(front_command)
simulate.add_command(record)
simulate.add_command(rejections_command)
simulate.add_command(stops)
simulate.add_command(sweep)
