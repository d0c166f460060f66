"""JSON of what programs cost, which a grid that is done in parts, or is stopped, adds to."""

import datetime
import json
import pathlib
from collections.abc import Callable, Sequence

import jax


def keep(
    file: pathlib.Path, records: list[dict], keys: Sequence[str], more: Callable[[list[dict]], dict] | None = None,
) -> list[dict]:
    """Writes records beside those that the file has and that were not made anew.

    Args:
      file: where they go; its directory is made.
      records: of this run.
      keys: fields that name a record.
      more: what else the file is to have, of all records.

    Returns:
      All records.
    """
    def identity(record):
        return tuple(record[key] for key in keys)

    known = set(map(identity, records))
    before = json.loads(file.read_text())["programs"] if file.exists() else []
    every = [one for one in before if identity(one) not in known] + records
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"day": datetime.date.today().isoformat(), "jax": jax.__version__, "programs": every}
    file.write_text(json.dumps({**content, **(more(every) if more else {})}, indent=1) + "\n")
    return every
