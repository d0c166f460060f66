#!/usr/bin/env bash
# The main job: the reference model answers questions to a long document, its KV cache on flash.
#   scripts/demo.sh [--config.model=DIR --config.prompt_file=FILE --config.question="..."]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python -m experiments.main --config=configs/demo.py --workdir="${WORKDIR:-runs/demo}" "$@"
