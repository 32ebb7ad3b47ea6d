"""`pearl simulate sweep`: speeds along an axis, as JSON, as a picture, and where PEARL stops paying as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from pearl.cli.numbers import POSITIVE, Number, Times, write_json
from pearl.errors import ConfigError
from pearl.lab.experiments.estimate import Estimate

if TYPE_CHECKING:
    from pearl.lab.experiments.sweeps import Point
    from pearl.lab.simulate import Timing

_AXES = {  # name -> label, from seconds to its unit
    "jitter": ("jitter: standard deviation of a forward, as a share of it", 1.0),
    "delay": ("delay of a message, one way (ms)", 1e3),
    "foreseen": ("share of the rejections behind which a full window waits", 1.0),
    "lookup": ("how often a token that the draft has looked up is right", 1.0),
}
_PAYS = ("jitter", "delay")  # until where?
_SWEEPS = ("speedup", *_AXES)


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

    speedup: by acceptance rate and speed ratio, with a constant t_target.  The others have a panel for each
    --acceptance.  jitter, delay: at what delay between two hosts does PEARL stop paying?  foreseen: what branches can
    give at most, with its closed form.  lookup: by how often the draft's own lookup is right.
    """
    from pearl.lab.experiments import sweeps
    from pearl.lab.experiments.recorded import interpolated
    from pearl.lab.simulate import Timing

    luck = sweeps.Luck(tokens, repeats, seed)
    timing = Timing(t_draft / 1e3, interpolated({n: ms / 1e3 for n, ms in t_target.items()}))
    along: dict[str, Callable[[], Iterator[Point]]] = {
        "speedup": lambda: sweeps.over_acceptance_and_ratio(timing.t_draft, luck),
        "jitter": lambda: sweeps.over_jitter(timing, acceptance, luck),
        "delay": lambda: sweeps.over_delay(timing, acceptance, luck),
        "foreseen": lambda: sweeps.over_foreseen(timing, acceptance, luck),
        "lookup": lambda: sweeps.over_lookup(timing, acceptance, luck),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out}: {error.strerror}") from None
    for name in what or _SWEEPS:
        points = _followed(name, along[name]())
        write_json(out / f"{name}.json", [one.as_dict() for one in points])
        _draw(name, points, timing, out / f"{name}.png")
        click.echo(f"{out / name}.png and .json: {len(points)} points of {repeats} x {tokens} tokens")
        if name in _PAYS:
            _print_ends(points, name)


def _followed(name: str, points: Iterator[Point]) -> list[Point]:
    done: list[Point] = []
    with Console(stderr=True, highlight=False).status("simulating") as status:
        for one in points:
            done.append(one)
            status.update(f"{name}: {len(done)} points done; acceptance {one.acceptance:g}, ratio {one.ratio:g}")
    return done


def _draw(name: str, points: Sequence[Point], timing: Timing, path: Path) -> None:
    from pearl.lab.experiments import plots

    if name in _AXES:
        title = f"t_draft {timing.t_draft * 1e3:g} ms, t_target(1) {timing.t_target(1) * 1e3:g} ms"
        plots.lines(points, name, *_AXES[name], title, path)
    else:
        plots.heat_maps(points, path)


def _print_ends(points: Sequence[Point], axis: str) -> None:
    from pearl.lab.experiments import sweeps

    label, scale = _AXES[axis]
    table = Table("acceptance", box=None, padding=(0, 2, 0, 0))
    pairs = [(m, o) for m in points[0].speedups for o in (sweeps.SD, None) if m != sweeps.SD]
    for method, other in pairs:
        name = method.replace(", ", "\n").replace("best window", "best c")
        table.add_column(f"{name}\nthan {'sd' if other else 'ar'}", justify="right")
    for acceptance, group in sweeps.by_acceptance(points).items():
        most = getattr(group[-1], axis) * scale
        table.add_row(f"{acceptance:g}", *(_end(group, axis, *pair, scale, most) for pair in pairs))
    console = Console(highlight=False)
    console.print(f"slower from here on; {label}; sd at its best gamma; in brackets 95%:")
    console.print(table)


def _end(group: Sequence[Point], axis: str, method: str, other: str | None, scale: float, most: float) -> str:
    """Where `method` stops paying, and between where this may be."""
    from pearl.lab.experiments import sweeps

    def told(of: Callable[[Estimate], float]) -> str:
        end = sweeps.stops_paying(group, axis, method, other, of)
        return f"> {most:g}" if end is None else f"{end * scale:.2g}"

    end, earliest, latest = told(lambda e: e.value), told(lambda e: e.low), told(lambda e: e.high)
    return end if earliest == latest else f"{end} ({earliest} to {latest})"
