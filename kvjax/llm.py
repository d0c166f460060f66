"""The three-line API: load a model, prefill a context into a cache, ask questions.

    llm = kvjax.load(path)
    cache = llm.prefill(context, method=kvjax.DynaKV(budget=256), store=kvjax.FlashStore(file=path))
    llm.generate(question, cache).text
"""

import os
import pathlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache.method import Method
from kvjax.errors import ConfigError, FormatMismatch, PromptError
from kvjax.inference import arguments, loop, new_cache, progress, questions
from kvjax.inference.answers import Result, Scores
from kvjax.inference.cache import Cache
from kvjax.inference.chat import Chat
from kvjax.inference.decode import Driver, check_driver, check_single
from kvjax.inference.dense_prefill import PromptActivations
from kvjax.inference.generate import Observer, running
from kvjax.inference.model import TextModel
from kvjax.inference.new_cache import PrefillDefaults, Wanted
from kvjax.inference.plan import Slots
from kvjax.inference.sampling import Sampling
from kvjax.inference.saves import restoring
from kvjax.inference.stream import Piece, Stream, TextSoFar
from kvjax.models import checkpoint, gguf, hf_config
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout, MeshRules
from kvjax.models.tokenizer import TextTokenizer
from kvjax.ops.weights import check_kind
from kvjax.store.interface import Store
from kvjax.typing import PyTree

GREEDY = Sampling()
MESH_RULES = MeshRules()
QUESTION_CHUNK = 64  # tokens of the longest question that is fed token by token


def check_tuning(tuning) -> None:
    """Raises ConfigError if `tuning` is neither None nor a tuning (but a path, for example)."""
    if not (tuning is None or isinstance(tuning, PrefillDefaults)):
        raise ConfigError(f"tuning={tuning!r:.80} is not a tuning; give what kvjax.calibration.tuner.load returns")


class LLM(TextModel):
    """A model with its tokenizer, and what can be done with it. It holds no state between calls.

    Attributes:
      tuning: choice of method, slots and type when `prefill` is given none; None = full attention.
      config, params, tokenizer, folder, layout: see `TextModel`.
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
        super().__init__(config, params, tokenizer, folder, MeshLayout.on(mesh, rules))
        self.tuning = tuning
        if tuning is not None and tuning.fingerprint != self.identity:
            raise FormatMismatch(f"the tuning is for the model {tuning.fingerprint!r}, not for {self.identity!r}; "
                                 "run configs/tune.py with this model")

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
        return new_cache.read(self, context, capacity)

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
        wanted = Wanted(method, store, capacity, dtype, slots)
        prompts = new_cache.tokenise(self, context, chunk)
        plan, slots, prompts = new_cache.plan_cache(self, self.tuning, prompts, wanted)
        branch = None if store is None else new_cache.create(self, plan, store, prompts)
        return new_cache.fill(self, plan, prompts, branch, slots)

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
        rows = questions.encode(self, "texts", text, cache)
        return new_cache.read_more(self, cache.fork(), cache.after_pending(rows), chunk)

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
            restored = restoring.restore(
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
        request = questions.ask(self, question, cache, max_new_tokens, sampling, seed, stop, eos)
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
        request = questions.ask(self, question, cache, max_new_tokens, sampling, seed, stop, eos)
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
          PromptError: the template alters the context, or `cache` holds another number of tokens than it has.
          ConfigError, StoreError: as `prefill`.
        """
        return Chat.open(self, context, system, dict(template or {}), cache, prefill_settings)

    def restore_chat(self, directory: str | os.PathLike, **restore_settings) -> Chat:
        """Takes up the conversation last saved in a directory (`Chat.save`).

        Where the chat template rewrites earlier answers, the next turn is read anew with the method and the type of the
        saved cache, in memory.

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
        rows = questions.encode(self, "texts", continuation, cache)
        if not all(rows):
            raise PromptError("a text to score is empty; give at least one token of each")
        before = cache.after_pending([[]] * cache.plan.batch)
        questions.check_room(cache, [pending + row for pending, row in zip(before, rows, strict=True)], 0)
        with running(self.params, cache, driver, observer) as run:
            run.feed(before)
            logprobs, greedy = run.force(rows)
            return Scores(logprobs, greedy, run.cache, run.usage())

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
