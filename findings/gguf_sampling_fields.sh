#!/bin/sh
# gguf 0.19.0: what becomes of a generation_config.json in a GGUF file's fields general.sampling.*, which llama-server
# takes as its defaults.
# Metadata.load copies "temperature" whatever "do_sample" says, so a model that its publisher wants to be greedy is sampled.
# It looks for "penalty_repeat", a name that no generation_config.json has, so "repetition_penalty" is lost.
# Exits with 1 if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet gguf==0.19.0
mkdir "$folder/model"
cat > "$folder/model/generation_config.json" <<'JSON'
{"do_sample": false, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
JSON
"$folder/env/bin/python" - "$folder/model" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

from gguf import Metadata

metadata = Metadata.load(model_path=Path(sys.argv[1]))
seen = {name: value for name, value in vars(metadata).items() if name.startswith("sampling_") and value is not None}
print("gguf", version("gguf"), "keeps of do_sample false and repetition_penalty 1.05:", seen)
sys.exit(seen != {"sampling_temp": 0.6, "sampling_top_k": 20, "sampling_top_p": 0.95})
PYTHON
