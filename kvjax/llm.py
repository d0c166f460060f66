"""The three-line API: load a model, prefill a context into a cache, ask.

    llm = kvjax.load(path)
    cache = llm.prefill(context, method=kvjax.DynaKV(budget=256), store=kvjax.FlashStore(path))
    llm.generate(question, cache).text
"""

import dataclasses
import functools
import hashlib
import os
import warnings
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import Method
from kvjax.errors import ConfigError, FormatMismatch, PromptError
from kvjax.inference import arguments, chunked_prefill, prefill
from kvjax.inference import checkpoint as persistence
from kvjax.inference.cache import Cache
from kvjax.inference.decode import Driver
from kvjax.inference.generate import Observer, Usage, check_logits, running
from kvjax.inference.plan import Plan, Slots, check_plan, make_plan, on_store, store_geometry
from kvjax.inference.prefill import PromptActivations
from kvjax.inference.sampling import Sampling
from kvjax.inference.stops import Stops
from kvjax.methods.full import Full
from kvjax.models import checkpoint, hf_config
from kvjax.models.config import ModelConfig
from kvjax.models.tokenizer import TextTokenizer
from kvjax.ops import quantize
from kvjax.store.interface import Branch, Store
from kvjax.typing import PyTree

GREEDY = Sampling()
_SAMPLE = 1024  # weights of each array that enter the fingerprint


@dataclasses.dataclass(frozen=True)
class Result:
    """An answer: its text (one string per sequence for a batch), its tokens, and the cache after it.

    A token is fed when the next one is to be drawn. So the last one of an answer is not in the cache's arrays yet: it
    is `cache.pending`, and whatever is asked of the cache next feeds it first. That is the end-of-text token where the
    model's chat template puts it behind an answer, and where it does not, such a token is dropped.
    """

    text: str | list[str]
    tokens: list[list[int]]
    cache: Cache
    usage: Usage


@runtime_checkable
class PrefillDefaults(Protocol):
    """What chooses for a run of so many sequences of so many tokens (`kvjax.calibration.tuner.Tuning`)."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def method(self, batch: int, context: int) -> Method: ...

    def slots(self, batch: int, context: int) -> Slots: ...


def check_tuning(tuning) -> None:
    """Raises ConfigError for what is given as a tuning and is none, such as a path."""
    if not (tuning is None or isinstance(tuning, PrefillDefaults)):
        raise ConfigError(f"tuning={tuning!r:.80} is no tuning; give what kvjax.calibration.tuner.load returns")


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model thinks of given continuations, one array per sequence, and the cache after them."""

    logprobs: list[np.ndarray]  # natural logarithm of each token's probability
    greedy: list[np.ndarray]  # whether it was the likeliest token
    cache: Cache
    usage: Usage


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """Tokenised prompts of one `LLM.prefill`, on the host."""

    read: PromptActivations  # read densely; without layers if that is still to be done
    rest: list[list[int]]  # tokens of each prompt that go through the cache in chunks
    chunk: int | None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [int(dense) + len(rest) for dense, rest in zip(self.read.length, self.rest, strict=True)]


class LLM:
    """A model with its tokenizer; holds no state between calls."""

    def __init__(
        self, config: ModelConfig, params: PyTree, tokenizer: TextTokenizer | None = None,
        tuning: PrefillDefaults | None = None,
    ):
        """`tuning` chooses method, slots and type where `prefill` is given none; FormatMismatch for another model's."""
        check_tuning(tuning)
        self.config, self.params, self.tokenizer, self.tuning = config, params, tokenizer, tuning
        if tuning is not None and tuning.fingerprint != self.identity:
            raise FormatMismatch(f"the tuning is for the model {tuning.fingerprint!r}, not for {self.identity!r}; "
                                 "run configs/tune.py with this model")

    def encode(self, text, start: bool) -> list[int]:
        """Returns the token ids of a text, or those that are given.

        With `start` the text has before it what every text begins with, unless it begins with that; else it goes on
        from another one. Raises PromptError for what is neither, or an id that the model has not.
        """
        if not isinstance(text, str):
            return self._known(text)
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer.json; give token ids instead of text")
        return self._known(self.tokenizer.encode(text) if start else self.tokenizer.encode_continuation(text))

    def _known(self, ids) -> list[int]:
        """Token ids, all of which the model has."""
        try:
            given = np.asarray(ids)
        except ValueError:  # rows of several lengths
            given = np.empty((0, 0))
        if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
            raise PromptError(f"{ids!r:.80} is no text and no sequence of token ids; give one of them")
        known, size = given.astype(int).tolist(), self.config.vocab_size
        unknown = [one for one in known if not 0 <= one < size]
        if unknown:
            raise PromptError(f"token id {unknown[0]} is none of the model's, which are 0 to {size - 1}; encode the "
                              "text with the model's own tokenizer")
        return known

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation: those of the model's files and the tokenizer's own."""
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *(self.tokenizer.eos_ids if self.tokenizer else ()))))

    def read(self, context) -> PromptActivations:
        """Reads a context (text, token ids, or a list of either) densely; `prefill` takes the result in its place.

        For comparing methods, each of which then is filled from the same activations, and for measuring them
        (`kvjax.eval.metrics.Probe`). All layers' hidden states, keys and values stay in host memory as long as it does.
        Raises PromptError.
        """
        tokens, length = prefill.batch(self._prompts(context))
        return self._read(PromptActivations(tokens, length, (), self.fingerprint))

    def _read(self, reading: PromptActivations) -> PromptActivations:
        """With the activations of all layers."""
        tokens = prefill.pad(reading.tokens)
        layers = tuple(jax.device_get(one) for one in prefill.read(self.config, self.params, tokens))
        return dataclasses.replace(reading, tokens=tokens, layers=layers)

    def prefill(
        self, context, *, method: Method | None = None, store: Store | None = None, capacity: int | None = None,
        dtype: str | None = None, slots: Slots | None = None, chunk: int | None = None,
    ) -> Cache:
        """Reads a context (text, token ids, or a list of either; or what `read` gave) into a new cache.

        With `chunk` only so many tokens are read by dense attention. The rest goes through the cache, so many tokens at
        a time: each chunk attends what the method selects for it of everything before
        (`kvjax.inference.chunked_prefill`). That bounds memory for long contexts, and is an approximation as decoding
        is.

        Args:
          method: cache method; None = the tuned one, or full attention.
          store: where blocks live; None = memory.
          capacity: most tokens of a sequence, question and answer included; None = context + 1024, rounded up to whole
            256, so that contexts of about one length share compiled programs.
          dtype: of stored keys and values: float32, bfloat16, float16, int8 or int4 (`kvjax.ops.quantize`); None = the
            tuned one where the method is, else float32.
          slots: how many blocks of a store are kept in memory, and by which policy.
          chunk: see above; None = dense attention over the whole context.

        Raises PromptError, ConfigError, FormatMismatch for a method or a reading of another model, NotFinite where the
        model computes NaN, or a StoreError before anything is written.
        """
        arguments.check_kinds(method, store, slots)
        prompts = self._tokenised(context, chunk)
        plan, slots, prompts = self._planned(prompts, method, store, slots, capacity, dtype)
        branch = None if store is None else self._created(plan, store, prompts)
        return self._filled(plan, prompts, branch, slots)

    def _tokenised(self, context, chunk: int | None) -> "_Prompts":
        """Encodes a context, on the host; what was read already is taken as it is."""
        if chunk is not None:
            chunked_prefill.check_chunk(chunk)
        if not isinstance(context, PromptActivations):
            rows = self._prompts(context)
            tokens, length = prefill.batch([row[:chunk] for row in rows])
            rest = [[] if chunk is None else row[chunk:] for row in rows]
            return _Prompts(PromptActivations(tokens, length, (), self.fingerprint), rest, chunk)
        if chunk is not None:
            raise ConfigError(f"chunk={chunk}, but what was read already is not read in chunks; give the text")
        if context.fingerprint != self.fingerprint:
            raise FormatMismatch(f"the context was read by the model {context.fingerprint!r}, not by "
                                 f"{self.fingerprint!r}; read it with this one")
        return _Prompts(context, [[]] * len(context.length), None)

    def _planned(
        self, prompts: "_Prompts", method: Method | None, store: Store | None, slots: Slots | None,
        capacity: int | None, dtype: str | None,
    ) -> tuple[Plan, Slots | None, "_Prompts"]:
        """Sizes the cache and checks everything that can be known before something is written.

        Returns the plan, the slots, and the prompts, which a method that fits itself to them has had read.
        """
        longest, batch = max(prompts.lengths), len(prompts.lengths)
        if longest > self.config.max_position:
            warnings.warn(f"the prompt has {longest} tokens, and the model was made for {self.config.max_position}: "
                          "expect little of what it says", stacklevel=3)
        capacity = _usual_capacity(longest) if capacity is None else capacity
        if method is None:
            method, slots, dtype = self._default(batch, capacity, store, slots, dtype)
        method.check_model(self.identity)
        plan = make_plan(self.config, method, batch, capacity, "float32" if dtype is None else dtype)
        if longest > plan.capacity:
            raise PromptError(f"the prompt has {longest} tokens but capacity={plan.capacity}; raise the capacity")
        if method.fits_prompts:
            if prompts.chunk is None and not prompts.read.layers:
                prompts = dataclasses.replace(prompts, read=self._read(prompts.read))
            plan = self._fitted(plan, method, prompts.read)
        prefill.check_prompts(plan, np.asarray(prompts.read.length))
        if prompts.chunk is not None:
            check = chunked_prefill.check_prompt if any(prompts.rest) else chunked_prefill.check
            check(plan, prompts.chunk)
        check_plan(plan, store is not None, slots or Slots())
        return plan, slots, prompts

    def _created(self, plan: Plan, store: Store, prompts: "_Prompts") -> Branch:
        """Creates the branch, with room for the prompts. Raises StoreError."""
        return store.create(store_geometry(plan), self.fingerprint, _least_blocks(plan, prompts.lengths))

    def _filled(self, plan: Plan, prompts: "_Prompts", branch: Branch | None, slots: Slots | None) -> Cache:
        """Fills a cache from the prompts; the branch is discarded where that fails."""
        read = prompts.read
        try:
            state, logits = prefill.fill_cache(
                plan, self.params, prefill.pad(read.tokens), read.length, branch, slots,
                read.layers or None,
            )
            cache = Cache(plan, state, logits, branch, self.fingerprint)
            check_logits(self.params, cache)
        except BaseException:
            if branch is not None:
                branch.discard()
            raise
        return cache if prompts.chunk is None else self._extended(cache, prompts.rest, prompts.chunk)

    def _prompts(self, context) -> list[list[int]]:
        given = arguments.rows(context)
        rows = [self.encode(row, start=True) for row in given]
        if not rows or not all(rows) or "" in [row for row in given if isinstance(row, str)]:
            raise PromptError("the prompt is empty; give at least one token")
        return rows

    def _fitted(self, plan: Plan, method: Method, reading: PromptActivations) -> Plan:
        """The plan with the method as these prompts want it."""
        itemsize = np.dtype(quantize.stored_type(plan.dtype)).itemsize
        key_bytes = quantize.width(plan.dtype, self.config.head_dim) * itemsize
        keys = [one.key for one in reading.layers]
        method = method.for_prompts(plan.layers[-1].spec, keys, np.asarray(reading.length), key_bytes)
        return make_plan(self.config, method, plan.batch, plan.capacity, plan.dtype)

    def _default(
        self, batch: int, context: int, store: Store | None, slots: Slots | None, dtype: str | None
    ) -> tuple[Method, Slots | None, str | None]:
        if self.tuning is None:
            return Full(), slots, dtype
        if store is None:
            raise ConfigError("the model's tuning is for caches over a store, and only there does its memory hold; "
                              "give store=, or method= for a cache in memory")
        method, dtype = self.tuning.method(batch, context), self.tuning.dtype if dtype is None else dtype
        return method, slots or self.tuning.slots(batch, context), dtype

    def extend(self, cache: Cache, text, *, chunk: int = 64) -> Cache:
        """The cache after more text (one for each sequence of a batch), read `chunk` tokens at a time
        (`kvjax.inference.chunked_prefill`).

        The given cache stays as it is. Raises PromptError beyond the capacity, ConfigError for methods that need single
        tokens, or a StoreError.
        """
        rows = self._asked("texts", text, cache)
        return self._extended(cache.fork(), cache.after_pending(rows), chunk)

    def _extended(self, cache: Cache, rows: list[list[int]], chunk: int) -> Cache:
        """`cache` with more tokens; it must not be used again, and is closed where that fails."""
        try:
            tokens, length = prefill.batch(rows)
            state, logits = chunked_prefill.extend(cache.plan, self.params, cache.state, tokens, length, chunk)
            logits = jnp.where(jnp.asarray(length > 0)[:, None], logits, cache.logits)
            cache = dataclasses.replace(cache, state=state, logits=logits, pending=())
            check_logits(self.params, cache)
            return cache
        except BaseException:
            cache.discard()
            raise

    def restore(
        self, directory: str | os.PathLike, *, method: Method | None = None, slots: Slots | None = None,
        read_only: bool = False, **store_settings,
    ) -> Cache:
        """The cache last saved in a directory; it decodes the tokens that the saved one would.

        Only one process may have it open for writing; any number may with `read_only`, and keep what they add in a
        private temporary file. `method` is needed for methods of your own, `slots` and `store_settings` (arguments of
        `FlashStore`) are free to differ. Raises StoreError or ConfigError (`kvjax.inference.checkpoint.restore`).
        """
        arguments.check_method_and_slots(method, slots)
        found = persistence.restore(
            directory, self.config, self.fingerprint, method=method, slots=slots, read_only=read_only,
            store_settings=store_settings,
        )
        return Cache(found.plan, found.state, found.logits, found.branch, self.fingerprint, found.pending)

    def generate(
        self, question, cache: Cache, *, max_new_tokens: int = 64, sampling: Sampling = GREEDY, seed: int = 0,
        driver: Driver = "staged", stop: str | Sequence[str] = (), observer: Observer | None = None,
    ) -> Result:
        """Feeds the question token by token through the cache, then answers. The given cache stays as it is.

        Generation of a sequence ends at an end-of-text token, after text that contains one of `stop` (before it, if
        there is a special token in it), or after `max_new_tokens`. Raises PromptError if question and answer exceed the
        capacity, FormatMismatch for another model's cache, NotFinite where the model computes NaN, ConfigError or a
        StoreError.
        """
        arguments.check_generation(max_new_tokens, sampling, seed)
        stops = Stops(self.tokenizer, arguments.marks(stop, self.tokenizer))
        questions = cache.after_pending(self._asked("questions", question, cache))
        self._check_room(cache, questions, max_new_tokens)
        kept = () if self.tokenizer is None else self.tokenizer.closing_ids
        with running(self.params, cache, driver, observer) as run:
            run.feed(questions)
            tokens = run.answer(
                max_new_tokens, sampling, jax.random.key(seed), (*self.eos_ids, *stops.ids), kept, stops.complete
            )
            tokens, text = map(list, zip(*map(stops.cut, tokens, questions), strict=True))
            return Result(text if arguments.is_batch(question) else text[0], tokens, run.cache, run.usage())

    def score(
        self, continuation, cache: Cache, *, driver: Driver = "staged", observer: Observer | None = None
    ) -> Scores:
        """How likely given texts (one for each sequence of a batch) are, fed token by token through the cache.

        Each token is predicted from what the method selects, which a parallel forward pass never exercises. The last
        one of each text is pending in the cache after it. The given cache stays as it is. Raises as `generate` does.
        """
        rows = self._asked("texts", continuation, cache)
        if not all(rows):
            raise PromptError("a text to score is empty; give at least one token of each")
        before = cache.after_pending([[]] * cache.plan.batch)
        self._check_room(cache, [pending + row for pending, row in zip(before, rows, strict=True)], 0)
        with running(self.params, cache, driver, observer) as run:
            run.feed(before)
            logprobs, greedy = run.force(rows)
            return Scores(logprobs, greedy, run.cache, run.usage())

    @functools.cached_property
    def fingerprint(self) -> str:
        """What a store checks before it serves another process: model shape, a sample of the weights, tokenizer."""
        return self._digest(self._sampled)

    @functools.cached_property
    def identity(self) -> str:
        """The same for what is fitted to a model, as adapters are: weights are rounded to bfloat16 first, so that it is
        the same model whether it was loaded in that type or in float32."""
        return self._digest([weights.astype(jnp.bfloat16) for weights in self._sampled])

    @functools.cached_property
    def _sampled(self) -> list[np.ndarray]:
        """Some weights of each array."""
        return [np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // _SAMPLE)]) for leaf in jax.tree.leaves(self.params)]

    def _digest(self, weights: list[np.ndarray]) -> str:
        digest = hashlib.sha256(repr(self.config).encode())
        for some in weights:
            digest.update(some.tobytes())
        return f"{digest.hexdigest()[:16]}-{self.tokenizer.fingerprint if self.tokenizer else 'none'}"

    def _asked(self, kind: str, text, cache: Cache) -> list[list[int]]:
        """The token ids of one text for each sequence of a cache that is this model's."""
        arguments.check_cache(cache)
        if cache.fingerprint != self.fingerprint:
            raise FormatMismatch(f"the cache is of the model {cache.fingerprint!r}, not of {self.fingerprint!r}; "
                                 "prefill with this one")
        rows = [self.encode(row, start=False) for row in arguments.rows(text)]
        if len(rows) != cache.plan.batch:
            raise PromptError(f"{len(rows)} {kind} for {cache.plan.batch} cached sequences; give one each")
        return rows

    def _check_room(self, cache, questions, max_new_tokens):
        needed = max(n + len(q) for n, q in zip(cache.length, questions, strict=True)) + max_new_tokens
        if needed > cache.plan.capacity:
            raise PromptError(
                f"question and answer need up to {needed} tokens but the cache was made for {cache.plan.capacity}; "
                "prefill with a larger capacity or lower max_new_tokens"
            )


def _usual_capacity(length: int) -> int:
    return -(-length // 256) * 256 + 1024


def _least_blocks(plan: Plan, lengths: list[int]) -> int:
    """How many blocks of a store the prompts fill at least, were every block full."""
    total = 0
    for i, one in enumerate(plan.layers):
        if on_store(plan, i) and not one.method.evicts:
            middle = [max(0, length - one.spec.sinks - one.spec.window) for length in lengths]
            total += one.spec.block_heads * sum(-(-tokens // one.spec.block_rows) for tokens in middle)
    return max(1, total)


def load(path: str | os.PathLike, dtype=jnp.float32, tuning: PrefillDefaults | None = None) -> LLM:
    """Loads a local Hugging Face model directory, to decode as `tuning` says where that is given.

    `dtype` is that of the weights, as "bfloat16"; `tuning` is what `kvjax.calibration.tuner.load` read of a file.
    Raises CheckpointError naming file and tensor, and ConfigError for an unknown type.
    """
    config = hf_config.read_config(path)
    tokenizer = TextTokenizer.from_directory(path)  # before the weights, which take longer
    return LLM(*checkpoint.load(path, config, _float_type(dtype)), tokenizer, tuning)


def _float_type(dtype) -> jnp.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ConfigError(f"dtype={dtype!r} is no type of weights; use float32, bfloat16 or float16")
    return found


def save(llm: LLM, path: str | os.PathLike, dtype: str = "float32") -> None:
    """Writes a directory that `load` and transformers read; a model that is there is replaced once all is written.

    Of a model without tokenizer a tokenizer.json that is there stays, and `load` wants one. Raises CheckpointError
    where it cannot be written, or transformers has no such model.
    """
    beside = None if llm.tokenizer is None else llm.tokenizer.saving(path)
    checkpoint.save_params(llm.params, llm.config, path, dtype, beside)
