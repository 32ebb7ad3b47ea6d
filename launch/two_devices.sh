#!/usr/bin/env bash
# Two devices on one host: rank 0 runs the target (and is the front), rank 1 the draft.
#
#   launch/two_devices.sh "Explain gravity to a beginner."                       # the embedded pair on two CPU cores
#   launch/two_devices.sh --config configs/codellama-7b-34b.yaml --raw "def fib(n):"
#   launch/two_devices.sh --dry-run "..."                                        # only show the command
#
# Arguments are those of `pearl generate`. --standalone makes torchrun pick a free port for its own rendezvous, so that
# two such jobs can run side by side.
set -euo pipefail
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
dry=; if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
command=("$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m pearl generate "$@")
if [ -n "$dry" ]; then printf '%q ' "${command[@]}"; echo; exit; fi
exec "${command[@]}"
