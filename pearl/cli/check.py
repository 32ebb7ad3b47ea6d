"""`pearl simulate check`: a table of closed forms and what the simulator makes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from pearl.cli.numbers import STDOUT, json_option, table_console, write_json

if TYPE_CHECKING:
    from pearl.lab.experiments.checks import Check


@click.command()
@click.option(
    "--tokens", type=click.IntRange(min=20_000), default=60_000, show_default=True, metavar="N", help="Of a simulation."
)
@click.option("--seed", type=int, default=0, metavar="N")
@json_option
def check(tokens: int, seed: int, to: Path | None) -> None:
    """Closed forms against the simulator; exit code 1 where one is missed.

    Theorems 1 and 2 of PEARL and its tokens a step, also where a share of the rejections is foreseen; speculative
    decoding after Leviathan et al.; and the expected number of rejections after Yin et al., with models whose
    distributions are known.
    """
    from pearl.lab.experiments.checks import checks

    done: list[Check] = []
    with Console(stderr=True, highlight=False).status("simulating") as status:
        for one in checks(tokens, seed):
            done.append(one)
            status.update(f"{one.claim}, {one.setting}")
    if to is not None:
        write_json(to, [one.as_dict() for one in done])
    if to != STDOUT:
        _print(done)
    if not all(one.passed for one in done):
        sys.exit(1)


def _print(done: Sequence[Check]) -> None:
    from pearl.lab.experiments.checks import CLOSE

    table = Table("claim", "setting", box=None, padding=(0, 2, 0, 0))
    for column in ("closed form", "simulated", "difference"):
        table.add_column(column, justify="right")
    table.add_column("")
    for one in done:
        numbers = (f"{one.closed:.5g}", f"{one.simulated:.5g}", "-" if one.exact else f"{one.difference:+.2%}")
        table.add_row(one.claim, one.setting, *numbers, "pass" if one.passed else "[red]FAIL[/red]")
    console = table_console()
    console.print(table, "")
    for one in done:
        if one.note:
            console.print(f"{one.claim.partition(':')[0]}, {one.setting}: {one.note}")
    passed = sum(one.passed for one in done)
    console.print(f"{passed} of {len(done)} hold: best windows exactly, all else within {CLOSE:.0%}")
