"""`pearl bench`, `calibrate` and `check`: methods, rules and stop policies on real runs.

Arguments and tables; `pearl.lab.bench` measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pearl.cli.commands import example
from pearl.cli.console import Bars, Column, print_columns, print_table, shown
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.prompt_sets import json_option, read_sets, reported, sampling_of
from pearl.config import Settings
from pearl.config.options import DECODING_NAMES
from pearl.errors import ConfigError
from pearl.lab.bench.machine import Conditions
from pearl.lab.distill.prompts import read_turns
from pearl.lab.studies.estimate import Estimate
from pearl.printable import log_to_stderr
from pearl.spec.rules import RULES

if TYPE_CHECKING:
    from pearl.engine.request import Prompt
    from pearl.lab.bench.calibrate import Calibration
    from pearl.lab.bench.exactness import Finding
    from pearl.lab.bench.figures import Figures
    from pearl.lab.bench.runner import Measured, Plan

_EACH_WAY = "pearl bench runs untraced, and each way with its own settings, such as pearl,draft_stop=heuristic"
_Command = TypeVar("_Command", bound=Callable[..., Any])
_COUNT = click.IntRange(min=1)
_DEFAULT, _EMULATED = (4, 128), (3, 500)  # (prompts per set, max_tokens)
_CALIBRATED = 64  # tokens
_CHECKED = 16  # of a text; with two prompts the embedded pair takes minutes
_UNTRACED = {*DECODING_NAMES, "trace"}  # settings that bench, calibrate and check choose themselves
_SEEDED = {"seed": "0"}


def _prompt_options(limit: int) -> Callable[[_Command], _Command]:
    """`limit`: prompts of each set, if not given; of an emulated pair one less."""

    def add(command: _Command) -> _Command:
        for option in (
            click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template."),
            click.option(
                "--limit",
                type=_COUNT,
                metavar="N",
                help=f"Prompts of each set.  [default: {limit}]",
            ),
            click.option(
                "--prompts",
                multiple=True,
                metavar="[NAME=]FILE",
                help="A prompt set: humaneval; questions, summaries or edits (built in, 20 prompts each); or a .jsonl "
                "file of prompts, questions or turns. Repeatable.  [default: the three built-in sets]",
            ),
        ):
            command = option(command)
        return command

    return add


@click.command(
    cls=SettingsCommand,
    epilog=example("pearl bench pearl pearl,rule=opt,epsilon=0.1 --temperature 1 --perplexity"),
)
@click.argument("ways", nargs=-1, metavar="[WAY]...")
@_prompt_options(4)
@click.option(
    "--perplexity",
    is_flag=True,
    help="Also that of the texts, for which the target is loaded once more.",
)
@json_option
@settings_options(
    _SEEDED
    | {
        "max_tokens": f"{_DEFAULT[1]}; of an emulated pair {_EMULATED[1]}",
        "temperature": "0; of an emulated pair 1",
        "gamma": "for sd and ssd the fastest one tried",
    },
    unread=_UNTRACED - {"gamma", "rule"},
    instead=_EACH_WAY,
)
@click.pass_context
def bench(
    ctx: click.Context,
    settings: Settings,
    ways: tuple[str, ...],
    perplexity: bool,
    to: Path | None,
    **options: Any,
) -> None:
    """Compare methods, rules and stop policies on the same prompts.

    A WAY is a method and its settings, such as sd,draft_stop=threshold,confidence=0.4 or pearl,rule=opt,epsilon=0.1;
    "published" is pearl with none of its guesses. Without any: all methods, ar and ngram also on all cores that PEARL
    uses ("ar, all devices"). They take turns, text by text, beside ar. sd runs with its fastest gamma. Decoding is
    greedy unless --temperature is given; only committed tokens up to EOS count.
    """
    # A configuration file may set it for other commands.
    if ways and ctx.get_parameter_source("rule") is click.core.ParameterSource.COMMANDLINE:
        raise ConfigError(f"--rule: {_EACH_WAY}")
    _report(_benched(settings, ways, **options), to, perplexity)


def _report(plan: Plan, to: Path | None, perplexity: bool) -> None:
    """Measure; write JSON, or print a table and notes."""
    from pearl.lab.bench.figures import Surprise, document, figures
    from pearl.lab.bench.runner import measure

    log_to_stderr(plan.config.log_level, "front")
    conditions = Conditions()
    with Bars() as bars:
        measured = measure(plan, bars)
        if not measured.samples:
            raise ConfigError(
                "no prompt fits the context: shorten them, lower max_tokens, or raise max_context"
            )
        conditions.stop()
        if perplexity:
            bars.say("reading the texts for their perplexity")
        found = figures(plan, measured, Surprise(plan.config) if perplexity else None)
    if reported(to, document(plan, measured, found, conditions)):
        columns, notes = _columns(plan, measured, found)
        print_columns(columns, found, *notes, *_result_lines(plan, measured, conditions), words=2)


def _benched(
    settings: Settings, ways: Sequence[str], *, prompts: Sequence[str], limit: int | None, raw: bool
) -> Plan:
    from pearl.lab.bench.rows import devices_of, is_emulated, named_rows, rows_for
    from pearl.lab.bench.runner import Plan

    config = settings.engine
    options = settings.options
    if not config.has_draft and not ways:
        raise ConfigError(
            "--draft none: there is nothing to compare with ar; name ways, such as ngram"
        )
    rows = (
        named_rows(ways, rows_for(config))
        if ways
        else rows_for(config, options.rule or next(iter(RULES)))
    )
    for row in rows:
        config.check_options(row.options)
    toys = is_emulated(config)
    texts, tokens, temperature = (
        (*_EMULATED, 1.0) if toys else (*_DEFAULT, 0.0)
    )  # a toy's rate is under sampling
    tasks, params = (
        read_sets(prompts, limit or texts, toys),
        sampling_of(settings.options, tokens, temperature),
    )
    together = not devices_of(config)[0].gpus
    return Plan(config, rows, tasks, params, raw=raw, together=together, gamma=options.gamma)


def _columns(
    plan: Plan, measured: Measured, found: Sequence[Figures]
) -> tuple[list[Column[Figures]], list[str]]:
    def between(one: Estimate | None) -> str:
        return "" if one is None or one.low == one.high else f"{one.low:.2f}-{one.high:.2f}"

    def named(one: Figures) -> str:
        special = {
            "sd": f"sd, gamma {measured.gamma}",
            "published,window=fixed": f"published, window {one.window}",
        }
        return special.get(one.name, one.name)

    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.0f}"

    names = list(dict.fromkeys(task.set for task in plan.tasks))
    sets = names if len(names) > 1 else []
    columns: list[Column[Figures]] = [
        ("method", named),
        ("on", lambda one: one.devices),
        ("tokens/s", lambda one: shown(one.rate)),
        ("95%", lambda one: between(one.rate)),
        ("over\nar", lambda one: shown(one.speedup)),
        ("95%", lambda one: between(one.speedup)),
        ("biased\nby", lambda one: "" if one.exact else f"{one.bias.value:.3f}"),
        ("perplexity", lambda one: str(one.perplexity or "")),
        *((name, lambda one, name=name: shown(one.by_set.get(name))) for name in sets),
        ("first\ntoken", lambda one: milliseconds(one.first_seconds)),
        ("ITL\np50", lambda one: milliseconds(one.itl_p50)),
        ("ITL\np99", lambda one: milliseconds(one.itl_p99)),
        ("accepted", lambda one: shown(one.acceptance)),
        ("accepted\nlength", lambda one: shown(one.tokens_per_run)),
        ("tokens\na step", lambda one: shown(one.tokens_per_step)),
    ]
    tried = ", ".join(f"{g}: {rate:.1f}" for g, rate in sorted(measured.gammas.items()))
    notes = [
        "tokens/s: after a text's first commit, median over texts; over ar: speedup on the same text, median over "
        "texts; 95%: bootstrap interval; first token (without queueing), ITL (inter-token latency): ms, medians over "
        "texts; accepted length: mean, including the correction or bonus token",
        f"tokens/s of sd by gamma: {tried}" if tried else "",
        "biased by: total variation distance between the distribution sampled from and the target's, per token"
        if any(not one.exact for one in found)
        else "",
        "perplexity: of the texts under the target, at temperature 1"
        if any(one.perplexity for one in found)
        else "",
    ]
    return columns, notes


def _result_lines(plan: Plan, measured: Measured, conditions: Conditions) -> list[str]:
    """The lines below the table: settings and conditions."""
    sampled = f"temperature {plan.params.temperature:g}" if plan.params.temperature else "greedy"
    tokens = sum(sample.tokens for sample in measured.samples)
    lines = [
        f"{len(plan.tasks)} texts of up to {plan.params.max_tokens} tokens, {sampled}, seed "
        f"{plan.params.seed}; {tokens} tokens in {conditions}"
    ]
    if measured.gamma is not None:
        lines.insert(0, f"sd rows that set no gamma use the fastest one tried, {measured.gamma}")
    if measured.skipped:
        lines.insert(0, f"skipped, because the context is too small: {', '.join(measured.skipped)}")
    return lines


@click.command(
    "calibrate",
    cls=SettingsCommand,
    epilog=example("pearl calibrate --target my-model --draft my-small-model"),
)
@click.option(
    "--prompts",
    metavar="[NAME=]FILE",
    help="Prompts to measure on, as of pearl bench.  [default: questions]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="Prompts of it.",
)
@json_option
@settings_options(
    _SEEDED | {"max_tokens": str(_CALIBRATED), "temperature": "0; of an emulated pair 1"},
    unread=_UNTRACED,
    instead="pearl calibrate runs untraced, and compares the methods that auto chooses from",
)
def calibrate_pair(settings: Settings, prompts: str | None, limit: int, to: Path | None) -> None:
    """Measure a pair on this machine: which method to use.

    Decodes a few texts (up to --max-tokens, 64 by default) with the target alone and with each method that auto chooses
    from, in turns. Says whether speculation pays, and names the fastest method. Later engines of this pair on this
    machine start with these figures, unless the machine was too busy to measure.
    """
    from pearl.lab.bench.calibrate import calibrate
    from pearl.lab.bench.rows import is_emulated
    from pearl.worker import speed_profile

    if not settings.engine.has_draft:
        raise ConfigError("--draft none: there is no pair to measure")
    log_to_stderr(settings.engine.log_level, "front")
    toys = is_emulated(settings.engine)
    params = sampling_of(settings.options, _CALIBRATED, 1.0 if toys else 0.0)
    tasks = read_sets([prompts] if prompts else [], limit, toys, default=("questions",))
    conditions = Conditions()
    with Bars() as bars:
        found = calibrate(settings.engine, tasks, params, bars)
    conditions.stop()
    is_saved = not toys and not conditions.are_noisy
    saved = speed_profile.save(settings.engine, found.profile) if is_saved else None
    if reported(
        to, asdict(found) | conditions.as_dict() | {"settings": settings.engine.model_dump()}
    ):
        _print_calibration(found, conditions, saved)


def _print_calibration(found: Calibration, conditions: Conditions, saved: Path | None) -> None:
    columns: list[Column[Figures]] = [
        ("method", lambda one: one.name),
        ("on", lambda one: one.devices),
        ("tokens/s", lambda one: shown(one.rate, 1)),
        ("over ar, 95%", lambda one: str(one.speedup)),
    ]
    times = ", ".join(f"t_target({n}) {seconds * 1e3:.2f}" for n, seconds in found.profile.t_target)
    print_columns(
        columns,
        found.rows,
        f"ms a forward: t_draft {found.profile.t_draft * 1e3:.2f}, {times}",
        f"window c = {found.c}; gamma of sd and ssd {found.gamma}; acceptance {found.acceptance:.2f}",
        f"[bold]{found.advice}[/bold]\n  {found.flags}\n{conditions}",
        "not kept: calibrate again when the machine has nothing else to do"
        if conditions.are_noisy
        else "",
        f"kept: engines of this pair begin with it (--profile none: afresh): {saved}"
        if saved
        else "",
        words=2,
    )


@click.command(
    "check",
    cls=SettingsCommand,
    epilog=example("pearl check --target my-model --draft my-small-model"),
)
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="File of prompts to decode.  [default: ours]"
)
@click.option(
    "--limit", type=_COUNT, metavar="N", help="Prompts of it.  [default: 2; with --quick 1]"
)
@click.option(
    "--kill/--no-kill",
    default=True,
    show_default=True,
    help="Also kill the draft in the middle of texts.",
)
@click.option("--quick", is_flag=True, help="Compare one method of each kind only: a first look.")
@json_option
@settings_options(
    {"max_tokens": str(_CHECKED), "temperature": "1; greedy texts are compared too"},
    unread={*_UNTRACED, "stop"},
    instead="pearl check runs untraced, without stop strings, and compares every method",
)
def check_bits(
    settings: Settings,
    prompts: Path | None,
    limit: int | None,
    kill: bool,
    quick: bool,
    to: Path | None,
) -> None:
    """Compare logits and texts of all methods bit for bit.

    Exit code 1 if any differ. Logits: one sequence, cut into forwards at random. Texts: every method and window, also
    with the draft killed, of prompts one after the other in one cache and of a second turn of the first; some methods
    with penalties, with a grammar (extra structured), and several texts at once in slots. They are compared with the
    target alone, decoded from an empty cache with the same seed; under the ratio rule with each other. This does not
    check that sampled texts have the target's distribution; the project's tests do.
    Texts have up to --max-tokens; --limit 4 --max-tokens 48 is thorough. With --datastore, method ngram is compared
    with and without it.
    """
    from pearl.lab.bench.exactness import PROMPTS, check_pair

    log_to_stderr("error" if kill else settings.engine.log_level, "front")
    params = settings.options.with_seed()
    length = {
        "max_tokens": params.max_tokens or _CHECKED,
        "stop": (),
    }  # the reference knows no stop strings
    params = params.changed(**length, temperature=params.temperature or 1.0)
    if limit is None:
        limit = 1 if quick else 2
    asked: list[Prompt] = (
        [turns[0] for turns in read_turns(prompts, limit)] if prompts else [*PROMPTS[:limit]]
    )
    config = settings.engine.model_copy(update={"log_level": "error", "draft_restarts": 10_000})
    findings: list[Finding] = []
    with Bars() as bars:
        bars.begin("loading the models", None)
        for finding in check_pair(
            config,
            asked,
            params,
            kill=kill,
            quick=quick,
            tick=lambda what: bars.advance(0, what),
            begin=lambda total: bars.begin("checking", total),
        ):
            findings.append(finding)
            bars.advance(1, f"{finding.what}: {finding.equal} of {finding.count} equal")
    if reported(to, {"seed": params.seed, "findings": findings}):
        _print_findings(findings, params.seed)
    if not all(finding.passed for finding in findings):
        sys.exit(1)


def _print_findings(findings: list[Finding], seed: int | None) -> None:
    rows = []
    for one in findings:
        guessed = ", ".join(
            f"{tokens} {source}" for source, tokens in sorted(one.guessed.items(), reverse=True)
        )
        equal, longest = f"{one.equal} of {one.count}", str(one.longest or "")
        rows.append([one.what, one.reference, equal, guessed, longest, one.first])
    columns = ("compared", "with", "equal", "tokens guessed", "longest step", "first difference")
    wrong = sum(not finding.passed for finding in findings)
    result = f"{wrong} of {len(findings)} comparisons differ" if wrong else "all equal, bit for bit"
    print_table(columns, rows, f"{result}; seed {seed}", words=2)
