#!/usr/bin/env bash
# The main job: questions to a document whose KV cache, on flash, does not fit the memory that it is given.
#   scripts/demo.sh [--config.memory=MIB]
#   scripts/demo.sh --config.model=DIR --config.prompt_file=FILE --config.question="..."
# Results go to a directory of their own under runs/ of the repository; WORKDIR=DIR names one, and goes on with what is
# there. Paths that are given are relative to where this is called.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
"$root/scripts/setup.sh"
export PYTHONPATH="$root"
exec "$root/.venv/bin/python" -P -m experiments.main --config="$root/configs/demo.py" \
  --workdir="${WORKDIR:-$root/runs/demo-$(date +%Y%m%d-%H%M%S)}" "$@"
