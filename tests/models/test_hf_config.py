"""Reading and writing Hugging Face's config.json."""

import json
import math

import pytest

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models.config import FAMILIES, Experts, ModelConfig, RopeConfig
from kvjax.models.hf_config import read_config, write_config

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"activation": "gelu_tanh", "norm_offset": 1.0, "out_norms": True, "scaled_embedding": True}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1, 2.0, 3.0, 4.0]}


def model(**changes):
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2,
                 head_dim=8, family="llama")
    return ModelConfig(**(shape | changes))


@pytest.fixture
def read(tmp_path):
    """Reads a config.json made of SMALL, a family and changes, without the fields in `drop`."""

    def reader(family="llama", drop=(), generation=None, **changes):
        fields = {"model_type": family, **SMALL, **changes}
        fields = {name: value for name, value in fields.items() if name not in drop}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(tmp_path)

    return reader


def refused(read, *words, **changes):
    """The message with which a configuration is refused; it names the file and every word."""
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    for word in ("config.json", *words):
        assert word in str(caught.value)


def test_shape(read):
    assert read(max_position_embeddings=77, rms_norm_eps=1e-3) == model(
        max_position=77, rms_norm_eps=1e-3, bos_token_id=1, eos_token_ids=(2,)
    )


# ---------------------------------------------------------------- what a missing field means


@pytest.mark.parametrize("family, expected", [("llama", 4), ("mistral", 8), ("qwen2", 32), ("qwen3", 32)])
def test_missing_kv_heads_have_the_familys_default(read, family, expected):
    heads = 4 if family == "llama" else 32
    config = read(family, drop=["num_key_value_heads"], num_attention_heads=heads, head_dim=8)
    assert config.num_kv_heads == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_null_kv_heads_are_as_many_as_query_heads(read, family):
    assert read(family, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize("family, expected", [("llama", 8), ("mistral", 8), ("qwen2", 8), ("qwen3", 128)])
def test_missing_head_dim(read, family, expected):
    assert read(family).head_dim == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_null_head_dim_is_hidden_size_over_heads(read, family):
    assert read(family, head_dim=None).head_dim == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_explicit_head_dim(read, family):
    assert read(family, head_dim=16).head_dim == 16


@pytest.mark.parametrize("family, length", [("llama", 2048), ("mistral", 131072), ("qwen2", 32768), ("qwen3", 32768)])
def test_missing_lengths_and_epsilon(read, family, length):
    config = read(family)
    assert (config.max_position, config.rms_norm_eps, config.tie_embeddings) == (length, 1e-6, False)


# ---------------------------------------------------------------- switches


@pytest.mark.parametrize(
    "family, attention_bias, qkv, output",
    [
        ("llama", True, True, True), ("llama", False, False, False),
        ("qwen3", True, True, True), ("qwen3", False, False, False),
        ("qwen2", False, True, False), ("qwen2", True, True, False),
        ("mistral", True, False, False),
    ],
)
def test_attention_bias(read, family, attention_bias, qkv, output):
    config = read(family, attention_bias=attention_bias)
    assert (config.qkv_bias, config.output_bias) == (qkv, output)


@pytest.mark.parametrize("family, expected", [("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", False)])
def test_only_llama_has_mlp_bias(read, family, expected):
    assert read(family, mlp_bias=True).mlp_bias is expected


@pytest.mark.parametrize("family, expected", [("llama", False), ("mistral", False), ("qwen2", False), ("qwen3", True)])
def test_only_qwen3_normalises_queries_and_keys(read, family, expected):
    assert read(family).qk_norm is expected


def test_tied_embeddings(read):
    assert read(tie_word_embeddings=True).tie_embeddings


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_default_rope_in_every_spelling(read, fields):
    assert read(**fields).rope == RopeConfig(theta=5e5)


def test_missing_rope_has_base_ten_thousand(read):
    assert read().rope == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_linear_rope_in_every_spelling(read, fields):
    assert read(**fields).rope == RopeConfig(5e5, "linear", 2.0)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_llama3_rope(read, name):
    rope = read(**{name: LLAMA3 | {"original_max_position_embeddings": 512, "low_freq_factor": 2.0}}).rope
    assert rope == RopeConfig(10_000.0, "llama3", 8.0, 2.0, 4.0, 512)


def test_llama3_rope_without_original_length_takes_the_models(read):
    assert read(rope_scaling=LLAMA3, max_position_embeddings=640).rope.original_max_position == 640


def test_original_length_beside_the_rope_settings_comes_first(read):
    scaling = LLAMA3 | {"original_max_position_embeddings": 512}
    assert read(rope_scaling=scaling, original_max_position_embeddings=128).rope.original_max_position == 128


def test_yarn_has_the_papers_defaults(read):
    expected = RopeConfig(1e4, "yarn", 4.0, original_max_position=64, attention_factor=0.1 * math.log(4) + 1)
    assert read(rope_scaling=YARN).rope == expected
    assert read(rope_scaling=YARN | {"factor": None}, max_position_embeddings=256).rope == expected
    zeros = dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 0)  # as transformers reads them
    assert read(rope_scaling=YARN | zeros | {"attention_factor": None}).rope == expected
    assert read(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0}).rope == expected


def test_every_field_of_yarn(read):
    given = {"beta_fast": 8, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5, "mscale": 3.0,
             "mscale_all_dim": 1.0}
    rope = read(rope_scaling=YARN | given).rope
    assert rope == RopeConfig(1e4, "yarn", 4.0, original_max_position=64, attention_factor=1.5, beta_fast=8.0,
                              beta_slow=2.0, truncate=False)
    del given["attention_factor"]
    expected = (0.3 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert read(rope_scaling=YARN | given).rope.attention_factor == pytest.approx(expected)


def test_dynamic_rope_grows_from_the_models_length(read):
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 7}
    rope = read(rope_scaling=scaling, max_position_embeddings=96).rope
    assert rope == RopeConfig(1e4, "dynamic", 3.0, original_max_position=96)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_has_longrope_under_three_names(read, kind):
    rope = read("phi3", rope_scaling=LONGROPE | {"type": kind}, original_max_position_embeddings=64,
                max_position_embeddings=256).rope
    assert (rope.kind, rope.original_max_position) == ("longrope", 64)
    assert (rope.short_factor, rope.long_factor) == ((1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_phi3_without_original_length_has_4096(read):
    assert read("phi3", rope_scaling=LONGROPE, max_position_embeddings=8192).rope.original_max_position == 4096


def test_longrope_of_another_family_and_its_factor(read):
    scaling = LONGROPE | {"factor": 8.0, "original_max_position_embeddings": 64}
    rope = read(rope_scaling=scaling).rope
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(64)))
    assert read(rope_scaling=scaling | {"attention_factor": 2.5}).rope.attention_factor == 2.5


@pytest.mark.parametrize("fields", [
    {"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}},
    {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
])
def test_phi3_may_rotate_a_part_of_each_head(read, fields):
    assert read("phi3", **fields).rope == RopeConfig(partial=0.5)


def test_the_part_beside_longrope_comes_before_that_in_it(read):
    """As in transformers, where it is the other way round without longrope."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "partial_rotary_factor": 1.0}
    assert read("phi3", partial_rotary_factor=0.5, rope_parameters=scaling).rope.partial == 0.5


@pytest.mark.parametrize("size, part, pairs", [(80, 0.5, 20), (80, 0.75, 30), (96, 0.5, 24), (96, 0.75, 36)])
def test_longrope_has_a_factor_for_each_pair_that_rotates(read, size, part, pairs):
    factors = {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    fields = {"hidden_size": 4 * size, "partial_rotary_factor": part, "family": "phi3"}
    assert read(**fields, rope_scaling=LONGROPE | factors).rope.rotated(size) == 2 * pairs
    for name in factors:
        refused(read, name, f"{pairs + 1} numbers", f"{pairs} pairs", **fields,
                rope_scaling=LONGROPE | factors | {name: [1.0] * (pairs + 1)})


# ---------------------------------------------------------------- sliding windows


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3"])
def test_mistrals_and_phi3s_window_holds_for_every_layer(read, family, window):
    assert read(family, sliding_window=window).windows == (window,) * 3


def test_a_mistral_whose_layers_have_types_is_ministral(read, tmp_path):
    """Transformers reads it as one, also what is written for it."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = read("mistral", sliding_window=16, layer_types=kinds)
    assert config.windows == (None, 16, None)
    write_config(config, tmp_path, "float32")
    assert read_config(tmp_path) == config
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == kinds


def test_mistral_without_window_field_has_4096_and_phi3_none(read):
    assert (read("mistral").windows, read("phi3").windows) == ((4096,) * 3, (None,) * 3)


def test_llama_has_no_window(read):
    assert read("llama", sliding_window=16).windows == (None,) * 3


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_layers_slide_from_max_window_layers_on(read, family):
    config = read(family, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert config.windows == (None, 16, 16)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_window_is_off_unless_in_use(read, family):
    assert read(family, sliding_window=16, max_window_layers=0).windows == (None,) * 3
    assert read(family, sliding_window=16, max_window_layers=None).windows == (None,) * 3  # no window is in use


def test_gemmas_layers_alternate(read):
    """In Gemma 2 every second layer has no window, in Gemma 3 every sixth, or as many as the file says."""
    six = {"num_hidden_layers": 6, "sliding_window": 16}
    assert read("gemma2", **six).windows == (16, None) * 3
    assert read("gemma3_text", **six).windows == (16,) * 5 + (None,)
    assert read("gemma3_text", **six, sliding_window_pattern=3).windows == (16, 16, None) * 2
    kinds = ["full_attention", "sliding_attention"] * 3
    assert read("gemma3_text", **six, layer_types=kinds).windows == (None, 16) * 3
    refused(read, "sliding_window", family="gemma2", sliding_window=None)


def test_gemma_3_has_two_rotary_bases(read):
    older = read("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=5e3)
    assert older.rope == RopeConfig(1e6, "linear", 8.0) and older.local_rope == RopeConfig(5e3)
    newer = read("gemma3_text", rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}})
    assert newer.rope == RopeConfig(1e5, "linear", 4.0) and newer.local_rope == RopeConfig(2e4)
    assert [layer.rope for layer in read("gemma3_text", num_hidden_layers=6).layers] == [RopeConfig(1e4)] * 5 + [
        RopeConfig(1e6)]
    one_kind = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 2e4}, "rope_theta": None}
    assert read("gemma3_text", rope_parameters=one_kind | {"rope_type": "default"}).rope == RopeConfig(1e5)
    refused(read, "rope_parameters", family="gemma3_text", rope_parameters={"rope_type": "default"})


def test_gemma_2_caps_unless_the_file_says_null(read):
    config = read("gemma2")
    assert (config.soft_cap, config.logit_cap, config.query_scalar) == (50.0, 30.0, 256.0)
    config = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=144)
    assert (config.soft_cap, config.logit_cap, config.query_scalar) == (None, None, 144.0)
    assert read("gemma3_text", attn_logit_softcapping=2.0).soft_cap is None  # transformers does not use it there


def test_gemma_with_images_is_read_as_its_language_model(read):
    text = read("gemma3_text", eos_token_id=[1, 5])
    both = read("gemma3", text_config=SMALL, vision_config={"hidden_size": 4}, eos_token_id=[1, 5])
    assert both == text
    untied = read("gemma3", text_config=SMALL, tie_word_embeddings=False)
    assert not untied.tie_embeddings and both.tie_embeddings
    refused(read, "text_config", family="gemma3")


@pytest.mark.parametrize("family, reason", [
    ("deepseek_v3", "latent"), ("llama4", "positions"), ("gemma3n", "share"), ("mamba", "supported: llama")])
def test_other_attention_is_refused_by_name(read, family, reason):
    refused(read, family, reason, family=family)


@pytest.mark.parametrize("name, value", [("hidden_activation", "relu"), ("use_bidirectional_attention", True)])
def test_gemma_with_another_activation_or_mask_is_refused(read, name, value):
    refused(read, name, family="gemma2", **{name: value})


def test_layer_types_override_max_window_layers(read):
    config = read(
        "qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    assert config.windows == (16, None, 16)


# ---------------------------------------------------------------- experts


def test_mixtrals_experts_have_the_intermediate_size_and_weights_that_sum_to_one(read):
    assert read("mixtral", num_local_experts=5).experts == Experts(5, 2, 48, normalise=True)


def test_experts_without_fields_have_the_familys_defaults(read):
    assert read("mixtral").experts == Experts(8, 2, 48)
    assert read("qwen2_moe").experts == Experts(60, 4, 1408, normalise=False, shared_size=5632)
    assert read("qwen3_moe").experts == Experts(128, 8, 768, normalise=False)
    assert {family for family in FAMILIES if read(family).experts} == {
        "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}
    assert read("gpt_oss").experts == Experts(128, 4, 48, bias=True, limit=7.0)


def test_a_model_without_experts_prints_as_before_there_were_any(read):
    """Saved caches and fitted adapters name a digest of this text."""
    assert repr(read()).endswith("bos_token_id=1, eos_token_ids=(2,))")
    assert "eos_token_ids=(2,), experts=Experts(count=8, per_token=2, size=48" in repr(read("mixtral"))


@pytest.mark.parametrize("fields, words", [
    ({"count": 0}, "count=0"), ({"per_token": 9}, "9 experts per token exceed the 5"), ({"shared_size": 0}, "None"),
    ({"limit": 0.0}, "above 0"),
    ({"dense_layers": (3,)}, "among 3 layers"),
])
def test_a_mixture_of_impossible_sizes_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        model(family="qwen3_moe", experts=Experts(**{"count": 5, "per_token": 2, "size": 8} | fields))


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_qwen3s_experts_has_two_names(read, name):
    assert read("qwen3_moe", **{name: 9}).experts.count == 9


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("fields, dense", [
    ({}, ()), ({"mlp_only_layers": [2, 0]}, (0, 2)), ({"mlp_only_layers": [7]}, ()),
    ({"decoder_sparse_step": 2}, (0, 2)), ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2)),
])
def test_layers_without_experts_are_named_or_between_every_few(read, family, fields, dense):
    config = read(family, **fields)
    assert config.experts.dense_layers == dense
    assert [layer.experts is not None for layer in config.layers] == [i not in dense for i in range(3)]


@pytest.mark.parametrize("bias", [True, False])
def test_qwen2_moe_has_the_bias_that_it_names(read, bias):
    config = read("qwen2_moe", qkv_bias=bias, attention_bias=True)
    assert (config.qkv_bias, config.output_bias) == (bias, False)


def test_qwen2_moes_windows_without_types_are_in_every_other_of_the_first_layers(read):
    fields = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 6}
    assert read("qwen2_moe", max_window_layers=4, **fields).windows == (16, None, 16, None, None, None)
    assert read("qwen2_moe", layer_types=["full_attention"] * 5 + ["sliding_attention"], **fields).windows == (
        *(None,) * 5, 16)


def test_qwen3_moes_window_holds_for_every_layer(read):
    assert read("qwen3_moe", use_sliding_window=True, sliding_window=16).windows == (16,) * 3


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_a_window_of_zero_that_is_not_in_use_is_none(read, family):
    assert read(family, use_sliding_window=False, sliding_window=0).windows == (None,) * 3


# ---------------------------------------------------------------- token ids


@pytest.mark.parametrize("eos, expected", [(7, (7,)), ([7, 8], (7, 8)), (0, (0,)), (None, ())])
def test_eos_ids_of_config(read, eos, expected):
    assert read(eos_token_id=eos).eos_token_ids == expected


def test_generation_config_comes_first(read):
    config = read(eos_token_id=7, bos_token_id=5, generation={"eos_token_id": [8, 9], "bos_token_id": 6})
    assert (config.eos_token_ids, config.bos_token_id) == ((8, 9), 6)


def test_generation_config_without_ids_leaves_those_of_config(read):
    config = read(eos_token_id=7, bos_token_id=5, generation={"eos_token_id": None})
    assert (config.eos_token_ids, config.bos_token_id) == ((7,), 5)


@pytest.mark.parametrize("family, bos, eos", [("mistral", 1, (2,)), ("qwen2", None, ()), ("qwen3", None, ())])
def test_missing_ids_have_the_familys_default(read, family, bos, eos):
    config = read(family)
    assert (config.bos_token_id, config.eos_token_ids) == (bos, eos)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "words, changes",
    [
        (["model_type", "'gpt2'", "llama, mistral, qwen2, qwen3, phi3, gemma2"], {"family": "gpt2"}),
        (["model_type", "None", "qwen3"], {"drop": ["model_type"]}),
        (["hidden_act", "'gelu'", "silu"], {"hidden_act": "gelu"}),
        (["rope_scaling.rope_type", "'su'", "llama3"], {"rope_scaling": {"type": "su", "factor": 2.0}}),
        (["rope_parameters.rope_type", "'linear'", "longrope"],
         {"family": "phi3", "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        (["rope_scaling.mscale", "-1"], {"rope_scaling": YARN | {"mscale": -1}}),
        (["rope_scaling.truncate", "0"], {"rope_scaling": YARN | {"truncate": 0}}),
        (["rope_scaling.attention_factor", "0"], {"rope_scaling": YARN | {"attention_factor": 0}}),
        (["rope_scaling.rope_theta", "0.5", "more than 1"], {"rope_theta": 0.5, "rope_scaling": YARN}),
        (["rope_scaling.factor", "None"], {"rope_scaling": {"type": "dynamic"}}),
        (["rope_scaling.long_factor", "[]"], {"rope_scaling": LONGROPE | {"long_factor": []}}),
        (["rope_scaling.short_factor", "None"], {"rope_scaling": LONGROPE | {"short_factor": None}}),
        (["rope_scaling.short_factor", "-1"], {"rope_scaling": LONGROPE | {"short_factor": [1.0, -1, 1.0, 1.0]}}),
        (["short_factor", "2 numbers", "4 pairs"], {"rope_scaling": LONGROPE | {"short_factor": [1.0, 2.0]}}),
        (["original_max_position_embeddings", "1", "at least 2"],
         {"family": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 1}),
        (["partial_rotary_factor=0.4", "3 dimensions"], {"family": "phi3", "partial_rotary_factor": 0.4}),
        (["partial_rotary_factor=1.5", "12 dimensions"], {"family": "phi3", "partial_rotary_factor": 1.5}),
        (["partial_rotary_factor", "0"], {"family": "phi3", "partial_rotary_factor": 0}),
        (["head_dim=2", "dynamic"], {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        (["rope_scaling.factor", "None"], {"rope_scaling": {"type": "linear"}}),
        (["rope_scaling.factor", "'x'"], {"rope_scaling": {"type": "linear", "factor": "x"}}),
        (["rope_scaling.low_freq_factor"], {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}),
        (["rope_scaling", "'linear'"], {"rope_scaling": "linear"}),
        (["rope_parameters", "full_attention"], {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
        (["partial_rotary_factor", "0.5"], {"partial_rotary_factor": 0.5}),
        (["rope_parameters.partial_rotary_factor"], {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        (["quantization_config", "gptq"], {"quantization_config": {"quant_method": "gptq"}}),
        (["hidden_size", "'32'"], {"hidden_size": "32"}),
        (["num_hidden_layers", "0"], {"num_hidden_layers": 0}),
        (["num_attention_heads", "True"], {"num_attention_heads": True}),
        (["rms_norm_eps", "-1"], {"rms_norm_eps": -1}),
        (["tie_word_embeddings", "'yes'"], {"tie_word_embeddings": "yes"}),
        (["num_kv_heads=3"], {"num_key_value_heads": 3}),
        (["eos_token_id", "'</s>'"], {"eos_token_id": "</s>"}),
        (["generation_config.json", "eos_token_id", "-1"], {"generation": {"eos_token_id": [-1]}}),
        (["sliding_window", "0"], {"family": "mistral", "sliding_window": 0}),
        (["layer_types", "3 layers"], {"family": "qwen3", "layer_types": ["full_attention"]}),
        (["layer_types", "'chunked'"], {"family": "qwen3", "layer_types": ["chunked"] * 3}),
        (["layer_types", "use_sliding_window"], {"family": "qwen3", "layer_types": ["sliding_attention"] * 3}),
        (["num_hidden_layers", "10001", "at most 10000"], {"num_hidden_layers": 10_001}),
        (["hidden_size", "1073741825", "at most 1073741824"], {"hidden_size": 2**30 + 1}),
        (["sliding_window", "2147483647"], {"family": "mistral", "sliding_window": 2**31 - 1}),
        (["eos_token_id", "2147483648"], {"eos_token_id": 2**31}),
        (["head_dim=0"], {"num_attention_heads": 64, "num_key_value_heads": 64}),
        (["rms_norm_eps", "inf"], {"rms_norm_eps": math.inf}),
        (["rms_norm_eps", "nan"], {"rms_norm_eps": math.nan}),
        (["rms_norm_eps", "1e-300"], {"rms_norm_eps": 1e-300}),
        (["rope_theta", "1e+300"], {"rope_theta": 1e300}),
        (["rope_theta", "9999", "..."], {"rope_theta": 10**400 - 1}),
        (["partial_rotary_factor", "True"], {"partial_rotary_factor": True}),
        (["rope_scaling", "False"], {"rope_scaling": False}),
        (["rope_parameters", "[]"], {"rope_parameters": []}),
        (["rope_scaling.high_freq_factor", "4.0"], {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}),
        (["num_local_experts", "0"], {"family": "mixtral", "num_local_experts": 0}),
        (["num_experts", "17000", "at most 16666"], {"family": "qwen3_moe", "num_experts": 17_000}),
        (["num_experts_per_tok", "9", "at most 8"], {"family": "mixtral", "num_experts_per_tok": 9}),
        (["moe_intermediate_size", "0"], {"family": "qwen3_moe", "moe_intermediate_size": 0}),
        (["shared_expert_intermediate_size", "'x'"],
         {"family": "qwen2_moe", "shared_expert_intermediate_size": "x"}),
        (["norm_topk_prob", "1"], {"family": "qwen2_moe", "norm_topk_prob": 1}),
        (["decoder_sparse_step", "0"], {"family": "qwen2_moe", "decoder_sparse_step": 0}),
        (["mlp_only_layers", "[True]", "list of layers"], {"family": "qwen3_moe", "mlp_only_layers": [True]}),
        (["qkv_bias", "None"], {"family": "qwen2_moe", "qkv_bias": None}),
    ],
)
def test_unusable_field_is_named(read, words, changes):
    refused(read, *words, **changes)


@pytest.mark.parametrize("value", ["x" * 10**6, list(range(10**5)), json.loads("[" * 900 + "]" * 900)])
def test_message_shows_a_part_of_a_long_value(read, value):
    with pytest.raises(CheckpointError, match="model_type is ") as caught:
        read(family=value)
    assert len(str(caught.value)) < 1000


def test_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: not a directory"):
        read_config(tmp_path / "nowhere")


def test_file_in_place_of_a_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: not a directory"):
        read_config(tmp_path / "file")


def test_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: this file is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b'{"model_type": "lla', b"\xff\xfe\x00", b"[1, 2]", b"", b'{"a":' * 100_000])
def test_corrupt_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


# ---------------------------------------------------------------- writing

WRITABLE = {
    "llama": model(bos_token_id=1, eos_token_ids=(2, 3)),
    "llama_biased": model(qkv_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=True, head_dim=16),
    "llama3": model(rope=RopeConfig(5e5, "llama3", 8.0, 2.0, 5.0, 512), max_position=4096, eos_token_ids=(0,)),
    "linear": model(rope=RopeConfig(1e4, "linear", 4.0)),
    "mistral": model(family="mistral", windows=(16,) * 3),
    "mistral_full": model(family="mistral"),
    "qwen2": model(family="qwen2", qkv_bias=True),
    "qwen2_window": model(family="qwen2", qkv_bias=True, windows=(None, 16, 16)),
    "qwen3": model(family="qwen3", qk_norm=True, windows=(16, None, 16)),
    "yarn": model(rope=RopeConfig(1e4, "yarn", 4.0, original_max_position=64, attention_factor=1.2, truncate=False)),
    "dynamic": model(rope=RopeConfig(1e4, "dynamic", 2.0, original_max_position=96), max_position=96),
    "longrope": model(rope=RopeConfig(1e4, "longrope", original_max_position=64, attention_factor=1.2,
                                      short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)),
    "phi3": model(family="phi3", windows=(16,) * 3),
    "phi3_longrope": model(family="phi3", rope=RopeConfig(
        1e4, "longrope", original_max_position=64, attention_factor=1.2, short_factor=(1.0,) * 2,
        long_factor=(2.0,) * 2, partial=0.5)),
    "qwen3_biased": model(family="qwen3", qk_norm=True, qkv_bias=True, output_bias=True),
    "gemma2": model(**GEMMA, family="gemma2", windows=(16, None, 16), query_scalar=9.0, soft_cap=5.0, logit_cap=3.0),
    "gemma3": model(
        **GEMMA, family="gemma3_text", windows=(16, 16, None), query_scalar=8.0, qk_norm=True, tie_embeddings=True,
        rope=RopeConfig(1e6, "linear", 8.0), local_rope=RopeConfig(1e4)),
    "mixtral": model(family="mixtral", experts=Experts(5, 2, 48), windows=(16,) * 3),
    "qwen2_moe": model(family="qwen2_moe", qkv_bias=True, windows=(16, None, 16),
                       experts=Experts(5, 2, 24, normalise=False, shared_size=20, dense_layers=(0, 2))),
    "qwen2_moe_unbiased": model(family="qwen2_moe", experts=Experts(5, 2, 24, shared_size=20)),
    "qwen3_moe": model(family="qwen3_moe", qk_norm=True, qkv_bias=True, output_bias=True, windows=(16,) * 3,
                       experts=Experts(5, 2, 24, dense_layers=(1,))),
}


@pytest.mark.parametrize("config", WRITABLE.values(), ids=WRITABLE)
def test_written_config_reads_back_equal(tmp_path, config):
    write_config(config, tmp_path / "new" / "folder", "float32")
    assert read_config(tmp_path / "new" / "folder") == config


def test_written_config_names_architecture_and_dtype(tmp_path):
    write_config(model(), tmp_path, "bfloat16")
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["architectures"], fields["torch_dtype"]) == (["LlamaForCausalLM"], "bfloat16")


def test_phi3_is_written_as_transformers_4_has_it(tmp_path):
    recommended = math.sqrt(1 + math.log(2048 / 64) / math.log(64))
    rope = RopeConfig(1e4, "longrope", original_max_position=64, attention_factor=recommended,
                      short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
    write_config(model(family="phi3", rope=rope), tmp_path, "float32")
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["rope_scaling"] == {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert (fields["original_max_position_embeddings"], fields["pad_token_id"]) == (64, None)
    assert read_config(tmp_path).rope == rope


def test_ids_of_an_earlier_model_do_not_survive(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 60, "bos_token_id": 61}')
    write_config(model(eos_token_ids=(5,)), tmp_path, "float32")
    assert (read_config(tmp_path).eos_token_ids, read_config(tmp_path).bos_token_id) == ((5,), None)


@pytest.mark.parametrize(
    "name, config",
    [
        ("use_mlp", model(use_mlp=False)),
        ("qkv_bias", model(qkv_bias=True)),
        ("qkv_bias", model(family="qwen2")),
        ("output_bias", model(family="mistral", output_bias=True)),
        ("mlp_bias", model(family="qwen3", qk_norm=True, mlp_bias=True)),
        ("qk_norm", model(qk_norm=True)),
        ("windows", model(windows=(16,) * 3)),
        ("windows", model(family="mistral", windows=(16, 8, 16))),
        ("windows", model(family="qwen3", qk_norm=True, windows=(16, 8, 16))),
        ("rope", model(rope=RopeConfig(factor=2.0))),
        ("rope", model(rope=RopeConfig(partial=0.5))),
        ("rope", model(rope=RopeConfig(kind="dynamic", original_max_position=64))),
        ("qkv_bias", model(family="phi3", qkv_bias=True)),
        ("soft_cap", model(soft_cap=5.0)),
        ("norm_offset", model(norm_offset=1.0)),
        ("local_rope", model(family="gemma2", **GEMMA, query_scalar=8.0, local_rope=RopeConfig(1e4))),
        ("local_rope", model(family="gemma3_text", **GEMMA, query_scalar=8.0, qk_norm=True,
                             local_rope=RopeConfig(1e4, "linear", 2.0))),
        ("experts", model(experts=Experts(5, 2, 48))),
        ("experts", model(family="mixtral", experts=Experts(5, 2, 40))),
        ("experts", model(family="mixtral", experts=Experts(5, 2, 48, normalise=False))),
        ("experts", model(family="qwen3_moe", qk_norm=True, experts=Experts(5, 2, 24, shared_size=8))),
        ("experts", model(family="qwen3_moe", qk_norm=True, experts=Experts(5, 2, 24, bias=True))),
        ("experts", model(family="qwen3_moe", qk_norm=True, experts=Experts(5, 2, 24, limit=7.0))),
        ("windows", model(family="qwen3_moe", qk_norm=True, windows=(16, None, 16), experts=Experts(5, 2, 24))),
    ],
)
def test_setting_without_a_field_is_refused_before_anything_is_written(tmp_path, name, config):
    with pytest.raises(CheckpointError, match=rf"config\.json: model_type '{config.family}' cannot express {name}="):
        write_config(config, tmp_path, "float32")
    assert not list(tmp_path.iterdir())


def test_nothing_temporary_is_left(tmp_path):
    write_config(model(), tmp_path, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "generation_config.json"]
