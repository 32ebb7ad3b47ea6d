"""Makes pearl/lab/distill/benchmarks.npy from the prompts of HumanEval, GSM8K and MT-bench.

    python scripts/fingerprint_benchmarks.py humaneval.jsonl gsm8k.jsonl mt_bench.jsonl

Each line of a file has its prompt under "prompt" or "question", or its user turns under "turns".
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from pearl.lab.distill.benchmarks import FINGERPRINTS, fingerprints


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    known: set[int] = set()
    for path in files:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            turns = record.get("turns") or [record.get("prompt") or record["question"]]
            known = known.union(*(fingerprints(turn) for turn in turns))
    np.save(FINGERPRINTS, np.array(sorted(known), dtype=np.uint32))
    click.echo(f"{FINGERPRINTS}: {len(known)} fingerprints, {FINGERPRINTS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
