"""The three-line API: load a model, prefill a context into a cache, ask questions.

    llm = kvjax.load(path)
    cache = llm.prefill(context, method=kvjax.DynaKV(budget=256), store=kvjax.FlashStore(file=path))
    llm.generate(question, cache).text
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.method import ENDLESS, Method
from kvjax.errors import ConfigError, FormatMismatch, PromptError
from kvjax.inference import arguments, chunked_prefill, loop, prefill, progress
from kvjax.inference import checkpoint as persistence
from kvjax.inference.answers import Asked, Ends, Result, Scores
from kvjax.inference.cache import Cache
from kvjax.inference.chat import Chat
from kvjax.inference.decode import Driver, check_driver, check_single
from kvjax.inference.generate import Observer, check_logits, extended, running
from kvjax.inference.plan import Plan, Slots, check_capacity, check_plan, make_plan, on_store, store_geometry
from kvjax.inference.prefill import PromptActivations
from kvjax.inference.sampling import Sampling
from kvjax.inference.stops import Stops
from kvjax.inference.stream import Piece, Stream, TextSoFar
from kvjax.methods.full import Full
from kvjax.models import checkpoint, gguf, hf_config
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout, MeshRules
from kvjax.models.tokenizer import TextTokenizer
from kvjax.ops import quantize
from kvjax.ops.weights import check_kind, parameters, types_of
from kvjax.store.interface import Branch, Store
from kvjax.typing import PyTree

GREEDY = Sampling()
MESH_RULES = MeshRules()
QUESTION_CHUNK = 64  # tokens of the longest question that is fed token by token
_SAMPLE = 1024  # weights of each array that enter the fingerprint


@runtime_checkable
class PrefillDefaults(Protocol):
    """A choice of method and slots by batch size and context length (`kvjax.calibration.tuner.Tuning`)."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def method(self, batch: int, context: int) -> Method: ...

    def slots(self, batch: int, context: int) -> Slots: ...


def check_tuning(tuning) -> None:
    """Raises ConfigError if `tuning` is neither None nor a tuning (but a path, for example)."""
    if not (tuning is None or isinstance(tuning, PrefillDefaults)):
        raise ConfigError(f"tuning={tuning!r:.80} is not a tuning; give what kvjax.calibration.tuner.load returns")


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """Tokenised prompts of one `LLM.prefill`, on the host."""

    read: PromptActivations  # the part to read densely; without layers until it has been read
    rest: list[list[int]]  # tokens of each prompt that go through the cache in chunks
    chunk: int | None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [int(dense) + len(rest) for dense, rest in zip(self.read.length, self.rest, strict=True)]


class LLM:
    """A model with its tokenizer. It holds no state between calls.

    Attributes:
      config: configuration of the model.
      params: weights.
      tokenizer: tokenizer; None = the model takes token ids only.
      tuning: choice of method, slots and type when `prefill` is given none; None = full attention.
      folder: where files that were fitted to the model are looked for, such as KVSwap's adapters: `DIR/kvjax` of a
        model directory, `FILE.kvjax` of a GGUF file; None = nowhere.
      layout: how the model is divided on a mesh (`kvjax.models.mesh`); None = it is on one device.
    """

    def __init__(
        self, config: ModelConfig, params: PyTree, tokenizer: TextTokenizer | None = None,
        tuning: PrefillDefaults | None = None, *, folder: pathlib.Path | None = None, mesh: Mesh | None = None,
        rules: MeshRules = MESH_RULES,
    ):
        """Initialises the model; see the class and `load` for the arguments.

        Raises:
          ConfigError: `tuning` is not a tuning, or the model cannot be divided on the mesh.
          FormatMismatch: `tuning` was made for another model.
        """
        check_tuning(tuning)
        self.config, self.tokenizer, self.tuning, self.folder = config, tokenizer, tuning, folder
        self.layout = MeshLayout.on(mesh, rules)
        self.params = params if self.layout is None else self.layout.place(config, params)
        if tuning is not None and tuning.fingerprint != self.identity:
            raise FormatMismatch(f"the tuning is for the model {tuning.fingerprint!r}, not for {self.identity!r}; "
                                 "run configs/tune.py with this model")

    def __repr__(self) -> str:
        config, leaves = self.config, parameters(self.params)
        count, mib = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves) / 2**20
        return (f"LLM({config.family}, {config.num_layers} layers, {count / 1e6:,.1f} M parameters in "
                f"{types_of(self.params)}, {mib:,.1f} MiB)")

    def encode(self, text, start: bool) -> list[int]:
        """Encodes a text.

        Args:
          text: a string, or a sequence of token ids, which is returned as a list.
          start: True = the text begins a sequence, so the tokenizer's start tokens are put before it unless it begins
            with them; False = it continues another text.

        Returns:
          Token ids.

        Raises:
          PromptError: `text` is neither a string nor token ids, or the model does not have one of its tokens.
          ConfigError: `text` is a string and the model has no tokenizer.
        """
        if not isinstance(text, str):
            return self._known(text)
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer.json; give token ids instead of text")
        return self._known(self.tokenizer.encode(text) if start else self.tokenizer.encode_continuation(text))

    def _known(self, ids) -> list[int]:
        """Returns token ids as a list; raises PromptError unless the model has all of them."""
        try:
            given = np.asarray(ids)
        except ValueError:  # rows of several lengths
            given = np.empty((0, 0))
        if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
            raise PromptError(f"{ids!r:.80} is no text and no sequence of token ids; give one of them")
        known, size = given.astype(int).tolist(), self.config.vocab_size
        unknown = [token for token in known if not 0 <= token < size]
        if unknown:
            raise PromptError(f"token id {unknown[0]} is outside the model's vocabulary, 0 to {size - 1}; encode the "
                              "text with the model's own tokenizer")
        return known

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation: those in the model's files and the tokenizer's own."""
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *(self.tokenizer.eos_ids if self.tokenizer else ()))))

    def read(self, context, *, capacity: int | None = None) -> PromptActivations:
        """Reads a context densely, so that `prefill` can fill several caches from the result.

        This serves to compare methods on the same activations and to measure them (`kvjax.eval.metrics.Probe`).

        Args:
          context: text, token ids, or a list of either for a batch.
          capacity: capacity of the caches to fill, on which the rotary embedding of some models depends
            (`RopeConfig.by_length`); None = that of `prefill`.

        Returns:
          Hidden states, keys and values of all layers, in host memory.

        Raises:
          PromptError: a prompt is empty, or is neither text nor token ids of the model.
          ConfigError: the context is text and the model has no tokenizer, or `capacity` is no number of tokens.
        """
        if capacity is not None:
            check_capacity(capacity)
        tokens, length = prefill.batch(self._prompts(context))
        capacity = self._usual_capacity(int(length.max())) if capacity is None else capacity
        return self._read(PromptActivations(tokens, length, (), self.fingerprint), capacity)

    def _read(self, reading: PromptActivations, capacity: int) -> PromptActivations:
        """Adds the activations of all layers, for caches of this capacity."""
        tokens, config = prefill.pad(reading.tokens), self.config.for_length(capacity)
        if self.layout is not None:
            self.layout.check_batch(len(tokens))
        layers = tuple(jax.device_get(layer) for layer in prefill.read(config, self.params, tokens, self.layout))
        return dataclasses.replace(reading, tokens=tokens, layers=layers, capacity=capacity)

    def _usual_capacity(self, length: int) -> int:
        """Returns the capacity for prompts of up to `length` tokens.

        It stays within the model's original length if the prompt does and rotary embedding depends on the length.
        """
        usual, rope = _usual_capacity(length), self.config.rope
        within = rope.by_length and length <= rope.original_max_position
        return min(usual, rope.original_max_position) if within else usual

    def prefill(
        self, context, *, method: Method | None = None, store: Store | None = None, capacity: int | None = None,
        dtype: str | None = None, slots: Slots | None = None, chunk: int | None = None,
    ) -> Cache:
        """Reads a context into a new cache.

        With `chunk`, only the first `chunk` tokens are read by dense attention. The rest goes through the cache in
        chunks of that size, each of which attends the blocks that the method selects for it
        (`kvjax.inference.chunked_prefill`). This bounds memory for long contexts and is an approximation, as decoding
        is.

        Args:
          context: text, token ids, or a list of either for a batch; or the result of `read`.
          method: cache method; None = the tuned one, or full attention.
          store: where blocks are kept; None = in memory.
          capacity: largest number of tokens of a sequence, question and answer included; None = room for at least 1,024
            tokens after the context, in few sizes, so that contexts of similar length share compiled programs; no limit
            for a method whose cache does not grow (`Method.endless`). Where rotary embedding depends on the length
            (longrope, dynamic), keys are rotated as for a text of `capacity` tokens, and None stays within the model's
            original length if the context does: then there is less room.
          dtype: type of the keys and values in blocks: float32, bfloat16, float16, int8 or int4
            (`kvjax.ops.quantize`); None = the tuned type with the tuned method, else float32.
          slots: how many blocks of a store are kept in memory, and by which policy.
          chunk: tokens of a chunk; None = dense attention over the whole context.

        Returns:
          The cache, with the logits of the next token.

        Raises:
          PromptError: a prompt is empty, invalid, longer than the capacity, or too short for the method.
          ConfigError: the settings do not fit together.
          MethodError: the method breaks the contract of methods.
          FormatMismatch: the method was fitted to, or the context was read by, another model.
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        arguments.check_kinds(method, store, slots)
        if self.layout is not None:
            arguments.check_in_memory(store, slots)
        prompts = self._tokenised(context, chunk)
        plan, slots, prompts = self._planned(prompts, method, store, slots, capacity, dtype)
        branch = None if store is None else self._created(plan, store, prompts)
        return self._filled(plan, prompts, branch, slots)

    def _tokenised(self, context, chunk: int | None) -> "_Prompts":
        """Encodes a context on the host; activations that were read before are taken as they are."""
        if chunk is not None:
            chunked_prefill.check_chunk(chunk)
        if not isinstance(context, PromptActivations):
            rows = self._prompts(context)
            tokens, length = prefill.batch([row[:chunk] for row in rows])
            rest = [[] if chunk is None else row[chunk:] for row in rows]
            return _Prompts(PromptActivations(tokens, length, (), self.fingerprint), rest, chunk)
        if chunk is not None:
            raise ConfigError(f"chunk={chunk}, but a context that was read before cannot be read in chunks; give the "
                              "text")
        if context.fingerprint != self.fingerprint:
            raise FormatMismatch(f"the context was read by the model {context.fingerprint!r}, not by "
                                 f"{self.fingerprint!r}; read it with this model")
        return _Prompts(context, [[]] * len(context.length), None)

    def _planned(
        self, prompts: "_Prompts", method: Method | None, store: Store | None, slots: Slots | None,
        capacity: int | None, dtype: str | None,
    ) -> tuple[Plan, Slots | None, "_Prompts"]:
        """Sizes the cache and checks everything that can be checked before anything is written.

        Returns the plan, the slots and the prompts, which are read already if the method fits itself to them.
        """
        longest, batch = max(prompts.lengths), len(prompts.lengths)
        if longest > self.config.max_position and self.config.rope.kind != "dynamic":
            warnings.warn(f"the prompt has {longest} tokens, and the model was made for {self.config.max_position}; "
                          "expect poor answers", stacklevel=3)
        by_length = self.config.rope.by_length
        if capacity is None and by_length and prompts.read.layers:
            capacity = prompts.read.capacity
        elif capacity is None:
            grows = method is None or method.dense_layers or not method.endless
            capacity = self._usual_capacity(longest) if grows or by_length else ENDLESS
        if method is None:
            method, slots, dtype = self._default(batch, capacity, store, slots, dtype)
        method, dtype = self.with_fitted(method), "float32" if dtype is None else dtype
        plan = make_plan(self.config, method, batch, capacity, dtype, self.layout)
        if longest > plan.capacity:
            raise PromptError(f"the prompt has {longest} tokens but capacity={plan.capacity}; raise the capacity")
        if prompts.read.layers and plan.config != self.config.for_length(prompts.read.capacity):
            raise ConfigError(f"the context was read for a cache of capacity={prompts.read.capacity}, and keys are "
                              f"rotated otherwise for {plan.capacity}; read it with capacity={plan.capacity}")
        if method.fits_prompts:
            if prompts.chunk is None and not prompts.read.layers:
                prompts = dataclasses.replace(prompts, read=self._read(prompts.read, plan.capacity))
            plan = self._fitted(plan, method, prompts.read)
        prefill.check_prompts(plan, np.asarray(prompts.read.length))
        if prompts.chunk is not None:
            check = chunked_prefill.check_prompt if any(prompts.rest) else chunked_prefill.check
            check(plan, prompts.chunk)
        check_plan(plan, store is not None, slots or Slots())
        return plan, slots, prompts

    def with_fitted(self, method: Method) -> Method:
        """Returns a method with what was fitted to this model and lies beside it (`Method.for_model`).

        Raises:
          FormatMismatch: the method was given something that was fitted to another model.
          ReadFailed, ChecksumMismatch: a file beside the model is damaged.
        """
        method.check_model(self.identity)
        if self.folder is None:
            return method
        config = self.config
        return method.for_model(self.folder, self.identity, (config.num_layers, config.num_kv_heads, config.head_dim))

    def _created(self, plan: Plan, store: Store, prompts: "_Prompts") -> Branch:
        """Creates a branch with room for the prompts; raises StoreError."""
        return store.create(store_geometry(plan), self.fingerprint, _least_blocks(plan, prompts.lengths))

    def _filled(self, plan: Plan, prompts: "_Prompts", branch: Branch | None, slots: Slots | None) -> Cache:
        """Fills a cache from the prompts; discards the branch if that fails."""
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
        """Returns the plan with the method fitted to the prompts."""
        itemsize = np.dtype(quantize.stored_type(plan.dtype)).itemsize
        key_bytes = quantize.width(plan.dtype, self.config.head_dim) * itemsize
        keys = [layer.key for layer in reading.layers]
        method = method.for_prompts(plan.layers[-1].spec, keys, np.asarray(reading.length), key_bytes)
        return make_plan(self.config, method, plan.batch, plan.capacity, plan.dtype, plan.layout)

    def _default(
        self, batch: int, context: int, store: Store | None, slots: Slots | None, dtype: str | None
    ) -> tuple[Method, Slots | None, str | None]:
        if self.tuning is None:
            return Full(), slots, dtype
        if store is None:
            raise ConfigError("the model's tuning is for caches over a store, and its memory limit holds only there; "
                              "give store=, or method= for a cache in memory")
        method, dtype = self.tuning.method(batch, context), self.tuning.dtype if dtype is None else dtype
        return method, slots or self.tuning.slots(batch, context), dtype

    def extend(self, cache: Cache, text, *, chunk: int = QUESTION_CHUNK) -> Cache:
        """Reads more text into a copy of a cache, in chunks (`kvjax.inference.chunked_prefill`).

        Args:
          cache: cache of this model; it stays as it is.
          text: text or token ids, or a list with one of either for each sequence of a batch.
          chunk: tokens read at a time.

        Returns:
          The cache after the text.

        Raises:
          PromptError: the text is invalid or exceeds the capacity.
          ConfigError: the method needs single tokens, or `chunk` is not a number of tokens.
          FormatMismatch: the cache belongs to another model.
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        rows = self._asked("texts", text, cache)
        return self._extended(cache.fork(), cache.after_pending(rows), chunk)

    def _extended(self, cache: Cache, rows: list[list[int]], chunk: int) -> Cache:
        """Reads more tokens into `cache`, which must not be used again and is discarded if that fails."""
        try:
            cache = extended(self.params, cache, rows, chunk)
            check_logits(self.params, cache)
            return cache
        except BaseException:
            cache.discard()
            raise

    def restore(
        self, directory: str | os.PathLike, *, method: Method | None = None, slots: Slots | None = None,
        read_only: bool = False, **store_settings,
    ) -> Cache:
        """Restores the cache last saved in a directory; it decodes the same tokens as the saved one.

        Only one process may have the cache open for writing.

        Args:
          directory: path given to `Cache.save`.
          method: method of the saved cache; required only if it is not in `kvjax.METHODS`.
          slots: how a store's blocks are kept in memory, which may differ from the saved settings; None = as saved,
            except `offload` and `backend`.
          read_only: True = any number of processes may open the cache; what each adds goes to a private temporary
            file.
          **store_settings: arguments of `kvjax.FlashStore` other than its place.

        Returns:
          The cache.

        Raises:
          NothingSaved: the directory holds no saved cache.
          ConfigError: a setting does not exist or does not apply to this cache, or the method must be given.
          FormatMismatch: the cache was saved with another model or method, or by another version.
          StoreLocked: another process has the cache open for writing.
          StoreError: the saved files are damaged or cannot be read.
        """
        arguments.check_method_and_slots(method, slots)
        if self.layout is not None:
            raise ConfigError("saved caches are restored on one device; load the model without mesh=, or prefill again")
        with progress.shown("restoring"):
            restored = persistence.restore(
                directory, self.config, self.fingerprint, method=method, slots=slots, read_only=read_only,
                store_settings=store_settings,
            )
        return Cache(
            restored.plan, restored.state, restored.logits, restored.branch, self.fingerprint, restored.pending
        )

    def generate(
        self, question, cache: Cache, *, max_new_tokens: int = 64, sampling: Sampling = GREEDY, seed: int = 0,
        driver: Driver = "staged", stop: str | Sequence[str] = (), eos: int | Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> Result:
        """Feeds a question through a copy of the cache, then generates the answer.

        A question of more than `QUESTION_CHUNK` tokens is read in chunks, as `extend` does, unless the method needs
        single tokens or there is an observer; a shorter one is fed token by token.

        Args:
          question: text or token ids, or a list with one of either for each sequence of a batch.
          cache: cache of this model; it stays as it is.
          max_new_tokens: largest number of tokens of an answer.
          sampling: how tokens are drawn.
          seed: seed of the draws, 0 to 2^32 - 1.
          driver: how tokens are run: "staged" or "fused", one by one (`kvjax.inference.decode`), or "loop", the whole
            answer in one program, which Ctrl-C does not end (`kvjax.inference.loop`).
          stop: text or texts that end an answer. The answer includes such a text, unless it contains a special token:
            then the answer ends before it.
          eos: token id or ids that end an answer; None = `eos_ids`, () = none.
          observer: function called after every token with its step and its input token ids [B]; not with "loop".

        Returns:
          The answer, which ends at an end-of-text token, at one of `stop`, or after `max_new_tokens`.

        Raises:
          PromptError: the question is invalid, or question and answer exceed the capacity.
          ConfigError: a setting is invalid.
          FormatMismatch: the cache belongs to another model.
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        request = self._request(question, cache, max_new_tokens, sampling, seed, stop, eos)
        with running(self.params, cache, driver, observer) as run:
            run.feed(request.questions, QUESTION_CHUNK)
            answers = request.blank()
            with progress.shown("answering", max_new_tokens) as bar:
                for _ in run.answer(
                    answers, max_new_tokens, sampling, jax.random.key(seed), request.ends, request.stops
                ):
                    bar.update()
            return request.result(answers, run)

    def stream(
        self, question, cache: Cache, *, max_new_tokens: int = 64, sampling: Sampling = GREEDY, seed: int = 0,
        driver: Driver = "staged", stop: str | Sequence[str] = (), eos: int | Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> Stream:
        """Generates an answer as `generate` does, and gives its text while it grows.

        The pieces together are the text of `generate`. A piece ends with a whole character; text that a `stop` may cut
        off is held back. The last piece has the result, which says why the answer ended and has the cache after it.
        With driver="loop", up to 32 tokens are drawn before a piece is given.

        Args: those of `generate`.

        Returns:
          An iterator over `kvjax.Piece`. Nothing is computed before the first is asked for.

        Raises:
          ConfigError: the model has no tokenizer, or a setting is invalid.
          PromptError, FormatMismatch: as `generate`. NotFinite and StoreError are raised by the iterator.
        """
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer.json, so that its answers have no text; use generate")
        request = self._request(question, cache, max_new_tokens, sampling, seed, stop, eos)
        check_driver(driver)
        if driver == "loop":
            loop.check(cache.state.layers, observer is not None)

        def pieces() -> Generator[Piece, None, None]:
            texts = [TextSoFar(request.stops, row) for row in request.questions]
            answers = request.blank()
            with running(self.params, cache, driver, observer, at_once=loop.LEAST) as run:
                run.feed(request.questions, QUESTION_CHUNK)
                for _ in run.answer(
                    answers, max_new_tokens, sampling, jax.random.key(seed), request.ends, request.stops
                ):
                    more = [text.more(answer) for text, answer in zip(texts, answers, strict=True)]
                    if any(more):
                        yield Piece(request.shaped(more))
                result = request.result(answers, run)
                rest = [text.rest(whole) for text, whole in zip(texts, request.texts(result), strict=True)]
            yield Piece(request.shaped(rest), result)

        return Stream(pieces())

    def chat(
        self, context: str = "", *, system: str | None = None, template: Mapping[str, Any] | None = None,
        cache: Cache | None = None, **prefill_settings,
    ) -> Chat:
        """Opens a conversation in the form that the model was trained on (`kvjax.inference.chat`).

        Args:
          context: text, such as a document, that comes before the first question in the user's first message. It is
            read now.
          system: the system's message; None = what the template puts there.
          template: values of further variables of the chat template, such as enable_thinking or tools.
          cache: cache of an earlier conversation that had read this context and nothing else, so that it is not read
            again; None = the context is read.
          **prefill_settings: arguments of `prefill`, such as method= and store=.

        Returns:
          The conversation.

        Raises:
          CheckpointError: the model has no chat template.
          PromptError: the template alters the context, or `cache` holds something else.
          ConfigError, StoreError: as `prefill`.
        """
        return Chat.open(self, context, system, dict(template or {}), cache, prefill_settings)

    def restore_chat(self, directory: str | os.PathLike, **restore_settings) -> Chat:
        """Takes up the conversation last saved in a directory (`Chat.save`).

        Args:
          directory: path given to `Chat.save`.
          **restore_settings: arguments of `restore`.

        Returns:
          The conversation.

        Raises:
          ReadFailed, FormatMismatch: `Chat.save` did not write there, or another cache was saved there since.
          NothingSaved, ConfigError, StoreLocked, StoreError: as `restore`.
        """
        cache = self.restore(directory, **restore_settings)
        try:
            return Chat.restored(self, directory, cache)
        except BaseException:
            cache.discard()
            raise

    def _request(self, question, cache, max_new_tokens, sampling, seed, stop, eos) -> Asked:
        """Checks the arguments of `generate` and encodes the questions."""
        arguments.check_generation(max_new_tokens, sampling, seed)
        stops = Stops(self.tokenizer, arguments.marks(stop, self.tokenizer))
        eos = self.eos_ids if eos is None else arguments.ids("eos", eos, self.config.vocab_size)
        asked = self._asked("questions", question, cache)
        questions = cache.after_pending(asked)
        self._check_room(cache, questions, max_new_tokens)
        kept = () if self.tokenizer is None else self.tokenizer.closing_ids
        ends = Ends(frozenset(eos), frozenset(stops.ids), frozenset(kept))
        return Asked(questions, arguments.is_batch(question), stops, ends)

    def score(
        self, continuation, cache: Cache, *, driver: Driver = "staged", observer: Observer | None = None
    ) -> Scores:
        """Scores given texts by feeding them token by token through a copy of the cache.

        Each token is predicted from the blocks that the method selects, which a parallel forward pass never exercises.
        The last token of each text is pending in the resulting cache.

        Args:
          continuation: text or token ids, or a list with one of either for each sequence of a batch; not empty.
          cache: cache of this model; it stays as it is.
          driver: how a step is run, "staged" or "fused" (`kvjax.inference.decode`).
          observer: function called after every token with its step and its input token ids [B].

        Returns:
          Log-probability of each token and whether it was the most likely one.

        Raises:
          PromptError: a text is empty or invalid, or exceeds the capacity.
          ConfigError: the driver does not exist.
          FormatMismatch: the cache belongs to another model.
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        check_single(driver)
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
        """Digest of model configuration, a sample of the weights, and tokenizer, which a store checks when opened."""
        return self._digest(self._sampled)

    @functools.cached_property
    def identity(self) -> str:
        """Digest for settings fitted to a model, such as adapters.

        Unlike in `fingerprint`, weights are rounded to bfloat16 first, so the model is the same whether it was loaded
        in that type or in float32. In few bits it is another one.
        """
        return self._digest([weights.astype(jnp.bfloat16) for weights in self._sampled])

    @functools.cached_property
    def _sampled(self) -> list[np.ndarray]:
        """A sample of the weights of each array."""
        return [np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // _SAMPLE)]) for leaf in jax.tree.leaves(self.params)]

    def _digest(self, weights: list[np.ndarray]) -> str:
        digest = hashlib.sha256(repr(self.config).encode())
        for sample in weights:
            digest.update(sample.tobytes())
        return f"{digest.hexdigest()[:16]}-{self.tokenizer.fingerprint if self.tokenizer else 'none'}"

    def _asked(self, kind: str, text, cache: Cache) -> list[list[int]]:
        """Encodes one text for each sequence of the cache, after checking that the cache belongs to this model."""
        arguments.check_cache(cache)
        if cache.fingerprint != self.fingerprint:
            raise FormatMismatch(f"the cache is of the model {cache.fingerprint!r}, not of {self.fingerprint!r}; "
                                 "prefill with this model")
        if cache.plan.layout != self.layout:
            raise ConfigError("cache and model are on different devices; prefill with this model, or load it with the "
                              "mesh= and rules= of the model that made the cache")
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
    """Returns one of four capacities between one power of two and the next, with room for 1,024 tokens more."""
    step = max(256, 1 << (length + 1023).bit_length() - 3)
    return -(-(length + 1024) // step) * step


def _least_blocks(plan: Plan, lengths: list[int]) -> int:
    """Returns the least number of store blocks that the prompts take, reached if every block is full."""
    total = 0
    for i, layer in enumerate(plan.layers):
        if on_store(plan, i) and not layer.method.evicts:
            middle = [max(0, length - layer.spec.sinks - layer.spec.window) for length in lengths]
            total += layer.spec.block_heads * sum(-(-tokens // layer.spec.block_rows) for tokens in middle)
    return max(1, total)


def load(
    path: str | os.PathLike, dtype=jnp.float32, tuning: PrefillDefaults | None = None, *, weights: str | None = None,
    mesh: Mesh | None = None, rules: MeshRules = MESH_RULES,
) -> LLM:
    """Loads a local model, a Hugging Face directory or a GGUF file.

    Tensors are read one at a time, so that the host needs the memory of the model as it is kept and of its largest
    tensor.

    Args:
      path: directory with config.json, tokenizer.json and safetensors files, or a GGUF file (`kvjax.models.gguf`).
      dtype: type of the weights in memory, and of hidden states: float32, bfloat16 or float16.
      tuning: result of `kvjax.calibration.tuner.load`, which chooses method, slots and type when `LLM.prefill` is given
        none; None = full attention.
      weights: type of all matrices, "int8" (a scale per row) or "int4" (a scale per 32 weights; embedding and
        unembedding in int8); norms and biases stay in `dtype`. None = everything in `dtype`. It is another model than
        the one in `dtype`: `LLM.identity` differs (`kvjax.ops.weights`).
      mesh: devices to divide the model and its caches among, such as `jax.make_mesh((2, 4), ("data", "model"))`; None =
        one device. Each device reads its own part of the weights. Caches are in memory.
      rules: names of the mesh axes that sequences and heads are divided over.

    Returns:
      The model with its tokenizer.

    Raises:
      CheckpointError: the model cannot be loaded; the message names file and tensor.
      ConfigError: `dtype` or `weights` is not one of these types, `weights` is given for a mixture of experts or with
        a mesh, `tuning` is not a tuning, or the model cannot be divided on the mesh.
      FormatMismatch: the tuning was made for another model.
    """
    kind, layout = _float_type(dtype), MeshLayout.on(mesh, rules)
    check_kind(weights)
    if weights is not None and layout is not None:
        raise ConfigError(f"weights={weights!r} is for one device; leave it out with mesh=, or take dtype='bfloat16'")
    place = pathlib.Path(path).expanduser()
    if os.path.isfile(place):  # False for a name that the system refuses
        stored, tokenizer = gguf.find(path)
        folder = place.with_name(f"{place.name}.kvjax")
    else:
        folder = place / "kvjax"
        config = hf_config.read_config(path)
        tokenizer = TextTokenizer.from_directory(path)
        stored = checkpoint.find(path, config)
    if weights is not None and stored.config.experts is not None:
        raise ConfigError(f"weights={weights!r} is for models without experts, and {path} is a mixture of experts; "
                          "leave it out, or take dtype='bfloat16'")
    if layout is not None:
        layout.check(stored.config)
    with progress.shown("loading", len(stored.parts), "tensors") as bar:
        params = stored.read(kind, bar.update, weights, layout)
    return LLM(stored.config, params, tokenizer, tuning, folder=folder, mesh=mesh, rules=rules)


def _float_type(dtype) -> jnp.dtype:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ConfigError(f"dtype={dtype!r} is not a type of weights; use float32, bfloat16 or float16")
    return kind


def save(llm: LLM, path: str | os.PathLike, dtype: str = "float32") -> None:
    """Writes a model directory that `load` and transformers can read.

    A model that is already there is replaced once everything is written. For a model without a tokenizer, an existing
    tokenizer.json stays; `load` needs one.

    Args:
      llm: model to save.
      path: directory to write.
      dtype: type of the weights in the file, float32 or bfloat16.

    Raises:
      CheckpointError: the directory cannot be written, weights are not finite in that type, or transformers has no such
        model.
      ConfigError: another `dtype` is given.
    """
    beside = None if llm.tokenizer is None else llm.tokenizer.saving(path)
    checkpoint.save_params(llm.params, llm.config, path, dtype, beside)
