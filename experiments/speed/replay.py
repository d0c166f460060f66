"""Timed runs that select what was selected elsewhere: recordings, and a method that plays them.

On made-up keys and random weights, groups do not come back from step to step as they do on real text. So a trained
model, the reference model if none is named, decodes real text, with the method at the same share of tokens, and what it
selected is what the timed run reads and attends. Its contexts may be short: a long one is as many texts as fit, side by
side. Text j's groups are numbered from j times the groups of one text, so that groups come back exactly as in the
texts.

Recorded are complete groups; an unfinished one is the timed run's own. A group that a text completes while it is
decoded is in memory by then; in the timed run, whose prompt has it, it is read once (1 to 2 % of what a step needs).

Recording needs the model. Where it is not, `replay.model` is the directory WORKDIR/recordings of a run that had it.

How often groups come back depends on the model. What another rate would give is seen with selections that are drawn at
that rate, as KVSwap's tuner takes its I/O times (appendix A.3).
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


@dataclasses.dataclass(frozen=True, eq=False)  # equal to itself alone, so that a method that has it can be hashed
class Recording:
    """What was selected in each step; heads = 1 where all select the same."""

    block: np.ndarray  # int32[steps, layers, texts, heads, ranks] complete groups of each text, best first
    width: int  # groups of a text at its end: all numbers are smaller


# -------------------------------------------------------------------------------------- recordings


def record(llm: kvjax.LLM, method: LowRankMethod, texts: Sequence[Sequence[int]], steps: int, ranks: int) -> Recording:
    """Decodes the last `steps` tokens of equally long texts and notes each step's `ranks` best complete groups."""
    length, found, heads = len(texts[0]), [], 1 if method.shared else None
    cache = llm.prefill([text[:-steps] for text in texts], method=method, capacity=length + 1)

    def note(step, tokens):
        loaded = np.stack([one.state.loaded[:, :heads] for one in step.state.layers])
        found.append(_best_complete(loaded, method.complete_groups(int(step.state.length[0]) - 1), ranks))

    llm.score([[*text[-steps:], 0] for text in texts], cache, observer=note)  # the last token is not fed
    return Recording(np.stack(found), method.complete_groups(length))


def _best_complete(loaded: np.ndarray, complete: int, ranks: int) -> np.ndarray:
    """The first `ranks` of loaded[..., M1] that are complete."""
    order = np.argsort(loaded >= complete, axis=-1, kind="stable")[..., :ranks]
    best = np.take_along_axis(loaded, order, axis=-1)
    if best.shape[-1] < ranks or best.max() >= complete:
        raise ConfigError(f"a text of {complete} complete groups cannot select {ranks}; replay longer texts, or lower "
                          "the budget")
    return best


def draw(rate: float, shape: tuple[int, int, int, int], groups: int, seed: int) -> Recording:
    """A selection of [steps, layers, heads, M] of which each step keeps the share `rate` and draws the rest anew.

    As one text of so many groups; what is drawn may have been selected before, a few steps ago.
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
    """How many of `count` selected groups a step draws. Raises ConfigError where there are too few to draw from."""
    fresh = count - round(rate * count)
    if count + fresh > groups:
        raise ConfigError(f"of {groups} groups no step can select {count}, {fresh} of them anew; replay at longer "
                          "contexts, or lower the budget")
    return fresh


# --------------------------------------------------------------------------------------------- play


@pytree
class Playing:
    inner: Any  # the method's own index
    layer: Int32[Array, "*B"]
    step: Int32[Array, "*B"]  # tokens appended, and where the sequence started in the recording


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay(Method):
    """`inner`, which selects and is not heeded: it is what was recorded that is read and attended.

    Its own unfinished group comes first, as ever. More layers and heads than recorded take them in turn, and after the
    last recorded step comes the first. The recording is a constant of compiled programs, no memory of the cache.
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
        """int32[steps, layers, heads, M] groups of all texts side by side, best first.

        A text has its share of the M groups: where they cannot be shared out evenly, some texts have one more.
        """
        texts, ranks = self.recording.block.shape[2], self.recording.block.shape[4]
        share = np.diff(np.arange(texts + 1) * groups_of(self.inner) // texts)
        block = self.recording.block + self.recording.width * np.arange(texts, dtype=np.int32)[:, None, None]
        return np.stack([block[:, :, t, :, r] for r in range(ranks) for t in range(texts) if r < share[t]], axis=-1)

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
        # No number is negative, but the compiler cannot know that: the method's own choice is made all the same.
        return Selection(jnp.where(own < 0, own, ranked))

    def append(self, spec, index, view, evicted):
        inner, placement = self.inner.append(spec, index.inner, view, evicted)
        return Playing(inner, index.layer, index.step + evicted.valid), placement


def selected_tokens(method: LowRankMethod) -> int:
    """MG: the budget without sinks and window."""
    assert method.budget is not None
    return method.budget - method.sinks - method.window


def groups_of(method: LowRankMethod) -> int:
    """M, complete groups that fit the budget."""
    return selected_tokens(method) // method.group


def replayed(inner: LowRankMethod, recording: Recording) -> Replay:
    """The method that plays a recording of `inner`."""
    common_fields = {field.name: getattr(inner, field.name) for field in dataclasses.fields(Method)}
    return Replay(inner=inner, recording=recording, **common_fields)


def starts(method: Replay, batch: int) -> np.ndarray:
    """int32[B] step of the recording at which each sequence begins: spread evenly, so that they do not go in step."""
    return (np.arange(batch) * method.table.shape[0] // batch).astype(np.int32)


def stagger(method: Replay, state: State) -> State:
    """A filled cache whose sequences begin at their `starts`."""
    def begin(one):
        step = jnp.array(starts(method, state.length.shape[0]))  # each layer's own, as states are donated
        index = dataclasses.replace(one.state.index, step=step)
        return dataclasses.replace(one, state=dataclasses.replace(one.state, index=index))

    return dataclasses.replace(state, layers=tuple(begin(one) for one in state.layers))


def asked(method: Replay, layers: int, context: int, batch: int, steps: int) -> np.ndarray:
    """int32[steps, layers * batch * heads, M + 1] groups that a staggered run needs; -1 = none.

    Computed without running it. `heads` are the recorded ones.
    """
    at = (starts(method, batch) + np.arange(steps)[:, None]) % method.table.shape[0]
    played = method.table[at][:, :, np.arange(layers) % method.table.shape[1]]
    stored = method.inner.stored_tokens(context) + np.arange(steps)
    attended = (stored % method.inner.group > 0) & method.inner.rolling_buffer
    unfinished = np.where(attended, stored // method.inner.group, -1)
    first = np.broadcast_to(unfinished[:, None, None, None, None], (*played.shape[:-1], 1))
    return np.concatenate([first, played], axis=-1).swapaxes(1, 2).reshape(steps, -1, played.shape[-1] + 1)


# ------------------------------------------------------------------------------------ configuration


def check(settings: Mapping[str, Any], config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError where a method's "replay" cannot be had.

    True plays a recording (`config.replay`, see `check_texts`), a number from 0 to 1 what is drawn at that rate.
    """
    wanted = settings.get("replay", False)
    if not isinstance(wanted, bool | float) or not 0 <= wanted <= 1:
        raise ConfigError(f"replay={wanted!r} must be True, False or a share of groups that come back, such as 0.77")
    if wanted is False:
        return
    method = common.make_method(settings, common.NOT_FIELDS)
    fits = isinstance(method, LowRankMethod) and method.budget is not None and method.max_blocks is None
    if not fits or method.dense_layers or method.reuse > 1:
        raise ConfigError(f"no replay for {method.name}: it is for infinigen, kvswap and loki with a budget, without "
                          "max_blocks, dense layers or shared selections")
    check_texts(config.get("replay"))
    short = [context for context in config.contexts if context < config.replay.tokens]
    if wanted is True and short:
        raise ConfigError(f"contexts={tuple(short)} are shorter than a text of replay.tokens={config.replay.tokens}")


def check_texts(how: ml_collections.ConfigDict | None) -> None:
    """Raises ConfigError unless `how` has what a recording is made of: the directory of the `model`, empty for the
    reference model, or of recordings that were made elsewhere, `tokens` of each text, of which the last `steps` are
    decoded, the `kinds` of texts in turn (`experiments.texts`), and a `seed`."""
    if how is None or set(how) != {"model", "tokens", "steps", "kinds", "seed"}:
        raise ConfigError("a replay needs replay.model, .tokens, .steps, .kinds and .seed in the configuration, and no "
                          "more")
    if not 0 < how.steps < how.tokens or not how.kinds or set(how.kinds) - set(KINDS):
        raise ConfigError(f"replay.steps={how.steps} must be from 1 to below replay.tokens={how.tokens}, replay.kinds="
                          f"{tuple(how.kinds)} some of {', '.join(KINDS)}")


def check_model(config: ml_collections.ConfigDict) -> None:
    """Raises CheckpointError where a method's selections are to be recorded and there is no such model."""
    wanted = any(settings.get("replay") is True for settings in config.methods)
    if wanted and not _recorded_elsewhere(config.replay):
        hf_config.read_config(config.replay.model or common.REFERENCE)


def check_context(settings: Mapping[str, Any], config: ml_collections.ConfigDict, context: int) -> None:
    """Raises ConfigError where a context of so many tokens has too few groups for a selection to be drawn, or
    recordings were made elsewhere and the one for it is missing."""
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
    """The method of these settings for contexts of so many tokens, as a replay if they say so (see `check`).

    A recording is made once and kept in the directory.
    """
    wanted = settings.get("replay", False)
    if wanted is False:
        return common.make_method(settings, common.NOT_FIELDS)
    method = _predictor(settings)
    if wanted is True:
        found = _recorded(method, config.replay, context // config.replay.tokens, directory)
        return replayed(method, spread(found, model.num_layers))
    return at_random(method, wanted, config.replay.steps, model, context, config.replay.seed)


def _predictor(settings: Mapping[str, Any]) -> LowRankMethod:
    """The method of settings that are to be replayed (see `check`)."""
    method = common.make_method(settings, common.NOT_FIELDS)
    assert isinstance(method, LowRankMethod)
    return method


def at_random(method: LowRankMethod, rate: float, steps: int, model: ModelConfig, context: int, seed: int) -> Replay:
    """A replay of groups drawn at random for so many steps, of which that share comes back."""
    heads = 1 if method.shared else model.num_kv_heads
    shape = (steps, model.num_layers, heads, groups_of(method))
    return replayed(method, draw(rate, shape, method.complete_groups(context), seed))


def spread(recording: Recording, layers: int) -> Recording:
    """The recording of at most so many layers, evenly spread over those of its model."""
    recorded = recording.block.shape[1]
    kept = np.arange(layers) * recorded // layers if layers < recorded else slice(None)
    return dataclasses.replace(recording, block=recording.block[:, kept])


def selecting(method: LowRankMethod, tokens: int) -> LowRankMethod:
    """The method with a budget for so many tokens of complete groups, whatever it has unfinished."""
    return dataclasses.replace(method, budget=tokens + method.group - 1 + method.sinks + method.window)


def draw_texts(llm: kvjax.LLM, how: ml_collections.ConfigDict, count: int) -> list[list[int]]:
    """Texts of the kinds in turn."""
    texts, kinds = Texts(llm, how.seed), how.kinds
    return [texts.draw(kinds[i % len(kinds)], i // len(kinds), how.tokens - how.steps, how.tokens)
            for i in range(count)]


def _recorded(method: LowRankMethod, how: ml_collections.ConfigDict, texts: int, directory: pathlib.Path) -> Recording:
    """The recording of so many texts that is in the directory, made if it is not. Raises ConfigError where
    recordings were made elsewhere and it is none of them."""
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
    """Whether `model` is a directory of recordings."""
    path = pathlib.Path(how.model)
    return bool(how.model) and not (path / "config.json").exists() and any(path.glob("*.npz"))


def _brought(directory: pathlib.Path, made_of: str) -> Recording:
    """The recording there that was made of this; of which model, its directory does not say."""
    found = [path for path in sorted(directory.glob("*.npz")) if _made_of(path) == made_of]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} recordings in {directory} are of {made_of}; one is wanted, of one model, from "
                          "WORKDIR/recordings of a run that had it")
    return _load(found[0])


def _made_of(path: pathlib.Path) -> str | None:
    """What a recording was made of but for the model; None in files of before that was kept."""
    with np.load(path) as kept:
        return str(kept["made_of"]) if "made_of" in kept else None


def _load(path: pathlib.Path) -> Recording:
    with np.load(path) as kept:
        return Recording(kept["block"], int(kept["width"]))


def _save(recording: Recording, made_of: str, path: pathlib.Path) -> None:
    """Writes all of the file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _files.replacing(path) as fresh, fresh.open("wb") as file:
        np.savez_compressed(file, block=recording.block, width=recording.width, made_of=made_of)
