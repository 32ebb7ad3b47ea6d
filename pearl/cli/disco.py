"""`pearl disco train` and `pearl simulate stops`: stop policies. Arguments and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from pearl.cli import listed
from pearl.cli.console import SafeConsole
from pearl.cli.numbers import STDOUT, Times, json_option, table_console, write_json
from pearl.lab.experiments.estimate import speedup

if TYPE_CHECKING:
    from pearl.lab.experiments.stops import Stopped

_FILE = click.Path(dir_okay=False, path_type=Path)
_T_DRAFT = click.option("--t-draft", type=Times(), help="Of a draft forward; 1:10,4:12: by tokens fed.  [default: 10]")
_T_TARGET = click.option("--t-target", type=Times(), help="Of a target forward, likewise.  [default: 50]")


@listed("Make a draft", "pearl disco train texts.npz --out pair.disco")
@click.group()
def disco() -> None:
    """Train the classifier that tells a draft where to stop.

    It is for one pair, and for --draft-stop disco.
    """


@disco.command()
@click.argument("texts", type=_FILE)
@click.option("--out", required=True, type=_FILE, metavar="FILE", help="To write.")
@_T_DRAFT
@_T_TARGET
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of the first weights.")
def train(
    texts: Path, out: Path, t_draft: dict[int, float] | None, t_target: dict[int, float] | None, seed: int
) -> None:
    """Train a classifier on TEXTS, which pearl simulate record has written.

    Each token of the target's answers is an example: how the draft's distribution looks there, and whether its token
    is the target's. Each fourth text is held out; on these the confidence up to which drafting ends, and the longest
    window, are chosen by the time that method sd then takes at the given forward times.
    """
    from pearl.lab.experiments.disco import train as training
    from pearl.lab.experiments.recorded import timing_of
    from pearl.models.recorded import read_texts

    recorded = read_texts(texts)
    with SafeConsole(stderr=True).status("training") as status:
        found = training(recorded, timing_of(t_draft, t_target), seed, status.update)
    found.classifier.write(out)
    gain = found.best.totals.tokens_per_second / found.static.totals.tokens_per_second
    click.echo(
        f"{out}: for {found.classifier.draft} and {found.classifier.target}; trained on {found.examples} tokens, "
        f"{found.classifier.accepted:.1%} of them accepted\n"
        f"on {found.held_out} held-out tokens it is right about {found.accuracy:.1%} (the more frequent answer: "
        f"{found.base:.1%})\n"
        f"drafting ends at a confidence of {found.classifier.threshold:.3f}, or after {found.classifier.cap} tokens: "
        f"there sd takes {1 / gain:.3f} of the time that it takes with the best static window, "
        f"{found.static.totals.window}"
    )


@click.command()
@click.argument("texts", type=_FILE)
@click.option("--disco", "classifier", type=_FILE, help="A classifier of this pair, as pearl disco train makes it.")
@_T_DRAFT
@_T_TARGET
@json_option
def stops(
    texts: Path,
    classifier: Path | None,
    t_draft: dict[int, float] | None,
    t_target: dict[int, float] | None,
    to: Path | None,
) -> None:
    """Stop policies side by side, on TEXTS that pearl simulate record has written.

    Methods sd and pearl with each policy and with the oracle, which stops where the next token would be wrong: no
    policy can need fewer calls. The best static window and the best threshold are those of these texts.
    """
    from pearl.drafting.disco import read_classifier
    from pearl.lab.experiments.recorded import timing_of
    from pearl.lab.experiments.stops import side_by_side
    from pearl.models.recorded import read_texts

    recorded, timing = read_texts(texts), timing_of(t_draft, t_target)
    header = recorded.header
    known = None if classifier is None else read_classifier(classifier, header.target, header.draft)
    with SafeConsole(stderr=True).status("simulating") as status:
        done = side_by_side(recorded, timing, known, status.update)
    if to is not None:
        settings = {"target": header.target, "draft": header.draft, "t_draft": timing.t_draft}
        settings |= {"t_target": {n: timing.t_target(n) for n in (1, 2, 4, 8, 16)}, "texts": len(recorded.texts)}
        write_json(to, {"settings": settings, "policies": [_entry(one, done[0]) for one in done]})
    if to != STDOUT:
        _print(done)
        console = table_console()
        console.print(
            f"\nt_draft {timing.t_draft * 1e3:.4g} ms, t_target(1) {timing.t_target(1) * 1e3:.4g} ms; "
            f"{len(recorded.texts)} texts of {header.target} and {header.draft}; virtual time\n"
            "calls: forwards of either model after the prefill, per 100 tokens; wasted: drafted tokens that were not "
            "accepted",
            soft_wrap=True,
        )


def _entry(one: Stopped, ar: Stopped) -> dict[str, Any]:
    over = speedup(one.totals, ar.totals, 1)
    own = {"draft_stop": one.policy, "draft_calls": one.drafted, "speedup": over.value, "speedup_margin": over.margin}
    return one.totals.as_dict() | {"name": one.name} | own


def _print(done: Sequence[Stopped]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("method, policy", no_wrap=True)
    for column in ("target\ncalls", "draft\ncalls", "tokens\na step", "accepted", "wasted", "over ar, 95%"):
        table.add_column(column, justify="right")
    for one in done:
        totals = one.totals
        accepted = totals.acceptance_rate
        wasted = 1 - totals.accepted / one.drafted if one.drafted else None
        table.add_row(
            one.name,
            f"{100 * totals.steps / totals.tokens:.1f}",
            f"{100 * one.drafted / totals.tokens:.1f}",
            f"{totals.tokens_per_step:.3f}",
            "-" if accepted is None else f"{accepted:.3f}",
            "-" if wasted is None else f"{wasted:.1%}",
            str(speedup(totals, done[0].totals, 1)),
        )
    table_console().print(table)
