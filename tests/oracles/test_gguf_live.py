"""A GGUF file of llama.cpp's becomes a checkpoint with the logits that transformers reads out of the same file."""

import numpy as np
import pytest

import kvjax
from kvjax.models.transformer import Transformer

pytestmark = pytest.mark.oracles
LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN = 2, 4, 2, 16, 96
TOKENS = ["<end>", "<user>", *map(chr, range(97, 123)), "ab", "abc"]


def pairs_together(weight, heads):
    """Rows as llama.cpp has them: those that rotate together are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def convert():
    from scripts.gguf_to_hf import convert

    return convert


@pytest.fixture
def file(tmp_path):
    """A file as llama.cpp's converter writes it, projections in 4 bits (Q4_1)."""
    import gguf

    rng, width = np.random.default_rng(0), HEADS * SIZE
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
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
        weight = rng.normal(0, 0.3, (rows, columns)).astype(np.float32)
        weight = weight if heads is None else pairs_together(weight, heads)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    writer.add_tensor("token_embd.weight", rng.normal(0, 0.3, (len(TOKENS), width)).astype(np.float32))
    writer.add_tensor("output_norm.weight", rng.normal(1, 0.1, width).astype(np.float32))
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", rng.normal(1, 0.1, width).astype(np.float32))
        add(f"blk.{i}.attn_q.weight", width, width, HEADS)
        add(f"blk.{i}.attn_k.weight", KV_HEADS * SIZE, width, KV_HEADS)
        add(f"blk.{i}.attn_v.weight", KV_HEADS * SIZE, width)
        add(f"blk.{i}.attn_output.weight", width, width)
        add(f"blk.{i}.ffn_gate.weight", HIDDEN, width)
        add(f"blk.{i}.ffn_up.weight", HIDDEN, width)
        add(f"blk.{i}.ffn_down.weight", width, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_logits_are_those_of_transformers(file, convert, tmp_path):
    import torch
    import transformers

    convert(file, tmp_path / "made")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens = np.random.default_rng(1).integers(0, len(TOKENS), (2, 40), np.int32)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    llm = kvjax.load(tmp_path / "made")
    where = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    found = Transformer(llm.config).apply({"params": llm.params}, tokens, where)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_tokenizer_comes_along(file, convert, tmp_path):
    convert(file, tmp_path / "made")
    llm = kvjax.load(tmp_path / "made")
    assert llm.encode("abcb", start=False) == [TOKENS.index("abc"), TOKENS.index("b")]
    assert llm.config.eos_token_ids == (0,)


def test_another_architecture_is_refused(convert, tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="gpt2 is not llama"):
        convert(tmp_path / "model.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()
