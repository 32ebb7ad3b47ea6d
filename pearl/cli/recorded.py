"""Recorded texts: `pearl simulate record`, `pearl simulate stops` and `pearl disco train`. Arguments and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pearl.cli import listed
from pearl.cli.numbers import Times
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.tables import Bars, print_columns, shown
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_turns
from pearl.lab.experiments.estimate import speedup

_FILE = click.Path(dir_okay=False, path_type=Path)
_TOKENS = 128  # of an answer, without --max-tokens

t_draft_option = click.option(
    "--t-draft", type=click.FloatRange(0, 1e6), metavar="MS", help="Of a draft forward.  [default: 10]"
)
t_target_option = click.option(
    "--t-target", type=Times(), help="Of a target forward; 1:50,4:55,8:60: by tokens fed.  [default: 50]"
)


@listed("Measure", "pearl simulate record prompts.jsonl --out texts.npz")
@click.group()
def simulate() -> None:
    """Record texts of a pair, and decode them in virtual time.

    Runs the real coordinator; only forwards take time. Each model has its own device.
    """


@simulate.command(cls=SettingsCommand)
@click.argument("prompts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=_FILE, metavar="FILE", help="To write.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts of each file.  [default: all]")
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@settings_options
def record(settings: Settings, prompts: tuple[Path, ...], out: Path, limit: int | None, raw: bool) -> None:
    """Record answers of the target, and what the draft draws at each position.

    PROMPTS are files as pearl bench reads them (.jsonl with prompt, question or turns; or a line each). Greedy unless
    --temperature is above 0; then the texts are those of the coupled rule. pearl simulate stops decodes them again, at
    any speed.
    """
    from pearl.engine.request import resolve_sampling
    from pearl.lab.experiments.texts import record_pair
    from pearl.models.checkpoints.tokenizers import load_tokenizer
    from pearl.models.recorded import write_texts

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
    tokens, how = given.max_tokens or _TOKENS, {"ignore_eos": bool(given.ignore_eos), "raw": raw}
    with Bars() as bars:
        bars.begin("recording", None)
        recorded, _ = record_pair(config, conversations, sampling, tokens, **how, tick=bars.step)
    write_texts(out, recorded.header, recorded.texts)
    tokens = sum(len(text.answer) for text in recorded.texts)
    click.echo(f"{out}: {len(recorded.texts)} texts, {tokens} tokens, {out.stat().st_size / 1e6:.1f} MB")


@simulate.command()
@click.argument("texts", type=_FILE)
@click.option("--disco", "classifier", type=_FILE, help="A classifier of this pair, as pearl disco train makes it.")
@t_draft_option
@t_target_option
def stops(texts: Path, classifier: Path | None, t_draft: float | None, t_target: dict[int, float] | None) -> None:
    """Stop policies side by side, on TEXTS that pearl simulate record has written.

    Methods sd and pearl with each policy and with the oracle, which knows which tokens are right: under sd no policy is
    faster. The best static window and the best threshold are those of these texts.
    """
    from pearl.drafting.disco import read_classifier
    from pearl.lab.experiments.stops import side_by_side
    from pearl.lab.simulate import timing_of
    from pearl.models.recorded import read_texts

    recorded, timing = read_texts(texts), timing_of(t_draft, t_target)
    header = recorded.header
    known = None if classifier is None else read_classifier(classifier, header.target, header.draft)
    with Bars() as bars:
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
        f"{len(recorded.texts)} texts of {header.target} and {header.draft}; virtual time",
        "calls: forwards of either model after the prefill, per 100 tokens; wasted: drafted tokens that were not "
        "accepted",
    )


@listed("Make a draft", "pearl disco train texts.npz --out pair.disco")
@click.group()
def disco() -> None:
    """Train the classifier that tells a draft where to stop.

    It is for one pair, and for --draft-stop disco.
    """


@disco.command()
@click.argument("texts", type=_FILE)
@click.option("--out", required=True, type=_FILE, metavar="FILE", help="To write.")
@t_draft_option
@t_target_option
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of the first weights.")
def train(texts: Path, out: Path, t_draft: float | None, t_target: dict[int, float] | None, seed: int) -> None:
    """Train a classifier on TEXTS, which pearl simulate record has written.

    Each token of the target's answers is an example: how the draft's distribution looks there, and whether its token
    is the target's. Each fourth text is held out; on these the confidence up to which drafting ends, and the longest
    window, are chosen by the time that method sd then takes at the given forward times.
    """
    from pearl.lab.experiments.stops import train as training
    from pearl.lab.simulate import timing_of
    from pearl.models.recorded import read_texts

    recorded = read_texts(texts)
    with Bars() as bars:
        found = training(recorded, timing_of(t_draft, t_target), seed, bars.step)
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
