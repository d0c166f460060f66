"""Division of a model, and of its caches, among the devices of a mesh.

Sequences are divided over one axis of the mesh. KV heads with their query heads, the intermediate sizes of
feed-forward networks and the vocabulary are divided over another. Programs run inside `jax.shard_map`: each device runs
the functions that a single one would, with the configuration of its part (`MeshLayout.of_one`), and what depends on all
heads goes through `kvjax.ops.shards`. That way kernels and loops over sequences, which XLA cannot divide, are local.

A parameter is divided along the axis that is shorter in the configuration of one device: rows of the projections to
queries, keys, values and intermediate numbers, columns of the projections back, rows of the embedding. Everything else,
such as norms and routers, is on every device. A vocabulary that does not divide is on every device, too.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.errors import ConfigError
from kvjax.models.config import ModelConfig
from kvjax.models.tensor_names import targets_of
from kvjax.ops.shards import WHOLE, Shards
from kvjax.ops.weights import QuantisedMatrix, parameters
from kvjax.typing import PyTree

_OF_A_LAYER = re.compile(r"layers_\d+/")


@dataclasses.dataclass(frozen=True)
class MeshRules:
    """Names of the mesh axes that a model is divided over.

    Attributes:
      sequences: mesh axis over which the sequences of a batch are divided.
      heads: mesh axis over which KV heads, intermediate sizes and vocabulary are divided.
    """

    sequences: str = "data"
    heads: str = "model"


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """How models and caches are divided on a mesh, a hashable value.

    Attributes:
      mesh: devices; an axis that the rules name may be missing, and then nothing is divided that way.
      rules: names of its axes.
    """

    mesh: Mesh
    rules: MeshRules = MeshRules()

    @classmethod
    def on(cls, mesh: Mesh | None, rules: MeshRules) -> "MeshLayout | None":
        """Returns the layout on a mesh that a user gave; None without a mesh.

        `jax.make_mesh` makes axes of explicit type, which are for programs that say where every array is. Here XLA
        decides about what is computed between the divided programs, so the axes become automatic.

        Raises:
          ConfigError: this is no mesh, it has an axis that the rules do not name, or it has devices of other processes.
        """
        if mesh is None:
            return None
        if not isinstance(mesh, Mesh) or not isinstance(rules, MeshRules):
            raise ConfigError(f"mesh={mesh!r:.80} and rules={rules!r:.80} must be a jax.sharding.Mesh, such as "
                              "jax.make_mesh((2, 4), ('data', 'model')), and a kvjax.MeshRules")
        names = rules.sequences, rules.heads
        unknown = [name for name in mesh.axis_names if name not in names]
        if unknown or len(set(names)) == 1:
            raise ConfigError(f"the mesh has the axes {', '.join(map(repr, mesh.axis_names))}, and sequences and heads "
                              f"are divided over {names[0]!r} and {names[1]!r}; name two axes with "
                              "rules=kvjax.MeshRules(sequences=..., heads=...)")
        if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
            raise ConfigError("the mesh has devices of several processes, and caches are on those of one; make the "
                              "mesh of jax.local_devices()")
        return cls(Mesh(mesh.devices, mesh.axis_names), rules)

    def _axis(self, name: str) -> str | None:
        return name if name in self.mesh.axis_names else None

    @property
    def sequence_parts(self) -> int:
        """Number of parts of a batch."""
        return self.mesh.shape.get(self.rules.sequences, 1)

    @property
    def head_parts(self) -> int:
        """Number of parts of the heads."""
        return self.mesh.shape.get(self.rules.heads, 1)

    @property
    def everywhere(self) -> PartitionSpec:
        """Places arrays that every device has."""
        return PartitionSpec()

    @property
    def by_sequence(self) -> PartitionSpec:
        """Places arrays [B, ...]."""
        return PartitionSpec(self._axis(self.rules.sequences))

    @property
    def by_head(self) -> PartitionSpec:
        """Places arrays [K, ...]."""
        return PartitionSpec(self._axis(self.rules.heads))

    def heads_at(self, axis: int) -> PartitionSpec:
        """Places arrays [B, ...] whose axis of this number is that of the heads."""
        return PartitionSpec(*self.by_sequence, *(None,) * (axis - 1), *self.by_head)

    def put(self, x: Any, spec: PartitionSpec) -> jax.Array:
        """Returns an array on the devices of the mesh."""
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def run(self, function: Callable, takes: Any, gives: Any) -> Callable:
        """Returns a function that each device runs on its own parts.

        Args:
          function: function of arrays.
          takes: where its arguments are, a tree of partition specs or the beginning of one.
          gives: where its results are.
        """
        # Replication is not inferred through kernels; that results which are everywhere are equal is for tests.
        return jax.shard_map(function, mesh=self.mesh, in_specs=takes, out_specs=gives, check_vma=False)

    # ------------------------------------------------------------------------------- the model

    def of_one(self, config: ModelConfig, exchanging: bool = True) -> ModelConfig:
        """Returns the model as one device has it.

        Args:
          config: the whole model.
          exchanging: False = for shapes only: nothing is summed over devices, so that functions can be traced anywhere.
        """
        count = self.head_parts
        if count == 1:
            return config
        experts, vocabulary = config.experts, WHOLE
        shards = Shards(count, self.rules.heads if exchanging else None)
        if experts is not None:
            shared = experts.shared_size
            shared = None if shared is None else shared // count
            experts = dataclasses.replace(experts, size=experts.size // count, shared_size=shared)
        if config.vocab_size % count == 0:
            vocabulary = shards
        return dataclasses.replace(
            config, num_heads=config.num_heads // count, num_kv_heads=config.num_kv_heads // count,
            intermediate_size=max(1, config.intermediate_size // count), experts=experts,
            vocab_size=config.vocab_size // vocabulary.count, shards=shards, vocabulary=vocabulary,
        )

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError unless the model's sizes can be divided."""
        count, sizes = self.head_parts, {"KV heads": config.num_kv_heads}
        if config.use_mlp and any(layer.experts is None for layer in config.layers):
            sizes["intermediate numbers of the feed-forward network"] = config.intermediate_size
        if config.experts is not None:
            sizes |= {"intermediate numbers of an expert": config.experts.size,
                      "intermediate numbers of the shared expert": config.experts.shared_size or count}
        for what, size in sizes.items():
            if size % count:
                raise ConfigError(f"{size} {what} cannot be divided evenly among the {count} devices on the mesh axis "
                                  f"{self.rules.heads!r}; give that axis a number of devices that divides {size}, and "
                                  f"the other devices to {self.rules.sequences!r}")

    def check_batch(self, batch: int) -> None:
        """Raises ConfigError unless a batch can be divided."""
        if batch % self.sequence_parts:
            raise ConfigError(f"{batch} sequences cannot be divided evenly among the {self.sequence_parts} devices on "
                              f"the mesh axis {self.rules.sequences!r}; give a multiple of {self.sequence_parts}, or a "
                              f"mesh with fewer devices there and more on {self.rules.heads!r}")

    def params(self, config: ModelConfig, params: PyTree) -> PyTree:
        """Returns where parameters of the whole model, or of one of its layers, are."""
        known = _parameter_specs(self, config)
        flat = traverse_util.flatten_dict(params, sep="/")
        return traverse_util.unflatten_dict({path: known[_OF_A_LAYER.sub("", path)] for path in flat}, sep="/")

    def sharding(self, config: ModelConfig, path: str) -> NamedSharding:
        """Returns where the parameter of a path is."""
        return NamedSharding(self.mesh, _parameter_specs(self, config)[_OF_A_LAYER.sub("", path)])

    def place(self, config: ModelConfig, params: PyTree) -> PyTree:
        """Returns parameters on the devices of the mesh; those that are there already stay as they are.

        Raises:
          ConfigError: the sizes cannot be divided, or weights are in few bits.
        """
        self.check(config)
        if any(isinstance(leaf, QuantisedMatrix) for leaf in parameters(params)):
            raise ConfigError("weights in few bits are for one device; load the model with dtype='bfloat16' on a mesh")
        return jax.tree.map(self.put, params, self.params(config, params))


@functools.cache
def _parameter_specs(layout: MeshLayout, config: ModelConfig) -> Mapping[str, PartitionSpec]:
    """Returns where each parameter is, by its path in the model or in a layer."""
    whole, own = _shapes(config), _shapes(layout.of_one(config))
    heads, specs = layout.rules.heads, {}
    for path, shape in whole.items():
        specs[path] = PartitionSpec(*(None if size == part else heads for size, part in
                                      zip(shape, own[path], strict=True)))
    return specs


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets_of(config).values():
        for path, rows in zip(target.paths, target.rows, strict=True):
            stacked = () if target.expert is None else (target.expert + 1,)
            shapes[_OF_A_LAYER.sub("", path)] = (*stacked, rows, *target.shape[1:])
    return shapes
