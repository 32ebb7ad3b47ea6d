#!/usr/bin/env bash
# Two torchrun agents on one host, one rank each: how a scheduler that starts one agent a task would launch PEARL.
#
#   launch/two_agents.sh "Explain gravity to a beginner."
#   launch/two_agents.sh --dry-run "..."                                         # only show the two commands
#
# The agents meet on loopback, at a port that is free now. For two hosts: launch/two_hosts.sh.
set -euo pipefail
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
dry=; if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
port=${PORT:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
agent() {
    command=("$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d
        --rdzv-id "pearl-$port" --rdzv-endpoint "127.0.0.1:$port" --local-addr 127.0.0.1 -m pearl generate "$@")
    if [ -n "$dry" ]; then printf '%q ' "${command[@]}"; echo; else exec "${command[@]}"; fi
}
if [ -n "$dry" ]; then agent "$@"; agent "$@"; exit; fi
agent "$@" &
second=$!
trap 'kill $second 2>/dev/null || true' EXIT
(agent "$@")
wait $second
