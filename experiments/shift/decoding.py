"""Decoding of a batch of texts with one strategy, and windows of steps recorded along the way."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

import kvjax
from experiments import common
from kvjax.cache.fill import Prompts, empty_state, fill_memory
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import Method
from kvjax.inference import decode, prefill, sampling
from kvjax.inference.plan import Plan, State, make_plan
from kvjax.inference.sampling import Sampling


def settings_of(strategy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a strategy's cache method, as a configuration has them."""
    if strategy == "full":
        return {"name": "full"}
    given = dict(settings)
    if strategy == "no_cluster":
        of_all = {field.name for field in dataclasses.fields(Method)} - {"aggregation"}  # which is for clusters here
        return {"name": "oracle", **{name: value for name, value in given.items() if name in of_all}}
    return {"name": "dynakv", **given, "update": "static" if strategy == "global" else strategy}


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


@functools.partial(jax.jit, static_argnums=(0, 3))
def _reclustered(plan: LayerPlan, cache: LayerCache, length, tokens):
    key, value, _ = in_token_order(plan, cache, tokens)
    return fill_memory(plan, empty_state(plan, key.shape[0]), Prompts(key, value, length))


def recluster(plan: Plan, state: State) -> State:
    """Returns the cache with k-means over all of its keys, as if all decoded tokens had been in the prompt."""
    layers = [
        _reclustered(layer, cache, state.length, plan.capacity)
        for layer, cache in zip(plan.layers, state.layers, strict=True)
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
    retrieved: list[np.ndarray]  # [S, B, K, M] blocks
    counts: list[np.ndarray]  # [S + 1, B, K, NB] rows of each block, before the first step and after each


class Decoding:
    """One strategy over a batch of texts; in mode `free`, sampled tokens are written into `tokens`."""

    def __init__(self, llm: kvjax.LLM, strategy: str, tokens: np.ndarray, mode: str, config):
        self.llm, self.strategy, self.mode, self.config = llm, strategy, mode, config
        self.tokens, self.prompt = tokens.copy(), config.prompt
        method = common.make_method(settings_of(strategy, config.method))
        self.plan = make_plan(llm.config, method, *tokens.shape)
        length = jnp.full(len(tokens), self.prompt, jnp.int32)
        self.state, self.logits = prefill.prefill(self.plan, llm.params, tokens[:, : self.prompt], length)

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
        if self.strategy == "global":
            self.state = recluster(self.plan, self.state)
        counts, steps = [self._counts()], []
        for step in range(start, start + self.config.steps):
            done = self._step(step)
            retrieved = [layer.state.loaded[..., :-1] for layer in done.state.layers]  # the last block is forced
            steps.append(jax.device_get((
                done.logits, [r.q for r in done.reports], [r.selected for r in done.reports], retrieved,
            )))
            counts.append(self._counts())
        logits, queries, selected, retrieved = zip(*steps, strict=True)
        by_layer = [[np.stack(layer) for layer in zip(*part, strict=True)] for part in (queries, selected, retrieved)]
        counts = [np.stack(layer) for layer in zip(*counts, strict=True)]
        return Window(start, self.state, np.stack(logits), *by_layer, counts)

    def _counts(self):
        return [np.array(layer.state.count) for layer in self.state.layers]  # copies: the next step donates the state

    def _step(self, step: int) -> decode.Step:
        if self.strategy == "global" and step % self.prompt == 0 and step:
            self.state = recluster(self.plan, self.state)
        if self.mode == "free":
            key = jax.random.fold_in(jax.random.key(self.config.seed), step)
            drawn = sampling.sample(Sampling(self.config.temperature), self.logits, key)
            self.tokens[:, self.prompt + step] = np.asarray(drawn)
        column = self.tokens[:, self.prompt + step]
        done = decode.step(self.plan, self.llm.params, self.state, column, driver="fused", donate=True)
        self.state, self.logits = done.state, done.logits
        return done


def continued(llm: kvjax.LLM, tokens: np.ndarray, config) -> np.ndarray:
    """Returns the same prompts, continued with tokens that the model samples with its full cache."""
    return Decoding(llm, "full", tokens, "free", config).texts()


def window_starts(config: ml_collections.ConfigDict) -> list[int]:
    """Returns the step at which each checkpoint's window starts; it ends at the checkpoint, except that of checkpoint
    0."""
    return [max(0, c * config.prompt - config.steps) for c in config.checkpoints]
