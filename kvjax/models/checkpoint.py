"""Loading and saving of parameters as safetensors files with Hugging Face's names."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax import _files
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import hf_config, tensor_file
from kvjax.models.config import ModelConfig
from kvjax.models.tensor_file import StoredTensor
from kvjax.ops.weights import QuantisedMatrix, widened
from kvjax.typing import PyTree

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PREFIX = "model."  # of all tensors but the unembedding; files of a bare model leave it out, and those of a model that
# also reads images say language_model
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Older checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# The module of a mixture of experts, and the maps of an expert in it, first those that read the expert's input.
_EXPERTS = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
_USUAL_EXPERTS = ("mlp", ("gate_proj", "up_proj", "down_proj"))
# What transformers 5 has in memory, and so in files that it wrote without going back to the names of earlier versions.
_STACKED = re.compile(r"(?P<layer>(model\.)?layers\.\d+)\.mlp\.(experts\.(?P<map>gate_up_proj|down_proj)|gate\.weight)")
# GPT-OSS's, transposed: the columns of gate and up alternate.
_TRANSPOSED = re.compile(
    r"(?P<layer>(model\.)?layers\.\d+)\.mlp\.experts\.(?P<map>gate_up_proj|down_proj)(?P<bias>_bias)?")
_MOST_HEADER = 8 << 20  # bytes of a file's header; each tensor takes about 100
_FEW = 5  # names in a warning


class _Target(NamedTuple):
    """Shape of a tensor in the model, and the paths of the parameters that it holds one after another."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]  # rows of each parameter, which make up the tensor's
    expert: int | None = None  # the tensor is this element of a parameter that stacks the experts'

    @classmethod
    def of(cls, *parts: tuple[str, tuple[int, ...]]) -> "_Target":
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


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of a model in files whose headers have been checked.

    config   settings of the model, tied or untied as the weights are
    tensors  each tensor by its parameter's path
    stacks   tensors of all experts, by the path of the parameter that they are together
    """

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    stacks: Mapping[str, Sequence[StoredTensor]] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Sequence[StoredTensor]]:
        """The tensors of each parameter, one or an expert's each, by its path."""
        return {path: (stored,) for path, stored in self.tensors.items()} | dict(self.stacks)

    def read(
        self, dtype: DTypeLike = jnp.float32, advance: Callable[[], object] | None = None, kind: str | None = None
    ) -> PyTree:
        """Returns the parameters of `Transformer(config)` on the device.

        Parameters are read one at a time, in the order of the files, so that the host holds at most one of them.

        Args:
          dtype: type of the parameters.
          advance: function called after each parameter.
          kind: type of all matrices, one of `kvjax.ops.weights.KINDS`; None = `dtype`. Embedding and unembedding have
            8 bits at least: an error in them meets every token, and other formats spare them, too. Those of experts
            are of type `dtype`.

        Raises:
          CheckpointError: a value is not finite in the file or as `dtype`, or a file cannot be read.
        """

        params: dict[str, jax.Array | QuantisedMatrix] = {}
        with contextlib.ExitStack() as files:
            opened = functools.cache(lambda file: files.enter_context(_opened(file)))
            for path, parts in sorted(self.parts.items(), key=lambda item: (item[1][0].file, item[1][0].offset)):
                if path in self.stacks:
                    params[path] = tensor_file.read_stacked(opened, parts, dtype)
                else:
                    params[path] = tensor_file.read(opened(parts[0].file), parts[0], dtype, self._kind(path, kind))
                if advance is not None:
                    advance()
        return traverse_util.unflatten_dict(params, sep="/")

    def _kind(self, path: str, kind: str | None) -> str | None:
        """Returns the type in few bits of a parameter; None for one that stays as wide as it is."""
        if kind is None or len(self.tensors[path].shape) != 2:
            return None
        return "int8" if path in ("embedding/embedding", "lm_head/weight") else kind


def load(directory: hf_config.Path, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> tuple[ModelConfig, PyTree]:
    """Finds and reads the weights of a model directory; see `find` and `Weights.read`.

    Returns:
      `config`, tied or untied as the weights are, and the parameters of `Transformer(config)`.
    """
    weights = find(directory, config)
    return weights.config, weights.read(dtype)


def find(directory: hf_config.Path, config: ModelConfig) -> Weights:
    """Checks all names, shapes and types in the headers of a model directory's files.

    As in transformers, the weights decide whether embedding and unembedding are tied, not the configuration: a tied
    model with a different `lm_head.weight` is untied, with a warning, and one with `lm_head.weight` alone uses it for
    both. Tensors that the model does not have are skipped, with a warning that names them. A tensor in two shards is
    read from the one that the index names.

    Args:
      directory: model directory.
      config: settings of the model, from `hf_config.read_config`.

    Raises:
      CheckpointError: a file is missing, not a regular file or truncated, or a tensor is missing, ambiguous or
        misshapen. The message names file and tensor.
    """
    held, weight_map = _held(directory)
    held = _expert_by_expert(held, config)
    own_head = config.tie_embeddings and _HEAD in held and _name_in(held, _EMBEDDING) in held
    if own_head:
        config = dataclasses.replace(config, tie_embeddings=False)
    weights = placed(held, config, weight_map)
    _warn_of_others(held, weights)
    for parts in weights.parts.values():
        for stored in parts:
            _check_plain(stored)
    if not own_head:
        return weights
    embedding, head = (weights.tensors[path] for path in ("embedding/embedding", "lm_head/weight"))
    if tensor_file.are_equal(embedding, head):
        # The tied model is the same and takes less memory.
        tensors = {path: stored for path, stored in weights.tensors.items() if stored is not head}
        return Weights(dataclasses.replace(config, tie_embeddings=True), tensors, weights.stacks)
    warnings.warn(f"{head.file}: {_HEAD} is not the embedding, although tie_word_embeddings in "
                  f"{hf_config.CONFIG} is true; both are loaded as they are", stacklevel=3)
    return weights


def placed(
    held: Mapping[str, list[StoredTensor]], config: ModelConfig, weight_map: Mapping[str, str],
    spell: Callable[[str], str] = str,
) -> Weights:
    """Returns the weights of `config` among the tensors in a model's files.

    Args:
      held: every tensor in the files' headers, with each file that has it, by Hugging Face's name.
      config: settings of the model.
      weight_map: the index's file of each tensor, if there are several files.
      spell: returns the name in the file of a tensor with Hugging Face's name, for error messages.

    Raises:
      CheckpointError: a tensor is missing, ambiguous or misshapen.
    """
    targets = _targets(config)
    sources = _sources(held, weight_map, targets, spell)
    tensors: dict[str, StoredTensor] = {}
    stacks: dict[str, list[StoredTensor]] = {}
    for name, source in sources.items():
        if targets[name].expert is None:
            tensors |= targets[name].split(source)
        else:  # in the experts' order
            stacks.setdefault(targets[name].paths[0], []).append(source)
    return Weights(config, tensors, stacks)


def save_params(
    params: PyTree, config: ModelConfig, directory: hf_config.Path, dtype: str = "float32",
    beside: contextlib.AbstractContextManager | None = None,
) -> None:
    """Writes parameters and configuration in the form that `load` and transformers read.

    Matrices in few bits are written as the numbers that they stand for. Holds a copy of the model in host memory
    meanwhile. Files in the directory are replaced once everything is written.

    Args:
      params: parameters of `Transformer(config)`.
      config: settings of the model.
      directory: directory to write to, created if it does not exist.
      dtype: type of the stored weights, float32 or bfloat16.
      beside: context that writes further files when it is entered and moves them into place when it is left.

    Raises:
      CheckpointError: Hugging Face has no format for `config` (such as a model without MLP), `params` do not belong to
        it or are not finite as `dtype`, or the files cannot be written.
      ConfigError: another `dtype` is given.
    """
    if dtype not in tensor_file.WRITABLE:
        raise ConfigError(f"cannot save as dtype {dtype!r}; use one of {', '.join(tensor_file.WRITABLE)}")
    path = pathlib.Path(directory).expanduser() / WEIGHTS
    flat, targets = traverse_util.flatten_dict(params, sep="/"), _targets(config)
    hf_config.check_writable(config, path.with_name(hf_config.CONFIG))
    _check_params(path, flat, targets)
    tensors = _in_files({name: _to_tensor(path, target, flat, dtype) for name, target in targets.items()}, config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot create the directory ({error}); choose another path") from error
    try:
        with beside or contextlib.nullcontext(), _files.replacing(path) as temporary:
            # transformers refuses a file whose metadata does not name a framework.
            save_file(tensors, temporary, metadata={"format": "pt"})
            # Last, so that a full disk leaves an earlier model intact.
            hf_config.write_config(config, directory, dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot be written ({error}); make room, or choose another") from error


def _targets(config: ModelConfig) -> dict[str, _Target]:
    """Returns the parameter path and shape of each tensor of a checkpoint, by the tensor's name.

    Shapes are derived from the settings: tracing the model could take arbitrarily long for a hostile configuration.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    targets = {_EMBEDDING: _Target.of(("embedding/embedding", (vocab, hidden))),
               "model.norm.weight": _Target.of(("norm/scale", (hidden,)))}
    if not config.tie_embeddings:
        targets[_HEAD] = _Target.of(("lm_head/weight", (vocab, hidden)))
    norms, dense, sparse = _norm_targets(config), _linear_targets(config), _sparse_targets(config)
    for i, layer in enumerate(config.layers):
        for name, target in {**norms, **(sparse if layer.experts else dense)}.items():
            paths = tuple(f"layers_{i}/{path}" for path in target.paths)
            targets[f"model.layers.{i}.{name}"] = target._replace(paths=paths)
    return targets


def _norm_targets(config: ModelConfig) -> dict[str, _Target]:
    """Returns the targets of one layer's vectors: scales of its normalisations, and sink logits."""
    norms = {"input_layernorm": ("input_norm", config.hidden_size),
             "post_attention_layernorm": ("post_norm", config.hidden_size)}
    if config.out_norms:
        norms |= {"post_attention_layernorm": ("attention_out_norm", config.hidden_size),
                  "pre_feedforward_layernorm": ("post_norm", config.hidden_size),
                  "post_feedforward_layernorm": ("mlp_out_norm", config.hidden_size)}
    if config.qk_norm:
        norms |= {f"self_attn.{name}": (name, config.head_dim) for name in ("q_norm", "k_norm")}
    sinks = {"self_attn.sinks": _Target.of(("sinks", (config.num_heads,)))} if config.sink_logits else {}
    return sinks | {f"{name}.weight": _Target.of((f"{path}/scale", (size,))) for name, (path, size) in norms.items()}


class _Map(NamedTuple):
    """Linear map: path of its parameters, shape [out, in], and whether it has a bias."""

    path: str
    shape: tuple[int, int]
    bias: bool = False


def _linear_targets(config: ModelConfig) -> dict[str, _Target]:
    """Returns the targets of the linear maps of a layer without experts."""
    maps = _attention_maps(config) | _gated_maps("mlp", "mlp", config, config.intermediate_size, config.mlp_bias)
    # Phi-3's files hold maps of the same input as one.
    return _targets_of(maps, _FUSED if config.family == "phi3" else {})


def _sparse_targets(config: ModelConfig) -> dict[str, _Target]:
    """Returns the targets of the linear maps of a layer with experts, if the model has any."""
    mixture, hidden = config.experts, config.hidden_size
    if mixture is None:
        return {}
    module, names = _EXPERTS.get(config.family, _USUAL_EXPERTS)
    router = "router" if config.family == "gpt_oss" else "gate"
    maps = _attention_maps(config)
    maps[f"{module}.{router}"] = _Map("experts/router", (mixture.count, hidden), mixture.bias)
    if mixture.shared_size is not None:
        maps |= _gated_maps(f"{module}.shared_expert", "experts/shared", config, mixture.shared_size)
        maps[f"{module}.shared_expert_gate"] = _Map("experts/shared_gate", (1, hidden))
    wide, narrow = (mixture.size, hidden), (hidden, mixture.size)
    experts = {}
    for name, path, shape in zip(names, _USUAL_EXPERTS[1], (wide, wide, narrow), strict=True):
        for i in range(mixture.count):
            one = f"{module}.experts.{i}.{name}"
            experts[f"{one}.weight"] = _Target((f"experts/{path}",), shape, shape[:1], i)
            if mixture.bias:
                experts[f"{one}.bias"] = _Target((f"experts/{path}_bias",), shape[:1], shape[:1], i)
    return _targets_of(maps, {}) | experts


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


def _targets_of(maps: Mapping[str, _Map], fused: Mapping[str, tuple[str, ...]]) -> dict[str, _Target]:
    """Returns the targets of linear maps; a fused tensor holds several."""
    apart = {name: (name,) for name in maps if not any(name in names for names in fused.values())}
    targets = {}
    for tensor, names in {**fused, **apart}.items():
        parts = [maps[name] for name in names]
        targets[f"{tensor}.weight"] = _Target.of(*((f"{part.path}/weight", part.shape) for part in parts))
        if parts[0].bias:
            targets[f"{tensor}.bias"] = _Target.of(*((f"{part.path}/bias", part.shape[:1]) for part in parts))
    return targets


# ---- contents of the files


def _held(directory: hf_config.Path) -> tuple[dict[str, list[StoredTensor]], Mapping[str, str]]:
    """Returns every tensor in the files' headers, with each file that has it, and the index's file of each tensor."""
    paths, weight_map = _weight_files(directory)
    held: dict[str, list[StoredTensor]] = {}
    for file in paths:
        for stored in _header(file):
            held.setdefault(stored.name, []).append(stored)
    if not held:
        raise CheckpointError(f"{paths[0]}: no tensors in the file; download it again")
    return held, weight_map


def _expert_by_expert(held: dict[str, list[StoredTensor]], config: ModelConfig) -> dict[str, list[StoredTensor]]:
    """Returns tensors of which each is of one expert, under the names that earlier versions of transformers gave them.

    Raises:
      CheckpointError: a tensor that stacks the experts' is misshapen or of a type that is not supported.
    """
    mixture, hidden = config.experts, config.hidden_size
    if mixture is None:
        return held
    if config.family == "gpt_oss":
        return _transposed_experts(held, config)
    module, (gate, up, down) = _EXPERTS.get(config.family, _USUAL_EXPERTS)
    apart: dict[str, list[StoredTensor]] = {}
    for name, sources in held.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            apart.setdefault(name, []).extend(sources)
        elif match["map"] is None:
            apart.setdefault(f"{match['layer']}.{module}.gate.weight", []).extend(sources)
        else:
            names = (gate, up) if match["map"] == "gate_up_proj" else (down,)
            shape = (mixture.size, hidden) if len(names) == 2 else (hidden, mixture.size)
            for stored in sources:
                _check_plain(stored)
                _check_tensor(stored, _Target((), (mixture.count, len(names) * shape[0], shape[1]), ()))
                part = stored._replace(shape=shape)
                for i in range(mixture.count * len(names)):
                    one = f"{match['layer']}.{module}.experts.{i // len(names)}.{names[i % len(names)]}.weight"
                    apart.setdefault(one, []).append(part._replace(offset=stored.offset + i * part.nbytes))
    return apart


def _transposed_experts(held: dict[str, list[StoredTensor]], config: ModelConfig) -> dict[str, list[StoredTensor]]:
    """Returns the tensors of GPT-OSS's files, those of experts one by one; raises CheckpointError as the caller."""
    mixture, hidden = config.experts, config.hidden_size
    assert mixture is not None
    apart: dict[str, list[StoredTensor]] = {}
    for name, sources in held.items():
        match = _TRANSPOSED.fullmatch(name)
        if match is None:
            apart.setdefault(name, []).extend(sources)
            continue
        names = ("gate_proj", "up_proj") if match["map"] == "gate_up_proj" else ("down_proj",)
        outer, inner = (mixture.size, hidden) if len(names) == 2 else (hidden, mixture.size)
        shape, kind = ((outer,), "bias") if match["bias"] else ((outer, inner), "weight")
        for stored in sources:
            _check_plain(stored)
            _check_tensor(stored, _Target((), (mixture.count, *shape[1:], len(names) * outer), ()))
            for i, (first, one) in itertools.product(range(mixture.count), enumerate(names)):
                part = stored._replace(shape=shape, every=(first, len(names)))
                apart.setdefault(f"{match['layer']}.mlp.experts.{i}.{one}.{kind}", []).append(
                    part._replace(offset=stored.offset + i * part.nbytes))
    return apart


def _in_files(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns tensors as files have them: GPT-OSS's have those of all experts in one, transposed."""
    if config.family != "gpt_oss" or config.experts is None:
        return tensors
    count = config.experts.count
    written = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer, (kind, end) in itertools.product(range(config.num_layers), (("weight", ""), ("bias", "_bias"))):
        module = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (np.stack([tensors[f"{module}.{i}.{name}.{kind}"].T for i in range(count)])
                          for name in ("gate_proj", "up_proj", "down_proj"))
        both = np.stack([gate, up], axis=-1)
        written[f"{module}.gate_up_proj{end}"] = both.reshape(*both.shape[:-2], -1)
        written[f"{module}.down_proj{end}"] = down
    return written


def _weight_files(directory: hf_config.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    """Returns the single file if there is one, as transformers does, or else the shards and the index's map to them."""
    root = hf_config.model_directory(directory)
    if os.path.lexists(root / WEIGHTS):
        return [root / WEIGHTS], {}
    index = root / INDEX
    if not os.path.lexists(index):
        raise CheckpointError(f"{root}: neither {WEIGHTS} nor {INDEX}; convert other formats to safetensors first")
    weight_map = hf_config.read_json(index).get("weight_map")
    # Plain names only, so that an index cannot name files outside its directory.
    if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_plain_name, weight_map.values())):
        raise CheckpointError(f"{index}: weight_map is not an object of tensor names and plain file names")
    for name, shard in weight_map.items():
        if not os.path.exists(root / shard):
            raise CheckpointError(f"{root / shard}: this shard with tensor {name} is missing; download it")
    return [root / shard for shard in sorted(set(weight_map.values()))], weight_map


def _is_plain_name(shard: object) -> bool:
    return isinstance(shard, str) and pathlib.PurePath(shard).name == shard


def _name_in(held: Mapping[str, Sequence[StoredTensor]], name: str) -> str:
    """Returns the name under which the files hold a tensor, if they hold it."""
    short = name.removeprefix(_PREFIX)
    spellings = (name, short, f"language_model.{name}", f"model.language_model.{short}")
    return next((spelling for spelling in spellings if spelling in held), name)


def _sources(
    held: Mapping[str, list[StoredTensor]], weight_map: Mapping[str, str], targets: Mapping[str, _Target],
    spell: Callable[[str], str],
) -> dict[str, StoredTensor]:
    """Returns the source of each tensor; CheckpointError if one is missing, ambiguous or misshapen."""
    names = {name: _name_in(held, name) for name in targets}
    if _HEAD not in targets and names[_EMBEDDING] not in held:
        names[_EMBEDDING] = _HEAD  # a tied model holds one of the two, under either name
    missing = sorted(name for name in targets if names[name] not in held)
    if missing:
        first = next(iter(held.values()))[0].file
        where = first.with_name(INDEX) if weight_map else first
        raise CheckpointError(f"{where}: tensor {spell(missing[0])} is missing, and {len(missing) - 1} more, which "
                              "the model's configuration requires; download the model again")
    sources = {name: _only_one(held[names[name]], weight_map) for name in targets}
    for name, source in sources.items():
        _check_tensor(source, targets[name])
    return sources


def _only_one(sources: Sequence[StoredTensor], weight_map: Mapping[str, str]) -> StoredTensor:
    """Returns the source that the index names, where several files hold a tensor."""
    first, *others = sources
    if not others:
        return first
    for source in sources:
        if source.file.name == weight_map.get(source.name):
            return source
    raise CheckpointError(f"{others[0].file}: tensor {first.name} is also in {first.file.name}, and {INDEX} names "
                          "neither; download the model again")


def _check_tensor(source: StoredTensor, target: _Target) -> None:
    if source.shape != target.shape:
        raise CheckpointError(f"{source.file}: tensor {source.name} has shape {source.shape}; the model's "
                              f"configuration asks for {target.shape}")


def _check_plain(stored: StoredTensor) -> None:
    if stored.dtype not in tensor_file.PLAIN:
        raise CheckpointError(f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; supported: "
                              f"{', '.join(tensor_file.PLAIN)}")


def others_in(held: Mapping[str, list[StoredTensor]], weights: Weights) -> list[str]:
    """Returns the names of tensors that are in the files but not in the model."""
    read = {(stored.file, stored.name) for parts in weights.parts.values() for stored in parts}
    return [name for name in sorted(held) if not _DERIVED.fullmatch(name)
            and read.isdisjoint((stored.file, stored.name) for stored in held[name])]


def _warn_of_others(held: Mapping[str, list[StoredTensor]], weights: Weights) -> None:
    others = others_in(held, weights)
    if others:
        names = ", ".join(f"{name:.100}" for name in others[:_FEW])
        warnings.warn(f"{held[others[0]][0].file.parent}: tensors that are not part of the model's "
                      f"configuration are not read: {names} ({len(others)} in all)", stacklevel=4)


def _check_params(
    path: pathlib.Path, flat: Mapping[str, jax.Array | QuantisedMatrix], targets: Mapping[str, _Target]
) -> None:
    # The last expert's tensor tells how many there are.
    expected = {path: (*(() if target.expert is None else (target.expert + 1,)), rows, *target.shape[1:])
                for target in targets.values() for path, rows in zip(target.paths, target.rows, strict=True)}
    for name in sorted(flat.keys() | expected.keys()):
        have = flat[name].shape if name in flat else None
        if have != expected.get(name):
            raise CheckpointError(f"{path}: parameter {name} has shape {have}; the model has {expected.get(name)}")


# ---- values


def _header(file: pathlib.Path) -> list[StoredTensor]:
    """Returns the tensors of a safetensors file."""
    with _opened(file) as opened:
        try:
            size = int.from_bytes(opened.read(8), "little")
            if size > _MOST_HEADER:
                raise ValueError(f"its header has {size} bytes; at most {_MOST_HEADER} are read")
            with safe_open(file, framework="numpy"):  # checks the header
                entries = _files.parse_json(tensor_file.take(opened, size, f"{file}: the header"))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again") from error
    return [StoredTensor(file, name, tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
            for name, entry in entries.items() if name != "__metadata__"]


def _opened(file: pathlib.Path) -> BinaryIO:
    try:
        return _files.open_regular(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be opened ({error}); download it again") from error


def _to_tensor(
    path: pathlib.Path, target: _Target, flat: Mapping[str, jax.Array | QuantisedMatrix], dtype: str
) -> np.ndarray:
    parts = []
    for name in target.paths:
        whole = widened(flat[name])
        stored = np.asarray(whole if target.expert is None else whole[target.expert])
        tensor_file.check_finite(f"{path}: parameter {name}", stored, dtype)
        # save_file ignores strides and writes the bytes from the array's address on, so they must be in C order.
        parts.append(stored.astype(jnp.dtype(dtype), order="C"))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
