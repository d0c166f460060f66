"""The leaderboard's grid: its parts, and in each one cell for every method, task, length, budget and seed."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import ml_collections

from experiments import common
from kvjax.cache.method import Method
from kvjax.errors import ConfigError

EXTRAS = ("label", "dtype", "whole", "budgets", "slots")  # of a method's settings
_NOT_THE_METHODS = ("label", "whole", "budgets")
PART = ("tasks", "lengths", "budgets", "seeds", "samples", "continuations", "max_new_tokens", "perplexity_tokens",
        "question", "methods")  # fields that a part of the grid may have of its own
DRAWN = ("samples", "continuations", "max_new_tokens", "perplexity_tokens")
_HEAD = ("method", "task", "context", "budget", "seed", "question")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination; with `budget` None the whole cache is attended."""

    settings: tuple[tuple[str, object], ...]
    label: str
    task: str
    context: int
    budget: int | None
    seed: int
    question: str = "after"  # "after": token by token after the prompt; "within": part of the prompt
    drawn: tuple[int, ...] = ()  # numbers on which its samples depend, `DRAWN`

    @property
    def head(self) -> dict:
        """Fields that tell its row from others."""
        values = self.label, self.task, self.context, self.budget, self.seed, self.question
        return dict(zip(_HEAD, values, strict=True))

    @property
    def key(self) -> tuple:
        """Fields that tell its lines from others, `key_of` these."""
        return *self.head.values(), self.drawn

    @property
    def exam(self) -> tuple[str, int, int]:
        """Task, length and seed: cells with the same ones answer the same samples."""
        return self.task, self.context, self.seed

    @property
    def method(self) -> Method:
        return common.make_method({**dict(self.settings), "budget": self.budget}, EXTRAS)


def key_of(line: Mapping) -> tuple:
    """Returns the key of the cell that a line belongs to."""
    return *(line[name] for name in _HEAD), tuple(line["drawn"])


def parts(config: ml_collections.ConfigDict) -> list[ml_collections.ConfigDict]:
    """Returns the configuration of each part of the grid: `config` with the fields that an entry of `config.parts` has
    of its own, or `config` alone without such entries. A part's "methods" are labels of those in `config.methods`.

    Methods whose "table" is empty get `config.table`.

    Raises:
      ConfigError: a part has another field, or a method that `config.methods` does not have.
    """
    return [_part(config, own) for own in config.get("parts", ()) or ({},)]


def _part(config: ml_collections.ConfigDict, own: Mapping[str, object]) -> ml_collections.ConfigDict:
    unknown = sorted(set(own) - set(PART))
    if unknown:
        raise ConfigError(f"a part of the grid has no {', '.join(unknown)} of its own; use some of {', '.join(PART)}")
    part = config.copy_and_resolve_references()
    changes = dict(own)
    labels = changes.pop("methods", None)
    methods = tuple({**entry, "table": config.table} if entry.get("table") == "" else entry
                    for entry in config.methods)
    if labels is not None:
        common.check_names({"methods": labels}, "methods", [label_of(entry) for entry in methods])
        methods = tuple(entry for entry in methods if label_of(entry) in labels)
    part.update(**changes, methods=methods)
    return part


def with_folder(task: str, folder: str) -> str:
    """Returns the name of a task with the path of its file, if it has one, within a folder; rows have it without."""
    base, colon, path = task.partition(":")
    return f"{base}:{pathlib.Path(folder, path)}" if colon else task


def label_of(entry: Mapping[str, object]) -> str:
    """Returns the name that a method's settings have in tables."""
    return str(entry.get("label", entry.get("name")))


def cells(config: ml_collections.ConfigDict) -> Iterator[Cell]:
    """Yields one part's cells in the order in which they are run: those that answer the same samples are neighbours."""
    if config.question not in ("after", "within"):
        raise ConfigError(f"question={config.question!r} must be after or within the prompt")
    drawn = tuple(config[name] for name in DRAWN)
    entries: dict[str, object] = {}
    for entry in config.methods:
        if entries.setdefault(label_of(entry), entry) != entry:
            raise ConfigError(f'two methods are called {label_of(entry)}; give one of them a "label"')
    for context, task, seed in itertools.product(config.lengths, config.tasks, config.seeds):
        for entry in config.methods:
            for budget in _budgets(config, entry, context):
                settings = tuple((key, value) for key, value in entry.items() if key not in _NOT_THE_METHODS)
                yield Cell(settings, label_of(entry), task, context, budget, seed, config.question, drawn)


def _budgets(config: ml_collections.ConfigDict, entry: Mapping[str, object], context: int) -> Sequence[int | None]:
    """Returns the budgets in tokens of a method at one length, its own or the grid's, each once."""
    if entry.get("whole", False):
        return (None,)
    tokens = (int(budget * context) if isinstance(budget, float) else budget
              for budget in entry.get("budgets", config.budgets))
    return tuple(dict.fromkeys(tokens))


def check_apart(jobs: Sequence[Cell]) -> None:
    """Raises ConfigError if two parts have a cell in common."""
    heads = [tuple(cell.head.items()) for cell in jobs]
    if len(set(heads)) < len(heads):
        twice = dict(next(head for head in heads if heads.count(head) > 1))
        raise ConfigError(f"two parts of the grid have {twice['method']} at {twice['task']} of {twice['context']} "
                          "tokens; leave it out of one")


def take_shard(jobs: Sequence[Cell], shard: str) -> list[Cell]:
    """Returns, for shard "i/n", the cells of every n-th exam from the i-th (from 0) on, so that each context is read in
    one shard; raises ConfigError for any other text."""
    try:
        index, count = map(int, shard.split("/"))
    except ValueError:
        raise ConfigError(f"shard={shard!r} must be i/n, such as 0/4") from None
    if not 0 <= index < count:
        raise ConfigError(f"shard={shard!r}: i must be in 0..{count - 1}")
    exams = list(dict.fromkeys(cell.exam for cell in jobs))
    mine = set(exams[index::count])
    return [cell for cell in jobs if cell.exam in mine]
