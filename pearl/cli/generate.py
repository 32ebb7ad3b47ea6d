"""`pearl generate`: decodes one prompt, and prints the text with a summary of its decoding."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import click
from msgspec import structs
from rich.text import Text

from pearl import __version__
from pearl.cli.commands import example
from pearl.cli.console import SafeConsole, pair_table, text_input, write_text
from pearl.cli.open_engine import connect_option, open_engine
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import RequestOptions, Settings
from pearl.config.option_names import by_flag
from pearl.engine import Engine, Result, Stream, torchrun
from pearl.engine.request import prompt_for
from pearl.errors import ConfigError
from pearl.metrics import FIGURES, Statistics, brief
from pearl.spec.methods import DRAFTLESS
from pearl.spec.rules import find
from pearl.spec.stops import FIXED
from pearl.text.grammar import grammar_of
from pearl.text.reasoning import tags_after
from pearl.text.reply import Delta, ReplyParser, reasoning_parser
from pearl.text.tokenizer import GenerationDefaults

_NORMAL_95 = 1.96  # standard deviations: half of a 95% interval


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

    Without PROMPT (or with -) the prompt is read from standard input. The text goes to standard
    output. All else goes to standard error, even a model's reasoning. If the model has a chat
    template, the prompt is put into it, unless --raw is given.
    """
    console = SafeConsole(stderr=True)
    # Read the prompt before models are loaded. torchrun's other ranks need none.
    text = "" if torchrun.rank() else read_prompt(prompt, raw)
    options = settings.options
    grammar_of(options.json_schema, options.regex)
    if connect is None:
        settings.engine.check_options(options)
    with open_engine(settings.engine, console, connect) as engine:
        tokens = prompt_for(engine.tokenizer, engine.encode(text, raw=raw), options)
        tags = None
        if not raw:
            tags = tags_after(engine.tokenizer, tokens, options.has_grammar)
        shown = () if tags is None else tags.tokens
        with engine.stream(tokens, options, show=shown) as stream:
            parser = None
            if tags is not None:
                parser = reasoning_parser(engine.tokenizer, tokens)
            reply = Delta()
            if as_json:
                for delta in _deltas(stream, parser):
                    reply += delta
            else:
                _print_as_it_comes(stream, parser, console)
            result = stream.result
    if as_json:
        reasoning = None if parser is None else reply.reasoning
        click.echo(json.dumps(_document(settings, engine, result, reply.content, reasoning)))
        return
    console.print()
    if stats:
        console.print(pair_table(_summary(settings, result, engine.defaults)))
    else:
        console.print(Text(brief(result.statistics), "dim"), soft_wrap=True)
    if result.statistics.draft_lost:
        warning = "the draft was lost during the text; the target went on alone"
        console.print(warning, style="yellow")


def read_prompt(prompt: str | None, raw: bool) -> str:
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            click.echo("prompt (end with Ctrl-D):", err=True)
        # Invalid bytes become lone surrogates; the engine refuses a prompt that has any.
        prompt = text_input("surrogateescape").read()
        raw = False
    if not raw and not prompt.strip():  # --raw "" starts from the tokenizer's first token
        raise ConfigError(
            'no prompt: give one as an argument or on standard input, e.g. pearl generate "Hello!"'
        )
    return prompt


def _print_as_it_comes(stream: Stream, parser: ReplyParser | None, console: SafeConsole) -> None:
    """Print the answer to standard output, and the reasoning before it dimmed to standard error."""
    is_thinking = False
    for delta in _deltas(stream, parser):
        if delta.reasoning:
            is_thinking = True
            console.print(delta.reasoning, style="dim italic", end="", soft_wrap=True)
        if delta.content:
            if is_thinking:
                console.print("\n")
            is_thinking = False
            write_text(delta.content)
    if is_thinking:
        console.print()
    click.echo()


def _deltas(stream: Stream, parser: ReplyParser | None) -> Iterator[Delta]:
    """Yield reasoning and answer of each piece, and at the end what the parser has held back."""
    for piece in stream:
        if parser is None:
            yield Delta.of_content(piece.text)
        else:
            yield parser.feed(piece.texts or (piece.text,), piece.tokens)
    if parser is not None:
        yield parser.finish()


def _document(
    settings: Settings, engine: Engine, result: Result, text: str, reasoning: str | None
) -> dict[str, object]:
    """Return the output of --json.

    All settings are in it, with their defaults filled in. A call with the same prompt tokens and
    settings gives the same text again.
    """
    logprobs = None
    options = settings.options
    if options.logprobs is not None:
        logprobs = [structs.asdict(position) for position in result.logprobs]
    room = engine.context - len(result.prompt_tokens)
    in_use = options.in_use(result.statistics.window).resolved(engine.defaults.sampling)
    in_use = in_use.changed(seed=result.seed, max_tokens=options.max_tokens or room)
    return {
        "text": text,
        "reasoning": reasoning,
        "tokens": result.tokens,
        "provenance": [source.value for source in result.provenance],
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "logprobs": logprobs,
        "statistics": asdict(result.statistics),
        "settings": {"engine": engine.config.model_dump(), "options": by_flag(in_use)},
        "version": __version__,
    }


def _summary(
    settings: Settings, result: Result, defaults: GenerationDefaults
) -> Iterator[tuple[str, str]]:
    """Yield the names of all figures of a finished text, and the figures."""
    statistics = result.statistics
    options = settings.options.resolved(defaults.sampling)
    yield "method", f"{_method_text(options, statistics)}, seed {result.seed}"
    lengths = (
        f"{statistics.num_generated_tokens} tokens after a prompt of {statistics.num_prompt_tokens}"
    )
    yield "text", f"{lengths}, ended by {result.finish_reason}"
    for figure in FIGURES:
        text = figure.text(statistics)
        if text is not None:
            remark = figure.remark(statistics)
            if remark:
                text += f" ({remark})"
            yield figure.name, text
    if statistics.expected_rejections is not None:
        yield "rejections", _rejections_text(statistics)
    yield from _times(statistics)


def _method_text(options: RequestOptions, statistics: Statistics) -> str:
    """Return how the text was decoded, such as "sd, window stream, rule ratio"."""
    text = options.method
    if options.method not in DRAFTLESS:
        text += f", window {options.window}"
    if options.draft_stop != FIXED:
        text += f", stopped by {options.draft_stop} {statistics.num_draft_stops} times"
    return f"{text}, rule {find(options.rule).label(options.temperature)}"


def _rejections_text(statistics: Statistics) -> str:
    """Return the number of rejections, and the number expected from the models' distributions."""
    margin = _NORMAL_95 * (statistics.expected_rejections_sd or 0)
    expected = f"{statistics.expected_rejections:.1f} ± {margin:.1f} expected"
    text = f"{statistics.num_rejections}, {expected} from the models' distributions"
    if statistics.bias:
        bias = statistics.bias / statistics.num_judged_draft_tokens
        text += f"; bias {bias:.3f} per judged token"
    return text


def _times(statistics: Statistics) -> Iterator[tuple[str, str]]:
    """Yield the target's steps, the forward times, and the target's waits by cause."""
    steps = [f"{count} {phase}" for phase, count in statistics.target_steps.items() if count]
    yield "target steps", ", ".join(steps)
    if statistics.t_draft and statistics.num_draft_tokens:
        ratio = f"t_target(1) / t_draft = {statistics.speed_ratio:.2f}"
        yield "t_draft", f"{statistics.t_draft * 1e3:.1f} ms; {ratio}"
    for name, forward_times in (
        ("t_target(n)", statistics.t_target),
        ("on all cores", statistics.t_target_spread),
    ):
        if forward_times:
            times = [f"{size}: {seconds * 1e3:.1f}" for size, seconds in forward_times.items()]
            yield name, ", ".join(times) + " ms"
    waits = []
    for cause, seconds in statistics.target_wait_seconds.items():
        if cause != "idle":
            waits.append(f"{cause} {seconds:.2f} s")
    yield "target waited for", ", ".join(waits) or "nothing"
