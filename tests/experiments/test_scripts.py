"""Benchmarks that are scripts still run, at small sizes."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def output_of(script, *settings) -> str:
    done = subprocess.run([sys.executable, f"scripts/{script}.py", *settings], cwd=ROOT, text=True, capture_output=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bench_v2f():
    """Both ways to select attend alike."""
    out = output_of("bench_v2f", "--tokens=1024", "--repeats=1")
    apart = [float(line.split()[-1]) for line in out.splitlines() if "largest difference" in line]
    assert len(apart) == 2 and max(apart) < 1e-5 and "head after head" in out.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "split --steps=1 --capacity=512", "saving --repeats=1", "reads --repeats=1 --blocks_kb=16 --asked=1",
    "parking --layers=2 --context=512 --steps=1", "fetch --blocks=0,1 --layers=2 --context=512 --repeats=1",
    "weights --rows=64 --columns=96 --mib=1 --repeats=5 --many=70", "accuracy --tokens=64",
    "drivers --methods=quest --tokens=4 --repeats=1",
])
def test_bench(command, tmp_path):
    name, *settings = command.split()
    where = [] if name in ("split", "weights", "accuracy") else [f"--dir={tmp_path}"]
    assert output_of(f"bench_{name}", *settings, *where)


@pytest.mark.slow
def test_check_tiers():
    out = output_of("check_tiers", "--methods=quest", "--drivers=fused").splitlines()[1:]
    assert len(out) == 3 and all("0.0e+00 apart" in line for line in out)
    assert "pinned_host -> pinned_host" in out[2]
