#!/usr/bin/env bash
# One engine behind OpenAI's API, with the page at / (needs the extra `server`).
#
#   launch/serve.sh                                                              # the embedded pair at 127.0.0.1:8000
#   launch/serve.sh --config configs/codellama-7b-34b.yaml
#   HTTP=0.0.0.0:8000 PEARL_API_KEY=... launch/serve.sh                          # for other hosts: asks for the key
#   launch/serve.sh --dry-run ...                                                # only show the command
#
# As a service of a host: launch/pearl.service; in a container: launch/Dockerfile.
set -euo pipefail
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
dry=; if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
command=("$python" -m pearl serve --http "${HTTP:-127.0.0.1:8000}" "$@")
if [ -n "$dry" ]; then printf '%q ' "${command[@]}"; echo; exit; fi
exec "${command[@]}"
