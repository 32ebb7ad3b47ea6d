"""`pearl simulate rejections`: arguments and output only."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pearl.cli.numbers import STDOUT, json_option, write_json
from pearl.cli.tables import Bars, print_columns


@click.command()
@click.option("--texts", type=click.IntRange(min=2), default=100, show_default=True, metavar="N", help="By each rule.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N")
@json_option
def rejections(texts: int, seed: int, to: Path | None) -> None:
    """Rejections and bias of the rules, as theory expects and as the protocol has them.

    On two pairs of Markov chains whose distributions are known (Yin et al. 2024): the ratio rule's expected rejections
    are the sum of the distances between the two models; batch drafts save some of them, but never all; opt trades each
    rejection for as much bias, uno for more.
    """
    from pearl.lab.experiments import rejections as study

    with Bars() as bars:
        done = list(study.rejections(texts, seed, bars.step))
    limits = {chain.name: study.limit(chain) for chain in study.chains(seed)}
    if to is not None:
        rules = [asdict(one) for one in done]
        write_json(to, {"texts": texts, "tokens": study.TOKENS, "limits": limits, "rules": rules})
    if to != STDOUT:
        within = sum(one.measured.low <= one.expected <= one.measured.high for one in done)
        print_columns(
            [
                ("", lambda one: one.chain),
                ("rule", lambda one: one.label),
                ("rejections\nexpected", lambda one: f"{one.expected:.2f}"),
                ("\nmeasured, 95%", lambda one: str(one.measured)),
                ("bias\nexpected", lambda one: f"{one.bias:.2f}"),
                ("\nmeasured, 95%", lambda one: str(one.measured_bias)),
            ],
            done,
            *(f"{name}: with any number of candidates batch expects {n:.2f} rejections" for name, n in limits.items()),
            f"{within} of {len(done)} intervals contain the expected value",
            f"{texts} texts of {study.TOKENS} tokens by each rule",
            "per text; bias: summed distances of what was committed from the target's distribution",
            words=2,
        )
