"""GGUF files as llama.cpp's own package writes them: its numbers, and the logits that transformers has from them."""

import pathlib

import numpy as np
import pytest
from gguf_files import pairs_together

import kvjax
from kvjax.models.transformer import Transformer

pytestmark = pytest.mark.oracles
# Transformers takes heads of 128 for Qwen3, whatever the file says.
LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN = 2, 2, 1, 128, 512
WIDTH = HEADS * SIZE
TOKENS = ["<end>", "<user>", *map(chr, range(97, 123)), "ab", "abc"]


def write(path, architecture, kind=None):
    """A file of random weights as llama.cpp's converter writes it, and the projections in it by name.

    With `kind`, projections are of this quantised type.
    """
    import gguf

    rng, projections = np.random.default_rng(0), {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)

    def add(name, rows, columns, heads=None):
        weight = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        if heads is not None and architecture == "llama":
            weight = pairs_together(weight, heads)
        if kind is None:
            writer.add_tensor(name, weight)
            projections[name] = weight
        else:
            raw = blocks(weight, kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
            projections[name] = gguf.quants.dequantize(raw, kind)

    def add_plain(name, mean, spread, *shape):
        writer.add_tensor(name, rng.normal(mean, spread, shape).astype(np.float32))

    add_plain("token_embd.weight", 0, WIDTH**-0.5, len(TOKENS), WIDTH)
    add_plain("output_norm.weight", 1, 0.1, WIDTH)
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            add_plain(f"blk.{i}.{norm}.weight", 1, 0.1, WIDTH)
        if architecture == "qwen3":
            for norm in ("attn_q_norm", "attn_k_norm"):
                add_plain(f"blk.{i}.{norm}.weight", 1, 0.1, SIZE)
        for name, rows in (("q", WIDTH), ("k", KV_HEADS * SIZE), ("v", KV_HEADS * SIZE)):
            add(f"blk.{i}.attn_{name}.weight", rows, WIDTH, {"q": HEADS, "k": KV_HEADS}.get(name))
            if architecture == "qwen2":
                add_plain(f"blk.{i}.attn_{name}.bias", 0, 0.3, rows)
        add(f"blk.{i}.attn_output.weight", WIDTH, WIDTH)
        add(f"blk.{i}.ffn_gate.weight", HIDDEN, WIDTH)
        add(f"blk.{i}.ffn_up.weight", HIDDEN, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return pathlib.Path(path), projections


def blocks(weight, kind):
    """The weight in a quantised type, or random blocks with small scales where the package has no way to make them."""
    import gguf

    try:
        return gguf.quants.quantize(weight, kind)
    except NotImplementedError:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*weight.shape[:-1], weight.shape[-1] // values, size)
        raw = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        # K types begin, or Q6_K ends, with their scales in f16.
        scale = np.array([0.003, 0.001], np.float16).view(np.uint8)
        if kind.name == "Q6_K":
            raw[..., -2:] = scale[2:]
        else:
            raw[..., :4] = scale
        return raw.reshape(*weight.shape[:-1], -1)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_quantised_weights_are_those_of_the_package(tmp_path, name):
    import gguf

    file, projections = write(tmp_path / "model.gguf", "qwen2", gguf.GGMLQuantizationType[name])
    layer = kvjax.load(file).params["layers_1"]
    for ours, theirs in (("q_proj", "attn_q"), ("o_proj", "attn_output")):
        np.testing.assert_array_equal(layer[ours]["weight"], projections[f"blk.1.{theirs}.weight"])
    np.testing.assert_array_equal(layer["mlp"]["down_proj"]["weight"], projections["blk.1.ffn_down.weight"])


def test_type_that_the_package_cannot_read(tmp_path):
    import gguf

    file, _ = write(tmp_path / "model.gguf", "qwen2", gguf.GGMLQuantizationType.Q8_0)
    content = file.read_bytes()
    name = b"blk.1.attn_v.weight"
    at = content.index(name) + len(name) + 4 + 16
    assert content[at] == 8
    file.write_bytes(content[:at] + bytes([9]) + content[at + 1 :])  # Q8_1
    with pytest.raises(kvjax.KvjaxError, match=r"model\.gguf: tensor blk\.1\.attn_v\.weight: type Q8_1 cannot"):
        kvjax.load(file)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", [None, "Q8_0", "Q4_1"])
def test_logprobs_are_those_of_transformers(tmp_path, architecture, name):
    import gguf
    import torch
    import transformers

    file, _ = write(tmp_path / "model.gguf", architecture, None if name is None else gguf.GGMLQuantizationType[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens = np.random.default_rng(1).integers(0, len(TOKENS), (2, 40), np.int32)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(tokens)).logits.log_softmax(-1).numpy()
    llm = kvjax.load(file)
    where = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    logits = np.asarray(Transformer(llm.config).apply({"params": llm.params}, tokens, where))
    found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_tokenizer_comes_along(tmp_path):
    llm = kvjax.load(write(tmp_path / "model.gguf", "llama")[0])
    assert llm.encode("abcb", start=False) == [TOKENS.index("abc"), TOKENS.index("b")]
    assert llm.config.eos_token_ids == (0,)
