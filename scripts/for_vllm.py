"""A model that PEARL reads from GGUF, dequantised, as a folder of safetensors that vLLM loads.

    python scripts/for_vllm.py MODEL OUT      # MODEL: a .gguf file, embedded or embedded-draft; weights in bfloat16

For benchmarks: vLLM's own draft_model and PEARL's draft then have the same numbers.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.gguf_weights import GgufWeights
from pearl.models.families import OWN_FORWARD

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def main(model: str, out: Path) -> None:
    directory = resolve_checkpoint(model)
    table = table_in(directory)
    if table is None:
        sys.exit(f"{model} is no GGUF file: vLLM loads it as it is")
    config = json.loads((directory / "config.json").read_text())
    weights = GgufWeights(table, OWN_FORWARD[config["architectures"][0]].forward)
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights.state_dict(torch.bfloat16), out / "model.safetensors", {"format": "pt"})
    for name in _FILES:
        if (directory / name).exists():
            shutil.copy(directory / name, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
