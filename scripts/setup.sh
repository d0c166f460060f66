#!/usr/bin/env bash
# Makes .venv from the pinned versions if it is missing or out of date; quick if it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=$(cat setup.cfg setup.py constraints.txt kvjax/*.h kvjax/*/*/*.[ch] | sha256sum | cut -d' ' -f1)
stamp=.venv/.kvjax-setup
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi
python=""
for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: kvjax needs Python 3.11 or newer; install it, or set PYTHON to its path" >&2
  exit 2
fi
echo "making .venv with $("$python" --version) (a few minutes the first time)"
"$python" -m venv .venv
# What kvjax is built with goes into .venv itself: an environment for building alone would install jaxlib twice.
.venv/bin/python -m pip install --quiet --constraint constraints.txt setuptools jaxlib
rm -f kvjax/*/*/*.so  # where they cannot be compiled, pip would leave older ones in use without a word
.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
for part in store/native/_compiled ops/kernels/_compiled; do
  if [ -z "$(find kvjax -path "kvjax/$part.*.so")" ]; then
    echo "note: kvjax/$part was not compiled (GCC 12 or clang does that), so that decoding on CPU is slower" >&2
  fi
done
echo "$wanted" > "$stamp"
