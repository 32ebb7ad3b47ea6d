#!/usr/bin/env bash
# Do sampled texts with a Gemma 4 assistant have the target's distribution in transformers 5.24.0?
#
# Expected: yes, as with other assistants: a drafted token x is accepted with probability p(x) / q(x), where q is the
# distribution that x was drawn from. Seen: no. The assistant takes its likeliest token, always, and hands in the softmax of
# its logits as q. So a token that it likes is accepted more often than the target draws it. With small models of random
# weights and 8 tokens, 500 texts, at the second sampled position (chi-square, 24.3 is exceeded once in 1,000):
#
#   without an assistant   16
#   with an assistant     325
#
# Greedy texts are right. An exact q would be 1 for the drafted token, as for tokens that a prompt lookup proposes.
# Exits with 1 if that changes. Some minutes, 1 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.24.0
cat > "$folder/show.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

TOKENS = 8
TEXTS = 500
BOUND = 24.3  # of a chi-square of 7 degrees of freedom: exceeded once in 1,000

torch.manual_seed(0)
transformers.logging.set_verbosity_error()
layers = dict(
    vocab_size=TOKENS,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    global_head_dim=16,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
)
target = Gemma4ForCausalLM(Gemma4TextConfig(**layers)).eval()
text_config = Gemma4TextConfig(**layers, num_kv_shared_layers=2)
config = Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=32)
assistant = Gemma4AssistantForCausalLM(config).eval()
assistant.generation_config.num_assistant_tokens = 3
for model in (target, assistant):
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.08)
prompt = torch.tensor([[3, 1, 4, 1, 5]])


@torch.no_grad()
def probabilities(ids):
    return target(ids).logits[0, -1].softmax(-1)


first = probabilities(prompt)
second = torch.zeros(TOKENS)
for token in range(TOKENS):
    ids = torch.cat((prompt, torch.tensor([[token]])), 1)
    second += first[token] * probabilities(ids)


def chi_square(**mode):
    """Of the second token of sampled texts, beside the target's exact probabilities."""
    counts = torch.zeros(TOKENS)
    for _ in range(TEXTS):
        ids = target.generate(prompt, max_new_tokens=3, do_sample=True, top_k=0, **mode)
        counts[ids[0, prompt.shape[1] + 1]] += 1
    print(*(f"{count / TEXTS:.3f}" for count in counts.tolist()), *mode)
    expected = TEXTS * second
    return float(((counts - expected) ** 2 / expected).sum())


print("transformers", transformers.__version__)
print(*(f"{share:.3f}" for share in second.tolist()), "exact")
alone = chi_square()
assisted = chi_square(assistant_model=assistant)
print(f"chi-square: {alone:.0f} without an assistant, {assisted:.0f} with one; bound {BOUND}")
sys.exit(not alone < BOUND < 3 * BOUND < assisted)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
