"""What every run leaves in its workdir: config.json, metrics.jsonl, summary.json."""

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
    """Versions of what the figures depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # kvjax run from a checkout
        return None


def machine() -> dict[str, Any]:
    """What runs, and what it runs on."""
    return {"versions": versions(), "commit": commit(), "device": str(jax.devices()[0]), "processor": processor(),
            "kernels": kernels.COMPILED}


def commit() -> str | None:
    """The commit that is checked out, "-dirty" if files were changed; None outside a git repository."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Model and number of the processors that this process may use."""
    file = pathlib.Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} x {names[0] if names else platform.machine()}"


def _header(file: pathlib.Path) -> dict[str, Any]:
    """What a run wrote there. Raises ConfigError where it is something else."""
    try:
        before = json.loads(file.read_text())
    except ValueError:
        before = None
    if not isinstance(before, dict) or "config" not in before:
        raise ConfigError(f"{file} is no configuration of a run; remove it, or give another --workdir")
    return before


class Run:
    """A workdir in use. Lines of `metrics.jsonl` that are already there are what is done.

    They have to be of the same configuration, or nobody would know what a table shows. Only fields of the `grid`, by
    which rows are told apart, may differ, and "methods" by entries of other labels; None = any field. Raises
    ConfigError for other differences, and for a workdir that cannot be used. Other versions or another machine are a
    warning, and "before" in the header has what earlier rows were measured on.
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
        """Lines of metrics.jsonl written so far."""
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The rows of metrics.jsonl, and the bytes they take: a last line that was cut short is not among them. Raises
        ConfigError for any other line that is no row."""
        path, rows, size = self.path / "metrics.jsonl", [], 0
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, start=1):
            row = _row(line)
            if row is not None:
                rows.append(row)
                size += len(line)
            elif number < len(lines):
                raise ConfigError(f"{path}, line {number} is no row of results; remove it, or give another --workdir")
        return rows, size

    def _mend(self) -> None:
        """Cuts off a last line that a run did not get to finish, so that what is appended begins a line."""
        path = self.path / "metrics.jsonl"
        _, size = self._read()
        if path.exists() and size < path.stat().st_size:
            logging.warning("%s: the last line was cut short and is removed; its row is measured again", path)
            with path.open("r+b") as file:
                file.truncate(size)

    def keep_only(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drops all other lines of metrics.jsonl: what is going to be measured again."""
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
    """A whole line of metrics.jsonl, its end included; None for anything else."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and line.endswith(b"\n") else None


def _machines(workdir: str, before: dict[str, Any], here: dict[str, Any]) -> list[dict[str, Any]]:
    """What rows of a workdir were measured on, each once, but for what is so now. Warns where the last was another."""
    last = {key: before.get(key) for key in here}
    known = before.get("before", [])
    if last == here:
        return known
    changed = "; ".join(f"{key} was {last[key]} and is {here[key]}" for key in here if last[key] != here[key])
    logging.warning("%s has rows of another time: %s", workdir, changed)
    return [one for one in known if one != last] + [last]


def _check_same(workdir: str, before: dict[str, Any], now: dict[str, Any], grid: Sequence[str]) -> None:
    pairs = {name: (before.get(name), now.get(name)) for name in {**before, **now} if name not in grid}
    if "methods" in grid:
        known, asked = common.by_label(before["methods"]), common.by_label(now["methods"])
        pairs |= {label: (known[label], asked[label]) for label in known if label in asked}
    changed = [f"{name} was {was} and is {value}" for name, (was, value) in pairs.items() if was != value]
    if changed:
        raise ConfigError(f"{workdir} has results of another configuration: {'; '.join(changed)}; give another "
                          "--workdir")
