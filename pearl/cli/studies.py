"""Studies of the theory: `pearl simulate check` and `rejections`.

Arguments and output only: the rows of `pearl.lab.experiments` become JSON, a picture (PNG) and a table.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from pearl.cli.numbers import STDOUT, json_option, write_json
from pearl.cli.tables import Bars, print_table


@click.command()
@click.option(
    "--tokens", type=click.IntRange(min=20_000), default=20_000, show_default=True, metavar="N", help="Of a simulation."
)
@click.option("--seed", type=int, default=0, metavar="N")
@json_option
def check(tokens: int, seed: int, to: Path | None) -> None:
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
    if to is not None:
        write_json(to, [one.as_dict() for one in done])
    if to != STDOUT:
        notes = [f"{one.claim.partition(':')[0]}, {one.setting}: {one.note}" for one in done if one.note]
        passed = sum(one.passed for one in done)
        print_table(
            ("claim", "setting", "closed form", "simulated", "difference", ""),
            [
                (
                    one.claim,
                    one.setting,
                    f"{one.closed:.5g}",
                    f"{one.simulated:.5g}",
                    "-" if one.exact else f"{one.difference:+.2%}",
                    "pass" if one.passed else "[red]FAIL[/red]",
                )
                for one in done
            ],
            *notes,
            f"{passed} of {len(done)} hold: best windows exactly, all else within {CLOSE:.0%}",
            words=2,
        )
    if not all(one.passed for one in done):
        sys.exit(1)


@click.command()
@click.option("--texts", type=click.IntRange(min=2), default=100, show_default=True, metavar="N", help="By each rule.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N")
@click.option("--png", type=click.Path(path_type=Path), help="A picture: rejections, and the price of fewer.")
@json_option
def rejections(texts: int, seed: int, png: Path | None, to: Path | None) -> None:
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
    if to is not None:
        rules = [asdict(one) for one in done]
        write_json(to, {"texts": texts, "tokens": study.TOKENS, "limits": limits, "rules": rules})
    if png is not None:
        plots.rejections_and_bias(done, limits, study.TOKENS, png)
    if to != STDOUT:
        within = sum(one.measured.low <= one.expected <= one.measured.high for one in done)
        print_table(
            ("", "rule", "rejections\nexpected", "\nmeasured, 95%", "bias\nexpected", "\nmeasured, 95%"),
            [
                (
                    one.chain,
                    one.label,
                    f"{one.expected:.2f}",
                    str(one.measured),
                    f"{one.bias:.2f}",
                    str(one.measured_bias),
                )
                for one in done
            ],
            *(f"{name}: with any number of candidates batch expects {n:.2f} rejections" for name, n in limits.items()),
            f"{within} of {len(done)} intervals contain the expected value",
            f"{texts} texts of {study.TOKENS} tokens by each rule",
            "per text; bias: summed distances of what was committed from the target's distribution",
            words=2,
        )
