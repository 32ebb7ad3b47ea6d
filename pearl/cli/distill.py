"""`pearl distill`: make a draft. Arguments and output only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from pearl.cli import listed
from pearl.cli.options import field_options
from pearl.cli.tables import Bars
from pearl.lab.distill.config import DistillConfig, load_config


@listed("Make a draft", "pearl distill --target my-model --out my-draft")
@click.command()
@click.option("--resume", is_flag=True, help="Go on with the run in --out, from its last checkpoint.")
@click.option(
    "--answers-only", is_flag=True, help="Only answer: write OUT/answers.jsonl, as for `pearl datastore build`."
)
@field_options(DistillConfig.model_fields, "YAML file of these settings; see configs/distill/embedded.yaml.")
def distill(config: Path | None, resume: bool, answers_only: bool, **given: Any) -> None:
    """Make a draft for a target, out of the target's own answers.

    The target answers prompts, which it invents itself or which you give; the draft learns the target's distribution
    on them. --resume continues a killed run from its last checkpoint, or goes on to learn after --answers-only. The
    draft is OUT/draft, an ordinary checkpoint; with --head it is OUT/head, a head for --head of other commands.
    """
    from pearl.lab.distill.run import Distillation

    settings = load_config(config, {name: value for name, value in given.items() if value not in (None, ())})
    logging.basicConfig(level="WARNING")
    with Bars() as bars:
        distillation = Distillation(settings, bars, resume=resume)
        made = distillation.answer() if answers_only else distillation.run()
    click.echo(made)
