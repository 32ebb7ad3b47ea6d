#!/usr/bin/env bash
# A target too large for one GPU, spread over several, layer by layer; the draft has a GPU to itself.
#
#   GPUS=0-1 DRAFT_GPU=2 launch/spread_target.sh --config configs/codellama-7b-70b.yaml --raw "def fib(n):"
#   launch/spread_target.sh --dry-run ...                                        # only show the command
#
# One GPU computes after the other: this saves memory and adds no speed.
# Still two processes: the target's worker holds all of its GPUs.
set -euo pipefail
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
dry=; if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
gpus=${GPUS:-0-1} draft=${DRAFT_GPU:-2}
command=("$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m pearl generate
    --target-device "cuda:$gpus" --draft-device "cuda:$draft" "$@")
if [ -n "$dry" ]; then printf '%q ' "${command[@]}"; echo; exit; fi
exec "${command[@]}"
