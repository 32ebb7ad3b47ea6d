#!/usr/bin/env bash
# Two hosts: the first runs the target (and is the front), the second the draft. Run the same line on both, rank 0 on the
# first, rank 1 on the second:
#
#   pearl keys pearl.keys && scp -p pearl.keys second:                           # once; whoever has the file can get in
#   RANK=0 HOST=10.0.0.1 KEYS=pearl.keys launch/two_hosts.sh "Explain gravity to a beginner."      # on 10.0.0.1
#   RANK=1 HOST=10.0.0.1 KEYS=pearl.keys launch/two_hosts.sh "Explain gravity to a beginner."      # on the second
#   RANK=0 HOST=10.0.0.1 KEYS=pearl.keys launch/two_hosts.sh --dry-run "..."     # only show the command
#
# HOST is the first host's address, by which the second reaches it. PORT (29500) is torchrun's, CONTROL_PORT (29501) ours;
# nothing else is opened. What PEARL says is encrypted and both sides prove their key; torchrun's own rendezvous is
# neither, so let no stranger reach PORT (see SECURITY.md). It is static, for torchrun's other ones unpickle what they
# receive. Both hosts must find the models under the same names.
set -euo pipefail
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}  # else torchrun warns of every address without a name
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
dry=; if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
: "${RANK:?0 on the first host, 1 on the second}" "${HOST:?the address of the first host}" "${KEYS:?made by: pearl keys FILE}"
command=("$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend static --max-restarts 0
    --node-rank "$RANK" --master-addr "$HOST" --master-port "${PORT:-29500}"
    -m pearl generate --control "tcp://$HOST:${CONTROL_PORT:-29501}" --keys "$KEYS" "$@")
if [ -n "$dry" ]; then printf '%q ' "${command[@]}"; echo; exit; fi
exec "${command[@]}"
