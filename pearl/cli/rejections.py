"""`pearl simulate rejections`: a table and a picture of how often rules reject, and of what relaxed ones cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from pearl.cli.numbers import STDOUT, json_option, table_console, write_json

if TYPE_CHECKING:
    from pearl.lab.experiments.rejections import Rejections


@click.command(name="rejections")
@click.option("--texts", type=click.IntRange(min=2), default=100, show_default=True, metavar="N", help="By each rule.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N")
@click.option("--png", type=click.Path(path_type=Path), help="A picture: rejections, and the price of fewer.")
@json_option
def rejections_command(texts: int, seed: int, png: Path | None, to: Path | None) -> None:
    """Rejections and bias of the rules, as theory expects and as the protocol has them.

    On two pairs of Markov chains whose distributions are known (Yin et al. 2024): the ratio rule's expected rejections
    are the sum of the distances between the two models; batch drafts save some of these, and no number of them all; opt
    pays for each rejection less with as much bias, uno with more.
    """
    from pearl.lab.experiments.plots import rejections_and_bias
    from pearl.lab.experiments.rejections import TOKENS, chains, limit, rejections

    with Console(stderr=True, highlight=False).status("simulating") as status:
        done = list(rejections(texts, seed, status.update))
    limits = {chain.name: limit(chain) for chain in chains(seed)}
    if to is not None:
        write_json(to, {"texts": texts, "tokens": TOKENS, "limits": limits, "rules": [one.as_dict() for one in done]})
    if png is not None:
        rejections_and_bias(done, limits, TOKENS, png)
    if to != STDOUT:
        _print(done, limits, texts)


def _print(done: Sequence[Rejections], limits: dict[str, float], texts: int) -> None:
    from pearl.lab.experiments.rejections import TOKENS

    table = Table("", "rule", box=None, padding=(0, 2, 0, 0))
    for column in ("rejections\nexpected", "\nmeasured, 95%", "bias\nexpected", "\nmeasured, 95%"):
        table.add_column(column, justify="right")
    for one in done:
        counted = (f"{one.expected:.2f}", str(one.measured), f"{one.bias:.2f}", str(one.measured_bias))
        table.add_row(one.chain, one.label, *counted)
    console = table_console()
    console.print(table, "")
    for name, least in limits.items():
        console.print(f"{name}: with any number of candidates batch expects {least:.2f} rejections")
    within = [one.measured.ties(one.expected) for one in done]
    console.print(
        f"{sum(within)} of {len(within)} intervals hold what is expected",
        f"{texts} texts of {TOKENS} tokens by each rule",
        "rejections and bias: of a text; bias: summed distances of what was committed from the target's distribution",
        sep="\n",
    )
