"""Make a draft that `pearl distill` has taught on the embedded target the one that PEARL ships.

    python scripts/embed_draft.py my-draft/draft

Writes its layers, in 4 bits, and its last norm into pearl/models/checkpoints/embedded_draft/layers.safetensors, and
prints what has to stand in pearl/models/checkpoints/embedded.py. The embeddings must be the target's own: they are not
repeated in the repository.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import click
import torch
from safetensors.torch import load_file, save_file

from pearl.models.checkpoints.direct import read_decoder
from pearl.models.checkpoints.embedded import DRAFT_LAYERS, embedded_target

MOST_BYTES = 20_000_000
TABLE = "model.embed_tokens.weight"
GROUP = 32
# Of a group's range that its steps may be spread over.
SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82)


@click.command()
@click.argument("draft", type=click.Path(path_type=Path))
def main(draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    target = read_decoder(embedded_target(), torch.bfloat16, torch.device("cpu"))
    if not torch.equal(tensors.pop(TABLE), target.model.embed_tokens.weight):
        raise click.ClickException("the draft has embeddings of its own")
    tensors = pack_layers(tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > MOST_BYTES:
        raise click.ClickException(
            f"{size:,} bytes are more than the {MOST_BYTES:,} that the repository is to carry"
        )
    save_file(tensors, DRAFT_LAYERS, metadata={"format": "pt"})
    layers = json.loads((draft / "config.json").read_text())["num_hidden_layers"]
    click.echo(f'DRAFT_SHA256 = "{hashlib.sha256(DRAFT_LAYERS.read_bytes()).hexdigest()}"')
    click.echo(f"DRAFT_NUM_LAYERS = {layers}")
    click.echo(f"{DRAFT_LAYERS}: {DRAFT_LAYERS.stat().st_size:,} bytes")


def pack_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as they are shipped: matrices in 4 bits, in which the forward also runs, the rest in bfloat16.

    Each 32 weights of a row are 16 steps, as in a Q4_1 file, over the share of their range that minimises the squared
    error. A matrix NAME [rows, columns] becomes NAME.steps [rows, columns / 2] (two to a byte, the first in the lower
    half), and NAME.low and NAME.width [rows, columns / 32] in bfloat16.
    """
    packed = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            packed[name] = tensor.bfloat16()
            continue
        groups = tensor.float().view(len(tensor), -1, GROUP)
        best = in_steps(groups, SHARES[0])
        for share in SHARES[1:]:
            tried = in_steps(groups, share)
            is_better = (tried.error(groups) < best.error(groups))[..., None]
            best = Steps(
                torch.where(is_better, tried.steps, best.steps),
                torch.where(is_better, tried.low, best.low),
                torch.where(is_better, tried.width, best.width),
            )
        pairs = best.steps.byte().view(len(tensor), -1, 2)
        packed[name + ".steps"] = pairs[..., 0] | pairs[..., 1] << 4
        packed[name + ".low"] = best.low[..., 0].bfloat16()
        packed[name + ".width"] = best.width[..., 0].bfloat16()
    return packed


class Steps(NamedTuple):
    """Groups of weights [..., 32] as low + steps * width; low and width are [..., 1]."""

    steps: torch.Tensor
    low: torch.Tensor
    width: torch.Tensor

    def error(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the squared error of each group."""
        return (self.low + self.steps * self.width - groups).square().sum(-1)


def in_steps(groups: torch.Tensor, share: float) -> Steps:
    """Spread 16 steps over a share of each group's range."""
    low = groups.amin(-1, keepdim=True)
    high = groups.amax(-1, keepdim=True)
    cut = (high - low) * (1 - share) / 2
    low = (low + cut).bfloat16().float()
    width = ((high - cut - low) / 15).bfloat16().float().clamp_min(torch.finfo(torch.bfloat16).tiny)
    return Steps(((groups - low) / width).round().clamp(0, 15), low, width)


if __name__ == "__main__":
    main()
