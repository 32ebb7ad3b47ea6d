"""`pearl evaluate-draft`: how often a target would accept a draft, without decoding. Arguments and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from pearl.cache import cache_directory
from pearl.cli import listed
from pearl.cli.distill import Bars
from pearl.cli.numbers import named_file
from pearl.lab.distill.prompts import read_prompts
from pearl.models.tokenizers import load_tokenizer
from pearl.text.tokenizer import check_same_vocabulary

if TYPE_CHECKING:
    from pearl.lab.distill.evaluate import Figures

_PATH = click.Path(path_type=Path)


@listed("Make a draft", "pearl evaluate-draft my-draft/draft prompts.jsonl --target my-model")
@click.command("evaluate-draft")
@click.argument("draft")
@click.argument("prompts", nargs=-1, required=True, metavar="[NAME=]FILE...")
@click.option("--target", default="embedded", show_default=True, help="Whose answers they are.")
@click.option("--limit", type=click.IntRange(1), help="Take the first N prompts of each file.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Longest answer.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Answers generated at once.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda:N.")
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", help="auto: as in the checkpoint."
)
@click.option("--answers", type=_PATH, help="Directory where the target's answers are kept.  [default: PEARL's cache]")
@click.option("--png", "png_path", type=_PATH, help="Draw a picture too.")
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
    answers: Path | None,
    png_path: Path | None,
    as_json: bool,
) -> None:
    """How often the target would accept what a draft guesses.

    The target answers the prompts of each FILE (.jsonl with "prompt", "question" or "turns"; or one a line) greedily;
    both models then read the answers. NAME names the file in the table.
    """
    from pearl.lab.distill.evaluate import GreedyAnswers, as_dict, evaluate
    from pearl.lab.distill.plot import plot
    from pearl.lab.distill.teacher import choose_device, load_teacher
    from pearl.models.loading import load_model

    sets = {name: read_prompts(path, limit) for name, path in map(named_file, prompts)}
    where = choose_device(device)
    console = Console(stderr=True, highlight=False)
    teacher = load_teacher(target, where, dtype)
    tokenizer, _ = load_tokenizer(draft)
    check_same_vocabulary(teacher.tokenizer, tokenizer, target, draft)
    model = load_model(draft, device=where, dtype=dtype).eval()
    kept = GreedyAnswers(teacher, answers or cache_directory() / "answers", max_tokens)
    with Bars(console) as bars:
        bars.begin("answering", sum(-(-len(asked) // batch) for asked in sets.values()) * max_tokens)
        found = evaluate(teacher, model, sets, kept, batch=batch, tick=lambda tokens: bars.advance(1))
    if png_path is not None:
        plot(found, f"{draft} for {target}", png_path)
    if as_json:
        click.echo(json.dumps({"target": target, "draft": draft, "max_tokens": max_tokens, "sets": as_dict(found)}))
    else:
        Console(highlight=False).print(_table(found))


def _table(found: dict[str, Figures]) -> Table:
    from pearl.lab.distill.evaluate import TOPS

    table = Table("", *found, box=None, padding=(0, 2, 0, 0))
    rows: dict[str, list[object]] = {
        "tokens": [f"{of.tokens:,}" for of in found.values()],
        "greedy agreement": [_share(of.agreement) for of in found.values()],
        "1 - TV": [_share(of.overlap) for of in found.values()],
        "tokens in repeated 8-grams": [_share(of.repeated) for of in found.values()],
        "greedy agreement without them": [_share(of.agreement_unrepeated) for of in found.values()],
        "1 - TV without them": [_share(of.overlap_unrepeated) for of in found.values()],
    }
    for first in sorted({first for of in found.values() for first in of.by_position}):
        rows[f"agreement from position {first}"] = [
            _share(of.by_position.get(first, (None,))[0]) for of in found.values()
        ]
    for k in TOPS:
        rows[f"wrong: right one in the top {k}"] = [_share(of.correction_in_top[k]) for of in found.values()]
    for name, cells in rows.items():
        table.add_row(name, *map(str, cells))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
