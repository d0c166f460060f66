"""Names and shapes of a checkpoint's tensors as Hugging Face has them, and the parameters that they hold."""

from collections.abc import Mapping
from typing import NamedTuple

from kvjax.errors import CheckpointError
from kvjax.models.config import ModelConfig
from kvjax.models.tensor_file import StoredTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# The module of a mixture of experts, and the maps of an expert in it, first those that read the expert's input.
EXPERTS = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
USUAL_EXPERTS = ("mlp", ("gate_proj", "up_proj", "down_proj"))


class Target(NamedTuple):
    """Shape of a tensor in the model, and the paths of the parameters that it holds one after another."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]  # rows of each parameter, which make up the tensor's
    expert: int | None = None  # the tensor is this element of a parameter that stacks the experts'

    @classmethod
    def of(cls, *parts: tuple[str, tuple[int, ...]]) -> "Target":
        """Returns the tensor of parameters, each given by path and shape."""
        paths, shapes = zip(*parts, strict=True)
        rows = tuple(shape[0] for shape in shapes)
        return cls(paths, (sum(rows), *shapes[0][1:]), rows)

    def split(self, stored: StoredTensor) -> dict[str, StoredTensor]:
        """Returns the parameters in a tensor of this shape, by path."""
        if len(self.paths) == 1:
            return {self.paths[0]: stored}
        parts, start = {}, stored.offset
        for path, rows in zip(self.paths, self.rows, strict=True):
            parts[path] = stored._replace(shape=(rows, *stored.shape[1:]), offset=start)
            start += parts[path].nbytes
        return parts


def targets_of(config: ModelConfig) -> dict[str, Target]:
    """Returns the parameter path and shape of each tensor of a checkpoint, by the tensor's name.

    Shapes are derived from the settings: tracing the model could take arbitrarily long for a hostile configuration.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    targets = {EMBEDDING: Target.of(("embedding/embedding", (vocab, hidden))),
               "model.norm.weight": Target.of(("norm/scale", (hidden,)))}
    if not config.tie_embeddings:
        targets[HEAD] = Target.of(("lm_head/weight", (vocab, hidden)))
    norms, dense, sparse = _norm_targets(config), _linear_targets(config), _sparse_targets(config)
    for i, layer in enumerate(config.layers):
        for name, target in {**norms, **(sparse if layer.experts else dense)}.items():
            paths = tuple(f"layers_{i}/{path}" for path in target.paths)
            targets[f"model.layers.{i}.{name}"] = target._replace(paths=paths)
    return targets


def _norm_targets(config: ModelConfig) -> dict[str, Target]:
    """Returns the targets of one layer's vectors: scales of its normalisations, and sink logits."""
    norms = {"input_layernorm": ("input_norm", config.hidden_size),
             "post_attention_layernorm": ("post_norm", config.hidden_size)}
    if config.out_norms:
        norms |= {"post_attention_layernorm": ("attention_out_norm", config.hidden_size),
                  "pre_feedforward_layernorm": ("post_norm", config.hidden_size),
                  "post_feedforward_layernorm": ("mlp_out_norm", config.hidden_size)}
    if config.qk_norm:
        norms |= {f"self_attn.{name}": (name, config.head_dim) for name in ("q_norm", "k_norm")}
    sinks = {"self_attn.sinks": Target.of(("sinks", (config.num_heads,)))} if config.sink_logits else {}
    return sinks | {f"{name}.weight": Target.of((f"{path}/scale", (size,))) for name, (path, size) in norms.items()}


class _Map(NamedTuple):
    """Linear map: path of its parameters, shape [out, in], and whether it has a bias."""

    path: str
    shape: tuple[int, int]
    bias: bool = False


def _linear_targets(config: ModelConfig) -> dict[str, Target]:
    """Returns the targets of the linear maps of a layer without experts."""
    maps = _attention_maps(config) | _gated_maps("mlp", "mlp", config, config.intermediate_size, config.mlp_bias)
    # Phi-3's files hold maps of the same input as one.
    return _targets_of_maps(maps, _FUSED if config.family == "phi3" else {})


def _sparse_targets(config: ModelConfig) -> dict[str, Target]:
    """Returns the targets of the linear maps of a layer with experts, if the model has any."""
    mixture, hidden = config.experts, config.hidden_size
    if mixture is None:
        return {}
    module, names = EXPERTS.get(config.family, USUAL_EXPERTS)
    router = "router" if config.family == "gpt_oss" else "gate"
    maps = _attention_maps(config)
    maps[f"{module}.{router}"] = _Map("experts/router", (mixture.count, hidden), mixture.bias)
    if mixture.shared_size is not None:
        maps |= _gated_maps(f"{module}.shared_expert", "experts/shared", config, mixture.shared_size)
        maps[f"{module}.shared_expert_gate"] = _Map("experts/shared_gate", (1, hidden))
    wide, narrow = (mixture.size, hidden), (hidden, mixture.size)
    experts = {}
    for name, path, shape in zip(names, USUAL_EXPERTS[1], (wide, wide, narrow), strict=True):
        for i in range(mixture.count):
            one = f"{module}.experts.{i}.{name}"
            experts[f"{one}.weight"] = Target((f"experts/{path}",), shape, shape[:1], i)
            if mixture.bias:
                experts[f"{one}.bias"] = Target((f"experts/{path}_bias",), shape[:1], shape[:1], i)
    return _targets_of_maps(maps, {}) | experts


def _attention_maps(config: ModelConfig) -> dict[str, _Map]:
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": _Map("q_proj", (queries, hidden), config.qkv_bias),
        "self_attn.k_proj": _Map("k_proj", (keys, hidden), config.qkv_bias),
        "self_attn.v_proj": _Map("v_proj", (keys, hidden), config.qkv_bias),
        "self_attn.o_proj": _Map("o_proj", (hidden, queries), config.output_bias),
    }


def _gated_maps(name: str, path: str, config: ModelConfig, inner: int, bias: bool = False) -> dict[str, _Map]:
    """Returns the maps of a gated feed-forward network, by their names in a file."""
    shapes = {"gate_proj": (inner, config.hidden_size), "up_proj": (inner, config.hidden_size),
              "down_proj": (config.hidden_size, inner)}
    return {f"{name}.{part}": _Map(f"{path}/{part}", shape, bias) for part, shape in shapes.items()}


def _targets_of_maps(maps: Mapping[str, _Map], fused: Mapping[str, tuple[str, ...]]) -> dict[str, Target]:
    """Returns the targets of linear maps; a fused tensor holds several."""
    apart = {name: (name,) for name in maps if not any(name in names for names in fused.values())}
    targets = {}
    for tensor, names in {**fused, **apart}.items():
        parts = [maps[name] for name in names]
        targets[f"{tensor}.weight"] = Target.of(*((f"{part.path}/weight", part.shape) for part in parts))
        if parts[0].bias:
            targets[f"{tensor}.bias"] = Target.of(*((f"{part.path}/bias", part.shape[:1]) for part in parts))
    return targets


def check_tensor(source: StoredTensor, target: Target) -> None:
    """Raises CheckpointError unless a tensor has the shape that the model asks for."""
    if source.shape != target.shape:
        raise CheckpointError(f"{source.file}: tensor {source.name} has shape {source.shape}; the model's "
                              f"configuration asks for {target.shape}")
