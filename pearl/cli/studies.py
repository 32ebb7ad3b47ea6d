"""Studies of the theory: `pearl simulate check`, `rejections`, `front` and `sweep`.

Arguments and output only: the rows of `pearl.lab.experiments` become JSON, a picture (PNG) and a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pearl.cli.numbers import POSITIVE, STDOUT, Number, Times, json_option, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.recorded import LocalPair, limit_option, raw_option
from pearl.cli.tables import print_table, progress
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_turns
from pearl.lab.experiments.estimate import Estimate

if TYPE_CHECKING:
    from pearl.lab.experiments.sweeps import Point

_FRONT_TOKENS = 48  # of a text, without --max-tokens
_AXES = {  # name -> label, factor from seconds to its unit
    "jitter": ("jitter: standard deviation of a forward, as a share of it", 1.0),
    "delay": ("delay of a message, one way (ms)", 1e3),
}
_SWEEPS = ("speedup", *_AXES)


@click.command()
@click.option(
    "--tokens", type=click.IntRange(min=20_000), default=60_000, show_default=True, metavar="N", help="Of a simulation."
)
@click.option("--seed", type=int, default=0, metavar="N")
@json_option
def check(tokens: int, seed: int, to: Path | None) -> None:
    """Closed forms against the simulator; exit code 1 where one is missed.

    Theorems 1 and 2 of PEARL and its tokens per step; speculative decoding after Leviathan et al.; and the expected
    number of rejections after Yin et al., with models whose distributions are known.
    """
    from pearl.lab.experiments.checks import CLOSE, Check, checks

    done: list[Check] = []
    with progress("checked") as report:
        for one in checks(tokens, seed):
            done.append(one)
            report(f"{one.claim}, {one.setting}: {'pass' if one.passed else 'FAIL'} ({len(done)} done)")
    if to is not None:
        write_json(to, [one.as_dict() for one in done])
    if to != STDOUT:
        notes = [f"{one.claim.partition(':')[0]}, {one.setting}: {one.note}" for one in done if one.note]
        passed = sum(one.passed for one in done)
        print_table(
            ("claim", "setting", "closed form", "simulated", "difference", ""),
            [
                (
                    one.claim,
                    one.setting,
                    f"{one.closed:.5g}",
                    f"{one.simulated:.5g}",
                    "-" if one.exact else f"{one.difference:+.2%}",
                    "pass" if one.passed else "[red]FAIL[/red]",
                )
                for one in done
            ],
            *notes,
            f"{passed} of {len(done)} hold: best windows exactly, all else within {CLOSE:.0%}",
            words=2,
        )
    if not all(one.passed for one in done):
        sys.exit(1)


@click.command()
@click.option("--texts", type=click.IntRange(min=2), default=100, show_default=True, metavar="N", help="By each rule.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N")
@click.option("--png", type=click.Path(path_type=Path), help="A picture: rejections, and the price of fewer.")
@json_option
def rejections(texts: int, seed: int, png: Path | None, to: Path | None) -> None:
    """Rejections and bias of the rules, as theory expects and as the protocol has them.

    On two pairs of Markov chains whose distributions are known (Yin et al. 2024): the ratio rule's expected rejections
    are the sum of the distances between the two models; batch drafts save some of these, and no number of them all; opt
    pays for each rejection less with as much bias, uno with more.
    """
    from pearl.lab.experiments import plots
    from pearl.lab.experiments import rejections as study

    with progress() as report:
        done = list(study.rejections(texts, seed, report))
    limits = {chain.name: study.limit(chain) for chain in study.chains(seed)}
    if to is not None:
        rules = [asdict(one) for one in done]
        write_json(to, {"texts": texts, "tokens": study.TOKENS, "limits": limits, "rules": rules})
    if png is not None:
        plots.rejections_and_bias(done, limits, study.TOKENS, png)
    if to != STDOUT:
        within = sum(one.measured.ties(one.expected) for one in done)
        print_table(
            ("", "rule", "rejections\nexpected", "\nmeasured, 95%", "bias\nexpected", "\nmeasured, 95%"),
            [
                (
                    one.chain,
                    one.label,
                    f"{one.expected:.2f}",
                    str(one.measured),
                    f"{one.bias:.2f}",
                    str(one.measured_bias),
                )
                for one in done
            ],
            *(f"{name}: with any number of candidates batch expects {n:.2f} rejections" for name, n in limits.items()),
            f"{within} of {len(done)} intervals contain the expected value",
            f"{texts} texts of {study.TOKENS} tokens by each rule",
            "per text; bias: summed distances of what was committed from the target's distribution",
            words=2,
        )


@click.command(cls=SettingsCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PROMPTS...")
@limit_option
@raw_option
@click.option("--png", type=click.Path(path_type=Path), help="A picture: rejections against bias.")
@json_option
@settings_options
def front(
    settings: Settings, files: tuple[Path, ...], limit: int | None, raw: bool, png: Path | None, to: Path | None
) -> None:
    """What opt and uno pay in bias for fewer rejections, by epsilon, on a pair of models.

    PROMPTS are files as pearl bench reads them. Both models run in this process, one after the other, and nothing is
    timed; temperature 1 unless --temperature says otherwise. Along texts that the target might have written, bias and
    rejections of opt add up to one number, the distance between the models; in the rules' own texts, which the bias
    leads elsewhere, they are measured.
    """
    from pearl.engine.conversation import Conversation
    from pearl.lab.experiments import plots
    from pearl.lab.experiments import rejections as study

    if settings.sampling.temperature == 0:
        raise ConfigError("--temperature 0: greedy decoding has no distribution to be biased; give one above 0")
    tokens = settings.sampling.max_tokens or _FRONT_TOKENS
    pair = LocalPair(settings, temperature=1.0, why="these rules judge what a draft proposes")
    raw = raw or pair.tokenizer.apply_chat([{"role": "user", "content": "."}]) is None
    turns = [each[0] for path in files for each in read_turns(path, limit)]
    prompts = [Conversation(pair.tokenizer, raw).prompt(turn) for turn in turns]
    with progress() as report:
        target, draft = pair.runners()
        most = min(target.context, draft.context) - tokens
        prompts = [prompt for prompt in prompts if len(prompt) <= most]
        if len(prompts) < 2:
            raise ConfigError("it takes two prompts that fit the context with their texts, for an interval")
        done = list(study.front(target, draft, prompts, tokens, pair.sampling, report))
    if to is not None:
        write_json(to, {"texts": len(prompts), "tokens": tokens, "rules": [asdict(one) for one in done]})
    if png is not None:
        plots.prices(done, png)
    if to != STDOUT:
        columns = ("target's texts:\nrejections", "\nbias", "\nboth")
        print_table(
            ("rule", *columns, "own texts:\nrejections, 95%", "\nforetold", "\nbias, 95%"),
            [
                (
                    f"{one.rule} (not exact), epsilon {one.epsilon:g}",
                    *(f"{value:.3f}" for value in (one.expected, one.bias, one.expected + one.bias)),
                    str(one.measured),
                    f"{one.foretold:.3f} ± {one.margin:.3f}",
                    str(one.measured_bias),
                )
                for one in done
            ],
            f"{sum(one.is_as_foretold for one in done)} of {len(done)} counts of rejections are within 1.96 standard "
            "deviations of what the distributions along the same texts foretell",
            f"{len(prompts)} texts of {tokens} tokens by each rule; per token; opt with epsilon 0 is ratio, and exact",
        )


@click.command()
@click.argument("what", nargs=-1, type=click.Choice(_SWEEPS))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the results.")
@click.option("--t-draft", type=POSITIVE, default=10.0, show_default=True, metavar="MS", help="Of a draft forward.")
@click.option("--t-target", type=Times(), default={1: 50.0}, help="Of a target forward.  [default: 50]")
@click.option("--acceptance", type=Number(0, 1), multiple=True, default=(0.6, 0.8, 0.9), show_default=True, metavar="X")
@click.option(
    "--tokens", type=click.IntRange(min=1000), default=4000, show_default=True, metavar="N", help="Of a simulation."
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Simulations of a point, each with luck of its own: its 95% interval is over them. 1: no intervals.",
)
@click.option("--seed", type=int, default=0, metavar="N")
def sweep(
    what: tuple[str, ...],
    out: Path,
    t_draft: float,
    t_target: dict[int, float],
    acceptance: tuple[float, ...],
    tokens: int,
    repeats: int,
    seed: int,
) -> None:
    """Speeds along an axis, in OUT/WHAT.json and OUT/WHAT.png. Without WHAT: all, in about half an hour of a core.

    speedup: by acceptance rate and speed ratio, with a constant t_target.  jitter, delay: a panel for each
    --acceptance, and a table of where PEARL stops paying.
    """
    from pearl.lab.experiments import plots, sweeps
    from pearl.lab.experiments.recorded import interpolated
    from pearl.lab.simulate import Timing

    luck = sweeps.Luck(tokens, repeats, seed)
    timing = Timing(t_draft / 1e3, interpolated({n: ms / 1e3 for n, ms in t_target.items()}))
    along: dict[str, Callable[[], Iterator[Point]]] = {
        "speedup": lambda: sweeps.over_acceptance_and_ratio(timing.t_draft, luck),
        "jitter": lambda: sweeps.over_jitter(timing, acceptance, luck),
        "delay": lambda: sweeps.over_delay(timing, acceptance, luck),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out}: {error.strerror}") from None
    for name in what or _SWEEPS:
        points: list[Point] = []
        with progress() as report:
            for one in along[name]():
                points.append(one)
                report(f"{name}: {len(points)} points done; acceptance {one.acceptance:g}, ratio {one.ratio:g}")
        write_json(out / f"{name}.json", [one.as_dict() for one in points])
        if name in _AXES:
            title = f"t_draft {timing.t_draft * 1e3:g} ms, t_target(1) {timing.t_target(1) * 1e3:g} ms"
            plots.lines(points, name, *_AXES[name], title, out / f"{name}.png")
        else:
            plots.heat_maps(points, out / f"{name}.png")
        click.echo(f"{out / name}.png and .json: {len(points)} points of {repeats} x {tokens} tokens")
        if name in _AXES:
            _print_ends(points, name)


def _print_ends(points: Sequence[Point], axis: str) -> None:
    """From which value of the axis on each method is slower than another."""
    from pearl.lab.experiments import sweeps

    label, scale = _AXES[axis]
    pairs = [(m, o) for m in points[0].speedups for o in (sweeps.SD, None) if m != sweeps.SD]
    names = [method.replace(", ", "\n").replace("best window", "best c") for method, _ in pairs]
    heads = [f"{name}\nthan {'sd' if other else 'ar'}" for name, (_, other) in zip(names, pairs, strict=True)]

    def cell(group: Sequence[Point], method: str, other: str | None) -> str:
        def end(of: Callable[[Estimate], float]) -> str:
            at = sweeps.stops_paying(group, axis, method, other, of)
            return f"> {getattr(group[-1], axis) * scale:g}" if at is None else f"{at * scale:.2g}"

        value, earliest, latest = end(lambda e: e.value), end(lambda e: e.low), end(lambda e: e.high)
        return value if earliest == latest else f"{value} ({earliest} to {latest})"

    click.echo(f"slower from here on; {label}; sd at its best gamma; in brackets 95%:")
    groups = sweeps.by_acceptance(points).items()
    print_table(("acceptance", *heads), [(f"{a:g}", *(cell(group, *pair) for pair in pairs)) for a, group in groups])
