#!/usr/bin/env bash
# Which "last hidden states" does speculators 0.9.0 train a head on: those after the target's last norm, as transformers
# returns them, or those before it?
#
# Expected: after it. A writer of hidden states takes `output_hidden_states` of transformers, whose last entry is what
# the output head reads. Seen: before it. The drafter applies the norm itself (`verifier_norm`), so states that have
# passed it once pass it twice: the trainer then learns from other distributions than the target's, without a word.
# transformers' tuple has no such entry: the output of the last layer takes a hook.
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
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

print("speculators", version("speculators"), "transformers", version("transformers"))
torch.manual_seed(0)
sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=7,
    num_attention_heads=4, num_key_value_heads=2,
)
target = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
target.model.norm.weight.data.uniform_(0.5, 4)  # as in a trained model, not all ones
target.save_pretrained(sys.argv[1])
layers = Qwen3Config(**{**sizes, "num_hidden_layers": 1})
drafter = SpeculatorModel.registry["dflash"].from_training_args(
    layers, draft_vocab_size=64, block_size=4, mask_token_id=0, verifier_name_or_path=sys.argv[1],
    draft_attn_impl="sdpa",
)
before = []
target.model.layers[-1].register_forward_hook(lambda layer, inputs, output: before.append(output))
with torch.no_grad():
    outputs = target(torch.arange(20)[None], output_hidden_states=True)
    errors = {}
    for name, states in (("after", outputs.hidden_states[-1]), ("before", before[0])):
        learned = drafter.verifier_lm_head(drafter.verifier_norm(states))
        errors[name] = (learned.softmax(-1) - outputs.logits.softmax(-1)).abs().max().item()
        print(f"states {name} the last norm: probabilities differ from the target's by {errors[name]:.1e}")
assert errors["before"] < 1e-5 < 1e-3 < errors["after"], "other states are read"
PYTHON
