"""What every run leaves in its workdir: config.json, metrics.jsonl, summary.json."""

import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Iterable
from typing import Any

import jax
import ml_collections
from absl import logging

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors")


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _PACKAGES}}


class Run:
    """A workdir in use. Lines of `metrics.jsonl` that are already there are what is done."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: str):
        self.path = pathlib.Path(workdir)
        self.path.mkdir(parents=True, exist_ok=True)
        self.header = {
            "experiment": config.experiment,
            "config": json.loads(config.to_json_best_effort()),
            "versions": versions(),
            "device": str(jax.devices()[0]),
        }
        (self.path / "config.json").write_text(json.dumps(self.header, indent=2) + "\n")

    def log(self, **values: Any) -> None:
        """Appends one line to metrics.jsonl and logs it."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")
        logging.info("%s", "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()))

    def logged(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl written so far."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes summary.json."""
        (self.path / "summary.json").write_text(json.dumps({**self.header, "rows": list(rows)}, indent=2) + "\n")
