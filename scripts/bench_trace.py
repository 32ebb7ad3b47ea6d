"""The cost of tracing: the same texts with and without --trace, in turns, on two engines that are both loaded.

Prints the ratio of the times with a bootstrap interval, and the recorder's own measurements.

    python scripts/bench_trace.py            # the embedded pair, greedy: about five minutes
"""

from __future__ import annotations

import platform
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from pearl import Engine, RequestOptions
from pearl.lab.studies.estimate import bootstrap
from pearl.trace.reading import read
from pearl.trace.report import report


@click.command()
@click.option("--target", default="embedded", help="Target model.")
@click.option("--draft", default="embedded-draft", help="Draft model.")
@click.option("--target-pace", type=float, help="Emulation: seconds of a target forward.")
@click.option("--draft-pace", type=float, help="Emulation: seconds of a draft forward.")
@click.option("--tokens", default=48, help="Tokens a text.")
@click.option("--pairs", default=20, help="Texts with a trace, and as many without.")
def main(
    target: str,
    draft: str,
    target_pace: float | None,
    draft_pace: float | None,
    tokens: int,
    pairs: int,
) -> None:
    """Prints seconds with a trace over seconds without, and the recorder's own share."""
    console = Console(soft_wrap=True, highlight=False)
    params = RequestOptions(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompt = list(range(5, 25))
    pace: dict[str, Any] = {"target_pace": target_pace, "draft_pace": draft_pace}
    ratios: list[float] = []
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        with (
            Engine(target, draft, **pace) as off,
            Engine(target, draft, trace=str(path), **pace) as on,
        ):
            for i in range(-1, pairs):  # the first warms up
                order = (off, on) if i % 2 else (on, off)
                seconds = {e: e.generate([prompt], params)[0].statistics.seconds for e in order}
                if i >= 0:
                    ratios.append(seconds[on] / seconds[off])
                    console.print(
                        f"{i}: {seconds[off]:.3f} s without, {seconds[on]:.3f} s with a trace"
                    )
        trace = read(path)
        size = path.stat().st_size
    summary = report(trace)
    ratio = bootstrap(ratios)
    console.print(
        f"with over without: {ratio.value:.4f}, 95% interval {ratio.low:.4f} to {ratio.high:.4f}; "
        f"{pairs} x {tokens} tokens"
    )
    console.print(f"file: {size / summary.tokens / 1e3:.1f} kB a token; {platform.machine()}")


if __name__ == "__main__":
    main()
