#!/usr/bin/env bash
# The test suite. Extra arguments go to pytest; --slow adds the slow tests, --oracles the live comparisons, in an
# environment of their own (.venv-oracles), as transformers wants other versions of two packages than constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
venv=.venv
for argument in "$@"; do
  if [ "$argument" = --oracles ]; then
    venv=.venv-oracles
    if ! "$venv/bin/python" -c 'import faiss, gguf, kvpress, lm_eval, torch, transformers' 2>/dev/null; then
      .venv/bin/python -m venv "$venv"
      grep -v -e '^tokenizers==' -e '^huggingface_hub==' constraints.txt > "$venv/constraints.txt"
      "$venv/bin/python" -m pip install --quiet --constraint "$venv/constraints.txt" setuptools jaxlib
      "$venv/bin/python" -m pip install --quiet --constraint "$venv/constraints.txt" --no-build-isolation \
        --editable '.[test]' \
        faiss-cpu==1.15.1 gguf==0.19.0 kvpress==0.5.5 lm-eval==0.4.13 torch==2.13.0 transformers==5.2.0
    fi
  fi
done
# One BLAS and XLA thread pool per worker would oversubscribe the cores.
exec "$venv/bin/python" -m pytest -n "${WORKERS:-2}" "$@"
