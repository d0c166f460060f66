"""Models in GGUF files are those of Hugging Face directories, and files that are broken are refused at once."""

import dataclasses
import itertools
import json
import os
import random
import signal
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import content, fields_of, name_of, tensors_of
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

import kvjax
from kvjax.errors import CheckpointError
from kvjax.models import checkpoint, gguf, hf_config, tensor_file, tensor_names
from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.ops import weights
from kvjax.ops.rotary import inverse_frequencies

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<end>", "<user>", "<own>", *BYTES, "ab", "abc"]
END, USER, OWN = 0, 1, 2
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(TOKENS) - 3), "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": USER, "tokenizer.ggml.eos_token_id": END,
    "tokenizer.chat_template": "{% for message in messages %}{{ bos_token + message.content }}{% endfor %}",
}
LLAMA = ModelConfig(
    family="llama", vocab_size=len(TOKENS), hidden_size=12, intermediate_size=16, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, bos_token_id=USER, eos_token_ids=(END,),
)
CONFIGS = {
    "llama": LLAMA,
    "llama_tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "llama_biased": dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, rope=RopeConfig(1e6)),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, tie_embeddings=True),
    "gemma3": dataclasses.replace(
        LLAMA, family="gemma3_text", qk_norm=True, tie_embeddings=True, num_layers=7, windows=(9,) * 5 + (None, 9),
        rope=RopeConfig(1e6), local_rope=RopeConfig(10_000.0), query_scalar=8.0, activation="gelu_tanh",
        norm_offset=1.0, out_norms=True, scaled_embedding=True,
    ),
    "phi3": dataclasses.replace(
        LLAMA, family="phi3", max_position=4096, windows=(2047,) * 2, rope=RopeConfig(10_000.0, partial=0.75),
    ),
}
FIELDS = fields_of(LLAMA) | TOKENIZER


@pytest.fixture(autouse=True)
def ends():
    """Fails a test that waits or computes without an end."""

    def stop(*_):
        raise TimeoutError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def random_tensors(config, dtype=np.float32):
    """Random weights by Hugging Face's names."""
    rng = np.random.default_rng(0)
    targets = tensor_names.targets_of(config)
    return {name: rng.normal(size=target.shape).astype(dtype) for name, target in targets.items()}


def written(path, config=LLAMA, fields=None, dtype=np.float32, **changed):
    """The path, with a model's file there; `changed` replaces tensors by their names' last part, None removes."""
    tensors = tensors_of(config, random_tensors(config, dtype))
    path.write_bytes(content(fields or fields_of(config) | TOKENIZER, tensors | changed))
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


def without(name):
    return {field: value for field, value in FIELDS.items() if field != name}


def refused(path, *words):
    """Loading fails with a message that names the file and has every word."""
    with pytest.raises(CheckpointError) as caught:
        kvjax.load(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


# ---------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_weights_and_configuration_are_those_of_the_directory(tmp_path, file, config, dtype):
    hf_config.write_config(config, tmp_path, "float32")
    save_file(random_tensors(config, np.dtype(dtype)), tmp_path / "model.safetensors")
    expected_config, expected = checkpoint.load(tmp_path, hf_config.read_config(tmp_path))
    llm = kvjax.load(written(file, config, dtype=np.dtype(dtype)))
    assert llm.config == expected_config == config
    # llama.cpp's files have 1 more than Gemma's small scales, rounded.
    atol = jnp.finfo(dtype).eps * 2 if config.norm_offset else 0
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=0, atol=float(atol)), llm.params, expected)


@pytest.mark.parametrize("piece", [1, 40, 100])
def test_pieces_of_a_tensor_give_what_the_whole_gives(file, monkeypatch, piece):
    expected = kvjax.load(written(file, CONFIGS["llama_biased"])).params
    monkeypatch.setattr(tensor_file, "_PIECE", piece)
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(file).params, expected)


@pytest.mark.parametrize("piece", [1, 100, 1 << 18])
@pytest.mark.parametrize("kind", weights.KINDS)
def test_codes_of_rows_that_rotate_together_are_reordered_as_their_numbers_are(file, kind, piece, monkeypatch):
    wide = kvjax.load(written(file)).params["layers_0"]
    monkeypatch.setattr(tensor_file, "_PIECE", piece)
    few = kvjax.load(file, weights=kind).params["layers_0"]
    for name in ("q_proj", "k_proj", "v_proj"):
        codes, scale = weights.codes_and_scale(np.asarray(wide[name]["weight"]), kind)
        np.testing.assert_array_equal(few[name]["weight"].codes, codes)
        np.testing.assert_array_equal(few[name]["weight"].scale, scale)


def test_saving_converts_to_a_directory(tmp_path, file):
    llm = kvjax.load(written(file))
    kvjax.save(llm, tmp_path / "made")
    made = kvjax.load(tmp_path / "made")
    assert made.config == llm.config and made.fingerprint == llm.fingerprint
    assert made.tokenizer.template == llm.tokenizer.template
    assert made.tokenizer.encode("abc <user>") == llm.tokenizer.encode("abc <user>")
    jax.tree.map(np.testing.assert_array_equal, made.params, llm.params)


def test_a_model_answers(file):
    llm = kvjax.load(written(file))
    with llm.chat("abc cab") as chat:
        assert len(chat.ask(" a", max_new_tokens=3).tokens[0]) <= 3


@pytest.mark.parametrize("name", [
    "extra.weight", "rope_factors_long.weight", "blk.0.attn_q.bias", "blk.2.attn_q.weight", "model.norm.weight"])
def test_other_tensors_are_refused(file, name):
    """In a GGUF file every tensor is part of what is computed."""
    refused(written(file, **{name: np.ones((32, 12), np.float32)}), f"tensor {name}", "not part of the llama models")


def test_more_tokens_than_rows(file):
    config = dataclasses.replace(LLAMA, vocab_size=len(TOKENS) - 1)
    refused(written(file, config), "tokenizer.ggml.tokens", "token_embd.weight")


@pytest.mark.parametrize("name", ["context_length", "attention.head_count", "attention.layer_norm_rms_epsilon"])
def test_missing_field(file, name):
    refused(written(file, fields=without(f"llama.{name}")), f"llama.{name}")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_query_head_has_keys_if_the_file_does_not_say(file, family):
    config = dataclasses.replace(CONFIGS[family], num_kv_heads=4)
    fields = fields_of(config) | TOKENIZER
    del fields[f"{family}.attention.head_count_kv"]
    assert kvjax.load(written(file, config, fields)).config == config


# ---------------------------------------------------------------- rotary embedding


def scaled(config, rope):
    """`config` with a scaling, and the divisors of frequencies that llama.cpp's converter writes for it."""
    plain = inverse_frequencies(config.head_dim, RopeConfig(rope.theta)).astype(np.float64)
    stretched = inverse_frequencies(config.head_dim, rope).astype(np.float64)
    return dataclasses.replace(config, rope=rope), (plain / stretched).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_llama_3(file, factor):
    rope = RopeConfig(500_000.0, "llama3", factor, 1.0, 4.0, 8192)
    config, divisors = scaled(dataclasses.replace(LLAMA, head_dim=128), rope)
    assert len(set(divisors.tolist())) > 3  # kept, divided, and between
    assert kvjax.load(written(file, config, **{"rope_freqs.weight": divisors})).config == config


def test_other_divisors_are_refused(file):
    config, divisors = scaled(LLAMA, RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192))
    divisors[1] *= 1.01
    refused(written(file, config, **{"rope_freqs.weight": divisors}), "rope_freqs.weight", "Llama 3")


@pytest.mark.parametrize("scaling", [
    {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0},
    {"llama.rope.scaling.factor": 4.0}])  # in llama.cpp a factor alone is linear
def test_linear_scaling(file, scaling):
    assert kvjax.load(written(file, fields=FIELDS | scaling)).config.rope == RopeConfig(10_000.0, "linear", 4.0)


def test_factors_of_phi3(file):
    """The attention factor in the file is that of the longer context."""
    short, long = (1.0, 1.5, 2.0), (2.0, 3.0, 4.0)
    rope = RopeConfig(10_000.0, "longrope", original_max_position=4096, attention_factor=1.25, short_factor=short,
                      long_factor=long, partial=0.75)
    config = dataclasses.replace(CONFIGS["phi3"], max_position=131_072, rope=rope)
    fields = fields_of(config) | TOKENIZER | {
        "phi3.rope.scaling.original_context_length": 4096, "phi3.rope.scaling.attn_factor": 1.25}
    factors = {f"rope_factors_{name}.weight": np.array(values, np.float32)
               for name, values in (("short", short), ("long", long))}
    assert kvjax.load(written(file, config, fields, **factors)).config == config
    refused(written(file, config, fields, **factors | {"rope_factors_long.weight": np.ones((3, 1), np.float32)}),
            "rope_factors_long.weight", "(3, 1)")


@pytest.mark.parametrize("scaling", [
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0},
    {"rope.scaling.type": "yarn"}, {"rope.scaling.yarn_log_multiplier": 0.1}])
def test_scalings_that_phi3_does_not_have_are_refused(file, scaling):
    config = CONFIGS["phi3"]
    fields = fields_of(config) | TOKENIZER | {f"phi3.{name}": value for name, value in scaling.items()}
    refused(written(file, config, fields), f"phi3.{next(iter(scaling))}")


def test_gemma_3_has_the_bases_and_the_windows_of_its_file(file):
    config = CONFIGS["gemma3"]
    fields = fields_of(config) | TOKENIZER
    own = {"gemma3.rope.freq_base_swa": 20_000.0, "gemma3.attention.sliding_window_pattern": 2}
    found = kvjax.load(written(file, config, fields | own)).config
    assert found.local_rope.theta == 20_000.0
    window = fields["gemma3.attention.sliding_window"]
    assert found.windows == tuple(window if (i + 1) % 2 else None for i in range(config.num_layers))
    del fields["gemma3.attention.sliding_window"]
    assert set(kvjax.load(written(file, config, fields)).config.windows) == {None}


@pytest.mark.parametrize("fields", [
    {"llama.rope.scaling.type": "other", "llama.rope.scaling.factor": 4.0},
    {"llama.rope.scaling.type": "linear", "llama.rope.scaling.attn_factor": 2.0},
    {"llama.rope.scaling.type": "linear", "llama.rope.scaling.strange": 2.0}, {"llama.rope.dimension_count": 4}])
def test_other_rotations_are_refused(file, fields):
    refused(written(file, fields=FIELDS | fields), "rope")


# ---------------------------------------------------------------- tokenizer


def pieces(llm, text):
    split = llm.tokenizer.tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in split]


@pytest.mark.parametrize("name, expected", [
    ("gpt-2", ["a", " 12345", " it", "'", "S", "!!", "\n", "\n", "b"]),
    ("default", ["a", " ", "123", "45", " it", "'", "S", "!!", "\n", "\n", "b"]),
    ("smollm", ["a", " ", "1", "2", "3", "4", "5", " it", "'", "S", "!!", "\n", "\n", "b"]),
    ("llama-bpe", ["a", " ", "123", "45", " it", "'S", "!!\n\n", "b"]),
    ("qwen2", ["a", " ", "1", "2", "3", "4", "5", " it", "'S", "!!\n\n", "b"]),
])
def test_words_are_split_as_the_file_says(file, name, expected):
    llm = kvjax.load(written(file, fields=FIELDS | {"tokenizer.ggml.pre": name}))
    assert pieces(llm, "a 12345 it'S!!\n\nb") == expected


def test_merges_and_special_tokens(file):
    tokenizer = kvjax.load(written(file)).tokenizer
    assert tokenizer.encode("abcb<own>a<end>") == [
        TOKENS.index("abc"), TOKENS.index("b"), OWN, TOKENS.index("a"), END]
    assert tokenizer.decode([TOKENS.index("abc"), OWN, END]) == "abc<own>"
    assert tokenizer.eos_ids == (END,) and tokenizer.bos_id == USER
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "<user>a"


@pytest.mark.parametrize("fields, begins", [
    ({}, False), ({"tokenizer.ggml.pre": "llama-bpe"}, True), ({"tokenizer.ggml.add_bos_token": True}, True),
    ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False)])
def test_texts_begin_with_the_start_token_if_the_file_says_so(file, fields, begins):
    llm = kvjax.load(written(file, fields=FIELDS | fields))
    assert llm.tokenizer.start_ids == ((USER,) if begins else ())


def test_an_end_of_turn_ends_an_answer_too(file):
    llm = kvjax.load(written(file, fields=FIELDS | {"tokenizer.ggml.eot_token_id": USER}))
    assert llm.config.eos_token_ids == llm.tokenizer.eos_ids == (END, USER)


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def sentence_pieces():
    """Pieces and scores: letters, a space, and random words, each of two that come before."""
    rng = random.Random(0)
    words = [SPACE, *"abcd"]
    while len(words) < 60:
        made = rng.choice(words) + rng.choice(words)
        if made not in words and len(made) < 8:
            words.append(made)
    scores = {word: -float(rng.sample(range(1000), 1)[0]) for word in words}
    return ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words], scores


def by_scores(text, scores):
    """SentencePiece's algorithm: joins the two neighbours that make the piece with the highest score."""
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not joined:
            return symbols
        i = -max(joined)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def test_pieces_with_the_highest_scores_are_merged_first(file):
    tokens, scores = sentence_pieces()
    vocabulary = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [scores.get(token, 0.0) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scores), "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }
    config = dataclasses.replace(LLAMA, vocab_size=len(tokens))
    tokenizer = kvjax.load(written(file, config, fields_of(config) | vocabulary)).tokenizer
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices("abcd  ", k=20)).strip() or "a"
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and [tokens[i] for i in ids[1:]] == by_scores(text, scores)
        assert tokenizer.decode(ids) == text
    assert [tokens[i] for i in tokenizer.encode("é")[-2:]] == ["<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("name, value", [
    ("model", "bert"), ("pre", "tekken"), ("tokens", ["a", "a"]), ("tokens", "a"), ("token_type", [1, 1]),
    ("merges", ["ab"]), ("merges", ["x y z"]), ("eos_token_id", len(TOKENS)), ("add_bos_token", 7),
])
def test_wrong_field_of_the_tokenizer(file, name, value):
    refused(written(file, fields=FIELDS | {f"tokenizer.ggml.{name}": value}), f"tokenizer.ggml.{name}")


@pytest.mark.parametrize("name", ["model", "tokens", "merges"])
def test_missing_field_of_the_tokenizer(file, name):
    refused(written(file, fields=without(f"tokenizer.ggml.{name}")), f"tokenizer.ggml.{name}")


def test_merge_of_unknown_tokens(file):
    refused(written(file, fields=FIELDS | {"tokenizer.ggml.merges": ["abc abc"]}), "tokenizer")


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("name", ["gemma2", "mamba", 3])
def test_another_architecture(file, name):
    refused(written(file, fields=FIELDS | {"general.architecture": name}), "general.architecture", str(name), "qwen3")


@pytest.mark.parametrize("fields, word", [
    ({"split.count": 3}, "--merge"), ({"llama.expert_count": 8}, "llama.expert_count"),
    ({"llama.attention.value_length": 4}, "value_length"), ({"llama.attention.head_count": 3}, "head_count"),
    ({"llama.block_count": 3}, "blk.2."),
    ({"llama.use_parallel_residual": True}, "parallel"), ({"llama.block_count": "x"}, "llama.block_count"),
    ({"llama.embedding_length": 13}, "shape"), ({"llama.attention.sliding_window": 16}, "sliding_window"),
])
def test_fields_that_say_another_model(file, fields, word):
    refused(written(file, fields=FIELDS | fields), word)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_missing_tensor(file, name):
    tensors = tensors_of(LLAMA, random_tensors(LLAMA))
    del tensors[name]
    file.write_bytes(content(FIELDS, tensors))
    refused(file, f"tensor {name} is missing")


def test_misshapen_tensor(file):
    refused(written(file, **{"blk.0.ffn_up.weight": np.ones((3, 12), np.float32)}), "blk.0.ffn_up.weight", "(3, 12)")


def test_value_that_is_not_finite(file):
    tensor = np.full((16, 12), np.nan, np.float32)
    refused(written(file, **{"blk.0.ffn_up.weight": tensor}), "blk.0.ffn_up.weight", "nan")


def test_quantised_weights_need_the_package(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    tensor = ((16, 12), 12, bytes(1000))
    refused(written(file, **{"blk.0.ffn_up.weight": tensor}), "blk.0.ffn_up.weight", "pip install gguf")


@pytest.mark.parametrize("start", [b"GGML", b"FUGG", b"", b"{\"a\""])
def test_another_file(file, start):
    file.write_bytes(start + bytes(100))
    refused(file, "not a complete GGUF file")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_another_version(file, version):
    file.write_bytes(content(FIELDS, {}, version=version))
    refused(file, "version")


def test_a_file_that_is_cut_anywhere(file):
    whole = written(file).read_bytes()
    for length in (*range(0, len(whole), 211), len(whole) - 32):
        file.write_bytes(whole[:length])
        refused(file)


BILLIONS = 1 << 60
WRONG = {
    "endless_array": struct.pack("<IIQ", 9, 0, BILLIONS), "endless_texts": struct.pack("<IIQ", 9, 8, BILLIONS),
    "endless_text": struct.pack("<IQ", 8, BILLIONS), "nested": struct.pack("<IIQIQ", 9, 9, 1, 9, 1) * 1000,
    "unknown": struct.pack("<I", 99), "half_a_character": struct.pack("<IQ", 8, 1) + b"\xff",
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_field_that_is_none(file, wrong):
    refused(written(file, fields={"a": wrong} | FIELDS), "not a complete GGUF file")


@pytest.mark.parametrize("at, width", [(8, 8), (16, 8)])
@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_more_fields_or_tensors_than_there_are(file, at, width, count):
    whole = written(file).read_bytes()
    file.write_bytes(whole[:at] + struct.pack("<Q", count) + whole[at + width :])
    refused(file)


@pytest.mark.parametrize("shape", [(1 << 40, 12), (1 << 63, 2), (0, 12), (1, 2, 3, 4, 5)])
def test_impossible_shape(file, shape):
    refused(written(file, **{"blk.0.ffn_up.weight": (shape, 0, b"")}))


def test_flipped_bits_of_a_header(file):
    whole, rng, refusals = written(file).read_bytes(), random.Random(0), 0
    for _ in range(200):
        changed = bytearray(whole)
        changed[rng.randrange(8000)] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        try:
            gguf.find(file)
        except CheckpointError as error:
            assert 0 < len(str(error)) < 10_000
            refusals += 1
    assert refusals > 20


@pytest.mark.parametrize("kind", ["fifo", "nothing"])
def test_what_is_no_file(file, kind):
    if kind == "fifo":
        os.mkfifo(file)
    refused(file, "not a directory")


def test_names_of_tensors():
    names = [(config.family, name) for config in CONFIGS.values() for name in tensor_names.targets_of(config)]
    for family, name in names:
        theirs, kind = name_of(name, family), family.removesuffix("_text")
        assert gguf._gguf_name(kind, name) == theirs and gguf._hf_name(theirs, kind) == name


def test_template_is_kept_in_what_is_saved(tmp_path, file):
    kvjax.save(kvjax.load(written(file)), tmp_path / "made")
    settings = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TOKENIZER["tokenizer.chat_template"]
