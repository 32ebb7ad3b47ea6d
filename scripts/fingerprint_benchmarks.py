"""Make pearl/lab/distill/benchmarks.npy from the prompts of HumanEval, GSM8K and MT-bench.

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
    hashes: set[int] = set()
    for path in files:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            turns = record.get("turns") or [record.get("prompt") or record["question"]]
            for turn in turns:
                hashes |= fingerprints(turn)
    np.save(FINGERPRINTS, np.array(sorted(hashes), dtype=np.uint32))
    click.echo(f"{FINGERPRINTS}: {len(hashes)} fingerprints, {FINGERPRINTS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
