"""Cache methods, one file each; `METHODS` maps the names used in configurations to classes."""

from collections.abc import Mapping
from typing import Any

from kvjax import _validate
from kvjax.cache.method import Method
from kvjax.errors import ConfigError
from kvjax.methods.arkvale import ArkVale
from kvjax.methods.chunkkv import ChunkKV
from kvjax.methods.clusterkv import ClusterKV
from kvjax.methods.dynakv import DynaKV
from kvjax.methods.dynsplit import DynSplit
from kvjax.methods.full import Full
from kvjax.methods.h2o import H2O
from kvjax.methods.icecache import IceCache
from kvjax.methods.infinigen import InfiniGen
from kvjax.methods.infllm import InfLLM
from kvjax.methods.kvswap import KVSwap
from kvjax.methods.loki import Loki
from kvjax.methods.magicpig import MagicPIG
from kvjax.methods.omnikv import OmniKV
from kvjax.methods.oracle import Oracle
from kvjax.methods.pqcache import PQCache
from kvjax.methods.quest import Quest
from kvjax.methods.random import Random
from kvjax.methods.rle import RLE
from kvjax.methods.sentencekv import SentenceKV
from kvjax.methods.shadowkv import ShadowKV
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming_llm import StreamingLLM


class _Methods(dict[str, type[Method]]):
    """Methods by name; an unknown name raises ConfigError."""

    def __missing__(self, name):
        raise ConfigError(f"unknown method {name!r}{_validate.nearest(name, self)}; use one of {', '.join(self)}")


METHODS = _Methods({
    "full": Full,
    "oracle": Oracle,
    "random": Random,
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "chunkkv": ChunkKV,
    "sentencekv": SentenceKV,
    "omnikv": OmniKV,
    "quest": Quest,
    "dynakv": DynaKV,
    "icecache": IceCache,
    "kvswap": KVSwap,
    "dynsplit": DynSplit,
    "rle": RLE,
    "infinigen": InfiniGen,
    "loki": Loki,
    "shadowkv": ShadowKV,
    "pqcache": PQCache,
    "clusterkv": ClusterKV,
    "magicpig": MagicPIG,
    "arkvale": ArkVale,
    "infllm": InfLLM,
})


def name_of(kind: type[Method]) -> str | None:
    """Returns the name of a method in configurations, or None if it is not in `METHODS`."""
    return next((name for name, known in METHODS.items() if known is kind), None)


def make(name: str | None, settings: Mapping[str, Any]) -> Method:
    """Returns a method by name.

    Args:
      name: a key of `METHODS`.
      settings: fields of the method's dataclass.

    Raises:
      ConfigError: the name or a setting is unknown, or a setting is refused by the method.
    """
    return METHODS[name](**settings)  # type: ignore[index]  # an unknown name, None included, is refused
