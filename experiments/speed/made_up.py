"""Models with random weights and caches of made-up keys, for times of any shape and context.

Keys are in clumps that drift along the sequence (random weights make no meaningful ones), so that a context of any
length costs no dense prefill.
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

_SHAPES = {  # hidden size, query heads, head size and MLP size, 0 without
    "llama-1b-4l": (2048, 32, 64, 8192), "llama-3b-4l": (3072, 24, 128, 8192), "llama-8b-4l": (4096, 32, 128, 14_336),
    "cache-path": (2048, 32, 64, 0), "cache-path-8b": (4096, 32, 128, 0),
}
_WEIGHT = 0.02  # standard deviation of random weights


def shape(name: str) -> ModelConfig:
    """The random-weight shapes: Llama-3.2-1B and 3B and Llama-3-8B cut to 4 layers and a small vocabulary; "cache-path"
    is without MLP."""
    if name not in _SHAPES:
        raise ConfigError(f"unknown shape {name!r}; use reference, {', '.join(_SHAPES)}")
    hidden, heads, head_dim, mlp = _SHAPES[name]
    return ModelConfig(
        family="llama", vocab_size=4096, hidden_size=hidden, intermediate_size=mlp or 8192, num_layers=4,
        num_heads=heads, num_kv_heads=8, head_dim=head_dim, max_position=131_072, tie_embeddings=True, use_mlp=mlp > 0,
        rope=RopeConfig(theta=500_000.0),
    )


def model_config(name: str) -> ModelConfig:
    """Of what `make_model` makes, without its weights. Raises ConfigError for an unknown name."""
    return hf_config.read_config(common.REFERENCE) if name == "reference" else shape(name)


def make_model(name: str, dtype: str = "float32") -> kvjax.LLM:
    """The reference model, or a shape with random weights; `dtype` is that of its weights."""
    if name == "reference":
        return common.load_model("", dtype)
    return kvjax.LLM(shape(name), random_params(shape(name), dtype))


def random_params(config: ModelConfig, dtype: str = "float32"):
    """Normal weights of the size that keeps activations steady, norms around one."""
    token = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), token, token)["params"]
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(leaf.shape, np.float32) * _WEIGHT + (leaf.ndim == 1) for leaf in leaves]
    made = [jnp.asarray(one, dtype) for one in made]
    return jax.tree.unflatten(tree, made)


def key_variance(config: ModelConfig) -> float:
    """Of each number of a key that random weights make of a hidden state whose numbers are around one."""
    return config.hidden_size * _WEIGHT**2


def keys(config: ModelConfig, tokens: int, seed: int, run: float = 1.0):
    """Keys and values `[1, T, K, D]` of one layer: clumps of nearby keys that drift. `run` neighbours on average are of
    one clump.

    They spread as the keys that random weights make of tokens (`key_variance`), half of it within clumps. So decoded
    keys join clusters as those of a text do: for 100 of them DynaKV splits 2 to 8 clusters, and 3 in real text. To
    tighter clumps each decoded key is an outlier, and most of them split a cluster.
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
    """Raises ConfigError for a method that wants to see a prompt's queries, which made-up prompts do not have. Nothing
    is computed."""
    method = common.make_method(settings, common.NOT_FIELDS)
    plan = make_plan(model, method, 1, context, common.dtype_of(settings))
    i = next(i for i, one in enumerate(plan.layers) if one.method == plan.layers[-1].method and not one.follows)

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
    """A plan and a state that holds `context` made-up tokens per sequence; seconds of building a layer's index, of the
    fastest layer that has the last one's method and is led by none.

    With `copies`, and in memory only, layers that are planned alike are copies of the first of them. `run`: see
    `keys`.
    """
    plan = make_plan(llm.config, method, batch, context + steps, dtype)
    branch = store.create(store_geometry(plan), "throughput") if store is not None else None
    layers, seconds, length = [], [], jnp.full(batch, context, jnp.int32)
    for i in range(llm.config.num_layers):
        twin = plan.layers.index(plan.layers[i])
        if copies and twin < i:
            layers.append(jax.tree.map(jnp.copy, layers[twin]))
            continue
        made = [keys(llm.config, context, i + b * llm.config.num_layers, run) for b in range(batch)]
        key, value = (jnp.concatenate(rows) for rows in zip(*made, strict=True))
        started = time.perf_counter()
        leader = layers[-1].state if plan.layers[i].follows else None
        layers.append(jax.block_until_ready(
            prefill.fill(plan, i, Prompts(key, value, length), leader, branch, slots)
        ))
        if plan.layers[i].method == plan.layers[-1].method and not plan.layers[i].follows:
            seconds.append(time.perf_counter() - started)
    if branch is not None:
        branch.settle()  # reads wait for what is still being written, which is nothing in most of a decode
    ref = StoreRef(jnp.int32(branch.handle if branch else -1), jnp.int32(0))
    layers = layer_offload.offload_all(slots.offload, layers) if slots.offload else tuple(layers)
    return plan, State(layers, length, ref), branch, float(np.min(seconds))
