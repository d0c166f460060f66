"""Decoding long sequences in JAX when the KV cache does not fit in memory.

    llm = kvjax.load(path)
    cache = llm.prefill(context, method=kvjax.dynakv(budget=256), store=kvjax.FlashStore(directory))
    print(llm.generate(question, cache).text)
"""

from kvjax.attend import AttentionCache, attend, init_cache, prefill_cache
from kvjax.cache.method import Method
from kvjax.calibration.tuner.search import tune
from kvjax.errors import KvjaxError, StoreError
from kvjax.inference.cache import Cache
from kvjax.inference.generate import Usage
from kvjax.inference.plan import Slots
from kvjax.inference.prefill import Reading
from kvjax.inference.sampling import Sampling
from kvjax.llm import LLM, Result, Scores, load, save
from kvjax.methods import METHODS
from kvjax.methods.arkvale import ArkVale as arkvale
from kvjax.methods.chunkkv import ChunkKV as chunkkv
from kvjax.methods.clusterkv import ClusterKV as clusterkv
from kvjax.methods.dynakv import DynaKV as dynakv
from kvjax.methods.dynsplit import DynSplit as dynsplit
from kvjax.methods.full import Full as full
from kvjax.methods.h2o import H2O as h2o
from kvjax.methods.icecache import IceCache as icecache
from kvjax.methods.infinigen import InfiniGen as infinigen
from kvjax.methods.infllm import InfLLM as infllm
from kvjax.methods.kvswap import KVSwap as kvswap
from kvjax.methods.loki import Loki as loki
from kvjax.methods.magicpig import MagicPIG as magicpig
from kvjax.methods.omnikv import OmniKV as omnikv
from kvjax.methods.oracle import Oracle as oracle
from kvjax.methods.pqcache import PQCache as pqcache
from kvjax.methods.quest import Quest as quest
from kvjax.methods.random import Random as random
from kvjax.methods.rle import RLE as rle
from kvjax.methods.sentencekv import SentenceKV as sentencekv
from kvjax.methods.shadowkv import ShadowKV as shadowkv
from kvjax.methods.snapkv import SnapKV as snapkv
from kvjax.methods.streaming_llm import StreamingLLM as streaming_llm
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "METHODS",
    "AttentionCache",
    "Cache",
    "FlashStore",
    "HostStore",
    "KvjaxError",
    "Method",
    "Reading",
    "Result",
    "Sampling",
    "Scores",
    "Slots",
    "StoreError",
    "Usage",
    "arkvale",
    "attend",
    "chunkkv",
    "clusterkv",
    "dynakv",
    "dynsplit",
    "full",
    "h2o",
    "icecache",
    "infinigen",
    "infllm",
    "init_cache",
    "kvswap",
    "load",
    "loki",
    "magicpig",
    "omnikv",
    "oracle",
    "pqcache",
    "prefill_cache",
    "quest",
    "random",
    "rle",
    "save",
    "sentencekv",
    "shadowkv",
    "snapkv",
    "streaming_llm",
    "tune",
]
