"""`pearl distill` and `pearl evaluate-draft`: make a draft, and judge one. Arguments and a table."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pearl.cli import listed
from pearl.cli.numbers import named_file
from pearl.cli.options import field_options
from pearl.cli.tables import Bars, print_table
from pearl.lab.distill.config import DistillConfig, load_config
from pearl.lab.distill.prompts import read_prompts

if TYPE_CHECKING:
    from pearl.lab.distill.evaluate import Figures

_COUNT = click.IntRange(1)


def _config_options(command: Callable[..., Any]) -> Any:
    """Add --config and a flag for every field to a command, which gets them as `config: DistillConfig`."""

    @functools.wraps(command)
    def wrapped(config: Path | None, **given: Any) -> Any:
        fields = {name: given.pop(name) for name in DistillConfig.model_fields}
        return command(config=load_config(config, {k: v for k, v in fields.items() if v not in (None, ())}), **given)

    about = "YAML file of these settings; see configs/distill/embedded.yaml."
    return field_options(DistillConfig.model_fields, about)(wrapped)


@listed("Make a draft", "pearl distill --target my-model --out my-draft")
@click.command()
@click.option("--resume", is_flag=True, help="Go on with the run in --out, from its last checkpoint.")
@click.option(
    "--answers-only", is_flag=True, help="Only answer: write OUT/answers.jsonl, as for `pearl datastore build`."
)
@_config_options
def distill(config: DistillConfig, resume: bool, answers_only: bool) -> None:
    """Make a draft for a target, out of the target's own answers.

    The target answers prompts, which it invents itself or which you give; the draft learns the target's distribution
    on them. --resume continues a killed run from its last checkpoint, or goes on to learn after --answers-only. The
    draft is OUT/draft, an ordinary checkpoint; with --head it is OUT/head, a head for --head of other commands.
    """
    from pearl.lab.distill.run import Distillation

    logging.basicConfig(level="WARNING")
    with Bars() as bars:
        distillation = Distillation(config, bars, resume=resume)
        made = distillation.answer() if answers_only else distillation.run()
    click.echo(made)


@listed("Make a draft", "pearl evaluate-draft my-draft/draft prompts.jsonl --target my-model")
@click.command("evaluate-draft")
@click.argument("draft")
@click.argument("prompts", nargs=-1, required=True, metavar="[NAME=]FILE...")
@click.option("--target", default="embedded", show_default=True, help="Whose answers they are.")
@click.option("--limit", type=_COUNT, help="Take the first N prompts of each file.")
@click.option("--max-tokens", type=_COUNT, default=256, show_default=True, help="Longest answer.")
@click.option("--batch", type=_COUNT, default=32, show_default=True, help="Answers generated at once.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda:N.")
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", help="auto: as in the checkpoint."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate_draft(
    draft: str,
    prompts: tuple[str, ...],
    target: str,
    limit: int | None,
    max_tokens: int,
    batch: int,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """How often the target would accept what a draft guesses.

    The target answers the prompts of each FILE (.jsonl with "prompt", "question" or "turns"; or one a line) greedily;
    both models then read the answers. NAME names the file in the table.
    """
    from pearl.lab.distill.evaluate import evaluate
    from pearl.lab.distill.teacher import choose_device, load_teacher
    from pearl.models.checkpoints.loading import load_model
    from pearl.models.checkpoints.tokenizers import load_tokenizer
    from pearl.text.tokenizer import check_same_vocabulary

    asked = {name: read_prompts(path, limit) for name, path in map(named_file, prompts)}
    where = choose_device(device)
    teacher = load_teacher(target, where, dtype)
    check_same_vocabulary(teacher.tokenizer, load_tokenizer(draft)[0], target, draft)
    model = load_model(draft, device=where, dtype=dtype).eval()
    with Bars() as bars:
        bars.begin("answering", sum(map(len, asked.values())))
        found = evaluate(teacher, model, asked, limit=max_tokens, batch=batch, tick=bars.advance)
    if as_json:
        click.echo(json.dumps({"target": target, "draft": draft, "max_tokens": max_tokens, "sets": found}))
    else:
        _print(found)


def _print(found: dict[str, Figures]) -> None:
    rows = {
        "greedy agreement": "agreement",
        "1 - TV": "overlap",
        "tokens in repeated 8-grams": "repeated",
        "greedy agreement without them": "agreement_unrepeated",
        "1 - TV without them": "overlap_unrepeated",
    }
    shares = [
        (label, *("-" if of[name] is None else f"{of[name]:.3f}" for of in found.values()))
        for label, name in rows.items()
    ]
    print_table(("", *found), [("tokens", *(f"{of['tokens']:,}" for of in found.values())), *shares])
