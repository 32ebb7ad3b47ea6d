#!/usr/bin/env bash
# Which distributions of a Gemma target does speculators 0.9.0 train a drafter on?
#
# Expected: the target's own, for all kinds of drafters. A Gemma's norms multiply by 1 + their weights; speculators knows
# that (`resolve_verifier_norm_class`), and a function of that name serves all kinds. Seen: only block drafters (DFlash
# and its kin) call it. EAGLE-3 and P-EAGLE drafters multiply by the weights alone, so their trainer learns from other
# distributions than the target's, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip install --quiet"
$pip torch==2.13.0
$pip transformers==5.19.0 datasets==5.1.0 openai==3.57.0 loguru==0.7.3 pydantic-settings==2.16.3 \
    httpx==0.28.1 aiohttp==3.14.5 click==8.5.1 typer==0.29.2 rich==15.0.0 psutil==7.2.2 protobuf==7.36.2
$pip --no-deps speculators==0.9.0 hs-connectors==0.9.0
"$folder/env/bin/python" - "$folder/target" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from speculators.model import SpeculatorModel
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config

print("speculators", version("speculators"), "transformers", version("transformers"))
torch.manual_seed(0)
sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=7,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)
target = Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()
target.model.norm.weight.data.normal_(std=0.3)  # as in a trained model, not all zeros
target.save_pretrained(sys.argv[1])
layers = Qwen3Config(**{**sizes, "num_hidden_layers": 1})
states = []
target.model.layers[-1].register_forward_hook(lambda layer, inputs, output: states.append(output))
with torch.no_grad():
    wanted = target(torch.arange(20)[None]).logits.softmax(-1)
errors = {}
for name, options in (
    ("dflash", {"block_size": 4}),
    ("eagle3", {"norm_before_residual": False, "ttt_steps": 2}),
    ("peagle", {"norm_before_residual": False, "num_depths": 4}),
):
    drafter = SpeculatorModel.registry[name].from_training_args(
        layers, draft_vocab_size=64, mask_token_id=0, verifier_name_or_path=sys.argv[1],
        draft_attn_impl="sdpa", **options,
    )
    with torch.no_grad():
        learned = drafter.verifier_lm_head(drafter.verifier_norm(states[0])).softmax(-1)
    errors[name] = (learned - wanted).abs().max().item()
    print(f"{name}: probabilities differ from the target's by {errors[name]:.1e}")
assert errors["dflash"] < 1e-5, "a block drafter learns from other distributions"
assert min(errors["eagle3"], errors["peagle"]) > 1e-3, "EAGLE-3 drafters learn from the target's own"
PYTHON
