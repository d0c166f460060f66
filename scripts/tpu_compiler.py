"""libtpu, which holds the compiler for TPUs, in a folder of its own: an environment with it would look for a TPU."""

import os
import pathlib
import re
import subprocess
import sys

_CONSTRAINTS = pathlib.Path(__file__).resolve().parent.parent / "constraints.txt"


def install(place: pathlib.Path) -> str | None:
    """Makes libtpu importable, which pip puts into a folder unless it is there.

    Args:
      place: the folder; it has nothing but libtpu.

    Returns:
      None, or a sentence that says why it cannot be installed.

    Raises:
      RuntimeError: pip fails for another reason than that there is nothing to install.
    """
    name, version = re.search(r"^(libtpu)==(.*)$", _CONSTRAINTS.read_text(), re.M).groups()
    if not (place / f"{name}-{version}.dist-info").exists():
        print(f"installing {name} {version} into {place} (some 200 MB)", flush=True)
        options = ["--quiet", "--upgrade", "--no-deps", "--target", str(place), f"{name}=={version}"]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options], capture_output=True, text=True)
        if "No matching distribution found" in done.stderr:
            return (f"{name} {version} cannot be installed (no network, or no wheel for this Python or platform), so "
                    "that nothing was compiled for a TPU.")
        if done.returncode:
            raise RuntimeError(f"pip could not install {name} {version}:\n{done.stderr}")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # else libtpu asks a cloud machine for its hosts
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used, so that others may use the compiler
    sys.path.append(str(place))
    return None
