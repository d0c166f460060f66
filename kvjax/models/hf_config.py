"""Conversion between Hugging Face's config.json and generation_config.json and a `ModelConfig`.

A field that is not in the file has transformers' default, which depends on the family. An unsupported field that would
change the model's output is an error, never ignored.
"""

import dataclasses
import json
import os
import pathlib
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax import _files
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models.config import FAMILIES, Experts, ModelConfig, RopeConfig
from kvjax.ops.rotary import longrope_attention_factor, yarn_attention_factor

CONFIG = "config.json"
GENERATION = "generation_config.json"

Path = str | os.PathLike[str]
Fields = Mapping[str, Any]

# Defaults of the configuration classes of transformers 5.2: those of all families, then those of each.
_COMMON = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "head_dim": None, "rope_theta": 10_000.0,
}
_QWEN = _COMMON | {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
    "bos_token_id": None, "eos_token_id": None,
}
_GEMMA = _COMMON | {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "use_bidirectional_attention": None,
    "bos_token_id": 2, "eos_token_id": 1,
}
_QWEN_MOE = _QWEN | {
    "hidden_size": 2048, "num_hidden_layers": 24, "norm_topk_prob": False, "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_DEFAULTS: dict[str, Fields] = {
    "llama": _COMMON | {
        "vocab_size": 32_000, "intermediate_size": 11_008, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "mistral": _COMMON | {
        "vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "phi3": _COMMON | {
        "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": None,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "sliding_window": None, "bos_token_id": 1, "eos_token_id": 32_000,
    },
    "gemma2": _GEMMA | {
        "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA | {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
    },
    "mixtral": _COMMON | {
        "vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2,
        "num_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen2_moe": _QWEN_MOE | {
        "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": True,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": _QWEN_MOE | {
        "intermediate_size": 6144, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gpt_oss": _COMMON | {
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "layer_types": None,
        "num_local_experts": 128, "num_experts_per_tok": 4, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                            "original_max_position_embeddings": 4096},
    },
}
_GEMMAS = ("gemma2", "gemma3_text")
_ALTERNATING = (*_GEMMAS, "gpt_oss")  # families in which layers with a sliding window alternate with others
_GPT_OSS_LIMIT = 7.0  # limit of GPT-OSS's SwiGLU
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
}
_LATENT = "its attention keeps one latent vector of a token for all heads, and caches here keep keys and values of each"
_CHUNKED = "some of its layers have no positions, and others attend within chunks"
_UNSUPPORTED = {
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "deepseek_v32": _LATENT, "llama4": _CHUNKED,
    "llama4_text": _CHUNKED, "gemma3n": "its layers share keys and values", "gemma3n_text": "its layers share keys and "
    "values", "mllama": "some of its layers attend an image",
}
_NO_SWITCH = ("mistral", "mixtral", "phi3")  # families whose sliding window is in use in all layers if there is one
_FULL, _SLIDING = "full_attention", "sliding_attention"
_REQUIRED = object()

_MOST_BYTES = 8 << 20  # limit for a JSON file; an index of 50,000 tensors takes half of it
_MOST = 2**30  # the sum of two such numbers fits a 32-bit integer on the device
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 50_000  # of all layers, each with tensors of its own
_LEAST_NUMBER, _MOST_NUMBER = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


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


def model_directory(directory: Path) -> pathlib.Path:
    """Returns `directory` as a path. Raises CheckpointError if it is not a directory."""
    path = pathlib.Path(directory).expanduser()
    try:
        is_directory = path.is_dir()
    except OSError as error:  # such as a name that is too long, or a parent without permission
        raise CheckpointError(f"{path}: cannot be looked at ({error}); give the folder that holds {CONFIG}") from error
    if not is_directory and re.fullmatch(r"[\w.-]+/[\w.-]+", os.fspath(directory)):
        raise CheckpointError(f"{path}: not a directory, and kvjax downloads nothing; if it is a model on the Hugging "
                              f"Face hub, run `hf download {path} --local-dir DIR` and load DIR")
    if not is_directory:
        raise CheckpointError(f"{path}: not a directory; download the model and give the directory that holds {CONFIG}")
    return path


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads the JSON object in `path`. Raises CheckpointError if it is missing, corrupt, too large or no object."""
    try:
        content = _files.parse_json(_files.read_regular(path, _MOST_BYTES))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: this file is missing from the model directory; download it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}; expected an object")
    return content


def read_optional_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads like `read_json`; returns an empty object if the file does not exist."""
    return read_json(path) if os.path.lexists(path) else {}


def token_ids(field: str, *documents: tuple[pathlib.Path, Fields]) -> tuple[int, ...]:
    """Returns the token ids that the first document with the given field has for it; () if none has it.

    Args:
      field: field that holds a token id or a list of them.
      *documents: each a path, for error messages, and the JSON object read from it.

    Raises:
      CheckpointError: the field holds something else.
    """
    for path, fields in documents:
        value = fields.get(field)
        if value is not None:
            ids = tuple(value) if isinstance(value, list) else (value,)
            if not all(type(i) is int and 0 <= i <= _MOST for i in ids):
                raise CheckpointError(f"{path}: {field} is {shown(value)}; expected a token id or a list of them")
            return ids
    return ()


def shown(value: object) -> str:
    """Returns a file's value for an error message, cut to a few dozen characters."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


@dataclasses.dataclass(frozen=True)
class _Section:
    """JSON object of a file, whose readers raise CheckpointError naming file, field and value."""

    path: pathlib.Path
    fields: Fields
    prefix: str = ""

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1, most: int = _MOST) -> Any:
        """Returns an integer field; null or no value means `default` if one is given."""
        value = self.fields.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"expected an integer of at least {least} and at most {most}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, zero_is_none: bool = False) -> Any:
        """Returns a positive number that is finite and above zero as f32, too.

        Null or no value, and a zero if `zero_is_none`, mean `default` if one is given.
        """
        value: Any = self.fields.get(name)
        absent = value is None or (zero_is_none and type(value) in (int, float) and value == 0)
        if absent and default is not _REQUIRED:
            return default
        if not _is_positive(value):
            raise self.wrong(name, f"expected a number above zero, at most {_MOST_NUMBER:.2g}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of numbers, each as `number` allows."""
        value: Any = self.fields.get(name)
        if not isinstance(value, list) or not value or not all(map(_is_positive, value)):
            raise self.wrong(name, f"expected a list of numbers above zero, at most {_MOST_NUMBER:.2g}")
        return tuple(map(float, value))

    def switch(self, name: str, default: Any = _REQUIRED) -> bool:
        """Returns true or false; no value means `default` if one is given."""
        value = self.fields.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "expected true or false")
        return value

    def require(self, name: str, supported: tuple[Any, ...]) -> Any:
        """Returns a field's value, which has to be one of `supported`."""
        value = self.fields.get(name)
        if type(value) is bool or value not in supported:  # True equals 1
            raise self.wrong(name, f"supported: {', '.join(map(str, supported))}")
        return value

    def wrong(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.prefix}{name} is {shown(self.fields.get(name))}; {expected}")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and _LEAST_NUMBER <= value <= _MOST_NUMBER


def parse(path: pathlib.Path, raw: Fields, generation: Fields) -> ModelConfig:
    """Returns the settings in the objects of config.json, at `path`, and of generation_config.json beside it.

    Raises:
      CheckpointError: as `read_config`.
    """
    if raw.get("model_type") == "gemma3":
        raw = _text_part(path, raw)
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in _UNSUPPORTED:
        raise CheckpointError(f"{path}: model_type is {kind!r}, which is not supported: {_UNSUPPORTED[kind]}")
    family = _Section(path, raw).require("model_type", FAMILIES)
    section = _Section(path, {**_DEFAULTS[family], **raw})
    _check_unused(section, family)
    ids = (path.with_name(GENERATION), generation), (path, section.fields)
    try:
        return ModelConfig(
            family=family,
            **_shape(section),
            **_switches(section, family),
            **(_gemma_switches(section, family) if family in _GEMMAS else {}),
            experts=_experts(section, family),
            rms_norm_eps=section.number("rms_norm_eps"),
            windows=_windows(section, family),
            **_ropes(section, family),
            bos_token_id=next(iter(token_ids("bos_token_id", *ids)), None),
            eos_token_ids=token_ids("eos_token_id", *ids),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _text_part(path: pathlib.Path, raw: Fields) -> Fields:
    """Returns the settings of the language model of a Gemma 3 that also reads images."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise _Section(path, raw).wrong("text_config", "expected the settings of the language model")
    ids = {name: raw[name] for name in ("bos_token_id", "eos_token_id", "quantization_config") if name in raw}
    return ids | text | {"model_type": text.get("model_type", "gemma3_text")}


def _check_unused(section: _Section, family: str) -> None:
    """Raises CheckpointError for a value that would change what the model computes and is not supported."""
    if family in _GEMMAS:
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


def _shape(section: _Section) -> dict[str, Any]:
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


def _layers(section: _Section) -> int:
    return section.integer("num_hidden_layers", most=_MOST_LAYERS)


def _switches(section: _Section, family: str) -> dict[str, Any]:
    # The layers of Mistral, Mixtral, Qwen2 and Phi-3 ignore attention_bias, and only Llama's use mlp_bias.
    bias = section.switch("attention_bias") and family in ("llama", "qwen3", "qwen3_moe", *_GEMMAS)
    return {
        "tie_embeddings": section.switch("tie_word_embeddings"),
        "qkv_bias": bias or family in ("qwen2", "gpt_oss") or (family == "qwen2_moe" and section.switch("qkv_bias")),
        "output_bias": bias or family == "gpt_oss",
        "mlp_bias": section.switch("mlp_bias") and family == "llama",
        "qk_norm": family in ("qwen3", "qwen3_moe", "gemma3_text"),
        "sink_logits": family == "gpt_oss",
    }


def _gemma_switches(section: _Section, family: str) -> dict[str, Any]:
    return {
        "query_scalar": section.number("query_pre_attn_scalar"),
        "soft_cap": section.number("attn_logit_softcapping", None),
        "logit_cap": section.number("final_logit_softcapping", None),
        "activation": "gelu_tanh", "norm_offset": 1.0, "out_norms": True, "scaled_embedding": True,
    }


def _experts(section: _Section, family: str) -> Experts | None:
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


def _dense_layers(section: _Section, layers: int) -> tuple[int, ...]:
    """Returns the layers with an ordinary feed-forward network, named or between every few with experts."""
    step, named = section.integer("decoder_sparse_step"), section.fields["mlp_only_layers"]
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(i) is int for i in named):
        raise section.wrong("mlp_only_layers", "expected null or a list of layers")
    return tuple(i for i in range(layers) if (i + 1) % step or i in named)


def _windows(section: _Section, family: str) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer; `layer_types` overrides `max_window_layers`."""
    layers = _layers(section)
    if family == "llama":
        return (None,) * layers
    if family in _NO_SWITCH:
        return (section.integer("sliding_window", default=None),) * layers
    if family in _ALTERNATING:
        return _alternating_windows(section, family, layers)
    # Where it is off, files of transformers 5 have a window of 0.
    window = section.integer("sliding_window", default=None) if section.switch("use_sliding_window") else None
    if family == "qwen3_moe":
        return (window,) * layers
    if section.fields["layer_types"] is not None:
        return _typed_windows(section, layers, window)
    first = section.integer("max_window_layers", least=0)
    if family == "qwen2_moe":
        return tuple(window if i < first and i % 2 == 0 else None for i in range(layers))
    return tuple(window if i >= first else None for i in range(layers))


def _alternating_windows(section: _Section, family: str, layers: int) -> tuple[int | None, ...]:
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


def _typed_windows(section: _Section, layers: int, window: int | None) -> tuple[int | None, ...]:
    kinds = section.fields["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_FULL, _SLIDING) for kind in kinds):
        raise section.wrong("layer_types", f"expected {_FULL!r} or {_SLIDING!r} for each of {layers} layers")
    if _SLIDING in kinds and window is None:
        raise section.wrong("layer_types", "sliding layers need a sliding_window, and use_sliding_window if there is "
                            "such a field")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _ropes(section: _Section, family: str) -> dict[str, Any]:
    """Returns the rotary embedding, and that of sliding layers if the family has another one for them."""
    if family != "gemma3_text":
        return {"rope": _rope(section, family)}
    newer: Any = section.fields.get("rope_parameters")
    of_kind = newer if isinstance(newer, dict) and newer.keys() <= {_FULL, _SLIDING} else {}

    def part(kind: str, theta: str) -> RopeConfig:
        fields = {**section.fields, "rope_theta": section.fields[theta], "rope_parameters": of_kind.get(kind)}
        if kind == _SLIDING:
            fields["rope_scaling"] = None
        return _rope(dataclasses.replace(section, fields=fields), family)

    if newer is not None and not of_kind:
        raise section.wrong("rope_parameters", f"expected an object with {_FULL!r} and {_SLIDING!r}")
    return {"rope": part(_FULL, "rope_theta"), "local_rope": part(_SLIDING, "rope_local_base_freq")}


def _rope(section: _Section, family: str) -> RopeConfig:
    """Returns the rotary embedding from `rope_scaling` and `rope_theta`, or from the newer `rope_parameters`."""
    name = "rope_parameters" if section.fields.get("rope_scaling") in (None, {}) else "rope_scaling"
    scaling = section.fields.get(name)
    scaling = {} if scaling is None else scaling
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise section.wrong(name, "expected null or one object of plain values for all layers")
    # Older files hold these under the key `type`, and beside the object instead of in it.
    inherited = {"rope_type": scaling.get("type", "default"), "rope_theta": section.fields["rope_theta"],
                 "partial_rotary_factor": section.fields.get("partial_rotary_factor")}
    rope = _Section(section.path, inherited | scaling, f"{name}.")
    if family == "phi3":
        return _phi3_rope(section, rope)
    rope.require("partial_rotary_factor", (None, 1.0))
    kind = rope.require("rope_type", ("default", *_STRETCHED))
    base = RopeConfig(rope.number("rope_theta"))
    return base if kind == "default" else _STRETCHED[kind](section, rope, base)


def _phi3_rope(section: _Section, rope: _Section) -> RopeConfig:
    """Returns the rotary embedding of Phi-3, whose older files call longrope su, or yarn."""
    outside = section.fields.get("partial_rotary_factor")
    inside = rope if outside is None else section  # transformers overwrites the inner one
    base = RopeConfig(rope.number("rope_theta"), partial=inside.number("partial_rotary_factor", default=1.0))
    kind = rope.require("rope_type", ("default", "longrope", "su", "yarn"))
    return base if kind == "default" else _longrope(section, rope, base)


def _linear(_: _Section, rope: _Section, base: RopeConfig) -> RopeConfig:
    return dataclasses.replace(base, kind="linear", factor=rope.number("factor"))


def _dynamic(section: _Section, rope: _Section, base: RopeConfig) -> RopeConfig:
    length = section.integer("max_position_embeddings")
    return dataclasses.replace(base, kind="dynamic", factor=rope.number("factor"), original_max_position=length)


def _llama3(section: _Section, rope: _Section, base: RopeConfig) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise rope.wrong("high_freq_factor", f"expected more than low_freq_factor, which is {low}")
    return dataclasses.replace(
        base, kind="llama3", factor=rope.number("factor"), low_freq_factor=low, high_freq_factor=high,
        original_max_position=_original_max_position(section, rope),
    )


def _yarn(section: _Section, rope: _Section, base: RopeConfig) -> RopeConfig:
    original, factor = _original_and_factor(section, rope)
    if base.theta <= 1:
        raise rope.wrong("rope_theta", "yarn expects more than 1")
    mscale, of_all = (rope.number(name, None, zero_is_none=True) for name in ("mscale", "mscale_all_dim"))
    recommended = yarn_attention_factor(factor)
    if mscale and of_all:
        recommended = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, of_all)
    return dataclasses.replace(
        base, kind="yarn", factor=factor, original_max_position=original,
        attention_factor=rope.number("attention_factor", recommended),
        beta_fast=rope.number("beta_fast", 32.0, zero_is_none=True),
        beta_slow=rope.number("beta_slow", 1.0, zero_is_none=True), truncate=rope.switch("truncate", True),
    )


def _longrope(section: _Section, rope: _Section, base: RopeConfig) -> RopeConfig:
    original, factor = _original_and_factor(section, rope)
    if original < 2:
        raise rope.wrong("original_max_position_embeddings", "longrope expects at least 2")
    return dataclasses.replace(
        base, kind="longrope", original_max_position=original, short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
        attention_factor=rope.number("attention_factor", longrope_attention_factor(factor, original)),
    )


_STRETCHED: dict[str, Callable[[_Section, _Section, RopeConfig], RopeConfig]] = {
    "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "dynamic": _dynamic,
}


def _original_and_factor(section: _Section, rope: _Section) -> tuple[int, float]:
    """Returns the length first trained on, and how many times as long texts may be."""
    original = _original_max_position(section, rope)
    return original, rope.number("factor", section.integer("max_position_embeddings") / original)


def _original_max_position(section: _Section, rope: _Section) -> int:
    """Returns the length first trained on; as in transformers, the field beside the rope settings comes first."""
    name = "original_max_position_embeddings"
    inside = rope.integer(name, default=section.integer("max_position_embeddings"))
    return section.integer(name, default=inside)


def _to_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json, with rope and dtype in the old spelling, which all of transformers reads."""
    return {
        "architectures": [_ARCHITECTURES[config.family]], "model_type": config.family, "torch_dtype": dtype,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps, "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias, "mlp_bias": config.mlp_bias, "rope_theta": config.rope.theta,
        "rope_scaling": _scaling_fields(config),
        **_expert_fields(config), **_phi3_fields(config), **_gemma_fields(config), **_window_fields(config),
        **_special_ids(config),
    }


def _scaling_fields(config: ModelConfig) -> dict[str, Any] | None:
    """Returns the content of `rope_scaling`."""
    rope = config.rope
    original = {"original_max_position_embeddings": rope.original_max_position}
    match rope.kind:
        case "default":
            return None
        case "longrope":
            own: dict[str, Any] = {name: list(getattr(rope, name)) for name in ("short_factor", "long_factor")}
            factor = config.max_position / rope.original_max_position
            if config.family != "phi3":
                own |= original
            elif rope.attention_factor == longrope_attention_factor(factor, rope.original_max_position):
                return {"type": "longrope", **own}  # transformers 4 refuses further fields and `rope_type`
            return {"type": "longrope", **own, "attention_factor": rope.attention_factor}
        case "yarn":
            own = {name: getattr(rope, name) for name in ("attention_factor", "beta_fast", "beta_slow", "truncate")}
            own |= original
        case "llama3":
            own = {name: getattr(rope, name) for name in ("low_freq_factor", "high_freq_factor")} | original
        case _:
            own = {}
    return {"rope_type": rope.kind, "factor": rope.factor, **own}


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
    if config.family not in _GEMMAS:
        return {"hidden_act": "silu"}
    local = {} if config.local_rope is None else {"rope_local_base_freq": config.local_rope.theta}
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config.query_scalar,
            "attn_logit_softcapping": config.soft_cap, "final_logit_softcapping": config.logit_cap, **local}


def _window_fields(config: ModelConfig) -> dict[str, Any]:
    if config.family == "llama":
        return {}
    window = next((w for w in config.windows if w is not None), None)
    kinds = [_FULL if w is None else _SLIDING for w in config.windows]
    if config.family in _ALTERNATING:
        return {"sliding_window": window, "layer_types": kinds}
    if config.family in _NO_SWITCH:
        return {"sliding_window": window}
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
