"""Parameters from and to safetensors files in Hugging Face's naming."""

import contextlib
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax import files
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import hf_config
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Transformer
from kvjax.typing import PyTree

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Parameter path -> tensor name.
_NAMES = (
    (r"embedding/embedding", r"model.embed_tokens.weight"),
    (r"norm/scale", r"model.norm.weight"),
    (r"lm_head/weight", r"lm_head.weight"),
    (r"layers_(\d+)/input_norm/scale", r"model.layers.\1.input_layernorm.weight"),
    (r"layers_(\d+)/post_norm/scale", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"layers_(\d+)/([qk]_norm)/scale", r"model.layers.\1.self_attn.\2.weight"),
    (r"layers_(\d+)/([qkvo]_proj)/weight", r"model.layers.\1.self_attn.\2.weight"),
    (r"layers_(\d+)/([qkvo]_proj)/bias", r"model.layers.\1.self_attn.\2.bias"),
    (r"layers_(\d+)/mlp/(\w+_proj)/weight", r"model.layers.\1.mlp.\2.weight"),
    (r"layers_(\d+)/mlp/(\w+_proj)/bias", r"model.layers.\1.mlp.\2.bias"),
)
# Older checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_READABLE, _WRITABLE = ("F32", "BF16", "F16"), ("float32", "bfloat16")


class _Target(NamedTuple):
    """Where a tensor goes: parameter path and shape."""

    path: str
    shape: tuple[int, ...]


def load_params(directory: hf_config.Path, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> PyTree:
    """Parameters of `Transformer(config)` as `dtype`.

    Every name, shape and type is checked before the first tensor is read, and one tensor is read at a
    time, so that the host never holds a second copy of the model. Raises CheckpointError, naming file and
    tensor, for a file that is missing or cut short and for a tensor that is unknown, duplicate, missing
    or misshapen.
    """
    files, targets = _weight_files(directory), _targets(config)
    sources = _sources(files, config, targets)
    params = {}
    for file in files:
        with _open(file) as tensors:
            for name in (name for name, source in sources.items() if source == file):
                params[targets[name].path] = _read(tensors, name, dtype)
    return traverse_util.unflatten_dict(params, sep="/")


def save_params(
    params: PyTree, config: ModelConfig, directory: hf_config.Path, dtype: str = "float32",
    beside: contextlib.AbstractContextManager | None = None,
) -> None:
    """Writes the parameters and the configuration so that `load_params` and transformers read them.

    Holds a copy of the model in host memory while it writes. What is there is replaced once all is written, also what
    `beside` writes as it is entered and puts in its place as it is left. Raises CheckpointError if Hugging Face has no
    format for `config` (a model without MLP, for one), if `params` are not those of `Transformer(config)`, or if they
    cannot be written, and ConfigError for a dtype other than float32 and bfloat16.
    """
    if dtype not in _WRITABLE:
        raise ConfigError(f"cannot save as dtype {dtype!r}; use one of {', '.join(_WRITABLE)}")
    path = pathlib.Path(directory) / WEIGHTS
    flat, targets = traverse_util.flatten_dict(params, sep="/"), _targets(config)
    hf_config.check_writable(config, path.with_name(hf_config.CONFIG))
    _check_params(path, flat, targets)
    tensors = {name: _to_tensor(flat[target.path], dtype) for name, target in targets.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory}: no directory can be made there ({error}); choose another") from error
    try:
        with beside or contextlib.nullcontext(), files.replacing(path) as temporary:
            # transformers refuses a file that does not say which framework its layout is for.
            save_file(tensors, temporary, metadata={"format": "pt"})
            # Last, so that a full disk leaves an earlier model as it was.
            hf_config.write_config(config, directory, dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot be written ({error}); make room, or choose another") from error


@functools.cache
def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of `Transformer(config)` by its path, `a/b/c`; computes nothing."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    variables = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(variables["params"], sep="/").items()}


def _targets(config: ModelConfig) -> dict[str, _Target]:
    """What each tensor of the checkpoint is to become, by the tensor's name."""
    targets = {}
    for path, shape in param_shapes(config).items():
        for pattern, name in _NAMES:
            if match := re.fullmatch(pattern, path):
                targets[match.expand(name)] = _Target(path, shape)
    return targets


def _weight_files(directory: hf_config.Path) -> list[pathlib.Path]:
    """The one file or the shards; like transformers, one file comes before an index."""
    root = hf_config.model_directory(directory)
    if (root / WEIGHTS).is_file():
        return [root / WEIGHTS]
    index = root / INDEX
    if not index.is_file():
        raise CheckpointError(f"{root}: neither {WEIGHTS} nor {INDEX}; convert other formats to safetensors first")
    shards = hf_config.read_json(index).get("weight_map")
    # Plain names only, so that an index cannot make us read outside its directory.
    if not isinstance(shards, dict) or not shards or not all(_is_plain_name(shard) for shard in shards.values()):
        raise CheckpointError(f"{index}: weight_map is no object of tensor names and plain file names")
    for name, shard in shards.items():
        if not (root / shard).is_file():
            raise CheckpointError(f"{root / shard}: this shard, which holds tensor {name}, is missing")
    return [root / shard for shard in sorted(set(shards.values()))]


def _is_plain_name(shard: object) -> bool:
    return isinstance(shard, str) and pathlib.PurePath(shard).name == shard


def _sources(
    files: Sequence[pathlib.Path], config: ModelConfig, targets: Mapping[str, _Target]
) -> dict[str, pathlib.Path]:
    """The file of every tensor, from the files' headers alone; none is unknown, duplicate or missing."""
    sources: dict[str, pathlib.Path] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - an open file is not a mapping
                if _is_redundant(name, config):
                    continue
                if name in sources:
                    raise CheckpointError(f"{file}: tensor {name} is also in {sources[name].name}")
                _check_tensor(file, name, tensors.get_slice(name), targets)
                sources[name] = file
    missing = sorted(targets.keys() - sources.keys())
    if missing:
        where = files[0].with_name(INDEX) if len(files) > 1 else files[0]
        raise CheckpointError(f"{where}: tensor {missing[0]} is missing, and {len(missing) - 1} more")
    return sources


def _is_redundant(name: str, config: ModelConfig) -> bool:
    # A tied model's lm_head is the embedding; some exporters write it all the same, and transformers drops it too.
    return bool(_DERIVED.fullmatch(name)) or (config.tie_embeddings and name == "lm_head.weight")


def _check_tensor(file: pathlib.Path, name: str, tensor, targets: Mapping[str, _Target]) -> None:
    if name not in targets:
        raise CheckpointError(f"{file}: tensor {name} is unknown; the model of {hf_config.CONFIG} has no place for it")
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if shape != targets[name].shape:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {shape}; {hf_config.CONFIG} asks for {targets[name].shape}"
        )
    if dtype not in _READABLE:
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype}; supported: {', '.join(_READABLE)}")


def _check_params(path: pathlib.Path, flat: Mapping[str, jax.Array], targets: Mapping[str, _Target]) -> None:
    expected = {target.path: target.shape for target in targets.values()}
    for name in sorted(flat.keys() | expected.keys()):
        have = flat[name].shape if name in flat else None
        if have != expected.get(name):
            raise CheckpointError(f"{path}: parameter {name} has shape {have}; the model has {expected.get(name)}")


def _open(file: pathlib.Path):
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again") from error


def _read(tensors, name: str, dtype: DTypeLike) -> jax.Array:
    """One tensor on the device as `dtype`; cast there, so that the host makes no second copy."""
    # Transfers run behind: without waiting, several tensors would be alive on the host at once.
    return jnp.asarray(tensors.get_tensor(name)).astype(dtype).block_until_ready()


def _to_tensor(value: jax.Array, dtype: str) -> np.ndarray:
    # save_file writes the bytes from the array's address on, whatever its strides: they must be in order.
    return np.asarray(value).astype(jnp.dtype(dtype), order="C")
