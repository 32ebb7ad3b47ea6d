#!/bin/sh
# XPressDraftModel.from_pretrained of speculators gives a refiner whose causal mask is uninitialised memory. The mask
# (`refiner_head.causal_tril`) is a buffer that is in no file (persistent=False). transformers makes a model without
# memory first and fills what the files have; a model must fill such buffers itself, and this one does not.
# Seen with speculators 0.9.0, transformers 5.19.0 and torch 2.13.0: for a block of 5 rows, the mask of the model that was
# saved and of the model that was loaded
#
#   saved   row 2: 1, 1, 1, 0, 0
#   loaded  row 2: whatever was there, such as 0, 0, 0, 0, 0 or 4.5e-44
#
# So a refiner that is loaded for further training, or as a reference, mixes no rows, or mixes them with noise, and the
# logits of its second and later rows are not those that were trained. All weights are right.
#
# Exits with 1 if this changes.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.19.0 datasets==5.1.0 accelerate==1.15.0 pydantic==2.14.4 \
    pydantic-settings==2.16.3 loguru==0.7.3 openai==3.57.0
"$folder/env/bin/pip" install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0

cat > "$folder/masks.py" <<'END'
import sys
from importlib.metadata import version

import torch
import transformers
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

layer = transformers.Qwen3Config(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=96,
)
method = SpeculatorsConfig(
    algorithm="xpress",
    proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
    default_proposal_method="greedy",
    verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
)
config = XPressSpeculatorConfig(
    transformer_layer_config=layer, speculators_config=method, draft_vocab_size=96, block_size=5, mask_token_id=3,
    aux_hidden_state_layer_ids=[1, 2, 3], xpress_rank=8,
)
model = XPressDraftModel(config)
torch.nn.init.normal_(model.refiner_head.mix_l)
for weight in (model.embed_tokens.weight, model.lm_head.weight):  # the target's; they change nothing here
    torch.nn.init.zeros_(weight)
model.save_pretrained(sys.argv[1])
loaded = XPressDraftModel.from_pretrained(sys.argv[1])
print(*(f"{name} {version(name)}" for name in ("speculators", "transformers", "torch")))
masks = [each.refiner_head.causal_tril for each in (model, loaded)]
print("saved", masks[0][2].tolist())
print("loaded", masks[1][2].tolist())
are_alike = torch.equal(model.refiner_head.mix_l, loaded.refiner_head.mix_l)
sys.exit(0 if are_alike and not torch.equal(*masks) else 1)
END
"$folder/env/bin/python" "$folder/masks.py" "$folder/head"
