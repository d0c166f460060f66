"""Weights of mixtures of experts from and to safetensors files, in both forms that transformers writes."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.errors import CheckpointError
from kvjax.models.checkpoint import find, load, save_params
from kvjax.models.config import Experts, ModelConfig
from kvjax.models.hf_config import read_config
from kvjax.models.transformer import Transformer

MIXTRAL = ModelConfig(
    family="mixtral", vocab_size=20, hidden_size=12, intermediate_size=6, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, experts=Experts(count=5, per_token=2, size=6),
)
QWEN2_MOE = dataclasses.replace(
    MIXTRAL, family="qwen2_moe", intermediate_size=16, qkv_bias=True,
    experts=Experts(count=3, per_token=2, size=6, normalise=False, shared_size=10, dense_layers=(0,)),
)
QWEN3_MOE = dataclasses.replace(
    MIXTRAL, family="qwen3_moe", qk_norm=True, intermediate_size=16, experts=Experts(count=3, per_token=1, size=6),
)
GPT_OSS = read_config(pathlib.Path(__file__).parents[1] / "goldens" / "gpt_oss")
every_family = pytest.mark.parametrize("config", [MIXTRAL, QWEN2_MOE, QWEN3_MOE], ids=lambda config: config.family)
FILE = "model.safetensors"
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")


def random_params(config):
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)


@pytest.fixture
def saved(config, tmp_path):
    """A directory with random weights, and these."""
    params = random_params(config)
    save_params(params, config, tmp_path / "saved")
    return tmp_path / "saved", params


def stacked(tensors, config):
    """The same tensors as transformers 5 has them in memory."""
    module, gate, up, down = NAMES.get(config.family, USUAL)
    tensors = {name.replace(f".{module}.", ".mlp."): tensor for name, tensor in tensors.items()}
    for i in (i for i, layer in enumerate(config.layers) if layer.experts):
        for name, maps in {"gate_up_proj": (gate, up), "down_proj": (down,)}.items():
            each = [[tensors.pop(f"model.layers.{i}.mlp.experts.{e}.{part}.weight") for part in maps]
                    for e in range(config.experts.count)]
            tensors[f"model.layers.{i}.mlp.experts.{name}"] = np.stack([np.concatenate(parts) for parts in each])
    return tensors


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@every_family
def test_saved_weights_are_loaded_again(config, saved, recwarn):
    directory, params = saved
    assert read_config(directory) == config
    same(load(directory, config)[1], params)
    assert not recwarn.list


@pytest.mark.parametrize("config", [GPT_OSS], ids=["gpt_oss"])
def test_weights_of_all_experts_in_one_tensor_are_loaded_again(config, saved):
    """Its file has them transposed."""
    directory, params = saved
    same(load(directory, config)[1], params)
    own = params["layers_1"]["experts"]["down_proj"]
    tensor = load_file(directory / FILE)["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(tensor, np.swapaxes(own, 1, 2))


@every_family
def test_each_map_of_each_expert_has_its_tensor(config, saved):
    tensors, (_, params) = load_file(saved[0] / FILE), saved
    module, *maps = NAMES.get(config.family, USUAL)
    own = params["layers_1"]["experts"]
    for e in range(config.experts.count):
        for name, path in zip(maps, USUAL[1:], strict=True):
            np.testing.assert_array_equal(tensors[f"model.layers.1.{module}.experts.{e}.{name}.weight"], own[path][e])
    np.testing.assert_array_equal(tensors[f"model.layers.1.{module}.gate.weight"], own["router"]["weight"])


@pytest.mark.parametrize("config", [QWEN2_MOE], ids=["qwen2_moe"])
def test_a_shared_expert_and_a_dense_layer_have_theirs(config, saved):
    tensors, (_, params) = load_file(saved[0] / FILE), saved
    own = params["layers_1"]["experts"]
    for name in USUAL[1:]:
        shared = tensors[f"model.layers.1.mlp.shared_expert.{name}.weight"]
        np.testing.assert_array_equal(shared, own["shared"][name]["weight"])
        dense = tensors[f"model.layers.0.mlp.{name}.weight"]
        np.testing.assert_array_equal(dense, params["layers_0"]["mlp"][name]["weight"])
    gate = tensors["model.layers.1.mlp.shared_expert_gate.weight"]
    np.testing.assert_array_equal(gate, own["shared_gate"]["weight"])


@every_family
@pytest.mark.parametrize("prefix", ["", "model."], ids=["whole_names", "short_names"])
def test_stacked_tensors_are_the_same_model(config, saved, prefix, recwarn):
    directory, params = saved
    tensors = stacked(load_file(directory / FILE), config)
    assert not [name for name in tensors if re.search(r"experts\.\d", name)]
    save_file({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, directory / FILE)
    same(load(directory, config)[1], params)
    assert not recwarn.list


@every_family
@pytest.mark.parametrize("form", [dict, stacked])
def test_experts_may_be_in_several_files(config, saved, form):
    directory, params = saved
    tensors = load_file(directory / FILE)
    tensors = stacked(tensors, config) if form is stacked else tensors
    (directory / FILE).unlink()
    shards = [f"model-{i}.safetensors" for i in range(3)]
    where = {name: shards[i % 3] for i, name in enumerate(tensors)}
    for shard in shards:
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == shard}, directory / shard)
    (directory / f"{FILE}.index.json").write_text(json.dumps({"weight_map": where}))
    same(load(directory, config)[1], params)


@every_family
def test_progress_is_told_once_for_each_parameter(config, saved):
    directory, params = saved
    weights, told = find(directory, config), []
    weights.read(advance=lambda: told.append(1))
    assert len(told) == len(weights.parts) == len(jax.tree.leaves(params))


def refused(directory, config, *words):
    with pytest.raises(CheckpointError) as caught:
        load(directory, config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("config", [QWEN3_MOE], ids=["qwen3_moe"])
def test_an_expert_that_is_missing_or_misshapen_is_named(config, saved):
    directory, name = saved[0], "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = load_file(directory / FILE)
    save_file({**tensors, name: tensors[name][:-1]}, directory / FILE)
    refused(directory, config, FILE, name, "(5, 12)", "(6, 12)")
    del tensors[name]
    save_file(tensors, directory / FILE)
    refused(directory, config, f"tensor {name} is missing")


@every_family
def test_a_stacked_tensor_of_another_size_or_type_is_named(config, saved):
    directory, name = saved[0], "model.layers.1.mlp.experts.gate_up_proj"
    tensors, count = stacked(load_file(directory / FILE), config), config.experts.count
    save_file({**tensors, name: tensors[name][1:]}, directory / FILE)
    refused(directory, config, FILE, name, f"({count - 1}, 12, 12)", f"({count}, 12, 12)")
    save_file({**tensors, name: tensors[name].astype(np.int8)}, directory / FILE)
    refused(directory, config, FILE, name, "I8")


@pytest.mark.parametrize("config", [MIXTRAL], ids=["mixtral"])
def test_a_value_of_an_expert_that_is_not_finite_is_refused(config, saved):
    directory, name = saved[0], "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors = load_file(directory / FILE)
    tensors[name][1, 2] = np.inf
    save_file(tensors, directory / FILE)
    refused(directory, config, FILE, name, "inf")


@every_family
def test_parameters_of_another_number_of_experts_are_not_saved(config, tmp_path):
    more = dataclasses.replace(config.experts, count=config.experts.count + 1)
    params = random_params(dataclasses.replace(config, experts=more))
    with pytest.raises(CheckpointError, match=r"parameter layers_./experts/.* has shape"):
        save_params(params, config, tmp_path)
    assert not list(pathlib.Path(tmp_path).iterdir())


@pytest.mark.parametrize("name, dtype", [("mixtral", "float32"), ("qwen3_moe_stacked", "bfloat16")])
def test_saving_what_transformers_wrote_gives_the_same_tensors(name, dtype, tmp_path):
    """Those of stacked experts under the names that every version of transformers reads."""
    directory = pathlib.Path(__file__).parents[1] / "goldens" / name
    config, params = load(directory, read_config(directory))
    save_params(params, config, tmp_path, dtype)
    ours, theirs = load_file(tmp_path / FILE), load_file(directory / FILE)
    same(stacked(ours, config) if name == "qwen3_moe_stacked" else ours, theirs)
