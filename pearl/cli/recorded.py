"""Recorded texts: `pearl simulate stops` and `pearl disco train` record a pair's. Arguments and tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pearl.cli import listed
from pearl.cli.numbers import Times
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.tables import Bars, print_columns, shown
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_turns
from pearl.lab.experiments.estimate import speedup

if TYPE_CHECKING:
    from pearl.lab.experiments.texts import RecordedTexts

_TOKENS = 128  # of an answer, without --max-tokens


def _recorded_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which texts are recorded, and the forward times that are assumed for them."""
    for option in (
        settings_options,
        click.option(
            "--t-target", type=Times(), help="Of a target forward; 1:50,4:55,8:60: by tokens fed.  [default: 50]"
        ),
        click.option(
            "--t-draft", type=click.FloatRange(0, 1e6), metavar="MS", help="Of a draft forward.  [default: 10]"
        ),
        click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template."),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts of each file.  [default: all]"),
        click.argument("prompts", nargs=-1, required=True, type=click.Path(path_type=Path)),
    ):
        command = option(command)
    return command


def _record(settings: Settings, prompts: tuple[Path, ...], limit: int | None, raw: bool, bars: Bars) -> RecordedTexts:
    """Answers of the target, and what the draft draws at each position."""
    from pearl.engine.request import resolve_sampling
    from pearl.lab.experiments.texts import record_pair
    from pearl.models.checkpoints.tokenizers import load_tokenizer

    config, given = settings.engine, settings.sampling
    if not config.has_draft:
        raise ConfigError("--draft none: a recording has the draft's tokens")
    conversations = [turns for path in prompts for turns in read_turns(path, limit)]
    asked: dict[str, Any] = {"temperature": given.temperature or 0.0, "seed": given.seed or 0}
    if given.repetition_penalty is None:  # leave out the checkpoint's own
        asked["repetition_penalty"] = 1.0
    _, defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    sampling = resolve_sampling(given.model_copy(update=asked), defaults, 0)
    if sampling.shaping is not None:
        raise ConfigError("this records the models' own distributions: leave out penalties and logit_bias")
    how = {"ignore_eos": bool(given.ignore_eos), "raw": raw}
    bars.begin("recording", None)
    return record_pair(config, conversations, sampling, given.max_tokens or _TOKENS, **how, tick=bars.step)[0]


@listed("Measure", "pearl simulate stops prompts.jsonl --t-draft 5 --t-target 40")
@click.group()
def simulate() -> None:
    """Decode recorded texts of a pair in virtual time.

    Runs the real coordinator; only forwards take time. Each model has its own device.
    """


@simulate.command(cls=SettingsCommand)
@_recorded_options
def stops(settings: Settings, t_draft: float | None, t_target: dict[int, float] | None, **recording: Any) -> None:
    """Stop policies side by side, on answers of the target.

    PROMPTS are files as pearl bench reads them (.jsonl with prompt, question or turns; or a line each). Greedy unless
    --temperature is above 0; then the texts are those of the coupled rule. Methods sd and pearl with each policy (disco
    with --disco FILE) and with the oracle, which knows which tokens are right: under sd no policy is faster. The best
    static window and the best threshold are those of these texts.
    """
    from pearl.drafting.disco import classifier_of
    from pearl.lab.experiments.stops import side_by_side
    from pearl.lab.simulate import timing_of

    known, timing = classifier_of(settings.engine), timing_of(t_draft, t_target)
    with Bars() as bars:
        recorded = _record(settings, bars=bars, **recording)
        done = side_by_side(recorded, timing, known, bars.step)
    ar = done[0].totals
    print_columns(
        [
            ("method, policy", lambda one: one.name),
            ("target\ncalls", lambda one: f"{100 / one.tokens_per_step:.1f}"),
            ("draft\ncalls", lambda one: f"{100 * one.drafted / one.totals.total('late_tokens'):.1f}"),
            ("tokens\na step", lambda one: f"{one.tokens_per_step:.3f}"),
            ("accepted", lambda one: shown(one.totals.acceptance_rate, 3)),
            ("wasted", lambda one: "-" if one.wasted is None else f"{one.wasted:.1%}"),
            ("over ar, 95%", lambda one: str(speedup(one.totals, ar))),
        ],
        done,
        f"t_draft {timing.t_draft * 1e3:.4g} ms, t_target(1) {timing.t_target(1) * 1e3:.4g} ms; "
        f"{len(recorded.texts)} texts of {recorded.target} and {recorded.draft}; virtual time",
        "calls: forwards of either model after the prefill, per 100 tokens; wasted: drafted tokens that were not "
        "accepted",
    )


@listed("Make a draft", "pearl disco train prompts.jsonl --out pair.disco")
@click.group()
def disco() -> None:
    """Train the classifier that tells a draft where to stop.

    It is for one pair, and for --draft-stop disco.
    """


@disco.command(cls=SettingsCommand)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="To write.")
@_recorded_options
def train(
    settings: Settings, out: Path, t_draft: float | None, t_target: dict[int, float] | None, **recording: Any
) -> None:
    """Train a classifier on answers of the target to PROMPTS, files as pearl simulate stops takes them.

    Each token of the answers is an example: how the draft's distribution looks there, and whether its token is the
    target's. Each fourth text is held out; on these the confidence up to which drafting ends, and the longest window,
    are chosen by the time that method sd then takes at the given forward times.
    """
    from pearl.lab.experiments.stops import train as training
    from pearl.lab.simulate import timing_of

    with Bars() as bars:
        recorded = _record(settings, bars=bars, **recording)
        found = training(recorded, timing_of(t_draft, t_target), settings.sampling.seed or 0, bars.step)
    found.classifier.write(out)
    click.echo(
        f"{out}: for {found.classifier.draft} and {found.classifier.target}; trained on "
        f"{found.classifier.examples} tokens, {found.classifier.accepted:.1%} of them accepted\n"
        f"on {found.held_out} held-out tokens it is right about {found.accuracy:.1%} (the more frequent answer: "
        f"{found.base:.1%})\n"
        f"drafting ends at a confidence of {found.classifier.threshold:.3f}, or after {found.classifier.cap} tokens: "
        f"there sd takes {found.static.speed / found.best.speed:.3f} of the time that it takes with the best static "
        f"window, {found.static.window}"
    )
