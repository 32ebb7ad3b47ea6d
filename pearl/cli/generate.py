"""`pearl generate`: one prompt in, one text out, and a summary of how it came about."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click
from rich.table import Table

from pearl import __version__
from pearl.cli.launch import connect_option, running
from pearl.cli.options import settings_options
from pearl.cli.terminal import SafeConsole
from pearl.config import Settings
from pearl.decoding.registry import find
from pearl.engine import Result, Stream, torchrun
from pearl.errors import ConfigError
from pearl.printable import printable


@click.command()
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Take the prompt as it is: no chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text and summary.")
@connect_option
@settings_options
def generate(settings: Settings, prompt: str | None, raw: bool, as_json: bool, connect: str | None) -> None:
    """Generate one text from a prompt.

    PROMPT is read from standard input where it is left out (or is -). The text goes to standard output, all else to
    standard error. Where the model has a chat template it is applied; see --raw.
    """
    console = SafeConsole(stderr=True)
    text = "" if torchrun.rank() else _prompt(prompt)  # before any work; torchrun's other rank needs none
    if connect is None:
        settings.engine.check_method(settings.decoding.method)
    with running(settings.engine, console, connect) as engine:
        if engine is None:
            return
        with engine.stream(text, settings.sampling, decoding=settings.decoding, raw=raw) as stream:
            _follow(stream, quiet=as_json)
            result = stream.result
    if as_json:
        click.echo(json.dumps(_document(settings, result), ensure_ascii=False))
    else:
        console.print(summary(settings, result))


def _prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        click.echo("prompt (end with Ctrl-D):", err=True)
    text = sys.stdin.read()
    if not text.strip():
        raise ConfigError('no prompt: give one as an argument or on standard input, e.g. pearl generate "Hello!"')
    return text


def _follow(stream: Stream, quiet: bool) -> None:
    for piece in stream:
        if not quiet:
            # Not by click, which takes colours out of what goes to a file: there the text is to be the model's own.
            sys.stdout.write(printable(piece.text) if sys.stdout.isatty() else piece.text)
            sys.stdout.flush()
    if not quiet:
        click.echo()


def _document(settings: Settings, result: Result) -> dict[str, object]:
    return {
        "text": result.text,
        "tokens": result.tokens,
        "provenance": [p.value for p in result.provenance],
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "statistics": asdict(result.statistics),
        "settings": {
            "engine": settings.engine.model_dump(),
            "decoding": settings.decoding.model_dump(),
            "sampling": settings.sampling.model_dump(),
        },
        "version": __version__,
    }


def summary(settings: Settings, result: Result) -> Table:
    """What a user wants to know of a finished text."""
    s, decoding = result.statistics, settings.decoding
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    window = f", window {decoding.window}" if decoding.method != "ar" else ""
    table.add_row("method", f"{decoding.method}{window}, rule {find(decoding.rule).label}, seed {result.seed}")
    rate = f"{s.tokens_per_second:.1f} tokens/s" if s.tokens_per_second else "too short for a rate"
    table.add_row("text", f"{s.num_generated_tokens} tokens, ended by {result.finish_reason}; {rate} after the first")
    table.add_row(
        "first token", f"{s.seconds_to_first_token * 1e3:.0f} ms for a prompt of {s.num_prompt_tokens} tokens"
    )
    if s.draft_acceptance_rate is not None:
        length = f"{s.mean_acceptance_length:.2f}" if s.mean_acceptance_length else "-"
        table.add_row(
            "acceptance",
            f"{s.draft_acceptance_rate:.2f} of {s.num_judged_draft_tokens} judged draft tokens; "
            f"mean run {length} tokens, its correction included",
        )
    steps = ", ".join(f"{n} {phase}" for phase, n in s.target_steps.items() if n)
    table.add_row("target steps", steps)
    if s.t_draft and s.num_draft_tokens:
        table.add_row("window", f"c = {s.window}; t_target(1) / t_draft = {s.speed_ratio:.2f}")
        table.add_row("t_draft", f"{s.t_draft * 1e3:.1f} ms")
    times = ", ".join(f"{n}: {t * 1e3:.1f}" for n, t in s.t_target.items())
    table.add_row("t_target(n)", f"{times} ms")
    waits = ", ".join(f"{cause} {t:.2f} s" for cause, t in s.target_wait_seconds.items() if cause != "idle")
    table.add_row("target waited", waits or "never")
    if s.draft_lost:
        table.add_row("draft", "lost on the way; the target went on alone")
    return table
