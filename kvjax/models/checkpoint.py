"""Loading and saving of parameters as safetensors files with Hugging Face's names."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax import _files
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import hf_config, json_file, tensor_file
from kvjax.models.config import ModelConfig
from kvjax.models.expert_tensors import expert_by_expert, in_files
from kvjax.models.mesh import MeshLayout
from kvjax.models.tensor_file import StoredTensor
from kvjax.models.tensor_names import EMBEDDING, HEAD, Target, check_tensor, targets_of
from kvjax.ops.weights import QuantisedMatrix, widened
from kvjax.typing import PyTree

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Prefix of all tensors but the unembedding; files of a bare model leave it out, and those of a model that also reads
# images say language_model.
_PREFIX = "model."
# Older checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_MOST_HEADER = 8 << 20  # bytes of a file's header; each tensor takes about 100
_FEW = 5  # names in a warning


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
        self, dtype: DTypeLike = jnp.float32, advance: Callable[[], object] | None = None, kind: str | None = None,
        layout: MeshLayout | None = None,
    ) -> PyTree:
        """Returns the parameters of `Transformer(config)` on the device, or divided among those of a mesh.

        Parameters are read one at a time, in the order of the files, so that the host holds at most one of them.

        Args:
          dtype: type of the parameters.
          advance: function called after each parameter.
          kind: type of all matrices, one of `kvjax.ops.weights.KINDS`; None = `dtype`. Embedding and unembedding have
            8 bits at least: an error in them meets every token, and other formats spare them, too. Those of experts
            are of type `dtype`.
          layout: how the model is divided on a mesh; None = it is on one device.

        Raises:
          CheckpointError: a value is not finite in the file or as `dtype`, or a file cannot be read.
        """

        params: dict[str, jax.Array | QuantisedMatrix] = {}
        with contextlib.ExitStack() as files:
            opened = functools.cache(lambda file: files.enter_context(_opened(file)))
            for path, parts in sorted(self.parts.items(), key=lambda item: (item[1][0].file, item[1][0].offset)):
                if layout is not None:
                    sharding = layout.sharding(self.config, path)
                    params[path] = tensor_file.read_divided(opened, parts, dtype, sharding, path in self.stacks)
                elif path in self.stacks:
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


def load(directory: json_file.Path, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> tuple[ModelConfig, PyTree]:
    """Finds and reads the weights of a model directory; see `find` and `Weights.read`.

    Returns:
      `config`, tied or untied as the weights are, and the parameters of `Transformer(config)`.
    """
    weights = find(directory, config)
    return weights.config, weights.read(dtype)


def find(directory: json_file.Path, config: ModelConfig) -> Weights:
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
    held = expert_by_expert(held, config)
    own_head = config.tie_embeddings and _name_in(held, HEAD) in held and _name_in(held, EMBEDDING) in held
    if own_head:
        config = dataclasses.replace(config, tie_embeddings=False)
    weights = placed(held, config, weight_map)
    _warn_of_others(held, weights)
    for parts in weights.parts.values():
        for stored in parts:
            tensor_file.check_plain(stored)
    if not own_head:
        return weights
    embedding, head = (weights.tensors[path] for path in ("embedding/embedding", "lm_head/weight"))
    if tensor_file.are_equal(embedding, head):
        # The tied model is the same and takes less memory.
        tensors = {path: stored for path, stored in weights.tensors.items() if stored is not head}
        return Weights(dataclasses.replace(config, tie_embeddings=True), tensors, weights.stacks)
    warnings.warn(f"{head.file}: {HEAD} is not the embedding, although tie_word_embeddings in "
                  f"{json_file.CONFIG} is true; both are loaded as they are", stacklevel=3)
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
    targets = targets_of(config)
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
    params: PyTree, config: ModelConfig, directory: json_file.Path, dtype: str = "float32",
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
    flat, targets = traverse_util.flatten_dict(params, sep="/"), targets_of(config)
    hf_config.check_writable(config, path.with_name(json_file.CONFIG))
    _check_params(path, flat, targets)
    tensors = in_files({name: _to_tensor(path, target, flat, dtype) for name, target in targets.items()}, config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot create the directory ({error}); choose another path") from error
    try:
        with beside or contextlib.nullcontext(), _files.replacing(path) as temporary:
            # `save_file` writes an array's memory whatever its strides are; transformers refuses a file whose metadata
            # does not name a framework.
            tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
            save_file(tensors, temporary, metadata={"format": "pt"})
            # Last, so that a full disk leaves an earlier model intact.
            hf_config.write_config(config, directory, dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot be written ({error}); make room, or choose another") from error


def _held(directory: json_file.Path) -> tuple[dict[str, list[StoredTensor]], Mapping[str, str]]:
    """Returns every tensor in the files' headers, with each file that has it, and the index's file of each tensor."""
    paths, weight_map = _weight_files(directory)
    held: dict[str, list[StoredTensor]] = {}
    for file in paths:
        for stored in _header(file):
            held.setdefault(stored.name, []).append(stored)
    if not held:
        raise CheckpointError(f"{paths[0]}: no tensors in the file; download it again")
    return held, weight_map


def _weight_files(directory: json_file.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    """Returns the single file if there is one, as transformers does, or else the shards and the index's map to them."""
    root = json_file.model_directory(directory)
    if os.path.lexists(root / WEIGHTS):
        return [root / WEIGHTS], {}
    index = root / INDEX
    if not os.path.lexists(index):
        raise CheckpointError(f"{root}: neither {WEIGHTS} nor {INDEX}; convert other formats to safetensors first")
    weight_map = json_file.read_json(index).get("weight_map")
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
    held: Mapping[str, list[StoredTensor]], weight_map: Mapping[str, str], targets: Mapping[str, Target],
    spell: Callable[[str], str],
) -> dict[str, StoredTensor]:
    """Returns the source of each tensor; CheckpointError if one is missing, ambiguous or misshapen."""
    names = {name: _name_in(held, name) for name in targets}
    if HEAD not in targets and names[EMBEDDING] not in held:
        names[EMBEDDING] = HEAD  # a tied model holds one of the two, under either name
    missing = sorted(name for name in targets if names[name] not in held)
    if missing:
        first = next(iter(held.values()))[0].file
        where = first.with_name(INDEX) if weight_map else first
        raise CheckpointError(f"{where}: tensor {spell(missing[0])} is missing, and {len(missing) - 1} more, which "
                              "the model's configuration requires; download the model again")
    sources = {name: _only_one(held[names[name]], weight_map) for name in targets}
    for name, source in sources.items():
        check_tensor(source, targets[name])
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
    path: pathlib.Path, flat: Mapping[str, jax.Array | QuantisedMatrix], targets: Mapping[str, Target]
) -> None:
    # The last expert's tensor tells how many there are.
    expected = {path: (*(() if target.expert is None else (target.expert + 1,)), rows, *target.shape[1:])
                for target in targets.values() for path, rows in zip(target.paths, target.rows, strict=True)}
    for name in sorted(flat.keys() | expected.keys()):
        have = flat[name].shape if name in flat else None
        if have != expected.get(name):
            raise CheckpointError(f"{path}: parameter {name} has shape {have}; the model has {expected.get(name)}")


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
    path: pathlib.Path, target: Target, flat: Mapping[str, jax.Array | QuantisedMatrix], dtype: str
) -> np.ndarray:
    parts = []
    for name in target.paths:
        whole = widened(flat[name])
        stored = np.asarray(whole if target.expert is None else whole[target.expert])
        tensor_file.check_finite(f"{path}: parameter {name}", stored, dtype)
        # save_file ignores strides and writes the bytes from the array's address on, so they must be in C order.
        parts.append(stored.astype(jnp.dtype(dtype), order="C"))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
