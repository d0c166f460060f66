"""Models in GGUF files, llama.cpp's format, of the architectures llama, qwen2, qwen3, gemma3 and phi3.

Configuration, weights, tokenizer and chat template are those of the file. `kvjax.save(kvjax.load(FILE), DIRECTORY)`
makes a Hugging Face directory of it. Quantised weights become numbers of the same value as llama.cpp computes; they are
read with the package gguf (`pip install gguf`), other files need no package.
"""

import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax import _files
from kvjax.errors import CheckpointError
from kvjax.models import checkpoint, gguf_header, gguf_tokenizer, hf_config, json_file, tensor_file
from kvjax.models.checkpoint import Weights
from kvjax.models.gguf_header import GgufHeader
from kvjax.models.hf_families import FULL
from kvjax.models.json_file import shown
from kvjax.models.tensor_file import StoredTensor
from kvjax.models.tokenizer import TextTokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
# Names that mean something else in some architectures.
_OTHER_NAMES = {
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
               "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_EMBEDDING, _HEAD, _FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
# config.json's name of each field, after the architecture's name.
_FIELDS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
_REQUIRED = ("embedding_length", "attention.head_count", "block_count", "feed_forward_length", "context_length")
# Fields that are read elsewhere, or say nothing of what the model computes. Another one that is set is an error.
_OTHERS = {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.scale_linear", "tensor_data_layout"}
# The last is of images, which are not read.
_OF_GEMMA = {"final_logit_softcapping", "rope.freq_base_swa", "attention.sliding_window_pattern", "mm.tokens_per_image"}
_OF_PHI3 = ("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned")
_WITH_WINDOWS = ("gemma3", "phi3")  # llama.cpp ignores the others' windows
_LARGEST_GEMMA = 62  # layers of the one whose scores are scaled otherwise than by the head size
_SCALING = {
    "type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}
_LOW, _HIGH, _LENGTH = 1.0, 4.0, 8192  # low_freq_factor, high_freq_factor and first length of Llama 3.1, 3.2 and 3.3
_MOST_FREQUENCIES = 1 << 16


def find(path: json_file.Path) -> tuple[Weights, TextTokenizer]:
    """Reads the header of a GGUF file and checks all that it says.

    Returns:
      The weights, with the model's configuration, and the tokenizer.

    Raises:
      CheckpointError: the file is not a complete GGUF file, its architecture, a field, a tensor's type or the tokenizer
        is not supported, or a tensor is missing or misshapen. The message names file and field or tensor.
    """
    file = pathlib.Path(path).expanduser()
    header = gguf_header.read(file)
    architecture = _architecture(file, header)
    held = {}
    for name in header.tensors:
        theirs = _hf_name(name, architecture)
        if theirs is not None:
            held[theirs] = [_stored(file, header, name, architecture)]
        elif name != _FREQUENCIES and not (architecture == "phi3" and name in _FACTORS.values()):
            raise _not_part(file, name, architecture)
    vocabulary = gguf_tokenizer.read(file, header.fields)
    raw = _config(file, header, architecture) | vocabulary.config
    weights = checkpoint.placed(held, hf_config.parse(file, raw, {}), {}, functools.partial(_gguf_name, architecture))
    others, tokens = checkpoint.others_in(held, weights), vocabulary.tokenizer.tokenizer.get_vocab_size()
    if others:
        raise _not_part(file, held[others[0]][0].name, architecture)
    if tokens > weights.config.vocab_size:
        raise CheckpointError(f"{file}: tokenizer.ggml.tokens has {tokens} tokens, and {_EMBEDDING} rows for "
                              f"{weights.config.vocab_size}; download the model again")
    return weights, vocabulary.tokenizer


def _architecture(file: pathlib.Path, header: GgufHeader) -> str:
    name = header.fields.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(f"{file}: general.architecture is {shown(name)}; supported: {', '.join(ARCHITECTURES)}")
    parts = header.fields.get("split.count", 1)
    if parts != 1:
        raise CheckpointError(f"{file}: split.count is {shown(parts)}: it is one of several files; join them with "
                              "`llama-gguf-split --merge` first")
    return name


# ---- tensors


def _not_part(file: pathlib.Path, name: str, architecture: str) -> CheckpointError:
    return CheckpointError(f"{file}: tensor {name:.100} is not part of the {architecture} models that kvjax knows; use "
                           "another model")


@functools.cache
def _names(architecture: str) -> dict[str, str]:
    """Returns Hugging Face's name of each kind of tensor, by llama.cpp's."""
    return _NAMES | _OTHER_NAMES.get(architecture, {})


def _hf_name(name: str, architecture: str) -> str | None:
    """Returns Hugging Face's name of a tensor; None if it has none."""
    match, names = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name), _names(architecture)
    if match is None or match[2] not in names:
        return None
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{names[match[2]]}.{match[3]}"


def _gguf_name(architecture: str, name: str) -> str:
    """Returns the name in a GGUF file of a tensor with Hugging Face's name."""
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match is not None
    ours = {theirs: ours for ours, theirs in _names(architecture).items()}[match[2]]
    return f"blk.{match[1]}.{ours}.{match[3]}" if match[1] else f"{ours}.{match[3]}"


def _stored(file: pathlib.Path, header: GgufHeader, name: str, architecture: str) -> StoredTensor:
    """Returns a tensor; raises CheckpointError if its type cannot be read or the file ends before it does."""
    shape, kind, offset = header.tensors[name]
    heads = _heads(file, header, name, shape) if architecture == "llama" else 0
    # llama.cpp's files have Gemma's scales of normalisations as they are multiplied with, Hugging Face's 1 less.
    shift = -1.0 if architecture == "gemma3" and name.endswith("norm.weight") else 0.0
    try:
        dtype = _TYPES.get(kind) or tensor_file.quantised_type(kind)
        stored = StoredTensor(file, name, shape, dtype, offset, heads, shift)
        end = offset + stored.nbytes
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name:.100}: {error}") from error
    if end > header.size:
        raise CheckpointError(f"{file}: tensor {name:.100} ends at byte {end}, and the file at {header.size}; download "
                              "it again")
    return stored


def _heads(file: pathlib.Path, header: GgufHeader, name: str, shape: tuple[int, ...]) -> int:
    """Returns the heads of a query or key projection of Llama, in which llama.cpp has changed the order of rows."""
    field = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}.get(
        name.split(".")[-2] if "." in name else "")
    if field is None:
        return 0
    heads = header.fields.get(field, header.fields.get("llama.attention.head_count"))
    if type(heads) is not int or heads < 1 or shape[0] % (2 * heads):
        raise CheckpointError(f"{file}: tensor {name:.100} has {shape[0]} rows, and {field} is {shown(heads)}; "
                              "expected an even number of rows for each head")
    return heads


# ---- configuration


def _config(file: pathlib.Path, header: GgufHeader, architecture: str) -> dict[str, Any]:
    """Returns the content of config.json, without the ids of special tokens."""
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in header.fields.items() if name.startswith(prefix)}
    _check_fields(file, architecture, prefix, fields)
    raw = {theirs: fields[ours] for ours, theirs in _FIELDS.items() if ours in fields}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    size = raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    _check_heads(file, architecture, prefix, fields, size)
    tensors = header.tensors
    if _EMBEDDING not in tensors:
        raise CheckpointError(f"{file}: tensor {_EMBEDDING} is missing; download the model again")
    raw |= {
        "model_type": architecture, "hidden_act": "silu", "vocab_size": tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": _HEAD not in tensors, "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if architecture == "gemma3":
        raw |= _gemma(raw, fields)
    if architecture == "phi3":
        return raw | _phi3(file, header, fields, raw)
    return raw | {"rope_scaling": _rope(file, header, fields, prefix)}


def _check_fields(file: pathlib.Path, architecture: str, prefix: str, fields: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a field that may change what the model computes, and for one that is missing."""
    known = {*_FIELDS, *_OTHERS, *(_OF_GEMMA if architecture == "gemma3" else ())}
    if architecture not in _WITH_WINDOWS:
        known.discard("attention.sliding_window")
    for name, value in fields.items():
        if name not in known and not name.startswith("rope.scaling.") and value:
            raise CheckpointError(f"{file}: {prefix}{name} is {shown(value)}; this field is not supported, and may "
                                  "change what the model computes")
    for name in _REQUIRED:
        if type(fields.get(name)) is not int or fields[name] < 1:
            raise CheckpointError(f"{file}: {prefix}{name} is {shown(fields.get(name))}; expected an integer above 0")
    if "attention.layer_norm_rms_epsilon" not in fields:
        raise CheckpointError(f"{file}: {prefix}attention.layer_norm_rms_epsilon is missing; download the model again")


def _check_heads(file: pathlib.Path, architecture: str, prefix: str, fields: Mapping[str, Any], size: int) -> None:
    """Raises CheckpointError unless values are as large as keys, and all of a head is rotated (in Phi-3 a part)."""
    if fields.get("attention.value_length", size) != size:
        raise CheckpointError(f"{file}: {prefix}attention.value_length is {shown(fields['attention.value_length'])}; "
                              f"expected {size}, as for keys")
    rotated = fields.get("rope.dimension_count", size)
    if rotated != size and not (architecture == "phi3" and type(rotated) is int):
        raise CheckpointError(f"{file}: {prefix}rope.dimension_count is {shown(rotated)}; expected the head size, "
                              f"{size}")


def _gemma(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that only Gemma 3 has; what the file does not say is as in llama.cpp."""
    scalar = raw["head_dim"]
    if raw["num_hidden_layers"] == _LARGEST_GEMMA:
        scalar = raw["hidden_size"] // raw["num_attention_heads"]
    found = {"model_type": "gemma3_text", "query_pre_attn_scalar": scalar,
             "final_logit_softcapping": fields.get("final_logit_softcapping")}
    if "rope.freq_base_swa" in fields:
        found["rope_local_base_freq"] = fields["rope.freq_base_swa"]
    if fields.get("attention.sliding_window_pattern"):
        found["sliding_window_pattern"] = fields["attention.sliding_window_pattern"]
    if not fields.get("attention.sliding_window"):
        found["layer_types"] = [FULL] * raw["num_hidden_layers"]
    return found


def _phi3(
    file: pathlib.Path, header: GgufHeader, fields: Mapping[str, Any], raw: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields that only Phi-3 has; its only scaling is longrope, whose factors are tensors."""
    plain = {"rope.scaling.type": ("none", "longrope"), "rope.scaling.factor": (0.0, 1.0),
             "rope.scale_linear": (0.0, 1.0)}
    for name, value in fields.items():
        if name in plain and value not in plain[name]:
            raise CheckpointError(f"{file}: phi3.{name} is {shown(value)}; supported: "
                                  f"{', '.join(map(str, plain[name]))}")
        if name.startswith("rope.scaling.") and name not in plain and name not in _OF_PHI3 and value:
            raise CheckpointError(f"{file}: phi3.{name} is {shown(value)}; this field is not supported, and may change "
                                  "what the model computes")
    original = fields.get("rope.scaling.original_context_length", raw["max_position_embeddings"])
    found = {"original_max_position_embeddings": original, "sliding_window": raw.get("sliding_window") or None,
             "partial_rotary_factor": fields.get("rope.dimension_count", raw["head_dim"]) / raw["head_dim"]}
    if not any(name in header.tensors for name in _FACTORS.values()):
        return found
    scaling: dict[str, Any] = {"type": "longrope"}
    for ours, name in _FACTORS.items():
        scaling[ours] = _numbers(file, header, name).astype(float).tolist()
    if "rope.scaling.attn_factor" in fields:
        scaling["attention_factor"] = fields["rope.scaling.attn_factor"]
    return found | {"rope_scaling": scaling}


def _numbers(file: pathlib.Path, header: GgufHeader, name: str) -> np.ndarray:
    """Returns a tensor of few numbers in F32, one for each pair of dimensions that rotates."""
    shape, kind, offset = header.tensors.get(name, ((), None, 0))
    if kind is None or _TYPES.get(kind) != "F32" or len(shape) != 1 or shape[0] > _MOST_FREQUENCIES:
        raise CheckpointError(f"{file}: tensor {name} has shape {shape}; expected half a head's size in F32")
    with _files.open_regular(file) as opened:
        opened.seek(min(offset, header.size))
        return np.frombuffer(tensor_file.take(opened, 4 * shape[0], f"{file}: tensor {name}"), "<f4")


def _rope(file: pathlib.Path, header: GgufHeader, fields: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """Returns `rope_scaling` of config.json."""
    given = {name.removeprefix("rope.scaling."): value for name, value in fields.items()
             if name.startswith("rope.scaling.")}
    if given.pop("attn_factor", 1.0) != 1.0 or given.keys() - {*_SCALING, "finetuned"}:
        raise CheckpointError(f"{file}: {prefix}rope.scaling has {shown(given)}; supported: {', '.join(_SCALING)}")
    if _FREQUENCIES in header.tensors:
        return _llama3(file, header, fields, given.get("original_context_length", _LENGTH))
    if fields.get("rope.scale_linear", 1.0) != 1.0:
        return {"rope_type": "linear", "factor": fields["rope.scale_linear"]}
    usual = "none" if given.get("factor", 1.0) in (0.0, 1.0) else "linear"  # of llama.cpp
    if given.setdefault("type", usual) == "none":
        return None
    return {_SCALING[name]: value for name, value in given.items() if name in _SCALING}


def _llama3(file: pathlib.Path, header: GgufHeader, fields: Mapping[str, Any], length: Any) -> dict[str, Any]:
    """Returns Llama 3's `rope_scaling` if the divisors of the frequencies in the file are those that follow from it."""
    if type(length) is not int:
        raise CheckpointError(f"{file}: rope.scaling.original_context_length is {shown(length)}; expected a number of "
                              "tokens")
    divisors = _numbers(file, header, _FREQUENCIES)
    count = len(divisors)
    theta = fields.get("rope.freq_base", 10_000.0)
    factor = float(divisors.max())
    turns = length / (2 * np.pi * float(theta) ** (np.arange(count) / count))
    kept = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    if not factor > 1 or not np.allclose(divisors, 1 / (kept + (1 - kept) / factor), rtol=1e-4):
        raise CheckpointError(f"{file}: tensor {_FREQUENCIES} does not hold Llama 3's scaling of rotary embeddings "
                              f"({_LOW:g}, {_HIGH:g}, {length}); other scalings in a tensor are not supported")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
            "original_max_position_embeddings": length}
