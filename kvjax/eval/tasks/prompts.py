"""Prompts of benchmark files, split into a context to prefill and a question that is read token by token."""

from collections.abc import Sequence

from kvjax.errors import CheckpointError, ConfigError
from kvjax.eval.tasks.base import Request


def split(request: Request, context: str, question: str, chat: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the token ids of context and question, at most `request.length` in all.

    A longer prompt loses its middle.

    Args:
      request: tokenizer and length.
      context: text before the question.
      question: text of the question.
      chat: whether both together are one user message in the model's chat template, if it has one.

    Raises:
      ConfigError: fewer than two tokens fit in the length.
      CheckpointError: the chat template changes the message, or does not work.
    """
    before, first, after = _opened(request, context, chat)
    last = _continued(request, first, question, after)
    room = request.length - len(before)
    if room < 2:
        raise ConfigError(f"no room for a prompt in {request.length} tokens; raise the length")
    if len(first) + len(last) > room:
        half, both = room // 2, first + last
        first, last = both[:half] + both[-half:], last[-half:]
        first = first[: len(first) - len(last)]
    return before + first, last


def shared(
    request: Request, context: str, questions: Sequence[str], chat: bool = False, keep_end: bool = False
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the token ids of a context and of each question about it, which can all be asked on forks of one cache.

    A context that is too long loses its end, or with `keep_end` its middle, so that it has at most `request.length`
    tokens with its longest question.

    Args:
      request: tokenizer and length.
      context: text before the questions.
      questions: texts of the questions.
      chat: whether context and question together are one user message in the model's chat template, if it has one.
      keep_end: whether a cut keeps as much of the end as of the beginning.

    Raises:
      ConfigError: the longest question leaves no room for the context.
      CheckpointError: the chat template changes the message, or does not work.
    """
    before, first, after = _opened(request, context, chat)
    asked = [_continued(request, first, question, after) for question in questions]
    longest = max(map(len, asked))
    room = request.length - len(before) - longest
    if room < 1:
        raise ConfigError(f"a question of {longest} tokens leaves no room for its context; raise the length, "
                          f"which is {request.length}")
    if len(first) > room:
        half = room // 2 if keep_end else 0
        first = first[: room - half] + first[len(first) - half :]
    return before + first, asked


def _opened(request: Request, context: str, chat: bool) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Returns the ids that begin the prompt, those of the context, and the text that ends the prompt."""
    tokenizer = request.tokenizer
    if chat and tokenizer.template is not None:
        opening, after = _wrapping(request)
        before = tuple(tokenizer.encode(opening, add_special_tokens=False))
        return before, tuple(tokenizer.encode_continuation(context, before)), after
    return request.start, tuple(tokenizer.encode(context)[len(request.start):]), ""


def _continued(request: Request, context: tuple[int, ...], question: str, after: str) -> tuple[int, ...]:
    """Returns the ids of a question behind a context and of the text that ends the prompt."""
    last = tuple(request.tokenizer.encode_continuation(question, context))
    return last + tuple(request.tokenizer.encode_continuation(after, last))


def _wrapping(request: Request) -> tuple[str, str]:
    """Returns the text that the chat template puts before and after a user message."""
    text = request.tokenizer.apply_chat_template([{"role": "user", "content": "\x00"}])
    before, mark, after = text.partition("\x00")
    if not mark:
        raise CheckpointError(f"{request.tokenizer.directory}: the chat template changes what a message says, so that "
                              "documents cannot be put there")
    return before, after
