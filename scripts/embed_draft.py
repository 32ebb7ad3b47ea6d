"""Makes a draft that `pearl distill` has taught on the embedded target the one that PEARL ships.

    python scripts/embed_draft.py my-draft/draft

Writes its layers, in 4 bits, and its last norm into pearl/models/checkpoints/embedded_draft/layers.safetensors, and
prints what has to stand in pearl/models/checkpoints/embedded.py. The embeddings must be the target's own: they are not
repeated in the repository.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file

from pearl.models.checkpoints.embedded import DRAFT_LAYERS, embedded_target, pack_layers

MOST_BYTES = 20_000_000
TABLE = "model.embed_tokens.weight"


@click.command()
@click.argument("draft", type=click.Path(path_type=Path))
def main(draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    table = load_file(embedded_target() / "model.safetensors")[TABLE]
    if not torch.equal(tensors.pop(TABLE), table):
        raise click.ClickException("the draft has embeddings of its own")
    tensors = pack_layers(tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > MOST_BYTES:
        raise click.ClickException(f"{size:,} bytes are more than the {MOST_BYTES:,} that the repository is to carry")
    save_file(tensors, DRAFT_LAYERS, metadata={"format": "pt"})
    layers = json.loads((draft / "config.json").read_text())["num_hidden_layers"]
    click.echo(f'DRAFT_SHA256 = "{hashlib.sha256(DRAFT_LAYERS.read_bytes()).hexdigest()}"')
    click.echo(f"DRAFT_NUM_LAYERS = {layers}")
    click.echo(f"{DRAFT_LAYERS}: {DRAFT_LAYERS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
