"""Shapes of real models, without weights, and methods for them: what is compiled for devices that are not there."""

import dataclasses
import pathlib

import kvjax
from kvjax.cache.method import Method
from kvjax.models.config import ModelConfig
from kvjax.models.hf_config import parse

_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "rope_theta": 500_000.0, "max_position_embeddings": 131_072}
# As their config.json has them.
MODELS = {
    "llama-3.2-1b": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
    },
}
# DynSplit's delimiters; only their number matters here.
_TABLE = pathlib.Path(kvjax.__file__).parent / "reference/delimiters.json"


def config_of(model: str, layers: int) -> ModelConfig:
    """Returns the shapes of a model, cut to some layers; 0 = all."""
    config = parse(pathlib.Path(model), MODELS[model], {})
    if not layers:
        return config
    return dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers])


def method_of(name: str, budget: int) -> Method:
    """Returns a method that attends so many tokens, without dense layers, which few layers would all be."""
    more = {"table": str(_TABLE)} if name == "dynsplit" else {}
    given = {} if kvjax.METHODS[name].attends_all else {"budget": budget}
    return kvjax.METHODS[name](dense_layers=0, **given, **more)
