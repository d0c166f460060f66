#!/usr/bin/env bash
# The test suite. Extra arguments go to pytest; --slow adds the slow tests, --oracles the live comparisons (installs
# faiss, kvpress, lm-eval, torch and transformers).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
for argument in "$@"; do
  if [ "$argument" = --oracles ]; then
    .venv/bin/python -c 'import faiss, kvpress, lm_eval, torch, transformers' 2>/dev/null ||
      .venv/bin/python -m pip install --quiet faiss-cpu==1.15.1 kvpress==0.5.5 lm-eval==0.4.13 torch==2.13.0 \
        transformers==5.2.0
  fi
done
# One BLAS and XLA thread pool per worker would oversubscribe the cores.
exec .venv/bin/python -m pytest -n "${WORKERS:-2}" "$@"
