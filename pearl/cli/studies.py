"""Studies of the theory: `pearl simulate check` and `rejections`.

Arguments and output only: the rows of `pearl.lab.experiments` become a table, and a picture (PNG).
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pearl.cli.tables import Bars, print_columns


@click.command()
@click.option(
    "--tokens", type=click.IntRange(min=20_000), default=20_000, show_default=True, metavar="N", help="Of a simulation."
)
@click.option("--seed", type=int, default=0, metavar="N")
def check(tokens: int, seed: int) -> None:
    """Closed forms against the simulator; exit code 1 where one is missed.

    Theorems 1 and 2 of PEARL and its tokens per step; speculative decoding after Leviathan et al.; and the expected
    number of rejections after Yin et al., with models whose distributions are known.
    """
    from pearl.lab.experiments.checks import CLOSE, Check, checks

    done: list[Check] = []
    with Bars() as bars:
        for one in checks(tokens, seed):
            done.append(one)
            bars.step(f"{one.claim}, {one.setting}: {'pass' if one.passed else 'FAIL'} ({len(done)} done)")
    passed = sum(one.passed for one in done)
    print_columns(
        [
            ("claim", lambda one: one.claim),
            ("setting", lambda one: one.setting),
            ("closed form", lambda one: f"{one.closed:.5g}"),
            ("simulated", lambda one: f"{one.simulated:.5g}"),
            ("difference", lambda one: "-" if one.exact else f"{one.difference:+.2%}"),
            ("", lambda one: "pass" if one.passed else "[red]FAIL[/red]"),
        ],
        done,
        *(f"{one.claim.partition(':')[0]}, {one.setting}: {one.note}" for one in done if one.note),
        f"{passed} of {len(done)} hold: best windows exactly, all else within {CLOSE:.0%}",
        words=2,
    )
    if passed < len(done):
        sys.exit(1)


@click.command()
@click.option("--texts", type=click.IntRange(min=2), default=100, show_default=True, metavar="N", help="By each rule.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N")
@click.option("--png", type=click.Path(path_type=Path), help="A picture: rejections, and the price of fewer.")
def rejections(texts: int, seed: int, png: Path | None) -> None:
    """Rejections and bias of the rules, as theory expects and as the protocol has them.

    On two pairs of Markov chains whose distributions are known (Yin et al. 2024): the ratio rule's expected rejections
    are the sum of the distances between the two models; batch drafts save some of them, but never all; opt trades each
    rejection for as much bias, uno for more.
    """
    from pearl.lab.experiments import plots
    from pearl.lab.experiments import rejections as study

    with Bars() as bars:
        done = list(study.rejections(texts, seed, bars.step))
    limits = {chain.name: study.limit(chain) for chain in study.chains(seed)}
    if png is not None:
        plots.rejections_and_bias(done, limits, study.TOKENS, png)
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
