"""`pearl simulate front`: a table and a picture of what opt and uno pay for fewer rejections on a pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from pearl.cli.console import SafeConsole
from pearl.cli.numbers import STDOUT, json_option, table_console, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_turns
from pearl.models.tokenizers import load_tokenizer
from pearl.text.tokenizer import check_same_vocabulary

if TYPE_CHECKING:
    from pearl.lab.experiments.front import Price

_TOKENS = 48  # of a text, where --max-tokens does not say


@click.command(name="front", cls=SettingsCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PROMPTS...")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts of each file.  [default: all]")
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@click.option("--png", type=click.Path(path_type=Path), help="A picture: rejections against bias.")
@json_option
@settings_options
def front_command(
    settings: Settings, files: tuple[Path, ...], limit: int | None, raw: bool, png: Path | None, to: Path | None
) -> None:
    """What opt and uno pay in bias for fewer rejections, by epsilon, on a pair of models.

    PROMPTS are files as pearl bench reads them. Both models run in this process, one after the other, and nothing is
    timed; temperature 1 unless --temperature says otherwise. Along texts that the target might have written bias and
    rejections of opt add up to one number, the distance between the models; in the rules' own texts, which the bias
    leads elsewhere, they are measured.
    """
    from pearl.engine.conversation import Conversation
    from pearl.engine.request import resolve_sampling
    from pearl.lab.experiments.front import front
    from pearl.lab.experiments.plots import prices
    from pearl.worker.build import make_runner, place

    config = settings.engine
    if not config.has_draft:
        raise ConfigError("--draft none: these rules judge what a draft proposes")
    given = settings.sampling
    if given.temperature == 0:
        raise ConfigError("--temperature 0: greedy decoding has no distribution to be biased; give one above 0")
    turns = [each[0] for path in files for each in read_turns(path, limit)]
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    theirs, _ = load_tokenizer(config.draft, trust_remote_code=config.trust_remote_code)
    check_same_vocabulary(tokenizer, theirs, config.target, config.draft)
    asked = {"temperature": given.temperature or 1.0, "seed": given.seed or 0, "repetition_penalty": 1.0}
    sampling = resolve_sampling(given.model_copy(update=asked), defaults, 0).changed(shaping=None)
    tokens = given.max_tokens or _TOKENS
    raw = raw or tokenizer.apply_chat([{"role": "user", "content": "."}]) is None
    prompts = [Conversation(tokenizer, raw).prompt(turn) for turn in turns]
    with SafeConsole(stderr=True).status("loading the models") as status:
        target, draft = (make_runner(config.model(role), place(config, role)) for role in config.roles)
        most = min(target.context, draft.context) - tokens
        prompts = [prompt for prompt in prompts if len(prompt) <= most]
        if len(prompts) < 2:
            raise ConfigError("it takes two prompts that fit the context with their texts, for an interval")
        done = list(front(target, draft, prompts, tokens, sampling, status.update))
    if to is not None:
        write_json(to, {"texts": len(prompts), "tokens": tokens, "rules": [one.as_dict() for one in done]})
    if png is not None:
        prices(done, png)
    if to != STDOUT:
        _print(done, len(prompts), tokens)


def _print(done: Sequence[Price], texts: int, tokens: int) -> None:
    table = Table("rule", box=None, padding=(0, 2, 0, 0))
    for column in (
        "target's texts:\nrejections",
        "\nbias",
        "\nboth",
        "own texts:\nrejections, 95%",
        "\nforetold",
        "\nbias, 95%",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for one in done:
        cells = [f"{one.expected:.3f}", f"{one.bias:.3f}", f"{one.expected + one.bias:.3f}"]
        cells += [str(one.measured), f"{one.foretold:.3f} ± {one.margin:.3f}", str(one.measured_bias)]
        table.add_row(f"{one.rule} (not exact), epsilon {one.epsilon:g}", *cells)
    console = table_console()
    console.print(table, "")
    console.print(
        f"of {len(done)} counts of rejections {sum(one.is_as_foretold for one in done)} are within 1.96 standard "
        "deviations of what the distributions along the same texts foretell",
        f"{texts} texts of {tokens} tokens by each rule; all figures a token; opt with epsilon 0 is ratio, and exact",
        sep="\n",
        soft_wrap=True,
    )
