"""Decoding long sequences in JAX when the KV cache does not fit in memory.

    llm = kvjax.load(path)
    cache = llm.prefill(context, method=kvjax.DynaKV(budget=256), store=kvjax.FlashStore(directory=directory))
    print(llm.generate(question, cache).text)
"""

from kvjax.attend import AttentionCache, attend, init_cache, prefill_cache
from kvjax.cache.check import check_method
from kvjax.cache.method import Method
from kvjax.calibration.tuner.search import tune
from kvjax.errors import KvjaxError, StoreError
from kvjax.inference.answers import Result, Scores
from kvjax.inference.cache import Cache
from kvjax.inference.chat import Chat
from kvjax.inference.dense_prefill import PromptActivations
from kvjax.inference.plan import Slots
from kvjax.inference.programs import keep_programs
from kvjax.inference.sampling import Sampling
from kvjax.inference.stream import Piece, Stream
from kvjax.inference.usage import Usage
from kvjax.llm import LLM, load, save
from kvjax.methods import METHODS
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
from kvjax.models.mesh import MeshRules
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore

__version__ = "0.1.0"

__all__ = [
    "H2O",
    "LLM",
    "METHODS",
    "RLE",
    "ArkVale",
    "AttentionCache",
    "Cache",
    "Chat",
    "ChunkKV",
    "ClusterKV",
    "DynSplit",
    "DynaKV",
    "FlashStore",
    "Full",
    "HostStore",
    "IceCache",
    "InfLLM",
    "InfiniGen",
    "KVSwap",
    "KvjaxError",
    "Loki",
    "MagicPIG",
    "MeshRules",
    "Method",
    "OmniKV",
    "Oracle",
    "PQCache",
    "Piece",
    "PromptActivations",
    "Quest",
    "Random",
    "Result",
    "Sampling",
    "Scores",
    "SentenceKV",
    "ShadowKV",
    "Slots",
    "SnapKV",
    "StoreError",
    "Stream",
    "StreamingLLM",
    "Usage",
    "attend",
    "check_method",
    "init_cache",
    "keep_programs",
    "load",
    "prefill_cache",
    "save",
    "tune",
]
