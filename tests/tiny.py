"""A small model with random weights, and prompts for it: for tests of what happens around a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.inference import decode, prefill
from kvjax.inference.plan import Slots, make_plan, store_geometry
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Transformer

CONFIG = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=128,
)
CAPACITY, PROMPT = 96, (40, 23)


def make_params(config=CONFIG, seed=1, sharper=3):
    """Random parameters; matrices are so many times as large as at init.

    Array by array: one program for all of them takes seconds to compile, for each model anew.
    """
    dummy = jnp.zeros((1, 4), jnp.int32)
    tree = Transformer(config).init(jax.random.key(seed), dummy, dummy)["params"]
    return jax.tree.map(lambda leaf: leaf * sharper if leaf.ndim == 2 else leaf, tree)


def make_tokens():
    return np.random.default_rng(0).integers(0, 64, (2, CAPACITY)).astype(np.int32)


def start(params, tokens, method, store=None, config=CONFIG, **slots):
    plan = make_plan(config, method, 2, CAPACITY)
    branch = store.create(store_geometry(plan), "test") if store else None
    length = jnp.asarray(PROMPT, jnp.int32)
    state, logits = prefill.prefill(plan, params, tokens[:, : max(PROMPT)], length, branch, Slots(**slots))
    return plan, state, logits, branch


def decoded(plan, params, state, tokens, steps, driver="staged"):
    """The last state and logits `[steps, B, V]` after each of the next tokens."""
    out = []
    for i in range(steps):
        fed = tokens[np.arange(2), np.asarray(PROMPT) + i]
        done = decode.step(plan, params, state, fed, driver=driver, donate=True)
        state = done.state
        out.append(np.asarray(done.logits))
    return state, np.stack(out)


def through_the_cache(llm, tokens, start, driver="staged", **settings):
    """Logits `[B, T - start, V]` of a prompt of `start` tokens and of all others but the last, one at a time."""
    cache = llm.prefill(tokens[:, :start].tolist(), **settings)
    logits = [cache.logits]
    llm.score(tokens[:, start:].tolist(), cache, driver=driver, observer=lambda step, _: logits.append(step.logits))
    return np.stack(logits, 1)


def drawn(outline, rng):
    """Arrays of noise in the place of an outline's."""

    def noise(leaf):
        bits = rng.integers(0, 2, leaf.shape) if leaf.dtype == bool else rng.normal(0, 99, leaf.shape)
        return jax.device_put(np.asarray(bits).astype(leaf.dtype))

    return jax.tree.map(noise, outline)


def dense(params, tokens, config=CONFIG):
    """Logits of every position by one forward pass."""
    return np.asarray(_forward(config.for_length(tokens.shape[-1]), params, tokens))


@functools.partial(jax.jit, static_argnums=0)
def _forward(config, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    return Transformer(config).apply({"params": params}, tokens, positions)


def temporaries(function, donated) -> int:
    """Bytes of temporaries of a compiled function whose argument is donated."""
    leaves, tree = jax.tree.flatten(donated)
    program = jax.jit(lambda leaves: function(jax.tree.unflatten(tree, leaves)), donate_argnums=0)
    return program.lower(leaves).compile().memory_analysis().temp_size_in_bytes
