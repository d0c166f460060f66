"""Writer of small GGUF files, byte by byte, so that tests need no package and can write what none would."""

import math
import struct

import jax.numpy as jnp
import numpy as np

TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(jnp.bfloat16): 30}
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
# Names that mean something else in some families.
OF_FAMILY = {
    "gemma3_text": {"pre_feedforward_layernorm": "ffn_norm", "post_attention_layernorm": "post_attention_norm",
                    "post_feedforward_layernorm": "post_ffw_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def text(value):
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(given):
    """A field's type and content."""
    match given:
        case bytes():
            return given  # as it is, the type included
        case bool():
            return struct.pack("<I?", 7, given)
        case int():
            return struct.pack("<II", 4, given)
        case float():
            return struct.pack("<If", 6, given)
        case str():
            return struct.pack("<I", 8) + text(given)
        case [str(), *_] | []:
            return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(map(text, given))
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(given)}i", 9, 5, len(given), *given)
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(given)}f", 9, 6, len(given), *given)
    raise TypeError(given)


def content(fields, tensors, magic=b"GGUF", version=3):
    """A file's bytes. A tensor is an array, or its shape, the number of its type, and bytes."""
    described = {name: tensor if isinstance(tensor, tuple) else (tensor.shape, TYPES[tensor.dtype], tensor.tobytes())
                 for name, tensor in tensors.items()}
    parts = [magic, struct.pack("<IQQ", version, len(tensors), len(fields))]
    parts += [text(name) + value(given) for name, given in fields.items()]
    data = b""
    for name, (shape, kind, raw) in described.items():
        parts.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data)))
        data += raw + bytes(-len(raw) % 32)
    header = b"".join(parts)
    return header + bytes(-len(header) % 32) + data


def name_of(name, family="llama"):
    """The name in a GGUF file of a tensor with Hugging Face's name."""
    base, kind = name.rsplit(".", 1)
    if base in OTHERS:
        return f"{OTHERS[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{(LAYER | OF_FAMILY.get(family, {}))[rest]}.{kind}"


def pairs_together(weight, heads):
    """Rows as llama.cpp's converter writes them for Llama: those that rotate together are neighbours."""
    return np.ascontiguousarray(
        weight.reshape(heads, 2, -1, math.prod(weight.shape[1:])).swapaxes(1, 2).reshape(weight.shape))


def tensors_of(config, tensors):
    """Tensors of a Hugging Face checkpoint as they are in a GGUF file."""
    written = {}
    for name, tensor in tensors.items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None and config.family == "llama":
            tensor = pairs_together(tensor, heads)
        if config.family == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor + np.asarray(1, tensor.dtype)
        written[name_of(name, config.family)] = tensor
    return written


def fields_of(config, **others):
    """Fields of a model, without those of the tokenizer."""
    prefix = config.family.removesuffix("_text")
    if config.family in ("gemma3_text", "phi3"):
        others = {f"{prefix}.attention.sliding_window": max(filter(None, config.windows), default=0)} | others
    return {
        "general.architecture": prefix, f"{prefix}.context_length": config.max_position,
        f"{prefix}.embedding_length": config.hidden_size, f"{prefix}.block_count": config.num_layers,
        f"{prefix}.feed_forward_length": config.intermediate_size, f"{prefix}.attention.head_count": config.num_heads,
        f"{prefix}.attention.head_count_kv": config.num_kv_heads, f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.attention.value_length": config.head_dim,
        f"{prefix}.rope.dimension_count": config.rope.rotated(config.head_dim),
        f"{prefix}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{prefix}.rope.freq_base": config.rope.theta, "general.file_type": 0, **others,
    }
