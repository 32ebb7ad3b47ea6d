"""Studies of the theory: `pearl simulate check`, `rejections` and `front`.

Arguments and output only: the rows of `pearl.lab.experiments` become JSON, a picture (PNG) and a table.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pearl.cli.numbers import STDOUT, json_option, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.recorded import LocalPair, limit_option, raw_option
from pearl.cli.tables import print_table, progress
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_turns

if TYPE_CHECKING:
    pass

_FRONT_TOKENS = 48  # of a text, without --max-tokens


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
    with progress("checked") as report:
        for one in checks(tokens, seed):
            done.append(one)
            report(f"{one.claim}, {one.setting}: {'pass' if one.passed else 'FAIL'} ({len(done)} done)")
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

    with progress() as report:
        done = list(study.rejections(texts, seed, report))
    limits = {chain.name: study.limit(chain) for chain in study.chains(seed)}
    if to is not None:
        rules = [asdict(one) for one in done]
        write_json(to, {"texts": texts, "tokens": study.TOKENS, "limits": limits, "rules": rules})
    if png is not None:
        plots.rejections_and_bias(done, limits, study.TOKENS, png)
    if to != STDOUT:
        within = sum(one.measured.ties(one.expected) for one in done)
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


@click.command(cls=SettingsCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PROMPTS...")
@limit_option
@raw_option
@click.option("--png", type=click.Path(path_type=Path), help="A picture: rejections against bias.")
@json_option
@settings_options
def front(
    settings: Settings, files: tuple[Path, ...], limit: int | None, raw: bool, png: Path | None, to: Path | None
) -> None:
    """What opt and uno pay in bias for fewer rejections, by epsilon, on a pair of models.

    PROMPTS are files as pearl bench reads them. Both models run in this process, one after the other, and nothing is
    timed; the default temperature is 1. Along texts of the target, bias and rejections of opt add up to one number, the
    distance between the models; in each rule's own texts, which its bias changes, they are measured.
    """
    from pearl.engine.conversation import Conversation
    from pearl.lab.experiments import plots
    from pearl.lab.experiments import rejections as study

    if settings.sampling.temperature == 0:
        raise ConfigError("--temperature 0: greedy decoding has no distribution to be biased; give one above 0")
    tokens = settings.sampling.max_tokens or _FRONT_TOKENS
    pair = LocalPair(settings, temperature=1.0, why="these rules judge what a draft proposes")
    raw = raw or pair.tokenizer.apply_chat([{"role": "user", "content": "."}]) is None
    turns = [each[0] for path in files for each in read_turns(path, limit)]
    prompts = [Conversation(pair.tokenizer, raw).prompt(turn) for turn in turns]
    with progress() as report:
        target, draft = pair.runners()
        most = min(target.context, draft.context) - tokens
        prompts = [prompt for prompt in prompts if len(prompt) <= most]
        if len(prompts) < 2:
            raise ConfigError("it takes two prompts that fit the context with their texts, for an interval")
        done = list(study.front(target, draft, prompts, tokens, pair.sampling, report))
    if to is not None:
        write_json(to, {"texts": len(prompts), "tokens": tokens, "rules": [asdict(one) for one in done]})
    if png is not None:
        plots.prices(done, png)
    if to != STDOUT:
        columns = ("target's texts:\nrejections", "\nbias", "\nboth")
        print_table(
            ("rule", *columns, "own texts:\nrejections, 95%", "\nforetold", "\nbias, 95%"),
            [
                (
                    f"{one.rule} (not exact), epsilon {one.epsilon:g}",
                    *(f"{value:.3f}" for value in (one.expected, one.bias, one.expected + one.bias)),
                    str(one.measured),
                    f"{one.foretold:.3f} ± {one.margin:.3f}",
                    str(one.measured_bias),
                )
                for one in done
            ],
            f"{sum(one.is_as_foretold for one in done)} of {len(done)} counts of rejections are within 1.96 standard "
            "deviations of what the distributions along the same texts foretell",
            f"{len(prompts)} texts of {tokens} tokens by each rule; per token; opt with epsilon 0 is ratio, and exact",
        )
