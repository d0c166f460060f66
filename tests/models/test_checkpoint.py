"""Parameters from and to safetensors files."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import checkpoint
from kvjax.models.checkpoint import load, save_params
from kvjax.models.config import ModelConfig
from kvjax.models.hf_config import read_config
from kvjax.models.transformer import Transformer

PLAIN = ModelConfig(
    family="llama", vocab_size=20, hidden_size=12, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4,
)
TIED = dataclasses.replace(PLAIN, tie_embeddings=True)
BIASED = dataclasses.replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True)
QWEN3 = dataclasses.replace(PLAIN, family="qwen3", qk_norm=True, head_dim=8)
QWEN3_BIASED = dataclasses.replace(BIASED, family="qwen3", qk_norm=True)
PHI3 = dataclasses.replace(PLAIN, family="phi3")
QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def tensors_of(config, dtype=np.float32):
    """A random checkpoint of `config` as Hugging Face names and lays it out: linear maps are [out, in]."""
    e, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = {"self_attn.q_proj": (q, e), "self_attn.k_proj": (kv, e), "self_attn.v_proj": (kv, e),
              "self_attn.o_proj": (e, q), "mlp.gate_proj": (f, e), "mlp.up_proj": (f, e), "mlp.down_proj": (e, f)}
    shapes = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (v, e)
    for layer in (f"model.layers.{i}." for i in range(config.num_layers)):
        shapes |= {f"{layer}{name}_layernorm.weight": (e,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}{name}.weight": shape for name, shape in linear.items()}
        if config.mlp_bias:
            shapes |= {f"{layer}{name}.bias": shape[:1] for name, shape in linear.items()}
        if config.qk_norm:
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    if config.family == "phi3":
        for name in [name for name in tensors if re.search("self_attn.q_proj|mlp.gate_proj", name)]:
            inside = ("q_proj", "k_proj", "v_proj") if "q_proj" in name else ("gate_proj", "up_proj")
            parts = [tensors.pop(name.replace(inside[0], part)) for part in inside]
            fused = name.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
            tensors[fused] = np.concatenate(parts)
    return tensors


@pytest.fixture
def tensors():
    return tensors_of(PLAIN)


@pytest.fixture
def write(tmp_path):
    """Writes tensors as model.safetensors, or as shards with an index; gives the directory."""

    def writer(*shards):
        if len(shards) == 1:
            save_file(shards[0], tmp_path / "model.safetensors")
            return tmp_path
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, tmp_path / name)
        index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return tmp_path

    return writer


def point_to(directory, name, shard):
    """Changes the index to name the shard of this number for a tensor, or none."""
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map.pop(name)
    if shard is not None:
        weight_map[name] = sorted(set(weight_map.values()))[shard]
    index.write_text(json.dumps({"weight_map": weight_map}))


def halves(tensors):
    items = list(tensors.items())
    return dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])


def load_params(directory, config, dtype=jnp.float32):
    return load(directory, config, dtype)[1]


def refused(directory, *words, config=PLAIN):
    """Loading fails with a message that has every word."""
    with pytest.raises(CheckpointError) as caught:
        load_params(directory, config)
    for word in words:
        assert word in str(caught.value)


def initial_params(config):
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]


def random_params(config):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), initial_params(config))


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    "config", [PLAIN, TIED, BIASED, QWEN3, QWEN3_BIASED, PHI3],
    ids=["plain", "tied", "biased", "qwen3", "qwen3_biased", "phi3"],
)
def test_tree_is_that_of_init(write, config):
    loaded = jax.eval_shape(lambda params: params, load_params(write(tensors_of(config)), config))
    assert loaded == initial_params(config)


@pytest.mark.parametrize(
    "config, path, name",
    [
        (PLAIN, "layers_0/q_proj/weight", QUERY),
        (PLAIN, "layers_1/k_proj/weight", KEY),
        (PLAIN, "layers_0/v_proj/weight", "model.layers.0.self_attn.v_proj.weight"),
        (PLAIN, "layers_1/o_proj/weight", "model.layers.1.self_attn.o_proj.weight"),
        (PLAIN, "layers_0/mlp/gate_proj/weight", "model.layers.0.mlp.gate_proj.weight"),
        (PLAIN, "layers_0/mlp/up_proj/weight", "model.layers.0.mlp.up_proj.weight"),
        (PLAIN, "layers_1/mlp/down_proj/weight", "model.layers.1.mlp.down_proj.weight"),
        (PLAIN, "lm_head/weight", "lm_head.weight"),
        (PLAIN, "embedding/embedding", "model.embed_tokens.weight"),
        (PLAIN, "norm/scale", "model.norm.weight"),
        (PLAIN, "layers_1/input_norm/scale", "model.layers.1.input_layernorm.weight"),
        (PLAIN, "layers_0/post_norm/scale", "model.layers.0.post_attention_layernorm.weight"),
        (QWEN3, "layers_0/q_norm/scale", "model.layers.0.self_attn.q_norm.weight"),
        (QWEN3, "layers_1/k_norm/scale", "model.layers.1.self_attn.k_norm.weight"),
        (BIASED, "layers_0/q_proj/bias", "model.layers.0.self_attn.q_proj.bias"),
        (BIASED, "layers_1/o_proj/bias", "model.layers.1.self_attn.o_proj.bias"),
        (BIASED, "layers_1/mlp/down_proj/bias", "model.layers.1.mlp.down_proj.bias"),
    ],
)
def test_tensors_are_kept_as_they_are(write, config, path, name):
    tensors = tensors_of(config)
    loaded = traverse_util.flatten_dict(load_params(write(tensors), config), sep="/")
    np.testing.assert_array_equal(loaded[path], tensors[name])


def test_phi3s_fused_tensors_are_split_and_fused_again(write, tmp_path):
    apart, fused = tensors_of(PLAIN), tensors_of(PHI3)
    directory = write(fused)
    loaded = load_params(directory, PHI3)
    flat = traverse_util.flatten_dict(loaded["layers_1"], sep="/")
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        path = part.removeprefix("self_attn.").replace(".", "/")
        np.testing.assert_array_equal(flat[f"{path}/weight"], apart[f"model.layers.1.{part}.weight"])
    save_params(loaded, PHI3, tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == fused.keys()
    for name, tensor in fused.items():
        np.testing.assert_array_equal(saved[name], tensor)


def test_a_fused_tensor_of_another_size_is_refused(write):
    tensors = tensors_of(PHI3)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    refused(write(tensors | {name: tensors[name][:-1]}), name, "(31, 12)", "(32, 12)", config=PHI3)


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_stored_type_is_cast_to_the_wanted_one(write, stored, wanted):
    tensors = tensors_of(PLAIN, np.dtype(stored))
    loaded = load_params(write(tensors), PLAIN, wanted)["layers_0"]["q_proj"]["weight"]
    assert loaded.dtype == wanted
    np.testing.assert_array_equal(loaded, tensors[QUERY].astype(wanted))


def test_shards_give_what_one_file_gives(write, tensors, tmp_path):
    whole = load_params(write(tensors), PLAIN)
    (tmp_path / "model.safetensors").unlink()
    sharded = load_params(write(*halves(tensors)), PLAIN)
    jax.tree.map(np.testing.assert_array_equal, sharded, whole)


def test_one_file_comes_before_an_index(write, tensors):
    write(*halves({name: np.zeros_like(tensor) for name, tensor in tensors.items()}))
    loaded = load_params(write(tensors), PLAIN)
    np.testing.assert_array_equal(loaded["norm"]["scale"], tensors["model.norm.weight"])


def test_every_tensor_is_told(write, tensors):
    told = []
    params = checkpoint.find(write(tensors), PLAIN).read(advance=lambda: told.append(1))
    assert len(told) == len(tensors) == len(jax.tree.leaves(params))


def test_a_file_that_has_become_shorter_since_it_was_looked_at(write, tensors):
    weights = checkpoint.find(write(tensors), PLAIN)
    file = next(iter(weights.tensors.values())).file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* ends 1 bytes early"):
        weights.read()


# ---------------------------------------------------------------- whether embedding and unembedding are one


def test_unembedding_of_its_own_unties_a_tied_model(write, tensors):
    """As in transformers: the file decides, not the flag."""
    with pytest.warns(UserWarning, match=r"model\.safetensors: lm_head\.weight is not the embedding"):
        config, params = load(write(tensors), TIED)
    assert config == PLAIN
    jax.tree.map(np.testing.assert_array_equal, params, load_params(write(tensors), PLAIN))


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
def test_equal_unembedding_leaves_a_model_tied(write, stored, recwarn):
    tensors = tensors_of(TIED, np.dtype(stored))
    config, params = load(write(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}), TIED)
    assert config == TIED
    jax.tree.map(np.testing.assert_array_equal, params, load_params(write(tensors), TIED))
    assert not recwarn.list


def test_unembedding_of_which_the_last_value_differs_is_one_of_its_own(write):
    """In the file, also where both are the same in the type that is asked for: it is one model in all types."""
    config = dataclasses.replace(TIED, vocab_size=20_001)
    tensors = tensors_of(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] = np.nextafter(tensors["lm_head.weight"][-1, -1], np.float32(9))
    with pytest.warns(UserWarning, match=r"lm_head\.weight is not the embedding"):
        assert not load(write(tensors), config, jnp.bfloat16)[0].tie_embeddings


def test_unembedding_of_another_type_is_one_of_its_own(write):
    tensors = tensors_of(TIED)
    head = tensors["model.embed_tokens.weight"].astype(np.float16)
    with pytest.warns(UserWarning, match=r"lm_head\.weight is not the embedding"):
        config, params = load(write(tensors | {"lm_head.weight": head}), TIED)
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"]["weight"], head.astype(np.float32))


def test_unembedding_alone_is_the_embedding_of_a_tied_model(write, recwarn):
    tensors = tensors_of(TIED)
    expected = load_params(write(tensors), TIED)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    config, params = load(write(tensors), TIED)
    assert config == TIED
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert not recwarn.list


def test_unembedding_alone_is_no_embedding_of_an_untied_model(write, tensors):
    del tensors["model.embed_tokens.weight"]
    refused(write(tensors), "tensor model.embed_tokens.weight is missing")


def test_misshapen_unembedding_of_a_tied_model(write, tensors):
    tensors["lm_head.weight"] = np.ones((3, 3), np.float32)
    refused(write(tensors), "lm_head.weight has shape (3, 3)", "(20, 12)", config=TIED)


def test_untied_model_is_saved_as_one(write, tensors, tmp_path):
    """Also where it was loaded with the configuration of a tied one."""
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        config, params = load(write(tensors), TIED)
    save_params(params, config, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    saved_config, saved = load(tmp_path / "saved", read_config(tmp_path / "saved"))
    assert not saved_config.tie_embeddings
    jax.tree.map(np.testing.assert_array_equal, saved, params)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("config", [PLAIN, TIED], ids=["plain", "tied"])
def test_names_without_the_prefix_of_the_model(write, config, recwarn):
    tensors = tensors_of(config)
    expected = load_params(write(tensors), config)
    loaded = load_params(write({name.removeprefix("model."): tensor for name, tensor in tensors.items()}), config)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    assert not recwarn.list


@pytest.mark.parametrize("spell", [
    lambda name: f"language_model.{name}",
    lambda name: name.replace("model.", "model.language_model.") if name.startswith("model.") else name,
], ids=["first", "within"])
def test_the_language_model_of_one_that_also_reads_images(write, tensors, spell):
    """Both spellings that Gemma 3's files have had; the other tensors are named in a warning."""
    expected = load_params(write(tensors), PLAIN)
    both = {spell(name): tensor for name, tensor in tensors.items()} | {"vision_tower.patch.weight": np.ones((2, 2))}
    with pytest.warns(UserWarning, match=r"not read: vision_tower\.patch\.weight"):
        loaded = load_params(write({name: tensor.astype(np.float32) for name, tensor in both.items()}), PLAIN)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_the_language_models_own_unembedding(write, tensors):
    """Beside images it has a longer name; a tied configuration does not hide it."""
    both = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    with pytest.warns(UserWarning, match=r"lm_head\.weight is not the embedding"):
        config, params = load(write(both), TIED)
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"]["weight"], tensors["lm_head.weight"])


def test_name_with_the_prefix_comes_first(write, tensors):
    directory = write(tensors | {"norm.weight": np.zeros(12, np.float32)})
    with pytest.warns(UserWarning, match=r"not read: norm\.weight \(1 in all\)"):
        loaded = load_params(directory, PLAIN)
    np.testing.assert_array_equal(loaded["norm"]["scale"], tensors["model.norm.weight"])


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq"]
)
def test_rotary_frequencies_are_ignored(write, tensors, name, recwarn):
    loaded = load_params(write(tensors | {name: np.ones(2, np.float32)}), PLAIN)
    assert set(loaded) == {"embedding", "layers_0", "layers_1", "norm", "lm_head"}
    assert not recwarn.list


@pytest.mark.parametrize(
    "name", ["model.layers.0.extra.weight", QUERY.replace("layers.0", "layers.2"), QUERY.replace("weight", "bias")]
)
def test_tensors_that_the_model_has_no_place_for_are_named(write, tensors, name):
    expected = load_params(write(tensors), PLAIN)
    with pytest.warns(UserWarning, match=re.escape(f"not read: {name} (1 in all)")):
        loaded = load_params(write(tensors | {name: np.ones(2, np.int8)}), PLAIN)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_of_many_tensors_without_a_place_the_first_are_named(write, tensors):
    others = {f"extra.{i}": np.ones(2, np.float32) for i in range(9)}
    named = re.escape("extra.0, extra.1, extra.2, extra.3, extra.4 (9 in all)")
    with pytest.warns(UserWarning, match=named):
        load_params(write(tensors | others), PLAIN)


@pytest.mark.parametrize("right", [0, 1])
def test_of_a_tensor_in_two_shards_the_one_that_the_index_names_counts(write, tensors, right):
    shards = halves(tensors)
    both = [shard | {KEY: tensors[KEY] if i == right else tensors[KEY] + 1} for i, shard in enumerate(shards)]
    directory = write(*both)
    point_to(directory, KEY, right)
    np.testing.assert_array_equal(load_params(directory, PLAIN)["layers_1"]["k_proj"]["weight"], tensors[KEY])


# ---------------------------------------------------------------- bad checkpoints


def test_missing_tensor(write, tensors):
    del tensors[KEY]
    refused(write(tensors), f"model.safetensors: tensor {KEY} is missing, and 0 more")


def test_missing_unembedding_of_an_untied_model(write):
    refused(write(tensors_of(TIED)), "model.safetensors: tensor lm_head.weight is missing")


def test_missing_tensor_of_a_sharded_checkpoint(write, tensors):
    first, second = halves(tensors)
    del second[KEY]
    refused(write(first, second), f"model.safetensors.index.json: tensor {KEY} is missing")


def test_tensor_in_two_shards_of_which_the_index_names_none(write, tensors):
    first, second = halves(tensors)
    directory = write(first, second | {"model.norm.weight": tensors["model.norm.weight"]})
    point_to(directory, "model.norm.weight", None)
    refused(directory, "00002-of-00002.safetensors: tensor model.norm.weight is also in model-00001-of-00002")


@pytest.mark.parametrize("name", [QUERY, "model.norm.weight", "model.embed_tokens.weight"])
def test_misshapen_tensor(write, tensors, name):
    shape = tensors[name].shape
    tensors[name] = np.ones((*shape[:-1], shape[-1] + 1), np.float32)
    refused(write(tensors), "model.safetensors", name, str(tensors[name].shape), str(shape))


def test_linear_map_stored_as_in_by_out(write, tensors):
    tensors[QUERY] = np.ascontiguousarray(tensors[QUERY].T)
    refused(write(tensors), "model.safetensors", QUERY, "(12, 16)", "(16, 12)")


def test_unsupported_dtype(write, tensors):
    tensors[QUERY] = tensors[QUERY].astype(np.int8)
    refused(write(tensors), "model.safetensors", QUERY, "I8", "F32, BF16, F16")


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_truncated_file(write, tensors, left):
    file = write(tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    refused(file.parent, "model.safetensors: not a complete safetensors file")


def test_truncated_shard(write, tensors):
    file = write(*halves(tensors)) / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused(file.parent, "model-00002-of-00002.safetensors: not a complete safetensors file")


def test_missing_shard(write, tensors):
    directory = write(*halves(tensors))
    (directory / "model-00002-of-00002.safetensors").unlink()
    refused(directory, "model-00002-of-00002.safetensors: this shard", next(iter(halves(tensors)[1])))


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_unusable_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refused(tmp_path, "model.safetensors.index.json: weight_map is not an object")


def test_corrupt_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map"')
    refused(tmp_path, "model.safetensors.index.json: not readable as JSON")


def test_directory_without_weights(tmp_path):
    refused(tmp_path, str(tmp_path), "neither model.safetensors nor model.safetensors.index.json")


def test_missing_directory(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: not a directory")


# ---------------------------------------------------------------- values that are not finite

MODEL_TYPES = (np.float32, np.float16, jnp.bfloat16)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", MODEL_TYPES)
def test_weight_that_is_not_finite_is_refused(write, stored, value):
    tensors = tensors_of(PLAIN, np.dtype(stored))
    tensors[KEY][-1, -1] = value
    refused(write(tensors), "model.safetensors", f"tensor {KEY} has a value that is {abs(value)}")


@pytest.mark.parametrize(
    "stored, wanted, largest, beyond, remedy",
    [
        (np.float32, jnp.float16, 65519.0, 65520.0, "use float32 or bfloat16"),
        (np.float32, jnp.float16, -65519.0, -65520.0, "use float32 or bfloat16"),
        (np.float32, jnp.float16, 65519.0, 3.4e38, "use float32"),
        (jnp.bfloat16, jnp.float16, 65280.0, 65536.0, "use float32 or bfloat16"),
        (np.float32, jnp.bfloat16, 3.3895314e38, 3.4e38, "use float32"),
    ],
)
def test_weight_that_a_cast_makes_infinite_is_refused(write, stored, wanted, largest, beyond, remedy):
    """Infinite is what lies beyond half the way from the type's largest number to the next that it would have."""
    tensors = tensors_of(PLAIN, np.dtype(stored))
    tensors[KEY][1, 2] = largest
    loaded = load_params(write(tensors), PLAIN, wanted)["layers_1"]["k_proj"]["weight"]
    assert np.isfinite(np.asarray(loaded, np.float32)).all()
    tensors[KEY][1, 2] = beyond
    with pytest.raises(CheckpointError) as caught:
        load_params(write(tensors), PLAIN, wanted)
    for words in (KEY, f"magnitude {abs(np.dtype(stored).type(beyond)):.6g}", jnp.dtype(wanted).name, remedy):
        assert words in str(caught.value)
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize("at", [0, 1 << 17, -1])
def test_every_weight_of_a_large_tensor_is_looked_at(write, at):
    config = dataclasses.replace(PLAIN, vocab_size=20_000)
    tensors = tensors_of(config)
    tensors["model.embed_tokens.weight"].reshape(-1)[at] = np.inf
    refused(write(tensors), "tensor model.embed_tokens.weight has a value that is inf", config=config)


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("config", [PLAIN, TIED, BIASED, QWEN3], ids=["plain", "tied", "biased", "qwen3"])
def test_saved_params_load_equal(tmp_path, config):
    params = random_params(config)
    save_params(params, config, tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "model", config), params)
    assert read_config(tmp_path / "model") == config


def test_saved_file_has_the_names_and_shapes_of_hugging_face(tmp_path):
    save_params(random_params(BIASED), BIASED, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in tensors_of(BIASED).items()}


def test_saved_file_says_whose_layout_it_has(tmp_path):
    save_params(random_params(PLAIN), PLAIN, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as tensors:
        assert tensors.metadata() == {"format": "pt"}


def test_bfloat16_is_rounded_on_save(tmp_path):
    params = random_params(PLAIN)
    save_params(params, PLAIN, tmp_path, "bfloat16")
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(saved[QUERY], params["layers_0"]["q_proj"]["weight"].astype(jnp.bfloat16))


def test_config_says_which_dtype_was_saved(tmp_path):
    save_params(random_params(PLAIN), PLAIN, tmp_path, "bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_unwritable_dtype(tmp_path):
    with pytest.raises(ConfigError, match=r"'int8'.*float32, bfloat16"):
        save_params(random_params(PLAIN), PLAIN, tmp_path, "int8")


def test_model_without_mlp_has_no_format(tmp_path):
    config = dataclasses.replace(PLAIN, use_mlp=False)
    with pytest.raises(CheckpointError, match=r"config\.json.*use_mlp=False"):
        save_params(random_params(config), config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_missing_param_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: parameter lm_head/weight has shape None"):
        save_params(random_params(TIED), PLAIN, tmp_path)
    assert not list(tmp_path.iterdir())


def test_surplus_param_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"lm_head/weight has shape \(20, 12\); the model has None"):
        save_params(random_params(PLAIN), TIED, tmp_path)


def test_variables_in_place_of_params_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="parameter embedding/embedding has shape None"):
        save_params({"params": random_params(PLAIN)}, PLAIN, tmp_path)


def test_misshapen_params_are_refused(tmp_path):
    params = random_params(PLAIN)
    params["norm"]["scale"] = jnp.ones(13)
    with pytest.raises(CheckpointError, match=r"norm/scale has shape \(13,\); the model has \(12,\)"):
        save_params(params, PLAIN, tmp_path)


@pytest.mark.parametrize(
    "value, words", [(np.nan, "a value that is nan"), (3.4e38, "infinite as bfloat16; use float32")]
)
def test_params_that_would_not_be_loaded_are_not_saved(tmp_path, value, words):
    params = random_params(PLAIN)
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(value)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: parameter norm/scale has .*{words}"):
        save_params(params, PLAIN, tmp_path / "model", "bfloat16")
    assert not (tmp_path / "model").exists()


def test_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    save_params(random_params(PLAIN), PLAIN, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(tensors, file, metadata):
        pathlib.Path(file).write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "save_file", half)
    with pytest.raises(CheckpointError, match="no space"):
        save_params(random_params(TIED), TIED, tmp_path, "bfloat16")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
