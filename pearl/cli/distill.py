"""`pearl distill` makes a draft, and `pearl disco train` a classifier for stop policy disco.

This file has arguments and output only.
"""

import logging
from pathlib import Path
from typing import Any

import click

from pearl.cli.commands import example
from pearl.cli.console import Bars
from pearl.cli.options import SettingsCommand, field_options, of_field, settings_options
from pearl.cli.prompt_sets import output_option
from pearl.config import OPTION_NAMES, Settings
from pearl.errors import ConfigError
from pearl.lab.distill.config import DistillConfig, load_config
from pearl.lab.distill.prompts import read_turns

_MILLISECONDS = click.FloatRange(0, 1e6, min_open=True)
_TOKENS = 128  # of an answer, without --max-tokens


@click.command(epilog=example("pearl distill --target my-model --out my-draft"))
@click.option(
    "--resume", is_flag=True, help="Go on with the run in --out, from its last checkpoint."
)
@click.option(
    "--answers-only",
    is_flag=True,
    help="Only answer: write OUT/answers.jsonl, as for `pearl datastore build`.",
)
@field_options(
    {name: of_field(field) for name, field in DistillConfig.model_fields.items()},
    "YAML file of these settings; see configs/distill/embedded.yaml.",
)
def distill(config: Path | None, resume: bool, answers_only: bool, **flags: Any) -> None:
    """Make a draft for a target, out of the target's own answers.

    The target answers prompts, which it invents itself or which you give. The draft learns the
    target's distribution on these answers. --resume continues a killed run from its last
    checkpoint. After a run with --answers-only, --resume begins the training. The draft is
    OUT/draft, an ordinary checkpoint; with --head it is OUT/head, which other commands take as
    --head.
    """
    from pearl.lab.distill.run import Distillation

    settings = {name: value for name, value in flags.items() if value not in (None, ())}
    logging.basicConfig(level="WARNING")
    with Bars() as bars:
        distillation = Distillation(load_config(config, settings), bars, resume=resume)
        path = distillation.answer() if answers_only else distillation.run()
    click.echo(path)


@click.group(epilog=example("pearl disco train prompts.jsonl --out pair.disco"))
def disco() -> None:
    """Train the classifier that tells a draft where to stop.

    A classifier is for one pair, and is used by --draft-stop disco. pearl paper disco compares all
    policies.
    """


@disco.command(cls=SettingsCommand)
@click.argument("prompts", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_option("--out", required=True, metavar="FILE", help="To write.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Prompts of each file.  [default: all]"
)
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@click.option(
    "--t-draft",
    type=_MILLISECONDS,
    default=10,
    show_default=True,
    metavar="MS",
    help="A draft forward.",
)
@click.option(
    "--t-target",
    type=_MILLISECONDS,
    default=50,
    show_default=True,
    metavar="MS",
    help="A target forward.",
)
@settings_options(
    {"max_tokens": str(_TOKENS), "seed": "0"},
    unread={"trace", *OPTION_NAMES} - {"max_tokens", "seed"},
    instead="pearl disco train records greedy answers, and reads no such setting",
)
def train(
    settings: Settings,
    prompts: tuple[Path, ...],
    out: Path,
    limit: int | None,
    raw: bool,
    t_draft: float,
    t_target: float,
) -> None:
    """Train a classifier on answers of the target to PROMPTS, files as pearl bench reads them.

    Each token of the greedy answers is an example: the shape of the draft's distribution, and
    whether the draft's likeliest token is the target's. Every fourth text is held out of training.
    On these texts the command chooses the confidence at which drafting ends, and the longest
    window: it takes the values with which method sd is fastest, if a draft forward lasts --t-draft
    and a target forward --t-target.
    """
    from pearl.lab.studies import stops
    from pearl.lab.studies.recorded_texts import record_pair
    from pearl.lab.studies.simulate import timing_of

    if not settings.engine.has_draft:
        raise ConfigError("--draft none: a recording has the draft's tokens")
    conversations = []
    for path in prompts:
        conversations += read_turns(path, limit)
    tokens = settings.options.max_tokens or _TOKENS
    seed = settings.options.seed or 0
    with Bars() as bars:
        bars.begin("recording", None)
        recorded = record_pair(settings.engine, conversations, tokens, raw=raw, tick=bars.step)
        training = stops.train(recorded, timing_of(t_draft, t_target), seed, bars.step)
    classifier = training.classifier
    classifier.write(out)
    ratio = training.static.speed / training.best.speed
    click.echo(
        f"{out}: for {classifier.draft} and {classifier.target}; trained on "
        f"{classifier.examples} tokens, {classifier.accepted:.1%} of them accepted\n"
        f"on {training.held_out} held-out tokens it is right about {training.accuracy:.1%} "
        f"(the more frequent answer: {training.base:.1%})\n"
        f"drafting ends at a confidence of {classifier.threshold:.3f}, or after {classifier.cap} "
        f"tokens: there sd takes {ratio:.3f} of the time that it takes with the best static "
        f"window, {training.static.window}"
    )
