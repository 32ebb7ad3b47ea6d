#!/usr/bin/env bash
# Does speculators 0.9.0 train the output head of a drafter with a vocabulary of its own (--draft-vocab-size)?
#
# Expected: yes. The published EAGLE-3 heads have trained ones, and a checkpoint of speculators has an lm_head.weight
# in either case. Seen: no, for EAGLE-3 and DFlash alike. The matrix is a copy of the target's rows of these tokens,
# frozen; one step of training leaves it as it was, bit for bit. So such a checkpoint holds nothing in it that `d2t`
# and the target do not tell: the largest matrix of a small head.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip install --quiet"
$pip torch==2.13.0
$pip transformers==5.19.0 datasets==5.1.0 openai==3.57.0 loguru==0.7.3 pydantic-settings==2.16.3 \
    httpx==0.28.1 aiohttp==3.14.5 click==8.5.1 typer==0.29.2 rich==15.0.0 psutil==7.2.2 protobuf==7.36.2
$pip --no-deps speculators==0.9.0 hs-connectors==0.9.0
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel
from speculators.train.optimizers import build_optimizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

print("speculators", version("speculators"))
folder = Path(sys.argv[1])
torch.manual_seed(0)
sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=7,
    num_attention_heads=4, num_key_value_heads=2,
)
target = LlamaForCausalLM(LlamaConfig(**sizes))
target.save_pretrained(folder / "target")
known = torch.arange(1, 64, 4)  # the tokens of the drafter's vocabulary
t2d = torch.zeros(64, dtype=torch.bool)
t2d[known] = True
d2t = known - torch.arange(len(known))
text = torch.randint(64, (1, 40))
batch = dict(
    hidden_states=torch.randn(1, 40, 96), input_ids=text, loss_mask=torch.ones_like(text),
    verifier_last_hidden_states=torch.randn(1, 40, 32), document_ids=torch.zeros_like(text),
    position_ids=torch.arange(40)[None],
)
for name, kind, options in (
    ("eagle3", LlamaConfig, {"norm_before_residual": False, "ttt_steps": 2, "ttt_step_loss_decay": 1.0}),
    ("dflash", Qwen3Config, {"block_size": 4, "mask_token_id": 0, "max_anchors": 8}),
):
    options |= {"loss_fn": "ce", "loss_implementation": "eager"}
    model_class = SpeculatorModel.registry[name]
    drafter = model_class.from_training_args(
        kind(**{**sizes, "num_hidden_layers": 1}), t2d=t2d, d2t=d2t, draft_vocab_size=len(known),
        verifier_name_or_path=str(folder / "target"), draft_attn_impl="sdpa", **options,
    ).train()
    begin = {key: weight.detach().clone() for key, weight in drafter.named_parameters()}
    settings = SimpleNamespace(optimizer="adamw", lr=1e-2, weight_decay=0.01)
    (optimizer,) = build_optimizers(drafter, settings)
    for_training, _ = model_class.get_trainer_kwargs(**options)
    _, loss, _ = drafter(**batch, **for_training)
    loss.backward()
    optimizer.step()
    moved = [key for key, weight in drafter.named_parameters() if not torch.equal(weight, begin[key])]
    drafter.save_pretrained(folder / name)
    saved = load_file(folder / name / "model.safetensors")["lm_head.weight"]
    is_copy = torch.equal(saved, target.lm_head.weight[known])
    print(f"{name}: {len(moved)} tensors moved; saved lm_head {list(saved.shape)} is the target's rows: {is_copy}")
    assert moved and "lm_head.weight" not in moved and is_copy, "the output head is trained"
PYTHON
