"""Files that every run leaves in its workdir: config.json, metrics.jsonl, summary.json."""

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import ml_collections
from absl import logging

from experiments import common
from kvjax import _files
from kvjax.errors import ConfigError
from kvjax.ops import kernels

_ROOT = pathlib.Path(__file__).parent.parent
_PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors")


def versions() -> dict[str, str | None]:
    """Returns the versions of the packages on which results depend."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # kvjax run from a checkout
        return None


def machine() -> dict[str, Any]:
    """Returns the software and hardware of the run: versions, commit, device, processor, compiled kernels."""
    return {"versions": versions(), "commit": commit(), "device": str(jax.devices()[0]), "processor": processor(),
            "kernels": kernels.COMPILED}


def commit() -> str | None:
    """Returns the checked-out commit, with "-dirty" if files were changed; None outside a git repository."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Returns the model and the number of the processors that this process may use."""
    file = pathlib.Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} x {names[0] if names else platform.machine()}"


def _header(file: pathlib.Path) -> dict[str, Any]:
    """Returns the header that a run wrote to a file; raises ConfigError if the file has something else."""
    try:
        before = json.loads(file.read_text())
    except ValueError:
        before = None
    if not isinstance(before, dict) or "config" not in before:
        raise ConfigError(f"{file} is not the configuration of a run; remove it, or give another --workdir")
    return before


class Run:
    """A workdir in use; the lines that its metrics.jsonl has are not measured again.

    Args:
      config: the experiment's; it has to be that of the existing lines, or a table would mix configurations.
      workdir: the directory; made if missing.
      grid: fields that may differ, as rows are told apart by them ("methods" may differ by entries of other labels);
        None = any field.

    Attributes:
      path: the workdir.
      header: configuration, versions and machine; "before" has the machines of earlier rows, if others.

    Raises:
      ConfigError: another configuration has results there, or the workdir cannot be used. Other versions or another
        machine are a warning.
    """

    def __init__(self, config: ml_collections.ConfigDict, workdir: str, grid: Sequence[str] | None = ()):
        self.path = pathlib.Path(workdir)
        here = machine()
        self.header = {
            "experiment": config.experiment,
            "config": json.loads(config.to_json_best_effort()),
            **here,
        }
        file = self.path / "config.json"
        try:
            if file.exists() and self.logged():
                before = _header(file)
                if grid is not None:
                    _check_same(workdir, before["config"], self.header["config"], grid)
                self.header["before"] = _machines(workdir, before, here)
            self.path.mkdir(parents=True, exist_ok=True)
            self._mend()
            with _files.replacing(file) as fresh:
                fresh.write_text(json.dumps(self.header, indent=2) + "\n")
        except OSError as cause:
            raise ConfigError(f"workdir={workdir} cannot be used: {cause}; give a directory") from cause

    def keep(self, **values: Any) -> None:
        """Appends one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def log(self, **values: Any) -> None:
        """Appends one line to metrics.jsonl and logs it."""
        self.keep(**values)
        logging.info("%s", "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()))

    def logged(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl written so far."""
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """Returns the rows of metrics.jsonl and their size in bytes, without a last line that was cut short; raises
        ConfigError for any other line that is not a row."""
        path, rows, size = self.path / "metrics.jsonl", [], 0
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, start=1):
            row = _row(line)
            if row is not None:
                rows.append(row)
                size += len(line)
            elif number < len(lines):
                raise ConfigError(f"{path}, line {number} is not a row of results; remove it or give another --workdir")
        return rows, size

    def _mend(self) -> None:
        """Removes a last line that an interrupted run did not finish, so that the next one begins on a line of its
        own."""
        path = self.path / "metrics.jsonl"
        _, size = self._read()
        if path.exists() and size < path.stat().st_size:
            logging.warning("%s: the last line was cut short and is removed; its row is measured again", path)
            with path.open("r+b") as file:
                file.truncate(size)

    def keep_only(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Removes all lines of metrics.jsonl that are not wanted, as they will be measured again."""
        rows = self.logged()
        kept = list(filter(wanted, rows))
        if len(kept) < len(rows):
            with _files.replacing(self.path / "metrics.jsonl") as fresh:
                fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def summary(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes summary.json, whole or not at all."""
        with _files.replacing(self.path / "summary.json") as fresh:
            fresh.write_text(json.dumps({**self.header, "rows": list(rows)}, indent=2) + "\n")


def _row(line: bytes) -> dict[str, Any] | None:
    """Returns the row of a complete line of metrics.jsonl; None for anything else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and line.endswith(b"\n") else None


def _machines(workdir: str, before: dict[str, Any], here: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the machines, each once, on which earlier rows of a workdir were measured; warns if the last one differs
    from this one."""
    last = {key: before.get(key) for key in here}
    known = before.get("before", [])
    if last == here:
        return known
    changed = "; ".join(f"{key} was {last[key]} and is {here[key]}" for key in here if last[key] != here[key])
    logging.warning("%s has rows that were measured elsewhere: %s", workdir, changed)
    return [earlier for earlier in known if earlier != last] + [last]


def _check_same(workdir: str, before: dict[str, Any], now: dict[str, Any], grid: Sequence[str]) -> None:
    pairs = {name: (before.get(name), now.get(name)) for name in {**before, **now} if name not in grid}
    if "methods" in grid:
        known, asked = common.by_label(before["methods"]), common.by_label(now["methods"])
        pairs |= {label: (known[label], asked[label]) for label in known if label in asked}
    changed = [f"{name} was {was} and is {value}" for name, (was, value) in pairs.items() if was != value]
    if changed:
        raise ConfigError(f"{workdir} has results of another configuration: {'; '.join(changed)}; give another "
                          "--workdir")
