"""Converter from a GGUF file of the Llama architecture to a Hugging Face directory for `kvjax.load`.

    pip install -c constraints.txt --no-build-isolation -e '.[gguf]'
    python scripts/gguf_to_hf.py FILE.gguf DIR

Quantised weights become f32 numbers of the same value. llama.cpp stores the rows of query and key projections in
another order, as it rotates neighbouring numbers while the Hugging Face layout rotates halves; the script restores the
order. The tokenizer is that of the file, for byte-level BPE (`tokenizer.ggml.model` gpt2) with single digits, as in
SmolLM2.
"""

import json
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from absl import app
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # `tokenizer.ggml.token_type` of special tokens


def tensor_name(name: str) -> str:
    """Returns Hugging Face's name of a tensor; raises ValueError for one that a plain Llama does not have."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in _NAMES:
        raise ValueError(f"tensor {name} is not part of a Llama model; this file cannot be converted")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_NAMES[match[2]]}.weight"


def halves_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a projection in Hugging Face's order: of each head first those that rotate as first of a
    pair."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def weights(reader: gguf.GGUFReader, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns every tensor in f32, by its Hugging Face name."""
    by_name = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        by_name[tensor_name(tensor.name)] = halves_together(weight, heads[part]) if part in heads else weight
    return by_name


def read_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json; raises ValueError for another architecture, or scaled rotary embeddings."""
    if fields["general.architecture"] != "llama":
        raise ValueError(f"architecture {fields['general.architecture']} is not llama; only that is converted")
    if any(key.startswith("llama.rope.scaling") for key in fields):
        raise ValueError("the file has scaled rotary embeddings, which are not converted")
    heads, size = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": size,
        "intermediate_size": fields["llama.feed_forward_length"], "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": size // heads, "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0), "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"], "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def read_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer; raises ValueError for one that is not byte-level BPE with single digits."""
    kind = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind} is not byte-level BPE with single digits (gpt2, smollm)")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def convert(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Writes config, weights, tokenizer and chat template of a file into a new directory."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config, tokenizer = read_config(fields), read_tokenizer(fields)
    tensors = weights(reader, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    tokens = fields["tokenizer.ggml.tokens"]
    about = {"bos_token": tokens[config["bos_token_id"]], "eos_token": tokens[config["eos_token_id"]],
             "chat_template": fields.get("tokenizer.chat_template")}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (("config", config), ("tokenizer_config", about)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main(argv):
    if len(argv) != 3:
        sys.exit("usage: python scripts/gguf_to_hf.py FILE.gguf DIR")
    convert(pathlib.Path(argv[1]), pathlib.Path(argv[2]))
    print(f"{argv[2]}: ready for kvjax.load")


if __name__ == "__main__":
    app.run(main)
