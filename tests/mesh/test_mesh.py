"""The tests of `eight_devices.py`, in a process of their own: JAX is told the number of devices before it starts."""

import os
import subprocess
import sys

from test_architecture import ROOT


def test_eight_devices_compute_what_one_does(request):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    more = ["--slow"] if request.config.getoption("--slow") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *more,
               "tests/mesh/eight_devices.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
