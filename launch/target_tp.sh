#!/usr/bin/env bash
# A target shared by several GPUs, each computing its part of every layer (tensor parallelism); the draft has one to itself, or several.
#
#   TP=2 launch/target_tp.sh --config configs/codellama-7b-70b.yaml --raw "def fib(n):"
#   TP=4 GPUS=0-3 DRAFT_GPU=4 launch/target_tp.sh --target my-model --draft my-draft "..."
#   DRAFT_GPU=2-3 launch/target_tp.sh --draft-tp 2 ...                           # a draft shared by two as well
#   DEVICE=cpu TP=3 launch/target_tp.sh "Explain gravity to a beginner."         # the embedded pair, whose 9 heads 3 can share
#   launch/target_tp.sh --dry-run ...                                            # only show the command
#
# TP must divide the model's heads (see the README). GPUS (by default the first TP) and DRAFT_GPU (the next) take the
# place of the devices in a configuration file.
set -euo pipefail
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
dry=; if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
tp=${TP:-2}
target=cuda:${GPUS:-0-$((tp - 1))} draft=cuda:${DRAFT_GPU:-$tp}
if [ "${DEVICE:-cuda}" = cpu ]; then target=auto draft=auto; fi
command=("$python" -m pearl generate
    --target-tp "$tp" --target-device "$target" --draft-device "$draft" "$@")
if [ -n "$dry" ]; then printf '%q ' "${command[@]}"; echo; exit; fi
exec "${command[@]}"
