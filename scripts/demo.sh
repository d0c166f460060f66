#!/usr/bin/env bash
# The main job: the reference model answers questions to a long document, its KV cache on flash.
#   scripts/demo.sh [--config.model=DIR --config.prompt_file=FILE --config.question="..."]
# Results go to a directory of their own under runs/; WORKDIR=DIR names one, and goes on with what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python -m experiments.main --config=configs/demo.py --workdir="${WORKDIR:-runs/demo-$(date +%Y%m%d-%H%M%S)}" "$@"
