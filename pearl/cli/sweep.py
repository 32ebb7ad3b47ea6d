"""`pearl simulate sweep`: speeds along an axis, as JSON, as a picture, and where PEARL stops paying as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from pearl.cli.numbers import POSITIVE, Number, Times, write_json
from pearl.errors import ConfigError
from pearl.lab.experiments import plots, sweeps
from pearl.lab.experiments.recorded import interpolated
from pearl.lab.experiments.sweeps import Point
from pearl.lab.simulate import Timing

_AXES = {  # name -> label, from seconds to its unit
    "jitter": ("jitter: standard deviation of a forward, as a share of it", 1.0),
    "delay": ("delay of a message, one way (ms)", 1e3),
}
_SWEEPS = ("speedup", *_AXES)


@click.command()
@click.argument("what", nargs=-1, type=click.Choice(_SWEEPS))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the results.")
@click.option("--t-draft", type=POSITIVE, default=10.0, show_default=True, metavar="MS", help="Of a draft forward.")
@click.option("--t-target", type=Times(), default={1: 50.0}, help="Of a target forward.  [default: 50]")
@click.option("--acceptance", type=Number(0, 1), multiple=True, default=(0.6, 0.8, 0.9), show_default=True, metavar="X")
@click.option(
    "--tokens", type=click.IntRange(min=200), default=4000, show_default=True, metavar="N", help="Of a simulation."
)
@click.option("--seed", type=int, default=0, metavar="N")
def sweep(
    what: tuple[str, ...],
    out: Path,
    t_draft: float,
    t_target: dict[int, float],
    acceptance: tuple[float, ...],
    tokens: int,
    seed: int,
) -> None:
    """Speeds along an axis, in OUT/WHAT.json and OUT/WHAT.png. Without WHAT: all three.

    speedup: by acceptance rate and speed ratio, with a constant t_target.  jitter, delay: a panel for each
    --acceptance.  At what delay between two hosts does PEARL stop paying?
    """
    timing = Timing(t_draft / 1e3, interpolated({n: ms / 1e3 for n, ms in t_target.items()}))
    along: dict[str, Callable[[], Iterator[Point]]] = {
        "speedup": lambda: sweeps.over_acceptance_and_ratio(timing.t_draft, tokens, seed),
        "jitter": lambda: sweeps.over_jitter(timing, acceptance, tokens, seed),
        "delay": lambda: sweeps.over_delay(timing, acceptance, tokens, seed),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out}: {error.strerror}") from None
    for name in what or _SWEEPS:
        points = _followed(name, along[name]())
        write_json(out / f"{name}.json", [one.as_dict() for one in points])
        _draw(name, points, timing, out / f"{name}.png")
        click.echo(f"{out / name}.png and .json: {len(points)} points of {tokens} tokens")
        if name in _AXES:
            _print_ends(points, name)


def _followed(name: str, points: Iterator[Point]) -> list[Point]:
    done: list[Point] = []
    with Console(stderr=True, highlight=False).status("simulating") as status:
        for one in points:
            done.append(one)
            status.update(f"{name}: {len(done)} points done; acceptance {one.acceptance:g}, ratio {one.ratio:g}")
    return done


def _draw(name: str, points: Sequence[Point], timing: Timing, path: Path) -> None:
    if name in _AXES:
        title = f"t_draft {timing.t_draft * 1e3:g} ms, t_target(1) {timing.t_target(1) * 1e3:g} ms"
        plots.lines(points, name, *_AXES[name], title, path)
    else:
        plots.heat_maps(points, path)


def _print_ends(points: Sequence[Point], axis: str) -> None:
    label, scale = _AXES[axis]
    table = Table("acceptance", box=None, padding=(0, 2, 0, 0))
    pairs = [(m, o) for m in points[0].speedups for o in (sweeps.SD, None) if m != sweeps.SD]
    for method, other in pairs:
        name = method.replace(", ", "\n").replace("best window", "best c")
        table.add_column(f"{name}\nthan {'sd' if other else 'ar'}", justify="right")
    for acceptance, group in sweeps.by_acceptance(points).items():
        ends = [sweeps.stops_paying(group, axis, method, other) for method, other in pairs]
        most = getattr(group[-1], axis) * scale
        table.add_row(f"{acceptance:g}", *(f"> {most:g}" if end is None else f"{end * scale:.3g}" for end in ends))
    console = Console(highlight=False)
    console.print(f"slower from here on; {label}; sd at its best gamma:")
    console.print(table)
