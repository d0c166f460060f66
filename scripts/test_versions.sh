#!/usr/bin/env bash
# The tests with other versions of Python and JAX than those of .venv, on a copy of the tracked files.
#   scripts/test_versions.sh PYTHON JAX [arguments of pytest]
#   scripts/test_versions.sh 3.13 0.12 tests/ops
# JAX is a series: 0.10 comes with the pins of constraints.txt, a later one with the newest versions of everything else;
# "oldest" takes the lower bounds of setup.cfg.
# python3.13 must be on PATH. The environment stays, in .venv-versions/, and is brought up to date by each call.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
  sed -n '2,7s/^# //p' "$0" >&2
  exit 2
fi
python=$1 jax=$2
shift 2
place=.venv-versions/python$python-jax$jax
[ -x "$place/bin/python" ] || "python$python" -m venv "$place"
place=$PWD/$place
# Compiled parts of one pair would be in another's way if they lay in one tree.
rm -rf "$place/tree"
mkdir "$place/tree"
git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$place/tree"
cd "$place/tree"
constraints=../constraints.txt
case $jax in
  oldest) sed -n '/^install_requires/,/^\[/s/^ *\([a-z-]*\)>=\(.*\)/\1==\2/p' setup.cfg > "$constraints" ;;
  0.10) cp constraints.txt "$constraints" ;;
  *) printf '%s\n' "jax==$jax.*" "jaxlib==$jax.*" > "$constraints" ;;
esac
"$place/bin/python" -m pip install --quiet --upgrade --constraint "$constraints" setuptools jaxlib
"$place/bin/python" -m pip install --quiet --upgrade --upgrade-strategy eager --constraint "$constraints" \
  --no-build-isolation --editable '.[test]'
"$place/bin/python" -c 'import sys, jax, flax, numpy
print("Python", sys.version.split()[0], "jax", jax.__version__, "flax", flax.__version__, "numpy", numpy.__version__)'
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$place/xla}
exec "$place/bin/python" -m pytest -n "${WORKERS:-2}" "$@"
