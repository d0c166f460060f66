"""Time from nothing to a first answer: README's example in a process of its own, with and without kept programs.

    python scripts/bench_start.py [--repeats=5]

Each repeat starts three processes: one that keeps no programs, one that keeps its programs in an empty directory, and
one that finds them there. Wall and processor seconds are of the whole process, Python's start and imports included. The
limit is a process that only imports kvjax.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPEATS = flags.DEFINE_integer("repeats", 5, "processes of each kind", lower_bound=5)
WORKDIR = flags.DEFINE_string("workdir", "runs/start", "where summary.json goes")

IMPORT = "import kvjax"
ANSWER = """
import pathlib, sys, tempfile, kvjax
if sys.argv[1]:
    kvjax.keep_programs(sys.argv[1])
root = pathlib.Path(kvjax.__file__).parent
text = (root / "inference" / "decode.py").read_text()
context = text[:2000] + "\\nThe pass key is 29318.\\n" + (root / "llm.py").read_text()[:2000]
llm = kvjax.load(root / "reference")
method = kvjax.KVSwap(budget=256, sigma=2, bits=4, per_head=True)
with llm.prefill(context, method=method, store=kvjax.FlashStore(directory=sys.argv[2])) as cache:
    assert llm.generate("\\nThe pass key is", cache, max_new_tokens=4).text == " 29318."
"""


def timed(code: str, *arguments: str) -> tuple[float, float]:
    """Runs code in a process of its own; returns wall and processor seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment, cwd=ROOT,
                   stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))


def main(_) -> None:
    """Prints a table and writes summary.json."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        timed(IMPORT)  # files of Python and JAX are in memory from here on
        for turn in range(REPEATS.value):
            kept = os.path.join(scratch, f"programs{turn}")
            for what, code, arguments in (("import only", IMPORT, ()), ("no programs kept", ANSWER, ("", scratch)),
                                          ("first start", ANSWER, (kept, scratch)),
                                          ("second start", ANSWER, (kept, scratch))):
                seconds.setdefault(what, []).append(timed(code, *arguments))
    rows = []
    print("| start | wall, s (least, most) | processor, s (least, most) |\n|---|---|---|")
    for what, pairs in seconds.items():
        columns = np.array(pairs).T
        cells = [f"{np.median(column):.1f} ({column.min():.1f}, {column.max():.1f})" for column in columns]
        print(f"| {what} | {cells[0]} | {cells[1]} |")
        rows.append({"start": what, "wall_s": columns[0].tolist(), "processor_s": columns[1].tolist()})
    path = pathlib.Path(WORKDIR.value)
    path.mkdir(parents=True, exist_ok=True)
    summary = {"experiment": "start", "config": {"repeats": REPEATS.value}, **results.machine(), "rows": rows}
    (path / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
