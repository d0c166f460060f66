"""Model directories that are broken, or made to do harm: they are loaded right or refused, at once and in one way."""

import dataclasses
import json
import os
import random
import signal
import struct
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import checkpoint, hf_config, tensor_file
from kvjax.models.config import Experts, ModelConfig
from kvjax.models.transformer import Transformer

LLAMA = ModelConfig(
    family="llama", vocab_size=20, hidden_size=12, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4,
)
MODELS = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, family="mistral", windows=(16, 16)),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, windows=(None, 16)),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True),
    "phi3": dataclasses.replace(LLAMA, family="phi3"),
    "mixtral": dataclasses.replace(LLAMA, family="mixtral", experts=Experts(3, 2, 16)),
    "qwen2_moe": dataclasses.replace(
        LLAMA, family="qwen2_moe", qkv_bias=True, experts=Experts(3, 2, 6, shared_size=8, dense_layers=(0,))),
    "qwen3_moe": dataclasses.replace(LLAMA, family="qwen3_moe", qk_norm=True, experts=Experts(3, 2, 6)),
}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "attention_factor": 1.2}
# What a field is set to, as it stands in the file.
VALUES = {
    "null": "null", "minus_one": "-1", "zero": "0", "one": "1", "half": "0.5", "2**31": str(2**31), "2**63": str(2**63),
    "1e400": "1e400", "nan": "NaN", "digits": "9" * 4000, "more_digits": "9" * 5000, "text": '"x"',
    "half_a_character": r'"\ud800"', "list": "[]", "nested_list": "[[1]]", "object": "{}", "true": "true",
    "deep": "[" * 900 + "]" * 900, "deeper": "[" * 100_000 + "]" * 100_000,
}


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


def made(directory, config):
    """The directory, with random weights of this model."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)
    checkpoint.save_params(params, config, directory)
    return directory


def unless_refused(function, *arguments):
    """The result, or None for a CheckpointError; there is no other error."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        assert 0 < len(str(error)) < 10_000
        return None


def load(directory, config=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensors without a place
        return checkpoint.load(directory, config or hf_config.read_config(directory))


def loaded_or_refused(directory, config=None):
    """Whether a directory can be loaded, with finite weights."""
    loaded = unless_refused(load, directory, config)
    if loaded is None:
        return False
    config, params = loaded
    assert set(params) >= {"embedding", "norm", *(f"layers_{i}" for i in range(config.num_layers))}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    return True


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("family", MODELS)
def test_any_value_of_any_field(tmp_path, family):
    directory = made(tmp_path, MODELS[family])
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    # `rope_parameters` is read where there is no `rope_scaling`.
    rope = LONGROPE if family == "phi3" else ROPE
    fields |= {"rope_scaling": None, "rope_parameters": rope | {"rope_theta": 1e4}, "quantization_config": None,
               "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64}
    rope = fields["rope_parameters"]
    changed = [fields | {name: "HERE"} for name in fields]
    changed += [fields | {"rope_parameters": rope | {name: "HERE"}} for name in rope]
    read = set()
    for content in map(json.dumps, changed):
        for value in VALUES.values():
            file.write_text(content.replace('"HERE"', value))
            read.add(unless_refused(hf_config.read_config, directory))
    loaded = {config for config in read - {None} if loaded_or_refused(directory, config)}
    assert len(read) > len(loaded) > 5


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_any_value_in_generation_config(tmp_path, name):
    directory = made(tmp_path, LLAMA)
    for value in VALUES.values():
        (directory / "generation_config.json").write_text(f'{{"{name}": {value}}}')
        loaded_or_refused(directory)


@pytest.mark.parametrize(
    "name, value",
    [("num_hidden_layers", 10_000), ("head_dim", 2**30), ("vocab_size", 2**30), ("hidden_size", 2**30),
     ("intermediate_size", 2**30), ("num_attention_heads", 2**30), ("num_key_value_heads", 1)],
)
def test_sizes_that_the_weights_do_not_have_are_seen_in_their_headers(tmp_path, monkeypatch, name, value):
    directory = made(tmp_path, LLAMA)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    monkeypatch.setattr(tensor_file, "read", None)  # nothing is read
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*(is missing|has shape)"):
        load(directory)


@pytest.mark.parametrize("value", [0, -1])
def test_model_of_impossible_size(value):
    with pytest.raises(ConfigError, match="head_dim="):
        dataclasses.replace(LLAMA, head_dim=value)


# ---------------------------------------------------------------- weights


def test_flipped_bits_of_a_header(tmp_path):
    directory = made(tmp_path, LLAMA)
    file = directory / "model.safetensors"
    content, rng, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(200):
        changed = bytearray(content)
        changed[rng.randrange(4096)] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        refused += not loaded_or_refused(directory)
    assert refused > 50


def test_truncated_anywhere(tmp_path):
    directory = made(tmp_path, LLAMA)
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for length in (*range(0, len(content), 97), len(content) - 1):
        file.write_bytes(content[:length])
        assert not loaded_or_refused(directory)


TENSOR = "model.norm.weight"
HEADERS = {
    "deep_list": b"[" * 100_000,
    "deep_object": b'{"a":' * 100_000,
    "nothing": b"{}",
    "null": b"null",
    "overflow": json.dumps({TENSOR: {"dtype": "F32", "shape": [2**64 - 1] * 2, "data_offsets": [0, 4]}}).encode(),
    "offsets_beyond_the_file": json.dumps(
        {TENSOR: {"dtype": "F32", "shape": [0], "data_offsets": [2**63, 2**63]}}
    ).encode(),
    "other_type": json.dumps({TENSOR: {"dtype": "x", "shape": [12], "data_offsets": [0, 48]}}).encode(),
    "many": json.dumps({i: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}).encode(),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_header_that_is_none(tmp_path, header):
    directory = made(tmp_path, LLAMA)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(48))
    assert not loaded_or_refused(directory)


@pytest.mark.parametrize("length", [0, (8 << 20) + 1, 2**63, 2**64 - 1])
def test_length_of_a_header_that_is_none(tmp_path, length):
    directory = made(tmp_path, LLAMA)
    file = directory / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", length) + content[8:])
    assert not loaded_or_refused(directory)


SHARDS = ["..", ".", "", "a\0b", "\ud800", "x" * 5000, "/etc/passwd", "sub/x", None, 3, [], {}, "config.json"]


@pytest.mark.parametrize("shard", SHARDS, ids=[repr(shard)[:12] for shard in SHARDS])
def test_index_that_names_what_is_no_shard(tmp_path, shard):
    directory = made(tmp_path, LLAMA)
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {TENSOR: "part.safetensors"}}))
    assert loaded_or_refused(directory)
    index.write_text(json.dumps({"weight_map": {TENSOR: "part.safetensors", "a": shard}}))
    assert not loaded_or_refused(directory)


# ---------------------------------------------------------------- files that are none


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


SPECIAL = {
    "fifo": os.mkfifo, "directory": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero"), "huge": make_huge,
    "link_to_nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_special_file_in_the_place_of_another(tmp_path, name, make):
    directory = made(tmp_path, LLAMA)
    (directory / name).unlink()
    make(directory / name)
    with pytest.raises(CheckpointError, match=name):
        load(directory)


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "part.safetensors"])
def test_special_file_in_the_place_of_a_shard_or_the_index(tmp_path, name, make):
    directory = made(tmp_path, LLAMA)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {TENSOR: "part.safetensors"}}))
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    with pytest.raises(CheckpointError, match=name):
        load(directory)
