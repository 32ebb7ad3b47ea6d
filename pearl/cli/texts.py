"""What comes of recorded texts: the second table of `pearl simulate --texts`, that of `pearl bench paper --texts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pearl.cli.console import SafeConsole
from pearl.cli.distill import Bars
from pearl.cli.numbers import STDOUT, table_console, write_json
from pearl.drafting.datastore import Datastore
from pearl.lab.bench.machine import Conditions
from pearl.lab.experiments.estimate import speedup
from pearl.lab.papers.pearl import Pair

if TYPE_CHECKING:
    from pearl.lab.experiments.workload import Totals, Workload
    from pearl.lab.papers.replayed import Replayed
    from pearl.models.recorded import Header, RecordedTexts

_DRAFTED = ("model", "lookup", "branch")  # who drafted a token, as statistics name them


def ablations(recorded: RecordedTexts, workload: Workload, directory: Path | None = None) -> list[Totals]:
    """`directory`: of a datastore."""
    from pearl.lab.experiments import texts
    from pearl.lab.experiments.workload import Totals

    done = list[Totals]()
    store = Datastore(directory, recorded.header.vocab_size, verified=True) if directory is not None else None
    with Console(stderr=True, highlight=False).status("simulating") as status:
        for one in texts.compare(recorded, workload.timing, workload.seed, store):
            done.append(one)
            status.update(f"{one.name} is done")
    return done


def print_ablations(done: Sequence[Totals], plain: Totals) -> None:
    """`plain`: of `ar`; the first of `done` is `pearl` as published."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    drafted = ",\n".join(_DRAFTED)
    columns = ("tokens/s", "over ar, 95%", "over published", "tokens\na step", "fore-\nseen", f"accepted:\n{drafted}")
    by = sorted({name for totals in done for name in totals.guessed}, reverse=True)
    guessed = ",\n".join(by)
    for column in (*columns, f"guessed:\n{guessed}"):
        table.add_column(column, justify="right")
    for totals in done:
        table.add_row(totals.name, *_row(totals, plain, done[0], by))
    console = table_console()
    console.print("", table)
    console.print(
        "foreseen: share of the rejections (of ssd: and bonus tokens) for whose outcome a branch was there; "
        "accepted: tokens by who drafted them; guessed: tokens by who guessed them for the target",
        soft_wrap=True,
    )


def _row(totals: Totals, plain: Totals, published: Totals, guessers: Sequence[str]) -> list[str]:
    over_ar, foreseen = speedup(totals, plain, 1), totals.foreseen_share
    drafted = ", ".join(str(totals.sources.get(name, 0)) for name in _DRAFTED)
    return [
        f"{totals.tokens_per_second:.{max(0, over_ar.digits - 1)}f}",
        str(over_ar),
        str(speedup(totals, published, 1)),
        f"{totals.tokens_per_step:.{over_ar.digits}f}",
        "-" if not foreseen else f"{foreseen:.1%}",
        drafted if totals.accepted else "-",
        ", ".join(str(totals.guessed.get(name, 0)) for name in guessers) if totals.guessed else "-",
    ]


def replay_pairs(
    pairs: Sequence[Pair], file: Path, *, run: int, tokens: int, seed: int, parts: bool, to: Path | None
) -> None:
    """Prints each pair with each method, or writes it to `to`; see `replayed`."""
    from pearl.lab.papers.replayed import Replayed, replayed
    from pearl.models.recorded import read_texts

    conditions, done = Conditions(), list[Replayed]()
    with Bars(SafeConsole(stderr=True)) as bars:
        for pair in pairs:
            bars.say(pair.name)
            done += replayed(pair, file, bars, seed=seed, run=run, tokens=tokens, parts=parts)
    conditions.stop()
    if to is not None:
        settings = {
            "tokens": tokens,
            "run": run,
            "seed": seed,
            "parts": parts,
            "texts": read_texts(file).header.model_dump(),
        }
        about = {"kind": "replayed", "emulated": True, "settings": settings}
        write_json(to, about | conditions.as_dict() | {"pairs": [asdict(one) for one in done]})
    if to != STDOUT:
        _print_pairs(done, read_texts(file).header, file, str(conditions))


def _print_pairs(done: Sequence[Replayed], said: Header, file: Path, end: str) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("pair", no_wrap=True)
    table.add_column("method", no_wrap=True)
    columns = ("simulator:\nover ar", "over pub-\nlished", "tokens\na step", "fore-\nseen")
    for column in (*columns, "runtime:\nover ar", "over pub-\nlished", "of simulated"):
        table.add_column(column, justify="right")
    for one in done:
        ratios = (one.simulated, one.simulated_gain, one.tokens_per_step)
        runtime = ("-" if value is None else f"{value:.2f}" for value in (one.runtime, one.runtime_gain))
        share = "{:.3f} ({:.3f}-{:.3f})".format(*one.of_simulated) if one.of_simulated else ""
        foreseen = f"{one.foreseen:.1%}" if one.foreseen else "-"
        table.add_row(one.pair, one.method, *(f"{value:.2f}" for value in ratios), foreseen, *runtime, share)
    console = table_console()
    console.print(table)
    console.print(
        f"\nEMULATION: texts of {said.target} and {said.draft} ({file}; temperature {said.temperature:g}, vocabulary "
        f"{said.vocab_size}) at these pairs' speeds; a forward lasts as long whatever it is fed.\n{end}",
        soft_wrap=True,
    )
