"""`pearl generate`: one prompt in, one text and a summary of its decoding out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import chain

import click
from msgspec import structs
from rich.table import Table
from rich.text import Text

from pearl import __version__
from pearl.cli.commands import example
from pearl.cli.console import SafeConsole, text_input
from pearl.cli.open_engine import connect_option, open_engine
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import Settings
from pearl.engine import Engine, Result, Stream, torchrun
from pearl.errors import ConfigError
from pearl.metrics import FIGURES, brief
from pearl.printable import printable
from pearl.spec.methods import DRAFTLESS
from pearl.spec.rules import find
from pearl.spec.stops import FIXED
from pearl.text.grammar import grammar_of
from pearl.text.reasoning import Splitter, split, splitter_of
from pearl.text.tokenizer import GenerationDefaults


@click.command(
    cls=SettingsCommand,
    epilog=example(
        'pearl generate "Explain the tides to a child." --temperature 0 --max-tokens 100'
    ),
)
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Take the prompt as it is: no chat template.")
@click.option("--stats", is_flag=True, help="Print all figures below the text.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of text and figures."
)
@connect_option
@settings_options()
def generate(
    settings: Settings,
    prompt: str | None,
    raw: bool,
    stats: bool,
    as_json: bool,
    connect: str | None,
) -> None:
    """Generate one text from a prompt.

    Without PROMPT (or with -) the prompt is read from standard input. The text goes to standard output, all else to
    standard error, a model's reasoning too. A chat template of the model is applied; see --raw.
    """
    console = SafeConsole(stderr=True)
    # Before models are loaded. torchrun's other ranks need no prompt.
    text = "" if torchrun.rank() else _prompt(prompt, raw)
    options = settings.options
    grammar_of(options.json_schema, options.regex)
    if connect is None:
        settings.engine.check_options(options)
    with open_engine(settings.engine, console, connect) as engine:
        if engine is None:
            return
        with engine.stream(text, options, raw=raw) as stream:
            is_plain = raw or options.json_schema is not None or options.regex is not None
            splitter = (
                None if is_plain else splitter_of(engine.tokenizer, stream.result.prompt_tokens)
            )
            _print_as_it_comes(stream, splitter, console, quiet=as_json)
            result = stream.result
    if as_json:
        click.echo(json.dumps(_document(settings, engine, result, splitter)))
    else:
        console.print()
        if stats:
            console.print(summary(settings, result, engine.defaults))
        else:
            console.print(Text(brief(result.statistics), "dim"), soft_wrap=True)
        if result.statistics.draft_lost:
            console.print(
                "the draft was lost during the text; the target went on alone", style="yellow"
            )


def _prompt(prompt: str | None, raw: bool) -> str:
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            click.echo("prompt (end with Ctrl-D):", err=True)
        # The engine refuses a prompt with halves of surrogate pairs.
        prompt, raw = text_input("surrogateescape").read(), False
    if not raw and not prompt.strip():  # --raw "" starts from the tokenizer's first token
        raise ConfigError(
            'no prompt: give one as an argument or on standard input, e.g. pearl generate "Hello!"'
        )
    return prompt


def _print_as_it_comes(
    stream: Stream, splitter: Splitter | None, console: SafeConsole, quiet: bool
) -> None:
    """Print the answer to standard output, and what stands before it dimmed to standard error."""
    is_thinking = False
    for text, is_last in chain(((piece.text, False) for piece in stream), [("", True)]):
        thought, answer = ("", text) if splitter is None else splitter.feed(text, is_last)
        if quiet:
            continue
        if thought:
            is_thinking = True
            console.print(thought, style="dim italic", end="", soft_wrap=True)
        if answer:
            if is_thinking:
                console.print("\n")
            is_thinking = False
            # click.echo would strip ANSI codes, but a file must get the model's own text
            sys.stdout.write(printable(answer) if sys.stdout.isatty() else answer)
            sys.stdout.flush()
    if is_thinking:
        console.print()
    if not quiet:
        click.echo()


def _document(
    settings: Settings, engine: Engine, result: Result, splitter: Splitter | None
) -> dict[str, object]:
    """The output of --json. With its settings, all defaults resolved, the prompt's tokens give the same text again."""
    parts = None if splitter is None else split(result.text, splitter.tags, splitter.is_open)
    options = settings.options
    room = engine.context - len(result.prompt_tokens)
    in_use = options.in_use(result.statistics.window).resolved(engine.defaults.sampling)
    in_use = in_use.changed(seed=result.seed, max_tokens=options.max_tokens or room)
    return {
        "text": result.text if parts is None else parts[1],
        "reasoning": None if parts is None else parts[0],
        "tokens": result.tokens,
        "provenance": [p.value for p in result.provenance],
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "logprobs": [structs.asdict(one) for one in result.logprobs]
        if options.logprobs is not None
        else None,
        "statistics": asdict(result.statistics),
        "settings": {
            "engine": engine.config.model_dump(),
            "options": in_use.by_flag(),
        },
        "version": __version__,
    }


def summary(settings: Settings, result: Result, defaults: GenerationDefaults) -> Table:
    """All figures of a finished text."""
    s = result.statistics
    decoding = settings.options.resolved(defaults.sampling)
    rule = find(decoding.rule).label(decoding.temperature)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    window = f", window {decoding.window}" if decoding.method not in DRAFTLESS else ""
    if decoding.draft_stop != FIXED:
        window += f", stopped by {decoding.draft_stop} {s.num_draft_stops} times"
    table.add_row("method", f"{decoding.method}{window}, rule {rule}, seed {result.seed}")
    lengths = f"{s.num_generated_tokens} tokens after a prompt of {s.num_prompt_tokens}"
    table.add_row("text", f"{lengths}, ended by {result.finish_reason}")
    for figure in FIGURES:
        text = figure.text(s)
        if text is not None:
            remark = figure.remark(s)
            table.add_row(figure.name, f"{text} ({remark})" if remark else text)
    if s.expected_rejections is not None:
        odds = (
            f"{s.expected_rejections:.1f} ± {1.96 * (s.expected_rejections_sd or 0):.1f} expected"
        )
        bias = f"; bias {s.bias / s.num_judged_draft_tokens:.3f} per judged token" if s.bias else ""
        table.add_row(
            "rejections", f"{s.num_rejections}, {odds} from the models' distributions{bias}"
        )
    steps = ", ".join(f"{n} {phase}" for phase, n in s.target_steps.items() if n)
    table.add_row("target steps", steps)
    if s.t_draft and s.num_draft_tokens:
        table.add_row(
            "t_draft", f"{s.t_draft * 1e3:.1f} ms; t_target(1) / t_draft = {s.speed_ratio:.2f}"
        )
    for name, measured in (("t_target(n)", s.t_target), ("on all cores", s.t_target_spread)):
        if measured:
            table.add_row(
                name, ", ".join(f"{n}: {t * 1e3:.1f}" for n, t in measured.items()) + " ms"
            )
    waits = ", ".join(
        f"{cause} {t:.2f} s" for cause, t in s.target_wait_seconds.items() if cause != "idle"
    )
    table.add_row("target waited for", waits or "nothing")
    return table
