"""Conversations: turns in the form of the model's chat template, on one cache."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from kvjax import _files, _validate
from kvjax.errors import ConfigError, FormatMismatch, PromptError, ReadFailed, typed
from kvjax.inference.answers import Result
from kvjax.inference.cache import Cache
from kvjax.inference.stream import Piece, Stream
from kvjax.models.tokenizer import TextTokenizer

Message = Mapping[str, Any]  # a role and a content
SAVED = "chat.json"  # beside a saved cache
_MARK = "<<<the question>>>"
_BETWEEN = "\n\n"  # between the context and the first question


@runtime_checkable
class Model(Protocol):
    """A model (`kvjax.llm.LLM`), as far as a conversation needs it."""

    tokenizer: TextTokenizer | None

    @property
    def prefill(self) -> Callable[..., Cache]: ...

    @property
    def stream(self) -> Callable[..., Stream]: ...


@dataclasses.dataclass(frozen=True)
class Held:
    """A cache of one sequence, and what it holds."""

    cache: Cache
    text: str  # special tokens included
    last: tuple[int, ...]  # its last token


class Chat:
    """A conversation; made by `LLM.chat`.

    Every turn is the text that the chat template adds to the turns before, read into the cache that they left, so that
    the cache holds what it would hold if the whole conversation had been read at once. Some templates rewrite earlier
    turns, for instance to leave out what a model thought. The conversation is then read again from the end of the
    context, whose cache is kept for that.

    A turn that fails, or whose stream is closed early, did not happen. The conversation is a context manager, which
    closes its caches.

    Attributes:
      messages: turns so far, each with a role and a content; JSON's types.
    """

    def __init__(self, llm: Model, tokenizer: TextTokenizer, template: Mapping[str, Any], prefill: Mapping[str, Any]):
        """Initialises an empty conversation.

        Args:
          llm: model that answers.
          tokenizer: its tokenizer.
          template: values of further variables of the chat template.
          prefill: settings of the cache, those of `LLM.prefill`.
        """
        self._llm, self._tokenizer, self._template, self._prefill = llm, tokenizer, template, prefill
        self.messages: list[Message] = []
        self._context = ""  # text before the first question
        self._start: Held | None = None  # when the context had been read
        self._held: Held | None = None  # after the newest turn
        self._apart: Cache | None = None  # of a newer answer that no turn can go on from

    @classmethod
    def open(
        cls, llm: Model, context: str, system: str | None, template: Mapping[str, Any], cache: Cache | None,
        prefill: Mapping[str, Any],
    ) -> "Chat":
        """Opens a conversation; see `LLM.chat`."""
        chat = cls(llm, _tokenizer_of(llm), template, prefill)
        chat.messages = [] if system is None else [{"role": "system", "content": system}]
        chat._rendered([*chat.messages, {"role": "user", "content": _MARK}])  # raises if there is no template
        if context:
            chat._read(f"{context}{_BETWEEN}", cache)
        elif cache is not None:
            raise ConfigError("cache= holds a context that was read before; give the context, too")
        return chat

    @classmethod
    def restored(cls, llm: Model, directory: str | os.PathLike, cache: Cache) -> "Chat":
        """Takes up the conversation that `save` wrote; see `LLM.restore_chat`."""
        path = pathlib.Path(_validate.path("directory", directory)) / SAVED
        try:
            saved = _files.read_json(path)
            # If a template rewrites what was said, the next turn is read anew, as the cache was made.
            settings = {"method": cache.plan.method.for_other_prompts(), "dtype": cache.plan.dtype}
            chat = cls(llm, _tokenizer_of(llm), saved["template"], settings)
            chat.messages, chat._context = saved["messages"], saved["context"]
            chat._start = chat._held = Held(cache, saved["text"], tuple(saved["last"]))
            expected = int(saved["tokens"])
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise ReadFailed(f"{path} is not a conversation that can be read ({cause}); give the directory of "
                             "Chat.save") from cause
        if _tokens_of(cache) != expected:
            raise FormatMismatch(f"{path} is of a conversation of {expected} tokens, and the cache beside it holds "
                                 f"{_tokens_of(cache)}: another cache was saved there since; save the conversation")
        return chat

    def save(self, directory: str | os.PathLike) -> None:
        """Saves the conversation and its cache to a directory, for `LLM.restore_chat` in any process.

        Args:
          directory: path of the directory, which is created if it is missing.

        Raises:
          PromptError: nothing has been read.
          ConfigError, StoreError: as `Cache.save`.
        """
        if self._held is None:
            raise PromptError("the conversation is empty; ask something before it is saved")
        self._held.cache.save(directory)
        path = pathlib.Path(_validate.path("directory", directory)) / SAVED
        content = {"messages": self.messages, "template": dict(self._template), "context": self._context,
                   "text": self._held.text, "last": self._held.last, "tokens": _tokens_of(self._held.cache)}
        try:
            with _files.replacing(path) as fresh:
                _files.write_private(fresh, json.dumps(content).encode())
        except OSError as cause:
            raise typed(f"saving {path} failed", cause, remedy="choose another directory") from cause

    @property
    def cache(self) -> Cache | None:
        """Cache that the next turn goes on from, which belongs to the conversation; None = nothing has been read.

        After an answer whose `stop` was cut off, it is that of the turn before.
        """
        return None if self._held is None else self._held.cache

    def ask(self, question: str, **settings) -> Result:
        """Asks a question and waits for the whole answer.

        Args:
          question: the user's next message.
          **settings: arguments of `LLM.generate`.

        Returns:
          The answer. Its cache belongs to the conversation; `fork` it to keep it.

        Raises:
          PromptError: the question is empty, or as `LLM.generate`; so are other errors.
        """
        stream = self.stream(question, **settings)
        for _ in stream:
            pass
        assert stream.result is not None, "a stream ends with its result"
        return stream.result

    def stream(self, question: str, **settings) -> Stream:
        """Asks a question and gives the answer while it grows; arguments and errors are those of `ask`."""
        if not isinstance(question, str) or not question:
            raise PromptError(f"question={question!r:.80} must be a text that is not empty")
        first = not any(message["role"] == "user" for message in self.messages)
        messages = [*self.messages, {"role": "user", "content": f"{self._context if first else ''}{question}"}]
        return Stream(self._turn(messages, self._rendered(messages), settings))

    def _turn(self, messages: list[Message], text: str, settings: Mapping[str, Any]) -> Generator[Piece, None, None]:
        base = next((held for held in (self._held, self._start) if held and text.startswith(held.text)), None)
        with contextlib.ExitStack() as stack:
            if base is None:
                *ids, last = self._tokenizer.encode(text, add_special_tokens=False)
                cache, rest = stack.enter_context(self._llm.prefill(ids, **self._prefill)), [last]
            else:
                cache = base.cache
                rest = self._tokenizer.encode_continuation(text[len(base.text) :], base.last)
            count = _tokens_of(cache) + len(rest)
            for piece in stack.enter_context(self._llm.stream(rest, cache, **settings)):
                if piece.result is not None:
                    self._answered(messages, text, piece.result, _tokens_of(piece.result.cache) - count)
                yield piece

    def _answered(self, messages: list[Message], text: str, result: Result, count: int) -> None:
        """Takes over an answer and the cache after it, which has `count` tokens more than the question left."""
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        tokens, (pending,) = result.tokens[0], result.cache.pending
        closing = () if result.ended == "length" or tuple(tokens[-1:]) == pending else pending
        said = [*tokens, *closing]
        apart, self._apart = self._apart, None
        if apart is not None:
            apart.close()
        if len(said) != count:  # a `stop` was cut off, which the cache holds: the next turn reads the answer again
            self._apart = result.cache
            return
        before = self._held
        self._held = Held(result.cache, text + self._tokenizer.codec.spell(said), tuple(said[-1:]))
        if before is not None and before is not self._start:
            before.cache.close()

    def _read(self, context: str, cache: Cache | None) -> None:
        """Reads everything up to the first question, or takes the cache that holds it."""
        text = self._rendered([*self.messages, {"role": "user", "content": f"{context}{_MARK}"}])
        if text.count(_MARK) != 1 or context not in text:
            raise PromptError("the model's chat template alters or repeats the first message, so that a context cannot "
                              "be read before the question; give the context with the question")
        text = text[: text.index(_MARK)]
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if cache is None:
            cache = self._llm.prefill(ids, **self._prefill)
        elif _tokens_of(cache) != len(ids):
            raise PromptError(f"the cache holds {_tokens_of(cache)} tokens, and this context has {len(ids)}; give the "
                              "context that it was made of")
        self._context = context
        self._start = self._held = Held(cache, text, tuple(ids[-1:]))

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt, **self._template)

    def close(self) -> None:
        """Closes the conversation's caches. Closing twice is allowed. Raises StoreError if a write failed."""
        caches = {id(held): held.cache for held in (self._held, self._start) if held is not None}
        if self._apart is not None:
            caches[id(self._apart)] = self._apart
        self._held = self._start = self._apart = None
        with contextlib.ExitStack() as stack:
            for cache in caches.values():
                stack.callback(cache.close)

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *raised) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, {self.cache!r})"


def _tokenizer_of(llm: Model) -> TextTokenizer:
    if llm.tokenizer is None:
        raise ConfigError("this model has no tokenizer.json, so that it cannot chat; give token ids to generate")
    return llm.tokenizer


def _tokens_of(cache: Cache) -> int:
    """Returns the tokens that a cache holds, those that are pending included; raises ConfigError for a batch."""
    if cache.plan.batch != 1:
        raise ConfigError("a conversation is one sequence; give a cache with a single one")
    return cache.length[0] + sum(map(len, cache.pending))
