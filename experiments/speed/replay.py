"""Replays of recorded or randomly drawn selections, for timed runs on made-up keys.

On made-up keys and random weights, groups do not come back from step to step as they do on real text. So a trained
model (the reference model if none is named) decodes real text, with the method at the same share of tokens, and the
timed run reads and attends what was selected there. The texts may be short: a long context consists of as many texts
as fit, side by side. The groups of text j are numbered from j times the groups of one text, so that groups come back
exactly as in the texts.

Only complete groups are recorded; the unfinished one is the timed run's own. A group that a text completes while it is
decoded is in memory by then; the timed run has it in its prompt and reads it once (1 to 2 % of the groups of a step).

A recording needs the model. On a machine without it, `replay.model` names the directory WORKDIR/recordings of a run
that had it.

How often groups come back depends on the model. Other rates are covered by selections drawn at a given rate, as in the
I/O times of KVSwap's tuner (appendix A.3).
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_collections
import numpy as np

import kvjax
from experiments import common
from experiments.texts import KINDS, Texts
from kvjax import _files
from kvjax.cache.method import Method
from kvjax.cache.types import Selection
from kvjax.errors import ConfigError
from kvjax.inference.plan import State
from kvjax.methods.shared.lowrank import LowRankMethod
from kvjax.models import hf_config
from kvjax.models.config import ModelConfig
from kvjax.typing import Array, Int32, pytree


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that a method with a recording can be hashed
class Recording:
    """The selection of every step; heads = 1 if all heads select the same."""

    block: np.ndarray  # int32[steps, layers, texts, heads, ranks] complete groups of each text, best first
    width: int  # groups of a text at its end: the upper bound of all group numbers


# -------------------------------------------------------------------------------------- recordings


def record(llm: kvjax.LLM, method: LowRankMethod, texts: Sequence[Sequence[int]], steps: int, ranks: int) -> Recording:
    """Decodes the last tokens of some texts and records the best complete groups of each step.

    Args:
      llm: the model.
      method: selects the groups.
      texts: token ids of texts of equal length.
      steps: tokens at the end of each text that are decoded.
      ranks: complete groups recorded per step.

    Returns:
      The recording, [steps, layers, texts, heads, ranks].

    Raises:
      ConfigError: a step selected fewer complete groups.
    """
    length, selections, heads = len(texts[0]), [], 1 if method.shared else None
    cache = llm.prefill([text[:-steps] for text in texts], method=method, capacity=length + 1)

    def note(step, tokens):
        loaded = np.stack([layer_cache.state.loaded[:, :heads] for layer_cache in step.state.layers])
        selections.append(_best_complete(loaded, method.complete_groups(int(step.state.length[0]) - 1), ranks))

    llm.score([[*text[-steps:], 0] for text in texts], cache, observer=note)  # the last token is not fed
    return Recording(np.stack(selections), method.complete_groups(length))


def _best_complete(loaded: np.ndarray, complete: int, ranks: int) -> np.ndarray:
    """Returns the first `ranks` complete groups of loaded[..., M1]."""
    order = np.argsort(loaded >= complete, axis=-1, kind="stable")[..., :ranks]
    best = np.take_along_axis(loaded, order, axis=-1)
    if best.shape[-1] < ranks or best.max() >= complete:
        raise ConfigError(f"a step cannot select {ranks} of a text's {complete} complete groups; replay longer texts, "
                          "or lower the budget")
    return best


def draw(rate: float, shape: tuple[int, int, int, int], groups: int, seed: int) -> Recording:
    """Draws selections of which each step keeps a share and replaces the rest.

    A replaced group may come back a few steps later. The result stands for one text.

    Args:
      rate: share of the selected groups that the next step keeps.
      shape: (steps, layers, heads, M).
      groups: number of groups to draw from.
      seed: of the random numbers.

    Returns:
      The recording, [steps, layers, 1, heads, M].

    Raises:
      ConfigError: there are too few groups.
    """
    rng, (steps, layers, heads, count) = np.random.default_rng(seed), shape
    fresh = _drawn_anew(rate, count, groups)
    block = np.empty((steps, layers, 1, heads, count), np.int32)
    for layer, head in np.ndindex(layers, heads):
        now = rng.permutation(groups)[:count]
        for step in range(steps):
            block[step, layer, 0, head] = now
            left = rng.permutation(count)[count - fresh :]
            now[left] = rng.choice(np.setdiff1d(np.arange(groups), now), fresh, replace=False)
    return Recording(block, groups)


def _drawn_anew(rate: float, count: int, groups: int) -> int:
    """Returns how many of `count` selected groups a step replaces; raises ConfigError for too few groups to draw
    from."""
    fresh = count - round(rate * count)
    if count + fresh > groups:
        raise ConfigError(f"a step cannot select {count} of {groups} groups, {fresh} of them new; replay at longer "
                          "contexts, or lower the budget")
    return fresh


# --------------------------------------------------------------------------------------------- play


@pytree
class Playing:
    """Index of a replay: the inner method's, and the position in the recording."""

    inner: Any  # the method's own index
    layer: Int32[Array, "*B"]
    step: Int32[Array, "*B"]  # tokens appended, plus the sequence's first step in the recording


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay(Method):
    """A method whose selections are replaced by recorded ones; `inner` selects, too, so that its work is timed.

    The unfinished group of `inner` comes first, as in its own selections. Layers and heads beyond the recorded ones
    use those again from the first, and after the last recorded step comes the first. The recording is a constant of
    the compiled programs and does not count as memory of the cache.
    """

    inner: LowRankMethod
    recording: Recording

    @property
    def name(self):
        return self.inner.name

    @property
    def head_shared(self):  # type: ignore[override]
        return self.inner.head_shared

    @property
    def fetches_alike(self):  # type: ignore[override]
        return self.inner.fetches_alike

    @property
    def placement(self):  # type: ignore[override]
        return self.inner.placement

    @property
    def selects_together(self):
        return self.inner.selects_together

    @functools.cached_property
    def table(self) -> np.ndarray:
        """Groups of all texts side by side, best first: int32[steps, layers, heads, M].

        Each text has an equal share of the M groups; where M is not divisible, some texts have one more.
        """
        texts, ranks = self.recording.block.shape[2], self.recording.block.shape[4]
        share = np.diff(np.arange(texts + 1) * groups_of(self.inner) // texts)
        block = self.recording.block + self.recording.width * np.arange(texts, dtype=np.int32)[:, None, None]
        return np.stack([block[:, :, t, :, r] for r in range(ranks) for t in range(texts) if r < share[t]], axis=-1)

    def for_model(self, folder, fingerprint, keys):
        return dataclasses.replace(self, inner=self.inner.for_model(folder, fingerprint, keys))

    def check_model(self, fingerprint):
        self.inner.check_model(fingerprint)

    def blocks(self, capacity, rows):
        return self.inner.blocks(capacity, rows)

    def weights(self, layer):
        return self.inner.weights(layer), np.int32(layer)

    def init(self, spec, weights):
        return Playing(self.inner.init(spec, weights[0]), jnp.asarray(weights[1]), jnp.int32(0))

    def build(self, spec, index, context):
        inner, placement = self.inner.build(spec, index.inner, context)
        return dataclasses.replace(index, inner=inner), placement

    def select(self, spec, index, view, q):
        own = self.inner.select(spec, index.inner, view, q).block
        steps, layers, heads, _ = self.table.shape
        played = jnp.asarray(self.table)[index.step % steps, index.layer % layers][jnp.arange(spec.kv_heads) % heads]
        first = own[:, :1]
        rows = jnp.take_along_axis(view.count, jnp.minimum(first, spec.num_blocks - 1), axis=1)
        ranked = jnp.concatenate([jnp.where(rows < spec.block_rows, first, spec.num_blocks), played], axis=1)
        missing = max(0, spec.max_blocks - ranked.shape[1])
        ranked = jnp.pad(ranked, ((0, 0), (0, missing)), constant_values=spec.num_blocks)[:, : spec.max_blocks]
        # `own` is never negative, but the compiler cannot know that, so that the method's own selection is computed.
        return Selection(jnp.where(own < 0, own, ranked))

    def append(self, spec, index, view, evicted):
        inner, placement = self.inner.append(spec, index.inner, view, evicted)
        return Playing(inner, index.layer, index.step + evicted.valid), placement


def selected_tokens(method: LowRankMethod) -> int:
    """Returns MG, the tokens of the budget without sinks and window."""
    assert method.budget is not None
    return method.budget - method.sinks - method.window


def groups_of(method: LowRankMethod) -> int:
    """Returns M, the number of complete groups that fit the budget."""
    return selected_tokens(method) // method.group


def replayed(inner: LowRankMethod, recording: Recording) -> Replay:
    """Returns the method that plays a recording of `inner`."""
    common_fields = {field.name: getattr(inner, field.name) for field in dataclasses.fields(Method)}
    return Replay(inner=inner, recording=recording, **common_fields)


def starts(method: Replay, batch: int) -> np.ndarray:
    """Returns the step of the recording at which each sequence begins, int32[B]; evenly spread, so that sequences do
    not select the same groups at the same time."""
    return (np.arange(batch) * method.table.shape[0] // batch).astype(np.int32)


def stagger(method: Replay, state: State) -> State:
    """Returns a filled cache with each sequence at its step of `starts`."""
    def begin(layer_cache):
        step = jnp.array(starts(method, state.length.shape[0]))  # an array per layer, as states are donated
        index = dataclasses.replace(layer_cache.state.index, step=step)
        return dataclasses.replace(layer_cache, state=dataclasses.replace(layer_cache.state, index=index))

    return dataclasses.replace(state, layers=tuple(begin(layer_cache) for layer_cache in state.layers))


def asked(method: Replay, layers: int, context: int, batch: int, steps: int) -> np.ndarray:
    """Computes the groups that a staggered run needs, without running it.

    Args:
      method: the replay.
      layers: layers of the timed model.
      context: tokens in the cache before the run.
      batch: B, sequences.
      steps: tokens decoded.

    Returns:
      int32[steps, layers * B * heads, M + 1] group numbers, -1 for none; heads are the recorded ones.
    """
    recorded_step = (starts(method, batch) + np.arange(steps)[:, None]) % method.table.shape[0]
    played = method.table[recorded_step][:, :, np.arange(layers) % method.table.shape[1]]
    stored = method.inner.stored_tokens(context) + np.arange(steps)
    attended = (stored % method.inner.group > 0) & method.inner.rolling_buffer
    unfinished = np.where(attended, stored // method.inner.group, -1)
    first = np.broadcast_to(unfinished[:, None, None, None, None], (*played.shape[:-1], 1))
    return np.concatenate([first, played], axis=-1).swapaxes(1, 2).reshape(steps, -1, played.shape[-1] + 1)


# ------------------------------------------------------------------------------------ configuration


def check(settings: Mapping[str, Any], config: ml_collections.ConfigDict) -> None:
    """Checks the "replay" setting of a method.

    True plays a recording (`config.replay`, see `check_texts`); a number from 0 to 1 plays groups drawn at that rate.

    Args:
      settings: the method's.
      config: the experiment's, with `contexts` and `replay`.

    Raises:
      ConfigError: the setting has another value, the method cannot be replayed, or a context is shorter than a text.
    """
    wanted = settings.get("replay", False)
    if not isinstance(wanted, bool | float) or not 0 <= wanted <= 1:
        raise ConfigError(f"replay={wanted!r} must be True, False or the share of groups that come back, such as 0.77")
    if wanted is False:
        return
    method = common.make_method(settings, common.NOT_FIELDS)
    fits = isinstance(method, LowRankMethod) and method.budget is not None and method.max_blocks is None
    if not fits or method.dense_layers or method.reuse > 1:
        raise ConfigError(f"no replay for {method.name}; use infinigen, kvswap or loki with a budget, without "
                          "max_blocks, dense layers or shared selections")
    check_texts(config.get("replay"))
    short = [context for context in config.contexts if context < config.replay.tokens]
    if wanted is True and short:
        raise ConfigError(f"contexts={tuple(short)} are shorter than a text of replay.tokens={config.replay.tokens}; "
                          "lower it, or raise contexts")


def check_texts(how: ml_collections.ConfigDict | None) -> None:
    """Checks the settings that a recording is made of.

    Args:
      how: `model`, the directory of a model (empty for the reference model) or of recordings made elsewhere; `tokens`
        of each text, of which the last `steps` are decoded; `kinds` of the texts (`experiments.texts`), used in turn;
        and `seed`.

    Raises:
      ConfigError: a setting is missing, unknown or out of range.
    """
    if how is None or set(how) != {"model", "tokens", "steps", "kinds", "seed"}:
        raise ConfigError("a replay needs replay.model, .tokens, .steps, .kinds and .seed in the configuration, and "
                          "nothing else")
    if not 0 < how.steps < how.tokens or not how.kinds or set(how.kinds) - set(KINDS):
        raise ConfigError(f"replay.steps={how.steps} must be from 1 to below replay.tokens={how.tokens}, replay.kinds="
                          f"{tuple(how.kinds)} some of {', '.join(KINDS)}")


def check_model(config: ml_collections.ConfigDict) -> None:
    """Raises CheckpointError if selections are to be recorded and the model does not exist."""
    wanted = any(settings.get("replay") is True for settings in config.methods)
    if wanted and not _recorded_elsewhere(config.replay):
        hf_config.read_config(config.replay.model or common.REFERENCE)


def check_context(settings: Mapping[str, Any], config: ml_collections.ConfigDict, context: int) -> None:
    """Raises ConfigError if a context (in tokens) has too few groups to draw from, or its recording is not among those
    that were made elsewhere."""
    wanted = settings.get("replay", False)
    if wanted is True and _recorded_elsewhere(config.replay):
        _recorded(_predictor(settings), config.replay, context // config.replay.tokens, pathlib.Path())
    if not isinstance(wanted, bool):
        method = _predictor(settings)
        _drawn_anew(wanted, groups_of(method), method.complete_groups(context))


def make(
    settings: Mapping[str, Any], config: ml_collections.ConfigDict, model: ModelConfig, context: int,
    directory: pathlib.Path,
) -> Method:
    """Makes the method of some settings, as a replay if they say so (see `check`).

    Args:
      settings: the method's.
      config: the experiment's.
      model: shape of the timed model.
      context: tokens of a sequence before the timed run.
      directory: where recordings are kept; each is made once.

    Returns:
      The method.

    Raises:
      ConfigError: there is no such method, or no recording of it can be made or found.
    """
    wanted = settings.get("replay", False)
    if wanted is False:
        return common.make_method(settings, common.NOT_FIELDS)
    method = _predictor(settings)
    if wanted is True:
        recording = _recorded(method, config.replay, context // config.replay.tokens, directory)
        return replayed(method, spread(recording, model.num_layers))
    return at_random(method, wanted, config.replay.steps, model, context, config.replay.seed)


def _predictor(settings: Mapping[str, Any]) -> LowRankMethod:
    """Returns the method of settings that are to be replayed (see `check`)."""
    method = common.make_method(settings, common.NOT_FIELDS)
    assert isinstance(method, LowRankMethod)
    return method


def at_random(method: LowRankMethod, rate: float, steps: int, model: ModelConfig, context: int, seed: int) -> Replay:
    """Returns a replay of groups drawn at random for `steps` steps, of which the share `rate` comes back at each."""
    heads = 1 if method.shared else model.num_kv_heads
    shape = (steps, model.num_layers, heads, groups_of(method))
    return replayed(method, draw(rate, shape, method.complete_groups(context), seed))


def spread(recording: Recording, layers: int) -> Recording:
    """Returns the recording cut to at most `layers` layers, evenly spread over the recorded ones."""
    recorded = recording.block.shape[1]
    kept = np.arange(layers) * recorded // layers if layers < recorded else slice(None)
    return dataclasses.replace(recording, block=recording.block[:, kept])


def selecting(method: LowRankMethod, tokens: int) -> LowRankMethod:
    """Returns the method with a budget for `tokens` tokens of complete groups, beside any unfinished group."""
    return dataclasses.replace(method, budget=tokens + method.group - 1 + method.sinks + method.window)


def draw_texts(llm: kvjax.LLM, how: ml_collections.ConfigDict, count: int) -> list[list[int]]:
    """Returns the token ids of `count` texts, of the configured kinds in turn."""
    texts, kinds = Texts(llm, how.seed), how.kinds
    return [texts.draw(kinds[i % len(kinds)], i // len(kinds), how.tokens - how.steps, how.tokens)
            for i in range(count)]


def _recorded(method: LowRankMethod, how: ml_collections.ConfigDict, texts: int, directory: pathlib.Path) -> Recording:
    """Returns the recording of `texts` texts in the directory, made if it is not there; raises ConfigError if
    recordings were made elsewhere and it is not among them."""
    ranks, share = -(-groups_of(method) // texts), selecting(method, -(-selected_tokens(method) // texts))
    made_of = repr((share, texts, ranks, sorted(item for item in how.to_dict().items() if item[0] != "model")))
    if _recorded_elsewhere(how):
        return _brought(pathlib.Path(how.model), made_of)
    llm = common.load_model(how.model)
    path = directory / f"{hashlib.sha256((llm.fingerprint + made_of).encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        _save(record(llm, share, draw_texts(llm, how, texts), how.steps, ranks), made_of, path)
    return _load(path)


def _recorded_elsewhere(how: ml_collections.ConfigDict) -> bool:
    """Returns whether `model` is a directory of recordings."""
    path = pathlib.Path(how.model)
    return bool(how.model) and not (path / "config.json").exists() and any(path.glob("*.npz"))


def _brought(directory: pathlib.Path, made_of: str) -> Recording:
    """Returns the recording in the directory that was made of `made_of`, whatever the model."""
    matching = [path for path in sorted(directory.glob("*.npz")) if _made_of(path) == made_of]
    if len(matching) != 1:
        raise ConfigError(f"{len(matching)} recordings in {directory} are of {made_of}; give exactly one, of one "
                          "model, from WORKDIR/recordings of a run that had it")
    return _load(matching[0])


def _made_of(path: pathlib.Path) -> str | None:
    """Returns the settings that a recording was made of, without the model; None in older files, which do not have
    them."""
    with np.load(path) as kept:
        return str(kept["made_of"]) if "made_of" in kept else None


def _load(path: pathlib.Path) -> Recording:
    with np.load(path) as kept:
        return Recording(kept["block"], int(kept["width"]))


def _save(recording: Recording, made_of: str, path: pathlib.Path) -> None:
    """Writes the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _files.replacing(path) as fresh, fresh.open("wb") as file:
        np.savez_compressed(file, block=recording.block, width=recording.width, made_of=made_of)
