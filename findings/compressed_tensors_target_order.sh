#!/usr/bin/env bash
# Which group does compressed-tensors 0.20.1 give to a module that two regular expressions match?
#
# Expected: that of the expression that comes first in `config_groups`, as in GPTQModel's `dynamic` and AutoRound's
# `extra_config`. Seen: that of the expression that comes first in the alphabet, in either order of the file
# (`match_targets` sorts the targets; its comment speaks of more specific ones). So "re:.*down_proj" goes before
# "re:.*proj" only because "d" is before "p", and "re:.*mlp.*" beats "re:.*mlp.down_proj".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.17.0 compressed-tensors==0.20.1
"$folder/env/bin/python" - <<'PYTHON'
import compressed_tensors
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

print("compressed-tensors", compressed_tensors.__version__)


def bits(*targets):
    """The bits of mlp.down_proj, where the first target has 8 and the second 4."""
    groups = {
        f"group_{number}": {"targets": [target], "weights": {"num_bits": 8 - 4 * number}}
        for number, target in enumerate(targets)
    }
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"down_proj": torch.nn.Linear(32, 32)})})
    apply_quantization_config(model, QuantizationConfig(config_groups=groups))
    return model.mlp.down_proj.quantization_scheme.weights.num_bits


seen = {
    targets: bits(*targets)
    for targets in (
        ("re:.*proj", "re:.*down_proj"),
        ("re:.*down_proj", "re:.*proj"),
        ("re:.*mlp.down_proj", "re:.*mlp.*"),
        ("re:.*mlp.*", "re:.*mlp.down_proj"),
    )
}
for targets, found in seen.items():
    print(f"{targets[0]} (8 bits), {targets[1]} (4 bits): {found}")
assert list(seen.values()) == [4, 8, 4, 8], "the order of targets has changed"
PYTHON
