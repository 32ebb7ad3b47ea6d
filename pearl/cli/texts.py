"""`pearl bench paper --texts`: the paper's pairs with recorded texts (`pearl.lab.papers.replayed`). Output only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.cli.console import SafeConsole
from pearl.cli.distill import Bars
from pearl.cli.numbers import STDOUT, write_json
from pearl.cli.tables import print_table
from pearl.lab.bench.machine import Conditions
from pearl.lab.papers.pearl import Pair

if TYPE_CHECKING:
    from pearl.lab.papers.replayed import Replayed
    from pearl.models.recorded import Header


def replay_pairs(
    pairs: Sequence[Pair], file: Path, *, run: int, tokens: int, seed: int, parts: bool, to: Path | None
) -> None:
    """Prints each pair with each method, or writes it to `to`; see `replayed`."""
    from pearl.lab.papers.replayed import Replayed, replayed
    from pearl.models.recorded import read_texts

    conditions, done = Conditions(), list[Replayed]()
    with Bars(SafeConsole(stderr=True)) as bars:
        for pair in pairs:
            bars.say(pair.name)
            done += replayed(pair, file, bars, seed=seed, run=run, tokens=tokens, parts=parts)
    conditions.stop()
    if to is not None:
        settings = {
            "tokens": tokens,
            "run": run,
            "seed": seed,
            "parts": parts,
            "texts": read_texts(file).header.model_dump(),
        }
        about = {"kind": "replayed", "emulated": True, "settings": settings}
        write_json(to, about | conditions.as_dict() | {"pairs": [asdict(one) for one in done]})
    if to != STDOUT:
        _print_pairs(done, read_texts(file).header, file, str(conditions))


def _print_pairs(done: Sequence[Replayed], header: Header, file: Path, end: str) -> None:
    columns = ("simulator:\nover ar", "over pub-\nlished", "tokens\na step", "fore-\nseen")
    rows = []
    for one in done:
        ratios = (one.simulated, one.simulated_gain, one.tokens_per_step)
        runtime = ("-" if value is None else f"{value:.2f}" for value in (one.runtime, one.runtime_gain))
        share = "{:.3f} ({:.3f}-{:.3f})".format(*one.of_simulated) if one.of_simulated else ""
        foreseen = f"{one.foreseen:.1%}" if one.foreseen else "-"
        rows.append((one.pair, one.method, *(f"{value:.2f}" for value in ratios), foreseen, *runtime, share))
    print_table(
        ("pair", "method", *columns, "runtime:\nover ar", "over pub-\nlished", "of simulated"),
        rows,
        f"EMULATION: texts of {header.target} and {header.draft} ({file}; temperature {header.temperature:g}, "
        f"vocabulary {header.vocab_size}) at these pairs' speeds; all forwards take the same time.",
        end,
        words=2,
    )
