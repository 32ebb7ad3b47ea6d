"""What one GPU can show of this package, in about 30 minutes and one command; nothing is downloaded.

    python scripts/prove_gpu.py                                  # cuda:0; prints a table and writes prove_gpu.json
    python scripts/prove_gpu.py --only graphs --only speed       # some of its steps
    python scripts/prove_gpu.py --rehearse                       # every step with tiny models, on a CPU

It makes random models of 1B and 7B shapes (17 GB of files in $TMPDIR, for the engine's pair). Please send the JSON file
back as an issue, whatever it says: no GPU has run this package yet.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pearl.worker.startup import allow_expandable_segments

if __name__ == "__main__":
    import os

    allow_expandable_segments(os.environ)  # as in a worker; before torch is imported

import click
import torch
from rich.console import Console
from rich.table import Table

from pearl.lab.bench.machine import hardware, in_words
from pearl.lab.bench.proof import REHEARSAL, STEPS, Figure, Scale, full

_SMALL = 40e9  # bytes: a GPU with less takes a smaller pair


def carry_out(name: str, scale: Scale, console: Console) -> dict[str, Any]:
    """One step: its figures, as they come, and the error that ended it, if any."""
    began, found, error = time.perf_counter(), list[Figure](), ""
    try:
        for figure in STEPS[name](scale):
            found.append(figure)
            console.print(f"  {name}: {figure.what} {figure.value:.4g} {figure.unit}", style="dim")
    except Exception as problem:  # one step that fails says nothing of the next
        error = f"{type(problem).__name__}: {problem}"
    gc.collect()
    if not scale.rehearses:
        torch.cuda.empty_cache()
    passed = not error and all(figure.passed for figure in found)
    seconds = time.perf_counter() - began
    return {"step": name, "passed": passed, "seconds": seconds, "error": error, "figures": [*map(asdict, found)]}


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table("step", "figure", "value", "must be", "")
    for result in results:
        for number, figure in enumerate(result["figures"]):
            mark = "" if not figure["must"] else "pass" if figure["passed"] else "FAIL"
            value = f"{figure['value']:.4g} {figure['unit']}".strip()
            what = figure["what"] + (f" ({figure['detail']})" if figure["detail"] else "")
            table.add_row("" if number else result["step"], what, value, figure["must"], mark)
        if result["error"]:
            table.add_row(result["step"], result["error"], "", "", "FAIL")
    return table


@click.command()
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--rehearse", is_flag=True, help="Every step with tiny models on a CPU: shows that the steps run.")
@click.option("--only", type=click.Choice([*STEPS]), multiple=True, help="This step; may be given several times.")
@click.option("--json", "to", type=click.Path(path_type=Path), default="prove_gpu.json", show_default=True)
def main(device: str, rehearse: bool, only: tuple[str, ...], to: Path) -> None:
    """Run the steps one after the other; exit code 1 where one has failed."""
    if not rehearse and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here; --rehearse runs every step on a CPU")
    place = torch.device(device)
    scale = REHEARSAL if rehearse else full(place, torch.cuda.get_device_properties(place).total_memory < _SMALL)
    console, where = Console(soft_wrap=True, highlight=False), hardware()
    results: list[dict[str, Any]] = []
    for name in only or STEPS:
        results.append(carry_out(name, scale, console))
        document = {"rehearsal": rehearse, "device": str(scale.device), "hardware": where, "steps": results}
        to.write_text(json.dumps(document, indent=2) + "\n")  # after each step: a machine may be taken away
    console.print(table_of(results))
    failed = [result["step"] for result in results if not result["passed"]]
    minutes = sum(result["seconds"] for result in results) / 60
    console.print(
        f"{'failed: ' + ', '.join(failed) if failed else 'all passed'}; {minutes:.1f} minutes; {in_words(where)}"
    )
    console.print(f"{to} has all of it: please send it as an issue" if not rehearse else f"a rehearsal: see {to}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
