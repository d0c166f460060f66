"""Conversion between Hugging Face's config.json and generation_config.json and a `ModelConfig`.

A field that is not in the file has transformers' default, which depends on the family. An unsupported field that would
change the model's output is an error, never ignored.
"""

import dataclasses
import json
import pathlib
from typing import Any

from kvjax import _files
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models.config import FAMILIES, Experts, ModelConfig
from kvjax.models.hf_families import (
    ALTERNATING,
    ARCHITECTURES,
    DEFAULTS,
    FULL,
    GEMMAS,
    NO_SWITCH,
    SLIDING,
    UNSUPPORTED,
)
from kvjax.models.hf_rope import ropes, scaling_fields
from kvjax.models.json_file import (
    CONFIG,
    GENERATION,
    Fields,
    Path,
    Section,
    model_directory,
    read_json,
    read_optional_json,
    token_ids,
)

_GPT_OSS_LIMIT = 7.0  # limit of GPT-OSS's SwiGLU
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 50_000  # of all layers, each with tensors of its own


def read_config(directory: Path) -> ModelConfig:
    """Reads the settings of a model directory from config.json; token ids in generation_config.json take precedence.

    Raises:
      CheckpointError: a file is missing or corrupt, or the model, its rope type or its activation is not supported. The
        message names file, field and value.
    """
    path = model_directory(directory) / CONFIG
    return parse(path, read_json(path), read_optional_json(path.with_name(GENERATION)))


def write_config(config: ModelConfig, directory: Path, dtype: str) -> None:
    """Writes config.json and generation_config.json so that `read_config` returns `config` again.

    Args:
      config: settings to write.
      directory: directory to write to, created if it does not exist.
      dtype: type of the weights beside the files, to be stated in config.json.

    Raises:
      CheckpointError: the family has no field for a setting of `config`, which the message names.
      OSError: the files cannot be written.
    """
    path = pathlib.Path(directory).expanduser() / CONFIG
    check_writable(config, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ids go to generation_config.json, too: one left by an earlier model would take precedence.
    for target, content in ((path.with_name(GENERATION), _special_ids(config)), (path, _to_fields(config, dtype))):
        with _files.replacing(target) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_writable(config: ModelConfig, path: pathlib.Path) -> None:
    """Raises CheckpointError for the first setting that would not survive being written and read."""
    back = parse(path, _to_fields(config, "float32"), _special_ids(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, name)
        if getattr(back, name) != value:
            raise CheckpointError(
                f"{path}: model_type {config.family!r} cannot express {name}={value!r}; "
                f"it would be read back as {getattr(back, name)!r}"
            )


def parse(path: pathlib.Path, raw: Fields, generation: Fields) -> ModelConfig:
    """Returns the settings in the objects of config.json, at `path`, and of generation_config.json beside it.

    Raises:
      CheckpointError: as `read_config`.
    """
    if raw.get("model_type") == "gemma3":
        raw = _text_part(path, raw)
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in UNSUPPORTED:
        raise CheckpointError(f"{path}: model_type is {kind!r}, which is not supported: {UNSUPPORTED[kind]}")
    family = Section(path, raw).require("model_type", FAMILIES)
    section = Section(path, {**DEFAULTS[family], **raw})
    _check_unused(section, family)
    ids = (path.with_name(GENERATION), generation), (path, section.fields)
    try:
        return ModelConfig(
            family=family,
            **_shape(section),
            **_switches(section, family),
            **(_gemma_switches(section, family) if family in GEMMAS else {}),
            experts=_experts(section, family),
            rms_norm_eps=section.number("rms_norm_eps"),
            windows=_windows(section, family),
            **ropes(section, family),
            bos_token_id=next(iter(token_ids("bos_token_id", *ids)), None),
            eos_token_ids=token_ids("eos_token_id", *ids),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _text_part(path: pathlib.Path, raw: Fields) -> Fields:
    """Returns the settings of the language model of a Gemma 3 that also reads images."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise Section(path, raw).wrong("text_config", "expected the settings of the language model")
    names = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
    outer = {name: raw[name] for name in names if name in raw}
    return outer | text | {"model_type": text.get("model_type", "gemma3_text")}


def _check_unused(section: Section, family: str) -> None:
    """Raises CheckpointError for a value that would change what the model computes and is not supported."""
    if family in GEMMAS:
        section.require("hidden_activation", (None, "gelu_pytorch_tanh"))
        if section.fields["use_bidirectional_attention"] not in (None, False):
            raise section.wrong("use_bidirectional_attention", "expected false: tokens attend those before them")
    else:
        section.require("hidden_act", ("silu",))
    quantised = section.fields.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4":
        raise section.wrong("quantization_config", "weights in MXFP4 are not read; load them in transformers with "
                            "Mxfp4Config(dequantize=True) and save them, or take a copy in bfloat16")
    section.require("quantization_config", (None,))


def _shape(section: Section) -> dict[str, Any]:
    heads, hidden = section.integer("num_attention_heads"), section.integer("hidden_size")
    return {
        "vocab_size": section.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": section.integer("intermediate_size"),
        "num_layers": _layers(section),
        "num_heads": heads,
        "num_kv_heads": section.integer("num_key_value_heads", default=heads),
        "head_dim": section.integer("head_dim", default=hidden // heads),
        "max_position": section.integer("max_position_embeddings"),
    }


def _layers(section: Section) -> int:
    return section.integer("num_hidden_layers", most=_MOST_LAYERS)


def _switches(section: Section, family: str) -> dict[str, Any]:
    # The layers of Mistral, Mixtral, Qwen2 and Phi-3 ignore attention_bias, and only Llama's use mlp_bias.
    bias = section.switch("attention_bias") and family in ("llama", "qwen3", "qwen3_moe", *GEMMAS)
    return {
        "tie_embeddings": section.switch("tie_word_embeddings"),
        "qkv_bias": bias or family in ("qwen2", "gpt_oss") or (family == "qwen2_moe" and section.switch("qkv_bias")),
        "output_bias": bias or family == "gpt_oss",
        "mlp_bias": section.switch("mlp_bias") and family == "llama",
        "qk_norm": family in ("qwen3", "qwen3_moe", "gemma3_text"),
        "sink_logits": family == "gpt_oss",
    }


def _gemma_switches(section: Section, family: str) -> dict[str, Any]:
    return {
        "query_scalar": section.number("query_pre_attn_scalar"),
        # Transformers has the field for Gemma 3, too, and does not use it.
        "soft_cap": section.number("attn_logit_softcapping", None) if family == "gemma2" else None,
        "logit_cap": section.number("final_logit_softcapping", None),
        "activation": "gelu_tanh", "norm_offset": 1.0, "out_norms": True, "scaled_embedding": True,
    }


def _experts(section: Section, family: str) -> Experts | None:
    """Returns the mixture of experts of a family that has one."""
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"):
        return None
    layers = _layers(section)
    if family == "gpt_oss":
        count = section.integer("num_local_experts", most=_MOST_EXPERTS // layers)
        return Experts(count, section.integer("num_experts_per_tok", most=count), section.integer("intermediate_size"),
                       bias=True, limit=_GPT_OSS_LIMIT)
    count = section.integer("num_experts", most=_MOST_EXPERTS // layers)
    if family != "qwen2_moe":  # transformers 5 writes Qwen3's under Mixtral's name, and reads both
        count = section.integer("num_local_experts", default=count, most=_MOST_EXPERTS // layers)
    per_token = section.integer("num_experts_per_tok", most=count)
    if family == "mixtral":
        return Experts(count, per_token, section.integer("intermediate_size"))
    return Experts(
        count, per_token, section.integer("moe_intermediate_size"), normalise=section.switch("norm_topk_prob"),
        shared_size=section.integer("shared_expert_intermediate_size") if family == "qwen2_moe" else None,
        dense_layers=_dense_layers(section, layers),
    )


def _dense_layers(section: Section, layers: int) -> tuple[int, ...]:
    """Returns the layers with an ordinary feed-forward network, named or between every few with experts."""
    step, named = section.integer("decoder_sparse_step"), section.fields["mlp_only_layers"]
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(i) is int for i in named):
        raise section.wrong("mlp_only_layers", "expected null or a list of layers")
    return tuple(i for i in range(layers) if (i + 1) % step or i in named)


def _windows(section: Section, family: str) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer; `layer_types` overrides `max_window_layers`."""
    layers = _layers(section)
    if family == "llama":
        return (None,) * layers
    if family in NO_SWITCH:
        window = section.integer("sliding_window", default=None)
        if family == "mistral" and section.fields.get("layer_types") is not None:  # it is then Ministral
            return _typed_windows(section, layers, window)
        return (window,) * layers
    if family in ALTERNATING:
        return _alternating_windows(section, family, layers)
    # Where it is off, files of transformers 5 have a window of 0.
    window = section.integer("sliding_window", default=None) if section.switch("use_sliding_window") else None
    if family == "qwen3_moe":
        return (window,) * layers
    if section.fields["layer_types"] is not None:
        return _typed_windows(section, layers, window)
    if window is None:
        return (None,) * layers
    first = section.integer("max_window_layers", least=0)
    if family == "qwen2_moe":
        return tuple(window if i < first and i % 2 == 0 else None for i in range(layers))
    return tuple(window if i >= first else None for i in range(layers))


def _alternating_windows(section: Section, family: str, layers: int) -> tuple[int | None, ...]:
    """Returns the windows of Gemma's or GPT-OSS's layers; without `layer_types`, every second or sixth has none."""
    window = section.integer("sliding_window", default=None)
    if section.fields["layer_types"] is not None:
        return _typed_windows(section, layers, window)
    if window is None:
        raise section.wrong("sliding_window", "expected a number of tokens")
    period = 2
    if family == "gemma3_text":
        name = "_sliding_window_pattern" if "_sliding_window_pattern" in section.fields else "sliding_window_pattern"
        period = section.integer(name, default=6)
    return tuple(window if (i + 1) % period else None for i in range(layers))


def _typed_windows(section: Section, layers: int, window: int | None) -> tuple[int | None, ...]:
    kinds = section.fields["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise section.wrong("layer_types", f"expected {FULL!r} or {SLIDING!r} for each of {layers} layers")
    if SLIDING in kinds and window is None:
        raise section.wrong("layer_types", "sliding layers need a sliding_window, and use_sliding_window if there is "
                            "such a field")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _to_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json, with rope and dtype in the old spelling, which all of transformers reads."""
    return {
        "architectures": [ARCHITECTURES[config.family]], "model_type": config.family, "torch_dtype": dtype,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps, "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias, "mlp_bias": config.mlp_bias, "rope_theta": config.rope.theta,
        "rope_scaling": scaling_fields(config),
        **_expert_fields(config), **_phi3_fields(config), **_gemma_fields(config), **_window_fields(config),
        **_special_ids(config),
    }


def _expert_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a mixture of experts."""
    mixture = config.experts
    if mixture is None:
        return {}
    if config.family in ("mixtral", "gpt_oss"):
        return {"num_local_experts": mixture.count, "num_experts_per_tok": mixture.per_token}
    own: dict[str, Any] = {}
    if config.family == "qwen2_moe":
        own = {"shared_expert_intermediate_size": mixture.shared_size, "qkv_bias": config.qkv_bias}
    return own | {
        "num_experts": mixture.count, "num_experts_per_tok": mixture.per_token, "moe_intermediate_size": mixture.size,
        "norm_topk_prob": mixture.normalise, "decoder_sparse_step": 1, "mlp_only_layers": list(mixture.dense_layers),
    }


def _phi3_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields that only Phi-3 has."""
    if config.family != "phi3":
        return {}
    # Without pad_token_id, padding is token 32,000, and transformers refuses a smaller vocabulary.
    original = config.rope.original_max_position if config.rope.kind == "longrope" else config.max_position
    return {"partial_rotary_factor": config.rope.partial, "original_max_position_embeddings": original,
            "pad_token_id": None}


def _gemma_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the activation's field, and those that only Gemma has."""
    if config.family not in GEMMAS:
        return {"hidden_act": "silu"}
    local = {} if config.local_rope is None else {"rope_local_base_freq": config.local_rope.theta}
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config.query_scalar,
            "attn_logit_softcapping": config.soft_cap, "final_logit_softcapping": config.logit_cap, **local}


def _window_fields(config: ModelConfig) -> dict[str, Any]:
    if config.family == "llama":
        return {}
    window = next((w for w in config.windows if w is not None), None)
    kinds = [FULL if w is None else SLIDING for w in config.windows]
    if config.family in ALTERNATING:
        return {"sliding_window": window, "layer_types": kinds}
    if config.family in NO_SWITCH:
        return {"sliding_window": window} | ({"layer_types": kinds} if len(set(kinds)) > 1 else {})
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        # For versions of transformers without layer_types, where all layers from this one on slide.
        "max_window_layers": next((i for i, w in enumerate(config.windows) if w is not None), config.num_layers),
        "layer_types": kinds,
    }


def _special_ids(config: ModelConfig) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    return {"bos_token_id": config.bos_token_id, "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None)}
