"""Models with random weights, and caches of made-up keys, for times of any shape and context.

Keys form clumps that drift along the sequence, as random weights make no meaningful ones. A context of any length
costs no dense prefill.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments import common
from kvjax.cache.fill import Prompts
from kvjax.cache.pool import StoreRef
from kvjax.errors import ConfigError
from kvjax.inference import layer_offload, prefill
from kvjax.inference.plan import Slots, State, make_plan, store_geometry
from kvjax.models import hf_config
from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.transformer import Transformer

_SHAPES = {  # hidden size, query heads, head size, MLP size (0: no MLP)
    "llama-1b-4l": (2048, 32, 64, 8192), "llama-3b-4l": (3072, 24, 128, 8192), "llama-8b-4l": (4096, 32, 128, 14_336),
    "cache-path": (2048, 32, 64, 0), "cache-path-8b": (4096, 32, 128, 0),
}
_WEIGHT = 0.02  # standard deviation of random weights


def shape(name: str) -> ModelConfig:
    """Returns a shape by name: Llama-3.2-1B, 3B or Llama-3-8B, cut to 4 layers and a small vocabulary; "cache-path"
    has no MLP."""
    if name not in _SHAPES:
        raise ConfigError(f"unknown shape {name!r}; use reference, {', '.join(_SHAPES)}")
    hidden, heads, head_dim, mlp = _SHAPES[name]
    return ModelConfig(
        family="llama", vocab_size=4096, hidden_size=hidden, intermediate_size=mlp or 8192, num_layers=4,
        num_heads=heads, num_kv_heads=8, head_dim=head_dim, max_position=131_072, tie_embeddings=True, use_mlp=mlp > 0,
        rope=RopeConfig(theta=500_000.0),
    )


def model_config(name: str) -> ModelConfig:
    """Returns the configuration of what `make_model` makes, without weights; raises ConfigError for an unknown name."""
    return hf_config.read_config(common.REFERENCE) if name == "reference" else shape(name)


def make_model(name: str, dtype: str = "float32") -> kvjax.LLM:
    """Makes the reference model, or a shape with random weights.

    Args:
      name: "reference", or a name of `shape`.
      dtype: of the weights.

    Returns:
      The model; one of random weights has no tokenizer.

    Raises:
      ConfigError: the name is unknown.
    """
    if name == "reference":
        return common.load_model("", dtype)
    return kvjax.LLM(shape(name), random_params(shape(name), dtype))


def random_params(config: ModelConfig, dtype: str = "float32"):
    """Returns normal weights of a size that keeps activations steady, with norms around one."""
    token = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), token, token)["params"]
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(leaf.shape, np.float32) * _WEIGHT + (leaf.ndim == 1) for leaf in leaves]
    arrays = [jnp.asarray(array, dtype) for array in arrays]
    return jax.tree.unflatten(tree, arrays)


def key_variance(config: ModelConfig) -> float:
    """Returns the variance of the numbers of a key that random weights make of a hidden state of numbers around one."""
    return config.hidden_size * _WEIGHT**2


def keys(config: ModelConfig, tokens: int, seed: int, run: float = 1.0):
    """Makes keys and values of one layer: clumps of nearby keys that drift along the sequence.

    The keys have the variance of keys that random weights make of tokens (`key_variance`), half of it within clumps.
    Decoded keys then join clusters as those of a text do: for 100 of them DynaKV splits 2 to 8 clusters, and 3 in real
    text. With tighter clumps each decoded key would be an outlier, and most of them would split a cluster.

    Args:
      config: the model's shape.
      tokens: T.
      seed: of the random numbers.
      run: mean number of neighbouring tokens of one clump.

    Returns:
      Keys and values, each [1, T, K, D].
    """
    rng = np.random.default_rng(seed)
    heads, size = config.num_kv_heads, config.head_dim
    spread = np.float32((key_variance(config) / 2) ** 0.5)
    centres = spread * rng.standard_normal((256, heads, size), np.float32)
    clump = rng.integers(0, 256, tokens)
    if run > 1:
        clump = clump[np.cumsum(rng.random(tokens) < 1 / run) - 1]
    key = centres[clump] + spread * rng.standard_normal((tokens, heads, size), np.float32)
    key += np.linspace(0, 0.5, tokens, dtype=np.float32)[:, None, None]
    return jnp.asarray(key[None]), jnp.asarray(rng.standard_normal((1, tokens, heads, size), np.float32))


def check_build(model: ModelConfig, settings, context: int) -> None:
    """Raises ConfigError for a method that needs a prompt's queries, which made-up prompts do not have; computes
    nothing."""
    method = common.make_method(settings, common.NOT_FIELDS)
    plan = make_plan(model, method, 1, context, common.dtype_of(settings))
    i = next(i for i, layer in enumerate(plan.layers) if layer.method == plan.layers[-1].method and not layer.follows)

    def build(key, length):
        return prefill.fill(plan, i, Prompts(key, key, length), None, None, Slots())

    key = jax.ShapeDtypeStruct((1, context, model.num_kv_heads, model.head_dim), jnp.float32)
    try:
        jax.eval_shape(build, key, jax.ShapeDtypeStruct((1,), jnp.int32))
    except ConfigError as cause:
        raise ConfigError(f"{common.label_of(settings)} cannot be timed on made-up prompts, which have no queries: "
                          f"{cause}") from cause


def filled_cache(
    llm, method, context: int, steps: int, store, slots: Slots, batch: int = 1, dtype: str = "float32",
    copies: bool = False, run: float = 1.0,
):
    """Fills a cache with made-up tokens and times the build of an index.

    Args:
      llm: the model.
      method: the cache's method.
      context: made-up tokens per sequence.
      steps: tokens that will follow.
      store: where blocks go; None = memory.
      slots: how a store's blocks are kept.
      batch: sequences.
      dtype: type of keys and values.
      copies: whether layers of equal plans are copies of the first of them; in memory only.
      run: see `keys`.

    Returns:
      Plan, state, branch (None in memory), and the seconds in which one layer's index was built: the fastest of the
      layers that have the last one's method and select for themselves.
    """
    plan = make_plan(llm.config, method, batch, context + steps, dtype)
    branch = store.create(store_geometry(plan), "throughput") if store is not None else None
    layers, seconds, length = [], [], jnp.full(batch, context, jnp.int32)
    for i in range(llm.config.num_layers):
        twin = plan.layers.index(plan.layers[i])
        if copies and twin < i:
            layers.append(jax.tree.map(jnp.copy, layers[twin]))
            continue
        pairs = [keys(llm.config, context, i + b * llm.config.num_layers, run) for b in range(batch)]
        key, value = (jnp.concatenate(rows) for rows in zip(*pairs, strict=True))
        started = time.perf_counter()
        leader = layers[-1].state if plan.layers[i].follows else None
        layers.append(jax.block_until_ready(
            prefill.fill(plan, i, Prompts(key, value, length), leader, branch, slots)
        ))
        if plan.layers[i].method == plan.layers[-1].method and not plan.layers[i].follows:
            seconds.append(time.perf_counter() - started)
    if branch is not None:
        branch.settle()  # reads wait for pending writes, of which most steps of a decode have none
    ref = StoreRef(jnp.int32(branch.handle if branch else -1), jnp.int32(0))
    layers = layer_offload.offload_all(slots.offload, layers) if slots.offload else tuple(layers)
    return plan, State(layers, length, ref), branch, float(np.min(seconds))
