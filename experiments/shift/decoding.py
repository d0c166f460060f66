"""Decoding of a batch of texts with one strategy, and windows of steps recorded along the way."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

import kvjax
from experiments import common
from kvjax.cache.fill import Prompts, empty_state, fill_memory
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.errors import ConfigError
from kvjax.inference import decode, prefill, sampling
from kvjax.inference.plan import Plan, State, make_plan
from kvjax.inference.sampling import Sampling

FITTED = "fitted"  # value of `adapters` for those that the study fits before it starts


def settings_of(strategy: str, config: ml_collections.ConfigDict, adapters: str = "") -> dict[str, Any]:
    """Returns the settings of a strategy's cache method.

    Args:
      strategy: a key of `config.structures`, or "full".
      config: the study's; `config.method` has settings that all methods share which have them.
      adapters: file of fitted adapters, for strategies that use some; empty = none yet.
    """
    if strategy == "full":
        return {"name": "full"}
    own = {name: value for name, value in config.structures[strategy].items() if name != "refit"}
    if own.get("adapters") == FITTED:
        own["adapters"] = adapters or None
    fields = _fields(own["name"])
    return {"name": own["name"], **{name: value for name, value in config.method.items() if name in fields}, **own}


def _fields(name: str) -> set[str]:
    """Returns the settings of a method; raises ConfigError if there is no such method."""
    return {field.name for field in dataclasses.fields(kvjax.METHODS[name])}


def check_shared(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for a setting in `config.method` that no method of `config.structures` has."""
    known = set().union(*(_fields(structure.name) for structure in config.structures.values()))
    for name in config.method:
        if name not in known:
            raise ConfigError(f"method.{name} is a setting of no method in structures; leave it out")


@functools.partial(jax.jit, static_argnums=(0, 2))
def in_token_order(plan: LayerPlan, cache: LayerCache, tokens: int):
    """Returns key and value [B, T, K, D] and cluster [B, T, K] of every token; cluster NB = not in a block."""
    state, none = cache.state, plan.spec.num_blocks
    batch, heads, blocks, rows = state.pos.shape
    everything = cache.pool.everything(jnp.broadcast_to(jnp.arange(blocks), (batch, heads, blocks)))
    key, value = dataclasses.replace(everything[0], smoothing=state.smoothing).unpacked(), everything[1].unpacked()
    owner = getattr(state.index, "cluster", jnp.broadcast_to(jnp.arange(blocks), (batch, heads, blocks)))
    owner = jnp.concatenate([jnp.repeat(owner, rows, axis=-1), jnp.full(state.tail.pos.shape, none)], axis=-1)
    pos = jnp.concatenate([state.pos.reshape(batch, heads, -1), state.tail.pos], axis=-1)
    place = (jnp.arange(batch)[:, None, None], jnp.where(pos >= 0, pos, tokens), jnp.arange(heads)[:, None])

    def ordered(stored, tail):
        empty = jnp.zeros((batch, tokens, heads, stored.shape[-1]))
        return empty.at[place].set(jnp.concatenate([stored, tail], axis=2), mode="drop")

    cluster = jnp.full((batch, tokens, heads), none).at[place].set(owner, mode="drop")
    return ordered(key, state.tail.key), ordered(value, state.tail.value), cluster


@functools.partial(jax.jit, static_argnums=(0, 4))
def _refitted(plan: LayerPlan, cache: LayerCache, length, weights, tokens):
    key, value, _ = in_token_order(plan, cache, tokens)
    return fill_memory(plan, empty_state(plan, key.shape[0], weights=weights), Prompts(key, value, length))


def refit(plan: Plan, state: State) -> State:
    """Returns the cache with everything fitted to all of its keys, as if all decoded tokens had been in the prompt."""
    layers = [
        _refitted(layer, cache, state.length, layer.method.weights(i), plan.capacity)
        for i, (layer, cache) in enumerate(zip(plan.layers, state.layers, strict=True))
    ]
    return dataclasses.replace(state, layers=tuple(layers))


@dataclasses.dataclass(frozen=True)
class Window:
    """Recorded data of the S steps of one checkpoint; lists are over layers."""

    start: int  # decoded tokens before the first step
    state: State  # after the last step
    logits: np.ndarray  # [S, B, V]
    queries: list[np.ndarray]  # [S, B, K, G, D]
    selected: list[np.ndarray]  # [S, B, K, N]
    retrieved: list[np.ndarray]  # [S, B, K, M] blocks; no layers if there are no clusters
    counts: list[np.ndarray]  # [S + 1, B, K, NB] rows of each block, before the first step and after each; likewise


class Decoding:
    """One strategy over a batch of texts; in mode `free`, sampled tokens are written into `tokens`."""

    def __init__(self, llm: kvjax.LLM, strategy: str, tokens: np.ndarray, mode: str, config, adapters: str = ""):
        self.llm, self.mode, self.config = llm, mode, config
        self.refits = strategy != "full" and config.structures[strategy].get("refit", False)
        self.tokens, self.prompt = tokens.copy(), config.prompt
        method = common.make_method(settings_of(strategy, config, adapters))
        self.plan = make_plan(llm.config, method, *tokens.shape)
        length = jnp.full(len(tokens), self.prompt, jnp.int32)
        self.state, self.logits = prefill.prefill(self.plan, llm.params, tokens[:, : self.prompt], length)
        self.clustered = has_clusters(self.state)

    def windows(self, starts: list[int]) -> Iterator[Window]:
        """Decodes, and yields a window of steps from each start on."""
        position = 0
        for start in starts:
            for step in range(position, start):
                self._step(step)
            yield self._record(start)
            position = start + self.config.steps

    def texts(self) -> np.ndarray:
        """Decodes to the end; returns the prompts with the tokens that followed."""
        for step in range(self.tokens.shape[1] - self.prompt):
            self._step(step)
        return self.tokens

    def _record(self, start: int) -> Window:
        if self.refits:
            self.state = refit(self.plan, self.state)
        counts, steps = [self._counts()], []
        for step in range(start, start + self.config.steps):
            done = self._step(step)
            layers = done.state.layers if self.clustered else ()
            retrieved = [layer.state.loaded[..., :-1] for layer in layers]  # the last block is forced
            steps.append(jax.device_get((
                done.logits, [r.q for r in done.reports], [r.selected for r in done.reports], retrieved,
            )))
            counts.append(self._counts())
        logits, queries, selected, retrieved = zip(*steps, strict=True)
        by_layer = [[np.stack(layer) for layer in zip(*part, strict=True)] for part in (queries, selected, retrieved)]
        counts = [np.stack(layer) for layer in zip(*counts, strict=True)]
        return Window(start, self.state, np.stack(logits), *by_layer, counts)

    def _counts(self):
        layers = self.state.layers if self.clustered else ()
        return [np.array(layer.state.count) for layer in layers]  # copies: the next step donates the state

    def _step(self, step: int) -> decode.Step:
        if self.refits and step % self.prompt == 0 and step:
            self.state = refit(self.plan, self.state)
        if self.mode == "free":
            key = jax.random.fold_in(jax.random.key(self.config.seed), step)
            drawn = sampling.sample(Sampling(self.config.temperature), self.logits, key)
            self.tokens[:, self.prompt + step] = np.asarray(drawn)
        column = self.tokens[:, self.prompt + step]
        done = decode.step(self.plan, self.llm.params, self.state, column, driver="fused", donate=True)
        self.state, self.logits = done.state, done.logits
        return done


def has_clusters(state: State) -> bool:
    """Returns whether any layer groups its tokens in clusters."""
    return any(hasattr(layer.state.index, "cluster") for layer in state.layers)


def continued(llm: kvjax.LLM, tokens: np.ndarray, config) -> np.ndarray:
    """Returns the same prompts, continued with tokens that the model samples with its full cache."""
    return Decoding(llm, "full", tokens, "free", config).texts()


def window_starts(config: ml_collections.ConfigDict) -> list[int]:
    """Returns the step at which each checkpoint's window starts; it ends at the checkpoint, except that of checkpoint
    0."""
    return [max(0, c * config.prompt - config.steps) for c in config.checkpoints]
