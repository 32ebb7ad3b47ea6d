#!/bin/sh
# `norm_output` in the config.json of an EAGLE-3 head has two meanings. In specforge 0.2.0 it says that the last norm
# stands before lm_head (which is the default); in speculators 0.9.0 it says that what the last norm gives is fed to the
# next step, in place of the state before it. speculators' own converter copies the flag from a head of the former to
# one of the latter. So the converted head computes another function: its first guess is the same, later ones are not.
# Seen with torch 2.14.1 and transformers 5.19.0 on a CPU, largest difference of logits between the two heads:
#
#   norm_output in config.json   after conversion   first guess   second guess
#   absent                       False              7.2e-07       7.2e-07
#   True                         True               7.2e-07       1.2
#
# Exits with 1 if this changes.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 torchaudio==2.11.1 transformers==5.19.0 speculators==0.9.0 pyyaml
"$folder/env/bin/pip" install --quiet --no-deps specforge==0.2.0  # its dependencies are for training on GPUs

cat > "$folder/heads.py" <<'END'
import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
import transformers
from loguru import logger
from safetensors.torch import load_file
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

logger.remove()
folder = Path(sys.argv[1])
sizes = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
transformers.LlamaConfig(**sizes).save_pretrained(folder / "target")
tokens, states = torch.tensor([[5, 9]]), torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def of_specforge(head):
    cache, hidden, guesses = [[], []], head.project_hidden_states(states), []
    for step in range(2):
        hidden = head.backbone(
            input_embeds=head.embed_input_ids(tokens[:, step : step + 1]),
            hidden_states=hidden,
            cache_hidden=cache,
            attention_mask=torch.zeros(1, 1, 1, 1),
            position_ids=torch.zeros(1, 1, dtype=torch.long),
            use_cache=False,
        )
        guesses.append(head.compute_logits(hidden)[0, 0])
    return guesses


@torch.no_grad()
def of_speculators(directory):
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel(config).eval()
    head.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    guesses = []
    head.lm_head.register_forward_hook(lambda module, given, logits: guesses.append(logits[0, 0]))
    # Its forward continues with the text's own tokens: the second step reads the second one at the first position.
    both = torch.cat((states, torch.zeros_like(states)), 1)
    head(hidden_states=both, input_ids=tokens, document_ids=torch.zeros(1, 2, dtype=torch.long), ttt_steps=2)
    return guesses, config.norm_output


print("torch", torch.__version__, "transformers", transformers.__version__)
rows = []
for flag in ({}, {"norm_output": True}):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, draft_vocab_size=64, architectures=["LlamaForCausalLMEagle3"], **flag)
    head = LlamaForCausalLMEagle3(config).eval()
    with torch.no_grad():
        for name, weight in head.named_parameters():
            weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0, 0.2)
    source, converted = folder / f"specforge{len(flag)}", folder / f"speculators{len(flag)}"
    head.save_pretrained(source)
    assert json.loads((source / "config.json").read_text()).get("norm_output") == flag.get("norm_output")
    Eagle3Converter().convert(source, converted, str(folder / "target"), validate=False)
    theirs, norm_output = of_speculators(converted)
    gaps = [float((one - other).abs().max()) for one, other in zip(of_specforge(head), theirs)]
    print(flag.get("norm_output", "absent"), norm_output, *(f"{gap:.2g}" for gap in gaps))
    rows.append((norm_output, *(gap > 1e-4 for gap in gaps)))
sys.exit(0 if rows == [(False, False, False), (True, False, True)] else 1)
END
HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/heads.py" "$folder"
