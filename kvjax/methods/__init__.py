"""Cache methods, one file each. `METHODS` names them for command lines and tests."""

from kvjax.methods.arkvale import ArkVale
from kvjax.methods.clusterkv import ClusterKV
from kvjax.methods.dynakv import DynaKV
from kvjax.methods.dynsplit import DynSplit
from kvjax.methods.full import Full
from kvjax.methods.icecache import IceCache
from kvjax.methods.infinigen import InfiniGen
from kvjax.methods.infllm import InfLLM
from kvjax.methods.kvswap import KVSwap
from kvjax.methods.loki import Loki
from kvjax.methods.magicpig import MagicPIG
from kvjax.methods.oracle import Oracle
from kvjax.methods.pqcache import PQCache
from kvjax.methods.quest import Quest
from kvjax.methods.shadowkv import ShadowKV
from kvjax.methods.streaming_llm import StreamingLLM

METHODS = {
    "full": Full,
    "oracle": Oracle,
    "streaming_llm": StreamingLLM,
    "quest": Quest,
    "dynakv": DynaKV,
    "icecache": IceCache,
    "kvswap": KVSwap,
    "dynsplit": DynSplit,
    "infinigen": InfiniGen,
    "loki": Loki,
    "shadowkv": ShadowKV,
    "pqcache": PQCache,
    "clusterkv": ClusterKV,
    "magicpig": MagicPIG,
    "arkvale": ArkVale,
    "infllm": InfLLM,
}
