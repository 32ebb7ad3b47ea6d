"""`pearl bench`, `calibrate` and `check`: methods, rules and stop policies on real runs.

This file has the arguments and prints tables; `pearl.lab.bench` measures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pearl.cli.commands import example
from pearl.cli.console import Bars, print_table, shown
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.prompt_sets import json_option, measured_with, read_sets, reported
from pearl.config import Settings
from pearl.config.option_names import DECODING_NAMES, sampling_of
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
_COUNT = click.IntRange(min=1)
_CALIBRATED = 64  # tokens
_CHECKED = 16  # tokens of a text; already with two prompts the embedded pair takes minutes
_UNTRACED = {*DECODING_NAMES, "trace"}  # settings that bench, calibrate and check choose themselves
_SEEDED = {"seed": "0"}


class _BenchSize(NamedTuple):
    """The defaults of pearl bench.

    Attributes:
        prompts: number of prompts of each set.
    """

    prompts: int
    max_tokens: int
    temperature: float


_DEFAULT = _BenchSize(4, 128, 0.0)
_EMULATED = _BenchSize(3, 500, 1.0)  # a toy has its acceptance rate only if it samples


@click.command(
    cls=SettingsCommand,
    epilog=example("pearl bench pearl pearl,rule=opt,epsilon=0.1 --temperature 1 --perplexity"),
)
@click.argument("ways", nargs=-1, metavar="[WAY]...")
@click.option(
    "--prompts",
    multiple=True,
    metavar="[NAME=]FILE",
    help="A prompt set: humaneval; questions, summaries or edits (built in, 20 prompts each); or a .jsonl "
    "file of prompts, questions or turns. Repeatable.  [default: the three built-in sets]",
)
@click.option(
    "--limit",
    type=_COUNT,
    metavar="N",
    help=f"Prompts of each set.  [default: {_DEFAULT.prompts}]",
)
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@click.option(
    "--perplexity",
    is_flag=True,
    help="Also that of the texts, for which the target is loaded once more.",
)
@json_option
@settings_options(
    _SEEDED
    | {
        "max_tokens": f"{_DEFAULT.max_tokens}; of an emulated pair {_EMULATED.max_tokens}",
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

    A WAY is a method and its settings, such as sd,draft_stop=threshold,confidence=0.4 or
    pearl,rule=opt,epsilon=0.1; "published" is pearl without its further guesses, as in its paper.
    If you name no WAY, all methods run; ar and ngram also run on all cores that PEARL uses ("ar,
    all devices"). All ways decode the first text, then all decode the second, and so on; ar is
    always among them. sd uses the gamma that is fastest in a trial. Decoding is greedy unless
    --temperature is given; only committed tokens up to EOS count.
    """
    # Only the flag is refused: a configuration file may set the rule for other commands.
    if ways and ctx.get_parameter_source("rule") is click.core.ParameterSource.COMMANDLINE:
        raise ConfigError(f"--rule: {_EACH_WAY}")
    _report(_benched(settings, ways, **options), to, perplexity)


def _report(plan: Plan, to: Path | None, perplexity: bool) -> None:
    """Run the benchmark; then write its JSON document, print its table with notes, or both."""
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
        surprise = None
        if perplexity:
            bars.say("reading the texts for their perplexity")
            surprise = Surprise(plan.config)
        rows = figures(plan, measured, surprise)
    if reported(to, document(plan, measured, rows, conditions)):
        notes = _notes(measured, rows) + _result_lines(plan, measured, conditions)
        _print_rows(plan, measured, rows, notes)


def _benched(
    settings: Settings, ways: Sequence[str], *, prompts: Sequence[str], limit: int | None, raw: bool
) -> Plan:
    from pearl.lab.bench.rows import devices_of, is_emulated, named_rows, rows_for
    from pearl.lab.bench.runner import Plan

    config = settings.engine
    options = settings.options
    if ways:
        rows = named_rows(ways, rows_for(config))
    else:
        rule = options.rule or next(iter(RULES))
        for name, value in options.parameters:
            rule += f",{name}={value}"
        rows = rows_for(config, rule)
    for row in rows:
        config.check_options(row.options)
    toys = is_emulated(config)
    size = _EMULATED if toys else _DEFAULT
    return Plan(
        config,
        rows,
        read_sets(prompts, limit or size.prompts, toys),
        measured_with(options, size.max_tokens, size.temperature),
        raw=raw,
        together=not devices_of(config)[0].gpus,
        gamma=options.gamma,
    )


def _print_rows(plan: Plan, measured: Measured, rows: Sequence[Figures], notes: list[str]) -> None:
    """Print the table, with a column for the speedup on each prompt set if there are several."""
    sets = list(dict.fromkeys(task.set for task in plan.tasks))
    if len(sets) == 1:
        sets = []
    columns = ["method", "on", "tokens/s", "95%", "over\nar", "95%", "biased\nby", "perplexity"]
    columns += sets
    columns += ["first\ntoken", "ITL\np50", "ITL\np99"]
    columns += ["accepted", "accepted\nlength", "tokens\na step"]
    table = []
    for row in rows:
        method = row.name
        bias = ""
        if method == "sd":
            method = f"sd, gamma {measured.gamma}"
        if method == "published,window=fixed":
            method = f"published, window {row.window}"
        if not row.exact:
            bias = f"{row.bias.value:.3f}"
        cells = [method, row.devices, shown(row.rate), _interval(row.rate)]
        cells += [shown(row.speedup), _interval(row.speedup), bias, str(row.perplexity or "")]
        for name in sets:
            cells.append(shown(row.by_set.get(name)))
        for seconds in (row.first_seconds, row.itl_p50, row.itl_p99):
            cells.append("-" if seconds is None else f"{seconds * 1e3:.0f}")
        cells += [shown(row.acceptance), shown(row.tokens_per_run), shown(row.tokens_per_step)]
        table.append(cells)
    print_table(columns, table, *notes, words=2)


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low == estimate.high:
        return ""
    return f"{estimate.low:.2f}-{estimate.high:.2f}"


def _notes(measured: Measured, rows: Sequence[Figures]) -> list[str]:
    """Return the lines that explain the table's columns."""
    notes = [
        "tokens/s: after a text's first commit, median over texts; over ar: speedup on the same text, median over "
        "texts; 95%: bootstrap interval; first token (without queueing), ITL (inter-token latency): ms, medians over "
        "texts; accepted length: mean, including the correction or bonus token"
    ]
    if measured.gammas:
        rates = ", ".join(f"{g}: {rate:.1f}" for g, rate in sorted(measured.gammas.items()))
        notes.append(f"tokens/s of sd by gamma: {rates}")
    if not all(row.exact for row in rows):
        notes.append(
            "biased by: total variation distance between the distribution sampled from and the target's, per token"
        )
    if any(row.perplexity for row in rows):
        notes.append("perplexity: of the texts under the target, at temperature 1")
    return notes


def _result_lines(plan: Plan, measured: Measured, conditions: Conditions) -> list[str]:
    """Return the lines below the notes: what was skipped, the settings, and the conditions."""
    params = plan.params
    lines = []
    if measured.skipped:
        lines.append(f"skipped, because the context is too small: {', '.join(measured.skipped)}")
    if measured.gamma is not None:
        lines.append(f"sd rows that set no gamma use the fastest one tried, {measured.gamma}")
    sampling = f"temperature {params.temperature:g}" if params.temperature else "greedy"
    tokens = sum(sample.tokens for sample in measured.samples)
    lines.append(
        f"{len(plan.tasks)} texts of up to {params.max_tokens} tokens, {sampling}, seed "
        f"{params.seed}; {tokens} tokens in {conditions}"
    )
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
    type=_COUNT,
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
    """Measure a pair, or a target alone, on this machine: which method to use.

    The command decodes a few texts (up to --max-tokens, 64 by default) with the target alone and
    with each method that auto chooses from, in turns. It says whether speculation pays, and names
    the fastest method. Later engines of this pair on this machine start with these figures, unless
    the machine was too busy to measure.
    """
    from pearl.lab.bench.calibrate import calibrate
    from pearl.lab.bench.rows import is_emulated
    from pearl.worker import speed_profile

    log_to_stderr(settings.engine.log_level, "front")
    toys = is_emulated(settings.engine)
    params = measured_with(settings.options, _CALIBRATED, 1.0 if toys else 0.0)
    tasks = read_sets([prompts] if prompts else [], limit, toys, default=("questions",))
    conditions = Conditions()
    with Bars() as bars:
        calibration = calibrate(settings.engine, tasks, params, bars)
    conditions.stop()
    file = None
    if not toys and not conditions.are_noisy:
        file = speed_profile.save(settings.engine, calibration.profile)
    document = asdict(calibration) | conditions.as_dict()
    if reported(to, document | {"settings": settings.engine.model_dump()}):
        _print_calibration(calibration, conditions, file)


def _print_calibration(calibration: Calibration, conditions: Conditions, file: Path | None) -> None:
    """Print the table of methods and the advice.

    Args:
        file: file that keeps the profile; None if the profile is not kept.
    """
    rows = []
    for row in calibration.rows:
        rows.append([row.name, row.devices, shown(row.rate, 1), str(row.speedup)])
    profile = calibration.profile
    times = []
    if profile.t_draft:
        times.append(f"t_draft {profile.t_draft * 1e3:.2f}")
    for fed, seconds in profile.t_target:
        times.append(f"t_target({fed}) {seconds * 1e3:.2f}")
    notes = [f"ms a forward: {', '.join(times)}"]
    if calibration.gamma:
        notes.append(
            f"window c = {calibration.c}; gamma of sd and ssd {calibration.gamma}; "
            f"acceptance {calibration.acceptance:.2f}"
        )
    notes.append(f"{calibration.advice}\n  {calibration.flags}\n{conditions}")
    if conditions.are_noisy:
        notes.append("not kept: calibrate again when the machine has nothing else to do")
    if file is not None:
        notes.append(f"kept: engines of this pair begin with it (--profile none: afresh): {file}")
    print_table(("method", "on", "tokens/s", "over ar, 95%"), rows, *notes, words=2)


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

    The exit code is 1 if anything differs. For the logits, one sequence is fed in forwards of
    random sizes, and again in forwards of equal size. For the texts, every method decodes the same
    prompts, with several windows; some methods also with penalties, with a grammar (extra
    structured), and with several texts at once in slots. The draft is killed in the middle of some
    texts. All texts share one cache, and the second turn of a conversation is among them.

    Each text must equal the text of the target alone, decoded from an empty cache with the same
    seed. Under the ratio rule it must instead equal the text of method pearl. This does not check
    that sampled texts have the target's distribution; the project's tests do.

    Texts have up to --max-tokens; --limit 4 --max-tokens 48 is thorough. With --datastore, method
    ngram is checked both with the datastore and without.
    """
    from pearl.lab.bench.exactness import PROMPTS, check_pair

    log_to_stderr("error" if kill else settings.engine.log_level, "front")
    params = sampling_of(settings.options).with_seed()
    params = params.changed(
        max_tokens=params.max_tokens or _CHECKED,
        stop=(),  # the reference knows no stop strings
        temperature=params.temperature or 1.0,
    )
    if limit is None:
        limit = 1 if quick else 2
    first_turns: list[Prompt] = list(PROMPTS[:limit])
    if prompts:
        first_turns = [turns[0] for turns in read_turns(prompts, limit)]
    config = settings.engine.model_copy(update={"log_level": "error", "draft_restarts": 10_000})
    findings = []
    with Bars() as bars:
        bars.begin("loading the models", None)
        for finding in check_pair(
            config, first_turns, params, kill=kill, quick=quick, watcher=bars
        ):
            findings.append(finding)
            bars.advance(1, f"{finding.what}: {finding.equal} of {finding.count} equal")
    if reported(to, {"seed": params.seed, "findings": findings}):
        _print_findings(findings, params.seed)
    if not all(finding.passed for finding in findings):
        sys.exit(1)


def _print_findings(findings: list[Finding], seed: int | None) -> None:
    columns = (
        "compared",
        "with",
        "equal",
        "tokens guessed",
        "longest step",
        "first difference",
    )
    rows = []
    num_failed = 0
    for finding in findings:
        num_failed += not finding.passed
        equal = f"{finding.equal} of {finding.count}"
        counts = sorted(finding.guessed.items(), reverse=True)
        guessed = ", ".join(f"{tokens} {source}" for source, tokens in counts)
        longest = str(finding.longest or "")
        rows.append([finding.what, finding.reference, equal, guessed, longest, finding.first])
    result = "all equal, bit for bit"
    if num_failed:
        result = f"{num_failed} of {len(findings)} comparisons differ"
    print_table(columns, rows, f"{result}; seed {seed}", words=2)
